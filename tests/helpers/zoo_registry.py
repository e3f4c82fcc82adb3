"""The registry of test models: builders by name, how models are randomised, cast and written.

Everything is drawn at random, zero-initialised parameters included: a gate or head at zero hides an
omission behind it.
"""

import dataclasses
from functools import partial

import torch
from single_samples import Written
from torch import Tensor, nn

from bench.cases import Case, calibrate, to_dtype


@dataclasses.dataclass
class ZooCase(Case):
    """A model of the zoo.

    Attributes:
        expected: ``"ok"``, an error class of fastlr.errors, or several joined by ``"|"`` of which
            any one is right.
        kinked: in float32 some ReLU inputs are zero within rounding; their side moves gradients by
            over 1e-4.
    """

    expected: str = "ok"
    kinked: bool = False


ZOO = {}


def zoo(name, long=False, **fields):
    """Register a builder of a :class:`Case`, or of a (model, inputs) pair, under a name.

    ``long``: too slow for most runs.
    """

    def register(build):
        if name in ZOO:
            raise ValueError(f"two models are called {name!r}")

        def make():
            case = build()
            case = case if isinstance(case, Case) else Case(*case)
            return ZooCase(**{**vars(case), "name": name, **fields})

        make.long = long
        ZOO[name] = make
        return build

    return register


CALIBRATED = set()  # models whose batch norms take the statistics of their inputs


def randomise(model):
    """Move every parameter off its initial value, constant ones by a visible amount.

    Constant are zeros, ones and layer scales.
    """
    with torch.no_grad():
        for p in model.parameters():
            rms = float(p.square().mean().sqrt())
            constant = p.numel() == 1 or float(p.std()) == 0.0
            p.add_(torch.randn_like(p) * (0.1 if constant or p.dim() <= 1 else 0.3 * rms))
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None:
                m.running_mean.normal_(std=0.1)
                m.running_var.uniform_(0.5, 1.5)
    return model


def make(name, dtype=torch.float32, seed=0):
    """Build a case, in eval mode unless it says otherwise; numbers are the same in every dtype."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        case = ZOO[name]()
        flags = {m: m.training for m in case.model.modules()}
        randomise(case.model)
        if case.name in CALIBRATED:
            calibrate(case.model, case.x)
        for m, training in flags.items():
            m.training = training
    return dataclasses.replace(case, model=case.model.to(dtype), x=to_dtype(case.x, dtype))


B = 4


def made(part):
    """What a function makes, or the part itself."""
    return part() if callable(part) else part


def held_as(part):
    """How a model holds a part: a shape as a parameter, a tensor as a buffer."""
    if isinstance(part, tuple):
        return nn.Parameter(torch.randn(part))
    return nn.Buffer(part) if type(part) is Tensor else part


def written(name, function, x, *, train=False, shared=(), kwargs=None, expected="ok", **parts):
    """Register a :class:`Written`, whose parts and inputs are functions: each build draws its own.

    Modules become children, tuples become parameters of that shape, tensors become buffers.
    """

    def build():
        held = {key: made(part) for key, part in parts.items()}
        held = {key: held_as(part) for key, part in held.items()}
        return Case(Written(function, **held).train(train), x(), kwargs or {}, shared=shared)

    zoo(name, expected=expected)(build)


def chain(name, layers, *shape, expected="ok"):
    """Register a sequence of layers on a random input [B, *shape]."""
    zoo(name, expected=expected)(
        lambda: Case(nn.Sequential(*layers()).eval(), torch.randn(B, *shape))
    )


# Ways to write what each build makes anew: ``lin(2, 3)`` is a function that makes such a layer,
# ``r(2, 3)`` one that draws.
lin, emb, bag = (partial(partial, layer) for layer in (nn.Linear, nn.Embedding, nn.EmbeddingBag))
conv1d, conv2d, conv3d = (partial(partial, kind) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
transposed1d, transposed2d, transposed3d = (
    partial(partial, kind) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)
attention = partial(partial, nn.MultiheadAttention, 8, 2)
r = partial(partial, torch.randn)


def ids(high, *shape):
    """A function that draws random indices."""
    return lambda: torch.randint(0, high, shape)


def each(*draws):
    """A function that draws a tuple, an element by each of these; constants stay what they are."""
    return lambda: tuple(map(made, draws))

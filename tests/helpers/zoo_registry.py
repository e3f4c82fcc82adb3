"""The registry of test models: builders by name, how models are randomised, cast and written.

Everything is drawn at random, zero-initialised parameters included: a gate or head at zero hides an
omission behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

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


ZOO: dict[str, Callable[[], ZooCase]] = {}


def zoo(name: str, long: bool = False, **fields: Any) -> Callable:
    """Register a builder of a :class:`Case`, or of a (model, inputs) pair, under a name.

    ``long``: too slow for most runs.
    """

    def register(build: Callable) -> Callable:
        if name in ZOO:
            raise ValueError(f"two models are called {name!r}")

        def make() -> ZooCase:
            case = build()
            case = case if isinstance(case, Case) else Case(*case)
            return ZooCase(**{**vars(case), "name": name, **fields})

        make.long = long
        ZOO[name] = make
        return build

    return register


CALIBRATED: set[str] = set()  # models whose batch norms take the statistics of their inputs


def randomise(model: nn.Module) -> nn.Module:
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


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> ZooCase:
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


def written(
    name: str,
    function: Callable,
    x: Callable[[], Any],
    *,
    train: bool = False,
    shared: tuple = (),
    kwargs: dict | None = None,
    expected: str = "ok",
    **parts: Callable[[], Any],
) -> None:
    """Register a :class:`Written`, whose parts and inputs are functions: each build draws its own.

    Modules become children, tuples become parameters of that shape, tensors become buffers.
    """

    def build() -> Case:
        made = {key: part() if callable(part) else part for key, part in parts.items()}
        made = {
            key: nn.Parameter(torch.randn(part)) if isinstance(part, tuple) else part
            for key, part in made.items()
        }
        buffers = {key: nn.Buffer(part) for key, part in made.items() if type(part) is Tensor}
        return Case(
            Written(function, **made | buffers).train(train), x(), kwargs or {}, shared=shared
        )

    zoo(name, expected=expected)(build)


def chain(
    name: str, layers: Callable[[], list[nn.Module]], *shape: int, expected: str = "ok"
) -> None:
    """Register a sequence of layers on a random input [B, *shape]."""
    zoo(name, expected=expected)(
        lambda: Case(nn.Sequential(*layers()).eval(), torch.randn(B, *shape))
    )


# Ways to write what each build makes anew: ``lin(2, 3)`` is a function that makes such a layer,
# ``r(2, 3)`` one that draws.
lin, emb, bag = (partial(partial, layer) for layer in (nn.Linear, nn.Embedding, nn.EmbeddingBag))
r = partial(partial, torch.randn)


def ids(high: int, *shape: int) -> Callable[[], Tensor]:
    """A function that draws random indices."""
    return lambda: torch.randint(0, high, shape)

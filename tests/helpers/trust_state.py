"""Models that change between two calls, or that write to themselves."""

import dataclasses
import enum
import sys
import threading
import weakref
from collections import ChainMap, OrderedDict, UserDict, deque
from contextvars import ContextVar
from functools import partial
from types import MethodType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from trust_cases import CASES, Call, Net, case

# -- h [B, ...] with a number, for which samples interact unless it is zero
# --------------------------------------------


def with_grad(h, alpha):
    return h - alpha * h.mean(0)


def detached(h, alpha):
    return h - alpha * h.mean(0).detach()


def gradient_only(h, alpha):
    """Leaves every output as it is."""
    mean = h.mean(0)
    return h + alpha * (mean - mean.detach())


# -- where the number is kept: name -> a model, and what sets it
# -------------------------------------------------------

ALPHA, OPTIONS = 0.0, {"alpha": 0.0}
THIS = sys.modules[__name__]


@dataclasses.dataclass
class Config:
    alpha: float = 0.0


class Mode(enum.Enum):
    OFF = 0.0
    ON = 1.0


SHARED = Config()  # models refer to it weakly


class Shared:
    """Holds what cannot be copied: copies of a model share it."""

    def __init__(self, held):
        self.held = held

    def __deepcopy__(self, memo):
        return self


class Slotted:
    __slots__ = ("alpha",)


class Listed(nn.Module):
    """A module without tensors that holds its value in a list."""

    def __init__(self, alpha=0.0):
        super().__init__()
        self.values = [alpha]


class OnClass(Net):
    """Reads an attribute of its class."""

    alpha = 0.0


class Patched(Net):
    """Its forward is replaced on the class."""


def mixing(mix, read, kind=Net, **parts):
    """A model that mixes its hidden values with the number that ``read(model)`` gives."""
    return kind(lambda net, x: net.c(mix(net.a(x).tanh(), read(net))), **parts)


def holder(read, write, kind=Net, **parts):
    """Return a place by how a model reads it, how it is written, and what makes its parts."""

    def hold(mix):
        model = mixing(mix, read, kind, **{key: make() for key, make in parts.items()})
        write(model, 0.0)
        return model, lambda alpha: write(model, alpha)

    return hold


def helper():
    return (lambda: OPTIONS["alpha"])()


def zero():
    return torch.zeros(())


def buffer():
    return nn.Buffer(zero())


def own(net):
    return net.alpha


def of_config(net):
    return net.config.alpha


def entry(net):
    return net.all["alpha"]


def first_of_all(net):
    return net.all[0].alpha


def put(net, alpha):
    net.alpha = alpha


def put_in_config(net, alpha):
    net.config.alpha = alpha


def put_tensor(net, alpha):
    net.alpha = torch.tensor(alpha)


def fill(net, alpha):
    net.alpha.data.fill_(alpha)


def fill_in_place(net, alpha):
    net.alpha.fill_(alpha)


def update(net, alpha):
    net.all.update(alpha=alpha)


def update_options(net, alpha):
    OPTIONS.update(alpha=alpha)


HOLDERS = {
    "buffer in place": holder(own, fill_in_place, alpha=buffer),
    "buffer replaced": holder(own, put_tensor, alpha=buffer),
    "tensor in place": holder(own, fill_in_place, alpha=zero),
    "tensor replaced": holder(own, put_tensor),
    "tensor in a list": holder(
        lambda net: net.all[0],
        lambda net, alpha: net.all[0].fill_(alpha),
        all=lambda: [zero()],
    ),
    "frozen parameter": holder(own, fill, alpha=lambda: nn.Parameter(zero(), requires_grad=False)),
    "attribute": holder(own, put),
    "dict": holder(entry, update, all=dict),
    "nested list": holder(
        lambda net: net.all["a"][0][1],
        lambda net, alpha: net.all["a"][0].__setitem__(1, alpha),
        all=lambda: {"a": [[1, 0.0]]},
    ),
    "namespace": holder(of_config, put_in_config, config=SimpleNamespace),
    "dataclass": holder(of_config, put_in_config, config=Config),
    "slots": holder(of_config, put_in_config, config=Slotted),
    "class attribute": holder(own, lambda net, alpha: put(OnClass, alpha), OnClass),
    "enum": holder(
        lambda net: net.mode.value, lambda net, alpha: setattr(net, "mode", Mode(alpha))
    ),
    "numpy scalar": holder(
        lambda net: float(net.alpha), lambda net, alpha: put(net, np.float32(alpha))
    ),
    "numpy array": holder(
        lambda net: float(net.alpha[0]),
        lambda net, alpha: net.alpha.fill(alpha),
        alpha=lambda: np.zeros(1),
    ),
    "submodule exchanged": holder(
        lambda net: net.inner.values[0],
        lambda net, alpha: setattr(net, "inner", Listed(alpha)),
    ),
    "global": holder(lambda net: ALPHA, lambda net, alpha: setattr(THIS, "ALPHA", alpha)),
    "global class": holder(lambda net: Config.alpha, lambda net, alpha: put(Config, alpha)),
    "global of a helper": holder(lambda net: helper(), update_options),
    "user dict": holder(entry, update, all=UserDict),
    "chain map": holder(
        entry,
        lambda net, alpha: net.all.maps[1].update(alpha=alpha),
        all=lambda: ChainMap({}, {}),
    ),
    "weak reference": holder(
        lambda net: net.found().alpha,
        lambda net, alpha: put(net.found(), alpha),
        found=lambda: weakref.ref(SHARED),
    ),
    "weak proxy": holder(
        first_of_all,
        lambda net, alpha: put(SHARED, alpha),
        all=lambda: [weakref.proxy(SHARED)],
    ),
    "array of objects": holder(
        first_of_all,
        lambda net, alpha: put(net.all[0], alpha),
        all=lambda: np.array([Config(), None], dtype=object),
    ),
    "context variable": holder(
        lambda net: net.shared.held.get(),
        lambda net, alpha: net.shared.held.set(alpha),
        shared=lambda: Shared(ContextVar("alpha")),
    ),
    "thread local": holder(
        lambda net: net.shared.held.alpha,
        lambda net, alpha: put(net.shared.held, alpha),
        shared=lambda: Shared(threading.local()),
    ),
    "entry of a global": holder(lambda net: OPTIONS["alpha"], update_options),
}


def closure_of_a_hook(mix):
    model, value = Net(lambda net, x: net.c(net.a(x))), 0.0

    def set_to(alpha):
        nonlocal value
        value = alpha

    model.a.register_forward_hook(lambda module, given, out: mix(out.tanh(), value))
    return model, set_to


def dict_in_the_closure_of_a_hook(mix):
    model, options = Net(lambda net, x: net.c(net.a(x))), {"alpha": 0.0}
    model.a.register_forward_hook(lambda module, given, out: mix(out.tanh(), options["alpha"]))
    return model, lambda alpha: options.update(alpha=alpha)


def closure_of_an_attribute(mix):
    options = {"alpha": 0.0}
    return mixing(mix, lambda net: options["alpha"]), lambda alpha: options.update(alpha=alpha)


def forward_of_the_class(mix):
    def set_to(alpha):
        Patched.forward = lambda self, x: self.c(mix(self.a(x).tanh(), alpha))  # type: ignore

    set_to(0.0)
    return Patched(None), set_to


def forward_of_the_instance(mix):
    model = Net(None)

    def set_to(alpha):
        model.forward = MethodType(lambda self, x: self.c(mix(self.a(x).tanh(), alpha)), model)

    set_to(0.0)
    return model, set_to


for _hold in (
    closure_of_a_hook,
    dict_in_the_closure_of_a_hook,
    closure_of_an_attribute,
    forward_of_the_class,
    forward_of_the_instance,
):
    HOLDERS[_hold.__name__.replace("_", " ")] = _hold


def toggled(hold, mix):
    """Alpha 0, 1 (the samples interact) and 0 again."""
    model, set_to = hold(mix)
    for alpha in (0.0, 1.0, 0.0):
        set_to(alpha)
        yield Call(model, (torch.randn(6, 5),), refused=alpha != 0)


for _name, _hold in HOLDERS.items():
    for _mix in (with_grad, detached, gradient_only):
        CASES[f"toggled-{_name}-{_mix.__name__}"] = partial(toggled, _hold, _mix)


@case(with_grad, detached)
def zero_dim_input(mix):
    model = Net(lambda net, x, alpha: net.c(mix(net.a(x).tanh(), alpha)))
    for alpha in (0.0, 1.0, 0.0):
        yield Call(model, (torch.randn(6, 5), torch.tensor(alpha)), refused=alpha != 0, shared=(1,))


@case()
def switched_by_data():
    model = Net(lambda net, x: net.c(with_grad(net.a(x).tanh(), (x.amax() > 10).to(x))))
    for largest in (1.0, 20.0, 1.0):
        x = torch.rand(6, 5)
        x[2, 3] = largest
        yield Call(model, (x,), refused=largest > 10)


@case()
def trainable_alpha_at_zero():
    """The output is each sample's own; the gradient of alpha is not."""
    model = mixing(with_grad, lambda net: net.alpha, alpha=nn.Parameter(torch.zeros(())))
    yield Call(model, (torch.randn(6, 5),), refused=True)


@case()
def gradient_only_from_the_start():
    yield Call(mixing(gradient_only, lambda net: 1.0), (torch.randn(6, 5),), refused=True)


@case()
def flipped_table():
    """A parameter used twice, once flipped: which axis is not to be seen in shapes."""

    def how(net, x):
        return net.c(net.a(x @ (net.table + net.table.flip(net.axis["d"]))).tanh())

    model = Net(how, table=nn.Parameter(torch.randn(5, 5)), axis={"d": 0})
    for axis in (0, 1, 0):
        model.axis["d"] = axis
        yield Call(model, (torch.randn(4, 5),))


def before_the_layers(net, x):
    return net.c(net.a(x.flip(net.axis["d"])).tanh().flip(net.axis["d"]))


def between_layers(net, x):
    return net.c(net.b(net.a(x).tanh().flip(net.axis["d"])).tanh().flip(net.axis["d"]))


@case(before_the_layers, between_layers)
def flipped_samples(how):
    """B = T: positions are flipped and flipped back, then samples are."""
    model = Net(how, axis={"d": 1})
    for axis in (1, 0, 1):
        model.axis["d"] = axis
        yield Call(model, (torch.randn(4, 4, 5),))


# -- state that forward writes
# -----------------------------------------------------------------------------------


class CachedBias(nn.Module):
    """Attention that keeps its position biases in eval mode.

    So do timm's LeViT, TinyViT and EfficientFormer.
    """

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(5, 15), nn.Linear(5, 4)
        self.biases = nn.Parameter(torch.randn(1, 4))
        self.register_buffer(
            "index", (torch.arange(4)[:, None] - torch.arange(4)[None]).abs(), persistent=False
        )
        self.cache = {}
        self.eval()

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.cache = {}
        return self

    def bias(self, device):
        if self.training:
            return self.biases[:, self.index]
        if str(device) not in self.cache:
            self.cache[str(device)] = self.biases[:, self.index]
        return self.cache[str(device)]

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head((q @ k.transpose(1, 2) + self.bias(x.device)).softmax(-1) @ v).sum(1)


@case()
def cached_bias():
    model = CachedBias()
    for count in (3, 3, 5, 1):
        yield Call(model, (torch.randn(count, 4, 5),))


FUSE = [0]


class Keeps(nn.Module):
    """Keeps what it has seen in every way there is, and fails when ``FUSE`` comes to zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.hidden, self.calls, self.old = None, 0, torch.ones(3)
        self.cache = {}
        self.ordered = OrderedDict(a=torch.zeros(2), b=1)
        self.history = [torch.zeros(1)]
        self.recent = deque([0], 3)
        self.shapes = {1}
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("total", torch.zeros(()))
        self.gone = "here"  # the last one: what is deleted comes back at the end
        self.eval()

    def forward(self, x):
        h = self.layer(x)
        self.hidden = h.detach()
        self.calls = self.calls + 1
        self.fresh = h.detach().mean()
        self.old = self.old * 2
        self.cache[x.shape], self.cache["h"] = h.detach(), h
        self.ordered["a"] = h.detach()[0]
        self.ordered.move_to_end("a")
        self.history.append(h.detach())
        self.recent.append(self.calls)
        self.shapes.add(tuple(x.shape))
        self.last = h.detach()[0]
        self.total += 1
        if "gone" in vars(self):
            del self.gone
        FUSE[0] -= 1
        if FUSE[0] == 0:
            raise ValueError("the fuse")
        return h.tanh()


@case()
def attribute_kept():
    model = Keeps()
    for count in (3, 3, 5, 1):
        yield Call(model, (torch.randn(count, 3),))


class Hard(nn.Module):
    """A router whose choice, by argmax, is all that it gives."""

    def __init__(self, experts=3):
        super().__init__()
        self.router = nn.Linear(5, experts)
        self.table = nn.Parameter(torch.randn(experts, 5, 4))
        self.eval()

    def forward(self, x):
        chosen = F.one_hot(self.router(x).argmax(-1), len(self.table)).to(x)
        return torch.einsum("be,bi,eio->bo", chosen, x, self.table)


class Equal(Net):
    """Models of one name compare equal."""

    name = "one"

    def __eq__(self, other):
        return isinstance(other, Equal) and other.name == self.name

    def __hash__(self):
        return hash(self.name)

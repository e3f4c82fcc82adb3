"""Objects of foreign classes that a model holds, and modules of such classes, break nothing."""

import odd_objects as odd
import torch
from pytest import mark
from single_samples import Written
from torch import nn

import fastlr

pytestmark = mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def two_layers():
    """Return two layers, and a buffer, for which the module's numbers are looked at."""
    parts = {"a": nn.Linear(5, 4), "c": nn.Linear(4, 3), "mean": nn.Buffer(torch.zeros(4))}
    return Written(lambda m, x: m.c(m.a(x).tanh() - m.mean), **parts)


def norms(net):
    torch.manual_seed(1)
    return fastlr.per_sample_grad_sq_norms(net, torch.randn(4, 5), torch.randn(4, 3))


def seeded():
    torch.manual_seed(0)
    return two_layers().eval()


def test_a_model_that_holds_them_all_is_measured():
    net = seeded()
    for name, make in odd.ODD.items():
        vars(net)[f"odd {name}"] = make()
    net.all = [make() for make in odd.ODD.values()]
    net.by_name = {name: make() for name, make in odd.ODD.items()}
    before = dict(vars(net))
    assert torch.equal(norms(net), norms(seeded()))
    fastlr.estimate(net, fastlr.TensorInputs(torch.randn(4, 5)), 4)
    assert list(vars(net)) == list(before)
    assert all(vars(net)[name] is value for name, value in before.items())


# -- modules of odd classes ------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Runs another module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Strict(Wrapper):
    """Finds its submodules only; asked for anything else it raises, and not AttributeError."""

    def __getattr__(self, name):
        return self.__dict__["_modules"][name]


class RefusingProperties(Wrapper):
    max_norm = property(odd.refuse)
    _orig_mod = property(odd.refuse)
    device = property(odd.refuse)


class ModuleWithoutClass(Wrapper):
    __class__ = property(odd.refuse)  # type: ignore[assignment]


class Unhashable(type):
    __hash__ = __eq__ = None  # type: ignore[assignment]


class OfUnhashableClass(Wrapper, metaclass=Unhashable):
    pass


class NamedByAnEnum(Wrapper):
    """Its attributes, buffers and submodules have members of an enum as their names."""

    def __init__(self, inner):
        super().__init__(inner)
        setattr(self, odd.Name.ALPHA, 1)
        self.register_buffer(odd.Name.BUFFER, torch.ones(1))
        self.add_module(odd.Name.MODULE, nn.Identity())


class NotCopied(Wrapper):
    """Cannot be copied."""

    __deepcopy__ = odd.refuse  # type: ignore[assignment]


KINDS = (Strict, RefusingProperties, OfUnhashableClass, NamedByAnEnum, NotCopied)


def assert_measured(net):
    for _ in range(2):  # the second finds the engine of the first
        assert torch.equal(norms(net), norms(seeded()))
    fastlr.estimate(net, fastlr.TensorInputs(torch.randn(4, 5)), 4)


@mark.parametrize("kind", KINDS)
def test_models_of_odd_classes(kind):
    assert_measured(kind(seeded()).eval())


@mark.parametrize("kind", [*KINDS, ModuleWithoutClass])
def test_parts_of_odd_classes(kind):
    assert_measured(nn.Sequential(kind(seeded()), nn.Identity()).eval())

"""A frozen base whose weights are quantised, each a tensor of a subclass, is measured."""

import torch
from pytest import mark
from single_samples import Written, truth
from torch import nn

import fastlr

aten = torch.ops.aten


class Int8(torch.Tensor):
    """Bytes and a scale, as torchao's: it takes the operations of a linear layer and no others."""

    follows = False

    @staticmethod
    def __new__(cls, whole, scale):
        return cls._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole, scale):
        self.whole, self.scale = whole, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        *others, weight = args
        if func in (aten.detach.default, aten.clone.default, aten.t.default):
            return cls(func(weight.whole), weight.scale)
        if func not in (aten.mm.default, aten.addmm.default):
            raise NotImplementedError(f"{func} of quantised weights")
        dtype = others[0].dtype if cls.follows else weight.dtype
        return func(*others, weight.whole * weight.scale.to(dtype))


class Int8OfAnyDtype(Int8):
    """It follows the dtype of what it is multiplied with."""

    follows = True


def forward(m, x):
    h = torch.relu(m.base(x) + m.up(m.down(x)))
    return m.head(h)


@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@mark.parametrize("kind", [Int8, Int8OfAnyDtype])
def test_what_is_trained_on_a_quantised_base_is_measured(kind, dtype):
    torch.manual_seed(0)
    sizes = {"base": (6, 16), "down": (6, 2), "up": (2, 16), "head": (16, 3)}
    layers = {name: nn.Linear(*size, dtype=dtype) for name, size in sizes.items()}
    base = layers["base"].requires_grad_(False)
    base.bias += torch.tensor([-100.0] * 5 + [3.0] * 11)
    weight = kind((300 * base.weight).to(torch.int8), torch.tensor(1 / 300, dtype=dtype))
    base.weight = nn.Parameter(weight, requires_grad=False)
    model, x = Written(forward, **layers), torch.randn(7, 6, dtype=dtype)
    v = torch.randn(7, 3, dtype=dtype)
    found = fastlr.per_sample_grad_sq_norms(model, x, v)
    precision = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, truth(model, (x,), v), rtol=precision, atol=0)
    assert fastlr.estimate(model, fastlr.TensorInputs(x), n=7).value > 0
    assert fastlr.metrics.dormant_ratio(model, x).details == {"units": 16, "dormant": 5}

"""Whole models on Triton kernels: estimates against plain torch, interpreted and on a GPU.

The interpreter works in float32.
"""

import interpreter
import torch
from definitions import definition
from expected import needs_gpu
from kernel_cases import fold_cases
from pytest import fixture, mark
from single_samples import Written
from torch import nn
from torch.utils._pytree import tree_leaves

import fastlr
from fastlr.ghost.api import engine_for
from fastlr.ops import dispatch as ops


def squeeze_excite(channels):
    """Scales channels by a function of their means."""
    return Written(
        lambda m, x: x * m.scale(m.pool(x)),
        pool=nn.AdaptiveAvgPool2d(1),
        scale=nn.Sequential(
            nn.Conv2d(channels, 3, 1), nn.ReLU(), nn.Conv2d(3, channels, 1), nn.Hardsigmoid()
        ),
    )


def inverted(channels, wide, kernel, act, se):
    """An inverted residual block: pointwise, depthwise, squeeze and excite, pointwise."""
    body = nn.Sequential(
        nn.Conv2d(channels, wide, 1, bias=False),
        nn.BatchNorm2d(wide, eps=1e-3),
        act(),
        nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False),
        nn.BatchNorm2d(wide),
        act(),
        squeeze_excite(wide) if se else nn.Identity(),
        nn.Conv2d(wide, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    )
    return Written(lambda m, x: x + m.body(x), body=body)


def mobile():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.Hardswish(),
        inverted(6, 17, 3, nn.ReLU, False),
        inverted(6, 12, 5, nn.Hardswish, True),
        nn.Conv2d(6, 10, 3, 2, 1),
        nn.BatchNorm2d(10),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 3),
    )


def transformer():
    layer = nn.TransformerEncoderLayer(
        12, 2, 20, 0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    return nn.Sequential(
        nn.Conv2d(3, 12, 4, 4),
        nn.Flatten(2),
        nn.Unflatten(2, (-1,)),
        Written(lambda m, x: x.transpose(1, 2)),
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        nn.LayerNorm(12),
        nn.Flatten(),
        nn.Linear(12 * 9, 3),
    )


MODELS = {"mobile": mobile, "transformer": transformer}


def made(name):
    """A model with random parameters and statistics, inputs, a cotangent."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for tensor_name, t in (*model.named_parameters(), *model.named_buffers()):
            if t.is_floating_point() and t.ndim == 1:
                t.copy_(
                    torch.rand_like(t) + 0.5 if tensor_name.endswith("var") else torch.randn_like(t)
                )
    return model, torch.randn(3, 3, 13, 12), torch.randn(3, 3)


def norms(name, device="cpu", dtype=None):
    model, x, v = (t.to(device) for t in made(name))
    with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
        return fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)


RUN = """
import test_kernels_whole as whole
with ops.comparing() as trust:
    norms = {name: whole.norms(name) for name in whole.MODELS}
fold = {name: ops.get("fold_weights", "triton")(*case) for name, case in whole.fold_cases().items()}
results = norms, fold, trust.switched_off, {key[0] for key, _ in trust.compared.items()}
"""


@fixture(scope="module")
def interpreted(tmp_path_factory):
    return interpreter.interpreted(RUN, tmp_path_factory.mktemp("whole"))


def agree(got, want, total_part):
    total = torch.stack(list(want.values())).sum(0)
    for name, value in want.items():
        assert bool(((got[name].cpu() - value).abs() <= total_part * total).all()), name


@mark.parametrize("name", MODELS)
def test_models_in_the_interpreter(name, interpreted):
    model, x, v = made(name)
    model, x, v = model.double(), x.double(), v.double()
    want = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
    assert len(engine_for(model).folding.blocks.folded) == {"mobile": 8, "transformer": 0}[name]
    agree(interpreted[0][name], want, 1e-4)


def test_right_kernels_pass_their_comparison(interpreted):
    *_, off, compared = interpreted
    assert off == {}
    assert {"fold_weights", "folded_conv", "folded_conv_backward", "linear_sq_norms"} <= set(
        compared
    )


@mark.parametrize("name", fold_cases())
def test_folded_weights(name, interpreted):
    case = fold_cases()[name]
    for got in (interpreted[1][name], ops.get("fold_weights", "torch")(*case)):
        pairs = zip(tree_leaves(got), tree_leaves(definition("fold_weights")(*case)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


@needs_gpu
@mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@mark.parametrize("name", MODELS)
def test_models_on_a_gpu(name, dtype):
    model, x, v = made(name)
    want = fastlr.per_sample_grad_sq_norms(
        model.double(), x.double(), v.double(), per_parameter=True
    )
    agree(norms(name, "cuda", dtype), want, 1e-4 if dtype is None else 5e-2)
    first = norms(name, "cuda", dtype)
    second = norms(name, "cuda", dtype)
    assert all(torch.equal(first[n], second[n]) for n in first), "the same call gives the same bits"

"""The kernels of weight gradients' norms against their definitions, interpreted and on a GPU.

The interpreter is Triton's; a GPU is used if there is one.
"""

import interpreter
import torch
from agreement import assert_near, pairs
from definitions import definition
from expected import needs_gpu, needs_triton
from kernel_calls import moved
from kernel_cases import dense_cases, linear_cases, one_row_cases
from pytest import fixture, mark

from bench.convolution_cases import (
    channels_last,
    conv_cases,
    convolution,
    draw,
    geometry,
    moments_cases,
    plain_block,
)
from fastlr import ops

pytestmark = needs_triton
TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 2e-3,
    torch.float16: 2e-3,
}  # on a GPU, for inputs rounded first


OPS = {
    "dense_sq_norms": dense_cases(),
    "one_row_sq_norms": one_row_cases(),
    "linear_sq_norms": linear_cases(),
    "conv_sq_norms": conv_cases(),
    "folded_conv_sq_norms": moments_cases(),
}
CASES = {(op, name): args for op, cases in OPS.items() for name, args in cases.items()}


def wide_cases():
    """For the tiles that low precision has: sizes that choose each of them, whole and broken."""
    cases = {}
    shapes = [(300, 72, 136), (140, 129, 65), (60, 200, 132), (130, 300, 301), (200, 400, 400)]
    for rows, inputs, outputs in [*shapes, (150, 70, 70), (140, 39, 41), (140, 39, 131)]:
        cases["linear_sq_norms", f"{rows}x{inputs}x{outputs}"] = (
            draw(1, 1, rows, inputs),
            draw(1, 1, rows, outputs),
        )
    strided = geometry(2, stride=(2, 1), padding=(1, 0))
    for inputs in (2, 32, 40, 72):
        for outputs in (20, 64, 132):
            name = f"{inputs}-{outputs}"
            x, g = draw(1, 140, inputs), draw(1, 140, outputs)
            cases["linear_sq_norms", name] = (x[None], g[None])
            x, g = (
                channels_last(t, 1) for t in (draw(1, inputs, 10, 14), draw(1, outputs, 10, 14))
            )
            block = plain_block(draw(outputs, inputs, 1, 1), draw(3, outputs), geometry(2))
            cases["folded_conv_sq_norms", name] = (x, g, block)
            x, g = (channels_last(t, 1) for t in (draw(1, inputs, 5, 4), draw(1, outputs, 3, 4)))
            weight, g = draw(outputs, inputs, 3, 2), g[..., :3]
            block = plain_block(weight, draw(3, outputs), strided)
            cases["folded_conv_sq_norms", f"3x2-{name}"] = (x, g, block)
            cases["conv_sq_norms", f"3x2-{name}"] = (x[:, None], g[:, None], weight, strided)
    x, g, weight = (
        draw(1, 72, 5, 4),
        draw(1, 132, 3, 3),
        draw(132, 72, 3, 2),
    )  # too few aligned channels for vectors
    block = plain_block(weight, draw(3, 132), strided)
    cases["folded_conv_sq_norms", "3x2-first"] = (x, g, block)
    cases["conv_sq_norms", "3x2-first"] = (x[:, None], g[:, None], weight, strided)
    kept = ("3x3", "pointwise", "3x5_grouped", "stem")
    return cases | {
        key: CASES[key] for key in CASES if key[1].startswith(kept) and "large" not in key[1]
    }


WIDE = wide_cases()
BOTH = CASES | WIDE
SLOW = (
    r"3x3_large|5_strided|twice|stem|(3x3_\w+|3x5\w*|even_kernel|pointwise_\w+|dilated)-(t|m|c)|"
    "gram-(blocks|common|vectors-)|two-tiles-square|tap-a-tile-grouped|vectors-channels"
)
# In full precision the folded op, which shares the kernel, has these quick.
SLOW_OR_ALIKE = (
    f"{SLOW}|^conv_sq_norms-(3x3-(vectors|strided-view|mixed|tap-a-tile)|3x3_few|pointwise_grouped)"
)

RUN = """
from bench import kernel_variants
from fastlr.kernels import linear_norms, product_norms

launched = set()


def configuration(name, flags):  # without the layout
    return name, tuple((key, flags[key]) for key in sorted(flags) if key in KEYS)


KEYS = {"X_PLAIN", "PACKED", "FOLDED", "OUTPUTS", "COLUMNS", "ROWS", "BLOCK", "CHUNK", "CENTRED"}
KEYS |= {"num_warps", "num_stages"}


def watch(module, name):
    kernel = getattr(module, name)

    class Watched:
        def __getitem__(self, grid):
            def launch(*args, **flags):
                launched.add(configuration(name, flags))
                kernel[grid](*args, **flags)

            return launch

    setattr(module, name, Watched())


def run(cases):
    return {key: ops.get(key[0], "triton")(*args) for key, args in cases.items()}


compiled = {
    (name.split("[")[1][:4], configuration(kernel.__name__, {**flags, **options}))
    for variants in (kernel_variants.linear_norms, kernel_variants.conv_norms)
    for name, kernel, _, flags, options in variants()
}
watch(product_norms, "product_norms_kernel")
watch(linear_norms, "gram_norms_kernel")
cases, wide, left = given
results = {"cases": run(cases), "left": run(left)}
with ops.using("triton"):
    results["left_run"] = {key: ops.run(key[0], *args) for key, args in left.items()}
choose_tile, gram_block = product_norms.choose_tile, linear_norms.gram_block
low = torch.bfloat16
product_norms.choose_tile = lambda dtype, *a, **k: choose_tile(low, *a, **k)
linear_norms.choose_tile = product_norms.choose_tile
linear_norms.gram_block = lambda dtype, *a: gram_block(low, *a)
linear_norms.CENTRED[torch.float32] = False
results["unknown"] = {("fp32", found) for found in launched} - compiled
launched = set()
results["wide"] = run(wide)
results["unknown"] |= {("bf16", found) for found in launched} - compiled
results["not_run"] = {c for c in compiled if c[0] == "bf16"}
results["not_run"] -= {("bf16", found) for found in launched}
"""


def left_to_torch():
    """What the kernels must hand on."""
    a, g = linear_cases()["tall"]
    others = {
        "float64": (a.double(), g.double()),
        "two-dtypes": (a, g.bfloat16()),
        "empty": (a[:, :, :0], g[:, :, :0]),
    }
    left = {("linear_sq_norms", name): args for name, args in others.items()}
    left["conv_sq_norms", "3d"] = convolution("3d", torch.float32, False)
    x, g, *rest = moments_cases()["3x3"]
    left["folded_conv_sq_norms", "float64"] = (x.double(), g.double(), *rest)
    return left


LEFT = left_to_torch()


@fixture(scope="module")
def interpreted(request, tmp_path_factory):
    """The cases by the kernels in the interpreter."""
    cases = interpreter.chosen(request, CASES, SLOW_OR_ALIKE)
    wide = interpreter.chosen(request, WIDE, SLOW)
    return interpreter.interpreted(RUN, tmp_path_factory.mktemp("norms"), (cases, wide, LEFT))


def check_norms(got, key, args, tolerance):
    """Squared norms are float64, and all results close to their definitions."""
    assert pairs(got, got)[0][0].dtype == torch.float64
    assert_near(got, definition(key[0])(*args), tolerance)


@mark.parametrize("key", interpreter.params(CASES, SLOW_OR_ALIKE))
def test_interpreted(key, interpreted):
    check_norms(interpreted["cases"][key], key, CASES[key], 2e-5)


@mark.parametrize("key", interpreter.params(WIDE, SLOW))
def test_tiles_of_low_precision(key, interpreted):
    check_norms(interpreted["wide"][key], key, WIDE[key], 2e-5)


@mark.parametrize("key", LEFT, ids="-".join)
def test_left_to_torch(key, interpreted):
    assert interpreted["left"][key] is NotImplemented
    got = interpreted["left_run"][key]
    want = ops.get(key[0], "torch")(*LEFT[key])
    torch.testing.assert_close(got, want)


def test_every_configuration_that_was_chosen_is_compiled(interpreted):
    assert interpreted["unknown"] == set()
    assert interpreted["not_run"] == set()


@needs_gpu
@mark.parametrize("dtype", TOLERANCE, ids=str)
@mark.parametrize("key", BOTH, ids="-".join)
def test_gpu(key, dtype):
    args = moved(key[0], BOTH[key], torch.device("cuda"), dtype)
    got = ops.get(key[0], "triton")(*args)
    check_norms(got, key, args, TOLERANCE[dtype])
    for a, b in pairs(got, ops.get(key[0], "triton")(*args)):
        assert torch.equal(a, b)
    # What serves where a kernel does not, and what kernels are held to, is plain torch there.
    check_norms(ops.get(key[0], "torch")(*args), key, args, TOLERANCE[dtype])

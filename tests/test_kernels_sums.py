"""The kernels of the small reductions, of activation gradients and of cotangents, against their definitions.

In Triton's interpreter (float32 and float64, in a process of its own) and, where there is one, on a GPU.
"""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastlr import ops
from fastlr.ghost.layout import Regular
from fastlr.ghost.rules import RULES, Site, Unsupported

OPS = (
    "channel_sums",
    "layer_norm_sums",
    "rms_norm_sums",
    "broadcast_sums",
    "embedding_sq_norms",
    "activation_grad",
    "gate_grad",
    "categorical_root_cotangent",
)
ACTS = ("relu", "relu6", "hardswish", "silu", "gelu", "gelu_tanh")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers with an offset, so that a missing or a doubled part would show."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) + 0.3


def channels_last(t: Tensor) -> Tensor:
    """The same values with the axis 2 last in memory."""
    return t.movedim(2, -1).contiguous().movedim(-1, 2)


def channel_cases() -> dict[str, tuple]:
    cases = {}
    shapes = {
        "one": (1, 1, 1),
        "no-positions": (3, 5, 7),
        "1d": (2, 1, 3, 23),
        "2d": (2, 1, 5, 7, 9),
        "images": (2, 3, 35, 3, 5),
        "wide": (1, 1, 70, 5, 7),
        "long": (1, 1, 3, 91, 97),  # more than one program a sum
        "3d": (2, 1, 3, 3, 2, 5),
    }
    for name, shape in shapes.items():
        x, g = draw(*shape), draw(*shape, seed=1)
        cases[name] = (x, g)
        cases[f"{name}-channels-last"] = (channels_last(x), channels_last(g))
    cases["long-pair"] = tuple(torch.cat([t, t.flip(-1)]) for t in cases["long"])
    x, g = draw(2, 1, 20, 5, 7), draw(2, 1, 20, 5, 7, seed=1)
    cases["mixed-formats"] = (x, channels_last(g))
    cases["expanded"] = (x, g[..., :1, :1].expand_as(x))  # what a mean over positions gives
    cases["sliced"] = (draw(3, 1, 20, 5, 14)[1:, ..., ::2], draw(2, 2, 40, 5, 7)[:, 1:, 1::2])
    cases["batch-first-in-memory-last"] = (draw(5, 7, 20, 2).movedim(-1, 0)[:, None], draw(2, 1, 5, 7, 20))
    return cases


def row_cases(statistics: int) -> dict[str, tuple]:
    """x, g [B, T, D] and row statistics."""
    cases = {}
    for name, (count, rows, width) in {
        "one": (1, 1, 1),
        "small": (3, 17, 5),
        "wide": (2, 33, 70),
        "long": (1, 600, 3),
        "longer": (1, 2100, 17),  # more than one program a sum
    }.items():
        x, g = draw(count, rows, width), draw(count, rows, width, seed=1)
        cases[name] = (x, g, *(draw(count, rows, 1, seed=2 + k) for k in range(statistics)))
    x, g, *rest = cases["wide"]
    cases["columns-first"] = (x.mT.contiguous().mT, g.mT.contiguous().mT, *rest)
    cases["rows-first"] = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, g, *rest))
    other = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in rest]
    cases["statistics-in-other-orders"] = (x, g, *other[:1], *rest[1:])
    return cases


def broadcast_cases() -> dict[str, tuple]:
    g = draw(2, 3, 4, 5, 6)
    cases = {f"sum-{''.join(map(str, axes))}": (g, None, axes) for axes in [(1,), (1, 2), (1, 4), (2, 4), (1, 2, 3, 4)]}
    cases |= {
        "bias-of-linear": (draw(2, 37, 70), None, (1,)),
        "bias-of-convolution-channels-last": (channels_last(draw(2, 1, 20, 5, 7)), None, (1, 3, 4)),
        "layer-scale": (draw(2, 1, 4, 5, 20), draw(2, 1, 4, 5, 20, seed=1), (1, 2, 3)),
        "layer-scale-channels-first": (draw(2, 1, 20, 5, 7), draw(2, 1, 20, 5, 7, seed=1), (1, 3, 4)),
        "factor-broadcast": (g, draw(5, 1), (1, 2)),
        "factor-of-a-sample": (draw(2, 3, 4), draw(2, 1, 1), (1,)),
        "one-number": (draw(3, 1, 5, 7), draw(3, 1, 5, 7, seed=1), (1, 2, 3)),
        "bias-table": (draw(2, 9, 3, 16, 16), None, (1,)),
        "expanded": (draw(2, 1, 6).expand(2, 40, 6), draw(2, 40, 6), (1,)),
        "long": (draw(1, 9000, 2).mT, None, (2,)),
    }
    return cases


BROADCAST_LEFT_TO_TORCH = {
    "nothing-to-sum": (draw(2, 1, 5, 6), None, (1,)),
    "three-apart": (draw(2, 3, 4, 5, 6, 7), None, (1, 3, 5)),
    "float64": (draw(2, 3, 4).double(), None, (1,)),
    "integers": (draw(2, 3, 4), torch.ones(3, 4, dtype=torch.int64), (1,)),
}


def embedding_cases() -> dict[str, tuple]:
    cases = {}
    sizes = {"one": (1, 1, 1, 1), "small": (3, 16, 5, 4), "tiles": (2, 67, 33, 9), "distinct": (2, 40, 7, 10**6)}
    for name, (count, rows, width, numbers) in sizes.items():
        ids = torch.randint(numbers, (count, rows), generator=torch.Generator().manual_seed(0))
        cases[name] = (ids, draw(count, rows, width))
    ids, g = cases["tiles"]
    cases["one-id"] = (torch.zeros_like(ids), g)
    cases["strides"] = (ids.T.contiguous().T.int(), g.mT.contiguous().mT)
    cases["large-ids"] = (ids + (1 << 40), g.transpose(0, 1).contiguous().transpose(0, 1))
    cases["expanded"] = (ids[:1].expand(2, -1), g[:, :1].expand(-1, 67, -1))
    return cases


def activation_cases() -> dict[str, tuple]:
    cases = {}
    edges = torch.tensor([-1e4, -100, -30, -5, -3, -2.5, -0.0, 0, 1e-30, 0.5, 3, 5.999, 6, 30, 100, 1e4])
    for act in ACTS:
        kept = 3 * draw(3, 7, 5, 11)
        cases[act] = (draw(3, 7, 5, 11, seed=1), kept, act)
        cases[f"{act}-edges"] = (draw(len(edges), seed=1), edges, act)
        last = {"memory_format": torch.channels_last}
        cases[f"{act}-channels-last"] = (draw(3, 7, 5, 11, seed=1).contiguous(**last), kept.contiguous(**last), act)
    cases["permuted"] = (draw(5, 3, 4).permute(2, 0, 1), draw(5, 3, 4, seed=1).permute(2, 0, 1), "silu")
    cases["inside-a-tensor"] = (draw(4, 5)[1:3], draw(4, 5, seed=1)[2:], "gelu")
    return cases


ACTIVATION_LEFT_TO_TORCH = {
    "orders": (draw(4, 5), draw(5, 4).T, "silu"),
    "holes": (draw(4, 10)[:, ::2], draw(4, 10)[:, ::2], "silu"),
    "overlap": (draw(1, 5).expand(4, 5), draw(1, 5).expand(4, 5), "relu"),
    "float64": (draw(4).double(), draw(4).double(), "relu"),
}


def gate_cases() -> dict[str, tuple]:
    last = {"memory_format": torch.channels_last}
    cases = {}
    for name, shape in {"one": (1, 1, 1, 2), "small": (3, 5, 3, 4), "wide": (2, 72, 7, 7), "long": (1, 17, 13, 11)}.items():
        g, x, gate = draw(*shape), draw(*shape, seed=1), draw(*shape[:2], 1, 1, seed=2)
        cases[name] = (g, x, gate)
        cases[f"{name}-channels-last"] = (g.contiguous(**last), x.contiguous(**last), gate)
        cases[f"{name}-mixed"] = (g.contiguous(**last), x, gate.contiguous(**last))
    g, x, gate = cases["small"]
    return cases | {"expanded": (g[..., :1, :1].expand_as(g), x, gate), "same-gate": (g, x, gate[:1].expand(3, 5, 1, 1))}


GATE_LEFT_TO_TORCH = {
    "float64": tuple(t.double() for t in gate_cases()["small"]),
    "1d": (draw(2, 3, 9), draw(2, 3, 9, seed=1), draw(2, 3, 1)),
    "windows": (draw(2, 3, 9, 8)[:, :, :, ::2], draw(2, 3, 9, 9)[..., :4], draw(2, 3, 1, 1)),
}


def cotangent_cases() -> dict[str, tuple]:
    def index(count: int, first: int = 0) -> Tensor:
        return torch.arange(first, first + count)

    cases = {}
    for classes in (2, 3, 10, 17, 129, 1000):
        z = 2 * draw(3, 2, classes)
        cases[f"{classes}-classes"] = (z, index(3), 5)
        cases[f"{classes}-classes-float64"] = (z.double() + 1e-12, index(3, 7), 5)
    z = draw(2, 3, 10)
    cases |= {
        "many-positions": (draw(2, 67, 5), index(2), 0),
        "classes-first": (draw(2, 5, 3, 4).movedim(1, -1).flatten(1, 2), index(2), 1),
        "strided-index": (z, index(4)[::2], 1),
        "large-index": (z, index(2, (1 << 32) - 1), 1),
        "huge-index": (z, index(2, (1 << 62) + 3), 1),
        "large-seed": (z, index(2), (1 << 63) + (1 << 31) + 9),
        "ties": (torch.zeros(2, 3, 10), index(2), 3),
        "almost-ties": (torch.tensor([1e-30, 2e-30, 0.0]).expand(2, 3, 3), index(2), 3),
        "gap-of-100": (z + 100 * (torch.arange(10) == 4), index(2), 2),
        "gap-of-900": (z.double() + 900 * (torch.arange(10) == 4), index(2), 2),
        "impossible-classes": (torch.where(torch.arange(10) % 3 == 1, -math.inf, z), index(2), 2),
    }
    bad = z.clone()
    bad[0, 0, 3], bad[0, 2, 9], bad[1, 1] = math.nan, math.inf, -math.inf
    cases["no-distribution"] = (bad, index(2), 2)
    return cases


CASES: dict[str, dict[str, tuple]] = {
    "channel_sums": channel_cases(),
    "layer_norm_sums": row_cases(2),
    "rms_norm_sums": row_cases(1),
    "broadcast_sums": broadcast_cases(),
    "embedding_sq_norms": embedding_cases(),
    "activation_grad": activation_cases(),
    "gate_grad": gate_cases(),
    "categorical_root_cotangent": cotangent_cases(),
}
LEFT_TO_TORCH: dict[str, dict[str, tuple]] = {
    "channel_sums": {"float64": tuple(t.double() for t in CASES["channel_sums"]["2d"])},
    "layer_norm_sums": {"float64": tuple(t.double() for t in CASES["layer_norm_sums"]["small"])},
    "rms_norm_sums": {"float64": tuple(t.double() for t in CASES["rms_norm_sums"]["small"])},
    "broadcast_sums": BROADCAST_LEFT_TO_TORCH,
    "embedding_sq_norms": {"float64": (torch.zeros(2, 3, dtype=torch.int64), draw(2, 3, 4).double())},
    "activation_grad": ACTIVATION_LEFT_TO_TORCH,
    "gate_grad": GATE_LEFT_TO_TORCH,
    "categorical_root_cotangent": {"vocabulary": (torch.zeros(1, 1, 4097), torch.arange(1), 0)},
}
NAMES = [(op, case) for op, cases in CASES.items() for case in cases]


def both(got: object, want: object) -> list[tuple[Tensor, Tensor]]:
    """Pair up the results of an op."""
    sides = [t if isinstance(t, tuple) else (t,) for t in (got, want)]
    return list(zip(*sides, strict=True))


def check(op: str, got: object, want: object, tolerance: float) -> None:
    """Relative to the largest value of the definition: of the row for cotangents, of the result for the others."""
    for a, b in both(got, want):
        assert a.shape == b.shape
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.double().nan_to_num(0, math.inf), b.double().nan_to_num(0, math.inf)
        scale = b.abs().amax(-1, keepdim=True) if op == "categorical_root_cotangent" else b.abs().max()
        assert bool(((a - b).abs() <= tolerance * scale).all()), float(((a - b).abs() / scale).max())


def tolerance(op: str) -> float:
    return {"categorical_root_cotangent": 1e-12, "activation_grad": 4e-6}.get(op, 2e-6)


RUN_CASES = """
import inspect, sys
import torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # new memory is NaN: what a kernel does not write would show
assert torch.zeros(1).new_empty(3).isnan().all() and torch.empty_like(torch.zeros(3)).isnan().all()
sys.path.insert(0, sys.argv[3])
import interpreter
from fastlr import ops
done = {}
for op, cases in torch.load(sys.argv[1]).items():
    run = ops.get(op, "triton")
    found = {name: run(*args) for name, args in cases.items()}
    done[op] = {name: "left to torch" if t is NotImplemented else t for name, t in found.items()}
    done[op]["signature"] = str(inspect.signature(run))
torch.save(done, sys.argv[2])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, dict[str, object]]:
    """Every case by its Triton kernel in the interpreter, in a process of its own (the variable is read at import)."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("interpreted")
    cases = {op: {**CASES[op], **{f"left-{name}": args for name, args in LEFT_TO_TORCH[op].items()}} for op in OPS}
    torch.save(cases, folder / "cases.pt")
    command = [sys.executable, "-c", RUN_CASES, str(folder / "cases.pt"), str(folder / "results.pt")]
    command.append(str(Path(__file__).parent))
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize(("op", "case"), NAMES)
def test_triton_gives_the_definition(op, case, interpreted):
    check(op, interpreted[op][case], ops.get(op, "reference")(*CASES[op][case]), tolerance(op))


@pytest.mark.parametrize(("op", "case"), NAMES)
def test_torch_gives_the_definition(op, case):
    check(op, ops.get(op, "torch")(*CASES[op][case]), ops.get(op, "reference")(*CASES[op][case]), tolerance(op))


@pytest.mark.parametrize(("op", "case"), [(op, case) for op in OPS for case in LEFT_TO_TORCH[op]])
def test_what_kernels_do_not_cover_is_left_to_torch(op, case, interpreted):
    args = LEFT_TO_TORCH[op][case]
    assert interpreted[op][f"left-{case}"] == "left to torch"
    if case != "vocabulary":  # the definition would take a matrix of its square
        check(op, ops.run(op, *args), ops.get(op, "reference")(*args), tolerance(op))


@pytest.mark.parametrize("op", OPS)
def test_signatures_agree(op, interpreted):
    reference = str(inspect.signature(ops.get(op, "reference")))
    assert str(inspect.signature(ops.get(op, "torch"))) == reference
    assert interpreted[op]["signature"] == reference


def test_activation_gradients_keep_the_memory_format(interpreted):
    for name, result in interpreted["activation_grad"].items():
        if name in CASES["activation_grad"]:
            assert result.stride() == CASES["activation_grad"][name][0].stride()
            assert result.dtype == torch.float32


def test_sums_of_a_sample_do_not_depend_on_its_batch(interpreted):
    """The long sums, which are divided among programs: one sample alone has the bits that it has in a batch."""
    assert CASES["channel_sums"]["long-pair"][0][:1].equal(CASES["channel_sums"]["long"][0])
    for alone, pair in both(interpreted["channel_sums"]["long"], interpreted["channel_sums"]["long-pair"]):
        assert torch.equal(alone[0], pair[0])


RUN_MODELS = """
import sys
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
import interpreter
import fastlr
from fastlr import ops

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(5, 1, 1)), nn.Parameter(torch.randn(4, 3))
    def forward(self, x):
        return x * self.scale + self.shift

class Gated(nn.Module):
    def forward(self, x):
        return x * x.mean((2, 3), keepdim=True).sigmoid()

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.place = nn.Embedding(5, 6), nn.Parameter(torch.randn(7, 6))
        self.rest = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 3))
    def forward(self, ids):
        return self.rest(self.table(ids) + self.place).mean(1)

first = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), Scaled(), nn.GroupNorm(1, 5)]
images = nn.Sequential(*first, nn.PReLU(5), Gated(), nn.Flatten())
models = {"images": (images.eval(), torch.randn(3, 3, 6, 5)), "tokens": (Tokens().eval(), torch.randint(5, (3, 7)))}
ran, plain = {}, ops.get
def spying(name, backend):
    run = plain(name, backend)

    def spy(*args):
        if backend == "triton" and name not in sys.argv[2:]:
            return NotImplemented  # kernels that have tests of their own
        result = run(*args)
        if backend == "triton" and result is not NotImplemented:
            ran[name] = ran.get(name, 0) + 1
        return result
    return spy
ops.get = spying
found = {}
for name, (model, x) in models.items():
    for p in model.parameters():
        p.data = torch.randn_like(p)
    v = torch.randn_like(model(x))
    for backend in ("torch", "triton"):
        with ops.using(backend):
            found[name, backend] = fastlr.per_sample_grad_sq_norms(model, x, v, per_parameter=True)
z, index = torch.randn(2, 4, 3), range(5, 7)
for backend in ("torch", "triton"):
    with ops.using(backend):
        found["cotangent", backend] = {"v": fastlr.Categorical(dim=1).cotangent(z, "rademacher", index, 1)}
torch.save((found, ran), sys.argv[1])
"""


def test_estimates_reach_the_kernels(tmp_path):
    """Whole models with these ops on their kernels, in the interpreter, against plain torch."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", RUN_MODELS, str(tmp_path / "found.pt"), *OPS], check=True, env=environment)
    found, ran = torch.load(tmp_path / "found.pt")
    assert set(OPS) - {"rms_norm_sums"} <= set(ran)  # the fused RMS norm has a node of its own on a GPU only
    for name in ("images", "tokens", "cotangent"):
        plain, fast = found[name, "torch"], found[name, "triton"]
        assert list(plain) == list(fast)
        largest = max(float(value.abs().max()) for value in plain.values())
        for key in plain:  # a bias before a norm of its channel has no gradient but rounding
            close = max(1e-5 * float(plain[key].abs().max()), 1e-12 * largest)
            torch.testing.assert_close(fast[key], plain[key], rtol=2e-5, atol=close)


def test_rule_of_the_fused_rms_norm():
    """On a CPU there is no such node, so the rule is given one: samples along axis 1, rows of two numbers times three."""
    x, g, rrms = draw(5, 4, 2, 3), draw(5, 4, 2, 3, seed=1), draw(5, 4, 1, 1, seed=2)
    node = SimpleNamespace(_saved_input=x, _saved_result1=rrms, _saved_normalized_shape=(2, 3))
    site = Site(node, (g,), {0: Regular(1, 1, 1)}, 4, {1: torch.Size((2, 3))})
    found = RULES["FusedRmsNormBackward0"](site, [1])[1]
    torch.testing.assert_close(found.dense(0, 4), (x * g * rrms).sum(0))
    inside = Site(node, (g,), {0: Regular(2, 1, 1)}, 2, {1: torch.Size((2, 3))})
    with pytest.raises(Unsupported):
        RULES["FusedRmsNormBackward0"](inside, [1])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def moved(args: tuple, dtype: torch.dtype) -> tuple:
    """Arguments on the GPU, with the same strides, float32 ones in ``dtype``."""
    out = []
    for a in args:
        if isinstance(a, Tensor):
            a = a.to(dtype) if a.dtype == torch.float32 else a
            a = (
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda").copy_(a)
                if 0 not in a.stride()
                else a.cuda()
            )
        out.append(a)
    return tuple(out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("op", "case"), NAMES)
def test_gpu_gives_the_definition(op, case, dtype):
    args = moved(CASES[op][case], dtype)
    run = ops.get(op, "triton")
    got = run(*args)
    allowed = tolerance(op)
    if op == "activation_grad":
        allowed = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    check(op, got, ops.get(op, "reference")(*args), allowed)
    for a, b in both(got, run(*args)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())  # same call, same bits

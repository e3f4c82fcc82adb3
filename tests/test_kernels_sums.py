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
from fastlr.kernel_cases import CASES as EVERY
from fastlr.kernel_cases import draw, gate_cases, moved

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

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


BROADCAST_LEFT_TO_TORCH = {
    "nothing-to-sum": (draw(2, 1, 5, 6), None, (1,)),
    "three-apart": (draw(2, 3, 4, 5, 6, 7), None, (1, 3, 5)),
    "float64": (draw(2, 3, 4).double(), None, (1,)),
    "integers": (draw(2, 3, 4), torch.ones(3, 4, dtype=torch.int64), (1,)),
}


ACTIVATION_LEFT_TO_TORCH = {
    "orders": (draw(4, 5), draw(5, 4).T, "silu"),
    "holes": (draw(4, 10)[:, ::2], draw(4, 10)[:, ::2], "silu"),
    "overlap": (draw(1, 5).expand(4, 5), draw(1, 5).expand(4, 5), "relu"),
    "float64": (draw(4).double(), draw(4).double(), "relu"),
}


GATE_LEFT_TO_TORCH = {
    "float64": tuple(t.double() for t in gate_cases()["small"]),
    "1d": (draw(2, 3, 9), draw(2, 3, 9, seed=1), draw(2, 3, 1)),
    "windows": (draw(2, 3, 9, 8)[:, :, :, ::2], draw(2, 3, 9, 9)[..., :4], draw(2, 3, 1, 1)),
}


CASES: dict[str, dict[str, tuple]] = {op: EVERY[op]() for op in OPS}
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
claims = interpreter.note_claims()
from fastlr import ops
done = {}
for op, cases in torch.load(sys.argv[1]).items():
    run = ops.get(op, "triton")
    found = {name: run(*args) for name, args in cases.items()}
    done[op] = {name: "left to torch" if t is NotImplemented else t for name, t in found.items()}
    done[op]["signature"] = str(inspect.signature(run))
assert not claims, claims
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("op", "case"), NAMES)
def test_gpu_gives_the_definition(op, case, dtype):
    args = moved(op, CASES[op][case], torch.device("cuda"), dtype)
    run = ops.get(op, "triton")
    got = run(*args)
    allowed = tolerance(op)
    if op == "activation_grad":
        allowed = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    check(op, got, ops.get(op, "reference")(*args), allowed)
    for a, b in both(got, run(*args)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())  # same call, same bits

"""The kernels of small reductions, activation gradients and cotangents, held to definitions.

In Triton's interpreter and, where there is one, on a GPU.
"""

from types import SimpleNamespace

import interpreter
import torch
from agreement import assert_near, pairs
from definitions import definition
from expected import needs_gpu
from kernel_calls import moved
from kernel_cases import CASES as EVERY
from pytest import fixture, mark, raises

from bench.convolution_cases import draw
from fastlr import ops
from fastlr.ghost.graph.layouts import Regular
from fastlr.ghost.norms.rules import RULES, Site, Unsupported

OPS = (
    "channel_sums",
    "layer_norm_sums",
    "rms_norm_sums",
    "broadcast_sums",
    "embedding_sq_norms",
    "categorical_root_cotangent",
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASES = {op: EVERY[op]() for op in OPS}


def in_float64(op, case):
    """A case that no kernel takes."""
    return {"float64": tuple(t.double() if t.is_floating_point() else t for t in CASES[op][case])}


LEFT_TO_TORCH = {
    "channel_sums": in_float64("channel_sums", "2d"),
    "layer_norm_sums": in_float64("layer_norm_sums", "small"),
    "rms_norm_sums": in_float64("rms_norm_sums", "small"),
    "broadcast_sums": {
        "nothing-to-sum": (draw(2, 1, 5, 6), None, (1,)),
        "three-apart": (draw(2, 3, 4, 5, 6, 7), None, (1, 3, 5)),
        "float64": (draw(2, 3, 4).double(), None, (1,)),
        "integers": (draw(2, 3, 4), torch.ones(3, 4, dtype=torch.int64), (1,)),
    },
    "embedding_sq_norms": in_float64("embedding_sq_norms", "small"),
    "categorical_root_cotangent": {"vocabulary": (torch.zeros(1, 1, 4097), torch.arange(1), 0)},
}
NAMES = [(op, case) for op, cases in CASES.items() for case in cases]


def check_sums(op, got, want, tolerance):
    """Hold a result to the definition, relative to its largest value.

    That is the largest of the row for cotangents, of the result for the others.
    """
    assert_near(got, want, tolerance, of="row" if op == "categorical_root_cotangent" else "result")


def tolerance(op):
    return {"categorical_root_cotangent": 1e-12}.get(op, 2e-6)


RUN_CASES = """
results = {}
for op, cases in given.items():
    run = ops.get(op, "triton")
    made = {name: run(*args) for name, args in cases.items()}
    results[op] = {name: "left to torch" if t is NotImplemented else t for name, t in made.items()}
"""


RUN_MODELS = """
from torch import nn
from fastlr.ops import dispatch
torch.manual_seed(0)

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
models = {"images": (images.eval(), torch.randn(3, 3, 6, 5))}
models["tokens"] = (Tokens().eval(), torch.randint(5, (3, 7)))
ran, plain = {}, dispatch.get
def spying(name, backend):
    run = plain(name, backend)

    def spy(*args):
        if backend == "triton" and name not in given:
            return NotImplemented  # kernels that have tests of their own
        result = run(*args)
        if backend == "triton" and result is not NotImplemented:
            ran[name] = ran.get(name, 0) + 1
        return result
    return spy
dispatch.get = spying
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
        v = fastlr.Categorical(dim=1).cotangent(z, "rademacher", index, 1)
        found["cotangent", backend] = {"v": v}
results = results, found, ran
"""


@fixture(scope="module")
def in_interpreter(tmp_path_factory):
    """Every case by its Triton kernel, models' results on kernels and plain, ops that ran."""
    cases = {
        op: {**CASES[op], **{f"left-{name}": args for name, args in LEFT_TO_TORCH[op].items()}}
        for op in OPS
    }
    folder = tmp_path_factory.mktemp("interpreted")
    return interpreter.interpreted(RUN_CASES + RUN_MODELS, folder, cases)


@fixture(scope="module")
def interpreted(in_interpreter):
    return in_interpreter[0]


@mark.parametrize(("op", "case"), NAMES)
def test_triton_gives_the_definition(op, case, interpreted):
    check_sums(op, interpreted[op][case], definition(op)(*CASES[op][case]), tolerance(op))


@mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@mark.parametrize(("op", "case"), NAMES)
def test_torch_gives_the_definition(op, case, dtype):
    args = moved(op, CASES[op][case], torch.device("cpu"), dtype)
    check_sums(op, ops.get(op, "torch")(*args), definition(op)(*args), tolerance(op))


@mark.parametrize(("op", "case"), [(op, case) for op in OPS for case in LEFT_TO_TORCH[op]])
def test_what_kernels_do_not_cover_is_left_to_torch(op, case, interpreted):
    args = LEFT_TO_TORCH[op][case]
    assert interpreted[op][f"left-{case}"] == "left to torch"
    if case != "vocabulary":  # the definition would take a matrix of its square
        check_sums(op, ops.run(op, *args), definition(op)(*args), tolerance(op))


def test_sums_of_a_sample_do_not_depend_on_its_batch(interpreted):
    """Long sums, divided among programs, give one sample the bits that it has in a batch."""
    assert CASES["channel_sums"]["long-pair"][0][:1].equal(CASES["channel_sums"]["long"][0])
    for alone, pair in pairs(
        interpreted["channel_sums"]["long"], interpreted["channel_sums"]["long-pair"]
    ):
        assert torch.equal(alone[0], pair[0])


def test_estimates_reach_the_kernels(in_interpreter):
    """Whole models with these ops on their kernels, in the interpreter, against plain torch."""
    _, found, ran = in_interpreter
    # The fused RMS norm has a node of its own on a GPU only.
    assert set(OPS) - {"rms_norm_sums"} <= set(ran)
    for name in ("images", "tokens", "cotangent"):
        plain, fast = found[name, "torch"], found[name, "triton"]
        assert list(plain) == list(fast)
        largest = max(float(value.abs().max()) for value in plain.values())
        for key in plain:  # a bias before a norm of its channel has no gradient but rounding
            close = max(1e-5 * float(plain[key].abs().max()), 1e-12 * largest)
            torch.testing.assert_close(fast[key], plain[key], rtol=2e-5, atol=close)


def test_rule_of_the_fused_rms_norm():
    """The rule is given the node that a CPU lacks: samples along axis 1, rows of 2 x 3 numbers."""
    x = draw(5, 4, 2, 3)
    g = draw(5, 4, 2, 3, seed=1)
    rrms = draw(5, 4, 1, 1, seed=2)
    node = SimpleNamespace(_saved_input=x, _saved_result1=rrms, _saved_normalized_shape=(2, 3))
    site = Site(node, (g,), {0: Regular(1, 1, 1)}, 4, {1: torch.Size((2, 3))})
    found = RULES["FusedRmsNormBackward0"](site, [1])[1]
    torch.testing.assert_close(found.dense(0, 4), (x * g * rrms).sum(0))
    inside = Site(node, (g,), {0: Regular(2, 1, 1)}, 2, {1: torch.Size((2, 3))})
    with raises(Unsupported):
        RULES["FusedRmsNormBackward0"](inside, [1])


# --- on a GPU
# --------------------------------------------------------------------------------------------------


@needs_gpu
@mark.parametrize("dtype", FLOATS, ids=str)
@mark.parametrize(("op", "case"), NAMES)
def test_gpu_gives_the_definition(op, case, dtype):
    args = moved(op, CASES[op][case], torch.device("cuda"), dtype)
    run = ops.get(op, "triton")
    got = run(*args)
    want, allowed = definition(op)(*args), tolerance(op)
    check_sums(op, got, want, allowed)
    for a, b in pairs(got, run(*args)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())  # same call, same bits
    # What serves where a kernel does not, and what kernels are held to, is plain torch there.
    check_sums(op, ops.get(op, "torch")(*args), want, allowed)

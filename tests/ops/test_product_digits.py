"""Whether products of float32 have all their digits, as set in either of torch's two ways."""

import torch
from pytest import fixture, mark, param
from torch import backends, nn

import fastlr
from fastlr.ghost.trust.agreement import computes_in_few_digits
from fastlr.ops import torch_private
from fastlr.ops.torch_private import narrow_products

NEWER = hasattr(torch._C, "_get_fp32_precision_getter")
needs_newer = mark.skipif(not NEWER, reason="needs the precisions by operation, from torch 2.9 on")
KEYS = [
    ("generic", "all"),
    ("cuda", "all"),
    ("mkldnn", "all"),
    *(("cuda", name) for name in ("matmul", "conv", "rnn")),
    *(("mkldnn", name) for name in ("matmul", "conv", "rnn")),
]


def said(read):
    try:
        return read()
    except RuntimeError:
        return "cannot be read"


def settings():
    """All settings of products, as they read."""
    found = {
        "cudnn": said(torch._C._get_cudnn_allow_tf32),
        "cublas": said(torch._C._get_cublas_allow_tf32),
        "matmul": said(torch.get_float32_matmul_precision),
        "fp16": torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        "bf16": torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        "accumulation": torch._C._get_cublas_allow_fp16_accumulation(),
    }
    if NEWER:
        for key in KEYS:
            found["/".join(key)] = torch._C._get_fp32_precision_getter(*key)
    return found


@fixture(autouse=True)
def as_they_were():
    """The settings of a new process, and afterwards those of the tests."""
    kept = backends.cudnn.allow_tf32
    fresh()
    yield
    fresh()
    backends.cudnn.allow_tf32 = kept


def fresh():
    for key in KEYS if NEWER else []:
        torch._C._set_fp32_precision_setter(*key, "none")
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for key in KEYS if NEWER else []:
        if key not in (("cuda", "conv"), ("cuda", "rnn")):
            torch._C._set_fp32_precision_setter(*key, "none")
    for kind in ("fp16", "bf16"):
        setattr(backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", True)
    backends.cuda.matmul.allow_fp16_accumulation = False


OLD = {
    "as they are": "pass",
    "cudnn off": "backends.cudnn.allow_tf32 = False",
    "matmul": "backends.cuda.matmul.allow_tf32 = True",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "sums": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "accumulation": "backends.cuda.matmul.allow_fp16_accumulation = True",
}
NEW = {
    "all ieee": "backends.fp32_precision = 'ieee'",
    "all tf32": "backends.fp32_precision = 'tf32'",
    "all bf16": "backends.fp32_precision = 'bf16'",
    "cudnn tf32": "backends.cudnn.fp32_precision = 'tf32'",
    "cudnn ieee": "backends.cudnn.fp32_precision = 'ieee'",
    "conv ieee": "backends.cudnn.conv.fp32_precision = 'ieee'",
    "conv not set": "backends.cudnn.conv.fp32_precision = 'none'",
    "rnn ieee": "backends.cudnn.rnn.fp32_precision = 'ieee'",
    "matmul tf32": "backends.cuda.matmul.fp32_precision = 'tf32'",
    "matmul ieee": "backends.cuda.matmul.fp32_precision = 'ieee'",
    "of the CPU": "backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "convolutions of the CPU": "backends.mkldnn.conv.fp32_precision = 'bf16'",
    "all tf32, matmul ieee": (
        "backends.fp32_precision = 'tf32'; backends.cuda.matmul.fp32_precision = 'ieee'"
    ),
    "all tf32, matmul tf32": (
        "backends.fp32_precision = 'tf32'; backends.cuda.matmul.fp32_precision = 'tf32'"
    ),
    "mixed": (
        "torch.set_float32_matmul_precision('high'); backends.cuda.matmul.fp32_precision = 'ieee'"
    ),
    "mixed, other way": (
        "backends.cudnn.allow_tf32 = False; backends.cudnn.conv.fp32_precision = 'tf32'"
    ),
    "medium, all tf32": (
        "torch.set_float32_matmul_precision('medium'); backends.fp32_precision = 'tf32'"
    ),
}
CASES = [*OLD.items(), *(param(*case, marks=needs_newer) for case in NEW.items())]


@mark.parametrize(("name", "setting"), CASES)
def test_estimates_do_not_mind(name, setting):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    exec(setting)
    before = settings()
    assert fastlr.estimate(model, fastlr.ShapeImages((3, 8, 8)), 8).value > 0
    assert settings() == before


@mark.parametrize(("name", "setting"), CASES)
def test_low_precision_is_that_of_either_way(name, setting):
    exec(setting)
    gpu = torch.device("cuda")
    if NEWER:
        operations = ("matmul", "conv", "rnn")
        narrow = any(
            torch._C._get_fp32_precision_getter("cuda", name) == "tf32" for name in operations
        )
    else:
        narrow = backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32
    assert computes_in_few_digits(gpu, {torch.float32}) == narrow
    assert not computes_in_few_digits(gpu, {torch.float64})


def test_low_precision_of_a_cpu_is_asked_of_it(monkeypatch):
    torch.set_float32_matmul_precision("medium")
    for able in (True, False):
        monkeypatch.setattr(torch_private, "_cpu_multiplies_bf16", lambda able=able: able)
        assert computes_in_few_digits(torch.device("cpu"), {torch.float32}) is able


def test_without_the_newer_way(monkeypatch):
    """As on torch 2.7."""
    has = torch_private._has
    monkeypatch.setattr(
        torch_private, "_has", lambda name: "fp32_precision" not in name and has(name)
    )
    torch.set_float32_matmul_precision("medium")
    assert narrow_products("cuda")
    assert not narrow_products("mps")
    backends.cudnn.allow_tf32 = False
    assert narrow_products("cuda")
    torch.set_float32_matmul_precision("highest")
    assert not narrow_products("cuda")

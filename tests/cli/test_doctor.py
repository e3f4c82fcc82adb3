"""The doctor: it says what is missing, what that costs and the remedy, and never fails."""

import importlib
import io
import threading
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # packages import it: before a GPU is feigned, where that fails half-way
from rich.console import Console

from bench import kernel_cases
from fastlr import ops
from fastlr.cli import doctor


def find(name):
    return next(finding for finding in doctor.examine() if finding.name == name)


def text(findings):
    console = Console(file=io.StringIO(), width=80)
    console.print(doctor.as_table(findings))
    return console.file.getvalue()


def let_imports_give(monkeypatch, modules):
    """Let imports of some names give these modules, or raise these errors."""
    real = importlib.import_module

    def import_module(name, *rest):
        module = modules[name] if name in modules else real(name, *rest)
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)


def test_command_exits_0(cli):
    out = cli("doctor").out
    for name in (
        "python",
        "torch",
        "triton",
        "GPU",
        "C++ compiler",
        "nvcc",
        "fastlr._C",
        "timm",
        "opacus",
    ):
        assert name in out


def test_everything_missing_has_a_cost_and_a_remedy(monkeypatch, tmp_path):
    names = ("torchvision", "triton", "fastlr._C", *doctor.OPTIONAL)
    let_imports_give(
        monkeypatch,
        {name: ModuleNotFoundError(f"No module named '{name}'", name=name) for name in names},
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = doctor.examine()
    assert {finding.name for finding in findings if finding.found} == {
        *("python", "torch", "comparisons")
    }
    assert all(
        finding.cost and finding.remedy and finding.detail
        for finding in findings
        if not finding.found
    )
    report = text(findings)
    assert "pip install --no-build-isolation '.[models]'" in report.replace("\n", "")
    assert "estimates run on the CPU" in report


def test_a_broken_package_is_a_finding(monkeypatch):
    let_imports_give(monkeypatch, {"triton": RuntimeError("libcuda is cursed\nsecond line")})
    assert not find("triton").found
    assert find("triton").detail == "does not import: libcuda is cursed"


def test_a_failing_check_is_a_finding(monkeypatch):
    def fail():
        raise OSError("no such tool")

    monkeypatch.setattr(doctor, "_nvcc", fail)
    assert not find("nvcc").found
    assert "no such tool" in find("nvcc").detail


@pytest.mark.parametrize(
    "cuda, gpu, found", [(True, True, True), (False, False, True), (False, True, False)]
)
def test_the_extension_says_what_it_is_for(monkeypatch, cuda, gpu, found):
    native = SimpleNamespace(cuda=cuda, architectures="8.0 9.0" if cuda else "", __file__="_C.so")
    let_imports_give(monkeypatch, {"fastlr._C": native})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    finding = find("fastlr._C")
    assert finding.found == found
    assert ("compute 8.0 9.0" in finding.detail) == cuda
    assert found or "nvcc" in finding.remedy


def test_a_gpu_is_named(monkeypatch):
    class Properties:
        name = "Example GPU"
        total_memory = 2**30 * 80
        major = 9
        minor = 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    assert find("GPU").found
    assert "Example GPU (80 GiB, compute 9.0)" in find("GPU").detail


# -- kernels
# --------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_how_kernels_are_run(monkeypatch, cli):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1 fastlr doctor --kernels" in " ".join(
        cli("doctor --kernels").out.split()
    )


def test_wrong_kernels_are_findings(monkeypatch):
    """The twins in the kernels' place, one of them spoilt, one that does not run."""
    plain = ops.get

    def fail(*_):
        raise RuntimeError("out of shared memory")

    def get(name, backend):
        def kernel(*args):
            if name == "dense_sq_norms":
                raise RuntimeError("PassManager::run failed")
            result = plain(name, "torch")(*args)
            return 1.01 * result if name == "embedding_sq_norms" else result

        return kernel if backend == "triton" else plain(name, backend)

    monkeypatch.setattr(ops, "get", get)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(ops, "images_agree", fail)
    wanted = {
        "channel_sums": "calls as plain torch",
        "fold_weights": "calls as plain torch",
        "embedding_sq_norms": "off by",
        "dense_sq_norms": "PassManager",
        "shape_images_at": "out of shared memory",
    }
    findings = {finding.name.split(",")[0]: finding for finding in doctor.kernels(wanted)}
    assert list(findings) == [name for name in ops.TABLE if name in wanted]
    for name, detail in wanted.items():
        assert detail in findings[name].detail
        assert findings[name].found == (detail == "calls as plain torch")


def test_kernels_are_compared_in_threads_on_a_gpu(monkeypatch):
    """So that they compile side by side; the findings are in the table's order."""
    together = threading.Barrier(2, timeout=30)

    def one(name, device, dtype):
        assert device.type == "cuda"
        together.wait()  # an even number of calls, two at a time at least
        return name, dtype

    monkeypatch.setattr(doctor, "small_calls", one)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    found = doctor.kernels(("channel_sums", "fold_weights"))
    names = [name for name in ops.TABLE if name in ("channel_sums", "fold_weights")]
    assert found == [
        (name, dtype) for name in names for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]


def test_every_kernel_has_cases():
    with_kernel = {name for name in ops.TABLE if "triton" in ops.backends(name)}
    images = {"shape_images", "shape_images_from", "shape_images_at"}
    assert with_kernel == {*kernel_cases.CASES} | images
    assert with_kernel <= {*doctor.model_calls()} | images

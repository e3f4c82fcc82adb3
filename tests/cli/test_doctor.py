"""The doctor: it says what is missing, what that costs and the remedy, and never fails."""

import importlib
import io
from types import SimpleNamespace

import kernel_cases
import pytest
import torch
import torch._dynamo  # packages import it: before a GPU is feigned, where that fails half-way
from rich.console import Console

from fastlr import ops
from fastlr.cli import doctor
from fastlr.ops import dispatch


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
        "fastlr._C",
        "timm",
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
    assert {finding.name for finding in findings if finding.found} == {*("python", "torch")}
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

    monkeypatch.setattr(doctor, "_gpu", fail)
    assert not find("GPU").found
    assert "no such tool" in find("GPU").detail


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
    """Plain torch in the kernels' place; one kernel is spoilt, one does not compile."""
    plain = dispatch.get

    def get(name, backend):
        def kernel(*args, **options):
            if name == "dense_sq_norms":
                raise RuntimeError("PassManager::run failed")
            result = plain(name, "torch")(*args, **options)
            return 1.01 * result if name == "embedding_sq_norms" else result

        return kernel if backend == "triton" else plain(name, backend)

    monkeypatch.setattr(dispatch, "get", get)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    findings = {finding.name: finding for finding in doctor.kernels()}
    assert list(findings) == [
        f"{name}, {dtype}"
        for dtype in ("float32", "bfloat16", "float16")
        for name in ops.with_kernels()
    ]
    wrong = {"dense_sq_norms": "PassManager", "embedding_sq_norms": "is off by 0.01"}
    for name, finding in findings.items():
        detail = wrong.get(name.split(",")[0], "calls as plain torch")
        assert detail in finding.detail, name
        assert finding.found == (detail == "calls as plain torch")
        assert not finding.detail.startswith("0 calls"), name


def test_every_kernel_has_cases():
    images = {"shape_images_from", "shape_images_at"}
    assert set(ops.with_kernels()) == {*kernel_cases.CASES} | images

"""The doctor: it says what is missing, what that costs and the remedy, and never fails."""

from __future__ import annotations

import importlib
import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from fastlr import doctor, kernel_cases, ops
from fastlr.cli import main


def find(name):
    return next(each for each in doctor.examine() if each.name == name)


def text(findings):
    console = Console(file=io.StringIO(), width=80)
    console.print(doctor.as_table(findings))
    return console.file.getvalue()


def test_command_exits_0(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("python", "torch", "triton", "GPU", "C++ compiler", "nvcc", "fastlr._C", "timm", "opacus"):
        assert name in out


def test_torch_is_found_with_its_version():
    assert find("torch").found
    assert torch.__version__.startswith(find("torch").detail.split("+")[0])


def test_everything_missing_has_a_cost_and_a_remedy(monkeypatch, tmp_path):
    real = importlib.import_module

    def absent(name, *rest):
        if name in ("torchvision", "triton", "fastlr._C", *doctor.OPTIONAL):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *rest)

    monkeypatch.setattr(doctor.importlib, "import_module", absent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = doctor.examine()
    missing = [each for each in findings if not each.found]
    assert {each.name for each in findings if each.found} == {"python", "torch"}
    assert all(each.cost and each.remedy and each.detail for each in missing)
    report = text(findings)
    assert "pip install 'fastlr[models]'" in report
    assert "estimates run on the CPU" in report


def test_a_broken_package_is_a_finding(monkeypatch):
    real = importlib.import_module

    def broken(name, *rest):
        if name == "triton":
            raise RuntimeError("libcuda is cursed\nsecond line")
        return real(name, *rest)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    finding = find("triton")
    assert not finding.found
    assert finding.detail == "does not import: libcuda is cursed"


def test_a_failing_check_is_a_finding(monkeypatch):
    def fail():
        raise OSError("no such tool")

    monkeypatch.setattr(doctor, "_nvcc", fail)
    finding = find("nvcc")
    assert not finding.found
    assert "no such tool" in finding.detail


@pytest.mark.parametrize("cuda, gpu, found", [(True, True, True), (False, False, True), (False, True, False)])
def test_the_extension_says_what_it_is_for(monkeypatch, cuda, gpu, found):
    native = SimpleNamespace(cuda=cuda, architectures="8.0 9.0" if cuda else "", __file__="_C.so")
    real = importlib.import_module
    monkeypatch.setattr(doctor.importlib, "import_module", lambda n, *a: native if n == "fastlr._C" else real(n, *a))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    finding = find("fastlr._C")
    assert finding.found == found and ("compute 8.0 9.0" in finding.detail) == cuda
    assert found or "nvcc" in finding.remedy


def test_a_gpu_is_named(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "Example GPU", 2**30 * 80, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    finding = find("GPU")
    assert finding.found
    assert "Example GPU (80 GiB, compute 9.0)" in finding.detail


@pytest.mark.parametrize("findings", [[doctor.Finding("torch", True, "2")]])
def test_nothing_missing(findings):
    assert "Nothing is missing." in text(findings)


# -- kernels -------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_how_kernels_are_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["doctor", "--kernels"]) == 0
    assert "TRITON_INTERPRET=1 fastlr doctor --kernels" in " ".join(capsys.readouterr().out.split())


def test_wrong_kernels_are_findings(monkeypatch):
    """The twins in the kernels' place, one of them spoilt, one that does not run."""
    plain = ops.get

    def get(name, backend):
        def kernel(*args):
            if name == "gate_grad":
                raise RuntimeError("PassManager::run failed")
            result = plain(name, "torch")(*args)
            return 1.01 * result if name == "embedding_sq_norms" else result

        return kernel if backend == "triton" else plain(name, backend)

    monkeypatch.setattr(ops, "get", get)
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = ("channel_sums", "embedding_sq_norms", "gate_grad", "activation_grad")
    found = {finding.name.split(",")[0]: finding for finding in doctor.kernels(names)}
    assert list(found) == [name for name in ops.TABLE if name in names]
    assert found["channel_sums"].found and found["activation_grad"].found
    assert "calls as plain torch" in found["channel_sums"].detail
    assert not found["embedding_sq_norms"].found and "off by" in found["embedding_sq_norms"].detail
    assert not found["gate_grad"].found and "PassManager" in found["gate_grad"].detail


def test_every_kernel_has_cases():
    assert {name for name in ops.TABLE if "triton" in ops.backends(name)} == {
        *kernel_cases.CASES, "shape_images", "shape_images_from", "shape_images_at"
    }  # fmt: skip

"""Every configuration of every kernel compiles for every architecture, fits it, and spills nothing; no GPU needed."""

from __future__ import annotations

from importlib.util import find_spec

import compile_kernels
import pytest

from fastlr import ops

MODULES = compile_kernels.kernel_modules()
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_spills(module, record_property):
    records = compile_kernels.run_module(module)
    if not records:  # functions that kernels share
        assert module not in {backends.get("triton") for backends in ops.TABLE.values()}, "no compile_cases()"
        return
    assert {record["arch"] for record in records} == {80, 90, 100}
    assert all(record["registers"] > 0 for record in records)
    names = [(record["case"], record["arch"]) for record in records]
    assert len(set(names)) == len(names), "cases of one name"
    for record in records:
        record_property(f"{record['case']}-sm{record['arch']}", f"{record['registers']} registers")
    assert compile_kernels.problems(records) == []
    if module.endswith(".shape_images"):
        assert max(record["registers"] for record in records) <= 96


def test_every_kernel_of_the_table_is_compiled():
    assert {backends["triton"] for backends in ops.TABLE.values() if "triton" in backends} <= set(MODULES)


def test_a_spill_would_be_seen(tmp_path, monkeypatch):
    """Force one: a kernel module of its own, with too few registers."""
    (tmp_path / "spilling.py").write_text(
        "from fastlr.kernels.shape_images import compile_cases as cases\n\n\n"
        "def compile_cases():\n"
        '    return [(*case, {"maxnreg": 24}) for case in cases() if case[0] == "paint[fp32]"]\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    records = compile_kernels.run_module("spilling", (90,))
    assert len(records) == 1
    assert records[0]["spills"] > 0
    assert len(compile_kernels.problems(records)) == 1


def test_what_does_not_fit_would_be_seen():
    fits = {
        "case": "a",
        "arch": 80,
        "warps": 8,
        "registers": 255,
        "shared": 163 << 10,
        "stack": 0,
        "local": 0,
        "spills": 0,
    }
    assert compile_kernels.problems([fits]) == []
    assert len(compile_kernels.problems([{**fits, "shared": (163 << 10) + 1}])) == 1
    assert len(compile_kernels.problems([{**fits, "warps": 16}])) == 1
    assert compile_kernels.problems([{**fits, "arch": 90, "shared": 227 << 10}]) == []


def test_table_is_markdown():
    record = {"case": "a[fp32]", "warps": 4, "registers": 40, "shared": 512, "spills": 0}
    found = {"fastlr.kernels.a": [{**record, "arch": arch} for arch in (80, 90)]}
    assert "| a[fp32] | 4 | 40 / 512 / 0 | 40 / 512 / 0 |" in compile_kernels.table(found).splitlines()

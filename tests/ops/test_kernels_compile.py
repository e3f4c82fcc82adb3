"""Every kernel configuration compiles for every architecture, fits it and spills nothing; no GPU.

Of each module the one that takes most registers, 7x7 apart, is compiled for one architecture, all
for each of them in the long tests.
"""

from pytest import importorskip, mark

from bench import compile_kernels
from fastlr import ops

triton = importorskip("triton")

MODULES = compile_kernels.kernel_modules()
OF_OPS = {op.kernel for op in ops.TABLE.values() if op.kernel is not None}


def require_no_problem(module, records):
    """Require no problem, but allow spills of an older Triton: registers are its own affair."""
    assert records or module not in OF_OPS, "no variants"
    assert len({record["case"] for record in records}) == len(records), "cases of one name"
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        records = [{**record, "local": 0, "stack": 0, "spills": 0} for record in records]
    assert compile_kernels.problems(records) == []
    limit = 96 if module == "shape_images" else 255
    assert all(0 < record["registers"] <= limit for record in records)


@mark.parametrize("module", MODULES)
def test_the_largest_kernel_compiles_without_spills(module):
    cases = compile_kernels.largest_case(module)
    require_no_problem(module, [compile_kernels.compile_case(case, 90) for case in cases])


@mark.long
@mark.parametrize("architecture", compile_kernels.ARCHITECTURES)
@mark.parametrize("module", MODULES)
def test_kernels_compile_without_spills(module, architecture, record_property):
    records = compile_kernels.run_module(module, (architecture,))
    for record in records:
        record_property(record["case"], f"{record['registers']} registers")
    require_no_problem(module, records)


def test_every_kernel_of_the_table_is_compiled():
    assert OF_OPS <= set(MODULES)


def test_a_spill_would_be_seen():
    """Force one with too few registers."""
    from bench.kernel_variants import VARIANTS

    (case,) = (case for case in VARIANTS["shape_images"]() if case[0] == "paint[fp32]")
    record = compile_kernels.compile_case(case, 90, maxnreg=24)
    assert record["spills"] > 0
    assert len(compile_kernels.problems([record])) == 1


def test_what_does_not_fit_would_be_seen():
    fits = {"case": "a", "arch": 80, "warps": 8, "registers": 255, "shared": 163 << 10}
    fits |= dict.fromkeys(("stack", "local", "spills"), 0)
    assert compile_kernels.problems([fits]) == []
    assert len(compile_kernels.problems([{**fits, "shared": (163 << 10) + 1}])) == 1
    assert len(compile_kernels.problems([{**fits, "warps": 16}])) == 1
    assert compile_kernels.problems([{**fits, "arch": 90, "shared": 227 << 10}]) == []


def table_of(registers, architectures=compile_kernels.ARCHITECTURES, spills=0):
    record = {
        "case": "a[fp32]",
        "warps": 4,
        "registers": registers,
        "shared": 512,
        "spills": spills,
    }
    return compile_kernels.table({"module": [{**record, "arch": arch} for arch in architectures]})


def test_a_table_is_read_back_and_compared_with_an_earlier_one():
    before, after = table_of(40), table_of(64, spills=8)
    assert list(compile_kernels.rows(before)) == [("module", "a[fp32]", 4, 3 * [[40, 512, 0, 48]])]
    line = "| module | 40 / 0 / 48 / 48 | 64 / 8 / 32 / 32 |"
    for record in (before, before.replace(" / 48", "")):  # once there were no resident warps in it
        assert line in compile_kernels.comparison(record, after).splitlines()
    assert "| module |  | 64 / 8 / 32 / 32 |" in compile_kernels.comparison("", after).splitlines()


@mark.parametrize(
    ("arch", "warps", "registers", "shared", "resident"),
    [
        (
            90,
            4,
            32,
            0,
            64,
            # 1,024 registers a warp: 16 warps in each quarter of a multiprocessor, the most.
        ),
        (90, 4, 33, 0, 48),  # 1,056, given as 1,280: 12 warps in each quarter
        (90, 4, 168, 0, 12),  # 5,376: 3 in each
        (90, 8, 168, 0, 8),  # of these 12 warps one program of 8
        (90, 1, 32, 0, 32),  # as many programs as there may be
        (80, 4, 32, 81 << 10, 8),  # with the reserved 1 KiB 82 KiB: two of 164 KiB
        (80, 4, 32, (81 << 10) + 1, 4),  # 82 KiB and 128 bytes
        (80, 4, 32, (163 << 10) + 1, 0),
        (100, 4, 32, 227 << 10, 4),
    ],
)
def test_occupancy(arch, warps, registers, shared, resident):
    assert compile_kernels.resident_warps(arch, warps, registers, shared) == resident

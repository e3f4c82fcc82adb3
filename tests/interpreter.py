"""Import this before fastlr's kernels where TRITON_INTERPRET=1: see `fastlr.doctor.repair_interpreter`."""

import triton.runtime.interpreter as interpreter

from fastlr.doctor import repair_interpreter

repair_interpreter()


def note_claims() -> list[str]:
    """From now on, note what a kernel tells the compiler to be a multiple of a number and is not.

    `multiple` rounds a size or stride down to what is claimed, ``tl.multiple_of`` does nothing here and all on a GPU.
    """
    import importlib
    import sys
    from pathlib import Path

    false: list[str] = []

    def note(value, divisor, number):
        if value % int(divisor):
            code = sys._getframe(2).f_code
            false.append(f"{code.co_name}: {value} is no multiple of {int(divisor)} (claim in line {number})")

    def multiple(n, ALIGN):
        note(int(n.handle.data.item()), ALIGN, sys._getframe(1).f_lineno)
        return n // ALIGN * ALIGN

    def multiple_of(pointer, values, name):
        if name == "tt.divisibility":
            note(int(pointer.handle.data.item()), values, sys._getframe(1).f_lineno)
        return pointer

    interpreter._set_attr = multiple_of
    for path in (Path(__file__).parent.parent / "kernels").glob("[!_]*.py"):
        module = importlib.import_module(f"fastlr.kernels.{path.stem}")
        if hasattr(module, "multiple"):
            module.multiple = multiple
    return false

"""Kernels in Triton's interpreter, in processes of their own.

TRITON_INTERPRET is read when Triton is imported.
"""

import atexit
import functools
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

LANGUAGES = ("triton.language", "triton.language.core")
TESTS = Path(__file__).parents[1]
SERVER = """
import json
import os
import sys
import traceback
import torch
torch.set_num_threads(1)
# New memory is NaN: what a kernel does not write would show.
torch.use_deterministic_algorithms(True)
assert torch.zeros(1).new_empty(3).isnan().all() and torch.empty_like(torch.zeros(3)).isnan().all()
import interpreter
from fastlr.kernels.interpreter import repair_interpreter
repair_interpreter()
interpreter.hasten()
claims = interpreter.note_claims()
import fastlr
from fastlr import ops

for line in sys.stdin:
    process = os.fork()
    if process == 0:
        os.dup2(2, 1)
        script, folder = json.loads(line)
        code = 1
        try:
            given = torch.load(f"{folder}/given.pt", weights_only=False)
            exec(script)
            assert not claims, claims
            torch.save(results, f"{folder}/results.pt")
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    print(os.waitpid(process, 0)[1], flush=True)
"""


@functools.cache
def server():
    """A process that has imported what scripts need, and runs each in a copy of itself."""
    path = os.pathsep.join(
        [str(TESTS / "helpers"), str(TESTS / "ops"), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **ends)
    atexit.register(process.communicate)
    return process


def interpreted(script, folder, given=None):
    """Return the ``results`` of a script that runs kernels in the interpreter.

    The test is skipped where there is no Triton.

    The script has ``torch``, ``fastlr``, ``ops`` and what is ``given``. It fails where a kernel
    tells the compiler what does not hold: on a GPU that goes wrong silently (see `note_claims`).
    """
    pytest.importorskip("triton")
    torch.save(given, folder / "given.pt")
    print(json.dumps([script, str(folder)]), file=server().stdin, flush=True)
    assert server().stdout.readline() == "0\n", "the script has failed: see stderr"
    return torch.load(folder / "results.pt", weights_only=False)


def params(cases, slow):
    """Return the names of cases as parameters of tests, those that match ``slow`` as long ones."""
    names = {case if isinstance(case, str) else "-".join(case): case for case in cases}
    return [
        pytest.param(c, id=n, marks=[pytest.mark.long] * bool(re.search(slow, n)))
        for n, c in names.items()
    ]


def chosen(request, cases, slow):
    """The cases that are not slow, or all where long tests were asked for."""
    asked = any(item.get_closest_marker("long") for item in request.session.items)
    return {p.values[0]: cases[p.values[0]] for p in params(cases, slow) if asked or not p.marks}


def hasten():
    """Have the interpreter do once what it does in every call, more than half of its time.

    It patches the language for every function, lists all dtypes for one, works out types of tuples
    that nobody asks for, and makes the shapes of every tensor anew.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules, patched = set(), set()

    def once(function):
        names = function.__globals__
        if id(names) not in modules:
            modules.add(id(names))
            languages = frozenset(
                id(value) for value in names.values() if getattr(value, "__name__", "") in LANGUAGES
            )
            if languages not in patched:
                patched.add(languages)
                patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once
    # Computed for each sum of integers, to be asserted in debugging alone.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    numbers = functools.cache(interpreter._get_np_dtype)
    pointers = np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda kind: (
        pointers if kind.scalar.is_ptr() else numbers(kind.scalar)
    )
    core = importlib.import_module("triton.language.core")

    def init(self, args, type=None):
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def of_name(self, name):
        if name != "type":
            return self.values[self.type.fields.index(name)]
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = init, of_name
    unwrap, make_block = core._unwrap_if_constexpr, core.block_type.__init__
    semantic = importlib.import_module("triton.language.semantic")
    blocks, shapes = {}, {}

    def unwrapped(value):
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, core.tuple)) else value

    def block(self, element_ty, shape):
        key = element_ty.name, *(shape.values if type(shape) is core.tuple else unwrapped(shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            sizes = core.tuple(map(core.constexpr, self.shape))
            of_tensors = core.constexpr(math.prod(self.shape)), sizes
            self.shape, self.of_tensors = shapes.setdefault(key[1:], (self.shape, of_tensors))
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    of_scalars = core.constexpr(1), core.tuple(())

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    core._unwrap_if_constexpr, core.block_type.__init__ = unwrapped, block
    core.tensor.__init__ = tensor
    if not hasattr(semantic, "TritonSemantic"):  # Triton 3.3
        return
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_unless_alike(self, lhs, rhs):
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_unless_alike


def note_claims():
    """From now on, note what a kernel tells the compiler to be a multiple of a number and is not.

    `multiple` rounds a size or stride down to what is claimed, ``tl.multiple_of`` does nothing here
    and all on a GPU.
    """
    from triton.runtime import interpreter

    false = []

    def note(value, divisor, number):
        if value % int(divisor):
            code = sys._getframe(2).f_code
            false.append(
                f"{code.co_name}: {value} is no multiple of {int(divisor)} (claim in line {number})"
            )

    def multiple(n, ALIGN):
        note(int(n.handle.data.item()), ALIGN, sys._getframe(1).f_lineno)
        return n // ALIGN * ALIGN

    def multiple_of(pointer, values, name):
        if name == "tt.divisibility":
            note(int(pointer.handle.data.item()), values, sys._getframe(1).f_lineno)
        return pointer

    interpreter._set_attr = multiple_of
    for path in (TESTS.parent / "kernels").glob("[!_]*.py"):
        module = importlib.import_module(f"fastlr.kernels.{path.stem}")
        if hasattr(module, "multiple"):
            module.multiple = multiple
    return false

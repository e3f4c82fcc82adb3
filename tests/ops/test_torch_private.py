"""Private names of PyTorch are used in one module, which says so where this torch lacks one."""

import ast
from pathlib import Path

import pytest
import torch

import fastlr
from fastlr.errors import FastlrError
from fastlr.ops import torch_private

HOME = Path(fastlr.__file__).parent
DOCUMENTED = ("_foreach_",)


def private_names(path):
    """Return the names of torch with a part that begins with an underscore, as a file has them.

    Those that it imports and those that it reads are looked at.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            first, *rest = name.split(".")
            if first in ("torch", "Tensor") and any(
                p.startswith("_") and not p.startswith(("__", *DOCUMENTED)) for p in rest
            ):
                found.append(f"{path.name}: {name}")
    return found


def test_private_names_are_in_one_module():
    files = [path for path in HOME.rglob("*.py") if path.name != "torch_private.py"]
    assert len(files) > 100
    assert [name for path in files for name in private_names(path)] == []


def test_a_name_that_is_gone_is_told():
    with pytest.raises(
        FastlrError,
        match=rf"^torch {torch.__version__.split('+')[0]}.* has no "
        r"torch\._C\.NoSuchName.*pip install torch==",
    ):
        torch_private._get("_C.NoSuchName")


def test_every_name_is_there():
    """Those that nothing else here calls without a GPU or another version of torch."""
    torch_private.compile_errors()
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    assert torch.version.cuda is None or any(torch_private._has(f"_C.{name}") for name in names)


@pytest.mark.parametrize("version", ["this", "2.7"])
def test_checkpointed_parts_are_seen(version, monkeypatch):
    if version == "2.7":
        monkeypatch.setattr(torch_private, "_has", lambda name: False)
    assert not torch_private.saved_tensors_are_hooked()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_private.saved_tensors_are_hooked()
        assert torch_private.saved_tensors_are_hooked()
    assert not torch_private.saved_tensors_are_hooked()
    with torch.autograd.graph.disable_saved_tensors_hooks("as a user says"):
        assert not torch_private.saved_tensors_are_hooked()

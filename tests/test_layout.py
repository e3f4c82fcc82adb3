"""Rooms of fastlr import in one order, modules in no circles, and ``import fastlr`` stays light."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fastlr

HOME = Path(fastlr.__file__).parent
# A room imports from those before it, and from itself; __init__ is fastlr with its public names.
ORDER = """
errors files ops display distributed ghost inputs estimator metrics models integrations __init__
experiments cli
""".split()
APART = {"__main__", "kernels"}
LIBRARIES = ("pandas", "scipy", "jinja2", "matplotlib", "rich", "typer")
HEAVY = (*LIBRARIES, "torch._dynamo", "torch.distributed.fsdp")  # of torch: seconds


@cache
def modules():
    """Name of each module -> its file."""
    files = [path for path in HOME.rglob("*.py") if path.relative_to(HOME).parts[0] != "kernels"]
    names = [(HOME.name, *path.relative_to(HOME).with_suffix("").parts) for path in files]
    return {
        ".".join(name).removesuffix(".__init__"): path
        for name, path in zip(names, files, strict=True)
    }


@cache
def imports():
    """Return, by module, the modules of fastlr that it imports.

    Imports at its top, in functions and for type checkers count.
    """
    targets = {}
    for name, path in modules().items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} has a relative import"
                full_names = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [full if full in modules() else str(node.module) for full in full_names]
        targets[name] = {target for target in names if target in modules() and target != name}
    return targets


def room(module):
    return module.split(".")[1] if "." in module else "__init__"


def test_the_top_has_these_rooms_only():
    """What a build leaves there aside."""
    names = {
        path.stem
        for path in HOME.iterdir()
        if path.suffix != ".so" and path.name not in ("py.typed", "__pycache__")
    }
    assert names - APART == set(ORDER)


def test_rooms_import_one_way():
    upwards = [
        f"{module} imports {target}"
        for module, targets in imports().items()
        for target in targets
        if room(module) not in APART and room(target) not in ORDER[: ORDER.index(room(module)) + 1]
    ]
    assert not upwards


def test_folders_of_ghost_import_one_way():
    """The order is that of docs/architecture.md; the top has nine names at most."""
    order = ["model", "graph", "norms", "fusion", "trust", "engine", "report", "api", "__init__"]
    assert {path.stem for path in (HOME / "ghost").iterdir()} - {"__pycache__"} == set(order)

    def place(module):
        return order.index((*module.split("."), "__init__")[2])

    ghost = [name for name in modules() if room(name) == "ghost"]
    upwards = [
        f"{module} imports {target}"
        for module in ghost
        for target in imports()[module]
        if room(target) == "ghost" and place(target) > place(module)
    ]
    assert len(ghost) > 40
    assert not upwards


def test_modules_import_in_no_circle():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_import_stays_light():
    """An estimate needs no library of the experiments, the tables or the command line either."""
    script = f"""
import sys, torch, fastlr
fastlr.estimate(torch.nn.Linear(4, 2), fastlr.TensorInputs(torch.ones(8, 4)), 8)
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=HOME.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

"""Run the Python blocks of CONTRIBUTING.md in this process.

Those that begin with ``# in FILE`` run as a part of that file.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType


def module_of(file: str) -> str:
    """Name of the module that a file is, such as fastlr.kernels.gate for kernels/gate.py."""
    return re.sub("^kernels", "fastlr.kernels", file.removesuffix(".py").replace("/", "."))


def add_to_module(file: str, text: str, folder: Path) -> None:
    """Execute the text in the module's namespace; a module that is not there is made of it."""
    name = module_of(file)
    path = folder / file.replace("/", "-")
    path.write_text(text)
    package = name.rpartition(".")[0]
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a new folder
        is_there = False
        sys.modules[package] = ModuleType(package)
    if is_there:
        exec(compile(text, str(path), "exec"), vars(importlib.import_module(name)))
        return
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def enter_op(line: str) -> None:
    """Enter a line of _OPS in the tables that are made of it."""
    from fastlr.ops import dispatch

    ((name, (*modules, samples)),) = eval(f"{{{line}}}").items()
    kinds = zip(("reference", "torch", "triton"), modules, strict=True)
    dispatch.TABLE[name] = {backend: f"fastlr.{module}" for backend, module in kinds}
    dispatch.SAMPLES[name] = samples


def main(page: Path, folder: Path) -> None:
    from fastlr.cli.doctor import repair_interpreter

    repair_interpreter()  # before any kernel

    for text in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        assert text.count("\n") < 60, text
        place = re.match(r"# in (\S+\.py)(, in _OPS)?", text)
        if place is None:
            exec(compile(text, str(page), "exec"), {"__name__": "example"})
        elif place[2]:
            enter_op(text.partition("\n")[2])
        else:
            add_to_module(place[1], text, folder)
        print(text.partition("\n")[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Follow docs/extending.md in a copy of the package, and run its examples on the copy.

Blocks that begin with ``# in FILE`` are added to that file, those with ``# in FILE, in TABLE`` to
the table there; the others are examples, whose runs are of two epochs a task here.
"""

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFINITIONS = "tests/helpers/definitions"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# in (?:fastlr/)?(\S+\.py)(, in TABLE)?.*\n")


def copy_package(folder):
    """Copy the package with the kernels in it, as they are installed, and the definitions."""
    home = folder / "fastlr"
    leave = shutil.ignore_patterns("__pycache__", "kernels")
    shutil.copytree(ROOT / "fastlr", home, ignore=leave)
    shutil.copytree(ROOT / "kernels", home / "kernels", ignore=leave)
    shutil.copytree(ROOT / DEFINITIONS, home / DEFINITIONS, ignore=leave)
    return home


def add(path, text):
    """Add text to the end of a file, which may be new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n\n{text}")


def enter_op(path, line):
    """Put a line first into the table of ops."""
    text = path.read_text()
    start = re.search(r"^TABLE = \{\n", text, re.MULTILINE)
    path.write_text(text[: start.end()] + line + text[start.end() :])


def follow(page, home):
    """Change the package as the page says; return its examples."""
    examples = []
    for text in PYTHON.findall(page.read_text()):
        assert text.count("\n") < 60, text
        place = PLACE.match(text)
        if place is None:
            examples.append(text)
        elif place[2]:
            enter_op(home / place[1], text[place.end() :])
        else:
            add(home / place[1], text[place.end() :])
    return examples


def main(rank, page, folder):
    """Follow the page and run its examples, in a process of their own (`ranks.run_ranks`)."""
    os.chdir(folder)
    os.environ["TRITON_INTERPRET"] = "1"
    home = copy_package(folder)
    examples = follow(page, home)
    # To be imported anew, but for the library that Triton can have once only.
    for name in [*sys.modules]:
        if re.match(r"(fastlr|definitions|triton(?!\._C))\b", name):
            del sys.modules[name]
    sys.path[:0] = [str(folder), str((home / DEFINITIONS).parent)]

    from runs_here import messages_here

    import fastlr
    from fastlr.experiments.runs import processes
    from fastlr.kernels.interpreter import repair_interpreter

    processes.job_messages = messages_here
    assert fastlr.__file__ == str(home / "__init__.py")
    repair_interpreter()  # before any kernel
    for text in examples:
        text = text.replace('"tasks=3"', '"tasks=3", "--set", "epochs=2"')
        exec(compile(text, str(page), "exec"), {"__name__": "example"})

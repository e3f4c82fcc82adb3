"""Ctrl-C and SIGTERM end the command line with 130 and one line, imports included."""

import subprocess
import sys

import pytest

INTERRUPTED_AT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == wanted:
            os.kill(os.getpid(), getattr(signal, number))

# It may be ignored, and inherited so, where the tests run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
wanted, number = sys.argv.pop(1), sys.argv.pop(1)
sys.meta_path.insert(0, Finder())
runpy.run_module("fastlr", run_name="__main__", alter_sys=True)
"""
MODULES = ["typer", "torch", "torch.nn.functional", "fastlr.models", "fastlr.ghost.engine"]


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "module", [*MODULES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in MODULES[2:])]
)
def test_an_import_is_interrupted(module, number):
    command = [sys.executable, "-c", INTERRUPTED_AT, module, number, "estimate", "squeezenet1_1"]
    done = subprocess.run([*command, "-n", "2"], capture_output=True, text=True, timeout=300)
    assert done.stderr == "interrupted\n"
    assert done.returncode == 130

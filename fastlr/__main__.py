"""``python -m fastlr``: the command line."""

from __future__ import annotations

import os
import sys

from fastlr.cli.interrupts import guard_imports


def run() -> int:
    """Run the command line and return the exit code."""
    guard_imports()
    from fastlr.cli.main import main

    code = main()
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        # NCCL would wait for the other processes, which torchrun ends only after this one.
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(run())

"""``python -m fastlr``: the command line."""

from __future__ import annotations

import os
import signal
import sys


def run() -> int:
    """Run the command line and return the exit code."""
    # Ranks keep the default: one that waits for others within torch would not end by an exception.
    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from fastlr.cli.main import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    code = main()
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        # NCCL would wait for the other processes, which torchrun ends only after this one.
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(run())

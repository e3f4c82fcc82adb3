"""Compare the golden runs of two commits to the bit: ``python -m tests.golden OLD NEW``.

Each of OLD and NEW is a commit, or ``.`` for the working tree. Every run of
`tests.golden.runs.RUNS` is made by both, on this machine and one thread. The command lists every
number that differs, and ends with exit code 1 if there is one.

``python -m tests.golden --record`` writes the first two records of each run of the working tree
into this folder. `test_golden` compares later runs with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.golden.runs import GOLDEN_RECORDS, RUNS, differences, read_records

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="OLD and NEW")
    parser.add_argument("--record", action="store_true", help="write the golden records")
    given = parser.parse_args()
    if len(given.commits) != (0 if given.record else 2):
        parser.error("give two commits, OLD and NEW, or --record")
    with tempfile.TemporaryDirectory() as temporary:
        if given.record:
            record(Path(temporary))
            return
        found = compare(*given.commits, Path(temporary))
    print("\n".join(found) or "golden runs unchanged")
    sys.exit(bool(found))


def record(folder: Path) -> None:
    """Write the first two records of each run of the working tree beside this file."""
    make_runs(ROOT, folder)
    for name in RUNS:
        lines = map(json.dumps, read_records(folder / name / "records.jsonl")[:GOLDEN_RECORDS])
        (Path(__file__).parent / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def compare(old: str, new: str, folder: Path) -> list[str]:
    """Make the runs of two commits in a folder, and return the list of differences."""
    for side, commit in (("old", old), ("new", new)):
        if commit == ".":
            make_runs(ROOT, folder / side)
            continue
        tree = folder / f"tree-{side}"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            if not (tree / "fastlr" / "kernels").exists():  # in commits before the link
                (tree / "fastlr" / "kernels").symlink_to(tree / "kernels")
            make_runs(tree, folder / side)
        finally:
            git("worktree", "remove", "--force", str(tree))
    found = []
    for name in RUNS:
        before, now = (
            read_records(folder / side / name / "records.jsonl") for side in ("old", "new")
        )
        found += differences(before, now, where=name)
    return found


def git(*arguments: str) -> None:
    """Run git in this repository; exit if it fails, as it has printed the reason."""
    if subprocess.run(["git", *arguments], cwd=ROOT).returncode:
        sys.exit(2)


def make_runs(tree: Path, folder: Path) -> None:
    """Make the runs in a folder with the code of a source tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    for name, (what, length, _) in RUNS.items():
        arguments = f"{what} {length}"
        print(f"{tree.name}: {arguments}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "fastlr", *arguments.split(), "--out", str(folder / name)]
        output = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if output.returncode:
            sys.exit(f"{' '.join(command)}\n{output.stdout}")


if __name__ == "__main__":
    main()

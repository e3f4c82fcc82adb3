"""What a change of structure must keep: estimates to the bit, records and reports to the digit.

``python -m bench.frozen make FOLDER`` computes all of it with the code at hand:

- ``estimates.json``: the bench networks in float32, float64 and under bfloat16 autocast, every
  float in hexadecimal.
- ``runs/``: a short run of every driver, and of the study of causes (2 seeds, 40 tasks).
- ``reports/``: the report of each of these runs, and of the committed records of continual_tiny.

``python -m bench.frozen make NEW --reports-of OLD`` reports the runs of OLD instead of its own, so
that times, which no two runs share, are the same in both. ``python -m bench.frozen compare OLD
NEW`` lists every difference and ends with 1 if there is one. Bits depend on the processor and on
torch: both folders are to be made on one machine.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastlr
from bench import cases
from fastlr.display.record import machine
from fastlr.experiments.runs.integrity import without_digest

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 4
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
NETWORKS = (cases.MAIN, "resnet18", "patchtst", "gpt2", "lstm")
PREDICTIVES = {"patchtst": fastlr.Gaussian(), "lstm": fastlr.Gaussian()}

# Each run is made by one command; records of the runs of a study lie one folder deeper.
RUNS = {
    "continual": ["fastlr", "continual", "demo", "--tasks", "12"],
    "transfer": ["fastlr", "transfer", "demo"],
    "memorize-vision": [
        "fastlr",
        "memorize",
        "vision-small",
        "--set",
        "epochs=12",
        "--set",
        "n=256",
    ],
    "memorize-series": ["fastlr", "memorize", "series-small", "--set", "epochs=100"],
}
STUDY = ["bench.causes", "--problems", "random-labels", "--seeds", "2", "--tasks", "40"]
STUDIES = {"causes": STUDY}
COMMITTED = {"continual-tiny": ROOT / "bench/results/cpu/continual_tiny"}
TEXTS = (".md", ".csv", ".json")

# Fields of records and settings that no two runs share.
OF_A_RUN = {
    "at",
    "cached",
    "command",
    "commit",
    "date",
    "ended",
    "fastlr",
    "host",
    "machine",
    "out",
    "path",
    "seconds",
    "started",
    "time",
    "torch",
    "versions",
    "when",
}


def main() -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="compute everything into a new folder")
    making.add_argument("folder", type=Path)
    making.add_argument(
        "--reports-of", type=Path, help="an earlier folder, whose runs are reported"
    )
    making.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="these alone"
    )
    comparing = commands.add_parser("compare", help="list the differences of two folders")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "make":
        given.folder.mkdir(parents=True, exist_ok=True)
        for part in given.parts:
            PARTS[part](given.folder, (given.reports_of or given.folder).resolve())
        return
    differences = list(compared(given.old, given.new))
    print("\n".join(differences) or "no difference")
    sys.exit(bool(differences))


# --------------------------------------------------------------------------------------------------
# making
def make_estimates(folder: Path, _reported: Path) -> None:
    """Write the estimates of all networks in all precisions, and the machine that made them."""
    torch.set_num_threads(1)
    table = {}
    for name in NETWORKS:
        for precision in PRECISIONS:
            if name == "lstm" and precision == "bfloat16" and not torch_has_lstms_in_bfloat16():
                continue
            table[f"{name} {precision}"] = estimate_in_hexadecimal(name, precision)
            print(name, precision, flush=True)
    made_by = {
        "machine": machine(torch.device("cpu")),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    (folder / "estimates.json").write_text(
        json.dumps({"made_by": made_by, **table}, indent=1) + "\n"
    )


def torch_has_lstms_in_bfloat16() -> bool:
    """Return True if an LSTM runs under autocast; on processors without AVX-512 none does."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.zeros(2, 1, 8))
    except RuntimeError:
        return False
    return True


def estimate_in_hexadecimal(name: str, precision: str) -> dict[str, str]:
    """Estimate a network's local redundancy on its own inputs by the first and by a kept plan."""
    case = cases.build(name, SAMPLES)
    if precision == "float64":
        case = cases.as_double(case)
    inputs = fastlr.TensorInputs(case.x)
    options: dict[str, Any] = {"predictive": PREDICTIVES.get(name), "n": len(inputs), **case.kwargs}
    if name == "gpt2":
        options["predictive"] = fastlr.Categorical(dim=-1)
    if precision == "bfloat16":
        options["dtype"] = torch.bfloat16
    first = fastlr.estimate(case.model, inputs, **options)
    again = fastlr.estimate(case.model, inputs, **options)
    return {
        "value": first.value.hex(),
        "stderr": first.stderr.hex(),
        "per_sample": digest(first.per_sample),
        "per_parameter": digest(
            torch.tensor(list(first.per_parameter.values()), dtype=torch.float64)
        ),
        "again": digest(again.per_sample),
        "routes": json.dumps(sorted(set(first.routes.values()))),
    }


def digest(values: Tensor) -> str:
    """Return a hash of the bits of a tensor."""
    return hashlib.sha256(values.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def make_runs(folder: Path, _reported: Path) -> None:
    """Carry out the short runs; of each, keep its settings and records."""
    for name, (module, *arguments) in RUNS.items():
        run([module, *arguments, "--seed", "1", "--out", str(folder / "runs" / name)])
    for name, (module, *arguments) in STUDIES.items():
        run([module, str(folder / "runs" / name), *arguments])
    keep_texts(folder / "runs", (".json", ".jsonl"), {folder.resolve(): "FOLDER"})


def make_reports(folder: Path, reported: Path) -> None:
    """Write the reports of runs in ``reported`` and of committed records, pictures left out."""
    runs = {name: reported / "runs" / name for name in RUNS} | COMMITTED
    for name, path in runs.items():
        run(["fastlr", "report", str(path), "--out", str(folder / "reports" / name)])
    for path in sorted((reported / "runs" / "causes").iterdir()):
        out = folder / "reports" / f"causes-{path.name}"
        run(["bench.causes.report", str(path), "--out", str(out)])
    keep_texts(folder / "reports", TEXTS, {reported: "FOLDER", ROOT: "ROOT"})


def keep_texts(folder: Path, suffixes: tuple[str, ...], names: dict[Path, str]) -> None:
    """Remove all files but texts from a folder, and replace this machine's paths by names in them.

    Texts are the files of the given suffixes. Runs lose the digests of what is changed in them.
    """
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        if path.suffix not in suffixes:
            path.unlink()
            continue
        text = path.read_text()
        for place, name in names.items():
            text = text.replace(str(place), name)
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        path.write_text("\n".join(map(without_digest, lines)))


def run(command: list[str]) -> None:
    """Run ``python -m`` with these arguments, on one thread."""
    print(" ".join(command), flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if output.returncode:
        sys.exit(output.stdout.decode())


PARTS = {"estimates": make_estimates, "runs": make_runs, "reports": make_reports}


# --------------------------------------------------------------------------------------------------
# comparing
def compared(old: Path, new: Path) -> Iterator[str]:
    """List what differs between two folders."""
    estimates = [folder / "estimates.json" for folder in (old, new)]
    missing = [path for path in estimates if not path.exists()]
    yield from (f"{path}: missing" for path in missing)
    if not missing:
        yield from values_that_differ("estimates", *(json.loads(p.read_text()) for p in estimates))
    for path in files(old / "runs"):
        yield from records_that_differ(old / "runs" / path, new / "runs" / path, f"runs/{path}")
    for path in files(old / "reports"):
        yield from texts_that_differ(
            old / "reports" / path, new / "reports" / path, f"reports/{path}"
        )
    for room in ("runs", "reports"):
        for path in sorted(set(files(new / room)) - set(files(old / room))):
            yield f"{room}/{path}: only in the new folder"


def files(folder: Path) -> list[Path]:
    """Return the files below a folder, relative to it."""
    return [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def records_that_differ(old: Path, new: Path, name: str) -> Iterator[str]:
    """Compare JSON files or lines of JSON, without what no two runs share."""
    if not new.exists():
        yield f"{name}: missing"
        return
    lines = []
    for path in (old, new):
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        lines.append([json.loads(text) for text in texts])
    if len(lines[0]) != len(lines[1]):
        yield f"{name}: {len(lines[0])} records, now {len(lines[1])}"
    for number, (before, after) in enumerate(zip(*lines, strict=False)):
        yield from values_that_differ(f"{name}:{number}", before, after)


def values_that_differ(where: str, old: Any, new: Any) -> Iterator[str]:
    """Compare two values of JSON, all the way down."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - OF_A_RUN):
            if key in old and key in new:
                yield from values_that_differ(f"{where}.{key}", old[key], new[key])
            else:
                yield f"{where}.{key}: only in the {'old' if key in old else 'new'} one"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from values_that_differ(f"{where}[{place}]", before, after)
    elif old != new and not (old != old and new != new):
        yield f"{where}: {old!r}, now {new!r}"


def texts_that_differ(old: Path, new: Path, name: str) -> Iterator[str]:
    """Compare two texts line by line."""
    if not new.exists():
        yield f"{name}: missing"
        return
    lines = [path.read_text().splitlines() for path in (old, new)]
    for line in difflib.unified_diff(*lines, lineterm="", n=0):
        if line[:3] not in ("---", "+++") and line[:2] != "@@":
            yield f"{name}: {line}"


def texts_that_differ_beyond_rounding(old: Path, new: Path, name: str) -> Iterator[str]:
    """Compare two texts of which another processor may have made one.

    They are alike but for the last digits of numbers, and all that is no number is the same.
    """
    if not new.exists():
        yield f"{name}: missing"
        return
    lines = [path.read_text().splitlines() for path in (old, new)]
    if len(lines[0]) != len(lines[1]):
        yield f"{name}: {len(lines[0])} lines, now {len(lines[1])}"
        return
    for before, now in zip(*lines, strict=True):
        if before != now and not _alike_but_for_rounding(before, now):
            yield f"{name}: {before!r}, now {now!r}"


SIGN_OF_ZERO = re.compile(r"-(?=0(?:\.0+)?(?![\d.]))")  # of what rounds to zero
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")
ROUNDING = 1e-5  # of a number, that another processor's sums may differ by


def _alike_but_for_rounding(before: str, now: str) -> bool:
    before, now = (SIGN_OF_ZERO.sub("", text) for text in (before, now))
    if NUMBER.sub("#", before) != NUMBER.sub("#", now):
        return False
    pairs = zip(NUMBER.findall(before), NUMBER.findall(now), strict=True)
    return all(_is_close(a, b) for a, b in pairs)


def _is_close(a: str, b: str) -> bool:
    """Return True if two numbers as printed differ by rounding: one unit of the last digit."""
    was, is_now = (float(text.replace(",", "")) for text in (a, b))
    mantissa, _, exponent = a.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    last_digit = 10.0 ** (int(exponent or 0) - digits)
    return abs(was - is_now) <= max(1.01 * last_digit, ROUNDING * abs(was))


if __name__ == "__main__":
    main()

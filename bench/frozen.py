"""Estimates and tables of reports that a change of structure must keep.

``python -m bench.frozen FOLDER`` computes into a new folder, with the code at hand:

- ``estimates.json``: local redundancy of the bench networks in float32, float64 and under bfloat16
  autocast, every float in hexadecimal.
- ``reports/``: the tables (CSV) of the reports of the committed runs: those in
  ``bench/results/cpu/frozen/runs`` and ``bench/results/cpu/continual_tiny``.

It then lists every difference from the committed ``bench/results/cpu/frozen``, and ends with exit
code 1 if there is one. Of the tables, numbers alone are compared, up to their last digit. Bits of
estimates depend on the processor and on torch. Training itself is held by ``tests/golden``.
"""

from __future__ import annotations

import argparse
import csv
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

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "bench/results/cpu/frozen"
SAMPLES = 4
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
NETWORKS = (cases.MAIN, "resnet18", "patchtst", "gpt2", "lstm")
PREDICTIVES = {"patchtst": fastlr.Gaussian(), "lstm": fastlr.Gaussian()}
RUNS = {
    "continual": FROZEN / "runs/continual",
    "transfer": FROZEN / "runs/transfer",
    "memorize-vision": FROZEN / "runs/memorize-vision",
    "memorize-series": FROZEN / "runs/memorize-series",
    "continual-tiny": ROOT / "bench/results/cpu/continual_tiny",
}


def main() -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)
    make_estimates(folder)
    make_reports(folder)
    estimates = (json.loads((path / "estimates.json").read_text()) for path in (FROZEN, folder))
    old, new = estimates
    if old.pop("made_by") != new.pop("made_by"):
        print("made on another machine or by another torch: bits may differ")
    differences = [*estimates_that_differ(old, new), *tables_that_differ(FROZEN, folder)]
    print("\n".join(differences) or "no difference")
    sys.exit(bool(differences))


# --------------------------------------------------------------------------------------------------
# making
def make_estimates(folder: Path) -> None:
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


def make_reports(folder: Path) -> None:
    """Write the tables of the reports of the committed runs."""
    for name, path in RUNS.items():
        report = folder / "reports" / name
        command = [sys.executable, "-m", "fastlr", "report", str(path), "--out", str(report)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if output.returncode:
            sys.exit(output.stderr)
        for file in report.iterdir():
            if file.suffix != ".csv":
                file.unlink()


# --------------------------------------------------------------------------------------------------
# comparing
def estimates_that_differ(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """List the entries of ``estimates.json`` that differ."""
    for name in sorted({*old, *new}):
        before, now = old.get(name, {}), new.get(name, {})
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                yield f"{name}.{key}: {before.get(key)}, now {now.get(key)}"


def tables_that_differ(old: Path, new: Path) -> Iterator[str]:
    """List the rows of tables below ``reports/`` whose numbers differ beyond their last digit."""
    for path in sorted((old / "reports").rglob("*.csv")):
        name = path.relative_to(old)
        if not (new / name).exists():
            yield f"{name}: missing"
            continue
        before, now = (_numbers(folder / name) for folder in (old, new))
        if len(before) != len(now):
            yield f"{name}: {len(before)} rows, now {len(now)}"
            continue
        for number, rows in enumerate(zip(before, now), 1):
            if not _alike(*rows):
                yield f"{name}, row {number}: {' '.join(rows[0])}, now {' '.join(rows[1])}"

    for path in sorted((new / "reports").rglob("*.csv")):
        if not (old / path.relative_to(new)).exists():
            yield f"{path.relative_to(new)}: only in the new folder"


NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")
ROUNDING = 1e-5  # relative difference that another processor's sums may cause


def _numbers(path: Path) -> list[list[str]]:
    """Return the numbers in each row of a CSV file, without its header."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [NUMBER.findall("  ".join(row)) for row in rows]


def _alike(before: list[str], now: list[str]) -> bool:
    return len(before) == len(now) and all(map(_is_close, before, now))


def _is_close(a: str, b: str) -> bool:
    """Return True if two numbers as printed differ by rounding: one unit of the last digit."""
    was, is_now = (float(text.replace(",", "")) for text in (a, b))
    mantissa, _, exponent = a.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    last_digit = 10.0 ** (int(exponent or 0) - digits)
    return abs(was - is_now) <= max(1.01 * last_digit, ROUNDING * abs(was))


if __name__ == "__main__":
    main()

"""How often the intervals of the prediction table hold what they are intervals of: a simulation.

Usage: ``python -m bench.causes.coverage [--studies 400]``.

A made up study has ten runs of 200 tasks. Accuracy is a level that differs from run to run plus
noise of which a part carries over from task to task; a measure, read after every fourth task, is
noise of the same kind, once by itself (it foretells nothing) and once mixed with the noise of
accuracy five tasks later (it foretells something). What an interval should hold is the mean gain
over all made up studies of its kind.
"""

from __future__ import annotations

import argparse

import numpy as np

from fastlr.display.sheets import Sheet
from fastlr.experiments.continual.prediction import HORIZON, Series, predict, recent_mean
from fastlr.experiments.runs.records import Array
from fastlr.experiments.runs.report import show

RUNS, TASKS, EVERY, AHEAD = 10, 200, 4, 5
KINDS = {"foretells nothing": 0.0, "foretells something": 0.7}
CARRIED = (0.0, 0.5, 0.9)  # of the noise, from task to task


def carried_noise(tasks: int, carried: float, rng: np.random.Generator) -> Array:
    """Return noise of unit variance of which a part carries over [tasks]."""
    noise = rng.standard_normal(tasks)
    for task in range(1, tasks):
        noise[task] = carried * noise[task - 1] + (1 - carried**2) ** 0.5 * noise[task]
    return noise


def made_up_run(seed: int, share: float, carried: float, rng: np.random.Generator) -> Series:
    """Return a run whose measure has this share of the noise of accuracy some tasks later."""
    noise = carried_noise(TASKS + AHEAD, carried, rng)
    accuracy = rng.standard_normal() + noise[:TASKS]
    target = np.full(TASKS, np.nan)
    for task in range(TASKS - HORIZON):
        target[task] = accuracy[task + 1 : task + 1 + HORIZON].mean()
    own = carried_noise(TASKS, carried, rng)
    measure = share * noise[AHEAD:] + (1 - share**2) ** 0.5 * own
    measure[np.arange(TASKS) % EVERY != EVERY - 1] = np.nan
    return Series(seed, target, recent_mean(accuracy)[:, None], measure)


def coverage(share: float, carried: float, studies: int) -> tuple[float, float]:
    """Return the mean gain over made up studies, and the share of intervals that hold it."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(studies):
        runs = [made_up_run(seed, share, carried, rng) for seed in range(RUNS)]
        prediction = predict("measure", runs, resamples=200, seed=0)
        assert prediction is not None
        found.append((prediction.gain, prediction.low, prediction.high))
    gain, low, high = np.array(found).T
    mean = gain.mean()
    return float(mean), float(np.mean((low <= mean) & (mean <= high)))


def coverage_sheet(studies: int) -> Sheet:
    """The coverage of the intervals, by kind of measure and by what carries over."""
    rows = []
    for kind, share in KINDS.items():
        for carried in CARRIED:
            mean, held = coverage(share, carried, studies)
            rows.append((kind, f"{carried:g}", f"{100 * mean:.2f}", f"{100 * held:.1f}"))
    note = (
        f"{studies} made up studies a row, each of {RUNS} runs of {TASKS} tasks, read after every "
        f"{EVERY}th. gain: mean over them, R^2 times 100; held: share of their 95 % intervals that "
        "hold that mean, in percent."
    )
    columns = ("measure", "carried over", "gain", "held")
    return Sheet("coverage", "What intervals of predictions hold", columns, rows, (note,))


def main() -> None:
    """Show the table, and print it as CSV."""
    parser = argparse.ArgumentParser(prog="python -m bench.causes.coverage", description=__doc__)
    parser.add_argument("--studies", type=int, default=400)
    sheet = coverage_sheet(parser.parse_args().studies)
    show([sheet])
    print(sheet.csv(), end="")


if __name__ == "__main__":
    main()

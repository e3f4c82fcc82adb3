"""Tables of the study: correlations, and what each intervention changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bench.causes.comparison import REDUNDANCY, Comparison
from bench.causes.correlations import FEWEST, KINDS, Together
from fastlr.display.sheets import DASH, Sheet
from fastlr.display.tables import pm
from fastlr.experiments.continual.course import geometric
from fastlr.experiments.continual.tables import hundred, label
from fastlr.experiments.runs.records import mean_of_known
from fastlr.experiments.statistics.seeds import Mean


def correlations_sheet(found: Comparison, pairs: Sequence[Together]) -> Sheet:
    """The correlations of each measure with accuracy."""
    seeds = np.isfinite(found.accuracy).sum(1)

    rows = []
    for pair in pairs:
        log = ", log" if pair.measure in found.logs else ""
        cells = [_with_interval(pair.values[kind], *pair.intervals[kind]) for kind in KINDS]
        rows.append((label(pair.measure) + log, *cells))
    note = (
        f"Means over the last fifth of {found.tasks} tasks. between: over {len(found.names)} "
        f"interventions, of means over {seeds.min()} to {seeds.max()} seeds; within: over the "
        f"seeds of each intervention; change: of differences to {found.names[0]} with the same "
        "seed, not centred. Brackets: 95 % intervals by bootstrap of interventions and seeds "
        f"(within: seeds), from {FEWEST} on. A correlation of changes is what an intervention does "
        "to both; that it acts through the measure it cannot show, but a measure that moves "
        "without accuracy is no cause."
    )
    title = "Does it cause? Late measures against late accuracy"
    return Sheet("causes", title, ("r x 100", *KINDS), rows, (note,))


def _with_interval(value: float, low: float, high: float) -> str:
    """Write a correlation with its interval, times 100."""
    if not math.isfinite(low):
        return hundred(value, 0)
    return f"{hundred(value, 0)} [{hundred(low, 0)}, {hundred(high, 0)}]"


def interventions_sheet(found: Comparison) -> Sheet:
    """Accuracy and local redundancy of each intervention, and their changes against the control."""
    seeds = np.isfinite(found.accuracy).sum(1)
    columns = ["intervention", "seeds", "accuracy %", "change"]
    rows = []
    for row, name in enumerate(found.names):
        accuracy = hundred(mean_of_known(found.accuracy[row]))
        rows.append([name, str(seeds[row]), accuracy, _change(found, 100 * found.accuracy, row)])
    if REDUNDANCY in found.logs:
        columns += ["LR", "log change"]
        logs = found.measures[REDUNDANCY]
        for row, cells in enumerate(rows):
            cells += [geometric(logs[row]), _change(found, logs, row)]
    note = (
        "Late accuracy, and local redundancy (geometric mean); changes against "
        f"{found.names[0]} with the same seed: mean and standard error over seeds, of local "
        "redundancy in natural logarithms."
    )
    return Sheet(
        "interventions",
        "What each intervention changes",
        columns,
        list(map(tuple, rows)),
        (note,),
    )


def _change(found: Comparison, values: np.ndarray, row: int) -> str:
    """Write the mean effect of an intervention; a dash for the control and where unknown."""
    effect: Mean = found.change(values, row)
    if row == 0 or not math.isfinite(effect.value):
        return DASH
    if not math.isfinite(effect.stderr):
        return f"{effect.value:.3g}"
    return pm(effect.value, effect.stderr)

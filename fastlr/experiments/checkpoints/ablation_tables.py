"""Tables of the ablation: how local redundancy on synthetic inputs follows that on real ones.

Source: paper, Table 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scipy.special import stdtrit

from fastlr.display.sheets import Sheet
from fastlr.display.tables import pm
from fastlr.estimator.result import Estimate
from fastlr.experiments.continual.fields import INPUTS
from fastlr.experiments.continual.summaries import FEWEST_FOR_ERROR
from fastlr.experiments.statistics.bootstrap import LEVEL

CONSTANT = (
    "Local redundancy is the same at all checkpoints, on the real inputs or the synthetic ones: "
    "nothing to compare."
)


def few_checkpoints(n: int) -> list[str]:
    """Say what correlations of ``n`` checkpoints are worth; nothing if they have a standard error.

    >>> few_checkpoints(5)[0][:60], few_checkpoints(91)
    ('With 5 checkpoints r has no standard error: unrelated number', [])
    """
    if n >= FEWEST_FOR_ERROR:
        return []
    t = float(stdtrit(n - 2, 1 - LEVEL / 2))
    return [
        f"With {n} checkpoints r has no standard error: unrelated numbers reach |r| of "
        f"{t / math.sqrt(n - 2 + t * t):.2f} once in 20 times, and a trend that all checkpoints of "
        "a training follow makes r large by itself. It describes these checkpoints, no others."
    ]


def checkpoints_sheet(
    names: Sequence[str], measured: Sequence[Mapping[str, Estimate]], notes: Sequence[str]
) -> Sheet:
    """Return the table of local redundancy at each checkpoint, a column for each kind of inputs.

    Every value has its standard error.
    """
    columns = ["checkpoint"]
    for kind, estimate in measured[0].items():
        columns.append(f"{INPUTS[kind]} (n = {estimate.n})")
    rows = []
    for name, estimates in zip(names, measured):
        cells = [pm(estimate.value, estimate.stderr) for estimate in estimates.values()]
        rows.append((name, *cells))
    title = "Local redundancy, with its standard error from the samples"
    return Sheet("checkpoints", title, columns, rows, notes)

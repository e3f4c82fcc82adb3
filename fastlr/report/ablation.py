"""The tables of the ablation: how local redundancy on synthetic inputs follows that on real ones (paper, Table 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fastlr.analysis import INPUTS, Agreement
from fastlr.analysis.bootstrap import LEVEL, student_quantile
from fastlr.analysis.summaries import FEWEST_FOR_ERROR
from fastlr.report.sheets import Sheet
from fastlr.report.tables import pm
from fastlr.result import Estimate

NOT_RECORDED = (
    "The runs have no local redundancy on the next task's images (measure local_redundancy_next_task), or it and "
    "another estimate do not both vary: no ablation table."
)
CONSTANT = (
    "Local redundancy is the same at all checkpoints, on the real inputs or the synthetic ones: nothing to compare."
)


def ablation_sheet(
    found: Sequence[Agreement],
    real: str = "real images of the next task",
    at: str = "boundaries",
    none: str = NOT_RECORDED,
    notes: Sequence[str] = (),
) -> Sheet:
    """Table 4: estimates on synthetic inputs against the one on real inputs.

    Args:
        found: From `fastlr.analysis.agreement`.
        real: What the real inputs are.
        at: Where both were measured.
        none: What to say if there is nothing to compare.
        notes: Further notes.
    """
    title = f"Table 4: synthetic inputs against {real}"
    if not found:
        return Sheet("ablation", title, (), (), (none, *notes))
    columns = ("inputs", "", "Pearson r", "R2 = r^2", "R2 of x = y", "MSE std.", "x / y", "n")
    rows = []
    for a in found:
        r = pm(a.r, a.stderr) if math.isfinite(a.stderr) else f"{a.r:.3f}"
        cells = (r, f"{a.r_squared:.3f}", f"{a.identity:.4g}", f"{a.mse:.3f}", f"{a.ratio:.3g}", str(a.n))
        rows.append((INPUTS.get(a.measure, a.measure) if a.transform == "raw" else "", a.transform, *cells))
    definitions = (
        f"x: local redundancy on the synthetic inputs, y: on {real}, at the same {at}, as they are and as logarithms. No "
        "trend is removed.",
        "The paper (Table 4) does not define R^2 and MSE; ours: r^2 is Pearson's r squared, the share of y's variance "
        "that the best straight line in x explains; R2 of x = y is 1 - sum (x - y)^2 / sum (y - mean y)^2, negative "
        "where the mean of y would be the better guess; MSE is the mean of (x - y)^2 after each series is brought to "
        "mean 0 and standard deviation 1, which is 2 (1 - r); x / y is the geometric mean of the ratio. s.e. of r: "
        f"block bootstrap, from {FEWEST_FOR_ERROR} {at} on.",
    )
    return Sheet("ablation", title, columns, tuple(rows), (*definitions, *notes))


def few_checkpoints(n: int) -> str:
    """Say what correlations of ``n`` checkpoints are worth; empty where they have a standard error.

    >>> few_checkpoints(5)[:60], few_checkpoints(91)
    ('With 5 checkpoints r has no standard error: unrelated number', '')
    """
    if n >= FEWEST_FOR_ERROR:
        return ""
    t = student_quantile(1 - LEVEL / 2, n - 2)
    return (
        f"With {n} checkpoints r has no standard error: unrelated numbers reach |r| of {t / math.sqrt(n - 2 + t * t):.2f} "
        "once in 20 times, and a trend that all checkpoints of a training follow makes r large by itself. It describes "
        "these checkpoints, no others."
    )


def checkpoints_sheet(names: Sequence[str], measured: Sequence[Mapping[str, Estimate]], notes: Sequence[str]) -> Sheet:
    """Local redundancy with its standard error at each checkpoint, a column for each kind of inputs."""
    kinds = list(measured[0])
    rows = [
        (name, *(pm(found[kind].value, found[kind].stderr) for kind in kinds)) for name, found in zip(names, measured)
    ]
    columns = ("checkpoint", *(f"{INPUTS[kind]} (n = {measured[0][kind].n})" for kind in kinds))
    title = "Local redundancy, with its standard error from the samples"
    return Sheet("checkpoints", title, columns, tuple(rows), tuple(notes))

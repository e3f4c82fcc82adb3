"""A ranking of checkpoints as a table and a figure."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from fastlr.analysis.ranking import Pair, Ranking
from fastlr.report.figures import COLOURS, GRID, INK, MUTED, new_figure, save_figure, style
from fastlr.report.sheets import Sheet
from fastlr.report.tables import pm

_FEW = 100  # inputs below which a normal distribution of the mean is doubtful


def verdict(found: Ranking) -> str:
    """Say whether the best can be told from the next, and which cannot."""
    following = found.against_best(list(found.estimates)[1])
    assert following is not None
    p = _p(following.adjusted)
    numbers = f"z = {following.z:.1f}, adjusted p {p if p.startswith('<') else '= ' + p}"
    if found.distinguishable:
        others = f"; not told from it, though: {', '.join(found.ties)}" if found.ties else ""
        return f"{found.best} is the best, distinguishable from the next, {following.second} ({numbers}){others}."
    return (
        f"{found.best} has the largest local redundancy, but cannot be told from {', '.join(found.ties)} ({numbers} for "
        f"{following.second})."
    )


def ranking_sheet(found: Ranking, notes: Sequence[str] = ()) -> Sheet:
    """The checkpoints, best first, with the paired difference of the best from each."""
    first = next(iter(found.estimates.values()))
    rows = []
    for place, (name, estimate) in enumerate(found.estimates.items(), 1):
        pair = found.against_best(name)
        cells = (
            ("–", "–", "–") if pair is None else (pm(pair.difference, pair.stderr), f"{pair.z:.1f}", _p(pair.adjusted))
        )
        rows.append((name, str(place), pm(estimate.value, estimate.stderr), *cells))
    k, pairs = len(found.estimates), len(found.pairs)
    texts = [
        verdict(found),
        f"Best minus: paired over the same n = {first.n} inputs, ± standard error; z: difference over its standard error. p: "
        f"two-sided by the normal distribution, Holm's correction for all {pairs} pairs of {k} checkpoints, as the best "
        f"was found on the same inputs; distinguishable: p < {found.level:g}.",
        "The errors are over inputs: they say how well these checkpoints are measured, not what another training would give.",
    ]
    if first.n < _FEW:
        texts.append(
            f"With n = {first.n} the normal distribution is doubtful, as gradients are heavy-tailed: take more."
        )
    columns = ("checkpoint", "rank", "local redundancy", "best minus", "z", "p")
    title = "Checkpoints by local redundancy"
    return Sheet("ranking", title, columns, tuple(rows), (*texts, *notes))


def ranking_record(found: Ranking) -> dict[str, Any]:
    """The ranking for JSON: best, verdict, every estimate and every pair."""
    return {
        "best": found.best,
        "distinguishable": found.distinguishable,
        "ties": found.ties,
        "verdict": verdict(found),
        "level": found.level,
        "test": "paired z over inputs, two-sided, Holm's correction for all pairs",
        "ranking": [{"checkpoint": name, **estimate.to_dict()} for name, estimate in found.estimates.items()],
        "pairs": [vars(pair) for pair in found.pairs],
    }


def ranking_chart(found: Ranking, path: str | os.PathLike[str]) -> bool:
    """Draw local redundancy of each checkpoint, best first, and the paired difference from the best; 95 % intervals."""
    names = list(found.estimates)
    figure, (left, right) = new_figure((9, 1.5 + 0.32 * len(names)), 1, 2, sharey=True)
    for y, (name, estimate) in enumerate(found.estimates.items()):
        _interval(left, y, estimate.value, estimate.stderr, COLOURS[0])
        pair = found.against_best(name)
        if pair is not None:
            _interval(right, y, pair.difference, pair.stderr, _colour(pair, found.level))
    right.axvline(0, color=MUTED, linewidth=1)
    left.set_yticks(range(len(names)), names, fontsize=8, color=INK)
    left.set_ylim(len(names) - 0.5, -0.5)
    for axes, text in (
        (left, "local redundancy (± 1.96 standard errors)"),
        (right, f"best ({names[0]}) minus this one, paired (± 1.96 standard errors)"),
    ):
        style(axes, "")
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.grid(False, axis="y")
        axes.set_xlabel(text, fontsize=8, color=INK)
        axes.tick_params(axis="y", length=0)
    figure.suptitle(
        "Checkpoints by local redundancy; orange: not distinguishable from the best",
        x=0.01,
        ha="left",
        fontsize=10,
        color=INK,
    )
    return save_figure(figure, path)


def _interval(axes: Any, y: int, value: float, stderr: float, colour: str) -> None:
    if math.isfinite(stderr):
        axes.plot([value - 1.96 * stderr, value + 1.96 * stderr], [y, y], color=colour, linewidth=1.8)
    axes.plot([value], [y], "o", color=colour, markersize=5)


def _colour(pair: Pair, level: float) -> str:
    return COLOURS[0] if pair.adjusted < level else COLOURS[1]


def _p(p: float) -> str:
    """Write a probability.

    >>> _p(0.2345), _p(0.0123), _p(1e-9)
    ('0.23', '0.012', '<0.0001')
    """
    return "<0.0001" if p < 1e-4 else f"{p:.2g}"

"""A ranking of checkpoints as a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastlr.display.figures import COLOURS, INK, MUTED, new_figure, style_rows, title_of_all
from fastlr.display.sheets import DASH, Sheet
from fastlr.display.tables import pm
from fastlr.experiments.checkpoints.ranking import Ranking

_FEW = 100  # inputs below which a normal distribution of the mean is doubtful


def verdict(ranked: Ranking) -> str:
    """Say which value is the largest, from which it cannot be told, and which are equal."""
    text = f"{ranked.largest} has the largest local redundancy"
    if ranked.equal:
        text = f"{_all([ranked.largest, *ranked.equal])} have the largest local redundancy"
    if ranked.others:
        following, ties = ranked.others[0], ", ".join(ranked.ties)
        p = _p(following.adjusted)
        numbers = f"z = {following.z:.1f}, adjusted p {p if p.startswith('<') else '= ' + p}"
        if ranked.distinguishable:
            text += f", distinguishable from the next, {following.second} ({numbers})"
            text += f"; not told from it, though: {ties}" if ties else ""
        else:
            text += f", but cannot be told from {ties} ({numbers} for {following.second})"
    groups: dict[str, list[str]] = {}
    for pair in ranked.pairs:
        if pair.equal and pair.first not in sum(groups.values(), []):
            groups.setdefault(pair.first, []).append(pair.second)
    equal = [
        f"{_all([first, *others])} are equal on every input, as equal weights are."
        for first, others in groups.items()
    ]
    return " ".join([f"{text}.", *equal])


def _all(names: Sequence[str]) -> str:
    """Join names.

    >>> _all(["a", "b", "c"])
    'a, b and c'
    """
    return f"{', '.join(names[:-1])} and {names[-1]}"


def ranking_sheet(ranked: Ranking, notes: Sequence[str] = ()) -> Sheet:
    """The checkpoints, largest first, with the paired difference of the largest from each."""
    n = ranked.estimates[ranked.largest].n
    rows = []
    for place, (name, estimate) in enumerate(ranked.estimates.items(), 1):
        pair = ranked.against_largest(name)
        cells = [DASH] * 3
        if pair is not None:
            cells = [pm(pair.difference, pair.stderr), f"{pair.z:.1f}", _p(pair.adjusted)]
        rows.append((name, str(place), pm(estimate.value, estimate.stderr), *cells))
    pairs = "the one pair" if len(ranked.pairs) == 1 else f"all {len(ranked.pairs)} pairs"
    texts = [
        verdict(ranked),
        f"Largest minus: paired over the same n = {n} inputs, ± standard error; z: difference over "
        "its standard error. p: two-sided by the normal distribution, Holm's correction for "
        f"{pairs} of {len(ranked.estimates)} checkpoints, as the largest was found on the same "
        f"inputs; distinguishable: p < {ranked.level:g}.",
        "The ranking cannot decide which checkpoint will learn a new task best: in our own runs "
        "the lowest validation loss chose as well or better. Nor does it say what another training "
        "would give, as the errors are over inputs alone.",
    ]
    if n < _FEW:
        texts.append(
            f"With n = {n} the normal distribution is doubtful, as gradients are heavy-tailed: "
            "take more."
        )
    columns = ("checkpoint", "rank", "local redundancy", "largest minus", "z", "p")
    title = "Checkpoints by local redundancy"
    return Sheet("ranking", title, columns, rows, [*texts, *notes])


def ranking_record(ranked: Ranking) -> dict[str, Any]:
    """The ranking for JSON: the largest, verdict, every estimate and every pair."""
    estimates = ranked.estimates.items()
    return {
        "largest": ranked.largest,
        "distinguishable": ranked.distinguishable,
        "equal": ranked.equal,
        "ties": ranked.ties,
        "verdict": verdict(ranked),
        "level": ranked.level,
        "test": "paired z over inputs, two-sided, Holm's correction for all pairs",
        "ranking": [{"checkpoint": name, **estimate.to_dict()} for name, estimate in estimates],
        "pairs": list(map(vars, ranked.pairs)),
    }


def ranking_chart(ranked: Ranking) -> Any:
    """Draw each checkpoint's local redundancy, and its paired difference from the largest.

    The largest comes first. The intervals are of 95 %.
    """
    names = [name.replace("$", r"\$") for name in ranked.estimates]  # no formulas
    figure, (left, right) = new_figure((9, 1.5 + 0.32 * len(names)), 1, 2, sharey=True)
    for y, (name, estimate) in enumerate(ranked.estimates.items()):
        _interval(left, y, estimate.value, estimate.stderr, COLOURS[0])
        pair = ranked.against_largest(name)
        if pair is not None:
            colour = COLOURS[0] if pair.adjusted < ranked.level else COLOURS[1]
            _interval(right, y, pair.difference, pair.stderr, colour)
    right.axvline(0, color=MUTED, linewidth=1)
    left.set_yticks(range(len(names)), names, fontsize=8, color=INK)
    left.set_ylim(len(names) - 0.5, -0.5)
    inputs = ranked.estimates[ranked.largest].n
    style_rows(left, f"local redundancy, n = {inputs} inputs (± 1.96 standard errors)", fontsize=8)
    text = f"largest ({names[0]}) minus this one, paired (± 1.96 standard errors)"
    style_rows(right, text, fontsize=8)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
    title = "Checkpoints by local redundancy; orange: not distinguishable from the largest"
    title_of_all(figure, title)
    return figure


def _interval(axes: Any, y: int, value: float, stderr: float, colour: str) -> None:
    axes.errorbar(value, y, xerr=1.96 * stderr, fmt="o", color=colour, markersize=5, elinewidth=1.8)


def _p(p: float) -> str:
    """Write a probability.

    >>> _p(0.2345), _p(0.0123), _p(1e-9)
    ('0.23', '0.012', '<0.0001')
    """
    return "<0.0001" if p < 1e-4 else f"{p:.2g}"

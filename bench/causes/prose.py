"""What the study found, in sentences made of its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.causes.comparison import REDUNDANCY, Comparison
from bench.causes.correlations import Together
from fastlr.experiments.continual.prediction import Prediction
from fastlr.experiments.continual.records import HORIZON
from fastlr.experiments.continual.tables import label
from fastlr.experiments.statistics.seeds import Mean

VERBS = {1: "raise", -1: "lower", 0: "do not measurably change"}


def findings(
    found: Comparison, pairs: Sequence[Together], predicted: Sequence[Prediction]
) -> list[str]:
    """Say in sentences whether local redundancy goes with accuracy, over interventions and seeds.

    They also say whether the interventions that move the one move the other, and what local
    redundancy adds to predictions.
    """
    sentences = []
    for pair in pairs:
        if pair.measure == REDUNDANCY:
            sentences += [_correlation(found, pair), _moved(found)]
    return sentences + _predicted(predicted)


def _correlation(found: Comparison, pair: Together) -> str:
    """Say how late local redundancy correlates with late accuracy, in three ways."""
    ways = {
        "between": f"between {len(found.names)} interventions",
        "within": "within them",
        "change": f"by change against {found.names[0]}",
    }
    told = []
    for kind, words in ways.items():
        value = pair.values[kind]
        if math.isfinite(value):
            words += f" {value:.2f}"
        told.append(f"{words} {_doubt(value, *pair.intervals[kind])}")
    return f"Correlation of late local redundancy with late accuracy: {', '.join(told)}."


def _moved(found: Comparison) -> str:
    """Say which interventions move local redundancy and accuracy, by 95 % intervals over seeds."""
    groups: dict[tuple[int, int], list[str]] = {}
    for row in range(1, len(found.names)):
        redundancy = found.change(found.measures[REDUNDANCY], row)
        accuracy = found.change(found.accuracy, row)
        if math.isfinite(redundancy.low) and math.isfinite(accuracy.low):  # two seeds or more
            signs = _sign(redundancy), _sign(accuracy)
            groups.setdefault(signs, []).append(found.names[row])
    parts = []
    for (redundancy_sign, accuracy_sign), names in groups.items():
        verbs = f"{VERBS[redundancy_sign]} it and {VERBS[accuracy_sign]} accuracy"
        parts.append(f"that {verbs}: {', '.join(names)}")
    which = f"those {'; '.join(parts)}" if parts else "too few seeds to tell which change what"
    return f"Of the interventions (95 % intervals over seeds): {which}."


def _predicted(predicted: Sequence[Prediction]) -> list[str]:
    """Say what local redundancy, and the best measure, add to the prediction of accuracy."""
    if not predicted:
        return []
    best = max(predicted, key=lambda p: p.gain)
    sentences = []
    for p in predicted:
        if p is not best and p.measure != REDUNDANCY:
            continue
        name = label(p.measure)
        if p is best and len(predicted) > 1:
            name += f" (the best of {len(predicted)})"
        sentences.append(
            f"Beyond task number and current accuracy, {name} changes R^2 of the next {HORIZON} "
            f"tasks' accuracy out of sample by {p.gain:+.4f} {_doubt(p.gain, p.low, p.high, 4)}."
        )
    return sentences


def _doubt(value: float, low: float, high: float, digits: int = 2) -> str:
    """Write an interval in brackets, and whether zero lies in it."""
    if not math.isfinite(value):
        return "(too few to tell from chance or constant)"
    if not math.isfinite(low):
        return "(too few to tell from chance)"
    unsure = "" if low > 0 or high < 0 else ": cannot be told from 0"
    return f"({low:.{digits}f} to {high:.{digits}f}{unsure})"


def _sign(mean: Mean) -> int:
    """Return the sign of a mean whose interval leaves out zero, else 0."""
    return int(mean.low > 0) - int(mean.high < 0)

"""Whether local redundancy has moved over a training, in words: one rule for runs and monitors.

The last fifth of the readings is compared with the first fifth after training began, three or more
each, on logarithms. A change counts where it is beyond two errors at 99 %: that of the readings'
scatter (Welch), and that of the images, paired where their values were kept.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastlr.display.tables import group_to_fit

PARTS, FEWEST = 5, 3  # parts of a training, and readings that a part has at least
_BLOCKS, _NAMED = 12, 2  # blocks of a network that are told apart, and those that are named
# Student's 99.5 % quantiles, by degrees of freedom; between two, that of the fewer is taken.
_FREEDOM = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 17, 20, 25, 30, 40, 60, 120, 1000)
_QUANTILES = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 2.977, 2.898, 2.845, 2.787, 2.750, 2.704, 2.660, 2.617, 2.581),
)
# What kept others learning, of bench/results/cpu/causes: random labels, pairs of classes; a
# transformer was ruined at the MLP's strength.
_HELPED = (
    "L2 to init, continual backprop, and shrink-and-perturb at a strength that suits the network "
    "kept small networks learning whose value fell so (docs/interpreting.md)."
)

_T = TypeVar("_T")


class Measurement(NamedTuple):
    """Local redundancy as it was measured once.

    Attributes:
        value: The estimate.
        stderr: Its standard error; NaN if there is none.
        blocks: The value's parts by block of the network; empty if they are not known.
        per_image: The images' values, float32; None if they were not kept.
    """

    value: float
    stderr: float
    blocks: Mapping[str, float] = {}
    per_image: Tensor | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any], per_image: Tensor | None = None) -> Measurement:
        """Return the measurement of a record with "value", "stderr" and "per_parameter"."""
        parts = record.get("per_parameter") or {}
        blocks = group_to_fit({name: _number(part) for name, part in parts.items()}, _BLOCKS)
        kept = None if per_image is None else per_image.to(torch.float32)
        return cls(_number(record.get("value")), _number(record.get("stderr")), blocks, kept)


class Change(NamedTuple):
    """How far the mean of some numbers has moved from a first part to a last.

    Attributes:
        first: Mean of the first part; of local redundancy the geometric one.
        last: Mean of the last part.
        low: The change's lower limit at 99 %: of a difference, of local redundancy of the ratio.
        high: The upper limit.
        moved: 1 if it has risen beyond its error, -1 if it has fallen, else 0.
        paired: True if the images' error is that of pairs.
    """

    first: float
    last: float
    low: float
    high: float
    moved: int
    paired: bool = False


def first_and_last(readings: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T]] | None:
    """Return the first and the last fifth, three or more each; None of fewer than six readings."""
    part = max(FEWEST, len(readings) // PARTS)
    return None if len(readings) < 2 * part else (readings[:part], readings[-part:])


def change(first: Sequence[Measurement], last: Sequence[Measurement]) -> Change | None:
    """Compare two parts of a training by the logarithms of local redundancy.

    Neighbouring readings are taken for independent.

    Returns:
        The change; None if a value is zero or was not measured, or has no standard error.
    """
    if any(not reading.value > 0 for reading in (*first, *last)):
        return None
    logarithms = [[math.log(reading.value) for reading in part] for part in (first, last)]
    a, b = map(fmean, logarithms)
    paired = paired_error(first, last)
    of_images = unpaired_error(first, last) if paired is None else paired
    if not math.isfinite(of_images):
        return None
    half = max(_welch(*logarithms), of_images)
    low, high = math.exp(b - a - half), math.exp(b - a + half)
    return Change(math.exp(a), math.exp(b), low, high, _sign(b - a, half), paired is not None)


def difference(first: Sequence[float], last: Sequence[float]) -> Change:
    """Compare two parts of a training by plain numbers, such as accuracies."""
    a, b = fmean(first), fmean(last)
    half = _welch(first, last)
    return Change(a, b, b - a - half, b - a + half, _sign(b - a, half))


def paired_error(first: Sequence[Measurement], last: Sequence[Measurement]) -> float | None:
    """Return how far the change may go at 99 % by the choice of images; None if that is not known.

    A reading's image values over their mean are, less 1, what each image moves its logarithm by, to
    first order. Their means over both parts are paired by image.
    """
    kept = [[reading.per_image for reading in part] for part in (first, last)]
    rows = [row for part in kept for row in part if row is not None]
    if len(rows) < len(first) + len(last) or len({len(row) for row in rows}) > 1:
        return None
    shares = torch.stack(rows).to(torch.float64)
    shares /= shares.mean(1, keepdim=True)
    differences = shares[len(first) :].mean(0) - shares[: len(first)].mean(0)
    n = len(differences)
    return float(differences.std()) / math.sqrt(n) * student(n - 1) if n > 1 else math.nan


def unpaired_error(first: Sequence[Measurement], last: Sequence[Measurement]) -> float:
    """Return the same where both parts' images are taken for independent, from standard errors.

    Within a part, all readings are of the same images.
    """
    errors = [fmean(reading.stderr / reading.value for reading in part) for part in (first, last)]
    return math.hypot(*errors) * student(math.inf)


def student(freedom: float) -> float:
    """Return Student's 99.5 % quantile, or one that is slightly larger.

    Example:
        >>> student(4), student(4.9), student(1e9)
        (4.604, 4.604, 2.581)
    """
    return _QUANTILES[max(0, bisect.bisect_right(_FREEDOM, freedom) - 1)]


def _welch(first: Sequence[float], last: Sequence[float]) -> float:
    """Half the width of the 99 % interval of a difference of means, variances apart."""
    shares = [variance(part) / len(part) for part in (first, last)]
    total = sum(shares)
    if total == 0:
        return 0.0
    spread = sum(
        share**2 / (len(part) - 1) for share, part in zip(shares, (first, last), strict=True)
    )
    return math.sqrt(total) * student(total**2 / spread)


def _sign(value: float, half: float) -> int:
    return int(value > half) - int(value < -half)


def verdict(
    parts: tuple[Sequence[Measurement], Sequence[Measurement]] | None,
    count: int,
    *,
    dormant: Mapping[str, Any] | None = None,
    accuracy: Change | None = None,
    own: Change | None = None,
    on_own: bool = False,
    guess: float | None = None,
) -> str:
    """Say how far local redundancy has moved, what accuracy did, and which of them to believe.

    Say also which blocks lost most and how many units are dormant, and where less than half is
    left, what kept other networks learning.

    Args:
        parts: What is compared, as of `first_and_last`; None: too few readings.
        count: Readings after training began.
        dormant: "value", and "units" and "dormant" if known, of `fastlr.metrics.dormant_ratio`.
        accuracy: What accuracy did; None: it is not known.
        own: What local redundancy on the network's own inputs did; None: it is not known.
        on_own: The readings themselves are on its own inputs.
        guess: The accuracy of a guess, where accuracy never was beyond it; else None.

    Example:
        >>> early = [Measurement(value, 0.1) for value in (10.0, 10.2, 9.9)]
        >>> late = [Measurement(value, 0.1) for value in (10.1, 9.8, 10.2)]
        >>> print(verdict((early, late), 6).partition(" Accuracy")[0])
        Local redundancy went from 10 to 10, which cannot be told from no change at 99 % (0.917 to \
1.09 times; neighbouring readings and both parts' images taken for independent).
    """
    found = change(*parts) if parts else None
    sentences = [_course(found, parts, count)]
    if own is not None:
        sentences.append(f"On its own inputs it {_ratio(own)}.")
    sentences.append(_belief(found, accuracy, own, on_own, guess))
    told = "; ".join(filter(None, [_losses(found, parts), _units(dormant)]))
    sentences.append(f"{told[0].upper()}{told[1:]}.")
    lost = accuracy is None or accuracy.moved < 0
    if guess is None and lost and found and found.moved < 0 and found.last < found.first / 2:
        sentences.append(_HELPED)
    return " ".join(sentences)


def _course(found: Change | None, parts: Any, count: int) -> str:
    if parts is None:
        return (
            "How local redundancy has changed cannot be told yet: it takes "
            f"{2 * FEWEST} readings after training began, {FEWEST} of them after a reference, and "
            f"there are {count}."
        )
    if found is None:
        return (
            "How local redundancy has changed cannot be told: a value is zero, or was not measured "
            "with a standard error."
        )
    alone = "neighbouring readings" + ("" if found.paired else " and both parts' images")
    limits = f"{found.low:.3g} to {found.high:.3g} times"
    return f"Local redundancy {_ratio(found)} ({limits}; {alone} taken for independent)."


def _ratio(found: Change) -> str:
    ends = f"from {brief(found.first)} to {brief(found.last)}"
    if not found.moved:
        return f"went {ends}, which cannot be told from no change at 99 %"
    word = "fallen" if found.moved < 0 else "risen"
    return f"has {word} {ends}, beyond its error at 99 %"


def _belief(
    found: Change | None, accuracy: Change | None, own: Change | None, on_own: bool, guess: Any
) -> str:
    """Say what accuracy did, and what to believe where it and values differ."""
    if accuracy is None:
        return _without_accuracy(own, on_own)
    ends = f"from {100 * accuracy.first:.1f} to {100 * accuracy.last:.1f} %"
    if guess is not None:
        return (
            f"Accuracy ({ends}) was a guess's ({100 * guess:.1f} %) from the start: the network "
            "never learned, and has lost nothing."
        )
    course = {
        -1: f"Accuracy fell {ends}",
        0: f"Accuracy went {ends}, no change that can be told",
        1: f"Accuracy rose {ends}",
    }[accuracy.moved]
    moved = found.moved if found else 0
    if accuracy.moved < 0 and moved >= 0:
        then = " and the value on its own inputs" if own is not None and own.moved < 0 else ""
        return f"{course} all the same: believe it{then}; a value not seen to fall is no proof."
    if accuracy.moved >= 0 and moved < 0:
        return f"{course}: believe accuracy, nothing is lost yet."
    if not moved:
        return f"{course}."
    as_the_value = ", as the value did" if moved == accuracy.moved else ""
    return f"{course}{as_the_value}: believe accuracy."


def _without_accuracy(own: Change | None, on_own: bool) -> str:
    if own is not None:
        return (
            "Accuracy is not known; of the two values, believe that on its own inputs if they are "
            "still to be learned (docs/interpreting.md)."
        )
    if on_own:
        return (
            "Accuracy is not known; these are its own inputs: believe the value if they are still "
            "to be learned, for on what a network knows it falls, too (docs/interpreting.md)."
        )
    return (
        "Accuracy is not known. On synthetic images a fall to below a half went with lost accuracy "
        "wherever one was seen; a value that stays says little (docs/interpreting.md)."
    )


def _losses(found: Change | None, parts: Any) -> str:
    """Name the blocks in which most of a fall lies; empty where nothing fell, or none is known."""
    if found is not None and found.moved < 0:
        first, last = (_mean_blocks(part) for part in parts)
        if first and first.keys() == last.keys():
            lost = {name: first[name] - last[name] for name in first}
            total = sum(lost.values())
            most = sorted(lost, key=lambda name: -lost[name])[:_NAMED]
            told = [f"{name} ({100 * lost[name] / total:.0f} %)" for name in most if lost[name] > 0]
            if total > 0:
                return f"the fall is largest in {' and '.join(told)}"
    return ""


def _mean_blocks(part: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean of each block's part of the value; empty where the blocks differ."""
    names = part[0].blocks.keys()
    if any(reading.blocks.keys() != names for reading in part):
        return {}
    return {name: fmean(reading.blocks[name] for reading in part) for name in names}


def _units(dormant: Mapping[str, Any] | None) -> str:
    ratio = _number(dormant.get("value")) if dormant else math.nan
    if not dormant or not math.isfinite(ratio):
        return "dormant units were not measured"
    if {"dormant", "units"} <= dormant.keys():
        return f"{dormant['dormant']} of {dormant['units']} units ({100 * ratio:.3g} %) are dormant"
    return f"{100 * ratio:.3g} % of the units are dormant"


def brief(value: float) -> str:
    """Return a value with three digits, or whole.

    Example:
        >>> brief(1.0613), brief(1043.2)
        ('1.06', '1,043')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan

"""What two measurements of a network tell, in two sentences, and in a third what helped others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastlr.display.tables import group_to_fit, pm

# Of bench/results/cpu/causes, random labels and pairs of classes; "suits": a transformer was ruined
# by the MLP's.
_HELPED = (
    "Where such a fall meant that small networks had stopped learning, L2 to init, continual "
    "backprop and shrink-and-perturb at a strength that suits the network kept others learning; "
    "whether it means that here, trainability or the value on your own inputs tells "
    "(docs/interpreting.md)."
)
_BLOCKS, _NAMED, _BEYOND = (
    12,
    2,
    1.96,
)  # blocks of a network, those named, standard errors of a change (95 %)


def moved(first: Mapping[str, Any], last: Mapping[str, Any]) -> int:
    """Return 1 if the "value" has risen beyond its errors, -1 if it has fallen, else 0.

    The errors ("stderr") are taken for independent.
    """
    change, error = _number(last.get("value")) - _number(first.get("value")), _error(first, last)
    return (
        int(change > _BEYOND * error) - int(change < -_BEYOND * error)
        if math.isfinite(error)
        else 0
    )


def verdict(
    first: Mapping[str, Any],
    last: Mapping[str, Any],
    dormant: Mapping[str, Any] | None = None,
    since: str = "the start",
) -> str:
    """Say how far local redundancy has moved and whether this is beyond its error.

    Say also which blocks lost most and how many units are dormant.

    Where less than half is left, say also what kept other networks learning.

    Args:
        first: "value", "stderr" and "per_parameter" of an estimate, as of
            `fastlr.Estimate.to_dict`; empty: not measured.
        last: of a later one, on the same inputs. The two errors are taken for independent.
        dormant: "value", and "units" and "dormant" if known, of `fastlr.metrics.dormant_ratio`.
        since: when the first was taken.

    Example:
        >>> part = {"body.w": 8.0, "head.w": 2.0}
        >>> first = {"value": 10, "stderr": 0.1, "per_parameter": part}
        >>> verdict(first, {"value": 10.1, "stderr": 0.1})
        'Local redundancy is 10.10 ± 0.10, after 10.00 ± 0.10 at the start: \
a change cannot be told from its error. Which \
blocks lost most cannot be told; dormant units were not measured.'
    """
    (a, error_a), (b, error_b) = (
        [_number(one.get(key)) for key in ("value", "stderr")] for one in (first, last)
    )
    error, change, beyond = _error(first, last), b - a, moved(first, last) != 0
    if not (math.isfinite(change) and a > 0):
        told = (
            f"How local redundancy has changed since {since} cannot be told: it was not measured, "
            "or was zero"
        )
    elif not math.isfinite(error):
        told = (
            f"Local redundancy is {b:.3g}, after {a:.3g} at {since}: without standard errors a "
            "change cannot be told"
        )
    elif not beyond:
        values = f"{pm(b, error_b)}, after {pm(a, error_a)} at {since}"
        told = f"Local redundancy is {values}: a change cannot be told from its error"
    else:
        share = (
            f"fallen by {-100 * change / a:.3g} %"
            if change < 0
            else f"risen to {b / a:.3g} times its value"
        )
        told = (
            f"Local redundancy has {share} since {since}, from {pm(a, error_a)} to "
            f"{pm(b, error_b)}: beyond its error (95 %)"
        )
    blocks = "which blocks lost most cannot be told"
    parts, later = first.get("per_parameter") or {}, last.get("per_parameter") or {}
    if beyond and a > 0 > change and parts and parts.keys() == later.keys():
        lost = group_to_fit(
            {name: _number(parts[name]) - _number(later[name]) for name in parts}, _BLOCKS
        )
        most = [
            name for name in sorted(lost, key=lambda name: -lost[name])[:_NAMED] if lost[name] > 0
        ]
        blocks = "the fall is largest in " + " and ".join(
            f"{name} ({-100 * lost[name] / change:.0f} %)" for name in most
        )
    units = "dormant units were not measured"
    if dormant and math.isfinite(ratio := _number(dormant.get("value"))):
        of = (
            f"{dormant['dormant']} of {dormant['units']} units "
            if {"dormant", "units"} <= dormant.keys()
            else ""
        )
        units = (
            f"{of}({100 * ratio:.3g} %) are dormant"
            if of
            else f"{100 * ratio:.3g} % of the units are dormant"
        )
    helped = f" {_HELPED}" if beyond and b < a / 2 else ""
    return f"{told}. {blocks[0].upper()}{blocks[1:]}; {units}.{helped}"


def _error(first: Mapping[str, Any], last: Mapping[str, Any]) -> float:
    return math.hypot(_number(first.get("stderr")), _number(last.get("stderr")))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan

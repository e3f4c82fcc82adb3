"""Estimates as text for 80 columns: a summary, the largest modules, the routes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def group_by_module(
    per_parameter: Mapping[str, float], depth: int | None = None
) -> dict[str, float]:
    """Sum the values of parameters by the module that owns them, in the given order.

    Args:
        per_parameter: Parameter name (``features.0.0.weight``) to value.
        depth: Keep at most this many components of the module's name; None keeps the owner itself.

    Returns:
        Module name to sum; parameters of the model itself come under ``(model)``.

    Examples:
        >>> group_by_module({"a.b.weight": 1.0, "a.b.bias": 2.0, "a.c.weight": 4.0, "scale": 8.0})
        {'a.b': 3.0, 'a.c': 4.0, '(model)': 8.0}
        >>> group_by_module({"a.b.weight": 1.0, "a.c.weight": 4.0}, depth=1)
        {'a': 5.0}
    """
    sums: dict[str, float] = {}
    for name, value in per_parameter.items():
        owner = name.split(".")[:-1][:depth]
        key = ".".join(owner) or "(model)"
        sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def group_to_fit(per_parameter: Mapping[str, float], most: int) -> dict[str, float]:
    """Group parameters by module, as finely as gives at most ``most`` groups.

    The depth of the modules is 1 if none gives so few.
    """
    groups = group_by_module(per_parameter)
    depth = max((len(name.split(".")) for name in per_parameter), default=1) - 1
    while len(groups) > most and depth > 1:
        depth -= 1
        groups = group_by_module(per_parameter, depth)
    return groups


def pm(value: float, stderr: float) -> str:
    """Format a value with its standard error to two significant digits of the latter.

    The value has seven significant digits at most.

    Examples:
        >>> pm(12.3456, 0.567), pm(1234567.0, 8901.0), pm(0.000123456, 0.0000012)
        ('12.35 ± 0.57', '1.2346e+06 ± 8.9e+03', '1.235e-04 ± 1.2e-06')
        >>> pm(3.0, 0.0), pm(0.517883063, 2.5e-13), pm(41000.0, 4100.0), pm(2.0, float("nan"))
        ('3 ± 0', '0.5178831 ± 2.5e-13', '41000 ± 4100', '2 ± nan')
    """
    if (
        not (math.isfinite(value) and math.isfinite(stderr))
        or stderr < 1e-6 * abs(value)
        or stderr == 0
    ):
        return f"{value:.7g} ± {stderr:.2g}"
    last = math.floor(math.log10(stderr)) - 1  # the decimal place of the second digit
    size = max(abs(value), stderr)
    if 1e-3 <= size < 1e5:
        places = max(0, -last)
        return f"{value:.{places}f} ± {stderr:.{places}f}"
    return f"{value:.{max(1, math.floor(math.log10(size)) - last)}e} ± {stderr:.1e}"


def brief(value: float) -> str:
    """Return a value with three digits, or whole.

    Example:
        >>> brief(1.0613), brief(1043.2)
        ('1.06', '1,043')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def headlines(estimate: Any) -> list[str]:
    """Return the value of an estimate and what it rests on, a line each."""
    value, stderr = estimate.value, estimate.stderr
    relative = f" ({100 * stderr / value:.1f} %)" if value > 0 and math.isfinite(stderr) else ""
    used = estimate.inputs_used or estimate.n
    milliseconds = 1000 * estimate.seconds / max(1, used)
    precision = f", autocast {estimate.dtype}" if estimate.dtype else ""
    if estimate.n > 1:
        shown = pm(value, stderr) + relative
    else:
        shown = f"{value:.7g} (n = 1: no standard error)"
    return [
        f"local redundancy  {shown}",
        f"n = {used}, probe {estimate.probe}, seed {estimate.seed}, {estimate.seconds:.1f} s "
        f"({milliseconds:.1f} ms each)",
        f"on {estimate.device}{precision}, {estimate.predictive}",
        estimate.inputs,
        f"redundancy of {used} inputs: at least eps x {used * value:.4g} nats + O(eps^2)",
        *(f"note: {note}" for note in estimate.notes),
    ]


def summary(estimate: Any, *, title: str = "", top: int = 8) -> RenderableType:
    """Return the estimate as a rich renderable.

    It shows the value, what it rests on, the largest modules and the routes.

    Args:
        estimate: A :class:`fastlr.Estimate`.
        title: What was measured.
        top: How many modules to list.
    """
    value, *others = headlines(estimate)
    lines = [
        *([Text(title)] if title else []),
        Text(value, style="bold"),
        *map(Text, others),
        Text(),
    ]
    routes = Text(f"routes: {routes_summary(estimate.routes)}")
    return Group(*lines, top_modules(estimate.per_parameter, top), Text(), routes)


def top_modules(per_parameter: Mapping[str, float], top: int = 8) -> Table:
    """Return a table of the modules with the largest shares of the mean squared gradient norm."""
    columns, rows = module_rows(per_parameter, top)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0], overflow="fold", max_width=48)
    for column in columns[1:3]:
        table.add_column(column, justify="right")
    table.add_column(columns[3])
    for row in rows:
        table.add_row(*row)
    return table


def module_rows(
    per_parameter: Mapping[str, float], top: int = 8
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the column names and the rows of `top_modules`.

    The columns are name, value, share, and a bar of text.
    """
    groups = group_by_module(per_parameter)
    total, largest = sum(groups.values()), max(groups.values(), default=0.0)
    rows: list[tuple[str, ...]] = []
    for name, value in sorted(groups.items(), key=lambda item: -item[1])[:top]:
        share = value / total if total > 0 else 0.0
        bar = "█" * round(14 * value / largest) if largest > 0 else ""
        rows.append((name, f"{value:.4g}", f"{100 * share:.1f} %", bar))
    of_all = f"largest of {len(groups)} module{'s' * (len(groups) != 1)}"
    return (of_all, "E||grad||^2", "share", ""), rows


def routes_summary(routes: Mapping[str, str]) -> str:
    """Count the parameters by route.

    Examples:
        >>> routes_summary({"a": "linear", "b": "linear", "c": "fallback"})
        'linear 2, fallback 1'
    """
    return ", ".join(f"{route} {count}" for route, count in Counter(routes.values()).most_common())

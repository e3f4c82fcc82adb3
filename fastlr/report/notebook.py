"""Estimates and support reports as HTML for notebooks: no colours of their own, so that they fit any theme."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from fastlr.report.sheets import table_html
from fastlr.report.tables import headlines, module_rows, routes_summary

_STYLE = "font-family: system-ui, sans-serif; line-height: 1.45; overflow-x: auto"


def estimate_html(estimate: Any) -> str:
    """The value with its error, what it rests on, the largest modules, the routes."""
    first, *others = headlines(estimate)
    columns, rows = module_rows(estimate.per_parameter)
    parts = [f"<strong>{html.escape(first)}</strong>", *map(html.escape, others)]
    return _block(parts, table_html(columns, rows), [f"routes: {routes_summary(estimate.routes)}"])


def support_html(columns: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str]) -> str:
    """A support report: how each parameter is handled in a table that folds, and the lines that sum it up above."""
    table = f"<details><summary>{len(rows)} rows</summary>{table_html(columns, rows)}</details>"
    return _block([html.escape(line) for line in lines], table, [])


def _block(above: Sequence[str], table: str, below: Sequence[str]) -> str:
    parts = [*above, table, *map(html.escape, below)]
    return f'<div style="{_STYLE}">' + "".join(f"<div>{part}</div>" for part in parts) + "</div>"

"""Estimates and support reports as HTML for notebooks.

They have no colours of their own, so that they fit any theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastlr.display.sheets import HTML
from fastlr.display.tables import headlines, module_rows, routes_summary

_STYLE = "font-family: system-ui, sans-serif; line-height: 1.45; overflow-x: auto"
_ESTIMATE = HTML.from_string(
    """
<div style="{{ style }}"><div><strong>{{ lines[0] }}</strong></div>
{% for line in lines[1:] %}<div>{{ line }}</div>{% endfor %}
<div>{% include "table" %}</div><div>routes: {{ routes }}</div></div>"""
)
_SUPPORT = HTML.from_string(
    """
<div style="{{ style }}">{% for line in lines %}<div>{{ line }}</div>{% endfor %}
<div><details><summary>{{ rows|length }} rows</summary>
{% include "table" %}</details></div></div>"""
)


def estimate_html(estimate: Any) -> str:
    """The value with its error, what it rests on, the largest modules, the routes."""
    columns, rows = module_rows(estimate.per_parameter)
    routes = routes_summary(estimate.routes)
    return _ESTIMATE.render(
        style=_STYLE, lines=headlines(estimate), columns=columns, rows=rows, routes=routes
    )


def support_html(
    columns: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[str]
) -> str:
    """Return a support report as HTML: its summary lines above a table that folds.

    The table says how each parameter is handled.
    """
    return _SUPPORT.render(style=_STYLE, lines=lines, columns=columns, rows=rows)

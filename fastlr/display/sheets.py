"""A table as data, written as terminal text, Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinja2 import DictLoader, Environment
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80
DASH = "–"  # a cell without a value

HTML = Environment(autoescape=True, trim_blocks=True)  # every text is escaped
HTML.loader = DictLoader(
    {
        "table": """
<table><thead><tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table>""",
        "sheet": """
<details id="{{ sheet.slug }}"><summary>{{ sheet.title }}</summary>
{% if sheet.rows %}
<div class="wide">{% with columns = sheet.columns, rows = sheet.rows %}
{%- include "table" %}{% endwith %}</div>
{% endif %}
{% for note in sheet.notes %}
<p class="note">{{ note }}</p>
{% endfor %}
</details>""",
    }
)


@dataclass(frozen=True)
class Sheet:
    """A table: title, column names, rows of text, notes below.

    Attributes:
        slug: Name for files and links.
        title: One line.
        columns: Their names; the first is aligned left, the others right.
        rows: Cells, as many as columns.
        notes: Sentences below.
    """

    slug: str
    title: str
    columns: Sequence[str] = ()
    rows: Sequence[tuple[str, ...]] = ()
    notes: Sequence[str] = ()

    def text(self) -> RenderableType:
        """The table for a terminal of 80 columns."""
        table = Table(
            box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", width=None
        )
        for index, column in enumerate(self.columns):
            left = index == 0
            table.add_column(
                column, justify="left" if left else "right", no_wrap=not left, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*row)
        parts: list[RenderableType] = [Text(self.title, style="bold underline")]
        parts += [table] if self.rows else []
        return Group(*parts, *(Text(note, style="dim") for note in self.notes), Text())

    def markdown(self) -> str:
        """The table in Markdown, with its title as a heading."""
        lines = [f"### {self.title}", ""]
        if self.rows:
            marks = [":--"] + ["--:"] * (len(self.columns) - 1)
            for row in (self.columns, marks, *self.rows):
                cells = " | ".join(cell.replace("|", "\\|") for cell in row)
                lines.append(f"| {cells} |")
            lines.append("")
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)

    def csv(self) -> str:
        """Title-less, note-less: a header and the rows as they are shown."""
        return csv_text(self.columns, self.rows)


def shown(value: float | None, form: str) -> str:
    """Return the text of a cell: the value in a format, an en dash where it is None or not finite.

    >>> shown(0.5, "{:.2f}"), shown(float("nan"), "{:.2f}"), shown(None, "{:.2f}")
    ('0.50', '–', '–')
    """
    return DASH if value is None or not math.isfinite(value) else form.format(value)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV with a header; lines end in a newline."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()


def outside_zero(names: Sequence[str], total: int) -> str:
    """Say which of ``total`` intervals of 95 % leave out zero, and how many would by chance."""
    return (
        f"Intervals without zero: {', '.join(names) or 'none'}; of {total} such intervals about "
        f"{total / 20:.1f} would leave out zero by chance"
    )

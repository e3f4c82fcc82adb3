"""A table as data, written as terminal text, Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80


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
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> RenderableType:
        """The table for a terminal of 80 columns."""
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", width=None)
        for index, column in enumerate(self.columns):
            left = index == 0
            table.add_column(column, justify="left" if left else "right", no_wrap=not left, overflow="fold")
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
            body = [self.columns, tuple(marks), *self.rows]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body] + [""]
        for note in self.notes:
            lines += [note, ""]
        return "\n".join(lines)

    def html(self) -> str:
        """The table in HTML."""
        parts = [f'<section id="{html.escape(self.slug)}"><h2>{html.escape(self.title)}</h2>']
        if self.rows:
            parts.append(f'<div class="wide">{table_html(self.columns, self.rows)}</div>')
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in self.notes]
        return "\n".join(parts) + "</section>"

    def csv(self) -> str:
        """Title-less, note-less: a header and the rows as they are shown."""
        return csv_text(self.columns, self.rows)


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in HTML."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """CSV with a header; lines end in a newline."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()

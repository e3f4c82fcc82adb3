"""One self-contained HTML page: tables, and pictures embedded as base64; nothing is fetched from anywhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastlr.errors import InputError
from fastlr.report.sheets import Sheet

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
p { overflow-wrap: anywhere; } h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e7eb; }
th:first-child, td:first-child, #definitions td, #definitions th { text-align: left; }
#definitions td { white-space: normal; vertical-align: top; }
thead th { border-bottom: 2px solid #66717d; }
.wide { overflow-x: auto; } .note { color: #66717d; font-size: .85rem; margin: .4rem 0; max-width: 52rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #66717d; font-size: .85rem; } pre { font-size: .75rem; overflow-x: auto; background: #f5f7f9;
  padding: .8rem; } summary { cursor: pointer; margin-top: 2rem; }
"""


def write_page(
    path: str | Path,
    title: str,
    lead: Sequence[str],
    parts: Sequence[Sheet | tuple[Path, str]],
    records: Mapping[str, str],
) -> None:
    """Write the page.

    Args:
        path: The file.
        title: Heading.
        lead: Paragraphs below it.
        parts: Tables and pictures (PNG file, caption), in order.
        records: Folded away at the end: heading to text, such as the configuration of each run.

    Raises:
        InputError: The file cannot be written.
    """
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(text)}</p>" for text in lead)]
    for part in parts:
        if isinstance(part, Sheet):
            body.append(part.html())
        else:
            body.append(_picture(*part))
    for heading, text in records.items():
        body.append(f"<details><summary>{html.escape(heading)}</summary><pre>{html.escape(text)}</pre></details>")
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _picture(file: Path, caption: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    alt = html.escape(caption, quote=True)
    return (
        f'<figure><img alt="{alt}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )

"""Write reports of runs: an HTML page, Markdown, CSV and JSON files, tables in the terminal."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastlr.display.figures import save_figure
from fastlr.display.record import output_folder, write_json
from fastlr.display.sheets import HTML, WIDTH, Sheet
from fastlr.errors import InputError
from fastlr.experiments.runs.options import RunOptions
from fastlr.experiments.runs.records import RunFolder, grouped
from fastlr.files import write_text

FIGURES = ("png", "none")
Figure = tuple[Path, str]  # the picture and its caption

# Self-contained: pictures are embedded as base64, nothing is fetched from anywhere.
_PAGE = HTML.from_string(
    """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff;
  max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
p { overflow-wrap: anywhere; } h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
.finding { font-size: 1.05rem; max-width: 52rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e3e7eb; }
th:first-child, td:first-child, #definitions td, #definitions th { text-align: left; }
#definitions td { white-space: normal; vertical-align: top; }
thead th { border-bottom: 2px solid #66717d; }
.wide { overflow-x: auto; }
.note { color: #66717d; font-size: .85rem; margin: .4rem 0; max-width: 52rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #66717d; font-size: .85rem; }
pre { font-size: .75rem; overflow-x: auto; background: #f5f7f9;
  padding: .8rem; } summary { cursor: pointer; margin: .6rem 0; }
</style></head>
<body>
{% macro figure(path, caption) %}

<figure><img alt="{{ caption }}" src="data:image/png;base64,{{ base64(path) }}">
<figcaption>{{ caption }}</figcaption></figure>
{% endmacro %}
<h1>{{ title }}</h1>
{% for path, caption in figures[:1] %}
{{ figure(path, caption) }}
{% endfor %}
{% for sentence in findings %}
<p class="finding">{{ sentence }}</p>
{% endfor %}
{% for paragraph in lead %}
<p class="note">{{ paragraph }}</p>
{% endfor %}
{% for path, caption in figures[1:] %}
{{ figure(path, caption) }}
{% endfor %}
<h2>Tables</h2>
{% for sheet in sheets %}
{% include "sheet" %}
{% endfor %}
{% for run in runs if run.config %}

<details><summary>Configuration of {{ run.name }}</summary>
<pre>{{ json(run.config, indent=2) }}</pre></details>
{% endfor %}
</body></html>
"""
)


@dataclass(frozen=True)
class Drawing:
    """A picture to draw.

    Attributes:
        name: Name of the PNG file.
        draw: Returns the figure, or a picture of Pillow; None where there is nothing to draw.
        caption: What stands below it.
    """

    name: str
    draw: Callable[[], Any]
    caption: str


@dataclass(frozen=True)
class Report:
    """The files of a report, and its tables.

    Attributes:
        folder: Where its files are.
        page: The HTML page.
        sheets: All tables, in the page's order.
        screen: Those that are shown in the terminal.
        figures: The pictures that were drawn, with captions.
        findings: What the runs show, in sentences.
        lead: Opening paragraphs.
    """

    folder: Path
    page: Path
    sheets: tuple[Sheet, ...]
    screen: tuple[Sheet, ...]
    figures: tuple[Figure, ...]
    findings: tuple[str, ...]
    lead: tuple[str, ...]

    def show(self, console: Console | None = None) -> None:
        """Print the opening paragraphs, the tables, the findings and where the files are."""
        console = console or Console(width=WIDTH, highlight=False)
        _print(self.lead, console)
        show(self.screen, console)
        _print(self.findings, console)
        console.print(f"report: {self.page}", highlight=False, soft_wrap=True)


def make_folder(paths: Sequence[str | Path], out: str | Path | None, figures: str) -> Path:
    """Make the folder of a report: ``out`` or a default.

    The default is ``report`` in the one path given, and ``fastlr-report`` for several paths.

    Raises:
        InputError: It cannot be made, or ``figures`` is neither "png" nor "none".
    """
    if figures not in FIGURES:
        raise InputError(f"figures {figures!r}: choose one of {', '.join(FIGURES)}")
    if out is None:
        out = Path(paths[0]) / "report" if len(paths) == 1 else "fastlr-report"
    return output_folder(out)


def write_files(
    folder: Path,
    title: str,
    findings: Sequence[str],
    lead: Sequence[str],
    sheets: Sequence[Sheet],
    drawings: Sequence[Drawing],
    runs: Sequence[RunFolder],
    numbers: Mapping[str, Any],
    *,
    screen: Sequence[Sheet],
    texts: Mapping[str, str] | None = None,
) -> Report:
    """Write ``index.html``, ``report.md``, a CSV file a table, ``report.json`` and the pictures.

    Pictures of an earlier report that there is nothing to draw for now are removed.

    Args:
        folder: Folder of the report.
        title: Title of the page.
        findings: What the runs show, in sentences; they stand below the first picture, before
            anything else.
        lead: Opening paragraphs, below the findings; the page also says where the runs come from.
        sheets: Tables in the page's order.
        drawings: The pictures, the one that shows most first.
        runs: Whose configurations are folded away at its end.
        numbers: What goes into ``report.json``.
        screen: Those of them that are shown in the terminal.
        texts: Further files: name to content.

    Raises:
        InputError: A file cannot be written.
    """
    figures: list[Figure] = []
    for drawing in drawings:
        path, picture = folder / drawing.name, drawing.draw()
        if picture is None:
            path.unlink(missing_ok=True)
        else:
            save_figure(picture, path)
            figures.append((path, drawing.caption.strip()))
    write_json(folder / "report.json", dict(numbers))
    origins = dict.fromkeys(filter(None, map(provenance, runs)))
    page = _PAGE.render(
        title=title,
        findings=findings,
        lead=[*lead, *origins],
        sheets=sheets,
        figures=figures,
        runs=runs,
        json=json.dumps,
        base64=_base64,
    )
    paragraphs = [f"{paragraph}\n" for paragraph in (f"# {title}", *findings, *lead)]
    markdown = "\n".join([*paragraphs, *(sheet.markdown() for sheet in sheets)])
    tables = {f"{sheet.slug}.csv": sheet.csv() for sheet in sheets if sheet.rows}
    files = {"report.md": markdown, **tables, **(texts or {}), "index.html": page}
    for name, text in files.items():
        write_text(folder / name, text)
    return Report(
        folder,
        folder / "index.html",
        tuple(sheets),
        tuple(screen),
        tuple(figures),
        tuple(findings),
        tuple(lead),
    )


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")


def differences_from_the_paper(
    runs: Sequence[RunFolder],
    changes: Iterable[Sequence[str]],
    paper: RunOptions,
    open_in_it: Mapping[str, str],
) -> str:
    """Return the paragraph of a report on how its runs differ from the paper.

    Differences that all runs share come first. The last sentence lists the options that the paper
    leaves open, unless a run sets another value than we take for the paper.

    Args:
        runs: Runs of the report.
        changes: Differences of each run, as `fastlr.experiments.runs.options.differences` returns
            them.
        paper: Options of the paper.
        open_in_it: Options that the paper leaves open, each with its words.

    Example:
        >>> runs = [RunFolder(Path(name), {"options": {"seed": 0}}) for name in "abc"]
        >>> changes = [["n 3 for 5"], ["n 3 for 5", "epochs 2 for 12"], ["n 3 for 5"]]
        >>> differences_from_the_paper(runs, changes, RunOptions(), {})
        'Differences from the paper: n 3 for 5. In b: epochs 2 for 12.'
        >>> differences_from_the_paper(runs, [[], [], []], RunOptions(), {"seed": "not given"})
        'Differences from the paper: none. Options that the paper leaves open: seed 0 (not given).'
    """
    listed = list(changes)
    shared = [change for change in listed[0] if all(change in others for others in listed)]
    texts = ["; ".join(shared)] if shared else []
    own = [tuple(change for change in others if change not in shared) for others in listed]
    for rest, group in grouped(runs, own):
        if rest:
            texts.append(f"In {', '.join(run.name for run in group)}: {'; '.join(rest)}")
    text = f"Differences from the paper: {'. '.join(texts) or 'none'}."
    ours = [
        f"{name} {getattr(paper, name)} ({words})"
        for name, words in open_in_it.items()
        if all(run.options.get(name) == getattr(paper, name) for run in runs)
    ]
    return f"{text} Options that the paper leaves open: {'; '.join(ours)}." if ours else text


def provenance(run: RunFolder) -> str:
    """Say what ran and where: the command, the versions and the commit.

    What the configuration does not hold is left out.
    """
    config, command, versions = run.config, run.config.get("command"), run.config.get("versions")
    if isinstance(command, list):
        command = " ".join(map(str, command))
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    entries = {
        "preset": config.get("preset"),
        "model": run.options.get("model"),
        "seed": run.options.get("seed"),
        "machine": run.machine,
        "command": command,
        "versions": versions,
        "commit": config.get("commit"),
    }
    text = "; ".join(f"{key}: {value}" for key, value in entries.items() if value not in (None, ""))
    return f"{run.name} – {text}." if text else ""


def show(sheets: Sequence[Sheet], console: Console | None = None) -> None:
    """Print tables, by default for 80 columns."""
    console = console or Console(width=WIDTH, highlight=False)
    for sheet in sheets:
        console.print(sheet.text(), highlight=False, markup=False)


def _print(paragraphs: Iterable[str], console: Console) -> None:
    for paragraph in paragraphs:
        console.print(f"{paragraph}\n", highlight=False, markup=False)

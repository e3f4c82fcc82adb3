"""What the reports of all drivers share: their folder and files, printing tables, saying where a run comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastlr.analysis.folders import RunFolder
from fastlr.errors import InputError
from fastlr.report.page import write_page
from fastlr.report.record import output_folder, write_json
from fastlr.report.sheets import WIDTH, Sheet

FIGURES = ("png", "none")
Figure = tuple[Path, str]  # the picture and its caption


@dataclass(frozen=True)
class Report:
    """What a report consists of.

    Attributes:
        folder: Where its files are.
        page: The HTML page.
        sheets: All tables, in the page's order.
        screen: Those that are shown in the terminal.
        figures: The pictures that were drawn, with captions.
    """

    folder: Path
    page: Path
    sheets: tuple[Sheet, ...]
    screen: tuple[Sheet, ...]
    figures: tuple[Figure, ...]

    def show(self, console: Console | None = None) -> None:
        """Print the tables and where the files are."""
        console = console or plain_console()
        show(self.screen, console)
        console.print(f"report: {self.page}", highlight=False, soft_wrap=True)


class Figures:
    """The pictures of a report, as they are drawn.

    Attributes:
        drawn: Those that were, with captions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drawn: list[Figure] = []

    def keep(self, name: str, done: bool, caption: str) -> None:
        """Keep a picture if it was drawn; else remove that of an earlier report."""
        if done:
            self.drawn.append((self.folder / name, caption.strip()))
        else:
            (self.folder / name).unlink(missing_ok=True)


def make_folder(paths: Sequence[str | Path], out: str | Path | None, figures: str) -> Path:
    """Make the folder of a report: ``out``, or ``report`` in the one path given, ``fastlr-report`` for several.

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
    lead: Sequence[str],
    parts: Sequence[Sheet | Figure],
    runs: Sequence[RunFolder],
    numbers: Mapping[str, Any],
) -> Path:
    """Write ``index.html``, ``report.md``, a CSV file a table and ``report.json``; return the page.

    Args:
        folder: Of the report.
        title: Of the page.
        lead: Its first paragraphs; where the runs come from is added.
        parts: Tables and pictures in the page's order.
        runs: Whose configurations are folded away at its end.
        numbers: What goes into ``report.json``.

    Raises:
        InputError: A file cannot be written.
    """
    sheets = [part for part in parts if isinstance(part, Sheet)]
    write_json(folder / "report.json", dict(numbers))
    write_text(folder / "report.md", "\n".join(sheet.markdown() for sheet in sheets))
    for sheet in sheets:
        if sheet.rows:
            write_text(folder / f"{sheet.slug}.csv", sheet.csv())
    page = folder / "index.html"
    records = {f"Configuration of {run.name}": json.dumps(run.config, indent=2) for run in runs if run.config}
    origins = dict.fromkeys(text for run in runs if (text := provenance(run)))
    write_page(page, title, [*lead, *origins], parts, records)
    return page


def provenance(run: RunFolder) -> str:
    """What ran, where: the command, the versions and the commit, as far as the configuration says."""
    config, command, versions = run.config, run.config.get("command"), run.config.get("versions")
    said = {
        "preset": config.get("preset"),
        "model": run.options.get("model"),
        "seed": run.options.get("seed"),
        "machine": run.machine,
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else versions,
        "commit": config.get("commit"),
    }
    text = "; ".join(f"{key}: {value}" for key, value in said.items() if value not in (None, ""))
    return f"{run.name} – {text}." if text else ""


def show(sheets: Sequence[Sheet], console: Console | None = None) -> None:
    """Print tables for 80 columns."""
    console = console or plain_console()
    for sheet in sheets:
        console.print(sheet.text(), highlight=False, markup=False)


def plain_console() -> Console:
    """Return a console of the tables' width."""
    return Console(width=WIDTH, highlight=False)


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        InputError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error

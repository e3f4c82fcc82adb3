"""The report of continual runs: terminal tables, CSV, Markdown, PNG figures and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlr.analysis import Correlation, Run, TooShort, agreement, correlations, costs, forgetting_by_blocks, read_runs
from fastlr.analysis.association import KINDS, TRANSFORMS
from fastlr.errors import InputError
from fastlr.report import continual_tables as tables
from fastlr.report import curves
from fastlr.report.ablation import ablation_sheet
from fastlr.report.folder import Figures, Report, make_folder, write_files, write_text
from fastlr.report.images import contact_sheet
from fastlr.report.sheets import Sheet, csv_text

_TITLES = {
    "semi-partial": "semi-partial",
    "partial": "partial",
    "raw": "raw measures",
    "log": "logarithms of the measures",
}
_WORDS = {"future accuracy": "accuracy of the next 10 tasks", "forgetting": "forgetting"}
_NUMBERS = {"future accuracy": 1, "forgetting": 2}


@dataclass(frozen=True)
class ContinualReport(Report):
    """The report of continual runs.

    Attributes:
        correlations: By target.
    """

    correlations: dict[str, list[Correlation] | TooShort]


def write_report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    figures: str = "png",
    resamples: int = 1000,
    seed: int = 0,
    pool: bool = False,
) -> ContinualReport:
    """Analyse run folders and write the report.

    Args:
        paths: Run folders, or folders of run folders; all of them are pooled.
        out: Folder for the files, made if missing; None: ``report`` in the one path given, ``fastlr-report`` for several.
        figures: "png", or "none".
        resamples: Of the bootstraps.
        seed: Of the bootstraps.
        pool: Also pool runs of different configurations.

    Returns:
        The report: ``index.html``, ``report.md``, a CSV file a table, ``correlations.csv`` and ``report.json`` with all
        digits, and the figures are in its folder.

    Raises:
        InputError: No run there, runs of different configurations, an argument out of range, or a file that cannot be written.
    """
    if resamples < 100:
        raise InputError(f"{resamples} resamples: a standard error needs at least 100")
    runs = read_runs(paths, pool=pool)
    folder = make_folder(paths, out, figures)
    found = {target: correlations(runs, target=target, resamples=resamples, seed=seed) for target in _WORDS}
    agreements = agreement(runs, resamples=resamples, seed=seed)
    lost, spent = forgetting_by_blocks(runs), costs(runs)
    full = {target: _full(found[target], target) for target in found}
    overviews = {
        target: tables.overview_sheet(
            found[target], slug=f"{target.replace(' ', '-')}-overview", title=f"All correlations with {_WORDS[target]}"
        )
        for target in found
    }
    listing, forgetting = tables.runs_sheet(runs), tables.forgetting_sheet(lost)
    cost, ablation = tables.cost_sheet(spent, runs), ablation_sheet(agreements)
    drawn = _draw(runs, found, folder) if figures == "png" else ()

    short = [target for target in found if isinstance(found[target], TooShort)]
    accuracy = [full["future accuracy"][0]] + ([] if "future accuracy" in short else [overviews["future accuracy"]])
    ahead = tables.lead_sheet(
        found["future accuracy"], slug="future-accuracy-lead", title="How far local redundancy leads"
    )
    accuracy += [ahead] if ahead is not None else []
    later = full["forgetting"][:1]
    screen = (listing, *accuracy, forgetting, *later, ablation, cost)
    rest = [sheet for target in found if target not in short for sheet in full[target][1:]]
    rest += [] if "forgetting" in short else [overviews["forgetting"]]
    sheets = (*screen, *rest, tables.definitions_sheet(runs))

    numbers: dict[str, Any] = {
        "runs": [str(run.path) for run in runs],
        "resamples": resamples,
        "seed": seed,
        "correlations": [c.to_dict() for each in found.values() if not isinstance(each, TooShort) for c in each],
        "forgetting": [vars(each) for each in lost],
        "costs": [vars(each) for each in spent],
        "agreement": [vars(each) for each in agreements],
    }
    if numbers["correlations"]:
        columns = [key for key in numbers["correlations"][0] if key != "per_run"]
        rows = [[entry[key] for key in columns] for entry in numbers["correlations"]]
        write_text(folder / "correlations.csv", csv_text(columns, rows))
    lead = [
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {sum(len(run.tasks) for run in runs)} tasks. "
        f"Bootstraps with {resamples} resamples, seed {seed}. Numbers with all digits are in report.json."
    ]
    parts = _arranged(screen, drawn, sheets)
    page = write_files(folder, "Plasticity over a sequence of tasks", lead, parts, runs, numbers)
    return ContinualReport(folder, page, sheets, screen, drawn, found)


def _full(found: list[Correlation] | TooShort, target: str) -> list[Sheet]:
    """The four tables of one target, the paper's first; one sentence where the runs are too short."""
    sheets = []
    for kind in KINDS:
        for transform in TRANSFORMS:
            title = f"Table {_NUMBERS[target]}: {_WORDS[target]}; {_TITLES[kind]}, {_TITLES[transform]}"
            slug = f"{target.replace(' ', '-')}-{kind}-{transform}"
            sheets.append(
                tables.correlation_sheet(found, slug=slug, title=title, target=target, kind=kind, transform=transform)
            )
    return sheets[:1] if isinstance(found, TooShort) else sheets


def _draw(
    runs: Sequence[Run], found: dict[str, list[Correlation] | TooShort], folder: Path
) -> tuple[tuple[Path, str], ...]:
    figures = Figures(folder)
    keep = figures.keep
    thick = "Thin: each task; thick: running mean over 30 tasks." if max(map(len, runs)) >= 150 else ""
    keep(
        "redundancy-accuracy.png",
        curves.redundancy_and_accuracy(runs, folder / "redundancy-accuracy.png"),
        f"Local redundancy at each task boundary and accuracy on the task's held-out images. {thick}",
    )
    for target, name in (("future accuracy", "correlations.png"), ("forgetting", "forgetting-correlations.png")):
        each = found[target]
        done = not isinstance(each, TooShort) and curves.correlation_chart(each, folder / name)
        keep(name, done, f"Correlation of each measure with {_WORDS[target]}: semi-partial, raw, 95 % intervals.")
    keep(
        "measures.png",
        curves.measure_curves(runs, folder / "measures.png"),
        f"The other measures at each task boundary; colours as in the first figure. {thick}",
    )
    keep(
        "ablation.png",
        curves.ablation_curves(runs, folder / "ablation.png"),
        f"Local redundancy on shapes, Gaussian noise and real images of the next task. {thick}",
    )
    for index, run in enumerate(runs):
        name = f"layers-{index}.png"
        keep(
            name,
            curves.layer_map(run, folder / name),
            f"Local redundancy by module and task: {run.name}. Grey: zero or none.",
        )
    done, caption = _samples(runs[0], folder / "inputs.png")
    keep("inputs.png", done, caption)
    return tuple(figures.drawn)


def _samples(run: Run, path: Path) -> tuple[bool, str]:
    """Draw the first synthetic images of a run's measurements, if its configuration says their size."""
    from fastlr.inputs import ShapeImages

    data, options = run.config.get("data"), run.config.get("options")
    size = data.get("size") if isinstance(data, dict) else None
    seed = options.get("seed", 0) if isinstance(options, dict) else 0
    if "local_redundancy" not in run.measures or not isinstance(size, int) or not isinstance(seed, int):
        return False, ""
    enlarged = max(1, 96 // size)  # whole pixels, so that small images can be seen
    images = ShapeImages(size=(3, size, size)).raw(0, 16, seed=seed)
    contact_sheet(images.repeat_interleave(enlarged, 2).repeat_interleave(enlarged, 3), path)
    return True, f"The first 16 synthetic images on which {run.name} was measured ({size} x {size}, seed {seed})."


def _arranged(
    screen: Sequence[Sheet], drawn: Sequence[tuple[Path, str]], sheets: Sequence[Sheet]
) -> list[Sheet | tuple[Path, str]]:
    """Put each figure after the table that it belongs to."""
    places = {
        "redundancy-accuracy.png": "runs",
        "correlations.png": "future-accuracy-semi-partial-raw",
        "forgetting-correlations.png": "forgetting-semi-partial-raw",
        "ablation.png": "ablation",
    }
    parts: list[Sheet | tuple[Path, str]] = []
    for sheet in screen:
        parts.append(sheet)
        parts += [figure for figure in drawn if places.get(figure[0].name) == sheet.slug]
    parts += [figure for figure in drawn if figure[0].name not in places]
    return parts + [sheet for sheet in sheets if sheet not in screen]

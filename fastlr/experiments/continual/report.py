"""The report of continual runs: tables for the terminal, CSV, Markdown, PNG figures, a web page.

The page is one self-contained HTML file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastlr.display.images import contact_sheet
from fastlr.display.record import counted
from fastlr.display.sheets import csv_text
from fastlr.errors import InputError
from fastlr.experiments.continual import figures as curves
from fastlr.experiments.continual import tables
from fastlr.experiments.continual.association import TARGETS, Correlation, TooShort, correlations
from fastlr.experiments.continual.course import by_intervention, course_sheets
from fastlr.experiments.continual.findings import findings, verdicts
from fastlr.experiments.continual.options import COMPARED
from fastlr.experiments.continual.prediction import prediction_sheet, predictions
from fastlr.experiments.continual.records import ContinualRun, read_runs
from fastlr.experiments.continual.summaries import agreement, costs, forgetting_by_blocks
from fastlr.experiments.runs.records import as_dict
from fastlr.experiments.runs.report import Drawing, Report, make_folder, write_files


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
        out: Folder for the files, made if missing; None: ``report`` in the one path given,
            ``fastlr-report`` for several.
        figures: "png", or "none".
        resamples: Of the bootstraps.
        seed: Of the bootstraps.
        pool: Also pool runs of different configurations. Without it, the courses of runs that
            differ by interventions and seeds are laid side by side.

    Returns:
        The report: ``index.html``, ``report.md``, a CSV file a table, ``correlations.csv`` and
        ``report.json`` with all digits, and the figures are in its folder.

    Raises:
        InputError: No run there, runs of different configurations, an argument out of range, or a
            file that cannot be written.
    """
    if resamples < 100:
        raise InputError(f"{resamples} resamples: a standard error needs at least 100")
    runs = read_runs(paths, pool=pool, apart=(*COMPARED, "measures"))
    folder = make_folder(paths, out, figures)
    groups = by_intervention(runs)
    if not pool and len(groups) > 1:
        return _report_by_intervention(groups, runs, folder, figures)
    predicted = predictions(runs, resamples=resamples, seed=seed)
    results = {
        target: correlations(runs, target=target, resamples=resamples, seed=seed)
        for target in TARGETS
    }
    agreements = agreement(runs, resamples=resamples, seed=seed)
    setting = tables.setting(runs)
    forgotten, spent = forgetting_by_blocks(runs), costs(runs)

    known = {
        target: [] if isinstance(result, TooShort) else result for target, result in results.items()
    }
    full = {target: tables.correlation_sheets(result, target) for target, result in results.items()}
    overviews = {
        target: [tables.overview_sheet(known[target], target)] if known[target] else []
        for target in TARGETS
    }
    accuracy, forgetting = TARGETS
    lead = tables.lead_sheet(known[accuracy], accuracy)
    screen = tables.with_setting(
        [
            tables.runs_sheet(runs),
            *full[accuracy][:1],
            *overviews[accuracy],
            *([lead] if lead else []),
            tables.forgetting_sheet(forgotten),
            *full[forgetting][:1],
            tables.ablation_sheet(agreements),
            tables.cost_sheet(spent, runs),
        ],
        runs,
    )
    rest = [
        *full[accuracy][1:],
        *full[forgetting][1:],
        *overviews[forgetting],
        prediction_sheet(predicted),
        tables.definitions_sheet(runs),
    ]

    entries = [vars(c) for of_target in known.values() for c in of_target]
    sentences = findings(runs, results[accuracy], resamples=resamples, seed=seed) + verdicts(runs)
    numbers: dict[str, Any] = {
        "findings": sentences,
        "runs": [str(run.path) for run in runs],
        "resamples": resamples,
        "seed": seed,
        "setting": list(setting),
        "correlations": entries,
        "forgetting": [vars(block) for block in forgotten],
        "costs": [vars(cost) for cost in spent],
        "predictions": [vars(p) for p in predicted],
        "agreement": [vars(candidate) for candidate in agreements],
    }
    texts = {}
    if entries:
        columns = [key for key in entries[0] if key != "per_run"]
        texts["correlations.csv"] = csv_text(
            columns, [[entry[key] for key in columns] for entry in entries]
        )
    summary = (
        f"{counted(len(runs), 'run')}, {counted(sum(len(run.tasks) for run in runs), 'task')}. "
        f"Bootstraps with {resamples} resamples, seed {seed}. Numbers with all digits are in "
        "report.json."
    )
    drawings = _drawings(runs, known) if figures == "png" else []
    title, sheets = "Plasticity over a sequence of tasks", [*screen, *rest]
    report = write_files(
        folder,
        title,
        sentences,
        [*setting, summary],
        sheets,
        drawings,
        runs,
        numbers,
        screen=screen,
        texts=texts,
    )
    return ContinualReport(**vars(report), correlations=results)


def _report_by_intervention(
    groups: Mapping[str, Sequence[ContinualRun]],
    runs: Sequence[ContinualRun],
    folder: Path,
    figures: str,
) -> ContinualReport:
    """Write the report of runs that differ by interventions: their courses side by side."""
    screen = [*course_sheets(groups), tables.runs_sheet(runs)]
    sentences = verdicts(runs)
    numbers = {
        "findings": sentences,
        "runs": [str(run.path) for run in runs],
        "interventions": list(groups),
    }
    caption = "Local redundancy and accuracy over the tasks, by intervention."
    course = Drawing("course.png", partial(curves.group_curves, groups), caption)
    lead = f"{counted(len(runs), 'run')} of {counted(len(groups), 'intervention')}."
    report = write_files(
        folder,
        "Plasticity over a sequence of tasks, by intervention",
        sentences,
        [lead],
        [*screen, tables.definitions_sheet(runs)],
        [course] if figures == "png" else [],
        runs,
        numbers,
        screen=screen,
    )
    return ContinualReport(**vars(report), correlations={})


def _drawings(runs: Sequence[ContinualRun], known: dict[str, list[Correlation]]) -> list[Drawing]:
    thick = (
        "Thin: each task; thick: running mean over 30 tasks." if max(map(len, runs)) >= 150 else ""
    )
    drawings = [
        Drawing(
            "redundancy-accuracy.png",
            partial(curves.redundancy_and_accuracy, runs),
            f"Local redundancy at each task boundary and accuracy on {runs[0].tested_on}. {thick}",
        ),
        *(
            Drawing(
                name,
                partial(curves.correlation_chart, known[target]),
                f"Correlation of each measure with {tables.TARGET_LABELS[target]}: semi-partial, "
                "raw, 95 % intervals.",
            )
            for target, name in zip(TARGETS, ("correlations.png", "forgetting-correlations.png"))
        ),
        Drawing(
            "measures.png",
            partial(curves.measure_curves, runs),
            f"The other measures at each task boundary; colours as in the first figure. {thick}",
        ),
        Drawing(
            "ablation.png",
            partial(curves.ablation_curves, runs),
            f"Local redundancy on shapes, Gaussian noise and real images of the next task. {thick}",
        ),
    ]
    for index, run in enumerate(runs):
        caption = f"Local redundancy by module and task: {run.name}. Grey: zero or none."
        drawings.append(Drawing(f"layers-{index}.png", partial(curves.layer_map, run), caption))
    size, seed = as_dict(runs[0].config, "data").get("size"), runs[0].options.get("seed", 0)
    caption = (
        f"The first 16 synthetic images on which {runs[0].name} was measured ({size} x {size}, "
        f"seed {seed})."
    )
    return [*drawings, Drawing("inputs.png", partial(_draw_inputs, runs[0], size, seed), caption)]


def _draw_inputs(run: ContinualRun, size: Any, seed: Any, path: Path) -> bool:
    """Draw the first synthetic images on which a run was measured.

    Returns False if the run did not measure on them or its configuration does not say their size.
    """
    from fastlr.inputs import ShapeImages

    if (
        "local_redundancy" not in run.measures
        or not isinstance(size, int)
        or not isinstance(seed, int)
    ):
        return False
    enlarged = max(1, 96 // size)  # whole pixels, so that small images can be seen
    images = ShapeImages(size=(3, size, size)).raw(0, 16, seed=seed)
    contact_sheet(images.repeat_interleave(enlarged, 2).repeat_interleave(enlarged, 3), path)
    return True

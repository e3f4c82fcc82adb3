"""The report of continual runs: tables for the terminal, CSV, Markdown, PNG figures, a web page.

The page is one self-contained HTML file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastlr.display.images import tiled
from fastlr.display.record import counted
from fastlr.display.sheets import csv_text
from fastlr.errors import InputError
from fastlr.experiments.continual import figures as curves
from fastlr.experiments.continual import tables
from fastlr.experiments.continual.association import TARGETS, Correlation, TooShort, correlations
from fastlr.experiments.continual.course import by_intervention, course_sheets
from fastlr.experiments.continual.options import COMPARED
from fastlr.experiments.continual.prediction import prediction_sheet, predictions
from fastlr.experiments.continual.records import ContinualRun, read_runs
from fastlr.experiments.continual.summaries import agreement, costs, forgetting_by_blocks
from fastlr.experiments.continual.trends import trends, trends_by_group
from fastlr.experiments.runs.records import as_dict
from fastlr.experiments.runs.report import Drawing, Report, make_folder, write_files


def write_report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    figures: str = "png",
    resamples: int = 1000,
    seed: int = 0,
    pool: bool = False,
) -> Report:
    """Analyse run folders and write the report.

    Args:
        paths: Run folders, or folders of run folders; all of them are pooled.
        out: Folder for the files, made if missing; None: ``report`` in the one path given,
            ``fastlr-report`` for several.
        figures: "png", or "none".
        resamples: Number of resamples of the bootstraps.
        seed: Seed of the bootstraps.
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
    known = [c for result in results.values() if not isinstance(result, TooShort) for c in result]
    agreements = agreement(runs, resamples=resamples, seed=seed)
    forgotten, spent = forgetting_by_blocks(runs), costs(runs)
    accuracy, forgetting = TARGETS
    full = {name: tables.correlation_sheets(result, name) for name, result in results.items()}
    overview = {name: tables.overview_sheets(result, name) for name, result in results.items()}
    screen = [
        tables.runs_sheet(runs),
        full[accuracy][0],
        *overview[accuracy],
        *tables.lead_sheets(results[accuracy], accuracy),
        tables.forgetting_sheet(forgotten),
        full[forgetting][0],
        tables.ablation_sheet(agreements),
        tables.cost_sheet(spent, runs),
    ]
    rest = [
        *full[accuracy][1:],
        *full[forgetting][1:],
        *overview[forgetting],
        prediction_sheet(predicted),
        tables.definitions_sheet(runs),
    ]
    setting = tables.setting(runs)
    sentences = trends(runs)
    numbers: dict[str, Any] = {
        "trends": sentences,
        "runs": [str(run.path) for run in runs],
        "resamples": resamples,
        "seed": seed,
        "setting": [setting],
        "correlations": list(map(vars, known)),
        "forgetting": list(map(vars, forgotten)),
        "costs": list(map(vars, spent)),
        "predictions": list(map(vars, predicted)),
        "agreement": list(map(vars, agreements)),
    }
    tasks = sum(len(run.tasks) for run in runs)
    summary = (
        f"{counted(len(runs), 'run')}, {counted(tasks, 'task')}. "
        f"Bootstraps with {resamples} resamples, seed {seed}. Numbers with all digits are in "
        "report.json."
    )
    return write_files(
        folder,
        "Plasticity over a sequence of tasks",
        sentences,
        [setting, summary],
        [*screen, *rest],
        _drawings(runs, known) if figures == "png" else [],
        runs,
        numbers,
        screen=screen,
        texts=_correlations_as_csv(known),
    )


def _correlations_as_csv(known: Sequence[Correlation]) -> dict[str, str]:
    """Return the file of all correlations, by its name; nothing where there are none."""
    if not known:
        return {}
    columns = [key for key in vars(known[0]) if key != "per_run"]
    rows = [list(map(vars(c).get, columns)) for c in known]
    return {"correlations.csv": csv_text(columns, rows)}


def _report_by_intervention(
    groups: Mapping[str, Sequence[ContinualRun]],
    runs: Sequence[ContinualRun],
    folder: Path,
    figures: str,
) -> Report:
    """Write the report of runs that differ by interventions: their courses side by side."""
    screen = [*course_sheets(groups), tables.runs_sheet(runs)]
    sentences = trends_by_group(groups)
    numbers = {
        "trends": sentences,
        "runs": [str(run.path) for run in runs],
        "interventions": list(groups),
    }
    caption = "Local redundancy and accuracy over the tasks, by intervention."
    course = Drawing("course.png", partial(curves.group_curves, groups), caption)
    lead = f"{counted(len(runs), 'run')} of {counted(len(groups), 'intervention')}."
    return write_files(
        folder,
        "Plasticity over a sequence of tasks, by intervention",
        sentences,
        [lead, tables.setting(runs)],
        [*screen, tables.definitions_sheet(runs)],
        [course] if figures == "png" else [],
        runs,
        numbers,
        screen=screen,
    )


def _drawings(runs: Sequence[ContinualRun], known: Sequence[Correlation]) -> list[Drawing]:
    """Return the figures of runs that are pooled, with their captions."""
    thick = ""
    if max(map(len, runs)) >= 150:
        thick = "Thin: each task; thick: running median over 31 tasks."
    drawings = [
        Drawing(
            "redundancy-accuracy.png",
            partial(curves.redundancy_and_accuracy, runs),
            f"Local redundancy at each task boundary and accuracy on {runs[0].tested_on}. {thick}",
        )
    ]
    for name, target in zip(("correlations.png", "forgetting-correlations.png"), TARGETS):
        caption = (
            f"Correlation of each measure with {TARGETS[target].label}: semi-partial, raw, 95 % "
            "intervals."
        )
        of_target = [c for c in known if c.target == target]
        drawings.append(Drawing(name, partial(curves.correlation_chart, of_target), caption))
    drawings += [
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


def _draw_inputs(run: ContinualRun, size: Any, seed: Any) -> Any:
    """Draw the first synthetic images on which a run was measured.

    Returns None if the run did not measure on them or its configuration does not say their size.
    """
    from fastlr.inputs import ShapeImages

    is_known = isinstance(size, int) and isinstance(seed, int)
    if not is_known or "local_redundancy" not in run.measures:
        return None
    enlarged = max(1, 96 // size)  # whole pixels, so that small images can be seen
    images = ShapeImages(size=(3, size, size)).raw(0, 16, seed=seed)
    return tiled(images.repeat_interleave(enlarged, 2).repeat_interleave(enlarged, 3))

"""The tables of a continual run: text cells, with every definition stated below its table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product

from fastlr.display.sheets import DASH, Sheet, outside_zero, shown
from fastlr.display.tables import pm
from fastlr.experiments.continual.association import (
    KINDS,
    TARGETS,
    TRANSFORMS,
    Correlation,
    TooShort,
)
from fastlr.experiments.continual.experiment import DRIVER
from fastlr.experiments.continual.fields import FIELDS, INPUTS, ROWS
from fastlr.experiments.continual.options import OPEN, ContinualOptions, substitutions
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.continual.summaries import (
    FEWEST_FOR_ERROR,
    Agreement,
    Cost,
    ForgettingBlock,
)
from fastlr.experiments.runs.records import (
    all_measures,
    as_dict,
    finite,
    mean_of_known,
    on_machines,
)
from fastlr.experiments.runs.report import differences_from_the_paper
from fastlr.experiments.statistics.bootstrap import SHORTEST_BLOCK
from fastlr.experiments.training.options import training_text

_TIMED = {"train": "training", "evaluate": "evaluation"}  # besides measures
_METHODS = {"pearson": "r", "spearman": "rho"}
_SHORT = {"semi-partial": "semi", "partial": "partial"}
_TRANSFORMS = {"raw": "raw measures", "log": "logarithms of the measures"}
NOT_RECORDED = (
    "The runs have no local redundancy on the next task's images (measure "
    "local_redundancy_next_task), or it and another estimate do not both vary: no ablation table."
)


def setting(runs: Sequence[ContinualRun]) -> str:
    """Return the paragraph on how runs differ from the paper."""
    return differences_from_the_paper(runs, map(_changes, runs), ContinualOptions(), OPEN)


def _changes(run: ContinualRun) -> list[str]:
    """Return the options in which a run differs from the paper, each in words."""
    if not run.options:
        return ["unknown, because the run has no configuration"]
    data = as_dict(run.config, "data")
    return substitutions(DRIVER.options_of(run.options), data, len(run.tasks))


def label(name: str) -> str:
    """A measure's name in words; names joined by + are one pass that serves several.

    >>> label("dormant_ratio+srank")
    'dormant ratio + srank'
    """
    labels = []
    for part in name.split("+"):
        field = FIELDS.get(part)
        labels.append(field.label if field else _TIMED.get(part, part.replace("_", " ")))
    return " + ".join(labels)


def hundred(value: float, digits: int = 1) -> str:
    """100 times the value; an en dash where there is none."""
    return shown(100 * value, f"{{:.{digits}f}}")


def order(names: Iterable[str]) -> list[str]:
    """Distinct measures in the order of the paper's Table 1, others after them as they come."""
    given = list(names)
    return sorted(set(given), key=[*ROWS, *given].index)


def _with_error(value: float, stderr: float) -> str:
    return f"{hundred(value)} ± {hundred(stderr)}" if math.isfinite(value) else DASH


def slug(target: str, suffix: str) -> str:
    """Name for files of a table of correlations with a target."""
    return f"{target.replace(' ', '-')}-{suffix}"


def correlation_sheets(correlations: list[Correlation] | TooShort, target: str) -> list[Sheet]:
    """Return the four tables of correlations with a target, the paper's first.

    Where the runs are too short, return one table that says so in a sentence.
    """
    tables: list[Sheet] = []
    for kind, transform in product(KINDS, TRANSFORMS):
        name = slug(target, f"{kind}-{transform}")
        # The first is the paper's.
        number = "Correlations with " if tables else f"Table {TARGETS[target].table}: "
        title = f"{number}{TARGETS[target].label}; {kind}, {_TRANSFORMS[transform]}"
        if isinstance(correlations, TooShort):
            return [Sheet(name, title, notes=(str(correlations),))]
        tables.append(_correlation_sheet(correlations, name, title, target, kind, transform))
    return tables


def _correlation_sheet(
    correlations: Sequence[Correlation],
    name: str,
    title: str,
    target: str,
    kind: str,
    transform: str,
) -> Sheet:
    """Correlations of one kind in full: a line for Pearson's and one for Spearman's."""
    chosen = [c for c in correlations if c.kind == kind and c.transform == transform]
    measures = order(c.measure for c in chosen)
    chosen.sort(key=lambda c: measures.index(c.measure))
    known = [c for c in chosen if not c.note]
    missing = "; ".join(dict.fromkeys(f"{label(c.measure)}: {c.note}" for c in chosen if c.note))
    if not known:
        return Sheet(name, title, notes=(f"No measure has a correlation. {missing}",))
    notes = _correlation_notes(known, target, kind, transform)
    outside = [
        f"{label(c.measure)} ({_METHODS[c.method]})" for c in known if c.low > 0 or c.high < 0
    ]
    notes.append(f"{outside_zero(outside, len(known))}.")
    if known[0].blocks < 10:
        notes.append(f"With {known[0].blocks} blocks the errors themselves are rough.")
    if missing:
        notes.append(f"Left out: {missing}.")
    columns = ("x 100", "", "value ± s.e.", "95 % interval", "naive", "least", "tasks")
    rows = []
    for c in known:
        row = (
            _once(c.measure, c.method),
            _METHODS[c.method],
            _with_error(c.value, c.stderr),
            f"[{hundred(c.low)}, {hundred(c.high)}]",
            hundred(c.naive),
            hundred(c.smallest),
            str(c.n),
        )
        rows.append(row)
    return Sheet(name, title, columns, rows, notes)


def _once(measure: str, method: str) -> str:
    """Return a measure's label in the line of the first method; empty in the second's."""
    return label(measure) if method == "pearson" else ""


def _correlation_notes(
    known: Sequence[Correlation], target: str, kind: str, transform: str
) -> list[str]:
    """Say what the correlations of a table are, and how their errors are computed."""
    of_logarithm = " (its logarithm)" if transform == "log" else ""
    trend = "both (partial)"
    if kind == "semi-partial":
        trend = "the target alone (semi-partial, as in the paper)"
    notes = [
        f"Each measure{of_logarithm} at the boundary after task t against "
        f"{TARGETS[target].definition}; r is Pearson's, rho Spearman's; a line in task number is "
        f"taken out of {trend}.",
        f"s.e. and interval: moving-block bootstrap, {known[0].blocks} blocks of {known[0].length} "
        "tasks, the line fitted anew to each resample; naive: 1/sqrt(tasks), which takes "
        "neighbouring tasks for independent; least: the smallest correlation that would be found "
        "with probability 80 % (two-sided test at 5 %).",
    ]
    runs = max(len(c.per_run) for c in known)
    if runs > 1:
        notes.append(f"Mean over {runs} runs, weighted by tasks, resampled within runs.")
    fewer = {label(c.measure): len(c.per_run) for c in known if len(c.per_run) < runs}
    if fewer:
        counts = ", ".join(f"{name} ({count})" for name, count in fewer.items())
        notes.append(f"Of fewer runs, as the others have no such correlation: {counts}.")
    if kind == "semi-partial":
        notes.append(
            "A measure that is nearly a line in task number has a semi-partial correlation near "
            "zero whatever it does beside the line: compare the partial ones."
        )
    return notes


def overview_sheets(correlations: list[Correlation] | TooShort, target: str) -> list[Sheet]:
    """All kinds of correlation side by side; no table where the runs are too short."""
    if isinstance(correlations, TooShort) or not correlations:
        return []
    by = {
        (c.measure, c.method, c.kind, c.transform): _with_error(c.value, c.stderr)
        for c in correlations
    }
    combinations = list(product(KINDS, TRANSFORMS))
    rows = []
    for measure, method in product(order(c.measure for c in correlations), _METHODS):
        cells = [by[(measure, method, *combination)] for combination in combinations]
        if set(cells) != {DASH}:
            rows.append((_once(measure, method), _METHODS[method], *cells))
    notes = (
        "value ± s.e. by block bootstrap. semi: the line in task number is taken out of the "
        "target alone; partial: out of the measure too. log: of the measure (Spearman's "
        "semi-partial does not feel it); – where it is zero at times, constant or a straight "
        "line.",
    )
    columns = ("x 100", "", *(f"{_SHORT[kind]}, {transform}" for kind, transform in combinations))
    title = f"All correlations with {TARGETS[target].label}"
    return [Sheet(slug(target, "overview"), title, columns, rows, notes)]


def lead_sheets(correlations: list[Correlation] | TooShort, target: str) -> list[Sheet]:
    """How far local redundancy leads each other measure; no table where there is no other."""
    if isinstance(correlations, TooShort):
        return []
    leads = [c for c in correlations if c.transform == "raw" and math.isfinite(c.lead)]
    if not leads:
        return []
    by = {(c.measure, c.kind, c.method): _with_error(c.lead, c.lead_stderr) for c in leads}
    combinations = list(product(KINDS, _METHODS))
    rows = []
    for measure in order(c.measure for c in leads):
        cells = [by.get((measure, *combination), DASH) for combination in combinations]
        rows.append((label(measure), *cells))
    columns = ("x 100", *(f"{_SHORT[kind]}, {_METHODS[method]}" for kind, method in combinations))
    notes = (
        "Local redundancy's correlation minus that of each other measure (raw), with the standard "
        "error of the difference: both are computed on the same resamples. With a sign: a measure "
        "that falls where accuracy rises has a negative correlation, so compare sizes in the "
        "tables above.",
    )
    return [Sheet(slug(target, "lead"), "How far local redundancy leads", columns, rows, notes)]


def forgetting_sheet(blocks: Sequence[ForgettingBlock]) -> Sheet:
    """Mean forgetting, of all tasks and by blocks."""
    title = "Forgetting: what a task's accuracy loses by training on the next"
    if not blocks:
        return Sheet("forgetting", title, notes=("No task has an accuracy after the next one.",))
    columns = ("tasks", "n", "right after", "one later", "forgetting")
    rows: list[tuple[str, ...]] = []
    for block in blocks:
        row = (
            f"{block.first} to {block.last}" if rows else "all tasks",
            str(block.n),
            hundred(block.right_after),
            hundred(block.one_later),
            f"{hundred(block.mean, 2)} ± {hundred(block.stderr, 2)}",
        )
        rows.append(row)
    note = (
        "Per cent: accuracy on a task right after training on it, after the next task, and their "
        f"difference (positive: forgotten) with its standard error, by blocks of {SHORTEST_BLOCK} "
        "tasks where there are two or more, else sd/sqrt(n)."
    )
    return Sheet("forgetting", title, columns, rows, (note,))


def cost_sheet(timed: Sequence[Cost], runs: Sequence[ContinualRun]) -> Sheet:
    """Table 5: seconds and share of training of each measure."""
    title = "Table 5: what each measure costs"
    if not timed:
        return Sheet("costs", title, notes=("The records hold no times.",))
    columns = ("", "total s", "mean s", "median s", "share", "tasks")
    rows = []
    for cost in timed:
        row = (
            label(cost.name),
            f"{cost.total:.1f}",
            f"{cost.mean:.4f}",
            f"{cost.median:.4f}",
            shown(100 * cost.share, "{:.2f} %"),
            str(cost.n),
        )
        rows.append(row)
    tasks = sum(len(run.tasks) for run in runs)
    of_measures = sum(c.total for c in timed if c.name not in ("train", "evaluate"))
    notes = [
        f"A task took {sum(c.total for c in timed) / tasks:.4g} s in all, "
        f"{of_measures / tasks:.4g} s of them for measures.",
        "Timed within the run: seconds in all, their mean and median a task, and their share of "
        "the seconds of training (first row). The first call plans and compiles: it is in the "
        "total and the mean, not in the median. Measures joined by + share one pass: each of them "
        "alone costs at most as much.",
    ]
    notes += on_machines(runs)
    return Sheet("costs", title, columns, rows, notes)


def runs_sheet(runs: Sequence[ContinualRun]) -> Sheet:
    """The runs: their tasks, gaps and accuracy at both ends."""
    columns = ("run", "tasks", "skipped", "resumed", "first 10th %", "last 10th %")
    rows = []
    for run in runs:
        counts = [str(len(of_run)) for of_run in (run.tasks, run.skipped, run.resumed)]
        accuracy = finite(run.accuracy)
        tenth = max(1, len(accuracy) // 10)
        ends = [hundred(mean_of_known(part)) for part in (accuracy[:tenth], accuracy[-tenth:])]
        rows.append((run.name, *counts, *ends))
    note = (
        f"Accuracy on {runs[0].tested_on} right after training on a task: mean of the first and "
        "the last tenth."
    )
    notes = [note, *dict.fromkeys(map(training_text, runs))]
    return Sheet("runs", "Runs", columns, rows, notes)


def definitions_sheet(runs: Sequence[ContinualRun]) -> Sheet:
    """The definition of each measure, in the words of the records."""
    rows = []
    for name in order(all_measures(runs)):
        texts = dict.fromkeys(run.definition(name) for run in runs)
        rows.append((label(name), " / ".join(filter(None, texts)) or DASH))
    return Sheet("definitions", "What the measures are", ("measure", "definition"), rows)


def ablation_sheet(
    agreements: Sequence[Agreement],
    real: str = "real images of the next task",
    at: str = "boundaries",
    none: str = NOT_RECORDED,
    notes: Sequence[str] = (),
) -> Sheet:
    """Table 4: estimates on synthetic inputs against the one on real inputs.

    Args:
        agreements: From `fastlr.experiments.continual.agreement`.
        real: What the real inputs are.
        at: Where both were measured.
        none: What to say if there is nothing to compare.
        notes: Further notes.
    """
    title = f"Table 4: synthetic inputs against {real}"
    if not agreements:
        return Sheet("ablation", title, notes=(none, *notes))
    columns = ["inputs", "", "Pearson r", "r^2", "R2 x = y", "MSE", "MSE std.", "x / y", "n"]
    rows = []
    for a in agreements:
        inputs = INPUTS.get(a.measure, a.measure) if a.transform == "raw" else ""
        r = pm(a.r, a.stderr) if math.isfinite(a.stderr) else f"{a.r:.3f}"
        row = (
            inputs,
            a.transform,  # what r and MSE are of
            r,
            f"{a.r_squared:.3f}",
            f"{a.identity:.4g}",
            f"{a.squared_error:.3g}",
            f"{a.mse:.3f}",
            shown(a.ratio, "{:.3g}"),
            str(a.n),
        )
        rows.append(row)
    definitions = (
        f"x: local redundancy on the synthetic inputs, y: on {real}, at the same {at}. raw: the "
        "values as they are; log: their natural logarithms. No trend is removed.",
        "The paper (Table 4) does not define R^2 and MSE. Its R^2 is r squared (.964^2 = .929, "
        ".847^2 = .717 for its .718), as r^2 here, the "
        "share of y's variance that the best straight line in x explains; R2 x = y is 1 - sum (x "
        "- y)^2 / sum (y - mean y)^2, negative where the mean of y would be the better guess; MSE "
        "is the mean of (x - y)^2, of the raw values and of their logarithms; MSE std. that after "
        "each series is brought to mean 0 and standard deviation 1, which is 2 (1 - r) and cannot "
        "be the paper's (2.474 at r = 0.847); x / y is the geometric mean of the ratio. s.e. of "
        f"r: block bootstrap, from {FEWEST_FOR_ERROR} {at} on.",
    )
    return Sheet("ablation", title, columns, rows, (*definitions, *notes))

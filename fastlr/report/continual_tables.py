"""The tables of a continual run, from the analysis: text cells, with every definition stated below its table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastlr.analysis import Correlation, Cost, ForgettingBlock, Run, TooShort
from fastlr.analysis.bootstrap import SHORTEST_BLOCK
from fastlr.report.sheets import Sheet

LABELS = {
    "local_redundancy": "local redundancy",
    "local_redundancy_noise": "LR on noise",
    "local_redundancy_next_task": "LR on next task",
    "distance_from_init": "distance from init",
    "weight_norm": "weight norm",
    "dormant_ratio": "dormant ratio",
    "dormant_ratio_tau": "dormant ratio tau",
    "train_grad_norm": "training grad norm",
    "batch_grad_norm": "batch grad norm",
    "effective_rank": "effective rank",
    "srank": "srank",
    "feature_rank": "feature rank",
    "train": "training",
    "evaluate": "evaluation",
}
_METHODS = {"pearson": "r", "spearman": "rho"}
_TARGETS = {
    "future accuracy": "the mean accuracy of the next 10 tasks",
    "forgetting": "forgetting (of this task by the next)",
}


def label(name: str) -> str:
    """A measure's name in words; names joined by + are one pass that serves several.

    >>> label("dormant_ratio+srank")
    'dormant ratio + srank'
    """
    return " + ".join(LABELS.get(part, part.replace("_", " ")) for part in name.split("+"))


def hundred(value: float, digits: int = 1) -> str:
    """100 times the value; an en dash where there is none."""
    return f"{100 * value:.{digits}f}" if math.isfinite(value) else "–"


def order(names: Sequence[str]) -> list[str]:
    """Measures in the order of the paper's Table 1, others after them."""
    known = list(LABELS)
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _shown(c: Correlation) -> str:
    return f"{hundred(c.value)} ± {hundred(c.stderr)}" if math.isfinite(c.value) else "–"


def correlation_sheet(
    found: list[Correlation] | TooShort, *, slug: str, title: str, target: str, kind: str, transform: str
) -> Sheet:
    """Correlations of one kind in full: a line for Pearson's and one for Spearman's."""
    if isinstance(found, TooShort):
        return Sheet(slug, title, (), (), (str(found),))
    chosen = [c for c in found if c.kind == kind and c.transform == transform]
    columns = ("x 100", "", "value ± s.e.", "95 % interval", "naive", "least", "tasks")
    rows, missing = [], []
    for name in order(list(dict.fromkeys(c.measure for c in chosen))):
        for c in (c for c in chosen if c.measure == name):
            if c.note:
                missing.append(f"{label(name)}: {c.note}")
                continue
            interval = f"[{hundred(c.low)}, {hundred(c.high)}]"
            first = label(name) if c.method == "pearson" else ""
            rows.append(
                (first, _METHODS[c.method], _shown(c), interval, hundred(c.naive), hundred(c.smallest), str(c.n))
            )
    if not rows:
        return Sheet(slug, title, (), (), ("No measure has a correlation. " + "; ".join(dict.fromkeys(missing)),))
    trend = "the target alone (semi-partial, as in the paper)" if kind == "semi-partial" else "both (partial)"
    known = [c for c in chosen if not c.note]
    notes = [
        f"Each measure{' (its logarithm)' if transform == 'log' else ''} at the boundary after task t against "
        f"{_TARGETS[target]}; r is Pearson's, rho Spearman's; a line in task number is taken out of {trend}.",
        f"s.e. and interval: moving-block bootstrap, {known[0].blocks} blocks of {known[0].length} tasks, the line "
        "fitted anew to each resample; naive: 1/sqrt(tasks), which takes neighbouring tasks for independent; least: the "
        "smallest correlation that would be found with probability 80 % (two-sided test at 5 %).",
    ]
    runs = len(known[0].per_run)
    if runs > 1:
        notes.append(f"Mean over {runs} runs, weighted by tasks, resampled within runs.")
    if kind == "semi-partial":
        notes.append(
            "A measure that is nearly a line in task number has a semi-partial correlation near zero whatever it does "
            "beside the line: compare the partial ones."
        )
    ordered = order(list(dict.fromkeys(c.measure for c in known)))
    known.sort(key=lambda c: ordered.index(c.measure))
    outside = [f"{label(c.measure)} ({_METHODS[c.method]})" for c in known if c.low > 0 or c.high < 0]
    notes.append(
        f"Intervals without zero: {', '.join(outside) or 'none'}; of {len(known)} such intervals about "
        f"{len(known) / 20:.1f} would leave out zero by chance."
    )
    if known[0].blocks < 10:
        notes.append(f"With {known[0].blocks} blocks the errors themselves are rough.")
    if missing:
        notes.append("Left out: " + "; ".join(dict.fromkeys(missing)) + ".")
    return Sheet(slug, title, columns, tuple(rows), tuple(notes))


def overview_sheet(found: list[Correlation] | TooShort, *, slug: str, title: str) -> Sheet:
    """All kinds of correlation side by side."""
    if isinstance(found, TooShort):
        return Sheet(slug, title, (), (), (str(found),))
    combinations = [(k, t) for k in ("semi-partial", "partial") for t in ("raw", "log")]
    columns = ("x 100", "", *(f"{'semi' if k != 'partial' else k}, {t}" for k, t in combinations))
    rows = []
    for name in order(list(dict.fromkeys(c.measure for c in found))):
        for method in _METHODS:
            by = {(c.kind, c.transform): c for c in found if c.measure == name and c.method == method}
            cells = [_shown(by[each]) for each in combinations]
            if set(cells) != {"–"}:
                rows.append((label(name) if method == "pearson" else "", _METHODS[method], *cells))
    notes = (
        "value ± s.e. by block bootstrap. semi: the line in task number is taken out of the target alone; partial: out "
        "of the measure too. log: of the measure (Spearman's semi-partial does not feel it); – where it is zero at "
        "times, constant or a straight line.",
    )
    return Sheet(slug, title, columns, tuple(rows), notes)


def lead_sheet(found: list[Correlation] | TooShort, *, slug: str, title: str) -> Sheet | None:
    """How far local redundancy leads each other measure; None where there is nothing to compare."""
    if isinstance(found, TooShort):
        return None
    raw = [c for c in found if c.transform == "raw" and math.isfinite(c.lead)]
    combinations = [(k, m) for k in ("semi-partial", "partial") for m in _METHODS]
    rows = []
    for name in order(list(dict.fromkeys(c.measure for c in raw))):
        by = {(c.kind, c.method): c for c in raw if c.measure == name}
        shown = [
            f"{hundred(c.lead)} ± {hundred(c.lead_stderr)}" if (c := by.get(each)) else "–" for each in combinations
        ]
        rows.append((label(name), *shown))
    if not rows:
        return None
    columns = ("x 100", *(f"{'semi' if k != 'partial' else k}, {_METHODS[m]}" for k, m in combinations))
    notes = (
        "Local redundancy's correlation minus that of each other measure (raw), with the standard error of the "
        "difference: both are computed on the same resamples. With a sign: a measure that falls where accuracy rises "
        "has a negative correlation, so compare sizes in the tables above.",
    )
    return Sheet(slug, title, columns, tuple(rows), notes)


def forgetting_sheet(blocks: Sequence[ForgettingBlock]) -> Sheet:
    """Mean forgetting, of all tasks and by blocks."""
    title = "Forgetting: what a task's accuracy loses by training on the next"
    if not blocks:
        return Sheet("forgetting", title, (), (), ("No task has an accuracy after the next one.",))
    rows = []
    for index, b in enumerate(blocks):
        name = "all tasks" if index == 0 else f"{b.first} to {b.last}"
        error = hundred(b.stderr, 2)
        rows.append((name, str(b.n), hundred(b.right_after), hundred(b.one_later), f"{hundred(b.mean, 2)} ± {error}"))
    notes = (
        "Per cent: accuracy on a task's held-out images right after training on it, after the next task, and their "
        f"difference (positive: forgotten) with its standard error, by blocks of {SHORTEST_BLOCK} tasks where there are "
        "two or more, else sd/sqrt(n).",
    )
    return Sheet("forgetting", title, ("tasks", "n", "right after", "one later", "forgetting"), tuple(rows), notes)


def cost_sheet(found: Sequence[Cost], runs: Sequence[Run]) -> Sheet:
    """Table 5: seconds and share of training of each measure."""
    title = "Table 5: what each measure costs"
    if not found:
        return Sheet("costs", title, (), (), ("The records hold no times.",))
    rows = [
        (
            label(c.name),
            f"{c.total:.1f}",
            f"{c.mean:.4f}",
            f"{c.median:.4f}",
            f"{100 * c.share:.2f} %" if math.isfinite(c.share) else "–",
            str(c.n),
        )
        for c in found
    ]
    devices = list(dict.fromkeys(text for run in runs if (text := run.machine)))
    notes = [
        "Timed within the run: seconds in all, their mean and median a task, and their share of the seconds of training "
        "(first row). The first call plans and compiles: it is in the total and the mean, not in the median. Measures "
        "joined by + share one pass.",
    ]
    if devices:
        notes.append("On " + "; ".join(devices) + ".")
    return Sheet("costs", title, ("", "total s", "mean s", "median s", "share", "tasks"), tuple(rows), tuple(notes))


def runs_sheet(runs: Sequence[Run]) -> Sheet:
    """What was run: each run's tasks, gaps and accuracy at its two ends."""
    rows = []
    for run in runs:
        accuracy = run.accuracy
        known = accuracy[accuracy == accuracy]
        tenth = max(1, len(known) // 10)
        ends = (
            (hundred(float(known[:tenth].mean())), hundred(float(known[-tenth:].mean()))) if len(known) else ("–",) * 2
        )
        rows.append((run.name, str(len(run.tasks)), str(len(run.skipped)), str(len(run.resumed)), *ends))
    columns = ("run", "tasks", "skipped", "resumed", "first 10th %", "last 10th %")
    note = "Accuracy on held-out images of a task right after training on it: mean of the first and the last tenth."
    return Sheet("runs", "Runs", columns, tuple(rows), (note,))


def definitions_sheet(runs: Sequence[Run]) -> Sheet:
    """The definition of each measure, in the words of the records."""
    names = order(list(dict.fromkeys(name for run in runs for name in run.measures)))
    rows = []
    for name in names:
        texts = dict.fromkeys(text for run in runs if (text := run.definition(name)))
        rows.append((label(name), " / ".join(texts) or "–"))
    return Sheet("definitions", "What the measures are", ("measure", "definition"), tuple(rows))

"""Whether measures are causes of accuracy: runs compared by intervention and by seed.

Measures are also tried as predictors of later accuracy.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri, stdtrit

from fastlr.display.figures import COLOURS, INK, MUTED, legend_below, new_figure, save_figure, style
from fastlr.display.sheets import DASH, Columns, Sheet
from fastlr.display.tables import pm
from fastlr.errors import FastlrWarning
from fastlr.experiments.continual.findings import brief, ends
from fastlr.experiments.continual.options import INTERVENTIONS, ContinualOptions
from fastlr.experiments.continual.records import HORIZON, ContinualRun
from fastlr.experiments.continual.tables import hundred, label, order
from fastlr.experiments.runs.records import Array, as_dict, finite, number
from fastlr.experiments.statistics.bootstrap import LEVEL, deviation
from fastlr.experiments.statistics.seeds import Mean, mean_over_seeds

# Interventions or seeds behind an interval; blocks of tasks, each predicted from the others.
FEWEST, FOLDS = (
    4,
    5,
)
_OFF = {key: getattr(ContinualOptions(), key) for key in INTERVENTIONS}
KINDS = ("between", "within", "change")
_LR = "local_redundancy"


@dataclass(frozen=True)
class Comparison:
    """Late accuracy and late measures (means over the last fifth) of runs by intervention and seed.

    Arrays are ``[interventions, seeds]``, NaN where there is no such run.

    Attributes:
        groups: The runs of each intervention that are compared; the first, with the fewest options,
            is the control.
        accuracy: Its mean.
        measures: The mean of each, or of its logarithm where it is always positive (``logs``).
        tasks: Of every run, what lies beyond is left out.
    """

    groups: dict[str, list[ContinualRun]]
    accuracy: Array
    measures: dict[str, Array]
    logs: frozenset[str]
    tasks: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the interventions."""
        return tuple(self.groups)

    def change(self, values: Array, intervention: int) -> Mean:
        """Return the mean over seeds of an intervention's effect on ``values``.

        The effect is the difference from the control of the same seed.
        """
        pairs = finite(values[intervention] - values[0])
        return (
            mean_over_seeds(pairs.tolist())
            if len(pairs)
            else Mean(math.nan, math.nan, math.nan, math.nan, 0)
        )


def by_intervention(runs: Sequence[ContinualRun]) -> dict[str, list[ContinualRun]]:
    """Group runs by the options of their interventions, those with the fewest options first.

    The groups are named by their folders if these differ.
    """
    groups: dict[str, list[ContinualRun]] = {}
    told = [{**_OFF, **{k: v for k, v in run.options.items() if k in _OFF}} for run in runs]
    varying = [k for k in _OFF if any(options[k] != told[0][k] for options in told)]
    changed = [{k: options[k] for k in varying if options[k] != _OFF[k]} for options in told]
    for i in sorted(range(len(runs)), key=lambda i: len(changed[i])):
        groups.setdefault(json.dumps(changed[i], sort_keys=True), []).append(runs[i])
    folders = [
        {re.sub(r"[,-]?seed-\d+$", "", run.path.name) for run in group} for group in groups.values()
    ]
    if all(map(len, folders)) and len(set().union(*folders)) == sum(map(len, folders)) == len(
        groups
    ):
        return {names.pop() or "none": group for names, group in zip(folders, groups.values())}
    return {
        ", ".join(f"{k}={v}" for k, v in json.loads(key).items()) or "none": g
        for key, g in groups.items()
    }


def compare(runs: Sequence[ContinualRun]) -> Comparison:
    """Take the late accuracy and measures of runs of several interventions.

    A run with less than 9/10 of the longest run's tasks is left out, with a warning.
    """
    longest = max(map(len, runs))
    used = [run for run in runs if 10 * len(run) >= 9 * longest]
    if len(used) < len(runs):
        text = (
            f"{len(runs) - len(used)} of {len(runs)} runs have less than 9/10 of {longest} tasks "
            "and are left out"
        )
        warnings.warn(text, FastlrWarning, stacklevel=2)
    groups, tasks = by_intervention(used), min(map(len, used))
    seeds = sorted({run.options.get("seed", 0) for run in used})
    measured = order(name for run in used for name in run.measures)
    late = {name: np.full((len(groups), len(seeds)), np.nan) for name in ("accuracy", *measured)}
    raw = {name: [finite(ends(run.measure(name)[:tasks])[1]) for run in used] for name in measured}
    logs = frozenset(name for name, values in raw.items() if all((v > 0).all() for v in values))
    for i, group in enumerate(groups.values()):
        for run in group:
            j = seeds.index(run.options.get("seed", 0))
            for name, values in late.items():
                value = finite(
                    ends((run.accuracy if name == "accuracy" else run.measure(name))[:tasks])[1]
                )
                if len(value):
                    values[i, j] = (np.log(value) if name in logs else value).mean()
    return Comparison(groups, late.pop("accuracy"), late, logs, tasks)


@dataclass(frozen=True)
class Together:
    """Pearson's correlation of a late measure with late accuracy, three ways, with 95 % intervals.

    The intervals are percentiles of a bootstrap, widened for few units.

    between: over interventions, of means over seeds (interventions and seeds are resampled);
    within: over the seeds of each intervention, of deviations from its means (seeds are); change:
    of differences to the control of the same seed, not centred: 1 where every intervention changes
    accuracy in proportion to the measure (both are). The control counts in every change: one that
    is out of the ordinary in both makes them alike.
    """

    measure: str
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def together(found: Comparison, *, resamples: int = 1000, seed: int = 0) -> list[Together]:
    """Correlate measures with accuracy: between and within interventions, and by their effects."""
    rows, columns = found.accuracy.shape
    if rows < 2:
        return []
    result = []
    for name, values in found.measures.items():
        rng = np.random.default_rng(seed)  # all measures are resampled alike
        x, y = (
            np.where(np.isfinite(values + found.accuracy), part, np.nan)
            for part in (values, found.accuracy)
        )
        picked: list[list[Any]] = [
            [rng.integers(0, rows, rows), range(rows), [0, *rng.integers(1, rows, rows - 1)]]
            for _ in range(resamples)
        ]
        drawn = rng.integers(0, columns, (resamples, columns))
        pair = Together(name, {}, {})
        for k, (kind, units) in enumerate(zip(KINDS, (rows, columns, min(rows - 1, columns)))):
            places = [np.ix_(rows_of[k], of_seeds) for rows_of, of_seeds in zip(picked, drawn)]
            pair.values[kind] = _r(kind, x, y)
            again = np.array([_r(kind, x[place], y[place]) for place in places])
            pair.intervals[kind] = _percentiles(pair.values[kind], again, units)
        result.append(pair)
    return result


def _percentiles(value: float, again: Array, units: int) -> tuple[float, float]:
    """Return the 95 % interval of a correlation from its bootstrap replicates ``again``.

    The percentiles are widened on Fisher's scale, as Student's quantile is for so few units.
    """
    known = finite(again)
    if units < FEWEST or not math.isfinite(value) or not len(known):
        return math.nan, math.nan
    z, *ends_ = np.arctanh(
        np.clip([value, *np.quantile(known, (LEVEL / 2, 1 - LEVEL / 2))], -1 + 1e-12, 1 - 1e-12)
    )
    wider = (
        stdtrit(units - 1, 1 - LEVEL / 2) / ndtri(1 - LEVEL / 2) * math.sqrt(units / (units - 1))
    )
    low, high = np.tanh(z + wider * (np.array(ends_) - z))
    return float(low), float(high)


def _r(kind: str, x: Array, y: Array) -> float:
    """A correlation of `Together`, from ``[interventions, seeds]``."""
    if kind == "change":
        x, y = x[1:] - x[0], y[1:] - y[0]
    else:
        count = np.isfinite(x).sum(1)
        with np.errstate(invalid="ignore"):
            means = [np.nansum(part, 1) / count for part in (x, y)]
        x, y = (
            means
            if kind == "between"
            else (part - mean[:, None] for part, mean in zip((x, y), means))
        )
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3:
        return math.nan
    if kind == "between":
        x, y = x - x.mean(), y - y.mean()
    size = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / size if size > 1e-12 else math.nan


@dataclass(frozen=True)
class Prediction:
    """What a measure adds to predictions, out of sample, of the mean accuracy of the next 10 tasks.

    Attributes:
        base: R^2 of task number (a line for each run) and current accuracy, against each run's
            mean.
        gain: What R^2 gains by the measure (its logarithm, where positive), 95 % interval ``low``
            to ``high`` by bootstrap of blocks: those of one seed at the same tasks are one.
        n: Tasks that are predicted.
    """

    measure: str
    base: float
    gain: float
    low: float
    high: float
    n: int


def predictions(
    runs: Sequence[ContinualRun], *, resamples: int = 1000, seed: int = 0
) -> list[Prediction]:
    """Predict future accuracy by nested least squares with and without each measure.

    The slopes are shared by all runs, and each of 5 blocks of tasks is predicted from the others.

    Tasks within 10 of the block are not learned from, as their targets overlap with it.
    """
    result, longest = [], max(map(len, runs))
    targets = [(run, run.future_accuracy(), run.accuracy) for run in runs]
    for name in order(measure for run in runs for measure in run.measures):
        measured = [run.measure(name) for run in runs]
        squares: dict[tuple[Any, int], Array] = {}
        positive = all((finite(values) > 0).all() for values in measured)
        n = 0
        for fold in range(FOLDS):
            start, stop = (longest * k // FOLDS for k in (fold, fold + 1))
            train, test = [], []
            for (run, y, accuracy), x in zip(targets, measured):
                t, x = np.arange(len(run), dtype=float), np.log(x) if positive else x
                known = np.isfinite(y) & np.isfinite(x) & np.isfinite(accuracy)
                held = known & (t >= start) & (t < stop)
                learned = known & ((t < start - HORIZON) | (t >= stop + HORIZON))
                if learned.sum() < FEWEST or not held.any():
                    continue
                columns = np.stack([y, accuracy, x], 1)
                line = np.polyfit(t[learned], columns[learned], 1)
                trended = columns - np.stack([t, np.ones_like(t)], 1) @ line
                train.append(trended[learned])
                test.append(
                    (
                        (run.options.get("seed", run.name), fold),
                        trended[held],
                        y[held] - y[learned].mean(),
                    )
                )
            if not train:
                continue
            of = np.concatenate(train)
            small, large = (np.linalg.lstsq(of[:, 1:k], of[:, 0], rcond=None)[0] for k in (2, 3))
            for key, z, total in test:
                errors = (z[:, 0] - z[:, 1:2] @ small, z[:, 0] - z[:, 1:] @ large, total)
                squares[key] = squares.get(key, np.zeros(3)) + [float(e @ e) for e in errors]
                n += len(z)
        units = np.array(list(squares.values()))
        if len(units) < FEWEST or not units[:, 2].sum():
            continue
        drawn = np.random.default_rng(seed).integers(0, len(units), (resamples, len(units)))
        small, large, total = units[drawn].sum(1).T
        half = stdtrit(len(units) - 2, 1 - LEVEL / 2) * deviation(
            (small - large) / total, len(units)
        )
        small, large, total = units.sum(0)
        gain = float((small - large) / total)
        result.append(Prediction(name, float(1 - small / total), gain, gain - half, gain + half, n))
    return result


def _cell(value: float, low: float, high: float) -> str:
    return hundred(value, 0) + (
        f" [{hundred(low, 0)}, {hundred(high, 0)}]" if math.isfinite(low) else ""
    )


def prediction_sheet(predicted: Sequence[Prediction]) -> Sheet:
    """What each measure adds to the prediction of the next tasks' accuracy, out of sample."""
    title = f"Prediction out of sample: mean accuracy of the next {HORIZON} tasks"
    if not predicted:
        return Sheet("prediction", title, notes=("Too few tasks to predict some from others.",))
    columns: Columns[Prediction] = {
        "R2 x 100": lambda p: label(p.measure),
        "without": lambda p: hundred(p.base),
        "gain": lambda p: hundred(p.gain, 2),
        "95 % interval": lambda p: f"[{hundred(p.low, 2)}, {hundred(p.high, 2)}]",
        "tasks": lambda p: str(p.n),
    }
    note = (
        "without: from task number (a line for each run) and current accuracy; gain: by the "
        "measure now (its logarithm where positive) besides. Least squares, slopes shared by all "
        f"runs; each of {FOLDS} blocks of tasks is predicted from the others, those within "
        f"{HORIZON} tasks of it left out. Negative: worse than without. Interval: bootstrap of "
        "blocks."
    )
    return Sheet.of("prediction", title, predicted, columns, [note])


def cause_sheets(found: Comparison, pairs: Sequence[Together]) -> list[Sheet]:
    """The correlations of each measure, and what each intervention changes."""
    control, rows = found.names[0], range(len(found.names))
    seeds = np.isfinite(found.accuracy).sum(1)
    kinds: Columns[Together] = {
        "r x 100": lambda c: label(c.measure) + (", log" if c.measure in found.logs else ""),
        **{kind: partial(_of_kind, kind) for kind in KINDS},
    }
    note = (
        f"Means over the last fifth of {found.tasks} tasks. between: over {len(rows)} "
        f"interventions, of means over {seeds.min()} to {seeds.max()} seeds; within: over the "
        f"seeds of each intervention; change: of differences to {control} with the same seed, not "
        "centred. Brackets: 95 % intervals by bootstrap of interventions and seeds (within: "
        f"seeds), from {FEWEST} on. A correlation of changes is what an intervention does to both; "
        "that it acts through the measure it cannot show, but a measure that moves without "
        "accuracy is no cause."
    )
    changes: dict[str, Callable[[int], str]] = {
        "intervention": lambda i: found.names[i],
        "seeds": lambda i: str(seeds[i]),
        "accuracy %": lambda i: hundred(_mean(found.accuracy[i])),
        "change": lambda i: _change(found.change(100 * found.accuracy, i)) if i else DASH,
    }
    if (values := found.measures.get(_LR)) is not None and _LR in found.logs:
        changes["LR"] = lambda i: _geometric(values[i])
        changes["log change"] = lambda i: _change(found.change(values, i)) if i else DASH
    told = (
        f"Late accuracy, and local redundancy (geometric mean); changes against {control} with the "
        "same seed: mean and standard error over seeds, of local redundancy in natural logarithms."
    )
    return [
        Sheet.of(
            "causes", "Does it cause? Late measures against late accuracy", pairs, kinds, [note]
        ),
        Sheet.of("interventions", "What each intervention changes", rows, changes, [told]),
    ]


def course_sheets(groups: dict[str, list[ContinualRun]]) -> list[Sheet]:
    """Return tables of how local redundancy on each kind of inputs, and accuracy, changed.

    The columns are: untrained, in the first and in the last fifth.
    """
    runs = (run for group in groups.values() for run in group)
    measured = order(name for run in runs for name in run.measures if name.startswith(_LR))
    return [_course(groups, name) for name in measured]


def _course(groups: dict[str, list[ContinualRun]], measure: str) -> Sheet:
    accuracy = {
        name: [_mean([_mean(ends(run.accuracy)[k]) for run in group]) for k in (0, 1)]
        for name, group in groups.items()
    }
    logs = {
        name: np.array([_logs(run, measure) for run in group]) for name, group in groups.items()
    }

    def apart(name: str) -> str:
        late = finite(logs[name][:, 2])
        return f"x {math.exp(late.std(ddof=1)):.2f}" if len(late) > 1 else DASH

    columns: Columns[str] = {
        "intervention": str,
        "first %": lambda name: hundred(accuracy[name][0]),
        "last %": lambda name: hundred(accuracy[name][1]),
        "LR start": lambda name: _geometric(logs[name][:, 0]),
        "LR first": lambda name: _geometric(logs[name][:, 1]),
        "LR last": lambda name: _geometric(logs[name][:, 2]),
        "seeds": apart,
    }
    note = (
        "%: accuracy; first, last: fifth of the tasks; start: untrained. LR: geometric means over "
        "tasks and seeds. seeds: the factor by which those of the last fifth lie apart, exp of "
        "the standard deviation of their logarithms."
    )
    return Sheet.of(
        f"course{measure.removeprefix(_LR)}",
        f"Over the run: {label(measure)}",
        groups,
        columns,
        [note],
    )


def _logs(run: ContinualRun, measure: str) -> list[float]:
    """Return the mean logarithms of a measure: untrained, in the first and in the last fifth.

    They are NaN where it was not measured.
    """
    start = np.array([number(as_dict(run.start, measure).get("value"))])
    return [_mean(np.log(part[part > 0])) for part in (start, *ends(run.measure(measure)))]


def _mean(values: ArrayLike) -> float:
    """The mean of those that are finite; NaN if none is."""
    known = finite(values)
    return float(known.mean()) if len(known) else math.nan


def _geometric(logs: Array) -> str:
    mean = _mean(logs)
    return brief(math.exp(mean)) if math.isfinite(mean) else DASH


def _of_kind(kind: str, c: Together) -> str:
    return _cell(c.values[kind], *c.intervals[kind])


def _change(mean: Mean) -> str:
    if not math.isfinite(mean.value):
        return DASH
    return pm(mean.value, mean.stderr) if math.isfinite(mean.stderr) else f"{mean.value:.3g}"


def cause_findings(
    found: Comparison, pairs: Sequence[Together], predicted: Sequence[Prediction]
) -> list[str]:
    """Say in sentences whether local redundancy goes with accuracy, over interventions and seeds.

    They also say whether the interventions that move the one move the other, and what local
    redundancy adds to predictions.
    """
    sentences = []
    for c in (c for c in pairs if c.measure == _LR):
        words = (
            f"between {len(found.names)} interventions",
            "within them",
            f"by change against {found.names[0]}",
        )
        told = [
            f"{w} {c.values[kind]:.2f} {_doubt(c.values[kind], *c.intervals[kind])}"
            for w, kind in zip(words, KINDS)
        ]
        text = ", ".join(told).replace(" nan ", " ")
        sentences.append(f"Correlation of late local redundancy with late accuracy: {text}.")
        moved: dict[tuple[int, int], list[str]] = {}
        for i in range(1, len(found.names)):
            lr, accuracy = (
                found.change(values, i) for values in (found.measures[_LR], found.accuracy)
            )
            if math.isfinite(lr.low) and math.isfinite(accuracy.low):  # two seeds or more
                moved.setdefault((_sign(lr), _sign(accuracy)), []).append(found.names[i])
        verbs = {1: "raise", -1: "lower", 0: "do not measurably change"}
        parts = [
            f"{verbs[a]} it and {verbs[b]} accuracy: {', '.join(names)}"
            for (a, b), names in moved.items()
        ]
        which = (
            f"those that {'; that '.join(parts)}"
            if parts
            else "too few seeds to tell which change what"
        )
        sentences.append(f"Of the interventions (95 % intervals over seeds): {which}.")
    best = max(predicted, key=lambda p: p.gain, default=None)
    for p in predicted:
        if p is best or p.measure == _LR:
            picked = f" (the best of {len(predicted)})" if p is best and len(predicted) > 1 else ""
            sentences.append(
                f"Beyond task number and current accuracy, {label(p.measure)}{picked} changes R^2 "
                f"of the next {HORIZON} tasks' accuracy out of sample by {p.gain:+.4f} "
                f"{_doubt(p.gain, p.low, p.high, 4)}."
            )
    return sentences


def _doubt(value: float, low: float, high: float, digits: int = 2) -> str:
    if not (math.isfinite(value) and math.isfinite(low)):
        return f"(too few to tell from chance{'' if math.isfinite(value) else ' or constant'})"
    unsure = "" if low > 0 or high < 0 else ": cannot be told from 0"
    return f"({low:.{digits}f} to {high:.{digits}f}{unsure})"


def _sign(mean: Mean) -> int:
    return int(mean.low > 0) - int(mean.high < 0)


def cause_scatter(found: Comparison, path: str | os.PathLike[str]) -> bool:
    """Draw late accuracy over late local redundancy; return False if there is nothing to draw.

    Small markers are runs, large ones the mean of an intervention.
    """
    if _LR not in found.logs:
        return False
    figure, axes = new_figure((8, 5.4), 1)
    for i, name in enumerate(found.names):
        x, y = np.exp(found.measures[_LR][i]), 100 * found.accuracy[i]
        style_of = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": "osD^v"[i // len(COLOURS) % 5],
            "linestyle": "",
        }
        axes.plot(x, y, markersize=3, alpha=0.5, **style_of)
        middle = math.exp(_mean(found.measures[_LR][i]))
        axes.plot([middle], [_mean(y)], markersize=9, markeredgecolor=INK, label=name, **style_of)
    axes.set_xscale("log")
    axes.set_xlabel("late local redundancy, E||grad||²", color=INK, fontsize=9)
    style(
        axes,
        "late accuracy, %",
        f"Last fifth of {found.tasks} tasks; small: a run, large: mean over seeds",
        grid="both",
    )
    axes.tick_params(which="both", labelsize=8, colors=MUTED)
    legend_below(figure, axes)
    return save_figure(figure, path)

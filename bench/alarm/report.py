"""The report of the study of alarms: tables, a figure and what they say.

Usage: ``python -m bench.alarm.report [--values FOLDER] [--out FOLDER]``, from the kept values.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from bench.alarm.analysis import (
    ACCURACY,
    ALL,
    LEADS,
    MEASURES,
    RARE,
    RESAMPLES,
    Alarm,
    Analysis,
    analyse,
    rule_of_all,
)
from bench.alarm.choices import LEAD, MOST_FALSE, percentile_interval, warns_earlier
from bench.alarm.falls import falls_sheets
from bench.alarm.figure import found_against_false
from bench.alarm.losses import (
    LOST,
    LOST_EARLY,
    NOT_LOST,
    UNCLEAR,
    Array,
    share_declared,
    shuffled,
)
from bench.alarm.prediction import prediction_sheet
from bench.alarm.problems import JUDGED, PROBLEMS
from bench.alarm.signals import Course
from bench.alarm.values import KEPT, courses
from fastlr.display.record import counted
from fastlr.display.sheets import DASH, Sheet
from fastlr.experiments.runs.report import Drawing, Report, write_files

STATIONARY = "fresh-digits"  # the problem in which nothing changes


def write_report(
    runs: Sequence[Course],
    out: Path,
    resamples: int = RESAMPLES,
    beside: Sequence[Course] = (),
) -> Report:
    """Judge the alarms of all measures and write the report.

    Args:
        runs: on which alarms are judged.
        out: folder of the report.
        resamples: of the bootstrap.
        beside: all runs of which it says what became of them; none: ``runs``.
    """
    found = analyse(runs, resamples)
    sentences = conclusions(found)
    sheets = [
        conclusion_sheet(found),
        differences_sheet(found),
        *(alarms_sheet(found, problem) for problem in found.problems),
        rules_sheet(found),
        prediction_sheet(runs, found.losing, False, resamples),
        prediction_sheet(runs, found.losing, True, resamples),
        runs_sheet(beside or runs),
        definition_sheet(runs),
        *falls_sheets(beside or runs),
    ]
    out.mkdir(parents=True, exist_ok=True)
    drawing = Drawing(
        "alarm.png",
        partial(found_against_false, runs),
        "Share of the losses found at least five tasks ahead, mean over the problems that were set "
        "to lose, against false alarms in 100 tasks.",
    )
    lead = f"{counted(len(runs), 'run')} of {counted(len(found.problems), 'problem')}."
    return write_files(
        out,
        "How often is an alarm right?",
        sentences,
        [lead],
        sheets,
        [drawing],
        [],
        numbers(found) | {"rules": {name: rule_of_all(runs, ALL[name]) for name in ALL}},
        screen=sheets[:1],
    )


def conclusions(found: Analysis) -> list[str]:
    """Say which measures warn earlier than accuracy does, by the rule fixed before the runs."""
    earlier = [
        name
        for name, difference in found.differences.items()
        if warns_earlier(difference, found.adjusted_p[name])
    ]
    first = (
        f"Measures that warn earlier than accuracy does: {', '.join(earlier)}."
        if earlier
        else "Not shown of any measure: that it warns earlier than accuracy does."
    )
    baseline = found.alarms[ACCURACY]
    shares = [100 * float(baseline[problem].found[LEAD][0]) for problem in found.losing]
    rates = [float(baseline[problem].false[0]) for problem in found.problems]
    second = (
        f"The trailing mean of accuracy found {min(shares):.0f} to {max(shares):.0f} % of the "
        f"losses at least {LEAD} tasks ahead, by rules that the other problems chose, with "
        f"{min(rates):.2g} to {max(rates):.2g} false alarms in 100 tasks."
    )
    return [first, second]


def conclusion_sheet(found: Analysis) -> Sheet:
    """The decisive comparison: the share found in time, less that of the accuracy baseline."""
    rows = []
    for name, difference in found.differences.items():
        mean = with_interval(difference.mean, difference.low, difference.high)
        p = found.adjusted_p[name]
        said = "warns earlier" if warns_earlier(difference, p) else "not shown"
        rows.append((name, mean, f"{p:.3f}", said))
    note = (
        f"Share of the losses found with a lead of at least {LEAD} tasks, less that of the "
        "trailing mean of accuracy, in points, with 95 % intervals by bootstrap of seeds within "
        "problems, thresholds chosen anew in each resample. p: two-sided, of the mean over the "
        "problems, after Holm over the measures. A measure warns earlier if its mean is above 0 "
        "and no problem lies below 0 beyond its interval; where it is not shown, half the width "
        "of the mean's interval is what could have been seen."
    )
    columns = ("measure", "mean", "p", "")
    title = "Does a measure warn earlier than accuracy?"
    return Sheet("conclusion", title, columns, rows, (note,))


def differences_sheet(found: Analysis) -> Sheet:
    """What the decisive comparison is the mean of: the difference on each problem that loses."""
    rows = []
    for name, difference in found.differences.items():
        by_problem = [
            with_interval(difference.by_problem[problem], *difference.intervals[problem])
            for problem in found.losing
        ]
        rows.append((name, *by_problem))
    note = "As above; brackets: 95 %."
    columns = ("measure", *found.losing)
    return Sheet("differences", "The same by problem", columns, rows, (note,))


def alarms_sheet(found: Analysis, problem: str) -> Sheet:
    """What the alarms did on one problem."""
    rows = []
    for name in ALL:
        alarm = found.alarms[name][problem]
        rows.append(
            (
                name,
                *(percent(alarm.found[lead], alarm.losses) for lead in LEADS),
                per_hundred(alarm),
                percent(alarm.followed, alarm.rings),
                percent(alarm.followed_if_rare, alarm.rings),
                percent(alarm.fitted, alarm.losses),
            )
        )
    alarm = found.alarms[ACCURACY][problem]
    note = (
        f"{alarm.losses} of {alarm.runs} runs lost plasticity. found: share of these whose loss "
        "was announced so many tasks ahead, in percent. false: rings that announce nothing, in "
        "100 tasks. followed: share of the rings with an onset within 40 tasks, here and where "
        f"one run in {round(1 / RARE)} loses. fitted: found at least {LEAD} ahead by the threshold "
        "that has, on this very problem, no more false alarms than accuracy has. Brackets: 95 %."
    )
    columns = ("measure", *(f"found >= {lead}" for lead in LEADS))
    columns += ("false", "followed", "if rare", "fitted")
    return Sheet(f"alarms-{problem}", f"Alarms on {problem}", columns, rows, (note,))


def rules_sheet(found: Analysis) -> Sheet:
    """The rules that the other problems chose."""
    rows = []
    for name in ALL:
        alarms = [found.alarms[name][problem] for problem in found.problems]
        rows.append((name, *(alarm.rule for alarm in alarms)))
    note = (
        "Chosen on all problems but the one of the column: most losses found with a lead of "
        f"{LEAD} at no more than {MOST_FALSE:g} false alarm in 100 tasks. Values are logarithms of "
        "ratios to the median over tasks 5 to 15; of accuracy and learning speed shares of the "
        "distance to a guess; of the dormant ratio and trainability differences."
    )
    return Sheet("rules", "Rules", ("measure", *found.problems), rows, (note,))


def runs_sheet(runs: Sequence[Course]) -> Sheet:
    """What became of the runs."""
    rows = []
    groups = dict.fromkeys((run.problem, run.variant) for run in runs)
    for problem, variant in groups:
        of_it = [run for run in runs if (run.problem, run.variant) == (problem, variant)]
        count = Counter(run.outcome for run in of_it)
        onsets = [run.loss.onset for run in of_it if run.loss is not None]
        first = np.mean([run.accuracy[:20].mean() for run in of_it])
        last = np.mean([run.accuracy[-20:].mean() for run in of_it])
        outcomes = (LOST, LOST_EARLY, NOT_LOST, UNCLEAR)
        cells = (f"{100 * first:.1f}", f"{100 * last:.1f}", *(str(count[o]) for o in outcomes))
        median = f"{np.median(onsets):.0f}" if onsets else DASH
        rows.append((f"{problem} {variant}", str(len(of_it)), *cells, median))
    columns = ("runs", "seeds", "first %", "last %", LOST, LOST_EARLY, NOT_LOST, UNCLEAR, "onset")
    note = (
        "Mean accuracy of the first and the last twenty tasks; the median onset of the losses. "
        "Rings in unclear runs, and in those lost early, count neither way."
    )
    return Sheet("runs", "What became of the runs", columns, rows, (note,))


def definition_sheet(runs: Sequence[Course]) -> Sheet:
    """The check of the definition: losses declared where nothing changes."""
    still = [run for run in runs if run.problem == STATIONARY]
    guess = PROBLEMS[STATIONARY].guess
    as_they_are = share_declared([run.accuracy for run in still], guess)
    at_random = share_declared([shuffled(run.accuracy, run.seed) for run in still], guess)
    rows = [(STATIONARY, str(len(still)), f"{100 * as_they_are:.1f}", f"{100 * at_random:.1f}")]
    note = "Share of the runs in which a loss is declared, in percent; at most 5 was wanted."
    columns = ("problem", "runs", "as they are", "tasks shuffled")
    return Sheet("definition", "Losses where nothing changes", columns, rows, (note,))


def percent(values: Array, count: int) -> str:
    """Write a share in percent with its interval; exact where all or none of a count are in it."""
    share = float(values[0])
    if not math.isfinite(share):
        return DASH
    low, high = percentile_interval(values[1:])
    if share in (0.0, 1.0) and count:
        low, high = exact_interval(round(share * count), count)
    return with_interval(share, low, high)


def exact_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Clopper and Pearson (1934)."""
    interval = binomtest(count, total).proportion_ci(method="exact")
    return float(interval.low), float(interval.high)


def with_interval(share: float, low: float, high: float) -> str:
    """Write a share or a difference of shares, in percent, with its interval."""
    return f"{100 * share:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def per_hundred(alarm: Alarm) -> str:
    """Write false alarms in 100 tasks with their interval."""
    rate = float(alarm.false[0])
    if not math.isfinite(rate):
        return DASH
    low, high = percentile_interval(alarm.false[1:])
    if rate == 0 and alarm.quiet_tasks:
        high = 100 * exact_interval(0, alarm.quiet_tasks)[1]
    return f"{rate:.2f} [{low:.2f}, {high:.2f}]"


def numbers(found: Analysis) -> dict[str, Any]:
    """Return what goes into report.json."""
    differences = {
        name: {**vars(difference), "p_holm": found.adjusted_p[name]}
        for name, difference in found.differences.items()
    }
    alarms: dict[str, dict[str, Any]] = {}
    for name, by_problem in found.alarms.items():
        alarms[name] = {problem: dict(plain(alarm)) for problem, alarm in by_problem.items()}
    return {
        "problems": list(found.problems),
        "losing": list(found.losing),
        "differences": differences,
        "alarms": alarms,
        "measures": list(MEASURES),
    }


def plain(alarm: Alarm) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of an alarm in the sample, by name."""
    yield "rule", alarm.rule
    for lead, found in alarm.found.items():
        yield f"found_{lead}", float(found[0])
    yield "false_per_100_tasks", float(alarm.false[0])
    yield "followed", float(alarm.followed[0])
    yield "followed_if_rare", float(alarm.followed_if_rare[0])
    yield "fitted", float(alarm.fitted[0])
    yield "losses", alarm.losses
    yield "runs", alarm.runs
    yield "quiet_tasks", alarm.quiet_tasks


def main() -> None:
    """Write the report, and show its first table."""
    parser = argparse.ArgumentParser(prog="python -m bench.alarm.report", description=__doc__)
    parser.add_argument("--values", type=Path, default=KEPT)
    parser.add_argument("--out", type=Path, default=KEPT.parent)
    given = parser.parse_args()
    runs = [run for problem in JUDGED for run in courses(given.values, problem)]
    beside = [run for problem in PROBLEMS for run in courses(given.values, problem)]
    write_report(runs, given.out, beside=beside).show()


if __name__ == "__main__":
    main()

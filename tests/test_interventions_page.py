"""docs/guides/interventions.md has all interventions, their options, and the studies' figures."""

import csv
import re
import shlex
from pathlib import Path

from pytest import mark
from test_interpreting import numbers, rows

from bench.causes.runs import INTERVENTIONS as OF_THE_STUDY
from fastlr.experiments.continual.interventions import INTERVENTIONS
from fastlr.experiments.continual.options import PRESETS, ContinualOptions
from fastlr.experiments.runs.options import json_object, resolve

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "bench/results/cpu"
PAGE = (ROOT / "docs/guides/interventions.md").read_text()

with_records = mark.skipif(not RECORDS.exists(), reason="a source distribution has no results")


def table(first):
    """The rows of the table whose first column is called this, by that column."""
    (text,) = re.findall(rf"^\| {first} \|.*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
    header, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
    )
    return {cells[0]: dict(zip(header[1:], cells[1:], strict=True)) for cells in lines}


@mark.parametrize("name", INTERVENTIONS)
def test_each_is_there_with_its_source_and_its_options(name):
    kind = INTERVENTIONS[name]
    for option in kind.options:
        assert re.search(rf"`{option}\b", PAGE), option
    for paper in re.findall(r"arXiv:[\d.]+|Nature \d+", kind.source):
        assert paper in PAGE


@with_records
@mark.parametrize("problem", ["random-labels", "permuted-digits", "class-pairs", "transformer"])
def test_the_table_of_causes_is_the_studys(problem):
    with (RECORDS / f"causes/{problem}/interventions.csv").open() as file:
        recorded = {row["intervention"]: row for row in csv.DictReader(file)}
    told = {name: row[problem] for name, row in table("row").items() if row[problem] != "–"}
    assert told.keys() == recorded.keys()
    for name, text in told.items():
        change = recorded[name]["change"]
        assert text == recorded[name]["accuracy %"] + (f", {change}" if name != "none" else "")


@with_records
def test_the_table_of_alarms_is_the_studys():
    with (RECORDS / "alarm/runs.csv").open() as file:
        recorded = {row["runs"]: row for row in csv.DictReader(file)}
    for name, row in table("runs").items():
        assert row.items() <= recorded[name].items()


@with_records
def test_sentences_on_the_studies_are_held_by_the_rows_they_name():
    found = 0
    for line in re.split(r"\n- |\n\n", PAGE):
        text = " ".join(line.split())
        for claim, citation in re.findall(r"(.*?)\(\*([a-z-]+/[a-z].*?)\*\)", text):
            held = set()
            for part in citation.split("; "):
                place, _, names = part.partition(": ")
                of_table = rows(*place.split("/"))
                held |= set().union(*(of_table[name] for name in names.split(", ")))
            assert numbers(claim) <= held, claim
            found += 1
    assert found == 6


def test_settings_shown_are_the_studys():
    """What stands after each intervention, where it was in the study; the weight decay as well."""
    shown = {}
    for command in re.findall(r"`(--set [^`]*)`", PAGE):
        for word in shlex.split(command):
            key, _, value = word.partition("=")
            shown.setdefault(key, set()).add(value)
    for settings in OF_THE_STUDY.values():
        for key, value in settings.items():
            given = shown[key]
            if isinstance(value, dict):
                assert value in [json_object(text) for text in given]
            else:
                assert value in [type(value)(text) for text in given]
        decay = resolve(ContinualOptions, PRESETS, "demo", settings).weight_decay
        assert f"weight decay at `{decay}` in all runs" in PAGE.replace("\n", " ")

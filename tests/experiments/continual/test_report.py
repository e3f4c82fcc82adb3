"""The report of continual runs: files, tables of 80 columns, a self-contained page, commands."""

import base64
import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from continual_runs import LAYERS, read_lines, set_options, write_lines, write_run
from expected import refused
from page import Page
from PIL import Image
from rich.console import Console

from fastlr.display.sheets import HTML, Sheet
from fastlr.experiments.continual import figures as curves
from fastlr.experiments.continual import read_run
from fastlr.experiments.continual.report import write_report
from fastlr.experiments.continual.tables import setting

FIGURES = (
    "redundancy-accuracy correlations forgetting-correlations measures ablation layers-0 inputs"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs, one with skipped tasks, a resumption and a line cut short."""
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent / "seed-0", 120, seed=0)
    write_run(parent / "seed-1", 130, seed=1, skip=(40, 41), resume=(60,), tail='{"kind": "ta')
    return parent


@pytest.fixture(scope="module")
def report(folder):
    with pytest.warns(UserWarning, match="last line is incomplete"):
        return write_report([folder], resamples=100)


def test_the_page_is_whole_and_needs_nothing_else(report):
    page = report.page.read_text()
    parsed = Page(page)
    assert parsed.addresses == []
    assert "://" not in page  # the letters of http may stand in a picture's base64
    assert "<script" not in page
    assert len(parsed.pictures) == len(report.figures) == len(FIGURES) + 1  # layers of both runs
    assert all(source.startswith("data:image/png;base64,") for source in parsed.pictures)
    embedded = {base64.b64decode(source.split(",", 1)[1]) for source in parsed.pictures}
    assert embedded == {file.read_bytes() for file, _ in report.figures}
    for sheet in report.sheets:
        assert f'id="{sheet.slug}"' in page
    # What made the figures stands beside them.
    assert "fastlr continual" in page
    assert "commit: abc" in page


def test_all_files_are_there_and_agree(report):
    names = {path.name for path in report.folder.iterdir()}
    assert {f"{name}.png" for name in FIGURES} | {
        "index.html",
        "report.md",
        "report.json",
        "correlations.csv",
    } <= names
    numbers = json.loads((report.folder / "report.json").read_text())
    with (report.folder / "correlations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(numbers["correlations"]) == 7 * 2 * 8
    first = numbers["correlations"][0]
    assert float(rows[0]["value"]) == first["value"]
    assert rows[0]["kind"] == "semi-partial"
    table = report.sheets[1]
    assert table.title.startswith("Table 1")
    assert "semi-partial, raw" in table.title
    assert table.rows[0][0] == "local redundancy"
    assert table.rows[0][2].startswith(f"{100 * first['value']:.1f} ±")
    with (report.folder / f"{table.slug}.csv").open() as file:
        assert tuple(map(tuple, csv.reader(file))) == (table.columns, *table.rows)
    (setting,) = numbers["setting"]
    assert setting.startswith("Differences from the paper: ")
    markdown = (report.folder / "report.md").read_text()
    assert f"\n{setting}\n" in markdown.partition("###")[0]
    assert all(f"### {sheet.title}" in markdown for sheet in report.sheets)
    assert "| local redundancy | r | " in markdown


def test_tables_fit_80_columns(report, capsys):
    report.show(Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f"report: {report.page}"
    body = [line for line in lines if line.startswith(("local redundancy", "training grad norm"))]
    assert len(body) >= 6
    assert not any("…" in line for line in lines)


def times_in_each_form(report, text):
    """How often a text is on the page, in report.md and on the terminal."""
    console = Console(width=80, record=True, file=io.StringIO())
    report.show(console)
    forms = [report.page.read_text(), (report.folder / "report.md").read_text()]
    return [" ".join(form.split()).count(text) for form in (*forms, console.export_text())]


def test_the_differences_from_the_paper_are_listed_once_a_report(tmp_path, cli):
    folder = write_run(tmp_path / "run", 12)
    options = {
        "dtype": "fp32",
        "reset_every": 5,
        "redundancy_probe": "sampled",
        "model_kwargs": {"width": 2},
    }
    config = set_options(folder, **options)
    listed = (
        "Differences from the paper: dtype fp32 for bf16; model resnet18 for mobilenet_v3_large; "
        "model with width 2; tasks 12 for 3000; reset_every 5 for 0; classes 12 for 1000; size 32 "
        "for 224; resize crop for squash."
    )
    report = write_report([folder], resamples=100, figures="none")
    for text in (listed, "dtype fp32 for bf16"):
        assert times_in_each_form(report, text) == [1, 1, 1]
    for command in ("cost", "ablate"):
        assert "for mobilenet" not in cli(f"{command} {folder}").out
    for changes, message in (
        ({"data": {"size": 224, "classes": 1000, "resize": "squash"}}, "resize"),
        (
            {
                "data": {"size": 32, "classes": 8, "resize": None},
                "options": {**options, "data": "synthetic"},
            },
            "resize",
        ),
        ({"options": {}}, "tasks"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        paragraph = setting([read_run(folder)])
        assert message not in paragraph
        assert paragraph.startswith("Differences from the paper: ")
    assert "the run has no configuration" in paragraph


def test_a_report_by_intervention_lists_once_what_its_runs_share(tmp_path):
    folders = [write_run(tmp_path / str(i), 12, seed=i) for i in range(4)]
    for folder in folders[2:]:
        set_options(folder, l2_init=0.1)
    report = write_report(folders, tmp_path / "out", figures="none")
    assert times_in_each_form(report, "Differences from the paper: ") == [1, 1, 1]
    assert times_in_each_form(report, "tasks 12 for 3000") == [1, 1, 1]
    assert times_in_each_form(report, ". In 2, 3: l2_init 0.1 for 0.0.") == [1, 1, 1]


def test_an_earlier_run_had_the_probe_of_then(tmp_path):
    text = setting([read_run(write_run(tmp_path / "run", 12))])
    assert "redundancy_probe rademacher for sampled" in text


def test_a_short_run_says_so_and_gives_the_rest(tmp_path):
    """And an older figure does not stay."""
    folder = write_run(tmp_path / "run", 35)
    older = folder / "report" / "correlations.png"
    older.parent.mkdir()
    older.write_bytes(b"old")
    report = write_report([folder], resamples=100)
    assert not older.exists()
    text = "\n".join(note for sheet in report.screen for note in sheet.notes)
    assert "run has 25 usable tasks" in text
    assert "run has 34 usable tasks" in text
    assert not (report.folder / "correlations.csv").exists()
    assert "nan" not in report.page.read_text().lower().split()
    drawn = {file.stem for file, _ in report.figures}
    assert drawn == set(FIGURES) - {"correlations", "forgetting-correlations"}


def test_missing_measures_leave_out_their_tables_and_figures(tmp_path):
    missing = ("local_redundancy", "local_redundancy_noise", "local_redundancy_next_task")
    report = write_report(
        [write_run(tmp_path / "run", 110, leave_out=missing)], tmp_path / "out", resamples=100
    )
    assert [file.stem for file, _ in report.figures] == FIGURES[:4]
    ablation = next(sheet for sheet in report.sheets if sheet.slug == "ablation")
    assert ablation.rows == ()
    assert "local_redundancy_next_task" in ablation.notes[0]


def test_a_run_of_one_task_and_a_run_without_tasks(tmp_path):
    for tasks in (0, 1):
        run = write_run(tmp_path / str(tasks), tasks)
        assert write_report([run], resamples=100, figures="png" if tasks else "none").page.exists()


def test_titles_and_cells_are_escaped():
    sheet = Sheet("x", "a < b", ("c|d", "e"), (("<b>", "1|2"),), ("n & m",))
    root = ElementTree.fromstring(HTML.get_template("sheet").render(sheet=sheet))
    assert root.find("summary").text == "a < b"
    assert root.find(".//td").text == "<b>"
    assert "c\\|d" in sheet.markdown()
    assert "1\\|2" in sheet.markdown()


def test_the_heat_map_holds_the_layers_in_network_order(tmp_path):
    """The picture itself: rows of the map are ordered as their values are."""
    run = read_run(write_run(tmp_path / "run", 30))
    curves.layer_map(run).save(tmp_path / "map.png")
    shares = {"stem": 0.101, "blocks.0": 0.3, "blocks.1": 0.4, "head": 0.199}
    pixels = np.asarray(Image.open(tmp_path / "map.png").convert("RGB")).astype(float)
    height, width = pixels.shape[:2]
    column = pixels[:, width // 2]
    coloured = np.flatnonzero(np.ptp(column, axis=1) > 40)
    top, bottom = coloured.min(), coloured.max()
    centres = [int(top + (bottom - top) * (i + 0.5) / 4) for i in range(4)]
    brightness = [column[y] @ [0.3, 0.59, 0.11] for y in centres]  # viridis gets lighter upwards
    assert np.argsort(brightness).tolist() == np.argsort(list(shares.values())).tolist()
    assert len(LAYERS) == 5


def drawn(figure):
    """The figure with its labels in place."""
    figure.canvas.draw()
    return figure


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_accuracy_has_a_chance_line_and_a_band_and_the_figure_says_of_how_many(tmp_path):
    folder = write_run(tmp_path / "run", 160)
    figure = drawn(curves.redundancy_and_accuracy([read_run(folder)]))
    top, bottom = figure.axes
    assert legend(figure) == ["run", "chance, 50 %"]
    assert "n = 5000 inputs" in top.get_title("left")
    assert "n = 100 images a task (band: ± 2 standard errors)" in bottom.get_title("left")
    assert bottom.get_xlabel() == "task (thin: each; thick: running median over 31)"
    falls = np.arange(160) < 20.0
    assert np.array_equal(curves._running_median(falls), falls)  # where it falls, not before
    (band,) = bottom.collections
    accuracy = 100 * read_run(folder).accuracy[7]
    edges = [y for x, y in band.get_paths()[0].vertices if x == 7]
    half = 2 * (accuracy * (100 - accuracy) / 100) ** 0.5
    assert (min(edges), max(edges)) == pytest.approx((accuracy - half, accuracy + half))
    # Accuracy is of all the task's images: nothing to be uncertain of.
    config = set_options(folder, data="random-labels")
    (folder / "config.json").write_text(json.dumps({**config, "data": {"classes": 10}}))
    figure = drawn(curves.redundancy_and_accuracy([read_run(folder)]))
    assert legend(figure) == ["run", "chance, 10 %"]
    assert not figure.axes[1].collections


def test_measures_begin_at_zero_and_have_names_on_both_axes(tmp_path):
    folder = write_run(tmp_path / "run", 30)
    lines = read_lines(folder)
    for record in lines[1:]:
        record["measures"]["dormant_ratio"]["value"] = 0.30 + 0.002 * record["task"]
    write_lines(folder, lines)
    figure = drawn(curves.measure_curves([read_run(folder)]))
    panels = {axes.get_title("left"): axes for axes in figure.axes if axes.get_visible()}
    assert {axes.get_xlabel() for axes in panels.values()} == {"task"}
    assert legend(figure) == ["run"]
    assert all(axes.get_ylabel() for axes in panels.values())
    low, high = panels["dormant ratio"].get_ylim()
    assert low == 0
    assert 0.358 < high < 0.5


# the commands


def test_the_commands_print_their_tables(folder, tmp_path, cli):
    target = tmp_path / "out"
    out = cli(f"report {folder} --out {target} --bootstrap 100 --figures none", says="Table 1")
    assert f"report: {target / 'index.html'}" in out.out
    assert out.err.count("warning:") == 1
    assert "last line is incomplete" in out.err
    assert not list(target.glob("*.png"))
    cli(f"ablate {folder} --bootstrap 100 --csv {tmp_path / 'a.csv'}", says="Table 4")
    assert (tmp_path / "a.csv").read_text().splitlines()[1].startswith("shapes,raw,")
    assert re.search(r"local redundancy +\S+ +\S+ +0\.2000 +2\.\d\d %", cli(f"cost {folder}").out)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("report nowhere", "nowhere is no run folder"),
        ("report run --figures gif", "choose one of png, none"),
        ("report run --bootstrap 5", "at least 100"),
        ("report run run", "given twice"),
        ("report", "Missing argument 'RUNS'"),
        ("ablate run --csv /nowhere/a.csv", "No such file"),
        ("ablate run --bootstrap 1", "at least 2 resamples"),
        ("report run --out /proc/x", "cannot write /proc/x"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(line, words, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 110)
    error = cli(line, code=2, says=words).err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_an_unwritable_report_is_named(tmp_path):
    folder = write_run(tmp_path / "run", 12)
    (folder / "report").mkdir()
    (folder / "report" / "index.html").mkdir()
    with refused("cannot write .*index.html"):
        write_report([folder], resamples=100, figures="none")

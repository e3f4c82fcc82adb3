"""Sweeps: grids and names, what does not fit, resumption."""

import json
import re
import sys

from continual_cases import SMALL
from continual_runs import set_options, write_run
from expected import refused
from test_many import Asked

from fastlr.cli.main import main
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual.options import ContinualOptions
from fastlr.experiments.runs import sweep

DRIVER = continual.DRIVER


# -- grids and names
# --------------------------------------------------------------------------------------------------


def test_grids_are_values_of_the_options_types():
    texts = [
        "epochs=1,2",
        'model_kwargs={"a": 1, "b": "x,{"},{}',
        "measures=[srank,weight_norm],srank,[]",
    ]
    assert sweep.parse_grids(ContinualOptions, texts) == {
        "epochs": (1, 2),
        "model_kwargs": ({"a": 1, "b": "x,{"}, {}),
        "measures": (("srank", "weight_norm"), ("srank",), ()),
    }
    for text, message in (
        ("epochs", "write key=value"),
        ("epochs=1,", "write key=value"),
        ("epochs=1,x", "--grid epochs=x: epochs wants a whole number"),
        ("epoch=1", "did you mean epochs"),
        ("learning_rate=0.1,1e-1", "the value 1e-1 is given twice"),
        ("seed=1,2", "say --seeds K"),
        ("device=cpu", "all runs of a sweep have the same"),
    ):
        with refused(re.escape(message)):
            sweep.parse_grids(ContinualOptions, [text])
    with refused("epochs is given twice"):
        sweep.parse_grids(ContinualOptions, ["epochs=1", "epochs=2"])


def test_every_combination_has_a_name_and_its_settings():
    grids = {"learning_rate": (0.001, 0.01), "measures": (("srank", "weight_norm"), ())}
    runs = sweep.product(DRIVER, "demo", {"seed": 3, "epochs": 1}, grids, 2)
    assert list(runs) == [
        f"learning_rate={rate},measures={measures},seed-{seed}"
        for rate in (0.001, 0.01)
        for measures in ("srank+weight_norm", sweep._value(()))
        for seed in (3, 4)
    ]
    assert runs["learning_rate=0.01,measures=srank+weight_norm,seed-4"] == {
        "seed": 4,
        "epochs": 1,
        "learning_rate": 0.01,
        "measures": ("srank", "weight_norm"),
    }
    with refused("--seeds 0"):
        sweep.product(DRIVER, "demo", {}, grids, 0)


def test_names_are_short_safe_and_different():
    paths = tuple(
        f"/data/{'long/' * 30}{end}" for end in ("a b", "a_b", "A_b", "../..", "", "ä", "A")
    )
    kwargs = ({"width": 2}, {"width": "2"}, {"Width": 2}, {})
    models = ("Net", "net", "a/b", "a b", "b" * 32, "b" * 33)
    runs = sweep.product(
        DRIVER, "demo", {}, {"data": paths, "model_kwargs": kwargs, "model": models}, 2
    )
    assert (
        len(runs)
        == len(paths) * len(kwargs) * len(models) * 2
        == len({name.casefold() for name in runs})
    )
    for name, settings in runs.items():
        assert re.fullmatch(r"[A-Za-z0-9._+=,-]{1,120}", name)
        assert name.endswith(f",seed-{settings['seed']}")
        assert not name.startswith((".", "-"))
    fewer = sweep.product(
        DRIVER, "demo", {}, {"data": paths[1:2], "model_kwargs": kwargs, "model": models[2:]}, 1
    )
    assert fewer.keys() <= runs.keys(), "a name does not depend on the other values"


# -- the command
# --------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_said(tmp_path, cli, monkeypatch):
    out = f"--out {tmp_path}/out"
    monkeypatch.setitem(sys.modules, "ray", None)
    for line, message in (
        (
            f"continual {out} --ray",
            "Ray is not installed: pip install --no-build-isolation '.[ray]'",
        ),
        (f"continul {out}", "did you mean continual?"),
        ("continual", "give --out"),
        (f"continual {out} --gpus-per-run 0.5", "--gpus-per-run goes with --ray"),
        (f"continual {out} --address auto", "--address goes with --ray"),
        (f"continual {out} --grid epochs=1,2 --set epochs=3", "are both given"),
        (f"continual {out} --resume", "holds no runs to go on with"),
        (f"transfer demo {out} --grid batch_size=64,0", "batch_size=0"),
        (f"continual demo {out} --grid data=synthetic,nowhere", "nowhere"),
    ):
        captured = cli(f"sweep {line}", code=2, says=message)
        assert captured.err.count("\n") == 1
        assert not captured.out


def test_resuming_a_sweep(tmp_path, images, monkeypatch, capsys):
    asked = Asked(monkeypatch)
    settings = {**SMALL, "data": images, "threads": 1, "measures": ""}
    del settings["learning_rate"]
    same = " ".join(f"--set={key}={value}" for key, value in settings.items())

    def do(line, grid="--grid=learning_rate=0.1,0.01", settings=same):
        asked.work = {}
        line = f"sweep continual paper --out {tmp_path}/out {line} {settings} {grid}"
        return main(line.split()), list(asked.work)

    names = [f"learning_rate={rate},seed-{seed}" for rate in (0.1, 0.01) for seed in (0, 1)]
    assert do("--seeds 2") == (0, names)
    assert do("--seeds 2") == (2, []), "not without --resume"
    known = json.loads((tmp_path / "out/many.json").read_text())["runs"]
    continual.begin(tmp_path / "out" / names[1], "paper", {**known[names[1]], "measures": ()})
    left = [names[0], *names[2:]]
    assert do("--seeds 2 --resume") == (0, left), "the same command, resumed"
    assert do("--resume", "", "") == (0, left)
    more = "--grid=learning_rate=0.1,0.01,0.5"
    added = [f"learning_rate=0.5,seed-{seed}" for seed in (0, 1)]
    assert do("--seeds 2 --resume", more, "") == (0, [*left, *added])
    assert asked.work["learning_rate=0.5,seed-1"]["settings"] == {
        **known[names[1]],
        "learning_rate": 0.5,
    }
    capsys.readouterr()
    for line, message in (
        (f"--seeds 1 {more}", "has learning_rate=0.1,seed-1, which is not among these"),
        ("--seeds 9", "do not differ by their seeds alone"),
        ("--set=epochs=3", "epochs cannot change"),
        ("--set=learning_rate=0.1", "the runs differ in learning_rate"),
    ):
        assert do(f"--resume {line}", "", "")[0] == 2
        assert message in capsys.readouterr().err


def test_configurations_are_not_pooled(tmp_path, cli):
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            folder = write_run(tmp_path / f"learning_rate={rate},seed-{seed}", 30, seed=seed)
            config = set_options(folder, learning_rate=rate, tasks=30 + seed, threads=seed)
    for command in ("report", "cost", "ablate"):
        message = cli(f"{command} {tmp_path}", code=2).err
        assert "runs of 2 configurations, which are not pooled" in message
        assert message.count("\n") == 1
        for rate in (0.1, 0.2):
            of_it = f"{tmp_path}/learning_rate={rate},seed"
            assert f"learning_rate={rate}: {of_it}-0 {of_it}-1" in message
    cli(f"cost {tmp_path} --pool")
    cli("cost", *tmp_path.glob("learning_rate=0.1,*"))
    (folder / "config.json").write_text(json.dumps({**config, "driver": "memorize"}))
    cli(f"report {folder} --pool", code=2, says="--pool goes with continual runs")


def test_seeds_are_pooled_whose_pixels_are_drawn_from_the_seed(tmp_path, cli):
    def write(data):
        for seed in (0, 1):
            folder = write_run(tmp_path / data / f"seed-{seed}", 30, seed=seed)
            config = set_options(folder, data=data)
            config["data"]["digest"] = f"pixels of seed {seed}"
            (folder / "config.json").write_text(json.dumps(config))
        return tmp_path / data

    cli(f"report {write('random-labels')} --figures none")
    message = "runs of 2 configurations, which are not pooled"
    cli(f"report {write('random-labels-digits')} --figures none", code=2, says=message)

"""The continual-learning driver: its records, its training against plain torch, and kills."""

import json
import re
import time
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from command_line import interrupted_at
from continual_cases import (
    EVERY_INTERVENTION,
    SMALL,
    as_arguments,
    begin,
    checkpoint,
    comparable,
    lines,
    net,
)
from expected import refused, warned
from kills import check_kills
from pytest import approx, mark, param

import fastlr
from fastlr.cli.main import main
from fastlr.cli.progress import Clock
from fastlr.errors import ModelError, NonFiniteError
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.continual.options import MEASURES, OF_THE_TABLES, PRESETS, ContinualOptions
from fastlr.experiments.data import ImageStore, load_task, normalise, pairs, synthetic_store
from fastlr.experiments.runs.folder import Run
from fastlr.experiments.runs.options import parse_settings, resolve

# -- killed and resumed
# ------------------------------------------------------------------------------------------------


@mark.parametrize(
    ("kills", "interventions"),
    [
        (1, EVERY_INTERVENTION),
        param(20, {}, marks=mark.long),
        param(20, EVERY_INTERVENTION, marks=mark.long),
    ],
    ids=["one", "twenty", "twenty with interventions"],
)
def test_killed_it_ends_as_the_uninterrupted_run(tmp_path, images, kills, interventions):
    tasks = 6 if kills > 1 else 3
    settings = {
        **SMALL,
        "data": images,
        "tasks": tasks,
        "epochs": 5,
        "measures": tuple(MEASURES),
        **interventions,
    }
    records = check_kills(tmp_path, continual.__name__, settings, kills, seed=kills)
    assert [line.get("task") for line in records] == [None, *range(tasks)]


def test_a_run_can_be_made_longer(tmp_path, images):
    for name, tasks in (("long", 4), ("short", 2)):
        begin(
            tmp_path / name,
            images,
            measures=("weight_norm", "local_redundancy_next_task", "local_redundancy_fitted"),
            tasks=tasks,
        )
    torch.rand(7)  # what happens in between does not matter
    continual.resume(tmp_path / "short", {"tasks": 4})
    assert comparable(tmp_path / "short") == comparable(tmp_path / "long")
    rounds = [(line["round"], line["classes"]) for line in comparable(tmp_path / "long")[1:]]
    # Three classes have three pairs; then a new permutation, marked.
    assert [r for r, _ in rounds] == [0, 0, 0, 1]
    config = (tmp_path / "short/config.json").read_text()
    with warned("has done more than tasks=3 already: nothing is left to do"):
        continual.resume(tmp_path / "short", {"tasks": 3})
    assert comparable(tmp_path / "short") == comparable(tmp_path / "long")
    assert (tmp_path / "short/config.json").read_text() == config


# -- what is recorded
# --------------------------------------------------------------------------------------------------


def test_the_records_say_what_the_checkpoint_computes(tmp_path, images):
    settings = {"tasks": 2, "measures": tuple(MEASURES), "seed": 3, "redundancy_probe": "exact"}
    first, before, last = begin(tmp_path / "run", images, **settings)
    assert (first["kind"], before["kind"], last["kind"]) == ("start", "task", "task")
    assert list(first["measures"]) == list(last["measures"]) == list(MEASURES)
    assert before["previous_accuracy"] is None
    assert before["task"] == 0
    assert last["task"] == 1
    shared = [key for key in last["seconds"] if "+" in key]
    assert shared == [
        "dormant_ratio+dormant_ratio_tau+batch_grad_norm+effective_rank+srank+feature_rank"
    ], "a pass for all"
    assert {name for key in last["seconds"] for name in key.split("+")} == {
        "train",
        "evaluate",
        *MEASURES,
    }

    store = ImageStore.open(images)
    drawn = pairs(3, 3, seed=3)
    assert [line["classes"] for line in (before, last)] == [[p.first, p.second] for p in drawn[:2]]
    assert last["names"] == [store.classes[i] for i in last["classes"]]
    earlier, task, following = (load_task(store, pair) for pair in drawn)
    assert last["train_images"] == len(task.train_y) == 22
    assert last["test_images"] == len(task.test_y) == 10
    model = net()
    model.load_state_dict(checkpoint(tmp_path / "run")["model"])
    model.eval()
    for t, name in ((task, "accuracy"), (earlier, "previous_accuracy")):
        right = sum(
            int(model(normalise(x[None])).argmax() == y) for x, y in zip(t.test_x, t.test_y)
        )
        assert last[name] == right / len(t.test_y)

    values = {name: measure["value"] for name, measure in last["measures"].items()}
    assert all(measure["definition"] for measure in last["measures"].values())
    initial = torch.load(tmp_path / "run/checkpoints/initial.pt", weights_only=True)
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
    start = torch.cat([initial[name].double().flatten() for name, _ in model.named_parameters()])
    assert values["weight_norm"] == approx(flat.norm().item(), rel=1e-12)
    assert values["distance_from_init"] == approx((flat - start).norm().item(), rel=1e-12)
    assert first["measures"]["distance_from_init"]["value"] == 0
    assert first["measures"]["weight_norm"]["value"] == approx(start.norm().item(), rel=1e-12)
    whole = fastlr.estimate(model, fastlr.ShapeImages(size=(3, 8, 8)), n=20, seed=3, probe="exact")
    assert values["local_redundancy"] == approx(whole.value, rel=1e-5)
    assert last["measures"]["local_redundancy"]["stderr"] == approx(whole.stderr, rel=1e-4)
    assert sum(last["measures"]["local_redundancy"]["per_parameter"].values()) == approx(
        whole.value, rel=1e-4
    )
    noise = fastlr.estimate(model, fastlr.NoiseImages(size=(3, 8, 8)), n=20, seed=3, probe="exact")
    assert values["local_redundancy_noise"] == approx(noise.value, rel=1e-5)
    x = normalise(following.train_x)  # all 22, of which 20 are used
    each = fastlr.estimate(model, fastlr.TensorInputs(x), n=22, seed=3, probe="exact").per_sample
    used = last["measures"]["local_redundancy_next_task"]
    assert used["probe"] == "exact"
    assert used["n"] == 20
    assert each.sort().values[:20].mean() <= used["value"] <= each.sort().values[2:].mean()
    assert values["batch_grad_norm"] <= values["train_grad_norm"]


def test_measures_on_a_task_use_the_task_just_learned(tmp_path, images):
    *_, last = begin(
        tmp_path / "run", images, tasks=2, measures=("train_grad_norm",), measure_images=1000
    )
    model = net()
    model.load_state_dict(checkpoint(tmp_path / "run")["model"])
    task = load_task(ImageStore.open(images), pairs(3, 2)[1])
    wanted = fastlr.metrics.train_grad_norm(
        model, normalise(task.train_x), task.train_y, F.cross_entropy
    )
    assert last["measures"]["train_grad_norm"]["value"] == approx(float(wanted), rel=1e-5)


def test_fitted_inputs_are_made_like_the_images_of_the_first_task(tmp_path, images):
    name = "local_redundancy_fitted"
    settings = {"tasks": 2, "measures": (name,), "seed": 3, "redundancy_probe": "exact"}
    *_, last = begin(tmp_path / "run", images, **settings)
    model = net()
    model.load_state_dict(checkpoint(tmp_path / "run")["model"])
    first = load_task(ImageStore.open(images), pairs(3, 1, seed=3)[0])
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0))
    inputs = fastlr.GaussianInputs(normalise(first.train_x[order]))
    wanted = fastlr.estimate(model, inputs, n=20, seed=3, probe="exact")
    assert last["measures"][name]["value"] == approx(wanted.value, rel=1e-5)


def test_measures_at_some_boundaries(tmp_path, images):
    records = begin(tmp_path / "run", images, tasks=5, measures=("weight_norm",), measure_every=2)
    assert [bool(line["measures"]) for line in records] == [True, False, True, False, True, False]


def test_only_what_is_not_finite_is_missing_of_a_shared_pass(tmp_path, images, monkeypatch):
    taken = fastlr.metrics.measures

    def without_srank(model, names, **given):
        if "effective_rank" in names:
            raise NonFiniteError("the features are not finite")
        return taken(model, names, **given)

    monkeypatch.setattr(fastlr.metrics, "measures", without_srank)
    wanted = ("dormant_ratio_tau", "srank", "batch_grad_norm")
    first, *_ = begin(tmp_path / "run", images, tasks=1, measures=wanted, on_nan="skip")
    values = {name: measure["value"] for name, measure in first["measures"].items()}
    assert values["srank"] is None
    assert values["dormant_ratio_tau"] >= 0
    assert values["batch_grad_norm"] > 0
    with refused("after task -1: srank: the features are not finite", NonFiniteError):
        begin(tmp_path / "stops", images, tasks=1, measures=wanted)


def test_a_measure_that_the_model_does_not_have_is_named(tmp_path, images):
    settings = {
        "model": "continual_cases:no_activation",
        "measures": ("dormant_ratio", "batch_grad_norm"),
    }
    with refused("dormant_ratio: no activations .*leave it out by --set measures", ModelError):
        begin(tmp_path / "run", images, **settings)


# -- options and the command line
# --------------------------------------------------------------------------------------


def test_settings_are_checked():
    texts = ["learning_rate=1e-2", 'model_kwargs={"size": 64}', "dtype=bf16", "flip=off"]
    wanted = {"learning_rate": 0.01, "model_kwargs": {"size": 64}, "dtype": "bf16", "flip": False}
    assert parse_settings(ContinualOptions, texts) == wanted
    for text, message in (
        ("epoch=3", "epoch is unknown: did you mean epochs"),
        ("epochs=3.5", "epochs wants a whole number, not '3.5'"),
        ("learning_rate=nan", "finite"),
        ("flip=perhaps", "true or false"),
        ("dtype=fp8", "one of fp32, bf16"),
        ("model_kwargs=[1]", "a JSON object"),
        ("epochs", "write key=value"),
    ):
        with refused(message):
            parse_settings(ContinualOptions, [text])
    with refused("given twice"):
        parse_settings(ContinualOptions, ["epochs=1", "epochs=2"])
    for preset, settings, message in (
        ("paper", {"epochs": 0}, "epochs=0: give at least 1"),
        ("paper", {"learning_rate": 0.0}, "positive"),
        ("paper", {"measures": ("weight_nrm",)}, "did you mean weight_norm"),
        ("paper", {"measures": ("srank", "srank")}, "twice"),
        ("paper", {"epoch": 1}, "option epoch is unknown: did you mean epochs"),
        ("dohare", {}, "preset dohare is unknown: did you mean dohare32"),
        ("paper", {"cbp_rate": 1.5}, "cbp_rate=1.5: give at most 1"),
        ("paper", {"cbp_decay": 1.0}, "cbp_decay=1.0: give less than 1"),
        ("paper", {"replay_share": 1.0}, "replay_share=1.0: give less than 1"),
        ("paper", {"replay_share": 0.0}, "replay_share=0.0: give a positive number"),
        ("paper", {"ewc_decay": 1.01}, "ewc_decay=1.01: give at most 1"),
        ("paper", {"ewc": -1.0}, "ewc=-1.0: give at least 0"),
        ("paper", {"ewc_images": 0}, "ewc_images=0: give at least 1"),
    ):
        with refused(message):
            resolve(ContinualOptions, PRESETS, preset, settings)


def test_the_presets_are_those_of_the_papers():
    paper, dohare = (resolve(ContinualOptions, PRESETS, name, {}) for name in ("paper", "dohare32"))
    of_paper = {
        "model": "mobilenet_v3_large",
        "tasks": 3000,
        "epochs": 100,
        "redundancy_n": 5000,
        "optimiser": "adamw",
        "learning_rate": 1e-3,
        "batch_size": 1024,
        "norm_batch": 256,
        "dtype": "bf16",
        "optimiser_state": "kept",
        "head_reset": False,
    }
    assert vars(paper).items() >= of_paper.items()
    of_dohare = {
        "tasks": 2000,
        "epochs": 250,
        "batch_size": 100,
        "momentum": 0.9,
        "optimiser": "sgd",
        "head_reset": True,
    }
    assert vars(dohare).items() >= of_dohare.items()
    assert paper.measures == MEASURES, "the ablation's, too: Table 4 is made of them"
    table5 = resolve(ContinualOptions, PRESETS, "table5", {})
    assert vars(table5) == {**vars(paper), "tasks": 500, "measures": OF_THE_TABLES}
    for name in set(PRESETS) - {"paper", "table5", "small"}:
        assert set(MEASURES) - set(resolve(ContinualOptions, PRESETS, name, {}).measures) == {
            "local_redundancy_noise",
            "local_redundancy_next_task",
        }


def test_a_run_is_resumed_with_its_own_options(tmp_path, images):
    begin(tmp_path / "run", images, tasks=1, measures=())
    with refused("begun with epochs=2, not 3"):
        continual.resume(tmp_path / "run", {"epochs": 3})
    with refused("begun with the preset paper, not tiny"):
        continual.resume(tmp_path / "run", {}, preset="tiny")
    other = tmp_path / "other"
    synthetic_store(other, classes=3, size=8, train=11, test=5, seed=1)
    with refused("other data"):
        continual.resume(tmp_path / "run", {"data": str(other)})
    assert len(lines(tmp_path / "run")) == 2, "refusals leave no trace"


@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_another_number_of_threads_is_warned_of(tmp_path, images):
    before = torch.get_num_threads()
    try:
        begin(tmp_path / "run", images, tasks=1, measures=(), threads=2)
        assert torch.get_num_threads() == 2
        continual.resume(tmp_path / "run", {})  # the option is the run's
        with Run.resume(tmp_path / "run") as run:
            options = {**run.config["options"], "threads": 0}
            run.set_config({**run.config, "options": options, "threads": 3})
        with warned("begun with 3 threads, this process has 2"):
            continual.resume(tmp_path / "run", {})
    finally:
        torch.set_num_threads(before)


def test_the_command(tmp_path, images, cli):
    begin = (
        f"continual demo --data {images} --out {tmp_path / 'run'} --set epochs=1 --set "
        "measures=weight_norm"
    )
    captured = cli(f"{begin} --set model=continual_cases:net --tasks 2 --seed 5")
    # Quiet without a terminal.
    assert captured.out.split() == ["run:", str(tmp_path / "run")] and not captured.err
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["options"]["seed"] == 5
    assert config["options"]["tasks"] == 2
    assert config["preset"] == "demo"
    assert config["data"]["digest"] == ImageStore.open(images).digest
    assert config["versions"]["torch"] == torch.__version__
    assert config["device"] == "cpu"
    assert config["machine"].endswith(("1 thread", "threads"))
    cli(f"continual --resume --out {tmp_path / 'run'} --tasks 3")
    assert [line["kind"] for line in lines(tmp_path / "run")] == [
        "start",
        "task",
        "task",
        "resume",
        "task",
    ]
    cli(begin, code=2, says="holds a run: --resume goes on with it")
    for extra, message in (
        ("--set epoch=1", "did you mean epochs"),
        (
            f"--set redundancy_n=1 --data {images} --out {tmp_path / 'new'}",
            "redundancy_n=1: give at least 2",
        ),
        ("--tasks 2 --set tasks=3", "both given"),
        ("", "give --out"),
        (f"--out {tmp_path / 'new'}", "give --data (or --set data=), the folder of an image store"),
    ):
        cli(f"continual paper {extra}", code=2, says=message)
    assert not (tmp_path / "new").exists()
    out = cli("continual dohare32 --options").out
    assert "epochs=250\n" in out and "\ndtype=fp32  # fp32, bf16, bf16-weights\n" in out


def test_interrupted_it_says_how_far_it_is(tmp_path, images, monkeypatch, capsys):
    out = tmp_path / "run"
    settings = as_arguments({**SMALL, "tasks": 3, "measures": ()})
    arguments = ["continual", "paper", f"--data={images}", f"--out={out}", *settings]
    stops = []

    @contextmanager
    def stopping(driver):
        def show(at):
            if (at.done, at.epoch) in stops:
                raise KeyboardInterrupt

        yield show

    monkeypatch.setattr("fastlr.cli.experiments.progress", stopping)
    for stop, says in (
        ((0, 1), "interrupted before the first task was done: --resume goes on with it"),
        ((2, 1), "interrupted after task 2 of 3: --resume goes on with it"),
    ):
        stops[:] = [stop]
        assert main(arguments) == 130
        assert capsys.readouterr().err.splitlines() == [says]
        arguments = ["continual", "--resume", f"--out={out}"]
    stops.clear()
    assert main(arguments) == 0


def test_interrupted_at_a_terminal_it_says_so_too(tmp_path, images):
    """There the progress bar writes too, and typer, which catches Ctrl-C, says nothing."""
    arguments = ["continual", "demo", f"--out={tmp_path}/run", "--set", "measures="]
    code, text = interrupted_at(b"task 2/", arguments)
    assert code == 130
    assert re.search(rb"interrupted after task \d+ of 200: --resume goes on with it", text), text[
        -500:
    ]


def test_time_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock()
    assert clock.left(40, 50) is None  # resumed at task 40
    now[0] = 110.0
    assert clock.left(42, 50) == approx(40)


def test_progress_goes_from_epoch_to_epoch(tmp_path, images):
    reports = []
    settings = {**SMALL, "data": images, "tasks": 2, "measures": ()}
    continual.begin(tmp_path / "run", "paper", settings, reports.append)
    assert [(at.done, at.epoch, at.record is not None) for at in reports] == [
        (0, 0, True),
        *[(0, 1, False), (0, 2, False), (1, 0, True)],
        *[(1, 1, False), (1, 2, False), (2, 0, True)],
    ]


def test_local_redundancy_by_batches_is_the_estimators(tmp_path, images):
    """A record of redundancy_probe=batch is of batches, and says so."""
    settings = {
        "redundancy_probe": "batch",
        "redundancy_batch": 5,
        "measures": ("local_redundancy",),
    }
    *_, last = begin(tmp_path / "run", images, **settings)
    found = last["measures"]["local_redundancy"]
    assert (found["n"], found["probe"]) == (4, "batch")  # of 20 images
    assert found["definition"].startswith("local redundancy: mean over 20 synthetic shapes of ")
    assert found["definition"].endswith("; by batches of 5: 5 ||gradient of the batch's mean||^2")
    state = checkpoint(tmp_path / "run")
    model = net()
    model.load_state_dict(state["model"])
    shapes = fastlr.ShapeImages(size=(3, 8, 8))
    wanted = fastlr.estimate(model, shapes, n=20, probe="batch", batch_size=5, seed=0)
    assert found["value"] == approx(wanted.value, rel=1e-4)

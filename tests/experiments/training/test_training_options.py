"""Options of every driver that trains: bfloat16 weights, bfloat16 reduction, running statistics."""

import copy
import json

import rank_runs as work
import torch
import torch.nn.functional as F
from continual_cases import SMALL, assert_same, checkpoint, comparable, lines, plain, trainer
from expected import refused
from pytest import approx, mark, raises
from ranks import good, run_ranks
from transfer_cases import TINY

from fastlr.experiments.continual.options import MEASURES, PRESETS, ContinualOptions
from fastlr.experiments.data import ImageStore, load_task, normalise
from fastlr.experiments.memorization.options import MemorizeOptions
from fastlr.experiments.runs.experiment import find_driver
from fastlr.experiments.runs.folder import stream_seed
from fastlr.experiments.runs.options import resolve
from fastlr.experiments.transfer.options import TransferOptions, substitutions

MEMORIZE = {
    "model": "continual_cases:net",
    "device": "cpu",
    "threads": 1,
    "n": 30,
    "classes": 5,
    "size": 8,
    "batch_size": 12,
    "norm_batch": 6,
    "epochs": 3,
    "evaluate_every": 1,
    "measure_every": 1,
    "redundancy_n": 8,
    "redundancy_batch": 4,
}
SERIES = {**TINY, "norm_batch": 8, "finetune_runs": 1, "epochs": 2}


def settings_of(driver, images):
    small = {**SMALL, "data": images, "measures": tuple(MEASURES), "threads": 1}
    return {"continual": small, "memorize": MEMORIZE, "transfer": SERIES}[driver]


def stopped(folder, driver, settings, after):
    """A run that is interrupted after so many steps."""

    def stop(at):
        if at.record is not None and at.done == after:
            raise KeyboardInterrupt

    with raises(KeyboardInterrupt):
        find_driver(driver).begin(folder, None, settings, stop)
    return folder


# -- weights in bfloat16
# -----------------------------------------------------------------------------------------------


@mark.parametrize("driver", ["continual", "memorize", "transfer"])
def test_weights_in_bfloat16(tmp_path, images, driver):
    """A run trains and measures in bfloat16, and gives the same bits when it is resumed."""
    settings = {
        **settings_of(driver, images),
        "dtype": "bf16-weights",
        "batch_norm_updates": "every-part",
    }
    whole = find_driver(driver).begin(tmp_path / "whole", None, settings)
    again = find_driver(driver).resume(stopped(tmp_path / "again", driver, settings, after=2), {})
    assert comparable(again) == comparable(whole)
    assert_same(checkpoint(again), checkpoint(whole))
    settings["dtype"] = "fp32"
    first = lines(stopped(tmp_path / "fp32", driver, settings, after=0))[0]["measures"]
    found = lines(whole)[0]["measures"]
    value, wanted = (measures["local_redundancy"]["value"] for measures in (found, first))
    assert value == approx(wanted, rel=0.1)
    assert value != wanted
    initial = whole / "checkpoints" / ("last.pt" if driver == "memorize" else "initial.pt")
    state = torch.load(initial, weights_only=True)
    state = state["state"]["model"] if driver == "memorize" else state
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.bfloat16}
    if driver == "continual":
        moments = checkpoint(whole)["optimiser"]["state"][0]
        assert moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.bfloat16
    assert json.loads((whole / "config.json").read_text())["options"]["dtype"] == "bf16-weights"


def test_it_is_what_plain_torch_does_with_a_bfloat16_model(images):
    task = load_task(ImageStore.open(images), (0, 1))
    learner = trainer(dtype="bf16-weights", flip=False, norm_batch=0, epochs=1, learning_rate=0.02)
    torch.manual_seed(0)
    model = copy.deepcopy(plain().to(memory_format=torch.channels_last)).bfloat16()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    x = normalise(task.train_x).bfloat16()
    order = torch.Generator().manual_seed(stream_seed(0, "order", 5))
    for rows in torch.randperm(22, generator=order).split(12):
        optimiser.zero_grad()
        (
            F.cross_entropy(model(x[rows]).float(), task.train_y[rows], reduction="sum") / len(rows)
        ).backward()
        optimiser.step()
    learner.learn(task, 5)
    assert_same(learner.model.state_dict(), model.state_dict())


@mark.parametrize("name", ["ewc", "cbp_rate", "redo_every"])
def test_what_keeps_running_means_needs_float32(name):
    with refused(f"{name} keeps running means .*: choose dtype=bf16, or {name}=0"):
        ContinualOptions(dtype="bf16-weights", **{name: 1})


# -- several processes
# -------------------------------------------------------------------------------------------------


@mark.long
def test_a_run_whose_gradients_are_reduced_in_bfloat16(tmp_path, images):
    """Reducing in bfloat16 gives other bits than float32, and the same ones when resumed.

    One process has nothing to reduce.
    """
    settings = {
        **settings_of("continual", images),
        "model": "rank_runs:without_dropout",
        "measures": ("weight_norm",),
    }
    low = {**settings, "reduce_dtype": "bf16"}

    def done(name, ranks, settings, **changed):
        assert (
            good(run_ranks(ranks, work.run, "continual", str(tmp_path / name), settings, changed))
            == ["no error"] * ranks
        )
        return tmp_path / name

    whole, full = done("whole", 2, low), done("full", 2, settings)
    done("again", 2, {**low, "tasks": 2})
    again = done("again", 2, low, tasks=3)
    assert comparable(again) == comparable(whole) != comparable(full)
    assert_same(checkpoint(again), checkpoint(whole))
    for line, other in zip(comparable(whole), comparable(full), strict=True):
        norms = (each["measures"]["weight_norm"]["value"] for each in (line, other))
        assert next(norms) == approx(next(norms), rel=0.02)
    assert comparable(done("one", 1, low)) == comparable(done("alone", 1, settings))


# -- running statistics
# ------------------------------------------------------------------------------------------------


@mark.parametrize("driver", ["memorize", "transfer"])
def test_the_first_part_updates_running_statistics(tmp_path, images, driver):
    """The first part of a step alone updates running statistics, as in DataParallel.

    The losses of the first steps, from the same weights, are those of updates by every part.
    """
    counts, losses = {}, {}
    for updates in ("first-part", "every-part"):
        settings = {**settings_of(driver, images), "batch_norm_updates": updates, "epochs": 1}
        path = find_driver(driver).begin(tmp_path / updates, None, settings)
        file = "last.pt" if driver == "memorize" else "epoch-01.pt"
        state = torch.load(path / "checkpoints" / file, weights_only=True)
        state = state["state"]["model"] if driver == "memorize" else state
        counts[updates] = next(
            int(t) for name, t in state.items() if name.endswith("num_batches_tracked")
        )
        losses[updates] = lines(path)[1]["train_loss"]
    assert (
        counts
        == {
            "memorize": {"first-part": 3, "every-part": 5},
            "transfer": {"first-part": 6, "every-part": 12},
        }[driver]
    )
    assert losses["first-part"] == losses["every-part"], (
        "training takes the statistics of the part at hand"
    )


def test_the_presets_of_the_paper_keep_one_devices_update():
    for options in (
        resolve(ContinualOptions, PRESETS, "paper", {}),
        TransferOptions(),
        MemorizeOptions(),
    ):
        wanted = {"dtype": "bf16", "batch_norm_updates": "first-part", "reduce_dtype": "fp32"}
        assert vars(options).items() >= wanted.items()
    actual = {
        "source": "ETTm1",
        "target": "ETTh2",
        "steps_per_epoch": 54,
        "finetune_steps_per_epoch": 14,
    }
    assert substitutions(
        TransferOptions(batch_norm_updates="every-part", reduce_dtype="bf16"), **actual
    ) == ["batch_norm_updates every-part for first-part"]

"""The monitor of hand-written loops leaves training the same and agrees with `fastlr.estimate`."""

import copy
import inspect
import math
import pickle
from functools import partial

import torch
import torch.nn.functional as F
from expected import refused, warned
from integration_cases import (
    INPUTS,
    SHAPE,
    N,
    data,
    network,
    random_states,
    same_bits,
    train,
    without_draws,
)
from pytest import mark, raises
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastlr
from fastlr.display.trend import describe, trend
from fastlr.errors import NonFiniteError
from fastlr.integrations import Monitor
from fastlr.integrations.measurement import MeterOptions, on_main


def monitor(model, **options):
    return without_draws(Monitor, model, INPUTS, N, **({"every_n_steps": 2} | options))


@mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"autocast": True}], ids=["plain", "accumulate", "autocast"]
)
def test_training_is_bit_for_bit_the_same(options):
    alone, watched = network(), network()
    losses = train(alone, **options)
    states = random_states()
    x, y = data()
    what = {
        "measures": ["weight_norm", "feature_rank", "train_grad_norm"],
        "x": x,
        "y": y,
        "loss": F.cross_entropy,
    }
    rows = []
    meter = monitor(watched, log=lambda values, step: rows.append((step, values)), **what)
    assert train(watched, meter.step, mid=meter.measure, **options) == losses
    assert same_bits(alone, watched)
    assert random_states() == states
    assert {step for step, _ in rows} == set(range(7))
    assert all(math.isfinite(v) for _, values in rows for v in values.values())
    assert len(rows[0][1]) == 5


@mark.parametrize("dtype", [None, "bf16"])
def test_values_are_those_of_estimate_in_the_precision_asked_for(dtype):
    """The monitor's values are those of estimate in any autocast region.

    Cached casts of the weights there are those of before the step.
    """
    model, wanted = network(), []
    seen = []
    meter = monitor(
        model, every_n_steps=1, dtype=dtype, log=lambda v, s: seen.append(v["local_redundancy"])
    )

    def watch():
        meter.step()
        with torch.autocast("cpu", enabled=False):
            wanted.append(fastlr.estimate(copy.deepcopy(model), INPUTS, N, dtype=dtype).value)

    train(model, watch, steps=3, autocast=True)
    assert seen == wanted
    assert len(set(seen)) == 3
    assert meter.last.estimate.dtype == (None if dtype is None else "bfloat16")


def test_epochs_and_moments_by_hand():
    model, seen = network(), []
    meter = monitor(model, every_n_steps=None, every_n_epochs=3, log=lambda v, s: seen.append(s))
    readings = [meter.epoch() for _ in range(7) if meter.step() is None]
    assert [r is not None for r in readings] == [False, False, True, False, False, True, False]
    assert seen == [3, 6]
    assert readings[5].epoch == 6
    assert readings[5].step == 6
    assert meter.measure().step == 7
    assert meter.last.step == 7
    only = monitor(model, every_n_steps=None)
    assert only.step() is None
    assert only.epoch() is None
    assert only.measure().value == meter.last.value


def test_the_average_of_a_model_is_monitored_by_itself():
    alone, model = network(), network()
    losses = train(alone)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    meter = monitor(average.module)

    def watch():
        if meter.step() is not None:
            assert meter.last.value == fastlr.estimate(average.module, INPUTS, N).value
            assert meter.last.value != fastlr.estimate(model, INPUTS, N).value

    assert train(model, watch, each=partial(average.update_parameters, model)) == losses
    assert len(meter.course) == 3
    assert same_bits(alone, model)


def test_a_backward_pass_may_be_under_way():
    """The graph of a loss stays valid."""
    model = network()
    x, y = data()
    grads = []
    for watched in (False, True):
        seed = torch.manual_seed(0)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if watched:
            monitor(model).measure()
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        assert seed.get_state().equal(torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@mark.parametrize("mode", ["max", "min"])
def test_best_checkpoint_and_resumption(tmp_path, mode):
    model, values = network(), {}
    meter = monitor(model, every_n_steps=1, keep_best=tmp_path / "best.pt", mode=mode)

    def watch():
        reading = meter.step()
        values[reading.step] = reading.value

    train(model, watch)
    best = {"max": max, "min": min}[mode](values, key=values.get)
    found = torch.load(tmp_path / "best.pt", weights_only=True)
    assert found["step"] == best == meter.best.step
    assert found["local_redundancy"] == values[best]
    kept = network()
    kept.load_state_dict(found["state_dict"])
    assert fastlr.estimate(kept, INPUTS, N).value == values[best]
    assert [f.name for f in tmp_path.iterdir()] == ["best.pt"]

    seen = []
    again = monitor(
        model, every_n_steps=4, keep_best=lambda reading: seen.append(reading.value), mode=mode
    )
    again.load_state_dict(pickle.loads(pickle.dumps(meter.state_dict())))
    assert again.step() is None
    assert again.step().step == 8
    assert seen == []
    assert again.best is None
    assert again.meter.batch_size == meter.meter.batch_size == meter.last.estimate.batch_size
    with refused("state of a Monitor: epochs, first, best, batch_size, course is missing"):
        again.load_state_dict({"steps": 3})
    assert again.steps == 8


def test_the_trend_is_of_readings_after_training_began():
    model = network()
    meter = monitor(model)
    meter.measure()  # before training: not part of the trend
    assert "there are 0." in meter.trend()
    for _ in range(2):
        train(model, meter.step)  # three readings each
    assert len(meter.course) == 6
    assert "first three and last three of 6 readings" in meter.trend()
    kept = pickle.dumps(meter.state_dict())
    with torch.no_grad():
        [p.mul_(0.05) for p in model.parameters()]
    for _ in range(3):
        meter.measure()
    assert "first three and last three of 9 readings" in meter.trend()
    again = monitor(model)
    again.load_state_dict(pickle.loads(kept))
    for _ in range(3):
        again.measure()
    assert again.trend() == meter.trend() == describe(meter.course)
    assert trend(meter.course).ratio < 0.5


def test_the_plot_has_every_reading_after_a_resumption_too(tmp_path):
    model = network()
    meter = monitor(model)
    with refused("there is no reading to draw yet"):
        meter.plot()
    meter.measure()
    train(model, meter.step)
    again = monitor(model)
    again.load_state_dict(pickle.loads(pickle.dumps(meter.state_dict())))
    figures = [meter.plot(tmp_path / "course.png"), again.plot()]
    lines = [figure.axes[0].lines[0].get_xydata() for figure in figures]
    assert (lines[0] == lines[1]).all()
    steps, values = lines[0].T
    assert list(steps) == [0, 2, 4, 6]
    assert list(values[1:]) == [reading.value for reading in meter.course]
    assert values[0] == meter.first["value"]
    assert figures[0].axes[0].get_xlabel() == "optimizer steps"
    assert (tmp_path / "course.png").stat().st_size > 1000


def test_the_plot_is_over_epochs_if_no_step_was_counted():
    meter = without_draws(Monitor, network(), INPUTS, N, every_n_epochs=1)
    for _ in range(3):
        meter.epoch()
    axes = meter.plot().axes[0]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3]
    assert axes.get_xlabel() == "epochs"


def test_the_options_are_those_of_an_estimate():
    arguments = set(inspect.signature(fastlr.estimate).parameters) - {
        "model",
        "inputs",
        "n",
        "device",
    }
    own = {"measures", "x", "y", "loss", "init_state", "on_error"}
    assert set(MeterOptions.__annotations__) == arguments | own


def test_a_reading_prints_as_one_line():
    meter = monitor(network(), measures=["weight_norm"])
    reading = meter.measure()
    text = repr(reading)
    assert "\n" not in text and len(text) < 200
    assert reading.stderr == reading.estimate.stderr
    assert f"local_redundancy={reading.value:.6g}" in text and "weight_norm=" in text


@mark.parametrize(
    ("changed", "other"),
    [
        ("inputs", lambda model: Monitor(model, fastlr.NoiseImages(SHAPE), N)),
        ("n", lambda model: Monitor(model, INPUTS, N + 1)),
        ("seed", lambda model: Monitor(model, INPUTS, N, seed=1)),
        ("probe", lambda model: Monitor(model, INPUTS, N, probe="sampled")),
        ("predictive", lambda model: Monitor(model, INPUTS, N, predictive=fastlr.Gaussian())),
    ],
)
def test_readings_of_another_measurement_are_not_gone_on_with(changed, other):
    model = network()
    meter = monitor(model, every_n_steps=1)
    for _ in range(3):
        meter.step()
    state = pickle.loads(pickle.dumps(meter.state_dict()))
    again = other(model)
    with warned(f"taken with another {changed} and cannot be compared"):
        again.load_state_dict(state)
    assert again.steps == 3
    for _ in range(3):
        again.measure()
    assert again.first["value"] == again.course[0].value == again.best.value
    assert "Too few readings" in again.trend()
    older = {key: value for key, value in state.items() if key != "measured"}
    again.load_state_dict(older)
    assert len(again.course) == 3
    monitor(model).load_state_dict(state)


def test_inputs_and_files_of_a_wrong_kind(tmp_path):
    with refused("inputs of type Tensor have no batch.*wrap a tensor .* in fastlr.TensorInputs"):
        Monitor(network(), data()[0])
    with refused("keep_best=.* is a folder: name a file in it"):
        monitor(network(), keep_best=tmp_path)


def test_names():
    model, seen = network(), []
    meter = monitor(model, log=lambda *row: seen.append(row), prefix="fastlr/")
    train(model, meter.step)
    assert [step for _, step in seen] == [2, 4, 6]
    assert seen[-1][0] == {
        "fastlr/local_redundancy": meter.last.value,
        "fastlr/local_redundancy_stderr": meter.last.estimate.stderr,
    }
    assert meter.seconds >= 3 * 1e-4


def test_a_model_that_grows_is_planned_anew():
    model = network()
    meter = monitor(model, every_n_steps=1)
    first = meter.step()
    model[5] = nn.Linear(144, 5)
    second = meter.step()
    assert second.value == fastlr.estimate(copy.deepcopy(model), INPUTS, N).value != first.value
    model[0].requires_grad_(False)
    third = meter.step()
    assert set(third.estimate.per_parameter) == {"1.weight", "1.bias", "5.weight", "5.bias"}


def test_a_measurement_that_fails_does_not_end_the_training():
    model = network()
    with torch.no_grad():
        model[5].bias[0] = math.nan
    with raises(NonFiniteError):  # the first: a mistake shows at once
        monitor(model, every_n_steps=1).step()
    for on_error in ("warn", "raise"):
        model = network()
        meter = monitor(model, every_n_steps=1, on_error=on_error)
        good = meter.step()
        with torch.no_grad():
            model[5].bias[0] = math.nan
        if on_error == "raise":
            with raises(NonFiniteError):
                meter.step()
        else:
            with warned("not measured, the training goes on"):
                assert meter.step() is None
            assert meter.last is good
            with torch.no_grad():
                model[5].bias.zero_()
            assert meter.step().step == 3


@mark.parametrize(
    ("options", "match"),
    [
        ({"every_n_epochs": 1}, "both given"),
        ({"every_n_steps": 0}, "every_n_steps must be"),
        ({"mode": "best"}, "mode must be"),
        ({"keep_best": "/no/such/folder/best.pt"}, "no folder"),
        ({"log": 3}, "log must be a function"),
        ({"every_n_step": 2}, "unknown option every_n_step: did you mean every_n_steps?"),
        ({"seed": -1}, "seed"),
        ({"probe": "radamacher"}, "unknown probe 'radamacher'"),
        ({"logger": print}, "unknown option"),
        ({"on_error": "ignore"}, "on_error"),
        ({"dtype": "fp8"}, "dtype"),
        ({"measures": ["accuracy"]}, "unknown measures"),
        ({"measures": "weight_norm"}, r"\['weight_norm'\]"),
        ({"measures": ["dormant_ratio"]}, "pass x="),
        ({"measures": ["train_grad_norm"], "x": torch.zeros(2, *INPUTS.size)}, "pass y= and loss="),
        ({"measures": ["distance_from_init"]}, "init_state="),
        ({"samples": 3}, "unknown option"),
    ],
)
def test_mistakes_show_at_once(options, match):
    with refused(match):
        monitor(network(), **options)
    with warned("measures only by measure") as told:
        for _ in range(2):
            idle = Monitor(network(), INPUTS)
            idle.step()
            idle.step()
    assert len(told) == 2


def test_other_processes_hear_of_an_error():
    """What is broadcast reaches the others before the main process raises."""
    box = []
    model = torch.nn.Linear(2, 2)

    def fail():
        raise NonFiniteError("the output is not finite")

    with raises(NonFiniteError):
        on_main(fail, True, lambda what: box.append(what) or what, model)
    with refused("main process: the output is not finite", fastlr.FastlrError):
        on_main(fail, False, lambda what: box[0], model)
    assert on_main(lambda: "reading", True, lambda what: what, model) == "reading"
    assert on_main(fail, False, lambda what: ("reading", None), model) == "reading"

"""The transfer driver trains, measures, selects and fine-tunes as it says, and survives kills."""

import copy
import json
import math

import torch
import torch.nn.functional as F
from continual_cases import as_arguments, comparable, lines
from expected import refused
from kills import check_kills
from pytest import approx, fixture, mark, param
from torch import nn
from transfer_cases import TINY

import fastlr
from fastlr.errors import NonFiniteError
from fastlr.experiments.data import open_series, split_series
from fastlr.experiments.runs.folder import Run, seed_everything, stream_seed
from fastlr.experiments.runs.options import resolve
from fastlr.experiments.training.forecaster import Forecaster, batches, cosine, evenly
from fastlr.experiments.training.options import TrainingOptions
from fastlr.experiments.transfer import experiment as transfer
from fastlr.experiments.transfer import tables
from fastlr.experiments.transfer.options import PRESETS, STRATEGIES, TransferOptions
from fastlr.experiments.transfer.records import TransferRun
from fastlr.models.patchtst import PatchTST

SIZES = {"channels": 7, "context": 32, "horizon": 6}


@fixture(scope="module")
def run(tmp_path_factory):
    """One run that the tests look at: without dropout, so that plain torch can follow it."""
    path = tmp_path_factory.mktemp("transfer") / "run"
    kwargs = {**TINY["model_kwargs"], "dropout": 0.0}
    transfer.begin(path, None, {**TINY, "model_kwargs": kwargs, "seed": 3})
    return path


def series(which):
    return split_series(
        open_series(TINY[which], TINY["generated_rows"]), TINY["context"], TINY["horizon"]
    )


def network(run, epoch=None):
    model = PatchTST(**SIZES, **TINY["model_kwargs"] | {"dropout": 0.0})
    if epoch is not None:
        model.load_state_dict(
            torch.load(run / "checkpoints" / transfer.checkpoint_name(epoch), weights_only=True)
        )
    return model


@torch.no_grad()
def error(model, windows):
    """Mean squared error one window at a time, in float64."""
    model = copy.deepcopy(model).double().eval()
    windows = windows.to("cpu", torch.float64)
    each = [
        F.mse_loss(model(x), y)
        for x, y in (windows.batch(torch.tensor([i])) for i in range(len(windows)))
    ]
    return float(torch.stack(each).mean())


def step(model, windows, index, optimiser):
    """Take a step of plain torch; the loss before it."""
    x, y = windows.batch(index)
    loss = (model(x) - y).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()


def of_kind(run, kind):
    return [line for line in lines(run) if line["kind"] == kind]


# -- killed and resumed
# ------------------------------------------------------------------------------------------------


@mark.parametrize("kills", [1, param(20, marks=mark.long)])
def test_killed_it_ends_as_the_uninterrupted_run(tmp_path, kills):
    records = check_kills(
        tmp_path, transfer.__name__, {**TINY, "steps_per_epoch": 15}, kills, seed=kills
    )
    kinds = [line["kind"] for line in records]
    assert kinds[:5] == ["start", "pretrain", "pretrain", "pretrain", "selection"]
    picks = {pick["epoch"] for pick in records[4]["picks"].values()}
    assert kinds[5:] == ["finetune"] * (2 * len(picks))


def test_more_fine_tuning_runs_may_be_added(tmp_path, run):
    settings = {**TINY, "strategies": ("validation_loss", "no_pretraining")}
    transfer.begin(tmp_path / "long", None, settings)
    transfer.begin(tmp_path / "short", None, {**settings, "finetune_runs": 1})
    transfer.resume(tmp_path / "short", {"finetune_runs": 2})
    assert comparable(tmp_path / "short") == comparable(tmp_path / "long")
    with refused("begun with epochs=3, not 4"):
        transfer.resume(tmp_path / "short", {"epochs": 4})
    with refused("has other data"):
        transfer.resume(tmp_path / "short", {"source": "generated:7"})


# -- what it does
# --------------------------------------------------------------------------------------------------


def test_pretraining_is_that_of_plain_torch(run):
    model, source = network(run, 0), series("source")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=18)
    for epoch, record in enumerate(of_kind(run, "pretrain"), 1):
        losses = []
        for index in batches(len(source.train), 16, 6, stream_seed(3, "order", epoch)):
            assert len(index) == 16
            losses.append(step(model.train(), source.train, index, optimiser))
            schedule.step()
        assert record["train_loss"] == approx(sum(losses) / 6, rel=1e-5)
        states = (dict(made.state_dict()) for made in (model, network(run, epoch)))
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-5)
        assert record["validation_loss"] == approx(
            error(network(run, epoch), source.validation), rel=1e-5
        )


def test_measures_are_those_of_the_checkpoints(run):
    inputs = fastlr.GaussianSeries(length=32, features=7)
    predictive = fastlr.Gaussian()
    generator = torch.Generator().manual_seed(stream_seed(3, "dormant windows"))
    source = series("source").train
    index = torch.randperm(len(source), generator=generator)[:20]
    for record in (*of_kind(run, "start"), *of_kind(run, "pretrain")):
        model = network(run, record.get("epoch", 0))
        measures = record["measures"]
        found = measures["local_redundancy"]
        estimate = fastlr.estimate(
            model, inputs, n=12, predictive=predictive, seed=3, probe="sampled"
        )
        last = found["points"][-1]
        assert last["value"] == approx(estimate.value, rel=1e-5)
        assert last["stderr"] == approx(estimate.stderr, rel=1e-4)
        values = [point["value"] for point in found["points"]]
        assert found["value"] == approx(sum(values) / len(values))
        assert found["n"] == 12
        steps = [point["step"] for point in found["points"]]
        assert steps == (
            [6 * record["epoch"] - 3, 6 * record["epoch"]] if "epoch" in record else [0]
        )
        flat = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        assert measures["weight_norm"]["value"] == approx(float(flat.norm()), rel=1e-9)
        units = []
        model.layers[0].expand.register_forward_hook(
            lambda module, args, z, units=units: units.append(F.gelu(z))
        )
        model.eval()(source.batch(index)[0])
        dormant = (units[0].mean(0) < 0.05).double().mean()  # the paper's, signed
        assert measures["dormant_ratio"]["value"] == float(dormant)
    assert len(values) == 2
    assert last["value"] != values[0]


def test_a_linear_probe_trains_a_new_head_on_the_frozen_network(run):
    target = series("target")
    values = []
    for record in of_kind(run, "pretrain"):
        model = network(run, record["epoch"]).eval()
        found = record["measures"]["linear_probe"]
        before = copy.deepcopy(model.state_dict())
        seed_everything(stream_seed(3, "probe"))
        model.head.load_state_dict(network(run).head.state_dict())
        assert not torch.equal(model.head.weight, network(run, 0).head.weight)
        optimiser = torch.optim.AdamW(model.head.parameters(), lr=2e-3, weight_decay=0.01)
        order = batches(len(target.train), 16, 4, stream_seed(3, "probe order"))
        losses = [step(model, target.train, index, optimiser) for index in order]
        assert found["training"] == approx(sum(losses) / 4, rel=1e-5)
        assert (
            found["validation"]
            == found["value"]
            == approx(error(model, target.validation), rel=1e-5)
        )
        values.append(found["value"])
        assert all(
            torch.equal(before[k], v)
            for k, v in model.state_dict().items()
            if not k.startswith("head")
        )
    assert len(set(values)) == 3


def test_every_pick_can_be_audited(run):
    (selection,) = of_kind(run, "selection")
    records = of_kind(run, "pretrain")
    assert list(selection["picks"]) == list(STRATEGIES)
    for name, found in selection["picks"].items():
        by, rule, *_ = STRATEGIES[name]
        assert (found["by"] or "", found["rule"] or "") == (by, rule)
        if by:
            numbers = [
                r[by] if by == "validation_loss" else r["measures"][by]["value"] for r in records
            ]
            assert found["candidates"] == {str(i): value for i, value in enumerate(numbers, 1)}
            best = (min if rule == "least" else max)(numbers)
            assert found["value"] == best and found["epoch"] == 1 + numbers.index(best), (
                "the first of equal ones"
            )
    assert selection["picks"]["no_pretraining"]["epoch"] == 0
    chosen = {found["epoch"] for found in selection["picks"].values()}
    tuned = [(r["epoch"], r["run"]) for r in of_kind(run, "finetune")]
    assert len(tuned) == len(set(tuned)) == 2 * len(chosen)
    assert {e for e, _ in tuned} == chosen
    for record in of_kind(run, "finetune"):
        assert record["strategies"] == [
            n for n, f in selection["picks"].items() if f["epoch"] == record["epoch"]
        ]


def test_a_checkpoint_can_be_picked_by_its_own_local_redundancy():
    records = [
        {
            "epoch": e,
            "measures": {
                "local_redundancy": {"value": (a + b) / 2, "points": [{"value": a}, {"value": b}]}
            },
        }
        for e, (a, b) in enumerate([(1.0, 2.0), (1.0, 9.0), (8.0, 4.0), (8.0, 4.0)], 1)
    ]
    assert transfer.pick("local_redundancy", records)["epoch"] == 3, "the first of equal ones"
    picked = transfer.pick("local_redundancy_at_end", records)
    assert (picked["epoch"], picked["value"], picked["rule"]) == (2, 9.0, "greatest")
    assert picked["candidates"] == {"1": 2.0, "2": 9.0, "3": 4.0, "4": 4.0}
    assert (
        "local_redundancy_at_end"
        in TransferOptions(strategies=("local_redundancy_at_end",)).strategies
    )


def test_fine_tuning_is_that_of_plain_torch_and_pairs_checkpoints(run):
    target = series("target")
    finals = {}
    for record in of_kind(run, "finetune"):
        model = network(run, record["epoch"])
        assert record["validation"][0] == approx(error(model, target.validation), rel=1e-5)
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        for k in range(2):
            for index in batches(
                len(target.train), 16, 4, stream_seed(3, "finetune order", record["run"], k)
            ):
                step(model.train(), target.train, index, optimiser)
        assert record["steps"] == [0, 3, 5, 8]
        assert len(record["validation"]) == 4
        assert record["validation_loss"] == record["validation"][-1]
        assert record["validation_loss"] == approx(error(model, target.validation), rel=1e-3)
        finals[record["epoch"], record["run"]] = record["validation_loss"]
    assert len(set(finals.values())) == len(finals)


def test_fine_tuning_may_end_when_it_has_saturated(tmp_path):
    settings = {
        **TINY,
        "strategies": ("validation_loss",),
        "finetune_runs": 1,
        "finetune_epochs": 8,
    }
    settings |= {"finetune_learning_rate": 0.3, "finetune_evaluations": 16, "finetune_patience": 2}
    transfer.begin(tmp_path / "run", None, settings)
    (record,) = of_kind(tmp_path / "run", "finetune")
    losses = record["validation"]
    assert len(losses) < 17
    assert len(losses) - 1 - losses.index(min(losses)) == 2
    assert record["validation_loss"] == losses[-1]
    assert record["ended_by"] == "saturation"
    ends = " ".join(tables.setting([TransferRun.read(tmp_path / "run")]))
    assert (
        "section 4.2 (2 validations without a fall by 0 %), or its epochs; 1 of 1 runs saturated."
        in ends
    )
    assert "finetune_patience 2 for 0" in ends


def test_a_small_fall_is_none_with_a_tolerance(tmp_path):
    settings = {**TINY, "strategies": ("validation_loss",), "finetune_runs": 1, "epochs": 1}
    ended = {}
    for tolerance in (0.0, 0.5):
        out, patience = tmp_path / str(tolerance), int(tolerance > 0)
        transfer.begin(
            out, None, {**settings, "finetune_patience": patience, "finetune_tolerance": tolerance}
        )
        (record,) = of_kind(out, "finetune")
        ended[record["ended_by"]] = len(record["validation"])
    assert ended == {"epochs": 4, "saturation": 2}
    assert "all its epochs, as in the paper's appendix A.2" in " ".join(
        tables.setting([TransferRun.read(tmp_path / "0.0")])
    )
    with refused("finetune_tolerance goes with finetune_patience"):
        TransferOptions(finetune_tolerance=0.1)


@mark.filterwarnings("error::fastlr.FastlrWarning")
def test_hugging_faces_model_in_bfloat16(tmp_path):
    kwargs = {**TINY["model_kwargs"], "width": 32}
    settings = {
        **TINY,
        "model": "fastlr.models.patchtst:hugging_face",
        "model_kwargs": kwargs,
        "dtype": "bf16",
    }
    transfer.begin(tmp_path / "run", None, {**settings, "epochs": 1, "finetune_runs": 1})
    start, first = lines(tmp_path / "run")[:2]
    assert 0 < first["measures"]["local_redundancy"]["value"]
    assert first["measures"]["linear_probe"]["value"] < 10
    assert start["parameters"] == sum(p.numel() for p in PatchTST(**SIZES, **kwargs).parameters())


@mark.long
def test_compiled_training_is_the_same(tmp_path, run):
    kwargs = {**TINY["model_kwargs"], "dropout": 0.0}
    transfer.begin(
        tmp_path / "run", None, {**TINY, "model_kwargs": kwargs, "seed": 3, "compile": True}
    )
    for a, b in zip(of_kind(tmp_path / "run", "finetune"), of_kind(run, "finetune")):
        assert a["epoch"] == b["epoch"]
        assert a["validation_loss"] == approx(b["validation_loss"], rel=1e-3)


# -- parts
# --------------------------------------------------------------------------------------------------


def test_an_epoch_is_one_pass_or_a_number_of_steps():
    one = batches(50, 16, 0, seed=1)
    assert [len(b) for b in one] == [16, 16, 16, 2]
    assert sorted(torch.cat(one).tolist()) == list(range(50))
    many = torch.cat(batches(50, 16, 7, seed=1)).tolist()
    assert len(many) == 112
    assert sorted(many[:50]) == sorted(many[50:100]) == list(range(50))
    assert torch.equal(torch.cat(batches(50, 16, 2, seed=1)), torch.tensor(many[:32]))
    assert evenly(54, 4)[-1] == 54
    assert evenly(1, 4) == [1]
    rate = cosine(2e-3, 648)
    assert rate(0) == 2e-3
    assert rate(324) == approx(1e-3)
    assert 0 < rate(647) < 1e-7


def test_a_loss_that_is_not_finite_ends_the_run():
    net = Forecaster(
        network(None), torch.device("cpu"), TrainingOptions(dtype="fp32", batch_size=16)
    )
    net.optimiser = torch.optim.SGD(net.model.parameters(), lr=1e30)
    with refused("training loss is not finite: lower the learning rate", NonFiniteError):
        net.train(series("source").train, [torch.arange(8)] * 5)
    with refused("validation loss is not finite", NonFiniteError):
        net.validate(series("source").validation, 1)


def wrong_shape(channels, context, horizon):
    return nn.Linear(channels, channels)


def test_what_does_not_fit_is_named(tmp_path, monkeypatch):
    narrow = tmp_path / "two.csv"
    rows = [
        f"2020-01-{1 + i // 24:02d} {i % 24:02d}:00:00,{math.sin(i)},{i % 7}" for i in range(400)
    ]
    narrow.write_text("date,a,b\n" + "\n".join(rows) + "\n")
    monkeypatch.delenv("FASTLR_DATA", raising=False)
    for settings, message in (
        ({"target": str(narrow)}, "generated:1 has 7 features, .*two.csv 2: one network"),
        ({"source": "ETTm1"}, "no series ETTm1"),
        ({"context": 400}, "smaller context or horizon"),
        (
            {"head": "top"},
            "head=top: the model has no such part .it has embedding, dropout, layers, head.: name",
        ),
        ({"head": "dropout"}, "head=dropout has no parameters"),
        (
            {"model": "test_transfer:wrong_shape", "model_kwargs": {}, "head": ""},
            r"forecasts \(\d+, 32, 7\) .*not",
        ),
        ({"strategies": ("linear_prob",)}, "did you mean linear_probe"),
        ({"strategies": ()}, "name at least one"),
        ({"sigma": 0.0}, "sigma=0.0: give a positive"),
        ({"train_share": 1.0}, "train_share"),
        ({"redundancy_per_epoch": 0}, "at least 1"),
    ):
        with refused(message):
            transfer.begin(tmp_path / "run", None, {**TINY, **settings})
        for file in (
            "config.json",
            "checkpoints/initial.pt",
        ):  # of runs that failed once they had begun
            (tmp_path / "run" / file).unlink(missing_ok=True)


def test_the_presets():
    paper = resolve(TransferOptions, PRESETS, "paper", {})
    wanted = {
        "source": "ETTm1",
        "target": "ETTh2",
        "context": 512,
        "horizon": 96,
        "epochs": 12,
        "learning_rate": 2e-3,
        "batch_size": 1024,
        "dtype": "bf16",
        "redundancy_n": 1024,
        "finetune_learning_rate": 2e-4,
        "finetune_epochs": 2,
        "finetune_runs": 6,
        "redundancy_per_epoch": 4,
        "dormant_threshold": 0.05,
        "dormant_by": "mean",
    }
    assert vars(paper).items() >= wanted.items()
    assert len(paper.strategies) == 6
    for name in ("small", "demo"):
        assert resolve(TransferOptions, PRESETS, name, {}).device == "cpu"


def test_the_command(tmp_path, cli):
    few = {**TINY, "epochs": 1, "strategies": ("validation_loss", "no_pretraining")}
    del few["source"]
    out = tmp_path / "run"
    captured = cli(f"transfer demo --out {out} --source generated:4 --seed 9", *as_arguments(few))
    assert captured.out.split() == ["run:", str(out)]
    assert not captured.err
    config = json.loads((out / "config.json").read_text())
    assert (config["driver"], config["preset"], config["options"]["seed"]) == (
        "transfer",
        "demo",
        9,
    )
    assert config["data"]["source"] == {
        "name": "generated:4",
        "path": None,
        "rows": 400,
        "features": [f"F{i}" for i in range(7)],
        "step_seconds": 3600.0,
        "train_windows": 283,
        "validation_windows": 43,
    }
    assert [line["kind"] for line in lines(out)] == ["start", "pretrain", "selection"] + 4 * [
        "finetune"
    ]
    before = (out / "records.jsonl").read_text()
    cli(f"transfer --resume --out {out}")
    assert [line["kind"] for line in lines(out)][-1] == "resume"
    assert before in (out / "records.jsonl").read_text()
    cli("transfer --options", says="redundancy_per_epoch=4\n")


def test_a_run_from_before_norm_batch_goes_on_unchanged(tmp_path):
    """Whole batches, though the option's default is another now."""
    settings = {
        **TINY,
        "batch_size": 300,
        "norm_batch": 0,
        "epochs": 1,
        "steps_per_epoch": 2,
        "strategies": ("validation_loss",),
        "finetune_runs": 1,
    }
    transfer.begin(tmp_path / "whole", None, settings)
    transfer.begin(tmp_path / "old", None, settings)
    with Run.resume(tmp_path / "old") as run:
        del run.config["options"]["norm_batch"]
        run.set_config(run.config)
    transfer.resume(tmp_path / "old", {"finetune_runs": 2})
    assert json.loads((tmp_path / "old/config.json").read_text())["options"]["norm_batch"] == 0
    transfer.resume(tmp_path / "whole", {"finetune_runs": 2})
    assert comparable(tmp_path / "old") == comparable(tmp_path / "whole")

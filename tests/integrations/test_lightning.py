"""The Lightning callback in Lightning's Trainer."""

import importlib
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expected import refused
from integration_cases import INPUTS, N, Recorded, data, network, random_states, same_bits, seed_all
from torch.utils.data import DataLoader, TensorDataset

import fastlr
from fastlr.errors import MissingExtraError, ModelError

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from fastlr.integrations.lightning import LocalRedundancyMonitor  # noqa: E402


class Module(lightning.LightningModule):
    """The network under ``net``, trained with momentum; validation too."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def fit(*callbacks, folder=None, module=None, resume=None, **options):
    """A fit of 4 batches an epoch; returns (module, trainer)."""
    seed_all()
    module = module or Module()
    logger = CSVLogger(folder, name="", version="") if folder else False
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": logger,
        "log_every_n_steps": 1,
    }
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    keep = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            **{**settings, "enable_checkpointing": keep, **quiet, **options},
            callbacks=list(callbacks),
        )
        loaders = [
            DataLoader(TensorDataset(*data()), 16, shuffle=shuffle) for shuffle in (True, False)
        ]
        trainer.fit(module, *loaders, ckpt_path=resume)
    return module, trainer


class WatchedMonitor(Recorded, LocalRedundancyMonitor):
    def __init__(self, estimate_dtype=None, **options):
        super().__init__(INPUTS, N, **options)
        self.estimate_dtype = estimate_dtype

    def estimate(self, trainer, module):
        return fastlr.estimate(module, INPUTS, N, dtype=self.estimate_dtype).value


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}],
    ids=["plain", "accumulate", "bf16", "clip"],
)
def test_training_is_bit_for_bit_the_same(options):
    dtype = torch.bfloat16 if "precision" in options else None
    alone, _ = fit(**options)
    states = random_states()
    callback = WatchedMonitor(dtype, every_n_steps=2)
    watched, trainer = fit(callback, **options)
    assert same_bits(alone, watched)
    assert random_states() == states
    steps = [0, 2, 4] if "accumulate_grad_batches" in options else [0, 2, 4, 6, 8]
    assert [row[0] for row in callback.rows] == steps
    assert all(row[2] == row[3] for row in callback.rows)
    assert len({row[2] for row in callback.rows}) == len(steps)
    assert float(trainer.callback_metrics["local_redundancy"]) == pytest.approx(
        callback.rows[-1][2]
    )
    assert callback.last.estimate.dtype == ("bfloat16" if dtype else None)


class Chatty(Module):
    """Logs what ``forward`` computes, by the trainer and by the logger."""

    def forward(self, x):
        logits = self.net(x)
        self.log_dict({"mean": logits.mean()}, on_step=False, on_epoch=True)
        self.logger.log_metrics({"own": True})
        return logits

    def training_step(self, batch, _):
        return F.cross_entropy(self(batch[0]), batch[1])


def test_what_forward_logs_is_that_of_the_training_alone():
    found = []
    for callbacks in ([], [LocalRedundancyMonitor(INPUTS, N, every_n_steps=1)]):
        logger = DummyLogger()
        logger.log_metrics = mock.Mock()
        _, trainer = fit(*callbacks, module=Chatty(), logger=logger)
        own = logger.log_metrics.mock_calls.count(mock.call({"own": True}))
        found.append((own, float(trainer.callback_metrics["mean"])))
    assert found[0] == found[1]


def test_epochs_loggers_and_a_submodule(tmp_path):
    callback = WatchedMonitor(
        at_start=False, prefix="fastlr/", module="net", measures=["weight_norm"]
    )
    module, trainer = fit(callback, folder=tmp_path)
    assert [row[:2] for row in callback.rows] == [(4, 1), (8, 2)]
    assert "0.weight" in callback.last.estimate.per_parameter
    header, *rows = [
        line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()
    ]
    column = header.index("fastlr/local_redundancy")
    values = {int(row[header.index("step")]): float(row[column]) for row in rows if row[column]}
    assert values == {row[0]: row[2] for row in callback.rows}
    assert "fastlr/weight_norm" in header


def test_best_checkpoint_and_resumption(tmp_path):
    keep = {
        "monitor": "local_redundancy",
        "mode": "max",
        "save_on_train_epoch_end": True,
        "dirpath": tmp_path,
    }
    callback = WatchedMonitor(every_n_epochs=1)
    _, trainer = fit(callback, ModelCheckpoint(filename="best", **keep), max_epochs=4)
    values = {row[0]: row[2] for row in callback.rows if row[0]}
    best = torch.load(tmp_path / "best.ckpt", weights_only=False)
    assert best["global_step"] == max(values, key=values.get)
    module = Module()
    module.load_state_dict(best["state_dict"])
    assert fastlr.estimate(module, INPUTS, N).value == max(values.values())
    # from a checkpoint in the middle of the fit: the same steps and bits as without the break
    first = WatchedMonitor(every_n_steps=3)
    fit(first, max_epochs=4)
    broken = WatchedMonitor(every_n_steps=3)
    fit(broken, ModelCheckpoint(tmp_path, filename="middle", save_top_k=-1), max_epochs=2)
    second = WatchedMonitor(every_n_steps=3, at_start=False)
    fit(second, max_epochs=4, resume=tmp_path / "middle.ckpt")
    assert (
        [row[0] for row in broken.rows + second.rows]
        == [row[0] for row in first.rows]
        == [0, 3, 6, 9, 12, 15]
    )
    assert second.meter.batch_size == broken.meter.batch_size is not None
    assert all(row[2] == row[3] for row in second.rows)
    after_the_start = (broken.rows + second.rows)[1:]
    assert [reading.value for reading in second.course] == [row[2] for row in after_the_start]
    assert "and there are 5." in second.trend()


def test_averaged_weights_are_measured_as_a_module_of_their_own():
    averages = EMAWeightAveraging(decay=0.5)
    alone, _ = fit(EMAWeightAveraging(decay=0.5))
    callback = WatchedMonitor(every_n_steps=4, module=lambda _: averages._average_model.module)
    callback.estimate = lambda *_: fastlr.estimate(averages._average_model.module, INPUTS, N).value
    module, _ = fit(averages, callback)
    assert same_bits(alone, module)
    assert len({row[2] for row in callback.rows}) == 3
    assert all(row[2] == row[3] for row in callback.rows)


def test_mistakes_show_before_the_first_step():
    class Headless(Module):
        forward = lightning.LightningModule.forward

    with refused("Headless has no forward", ModelError):
        fit(LocalRedundancyMonitor(INPUTS, N), module=Headless())
    with refused("module='nett'"):
        fit(LocalRedundancyMonitor(INPUTS, N, module="nett"))
    with refused("cannot be multiplied"):  # images of another size
        fit(LocalRedundancyMonitor(fastlr.ShapeImages((3, 4, 4)), N))


@pytest.mark.parametrize("name", ["lightning", "huggingface", "avalanche", "stable_baselines3"])
def test_a_missing_framework_names_its_extra(name, monkeypatch):
    packages, extra = {"huggingface": "transformers"}, {"stable_baselines3": "rl"}.get(name, name)
    monkeypatch.setitem(sys.modules, packages.get(name, name), None)
    for inner in [m for m in sys.modules if m.startswith(f"{packages.get(name, name)}.")]:
        monkeypatch.setitem(sys.modules, inner, None)
    monkeypatch.delitem(sys.modules, f"fastlr.integrations.{name}", raising=False)
    with refused(rf"pip install --no-build-isolation '.\[{extra}\]'", MissingExtraError):
        importlib.import_module(f"fastlr.integrations.{name}")

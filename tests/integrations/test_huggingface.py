"""The Hugging Face callback in transformers' Trainer."""

import functools
import json

import torch
from expected import refused, warned
from integration_cases import Recorded, random_states, same_bits, seed_all
from pytest import approx, importorskip, mark

import fastlr

transformers = importorskip("transformers")
importorskip("accelerate")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from fastlr.integrations.huggingface import LocalRedundancyCallback  # noqa: E402

WHAT = {"n": 12, "predictive": fastlr.Categorical(), "on_error": "raise"}
TOKENS = fastlr.TokenInputs(31, 8)


def language_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=31,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


@functools.cache
def another_model():
    """Return a model that is measured apart from the one in training, always the same."""
    with torch.random.fork_rng(devices=[]):
        return language_model()


class WatchedTrainer(Recorded, LocalRedundancyCallback):
    def __init__(self, *, estimate_dtype=None, **options):
        super().__init__(TOKENS, **WHAT, **options)
        self.estimate_dtype = estimate_dtype

    def estimate(self):
        copied = another_model()
        copied.load_state_dict(self._event[3].state_dict())
        return fastlr.estimate(
            copied, TOKENS, 12, predictive=fastlr.Categorical(), dtype=self.estimate_dtype
        ).value


def train(folder, *callbacks, resume=None, sets=(), **options):
    """Eight batches an epoch."""
    seed_all()
    model = language_model()
    ids = torch.randint(0, 31, (32, 8), generator=torch.Generator().manual_seed(2))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 2,
        **options,
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **settings),
        train_dataset=rows,
        eval_dataset={name: rows[:8] for name in sets} if sets else rows[:8],
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer, ours=False):
    """The trainer's log without times; our rows or the others."""
    rows = [r for r in trainer.state.log_history if ("local_redundancy" in r) == ours]
    return [
        {k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}
        for row in rows
    ]


@mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"eval_strategy": "steps", "eval_steps": 4},
    ],
    ids=["plain", "accumulate", "bf16", "evaluations"],
)
def test_training_and_its_log_are_the_same(tmp_path, options, capsys):
    dtype = torch.bfloat16 if "bf16" in options else None
    alone = train(tmp_path, **options)
    states = random_states()
    every = None if "eval_steps" in options else 4
    callback = WatchedTrainer(every_n_steps=every, estimate_dtype=dtype)
    trainer = train(tmp_path, callback, **options)
    assert same_bits(alone.model, trainer.model)
    assert random_states() == states
    assert logged(alone) == logged(trainer)
    assert sum("loss" in row for row in logged(alone)) == 4
    printed = capsys.readouterr().out  # by a callback of the trainer
    assert printed.count("'local_redundancy'") == 3
    assert [row[0] for row in callback.rows] == [0, 4, 8]
    assert [reading.value for reading in callback.course] == [row[2] for row in callback.rows[1:]]
    assert "it takes 6 after training began" in callback.trend()
    assert [(r["step"], r["local_redundancy"]) for r in logged(trainer, True)] == [
        (r[0], r[2]) for r in callback.rows
    ]
    for _, _, value, wanted in callback.rows:
        assert value == approx(wanted, rel=1e-12)
    assert callback.last.estimate.dtype == ("bfloat16" if dtype else None)


def test_own_precision_below_the_autocast_of_accelerate(tmp_path):
    callback = WatchedTrainer(every_n_steps=8, dtype=None)
    trainer = train(tmp_path, callback, bf16=True)
    assert "_original_forward" in vars(trainer.model), (
        "accelerate no longer wraps forward: the special case can go"
    )
    wrapped = trainer.model.forward
    for _, _, value, wanted in callback.rows:
        assert value == wanted
    callback.measure()
    assert trainer.model.forward == wrapped
    assert callback.last.estimate.dtype is None


@mark.parametrize("sets", [(), ("a", "b")], ids=["one set", "two sets"])
def test_best_checkpoint_at_evaluations(tmp_path, sets):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "local_redundancy",
        "greater_is_better": True,
    }
    callback = WatchedTrainer(at_start=False)
    trainer = train(tmp_path, callback, sets=sets, **options, **best)
    values = {row[0]: row[2] for row in callback.rows}
    assert [row[0] for row in callback.rows] == [row["step"] for row in logged(trainer, True)]
    assert list(values) == [4, 8]
    assert trainer.state.best_metric == max(values.values())
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{max(values, key=values.get)}")
    reloaded = fastlr.estimate(trainer.model, TOKENS, 12, predictive=fastlr.Categorical())
    assert reloaded.value == approx(max(values.values()), rel=1e-12)
    with torch.no_grad():  # an evaluation by hand is of the weights as they are then
        trainer.model.lm_head.weight.mul_(2)
    assert trainer.evaluate()["eval_local_redundancy"] == callback.last.value != reloaded.value
    assert len(callback.course) == 3


def test_a_training_without_evaluations_is_warned_of(tmp_path):
    with warned("measures at evaluations, and there are none: give it every_n_steps"):
        train(tmp_path, WatchedTrainer())


def test_resumption_and_epochs(tmp_path):
    first, broken, second = (WatchedTrainer(every_n_epochs=1, at_start=False) for _ in range(3))
    whole = train(tmp_path / "a", first, max_steps=16)
    assert [row[:2] for row in first.rows] == [(8, 1), (16, 2)]
    train(tmp_path / "b", broken, max_steps=16, save_strategy="steps", save_steps=12)
    resumed = train(
        tmp_path / "b", second, max_steps=16, resume=str(tmp_path / "b" / "checkpoint-12")
    )
    assert [row[:3] for row in second.rows] == [row[:3] for row in first.rows[1:]]
    assert same_bits(whole.model, resumed.model)
    state = json.loads((tmp_path / "b" / "checkpoint-12" / "trainer_state.json").read_text())
    assert [r["step"] for r in state["log_history"] if "local_redundancy" in r] == [8]


def test_mistakes(tmp_path):
    with refused("inputs of type Trainer"):
        LocalRedundancyCallback(train(tmp_path, max_steps=1))
    with refused(r"Trainer\(callbacks="):
        LocalRedundancyCallback(TOKENS).measure()

"""The Hugging Face callback in transformers' Trainer."""

import functools
import json

import torch
from expected import refused
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
    def __init__(self, trainer, *args, estimate_dtype=None, **kwargs):
        super().__init__(trainer, *args, **kwargs)
        self.estimate_dtype = estimate_dtype

    def estimate(self):
        copied = another_model()
        copied.load_state_dict(self.trainer.model.state_dict())
        return fastlr.estimate(
            copied, TOKENS, 12, predictive=fastlr.Categorical(), dtype=self.estimate_dtype
        ).value


def train(folder, callback=None, *, resume=None, **options):
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
        model, TrainingArguments(str(folder), **settings), train_dataset=rows, eval_dataset=rows[:8]
    )
    if callback is not None:
        callback = callback(trainer)
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback


def logged(trainer, ours=False):
    """The trainer's log without times; our rows or the others."""
    rows = [r for r in trainer.state.log_history if ("local_redundancy" in r) == ours]
    return [
        {k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}
        for row in rows
    ]


@mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["plain", "accumulate", "bf16"],
)
def test_training_and_its_log_are_the_same(tmp_path, options):
    dtype = torch.bfloat16 if "bf16" in options else None
    alone, _ = train(tmp_path, **options)
    states = random_states()
    trainer, callback = train(
        tmp_path,
        lambda t: WatchedTrainer(t, TOKENS, every_n_steps=4, estimate_dtype=dtype, **WHAT),
        **options,
    )
    assert same_bits(alone.model, trainer.model)
    assert random_states() == states
    assert logged(alone) == logged(trainer)
    assert len(logged(alone)) == 5
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
    trainer, callback = train(
        tmp_path,
        lambda t: WatchedTrainer(t, TOKENS, every_n_steps=8, dtype=None, **WHAT),
        bf16=True,
    )
    assert "_original_forward" in vars(trainer.model), (
        "accelerate no longer wraps forward: the special case can go"
    )
    wrapped = trainer.model.forward
    for _, _, value, wanted in callback.rows:
        assert value == wanted
    callback.measure()
    assert trainer.model.forward == wrapped
    assert callback.last.estimate.dtype is None


def test_best_checkpoint_at_evaluations(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "local_redundancy",
        "greater_is_better": True,
    }
    trainer, callback = train(
        tmp_path, lambda t: WatchedTrainer(t, TOKENS, at_start=False, **WHAT), **options, **best
    )
    values = {row[0]: row[2] for row in callback.rows}
    assert list(values) == [4, 8]
    assert trainer.state.best_metric == max(values.values())
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{max(values, key=values.get)}")
    reloaded = fastlr.estimate(trainer.model, TOKENS, 12, predictive=fastlr.Categorical())
    assert reloaded.value == approx(max(values.values()), rel=1e-12)


def test_resumption_and_epochs(tmp_path):
    def watch(t):
        return WatchedTrainer(t, TOKENS, every_n_epochs=1, at_start=False, **WHAT)

    whole, first = train(tmp_path / "a", watch, max_steps=16)
    assert [row[:2] for row in first.rows] == [(8, 1), (16, 2)]
    train(tmp_path / "b", watch, max_steps=16, save_strategy="steps", save_steps=12)
    resumed, second = train(
        tmp_path / "b", watch, max_steps=16, resume=str(tmp_path / "b" / "checkpoint-12")
    )
    assert [row[:3] for row in second.rows] == [row[:3] for row in first.rows[1:]]
    assert same_bits(whole.model, resumed.model)
    state = json.loads((tmp_path / "b" / "checkpoint-12" / "trainer_state.json").read_text())
    assert [r["step"] for r in state["log_history"] if "local_redundancy" in r] == [8]


def test_a_trainer_is_required():
    with refused("transformers.Trainer"):
        LocalRedundancyCallback(language_model(), TOKENS)

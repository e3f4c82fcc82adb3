"""Hugging Face: watch local redundancy during a Trainer's training by a callback.

Install ``'.[huggingface]'`` and run ``python examples/huggingface_trainer.py``.

A tiny BERT, made here, learns whether a sentence of random tokens holds token 5.
"""

from tempfile import mkdtemp

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

import fastlr
from fastlr.integrations.huggingface import LocalRedundancyCallback

VOCABULARY, LENGTH = 64, 12


def sentences(n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows as a tokenized dataset has them."""
    ids = fastlr.TokenInputs(VOCABULARY, LENGTH).batch(0, n, seed=seed)["input_ids"]
    ids[::2, 3] = 5
    return [{"input_ids": row, "labels": (row == 5).any().long()} for row in ids]


def main() -> None:
    """Train for two epochs, measure at every evaluation."""
    set_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    )
    arguments = TrainingArguments(
        mkdtemp(prefix="fastlr-"),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    train, test = sentences(128, 1), sentences(32, 2)

    inputs = fastlr.TokenInputs(VOCABULARY, LENGTH)
    # Without every_n_steps: at evaluations.
    callback = LocalRedundancyCallback(inputs, n=128)
    trainer = Trainer(
        model, arguments, train_dataset=train, eval_dataset=test, callbacks=[callback]
    )
    trainer.train()

    for row in trainer.state.log_history:
        if "local_redundancy" in row:
            print(
                f"step {row['step']}: {row['local_redundancy']:.4g} +- "
                f"{row['local_redundancy_stderr']:.2g}"
            )


if __name__ == "__main__":
    main()

"""Fine-tune a small Hugging Face model on one task after another, and monitor it.

Install ``'.[huggingface]'`` and run ``python examples/finetuned_on_tasks.py``: a quarter of a
minute.

Every task has new texts with random labels, so that all tasks are equally hard. The model must
learn them by heart.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

import fastlr

TASKS, TEXTS, TOKENS, WORDS, CLASSES, STEPS = 24, 48, 8, 100, 4, 40
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def main() -> None:
    """Fine-tune on all tasks."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        intermediate_size=64,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SIZES,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = fastlr.TokenInputs(WORDS, TOKENS)
    options = {"predictive": fastlr.Categorical(), "output": "logits"}
    monitor = fastlr.Monitor(
        model, inputs, n=64, every_n_epochs=2, **options
    )  # an epoch here is a task
    for task in range(1, TASKS + 1):
        texts = torch.randint(WORDS, (TEXTS, TOKENS))
        labels = torch.randint(CLASSES, (TEXTS,))
        for _ in range(STEPS):
            loss = model(input_ids=texts, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            answers = model(input_ids=texts).logits.argmax(-1)
        accuracy = (answers == labels).double().mean().item()
        if reading := monitor.epoch():
            print(f"task {task}: accuracy {accuracy:.2f}, local redundancy {reading.value:.3g}")
    print(monitor.trend())


if __name__ == "__main__":
    main()

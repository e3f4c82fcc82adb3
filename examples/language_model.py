"""Fine-tune a language model and watch its plasticity on uniform tokens and on sentences.

The sentences are your own, padded.

Install ``'.[huggingface]'`` and run ``python examples/language_model.py``.

A tiny GPT-2, made here, and characters as tokens; with a pretrained model only ``model`` and
``sentences`` change.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fastlr

TEXT = [
    "the cat sat on the mat",
    "a dog ran",
    "the sun rose over the hill",
    "we sang",
    "rain fell on the roof",
] * 4
PAD = 0


def sentences() -> dict[str, torch.Tensor]:
    """What ``tokenizer(TEXT, padding=True, return_tensors="pt")`` gives."""
    longest = max(map(len, TEXT))
    ids = torch.tensor(
        [[ord(c) - 95 if c != " " else 1 for c in line.ljust(longest, "_")] for line in TEXT]
    )
    mask = torch.tensor([[int(i < len(line)) for i in range(longest)] for line in TEXT])
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}


def main() -> None:
    """Train for 40 steps."""
    torch.manual_seed(0)
    x = sentences()
    vocabulary, length = int(x["input_ids"].max()) + 1, x["input_ids"].shape[1]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=length,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            **special,
        )
    )
    labels = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    # An output for every token is a label for every token: say so. Padding has none.
    categorical = fastlr.Categorical()
    tokens = fastlr.TokenInputs(vocabulary, length, attention_mask=True)
    uniform = fastlr.Monitor(model, tokens, n=64, every_n_steps=20, predictive=categorical)
    own = fastlr.Monitor(
        model, fastlr.TensorInputs(x), n=len(TEXT), every_n_steps=20, predictive=categorical
    )
    uniform.measure(), own.measure()

    print("step   loss   uniform tokens    the sentences")
    for step in range(1, 41):
        loss = model(**x, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if all([uniform.step(), own.step()]):
            a, b = uniform.last.estimate, own.last.estimate
            print(
                f"{step:4d} {loss:6.2f} {a.value:9.0f} +- {a.stderr:4.0f} {b.value:9.0f} +- "
                f"{b.stderr:4.0f}"
            )
    print(own.last.estimate)


if __name__ == "__main__":
    main()

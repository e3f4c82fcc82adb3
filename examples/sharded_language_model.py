"""Train a language model sharded by fully_shard (FSDP2); all of its processes watch it together.

Run ``torchrun --nproc-per-node 2 examples/sharded_language_model.py``: two processes of the CPU, or
one for each of two GPUs.

The two lines that a loop of yours needs are marked: nothing in them is about shards. Characters are
tokens.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import fastlr

TEXT = (
    "the cat sat on the mat and the dog ran home as rain fell on the roof and the sun rose over "
    "the hill " * 20
)
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH = 16, 32


class LanguageModel(nn.Module):
    """A small causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, letters]."""
        x = self.embedding(input_ids) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(
            LENGTH, device=x.device, dtype=x.dtype
        )
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main() -> None:
    """Train for 40 steps; rank 0 prints."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = LanguageModel().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT], device=device)

    inputs = fastlr.TokenInputs(len(LETTERS), LENGTH)
    # First addition: on every rank.
    monitor = fastlr.Monitor(
        model, inputs, 64, every_n_steps=5, predictive=fastlr.Categorical(dim=2)
    )
    monitor.measure()
    torch.manual_seed(1 + dist.get_rank())  # other batches on every rank
    for step in range(1, 41):
        starts = torch.randint(len(ids) - LENGTH, (16,))
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (reading := monitor.step()) and dist.get_rank() == 0:  # second addition: on every rank
            lr = reading.estimate
            print(
                f"step {step}: loss {loss:.2f}, local redundancy {lr.value:.4g} +- {lr.stderr:.2g}"
            )
    if dist.get_rank() == 0:
        print(monitor.trend())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

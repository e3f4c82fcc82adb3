"""Lightning: watch local redundancy during a fit by a callback.

Install ``'.[lightning]'`` and run ``python examples/lightning_trainer.py``.
"""

from tempfile import mkdtemp

# First: it says which extra is missing.
from fastlr.integrations.lightning import LocalRedundancyMonitor

# isort: split
import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastlr


class Classifier(lightning.LightningModule):
    """A module as you would write it without fastlr."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.net(x)

    def training_step(self, batch: tuple, _: int) -> torch.Tensor:
        """Cross entropy of a batch."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-3)


def main() -> None:
    """Fit for three epochs."""
    lightning.seed_everything(0)
    images = fastlr.ShapeImages((3, 16, 16)).batch(0, 256, seed=1)
    labels = (images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2))).long()
    folder = mkdtemp(prefix="fastlr-")

    monitor = LocalRedundancyMonitor(fastlr.ShapeImages((3, 16, 16)), n=256, every_n_epochs=1)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[monitor],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(images, labels), 32, shuffle=True))

    last = monitor.last.estimate
    print(f"after {trainer.global_step} steps: {last.value:.4g} +- {last.stderr:.2g}")
    monitor.plot(f"{folder}/local_redundancy.png")
    print(f"figure: {folder}/local_redundancy.png")


if __name__ == "__main__":
    main()

"""The paper's other strategies of checkpoint selection (its Table 3), for a user's checkpoints.

The data are images or time series.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlr import metrics
from fastlr.display.sheets import Sheet
from fastlr.errors import InputError
from fastlr.estimator.result import Estimate
from fastlr.experiments.data import ImageStore, Windows, normalise, open_series, split_series
from fastlr.experiments.training.forecaster import Forecaster
from fastlr.experiments.transfer.experiment import pick
from fastlr.experiments.transfer.fields import STRATEGIES, strategy
from fastlr.experiments.transfer.measures import Probe, weights_and_units
from fastlr.experiments.transfer.options import TransferOptions
from fastlr.ghost.model.view import select_output
from fastlr.models.loading import load_state_dict, read_checkpoint

NAMES = tuple(name for name in STRATEGIES if name != "no_pretraining")
NEEDS = {  # option of the command line -> (the strategies that need its data, what the data are)
    "source": (("validation_loss", "dormant_ratio"), "what the checkpoints were trained on"),
    "target": (("linear_probe",), "what they shall be trained on next"),
}
BATCH = {"images": 128, "series": 1024}
Make = Callable[[int | None], nn.Module]


class StoreImages:
    """The images of one split of an image store with their labels, the numbers of their classes.

    Images are read when they are in a batch.
    """

    def __init__(self, store: ImageStore, split: str) -> None:
        self.images, (self.rows, classes) = store.images, store.rows(split)
        self.labels = torch.from_numpy(classes)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images ``index``, normalised, ``[B, 3, H, W]``, and their labels ``[B]``.

        Both are on the device of ``index``.
        """
        chosen = index.cpu()
        images = torch.from_numpy(self.images[self.rows[chosen.numpy()]]).permute(0, 3, 1, 2)
        return normalise(images.to(index.device)), self.labels[chosen].to(index.device)


@dataclass(frozen=True)
class Labelled:
    """Data with targets.

    Attributes:
        train: Data on which the head of a probe is trained, and units are looked at.
        validation: Data for losses.
        classes: Number of classes of images; None for a series.
    """

    train: Windows | StoreImages
    validation: Windows | StoreImages
    classes: int | None


class Classifier(Forecaster):
    """A `Forecaster` of classes: its loss is the cross-entropy."""

    def loss(self, *part: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of images ``[B, 3, H, W]`` and labels ``[B]``."""
        x, y = part
        with self.autocast():
            z = select_output(self.forward(self.as_input(x)), None)
        return F.cross_entropy(z.float(), y, reduction="sum")


def open_labelled(name: str, model: nn.Module, context: int, device: torch.device) -> Labelled:
    """Open an image store, or a series as `fastlr.experiments.data.open_series` does.

    Args:
        name: Name of the data.
        model: A forecaster of it, for a series: says how far it forecasts.
        context: Rows of a window of a series.
        device: Device of the windows.

    Raises:
        InputError: Nothing that can be read, or the model does not run on it.
    """
    if Path(name).is_dir():
        store = ImageStore.open(name)
        return Labelled(StoreImages(store, "train"), StoreImages(store, "test"), len(store.classes))
    table = open_series(name)
    try:
        with torch.no_grad():
            forecast = select_output(
                model(torch.zeros(2, context, len(table.columns), device=device)), None
            )
    except Exception as error:  # a model may raise anything
        shape = f"windows of {context} rows and {len(table.columns)} features"
        raise InputError(
            f"{name}: the model does not run on {shape} ({error}); --length is that of its windows"
        ) from error
    split = split_series(table, context, forecast.shape[1])
    return Labelled(split.train.to(device), split.validation.to(device), None)


def wanted(names: str, data: Mapping[str, str | None]) -> list[str]:
    """Return the strategies that a text names with commas, local redundancy first.

    Args:
        names: The text.
        data: "source" and "target": the names of data, or None.

    Raises:
        InputError: An unknown name, data that are missing, or that nothing needs.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in NAMES:
            raise InputError(f"--by {name}: choose from {', '.join(NAMES)}, with commas")
    for option, (strategies, what) in NEEDS.items():
        needing = [name for name in strategies if name in chosen]
        if needing and data[option] is None:
            raise InputError(
                f"--by {needing[0]} needs --{option} DATA, {what}: an image store or a .csv series"
            )
        if data[option] is not None and not needing:
            raise InputError(f"--{option} goes with --by {' or '.join(strategies)}")
    return [
        "local_redundancy",
        *(name for name in NAMES if name in chosen and name != "local_redundancy"),
    ]


class Strategies:
    """Measures checkpoints by the paper's strategies other than local redundancy.

    The measures are computed as ``fastlr transfer`` computes them.

    Args:
        model: The checkpoints are loaded into it, strictly.
        make: Number of classes (None: the model's own) -> a new one, for probes.
        names: As `wanted` returns them.
        source: Name of the data that the checkpoints were trained on, or None.
        target: Name of those of the next task, or None.
        context: Rows of a window of a series.
        head: The part that a probe draws anew: None: ``head`` for a forecaster, else the last
            linear layer.
        dtype: "fp32" or "bf16".
        batch_size: Samples at a time; None: by `BATCH`.
        seed: Seed of the probe's head and order, and of the samples on which units are looked at.

    Raises:
        InputError: The data cannot be read or do not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Make,
        names: Sequence[str],
        *,
        source: str | None = None,
        target: str | None = None,
        context: int = 512,
        head: str | None = None,
        dtype: str = "fp32",
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        device, self.names = next(model.parameters()).device, names
        self._source = None if source is None else open_labelled(source, model, context, device)
        of_probe = None if target is None else open_labelled(target, model, context, device)
        given = [data for data in (self._source, of_probe) if data is not None]
        has_images = any(data.classes for data in given)
        size = batch_size or BATCH["images" if has_images else "series"]
        precision: Any = dtype
        self.options = TransferOptions(
            seed=seed, dtype=precision, batch_size=size, norm_batch=min(256, size)
        )

        def learner(model: nn.Module, data: Labelled | None) -> Forecaster:
            kind = Classifier if data and data.classes else Forecaster
            return kind(model, device, self.options)

        self.net = learner(model, self._source)
        if self._source is not None and self._source.classes is not None:
            x, _ = self._source.validation.batch(torch.zeros(1, dtype=torch.int64, device=device))
            outputs = select_output(model(x), None).shape[-1]
            if outputs != self._source.classes:
                raise InputError(
                    f"{source} has {self._source.classes} classes, the model {outputs} outputs: "
                    "give --classes"
                )
        self.probe: Probe | None = None
        if of_probe is not None:
            torch.manual_seed(seed)
            spare = learner(make(of_probe.classes), of_probe)
            self._head = head or _head_of(spare.model, of_probe)
            options = TransferOptions(**{**vars(self.options), "head": self._head})
            self.probe = Probe(spare, of_probe, options)  # type: ignore[arg-type]

    def measure(self, path: Path) -> dict[str, dict[str, Any]]:
        """Return a checkpoint's measures by the name of the strategy, each with its definition."""
        net, source = self.net, self._source
        load_state_dict(net.model, read_checkpoint(path), source=str(path))
        found: dict[str, dict[str, Any]] = {}
        if "weight_norm" in self.names:
            found["weight_norm"] = metrics.weight_norm(net.model).to_dict()
        if "dormant_ratio" in self.names:
            found |= weights_and_units(net, source, self.options)  # type: ignore[arg-type]
        if "validation_loss" in self.names:
            loss = net.validate(source.validation, 1)  # type: ignore[union-attr, arg-type]
            found["validation_loss"] = {
                "value": loss,
                "definition": "mean loss on the source's validation data",
            }
        if self.probe is not None:
            new = self.probe.net.model.get_submodule(self._head).state_dict(prefix=f"{self._head}.")
            found["linear_probe"] = self.probe.measure({**net.model.state_dict(), **new})
        return found


def _head_of(model: nn.Module, data: Labelled) -> str:
    if data.classes is None:
        return "head"
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise InputError(
            "the model has no linear layer that makes the logits: name its last part by --head"
        )
    return linear[-1]


def picks(
    estimates: Mapping[str, Estimate],
    measured: Mapping[str, Mapping[str, Mapping[str, Any]]],
    names: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Return what each strategy picks among checkpoints.

    Args:
        estimates: Checkpoint to its local redundancy.
        measured: Checkpoint to what `Strategies.measure` returned.
        names: The strategies.

    Returns:
        Strategy to "pick" (of equal values the first), "rule" ("least" or "greatest"), "candidates"
        (checkpoint to value) and "definition".
    """
    records: list[dict[str, Any]] = []
    for checkpoint, estimate in estimates.items():
        redundancy = {"value": estimate.value, "definition": "local redundancy"}
        measures = {"local_redundancy": redundancy, **measured[checkpoint]}
        records.append({"epoch": checkpoint, "measures": measures})
    found = {}
    for name in names:
        picked = pick(name, records)
        found[name] = {
            "pick": picked["epoch"],
            "rule": picked["rule"],
            "candidates": picked["candidates"],
            "definition": records[0]["measures"][name]["definition"],
        }
    return found


def strategies_sheet(found: Mapping[str, Mapping[str, Any]]) -> Sheet:
    """Return the table of checkpoints by strategies; the pick of each strategy is marked."""
    shorts = {name: strategy(name).short for name in found}
    rows = []
    for checkpoint in next(iter(found.values()))["candidates"]:
        cells = []
        for one in found.values():
            mark = "*" if one["pick"] == checkpoint else " "
            cells.append(f"{one['candidates'][checkpoint]:.4g} {mark}")
        rows.append((checkpoint, *cells))
    definitions = "; ".join(
        f"{shorts[name]} ({one['rule']}): {one['definition']}" for name, one in found.items()
    )
    notes = [
        "*: the checkpoint that the strategy picks, with the least or the greatest value. "
        f"{definitions}."
    ]
    if "linear_probe" in found:
        notes.append("† Sees the data of the next task before it selects.")
    title = "Checkpoints by the paper's strategies (its Table 3)"
    return Sheet("strategies", title, ("checkpoint", *shorts.values()), rows, notes)

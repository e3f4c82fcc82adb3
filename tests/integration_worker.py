"""One of two processes that train together: ``python integration_worker.py FOLDER PART...``, with RANK and so on set.

Each framework trains with and without its integration; what came of it is in FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from integration_cases import INPUTS, N, network, same_bits, train
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import fastlr
import fastlr.distributed
from fastlr.errors import FastlrError
from fastlr.integrations import Monitor


def by_hand(rank: int) -> dict:
    """A loop with DDP: watched on both processes, on that of rank 0 alone, and not at all; bf16 autocast."""
    models, found = [], {}
    for watched in ("nobody", "both", "first"):
        model = network()
        meter = Monitor(DistributedDataParallel(model), INPUTS, N, every_n_steps=2, dtype=torch.bfloat16)
        watch = meter.step if watched == "both" or (watched == "first" and rank == 0) else lambda: None
        train(meter.model, watch, steps=4, accumulate=2, autocast=True, seed=3 + rank)
        models.append(model)
        found[watched] = None if meter.last is None else meter.last.value
    wanted = fastlr.estimate(models[0], INPUTS, N, dtype=torch.bfloat16).value
    rows: list[float] = []
    meter = Monitor(network(), INPUTS, N, batch_size=N // 2, logger=lambda values, step: rows.append(len(values)))
    with fastlr.distributed.sharded():
        shared = meter.measure().value
    alone = fastlr.estimate(network(), INPUTS, N, batch_size=N // 2).value
    return {"same": all(same_bits(models[0], m) for m in models), "values": found, "wanted": wanted,
            "shared": shared, "alone": alone, "logged": rows}  # fmt: skip


def by_lightning(rank: int) -> dict:
    from test_lightning import LocalRedundancyMonitor, fit

    options = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "use_distributed_sampler": True}
    alone, _ = fit(**options)
    monitor = LocalRedundancyMonitor(INPUTS, N, every_n_steps=1, module="net")
    watched, trainer = fit(monitor, **options)
    wanted = fastlr.estimate(watched.net, INPUTS, N).value
    try:
        fit(LocalRedundancyMonitor(INPUTS, N, module="net", predictive=fastlr.Categorical(dim=0)), **options)
        error = "none"
    except FastlrError as raised:
        error = str(raised)
    value = float(trainer.callback_metrics["local_redundancy"])
    return {"same": same_bits(alone, watched), "steps": monitor.last.step, "value": monitor.last.value,
            "metric": value, "wanted": wanted, "error": error}  # fmt: skip


def by_huggingface(rank: int, folder: Path) -> dict:
    from test_huggingface import TOKENS, WHAT, LocalRedundancyCallback, logged, train

    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    alone, _ = train(folder, **options)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "local_redundancy", "greater_is_better": False}
    trainer, callback = train(folder, lambda t: LocalRedundancyCallback(t, TOKENS, **WHAT), **options, **best)
    wanted = fastlr.estimate(alone.model, TOKENS, 12, predictive=WHAT["predictive"]).value
    values = [row["local_redundancy"] for row in logged(trainer, True)]
    return {"values": values, "value": callback.last.value, "wanted": wanted, "best": trainer.state.best_metric}


def main(folder: Path, parts: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    make = {"hand": by_hand, "lightning": by_lightning, "huggingface": partial(by_huggingface, folder=folder / "hf")}
    (folder / f"{rank}.json").write_text(json.dumps({part: make[part](rank) for part in parts}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""One of two processes that train together, with and without an integration.

Each function returns what came of it.
"""

import os
import warnings
from copy import deepcopy

import torch
from full_params_ranks import whole_state
from integration_cases import INPUTS, N, network, same_bits, train
from ranks import error_of
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from untouched import untouched

import fastlr
import fastlr.distributed
from fastlr.distributed import sharding
from fastlr.integrations import Monitor


def by_hand(rank):
    """Train by a loop with DDP in bf16 autocast, watched by both processes, by rank 0, by none."""
    models, found = [], {}
    for watched, ranks in {"nobody": (), "both": (0, 1), "first": (0,)}.items():
        model = network()
        meter = Monitor(
            DistributedDataParallel(model), INPUTS, N, every_n_steps=2, dtype=torch.bfloat16
        )
        watch = meter.step if rank in ranks else lambda: None
        train(meter.model, watch, steps=4, accumulate=2, autocast=True, seed=3 + rank)
        models.append(model)
        found[watched] = meter.last and meter.last.value
    wanted = fastlr.estimate(models[0], INPUTS, N, dtype=torch.bfloat16).value
    return all(same_bits(models[0], m) for m in models), found, wanted


def together(rank):
    """Train by a loop with DDP, with and without measurements by both processes in `sharded`."""
    sharding._PIECE = 1 << 9
    net, other = network(), network()
    readings, states, rows = [], [], []
    meter = Monitor(
        DistributedDataParallel(net), INPUTS, N, batch_size=8, log=lambda *at: rows.append(at)
    )

    def watch():
        states.append(deepcopy(net))
        with untouched(net):
            readings.append(meter.measure().value)

    with sharding.sharded():
        train(meter.model, watch, steps=3, seed=3 + rank)
    train(DistributedDataParallel(other), steps=3, seed=3 + rank)
    alone = [fastlr.estimate(state, INPUTS, N, batch_size=8).value for state in states]
    return readings, alone, len(rows), same_bits(net, other)


def by_lightning(rank):
    as_launched(rank)
    from test_lightning import LocalRedundancyMonitor, fit

    options = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "use_distributed_sampler": True}
    alone, _ = fit(**options)
    monitor = LocalRedundancyMonitor(INPUTS, N, every_n_steps=1, module="net")
    watched, trainer = fit(monitor, **options)
    wanted = fastlr.estimate(watched.net, INPUTS, N).value
    wrong = LocalRedundancyMonitor(INPUTS, N, module="net", predictive=fastlr.Categorical(dim=0))
    error = error_of(lambda: fit(wrong, **options))
    value = float(trainer.callback_metrics["local_redundancy"])
    return {
        "same": same_bits(alone, watched),
        "steps": monitor.last.step,
        "value": monitor.last.value,
        "metric": value,
        "wanted": wanted,
        "error": error,
    }


def by_huggingface(rank, folder):
    as_launched(rank)
    from test_huggingface import TOKENS, WHAT, LocalRedundancyCallback, logged, train

    options = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    alone = train(folder, **options)
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "local_redundancy",
        "greater_is_better": False,
    }
    callback = LocalRedundancyCallback(TOKENS, **WHAT)
    trainer = train(folder, callback, **options, **best)
    wanted = fastlr.estimate(alone.model, TOKENS, 12, predictive=WHAT["predictive"]).value
    values = [row["local_redundancy"] for row in logged(trainer, True)]
    return {
        "values": values,
        "value": callback.last.value,
        "wanted": wanted,
        "best": trainer.state.best_metric,
    }


def by_lightning_sharded(rank):
    """Lightning's ModelParallelStrategy, its module sharded in `configure_model`."""
    as_launched(rank)
    from lightning.pytorch.strategies import ModelParallelStrategy
    from test_lightning import LocalRedundancyMonitor, Module, fit

    class Sharded(Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)  # no batch norm: its statistics would differ between the processes
            self.net = nn.Sequential(
                nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
            )

        def configure_model(self):
            if not units(self):
                for part in (self.net[1], self.net):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def watched(*callbacks):
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return fit(*callbacks, module=Sharded(), strategy=strategy, devices=2, max_epochs=1)

    alone, _ = watched()
    monitor = LocalRedundancyMonitor(INPUTS, N, every_n_steps=1)
    module, trainer = watched(monitor)
    wanted = fastlr.estimate(with_weights_of(module, Sharded()), INPUTS, N).value
    return {
        "same": same_weights(alone, module),
        "value": monitor.last.value,
        "wanted": wanted,
        "metric": float(trainer.callback_metrics["local_redundancy"]),
        "steps": monitor.last.step,
    }


def by_huggingface_sharded(rank, folder, bf16):
    """Run the Trainer with accelerate's FSDP2 plugin, told that these processes are on GPUs.

    It takes the plugin on GPUs only.
    """
    as_launched(rank)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import accelerate

    accelerate.PartialState._prepare_backend = lambda *_: (
        "gloo",
        accelerate.DistributedType.MULTI_GPU,
    )
    from test_huggingface import (
        TOKENS,
        WHAT,
        LocalRedundancyCallback,
        language_model,
        logged,
        train,
    )

    options = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "fsdp": True,
        "bf16": bf16,
    }
    alone = train(folder, **options)
    callback = LocalRedundancyCallback(TOKENS, **WHAT)
    trainer = train(folder, callback, **options)
    wanted = fastlr.estimate(
        with_weights_of(trainer.model, language_model()), TOKENS, 12, predictive=WHAT["predictive"]
    )
    by_hand = Monitor(
        trainer.model,
        TOKENS,
        12,
        predictive=WHAT["predictive"],
        dtype=torch.bfloat16 if bf16 else None,
    )
    values = [row["local_redundancy"] for row in logged(trainer, True)]
    return {
        "same": same_weights(alone.model, trainer.model),
        "values": values,
        "value": callback.last.value,
        "wanted": wanted.value,
        "by hand": by_hand.measure().value,
        "units": units(trainer.model),
    }


def units(model):
    """The classes of the modules that are under ``fully_shard``."""
    return [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)]


def with_weights_of(model, plain):
    """A plain module with the weights of a sharded one."""
    plain.load_state_dict(
        {name: torch.from_numpy(values) for name, values in whole_state(model).items()}
    )
    return plain


def same_weights(a, b):
    return all(
        (x == y).all()
        for x, y in zip(whole_state(a).values(), whole_state(b).values(), strict=True)
    )


def as_launched(rank):
    """Set what torchrun tells the frameworks, of two processes on this machine."""
    warnings.simplefilter("ignore")
    settings = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # there is a process group already
        "TORCHELASTIC_RUN_ID": "test",
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ.update(settings)

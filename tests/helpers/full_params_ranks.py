"""What the ranks of tests/distributed/test_full_params.py do; each returns what it found."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from exact import seeded
from ranks import error_of, timed_error
from single_samples import Written
from threads import together
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import fastlr
from fastlr.distributed import full_params, fully_sharded, sharded
from fastlr.errors import ModelError
from fastlr.ghost.api import engine_for
from fastlr.integrations import Monitor
from fastlr.integrations.measurement import on_main


def in_residual_blocks(m, input_ids):
    x = m.embedding(input_ids)
    for block in m.blocks:
        x = x + block(x)
    return m.head(m.frozen(m.memory(x)[0])) * m.scale


def tokens_model():
    """A small language model that is hard to shard.

    It has a tied embedding, an LSTM, a frozen layer, a bias that fewer ranks hold, and a hook.
    """
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(2)]
    model = Written(
        in_residual_blocks,
        embedding=nn.Embedding(11, 6),
        blocks=nn.ModuleList(blocks),
        memory=nn.LSTM(6, 6, batch_first=True),
        frozen=nn.Linear(6, 6).requires_grad_(False),
        head=nn.Linear(6, 11, bias=False),
        scale=nn.Parameter(torch.randn(1)),
    )
    model.head.weight = model.embedding.weight
    model.blocks[0].register_forward_hook(lambda module, args, out: 1.5 * out)
    return model


def sharded_model(of_root=None, of_ends=None, **how):
    """Shard `tokens_model` by ``fully_shard``, its blocks in units of their own.

    The rest goes with the root, or all of it but both ends.
    """
    model = tokens_model()
    if of_ends is not None:
        fully_shard([model.embedding, model.head], **of_ends)
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how | (of_root or {}))


_HALF = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
DRAWN = fastlr.TokenInputs(11, 5)
PREDICTIVE = fastlr.Categorical(dim=2)


def batch(count, seed):
    return torch.randint(0, 11, (count, 5), generator=seeded(seed))


def cotangent(z):
    return torch.randn(z.shape, generator=seeded(1)).to(z.dtype)


def norms(model, x):
    return fastlr.per_sample_grad_sq_norms(model, x, cotangent, per_parameter=True)


def state(model):
    """All that a measurement must leave: objects by identity, tensors by value."""
    found = []
    for module in model.modules():
        held = vars(module)
        found += [
            id(type(module)),
            list(held),
            [id(value) for value in held.values()],
            module.training,
        ]
        for entry in held.values():
            if isinstance(entry, dict):
                found += [list(entry), [id(value) for value in entry.values()]]
    for p in model.parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        grad = None if p.grad is None else p.grad.to_local().clone()
        found += [local.detach().clone(), grad]
    return found


def same(a, b):
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def whole_state(model):
    """The values of the whole model as arrays."""
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy()
        for name, t in model.state_dict().items()
    }


def as_arrays(tensors):
    return {name: t.numpy() for name, t in tensors.items()}


def training(rank):
    """Train a sharded model for two steps of two parts, with measurements amid them and without."""
    found = {"values": []}
    trained = []
    for measured in (True, False):
        model = sharded_model(
            of_ends={"mp_policy": MixedPrecisionPolicy(torch.float32, output_dtype=torch.float32)}
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        estimator = fastlr.LocalRedundancy(model, DRAWN, 7, predictive=PREDICTIVE, batch_size=2)
        for step in range(2):
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                z = model(batch(4, 10 * rank + 2 * step + part))
                if measured and step == part == 0:
                    # A graph waits; root is not resharded.
                    found["in the midst"] = as_arrays(norms(model, batch(3, rank)))
                F.cross_entropy(z.flatten(0, 1), batch(4, 5).flatten()).backward()
                if measured:
                    before = state(model)
                    lr = (
                        on_main(estimator.measure, rank == 0, lambda told: told, model)
                        if part
                        else estimator.measure()
                    )
                    found["values"].append(lr.value)
                    found["as before"] = found.get("as before", True) and all(
                        map(same, before, state(model))
                    )
                    found["per parameter"] = lr.per_parameter
                    found["routes"] = lr.routes
                    found["weights"] = whole_state(model)
            optimizer.step()
            optimizer.zero_grad()
        if measured:
            found["checks"] = engine_for(model).independence.comparisons
        trained.append(whole_state(model))
    found["same training"] = all(
        (trained[0][name] == trained[1][name]).all() for name in trained[0]
    )
    return found


def written_inside(rank):
    """Write into the whole parameters: norms before, inside and after, and what is left."""
    model, x = sharded_model(), batch(3, rank)
    before = state(model)
    with full_params(model):
        plain = norms(model, x)
        with torch.no_grad():
            model.embedding.weight.add_(1.0)
            model.memory.bias_hh_l0.data = torch.ones(24)
        written = norms(model, x)
    after = norms(model, x)
    return {
        "norms": [as_arrays(found) for found in (plain, written, after)],
        "as before": all(map(same, before, state(model))),
    }


def too_little_memory(rank):
    """Measure where rank 1 has no memory free, or none to gather in, and then again."""
    model = sharded_model()
    before = state(model)
    measure = partial(fastlr.estimate, model, DRAWN, 4, predictive=PREDICTIVE)
    empty = torch.empty

    def full(*shape, **how):
        if how.get("dtype") == torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*shape, **how)

    free = 0 if rank == 1 else 1 << 60
    with patch.object(fully_sharded, "free_bytes", lambda device: free):
        errors = [error_of(measure)]
    with patch.object(torch, "empty", full) if rank == 1 else nullcontext():
        errors.append(error_of(measure))
    return {
        "errors": errors,
        "as before": all(map(same, before, state(model))),
        "value": measure().value,
    }


def variants(rank):
    """Other ways to shard, other ways to measure, and how many exchanges one takes."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    model = sharded_model(reshard_after_forward=False)
    with CommDebugMode() as exchanges, full_params(model):
        found["frozen"] = (
            not model.frozen.weight.requires_grad and type(model.frozen.weight) is nn.Parameter
        )
    found["exchanges"] = exchanges.get_total_counts()
    with full_params(model):
        inner = fastlr.estimate(model, DRAWN, 4, predictive=PREDICTIVE)
        inside = fastlr.metrics.measures(model, ["weight_norm"])["weight_norm"]
    found["shared"] = (
        inner.value,
        float(inside),
        fastlr.estimate(model, DRAWN, 4, predictive=PREDICTIVE).value,
    )
    widened = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)}
    found |= {"half": [], "same output": True}
    for half in (sharded_model(widened, **_HALF), sharded_model(_HALF, widened, **_HALF)):
        found["half"].append(as_arrays(norms(half, batch(3, 0))))
        z = half(batch(3, 0))
        with full_params(half):
            found["same output"] &= same_output(half, z) and z.dtype == torch.float32
        estimator = fastlr.LocalRedundancy(half, DRAWN, 4, predictive=PREDICTIVE)
        checks = [
            (estimator.measure(), engine_for(half).independence.comparisons)[1] for _ in range(2)
        ]
        found["same output"] &= checks[0] == checks[1]
    rows = []
    monitor = Monitor(
        model,
        DRAWN,
        4,
        every_n_steps=1,
        predictive=PREDICTIVE,
        keep_best=(lambda reading: rows.append((rank, reading.value))),
    )
    reading = monitor.step()
    found["monitor"] = reading.value if reading else None, rows
    report = fastlr.support_report(model, batch(3, 1))
    found["routes"] = set(report.routes.values())
    return found


def same_output(model, z):
    """Whether the output for the same batch is z, also after a pass that ended midway."""
    handle = model.memory.register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        model(batch(3, 0))
    except ZeroDivisionError:
        handle.remove()
    again = [model(batch(3, 0)) for _ in range(2)]
    return all(other.dtype == z.dtype and torch.equal(other, z) for other in again)


def refused(rank):
    """What cannot be measured, by its error; and ranks of which one fails, or does not come."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = sharded_model()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallel = parallelize_module(
        nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()}
    )

    def fails_on_rank_1():
        with full_params(model, timeout=20) as members:
            if rank == 1:
                raise ModelError("no more")
            members.share(None)

    def comes_late():
        if rank == 0:
            with full_params(model, timeout=1):
                pass

    x = torch.randn(3, 4)
    return [
        error_of(partial(fastlr.metrics.measures, model, ["weight_norm"])),
        error_of(partial(norms, model.head, torch.randn(3, 6))),
        error_of(partial(norms, parallel, x)),
        error_of(lambda: norms(fully_shard(parallel, mesh=mesh["data"]), x)),
        error_of(fails_on_rank_1),
        error_of(partial(fastlr.estimate, model, DRAWN, 4 + rank, predictive=PREDICTIVE)),
        error_of(comes_late),
    ]


def some_of_three(rank):
    """A model on two of three ranks, measured by these, and within `sharded` of all three."""
    group = dist.new_group([0, 2])
    found = []
    if rank != 1:
        model = sharded_model(mesh=DeviceMesh.from_group(group, "cpu"))
        found.append(fastlr.estimate(model, DRAWN, 4, predictive=PREDICTIVE).value)

    def together():
        with sharded(timeout=20) as members:
            if rank != 1:
                norms(model, batch(2, 0))
            members.share(None)

    return [*found, error_of(together)]


def in_threads(rank, fully):
    """Two threads measure a model each; each rank begins with another one.

    Args:
        rank: of this process.
        fully: whether the models are under ``fully_shard``.
    """
    work = []
    for seed in range(2):
        group = dist.new_group([0, 1])
        model = tokens_model()
        if fully:  # torch takes meshes of the same names for one
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ab"[seed],))
            model = sharded_model(mesh=mesh)
        work.append(partial(measured_later, 0.3 * (seed != rank), group, model, seed))
    return together(*work, timeout=60)


def measured_later(seconds, group, model, seed):
    """Measure five times after so many seconds."""
    time.sleep(seconds)
    with sharded(group, timeout=20):
        meter = fastlr.LocalRedundancy(model, DRAWN, 4, seed=seed, predictive=PREDICTIVE)
        return [meter.measure().value for _ in range(5)]


def killed(rank):
    """Rank 1 is killed before a measurement; what rank 0 raises, and after how many seconds."""
    model = sharded_model()
    norms(model, batch(2, 0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def late():
        with full_params(model, timeout=3):
            pass

    return timed_error(late)


def language_models(rank, name, shape):
    """Shard one of `big` block by block on a mesh of this shape, and measure it.

    Returned are norms, an estimate, and whether the model is as before.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    model, blocks, x, predictive, inputs = big(name)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = state(model)
    found = as_arrays(fastlr.per_sample_grad_sq_norms(model, x, cotangent, per_parameter=True))
    value = fastlr.estimate(model, inputs, 6, predictive=predictive, batch_size=2).value
    unchanged = all(map(same, before, state(model)))
    return {"norms": found, "value": value, "as before": unchanged}


def big(name):
    """Return a tiny transformers model, its blocks' getter, inputs, predictive, synthetic inputs.

    The weights are random.
    """
    import transformers as hf

    torch.manual_seed(7)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    if name == "vit":
        config = hf.ViTConfig(**shape, num_attention_heads=2, image_size=8, patch_size=4)
        images = fastlr.NoiseImages((3, 8, 8))
        model = hf.ViTForImageClassification(config).eval()
        return model, vit_layers, torch.randn(3, 3, 8, 8), None, images
    shape |= {"vocab_size": 11, "num_attention_heads": 4, "num_key_value_heads": 2}
    blocks = lambda m: m.model.layers  # noqa: E731
    if name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape))
    elif name == "mixtral":
        config = hf.MixtralConfig(**shape, num_local_experts=3, num_experts_per_tok=2)
        model = hf.MixtralForCausalLM(config)
    else:
        blocks = first_list
        config = hf.GPT2Config(
            vocab_size=11,
            n_positions=8,
            n_embd=16,
            n_layer=2,
            n_head=2,
            use_cache=name != "checkpointed",
        )
        model = hf.GPT2LMHeadModel(config)
        if name == "lora":
            import peft

            model = peft.get_peft_model(
                model, peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
            )
        if name == "checkpointed":
            model.transformer.h = nn.ModuleList(map(checkpoint_wrapper, model.transformer.h))
    return model.eval(), blocks, {"input_ids": batch(3, 2)}, PREDICTIVE, DRAWN


def vit_layers(model):
    return [part for part in model.modules() if type(part).__name__ == "ViTLayer"]


def first_list(model):
    return next(part for part in model.modules() if isinstance(part, nn.ModuleList))

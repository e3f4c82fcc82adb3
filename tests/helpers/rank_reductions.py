"""What the ranks of tests/distributed/test_reductions.py do; each returns what it found."""

import hashlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from definitions import reductions as reference
from exact import seeded
from ranks import error_of, timed_error
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from fastlr import distributed
from fastlr.distributed import reductions

SIZES = (1, 7, 8, 9, 4097, 100_003)
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def left_behind():
    """Return the names of shared memory of processes that have ended.

    Others have a name for a moment only, in tests beside this one too.
    """
    names = {p.name for p in Path("/dev/shm").glob("fastlr-*")}
    return {name for name in names if not Path("/proc", name.split("-")[1]).exists()}


def drawn(rank, shape, dtype=torch.bfloat16, device="cpu"):
    """A tensor that is this rank's, of varied magnitudes."""
    generator = seeded(1000 + rank)
    values = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    return values.to(dtype).to(device)


def same_bits(a, b):
    """Return True if two tensors hold the same bits; NaN is NaN."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    where = a.isnan() & b.isnan()
    return a.dtype == b.dtype and bool(
        ((a.contiguous().view(ints) == b.contiguous().view(ints)) | where).all()
    )


def hashed(tensors):
    total = hashlib.sha256()
    for t in tensors:
        total.update(t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def all_checks(rank, prefer, device="cpu", buffer_bytes=None):
    """Run every check that leaves the group whole.

    Keys of the result: the route, and for each check a list of what was wrong.
    """
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    route = distributed.connect(device, timeout=60, buffer_bytes=buffer_bytes, prefer=prefer)
    first, wrong = _sums(rank, device)
    again, _ = _sums(rank, device)
    return {
        "route": (route.name, route.why),
        "sums": wrong,
        "hash": hashed(first),
        "again": hashed(again),
        "special": _special(rank, device),
        "layouts": _layouts(rank, device),
        "norms": _norms(rank, device),
        "refused": _refused(device),
        "errors": _errors(rank, device),
        "capture": _capture(device),
        "ddp": {
            name: _ddp_step(rank, device, name) for name in ("float32", "bfloat16", "compressed")
        },
    }


def _sums(rank, device):
    found, wrong = [], []
    for dtype in DTYPES:
        for n in SIZES:
            for average in (False, True):
                want = reference.all_reduce(drawn(rank, n, dtype), average=average)
                got = drawn(rank, n, dtype, device)
                returned = distributed.all_reduce(got, average=average)
                if returned is not got or not same_bits(got.cpu(), want):
                    wrong.append(f"{dtype}, {n} elements, average={average}")
                found.append(got)
    return found, wrong


def _special(rank, device):
    """NaN, infinities, signed zeros, subnormals, sums beyond the range, and ties."""
    values = [
        float("nan"),
        float("inf"),
        -float("inf"),
        -0.0,
        0.0,
        1e-40,
        3e38,
        1.0,
        2.0**-8,
        1.0 + 2.0**-7,
    ]
    wrong = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.tensor(values, dtype=dtype).roll(rank)
        x = torch.cat([x, torch.tensor(values, dtype=dtype)])
        want = reference.all_reduce(x.clone())
        got = distributed.all_reduce(x.to(device, copy=True)).cpu()
        if not same_bits(got, want):
            wrong.append(f"{dtype}: {got.tolist()} for {want.tolist()}")
    return wrong


def _layouts(rank, device):
    """Check strides that differ between ranks, slices, parameters, no elements and no axes.

    Slices begin anywhere.
    """
    wrong = []
    base = drawn(rank, (2, 3, 4, 5), device=device)
    want = reference.all_reduce(base.cpu().clone())
    mixed = base.to(memory_format=torch.channels_last) if rank % 2 else base.clone()
    if not same_bits(distributed.all_reduce(mixed).cpu(), want):
        wrong.append("strides that differ between ranks")
    every = base.clone().repeat_interleave(2, dim=3)
    before = every.clone()
    if not same_bits(distributed.all_reduce(every[..., ::2]).cpu(), want):
        wrong.append("every second element")
    if not torch.equal(every[..., 1::2], before[..., 1::2]):
        wrong.append("elements in between were touched")
    for offset in (1, 3, 5):
        buffer = torch.full((4100,), 7.0, dtype=torch.bfloat16, device=device)
        inner = buffer[offset : offset + 4001]
        inner.copy_(drawn(rank, 4001))
        if not same_bits(
            distributed.all_reduce(inner).cpu(), reference.all_reduce(drawn(rank, 4001))
        ):
            wrong.append(f"a slice from {offset}")
        if not (bool((buffer[:offset] == 7).all()) and bool((buffer[offset + 4001 :] == 7).all())):
            wrong.append(f"memory around a slice from {offset}")
    parameter = nn.Parameter(drawn(rank, 5, torch.float32, device))
    version = parameter._version
    distributed.all_reduce(parameter)
    if parameter._version == version or not parameter.requires_grad:
        wrong.append("autograd does not know that a parameter has changed")
    scalar = torch.tensor(float(rank), device=device)
    if distributed.all_reduce(scalar).item() != sum(range(dist.get_world_size())):
        wrong.append("a tensor without axes")
    distributed.all_reduce(torch.empty(0, 3, device=device))
    return wrong


def _norms(rank, device):
    shapes = [(7,), (100, 33), (0,), (5000,), (3, 3), (257, 129)]
    tensors = [drawn(rank + 10 * k, shape, DTYPES[k % 2]) for k, shape in enumerate(shapes)]
    truth = [sum(t.double() for t in _everyones(k, shape)) for k, shape in enumerate(shapes)]
    want = reference.reduce_sq_norm(tensors).item()
    there = [t.to(device, copy=True) for t in tensors]
    got = [distributed.reduce_sq_norm(there).item() for _ in range(2)]
    before, reductions.BUCKET_BYTES = reductions.BUCKET_BYTES, 4096
    try:
        small_buckets = distributed.reduce_sq_norm(iter(there)).item()
    finally:
        reductions.BUCKET_BYTES = before
    one = distributed.reduce_sq_norm(there[1])
    unchanged = all(same_bits(a.cpu(), b) for a, b in zip(there, tensors))
    return {
        "want": want,
        "float64": sum(t.square().sum().item() for t in truth),
        "got": got,
        "small buckets": small_buckets,
        "one": (
            one.item(),
            reference.reduce_sq_norm(tensors[1]).item(),
            str(one.dtype),
            one.ndim,
            one.device.type,
        ),
        "none": distributed.reduce_sq_norm([]).item(),
        "unchanged": unchanged,
    }


def _everyones(k, shape):
    return [drawn(r + 10 * k, shape, DTYPES[k % 2]) for r in range(dist.get_world_size())]


def _refused(device):
    cases = {
        "integers": torch.ones(3, dtype=torch.int64, device=device),
        "complex": torch.ones(3, dtype=torch.complex64, device=device),
        "sparse": torch.eye(3, device=device).to_sparse(),
        "a list": [1.0],
    }
    return {name: error_of(lambda x=x: distributed.all_reduce(x)) for name, x in cases.items()}


def _capture(device):
    """On a GPU: what a reduction says that is captured in a CUDA graph."""
    if device == "cpu":
        return ""
    x = torch.ones(100, device=device)

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            distributed.all_reduce(x)

    return error_of(capture)


def _errors(rank, device):
    """Root mean square errors of bfloat16 sums against float64, by three ways."""
    n, ranks = 20_000, dist.get_world_size()
    parts = [drawn(100 + r, n) for r in range(ranks)]
    truth = sum(p.double() for p in parts)
    ours = distributed.all_reduce(parts[rank].to(device, copy=True)).cpu()
    stepwise = parts[0].clone()
    for part in parts[1:]:
        stepwise += part
    library = parts[rank].clone()
    dist.all_reduce(library)
    size = truth.square().mean().sqrt()
    found = {"fastlr": ours, "bfloat16": stepwise, "gloo": library}
    return {
        name: float((t.double() - truth).square().mean().sqrt() / size) for name, t in found.items()
    }


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    )


def _ddp_step(rank, device, how):
    """Take an SGD step on this rank's part; return how far it is from one process on the batch.

    The distance is that of the parameters.
    """
    ranks, each = dist.get_world_size(), 6
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    generator = seeded(1)
    x = torch.randn(each * ranks, 12, generator=generator).to(device, dtype)
    y = torch.randn(each * ranks, 3, generator=generator).to(device, dtype)
    alone, local = three_layers().to(device, dtype), three_layers().to(device, dtype)
    shared = DistributedDataParallel(three_layers().to(device, dtype), bucket_cap_mb=1)
    hook = distributed.ddp_comm_hook
    shared.register_comm_hook(None, bf16_compress_wrapper(hook) if how == "compressed" else hook)
    own = slice(rank * each, (rank + 1) * each)
    for model, rows in ((alone, slice(None)), (local, own), (shared, own)):
        (model(x[rows]) - y[rows]).square().mean().backward()
    # The definition: the mean of the ranks' own gradients, in float32, rounded once.
    wrong = 0
    for a, b in zip(local.parameters(), shared.module.parameters(), strict=True):
        sent = a.grad.to(torch.bfloat16) if how == "compressed" else a.grad
        want = reference.all_reduce(sent.cpu().clone(), average=True).to(dtype)
        wrong += not same_bits(b.grad.cpu(), want)
    for model in (alone, shared):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    pairs = list(zip(alone.parameters(), shared.module.parameters(), strict=True))
    steps = [
        (a.double() - p.to(device, dtype).double())
        for (a, _), p in zip(pairs, three_layers().parameters())
    ]
    gaps = [(a.double() - b.double()) for a, b in pairs]
    norm = [torch.stack([t.square().sum() for t in ts]).sum().sqrt().item() for ts in (gaps, steps)]
    return {"not the mean": wrong, "gap": norm[0] / norm[1]}


def one_is_killed(rank, when, prefer, timeout):
    """Rank 1 kills itself; the others say what they met, and after how many seconds."""
    first = when == "before connecting"
    if first and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = [time.perf_counter()]

    def work():
        route = distributed.connect("cpu", timeout=timeout if first else 60, prefer=prefer)
        route.set_timeout(timeout)
        x = drawn(rank, 100_000)
        model = None
        if when == "in a backward pass":
            model = DistributedDataParallel(three_layers())
            model.register_comm_hook(None, distributed.ddp_comm_hook)
        for k in range(20):
            if rank == 1 and k == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            begun[:] = [time.perf_counter()]
            if model is None:
                distributed.all_reduce(x)
            else:
                model(torch.ones(2, 12)).sum().backward()

    return error_of(work), time.perf_counter() - begun[0]


def one_is_stopped(rank, timeout):
    """Stop rank 1 for a while: the others end at their limit and never use the group again."""
    distributed.connect("cpu", timeout=60).set_timeout(timeout)
    if rank == 1:
        time.sleep(3 * timeout)
    x = drawn(rank, 100_000, torch.float32)
    text, seconds = timed_error(lambda: distributed.all_reduce(x))
    return [text, error_of(lambda: distributed.all_reduce(x))], seconds, bool(x.isnan().any())


def different_calls(rank):
    """Ranks that call something else, with whole groups for each."""
    found = []
    for which in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        distributed.connect("cpu", group, timeout=60)
        n = 10 + (which == 0 and rank == 0)
        x = torch.ones(n, dtype=torch.float32 if which == 1 and rank == 0 else torch.bfloat16)
        norm = which == 2 and rank == 0
        call = distributed.reduce_sq_norm if norm else distributed.all_reduce
        found.append(error_of(lambda call=call, x=x, group=group: call(x, group)))
    return found


def interrupted(rank):
    """Rank 0 waits for the others, who come too late, and is interrupted."""
    distributed.connect("cpu", timeout=60)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    if rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(6.0)
    return timed_error(lambda: [distributed.all_reduce(torch.ones(5)) for _ in range(2)])


def options_that_differ(rank):
    """Options of connect() that are wrong, or not the same on all ranks."""
    prefer = "extension" if rank else "torch.distributed"
    wrong = [
        {"timeout": 0},
        {"prefer": "nccl"},
        {"buffer_bytes": 100},
        {"device": "meta"},
        {"prefer": prefer, "timeout": 60},
        {"group": dist.GroupMember.NON_GROUP_MEMBER},
    ]
    return [
        error_of(partial(distributed.connect, **{"device": "cpu"} | options)) for options in wrong
    ]


def without_the_extension(rank, who):
    """One rank has no fastlr._C: all of them go through torch.distributed."""
    if rank == who:
        from fastlr.distributed import connection

        def absent():
            raise ModuleNotFoundError("No module named 'fastlr._C'")

        connection.load_extension = absent
    route = distributed.connect("cpu", timeout=60)
    x = distributed.all_reduce(drawn(rank, 1000))
    return (route.name, route.why), same_bits(x, reference.all_reduce(drawn(rank, 1000)))


def subgroups(rank):
    """Two groups at once; the default group is left alone."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    x = torch.full((1000,), float(rank))
    distributed.all_reduce(x, mine)
    return x[500].item(), error_of(lambda: distributed.all_reduce(x, groups[1 - rank % 2]))

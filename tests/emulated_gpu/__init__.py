"""A GPU emulated on the host, for the tests that need one.

``python -m pytest -p tests.emulated_gpu -p bench.gpu_run.plugin tests/ghost`` runs them without a
GPU. Tensors on "cuda:0" have memory of the host. Operators run the CPU's kernels, and Triton's run
in its interpreter. So these tests show wrong values, mixed devices, and reads while a graph is
captured. They show no races, no times, nothing of cuDNN, and no rounding of a GPU.

It replaces parts of PyTorch 2.11 by name, in the whole process. Random numbers are the CPU's.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import cuda
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.emulated_gpu import operators

FOLDER = Path(__file__).parent
HOST = torch.device("cpu")
# They only look at a tensor's sizes, or share its memory.
LEFT_OUT = [f"aten::{name}" for name in ("set_", "is_set_to", "record_stream", "_pin_memory")]
READS = ("_local_scalar_dense", "nonzero", "equal")
tapes = []  # of the graphs that are captured now


class Stream:
    """A stream, or an event. The host has done all work at once."""

    cuda_stream, device_index, device = 0, 0, torch.device("cuda", 0)

    def __init__(self, *args, **options):
        self.time = 0.0

    def __enter__(self):
        self.before = cuda.current_stream()
        cuda.set_stream(self)

    def __exit__(self, *error):
        cuda.set_stream(self.before)

    def record(self, stream=None):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.time - self.time)

    def wait_stream(self, other):
        """Do nothing: the other stream's work is done."""

    synchronize = wait_event = wait_stream


class Taping(TorchDispatchMode):
    """Keeps the operations of a graph, and refuses what none can have."""

    def __init__(self, tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = [t for t in given if t.is_cuda]
        crosses = any(t.ndim for t in given if not t.is_cuda) or kwargs.get("device") == HOST
        copies = name in ("copy_", "_to_copy") and crosses
        if on_gpu and (name in READS or copies):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = operator(*args, **kwargs)
        self.tape.append((lambda: operator(*args, **kwargs), result))
        return result


class Graph:
    """A CUDA graph: runs the captured operations again, into the memory of their results."""

    def __init__(self, keep_graph=False):
        self.tape = []

    def capture_begin(self, pool=None, capture_error_mode="global"):
        tapes.append(self.tape)
        self.mode = Taping(self.tape)
        self.mode.__enter__()

    def capture_end(self):
        self.mode.__exit__(None, None, None)
        tapes.remove(self.tape)

    @torch.no_grad()
    def replay(self):
        for function, result in self.tape:
            for kept, new in zip(tree_leaves(result), tree_leaves(function()), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


GENERATOR = SimpleNamespace(
    device=HOST, graphsafe_get_state=lambda: None, graphsafe_set_state=lambda state: None
)
PROPERTIES = SimpleNamespace(
    name="emulated GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=16 << 30,
    uuid="emulated",
)


def install_runtime():
    """Replace what torch.cuda asks the driver."""
    given = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "mem_get_info": (8 << 30, 16 << 30),
        "get_device_name": PROPERTIES.name,
        "get_device_capability": (9, 0),
        "get_device_properties": PROPERTIES,
        "is_bf16_supported": True,
        "graph_pool_handle": (0, 1),
    }
    nothing = "_lazy_init init set_device synchronize empty_cache reset_peak_memory_stats".split()
    sizes = "memory_allocated memory_reserved max_memory_allocated".split()
    given |= dict.fromkeys(nothing) | dict.fromkeys(sizes, 1 << 20)
    for name, value in given.items():
        setattr(cuda, name, lambda *args, value=value, **options: value)
    streams = [Stream()]
    cuda.current_stream = cuda.default_stream = lambda device=None: streams[-1]
    cuda.set_stream = lambda stream: streams.__setitem__(-1, stream)
    cuda.stream = lambda stream: stream
    cuda.Stream, cuda.Event, cuda.CUDAGraph = Stream, Stream, Graph
    cuda.is_current_stream_capturing = lambda: bool(tapes)
    cuda.default_generators = (GENERATOR,)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    clone = torch.UntypedStorage.clone

    def cloned(storage):
        if storage.device == HOST:
            return clone(storage)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        return whole.clone().untyped_storage()

    torch.UntypedStorage.clone = cloned


def install_interpreter(on_host):
    """Let Triton's interpreter run kernels on the host's memory of tensors."""
    from fastlr.kernels.interpreter import repair_interpreter

    sys.path.append(str(FOLDER.parent / "helpers"))
    repair_interpreter()
    importlib.import_module("interpreter").hasten()
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    launch = executor.__call__

    def host(value):
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return on_host(value) if isinstance(value, torch.Tensor) else value

    def launched(self, *args, **options):
        def run():
            with _disable_current_modes():
                launch(self, *args, **options)

        for tape in tapes:
            tape.append((run, None))
        run()

    executor._init_args_hst = lambda self, args, options: (
        [*map(host, args)],
        {name: host(value) for name, value in options.items()},
    )
    executor._restore_args_dev = lambda self, *args: None
    executor.__call__ = launched


def pytest_configure(config):
    """Emulate a GPU in this process."""
    from torch.utils.cpp_extension import load

    os.environ["TRITON_INTERPRET"] = "1"
    memory = load("emulated_gpu_memory", [str(FOLDER / "memory.cpp")], extra_cflags=["-O1"])
    memory.install(LEFT_OUT)
    install_runtime()
    config.kernels_of_emulated_gpu = operators.register()
    install_interpreter(memory.on_host)

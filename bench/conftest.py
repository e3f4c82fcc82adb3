"""Options, the paired rounds and the record of ``pytest bench/``.

Every contender is held to the truth before it is timed. A benchmark's ``extra_info`` holds what the
tables read: quantiles of the ratio to plain, peak memory, deviations; pytest-benchmark's own
columns are absolute seconds of a round.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.paired import CannotRun, Child, Work, Wrong, ratios
from fastlr.ops.torch_private import narrow_products

PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "numpy",
    "transformers",
    "opacus",
    "backpack-for-pytorch",
)
# So many rounds where one, with its plain round, takes longer than so many seconds.
FEW, LONG = (
    3,
    8.0,
)
REFUSED: pytest.StashKey[list[dict[str, str]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the benchmark's options.

    ``--benchmark-min-rounds`` is the number of rounds (5), OMP_NUM_THREADS that of threads.
    """
    group = parser.getgroup("fastlr's benchmark")
    group.addoption(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:1",
    )
    group.addoption(
        "--quick", action="store_true", help="small inputs, few cases: whether all of it runs"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse xdist, which would switch pytest-benchmark off and let contenders slow each other."""
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("benchmarks run one after another: leave -n out")
    config.stash[REFUSED] = []
    # The plugin may be missing.
    config.addinivalue_line("markers", "timeout(seconds): time limit of pytest-timeout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lift the time limit of tests, as the slowest tools take many minutes for one.

    Each answer still has the limit `paired.LIMIT`.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(0))


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Add command, device and versions to pytest-benchmark's machine; drop the host's name."""
    del machine_info["node"]
    installed = {each.name: each.version for each in distributions()}
    machine_info |= {
        "command": shlex.join(["pytest", *config.invocation_params.args]),
        "cpu": machine_info["cpu"].get("brand_raw"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "device": config.option.device,
        "versions": {name: installed.get(name) for name in PACKAGES},
    }
    if config.option.device.startswith("cuda") and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.device(config.option.device))
        machine_info |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
        machine_info |= {
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "cuda": torch.version.cuda,
        }
        machine_info |= {
            "cudnn": torch.backends.cudnn.version(),
            "tf32": narrow_products("cuda"),
        }


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Contenders that are wrong or cannot run have no times, but their place in the record."""
    output_json["refused"] = config.stash[REFUSED]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that is measured."""
    return torch.device(request.config.option.device)


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    """Whether inputs are small and rounds few."""
    return request.config.option.quick


@pytest.fixture
def rounds(request: pytest.FixtureRequest, quick: bool) -> int:
    """How many rounds are timed."""
    return FEW if quick else request.config.option.benchmark_min_rounds


@pytest.fixture
def beside_plain(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, rounds: int
) -> Callable[..., dict[str, Any]]:
    """Hold a contender to the truth, then time it in rounds, each after a plain round.

    The contender has a process of its own.

    Called as ``beside_plain(factory, *args, group=, name=, rival=False)``: see `paired.Work`. A
    rival that is not right or cannot run is an expected failure with the reason; fastlr's own are
    failures.
    """

    def measure(
        factory: Callable[..., Work], *args: Any, group: str, name: str, rival: bool = False
    ) -> dict[str, Any]:
        benchmark.group, info = group, benchmark.extra_info
        info["contender"] = name
        few_rounds = min(rounds, FEW)
        own: list[float] = []
        plain: list[float] = []
        try:
            with Child(factory, *args, watch_memory=True) as child:
                info["plain_peak_bytes"], info["peak_bytes"] = child.ask("peaks")
                info |= child.ask("check")
            info["memory_ratio"] = info["peak_bytes"] / max(1, info["plain_peak_bytes"])
            with Child(factory, *args) as child:
                child.ask("run")  # thread pools and plans are made
                long = child.ask("plain") + child.ask("run") > LONG
                rounds_here = few_rounds if long else rounds
                benchmark.pedantic(
                    lambda: own.append(child.ask("run")),
                    setup=lambda: plain.append(child.ask("plain")),
                    rounds=rounds_here,
                    iterations=1,
                )
        except (Wrong, CannotRun) as error:
            kind = "wrong" if isinstance(error, Wrong) else "cannot run"
            refusal = {"group": group, "contender": name, "kind": kind, "reason": str(error)}
            request.config.stash[REFUSED].append(refusal)
            if rival:
                pytest.xfail(f"{name} on {group}: {kind}: {error}")
            raise
        info |= ratios(own, plain)
        return info

    return measure

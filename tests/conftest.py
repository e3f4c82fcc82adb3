"""What all tests share: thread limits, time limits and the data folder.

Few threads keep parallel workers from fighting over cores.
"""

import ctypes
import gc
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from pytest import fixture

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
END = time.monotonic() + float(os.environ.get("FASTLR_TEST_SECONDS") or "inf")
# Of the long tests (True) the most telling; of the others the slow files, so that no worker ends
# with one.
FIRST = {
    True: ("ghost/test_fuzz", "distributed", "ghost", "experiments", "integrations"),
    False: (
        "ops/test_kernels_",
        "experiments/training/test_parallel",
        "experiments/runs",
        "distributed",
        "ghost/test_zoo",
        "bench",
        "test_",
    ),
}
torch.backends.cudnn.allow_tf32 = False  # float32 cases are held to float32's digits on a GPU too
torch.set_num_threads(int(os.environ.get("FASTLR_TEST_THREADS", "1")))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from what imports make: to look through it takes 0.4 s a time.

    Later it looks a tenth as often as by default, which took 5 to 7 % of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(7_000, 10, 10)


def pytest_collection_modifyitems(items):
    """Give each long test half an hour unless it sets its own limit, and order tests by FIRST."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))

    def rank(item):
        return [
            not item.nodeid.startswith(f"tests/{place}")
            for place in FIRST[bool(item.get_closest_marker("long"))]
        ]

    items.sort(key=rank)


def pytest_xdist_auto_num_workers(config):
    """A process for each core; of long tests one more, as some wait for processes they start."""
    more = config.getoption("markexpr") == "long"
    return min(8, (os.cpu_count() or 1) + more)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Begin no test once FASTLR_TEST_SECONDS have passed; ``-rs`` lists those not reached."""
    if time.monotonic() > END:
        pytest.skip(f"not reached in FASTLR_TEST_SECONDS: {item.nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Give back what a long test has freed: glibc would keep some GB of it in every worker."""
    if item.get_closest_marker("long") and sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@fixture(scope="session")
def fastlr_data():
    """Return the folder that FASTLR_DATA names; skip the test where it is not set."""
    folder = os.environ.get("FASTLR_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FASTLR_DATA is not set to a folder")
    return Path(folder)


@fixture(scope="session")
def images(tmp_path_factory):
    """The folder of a store of three classes, 11 training and 5 test images each."""
    from fastlr.experiments.data import synthetic_store

    path = tmp_path_factory.mktemp("data") / "store"
    synthetic_store(path, classes=3, size=8, train=11, test=5)
    return str(path)


@fixture
def double():
    """Tensors are float64, and drawn alike in every test."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@fixture
def cli(capsys):
    """Return a function that runs a command line and returns what it printed: ``out``, ``err``.

    The function takes a line and further arguments.

    It holds the exit code to ``code``, and requires ``says`` in what was printed: of an error, on
    stderr.
    """
    from fastlr.cli.main import main

    def run(line="", *more, code=0, says=""):
        capsys.readouterr()
        assert main([*line.split(), *map(str, more)]) == code
        printed = capsys.readouterr()
        assert says in (printed.err if code else printed.out)
        return printed

    return run

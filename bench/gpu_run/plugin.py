"""Plugin of pytest: tests that need a GPU, a line of JSON per test, a time limit per test.

``pytest -p bench.gpu_run.plugin`` selects the tests that are skipped without a GPU and have not
passed according to ``$GPU_RUN_EARLIER_TESTS``, and appends lines to ``$GPU_RUN_TESTS``: when a test
is collected for the first time, when it starts and when it ends. A test whose last line is
"started" ended the process, or was cut short.
The plugin works with and without pytest-xdist.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REASON = "needs a GPU"
TEST_SECONDS = float(os.environ.get("GPU_RUN_TEST_SECONDS", "240"))
STUCK_SECONDS = 30.0  # after TEST_SECONDS: Python code does not run any more
FAILURE = 6000  # characters of a failure's text
NO_TEST_RAN = 5  # exit code of pytest
# Places of tests by their last outcome, 1 for others. A crash comes last: it ends all tests.
PLACES = {"": 0, "collected": 0, "started": 2}


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark of pytest-timeout, which may not be installed."""
    config.addinivalue_line("markers", "timeout(seconds): time limit of pytest-timeout")


def is_worker() -> bool:
    """Return True in a worker of pytest-xdist."""
    return "PYTEST_XDIST_WORKER" in os.environ


def write_line(**line: Any) -> None:
    """Append a line to the file of tests."""
    path = os.environ.get("GPU_RUN_TESTS")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def earlier_outcomes() -> dict[str, str]:
    """Return the last outcome of each test that an earlier command ran."""
    path = Path(os.environ.get("GPU_RUN_EARLIER_TESTS", ""))
    outcomes = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            test = json.loads(line)
            outcomes[test["test"]] = test["outcome"]
    return outcomes


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select tests that need a GPU and have not passed; those that failed or crashed come last."""
    outcomes = earlier_outcomes()

    def is_wanted(item: pytest.Item) -> bool:
        reasons = [mark.kwargs.get("reason") for mark in item.iter_markers("skipif")]
        return REASON in reasons and outcomes.get(item.nodeid) != "passed"

    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(wanted, key=lambda item: PLACES.get(outcomes.get(item.nodeid, ""), 1))
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":  # the controller collects nothing
        for item in items:
            if item.nodeid not in outcomes:
                write_line(test=item.nodeid, outcome="collected")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Succeed where no test is left to run."""
    if exitstatus == NO_TEST_RAN:
        session.exitstatus = 0


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write a line before a test that may end this process; see `pytest_runtest_logreport`."""
    if not is_worker():
        write_line(test=nodeid, outcome="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line where all reports arrive: the controller of xdist, or the only process."""
    if is_worker() or (report.when != "call" and report.passed):
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "when": report.when,
        "seconds": round(report.duration, 2),
    }
    if report.failed:
        line["failure"] = str(report.longrepr)[-FAILURE:]
    write_line(**line)


def end_process(test: str) -> None:
    """End this process, which the test has made useless; xdist starts another worker.

    Where there is no controller that would notice it, the line of the test is written here.
    """
    if not is_worker():
        failure = f"stuck outside Python for {STUCK_SECONDS:.0f} s after its time limit"
        seconds = TEST_SECONDS + STUCK_SECONDS
        write_line(test=test, outcome="failed", when="call", seconds=seconds, failure=failure)
    os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the process after a test that is stuck, or after which all CUDA calls fail."""
    watchdog = threading.Timer(TEST_SECONDS + STUCK_SECONDS, end_process, [item.nodeid])
    watchdog.daemon = True
    watchdog.start()
    try:
        result = yield
    finally:
        watchdog.cancel()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # such as an illegal access: the context does not recover
            os._exit(1)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes longer than its time limit."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGALRM, on_alarm)
            stack.callback(signal.signal, signal.SIGALRM, before)
            stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
        return (yield)


def on_alarm(*_: Any) -> None:
    """Fail the test that runs."""
    pytest.fail(f"took longer than {TEST_SECONDS:.0f} s")

"""Run a queue's jobs on a Ray cluster, one started here or an existing one.

Each is a Ray task that starts the process of the local queue.

Ray chooses the node, and the GPU or the fraction of one. The task runs the command that a local
queue would run, so the results are the same; it passes on what the process reports. A run whose
worker, node or process was killed is begun again from its last checkpoint, up to a number of times;
one that ends with an error is not.

All nodes must see the folder of the runs under the same path, and have the same fastlr and torch.
Each task checks both before it starts anything; a node that fails ends the sweep with an error that
names it.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlr.errors import FastlrError, InputError, install, one_line, warn
from fastlr.estimator.result import versions
from fastlr.experiments.runs.options import RunOptions
from fastlr.experiments.runs.processes import Job, Listen, Message
from fastlr.experiments.runs.ray_node import Node, checksum, sent_whole

RETRIES = 3
# Seconds in which a network file system shows what was written, or drops the lock of a dead node.
_PATIENCE = 30.0
_CONNECT = 20.0  # seconds
# Seconds until a run that was lost is begun again, twice as many each time: Ray takes some to find
# that a node has died.
_PAUSE = 5.0
_SOON = 0.5  # seconds between two looks for lost runs that may begin again
_REACHED_BY_OTHERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_OBJECTS = 100 << 20  # bytes of shared memory for Ray's objects: only short messages pass


@dataclass(frozen=True)
class Share:
    """The part of a node that a run occupies.

    Attributes:
        cpus: Cores; Ray counts them, nothing holds a run to them.
        gpus: 0 to 1 GPU, counted likewise.
    """

    cpus: float
    gpus: float


class Cluster:
    """A Ray cluster that this process is connected to; `connect` makes one.

    Args:
        ray: The module.
        cpus: For each run; None: its threads.
        gpus: For each run; None: one where the cluster has any and the runs are not to be on the
            CPU.
        retries: How often a run is begun again after it was lost.

    Raises:
        InputError: A number out of range.
    """

    def __init__(
        self, ray: Any, cpus: float | None = None, gpus: float | None = None, retries: int = RETRIES
    ) -> None:
        if cpus is not None and not 0 < cpus < math.inf:
            raise InputError(f"--cpus-per-run {cpus:g}: give a positive number")
        if gpus is not None and not 0 <= gpus <= 1:
            raise InputError(
                f"--gpus-per-run {gpus:g}: give 0 to 1, as a run uses one GPU or a fraction of it"
            )
        if retries < 0:
            raise InputError(f"--retries {retries}: give at least 0")
        self.ray, self.cpus, self.gpus, self.retries = ray, cpus, gpus, retries

    def on_gpu(self, options: RunOptions) -> bool:
        """Return True if runs with these options get a GPU.

        Raises:
            InputError: The options and ``gpus`` contradict each other, or name a GPU, which Ray
                chooses.
        """
        device = options.device
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"device={device}: on Ray give auto, cpu or cuda; Ray chooses the GPU")
        if device == "cpu" and self.gpus:
            raise InputError(f"--gpus-per-run {self.gpus:g} and device=cpu: leave one out")
        if device == "cuda" and self.gpus == 0:
            raise InputError("--gpus-per-run 0 and device=cuda: leave one out")
        if device == "auto" and self.gpus is None:
            return any(node.get("GPU", 0) > 0 for node in self._nodes())
        return device == "cuda" or (device == "auto" and bool(self.gpus))

    def share(self, options: RunOptions) -> Share:
        """Return what each run occupies.

        Raises:
            InputError: No node has as much, or as `on_gpu`.
        """
        gpus = 0.0
        if self.on_gpu(options):
            gpus = 1.0 if self.gpus is None else self.gpus
        cpus = float(max(1, options.threads)) if self.cpus is None else self.cpus
        nodes = [(node.get("CPU", 0), node.get("GPU", 0)) for node in self._nodes()]
        if not any(its_cpus >= cpus and its_gpus >= gpus for its_cpus, its_gpus in nodes):
            present = "; ".join(f"{its[0]:g} CPUs and {its[1]:g} GPUs" for its in nodes)
            raise InputError(
                f"no node of the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs for a run (there: "
                f"{present}): lower --cpus-per-run or --gpus-per-run, or add a node first"
            )
        return Share(cpus, gpus)

    def run(
        self,
        jobs: Sequence[Job],
        shared_file: Path,
        share: Share,
        at_once: int | None,
        listen: Listen,
    ) -> dict[str, str]:
        """Run jobs; see `fastlr.experiments.runs.processes.run_jobs`.

        Args:
            jobs: Each writes the folder of its name, beside ``shared_file``.
            shared_file: A file that every node must see as it is here.
            share: What a job occupies.
            at_once: The most at a time; None: as many as the cluster has room for.
            listen: Called as by `run_jobs`; and with ``{"event": "lost", "why": a line, "next": a
                line}`` when a job was killed and is begun again.

        Returns:
            Name -> a line that says what went wrong, for the jobs that failed.

        Raises:
            InputError: A node sees another folder, or has another fastlr.
            FastlrError: A job was lost with the node that this process is connected to.
        """
        begin = self._starter(shared_file, share)
        waiting = deque(_Task(job) for job in jobs)
        running: list[_Task] = []
        failed: dict[str, str] = {}
        while waiting or running:
            while (at_once is None or len(running) < at_once) and (task := _take_due(waiting)):
                if task.losses:
                    self._refuse_without_own_node()
                task.stream = begin(task)
                running.append(task)
            if (task := self._ready(running)) is None:
                continue
            message = self._next_message(task)
            if "unfit" in message:
                raise InputError(message["unfit"])
            if message.get("event") == "ended":
                running.remove(task)
                message = self._lost_or_ended(task, message)
                if message["event"] == "lost":
                    waiting.appendleft(task)
                elif message["error"] is not None:
                    failed[task.job.name] = message["error"]
            listen(task.job.name, message)
        return failed

    def _starter(self, shared_file: Path, share: Share) -> Callable[[_Task], Any]:
        """Return the function that gives Ray a task, and returns the stream of its messages."""
        environment = {key: value for key, value in os.environ.items() if key.startswith("FASTLR_")}
        if not share.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        node = Node(
            shared_file, checksum(shared_file), versions(), environment, os.getcwd(), _PATIENCE
        )
        remote = self.ray.remote(sent_whole()).options(
            num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0, num_returns="streaming"
        )
        return lambda task: remote.remote(
            list(sys.path), pickle.dumps((task.job, node, task.losses > 0))
        )

    def _ready(self, running: Sequence[_Task]) -> _Task | None:
        """Return a task that has a message; None if none comes soon."""
        if not running:
            time.sleep(_SOON)
            return None
        streams = [task.stream for task in running]
        ready, _ = self.ray.wait(streams, num_returns=1, timeout=_SOON)
        return next((task for task in running if task.stream in ready), None)

    def _lost_or_ended(self, task: _Task, ended: Message) -> Message:
        """Return what is said of a job that has ended: "lost" if it is to be begun again."""
        if not ended["killed"] or not self.retries:
            return ended
        if task.losses < self.retries:
            task.due = time.monotonic() + _PAUSE * 2**task.losses
            task.losses += 1
            again = f"going on from its last checkpoint ({task.losses} of {self.retries} retries)"
            return {"event": "lost", "why": ended["error"], "next": again}
        times = "1 retry" if self.retries == 1 else f"{self.retries} retries"
        return {**ended, "error": f"{ended['error']}, also after {times}"}

    def _next_message(self, task: _Task) -> Message:
        """Return the next message of a task; the end of one that Ray ended counts as the job's."""
        errors = self.ray.exceptions
        try:
            message: Message = self.ray.get(next(task.stream))
            return message
        except errors.RayTaskError as error:
            return {"event": "ended", "error": one_line(error.cause), "killed": False}
        except errors.OutOfMemoryError as error:
            why = f"Ray ended it, as the node ran out of memory ({type(error).__name__})"
        except errors.RayError as error:
            why = f"its Ray worker or node was lost ({type(error).__name__})"
        except StopIteration:
            why = "its Ray task ended without a word"
        return {"event": "ended", "error": why, "killed": True}

    def _refuse_without_own_node(self) -> None:
        """Raise FastlrError if the node is dead that takes this process's tasks to the others."""
        with suppress(Exception):  # the cluster's head may not answer, each time with another error
            mine = self.ray.get_runtime_context().get_node_id()
            if any(node["NodeID"] == mine and node["Alive"] for node in self.ray.nodes()):
                return
        raise FastlrError(
            "the Ray node of this machine has died, and nothing can be begun without it: start "
            "again with --resume, which goes on with what has not finished"
        )

    def _nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


@dataclass(eq=False)
class _Task:
    """A job, the stream of its messages, how often it was lost, and when it may begin."""

    job: Job
    stream: Any = None
    losses: int = 0
    due: float = 0.0


def _take_due(waiting: deque[_Task]) -> _Task | None:
    """Take the first task that may begin by now out of those that wait."""
    for task in waiting:
        if task.due <= time.monotonic():
            waiting.remove(task)
            return task
    return None


@contextmanager
def connect(
    address: str | None,
    at_once: int | None = None,
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    retries: int = RETRIES,
) -> Iterator[Cluster]:
    """Connect to a Ray cluster, or start one on this machine that ends with the block.

    Args:
        address: ``HOST:PORT`` of an existing one that this machine is a node of, or ``auto``
            (RAY_ADDRESS, or the one that runs here); None: start one.
        at_once: Runs that one started here shall have room for; None: as many as it has cores for.
        cpus: As for `Cluster`, with ``gpus`` and ``retries``.
        gpus: See there.
        retries: See there.

    Raises:
        InputError: Ray is not installed, there is no such cluster, or a number is out of range.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise InputError(f"Ray is not installed: {install('ray')}; or leave --ray out") from error
    cluster = Cluster(ray, cpus, gpus, retries)
    with ExitStack() as stack:
        stack.callback(_let_print, ray, True)
        if address is None:
            cores = max(len(os.sched_getaffinity(0)), math.ceil((at_once or 1) * (cpus or 1)))
            _start(ray, cores, stack)
        else:
            _check_address(address)
            stack.callback(ray.shutdown)
            _join(ray, address)
        _let_print(ray, False)
        yield cluster


def _start(ray: Any, cores: int, stack: ExitStack) -> None:
    """Start a cluster on this machine; it and its files are gone when the stack is unwound."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    files = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="fastlr-ray-", ignore_cleanup_errors=True)
    )
    stack.callback(ray.shutdown)
    stack.enter_context(_reached_from_here_alone(ray))
    try:
        ray.init(
            "local",
            num_cpus=cores,
            include_dashboard=False,
            object_store_memory=_OBJECTS,
            _temp_dir=files,
            _system_config={"worker_niceness": 0},  # that of the local queue's processes
            **_QUIET,
        )
    except Exception as error:  # Ray raises a bare Exception where this machine is too busy
        raise FastlrError(
            f"Ray did not start on this machine ({one_line(error)}): leave --ray out, or try again "
            "when less runs beside it"
        ) from error
    address = ray.get_runtime_context().gcs_address
    if not address.startswith("127.0.0.1:"):
        warn(
            f"Ray listens at {address}, where other machines reach it, since this version of it "
            "does not bind to 127.0.0.1: leave --ray out where others are in the network"
        )


@contextmanager
def _reached_from_here_alone(ray: Any) -> Iterator[None]:
    """Have the Ray that is started within listen at 127.0.0.1 alone, and put its switch back.

    Ray takes ``_node_ip_address="127.0.0.1"`` for the address by which others reach this machine.
    What it does on macOS and Windows, to listen at 127.0.0.1 alone, it does by this switch: read
    here from a constant, and by the processes that it starts from the environment.
    """
    constants = ray._private.ray_constants
    constant = getattr(constants, "ENABLE_RAY_CLUSTER", None)  # `_start` asks where Ray listens
    variable = os.environ.get(_REACHED_BY_OTHERS)
    constants.ENABLE_RAY_CLUSTER, os.environ[_REACHED_BY_OTHERS] = False, "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = constant
        if variable is None:
            del os.environ[_REACHED_BY_OTHERS]
        else:
            os.environ[_REACHED_BY_OTHERS] = variable


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address, **_QUIET)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and its own
        raise InputError(
            f"--address {address}: no Ray cluster can be reached ({one_line(error)})"
        ) from error


def _check_address(address: str) -> None:
    """Meet an address where nothing answers now: Ray would try for minutes."""
    place = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if place == "auto":
        return
    host, colon, port = place.rpartition(":")
    if "/" in place or not colon or not port.isdecimal():
        raise InputError(
            f"--address {place}: give HOST:PORT (or auto), on a machine that is a node of the "
            "cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--address {place}: no Ray cluster can be reached ({error}): ray start begins one"
        ) from error


def _let_print(ray: Any, enabled: bool) -> None:
    """Say whether Ray prints paragraphs on lost workers to stdout; there is no public switch."""
    with suppress(AttributeError):
        ray._private.worker._worker_logs_enabled = enabled

"""Run a queue's jobs as tasks of a Ray cluster.

Ray chooses the node, and the GPU or the fraction of one. Each task carries out a run as a process
of the local queue does, so the results are the same. Ray starts a task again whose worker or node
was lost, and the run resumes from its last checkpoint. A run that ends with an error is not started
again.

All nodes must see the folder of the runs under the same path, and have the same fastlr and torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fastlr.errors import InputError, install, one_line
from fastlr.experiments.runs.experiment import carry_out
from fastlr.experiments.runs.options import RunOptions
from fastlr.experiments.runs.processes import Job, Listen
from fastlr.files import locked

RETRIES = 3
_PATIENCE = 30.0  # seconds in which a network file system drops the lock of a node that was lost
_CONNECT = 20.0  # seconds
_SOON = 0.5  # seconds between two looks at a lock


class Cluster:
    """A Ray cluster that this process is connected to; `connect` makes one.

    Args:
        ray: The module.
        cpus: For each run; None: its threads.
        gpus: For each run; None: one where the cluster has any and the runs are not to be on the
            CPU.
        retries: How often a run is started again after its worker or node was lost.

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

    def share(self, options: RunOptions) -> tuple[float, float]:
        """Return the CPUs and GPUs that each run occupies.

        Ray counts both; nothing restricts a run to them.

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
        return cpus, gpus

    def run(
        self,
        jobs: Sequence[Job],
        share: tuple[float, float],
        at_once: int | None,
        listen: Listen,
    ) -> dict[str, str]:
        """Run jobs; see `fastlr.experiments.runs.processes.run_jobs`.

        Args:
            jobs: Runs of a queue.
            share: The CPUs and GPUs that each occupies.
            at_once: The most at a time; None: as many as the cluster has room for.
            listen: Called as by `run_jobs`, when a run has ended.

        Returns:
            Name -> a line that says what went wrong, for the jobs that failed.
        """
        cpus, gpus = share
        # Each run has a new process, which ends with it.
        remote = self.ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_retries=self.retries, max_calls=1
        )(_carry_out)
        variables = {key: value for key, value in os.environ.items() if key.startswith("FASTLR_")}
        waiting = deque(jobs)
        running: dict[Any, str] = {}
        failed: dict[str, str] = {}
        while waiting or running:
            while waiting and len(running) < (at_once or math.inf):
                job = waiting.popleft()
                running[remote.remote(job, list(sys.path), os.getcwd(), variables)] = job.name
            (done,), _ = self.ray.wait(list(running))
            name = running.pop(done)
            try:
                error = self.ray.get(done)
            except self.ray.exceptions.RayError as lost:
                error = one_line(lost)
            if error is not None:
                failed[name] = error
            listen(name, {"event": "ended", "error": error})
        return failed

    def _nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


def _carry_out(job: Job, path: list[str], cwd: str, variables: Mapping[str, str]) -> str | None:
    """Carry out a run in this process, a Ray worker, as `main` does in a process of the queue.

    Args:
        job: The run.
        path: For imports, such as the user's model, after those of this node.
        cwd: Current folder, where it exists.
        variables: Variables of the environment.

    Returns:
        The line of the error; None if there is none.
    """
    sys.path += [folder for folder in path if folder not in sys.path]
    os.environ.update(variables)
    if os.path.isdir(cwd):
        os.chdir(cwd)
    if not job.log.parent.is_dir():
        return (
            f"node {socket.gethostname()} does not see {job.log.parent}: --out must be a folder "
            "that all nodes of the cluster share, under the same path"
        )
    work = json.loads(job.command[-1])
    until = time.monotonic() + _PATIENCE
    while _is_locked(Path(work["path"])) and time.monotonic() < until:
        time.sleep(_SOON)
    with open(job.log, "a") as log, redirect_stdout(log), redirect_stderr(log):
        return carry_out(work, lambda message: None)


def _is_locked(folder: Path) -> bool:
    """Return True if a process writes a run folder: the one of a worker that was lost."""
    if not folder.is_dir():
        return False
    try:
        with locked(folder):
            return False
    except InputError:
        return True


@contextmanager
def connect(
    address: str | None,
    *,
    cpus: float | None = None,
    gpus: float | None = None,
    retries: int = RETRIES,
) -> Iterator[Cluster]:
    """Connect to a Ray cluster.

    Args:
        address: ``HOST:PORT`` of a cluster that this machine is a node of, or ``auto``
            (RAY_ADDRESS, or the one that runs here).
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
    if address is None:
        raise InputError("--ray: give --address HOST:PORT or auto; ray start --head starts a node")
    cluster = Cluster(ray, cpus, gpus, retries)
    place = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    try:
        if place != "auto":  # Ray would try for minutes where nothing answers
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError, ValueError and its own
        raise InputError(
            f"--address {place}: no Ray cluster can be reached ({one_line(error)})"
        ) from error
    try:
        yield cluster
    finally:
        ray.shutdown()

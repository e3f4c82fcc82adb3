"""Run a job of a queue on a node of a Ray cluster, in a Ray worker: the other end of `Cluster.run`.

The node is looked at first: it must have the same versions, and see the folder of the runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastlr.errors import InputError
from fastlr.estimator.result import versions
from fastlr.experiments.runs.processes import Job, Message, job_messages
from fastlr.files import LOCK, locked

_DYING = 1.0  # seconds in which a worker that Ray ends, after the job that it has started, is gone


@dataclass(frozen=True)
class Node:
    """The requirements on a node, and what it is given.

    Attributes:
        shared_file: A file that it must see.
        checksum: Of its content.
        versions: Of fastlr, torch and Python.
        environment: Variables for the job.
        cwd: Current folder for the job, where it exists: relative paths and modules of the user's
            are found there.
        patience: Seconds in which a network file system may show what was written, or drop the lock
            of a dead node.
    """

    shared_file: Path
    checksum: str | None
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    cwd: str
    patience: float


def sent_whole() -> Any:
    """Return `run_on_node` as a function that Ray sends whole, not by its name.

    A worker may import another fastlr until its path is set.
    """

    def run_on_node(path: list[str], packed: bytes) -> Iterator[dict[str, Any]]:
        import os
        import pickle
        import socket
        import sys

        here = [folder for folder in path if not folder or os.path.exists(folder)]
        sys.path[:] = here + [folder for folder in sys.path if folder not in here]
        try:
            from fastlr.experiments.runs import ray_node
        except ImportError as error:
            yield {
                "unfit": f"node {socket.gethostname()} cannot import fastlr ({error}): "
                "install the same there"
            }
            return
        yield from ray_node.run_on_node(*pickle.loads(packed))

    return run_on_node


def run_on_node(job: Job, node: Node, again: bool) -> Iterator[Message]:
    """Run a job from this process, a Ray worker, and yield its messages.

    Where this node cannot run it, yield ``{"unfit": why}``.
    """
    until = time.monotonic() + node.patience
    name, folder = socket.gethostname(), node.shared_file.parent
    if versions() != node.versions:
        present, wanted = _listed(versions()), _listed(node.versions)
        yield {"unfit": f"node {name} has {present}, not {wanted}: install the same there"}
        return
    while (seen := checksum(node.shared_file)) != node.checksum and time.monotonic() < until:
        time.sleep(0.5)
    if seen != node.checksum:
        what = "does not see" if seen is None else "sees other files in"
        remedy = (
            "--out must be a folder that all nodes of the cluster share, under the same path; "
            "what was begun is kept"
        )
        yield {"unfit": f"node {name} {what} {folder}: {remedy}"}
        return
    while again and _locked(folder / job.name) and time.monotonic() < until:
        time.sleep(0.5)
    if os.path.isdir(node.cwd):
        os.chdir(node.cwd)
    local = replace(job, command=_here(job.command))
    with closing(job_messages([local], [node.environment])) as messages:
        for _, message in messages:
            if message.get("killed"):
                time.sleep(_DYING)
            yield message


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in versions.items())


def _here(command: Sequence[str]) -> list[str]:
    """Return what `Driver.command` returned elsewhere, for this node's Python and its path."""
    return [sys.executable, *command[1:-2], json.dumps(sys.path), command[-1]]


def checksum(file: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _locked(folder: Path) -> bool:
    """Return True if a process still writes a run folder: the one of a worker that was lost."""
    if not (folder / LOCK).exists():
        return False
    try:
        with locked(folder):
            return False
    except InputError:
        return True

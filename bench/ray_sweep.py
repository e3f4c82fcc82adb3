"""A sweep on a Ray cluster that gains one node and loses another, beside the same sweep without.

``python -m bench.ray_sweep FOLDER`` runs seeds of the preset ``demo`` twice: on a cluster of this
machine (`ray.cluster_utils`), whose nodes have one CPU each, and as processes of this machine, as
many at a time. A node is added when a quarter of the tasks are recorded; at half, one that has a
run is killed. FOLDER keeps the runs; ``--out`` takes what was measured, and whether the records are
the same to the bit. Idle nodes at the end say what a node costs the head.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from fastlr.experiments.runs.folder import commit_of_source
from fastlr.ghost.runtime import versions

PARTS = ("ray", "local", "compare")
PERIOD = 1.0  # seconds between two looks at the processes
PATIENCE = 600.0  # seconds for a node to come, also on a busy machine
IDLE = 30.0  # seconds in which idle nodes are watched
# What the words of a command say that its process is; the first that fits.
KINDS = (
    ("fastlr sweep", "command"),
    ("experiments.runs.experiment", "runs"),
    ("gcs_server", "head"),
    ("DashboardAgent", "agents"),
    ("RuntimeEnvAgent", "agents"),
    ("ray::", "workers"),
    ("default_worker.py", "workers"),
    ("raylet/raylet", "raylets"),
    ("dashboard.py", "dashboard"),
    ("log_monitor", "log monitor"),
    ("autoscaler", "autoscaler"),
)


def main(arguments: list[str] | None = None) -> None:
    """Carry out the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ray_sweep", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu/ray/ray.json"))
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--idle-nodes", type=int, default=8)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    given = parser.parse_args(arguments)
    chosen = ["--set", f"tasks={given.tasks}", "--seeds", str(given.seeds)]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(given.out.read_text()) if given.out.exists() else {}

    def keep(name: str, content: Any) -> None:
        found[name] = content
        given.out.write_text(json.dumps(found, indent=1) + "\n")

    if "ray" in given.only:
        with cluster(given.nodes) as nodes:
            keep("about Ray", about())
            disturbance = Disturbance(nodes, given.folder / "ray", given.seeds, given.tasks)
            on_ray = ["--ray", "--address", nodes.address, "--cpus-per-run", "1"]
            keep("on Ray", swept(given.folder / "ray", [*chosen, *on_ray], disturbance))
            keep("disturbed", disturbance.done)
            keep("idle nodes", with_idle_nodes(nodes, given.idle_nodes))
    if "local" in given.only:
        keep("about the local queue", about())
        at_once = ["--at-once", str(given.nodes)]
        keep("local queue", swept(given.folder / "local", [*chosen, *at_once]))
    if "compare" in given.only:
        keep("runs", compared(given.folder / "local", given.folder / "ray", given.tasks))
    print(given.out)


def about() -> dict[str, Any]:
    """Return where, when and with what a part is made."""
    import ray

    with open("/proc/cpuinfo") as file:
        (model, *_) = re.findall(r"^model name\s*: (.*)$", file.read(), re.M) or ["unknown"]
    return {
        "date": str(date.today()),
        "commit": commit_of_source(),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {model}, {platform.system()}",
        "versions": {**versions(), "ray": ray.__version__},
    }


# -- the cluster


@contextmanager
def cluster(count: int) -> Iterator[Any]:
    """Start a Ray cluster: a head that takes no runs, and nodes of one CPU each.

    Its workers have the priority of other processes, as a local queue's have; Ray would give them
    the last.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
        OMP_NUM_THREADS="1",
    )
    from ray._private import services
    from ray.cluster_utils import Cluster

    services.get_node = patient(services.get_node)
    # the paths of sockets must be short
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files:
        os.environ["RAY_TMPDIR"] = files
        Path(files, "ray").mkdir()
        made = Cluster()
        try:
            for cpus in (0, *[1] * count):
                add_node(made, cpus)
            made.wait_for_nodes(PATIENCE)
            yield made
        finally:
            made.shutdown()


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return what asks for a node until it has come: a new one is given 30 s by Ray itself."""

    def asked(*given: Any) -> Any:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with suppress(RuntimeError):
                return get_node(*given)
            time.sleep(0.2)
        return get_node(*given)

    return asked


def add_node(to: Any, cpus: int) -> Any:
    """Add a node, which may come later.

    Where its ports are given it does not wait for its agents, of which Ray is out of patience after
    some 30 s on a busy machine.
    """
    return to.add_node(
        wait=False,
        num_cpus=cpus,
        object_store_memory=100 << 20,
        include_dashboard=False,
        metrics_agent_port=free_port(),
        runtime_env_agent_port=free_port(),
        dashboard_agent_listen_port=free_port(),
        metrics_export_port=free_port(),
    )


def free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server(("", 0)) as made:
        port: int = made.getsockname()[1]
    return port


class Disturbance:
    """Add a node to a cluster that carries out a sweep, and later kill one amid a run of it.

    Attributes:
        done: What was done, with the recorded tasks then.
    """

    def __init__(self, cluster: Any, folder: Path, seeds: int, each: int) -> None:
        self.cluster, self.folder, self.tasks, self.each = cluster, folder, seeds * each, each
        self.done: dict[str, Any] = {}

    def __call__(self) -> None:
        """Do what is due by now."""
        recorded = {path.name: tasks_of(path) for path in self.folder.glob("seed-*")}
        total = sum(recorded.values())
        if "added" not in self.done and 4 * total >= self.tasks:
            self.done["added"] = {"at task": total}
            add_node(self.cluster, 1)
        if "killed" not in self.done and 2 * total >= self.tasks:
            for name, its in recorded.items():
                midst = self.each // 4 <= its <= self.each * 3 // 4
                if midst and (node := self._node_of(name)) is not None:
                    self.done["killed"] = {"at task": total, "run": name, "its": its}
                    self.cluster.remove_node(node, allow_graceful=False)
                    return

    def _node_of(self, name: str) -> Any:
        """Return the node on which a run is; None if it has ended."""
        with suppress(OSError, psutil.Error, TypeError):
            lock = (self.folder / name / "run.lock").read_text()
            (pid,) = re.findall(r"process (\d+)", lock) or [0]
            raylet = psutil.Process(int(pid)).parent().ppid()
            for node in self.cluster.worker_nodes:
                (of,) = node.all_processes["raylet"]
                if raylet == of.process.pid:
                    return node
        return None


def with_idle_nodes(nodes: Any, count: int) -> dict[str, Any]:
    """Return what the head takes without and with so many more nodes that do nothing."""
    found = {}
    for more in (0, count):
        for _ in range(more):
            add_node(nodes, 0)
        nodes.wait_for_nodes(PATIENCE)
        time.sleep(IDLE)
        watch = Watch()
        until = time.monotonic() + IDLE
        while time.monotonic() < until:
            watch.look()
            time.sleep(PERIOD)
        found[f"{len(nodes.list_all_nodes())} nodes"] = {"seconds": IDLE, **watch.found()}
    return found


# -- what was used


class Watch:
    """Processor time and memory of this process's descendants, by kind, from looks at them."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, float], float] = {}
        self._last: dict[tuple[int, float], float] = {}
        self._kind: dict[tuple[int, float], str] = {}
        self._memory: dict[str, float] = defaultdict(float)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                self._first[_key(process)] = _processor(process)

    def look(self) -> None:
        """Read the counters of all processes that there are."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                key = _key(process)
                self._kind[key] = kind = _kind(process)
                self._last[key] = _processor(process)
                memory = process.memory_info().rss / 2**20
                self._memory[kind] = max(self._memory[kind], memory)

    def found(self) -> dict[str, Any]:
        """Return seconds of processor time, processes, and MiB of the largest, by kind."""
        seconds: dict[str, float] = defaultdict(float)
        processes: dict[str, int] = defaultdict(int)
        for key, kind in self._kind.items():
            seconds[kind] += self._last[key] - self._first.get(key, 0.0)
            processes[kind] += 1
        return {
            "processor seconds": {kind: round(value, 2) for kind, value in seconds.items()},
            "processes": dict(processes),
            "MiB of the largest": {kind: round(value) for kind, value in self._memory.items()},
        }


def _key(process: psutil.Process) -> tuple[int, float]:
    return process.pid, process.create_time()


def _processor(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def _kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((kind for sign, kind in KINDS if sign in words), "others")


def swept(
    folder: Path, arguments: list[str], disturb: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Carry out a sweep in a process of its own, and return what it took."""
    command = "import sys; from fastlr.cli.main import main; sys.exit(main())"
    given = ["sweep", "continual", "demo", "--out", str(folder), *arguments]
    if (folder / "many.json").exists():
        given.append("--resume")
    said = folder.with_name(folder.name + ".txt")
    said.parent.mkdir(parents=True, exist_ok=True)
    watch, begun, load = Watch(), time.monotonic(), [os.getloadavg()[0]]
    with said.open("a") as file:
        program = f"'fastlr sweep'; {command}"
        process = subprocess.Popen([sys.executable, "-c", program, *given], stderr=file)
        while process.poll() is None:
            watch.look()
            disturb()
            time.sleep(PERIOD)
            load.append(os.getloadavg()[0])
    assert process.returncode == 0, said.read_text()
    lost = re.findall(r"^(.*?): its Ray worker or node was lost", said.read_text(), re.M)
    return {
        "wall seconds": round(time.monotonic() - begun, 1),
        "load": [round(min(load), 1), round(max(load), 1)],
        "lost": lost,
        **watch.found(),
    }


# -- what was recorded


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run."""
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def tasks_of(folder: Path) -> int:
    """Return how many tasks a run has recorded."""
    try:
        return (folder / "records.jsonl").read_bytes().count(b'"kind": "task"')
    except OSError:
        return 0


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Return the records without times, digests, which times enter, and what tells of resuming."""
    records = [line for line in lines(folder) if line["kind"] != "resume"]
    for record in records:
        record.pop("seconds", None)
        record.pop("digest", None)
    return records


def compared(local: Path, on_ray: Path, tasks: int) -> dict[str, Any]:
    """Compare the records of each seed, and return what a run's folder holds."""
    names = sorted(path.name for path in local.glob("seed-*"))
    assert names == sorted(path.name for path in on_ray.glob("seed-*"))
    other, incomplete, resumed = [], [], {}
    for name in names:
        if comparable(local / name) != comparable(on_ray / name):
            other.append(name)
        if tasks_of(on_ray / name) != tasks:
            incomplete.append(name)
        if times := resumptions(on_ray / name):
            resumed[name] = times
    one = local / names[0]
    files = [file.stat().st_size for file in one.rglob("*") if file.is_file()]
    return {
        "runs": len(names),
        "other records": other,
        "incomplete": incomplete,
        "resumed": resumed,
        "files of a run": len(files),
        "bytes of a run": sum(files),
        "bytes of a record": round((one / "records.jsonl").stat().st_size / len(lines(one))),
        "bytes of a checkpoint": (one / "checkpoints/last.pt").stat().st_size,
    }


def resumptions(folder: Path) -> int:
    """Return how often a run was gone on with."""
    return sum(line["kind"] == "resume" for line in lines(folder))


if __name__ == "__main__":
    main()

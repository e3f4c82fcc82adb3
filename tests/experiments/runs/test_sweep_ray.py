"""Sweeps on Ray: what a run occupies, and a cluster that loses a worker and a node."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from continual_cases import SMALL, as_arguments, assert_same, checkpoint, comparable, lines
from expected import refused
from pytest import fixture, importorskip, mark

from fastlr.cli.main import main
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.runs import ray as on_ray
from fastlr.experiments.runs import sweep
from fastlr.experiments.runs.options import RunOptions
from fastlr.experiments.runs.processes import Job
from fastlr.files import locked

DRIVER = continual.DRIVER


# -- what needs no cluster
# ----------------------------------------------------------------------------------------


class Nodes:
    """Stands in for the module where only the nodes are asked for."""

    def __init__(self, *resources):
        self.resources = resources

    def nodes(self):
        return [{"Alive": True, "Resources": resources} for resources in self.resources] + [
            {"Alive": False, "Resources": None}
        ]


def test_what_a_run_occupies():
    without = Nodes({"CPU": 2.0})
    with_one = Nodes({"CPU": 2.0}, {"CPU": 8.0, "GPU": 1.0})

    def share(nodes, device="auto", threads=1, **given):
        options = RunOptions(device=device, threads=threads)
        return on_ray.Cluster(nodes, **given).share(options)

    assert share(without) == share(with_one, "cpu") == share(with_one, gpus=0) == (1, 0)
    assert share(with_one) == share(with_one, "cuda", threads=0) == (1, 1)
    assert share(with_one, gpus=0.25, cpus=0.5) == (0.5, 0.25)
    assert share(without, threads=2) == (2, 0)
    for nodes, given, message in (
        (without, {"threads": 3}, "has 3 CPUs and 0 GPUs for a run (there: 2 CPUs and 0 GPUs)"),
        (without, {"gpus": 0.5}, "has 1 CPUs and 0.5 GPUs"),
        (with_one, {"device": "cuda:1"}, "Ray chooses the GPU"),
        (with_one, {"device": "cpu", "gpus": 1}, "leave one out"),
        (with_one, {"device": "cuda", "gpus": 0}, "leave one out"),
        (with_one, {"gpus": 2}, "give 0 to 1"),
        (with_one, {"gpus": float("nan")}, "give 0 to 1"),
        (with_one, {"cpus": 0}, "--cpus-per-run 0"),
        (with_one, {"retries": -1}, "--retries -1"),
    ):
        with refused(re.escape(message)):
            share(nodes, **given)


def carried_out(out, name, **changed):
    """Carry out the first task of a run in this process, in the place of a Ray worker."""
    settings = {**SMALL, "data": "synthetic", "tasks": 1, "measures": (), "threads": 1}
    command = DRIVER.command(out / name, "paper", settings, {}, False)
    job = Job(name, command, out / "logs" / f"{name}.txt")
    return on_ray._carry_out(job, ["/not/here"], str(out), {})


def test_a_worker_waits_for_a_lock_and_returns_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "_PATIENCE", 0.7)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.chdir(tmp_path)
    assert "does not see" in carried_out(tmp_path, "one")
    (tmp_path / "logs").mkdir()
    assert carried_out(tmp_path, "one") is None
    assert sys.path[-1] == "/not/here"
    begun = time.monotonic()
    with locked(tmp_path / "one"):
        assert "is being written by" in carried_out(tmp_path, "one")
    assert time.monotonic() - begun > 0.7
    assert "Traceback" in (tmp_path / "logs/one.txt").read_text()


# -- clusters
# --------------------------------------------------------------------------------------------------


def wait_for(what, seconds=300.0):
    until = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return value


@fixture
def nodes(monkeypatch):
    """Two nodes of a Ray cluster beside its head, which takes no runs."""
    importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    memory = {"object_store_memory": 100 << 20, "include_dashboard": False}
    # the paths of sockets must be short
    with tempfile.TemporaryDirectory(prefix="fastlr-test-", ignore_cleanup_errors=True) as files:
        monkeypatch.setenv("RAY_TMPDIR", files)
        (Path(files) / "ray").mkdir()
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=0, **memory)
            yield cluster, [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
        finally:
            cluster.shutdown()


def parent(pid):
    return int(re.search(r"^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])


def test_an_address_where_nothing_answers_is_said_at_once(monkeypatch):
    importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for given in (address, "auto"):
            with refused(f"{address}: no Ray cluster can be reached"), on_ray.connect(given):
                pass
    for wrong in ("ray://127.0.0.1:1", "somewhere", "host:x"):
        with refused(f"--address {wrong}"), on_ray.connect(wrong):
            pass
    with refused("give --address"), on_ray.connect(None):
        pass


@mark.long
def test_a_sweep_loses_a_worker_and_a_node_and_equals_single_runs(
    tmp_path, images, nodes, monkeypatch, capsys
):
    cluster, both = nodes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(Path(images).parent)
    settings = {**SMALL, "data": "store", "tasks": 12, "measures": ("weight_norm",)}
    del settings["learning_rate"]
    given = as_arguments(settings)
    out, hit = tmp_path / "out", "learning_rate=0.01,seed-0"

    def worker(tasks):
        """Return the process of a run that has written some records."""
        record = out / hit / "records.jsonl"
        wait_for(lambda: record.exists() and len(lines(out / hit)) >= tasks)
        return int(re.search(r"process (\d+)", (out / hit / "run.lock").read_text())[1])

    def disturb():
        first = worker(3)
        os.kill(first, signal.SIGKILL)
        second = wait_for(lambda: (pid := worker(5)) != first and pid)
        raylet = parent(second)
        (lost,) = [
            node for node in both if raylet in [p.process.pid for p in node.all_processes["raylet"]]
        ]
        cluster.remove_node(lost, allow_graceful=False)

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    grid = "--grid learning_rate=0.01,0.1 --seeds 2 --cpus-per-run 1"
    line = f"sweep continual paper --out {out} {grid} --ray --address {cluster.address}"
    assert main([*line.split(), *given]) == 0
    disturber.join()
    assert f"runs: {out} (4 finished)\n" in capsys.readouterr().out
    for name, chosen in sweep.product(
        DRIVER, "paper", settings, {"learning_rate": (0.01, 0.1)}, 2
    ).items():
        continual.begin(tmp_path / name, "paper", {**chosen, "threads": 1})
        assert comparable(out / name) == comparable(tmp_path / name)
        assert_same(checkpoint(out / name), checkpoint(tmp_path / name))
    assert [line["kind"] for line in lines(out / hit)].count("resume") == 2


ASKS_AS_A_WORKER_FIRST_ASKS = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).cluster_id)
"""


@mark.long
def test_a_worker_without_the_clusters_token_is_refused():
    """Token authentication works as docs/guides/several-gpus.md says."""
    importorskip("ray")
    without = {name: v for name, v in os.environ.items() if not name.startswith("RAY_AUTH")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here, port = address.split(":")
    options = ["--head", "--block", f"--node-ip-address={here}", f"--port={port}"]
    options += ["--include-dashboard=false", "--num-cpus=1", "--disable-usage-stats"]
    program = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    with tempfile.TemporaryFile() as log:
        head = subprocess.Popen(
            program, env=without | token, stdout=log, stderr=log, start_new_session=True
        )

        def asked(env):
            command = [sys.executable, "-c", ASKS_AS_A_WORKER_FIRST_ASKS, address]
            return subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=120, check=False
            )

        try:
            wait_for(lambda: asked(without | token).returncode == 0)
            for env in (without, without | token | {"RAY_AUTH_TOKEN": "f" * 32}):
                found = asked(env)
                assert found.returncode != 0
                assert "InvalidAuthToken" in found.stderr
        finally:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()

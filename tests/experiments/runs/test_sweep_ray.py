"""Sweeps on Ray: what a run occupies, what a node must have, and a cluster that loses its parts.

These are workers, nodes and processes.
"""

import dataclasses
import itertools
import json
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
from unittest.mock import Mock

from continual_cases import SMALL, as_arguments, assert_same, checkpoint, comparable, lines
from expected import refused
from pytest import fixture, importorskip, mark, raises
from test_many import ATTACH

from fastlr.cli.main import main
from fastlr.errors import FastlrError
from fastlr.estimator.result import versions
from fastlr.experiments.continual import experiment as continual
from fastlr.experiments.runs import ray as on_ray
from fastlr.experiments.runs import ray_node, sweep
from fastlr.experiments.runs.experiment import Driver
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
        return dataclasses.astuple(on_ray.Cluster(nodes, **given).share(options))

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


def job(folder, name, code):
    """Return a job that runs a program in the place of a run.

    The command has the form of `Driver.command`: Python, -c, program, its
    path, its work.
    """
    command = [
        "/another/python",
        "-c",
        "import sys; exec(sys.argv[2])",
        json.dumps(["/not/here"]),
        ATTACH + code,
    ]
    return Job(name, command, folder / f"{name}.txt")


@mark.parametrize("alive", [True, False])
def test_a_lost_run_is_begun_again_after_growing_pauses_if_the_node_lives(
    tmp_path, monkeypatch, alive
):
    monkeypatch.setattr(on_ray, "_PAUSE", 0.1)
    (tmp_path / "many.json").write_text("{}")
    ray, begun = Mock(), []
    ray.exceptions = Mock(RayTaskError=KeyError, OutOfMemoryError=MemoryError, RayError=OSError)
    ray.remote().options().remote = lambda *_: begun.append(time.monotonic()) or iter([1])
    ray.wait = lambda streams, **_: (streams, [])
    ray.get.side_effect = OSError
    ray.nodes = lambda: [{"NodeID": ray.get_runtime_context().get_node_id(), "Alive": alive}]
    cluster = on_ray.Cluster(ray, retries=2)
    given = [job(tmp_path, "one", "")], tmp_path / "many.json", on_ray.Share(1, 0), None, Mock()
    if alive:
        assert "also after 2 retries" in cluster.run(*given)["one"]
        pauses = [after - before for before, after in itertools.pairwise(begun)]
        assert pauses[0] >= 0.1
        assert pauses[1] >= 0.2
    else:
        with raises(FastlrError, match="node of this machine has died.*--resume"):
            cluster.run(*given)
        assert len(begun) == 1


def test_a_worker_checks_its_node_first(tmp_path, monkeypatch):
    shared = tmp_path / "many.json"
    shared.write_text("{}")
    node = ray_node.Node(
        shared, ray_node.checksum(shared), versions(), {"SLOT": "a"}, str(tmp_path), 0.0
    )
    one = job(tmp_path, "one", "import os; send({'slot': os.environ['SLOT'], 'cwd': os.getcwd()})")
    monkeypatch.chdir(tmp_path.parent)
    heard = list(ray_node.run_on_node(one, node, False))
    assert heard[1] == {"slot": "a", "cwd": str(tmp_path)}
    assert heard[-1]["error"] is None
    for change, message in (
        (
            {"shared_file": tmp_path / "none/many.json"},
            f"does not see {tmp_path}/none: --out must be a folder that all",
        ),
        ({"checksum": "0"}, f"sees other files in {tmp_path}"),
        ({"versions": {**versions(), "torch": "1.0"}}, "torch 1.0, python"),
    ):
        (only,) = ray_node.run_on_node(one, dataclasses.replace(node, **change), False)
        assert only.keys() == {"unfit"}
        assert message in only["unfit"]
    (tmp_path / "one").mkdir()
    begun = time.monotonic()
    with locked(tmp_path / "one"):
        assert ray_node._locked(tmp_path / "one")
        list(ray_node.run_on_node(one, dataclasses.replace(node, patience=0.7), True))
    assert time.monotonic() - begun > 0.7
    assert not ray_node._locked(tmp_path / "one")


def test_a_worker_imports_what_this_process_does(tmp_path):
    """The sent function refers to nothing of fastlr, and imports from this process's path first.

    The path of the worker itself comes after it.
    """
    program = f"""
import pickle, sys
sys.path = [folder for folder in sys.path if folder != {str(Path(on_ray.__file__).parents[2])!r}]
carry = pickle.load(open({str(tmp_path / "function")!r}, "rb"))
assert "fastlr" not in sys.modules
print(list(carry([sys.argv[1], "/not/here"], pickle.dumps(([], [], []))))[0]["unfit"])
assert sys.path[0] == sys.argv[1] and "/not/here" not in sys.path
"""
    cloudpickle = importorskip("ray.cloudpickle")
    (tmp_path / "function").write_bytes(cloudpickle.dumps(ray_node.sent_whole()))
    (tmp_path / "fastlr").mkdir()
    (tmp_path / "fastlr/__init__.py").write_text("raise ImportError('broken')")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert re.match(r"node .* cannot import fastlr \(broken\): install the same there", done.stdout)


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


@mark.long
def test_an_existing_cluster_loses_a_node_and_processes(tmp_path, nodes, monkeypatch):
    cluster, both = nodes
    shared = tmp_path / "many.json"
    shared.write_text("{}")
    count = (
        f"f = open({str(tmp_path)!r} + '/' + NAME, 'a'); f.write('x'); f.flush(); "
        "again = f.tell() > 1\n"
    )
    work = {
        "good": "send({'n': 1})",
        "says": "send({'error': 'no such thing'}); raise SystemExit(1)",
        "killed": "import os; again or os.kill(os.getpid(), 9)",
        "always": "import os; os.kill(os.getpid(), 9)",
        "node": "import os, time; send({'node': os.getppid()}); time.sleep(0 if again else 600)",
    }
    jobs = [
        job(tmp_path, name, count.replace("NAME", repr(name)) + code) for name, code in work.items()
    ]
    heard = {name: [] for name in work}

    def listen(name, message):
        heard[name].append(message)
        if "node" in message and len(heard[name]) == 2:  # the first time
            raylet = parent(message["node"])
            lost = next(
                node
                for node in both
                if raylet in [p.process.pid for p in node.all_processes["raylet"]]
            )
            cluster.remove_node(lost, allow_graceful=False)

    with on_ray.connect(cluster.address, cpus=1, retries=1) as here:
        share = here.share(RunOptions())
        assert share == on_ray.Share(1, 0)
        failed = here.run(jobs, shared, share, None, listen)
        assert failed == {
            "says": "no such thing",
            "always": "ended by signal 9 (SIGKILL), often for lack of memory, also after 1 retry",
        }
        began = {name: (tmp_path / name).read_text() for name in work}
        assert began["says"] == "x"
        assert began["killed"] == began["always"] == began["node"] == "xx"
        for name, messages in heard.items():
            assert messages[-1]["event"] == "ended"
            assert messages[-1]["error"] == failed.get(name)
        (lost,) = [message for message in heard["node"] if message.get("event") == "lost"]
        assert "Ray worker or node was lost" in lost["why"]
        assert "(1 of 1 retries)" in lost["next"]
        monkeypatch.setattr(on_ray, "checksum", lambda path: "of another folder")
        monkeypatch.setattr(on_ray, "_PATIENCE", 0.0)
        with refused(f"sees other files in {tmp_path}: --out must be a folder that all nodes"):
            here.run(jobs[:1], shared, share, None, listen)


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
        with refused(f"--address {wrong}: give HOST:PORT"), on_ray.connect(wrong):
            pass


@mark.long
def test_a_sweep_on_ray_loses_a_worker_and_equals_single_runs(
    tmp_path, images, monkeypatch, capsys
):
    importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(Path(images).parent)
    settings = {**SMALL, "data": "store", "tasks": 12, "measures": ("weight_norm",)}
    del settings["learning_rate"]
    given = as_arguments(settings)
    out, hit = tmp_path / "out", "learning_rate=0.01,seed-1"

    def kill():
        wait_for(lambda: (out / hit / "records.jsonl").exists() and len(lines(out / hit)) >= 3)
        pid = int(re.search(r"process (\d+)", (out / hit / "run.lock").read_text())[1])
        os.kill(parent(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    grid = "--grid learning_rate=0.01,0.1 --seeds 2 --ray --at-once 2 --cpus-per-run 1"
    line = f"sweep continual paper --out {out} {grid}"
    assert main([*line.split(), *given]) == 0
    killer.join()
    captured = capsys.readouterr()
    assert captured.out == f"runs: {out} (4 finished)\n"
    assert re.search(
        rf"^{hit}: its Ray worker or node was lost \(\w+\); going on .* \(1 of 3 retries\)$",
        captured.err,
        re.M,
    )
    for name, chosen in sweep.product(
        DRIVER, "paper", settings, {"learning_rate": (0.01, 0.1)}, 2
    ).items():
        continual.begin(tmp_path / name, "paper", {**chosen, "threads": 1})
        assert comparable(out / name) == comparable(tmp_path / name)
        assert_same(checkpoint(out / name), checkpoint(tmp_path / name))
        assert [line["kind"] for line in lines(out / name)].count("resume") == (name == hit)


# In the place of a run, as a process that imports no torch starts ten times as fast: it goes on
# after its last record.
QUICK = """
import json, os, time
work = json.loads(sys.argv[2])
seed, path = work["seed"], work["path"]
os.makedirs(path, exist_ok=True)
done = 0
if os.path.exists(path + "/records.jsonl"):
    done = len(open(path + "/records.jsonl").readlines())
raylet = open(f"/proc/{os.getppid()}/stat").read().split(")")[1].split()[1]
print(seed, os.getppid(), raylet, file=open(path + "/../../begun", "a"))
for task in range(done, 3):
    time.sleep(0.02)
    print(json.dumps({"kind": "task", "task": task}), file=open(path + "/records.jsonl", "a"))
    send({"done": task + 1, "total": 3, "part": 0, "shown": None})
    if seed == work["waits"] and done == task == 0:
        time.sleep(600)
"""


@mark.long
def test_two_hundred_runs_outlive_a_killed_worker_and_a_drained_node(
    tmp_path, nodes, monkeypatch, capsys
):
    """Every record is there once, though a worker is killed and a node drained.

    Only the run of the killed worker began twice, and none on the node that was drained.
    """
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    cluster, both = nodes
    out, begun, victim = tmp_path / "out", tmp_path / "begun", 30

    def command(driver, path, preset, settings, changed, tensorboard):
        work = {"seed": settings["seed"], "path": str(path), "waits": victim}
        return [sys.executable, "-c", "import sys\n" + ATTACH + QUICK, "[]", json.dumps(work)]

    def runs():
        # Seed, process of its Ray worker and of its node, in the order in which they began.
        return [[int(word) for word in line.split()] for line in begun.read_text().splitlines()]

    monkeypatch.setattr(Driver, "command", command)
    drained = []

    def disturb():
        _, worker, raylet = wait_for(
            lambda: begun.exists() and next((run for run in runs() if run[0] == victim), None)
        )
        record = out / f"seed-{victim}/records.jsonl"
        wait_for(lambda: record.exists() and record.read_text().endswith("\n"))
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: len(runs()) >= 60)
        (other,) = [
            node
            for node in both
            if raylet not in [p.process.pid for p in node.all_processes["raylet"]]
        ]
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        soon = int(1000 * time.time()) + 600_000
        accepted, why = GcsClient(address=cluster.address).drain_node(
            other.node_id, reason, "repairs", soon
        )
        assert accepted, why
        drained.extend((len(runs()), raylet))

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    on_cluster = f"--ray --address {cluster.address} --cpus-per-run 0.5"
    assert main(f"sweep continual demo --out {out} --seeds 200 {on_cluster}".split()) == 0
    disturber.join()
    captured = capsys.readouterr()
    assert captured.out == f"runs: {out} (200 finished)\n"
    assert re.findall(r"^(\S+): its Ray worker or node was lost", captured.err, re.M) == [
        f"seed-{victim}"
    ]
    for seed in range(200):
        assert [line["task"] for line in lines(out / f"seed-{seed}")] == [0, 1, 2]
    seeds = [seed for seed, *_ in runs()]
    assert sorted(seeds) == sorted([*range(200), victim])
    at, left = drained
    assert len(seeds) - at > 100
    assert {raylet for *_, raylet in runs()[at + 20 :]} == {left}, (
        "the few that it had been given when it was drained"
    )


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

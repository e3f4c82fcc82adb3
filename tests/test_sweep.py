"""Sweeps: grids and names, what does not fit, resumption, and a Ray cluster that loses workers, nodes and processes."""

from __future__ import annotations

import dataclasses
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

import pytest
from continual_cases import SMALL, assert_same, checkpoint, comparable, lines
from continual_runs import write_run
from test_many import ATTACH, Asked

from fastlr.cli import main
from fastlr.data import synthetic_store
from fastlr.drivers import continual, many, on_ray, sweep
from fastlr.drivers.config import RunOptions
from fastlr.drivers.continual_config import ContinualOptions
from fastlr.drivers.jobs import Job
from fastlr.errors import InputError
from fastlr.runtime import versions

DRIVER = continual.DRIVER


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "store"
    synthetic_store(path, classes=3, size=8, train=11, test=5)
    return str(path)


# -- grids and names ---------------------------------------------------------------------------------------------------


def test_grids_are_values_of_the_options_types():
    texts = ["epochs=1,2", 'model_kwargs={"a": 1, "b": "x,{"},{}', "measures=[srank,weight_norm],srank,[]"]
    assert sweep.parse_grids(ContinualOptions, texts) == {
        "epochs": (1, 2),
        "model_kwargs": ({"a": 1, "b": "x,{"}, {}),
        "measures": (("srank", "weight_norm"), ("srank",), ()),
    }
    for text, message in (
        ("epochs", "write key=value"),
        ("epochs=1,", "write key=value"),
        ("epochs=1,x", "--grid epochs=x: epochs wants a whole number"),
        ("epoch=1", "did you mean epochs"),
        ("learning_rate=0.1,1e-1", "the value 1e-1 is given twice"),
        ("seed=1,2", "say --seeds K"),
        ("device=cpu", "all runs of a sweep have the same"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            sweep.parse_grids(ContinualOptions, [text])
    with pytest.raises(InputError, match="epochs is given twice"):
        sweep.parse_grids(ContinualOptions, ["epochs=1", "epochs=2"])


def test_every_combination_has_a_name_and_its_settings():
    grids = {"learning_rate": (0.001, 0.01), "measures": (("srank", "weight_norm"), ())}
    runs = sweep.product(DRIVER, "demo", {"seed": 3, "epochs": 1}, grids, 2)
    assert list(runs) == [
        f"learning_rate={rate},measures={measures},seed-{seed}"
        for rate in (0.001, 0.01)
        for measures in ("srank+weight_norm", sweep._value(()))
        for seed in (3, 4)
    ]
    assert runs["learning_rate=0.01,measures=srank+weight_norm,seed-4"] == {
        "seed": 4, "epochs": 1, "learning_rate": 0.01, "measures": ("srank", "weight_norm"),
    }  # fmt: skip
    assert list(sweep.product(DRIVER, "demo", {}, {}, 2)) == ["seed-0", "seed-1"]
    with pytest.raises(InputError, match="--seeds 0"):
        sweep.product(DRIVER, "demo", {}, grids, 0)


def test_names_are_short_safe_and_different():
    paths = tuple(f"/data/{'long/' * 30}{end}" for end in ("a b", "a_b", "A_b", "../..", "", "ä", "A"))
    kwargs = ({"width": 2}, {"width": "2"}, {"Width": 2}, {})
    models = ("Net", "net", "a/b", "a b", "b" * 32, "b" * 33)
    runs = sweep.product(DRIVER, "demo", {}, {"data": paths, "model_kwargs": kwargs, "model": models}, 2)
    assert len(runs) == len(paths) * len(kwargs) * len(models) * 2 == len({name.casefold() for name in runs})
    for name, settings in runs.items():
        assert re.fullmatch(r"[A-Za-z0-9._+=,-]{1,120}", name) and name.endswith(f",seed-{settings['seed']}")
        assert not name.startswith((".", "-"))
    fewer = sweep.product(DRIVER, "demo", {}, {"data": paths[1:2], "model_kwargs": kwargs, "model": models[2:]}, 1)
    assert fewer.keys() <= runs.keys(), "a name does not depend on the other values"


# -- the command -------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_said(tmp_path, capsys, monkeypatch):
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.setitem(sys.modules, "ray", None)
    for arguments, message in (
        (["continual", *out, "--ray"], "Ray is not installed: pip install 'fastlr[ray]'"),
        (["continul", *out], "did you mean continual?"),
        (["continual"], "give --out"),
        (["continual", *out, "--gpus-per-run", "0.5"], "--gpus-per-run goes with --ray"),
        (["continual", *out, "--address", "auto"], "--address goes with --ray"),
        (["continual", *out, "--grid", "epochs=1,2", "--set", "epochs=3"], "are both given"),
        (["continual", *out, "--resume"], "holds no runs to go on with"),
        (["transfer", "demo", *out, "--grid", "batch_size=64,0"], "batch_size=0"),
        (["continual", "demo", *out, "--grid", "data=synthetic,nowhere"], "nowhere"),
    ):
        assert main(["sweep", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_resuming_a_sweep(tmp_path, images, monkeypatch, capsys):
    asked = Asked(monkeypatch)
    settings = {**SMALL, "data": images, "threads": 1, "measures": ""}
    del settings["learning_rate"]
    same = [f"--set={key}={value}" for key, value in settings.items()]

    def do(*arguments: str, grid: str = "learning_rate=0.1,0.01", settings: list[str] = same) -> tuple[int, list[str]]:
        asked.work = {}
        given = ["--out", str(tmp_path / "out"), *arguments, *settings, *([f"--grid={grid}"] if grid else [])]
        return main(["sweep", "continual", "paper", *given]), list(asked.work)

    names = [f"learning_rate={rate},seed-{seed}" for rate in (0.1, 0.01) for seed in (0, 1)]
    assert do("--seeds", "2") == (0, names)
    assert do("--seeds", "2") == (2, []), "not without --resume"
    known = json.loads((tmp_path / "out/many.json").read_text())["runs"]
    continual.begin(tmp_path / "out" / names[1], "paper", {**known[names[1]], "measures": ()})
    left = [names[0], *names[2:]]
    assert do("--seeds", "2", "--resume") == (0, left), "the same command, resumed"
    assert do("--resume", settings=[], grid="") == (0, left)
    more = "learning_rate=0.1,0.01,0.5"
    found = do("--seeds", "2", "--resume", grid=more, settings=[])
    assert found == (0, [*left, *(f"learning_rate=0.5,seed-{seed}" for seed in (0, 1))])
    assert asked.work["learning_rate=0.5,seed-1"]["settings"] == {**known[names[1]], "learning_rate": 0.5}
    capsys.readouterr()
    for arguments, grid, settings, message in (
        (["--seeds", "1"], more, [], "has learning_rate=0.1,seed-1, which is not among these"),
        (["--seeds", "9"], "", [], "do not differ by their seeds alone"),
        ([], "", ["--set=epochs=3"], "epochs cannot change"),
        ([], "", ["--set=learning_rate=0.1"], "the runs differ in learning_rate"),
    ):
        assert do("--resume", *arguments, grid=grid, settings=settings)[0] == 2
        assert message in capsys.readouterr().err


def test_configurations_are_not_pooled(tmp_path, capsys):
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            folder = write_run(tmp_path / f"learning_rate={rate},seed-{seed}", 30, seed=seed)
            config = json.loads((folder / "config.json").read_text())
            config["options"] |= {"learning_rate": rate, "tasks": 30 + seed, "threads": seed}
            (folder / "config.json").write_text(json.dumps(config))
    for command in ("report", "cost", "ablate"):
        assert main([command, str(tmp_path)]) == 2
        message = capsys.readouterr().err
        assert "runs of 2 configurations, which are not pooled" in message and message.count("\n") == 1
        for rate in (0.1, 0.2):
            of_it = f"{tmp_path}/learning_rate={rate},seed"
            assert f"learning_rate={rate}: {of_it}-0 {of_it}-1" in message
    assert main(["cost", str(tmp_path), "--pool"]) == 0
    assert main(["cost", *map(str, tmp_path.glob("learning_rate=0.1,*"))]) == 0
    (folder / "config.json").write_text(json.dumps({**config, "driver": "memorize"}))
    assert main(["report", str(folder), "--pool"]) == 2
    assert "--pool goes with continual runs" in capsys.readouterr().err


# -- Ray: what needs no cluster ----------------------------------------------------------------------------------------


class Nodes:
    """Stands in for the module where only the nodes are asked for."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self.resources = resources

    def nodes(self):
        return [{"Alive": True, "Resources": each} for each in self.resources] + [{"Alive": False, "Resources": None}]


def test_what_a_run_occupies():
    without, with_one = Nodes({"CPU": 2.0}), Nodes({"CPU": 2.0}, {"CPU": 8.0, "GPU": 1.0})

    def share(nodes: Nodes, device: str = "auto", threads: int = 1, **given) -> tuple[float, float]:
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
        with pytest.raises(InputError, match=re.escape(message)):
            share(nodes, **given)


def job(folder: Path, name: str, code: str) -> Job:
    """A program in the place of a run: as `fastlr.drivers.worker.command`, Python, -c, program, its path, its work."""
    command = ["/another/python", "-c", "import sys; exec(sys.argv[2])", json.dumps(["/not/here"]), ATTACH + code]
    return Job(name, command, folder / f"{name}.txt")


def test_a_worker_checks_its_node_first(tmp_path, monkeypatch):
    witness = tmp_path / "many.json"
    witness.write_text("{}")
    scene = on_ray.Scene(witness, on_ray._seal(witness), versions(), {"SLOT": "a"}, str(tmp_path), 0.0)
    one = job(tmp_path, "one", "import os; send({'slot': os.environ['SLOT'], 'cwd': os.getcwd()})")
    monkeypatch.chdir(tmp_path.parent)
    heard = list(on_ray.carry(one, scene, False))
    assert heard[1] == {"slot": "a", "cwd": str(tmp_path)} and heard[-1]["error"] is None
    for change, message in (
        (
            {"witness": tmp_path / "none/many.json"},
            f"does not see {tmp_path}/none: --out must be a folder that all nodes",
        ),
        ({"seal": "0"}, f"sees other files in {tmp_path}"),
        ({"versions": {**versions(), "torch": "1.0"}}, "torch 1.0, python"),
    ):
        (only,) = on_ray.carry(one, dataclasses.replace(scene, **change), False)
        assert only.keys() == {"unfit"} and message in only["unfit"]
    (tmp_path / "one").mkdir()
    begun = time.monotonic()
    with many._folder(tmp_path / "one", make=False):
        assert on_ray._locked(tmp_path / "one")
        list(on_ray.carry(one, dataclasses.replace(scene, patience=0.7), True))
    assert time.monotonic() - begun > 0.7 and not on_ray._locked(tmp_path / "one")


def test_a_worker_imports_what_this_process_does(tmp_path):
    """The function that is sent refers to nothing of fastlr; it takes what is here first, and its own path after it."""
    program = f"""
import pickle, sys
sys.path = [each for each in sys.path if each != {str(Path(on_ray.__file__).parents[2])!r}]
carry = pickle.load(open({str(tmp_path / "function")!r}, "rb"))
assert "fastlr" not in sys.modules
print(list(carry([sys.argv[1], "/not/here"], pickle.dumps(([], [], []))))[0]["unfit"])
assert sys.path[0] == sys.argv[1] and "/not/here" not in sys.path
"""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    (tmp_path / "function").write_bytes(cloudpickle.dumps(on_ray._by_value()))
    (tmp_path / "fastlr").mkdir()
    (tmp_path / "fastlr/__init__.py").write_text("raise ImportError('broken')")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert re.match(r"node .* cannot import fastlr \(broken\): install the same there", done.stdout)


# -- Ray ---------------------------------------------------------------------------------------------------------------


def wait_for(what, seconds: float = 120.0):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.fixture
def nodes(monkeypatch):
    """Two nodes of a Ray cluster beside its head, which takes no runs."""
    pytest.importorskip("ray")
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


def test_an_existing_cluster_loses_a_node_and_processes(tmp_path, nodes, monkeypatch):
    cluster, both = nodes
    witness = tmp_path / "many.json"
    witness.write_text("{}")
    count = f"f = open({str(tmp_path)!r} + '/' + NAME, 'a'); f.write('x'); f.flush(); again = f.tell() > 1\n"
    work = {
        "good": "send({'n': 1})",
        "says": "send({'error': 'no such thing'}); raise SystemExit(1)",
        "killed": "import os; again or os.kill(os.getpid(), 9)",
        "always": "import os; os.kill(os.getpid(), 9)",
        "node": "import os, time; send({'node': os.getppid()}); time.sleep(0 if again else 600)",
    }
    jobs = [job(tmp_path, name, count.replace("NAME", repr(name)) + code) for name, code in work.items()]
    heard: dict[str, list[dict]] = {name: [] for name in work}

    def listen(name: str, message: dict) -> None:
        heard[name].append(message)
        if "node" in message and len(heard[name]) == 2:  # the first time
            raylet = parent(message["node"])
            lost = next(node for node in both if raylet in [p.process.pid for p in node.all_processes["raylet"]])
            cluster.remove_node(lost, allow_graceful=False)

    with on_ray.connect(cluster.address, cpus=1, retries=1) as here:
        share = here.share(RunOptions())
        assert share == on_ray.Share(1, 0)
        failed = here.run(jobs, witness, share, None, listen)
        assert failed == {
            "says": "no such thing",
            "always": "ended by signal 9 (SIGKILL), often for lack of memory, also after 1 retry",
        }
        began = {name: (tmp_path / name).read_text() for name in work}
        assert began["says"] == "x" and began["killed"] == began["always"] == began["node"] == "xx"
        for name, messages in heard.items():
            assert messages[-1]["event"] == "ended" and messages[-1]["error"] == failed.get(name)
        (lost,) = [message for message in heard["node"] if message.get("event") == "lost"]
        assert "Ray worker or node was lost" in lost["why"] and "(1 of 1 retries)" in lost["next"]
        monkeypatch.setattr(on_ray, "_seal", lambda path: "of another folder")
        monkeypatch.setattr(on_ray, "_PATIENCE", 0.0)
        with pytest.raises(InputError, match=f"sees other files in {tmp_path}: --out must be a folder that all nodes"):
            here.run(jobs[:1], witness, share, None, listen)


def parent(pid: int) -> int:
    return int(re.search(r"^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])


def test_an_address_where_nothing_answers_is_said_at_once(monkeypatch):
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for given in (address, "auto"):
            with pytest.raises(InputError, match=f"{address}: no Ray cluster can be reached"), on_ray.connect(given):
                pass
    for wrong in ("ray://127.0.0.1:1", "somewhere", "host:x"):
        with pytest.raises(InputError, match=f"--address {wrong}: give HOST:PORT"), on_ray.connect(wrong):
            pass


def test_a_sweep_on_ray_loses_a_worker_and_equals_single_runs(tmp_path, images, monkeypatch, capsys):
    pytest.importorskip("ray")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(Path(images).parent)
    settings = {**SMALL, "data": "store", "tasks": 12, "measures": ("weight_norm",)}
    del settings["learning_rate"]
    given = [f"--set={key}={','.join(v) if isinstance(v, tuple) else v}" for key, v in settings.items()]
    out, hit = tmp_path / "out", "learning_rate=0.01,seed-1"

    def kill() -> None:
        wait_for(lambda: (out / hit / "records.jsonl").exists() and len(lines(out / hit)) >= 3)
        pid = int(re.search(r"process (\d+)", (out / hit / "run.lock").read_text())[1])
        os.kill(parent(pid), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    grid = ["--grid", "learning_rate=0.01,0.1", "--seeds", "2", "--ray", "--at-once", "2", "--cpus-per-run", "1"]
    assert main(["sweep", "continual", "paper", "--out", str(out), *given, *grid]) == 0
    killer.join()
    captured = capsys.readouterr()
    assert captured.out == f"runs: {out} (4 finished)\n"
    assert re.search(
        rf"^{hit}: its Ray worker or node was lost \(\w+\); going on .* \(1 of 3 retries\)$", captured.err, re.M
    )
    for name, chosen in sweep.product(DRIVER, "paper", settings, {"learning_rate": (0.01, 0.1)}, 2).items():
        continual.begin(tmp_path / name, "paper", {**chosen, "threads": 1})
        assert comparable(out / name) == comparable(tmp_path / name)
        assert_same(checkpoint(out / name), checkpoint(tmp_path / name))
        assert [line["kind"] for line in lines(out / name)].count("resume") == (name == hit)

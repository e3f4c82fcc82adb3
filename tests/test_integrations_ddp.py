"""Two processes that train together (gloo): nothing hangs, rank 0 measures, the training is the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def two_processes(folder: Path, *parts: str) -> list[dict]:
    """Run the worker twice; what each has written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    shared["PYTHONPATH"] = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(here / "integration_worker.py"), str(folder), *parts]
    files = [folder / f"{rank}.out" for rank in range(2)]
    workers = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=files[rank].open("w"),
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        for rank in range(2)
    ]
    try:
        codes = [worker.wait(timeout=400) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0, 0], "\n".join(file.read_text()[-4000:] for file in files)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_hand_written_loop(tmp_path):
    first, second = (found["hand"] for found in two_processes(tmp_path, "hand"))
    assert first["same"] and second["same"] and first["values"]["nobody"] is None
    assert first["values"]["both"] == first["values"]["first"] == first["wanted"]
    assert second["values"] == {"nobody": None, "both": None, "first": None}
    assert first["shared"] == second["shared"] == first["alone"]
    assert first["logged"] == [2] and second["logged"] == []


@pytest.mark.long
def test_frameworks(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    first, second = two_processes(tmp_path, "lightning", "huggingface")
    for found in (first["lightning"], second["lightning"]):
        assert found["same"] and found["steps"] == 2
        assert found["value"] == found["wanted"] == pytest.approx(found["metric"])
    assert "Categorical(dim=0)" in first["lightning"]["error"]
    assert "failed on the main process" in second["lightning"]["error"]
    for found in (first["huggingface"], second["huggingface"]):
        assert found["values"] == first["huggingface"]["values"] and len(found["values"]) == 3
        assert found["value"] == pytest.approx(found["wanted"], rel=1e-9)
        assert found["best"] == min(found["values"][1:])

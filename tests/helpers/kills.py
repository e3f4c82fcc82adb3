"""Runs killed at random moments and resumed are held to an unbroken run, for every driver."""

import importlib
import random
import time
import warnings

import torch
from continual_cases import assert_same, checkpoint, comparable, lines
from ranks import fork_server

from fastlr.errors import FastlrWarning


def carry_on(module, path, settings):
    """Begin, or go on with, a run; in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FastlrWarning)
    driver = importlib.import_module(module).DRIVER
    if (path / "config.json").exists():
        driver.resume(path, {})
    else:
        driver.begin(path, None, settings)


def start(module, path, settings):
    process = fork_server().Process(target=carry_on, args=(module, path, settings))
    process.start()
    return process


def finish(module, path, settings):
    process = start(module, path, settings)
    process.join(300)
    assert process.exitcode == 0


def rows(path):
    """The files of rows of numbers of a run."""
    return {file.name: file.read_bytes() for file in (path / "checkpoints").glob("*.f32")}


def check_kills(folder, module, settings, kills, seed):
    """Kill runs at moments spread over a whole one; compare and return the records.

    Checkpoints are compared, too.
    """
    whole = folder / "whole"
    finish(module, whole, settings)
    seconds = (whole / "records.jsonl").stat().st_mtime - (whole / "run.lock").stat().st_mtime
    of_steps = sum(sum(line.get("seconds", {}).values()) for line in lines(whole)[1:])
    wanted = comparable(whole)
    moments = random.Random(seed)
    ends = []
    for kill in range(kills):
        path = folder / f"killed{kill}"
        process = start(module, path, settings)
        # before the first step too
        mark, span = ("records.jsonl", of_steps) if kill % 2 == 0 else ("run.lock", seconds)
        while not (path / mark).exists() and process.is_alive():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, span))
        process.kill()
        process.join()
        before = (path / "records.jsonl").read_bytes() if (path / "records.jsonl").exists() else b""
        ends.append(before.count(b"\n"))
        finish(module, path, settings)
        assert comparable(path) == wanted, f"killed after {ends[-1]} records"
        assert_same(checkpoint(path), checkpoint(whole))
        assert rows(path) == rows(whole)
    assert kills < 10 or len(set(ends)) > 3, f"the kills came at the same places: {ends}"
    return wanted

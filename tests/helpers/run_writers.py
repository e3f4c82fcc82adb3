"""What processes do with run folders until they are killed, or the disk is full."""

import resource

import torch
from ranks import fork_server

from fastlr.errors import FastlrError
from fastlr.experiments.runs.folder import Run


def start(work, path):
    """Begin ``work(path, send)`` in a process; return it, and what ``send`` sends to."""
    context = fork_server()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(path, there.send), daemon=True)
    process.start()
    there.close()
    return process, here


def write_on(path, send):
    """Go on with a run, a record after the other."""
    with Run.resume(path) as run:
        begun = run.state["position"] if run.state else 0
        send("ready")
        for t in range(begun, 100_000):
            record = {"kind": "task", "task": t, "text": "a" * 5000}
            run.commit(record, {"position": t + 1, "x": torch.zeros(1000)})


def fill(path, send):
    """Meet the limit on a file's size in two runs' second step, and send what is said."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
    for where, numbers, letters in (("checkpoint", 100_000, 0), ("records", 10, 100_000)):
        with Run.create(path / where, {}) as run:
            run.commit({"kind": "task", "task": 0}, {"x": torch.zeros(10)})
            if where == "records":  # the checkpoint holds the record too, and is written first
                run.write_checkpoint = lambda name, content: None
            record = {"kind": "task", "task": 1, "text": "a" * letters}
            try:
                run.commit(record, {"x": torch.zeros(numbers)})
            except FastlrError as error:
                send(str(error))

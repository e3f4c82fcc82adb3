"""The same work side by side: per-sample squared gradient norms of every parameter, by fastlr and by other tools.

    python -m bench.peers [--models ...] [--peers ...] [--batch 16] [--rounds 7] [--threads 2] [--json FILE [--add]]
        [--figure FILE]

Model in eval mode, float32, one fixed cotangent at the output. For every model:

1. The truth: one backward pass per sample in float64, for a few samples spread over the batch.
2. Each contender in a process of its own: its norms are held to the truth (every parameter, relative to its sample's
   total and to itself), and the peak of resident memory is taken during its second call, above what the process held
   before the first (the model, the inputs, the loaded libraries). Large blocks are mapped one by one there, so that
   what is freed is gone: the peak is of live memory. A contender that fails or is killed is shown with the reason.
3. Time: each correct one in a process of its own, in rounds interleaved with the plain forward and backward pass, by whose
   time in the same round it is divided. (In one process they may slow each other: what one leaves of its memory,
   pieces or pages given back, is another's page faults.)

Plain is one forward and backward pass of the batch with all weight gradients, and has no norms: the unit of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import cases, peer_autograd, peer_backpack, peer_opacus, timing

TOLERANCE = 1e-3  # of the sample's total. Float32 is off by up to 2e-4 where a ReLU's input is zero within rounding.
OWN_TOLERANCE = 0.05  # of the parameter's own norm, for the parameters with a visible share of the total:
VISIBLE = 1e-9  # a tool may be off by 15 times in every depthwise layer of a network and hardly move the total
PEERS: dict[str, Callable[[cases.Case, Tensor], peer_autograd.Contender]] = {
    "plain": peer_autograd.plain,
    "fastlr": peer_autograd.fastlr,
    "loop": peer_autograd.loop,
    "vmap": peer_autograd.vmap,
    "opacus": peer_opacus.grad_samples,
    "opacus-ghost": peer_opacus.ghost,
    "backpack": peer_backpack.batch_l2,
}
TITLES = {
    "plain": "plain forward+backward",
    "fastlr": "fastlr",
    "loop": "loop over samples",
    "vmap": "torch.func vmap(grad)",
    "opacus": "Opacus grad samples",
    "opacus-ghost": "Opacus ghost clipping",
    "backpack": "BackPACK BatchL2Grad",
}


def checked_samples(batch: int, count: int) -> list[int]:
    """Samples to hold to the truth: ``count`` of them, the first and the last included."""
    if count >= batch or batch == 1:
        return list(range(batch))
    return sorted({round(k * (batch - 1) / max(1, count - 1)) for k in range(count)})


def truth(model: str, batch: int, count: int) -> dict[str, Any]:
    """The float64 norms of a few samples of a case: what every contender is held to."""
    case = cases.build(model, batch)
    cotangent = cases.cotangent_for(case)
    samples = checked_samples(batch, count)
    return {"samples": samples, "norms": cases.loop_norms(cases.as_double(case), cotangent, samples)}


def gate(found: dict[str, Tensor], known: dict[str, Any]) -> dict[str, Any]:
    """Hold norms to the truth: largest deviations (of the total, of itself), ratio of the totals, worst parameter."""
    norms, samples = known["norms"], known["samples"]
    missing = sorted(set(norms) - set(found))
    if missing:
        return {"correct": False, "reason": f"no norm for {len(missing)} parameters, first {missing[0]}"}
    want = torch.stack(list(norms.values()))
    got = torch.stack([found[name].detach().double()[samples] for name in norms])
    total = want.sum(0)
    deviation = float(((got - want).abs() / total).nan_to_num(nan=torch.inf).max())
    seen = want >= VISIBLE * total
    own = torch.where(seen, (got / want - 1).abs(), 0.0).nan_to_num(nan=torch.inf)
    worst, sample = divmod(int(own.argmax()), own.shape[1])
    ratio = got.sum(0) / total
    return {
        "correct": deviation <= TOLERANCE and float(own.max()) <= OWN_TOLERANCE,
        "deviation": deviation,
        "own_deviation": float(own.max()),
        "total_ratio": float(ratio[(ratio - 1).abs().argmax()]),
        "worst_parameter": list(norms)[worst],
        "worst_parameter_ratio": float(got[worst, sample] / want[worst, sample]),
    }


def measure_one(name: str, model: str, batch: int, known: dict[str, Any]) -> dict[str, Any]:
    """Correctness and peak memory of one contender, in this process."""
    case = cases.build(model, batch)
    cotangent = cases.cotangent_for(case)
    small = torch.nn.Linear(8, 8)  # libraries and thread pools are loaded before the baseline
    torch.autograd.grad(small(torch.randn(4, 8)).sum(), list(small.parameters()))
    contender = PEERS[name](case, cotangent)
    timing.trim()
    baseline = timing.resident()
    first, first_seconds, found = timing.peak_above(contender.run, baseline)
    result: dict[str, Any] = {"notes": contender.notes}
    if name != "plain":
        result |= gate(found, known)
    del found
    again, seconds, _ = timing.peak_above(contender.run, baseline)
    return {
        **result,
        "peak_bytes": again,
        "first_call_peak_bytes": first,
        "first_call_seconds": first_seconds,
        "second_call_seconds": seconds,
    }


def time_one(name: str, model: str, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round of one contender, and of plain, in this process."""
    case = cases.build(model, batch)
    cotangent = cases.cotangent_for(case)
    pair = {each: PEERS[each](case, cotangent).run for each in ("plain", name)}
    return dict(timing.interleaved(pair, rounds))


def in_child(
    name: str, model: str, batch: int, threads: int, known: Path | None, limit: float, rounds: int = 1
) -> dict[str, Any]:
    """Run :func:`measure_one`, or without ``known`` :func:`time_one`, in a process of its own.

    What went wrong, if anything, is under ``error``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bench.peers", "--one", name, "--models", model, "--batch", str(batch)]
        command += ["--threads", str(threads), "--rounds", str(rounds), "--json", str(out)]
        command += [] if known is None else ["--truth", str(known)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
        if known is not None:
            environment = timing.child_environment(threads)
        try:
            run = subprocess.run(command, cwd=timing.ROOT, env=environment, stderr=subprocess.PIPE, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {limit:.0f} s"}
        if out.exists():
            return json.loads(out.read_text())
        if run.returncode < 0:
            return {"error": f"killed by signal {-run.returncode}" + (" (memory)" if run.returncode == -9 else "")}
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return {"error": lines[-1][:300]}


def measure_model(model: str, args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All contenders on one model: correctness and memory apart, then time together."""
    say(f"{model}: float64 truth of {len(checked_samples(args.batch, args.check))} samples")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "truth.pt"
        torch.save(truth(model, args.batch, args.check), known)
        for name in args.peers:
            say(f"{model}: {TITLES[name]}: correctness and memory")
            rows[name] = in_child(name, model, args.batch, args.threads, known, args.limit)
    plain: list[float] = []
    for name in (name for name in args.peers if name != "plain" and rows[name].get("correct")):
        say(f"{model}: {TITLES[name]}: time, {args.rounds} rounds")
        seconds = in_child(name, model, args.batch, args.threads, None, args.limit, args.rounds)
        if "error" in seconds:
            rows[name] |= seconds
            continue
        rows[name] |= timing.summary(seconds[name], seconds["plain"])
        rows[name] |= {"round_seconds": seconds[name], "plain_round_seconds": seconds["plain"]}
        if rows["plain"].get("peak_bytes"):
            rows[name]["memory_ratio"] = rows[name]["peak_bytes"] / rows["plain"]["peak_bytes"]
        plain += seconds["plain"]
    plain = plain or in_child("plain", model, args.batch, args.threads, None, args.limit, args.rounds).get("plain", [])
    if plain:
        rows["plain"] |= {**timing.summary(plain, plain), "memory_ratio": 1.0}
    return rows


def tables(results: dict[str, dict[str, dict[str, Any]]]) -> list[Any]:
    """One table per model, and under it a line for each contender that is wrong or cannot run."""
    from rich.table import Table
    from rich.text import Text

    made = []
    for model, rows in results.items():
        table = Table(title=f"{model} (time and memory: ratios to plain)", title_justify="left")
        table.add_column("contender", no_wrap=True)
        for head in ("time", "p20-p80", "ms", "memory"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("error", no_wrap=True)
        for name, row in rows.items():
            if "ratio" in row:
                cells = [f"{row['ratio']:.2f}", f"{row['ratio_p20']:.2f}-{row['ratio_p80']:.2f}"]
                cells += [f"{1e3 * row['seconds']:.0f}", f"{row.get('memory_ratio', float('nan')):.2f}"]
                error = f"{row['deviation']:.0e}" if "deviation" in row else "-"
            else:
                cells = ["-"] * 4
                error = "cannot run" if "error" in row else "WRONG"
            table.add_row(Text(TITLES[name]), *cells, Text(error), style=None if "ratio" in row else "red")
        made.append(table)
        for name, row in rows.items():
            if "ratio" not in row:
                text = f"cannot run: {row['error']}" if "error" in row else wrong(row)
                made.append(Text(f"{TITLES[name]}: {text}", style="red"))
    return made


def wrong(row: dict[str, Any]) -> str:
    """How a wrong contender is wrong, in a few words."""
    if "reason" in row:
        return f"WRONG: {row['reason']}"
    text = f"WRONG: total {row['total_ratio']:.3g} times the truth"
    return f"{text}, {row['worst_parameter']} {row['worst_parameter_ratio']:.3g} times"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(cases.MODELS), default=list(cases.MODELS), metavar="MODEL")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER")
    parser.add_argument("--batch", type=int, default=16, help="samples at once (16)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (2)")
    parser.add_argument("--check", type=int, default=4, help="samples held to the float64 truth (4)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds a contender may take (1800)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--add", action="store_true", help="keep what the file of --json holds of other models")
    parser.add_argument("--figure", type=Path, help="where to draw the times (.png, .pdf, .svg)")
    parser.add_argument("--one", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--truth", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name in ("batch", "rounds", "threads", "check"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if "plain" not in args.peers:
        args.peers.insert(0, "plain")
    return args


def earlier(args: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    """The record to add to; SystemExit where it is missing or was not made alike."""
    try:
        before = json.loads(args.json.read_text())
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"--add: no record to add to ({error}): name one by --json, or leave --add out") from None
    old, now = ((r["cpu"], r["versions"]["torch"]) for r in (before["environment"], record))
    if (before["batch"], before["rounds"], *old) != (args.batch, args.rounds, *now):
        raise SystemExit(f"--add: {args.json} has another batch, number of rounds, CPU or torch: leave --add out")
    return before


def record_of(
    results: dict[str, Any], args: argparse.Namespace, record: dict[str, Any], before: dict[str, Any]
) -> dict[str, Any]:
    """The document: the results of all models, and under ``measured`` what environment each was measured in."""
    measured = {model: before["environment"] for model in before.get("results", ())} | before.get("measured", {})
    found = {**before.get("results", {}), **results}
    return {
        "environment": record,
        "batch": args.batch,
        "rounds": args.rounds,
        "measured": {model: record if model in results else measured[model] for model in found},
        "results": {model: found[model] for model in cases.MODELS if model in found},
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print its tables; 1 if fastlr itself is wrong or could not run."""
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    if args.one:
        if args.truth is None:
            found = time_one(args.one, args.models[0], args.batch, args.rounds)
        else:
            found = measure_one(args.one, args.models[0], args.batch, torch.load(args.truth, weights_only=True))
        args.json.write_text(json.dumps(found))
        return 0
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    from rich.console import Console

    console, progress = Console(), Console(stderr=True)
    record = timing.environment(("opacus", "backpack-for-pytorch", "transformers"))
    before = earlier(args, record) if args.add else {}
    results = {}
    for model in args.models:
        results[model] = measure_model(model, args, lambda text: progress.print(f"[dim]{text}[/dim]", highlight=False))
        console.print(*tables({model: results[model]}))
        document = record_of(results, args, record, before)
        if args.json:
            args.json.write_text(json.dumps(document, indent=1))
        if args.figure:
            from bench.peers_figure import draw

            draw(document, args.figure)
    for name in args.peers:
        notes = {note: model for model in results for note in results[model][name].get("notes", ())}
        if notes:
            console.print(f"{TITLES[name]}: {'; '.join(notes)}", style="dim", highlight=False)
    console.print(
        f"B = {args.batch}, float32, {args.threads} threads, {record['cpu']}, torch {record['versions']['torch']}",
        highlight=False,
    )
    ours = [results[model].get("fastlr", {}) for model in results]
    return int("fastlr" in args.peers and not all("ratio" in row for row in ours))


if __name__ == "__main__":
    sys.exit(main())

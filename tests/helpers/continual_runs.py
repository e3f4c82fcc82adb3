"""Run folders in the driver's format, of simulated numbers, for tests of analysis and report."""

import json
import math

import numpy as np

LAYERS = ("stem.weight", "stem.bias", "blocks.0.weight", "blocks.1.weight", "head.weight")


def autoregressive(rng, n, phi=0.97):
    """A stationary AR(1) series of unit variance."""
    noise = rng.standard_normal(n) * math.sqrt(1 - phi**2)
    values = np.empty(n)
    values[:1] = rng.standard_normal()
    for i in range(1, n):
        values[i] = phi * values[i - 1] + noise[i]
    return values


def read_lines(folder):
    """The lines of a run's records."""
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def write_lines(folder, lines):
    """Replace a run's records."""
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder,
    tasks,
    *,
    seed=0,
    effect=0.02,
    at_a_guess_from=None,
    skip=(),
    leave_out=(),
    resume=(),
    tail="",
):
    """Write config.json and records.jsonl, where accuracy falls as LR does.

    Next-task LR follows that of shapes.
    """
    rng = np.random.default_rng(seed)
    slow = autoregressive(rng, tasks)
    log_lr = 3 - 2 * np.arange(tasks) / max(tasks, 200) + 0.5 * slow
    accuracy = np.clip(0.85 - 0.05 * np.arange(tasks) / max(tasks, 200) + effect * slow, 0, 0.96)
    accuracy = np.clip(accuracy + 0.06 * rng.standard_normal(tasks), 0.4, 1.0)
    accuracy[tasks if at_a_guess_from is None else at_a_guess_from :] = 0.5
    lines = [
        {
            "kind": "start",
            "measures": {"weight_norm": {"value": 10.0, "stderr": None, "definition": "norm"}},
        }
    ]
    for t in range(tasks):
        if t in resume:
            lines.append({"kind": "resume", "task": t, "date": "2026-11-21T00:00:00Z"})
        lr = float(np.exp(log_lr[t]))
        values = {
            "local_redundancy": lr,
            "local_redundancy_noise": float(lr**0.5 * np.exp(0.8 * rng.standard_normal())),
            "local_redundancy_next_task": float(1.3 * lr * np.exp(0.1 * rng.standard_normal())),
            "weight_norm": 10 + math.sqrt(t) + 0.05 * float(rng.standard_normal()),
            "distance_from_init": math.sqrt(t) + 0.02 * float(rng.standard_normal()),
            "dormant_ratio": round(
                max(0.0, 0.02 * t / tasks + 0.01 * float(rng.standard_normal())), 3
            ),
            "train_grad_norm": float(np.exp(rng.standard_normal())),
        }
        measures = {
            name: {"value": value, "stderr": None, "definition": f"definition of {name}"}
            for name, value in values.items()
            if name not in leave_out
        }
        if "local_redundancy" in measures:
            shares = np.array([0.1, 0.001, 0.3, 0.4, 0.199])
            parts = {name: float(lr * share) for name, share in zip(LAYERS, shares)}
            measures["local_redundancy"] |= {"stderr": 0.03 * lr, "n": 5000, "per_parameter": parts}
        skipped = t in skip
        lines.append(
            {
                "kind": "task",
                "task": t,
                "round": 0,
                "classes": [t % 7, 7 + t % 5],
                "names": ["cat", "dog"],
                "train_images": 400,
                "test_images": 100,
                "epochs": 3,
                "accuracy": None if skipped else float(accuracy[t]),
                "previous_accuracy": None
                if t == 0 or skipped or t - 1 in skip
                else float(accuracy[t - 1] - 0.1 - 0.02 * rng.standard_normal()),
                "train_loss": 0.3,
                "optimiser_state": "kept",
                "measures": measures,
                "seconds": {
                    "train": 10.0,
                    "evaluate": 0.5,
                    "local_redundancy": 3.0 if t == 0 else 0.2,
                    "dormant_ratio+srank": 0.04,
                },
                "skipped": "nan loss" if skipped else None,
                "something_new": [1, 2],
            }
        )
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "records.jsonl").write_text(text + tail)
    config = {
        "driver": "continual",
        "preset": "tiny",
        "options": {"model": "resnet18", "seed": seed},
        "data": {"size": 32, "classes": 12},
        "device": "cpu",
        "versions": {"torch": "2.11"},
        "commit": "abc",
        "command": ["fastlr", "continual"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def set_options(folder, **options):
    """Replace options in a run's configuration, and return it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["options"] |= options
    file.write_text(json.dumps(config))
    return config


# What each intervention does to plasticity, and to weight norm.
GRID = [(u, v) for u in (0, 1, -1) for v in (0, 1, -1)]


def write_grid(parent, seeds=4, tasks=100, grid=GRID):
    """Write runs whose plasticity moves redundancy and accuracy, and whose weight norm moves alone.

    Redundancy also shows the slow part of accuracy early.
    """
    for k, (u, v) in enumerate(grid):
        for seed in range(seeds):
            rng = np.random.default_rng([seed, k])
            plasticity = 1.5 * u + 0.2 * rng.normal()
            slow = autoregressive(rng, tasks)
            accuracy = 0.5 + 0.1 * plasticity + 0.03 * slow + 0.03 * rng.normal(size=tasks)
            norm = np.exp(1.5 * v + 0.3 * rng.normal() + 0.3 * rng.normal(size=tasks))
            folder = write_run(
                parent / f"{'none' if k == 0 else f'way-{k}'},seed-{seed}", tasks, seed=seed
            )
            set_options(folder, shrink=1 - 0.05 * k)
            lines = read_lines(folder)
            for t, line in enumerate(lines[1:]):
                line["accuracy"] = float(accuracy[t])
                line["measures"]["local_redundancy"]["value"] = float(
                    np.exp(3 + plasticity + 0.3 * slow[t])
                )
                line["measures"]["weight_norm"]["value"] = float(norm[t])
            write_lines(folder, lines)
    return parent

"""What the tests of the transfer driver share: a run of seconds on generated series."""

from __future__ import annotations

TINY = {
    "model_kwargs": {"patch": 8, "stride": 8, "layers": 1, "width": 8, "heads": 2, "ffn": 12},
    "source": "generated:1",
    "target": "generated:2",
    "generated_rows": 400,
    "context": 32,
    "horizon": 6,
    "device": "cpu",
    "threads": 1,
    "dtype": "fp32",
    "batch_size": 16,
    "epochs": 3,
    "steps_per_epoch": 6,
    "learning_rate": 1e-2,
    "redundancy_n": 12,
    "redundancy_per_epoch": 2,
    "redundancy_batch": 12,
    "dormant_windows": 20,
    "finetune_runs": 2,
    "finetune_steps_per_epoch": 4,
    "finetune_learning_rate": 3e-3,
    "finetune_evaluations": 3,
}

"""Avalanche: local redundancy as one more metric of the evaluation plugin, over a stream of tasks.

Install ``'.[avalanche]'`` and run ``python examples/avalanche_strategy.py``.
"""

import warnings

import torch
from torch import nn

import fastlr

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # First: it says which extra is missing.
    from fastlr.integrations.avalanche import LocalRedundancyMetric

    # isort: split
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training import Naive
    from avalanche.training.plugins import EvaluationPlugin

TASKS = 3


def main() -> None:
    """Learn three tasks in turn: which of two colours an image has more of."""
    warnings.simplefilter("ignore")  # of the evaluation plugin, that it has no loggers
    torch.manual_seed(0)
    stream = []
    for task in range(TASKS):
        images = fastlr.ShapeImages((3, 16, 16)).batch(256 * task, 256 * (task + 1), seed=1)
        means = images.mean((2, 3)).roll(task, 1)
        stream.append((images, (means[:, 0] > means[:, 1]).long()))
    benchmark = tensors_benchmark(stream, stream, task_labels=[0] * TASKS)

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(), nn.Linear(32, 2))
    evaluator = EvaluationPlugin(
        accuracy_metrics(epoch=True),
        LocalRedundancyMetric(fastlr.ShapeImages((3, 16, 16)), n=256, measures=["weight_norm"]),
        loggers=[],
    )
    strategy = Naive(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), 1e-3),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=3,
        evaluator=evaluator,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)

    curves = evaluator.get_all_metrics()
    steps, values = curves["local_redundancy/train_phase/train_stream"]
    errors = curves["local_redundancy_stderr/train_phase/train_stream"][1]
    norms = curves["weight_norm/train_phase/train_stream"][1]
    for task, (step, value, error, norm) in enumerate(
        zip(steps, values, errors, norms, strict=True)
    ):
        print(
            f"after {task} tasks (step {step}): {value:.4g} +- {error:.2g}, weight norm {norm:.4g}"
        )


if __name__ == "__main__":
    main()

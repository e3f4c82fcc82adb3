"""The problems of the study: four that lose plasticity, three that do not, each with a help.

New to fastlr's studies are layer-norm at this rate, the transformer at this size of tasks, and the
two others that do not lose. Rates were set by pilots (``python -m bench.alarm.runs OUT --pilots``)
of three seeds that no run of the study uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MLP = "fastlr.models.mlp:MLP"
CONVNET = "fastlr.models.convnet:ConvNet"
TRANSFORMER = "timm/vit_tiny_patch16_224"
TINY = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 4}
MEASURES = (
    "local_redundancy",
    "local_redundancy_this_task",
    "local_redundancy_next_task",
    "learning_speed",
    "dormant_ratio",
    "effective_rank",
    "weight_norm",
    "train_grad_norm",
)
EVERY = 2  # tasks between readings
COMMON = {
    "measures": MEASURES,
    "measure_every": EVERY,
    "redundancy_n": 256,
    "redundancy_batch": 256,
    "fused": True,
    "batch_size": 32,
}
LABELS = {"data": "random-labels-digits", "random_images": 96, "epochs": 15}
PIXELS = {"data": "permuted-digits", "random_images": 160, "epochs": 10}
FRESH = {"data": "fresh-digits", "random_images": 96, "epochs": 15}
SHRINK = {"shrink": 0.8, "perturb": 0.03}
L2_INIT = {"l2_init": 1e-3}
NONE = "none"
IMAGES = "class-pairs"  # the one that needs an image store, of images of 24 x 24
GUESS_OF_LABELS = 0.152  # mean share of the commonest of ten labels among 96 images


class Setting(NamedTuple):
    """A problem of the study.

    Attributes:
        loses: whether it was set to lose plasticity.
        guess: accuracy of the best answer that does not look at the input.
        settings: of its runs.
        network: name for `fastlr.models.load_model`.
        network_kwargs: its arguments.
        help: name and settings of the intervention of its second variant; None: it has no second.
        seeds: how many.
        tasks: of a run.
        learned: images that trainability draws labels for; fewer of the large networks, which would
            take too long.
        judged: whether alarms are judged on it; else it is shown beside the others.
    """

    loses: bool
    guess: float
    settings: Mapping[str, Any]
    network: str = MLP
    network_kwargs: Mapping[str, Any] = {}
    help: tuple[str, Mapping[str, Any]] | None = ("shrink-and-perturb", SHRINK)
    seeds: int = 30
    tasks: int = 100
    learned: int = 64
    judged: bool = True

    @property
    def variants(self) -> dict[str, Mapping[str, Any]]:
        """Name -> settings of the run as it is, and of the one that is helped."""
        return {NONE: {}, **dict([self.help] if self.help else [])}


RANDOM_LABELS = {**LABELS, "learning_rate": 2e-3}
PROBLEMS = {
    "random-labels": Setting(True, GUESS_OF_LABELS, RANDOM_LABELS),
    "permuted-digits": Setting(True, 0.1, {**PIXELS, "learning_rate": 8e-3}),
    "layer-norm": Setting(
        True,
        GUESS_OF_LABELS,
        {**LABELS, "learning_rate": 7e-3},
        network_kwargs={"layer_norm": True},
        help=("l2-init", L2_INIT),
    ),
    IMAGES: Setting(
        True,
        0.5,
        {"learning_rate": 5e-3, "epochs": 6},
        CONVNET,
        {"size": 24, "widths": [8, 16, 32], "hidden": 64},
        seeds=10,
        learned=32,
    ),
    "fresh-digits": Setting(False, 0.1, {**FRESH, "learning_rate": 1e-3}),
    "slow-permutations": Setting(False, 0.1, {**PIXELS, "learning_rate": 5e-4}),
    "transformer": Setting(
        False,
        GUESS_OF_LABELS,
        {**LABELS, "learning_rate": 1e-3},
        TRANSFORMER,
        TINY,
        ("l2-init", L2_INIT),
        seeds=10,
        learned=32,
    ),
    "state-kept": Setting(
        True,
        GUESS_OF_LABELS,
        {**RANDOM_LABELS, "optimiser_state": "kept"},
        help=None,
        seeds=10,
        judged=False,
    ),
}
JUDGED = [name for name, problem in PROBLEMS.items() if problem.judged]

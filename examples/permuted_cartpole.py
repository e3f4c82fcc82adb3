"""PPO on CartPole, its observations permuted again and again; Adam, and Dohare's remedy (2024).

Install ``'.[rl]'``, run ``python examples/permuted_cartpole.py SEEDS CHANGES PERIOD``. None twice.
"""

import csv
import sys
from pathlib import Path

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from torch.nn import ReLU

from fastlr.integrations.stable_baselines3 import LocalRedundancyCallback

SEEDS, CHANGES, PERIOD = [*map(int, sys.argv[1:]), *[1, 20, 20_480][len(sys.argv) - 1 :]]
ENVS, OUT = 8, Path("permuted-cartpole")
ARMS = {"Adam": {}, "equal betas and L2": {"betas": (0.99, 0.99), "weight_decay": 1e-4}}
PARTS = [f"{p}/{m}" for m in ("local_redundancy", "dormant_ratio") for p in ("actor", "critic")]
SHOWN = ["rollout/ep_rew_mean", *PARTS]


class Permuted(gymnasium.ObservationWrapper):
    """Another order of the observation's four numbers after every so many steps."""

    steps, seed = 0, 0

    def step(self, action):  # noqa: D102
        self.steps += 1
        return super().step(action)

    def observation(self, observation):  # noqa: D102
        rng = np.random.default_rng([self.seed, ENVS * self.steps // PERIOD])
        return observation[rng.permutation(4)]


def train(arm: str, seed: int, folder: Path) -> float:
    """Train an agent, its log in the folder, and return the seconds that measuring took."""
    worlds = make_vec_env("CartPole-v1", ENVS, seed=seed, wrapper_class=Permuted)
    worlds.set_attr("seed", seed)
    options = {"n_steps": 64, "batch_size": 128, "learning_rate": 1e-3, "stats_window_size": 20}
    layers = {"activation_fn": ReLU, "optimizer_kwargs": {"eps": 1e-5, **ARMS[arm]}}
    agent = PPO("MlpPolicy", worlds, policy_kwargs=layers, seed=seed, device="cpu", **options)
    agent.set_logger(configure(str(folder), ["csv"]))
    callback = LocalRedundancyCallback(512, every_n_steps=PERIOD, measures=["dormant_ratio"])
    agent.learn(PERIOD * CHANGES, callback)
    return callback.seconds


def course(arm: str, seed: int) -> np.ndarray:
    """Return what is shown at the end of each period of a run, [shown, changes]."""
    folder = OUT / f"{arm}-{seed}-{CHANGES}x{PERIOD}"
    if not (cost := folder / "cost.txt").exists():  # it has not ended
        cost.write_text(f"{train(arm, seed, folder):.1f}")
    rows = list(csv.DictReader(open(folder / "progress.csv")))
    print(f"{arm}, seed {seed}: {cost.read_text()} of {rows[-1]['time/time_elapsed']} s measuring")
    known = {(r["time/total_timesteps"], name): r[name] for r in rows for name in SHOWN if r[name]}
    ends = range(PERIOD, PERIOD * CHANGES + 1, PERIOD)
    return np.array([[float(known[str(end), name]) for end in ends] for name in SHOWN])


figure, axes = plt.subplots(len(SHOWN), sharex=True, figsize=(7, 11), layout="constrained")
for arm in ARMS:
    runs = np.stack([course(arm, seed) for seed in range(SEEDS)])
    for values, name, axis in zip(runs.swapaxes(0, 1), SHOWN, axes, strict=True):
        quarter = max(1, CHANGES // 4)
        parts = np.stack([values[:, :quarter].mean(1), values[:, -quarter:].mean(1)])
        errors = parts.std(1, ddof=1) / SEEDS**0.5
        first, last = (f"{m:.4g} +- {e:.2g}" for m, e in zip(parts.mean(1), errors, strict=True))
        print(f"{arm}, {name}: first quarter {first}, last quarter {last}")
        axis.errorbar(range(CHANGES), values.mean(0), values.std(0, ddof=1) / SEEDS**0.5, label=arm)
        axis.set_ylabel(name.replace("/", "\n"))
axes[-1].set_xlabel(f"changes of the observations' order, one every {PERIOD:,} steps")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
figure.savefig(OUT / "course.png", dpi=120)

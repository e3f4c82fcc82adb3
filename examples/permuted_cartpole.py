"""PPO on CartPole whose observations are permuted again and again: Adam as it is, and a remedy.

Install ``'.[rl]'`` and run ``python examples/permuted_cartpole.py SEEDS CHANGES PERIOD``.

The remedy is Adam with equal betas and L2 (Dohare et al. 2024, doi:10.1038/s41586-024-07711-7).
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

GIVEN = [int(argument) for argument in sys.argv[1:]]
SEEDS, CHANGES, PERIOD = GIVEN + [1, 20, 20_480][len(GIVEN) :]
ENVS, OUT = 8, Path("permuted-cartpole")
REMEDY = {"betas": (0.99, 0.99), "weight_decay": 1e-4}
ARMS = {"Adam": {"eps": 1e-5}, "equal betas and L2": {"eps": 1e-5, **REMEDY}}
PARTS = [f"{p}/{m}" for m in ("local_redundancy", "dormant_ratio") for p in ("actor", "critic")]
SHOWN = ["rollout/ep_rew_mean", *PARTS]


class Permuted(gymnasium.ObservationWrapper):
    """Another order of the observation's four numbers after every so many steps."""

    steps, seed = 0, 0

    def step(self, action):
        """Count the step."""
        self.steps += 1
        return super().step(action)

    def observation(self, observation):
        """Return the numbers in the order of this period."""
        rng = np.random.default_rng([self.seed, ENVS * self.steps // PERIOD])
        return observation[rng.permutation(4)]


def train(arm: str, seed: int) -> np.ndarray:
    """Train an agent, and return what is shown at the end of each period, [shown, changes]."""
    folder = OUT / f"{arm}-{seed}"
    worlds = make_vec_env("CartPole-v1", ENVS, seed=seed, wrapper_class=Permuted)
    worlds.set_attr("seed", seed)
    options = {"n_steps": 64, "batch_size": 128, "learning_rate": 1e-3, "stats_window_size": 20}
    layers = {"activation_fn": ReLU, "optimizer_kwargs": ARMS[arm]}
    agent = PPO("MlpPolicy", worlds, policy_kwargs=layers, seed=seed, device="cpu", **options)
    agent.set_logger(configure(str(folder), ["csv"]))
    callback = LocalRedundancyCallback(512, every_n_steps=PERIOD, measures=["dormant_ratio"])
    agent.learn(PERIOD * CHANGES, callback)
    with open(folder / "progress.csv") as file:
        rows = [(row["time/total_timesteps"], row) for row in csv.DictReader(file)]
    took = rows[-1][1]["time/time_elapsed"]
    print(f"{arm}, seed {seed}: {callback.seconds:.1f} of {took} s spent measuring")
    ends = [[row for step, row in rows if step == str(PERIOD * k)] for k in range(1, CHANGES + 1)]
    return np.array([[next(float(r[n]) for r in end if r[n]) for end in ends] for n in SHOWN])


figure, axes = plt.subplots(len(SHOWN), sharex=True, figsize=(7, 11), layout="constrained")
for arm in ARMS:
    runs = np.stack([train(arm, seed) for seed in range(SEEDS)])
    for values, name, axis in zip(runs.swapaxes(0, 1), SHOWN, axes, strict=True):
        quarter = max(1, CHANGES // 4)
        parts = np.stack([values[:, :quarter].mean(1), values[:, -quarter:].mean(1)])
        errors = parts.std(1, ddof=1) / SEEDS**0.5
        first, last = (f"{m:.4g} +- {e:.2g}" for m, e in zip(parts.mean(1), errors, strict=True))
        print(f"{arm}, {name}: first quarter {first}, last quarter {last}")
        error = values.std(0, ddof=1) / SEEDS**0.5
        axis.errorbar(np.arange(CHANGES), values.mean(0), error, label=arm)
        axis.set_ylabel(name.replace("/", "\n"))
axes[0].legend(title=f"a change every {PERIOD} steps")
figure.savefig(OUT / "course.png", dpi=120)

"""The callback: when to measure, on what, where the numbers go, and how it goes on."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from torch import nn
from typing_extensions import Unpack

from fastlr.errors import InputError, few, warn
from fastlr.estimator.eval_mode import train_flags_kept
from fastlr.estimator.statistics import count
from fastlr.files import read_tensors, save_file
from fastlr.inputs import TensorInputs
from fastlr.integrations.measurement import MeasurementOptions, Reading
from fastlr.integrations.monitor import Monitor
from fastlr.integrations.stable_baselines3.networks import Part, networks, shared
from fastlr.integrations.stable_baselines3.observations import (
    Seen,
    as_tensors,
    draw,
    draw_actions,
    preprocessed,
    spaces_of,
    unbounded,
)

OWN, SPACE = "own", "space"
_OF_THE_AGENT = {"x", "y", "loss", "init_state", "predictive", "log"}


class LocalRedundancyCallback(BaseCallback):
    """Measures actor and critic of PPO, A2C, DQN, SAC or TD3, apart, and logs by SB3's logger.

    The training is bit for bit the same without it. A policy is measured by its own distribution:
    categorical, or a Gaussian whose mean and log deviation are both learned; a squashed one by the
    Gaussian before the squashing; TD3's by a Gaussian of its exploration noise, without one of
    ``target_policy_noise``. Values are measured by a Gaussian; DQN has values alone. Layers that
    actor and critic share belong to both. `about` says which of these an agent has.

    The observations are the same ones at every measurement. A Box without usable bounds (one is
    beyond 1e6, as CartPole's are, or VecNormalize scales it) is drawn from a Gaussian by mean and
    deviation of what was seen; its first measurement waits for n observations. Critics of actions
    take uniformly drawn ones, or with "own" those of the buffer.

    It measures at the ends of rollouts, before they are trained on; as the callback of an
    ``EventCallback``, such as ``EveryNTimesteps``, at each event. It logs in a row of its own:
    "actor/local_redundancy", "critic/local_redundancy", their standard errors and the measures, at
    the number of environment steps.

    Args:
        n: how many observations.
        inputs: "space": drawn from the observation space; "own": those that the agent has met when
            it is first measured, from its rollouts or its replay buffer.
        every_n_steps: environment steps between two measurements.
        every_n_rollouts: rollouts between two measurements. Neither: every 10,000 steps.
        at_start: measure as soon as there are observations, too.
        measures: Names of `fastlr.metrics.measures`, those of parameters and of activations.
        prefix: before each name that is logged.
        state_file: what a resumed training needs, written at each measurement. Go on with the
            same file after ``PPO.load(...)``, by ``learn(reset_num_timesteps=False)``: readings of
            later steps than the agent's are dropped.
        action_sigma: deviation around TD3's actions, which are scaled to [-1, 1]; None: that of
            its exploration noise.
        value_sigma: deviation around values.
        seed: Seed of the observations and the probe.
        verbose: as of any callback of SB3.
        options: dtype, on_error, and options of `fastlr.LocalRedundancy`; see
            `fastlr.integrations.measurement.Meter`.

    Attributes:
        last: the last `Reading` by "actor" and "critic".
        monitors: the `fastlr.Monitor` of each, with its ``trend()``.
        about: by "actor" and "critic": what is measured, in words.
        seconds: spent measuring.

    Raises:
        InputError: wrong arguments; at the start of training: a policy that is not known, no
            observation space, or one that cannot be drawn from.

    Example:
        >>> from fastlr.integrations.stable_baselines3 import *  # doctest: +SKIP
        >>> callback = LocalRedundancyCallback(measures=["dormant_ratio"])  # doctest: +SKIP
        >>> PPO("MlpPolicy", "CartPole-v1").learn(100_000, callback)  # doctest: +SKIP
    """

    def __init__(
        self,
        n: int = 1000,
        *,
        inputs: str = SPACE,
        every_n_steps: int | None = None,
        every_n_rollouts: int | None = None,
        at_start: bool = True,
        measures: Collection[str] = (),
        prefix: str = "",
        state_file: str | os.PathLike[str] | None = None,
        action_sigma: float | None = None,
        value_sigma: float = 1.0,
        seed: int = 0,
        verbose: int = 0,
        **options: Unpack[MeasurementOptions],
    ) -> None:
        super().__init__(verbose)
        if inputs not in (SPACE, OWN):
            raise InputError(f"inputs must be {SPACE!r} or {OWN!r}, not {inputs!r}")
        if taken := sorted(_OF_THE_AGENT & set(options)):
            raise InputError(f"{', '.join(taken)}: leave out what the callback takes of the agent")
        if every_n_steps is not None and every_n_rollouts is not None:
            raise InputError("every_n_steps and every_n_rollouts are both given: choose one")
        if every_n_steps is None and every_n_rollouts is None:
            every_n_steps = 10_000
        self.n, self.inputs, self.at_start, self.prefix = n, inputs, at_start, prefix
        self.action_sigma, self.value_sigma, self.seed = action_sigma, value_sigma, seed
        self.state_file = None if state_file is None else Path(state_file)
        self.options = {
            "every_n_steps": every_n_steps,
            "every_n_epochs": every_n_rollouts,
            "measures": measures,
            "seed": seed,
            **options,
        }
        self.parts: dict[str, Part] = {}
        self.monitors: dict[str, Monitor] = {}
        self.rollouts = 0
        self._steps_seen = 0
        self._observations: dict[str, Any] = {}
        self._actions: Any = None
        self._seen, self._too_few = Seen(n), f"fewer than n={n} observations were seen"
        self._agent: Any = None
        # A mistake in the options shows here, before there is an agent.
        observations = TensorInputs(torch.zeros(count("n", n), 1))
        self._monitor(nn.ParameterList([torch.zeros(1)]), observations, None)

    @property
    def about(self) -> dict[str, str]:
        """What is measured, by "actor" and "critic", in words."""
        return {name: part.about for name, part in self.parts.items()}

    @property
    def last(self) -> dict[str, Reading]:
        """The last reading of each part that was measured."""
        return {name: m.last for name, m in self.monitors.items() if m.last}

    @property
    def seconds(self) -> float:
        """Wall time of all measurements."""
        return sum(monitor.seconds for monitor in self.monitors.values())

    @property
    def _has_begun(self) -> bool:
        """Whether anything was measured, in this training or in the one that it goes on with."""
        return any(monitor.first for monitor in self.monitors.values())

    def _init_callback(self) -> None:
        """Find what is measured of the agent, and measure where that can be.

        Mistakes show here, before anything runs. Not every EventCallback passes on the start.
        """
        agent = self.model
        if self._agent not in (None, agent) and not agent.num_timesteps:
            raise InputError("this callback has measured another agent: make a new one for each")
        self._agent = agent
        spaces_of(agent)
        self.parts = networks(agent, self.action_sigma, self.value_sigma)
        for name, monitor in self.monitors.items():
            monitor.model = self.parts[name].module
        self._steps_seen, self._by_events = agent.num_timesteps, True
        if self.state_file is not None and not self.monitors:
            self._resume(self.state_file)
        for name, text in self.about.items():
            self.logger.info(f"{name} is measured as {text}")
        if both := shared(self.parts):
            self.logger.info(f"actor and critic share {few(both)}: measured in both")
        if self.at_start and not self._has_begun and self._make_inputs():
            self.measure()

    def _on_rollout_start(self) -> None:
        self._by_events = False  # an EventCallback passes on its events alone

    def _on_step(self) -> bool:
        if self._by_events:
            if self._look():
                self.measure()
            else:
                warn(f"actor and critic are not measured yet: {self._too_few}")
        return True

    def _on_rollout_end(self) -> None:
        """Measure if it is time to."""
        self.rollouts += 1
        before, self._steps_seen = self._steps_seen, self.model.num_timesteps
        if not self._look():
            return
        monitor = next(iter(self.monitors.values()))
        due = monitor.step_due(before, self._steps_seen) or monitor.epoch_due(self.rollouts)
        if due or (self.at_start and not self._has_begun):
            self.measure()

    def _on_training_end(self) -> None:
        if not self._has_begun:
            why = "no measurement was due" if self.monitors else self._too_few
            warn(f"actor and critic were not measured: {why}")

    def measure(self) -> dict[str, Reading]:
        """Measure and log now, and return the readings, without parts whose measurement failed.

        Raises:
            InputError: too few observations were seen so far.
            FastlrError: the first measurement failed; later ones only with ``on_error="raise"``.
        """
        if not self.monitors and not self._make_inputs():
            raise InputError(f"{self._too_few}: train first")
        readings = {}
        models = [self.model.policy, *(part.module for part in self.parts.values())]
        modules = [module for model in models for module in model.modules()]
        with train_flags_kept(modules):
            for module in modules:  # as SB3 has a policy that acts
                module.training = False
            for name in self.parts:
                if reading := self._measure_part(name):
                    readings[name] = reading
        self._log(readings)
        if self.state_file is not None:
            self._save(self.state_file)
        return readings

    def _measure_part(self, name: str) -> Reading | None:
        """Measure one part; what was measured before any update is no part of the course."""
        monitor = self.monitors[name]
        monitor.steps, monitor.epochs = self.model.num_timesteps, self.rollouts
        reading = monitor.measure()
        if not self.model._n_updates:
            monitor.course.clear()
        return reading

    def _log(self, readings: dict[str, Reading]) -> None:
        """Write a row to the outputs of the agent's logger; what it has pending stays pending."""
        row = Logger(self.logger.get_dir(), self.logger.output_formats)
        row.set_level(self.logger.level)
        for name, reading in readings.items():
            for key, value in reading.values(f"{self.prefix}{name}/").items():
                row.record(key, value)
        step = self.model.num_timesteps
        if readings:
            row.record("time/total_timesteps", step, exclude="tensorboard")
            row.dump(step)

    def _look(self) -> bool:
        """Keep what was seen as long as it is wanted; return False without observations."""
        if self.monitors:
            return True
        self._seen.add_rollout(self.model)
        return self._make_inputs()

    def _make_inputs(self) -> bool:
        """Choose the observations, once for all; return False as long as that cannot be done."""
        wide = unbounded(self.model)
        seen: dict[str, np.ndarray] = {}
        actions: Any = None
        if wide or self.inputs == OWN:
            met = self._seen.batch(self.model)
            if met is None:
                return False
            seen, actions = met
        if self.inputs == SPACE:
            rng = np.random.default_rng(self.seed)
            seen = draw(self.model, self.n, rng, {key: seen[key] for key in wide})
            takers = any(part.takes_actions for part in self.parts.values())
            actions = draw_actions(self.model, self.n, rng) if takers else None
        self._observations = as_tensors(seen)
        self._actions = None if actions is None else torch.tensor(actions)
        self._make_monitors()
        return True

    def _make_monitors(self) -> None:
        tensors = preprocessed(self.model, self._observations)
        for name, part in self.parts.items():
            x = (*tensors, self._actions) if part.takes_actions else tensors
            self.monitors[name] = self._monitor(part.module, TensorInputs(x), part.predictive)

    def _monitor(self, module: nn.Module, inputs: TensorInputs, predictive: Any) -> Monitor:
        options = {"predictive": predictive, "x": inputs.tensors, **self.options}
        return Monitor(module, inputs, self.n, **options)

    def _save(self, path: Path) -> None:
        parts = {name: monitor.state_dict() for name, monitor in self.monitors.items()}
        state = {
            "observations": self._observations,
            "actions": self._actions,
            "rollouts": self.rollouts,
            "parts": parts,
        }
        save_file(path, state)

    def _resume(self, path: Path) -> None:
        """Go on from a state file, as of the step that the agent is at."""
        step = self.model.num_timesteps
        if not path.exists():
            if step:
                warn(f"no {path}: measurements begin anew at step {step}")
            return
        if not step:
            raise InputError(
                f"{path} is there already and the training begins anew: choose another state_file, "
                "or go on by learn(reset_num_timesteps=False)"
            )
        state = read_tensors(path)
        if not isinstance(state, dict) or set(state.get("parts", ())) != set(self.parts):
            raise InputError(f"{path} holds no state of {' and '.join(self.parts)}")
        self._observations, self._actions = state["observations"], state["actions"]
        self.rollouts = state["rollouts"]
        self._make_monitors()
        for name, monitor in self.monitors.items():
            monitor.load_state_dict(state["parts"][name])
            monitor.course = [reading for reading in monitor.course if reading.step <= step]

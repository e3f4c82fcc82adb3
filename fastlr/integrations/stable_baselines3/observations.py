"""The observations that an agent is measured on: drawn from its space, or its own.

A batch of observations is a dict of arrays, one a key of a Dict space; of other spaces the key is
"". They are as the policy gets them: after VecNormalize and with the channels of images first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor

from fastlr.errors import InputError

WIDEST = 1e6  # bounds beyond this stand for "unbounded", as the largest float of many spaces does

Arrays = dict[str, np.ndarray]


def spaces_of(agent: Any) -> dict[str, Any]:
    """Return the observation space of an agent by key.

    Raises:
        InputError: It has none.
    """
    space = getattr(agent, "observation_space", None)
    if not isinstance(space, spaces.Space):
        raise InputError(
            f"{type(agent).__name__} has no observation space: make the agent with an environment "
            "that has observation_space and action_space"
        )
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}


def unbounded(agent: Any) -> list[str]:
    """Return the keys of Boxes whose bounds do not say where observations are.

    They are wider than `WIDEST`, or those of VecNormalize, which clips far out.
    """
    normalized = _normalized(agent)
    return [
        key
        for key, space in spaces_of(agent).items()
        if isinstance(space, spaces.Box) and (key in normalized or not _is_usable(space))
    ]


def draw(agent: Any, n: int, rng: np.random.Generator, seen: Mapping[str, np.ndarray]) -> Arrays:
    """Draw observations from an agent's space, independently and uniformly.

    Those of `unbounded` keys are Gaussian, by mean and deviation of what was seen in each element.

    Args:
        agent: the agent.
        n: how many.
        rng: what draws.
        seen: observations by key, for the `unbounded` ones.

    Raises:
        InputError: A space that cannot be drawn from.
    """
    return {
        key: _gaussian(space, n, rng, seen[key]) if key in seen else _uniform(space, n, rng)
        for key, space in spaces_of(agent).items()
    }


def draw_actions(agent: Any, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw actions uniformly, scaled to [-1, 1] as critics get them."""
    size = int(np.prod(agent.action_space.shape))
    return rng.uniform(-1, 1, (n, size)).astype(np.float32)


def preprocessed(agent: Any, observations: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return observations as the features extractor takes them, in the order of their keys."""
    normalize = agent.policy.normalize_images
    tensors: Any = (
        preprocess_obs(observations[key], space, normalize_images=normalize)
        for key, space in spaces_of(agent).items()
    )
    return tuple(tensors)


class Seen:
    """Observations that an agent has met: the replay buffer's, or those of its latest rollouts.

    Args:
        n: how many are wanted; rollouts are kept until later ones hold as many.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._rollouts: list[Arrays] = []
        self._latest: Any = None  # the buffer's own observations, new in each rollout

    def add_rollout(self, agent: Any) -> None:
        """Keep a copy of a rollout, as far as it is; a replay buffer is read when asked."""
        buffer = getattr(agent, "rollout_buffer", None)
        if buffer is None:
            return
        if self._latest is buffer.observations:
            self._rollouts.pop()
        self._latest = buffer.observations
        shapes, stored = spaces_of(agent), _by_key(buffer.observations)
        rows = {key: stored[key][: buffer.pos].copy() for key in stored}
        self._rollouts.append({key: rows[key].reshape(-1, *shapes[key].shape) for key in rows})
        while sum(map(_length, self._rollouts[1:])) >= self.n:
            del self._rollouts[0]

    def batch(self, agent: Any) -> tuple[Arrays, np.ndarray | None] | None:
        """Return n of the observations, evenly spaced in time, and the actions stored with them.

        None as long as there are fewer.
        """
        if getattr(agent, "replay_buffer", None) is not None:
            return self._replayed(agent)
        count = sum(map(_length, self._rollouts))
        if count < self.n:
            return None
        rows = self._spaced(count)
        keys = self._rollouts[0]
        return {key: np.concatenate([r[key] for r in self._rollouts])[rows] for key in keys}, None

    def _replayed(self, agent: Any) -> tuple[Arrays, np.ndarray] | None:
        buffer, by_key = agent.replay_buffer, spaces_of(agent)
        count = buffer.size() * buffer.n_envs
        if count < self.n:
            return None
        at, env = np.divmod(self._spaced(count), buffer.n_envs)
        picked = {key: stored[at, env] for key, stored in _by_key(buffer.observations).items()}
        picked = {key: rows.reshape(-1, *by_key[key].shape) for key, rows in picked.items()}
        normalizer = agent.get_vec_normalize_env()
        if normalizer is not None:
            picked = _by_key(normalizer.normalize_obs(picked.get("", picked)))
        return picked, buffer.actions[at, env]

    def _spaced(self, count: int) -> np.ndarray:
        return np.linspace(0, count - 1, self.n).astype(int)


def as_tensors(observations: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return arrays as tensors that own their memory."""
    return {key: torch.tensor(rows) for key, rows in observations.items()}


def _by_key(observations: Any) -> Arrays:
    return observations if isinstance(observations, dict) else {"": observations}


def _length(rollout: Arrays) -> int:
    return len(next(iter(rollout.values())))


def _normalized(agent: Any) -> set[str]:
    """Return the keys that VecNormalize changes."""
    normalizer = agent.get_vec_normalize_env()
    if normalizer is None or not normalizer.norm_obs:
        return set()
    return set(normalizer.norm_obs_keys or [""])


def _is_usable(space: spaces.Box) -> bool:
    return bool((np.abs(space.low) <= WIDEST).all() and (np.abs(space.high) <= WIDEST).all())


def _gaussian(space: spaces.Box, n: int, rng: np.random.Generator, seen: np.ndarray) -> np.ndarray:
    seen = seen.astype(np.float64)
    drawn = rng.normal(seen.mean(0), seen.std(0), (n, *space.shape))
    return np.clip(drawn, space.low, space.high).astype(space.dtype)


def _uniform(space: Any, n: int, rng: np.random.Generator) -> np.ndarray:
    shape = (n, *(space.shape or ()))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return rng.integers(low, high, shape, endpoint=True).astype(space.dtype)
    if isinstance(space, spaces.Box):
        return rng.uniform(space.low, space.high, shape).astype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.n, size=shape)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(space.nvec, size=shape)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(2, size=shape)
    raise InputError(f"observations cannot be drawn from {space}: pass inputs='own'")

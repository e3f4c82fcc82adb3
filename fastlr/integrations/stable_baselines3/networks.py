"""The actor and the critic of an agent, as modules of preprocessed observations.

Their layers are those of the agent's policy, so that they have its weights at any time. What they
return is what a `fastlr.estimator.predictive.Predictive` takes: logits, a Gaussian's mean, or its
mean and log deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
    StateDependentNoiseDistribution,
)
from stable_baselines3.common.noise import (
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
    VectorizedActionNoise,
)
from stable_baselines3.common.policies import ActorCriticPolicy, ContinuousCritic
from stable_baselines3.common.torch_layers import MlpExtractor
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from stable_baselines3.sac.policies import LOG_STD_MAX, LOG_STD_MIN, SACPolicy
from stable_baselines3.sac.policies import Actor as SACActor
from stable_baselines3.td3.policies import Actor as TD3Actor
from stable_baselines3.td3.policies import TD3Policy
from torch import Tensor, nn

from fastlr.errors import InputError
from fastlr.estimator.predictive import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Gaussian,
    Predictive,
)

ACTOR, CRITIC = "actor", "critic"
_BY_HAND = "measure its networks by fastlr.Monitor (docs/guides/training.md)"


@dataclass(frozen=True)
class Part:
    """An actor or a critic, and what its output means.

    Attributes:
        module: takes an observation's preprocessed tensors, one a key of a Dict, and then actions
            where ``takes_actions``.
        predictive: the distribution that its output gives.
        about: what is measured, in words.
        takes_actions: True of critics of observations and actions.
    """

    module: nn.Module
    predictive: Predictive
    about: str
    takes_actions: bool = False


class Network(nn.Module):
    """Base: the features of preprocessed observations."""

    def __init__(self, policy: Any, features_extractor: nn.Module) -> None:
        super().__init__()
        self.features_extractor = features_extractor
        space = policy.observation_space
        self.keys = tuple(space.spaces) if isinstance(space, spaces.Dict) else None

    def features(self, observations: tuple[Tensor, ...]) -> Tensor:
        """Return what the policy's features extractor makes of observations."""
        if self.keys is None:
            return self.features_extractor(*observations)
        return self.features_extractor(dict(zip(self.keys, observations, strict=True)))


class Layers(Network):
    """Features, then a body, then a head."""

    def __init__(
        self, policy: Any, features_extractor: nn.Module, body: nn.Module, head: nn.Module
    ) -> None:
        super().__init__(policy, features_extractor)
        self.body, self.head = body, head

    def latent(self, observations: tuple[Tensor, ...]) -> Tensor:
        """Return what the head takes."""
        return self.body(self.features(observations))

    def forward(self, *observations: Tensor) -> Tensor:
        """Return logits, values or a mean."""
        return self.head(self.latent(observations))


class SeveralLogits(Layers):
    """Logits of several actions, [B, actions, most choices]; -inf where an action has fewer."""

    sizes: list[int]

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the logits of each action in a row of its own."""
        most = max(self.sizes)
        rows = super().forward(*observations).split(self.sizes, -1)
        padded = [
            nn.functional.pad(row, (0, most - row.shape[-1]), value=-torch.inf) for row in rows
        ]
        return torch.stack(padded, 1)


class ScaledMean(Layers):
    """The mean of an action, by the deviation of the noise around it."""

    deviation: Tensor

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the mean in units of the deviation: N(mean, deviation^2) is N(output, 1)."""
        return super().forward(*observations) / self.deviation


class OneDeviation(Layers):
    """Means, and log deviations that are the same for all observations: a parameter."""

    log_std: nn.Parameter

    def forward(self, *observations: Tensor) -> Tensor:
        """Return means and log deviations, [B, 2 actions]."""
        mean = super().forward(*observations)
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)


class OwnDeviation(Layers):
    """Means, and log deviations by a head of their own, within SAC's limits."""

    log_std: nn.Module

    def forward(self, *observations: Tensor) -> Tensor:
        """Return means and log deviations, [B, 2 actions]."""
        latent = self.latent(observations)
        log_std = self.log_std(latent).clamp(LOG_STD_MIN, LOG_STD_MAX)
        return torch.cat([self.head(latent), log_std], -1)


class NoiseDeviation(Layers):
    """Means, and log deviations of state-dependent exploration (gSDE; arXiv:2005.05719)."""

    log_std: nn.Parameter
    noise: StateDependentNoiseDistribution

    def forward(self, *observations: Tensor) -> Tensor:
        """Return means and log deviations, [B, 2 actions]."""
        latent = self.latent(observations)
        seen = latent if self.noise.learn_features else latent.detach()
        variance = seen.square() @ self.noise.get_std(self.log_std).square()
        log_std = (variance + self.noise.epsilon).log() / 2
        return torch.cat([self.head(latent), log_std], -1)


class ActionValues(Network):
    """The Q networks of observations and actions, [B, networks].

    Features that the actor shares have a gradient here, though SB3 trains them by the policy alone.
    """

    def __init__(self, critic: ContinuousCritic) -> None:
        super().__init__(critic, critic.features_extractor)
        self.q_networks = nn.ModuleList(critic.q_networks)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the values; the last tensor is the actions."""
        *observations, actions = tensors
        features = torch.cat([self.features(tuple(observations)), actions], 1)
        return torch.cat([q(features) for q in self.q_networks], 1)


def networks(agent: Any, action_sigma: float | None, value_sigma: float) -> dict[str, Part]:
    """Return the parts of an agent by name: "actor" and "critic", of DQN the critic alone.

    Args:
        agent: Agent of Stable-Baselines3.
        action_sigma: deviation around TD3's actions; None: that of its exploration noise.
        value_sigma: deviation around values.

    Raises:
        InputError: What the policy computes is not known, or TD3 has no noise.
    """
    policy, of_values = getattr(agent, "policy", None), Gaussian(value_sigma)
    if action_sigma is not None and not isinstance(policy, TD3Policy):
        raise InputError(
            "action_sigma is for TD3, whose policy has no deviation of its own: leave it out"
        )
    if isinstance(policy, ActorCriticPolicy):
        parts = _of_actor_critic(policy, of_values)
    elif isinstance(policy, SACPolicy):
        parts = {ACTOR: _sac_actor(policy.actor), CRITIC: _action_values(policy, of_values)}
    elif isinstance(policy, TD3Policy):
        actor = _td3_actor(agent, policy.actor, action_sigma)
        parts = {ACTOR: actor, CRITIC: _action_values(policy, of_values)}
    elif isinstance(policy, DQNPolicy):
        parts = {CRITIC: _dqn_values(policy.q_net, of_values)}
    else:
        raise InputError(
            f"the policy of {type(agent).__name__} is {type(policy).__name__}, which is not known "
            "(PPO's, A2C's, DQN's, SAC's and TD3's are): " + _BY_HAND
        )
    return parts


def shared(parts: dict[str, Part]) -> list[str]:
    """Return the names in the actor of parameters that are the critic's, too."""
    if len(parts) < 2:
        return []
    others = {id(p) for p in parts[CRITIC].module.parameters()}
    return [name for name, p in parts[ACTOR].module.named_parameters() if id(p) in others]


def _require_own(thing: Any, base: type, *methods: str) -> None:
    """Raise InputError unless a policy computes by the methods of ``base`` what it computes."""
    if not isinstance(thing, base):
        raise InputError(f"{type(thing).__name__} is no {base.__name__}: {_BY_HAND}")
    for method in methods:
        if getattr(type(thing), method) is not getattr(base, method):
            raise InputError(
                f"{type(thing).__name__}.{method} is not that of {base.__name__}, so what it "
                f"computes is not known: {_BY_HAND}"
            )


def _of_actor_critic(policy: ActorCriticPolicy, of_values: Gaussian) -> dict[str, Part]:
    """Return the parts of PPO's and A2C's policy."""
    methods = ("extract_features", "get_distribution", "predict_values")
    _require_own(policy, ActorCriticPolicy, *methods, "_get_action_dist_from_latent")
    extractor, distribution = policy.mlp_extractor, policy.action_dist
    _require_own(extractor, MlpExtractor, "forward_actor", "forward_critic")
    layers = (policy, policy.pi_features_extractor, extractor.policy_net, policy.action_net)
    if isinstance(distribution, CategoricalDistribution):
        actor = Part(Layers(*layers), Categorical(), "a categorical distribution")
    elif isinstance(distribution, MultiCategoricalDistribution):
        several = SeveralLogits(*layers)
        several.sizes = [int(size) for size in distribution.action_dims]
        actor = Part(several, Categorical(), "independent categorical distributions")
    elif isinstance(distribution, BernoulliDistribution):
        actor = Part(Layers(*layers), Bernoulli(), "independent Bernoulli distributions")
    elif isinstance(distribution, DiagGaussianDistribution):
        one = OneDeviation(*layers)
        one.log_std = policy.log_std
        about = "a Gaussian of the policy's own deviation, whose logarithm is a parameter"
        actor = Part(one, DiagonalGaussian(), about)
    else:
        actor = _with_noise(layers, policy)
    critic = Layers(policy, policy.vf_features_extractor, extractor.value_net, policy.value_net)
    return {ACTOR: actor, CRITIC: Part(critic, of_values, _about_values(of_values))}


def _with_noise(layers: tuple[Any, ...], actor: Any) -> Part:
    """Return an actor that explores by gSDE; its noise without the weights that were drawn."""
    own = actor.action_dist
    network = NoiseDeviation(*layers)
    network.log_std = actor.log_std
    network.noise = StateDependentNoiseDistribution(
        own.action_dim, own.full_std, own.use_expln, False, own.learn_features, own.epsilon
    )
    network.noise.latent_sde_dim = own.latent_sde_dim
    about = "the Gaussian of state-dependent exploration"
    if own.bijector is not None:
        about += ", before the squashing"
    return Part(network, DiagonalGaussian(), about)


def _sac_actor(actor: Any) -> Part:
    _require_own(actor, SACActor, "extract_features", "get_action_dist_params")
    layers = (actor, actor.features_extractor, actor.latent_pi, actor.mu)
    if actor.use_sde:
        return _with_noise(layers, actor)
    network = OwnDeviation(*layers)
    network.log_std = actor.log_std
    about = "a Gaussian of the policy's own deviation, before the squashing"
    return Part(network, DiagonalGaussian(), about)


def _td3_actor(agent: Any, actor: Any, given: float | None) -> Part:
    _require_own(actor, TD3Actor, "extract_features", "forward")
    deviation, whence = _exploration(agent, given)
    network = ScaledMean(actor, actor.features_extractor, actor.mu, nn.Identity())
    actions = int(np.prod(actor.action_space.shape))
    deviations = torch.as_tensor(np.broadcast_to(deviation, actions).copy(), dtype=torch.float32)
    network.register_buffer("deviation", deviations.to(actor.device))
    return Part(network, Gaussian(1.0), f"a Gaussian around its scaled actions, {whence}")


def _exploration(agent: Any, given: float | None) -> tuple[Any, str]:
    """Return the deviation around TD3's actions, which are scaled to [-1, 1], and what it is."""
    noise: Any = agent.action_noise
    deviation: Any = given
    if isinstance(noise, VectorizedActionNoise):
        noise = noise.base_noise
    if given is not None:
        whence = "of deviation action_sigma"
    elif noise is None:
        is_used = agent.target_noise_clip > 0  # DDPG's is clipped to nothing
        deviation = agent.target_policy_noise if is_used else 0.0
        whence = "of deviation target_policy_noise"
    elif isinstance(noise, NormalActionNoise):
        deviation, whence = noise._sigma, "of the exploration noise's deviation"
    elif isinstance(noise, OrnsteinUhlenbeckActionNoise):
        kept = 1 - noise._theta * noise._dt
        deviation = noise._sigma * np.sqrt(noise._dt / (1 - kept**2))
        whence = "of the exploration noise's deviation after many steps"
    else:
        raise InputError(
            f"the deviation of {type(noise).__name__} is not known: pass action_sigma=, in units "
            "of actions that are scaled to [-1, 1]"
        )
    if not (np.all(np.isfinite(deviation)) and np.all(np.asarray(deviation) > 0)):
        raise InputError(
            f"the actor is measured by a Gaussian {whence}, which is {deviation}: pass "
            "action_sigma=, in units of actions that are scaled to [-1, 1]"
        )
    return deviation, whence


def _about_values(of_values: Gaussian) -> str:
    return f"values by a Gaussian of deviation {of_values.sigma:g}"


def _action_values(policy: Any, of_values: Gaussian) -> Part:
    _require_own(policy.critic, ContinuousCritic, "extract_features", "forward")
    about = f"{_about_values(of_values)}, of all its Q networks"
    return Part(ActionValues(policy.critic), of_values, about, takes_actions=True)


def _dqn_values(q_net: QNetwork, of_values: Gaussian) -> Part:
    _require_own(q_net, QNetwork, "extract_features", "forward")
    network = Layers(q_net, q_net.features_extractor, q_net.q_net, nn.Identity())
    return Part(network, of_values, f"{_about_values(of_values)}, of all actions")

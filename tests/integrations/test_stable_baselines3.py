"""Actor and critic of Stable-Baselines3's agents: what is measured, on what, and nothing moved."""

import csv
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import torch
from integration_cases import random_states, seed_all
from pytest import approx, fixture, importorskip, mark, param, raises, warns
from torch.testing import assert_close

import fastlr
from fastlr.errors import FastlrWarning, InputError
from fastlr.ops.torch_private import tree_map_only

importorskip("stable_baselines3")
import gymnasium
from gymnasium import spaces
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import (
    CallbackList,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
)
from stable_baselines3.common.logger import configure
from stable_baselines3.common.noise import (
    ActionNoise,
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from fastlr.integrations.stable_baselines3 import LocalRedundancyCallback
from fastlr.integrations.stable_baselines3.networks import networks, shared
from fastlr.integrations.stable_baselines3.observations import (
    as_tensors,
    draw,
    preprocessed,
    unbounded,
)

pytestmark = mark.filterwarnings("ignore:You are trying to run:UserWarning")
N = 16
BOX = spaces.Box(-1.0, 2.0, (3,))
WIDE = spaces.Box(-np.inf, np.inf, (3,))
TWO = spaces.Box(-1.0, 1.0, (2,))
THREE = spaces.Discrete(3)
DICT = spaces.Dict({"a": BOX, "b": THREE, "c": spaces.MultiDiscrete([2, 3])})
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)


@fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    """Have agents' loggers make their folders where the test ends them."""
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path))


class World(gymnasium.Env):
    """Observations at random from a space, or around 5 in a wide one; episodes of nine steps."""

    def __init__(self, observation_space=BOX, action_space=TWO):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), float(self.np_random.random()), self.steps == 9, False, {}

    def _observe(self):
        if self.observation_space is WIDE:
            return self.np_random.normal([5, 5, 50], 2).astype(np.float32)
        return self.observation_space.sample()


def noise(kind=NormalActionNoise):
    return kind(np.zeros(2), np.array([0.2, 0.5]))


def make(kind, observations=BOX, actions=TWO, policy="MlpPolicy", env=None, layers=(8,), **options):
    """Return a small agent on a `World`."""
    options = {"seed": 0, "device": "cpu", **options}
    if kind in (PPO, A2C):
        options["n_steps"] = 8
    else:
        options |= {"learning_starts": 12, "buffer_size": 64, "batch_size": 4}
    if kind is PPO:
        options |= {"batch_size": 4, "n_epochs": 2}
    options["policy_kwargs"] = {"net_arch": list(layers), **options.get("policy_kwargs", {})}
    return kind(policy, env or World(observations, actions), **options)


AGENTS = {
    "ppo": lambda: make(PPO),
    "a2c": lambda: make(A2C, actions=THREE),
    "dqn": lambda: make(DQN, actions=THREE),
    "sac": lambda: make(SAC),
    "td3": lambda: make(TD3, action_noise=noise()),
}


def callback(n=N, **options):
    return LocalRedundancyCallback(n, **{"every_n_steps": 8, "on_error": "raise", **options})


def state(agent):
    """All that a training changes: weights, optimizers, buffers, modes, and random states."""
    buffer = getattr(agent, "replay_buffer", None) or agent.rollout_buffer
    arrays = {k: v.tolist() for k, v in vars(buffer).items() if isinstance(v, np.ndarray)}
    env = agent.get_env().envs[0].unwrapped
    around = [env.np_random, env.observation_space.np_random, agent.action_space.np_random]
    optimizers = [getattr(part, "optimizer", None) for part in agent.policy.modules()]
    found = {
        "tensors": dict(agent.policy.state_dict()),
        "gradients": {n: p.grad for n, p in agent.policy.named_parameters()},
        "optimizers": [o.state_dict()["state"] for o in optimizers if o is not None],
        "arrays": arrays,
        "modes": [module.training for module in agent.policy.modules()],
        "random": [random_states(), [str(r.bit_generator.state) for r in around]],
        "counts": [agent.num_timesteps, agent._n_updates],
        "pending": {k: v for k, v in agent.logger.name_to_value.items() if k[:4] != "time"},
    }
    return tree_map_only(torch.Tensor, torch.Tensor.tolist, found)


def trained(name, make=lambda: None, steps=40):
    """Train an agent with what is made after it, as in the guide."""
    seed_all()
    agent = AGENTS[name]()
    watch = make()
    return agent.learn(steps, watch), watch


@mark.parametrize(
    ("name", "inputs"),
    [
        ("ppo", "space"),
        ("a2c", "own"),
        ("dqn", "space"),
        ("sac", "space"),
        ("td3", "own"),
        *(
            param(*rest, marks=mark.long)
            for rest in [("ppo", "own"), ("a2c", "space"), ("dqn", "own"), ("sac", "own")]
        ),
    ],
)
def test_training_is_bit_for_bit_the_same(name, inputs):
    alone, _ = trained(name)
    watched, watch = trained(name, lambda: callback(inputs=inputs, measures=["dormant_ratio"]))
    assert state(watched) == state(alone)
    assert {reading.step for reading in watch.last.values()} == {40}
    assert len(watch.last) == len(watch.about)
    assert all("dormant_ratio" in reading.measures for reading in watch.last.values())


def evaluations(watch):
    env = World()
    env.reset(seed=1)
    return EvalCallback(env, watch, n_eval_episodes=1, eval_freq=12, warn=False)


@mark.parametrize(
    ("name", "wrap", "count"),
    [
        ("ppo", lambda watch: EveryNTimesteps(12, watch), 4),
        ("sac", lambda watch: [EveryNTimesteps(12, CallbackList([watch]))], 4),
        ("ppo", evaluations, 3),
    ],
    ids=["every", "list", "best"],
)
def test_measures_at_the_start_and_at_each_event_of_another_callback(name, wrap, count):
    watch = callback()
    watch.measure = Mock(wraps=watch.measure)
    watched, _ = trained(name, lambda: wrap(watch))
    alone, _ = trained(name, lambda: wrap(ConvertCallback(lambda *_: True)))
    assert state(watched) == state(alone)
    assert watch.measure.call_count == count


def test_events_wait_for_observations():
    """Observations between two events of a rollout are seen once, and none is made up."""
    watch = callback(inputs="own")
    watch.measure = Mock(wraps=watch.measure)
    with warns(FastlrWarning, match="not measured yet: fewer than n=16"):
        trained("ppo", lambda: EveryNTimesteps(3, watch))
    assert watch.measure.call_count == len(range(24, 40, 3))
    assert watch._observations[""].abs().sum(1).all()


def labels(distribution):
    """(label, weight) pairs that a squared score's expectation is the sum over, exactly.

    It is a polynomial of degree 4 in a Gaussian's label: three points an element suffice.
    """
    if isinstance(distribution, torch.distributions.Categorical):
        return [(torch.tensor([k]), float(p)) for k, p in enumerate(distribution.probs[0].detach())]
    if isinstance(distribution, torch.distributions.Bernoulli):
        p = distribution.probs[0]
        points = [[(0.0, 1 - one), (1.0, one)] for one in p]
    else:
        points = [
            [(m + s * e, w) for e, w in ((-(3**0.5), 1 / 6), (0.0, 2 / 3), (3**0.5, 1 / 6))]
            for m, s in zip(distribution.loc[0], distribution.scale[0])
        ]
    return [
        (torch.tensor([[float(y) for y, _ in row]]), np.prod([float(w) for _, w in row]))
        for row in product(*points)
    ]


def sq_norm(value, policy):
    found = torch.autograd.grad(
        value, list(policy.parameters()), retain_graph=True, allow_unused=True
    )
    return sum(float(g.double().square().sum()) for g in found if g is not None)


def by_hand(policy, distributions):
    """E ||grad log P||^2 of one observation, over SB3's own independent distributions."""
    total = 0.0
    for row in product(*map(labels, distributions)):
        log_p = sum(d.log_prob(y.detach()).sum() for d, (y, _) in zip(distributions, row))
        total += float(np.prod([float(w) for _, w in row])) * sq_norm(log_p, policy)
    return total


def distributions(agent, row):
    """What SB3 itself makes of an observation: the policy's distributions, before any squashing."""
    policy = agent.policy
    if isinstance(agent, TD3):
        scale = torch.tensor([[0.2, 0.5]]) if agent.action_noise else torch.full((1, 2), 0.2)
        return [torch.distributions.Normal(policy.actor(row), scale)]
    if isinstance(agent, SAC):
        mean, log_std, more = policy.actor.get_action_dist_params(row)
        found = policy.actor.action_dist.proba_distribution(mean, log_std, **more).distribution
    else:
        found = policy.get_distribution(row).distribution
    return found if isinstance(found, list) else [found]


def values(agent, row, action):
    policy = agent.policy
    if isinstance(agent, DQN):
        return policy.q_net(row)
    if isinstance(agent, (SAC, TD3)):
        return torch.cat(policy.critic(row, action), 1)
    return policy.predict_values(row)


SDE = {"use_sde": True}
KINDS = {
    "categorical": lambda: make(PPO, actions=THREE),
    "several": lambda: make(PPO, DICT, spaces.MultiDiscrete([2, 3]), "MultiInputPolicy"),
    "bernoulli": lambda: make(A2C, THREE, spaces.MultiBinary(2)),
    "gaussian": lambda: make(PPO, spaces.MultiBinary(4)),
    "gaussian-sde": lambda: make(PPO, **SDE),
    "sac": lambda: make(SAC),
    "sac-sde": lambda: make(SAC, **SDE),
    "td3": AGENTS["td3"],
    "td3-silent": lambda: make(TD3),
    "dqn": AGENTS["dqn"],
    "image": lambda: make(
        PPO,
        IMAGE,
        THREE,
        "CnnPolicy",
        layers=[],
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}},
    ),
}


@mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_agents_own_distributions(kind):
    torch.manual_seed(0)
    agent = KINDS[kind]()
    with torch.no_grad():  # away from an output layer of nearly zero
        for p in agent.policy.parameters():
            p.add_(0.1 * torch.randn_like(p))
    rng = np.random.default_rng(0)
    observations = as_tensors(draw(agent, 2, rng, {}))
    actions = torch.rand(2, 2) if isinstance(agent, (SAC, TD3)) else None
    tensors = preprocessed(agent, observations)
    for name, part in networks(agent, None, 1.0).items():
        x = (*tensors, actions) if part.takes_actions else tensors
        options = {"predictive": part.predictive, "probe": "exact"}
        found = fastlr.estimate(part.module, fastlr.TensorInputs(x), 2, **options).per_sample
        for i in range(2):
            row = {key: rows[i : i + 1] for key, rows in observations.items()}
            row = row.get("", row)
            if name == "actor":
                wanted = by_hand(agent.policy, distributions(agent, row))
            else:
                action = None if actions is None else actions[i : i + 1]
                each = values(agent, row, action).flatten()
                wanted = sum(sq_norm(value, agent.policy) for value in each)
            assert float(found[i]) == approx(wanted, rel=1e-3)
    assert bool(shared(networks(agent, None, 1.0))) == (kind == "image")


def space_of(space, normalizer=None):
    return SimpleNamespace(observation_space=space, get_vec_normalize_env=lambda: normalizer)


@mark.parametrize("space", [BOX, THREE, DICT, IMAGE, spaces.MultiBinary(3)], ids=str)
def test_drawn_observations_are_of_their_space_and_of_the_seed(space):
    first, again = (draw(space_of(space), 50, np.random.default_rng(3), {}) for _ in range(2))
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    for key, part in parts.items():
        assert all(part.contains(part.dtype.type(row)) for row in first[key])
        assert np.array_equal(first[key], again[key])
        assert len(np.unique(first[key])) > 1
    assert not unbounded(space_of(space))


@mark.parametrize(
    ("kind", "inputs", "normalize"),
    [
        (PPO, "space", False),
        (PPO, "own", True),
        (SAC, "space", True),
        param(SAC, "own", True, marks=mark.long),
    ],
)
def test_wide_boxes_follow_what_was_seen(kind, inputs, normalize):
    """Also where VecNormalize makes observations of mean 0 and deviation 1 of them."""
    env = DummyVecEnv([lambda: World(WIDE)])
    agent = make(kind, env=VecNormalize(env) if normalize else env)
    watch = callback(40, inputs=inputs, at_start=False, every_n_steps=8)
    seen = watch._seen
    agent._setup_learn(48, watch)
    watch.init_callback(agent)
    assert seen.batch(agent) is None
    agent.learn(48, watch)
    rows = watch._observations[""]
    centre = torch.zeros(3) if normalize else torch.tensor([5.0, 5, 50])
    deviation = 1.0 if normalize else 2.0
    assert_close(rows.mean(0), centre, rtol=0, atol=1.2 * deviation)
    assert_close(rows.std(0), torch.full((3,), deviation), rtol=0.5, atol=0)
    assert watch.last["actor"].step == 48


def test_numbers_go_to_the_agents_logger(tmp_path):
    agent, watch = AGENTS["ppo"](), callback(every_n_rollouts=2, every_n_steps=None, prefix="lr-")
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    agent.learn(40, watch)
    with open(tmp_path / "progress.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["lr-actor/local_redundancy"]]
    assert [row["time/total_timesteps"] for row in rows] == ["0", "16", "32"]
    assert float(rows[-1]["lr-critic/local_redundancy"]) == watch.last["critic"].value
    assert len(watch.monitors["actor"].course) == 2


def test_goes_on_after_load(tmp_path):
    file = tmp_path / "watch.pt"
    agent, watch = AGENTS["ppo"](), callback(inputs="own", state_file=file)
    agent.learn(32, watch)
    agent.save(tmp_path / "agent")
    agent.learn(16, watch, reset_num_timesteps=False)  # lost: the agent was saved before
    assert len(watch.monitors["actor"].course) == 5
    again = PPO.load(tmp_path / "agent", World(), device="cpu")
    resumed = callback(inputs="own", state_file=file)
    again.learn(16, resumed, reset_num_timesteps=False)
    assert torch.equal(resumed._observations[""], watch._observations[""])
    assert [len(monitor.course) for monitor in resumed.monitors.values()] == [5, 5]
    kept, before = (w.monitors["actor"].course[2].value for w in (resumed, watch))
    assert kept == before
    assert [reading.step for reading in resumed.monitors["critic"].course] == [16, 24, 32, 40, 48]
    with raises(InputError, match="is there already"):
        AGENTS["ppo"]().learn(8, callback(state_file=file))
    with raises(InputError, match="no state of critic"):
        other = AGENTS["dqn"]()
        other.num_timesteps = 8
        other.learn(8, callback(state_file=file), reset_num_timesteps=False)
    with warns(FastlrWarning, match="begin anew at step 48"):
        again.learn(8, callback(state_file=tmp_path / "no.pt"), reset_num_timesteps=False)
    with raises(InputError, match="another agent"):
        AGENTS["ppo"]().learn(8, resumed)


class RecurrentPolicy(ActorCriticPolicy):
    def get_distribution(self, obs):
        return super().get_distribution(obs)


class Strange(ActionNoise):
    def __call__(self):
        return np.zeros(2)


@mark.parametrize(
    ("agent", "match"),
    [
        (lambda: SimpleNamespace(observation_space=None), "no observation space"),
        (lambda: SimpleNamespace(observation_space=BOX, policy=torch.nn.Linear(1, 1)), "not known"),
        (
            lambda: make(PPO, policy=RecurrentPolicy),
            "RecurrentPolicy.get_distribution is not that of",
        ),
        (lambda: make(TD3, action_noise=Strange()), "Strange is not known: pass action_sigma"),
        (lambda: make(DDPG), "target_policy_noise, which is 0.0: pass action_sigma"),
    ],
)
def test_agents_that_cannot_be_measured_are_named(agent, match):
    with raises(InputError, match=match):
        callback().init_callback(agent())


def test_the_rest_of_wrong_use_is_named():
    for options, match in [
        ({"inputs": "mine"}, "inputs must be"),
        ({"every_n_rollouts": 1}, "both given"),
        ({"x": 1, "predictive": 2}, "predictive, x: leave out"),
        ({"measures": ["dormant"]}, "dormant"),
        ({"n": 0}, "n must"),
    ]:
        with raises(InputError, match=match):
            callback(**options)
    with raises(InputError, match="cannot be drawn from Text"):
        draw(space_of(spaces.Text(3)), 2, np.random.default_rng(0), {})
    with raises(InputError, match="action_sigma is for TD3"):
        callback(action_sigma=1.0).init_callback(AGENTS["a2c"]())
    with raises(InputError, match="fewer than n=16"):
        watch = callback(inputs="own")
        AGENTS["a2c"]()._setup_learn(8, watch)
        watch.measure()
    with warns(FastlrWarning, match="fewer than n=16"):
        AGENTS["a2c"]().learn(8, callback(inputs="own"))


@mark.parametrize(
    ("options", "deviation"),
    [
        ({"action_noise": noise(OrnsteinUhlenbeckActionNoise)}, [0.365, 0.913]),
        ({"action_noise": noise()}, [0.2, 0.5]),
        ({}, [0.2, 0.2]),
    ],
)
def test_the_deviation_of_td3(options, deviation):
    part = networks(make(TD3, **options), None, 1.0)["actor"]
    assert_close(part.module.deviation, torch.tensor(deviation), rtol=1e-2, atol=0)

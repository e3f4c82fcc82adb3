"""A single-file actor-critic loop on CartPole, with a monitor on each of its two networks.

Install ``'.[rl]'`` and run ``python examples/actor_critic_loop.py``.

Both log into one list, under prefixes of their own. The lines that a loop of yours needs are
marked; the training is bit for bit the same without them.
"""

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import fastlr

UPDATES, STEPS, GAMMA = 40, 64, 0.99


def network(outputs: int) -> nn.Sequential:
    """Make a small network of CartPole's four observations."""
    first, second = nn.Linear(4, 32), nn.Linear(32, 32)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(32, outputs))


def main() -> None:
    """Train actor and critic, and print how their local redundancy went."""
    torch.manual_seed(0)
    env = gymnasium.make("CartPole-v1")
    actor, critic = network(2), network(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 3e-3)

    env.reset(seed=0)
    x = torch.from_numpy(np.stack([env.step(k % 2)[0] for k in range(32)]))  # of your own agent's
    rows = []

    def log(values: dict[str, float], step: int) -> None:
        rows.append({"step": step, **values})

    distributions = {"actor": fastlr.Categorical(), "critic": fastlr.Gaussian()}
    what = {"n": 32, "measures": ["dormant_ratio"], "x": x, "every_n_steps": 10, "log": log}
    monitors = [  # one a network, each by its own distribution
        fastlr.Monitor(
            net, fastlr.TensorInputs(x), prefix=f"{name}/", predictive=distribution, **what
        )
        for net, (name, distribution) in zip((actor, critic), distributions.items(), strict=True)
    ]
    for monitor in monitors:
        monitor.measure()  # at the start, where a mistake in the arguments shows at once

    observation, lengths, length = env.reset(seed=1)[0], [], 0
    for _ in range(UPDATES):
        log_probs, values, rewards, going = [], [], [], []
        for _ in range(STEPS):
            state = torch.from_numpy(observation)
            choice = Categorical(logits=actor(state))
            action = choice.sample()
            observation, reward, ended, cut, _ = env.step(action.item())
            log_probs.append(choice.log_prob(action))
            values.append(critic(state).squeeze())
            rewards.append(reward)
            going.append(not (ended or cut))
            length += 1
            if ended or cut:
                lengths.append(length)
                observation, length = env.reset()[0], 0
        gain = critic(torch.from_numpy(observation)).item()
        gains = []
        for reward, goes_on in zip(reversed(rewards), reversed(going), strict=True):
            gain = reward + GAMMA * gain * goes_on
            gains.insert(0, gain)
        advantages = torch.tensor(gains) - torch.stack(values)
        loss = advantages.square().mean() - (torch.stack(log_probs) * advantages.detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for monitor in monitors:
            monitor.step()  # after each optimizer step

    for row in rows:
        print(row)
    print(f"return of the last ten episodes: {np.mean(lengths[-10:]):.0f}")
    for monitor in monitors:
        first, last = monitor.first["value"], monitor.last.value
        print(f"{monitor.prefix}local_redundancy: {first:.4g} at the start, {last:.4g} at the end")


if __name__ == "__main__":
    main()

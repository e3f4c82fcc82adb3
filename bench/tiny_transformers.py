"""Where the time of a measurement goes in transformers so small that torch's own work is little.

    python -m bench.tiny_transformers                      # a table: measured, plain, their ratio
    python -m bench.tiny_transformers --parts              # by what the time is spent on
    python -m bench.tiny_transformers --profile --models llama      # by function

Two layers of width 32 of Hugging Face's architectures with random weights, on one thread. *Plain*
is one forward pass and the backward pass of a random cotangent with weight gradients; *measured*
one call of an engine that has seen the shape, so nothing is compared any more. Both take
turns; what is shown are medians over the rounds, and the least.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from fastlr.ghost import engine
from fastlr.ghost.engine import Engine
from fastlr.ghost.graph.plan import Key
from fastlr.ghost.model.view import ModelView
from fastlr.ghost.norms import sq_norms as backward

LENGTH, TOKENS = 16, 100
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": TOKENS,
}
Case = tuple[nn.Module, Callable[[int], Any]]  # a model, and what makes inputs of some samples


class Logits(nn.Module):
    """A model of Hugging Face's whose output is a record, as one that returns its logits."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the entry of the output that is measured."""
        return getattr(self.model(**inputs), self.name)


def tokens(count: int) -> dict[str, Tensor]:
    """Return random tokens [count, LENGTH]."""
    return {"input_ids": torch.randint(TOKENS, (count, LENGTH))}


def llama() -> Case:
    """Return a causal language model with rotary positions and gated MLPs."""
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    return Logits(transformers.LlamaForCausalLM(config), "logits"), tokens


def mixtral() -> Case:
    """Return a causal language model whose MLPs are experts that tokens are sent to."""
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return Logits(transformers.MixtralForCausalLM(config), "logits"), tokens


def bert() -> Case:
    """Return a classifier of sentences."""
    config = transformers.BertConfig(**SIZES)
    return Logits(transformers.BertForSequenceClassification(config), "logits"), tokens


def fnet() -> Case:
    """Return a classifier of sentences that mixes tokens by Fourier transforms."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    config = transformers.FNetConfig(**sizes)
    return Logits(transformers.FNetForSequenceClassification(config), "logits"), tokens


def clip() -> Case:
    """Return an encoder of images."""
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    model = Logits(transformers.CLIPVisionModel(config), "pooler_output")
    return model, lambda count: {"pixel_values": torch.randn(count, 3, 32, 32)}


CASES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "clip": clip,
    "bert": bert,
    "fnet": fnet,
    "mixtral": mixtral,
}


def calls(name: str, count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return one call of a kept engine, and a plain pass, of a model and ``count`` samples."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    model.eval()
    x = inputs(count)
    kept = Engine(model)
    direction = torch.randn_like(model(**x))

    def cotangent(z: Tensor) -> Tensor:
        return direction

    def plain() -> None:
        model.zero_grad()
        model(**x).backward(direction)

    def measured() -> None:
        kept.run(x, cotangent)

    measured()
    for _ in range(3):
        plain()
        measured()
    return measured, plain


# What the time is spent on -> functions, by their modules or classes; what one calls of another's
# counts there alone.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "forward pass": [(ModelView, "forward")],
    "backward pass, and reaching the uses in it": [(torch.autograd, "grad")],
    "rules: factors of the uses": [(backward, "_factors")],
    "norms of the factors": [
        (backward._NormsOfUses, "add_factors"),
        (backward._NormsOfUses, "add_waiting"),
    ],
    "the graph walked and known again, or looked at": [
        (engine, "walk"),
        (Key, "of"),
        (Engine, "_plan_for"),
    ],
    "audits": [(Engine, "_audit")],
    "all else": [(Engine, "run")],
}


class Spent:
    """Adds up the processor's time that functions take, without that of others within."""

    def __init__(self) -> None:
        self.by_part: Counter[str] = Counter()
        self._within: list[float] = []  # what others took, of each function that runs now

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time is added to a part's."""

        @wraps(function)
        def timed_function(*args: Any, **options: Any) -> Any:
            begun = time.process_time()
            self._within.append(0.0)
            try:
                return function(*args, **options)
            finally:
                taken = time.process_time() - begun
                self.by_part[part] += taken - self._within.pop()
                if self._within:
                    self._within[-1] += taken

        return timed_function


def parts(name: str, count: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds a call that each of `PARTS` takes."""
    measured, _ = calls(name, count)
    spent = Spent()
    with ExitStack() as watching:
        for part, functions in PARTS.items():
            for owner, attribute in functions:
                watched: Any = spent.watched(part, getattr(owner, attribute))
                if isinstance(vars(owner)[attribute], staticmethod):
                    watched = staticmethod(watched)
                watching.enter_context(mock.patch.object(owner, attribute, watched))
        _repeated(measured, rounds)
    return {part: 1e3 * spent.by_part[part] / rounds for part in PARTS}


def print_parts(models: list[str], count: int, rounds: int) -> None:
    """Print a table of what the time of each model's calls is spent on."""
    columns = [parts(name, count, rounds) for name in models]
    print(f"| ms a call, {count} samples | {' | '.join(models)} |")
    print("|---|" + "--:|" * len(models))
    for part in PARTS:
        print(f"| {part} | {' | '.join([f'{column[part]:.1f}' for column in columns])} |")


def seconds(call: Callable[[], Any]) -> float:
    """Return the processor's time of a call: what others do on the machine is not in it."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def timed(name: str, count: int, rounds: int) -> str:
    """Return a line of the table."""
    measured, plain = calls(name, count)
    own, unit = [], []
    for _ in range(rounds):
        own.append(1e3 * seconds(measured))
        unit.append(1e3 * seconds(plain))
    middle, other = statistics.median(own), statistics.median(unit)
    return (
        f"| {name} | {count} | {middle:.1f} | {min(own):.1f} "
        f"| {other:.1f} | {min(unit):.1f} | {middle / other:.1f} |"
    )


def profiled(name: str, count: int, rounds: int, lines: int) -> None:
    """Print where the calls of an engine spend their time, by function, a call."""
    measured, _ = calls(name, count)
    profile = cProfile.Profile(time.process_time)
    profile.runcall(partial(_repeated, measured, rounds))
    print(f"{name}, {count} samples, {rounds} calls")
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)
    pstats.Stats(profile).sort_stats("cumtime").print_stats("fastlr", 2 * lines)


def _repeated(call: Callable[[], Any], rounds: int) -> None:
    for _ in range(rounds):
        call()


def main() -> None:
    """Print the table, or the profile of one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--counts", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--profile", action="store_true", help="by function instead of the table")
    parser.add_argument("--parts", action="store_true", help="by part instead of the table")
    parser.add_argument("--lines", type=int, default=25, help="of the profile")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )
    if chosen.parts:
        for count in chosen.counts:
            print_parts(chosen.models, count, chosen.rounds)
        return
    if not chosen.profile:
        print("| model | samples | measured (ms) | least | plain (ms) | least | ratio |")
        print("|---|--:|--:|--:|--:|--:|--:|")
    for name in chosen.models:
        for count in chosen.counts:
            if chosen.profile:
                profiled(name, count, chosen.rounds, chosen.lines)
            else:
                print(timed(name, count, chosen.rounds), flush=True)


if __name__ == "__main__":
    main()

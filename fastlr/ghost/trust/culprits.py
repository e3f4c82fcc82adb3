"""Which module makes samples interact, or draws at random.

In: a model and a few samples. Out: an error that names the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fastlr.errors import InteractionError, RandomForwardError
from fastlr.ghost.fusion.recurrent import Unfused
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.refusals import NORMS_OF_ONE_SAMPLE
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ghost.trust.agreement import agree, rounding
from fastlr.ghost.trust.company import BatchOutput

OR_ONE_SAMPLE = (
    "or measure the model on one sample at a time, if that is what it is for: fastlr.estimate(..., "
    "batch_size=1)"
)


def require_not_random(view: ModelView, samples: Batch) -> BatchOutput:
    """Require that samples give the same again, and return their output.

    Raises:
        RandomForwardError: Two forward passes differ.
    """
    every = range(samples.count)
    with Unfused():
        together = BatchOutput(view, samples, view.outputs(samples.pick(every)))
        if not together.matches(every, together.run(every)):
            raise RandomForwardError(_random_message(view.module))
    return together


def refuse_interaction(together: BatchOutput) -> None:
    """Require that each of a few samples gives the same among copies of itself.

    Raises:
        InteractionError: A sample gives something else; the error names the first such module.
    """
    count = together.batch.count
    with Unfused():
        if together.first_difference([sample] * count for sample in range(count)) is not None:
            raise InteractionError(_interaction_message(together))


def _random_message(model: nn.Module) -> str:
    drops = [
        name
        for name, module in model.named_modules()
        if module.training and "dropout" in type(module).__name__.lower()
    ]
    where = f"; in train mode: {', '.join(drops[:5])}" if drops else ""
    message = f"two forward passes on the same inputs differ (dropout, sampling){where}"
    if any(module.training for module in model.modules()):
        return f"{message}: call model.eval()"
    return (
        f"{message}, although the model is in eval mode: its forward pass draws at random "
        "whatever the mode. Give F.dropout training=self.training, or draw only where "
        "self.training is true. If the model fits itself to its first batch, run it once on data"
    )


def _interaction_message(together: BatchOutput) -> str:
    """Name the first module whose output for sample 0 changes when the other samples do."""
    message = "samples interact: the output of one depends on the others"
    if _gives_more_in_a_larger_batch(together):
        return (
            f"{message}, of whom it has an output each, as in f(x) @ g(x).T. Give what all samples "
            "are compared with as an input of its own, which they then share"
        )
    modules = together.view.module.named_modules()
    for name, module in modules:
        if getattr(module, "batch_first", True) is False:
            return (
                f"{message}: module {name} ({type(module).__name__}) has batch_first=False, so it "
                "takes axis 1 for the samples. Make it with batch_first=True, or pass in_dim=1"
            )
    name = _first_changed_module(together)
    if name is None:
        return f"{message}. Make the forward pass work on each sample alone, {OR_ONE_SAMPLE}"
    module = together.view.module.get_submodule(name)
    message += f", first seen in module {name} ({type(module).__name__})"
    if getattr(module, "track_running_stats", True) is False:
        return f"{message}, which has no running statistics: {NORMS_OF_ONE_SAMPLE}"
    if module.training and "Norm" in type(module).__name__:
        return f"{message}, which is in train mode and uses batch statistics: call model.eval()"
    return f"{message}. Make it work on each sample alone, {OR_ONE_SAMPLE}"


def _gives_more_in_a_larger_batch(together: BatchOutput) -> bool:
    """Return True if a sample's output has more elements in a batch of twice the samples."""
    try:
        twice = together.run([*range(together.batch.count)] * 2)
    except FAILURES:  # the model may take no other batch
        return False
    return twice.numel() > 2 * together.output.numel()


def _first_changed_module(together: BatchOutput) -> str | None:
    count = together.batch.count
    with_others = _outputs_of_sample_0(together, range(count))
    by_itself = _outputs_of_sample_0(together, [0] * count)
    for (name, one), (_, other) in zip(with_others, by_itself, strict=False):
        if one.shape == other.shape and not agree(one, other, rounding(one.dtype)):
            return name
    return None


def _outputs_of_sample_0(together: BatchOutput, samples: Sequence[int]) -> list[tuple[str, Tensor]]:
    """Run some samples, and return what each module gave for the first of them, in order."""
    seen: list[tuple[str, Tensor]] = []
    count = together.batch.count

    def hook_for(name: str) -> Callable:
        def hook(_module: nn.Module, _inputs: Any, result: Any) -> None:
            is_plain = isinstance(result, Tensor) and not result.is_nested and result.ndim > 0
            if is_plain and len(result) % count == 0:
                seen.append((name, result.detach()[: len(result) // count].clone()))

        return hook

    handles = [
        module.register_forward_hook(hook_for(name))
        for name, module in together.view.module.named_modules()
        if name
    ]
    try:
        together.run(samples)
    finally:
        for handle in handles:
            handle.remove()
    return seen

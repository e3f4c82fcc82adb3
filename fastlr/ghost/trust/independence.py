"""Require that samples do not depend on the others in their batch.

In: a forward pass over a batch. Out: which inputs carry samples, or an error that says what makes
them interact. Samples run again in other company, and must give the same outputs. See "For a new
structure or shape" in docs/trust.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fastlr.errors import (
    FastlrError,
    InputError,
    InteractionError,
    first_line,
    warn,
)
from fastlr.ghost.fusion.forward import ForwardPass
from fastlr.ghost.model.batch import FLAT_IDS, Batch
from fastlr.ghost.model.view import FAILURES
from fastlr.ghost.model.writes import passes_have_written
from fastlr.ghost.trust.audits import SAMPLES, Refuted
from fastlr.ghost.trust.company import BatchOutput
from fastlr.ghost.trust.culprits import refuse_interaction, require_not_random
from fastlr.ops.deferred_checks import out_of_memory

# Samples that run alone in a comparison, where audits run three others; and if they may interact.
SOME_ALONE = 5
MANY_ALONE = 32
FEW = 4  # samples that stand for a batch
OTHER_MAGNITUDES = (30.0, -1 / 30)  # factors of two samples' values


def evenly_spaced(count: int) -> list[int]:
    """Return the numbers of a few samples, from the first to the last of a batch."""
    return sorted({k * (count - 1) // (FEW - 1) for k in range(FEW)})


class Independence:
    """Compares the outputs of samples in other company, for one engine.

    Attributes:
        comparisons: Number of batches that were compared.
        suspicion: Why samples may interact in later batches, so that all are compared; "" for none.
    """

    def __init__(self) -> None:
        self.comparisons = 0
        self.suspicion = ""

    def require_and_find_carriers(self, forward: ForwardPass, largest_compared: int) -> list[int]:
        """Require that the samples of a batch give the same in other company.

        Args:
            forward: Forward pass over the batch.
            largest_compared: Number of elements of the largest batch of this structure that was
                compared; 0 if there is none.

        Returns:
            Indices of the flattened inputs that carry samples.

        Raises:
            InteractionError: Outputs depend on the company.
            InputError: The model fails on parts of the batch.
            RandomForwardError: The model draws at random.
        """
        self.comparisons += 1
        if passes_have_written():
            # A few samples need not show it, as in a vector quantiser that begins with all of them.
            require_not_random(forward.view, forward.batch)
        batch = self._batch_with_carriers(forward, largest_compared)
        if (
            not largest_compared
            and not self.suspicion
            and _interacts_at_other_magnitudes(forward, batch)
        ):
            self.suspicion = "samples of other sizes would interact"
            batch = self._batch_with_carriers(forward, largest_compared)
        return batch.batched

    def interaction_error(self, forward: ForwardPass) -> InteractionError:
        """Return the error for samples that interact. All later batches are compared.

        Raises:
            InteractionError, RandomForwardError: A few samples show what is to blame.
        """
        samples = forward.batch.part(evenly_spaced(forward.count))
        together = require_not_random(forward.view, samples)
        self.suspicion = "samples that interacted in an earlier batch"
        refuse_interaction(together)
        return InteractionError(
            f"samples give another output within the batch of {forward.count} than in parts of it, "
            "or among copies of themselves: samples interact (as where experts have a capacity for "
            f"the whole batch), or an input is shared that in_dim={forward.view.in_dim} makes look "
            "batched. Make the forward pass work on each sample alone"
        )

    def _batch_with_carriers(self, forward: ForwardPass, largest_compared: int) -> Batch:
        """Return the batch, with the inputs that carry samples: its parts must give the same."""
        batch = forward.batch
        failures: list[str] = []
        differs = False
        for carriers in _choices_of_carriers(forward, batch):
            trial = forward.view.batch(forward.x, forward.count, carriers)
            try:
                is_same = self._is_same_in_other_company(forward, trial, largest_compared)
                if is_same and differs:
                    is_same = _may_be_shared(forward, batch, trial)
            except Exception as error:  # a model may raise anything
                if isinstance(error, FastlrError) or out_of_memory(error):
                    raise
                failures.append(f"{type(error).__name__}: {first_line(error)}")
                continue
            if is_same:
                return trial
            differs = True
        if differs:
            raise self.interaction_error(forward)
        remedy = (
            f"check in_dim={forward.view.in_dim}, or pass inputs whose every batched tensor has "
            "the samples along it"
        )
        if any(isinstance(module, nn.EmbeddingBag) for module in forward.view.module.modules()):
            remedy = FLAT_IDS
        raise InputError(
            f"the model fails on parts of the {forward.count} samples ({failures[0]}); {remedy}"
        )

    def _is_same_in_other_company(
        self, forward: ForwardPass, batch: Batch, largest_compared: int
    ) -> bool:
        """Return True if the samples give the same in parts of the batch.

        The parts run as the model is written. The batch may have run folded.

        Raises:
            Refuted: They would give the same if the batch had not run folded.
        """
        in_batch = BatchOutput(forward.view, batch, forward.z)
        difference = in_batch.first_difference(self._companies(forward, largest_compared))
        if difference is None:
            return True
        if forward.has_folded:
            plain = replace(in_batch, output=in_batch.run(range(batch.count)))
            if plain.matches(difference.samples, difference.output):
                raise Refuted("the folded model gives another output")
        return False

    def _companies(self, forward: ForwardPass, largest_compared: int) -> list[list[int]]:
        """Return the companies in which samples run again, as lists of their numbers.

        These are two random halves of the batch; one sample as often as fills the batch; and some
        samples, each beside a copy. The second is a crowd that a router sends one way, so that it
        exceeds any capacity that samples share. Smaller batches than an earlier one need the last
        ones only.
        """
        count = forward.count
        generator = torch.Generator().manual_seed(self.comparisons)
        order = torch.randperm(count, generator=generator, device="cpu").tolist()
        companies: list[list[int]] = []
        if forward.elements > largest_compared or self.suspicion:
            if count > SAMPLES:
                companies = [order[: count // 2], order[count // 2 :]]
            if count > 2:
                companies.append(order[-1:] * count)
        not_audited = count - SAMPLES
        pairs = MANY_ALONE if self.suspicion else max(1, min(SOME_ALONE, not_audited))
        return companies + [[sample, sample] for sample in order[:pairs]]


def _choices_of_carriers(forward: ForwardPass, batch: Batch) -> list[list[int]]:
    """Return the inputs that may carry samples: all that look so, or all but one of these."""
    choices = [batch.batched]
    if forward.carriers is None:
        choices += [[i for i in batch.batched if i != shared] for shared in batch.batched]
    return [choice for choice in choices if choice]


def _may_be_shared(forward: ForwardPass, batch: Batch, trial: Batch) -> bool:
    """Return False if inputs taken as shared are numbers of the samples, used together only.

    An example are lengths, of which a model uses the largest. A warning says how other inputs are
    taken that are used together, such as a memory that all samples attend to.

    Args:
        forward: Forward pass over the batch.
        batch: Batch with all inputs that may carry samples.
        trial: Batch with fewer of them, the others being shared.
    """
    shared = [i for i in batch.batched if i not in trial.batched]
    leaves = [batch.leaves[i] for i in shared]
    have_no_order = all(torch.equal(leaf, leaf.flip(batch.in_dim)) for leaf in leaves)
    if have_no_order:
        return True
    whole = forward.view.batch(forward.x, forward.count, shared)
    output = forward.view.outputs(whole.pick(list(reversed(range(forward.count)))))
    order_matters = not BatchOutput(forward.view, trial, forward.z).matches(
        range(forward.count), output
    )
    if order_matters:  # so they are no samples
        return True
    are_numbers_of_samples = all(leaf.ndim == 1 for leaf in leaves)
    if are_numbers_of_samples:
        return False
    warn(
        f"an input of shape {tuple(leaves[0].shape)} has as many rows as there are samples, and is "
        "taken as shared by all of them, as the model uses its rows together only. If they are the "
        "samples' own, the model makes samples interact through them, and norms are those within "
        "this very batch"
    )
    return True


def _interacts_at_other_magnitudes(forward: ForwardPass, batch: Batch) -> bool:
    """Return True if a sample gives something else beside a far larger one.

    The model is not refused for that, as such values may not occur.
    """
    two, view = batch.scaled(OTHER_MAGNITUDES), forward.view
    try:
        together = BatchOutput(view, two, view.outputs(two.pick(range(2))))
        return together.first_difference([[1, 1]]) is not None
    except FAILURES as error:  # the model may take no such values
        if out_of_memory(error):
            raise
        return False

"""How far a model's outputs are off by rounding: measured where a tolerance does not explain it.

In: a model, a batch and some of its samples. Out: the rounding of one sample's output, element by
element, or None where it cannot be measured. A sample among copies of itself shows it, as company
cannot matter there. So does the distance from what a deep copy of the model gives in more digits,
for the same samples in the same company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.ghost.graph.walk import walk
from fastlr.ghost.model.batch import Batch
from fastlr.ghost.model.view import FAILURES, ModelView
from fastlr.ghost.trust.agreement import agree, gap, rounding, typical_size, unexplained
from fastlr.ghost.trust.copies import deep_copies, outputs_of_copy
from fastlr.ops.deferred_checks import out_of_memory

MEASURED = 8  # samples at most by which rounding is measured
# Differences of this many times the measured rounding are rounding.
_MARGIN_OF_COPIES, _MARGIN_OF_DIGITS = 4, 32


def among_copies(view: ModelView, batch: Batch, samples: Sequence[int]) -> Tensor | None:
    """Return by how much a sample's output differs among copies of it in batches of other sizes.

    It is at most what the least precise dtype in the graph rounds: copies of a sample differ by
    more where the model goes by their places.
    """
    off: Tensor | None = None
    for sample in samples:
        for size in sorted({2, batch.count // 2, batch.count} - {0}):
            try:
                z = view.forward(batch.pick([sample] * size))
            except FAILURES as error:  # the model may take no such number
                if out_of_memory(error):
                    raise
                continue
            if off is None and not _repeats(view, batch, [sample] * size, z):
                return None
            if size == 2 or off is None:
                first = view.row(z.detach(), 0)
                lowest = walk(z, {}).lowest_dtype() if z.requires_grad else z.dtype
                most = rounding(lowest) * typical_size(first)
            if view.row(z, 0).shape != first.shape:
                return None
            here = _largest_gap(view, z.detach(), first.expand_as(z))
            here = here.mul_(_MARGIN_OF_COPIES).clamp_(max=most)
            off = here if off is None else torch.maximum(off, here)
    return off


def by_more_digits(view: ModelView, batch: Batch, samples: Sequence[int]) -> Tensor | None:
    """Return the distance of outputs from those of a deep copy in more digits."""
    samples = list(dict.fromkeys([*samples, *range(batch.count)]))[:MEASURED]
    own = view.outputs(batch.pick(samples))
    if not _repeats(view, batch, samples, own):
        return None
    few_digits = own.dtype.itemsize < 4
    for clone in deep_copies(view.module):
        exact = outputs_of_copy(view, clone, batch, samples)
        if exact is None or exact.shape != own.shape:
            continue
        if exact.dtype.itemsize <= min(p.dtype.itemsize for p in view.parameters.values()):
            return None
        off = _largest_gap(view, own, exact)
        if few_digits:  # an element may have little of it by chance
            return _MARGIN_OF_DIGITS * off.clamp(min=float(off.median()))
        return (_MARGIN_OF_DIGITS * off).clamp_(max=rounding(own.dtype) * typical_size(own))
    return None


def _repeats(view: ModelView, batch: Batch, samples: Sequence[int], z: Tensor) -> bool:
    """Return True if another forward pass gives the same: the model draws nothing at random."""
    relative = unexplained(z, view.parameters.values())
    return agree(z, view.outputs(batch.pick(samples)), relative, view.out_dim)


def _largest_gap(view: ModelView, a: Tensor, b: Tensor) -> Tensor:
    """Return the largest finite distance of each element over the samples."""
    return gap(a, b).nan_to_num(posinf=0.0).amax(view.out_dim)

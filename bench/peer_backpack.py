"""BackPACK: BatchL2Grad, the squared norm of every sample's gradient."""

from __future__ import annotations

from torch import Tensor

from bench import peer_repairs as repairs
from bench.cases import Case, forward
from bench.peer_autograd import Contender


def batch_l2(case: Case, cotangent: Tensor) -> Contender:
    """BatchL2Grad on the model in eval mode, with its in-place operations and unsupported layers rewritten."""
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    model = repairs.prepare(case.model)
    notes = []
    for repair in (
        repairs.out_of_place,
        repairs.split_attention,
        repairs.tables_as_embeddings,
        repairs.layer_norm_as_batch_norm,
        repairs.unfold_channels,
    ):
        notes += repair(model)
    extend(model)
    params = repairs.owned(model)

    def run() -> dict[str, Tensor]:
        with backpack(BatchL2Grad()):
            (forward(model, case.x, case.kwargs.get("output")) * cotangent).sum().backward()
        found = repairs.collect((name, p.batch_l2.detach()) for p, name in params)
        for p, _ in params:
            p.grad = None
            del p.batch_l2
        return found

    return Contender(run, notes)

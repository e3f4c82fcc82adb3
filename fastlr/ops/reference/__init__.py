"""Every op in plain torch: the definition, with the same name and signature as its fast twins."""

from fastlr.ops.reference.norms import (
    channel_sums,
    conv_grads,
    conv_sq_norms,
    embedding_sq_norms,
    layer_norm_sums,
    linear_sq_norms,
)
from fastlr.ops.reference.reductions import all_reduce, reduce_sq_norm
from fastlr.ops.reference.theory import local_redundancy_exact
from fastlr.ops.shape_images import shape_images

__all__ = [
    "all_reduce",
    "channel_sums",
    "conv_grads",
    "conv_sq_norms",
    "embedding_sq_norms",
    "layer_norm_sums",
    "linear_sq_norms",
    "local_redundancy_exact",
    "reduce_sq_norm",
    "shape_images",
]

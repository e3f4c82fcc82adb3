"""The plasticity measures that local redundancy is compared with.

See section 4.1 and appendix A.1 of the paper.

All are for any model, in eval mode, and leave the model as it was (flags, buffers, gradients,
hooks, random states). Each returns a `Measure`: a float that carries the name of its definition.

- `weight_norm`, `distance_from_init`: of the trainable parameters alone.
- `dormant_ratio`, `effective_rank`, `feature_rank`: of the activations; `activation_measures` gives
  them all from one forward pass.
- `train_grad_norm`: of gradients on real data; `gradient_measures` adds the norm of the batch
  gradient.
- `trainability`: how far a copy gets on random labels; `curvature_rank` and `ntk_rank`: of the
  Gauss-Newton matrix and of the neural tangent kernel on a few inputs.
- `local_redundancy_exact`: Definition 3.1 of the paper itself, for models of a few parameters.
- `measures`: any of those above by name, in as few passes as they need.
"""

from fastlr.metrics.activations import (
    activation_measures,
    dormant_ratio,
    effective_rank,
    feature_rank,
)
from fastlr.metrics.compute import measures
from fastlr.metrics.exact import local_redundancy_exact
from fastlr.metrics.gradients import gradient_measures, train_grad_norm
from fastlr.metrics.probes import curvature_rank, ntk_rank, trainability
from fastlr.metrics.value import Measure
from fastlr.metrics.weights import distance_from_init, weight_norm

__all__ = [
    "Measure",
    "activation_measures",
    "curvature_rank",
    "distance_from_init",
    "dormant_ratio",
    "effective_rank",
    "feature_rank",
    "gradient_measures",
    "local_redundancy_exact",
    "measures",
    "ntk_rank",
    "train_grad_norm",
    "trainability",
    "weight_norm",
]

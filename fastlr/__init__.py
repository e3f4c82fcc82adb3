"""fastlr: measure the plasticity of a neural network by its local redundancy.

See README.md for six lines of use; the definitions are in the docstring of `estimate`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastlr import distributed, metrics
from fastlr.errors import (
    DistributedError,
    FastlrError,
    FastlrWarning,
    HiddenParameterError,
    InputError,
    InteractionError,
    ModelError,
    NonFiniteError,
    NonlinearBackwardError,
    RandomForwardError,
)
from fastlr.estimate import LocalRedundancy, estimate
from fastlr.ghost import per_sample_grad_sq_norms, support_report
from fastlr.inputs import GaussianSeries, NoiseImages, ShapeImages, TensorInputs, TokenInputs
from fastlr.predictive import Bernoulli, Categorical, Gaussian
from fastlr.result import Estimate, paired_difference
from fastlr.stats import memorization_gain, regression_memorization_bound

try:
    __version__ = version("fastlr")
except PackageNotFoundError:  # used from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Bernoulli",
    "Categorical",
    "DistributedError",
    "Estimate",
    "FastlrError",
    "FastlrWarning",
    "Gaussian",
    "GaussianSeries",
    "HiddenParameterError",
    "InputError",
    "InteractionError",
    "LocalRedundancy",
    "ModelError",
    "NoiseImages",
    "NonFiniteError",
    "NonlinearBackwardError",
    "RandomForwardError",
    "ShapeImages",
    "TensorInputs",
    "TokenInputs",
    "distributed",
    "estimate",
    "memorization_gain",
    "metrics",
    "paired_difference",
    "per_sample_grad_sq_norms",
    "regression_memorization_bound",
    "support_report",
]

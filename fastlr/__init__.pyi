from . import distributed, errors, integrations, metrics
from .errors import (
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
from .estimator.estimator import LocalRedundancy, estimate
from .estimator.loss import redundancy_loss
from .estimator.predictive import Bernoulli, Categorical, DiagonalGaussian, Gaussian
from .estimator.result import Estimate, paired_difference
from .estimator.statistics import memorization_gain, regression_memorization_bound
from .ghost import per_sample_grad_sq_norms, support_report
from .inputs import (
    GaussianInputs,
    GaussianSeries,
    NoiseImages,
    ShapeImages,
    TensorInputs,
    TokenInputs,
)
from .integrations import Monitor
from .metrics.gradients import gradient_noise_scale
from .metrics.probes import memorization_capacity

__version__: str

__all__ = [
    "Bernoulli",
    "Categorical",
    "DiagonalGaussian",
    "DistributedError",
    "Estimate",
    "FastlrError",
    "FastlrWarning",
    "Gaussian",
    "GaussianInputs",
    "GaussianSeries",
    "HiddenParameterError",
    "InputError",
    "InteractionError",
    "LocalRedundancy",
    "ModelError",
    "Monitor",
    "NoiseImages",
    "NonFiniteError",
    "NonlinearBackwardError",
    "RandomForwardError",
    "ShapeImages",
    "TensorInputs",
    "TokenInputs",
    "distributed",
    "errors",
    "estimate",
    "gradient_noise_scale",
    "integrations",
    "memorization_capacity",
    "memorization_gain",
    "metrics",
    "paired_difference",
    "per_sample_grad_sq_norms",
    "redundancy_loss",
    "regression_memorization_bound",
    "support_report",
]

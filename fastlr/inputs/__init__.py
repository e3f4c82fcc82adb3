"""Synthetic and user-supplied inputs: every batch is a pure function of (seed, sample index).

The lower bound of the paper holds for any inputs that do not depend on the labels (Theorem 3.2);
what matters is that they make the network's capacity visible. All generators here draw from one
counter-based generator (Philox4x32-10 under the 64-bit seed, one stream for each class), so that
sample i has the same bits on every device, in every chunk and on every rank, and the same images
can be used at every measurement of a run.

Anything with a method ``batch(start, stop, *, seed, device, dtype)`` that is such a pure function
can stand in for these.
"""

from fastlr.inputs.base import Batch, Inputs
from fastlr.inputs.fitted import GaussianInputs
from fastlr.inputs.synthetic import IMAGENET, GaussianSeries, NoiseImages, ShapeImages, TokenInputs
from fastlr.inputs.user import TensorInputs

__all__ = [
    "IMAGENET",
    "Batch",
    "GaussianInputs",
    "GaussianSeries",
    "Inputs",
    "NoiseImages",
    "ShapeImages",
    "TensorInputs",
    "TokenInputs",
]

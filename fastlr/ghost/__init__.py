"""Per-sample squared gradient norms of any module by a walk over the autograd graph.

Random samples of every measurement are compared with plain autograd.
"""

from fastlr.ghost.api import per_sample_grad_sq_norms, support_report
from fastlr.ghost.engine import ChunkNorms, Engine
from fastlr.ghost.report import ParameterSupport, SupportReport

__all__ = [
    "ChunkNorms",
    "Engine",
    "ParameterSupport",
    "SupportReport",
    "per_sample_grad_sq_norms",
    "support_report",
]

"""Every op in plain torch: the definitions, with the names and signatures of their fast twins."""

from fastlr.ops.reference.reductions import all_reduce, reduce_sq_norm

__all__ = ["all_reduce", "reduce_sq_norm"]

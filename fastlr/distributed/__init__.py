"""Many processes: shared estimates, sharded models, sums over ranks in a fixed order.

The inputs of an estimate are shared by the ranks.
"""

from __future__ import annotations

from fastlr.distributed.connection import connect
from fastlr.distributed.ddp import ddp_comm_hook
from fastlr.distributed.fully_sharded import full_params
from fastlr.distributed.reductions import all_reduce, reduce_sq_norm
from fastlr.distributed.sharding import sharded

__all__ = ["all_reduce", "connect", "ddp_comm_hook", "full_params", "reduce_sq_norm", "sharded"]

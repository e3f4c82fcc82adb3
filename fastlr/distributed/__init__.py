"""Many processes: estimates whose inputs are shared, and sums over ranks with a fixed order of additions."""

from __future__ import annotations

from fastlr.distributed.connection import connect
from fastlr.distributed.ddp import ddp_comm_hook
from fastlr.distributed.reductions import all_reduce, reduce_sq_norm
from fastlr.distributed.sharding import sharded

__all__ = ["all_reduce", "connect", "ddp_comm_hook", "reduce_sq_norm", "sharded"]

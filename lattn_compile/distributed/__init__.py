"""More than one device, by torch's own engines: DTensor, FSDP2, DDP, distributed checkpoints. docs/distributed.md.

Importing this package makes the `lattn::` ops take DTensors (`sharding.py`).
"""

from __future__ import annotations

from lattn_compile.distributed import sharding
from lattn_compile.distributed.checkpoint import load, save
from lattn_compile.distributed.context import before, context_parallel
from lattn_compile.distributed.ranks import check_same_recipe, meet, together

__all__ = ["before", "check_same_recipe", "context_parallel", "load", "meet", "save", "together"]

sharding.register()

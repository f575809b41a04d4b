"""The ops `lattn::chunk`, `lattn::decode` and `lattn::replay`, registered on import; kernels are imported when called.

Schemas, fakes and gradients stand in a file an op; what they share in `call.py` and `options.py`. `validate.py` refuses
bad input, `segments.py` turns lengths into runs of tokens, `dispatch.py` picks the kernel, `cache_tag.py` keeps graphs
that another version compiled from being called.
"""

from __future__ import annotations

from lattn_compile.ops import cache_tag, chunk, decode, recorded, replay
from lattn_compile.ops.decode import CHECKPOINT_EVERY, checkpoint_interval

__all__ = ["CHECKPOINT_EVERY", "checkpoint_interval", "chunk", "decode", "recorded", "replay"]

cache_tag.install()

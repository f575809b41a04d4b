"""The ops `lattn::chunk`, `lattn::decode` and `lattn::replay`, registered on import; kernels are imported when called.

Schemas, fakes and gradients stand in a file an op; what they share in `call.py` and `options.py`. `validate.py` refuses
bad input, `segments.py` turns lengths into runs of tokens, `dispatch.py` picks the kernel.
"""

from __future__ import annotations

from lattn_compile.ops import chunk, decode, replay
from lattn_compile.ops.decode import CHECKPOINT_EVERY, checkpoint_interval

__all__ = ["CHECKPOINT_EVERY", "checkpoint_interval", "chunk", "decode", "replay"]

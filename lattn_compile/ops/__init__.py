"""The ops `lattn::chunk` and `lattn::decode`, registered on import; torch only, kernels are imported when called.

Schemas, fakes and gradients stand in `chunk.py` and `decode.py`; what both share in `call.py`. `validate.py` refuses
bad input, `segments.py` turns lengths into runs of tokens, `dispatch.py` picks the kernel.
"""

from __future__ import annotations

from lattn_compile.ops import chunk, decode
from lattn_compile.ops.decode import CHECKPOINT_EVERY, checkpoint_interval

__all__ = ["CHECKPOINT_EVERY", "checkpoint_interval", "chunk", "decode"]

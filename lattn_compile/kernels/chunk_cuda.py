"""The chunk form's kernels that are written in Triton's Gluon, of NVIDIA's GPUs."""

from lattn_compile.kernels.chunk_channel_cuda import block_cuda
from lattn_compile.kernels.chunk_keys_cuda import keys_cuda
from lattn_compile.kernels.chunk_levels_cuda import levels_cuda
from lattn_compile.kernels.chunk_state_cuda import carry_back_cuda, carry_cuda

__all__ = ["block_cuda", "carry_back_cuda", "carry_cuda", "keys_cuda", "levels_cuda"]

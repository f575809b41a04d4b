"""Tiny, randomly initialised hybrid models from transformers' own classes, and how many linear layers each has."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

# K != V and HV != H wherever the class allows it: equal sizes hide transposes and head mix-ups.
_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}


def _sizes(layers: int) -> dict[str, Any]:
    # One layer of full attention at the end: transformers' caches want one.
    types = ["linear_attention"] * (layers - 1) + ["full_attention"]
    return {**_COMMON, "num_hidden_layers": layers, "layer_types": types}


NAMES = ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid")


def build(name: str, *, seed: int = 0, layers: int = 4) -> tuple[torch.nn.Module, int]:
    """`(model in float32 and eval mode, number of its linear-attention layers)`."""
    torch.manual_seed(seed)
    model = _BUILDERS[name](layers)
    with torch.no_grad():
        for parameter in model.parameters():
            # The default init keeps logits so small that differences between modes drown in rounding.
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    linear = sum(1 for n, _ in model.named_modules() if n.endswith(("linear_attn", "linear_attention")))
    return model.eval().float(), linear or _count_linear(model)


@contextlib.contextmanager
def torch_alone(model: torch.nn.Module) -> Iterator[None]:
    """Inside, `model` itself runs transformers' torch path, also where flash-linear-attention is installed: that has no
    float64, float32 products in tf32, and with some Triton versions refuses to train a gated delta rule on Hopper."""
    module = sys.modules[type(model).__module__]
    with contextlib.ExitStack() as stack:
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and (own := inspect.unwrap(function)) is not function:
                stack.enter_context(mock.patch.object(module, name, own))
        yield


def _count_linear(model: torch.nn.Module) -> int:
    return sum("DeltaNet" in type(m).__name__ or "DeltaAttention" in type(m).__name__ for m in model.modules())


def _qwen3_next(layers: int) -> torch.nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_sizes(layers),
        **_LINEAR,
        num_experts=0,
        num_experts_per_tok=1,
        decoder_sparse_step=1,
        mlp_only_layers=list(range(layers)),
    )
    return Qwen3NextForCausalLM(config)


def _qwen3_5(layers: int) -> torch.nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_sizes(layers), **_LINEAR))


def _olmo_hybrid(layers: int) -> torch.nn.Module:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    return OlmoHybridForCausalLM(OlmoHybridConfig(**_sizes(layers), **_LINEAR))


def _kimi_linear(layers: int) -> torch.nn.Module:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_num_heads=4,
        linear_head_dim=16,
        linear_conv_kernel_dim=4,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=layers,
        layer_types=["linear_attention"] * (layers - 1) + ["full_attention"],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return KimiLinearForCausalLM(config)


_BUILDERS = {
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "kimi_linear": _kimi_linear,
    "olmo_hybrid": _olmo_hybrid,
}

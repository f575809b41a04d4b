"""The two models, and how a policy gets into their linear layers.

A layer calls transformers' chunk function by its name in the library's module. `recurrence` puts a function of ours
there, which computes the exact prefix and then the suffix under a policy with `lc.linear_attention`: what the backend
makes of the same layer inside `lc.training_phase` (tests/test_quality.py holds the two equal). Here it is done without
a compile, because forty policies and training arms would each need one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lattn_compile as lc

__all__ = ["MODELS", "Size", "build", "exact", "linear_layers", "logits_of", "recurrence", "under"]

Layer = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Number of the linear layer, q, k, v, g, beta -> o."""

_FUNCTIONS = {
    "transformers.models.qwen3_next.modeling_qwen3_next": "torch_chunk_gated_delta_rule",
    "transformers.models.kimi_linear.modeling_kimi_linear": "chunk_kimi_delta_attention",
}


@dataclass(frozen=True)
class Size:
    """Sizes of a model: `linear` layers behind one layer of attention; `heads` of each, K = V = `dim`."""

    hidden: int = 256
    inner: int = 640
    linear: int = 3
    heads: int = 2
    dim: int = 128
    positions: int = 4224


def _shared(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": 256,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.linear + 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": size.positions,
        # Attention comes first: it sees bytes, not what precedes them, so it cannot look up what followed a key.
        "layer_types": ["full_attention"] + ["linear_attention"] * size.linear,
        "use_cache": False,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gdn(size: Size) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    layers = size.linear + 1
    config = Qwen3NextConfig(
        **_shared(size),
        head_dim=max(16, size.hidden // 4),
        linear_num_key_heads=max(1, size.heads // 2),
        linear_num_value_heads=size.heads,
        linear_key_head_dim=size.dim,
        linear_value_head_dim=size.dim,
        num_experts=1,  # the constructor wants some; mlp_only_layers leaves no layer to use them
        mlp_only_layers=list(range(layers)),
    )
    return Qwen3NextForCausalLM(config)


def _kda(size: Size) -> Any:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        **_shared(size),
        kv_lora_rank=size.hidden // 2,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=max(16, size.hidden // 4),
        linear_num_heads=size.heads,
        linear_head_dim=size.dim,
        mlp_layer_types=["dense"] * (size.linear + 1),
    )
    return KimiLinearForCausalLM(config)


MODELS: dict[str, Callable[[Size], Any]] = {"gdn": _gdn, "kda": _kda}
"""Qwen3-Next's classes (Gated DeltaNet) and Kimi-Linear's (Kimi Delta Attention), without experts."""


def build(kind: str, size: Size, seed: int) -> Any:
    """A new model over bytes, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[kind](size).float()
        _spread(model)
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(module, "dt_bias"):
                _slow_decay(module.get_parameter("A_log"), module.get_parameter("dt_bias"))
            if hasattr(module, "conv1d"):
                _look_up(module)
    return model


_WRITERS = ("o_proj", "out_proj", "down_proj")


@torch.no_grad()
def _spread(model: Any) -> None:
    """Matrices that keep the size of what goes through them: the classes' own (0.02 for all, short convolutions
    included) are for widths of thousands. What layers add to the residual stream is smaller, so that the byte itself
    is what the next layer sees."""
    for name, p in model.named_parameters():
        if "embed" in name:
            p.normal_(0.0, 0.1)
        elif p.dim() == 2:
            p.normal_(0.0, (0.3 if name.split(".")[-2] in _WRITERS else 1.0) * p.shape[1] ** -0.5)


@torch.no_grad()
def _look_up(module: Any) -> None:
    """Queries and keys begin as the same projection, of the byte itself and of the byte before: what followed a byte
    can be looked up from the first step on, and need not be found by chance, which takes most of a short training."""
    taps = module.conv1d.weight[:, 0]
    if hasattr(module, "in_proj_qkvz"):  # a block for each key head: q, k, v, z
        keys = module.key_dim
        block = module.in_proj_qkvz.weight.view(module.num_k_heads, -1, module.hidden_size)
        block[:, module.head_k_dim : 2 * module.head_k_dim] = block[:, : module.head_k_dim]
    else:
        keys = module.qkv_dim
        module.k_proj.weight.copy_(module.q_proj.weight)
    taps.uniform_(-0.1, 0.1)
    taps[:, -1] += 1.0
    taps[keys : 2 * keys] = taps[keys : 2 * keys].roll(-1, 1)


@torch.no_grad()
def _slow_decay(a_log: Tensor, dt_bias: Tensor) -> None:
    """Gates that remember for 10 to 10,000 tokens, spread evenly on a logarithmic scale, in random order: the classes'
    own values forget within a few tokens, and trained models have heads as slow as these."""
    a_log.zero_()
    count = dt_bias.numel()
    place = (torch.arange(count) + torch.rand(count))[torch.randperm(count)] / count
    step = (math.log(1e-4) + place * math.log(1e3)).exp().view_as(dt_bias)
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus


@contextlib.contextmanager
def recurrence(layer: Layer, layers: int) -> Iterator[None]:
    """Inside, the linear layers of both models compute `layer`; calls are numbered in turn, modulo `layers`."""
    calls = 0

    def stand_in(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
        nonlocal calls
        assert options.get("use_qk_l2norm_in_kernel") and options.get("initial_state") is None, options
        o = layer(calls % layers, q, k, v, g, beta)
        calls += 1
        return o, None

    modules = {importlib.import_module(name): function for name, function in _FUNCTIONS.items()}
    kept = {module: getattr(module, function) for module, function in modules.items()}
    for module, function in modules.items():
        setattr(module, function, stand_in)
    try:
        yield
    finally:
        for module, function in modules.items():
            setattr(module, function, kept[module])


_FAST = lc.Policy(lc.Fp32(), write=lc.Replay(16))
"""The exact recurrence in windows of 16 tokens; nothing is rounded, and Triton's replay kernels compute it."""
_STEPS = lc.Policy(lc.Fp32(), write=lc.Token())
"""The exact recurrence token by token."""


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cuda"


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    way: str = "fast",
    state: Any = None,
    keep: bool = False,
) -> tuple[Tensor, Any]:
    """Outputs, and with `keep` a dense final state.

    Args:
        way: "fast": what is fastest on the device; "steps": token by token; "chunk": the torch reference's chunks
            of 64. They differ by the order of sums only.
    """
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "initial_state": state, "output_final_state": keep}
    if way == "chunk" or (way == "fast" and not _has_kernels(q)):
        return lc.linear_attention(q, k, v, g, beta, **options)
    o, final = lc.linear_attention(q, k, v, g, beta, policy=_STEPS if way == "steps" else _FAST, **options)
    assert not isinstance(final, Tensor)
    return o, None if final is None else final.dense()


def under(policies: list[lc.Policy | None], prefix: int, way: str = "fast") -> Layer:
    """A layer whose first `prefix` tokens are exact and whose others are under the layer's policy (None: exact)."""

    def layer(i: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        policy = policies[i]
        if policy is None:
            return exact(q, k, v, g, beta, way=way)[0]
        head = (x[:, :prefix] for x in (q, k, v, g, beta))
        tail = (x[:, prefix:] for x in (q, k, v, g, beta))
        before, state = exact(*head, keep=True, way="steps" if _has_kernels(q) else "fast")
        after, _ = lc.linear_attention(*tail, policy=policy, initial_state=state, use_qk_l2norm_in_kernel=True)
        return torch.cat((before, after), 1)

    return layer


def linear_layers(model: Any) -> list[str]:
    """Paths of the linear layers, in order."""
    wanted = ("Qwen3NextGatedDeltaNet", "KimiLinearDeltaAttention")
    return [path for path, module in model.named_modules() if type(module).__name__ in wanted]


_NO_MASKS = {"full_attention": None, "linear_attention": None}
"""Causal, nothing padded. Left to itself, the library looks at the positions on the host."""


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """`[N, T, 256]` for `ids` `[N, T]`."""
    logits: Tensor = model(input_ids=ids.long(), attention_mask=_NO_MASKS, use_cache=False).logits
    return logits

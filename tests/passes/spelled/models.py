"""Whole models with and without a recurrence, and how each is called: a forward over T tokens, or one cached step."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import tiny_models

VOCABULARY = 97

# What every transformers config here shares.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


@contextlib.contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """transformers' chunk functions with chunks of `size` tokens, not 64: exported, one is as many rows of a loop."""
    modules = (
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for name in ("qwen3_next", "qwen3_5", "kimi_linear")
    )
    found = {
        inspect.unwrap(f)
        for module in modules
        for name, f in vars(module).items()
        if name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
    }
    defaults = [(f, f.__defaults__) for f in found]
    for f in found:
        assert f.__defaults__[0] == 64, "chunk_size"
        f.__defaults__ = (size, *f.__defaults__[1:])
    try:
        yield
    finally:
        for f, before in defaults:
            f.__defaults__ = before


def ids(batch: int, length: int, seed: int = 1) -> Tensor:
    """Token ids `[batch, length]`."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


class Logits(nn.Module):
    """A causal model over T tokens, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, use_cache=False).logits
        return logits


class Prefill(nn.Module):
    """A prompt: logits, and every tensor of the cache it leaves."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        out = self.model(input_ids, use_cache=True)
        return out.logits, *(x for *_, x in slots(_cache_of(out)))


class CachedStep(nn.Module):
    """A call of a causal model on a cache whose tensors are inputs.

    `forward(input_ids [B, T], *states)` writes the new recurrent and convolution states into `states`, as transformers'
    own cache does, and returns the logits, and MiniMax's states, which are replaced. `states` are those of `prefill`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.pattern: Any = None

    def prefill(self, prompt: Tensor) -> tuple[Tensor, ...]:
        """Run `prompt` and keep the cache it leaves as the pattern for later calls."""
        with torch.no_grad():
            self.pattern = _cache_of(self.model(prompt, use_cache=True))
        return tuple(x.detach().clone() for *_, x in slots(self.pattern))

    def forward(self, input_ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        cache = _copy(self.pattern)
        for (holder, key, _), state in zip(slots(cache), states, strict=True):
            holder[key] = state
        logits = self.model(input_ids, use_cache=True, **{self.argument: cache}).logits
        return logits, *(x for x in getattr(cache, "linear_cache", []) if isinstance(x, Tensor))


def _cache_of(out: Any) -> Any:
    return getattr(out, "cache", None) or out.past_key_values


def _copy(cache: Any) -> Any:
    new = copy.copy(cache)
    new.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in new.layers:
        vars(layer).update({k: dict(v) for k, v in vars(layer).items() if isinstance(v, dict)})
    if hasattr(cache, "linear_cache"):
        new.linear_cache = list(cache.linear_cache)
    return new


def slots(cache: Any) -> list[tuple[Any, Any, Tensor]]:
    """Every tensor of a cache with the dict or list that holds it."""
    holders: list[Any] = [vars(layer) for layer in cache.layers]
    holders += [v for h in holders for v in h.values() if isinstance(v, dict)]
    found = [(h, k, v) for h in holders for k, v in h.items() if isinstance(v, Tensor)]
    linear = getattr(cache, "linear_cache", [])
    return found + [(linear, i, v) for i, v in enumerate(linear) if isinstance(v, Tensor)]


def build(name: str, layers: int = 3) -> tuple[nn.Module, list[str]]:
    """`(tiny model in float32 and eval mode, paths of its recurrent layers)`; `layers`: of those in `tiny_models`, the
    last of which is one of attention."""
    if name in tiny_models.NAMES:
        model, _ = tiny_models.build(name, layers=layers)
    else:
        torch.manual_seed(0)
        model = _BUILDERS[name]().eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                # What a recurrence adds would drown in rounding under the default init.
                if parameter.ndim >= 2:
                    parameter.mul_(8.0)
    kinds = ("DeltaNet", "DeltaAttention", "Lightning", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "MambaLayer")
    return model, [n for n, m in model.named_modules() if any(k in type(m).__name__ for k in kinds)]


def _minimax() -> nn.Module:
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    types_ = ["linear_attention", "linear_attention", "full_attention"]
    config = MiniMaxConfig(
        **_COMMON, num_hidden_layers=3, layer_types=types_, block_size=16, num_local_experts=2, num_experts_per_tok=1
    )
    return MiniMaxForCausalLM(config)


def _mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}
    common = {k: v for k, v in _COMMON.items() if "attention" not in k and "position" not in k and "key_value" not in k}
    common.pop("intermediate_size")
    return Mamba2ForCausalLM(Mamba2Config(**common, **sizes, num_hidden_layers=2))


def _bamba() -> nn.Module:
    from transformers import BambaConfig, BambaForCausalLM

    return BambaForCausalLM(BambaConfig(**_COMMON, **_MAMBA, num_hidden_layers=3, attn_layer_indices=[2]))


def _falcon_h1() -> nn.Module:
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM(FalconH1Config(**_COMMON, **_MAMBA, mamba_d_ssm=64, num_hidden_layers=2))


def _granite() -> nn.Module:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_COMMON,
        **_MAMBA,
        num_hidden_layers=3,
        layer_types=["mamba", "mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=48,
    )
    return GraniteMoeHybridForCausalLM(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=2))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_COMMON, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "expand": 2, "time_step_rank": 2}
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, **sizes))


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "minimax": _minimax,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "llama": _llama,
    "mixtral": _mixtral,
    "mamba": _mamba,
}


class Retention(nn.Module):
    """A layer of RetNet: a fixed decay per head, group norm, a gate. `x [B, T, D]`, state `[B, H, K, V]`."""

    def __init__(self, width: int = 32, heads: int = 4, key: int = 8, value: int = 12, chunk: int = 8) -> None:
        super().__init__()
        self.heads, self.key, self.value, self.chunk = heads, key, value, chunk
        self.q, self.k = nn.Linear(width, heads * key, bias=False), nn.Linear(width, heads * key, bias=False)
        self.v, self.gate = nn.Linear(width, heads * value, bias=False), nn.Linear(width, heads * value, bias=False)
        self.norm = nn.GroupNorm(heads, heads * value, affine=False)
        self.out = nn.Linear(heads * value, width, bias=False)
        self.register_buffer("log_gamma", torch.log(1 - 2.0 ** (-5 - torch.arange(heads).float())))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.heads, self.key).transpose(1, 2)
        k = self.k(x).view(B, T, self.heads, self.key).transpose(1, 2) * self.key**-0.5
        return q, k, self.v(x).view(B, T, self.heads, self.value).transpose(1, 2)

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        B, T, _ = x.shape
        o = self.norm(o.transpose(1, 2).reshape(B * T, -1)).view(B, T, -1)
        y: Tensor = self.out(F.silu(self.gate(x)) * o)
        return y


class RetentionRecurrent(Retention):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)
        outputs = []
        for t in range(x.shape[1]):
            state = self.log_gamma.exp()[:, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
        return self.finish(x, torch.stack(outputs, 2)), state


class RetentionChunk(Retention):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(x)
        at = torch.arange(self.chunk, device=x.device)
        apart = (at[:, None] - at[None, :]).float()
        mask = torch.where(apart >= 0, (apart * self.log_gamma[:, None, None]).exp(), 0.0)
        into = ((at + 1) * self.log_gamma[:, None]).exp()[..., None]
        rest = ((self.chunk - 1 - at) * self.log_gamma[:, None]).exp()[..., None]
        whole = (self.chunk * self.log_gamma).exp()[:, None, None]
        outputs = []
        for q_i, k_i, v_i in zip(*(z.split(self.chunk, 2) for z in (q, k, v)), strict=True):
            inner = (q_i @ k_i.transpose(-1, -2) * mask) @ v_i
            outputs.append(inner + (q_i @ state) * into)
            state = whole * state + (k_i * rest).transpose(-1, -2) @ v_i
        return self.finish(x, torch.cat(outputs, 2)), state


class RetentionParallel(Retention):
    """No state at all: the whole decay matrix."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        at = torch.arange(x.shape[1], device=x.device)
        apart = (at[:, None] - at[None, :]).float()
        mask = torch.where(apart >= 0, (apart * self.log_gamma[:, None, None]).exp(), 0.0)
        return self.finish(x, (q @ k.transpose(-1, -2) * mask) @ v)


# Models without a recurrence that this library knows.


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.second = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, (a, b) in enumerate(zip(self.first, self.second, strict=True)):
            x = x + self.norms[2 * i + 1](b(F.relu(self.norms[2 * i](a(x)))))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


class ConvSSM(nn.Module):
    """S4D as a long convolution through an FFT, behind a short causal one."""

    def __init__(self, width: int = 8, state: int = 4) -> None:
        super().__init__()
        self.short = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.log_a = nn.Parameter(torch.rand(width, state))
        self.frequency = nn.Parameter(torch.rand(width, state) * 3)
        self.c = nn.Parameter(torch.randn(width, state))
        self.log_dt = nn.Parameter(torch.rand(width) - 4)
        self.d = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        x = F.silu(self.short(x.transpose(1, 2))[..., :T])
        a_dt = torch.complex(-self.log_a.exp(), self.frequency) * self.log_dt.exp()[:, None]
        powers = torch.exp(a_dt[..., None] * torch.arange(T, device=x.device))
        kernel = 2 * torch.einsum("dn,dnt->dt", self.c.to(powers.dtype) * (a_dt.exp() - 1), powers).real
        y = torch.fft.irfft(torch.fft.rfft(x, n=2 * T) * torch.fft.rfft(kernel, n=2 * T), n=2 * T)[..., :T]
        return (y + x * self.d[:, None]).transpose(1, 2)


class Encoder(nn.Module):
    """A ViT: patches, learned positions, blocks that spell their attention out."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.randn(1, 5, width))
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for i, qkv in enumerate(self.qkv):
            q, k, v = qkv(self.norms[2 * i](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
            x = x + self.out[i]((weights @ v).transpose(1, 2).flatten(2))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return x[:, 0]


class LSTMLoop(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1), h, c


class GatedRNN(nn.Module):
    """An elementwise recurrence, one number a channel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.z, self.u = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z, u = torch.sigmoid(self.z(x)), self.u(x)
        outputs = []
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * u[:, t]
            outputs.append(h)
        return torch.stack(outputs, 1), h


class MergedLoRA(nn.Module):
    """Weights merged on the fly: `(w * 0.9 + a @ b)` reads like a state with a decay and a write."""

    def __init__(self, width: int = 8, rank: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, width, width))
        self.a, self.b = nn.Parameter(torch.randn(2, width, rank)), nn.Parameter(torch.randn(2, rank, width))

    def forward(self, x: Tensor) -> Tensor:
        for w, a, b in zip(self.w, self.a, self.b, strict=True):
            x = torch.tanh(x @ (w + 0.5 * (a @ b)))
        return x


class RelativeBias(nn.Module):
    """Attention of T5: bucketed relative positions added to the logits."""

    def __init__(self, width: int = 16, heads: int = 2, buckets: int = 8) -> None:
        super().__init__()
        self.heads, self.buckets = heads, buckets
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.bias = nn.Embedding(buckets, heads)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        apart = (at[:, None] - at[None, :]).clamp(min=0)
        large = (torch.log(apart.float().clamp(min=1) / 4) / math.log(4) * 4).long() + 4
        bucket = torch.where(apart < 4, apart, large.clamp(max=self.buckets - 1))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) + self.bias(bucket).permute(2, 0, 1)
        logits = logits.masked_fill(at[None, :] > at[:, None], float("-inf"))
        y: Tensor = self.out((torch.softmax(logits, -1) @ v).transpose(1, 2).flatten(2))
        return y


class TrainingStep(nn.Module):
    """Gradients by hand, accumulated over two micro-batches, then momentum, SGD and an average of the weights.

    Every one of them is "old state times a number, plus something", in place, and the gradient is an outer product.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(width, width))
        self.register_buffer("ema", torch.randn(width, width))
        self.register_buffer("momentum", torch.zeros(width, width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gradient = torch.zeros_like(self.w)
        loss = torch.zeros((), device=x.device)
        for x_i, y_i in zip(x.chunk(2), y.chunk(2), strict=True):
            error = x_i @ self.w - y_i
            loss = loss + error.square().mean()
            gradient = gradient + x_i.T @ error / x_i.shape[0]
        self.momentum.mul_(0.9).add_(gradient, alpha=0.1)
        self.w.sub_(0.1 * self.momentum)
        self.ema.mul_(0.99).add_(self.w, alpha=0.01)
        return loss


class Whitening(nn.Module):
    """A running covariance and Shampoo's preconditioner: decayed sums of outer products that nothing queries."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("covariance", torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        centred = x - self.mean
        self.covariance.mul_(0.9).add_(centred.T @ centred / x.shape[0], alpha=0.1)
        return centred @ torch.linalg.inv(torch.linalg.cholesky(self.covariance)).T


def without_recurrence() -> dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]]:
    """Model and example inputs by name."""

    def tokens(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return Logits(build(name)[0]), (ids(2, 9),)

    def made(make: Callable[[], nn.Module], *sizes: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return make().eval(), tuple(torch.randn(s) for s in sizes)

    def cached() -> tuple[nn.Module, tuple[Tensor, ...]]:
        step = CachedStep(build("llama")[0])
        return step, (ids(2, 1), *step.prefill(ids(2, 6)))

    return {
        "llama": lambda: tokens("llama"),
        "llama step": cached,
        "mixtral": lambda: tokens("mixtral"),
        "resnet": lambda: made(ResNet, (2, 3, 8, 8)),
        "conv ssm": lambda: made(ConvSSM, (2, 16, 8)),
        "encoder": lambda: made(Encoder, (2, 3, 8, 8)),
        "lstm": lambda: made(LSTMLoop, (2, 5, 8), (2, 8), (2, 8)),
        "gated rnn": lambda: made(GatedRNN, (2, 5, 8), (2, 8)),
        "merged lora": lambda: made(MergedLoRA, (3, 8)),
        "relative bias": lambda: made(RelativeBias, (2, 7, 16)),
        "training step": lambda: made(TrainingStep, (8, 8), (8, 8)),
        "training step, batch 1": lambda: made(TrainingStep, (1, 8), (1, 8)),
        "training step, batch 2": lambda: made(TrainingStep, (2, 8), (2, 8)),
        "whitening": lambda: made(Whitening, (8, 8)),
        "whitening, batch 1": lambda: made(Whitening, (1, 8)),
    }


def with_own_functions(forward: Any) -> Any:
    """`forward` of a layer, in a module of its own where the library's recurrences are copies: other objects, other
    code, same meaning."""
    forward = inspect.unwrap(forward)
    module = types.ModuleType(f"own_{forward.__module__}")
    variables = vars(module)
    variables.update({k: v for k, v in forward.__globals__.items() if k not in variables})
    names = [n for n in forward.__code__.co_names if n.endswith(("delta_rule", "delta_attention"))]
    assert names
    for name in names:
        variables[name] = _copied(variables[name], variables)
    sys.modules[module.__name__] = module  # Dynamo looks there for what a frame's variables are
    return _copied(forward, variables)


def _copied(function: Any, variables: dict[str, Any]) -> Any:
    function = inspect.unwrap(function)
    copied = types.FunctionType(
        function.__code__.replace(), variables, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied

"""Random spellings of one recurrence, and random near misses of it: a hypothesis strategy.

A `Spelling` is data: one choice per freedom that an author has. Calling it computes the recurrence that way;
`meaning` says what the plain loop needs to agree. A spelling with a `mutation` is wrong in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.spelled import products
from tests.passes.spelled.mutations import MUTATIONS, Token, applies
from tests.passes.spelled.registry import Args

LAYOUTS = ("bh", "n", "hb")
ACCESSES = ("index", "select", "unbind", "split", "chunk", "time_major", "head_first", "narrow")
HEAD_DECAYS = (
    "exp", "exp_ahead", "exp2", "double_minus", "reciprocal", "expm1", "cumsum", "sigmoid", "one_minus_sigmoid",
    "softplus", "mamba", "power", "constant", "constants",
)  # fmt: skip
CHANNEL_DECAYS = HEAD_DECAYS[:-2]
DECAY_USES = ("mul", "mul_swapped", "minus_forgotten", "einsum", "in_place", "lerp")
FOLDS = ("error", "erase_then_write", "householder", "lerp", "mixture", "negated", "undecayed", "baddbmm")
BETAS = ("on_update", "on_key", "on_key_ahead", "on_key_and_value", "root")
SCALES = ("none", "q_ahead", "q_step", "o_step", "o_end", "o_divided")
COLLECTS = ("stack", "stack_then_transpose", "cat", "buffer", "copy")
NOISES = ("none", "clone", "to", "reshape", "transposes", "times_one")
MASKS = ("where", "where_not", "lerp", "float", "difference", "clear", "clear_by_product")
CONSTANT = 0.9


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One way to write it. Sizes, then what is computed, then how, then what is wrong with it."""

    tokens: int
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str  # float64 | float32 | upcast: float32 inputs, computed in float64
    rule: str
    decay: str
    group: int  # value heads per key head
    stored: str  # none | bfloat16 | float16
    start: str  # given | zeros | nothing
    layout: str
    values_first: bool
    access: str
    decay_form: str
    decay_use: str
    fold: str
    beta: str
    beta_form: str
    scale: str
    erase_product: str
    write_product: str
    read_product: str
    collect: str
    noise: str
    mask: str  # none, or how tokens are skipped, or the state cleared before them
    mutation: str | None

    def arguments(self) -> tuple[int, str, dict[str, Any]]:
        """For `make_args`."""
        sizes = {"batch": self.batch, "heads": self.heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        return self.tokens, self.decay, {**sizes, "dtype": dtype}

    def meaning(self, a: Args) -> dict[str, Any]:
        """Keyword arguments of `harness.recurrence`, whatever the mutation."""
        key_heads = self.heads // self.group
        a = Args(*(x.double() for x in a))
        if self.mask != "none":
            return self._masked_meaning(a)
        return {
            "q": a.q[:, :, :key_heads],
            "k": a.k[:, :, :key_heads],
            "v": a.v,
            "g": self._log_decay(a.g),
            "beta": self._strength(a.beta) if self.rule == "delta" else None,
            "S": a.S if self.start == "given" else None,
            "rule": self.rule,
            "scale": 1.0 if self.scale == "none" else self._scale,
            "stored": self._stored,
        }

    def _masked_meaning(self, a: Args) -> dict[str, Any]:
        plain = replace(self, mask="none").meaning(a)
        live, g, beta = self._live(a.beta)[..., None], plain["g"], plain["beta"]
        wide = live if g is None else live.reshape(*live.shape, *[1] * (g.dim() - 3))
        if self.mask.startswith("clear"):
            return {**plain, "g": torch.where(wide, g, -math.inf)}
        beta = torch.ones_like(a.beta) if beta is None else beta
        return {**plain, "g": None if g is None else torch.where(wide, g, 0.0), "beta": beta * live}

    def _live(self, beta: Tensor) -> Tensor:
        """[B, T]: which tokens are not masked."""
        return beta[..., 0] > 0.4

    @property
    def _stored(self) -> torch.dtype | None:
        return None if self.stored == "none" else getattr(torch, self.stored)

    @property
    def _scale(self) -> float:
        return self.key_dim**-0.5

    def _strength(self, beta: Tensor) -> Tensor:
        return {"raw": beta, "sigmoid": beta.sigmoid(), "doubled": 2 * beta.sigmoid()}[self.beta_form]

    def _log_decay(self, g: Tensor) -> Tensor | None:
        match self.decay_form:
            case "none":
                return None
            case "sigmoid":
                return F.logsigmoid(g)
            case "one_minus_sigmoid":
                return F.logsigmoid(-g)
            case "softplus":
                return -F.softplus(g)
            case "mamba":
                return -torch.exp(g)
            case "power":
                return F.logsigmoid(g) / 4
            case "constant":
                return torch.full_like(g, CONSTANT).log()
            case "constants":
                return self._constants(g).log().expand(g.shape)
        return g

    def _constants(self, like: Tensor) -> Tensor:
        return 1 - 2.0 ** (-3 - torch.arange(self.heads, dtype=like.dtype))

    def _decays(self, g: Tensor) -> Tensor:
        """All tokens' decays: [B, T, H] or [B, T, H, K]."""
        match self.decay_form:
            case "exp2":
                return torch.exp2(g * (1 / math.log(2)))
            case "double_minus":
                return torch.exp(-torch.neg(g))
            case "reciprocal":
                return 1 / torch.exp(-g)
            case "expm1":
                return torch.expm1(g) + 1
            case "sigmoid":
                return g.sigmoid()
            case "one_minus_sigmoid":
                return 1 - torch.sigmoid(g)
            case "softplus":
                return torch.exp(-F.softplus(g))
            case "mamba":
                return torch.exp(-torch.exp(g))
            case "power":
                return torch.sigmoid(g) ** 0.25
            case "cumsum":
                total = g.cumsum(1)
                return torch.cat([total[:, :1], total[:, 1:] - total[:, :-1]], 1).exp()
            case "constants":
                return self._constants(g).expand(g.shape)
        return g.exp()

    def _at(self, x: Tensor) -> list[Tensor]:
        """[B, T, H, ...] as T tensors [B, H, ...]."""
        steps = range(self.tokens)
        match self.access:
            case "select":
                return [x.select(1, t) for t in steps]
            case "unbind":
                return list(x.unbind(1))
            case "split":
                return [y.squeeze(1) for y in x.split(1, dim=1)]
            case "chunk":
                return [y[:, 0] for y in x.chunk(self.tokens, dim=1)]
            case "time_major":
                return list(x.transpose(0, 1).contiguous())
            case "head_first":
                return [x.transpose(1, 2)[:, :, t] for t in steps]
            case "narrow":
                return [x.narrow(1, t, 1).squeeze(1) for t in steps]
        return [x[:, t] for t in steps]

    def _fold_heads(self, x: Tensor) -> Tensor:
        """[B, H, ...] to the axes of this layout."""
        if self.layout == "n":
            return x.reshape(self.batch * self.heads, *x.shape[2:])
        return x.transpose(0, 1) if self.layout == "hb" else x

    def _unfold_heads(self, x: Tensor) -> Tensor:
        if self.layout == "n":
            return x.unflatten(0, (self.batch, self.heads))
        return x.transpose(0, 1) if self.layout == "hb" else x

    def _noisy(self, S: Tensor) -> Tensor:
        match self.noise:
            case "clone":
                return S.clone()
            case "to":
                return S.to(S.dtype).contiguous()
            case "reshape":
                return S.reshape(*S.shape[:-2], -1).reshape(S.shape)
            case "transposes":
                return S.transpose(-1, -2).contiguous().mT
            case "times_one":
                return S * 1.0
        return S

    def _kept(self, S: Tensor) -> Tensor:
        return S if self._stored is None else S.to(self._stored)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        if self.dtype == "upcast":
            q, k, v, g, beta, S = (x.double() for x in (q, k, v, g, beta, S))
        if self.group > 1:
            q, k = (x[:, :, : self.heads // self.group].repeat_interleave(self.group, dim=2) for x in (q, k))
        if self.scale == "q_ahead":
            q = q * self._scale
        live = self._at(self._live(beta)[..., None].expand(beta.shape)) if self.mask != "none" else [None] * self.tokens
        beta = self._strength(beta)
        if self.beta == "root" and self.rule == "delta":
            k, v, beta = k * beta.sqrt()[..., None], v * beta.sqrt()[..., None], torch.ones_like(beta)
        kb = self._at(k * beta[..., None]) if self.beta == "on_key_ahead" else [None] * self.tokens
        ahead = self.decay_form not in ("exp", "constant", "none")
        decays = self._at(self._decays(g) if ahead else g)
        columns = zip(*(self._at(x) for x in (q, k, v, beta)), decays, kb, live, strict=True)

        state: Tensor | None = self._fold_heads(S.mT if self.values_first else S)
        if self.start != "given":
            state = torch.zeros_like(state) if self.start == "zeros" else None
        state = None if state is None else self._kept(state)
        outs: list[Tensor] = []
        older = last = state
        for qt, kt, vt, bt, at, kbt, mt in columns:
            fold = self._fold_heads
            token = Token(
                q=fold(qt), k=fold(kt), v=fold(vt), beta=fold(bt), decay=self._decay(fold(at), ahead),
                kb=None if kbt is None else fold(kbt), previous=last, older=older, outs=outs,
                live=None if mt is None else fold(mt),
            )  # fmt: skip
            older, (state, o) = last, self._step(token, None if state is None else state.to(q.dtype))
            state = last = self._kept(self._noisy(state))
            outs.append(self._unfold_heads(o))
        assert state is not None
        o = self._collect(outs, v)
        if self.scale == "o_end":
            o = o * self._scale
        final = self._unfold_heads(state.to(q.dtype))
        return o, final.mT if self.values_first else final

    def _decay(self, x: Tensor, ahead: bool) -> Tensor | float | None:
        if self.decay_form in ("none", "constant"):
            return None if self.decay_form == "none" else CONSTANT
        return x if ahead else torch.exp(x)

    def _step(self, token: Token, S: Tensor | None) -> tuple[Tensor, Tensor]:
        mutation = MUTATIONS[self.mutation] if self.mutation else None
        if mutation is not None and S is not None:
            S, source = mutation(self, token, S)
        elif S is None:
            u = token.v if self.rule == "additive" else token.beta[..., None] * token.v
            S = source = products.outer(self.write_product, token.k, u, self.values_first)
        else:
            S = source = self._masked(token, S) if token.live is not None else self.updated(token, S)
        q = token.q * self._scale if self.scale == "q_step" else token.q
        o = products.read(self.read_product, source, q, self.values_first)
        if self.scale == "o_step":
            o = self._scale * o
        return S, o / math.sqrt(self.key_dim) if self.scale == "o_divided" else o

    def _masked(self, token: Token, S: Tensor) -> Tensor:
        assert token.live is not None
        live = token.live[..., None, None]
        number = live.to(S.dtype)
        if self.mask.startswith("clear"):
            return self.updated(token, S.masked_fill(~live, 0.0) if self.mask == "clear" else S * number)
        new = self.updated(token, S)
        match self.mask:
            case "where_not":
                return torch.where(~live, S, new)
            case "lerp":
                return torch.lerp(S, new, number)
            case "float":
                return new * number + (1 - number) * S
            case "difference":
                return S + (new - S) * live
        return torch.where(live, new, S)

    def updated(self, token: Token, S: Tensor) -> Tensor:
        """One token's state after its write, as this spelling writes it."""
        k, v, b = token.k, token.v, token.beta.unsqueeze(-1)
        if self.rule == "additive":
            return self.add(self.decayed(S, token.decay), k, v)
        if self.fold == "undecayed" and self.decay != "channel":
            a = token.decay.unsqueeze(-1) if isinstance(token.decay, Tensor) else token.decay
            prediction = self.erase_read(S, k)
            u = b * (v - (prediction if a is None else a * prediction))
            return self.add(self.decayed(S, token.decay), k, u)
        S = self.decayed(S, token.decay)
        match self.fold:
            case "erase_then_write":
                S = S - products.outer(self.write_product, b * k, self.erase_read(S, k), self.values_first)
                return self.add(S, k, b * v)
            case "householder":
                M = torch.eye(self.key_dim, dtype=S.dtype) - b.unsqueeze(-1) * (k.unsqueeze(-1) @ k.unsqueeze(-2))
                return self.add(S @ M if self.values_first else M @ S, b * k, v)
            case "lerp":
                old = self.erase_read(S, k)
                return self.add(S, k, torch.lerp(old, v, b) - old)
            case "mixture":
                old = self.erase_read(S, k)
                S = S - products.outer(self.write_product, k, old, self.values_first)
                return self.add(S, k, b * v + (1 - b) * old)
            case "negated":
                wrong = self.erase_read(S, k) - v
                return S - products.outer(self.write_product, b * k, wrong, self.values_first)
            case "baddbmm":
                rows = (S.mT if self.values_first else S).reshape(-1, self.key_dim, self.value_dim)
                error = torch.baddbmm(v.reshape(-1, 1, self.value_dim), k.reshape(-1, 1, self.key_dim), rows, alpha=-1)
                return self.add(S, k, error.reshape(v.shape) * b)
        match self.beta:
            case "on_key" | "on_key_ahead":
                key = b * k if token.kb is None else token.kb
                return self.add(S, key, v - self.erase_read(S, k))
            case "on_key_and_value":
                return self.add(S, k, b * v - self.erase_read(S, k * b))
        return self.add(S, k, (v - self.erase_read(S, k)) * b)

    def erase_read(self, S: Tensor, k: Tensor) -> Tensor:
        return products.read(self.erase_product, S, k, self.values_first)

    def add(self, S: Tensor, k: Tensor, u: Tensor) -> Tensor:
        return products.add_outer(self.write_product, S, k, u, self.values_first)

    def decayed(self, S: Tensor, decay: Tensor | float | None) -> Tensor:
        if not isinstance(decay, Tensor):
            return S if decay is None else S * decay
        wide = decay[..., None, None]
        if self.decay == "channel":
            wide = decay.unsqueeze(-2) if self.values_first else decay.unsqueeze(-1)
        match self.decay_use:
            case "mul_swapped":
                return wide.expand_as(S) * S
            case "minus_forgotten":
                return S - (1 - wide) * S
            case "in_place":
                return S.clone().mul_(wide)
            case "lerp":
                return torch.lerp(torch.zeros_like(S), S, wide)
            case "einsum":
                letters = "bhxy" if S.ndim == 4 else "nxy"
                channel = ("y" if self.values_first else "x") if self.decay == "channel" else ""
                return torch.einsum(f"{letters[:-2]}{channel},{letters}->{letters}", decay, S)
        return S * wide

    def _collect(self, outs: list[Tensor], v: Tensor) -> Tensor:
        match self.collect:
            case "stack_then_transpose":
                return torch.stack(outs).permute(1, 0, 2, 3)
            case "cat":
                return torch.cat([o.unsqueeze(1) for o in outs], dim=1)
            case "buffer" | "copy":
                out = torch.zeros_like(v)
                for t, o in enumerate(outs):
                    if self.collect == "copy":
                        out[:, t].copy_(o)
                    else:
                        out[:, t] = o
                return out
        return torch.stack(outs, dim=1)


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    """Two of five are near misses.

    One seed decides all: drawn one by one, hypothesis would vary one choice of a spelling at a time.
    """
    random = draw(st.randoms(use_true_random=True))

    def one(*options: Any) -> Any:
        return random.choice(options)

    rule, decay = one("delta", "delta", "additive"), one("head", "channel", "none")
    start = one("given", "given", "given", "zeros", "nothing")
    forms = {"head": HEAD_DECAYS, "channel": CHANNEL_DECAYS, "none": ("none",)}[decay]
    tokens = one(1, 2, 3, 4, 5)
    choices: dict[str, Any] = {
        # With one token and no state before it, nothing is carried.
        "tokens": tokens if start == "given" else max(tokens, 2),
        "batch": one(2, 1),
        "heads": one(2, 1, 3),
        "key_dim": one(*[3, 2, 4] * 4, 1),
        "value_dim": one(*[4, 2, 3] * 4, 1),
        "dtype": one("float64", "float64", "float32", "upcast"),
        "rule": rule,
        "decay": decay,
        "group": 1,
        "stored": one(*["none"] * 9, "bfloat16", "float16"),
        "start": start,
        "layout": one(*LAYOUTS),
        "values_first": one(False, True),
        "access": one(*ACCESSES),
        "decay_form": one(*forms),
        "decay_use": one(*DECAY_USES),
        "fold": one(*["error"] * 4, *FOLDS[1:]),
        "beta": one(*BETAS),
        "beta_form": one("raw", "raw", "sigmoid", "doubled"),
        "scale": one(*SCALES),
        "erase_product": one(*products.READS),
        "write_product": one(*products.WRITES),
        "read_product": one(*products.READS),
        "collect": one(*COLLECTS),
        "noise": one("none", "none", *NOISES),
        "mask": "none",
        "mutation": None,
    }
    if start == "given" and choices["stored"] == "none" and one(False, False, False, True):
        choices["mask"] = one(*(m for m in MASKS if decay != "none" or not m.startswith("clear")))
    if choices["heads"] == 2 and one(False, False, False, True):
        choices["group"] = 2
    if choices["stored"] != "none":
        # Stored in 16 bits, the last bits of a float32 sum decide about a rounding.
        choices["dtype"] = "float64"
    spelling = Spelling(**choices)
    if one(False, False, False, True, True):
        # A near miss is judged by its values to 1e-9, and rounds nothing but what it means to.
        choices.update(stored="none", dtype="float64", mask="none")
        choices.update({name: max(choices[name], 2) for name in ("key_dim", "value_dim")})
        spelling = Spelling(**choices)
        choices["mutation"] = one(*(name for name in MUTATIONS if applies(name, spelling)))
        if choices["mutation"].startswith("transposed"):
            choices["value_dim"] = choices["key_dim"]
        spelling = Spelling(**choices)
    return spelling


# The plain choices, in the order in which `simplified` tries them.
_PLAIN: tuple[dict[str, Any], ...] = (
    {"noise": "none"},
    {"mask": "none"},
    {"collect": "stack"},
    {"scale": "none"},
    {"stored": "none"},
    {"group": 1},
    {"start": "given"},
    {"tokens": 1},
    {"tokens": 2},
    {"layout": "bh"},
    {"values_first": False},
    {"access": "index"},
    {"decay": "none", "decay_form": "none"},
    {"decay": "head", "decay_form": "exp"},
    {"decay_form": "exp"},
    {"decay_use": "mul"},
    {"fold": "error"},
    {"beta": "on_update"},
    {"beta_form": "raw"},
    {"rule": "additive"},
    {"erase_product": "mul_sum"},
    {"write_product": "mul"},
    {"read_product": "mul_sum"},
    {"dtype": "float64"},
    {"batch": 2},
    {"heads": 2},
    {"key_dim": 3},
    {"value_dim": 4},
    {"mutation": None},
)


def simplified(spelling: Spelling, fails: Callable[[Spelling], bool]) -> Spelling:
    """`spelling` with every plain choice with which it still fails."""
    for plain in _PLAIN:
        simpler = replace(spelling, **plain)
        legal = (simpler.decay == "none") == (simpler.decay_form == "none")
        if simpler != spelling and legal and fails(simpler):
            spelling = simpler
    return spelling

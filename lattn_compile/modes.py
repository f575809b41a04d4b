"""Write modes of the suffix and prefill options, as data: what a `Policy` is made of beside the state's format.

A write mode says when the recurrent state is rounded after the prefix (semantics, write modes of the suffix):

| mode | the state is rounded |
|---|---|
| `Exact()` | never |
| `Chunk(chunk_size)` | after every `chunk_size` tokens; inside a chunk everything is exact |
| `Token()` | after every token |
| `Replay(window, factors)` | every `window` tokens; in between, the updates are kept beside the anchor and replayed |
| `TwoPrecision(window, read, anchor)` | only in a read copy; the anchor itself advances exactly |

Nothing here computes: these are frozen, hashable, picklable values with a JSON form (`to_dict`), and a `PolicyError`
for every value that no mode has.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from lattn_compile.errors import FormatError, PolicyError, nearest
from lattn_compile.formats import Format, Fp8, from_dict, parse
from lattn_compile.formats.factors import FACTORS
from lattn_compile.strict import check_choice, check_int, check_keys, init_names, strict

__all__ = [
    "INVERSES",
    "MODES",
    "PREFILL_OPTIONS",
    "SITES",
    "BlockDoubling",
    "Chunk",
    "Exact",
    "Inverse",
    "Neumann",
    "NewtonSchulz",
    "Prefill",
    "Replay",
    "Token",
    "TwoPrecision",
    "WriteMode",
    "as_format",
    "instance_hint",
]

MAX_WINDOW = 64
ANCHORS = ("fp32", "bf16")

SITES = ("kk", "qk", "w", "u", "ws", "qs", "av", "kv")
"""Operand sites of the chunked prefill, by the two matrices that meet there: (K, K), (Q, K), (T, βK), (T, βV), (W, S),
(Q, S), (attention, V'), (K, V')."""

OPERANDS = (None, "int8", "fp8_e4m3", "nvfp4")

DELTA_SITES = ("kk", "w", "u", "ws")
"""Sites of the inverse and of what is erased: products that the additive rule does not have."""

KEY_SITES = ("kk", "qk", "ws", "qs")
"""Sites whose products sum over the key channels; the others sum over the tokens of a chunk."""

NVFP4_BLOCK = 16
PREFILL_TOKENS = 64
"""Tokens of a chunk of the prefix: with rounded operands its borders are part of the numbers."""

GRADIENTS = ("inverse", "series")

PREFILL_OPTIONS = ("prefill_operands", "prefill_inverse", "prefill_residual", "prefill_gradient")
"""A `Prefill` in the arguments of an op."""


def as_format(where: str, name: str, value: object) -> Format:
    """`value` as a `Format`: one already, or the spec string of one ("int8", "fp8_e4m3/128x1").

    Raises:
        FormatError: a string that names no format.
        PolicyError: anything else.
    """
    if isinstance(value, Format):
        return value
    if isinstance(value, str):
        return parse(value, argument=name)
    raise PolicyError(
        name,
        got=f"{where}({name}={value!r})",
        want="a format, such as Int8(block_v=64), Fp8() or Nvfp4()",
        remedy=instance_hint(value, Format) or "Give it one of lattn_compile's formats.",
    )


def instance_hint(value: object, base: type[Any]) -> str:
    """`Write Token().` for the class `Token` where one of its instances is meant, else nothing."""
    return f"Write {value.__name__}()." if isinstance(value, type) and issubclass(value, base) else ""


class WriteMode:
    """Base of the write modes. `mode` is the name in JSON and, where an op knows the mode, its `write` argument."""

    mode: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads back."""
        values = {n: getattr(self, n) for n in init_names(type(self))}
        return {"mode": self.mode, **{n: v.to_dict() if isinstance(v, Format) else v for n, v in values.items()}}

    @staticmethod
    def from_dict(data: object) -> WriteMode:
        """The write mode that `to_dict` wrote; a bare mode name stands for the mode with its defaults."""
        if isinstance(data, str):
            data = {"mode": data}
        if not isinstance(data, Mapping):
            raise PolicyError("write", got=repr(data), want='a dict such as {"mode": "token"}', remedy=_MODE_REMEDY)
        name = data.get("mode")
        if not isinstance(name, str) or name not in MODES:
            raise PolicyError(
                "write.mode",
                got=repr(name),
                want=f"one of {', '.join(MODES)}",
                remedy=_MODE_REMEDY + (nearest(name, MODES) if isinstance(name, str) else ""),
            )
        cls = MODES[name]
        check_keys(PolicyError, f'{{"mode": "{name}"}}', data, ["mode", *init_names(cls)])
        options = {k: v for k, v in data.items() if k != "mode"}
        if isinstance(options.get("read"), Mapping):
            options["read"] = from_dict(options["read"], argument="read")
        return cls(**options)


@strict(PolicyError)
@dataclass(frozen=True)
class Exact(WriteMode):
    """No quantization anywhere; the policy's state format is not used."""

    mode: ClassVar[str] = "exact"

    def __str__(self) -> str:
        return "exact"


@strict(PolicyError)
@dataclass(frozen=True)
class Chunk(WriteMode):
    """The state is rounded after every `chunk_size` tokens, counted from the prefix's end, as in chunked training."""

    chunk_size: int = 64
    mode: ClassVar[str] = "chunk"

    def __post_init__(self) -> None:
        check_int(PolicyError, "Chunk", "chunk_size", self.chunk_size, low=1)
        check_int(PolicyError, "Chunk", "chunk_size", self.chunk_size, low=1, high=2**31 - 1)  # a cursor is an int32

    def __str__(self) -> str:
        return f"chunk({self.chunk_size})"


@strict(PolicyError)
@dataclass(frozen=True)
class Token(WriteMode):
    """The state is rounded after every token: what a decode loop with a quantized cache does."""

    mode: ClassVar[str] = "token"

    def __str__(self) -> str:
        return "token"


@strict(PolicyError)
@dataclass(frozen=True)
class Replay(WriteMode):
    """An anchor is rounded every `window` tokens; the updates since are kept and replayed to read the state.

    Attributes:
        window: tokens between two roundings of the anchor, 1 to 64. With 1 and no factors this is the token mode.
        factors: what the kept key and update vectors are stored in: None (fp32), "bf16", or "fp8_e4m3" / "int8" with
            one scale per vector.
    """

    window: int = 8
    _: KW_ONLY
    factors: str | None = None
    mode: ClassVar[str] = "replay"

    def __post_init__(self) -> None:
        check_int(PolicyError, "Replay", "window", self.window, low=1, high=MAX_WINDOW)
        check_choice(PolicyError, "Replay", "factors", self.factors, FACTORS)

    def __str__(self) -> str:
        return f"replay({self.window}{f', {self.factors} factors' if self.factors else ''})"


@strict(PolicyError)
@dataclass(frozen=True)
class TwoPrecision(WriteMode):
    """Outputs are read from a quantized copy; the recurrence itself runs on an anchor that never sees the read error.

    It saves bandwidth, not memory. The policy's state format is not used, and its readout is "before_write".

    Attributes:
        window: tokens between two refreshes of the read copy, 1 to 64.
        read: format of the read copy.
        anchor: what the anchor is stored in, "fp32" or "bf16".
    """

    window: int = 16
    _: KW_ONLY
    read: Format = field(default_factory=lambda: Fp8(block_k=128, block_v=1))
    anchor: str = "fp32"
    mode: ClassVar[str] = "two_precision"

    def __post_init__(self) -> None:
        check_int(PolicyError, "TwoPrecision", "window", self.window, low=1, high=MAX_WINDOW)
        object.__setattr__(self, "read", as_format("TwoPrecision", "read", self.read))
        check_choice(PolicyError, "TwoPrecision", "anchor", self.anchor, ANCHORS)

    def __str__(self) -> str:
        return f"two_precision({self.window}, read {self.read}, anchor {self.anchor})"


MODES: dict[str, type[WriteMode]] = {c.mode: c for c in (Exact, Chunk, Token, Replay, TwoPrecision)}
_MODE_REMEDY = f"The modes are {', '.join(MODES)}."


class Inverse:
    """Base of the approximations to the inverse of `I + A` in chunk form. `method` is the name in JSON."""

    method: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads back."""
        return {"method": self.method, **{n: getattr(self, n) for n in init_names(type(self))}}

    @staticmethod
    def from_dict(data: object) -> Inverse:
        """The approximation that `to_dict` wrote.

        Raises:
            PolicyError: no such method, or options that it has not.
        """
        name = data.get("method") if isinstance(data, Mapping) else data
        if not isinstance(data, Mapping) or not isinstance(name, str) or name not in INVERSES:
            raise PolicyError(
                "inverse",
                got=repr(data),
                want=f'"exact" or a dict whose "method" is one of {", ".join(INVERSES)}',
                remedy="Correct the method's name." + (nearest(name, INVERSES) if isinstance(name, str) else ""),
            )
        cls = INVERSES[name]
        check_keys(PolicyError, f'{{"method": "{name}"}}', data, ["method", *init_names(cls)])
        return cls(**{k: v for k, v in data.items() if k != "method"})

    def __str__(self) -> str:
        """As ops are told: `neumann(7)`."""
        (name,) = init_names(type(self))
        return f"{self.method}({getattr(self, name)})"


@strict(PolicyError)
@dataclass(frozen=True)
class Neumann(Inverse):
    """The series `Σ_{i ≤ order} (−A)^i`; of the 64 tokens of a chunk, order 63 is all of it."""

    order: int
    method: ClassVar[str] = "neumann"

    def __post_init__(self) -> None:
        check_int(PolicyError, "Neumann", "order", self.order, low=1, high=PREFILL_TOKENS - 1)


@strict(PolicyError)
@dataclass(frozen=True)
class NewtonSchulz(Inverse):
    """`iterations` steps of `T ← T (2I − (I + A) T)` from `T = I`: the series up to order `2^iterations − 1`, so that
    6 steps, but for their rounding errors, are the inverse of a chunk."""

    iterations: int
    method: ClassVar[str] = "newton_schulz"

    def __post_init__(self) -> None:
        check_int(
            PolicyError, "NewtonSchulz", "iterations", self.iterations, low=1, high=PREFILL_TOKENS.bit_length() - 1
        )


@strict(PolicyError)
@dataclass(frozen=True)
class BlockDoubling(Inverse):
    """Repeated doubling inside diagonal blocks of `block` rows, combined exactly."""

    block: int = 16
    method: ClassVar[str] = "block_doubling"

    def __post_init__(self) -> None:
        check_choice(PolicyError, "BlockDoubling", "block", self.block, (8, 16))


INVERSES: dict[str, type[Inverse]] = {c.method: c for c in (Neumann, NewtonSchulz, BlockDoubling)}


@strict(PolicyError)
@dataclass(frozen=True)
class Prefill:
    """Rounded matrix operands and an approximate inverse in the chunked prefix.

    Attributes:
        operands: site name -> "int8", "fp8_e4m3", "nvfp4", the format itself (`Fp8()`) or None (`SITES` lists the
            sites). Kept as a tuple of (site, name) pairs in the order of `SITES`, so that the value is hashable; sites
            set to None are dropped. Scales are one for each row of the left and each column of the right operand, so a
            format that says another tile is refused.
        inverse: "exact" (block forward substitution), `Neumann`, `NewtonSchulz` or `BlockDoubling`.
        max_residual: an approximate inverse whose residual `‖(I + A) T − I‖` (Frobenius, of one chunk and head) exceeds
            this is reported.
        gradient: "inverse": that of the exact inverse, taken at the approximate one, `dA = −Tᵀ dT Tᵀ`; "series": the
            derivative of what was computed, for `Neumann` and `NewtonSchulz`.
    """

    operands: Mapping[str, str | Format | None] | tuple[tuple[str, str], ...] = ()
    _: KW_ONLY
    inverse: str | Inverse = "exact"
    max_residual: float = 1e-3
    gradient: str = "inverse"

    def __post_init__(self) -> None:
        try:
            operands: dict[str, Any] = dict(self.operands)
        except (TypeError, ValueError):
            raise PolicyError(
                "operands",
                got=f"Prefill(operands={self.operands!r})",
                want='a dict of site names and formats, such as {"kk": "fp8_e4m3"}',
                remedy=f"The sites are {', '.join(SITES)}.",
            ) from None
        check_keys(PolicyError, "Prefill.operands", operands, SITES)
        named = {site: _operand(site, fmt) for site, fmt in operands.items()}
        pairs = tuple((site, named[site]) for site in SITES if named.get(site) is not None)
        object.__setattr__(self, "operands", pairs)
        exact = isinstance(self.inverse, str) and self.inverse == "exact"
        if not exact and not isinstance(self.inverse, Inverse):
            raise PolicyError(
                "inverse",
                got=f"Prefill(inverse={self.inverse!r})",
                want='"exact", Neumann(order=...), NewtonSchulz(iterations=...) or BlockDoubling(block=...)',
                remedy=instance_hint(self.inverse, Inverse) or "Choose one of these.",
            )
        residual = self.max_residual
        if type(residual) not in (int, float) or not (residual > 0 and math.isfinite(residual)):
            raise PolicyError(
                "max_residual",
                got=f"Prefill(max_residual={residual!r})",
                want="a finite number above 0",
                remedy="The default is 1e-3.",
            )
        object.__setattr__(self, "max_residual", float(residual))
        check_choice(PolicyError, "Prefill", "gradient", self.gradient, GRADIENTS)
        if self.gradient == "series" and not isinstance(self.inverse, Neumann | NewtonSchulz):
            raise PolicyError(
                "gradient",
                got=f"'series' with inverse={self.inverse!r}",
                want="'inverse': what is computed there is the inverse, with its own derivative",
                remedy="Drop gradient, or choose Neumann(...) or NewtonSchulz(...).",
            )

    @property
    def formats(self) -> dict[str, str]:
        """The rounded sites and their formats' names."""
        return dict(self.operands)  # type: ignore[arg-type] # __post_init__ left pairs of names

    @property
    def changes_nothing(self) -> bool:
        """Whether this is what a policy without `prefill` computes."""
        return not self.operands and self.inverse == "exact"

    def check(self, rule: str, key_dim: int) -> None:
        """Refuse a recurrence that has no such product, or whose keys are too short.

        Args:
            rule: "delta" or "additive". key_dim: K.

        Raises:
            PolicyError: a site, or an inverse, that the additive rule does not have.
            FormatError: nvfp4 over key channels that are not whole blocks.
        """
        formats = self.formats
        if rule == "additive":
            absent = [f"operands[{site!r}]" for site in DELTA_SITES if site in formats]
            absent += [] if self.inverse == "exact" else ["inverse"]
            if absent:
                raise PolicyError(
                    "prefill",
                    got=f"{', '.join(absent)} for the additive rule",
                    want="sites among " + ", ".join(s for s in SITES if s not in DELTA_SITES) + ", and no inverse",
                    remedy="An additive recurrence erases nothing and solves no system; give it a rule of its own in "
                    'the recipe, such as ("*/gla#*", policy).',
                )
        short = [site for site in KEY_SITES if formats.get(site) == "nvfp4"]
        if short and key_dim % NVFP4_BLOCK:
            raise FormatError(
                "prefill",
                got=f"nvfp4 at {', '.join(short)} with K = {key_dim}",
                want=f"a multiple of {NVFP4_BLOCK} key channels: these products sum over them, in blocks of that size",
                remedy="Choose int8 or fp8_e4m3 there, which have no blocks.",
            )

    def op_kwargs(self) -> dict[str, Any]:
        """Arguments of an op, those left out that have their default; none at all where nothing changes."""
        if self.changes_nothing:
            return {}
        said = {
            "prefill_operands": ",".join(f"{site}={fmt}" for site, fmt in self.formats.items()),
            "prefill_inverse": str(self.inverse),
            "prefill_residual": self.max_residual,
            "prefill_gradient": self.gradient,
        }
        return {name: value for name, value in said.items() if value != _OP_DEFAULTS[name]}

    @staticmethod
    def from_op(arguments: Mapping[str, Any]) -> Prefill | None:
        """What an op's arguments say, inverse of `op_kwargs`; None where they say nothing.

        Raises:
            PolicyError: text that no policy writes.
        """
        values = [arguments.get(name, _OP_DEFAULTS[name]) for name in PREFILL_OPTIONS]
        return None if values == list(_OP_DEFAULTS.values()) else _read(*values)

    def to_dict(self) -> dict[str, Any]:
        """JSON data, which `from_dict` reads back."""
        inverse = self.inverse.to_dict() if isinstance(self.inverse, Inverse) else self.inverse
        return {
            "operands": self.formats,
            "inverse": inverse,
            "max_residual": self.max_residual,
            "gradient": self.gradient,
        }

    @classmethod
    def from_dict(cls, data: object) -> Prefill:
        """The options that `to_dict` wrote; what is left out has its default.

        Raises:
            PolicyError: not a dict, an unknown key, or a value that the constructor refuses.
        """
        if not isinstance(data, Mapping):
            raise PolicyError(
                "prefill", got=repr(data), want="a dict or null", remedy="Write null for no prefill options."
            )
        check_keys(PolicyError, "prefill", data, init_names(cls))
        options = dict(data)
        if "inverse" in options and options["inverse"] != "exact":
            options["inverse"] = Inverse.from_dict(options["inverse"])
        return cls(**options)


_OP_DEFAULTS: dict[str, Any] = dict(zip(PREFILL_OPTIONS, ("", "exact", 1e-3, "inverse"), strict=True))


def _operand(site: str, fmt: object) -> str | None:
    """A site's format by its name."""
    if isinstance(fmt, Format):
        if not fmt.is_plain and fmt != type(fmt)():
            raise PolicyError(
                site,
                got=f"Prefill.operands({site}={fmt!r})",
                want=f"{type(fmt).__name__}(): a row or column of an operand has one scale, whatever a state's tile is",
                remedy="Leave the tile out.",
            )
        fmt = fmt.name
    fmt = "fp8_e4m3" if fmt == "fp8" else fmt
    check_choice(PolicyError, "Prefill.operands", site, fmt, OPERANDS)
    return fmt  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def _read(operands: str, inverse: str, residual: float, gradient: str) -> Prefill:
    pairs = [pair.partition("=") for pair in operands.split(",")] if operands else []
    if len({site for site, _, _ in pairs}) != len(pairs) or not all(equals for _, equals, _ in pairs):
        raise PolicyError(
            "prefill_operands",
            got=repr(operands),
            want='sites once each with their formats, such as "kk=int8,qs=fp8_e4m3"',
            remedy="Policy(prefill=Prefill(...)).op_kwargs() writes it.",
        )
    chosen: str | Inverse = inverse
    if inverse != "exact":
        said = re.fullmatch(r"(\w+)\((\d{1,9})\)", inverse)
        cls = INVERSES.get(said[1]) if said else None
        if said is None or cls is None:
            raise PolicyError(
                "prefill_inverse",
                got=repr(inverse),
                want='"exact", ' + ", ".join(f'"{name}(n)"' for name in INVERSES),
                remedy=nearest(said[1] if said else inverse, INVERSES).strip() or "Choose one of these.",
            )
        chosen = cls(int(said[2]))  # type: ignore[call-arg]
    return Prefill({site: fmt for site, _, fmt in pairs}, inverse=chosen, max_residual=residual, gradient=gradient)

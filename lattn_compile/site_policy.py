"""`Policy`: what happens to the recurrent state of one site.

A policy is data: frozen, hashable, picklable, with a JSON form. What the semantics do not allow is refused when the
policy is made (`PolicyError`); what they allow but this version does not compute is refused when the policy is used
(`UnsupportedError`, from `Policy.require_built`), and nothing else is ever done in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from lattn_compile.errors import PolicyError, UnsupportedError
from lattn_compile.formats import Format, Fp8, Fp32, factors
from lattn_compile.formats import from_dict as format_from_dict
from lattn_compile.formats import parse as parse_format
from lattn_compile.formats.quantizer import ROUNDINGS, Quantizer
from lattn_compile.formats.residual import FEEDBACKS
from lattn_compile.formats.rotation import ROTATIONS, check_rotation
from lattn_compile.modes import (
    Chunk,
    Exact,
    Prefill,
    Replay,
    Token,
    TwoPrecision,
    WriteMode,
    as_format,
    instance_hint,
)
from lattn_compile.strict import check_choice, check_int, check_keys, init_names, strict

__all__ = ["BUILT", "Policy"]

READOUTS = ("before_write", "after_write")
GATES = (None, "bf16", "fp16")
STORAGES = ("emulated", "packed")
KERNELS = ("auto", "triton", "reference")
MAX_SEED = 2**63 - 1

# What this version computes, field by field. A part that gets built is added here and nowhere else. Packed storage is
# built for packed states (lattn_compile.packed), not for calls and graphs over dense ones, which this table is about.
BUILT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "storage": ("emulated",),
        "kernel": KERNELS,
    }
)


_PACKED_REMEDY = (
    "Packed states are stepped by lc.QuantizedState and lc.StatePool, and held by caches that quantize_cache made; "
    "here the state is dense."
)


@strict(PolicyError)
@dataclass(frozen=True, repr=False)
class Policy:
    """How the recurrent state of one site is written, stored and read.

    Attributes:
        state: the format that the state is rounded to (`Int8(block_v=64)`, `Fp8()`, ...; a spec string such as
            "int8/*x64" is accepted). Not used by `Exact` and `TwoPrecision`: see `stored_format`.
        write: when it is rounded: `Token()`, `Chunk(...)`, `Replay(...)`, `TwoPrecision(...)` or `Exact()`.
        readout: "before_write" (outputs see the value before it is rounded) or "after_write" (what was stored).
        rounding: "nearest" or "stochastic" (Philox, keyed by `seed` and the site).
        seed: key of the stochastic rounding, 0 to 2**63 - 1.
        feedback: format of the residual stored beside the codes: None, "int4", "int8" or "bf16".
        rotation: None, "hadamard_k" or "hadamard_v": the state is rounded in a rotated basis of that axis.
        gate: None, "bf16" or "fp16": what the log-retention is rounded to before use, prefix included.
        prefill: None or `Prefill(...)`: rounded operands and an approximate inverse in the prefix. One that changes
            nothing is None.
        storage: "emulated" (values rounded, kept in fp32) or "packed" (really stored in few bits).
        kernel: "auto", "triton" or "reference".

    Raises:
        PolicyError: an unknown key, a value that a key does not have, or a combination that has no meaning.
        FormatError: a spec string that names no format, or an impossible tile.
    """

    state: Format = field(default_factory=Fp8)
    _: KW_ONLY
    write: WriteMode = field(default_factory=Token)
    readout: str = "before_write"
    rounding: str = "nearest"
    seed: int = 0
    feedback: str | None = None
    rotation: str | None = None
    gate: str | None = None
    prefill: Prefill | None = None
    storage: str = "emulated"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", as_format("Policy", "state", self.state))
        if not isinstance(self.write, WriteMode):
            raise PolicyError(
                "write",
                got=f"Policy(write={self.write!r})",
                want="Exact(), Chunk(...), Token(), Replay(...) or TwoPrecision(...)",
                remedy=instance_hint(self.write, WriteMode) or "Choose one of these.",
            )
        if self.prefill is not None and not isinstance(self.prefill, Prefill):
            raise PolicyError(
                "prefill",
                got=f"Policy(prefill={self.prefill!r})",
                want="None or Prefill(...)",
                remedy="Wrap the options in Prefill(...).",
            )
        if self.prefill is not None and self.prefill.changes_nothing:
            object.__setattr__(self, "prefill", None)  # one spelling: an op says nothing of it either
        check_int(PolicyError, "Policy", "seed", self.seed, low=0, high=MAX_SEED)
        for name, allowed in (
            ("readout", READOUTS),
            ("rounding", ROUNDINGS),
            ("feedback", FEEDBACKS),
            ("rotation", ROTATIONS),
            ("gate", GATES),
            ("storage", STORAGES),
            ("kernel", KERNELS),
        ):
            check_choice(PolicyError, "Policy", name, getattr(self, name), allowed)
        self._refuse_meaningless()

    def _refuse_meaningless(self) -> None:
        rounded = self.rounded_format

        def refuse(name: str, why: str, want: str, remedy: str) -> None:
            raise PolicyError(name, got=f"{getattr(self, name)!r} {why}", want=want, remedy=remedy)

        if rounded is None:
            for name, off in (("rounding", "nearest"), ("feedback", None), ("rotation", None)):
                if getattr(self, name) != off:
                    refuse(
                        name,
                        "with write=Exact()",
                        f"{off!r}: exact rounds no state",
                        f"Drop {name}, or choose another write mode.",
                    )
            return
        if isinstance(self.write, TwoPrecision):
            if self.readout == "after_write":
                refuse(
                    "readout",
                    "with write=TwoPrecision(...)",
                    "'before_write': outputs come from the read copy, and nothing stored is read back",
                    "Drop readout, or choose Replay(...).",
                )
            if self.feedback is not None:
                refuse(
                    "feedback",
                    "with write=TwoPrecision(...)",
                    "None: the read copy is made anew from the anchor, so no error accumulates",
                    "Drop feedback, or choose Token() or Replay(...).",
                )
        if self.feedback is not None and rounded.is_plain:
            refuse(
                "feedback",
                f"on the plain format {rounded}",
                "None on fp32, bf16 and fp16: they have no scale for a residual",
                "Drop feedback, or choose Int8, Fp8 or Nvfp4.",
            )
        if self.rounding == "stochastic" and isinstance(rounded, Fp32):
            refuse(
                "rounding",
                "on fp32",
                "'nearest': an fp32 state is stored as it is and nothing is rounded",
                "Drop rounding, or choose a narrower format.",
            )
        if self.storage == "packed" and isinstance(self.write, Chunk):
            refuse(
                "storage",
                "with write=Chunk(...)",
                "'emulated': inside a chunk the state is exact, so there is no packed form of it",
                "Drop storage, or choose Token() or Replay(...).",
            )

    @property
    def rounded_format(self) -> Format | None:
        """The format that rounding, rotation and feedback act on: the read copy's in two_precision, None in exact."""
        if isinstance(self.write, Exact):
            return None
        return self.write.read if isinstance(self.write, TwoPrecision) else self.state

    @property
    def stored_format(self) -> Format:
        """The format that the state travels in: fp32 in exact, the anchor's in two_precision, else `state`."""
        if isinstance(self.write, Exact):
            return Fp32()
        return parse_format(self.write.anchor) if isinstance(self.write, TwoPrecision) else self.state

    def check_shape(self, key_dim: int, value_dim: int) -> None:
        """Raise unless a `[key_dim, value_dim]` state can be held, and the prefix's operands rounded.

        Raises:
            FormatError: the format's tile does not fit, or a block of an operand's.
            PolicyError: the rotated axis is not a power of two.
        """
        if self.prefill is not None:
            self.prefill.check("delta", key_dim)
        if self.rounded_format is None:
            return
        self.rounded_format.check(key_dim, value_dim)
        check_rotation(self.rotation, key_dim, value_dim)

    def nbytes(self, H: int, HV: int, K: int, V: int, *, decay: str = "head", has_beta: bool = True) -> int:
        """Bytes that one sequence's state takes, all counted: codes, scales, residuals, read copy, ring, cursor.

        Args:
            H, HV, K, V: key heads, value heads, key and value size. decay: "none", "head" or "channel".
            has_beta: whether the ring of two_precision holds a write strength.
        """
        rounded = self.rounded_format
        if rounded is None:
            return HV * K * V * 4
        total = HV * Quantizer(rounded, feedback=self.feedback, rotation=self.rotation).nbytes(K, V)
        if not isinstance(self.write, Replay | TwoPrecision):
            return total
        gates = {"none": 0, "head": 1, "channel": K}[decay] * HV * 4
        if isinstance(self.write, Replay):
            record = H * factors.nbytes(K, self.write.factors) + HV * factors.nbytes(V, self.write.factors) + gates
        else:
            total += HV * self.stored_format.nbytes(K, V)
            record = 4 * (H * K + 2 * HV * V + (HV if has_beta else 0)) + gates
        return total + (self.write.window - 1) * record + 4

    def unbuilt(self) -> list[str]:
        """The parts of this policy that this version does not compute yet, as they are written: `gate='bf16'`."""
        parts = []
        for name, built in BUILT.items():
            value = getattr(self, name)
            if value not in built:
                parts.append(f"{name}={value!r}")
        return parts

    def require_built(self, argument: str = "policy") -> None:
        """Raise unless every part of this policy is built.

        Raises:
            UnsupportedError: names each part that is missing.
        """
        parts = self.unbuilt()
        if not parts:
            return
        names = [p.split("=", 1)[0] for p in parts]
        there = [f"{n} " + " or ".join(map(repr, BUILT[n])) for n in names]
        raise UnsupportedError(
            argument,
            got=", ".join(parts),
            want="; ".join(there),
            remedy=_PACKED_REMEDY
            if names == ["storage"]
            else "This version does not build more, and does nothing else in its place: change the policy.",
        )

    def op_kwargs(self) -> dict[str, Any]:
        """The policy as arguments of the `lattn::` op that computes it (`op_form`), without those at their defaults
        that not every op has.

        `kernel` becomes `implementation` there: Inductor's fallback has a parameter named kernel itself. The op's
        `state_format` is the format that is rounded to, in two_precision the read copy's.

        Raises:
            UnsupportedError: a part that is not built; an op never sees such a policy.
        """
        self.require_built()
        exact = isinstance(self.write, Exact)
        kwargs: dict[str, Any] = {
            "write": self.write.mode,
            "state_format": str(self.rounded_format or self.stored_format),
            # Exact stores what it computes: one spelling, so that equal policies give equal graphs.
            "readout": "before_write" if exact else self.readout,
            "implementation": self.kernel,
        }
        if isinstance(self.write, Chunk):
            kwargs["chunk_size"] = self.write.chunk_size
        elif isinstance(self.write, Replay):
            kwargs |= {"window": self.write.window, "factors": self.write.factors}
        elif isinstance(self.write, TwoPrecision):
            kwargs |= {"window": self.write.window, "anchor": self.write.anchor}
        kwargs |= self.rounding_kwargs() | ({} if self.gate is None else {"gate": self.gate})
        return kwargs | ({} if self.prefill is None else self.prefill.op_kwargs())

    def rounding_kwargs(self) -> dict[str, Any]:
        """What the codec's ops take beside the format, without what has its default."""
        kwargs: dict[str, Any] = {}
        if self.rounding != "nearest":
            kwargs |= {"rounding": self.rounding, "seed": self.seed}
        for name in ("feedback", "rotation"):
            if getattr(self, name) is not None:
                kwargs[name] = getattr(self, name)
        return kwargs

    @property
    def op_form(self) -> str:
        """The op that computes this policy where it quantizes: "chunk", "decode" or "replay"."""
        return {Chunk: "chunk", Replay: "replay", TwoPrecision: "replay"}.get(type(self.write), "decode")

    @property
    def rewrites_alike(self) -> bool:
        """Whether handing a stored state over again changes nothing: such a state may travel dense."""
        write = self.write
        each_token = isinstance(write, Token) or (
            isinstance(write, Replay) and write.window == 1 and write.factors is None
        )
        exact = isinstance(write, Exact)
        return exact or (each_token and self.rounding == "nearest" and self.feedback is None)

    @classmethod
    def from_op(cls, arguments: Mapping[str, Any]) -> Policy:
        """The policy that an op carries: inverse of `op_kwargs` on the arguments of a `lattn::` op."""
        fmt = parse_format(arguments["state_format"])
        mode = arguments["write"]
        options = {n: arguments[n] for n in ("rounding", "feedback", "rotation", "gate", "seed") if n in arguments}
        options |= {"kernel": arguments["implementation"], "prefill": Prefill.from_op(arguments)}
        if mode == "exact":
            return cls(write=Exact(), kernel=options["kernel"], gate=options.get("gate"), prefill=options["prefill"])
        options["readout"] = arguments["readout"]
        if options.get("rounding", "nearest") == "nearest":
            options.pop("seed", None)
        if mode == "two_precision":
            return cls(write=TwoPrecision(arguments["window"], read=fmt, anchor=arguments["anchor"]), **options)
        write: WriteMode = {
            "token": Token,
            "chunk": lambda: Chunk(arguments["chunk_size"]),
            "replay": lambda: Replay(arguments["window"], factors=arguments["factors"]),
        }[mode]()
        return cls(fmt, write=write, **options)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Every key is written, so that a later change of a default changes no saved policy."""
        values = {n: getattr(self, n) for n in init_names(type(self))}
        return {n: v.to_dict() if hasattr(v, "to_dict") else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, data: object) -> Policy:
        """The policy that `to_dict` wrote. Missing keys take their defaults; `state` and `write` may be bare names.

        Raises:
            PolicyError, FormatError: an unknown key, or a value that its key does not have.
        """
        if not isinstance(data, Mapping):
            raise PolicyError(
                "policy", got=repr(data), want="a dict of a policy's keys", remedy="See Policy.to_dict()."
            )
        check_keys(PolicyError, "Policy", data, init_names(cls))
        options = dict(data)
        if isinstance(options.get("state"), Mapping):
            options["state"] = format_from_dict(options["state"], argument="state")
        if "write" in options:
            options["write"] = WriteMode.from_dict(options["write"])
        if options.get("prefill") is not None:
            options["prefill"] = Prefill.from_dict(options["prefill"])
        return cls(**options)

    def _changed(self, skip: tuple[str, ...]) -> list[str]:
        parts = []
        for f in fields(self):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if f.name not in skip and getattr(self, f.name) != default:
                parts.append(f"{f.name}={getattr(self, f.name)!r}")
        return parts

    def __repr__(self) -> str:
        return f"Policy({', '.join([repr(self.state), f'write={self.write!r}', *self._changed(('state', 'write'))])})"

    def __str__(self) -> str:
        """One line for tables: `int8/*x64 token gate='bf16'`."""
        uses_state = not isinstance(self.write, Exact | TwoPrecision)
        head = ([str(self.state)] if uses_state else []) + [str(self.write)]
        return " ".join(head + self._changed(("state", "write")))

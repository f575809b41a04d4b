"""Every exception and every reason code of the library, with its remedy.

Two kinds of bad news exist and never mix. *Misuse* (a wrong argument, an unreadable file) raises a `LattnError`
subclass before anything is computed. A *rejection* (a recurrence that cannot be rewritten) is a `Reason`: a value that
ends up in the report, never an exception.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

__all__ = [
    "REASONS",
    "CaptureError",
    "DtypeError",
    "FileFormatError",
    "FormatError",
    "LattnError",
    "LattnWarning",
    "PolicyError",
    "Reason",
    "RecipeError",
    "RewriteError",
    "SequenceError",
    "ShapeError",
    "StateError",
    "UnsupportedError",
    "nearest",
    "reason",
]


class LattnError(Exception):
    """Misuse of the library. Every message names the argument, what it got, what it wants, and the way out.

    Attributes:
        argument: the name of the offending argument, as the caller spells it.
        got: what was passed, rendered for a person.
        want: what is accepted.
        remedy: one sentence on how to go on.
    """

    code = "misuse"

    def __init__(self, argument: str, *, got: object, want: str, remedy: str) -> None:
        self.argument, self.got, self.want, self.remedy = argument, str(got), want, remedy
        # Not super(): Dynamo follows this spelling, and then shows the text of an error raised while it traces.
        Exception.__init__(self, f"[{self.code}] {argument}: got {got}; want {want}. {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments survive pickling between worker processes only if the copy is spelled out.
        return (_rebuild, (type(self), self.argument, self.got, self.want, self.remedy))


def _rebuild(cls: type[LattnError], argument: str, got: str, want: str, remedy: str) -> LattnError:
    return cls(argument, got=got, want=want, remedy=remedy)


through_tracer: Callable[[LattnError], LattnError] | None = None
"""Makes an error one that the tracer now running hands to the user as it is (set by the backend)."""


@contextlib.contextmanager
def surfacing() -> Iterator[None]:
    """Around code that runs while Dynamo traces (fakes, constants), where it would wrap what is raised in its own."""
    try:
        yield
    except LattnError as error:
        raise error if through_tracer is None else through_tracer(error) from None


class PolicyError(LattnError):
    """A `Policy`, a write mode or one of their keys is not valid."""

    code = "policy"


class RecipeError(LattnError):
    """A `Recipe`, its JSON or one of its rules is not valid."""

    code = "recipe"


class FormatError(LattnError):
    """A state format or its tile is not valid, or does not fit the state."""

    code = "format"


class ShapeError(LattnError):
    """A tensor's shape contradicts the others."""

    code = "shape"


class DtypeError(LattnError):
    """A tensor's dtype or device cannot be used here."""

    code = "dtype"


class SequenceError(LattnError):
    """`cu_seqlens`, prefix or sequence lengths contradict the tokens."""

    code = "sequence"


class StateError(LattnError):
    """A carried state does not belong to this call."""

    code = "state"


class UnsupportedError(LattnError):
    """A legal request whose part is not built yet, or not for this device. Nothing else is done in its place."""

    code = "unsupported"


class CaptureError(LattnError):
    """A known library call was made with arguments that have no exact counterpart here."""

    code = "capture"


class RewriteError(LattnError):
    """A graph cannot be rewritten as asked (strict mode), or a rewritten graph broke an invariant."""

    code = "rewrite"


class FileFormatError(LattnError):
    """A file is missing, unreadable, or not what it should be."""

    code = "file"


class LattnWarning(UserWarning):
    """Said once where silence would hide that nothing, or less than asked, was done."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a site was left as it was: a stable `code`, a sentence, and what the user can do."""

    code: str
    text: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text, "remedy": self.remedy}


REASONS: dict[str, Reason] = {
    r.code: r
    for r in (
        Reason(
            code="RULE_NONE",
            text="the recipe's first matching rule says to leave this site alone",
            remedy="Change the rule's policy, or put a more specific rule before it.",
        ),
        Reason(
            code="NO_RULE",
            text="no rule of the recipe matches this site's path",
            remedy='Add a rule for it, or a last rule ("*", policy). Paths are relative to the compiled module; '
            "lc.attach(model, recipe) gives them in full.",
        ),
        Reason(
            code="CALL_OPTIONS",
            text="a known library function is called with an option that has no exact counterpart here",
            remedy="Drop that option, or leave this layer as it is.",
        ),
        Reason(
            code="EXPLICIT_POLICY",
            text="the model's own code calls lc.linear_attention with a policy, which the recipe does not override",
            remedy="Drop policy= from that call to let the recipe decide.",
        ),
        Reason(
            code="DENSE_CACHE",
            text="a dense cached state is handed over at every call, which is harmless only for exact and for token "
            "writes with nearest rounding and no feedback",
            remedy="Use a token policy for cached inference, or carry an EncodedState or ReplayState.",
        ),
        Reason(
            code="STATE_DTYPE",
            text="the graph itself stores the state in a lower precision, and only `exact` keeps that rounding",
            remedy='Keep the cache in float32, or use the policy "exact" for this site.',
        ),
        Reason(
            code="SHARED_REGION",
            text="one region of the graph serves several layers, and the recipe has different policies for them",
            remedy="Give these layers one policy, or do not mark them as a nested_compile_region.",
        ),
        Reason(
            code="FORMAT_SHAPE",
            text="the state's K or V does not fit the format's tile",
            remedy="Choose another tile or format for this site.",
        ),
    )
}


def reason(code: str, detail: str = "") -> Reason:
    """The catalogued reason `code`, with a site-specific `detail` appended to its text."""
    base = REASONS[code]
    return base if not detail else Reason(code=code, text=f"{base.text} ({detail})", remedy=base.remedy)


def nearest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known word closest to `word`, or an empty string."""
    hit = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {hit[0]!r}?" if hit else ""

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
    "DistributedError",
    "DtypeError",
    "FileFormatError",
    "FormatError",
    "LattnError",
    "LattnWarning",
    "PhaseError",
    "PlacementError",
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


class PhaseError(LattnError):
    """A phase is active where nothing can see it."""

    code = "phase"


class StateError(LattnError):
    """A carried state does not belong to this call."""

    code = "state"


class UnsupportedError(LattnError):
    """A legal request whose part is not built yet, or not for this device. Nothing else is done in its place."""

    code = "unsupported"


class RewriteError(LattnError):
    """A graph cannot be rewritten as asked (strict mode), or a rewritten graph broke an invariant."""

    code = "rewrite"


class PlacementError(LattnError):
    """A distributed tensor is cut where the recurrence cannot be cut, or unlike the others of its call."""

    code = "placement"


class DistributedError(LattnError):
    """The ranks of a process group disagree, or one of them is gone."""

    code = "distributed"


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
            code="PACKED_STATE",
            text="the cache holds this layer's state packed, under a policy that the recipe does not override",
            remedy="Give quantize_cache the recipe that the model is compiled with, or compile it without one.",
        ),
        Reason(
            code="NO_GAIN",
            text="it takes as many bytes as exact",
            remedy="Give it in candidates to measure it all the same.",
        ),
        Reason(
            code="DENSE_CACHE",
            text="a dense cached state is handed over at every call, which is harmless only for exact and for token "
            "writes with nearest rounding and no feedback",
            remedy="For training, call the model with use_cache=False; for cached inference use a token policy, or "
            "carry the EncodedState or ReplayState of lc.linear_attention.",
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
            code="HEADS_CUT",
            text="the layer's heads are cut over ranks, and stochastic rounding goes by the number of a head",
            remedy="Round to nearest there: a rank would number its own heads from 0, and draw others' random bits.",
        ),
        Reason(
            code="FORMAT_SHAPE",
            text="the state's K or V does not fit the format's tile",
            remedy="Choose another tile or format for this site.",
        ),
        Reason(
            code="NOT_NORMALIZED",
            text="a part of the graph has no functional counterpart before autograd, so recurrences that are spelled "
            "out in it cannot be found",
            remedy="Change what the text names, or compute the recurrence with lc.linear_attention.",
        ),
        Reason(
            code="AUTOCAST_REGION",
            text="a part of the graph runs under torch.autocast, whose casts are not in the graph, so recurrences that "
            "are spelled out in it cannot be found",
            remedy="Keep the recurrence out of the autocast region, or compute it with lc.linear_attention.",
        ),
        Reason(
            code="STATE_OP",
            text="an operation on the state path is not linear in the state, or keeps only a part of it",
            remedy="A recurrence of this family scales, erases and writes its state; take other operations off it.",
        ),
        Reason(
            code="STATE_NONLINEAR",
            text="the new state is of second order in the old one",
            remedy="Nothing to do: it is another recurrence.",
        ),
        Reason(
            code="STATE_MIXED",
            text="the state is mixed along an axis in a way that no decay and no key explains",
            remedy="A transition has to be a decay, or a decay and an erase along one key.",
        ),
        Reason(
            code="STATE_ROUNDED",
            text="the state is cast to a lower precision inside a token, or after some tokens only",
            remedy="Round the state once after every token, or keep it in float32.",
        ),
        Reason(
            code="ARITHMETIC_DTYPE",
            text="the state update computes in a lower precision than float32",
            remedy="Compute the update in float32 (S.float()); the op's state arithmetic is float32.",
        ),
        Reason(
            code="NOT_A_STATE",
            text="no earlier state flows into the update",
            remedy="Nothing to do, unless the state is meant to be carried.",
        ),
        Reason(
            code="NOT_CARRIED",
            text="a tensor is decayed and written to like a state, and then neither kept nor updated again",
            remedy="Return the new state, or write it back to the cache.",
        ),
        Reason(
            code="NO_WRITE",
            text="the update writes no outer product of a key and a value",
            remedy="Nothing to do: it is another recurrence.",
        ),
        Reason(
            code="NOT_RANK_ONE",
            text="what a token writes or erases is not one outer product of a key and a value",
            remedy="Write one key and one value a token.",
        ),
        Reason(
            code="KEYS_DIFFER",
            text="the state is written, erased and read back along different keys",
            remedy="A delta rule erases what it reads along its own key; use one key for all three.",
        ),
        Reason(
            code="BETA_ONE_SIDE",
            text="a factor stands on the write or on the erase only",
            remedy="Let beta multiply both, or scale the values before the recurrence.",
        ),
        Reason(
            code="ERASE_SIGN",
            text="the erase has the sign of a write",
            remedy="u = beta (v - S^T k), not beta (v + S^T k).",
        ),
        Reason(
            code="DECAY_ORDER",
            text="the erase reads the state before its decay",
            remedy="Decay the state first: S~ = exp(g) S, u = beta (v - S~^T k), S = S~ + k u^T.",
        ),
        Reason(
            code="DECAY_AXIS",
            text="the decay depends on the value axis of the state",
            remedy="Decays are per head, or per head and key channel.",
        ),
        Reason(
            code="DECAY_FORM",
            text="the decay of a delta rule is a sum of several terms",
            remedy="Give the decay as one tensor.",
        ),
        Reason(
            code="DECAY_RANGE",
            text="the decay is not certain to lie in [0, 1]",
            remedy="Give it as exp of a log decay, as a sigmoid, or clamped to [0, 1].",
        ),
        Reason(
            code="READ_BEFORE_WRITE",
            text="the output of a token is read before the token is written",
            remedy="Read after the write; a bonus for the current token can be added to the output.",
        ),
        Reason(
            code="AXES",
            text="the axes of the operands cannot be told apart with certainty",
            remedy="Keep batch, heads, key and value on axes of their own, without slices that cut across them.",
        ),
        Reason(
            code="TOO_MANY_TERMS",
            text="the state update is too large to be looked through",
            remedy="Spell the step more simply, or call lc.linear_attention.",
        ),
        Reason(
            code="SEARCH_FAILED",
            text="the search for spelled-out recurrences failed, and the graph is compiled as it was",
            remedy="This is a fault of lattn_compile; report it with the traceback in the log.",
        ),
        Reason(
            code="NOT_READ",
            text="a state is updated token by token and never read with a query",
            remedy="Nothing to do, unless its outputs are meant to be o = S^T q.",
        ),
        Reason(
            code="ASSOCIATIVE_SCAN",
            text="a recurrence is spelled as an associative scan over the states of all tokens",
            remedy="Spell it as a loop, a scan or a chunk form, none of which keeps a state for every token, or call "
            "lc.linear_attention.",
        ),
        Reason(
            code="GROUPED_QUERIES",
            text="several heads of queries read one state, and an operator has one query a state",
            remedy="Repeat k and v to the heads of q before the recurrence (k.repeat_interleave(n, dim)), where there "
            "is the memory for a state for each head of queries.",
        ),
        Reason(
            code="GRAD_MODE",
            text="the recurrence runs partly under no_grad",
            remedy="Put all of it inside or outside of the no_grad region.",
        ),
        Reason(
            code="SELF_CHECK",
            text="the rewrite of a spelled-out recurrence was not confirmed by running both in float64",
            remedy='If the detail says that it could not be run, options={"verify": False} skips it; else report it.',
        ),
        Reason(
            code="CHUNK_OPERATOR",
            text="an operator that is not analytic stands inside a recurrence in chunk form",
            remedy="Move clamps, activations, dropout and masks that depend on data out of the recurrence.",
        ),
        Reason(
            code="CHUNK_INPUTS",
            text="what a recurrence in chunk form is made from cannot be told apart as q, k, v, decay and beta",
            remedy="Form q, k, v, g and beta for all tokens, one axis each for batch, tokens, heads and features, "
            "before cutting them into chunks.",
        ),
        Reason(
            code="CHUNK_DECAY_INPUTS",
            text="decays that no token chooses come from tables that are inputs of the graph, so that nothing in it "
            "says that they are powers of one decay a head",
            remedy="Compute the tables in the forward pass, from one slope or decay a head, or keep them in float32 "
            "buffers whose values are known when compiling, all of them powers of one decay a head.",
        ),
        Reason(
            code="CHUNK_CLAMPED",
            text="the decays between the tokens of a chunk are clamped, and the clamp is not certain to do nothing",
            remedy="Let the graph show that log decays are at most 0 (-softplus(x), logsigmoid(x)) under clamp(max=0), "
            "or mask before the exponential: (c_i - c_j).masked_fill(~causal, -inf).exp(). A lower bound on decays is "
            "no part of a recurrence.",
        ),
        Reason(
            code="CHUNK_NOT_EQUAL",
            text="something built like a recurrence in chunk form computes none of those known here",
            remedy="Known are S = D S + k u^T with u = beta (v - (D S)^T k) or beta v, D one decay a head or key "
            "channel, and o = scale S^T q, the token's own write included.",
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

"""The numeric self-check: a claimed replacement and the original run in float64 on the same random inputs.

Values and gradients must agree at 1e-9 of their scale. That proves an equality because only analytic functions are
let through (`analytic.vet`). Dtypes below float64 are the identity here: where a state is rounded is proven elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from lattn_compile.passes.spelled import scaled
from lattn_compile.passes.spelled.analytic import vet
from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_tables import ChunkProposal, known_buffer
from lattn_compile.passes.spelled.literals import changes
from lattn_compile.passes.spelled.proposal import Proposal
from lattn_compile.passes.spelled.ranges import Interval, interval
from lattn_compile.passes.spelled.reach import needs
from lattn_compile.passes.spelled.subgraph import (
    Region,
    Rejected,
    clean_state,
    double,
    extract,
    grad_disabled,
    hint,
    is_trained,
    loop_of,
    run,
    shape_of,
)
from lattn_compile.passes.spelled.writer import value

__all__ = ["TOLERANCE", "Verification", "verify"]

TOLERANCE = 1e-9
"""Of the largest magnitude of a tensor; or of 1e-4 of the largest of all, where a tensor is rounding noise."""

_FLOOR = 1e-4
_STRONGEST = 128.0
_VALUE_BYTES = 1 << 30
_GRADIENT_BYTES = 512 << 20
_SMALL_BYTES = 64 << 20
"""Once sizes are changed at all, down to this."""
_WHILE_TURNS = 256
"""What a loop of unknown length is taken for, when its memory is estimated."""
_OP_COPIES = 3
"""How many times its arguments and results a `lattn::` op keeps while it runs."""

_KEPT = 256
_HASHED_BYTES = 1 << 20
_VERDICTS: OrderedDict[str, Verification] = OrderedDict()
_LOCK = threading.Lock()

TRIALS = ("gentle", "strong", "wide")
"""Decays so slow that the first token still counts at the last one; decays of very different strength; values of any
sign, which tell sqrt(x * x) from x (left out where the original has no finite value there, and without gradients)."""


@dataclass(frozen=True)
class Verification:
    """What came of it.

    Attributes:
        ok: whether old and new are the same function, as far as this can tell.
        evidence: for the report: shapes (real | scaled), trials, seed, largest relative errors, seconds, cached.
        detail: why not, in words; empty if ok.
    """

    ok: bool
    evidence: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


def verify(proposal: Proposal) -> Verification:
    """Tests a proposal's claim that `old` and `new` are the same function of `frontier`. Never raises."""
    began = time.perf_counter()
    evidence: dict[str, Any] = {}
    key = None
    try:
        with clean_state():
            case = _Case(proposal)
            key = case.key()
            if (known := _recall(key)) is not None:
                seconds = round(time.perf_counter() - began, 4)
                return Verification(known.ok, {**known.evidence, "cached": True, "seconds": seconds}, known.detail)
            with _growth(case.regions()):
                case.test(evidence)
        detail = ""
    except Rejected as e:
        detail = str(e)
    except Exception as e:
        # Whatever an op raised: a claim that could not be tested is not accepted. It may be tested again.
        key = None
        detail = f"the run in float64 raised {_first_line(e)}"
    verdict = Verification(not detail, {**evidence, "seconds": round(time.perf_counter() - began, 4)}, detail)
    _remember(key, verdict)
    return verdict


@contextlib.contextmanager
def _growth(regions: Sequence[Region]) -> Iterator[None]:
    """An op refuses decays that grow, which random values for its inputs may be."""
    ops = [n for r in regions for n in _nodes_of(r) if n.op == "call_function" and short_name(n).startswith("lattn::")]
    before = [dict(n.kwargs) for n in ops]
    for n in ops:
        n.kwargs = {**n.kwargs, "growth": True}
    try:
        yield
    finally:
        for n, kwargs in zip(ops, before, strict=True):
            n.kwargs = kwargs


def _nodes_of(region: Region) -> Iterator[fx.Node]:
    """Its nodes, and those of the bodies that it runs."""
    yield from region.nodes
    for body in region.modules.values():
        yield from body.graph.nodes


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"


def _recall(key: str | None) -> Verification | None:
    with _LOCK:
        return None if key is None else _VERDICTS.get(key)


def _remember(key: str | None, verdict: Verification) -> None:
    if key is not None:
        with _LOCK:
            _VERDICTS[key] = verdict
            if len(_VERDICTS) > _KEPT:
                _VERDICTS.popitem(last=False)


class _Case:
    """One claim: the two regions, what they depend on, and how large they are."""

    def __init__(self, proposal: Proposal) -> None:
        self.p = proposal
        self.frontier = list(proposal.frontier)
        self.tables = proposal.tables if isinstance(proposal, ChunkProposal) else None
        self.old, self.new = extract(proposal.old, self.frontier), extract(proposal.new, self.frontier)
        for old, new in zip(proposal.old, proposal.new, strict=True):
            a, b = value(old), value(new)
            if a.dtype != b.dtype or shape_of(old) != shape_of(new):
                raise Rejected(
                    f"{old} is {a.dtype} {list(shape_of(old))}, its replacement {new} {b.dtype} {list(shape_of(new))}"
                )
        self.untrained = {n for n in self.frontier if known_buffer(n) is not None}
        self.gradients = self._vet()
        self.domains = self._domains()
        tensors = [n for n in self.frontier if isinstance(value(n), Tensor)]
        self.needs = needs(self.regions(), tensors)

    def _domains(self) -> dict[fx.Node, tuple[str | None, bool]]:
        """How values are drawn: the proposal's word or what is proven, and whether none can be negative."""
        known: dict[fx.Node, Interval] = {}
        domains: dict[fx.Node, tuple[str | None, bool]] = {}
        for node in self.frontier:
            low, high = interval(node, known)
            proven = "decay" if low >= 0 and high <= 1 else "log_decay" if high <= 0 else None
            domain = self.p.domains.get(node, proven)
            domains[node] = domain, low >= 0 or domain == "decay"
        return domains

    def _vet(self) -> bool:
        """Checks both regions; whether there are gradients to compare."""
        tensors = [n for n in self.frontier if isinstance(value(n), Tensor)]
        old, new = vet(self.old, tensors), vet(self.new, tensors)
        computed = [n for n in [*self.old.nodes, *self.new.nodes] if n in old or n in new]
        off = grad_disabled(computed)
        if off and len(off) < len(set(computed)):
            raise Rejected(
                f"{next(n for n in computed if n in off)} stands in a region without gradients, others do not"
            )
        return not off

    def regions(self) -> tuple[Region, Region]:
        return self.old, self.new

    def key(self) -> str | None:
        """Equal for claims that differ in names only; None if a constant is too large to look at."""
        digest = hashlib.sha256()
        number: dict[fx.Node, int] = {}
        for i, node in enumerate(self.frontier):
            number[node] = i
            digest.update(repr(("in", _kind(node), self.domains[node], node in self.untrained)).encode())
        op_tokens = self._tokens()
        digest.update(repr((op_tokens, self._keys(), self.gradients)).encode())
        # The same numbers, of which some may be others at another call, are another claim.
        digest.update(
            repr((scaled.symbolic(self.regions()), sorted((str(s), n) for s, n in self.needs.items()))).encode()
        )
        for region in self.regions():
            if not _digest(region, number, digest):
                return None
        if self.tables is not None:
            digest.update(self.tables.key(number).encode())
        return digest.hexdigest()

    def _tokens(self) -> int:
        q = self.p.op.args[0]
        shape = shape_of(q) if isinstance(q, fx.Node) else ()
        return max(1, shape[1]) if len(shape) == 4 else 1

    def _keys(self) -> int:
        """K of the op: values of unknown role are drawn so that products over K stay of order 1."""
        q = self.p.op.args[0]
        return max(1, shape_of(q)[-1]) if isinstance(q, fx.Node) and len(shape_of(q)) == 4 else 1

    def test(self, evidence: dict[str, Any]) -> None:
        """Raises Rejected if old and new differ."""
        self.check(evidence)
        self.reach(evidence)

    def check(self, evidence: dict[str, Any]) -> None:
        """At the traced sizes, or smaller ones; where sizes are symbolic, at some others, if they fit."""
        gradients = self.gradients
        if not gradients:
            evidence["gradients"] = "none: the trace had them switched off"
        if self.fits(scaled.real, gradients):
            self.compare(scaled.real, gradients, evidence)
            evidence["shapes"] = "real"
            return
        smaller: scaled.Sizes | None = None
        for sizes in scaled.plans(self.p, self.regions()):
            if self.fits(sizes, gradients):
                smaller = sizes
                if _bytes(self.regions(), sizes)[1] <= _SMALL_BYTES:
                    break
        if smaller is not None:
            # An op that does not take the smaller sizes ends the attempt; a difference ends the test.
            try:
                self.compare(smaller, gradients, evidence)
                evidence["shapes"] = "scaled"
                return
            except (RuntimeError, TypeError, IndexError, ValueError) as e:
                evidence["not_scaled"] = _first_line(e)
        if not self.fits(scaled.real, False):
            raise Rejected(
                f"too large to run: {_bytes(self.regions(), scaled.real)[0] >> 20} MiB in float64, "
                "and its batch and heads could not be made smaller"
            )
        self.compare(scaled.real, False, evidence)
        evidence["shapes"] = "real"
        if gradients:
            evidence["gradients"] = "not run: size"

    def reach(self, evidence: dict[str, Any]) -> None:
        """At sizes that all numbers along a symbolic size are smaller than, unless the traced ones are such.

        Raises Rejected where old and new differ there, or where there are no such sizes that can be run.
        """
        short = {str(size): n for size, n in self.needs.items() if scaled.traced(self.regions(), size) < n}
        if not short:
            return
        for sizes in scaled.reaching_sizes(self.regions(), self.needs):
            if self.fits(sizes, False):
                self.trial(sizes, "gentle", 0, False, evidence)
                evidence["reach"] = short
                return
        least = ", ".join(f"{size} >= {n}" for size, n in sorted(short.items()))
        raise Rejected(
            f"a mask or an index reaches further than the sizes that could be tried: it takes {least} to see what it "
            "does. Trace with larger sizes, or with fixed ones"
        )

    def fits(self, sizes: scaled.Sizes, gradients: bool) -> bool:
        peak, total = _bytes(self.regions(), sizes)
        return peak <= _VALUE_BYTES and (not gradients or total <= _GRADIENT_BYTES)

    def compare(self, sizes: scaled.Sizes, gradients: bool, evidence: dict[str, Any]) -> None:
        """Runs all trials. Raises Rejected where old and new differ."""
        errors = {"value": 0.0, **({"gradient": 0.0} if gradients else {})}
        for seed, trial in enumerate(TRIALS):
            for what, error in self.trial(sizes, trial, seed, gradients and trial != "wide", evidence).items():
                errors[what] = max(errors[what], error)
        for other in scaled.other_sizes(self.regions(), self.frontier) if sizes is scaled.real else ():
            if self.fits(other, False):
                self.trial(other, "gentle", 0, False, evidence)
                evidence["other_sizes"] = True
                break
        evidence |= {"max_relative_error": errors, "seeds": list(range(len(TRIALS))), "trials": list(TRIALS)}

    def trial(
        self, sizes: scaled.Sizes, trial: str, seed: int, gradients: bool, evidence: dict[str, Any]
    ) -> dict[str, float]:
        """The largest relative errors of one run. Raises Rejected."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        inputs = [self.draw(node, sizes, trial, generator, evidence) for node in self.frontier]
        bound = self.drawn_tables(sizes, trial, generator)
        inputs = [bound.get(node, x) for node, x in zip(self.frontier, inputs, strict=True)]
        leaves = {
            node: (_near if is_trained(t) else _other)(double(t), generator)
            for region in self.regions()
            for node, t in region.constants.items()
            if changes(node, t)
        }
        drawn = [(n, x) for n, x in [*zip(self.frontier, inputs, strict=True), *leaves.items()] if n not in bound]
        drawn = [(n, x) for n, x in drawn if n not in self.untrained]
        leaves |= {n: x for n, x in bound.items() if n not in self.frontier}
        names, wanted = [str(n) for n, x in drawn if _is_float(x)], [x for _, x in drawn if _is_float(x)]
        for x in wanted:
            x.requires_grad_(gradients)
        with contextlib.nullcontext() if gradients else torch.no_grad():
            results: list[tuple[list[Tensor], list[Tensor]]] = []
            cotangents: list[Tensor] = []
            for region in self.regions():
                out = run(region, inputs, sizes, leaves)
                results.append(self._differentiate(out, wanted, cotangents, generator, gradients))
        (old, old_grads), (new, new_grads) = results
        if trial == "wide" and not all(torch.isfinite(t).all() for t in old):
            return {}
        errors = {"value": _agree([str(n) for n in self.p.old], old, new, "value")}
        if gradients:
            errors["gradient"] = _agree(names, old_grads, new_grads, "gradient with respect to")
        return errors

    def _differentiate(
        self,
        out: Sequence[Tensor],
        wanted: Sequence[Tensor],
        cotangents: list[Tensor],
        generator: torch.Generator,
        gradients: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        values = [t.detach() for t in out]
        if not gradients:
            return values, []
        for t in out[len(cotangents) :]:
            cotangents.append(torch.randn(t.shape, generator=generator, dtype=torch.float64))
        pairs = [(t, c) for t, c in zip(out, cotangents, strict=True) if t.requires_grad]
        if not pairs or not wanted:
            return values, [torch.zeros_like(x) for x in wanted]
        grads = torch.autograd.grad([t for t, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
        return values, [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)]

    def drawn_tables(self, sizes: scaled.Sizes, trial: str, generator: torch.Generator) -> dict[fx.Node, Tensor]:
        """Values of leaves that are powers of one decay. None of them is trained: they have no gradients to compare."""
        if self.tables is None:
            return {}
        return self.tables.drawn(sizes, lambda shape: self._log_decay(shape, trial, generator))

    def _log_decay(self, shape: Sequence[int], trial: str, generator: torch.Generator) -> Tensor:
        tokens = self._tokens()
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        # Strong: not so much that a quotient of decays, which some spellings form, overflows.
        return -torch.exp(x) * (1 / tokens if trial == "gentle" else min(1.0, _STRONGEST / tokens))

    def draw(
        self,
        node: fx.Node,
        sizes: scaled.Sizes,
        trial: str,
        generator: torch.Generator,
        evidence: dict[str, Any],
    ) -> Any:
        """A random value for a frontier node."""
        v = value(node)
        if not isinstance(v, Tensor):
            return sizes(node)
        shape = sizes(node)
        if not v.is_floating_point():
            # No branch and no index depends on it (vet), so any numbers do.
            evidence["integers"] = "drawn from 0 and 1"
            return torch.randint(0, 2, shape, generator=generator).to(v.dtype)
        domain, positive = self.domains[node]
        if domain in ("log_decay", "decay") and (trial != "wide" or domain == "decay"):
            g = self._log_decay(shape, trial, generator)
            return g if domain == "log_decay" else g.exp()
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if trial == "wide":
            x = x / max(self._tokens(), math.sqrt(self._keys()))
            return x.exp() if positive else x
        if domain == "beta":
            return 0.02 + 0.96 * torch.rand(shape, generator=generator, dtype=torch.float64)
        if domain == "key":
            return torch.nn.functional.normalize(x, dim=-1) if x.dim() else x
        x = x / math.sqrt(self._keys())
        return x.abs() if positive else x


def _near(x: Tensor, generator: torch.Generator) -> Tensor:
    """Another value of a parameter."""
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64) if x.is_floating_point() else x


def _other(x: Tensor, generator: torch.Generator) -> Tensor:
    """Another value of a buffer: of decays, decays; of anything else, where a 0 or an infinity need not stay one."""
    if not x.is_floating_point():
        return torch.randint(0, 2, x.shape, generator=generator).to(x.dtype)
    if bool(((x > 0) & (x <= 1)).all()):
        return x * (0.9 + 0.1 * torch.rand(x.shape, generator=generator, dtype=torch.float64))
    return _near(torch.where(x.isfinite(), x, 0.0), generator)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _agree(names: Sequence[str], old: Sequence[Tensor], new: Sequence[Tensor], what: str) -> float:
    """The largest error relative to its tensor's scale. Raises Rejected where it exceeds the tolerance."""
    scales = [max(_scale(a), _scale(b)) for a, b in zip(old, new, strict=True)]
    worst, floor = 0.0, _FLOOR * max(scales, default=0.0)
    for name, a, b, scale in zip(names, old, new, scales, strict=True):
        if a.shape != b.shape:
            raise Rejected(f"{what} {name} has the shape {list(a.shape)}, its replacement {list(b.shape)}")
        if not a.numel():
            continue
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise Rejected(f"{what} {name} is not finite on random inputs")
        error = float((a.double() - b.double()).abs().max())
        relative = error / max(scale, floor) if error else 0.0
        worst = max(worst, relative)
        if relative > TOLERANCE:
            raise Rejected(f"{what} {name} differs by {relative:.2g} of its scale on random inputs")
    return worst


def _scale(x: Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def _kind(node: fx.Node) -> Any:
    v = value(node)
    if isinstance(v, Tensor):
        return ("tensor", v.dtype, shape_of(node))
    return ("number", repr(tree_map(hint, v)))


def _digest(region: Region, number: dict[fx.Node, int], digest: Any) -> bool:
    for node in region.nodes:
        if node in number:
            continue
        number[node] = len(number)
        v = value(node)
        if not isinstance(v, Tensor) and node.op == "placeholder":
            digest.update(repr(_kind(node)).encode())
        elif node in region.constants:
            t = region.constants[node].detach()
            if t.numel() * t.element_size() > _HASHED_BYTES:
                return False
            digest.update(repr((t.dtype, tuple(t.shape), changes(node, t))).encode())
            digest.update(t.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif node in region.modules:
            body = region.modules[node].graph
            inner: dict[fx.Node, int] = {n: i for i, n in enumerate(body.find_nodes(op="placeholder"))}
            outputs = [n for n in tree_leaves(body.output_node().args[0]) if isinstance(n, fx.Node)]
            if not _digest(extract(outputs, list(inner)), inner, digest):
                return False
            digest.update(repr([inner[n] for n in outputs]).encode())
        else:
            arguments = tree_map(lambda x: _numbered(x, number), (list(node.args), dict(node.kwargs)))
            digest.update(repr((str(node.target), arguments, [_shape_key(t) for t in tree_leaves(v)])).encode())
    digest.update(repr([number[n] for n in region.outputs]).encode())
    return True


def _numbered(x: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(x, fx.Node):
        return f"%{number[x]}" if x in number else repr(_kind(x))
    return repr(hint(x))


def _shape_key(v: Any) -> Any:
    return (v.dtype, tuple(hint(n) for n in v.shape)) if isinstance(v, Tensor) else repr(hint(v))


_VIEWS = (
    "view _unsafe_view reshape alias select slice narrow unsqueeze squeeze permute transpose t mT expand expand_as "
    "split split_with_sizes chunk unbind flatten unflatten getitem diagonal to broadcast_to"
)
_NO_MEMORY = frozenset(_VIEWS.split())


def _bytes(regions: Sequence[Region], sizes: scaled.Sizes) -> tuple[int, int]:
    """(what is live at once, at most; what autograd may keep), in bytes of float64."""
    peak = total = 0
    for region in regions:
        owner = {node: node for node in region.inputs}  # whose memory a view reads
        size = {node: _elements(node, sizes) for node in region.inputs}
        views = dict.fromkeys(region.inputs, 1)
        live = kept = sum(size.values())
        for node in region.nodes:
            name = short_name(node) if node.op == "call_function" else ""
            if name in _NO_MEMORY and (base := owner.get(node.args[0])) is not None:  # type: ignore[arg-type]
                owner[node] = base
                views[base] += 1
            else:
                owner[node], views[node] = node, 1
                size[node] = _elements(node, sizes) * (_OP_COPIES if name.startswith("lattn::") else 1)
                live, kept = live + size[node], kept + size[node]
                peak = max(peak, live)
            if name.startswith("higher_order::"):
                loop = loop_of(node, region)
                turns = shape_of(loop.scanned[0])[0] if loop.scanned else _WHILE_TURNS
                kept += turns * sum(_elements(inner, sizes) for inner in loop.body.nodes)
            for dead in region.last_use.get(node, ()):
                views[owner[dead]] -= 1
                live -= 0 if views[owner[dead]] else size[owner[dead]]
        total += kept
    return 8 * peak, 8 * total


def _elements(node: fx.Node, sizes: scaled.Sizes) -> int:
    v = value(node)
    if isinstance(v, Tensor):
        return math.prod(sizes(node))
    return sum(math.prod(shape) for shape in sizes(node)) if isinstance(v, (list, tuple)) else 0

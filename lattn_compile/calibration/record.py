"""One exact run of a model, in which every recurrence that a compile finds is measured where it stands.

The model is compiled by a backend that runs the passes of `lattn_compile` under an exact recipe, puts a function in the
place of each `lattn::` op, and runs the graph eagerly. The function computes the op, so that the model goes on as ever,
and hands the op's inputs to the site's `Errors` before it returns: of all sites and batches only one set of inputs is
held at a time, on the device where it was made. Bodies of regions (activation checkpoints, ...) are graphs like the
rest.

Nothing of this stays with the model: marks, flags, buffers and random generators are put back, and what Dynamo compiled
is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lattn_compile import backend, phase
from lattn_compile.attach import GROUP, PATH, RECIPE, uncompiled, unwrapped_path
from lattn_compile.calibration.measure import Errors
from lattn_compile.errors import LattnError, Reason, reason
from lattn_compile.lowering import _torch_calibrate as dynamo
from lattn_compile.lowering import _torch_private as private
from lattn_compile.passes import PassContext, SiteNode, annotate, capture, lengths
from lattn_compile.passes import run as run_passes
from lattn_compile.passes.context import graph_modules_of, shape_of, value_of
from lattn_compile.passes.recognize import overload_of
from lattn_compile.passes.report import report_of
from lattn_compile.policy import Exact, Policy, Recipe

__all__ = ["RecordedSite", "Recorder"]


@dataclass(eq=False)
class RecordedSite:
    """One recurrence of the model, and what was measured at it.

    Attributes:
        id, kind, decay: as in a report. paths: of the layers that run it; several if a region's body serves them all.
        own: the policy that the model's own code gives it, which no recipe changes; else None.
        sizes: H, HV, K, V. has_beta: whether the recurrence has a write strength. exact_bytes: its state in exact.
        excluded: why candidates were not measured.
        errors: of the others.
    """

    id: str
    kind: str
    decay: str
    paths: tuple[str, ...]
    own: Policy | None
    errors: Errors
    itemsize: int = 4
    sizes: tuple[int, int, int, int] | None = None
    has_beta: bool = False
    excluded: dict[Policy, Reason] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        name = self.id.removeprefix(self.paths[0])
        return tuple(path + name for path in self.paths)

    @property
    def exact_bytes(self) -> int:
        assert self.sizes is not None
        _, HV, K, V = self.sizes
        return HV * K * V * self.itemsize

    def nbytes(self, policy: Policy) -> int:
        """Bytes of one layer's state for one sequence."""
        if isinstance(policy.write, Exact):
            return self.exact_bytes
        assert self.sizes is not None
        return policy.nbytes(*self.sizes, decay=self.decay, has_beta=self.has_beta)

    def record(self, call: Mapping[str, Any], candidates: Sequence[Policy], drop_useless: bool) -> None:
        """One call of the op, by argument names."""
        k, v = call["k"], call["v"]
        sizes = (k.shape[2], v.shape[2], k.shape[3], v.shape[3])
        if self.sizes not in (None, sizes):
            raise LattnError(
                "model",
                got=f"two recurrences that are both {self.id}, with H, HV, K, V = {self.sizes} and {sizes}",
                want="one recurrence of one size a site",
                remedy="Put them into modules of their own: a recipe could not tell them apart either.",
            )
        self.sizes, self.has_beta = sizes, call["beta"] is not None
        if self.own is None:
            for policy in candidates:
                if drop_useless and self.nbytes(policy) >= self.exact_bytes:
                    self.excluded.setdefault(policy, reason("NO_GAIN"))
            self.errors.add(call, [policy for policy in candidates if policy not in self.excluded])

    def merge(self, other: RecordedSite) -> None:
        """Add what another process recorded at the same site.

        Raises:
            LattnError: it has other sizes there, or a policy of its own.
        """
        known = (self.kind, self.own, self.sizes or other.sizes)
        if known != (other.kind, other.own, other.sizes or self.sizes):
            raise LattnError(
                "process_group",
                got=f"{self.id} as {known} on one rank and {(other.kind, other.own, other.sizes)} on another",
                want="the same model on every rank",
                remedy="Build and load the model in the same way everywhere.",
            )
        self.sizes, self.has_beta = self.sizes or other.sizes, self.has_beta or other.has_beta
        for policy, why in other.excluded.items():
            self.excluded.setdefault(policy, why)
        self.errors.merge(other.errors)


class Recorder:
    """Runs a model on batches and measures its sites.

    Args:
        candidates: policies to measure. drop_useless: not those that take as much as exact at a site.
        horizon: tokens to decode.
        dense_cache: whether states travel between calls as dense tensors; None: where the graph does that.

    Attributes:
        sites: by id, in the order in which they were found. unmatched: what looked like one, each with the reason.
        batches: how many were run. frames: what Dynamo broke and skipped.
    """

    def __init__(
        self, candidates: Sequence[Policy], horizon: int, dense_cache: bool | None, drop_useless: bool
    ) -> None:
        self.candidates, self.drop_useless = tuple(candidates), drop_useless
        self.horizon, self.dense_cache = horizon, dense_cache
        self.sites: dict[str, RecordedSite] = {}
        self.unmatched: dict[str, None] = {}
        self.batches = 0
        self.frames = dynamo.Frames()
        self._codes: set[types.CodeType] = set()

    def run(self, model: nn.Module, batches: Iterable[Any]) -> None:
        """Raises LattnError for a batch of another kind; what the model raises passes through."""
        entry = _entry(model)
        compiled = torch.compile(entry, backend=self._backend())
        try:
            with _untouched(model), dynamo.frames() as self.frames:
                _mark(model)
                for batch in batches:
                    args, kwargs = _arguments(self.batches, batch)
                    with torch.no_grad():
                        compiled(*args, **kwargs)
                    self.batches += 1
        finally:
            dynamo.forget({*self._codes, entry.__code__})

    def gather(self, group: dist.ProcessGroup) -> None:
        """Put together what the ranks of `group` recorded, on every one of them, in the order of ranks."""
        mine = (self.sites, self.unmatched, self.batches, self.frames.breaks, self.frames.skipped)
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        self.sites, self.unmatched, self.batches, self.frames = {}, {}, 0, dynamo.Frames()
        for sites, unmatched, batches, breaks, skipped in found:
            for name, site in sites.items():
                if name in self.sites:
                    self.sites[name].merge(site)
                else:
                    self.sites[name] = site
            self.unmatched |= unmatched
            self.batches += batches
            self.frames.breaks, self.frames.skipped = self.frames.breaks + breaks, self.frames.skipped + skipped

    def _backend(self) -> Callable[..., Any]:
        def measure(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if (code := dynamo.traced_code()) is not None:
                self._codes.add(code)
            try:
                return self._compile(gm, inputs)
            except LattnError as error:  # raised from here it would reach the user wrapped in Dynamo's own
                return functools.partial(_raise, error)

        # The name by which a trace is known to be one of ours, so that known calls are captured in it.
        measure.__name__ = private.BACKEND
        return measure

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        mine = private.current_compile()
        taken = [entry for trace, entry in capture.REFUSALS if trace == mine]
        capture.REFUSALS[:] = [(trace, entry) for trace, entry in capture.REFUSALS if trace != mine]
        refused = [entry for entry in taken if isinstance(entry, capture.Refused)]
        context = PassContext(gm, None, refused=refused, live=True, resumed=private.resumes_a_frame())
        with backend.values_known(context, inputs):
            run_passes(context)
        for found in report_of(context).unmatched:
            self.unmatched[f"{found.path or found.node}: [{found.reason.code}] {found.reason.text}"] = None
        for site in context.sites:
            self._watch(site)
        for module in graph_modules_of(context.module):
            module.recompile()
        private.guard_global(phase.__name__, phase.KIND)
        rewritten, appended = context.module, tuple(context.appended)

        def run(*args: Any) -> Any:
            active = dict(zip(phase.NAMES, lengths.active(), strict=True))
            return rewritten(*args, *(active[name] for name in appended))

        return torch.compiler.disable(run)  # type: ignore[no-any-return]

    def _watch(self, node: SiteNode) -> None:
        """Put a function that measures in the place of a site's op."""
        overload = overload_of(node.node)
        assert overload is not None and node.policy is not None
        site = self.sites.get(node.id)
        if site is None:
            own = None if isinstance(node.policy.write, Exact) else node.policy
            errors = Errors(node.id, self.horizon)
            paths = (node.path, *node.other_paths)
            site = RecordedSite(node.id, node.kind.name, node.kind.decay, paths, own, errors, _itemsize(node))
            self.sites[node.id] = site
        for policy in self.candidates:
            why = _obstacle(node, policy, self.dense_cache)
            if why is not None:
                site.excluded.setdefault(policy, why)
        node.node.target = self._measuring(overload, site)

    def _measuring(self, overload: torch._ops.OpOverload, site: RecordedSite) -> Callable[..., Any]:
        """The op, which measures before it computes."""
        arguments = overload._schema.arguments

        def lattn_measured(*args: Any, **kwargs: Any) -> Any:
            call = {a.name: a.default_value for a in arguments if a.has_default_value()}
            call |= {**dict(zip([a.name for a in arguments], args, strict=False)), **kwargs}
            site.record(call, self.candidates, self.drop_useless)
            return overload(*args, **kwargs)

        return lattn_measured


def _raise(error: LattnError, *args: Any) -> Any:
    raise error.with_traceback(None)


def _itemsize(site: SiteNode) -> int:
    """Bytes of one value of the state in exact: fp32, or what the graph itself keeps."""
    if site.proposal is not None and site.proposal.state_dtype is not None:
        return int(site.proposal.state_dtype.itemsize)
    state = value_of(site.arguments["initial_state"])
    return min(4, state.element_size()) if isinstance(state, Tensor) else 4


def _obstacle(site: SiteNode, policy: Policy, dense_cache: bool | None) -> Reason | None:
    """Why the site could not carry `policy`, in the use that is meant rather than the one that was traced."""
    found = annotate.obstacle(site, policy)
    if dense_cache is None or (found is not None and found.code == "STATE_DTYPE"):
        return found
    if dense_cache and not policy.rewrites_alike:
        return reason("DENSE_CACHE", f"the policy is {policy!r}")
    if found is None or found.code != "DENSE_CACHE":
        return found
    k, v = shape_of(site.arguments["k"]), shape_of(site.arguments["v"])
    try:
        if k is not None and v is not None:
            policy.check_shape(k[-1], v[-1])
    except LattnError as error:
        return reason("FORMAT_SHAPE", str(error))
    return None


def _entry(model: nn.Module) -> Any:
    """A function that calls `model`, with code of its own: what Dynamo compiles for it is not in the model's way."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)


def _arguments(number: int, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return (), dict(batch)
    if isinstance(batch, list | tuple):
        return tuple(batch), {}
    raise LattnError(
        f"batches[{number}]",
        got=type(batch).__name__,
        want="a tensor, a dict of keyword arguments, or a tuple of positional ones",
        remedy="Each batch is given to the model: model(x), model(**x) or model(*x).",
    )


def _mark(model: nn.Module) -> None:
    """Tell every module its path, as `lc.attach` does, and each a group and a rule of its own: no two layers may share
    a graph, or the sites of one would be counted as those of the other."""
    paths = {module: unwrapped_path(name) for name, module in model.named_modules()}
    exact = Policy(write=Exact())
    recipe = Recipe(rules=[*((glob.escape(path), exact) for path in paths.values() if path), ("*", exact)])
    for module, path in paths.items():
        for name, value in ((GROUP, f"calibrate:{path}"), (PATH, path), (RECIPE, recipe)):
            object.__setattr__(module, name, value)
        # Layers that the user compiled, in either way, run as they are: in a graph of ours, or in a frame of their own.
        module.__dict__["_compiled_call_impl"] = None
        if uncompiled(module) is not module:
            module.__dict__["forward"] = uncompiled(module).__call__


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and random numbers are always the same ones; afterwards, attributes and buffers
    of all modules, and the random generators, are as they were."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    values = [{name: b.detach().clone() for name, b in own.items() if b is not None} for own in buffers]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, were, own, kept in zip(modules, attributes, buffers, values, strict=True):
            for name in [name for name in module.__dict__ if name not in were]:
                del module.__dict__[name]
            for name, value in were.items():
                if module.__dict__.get(name) is not value:
                    module.__dict__[name] = value
            module._buffers.clear()
            module._buffers.update(own)
            with torch.no_grad():
                for name, buffer in own.items():
                    if buffer is not None and not _same(buffer, kept[name]):
                        buffer.copy_(kept[name])


def _same(a: Tensor, b: Tensor) -> bool:
    # Bit for bit, NaN included; and what did not change is not written, which would count as a change for autograd.
    return torch.equal(*(x.detach().flatten().contiguous().view(torch.uint8) for x in (a, b)))

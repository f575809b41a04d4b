"""Times a decode step on packed states on this machine's GPU, beside flash-linear-attention's on an fp32 state.

    python benchmarks/decode.py [--batch 1 8 64 256] [--only REGEX] [--seconds 600] [--out FOLDER]
    python benchmarks/decode.py --launch all --only 'gdn int8'          every way to launch (`kernels/packed_launch.py`)
    python benchmarks/decode.py --plot RESULTS.json                     draws what an earlier run wrote

Sizes of Qwen3-Next (GDN) and Kimi Linear (KDA): H = 16, HV = 32, K = V = 128, bf16 inputs, one token a sequence; gates
ready, l2norm in the kernel, states in a pool of slots and written in place, records of replay appended. FLA is
`fused_recurrent` on the same inputs, its fp32 state in place.

A CUDA graph steps sets of sequences one after the other, enough of them that one round touches 256 MB and nothing of a
state is in the cache when it is read. Replay: the sets stand at all places of the window, equally many at each, so a
graph has as many steps of every kind as a whole cycle, its flush included. Times are medians of replays over the steps
in a graph. Bytes: those that a step cannot do without, averaged over the window (`Step.traffic`); their rate as a share
of a copy's in the same run.

Before it is timed, a case is held to float64 on a few of its sequences, across a flush; one that is off is named and
not timed, and the exit code is 1. Kernels are compiled in several processes first. Lines are printed as they come, and
`decode_<gpu>.md`, `.json` and `.svg` are written into FOLDER anew with each; after --seconds nothing is begun.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import lattn_compile.ops  # noqa: F401 - registers the ops
from benchmarks import decode_report
from benchmarks.compiling import compile_in_parallel, only_compile
from lattn_compile.bench.timing import copy_bandwidth, milliseconds
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import packed, packed_launch
from lattn_compile.packed import layout
from lattn_compile.packed.ops import OPS
from lattn_compile.policy import Exact, Policy, Replay, TwoPrecision

DEVICE = "cuda"
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
SCALE = KEY**-0.5
TOUCHED = 256 * 10**6  # bytes of states that a round reads at least
LAUNCHES = 24  # of a graph, at least
CHECKED = 3  # sequences held to float64


@dataclass(frozen=True)
class Case:
    """A kind of decay, and how its states are stored."""

    kind: str
    policy: Policy
    what: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.what}"


WRITES = {
    "exact": Policy(write=Exact()),
    "bf16": Policy("bf16"),
    "int8": Policy("int8"),
    "fp8": Policy("fp8"),
    "nvfp4": Policy("nvfp4"),
    "int8 replay 8": Policy("int8", write=Replay(8)),
    "int8 replay 16": Policy("int8", write=Replay(16)),
    "fp8 replay 8": Policy("fp8", write=Replay(8)),
    "nvfp4 replay 16": Policy("nvfp4", write=Replay(16)),
    "fp8 two-precision 16": Policy(write=TwoPrecision(16)),
}
CASES = tuple(Case(kind, policy, what) for kind in ("gdn", "kda") for what, policy in WRITES.items())


def quantizer_of(case: Case) -> Quantizer | None:
    """Of the state, in two-precision of the read copy."""
    call = layout.call_of(case.policy)
    return None if call.write == "exact" else Quantizer(parse(call.state_format))


def tokens(kind: str, batch: int) -> list[Tensor]:
    """q, k, v, g, beta of one token of every sequence; the same numbers for the first sequences of any batch."""
    rng = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, 1, *shape, generator=rng, device=DEVICE)

    g = -0.1 * torch.nn.functional.softplus(normal(VALUE_HEADS, *([KEY] if kind == "kda" else [])))
    q, k = (normal(KEY_HEADS, KEY).bfloat16() for _ in range(2))
    return [q, k, normal(VALUE_HEADS, VALUE).bfloat16(), g, normal(VALUE_HEADS).sigmoid().bfloat16()]


class Step:
    """Steps of `sets` sets of `batch` sequences each, a pool of as many slots each.

    Attributes:
        cursor: set i's is i modulo the window. stored: by name, `[slots, ...]`.
    """

    def __init__(self, case: Case, batch: int, sets: int, *, filled: bool = True) -> None:
        self.case, self.batch, self.call = case, batch, layout.call_of(case.policy)
        decay = "head" if case.kind == "gdn" else "channel"
        self.heads = layout.Heads(KEY_HEADS, VALUE_HEADS, KEY, VALUE, decay, True)
        self.window = self.call.window or 1
        self.sets = self.window * -(-sets // self.window) if filled else 1
        self.tokens = tokens(case.kind, batch)
        slots = self.sets * batch if filled else 1  # kernels are compiled without a pool
        self.stored = layout.empty(self.call, self.heads, slots, DEVICE)
        self.cursor = torch.arange(self.sets, device=DEVICE, dtype=torch.int32) % self.window
        self.cursor = self.cursor.repeat_interleave(batch)
        own = [slice(i * batch, (i + 1) * batch) for i in range(self.sets)] if filled else [slice(None)]
        self.pools = [({n: x[rows] for n, x in self.stored.items()}, self.cursor[rows]) for rows in own]
        self._every = torch.arange(batch, device=DEVICE, dtype=torch.int32)
        self._quantize = quantizer_of(case)
        if filled:
            self._fill(slots)

    def _fill(self, slots: int) -> None:
        """Every slot with one of a few states, and every place of the rings with a record."""
        rng = torch.Generator(DEVICE).manual_seed(1)
        few = torch.randn(min(8, slots), VALUE_HEADS, KEY, VALUE, generator=rng, device=DEVICE)
        made = layout.handed_over(few, self.call, self.heads, rule="delta")
        for name, x in self.stored.items():
            if name.startswith("ring_"):
                x.normal_(generator=rng)
                if name == "ring_k":
                    x.mul_(KEY**-0.5)
                if name == "ring_g":
                    x.abs_().mul_(-0.05)
                if name == "ring_beta":
                    x.sigmoid_()
                continue
            source = made[name].view(torch.uint8) if x.dtype.itemsize == 1 else made[name]
            into = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
            for first in range(0, slots, len(few)):
                into[first : first + len(few)] = source[: slots - first]

    def run(self, i: int) -> Tensor:
        """One step of set i; o `[B, 1, HV, V]`."""
        q, k, v, g, beta = self.tokens
        return packed.step(
            q, k, v, g, beta, *self.pools[i], self._every, None, None, None, rule="delta", scale=SCALE,
            qk_l2norm=True, padding_slot=-1, write=self.call.write, readout=self.call.readout, quantize=self._quantize,
            window=self.call.window, anchor=self.call.anchor,
        )  # fmt: skip

    def _records(self, slots: slice, cursor: Tensor) -> dict[str, Tensor]:
        """Rows of slots, without what the rings hold beyond the cursors."""
        found = {}
        for name, x in self.stored.items():
            rows = x[slots].clone()
            if name.startswith("ring_"):
                own = torch.arange(rows.shape[1], device=DEVICE) < cursor[slots][:, None]
                rows = rows[own]
            found[name] = rows
        return found

    def check(self) -> list[str]:
        """What is off, in words: outputs, records and states of the last sequences of set 0, step by step.

        Every step from the rows as they were stored. bf16 outputs are within 2^-9 of float64's; a code may be rounded
        the other way now and then.
        """
        last = slice(max(self.batch - CHECKED, 0), self.batch)
        if self.window > 1:
            self.cursor[: self.batch] = max(self.window - 3, 0)
        op = getattr(torch.ops.lattn, OPS[self.call.write])
        options = {**self.call.op_options(), "implementation": "reference", "rule": "delta", "scale": SCALE}
        wrong = []
        for i in range(2 if self.window == 1 else 4):
            rows = {n: x[last].clone() for n, x in self.stored.items()}
            rows = {n: x.double() if x.dtype is torch.float32 else x for n, x in rows.items()}
            cursor = self.cursor[last].clone()
            exact = [x[last].double() for x in self.tokens]
            want = op(*exact, list(rows.values()), cursor, *(None,) * 6, **options, qk_l2norm=True)
            got = self.run(0)[last].double()
            errors = {"o": (float((got - want).norm() / want.norm()), 3e-3)}
            errors["cursor"] = (float((cursor != self.cursor[last]).sum()), 0.0)
            for name, y in self._records(last, self.cursor).items():
                x = rows[name]
                if name.startswith("ring_"):
                    x = x[torch.arange(x.shape[1], device=DEVICE) < cursor[:, None]]
                if y.dtype.itemsize == 1:
                    share = (y.view(torch.uint8) != x.view(torch.uint8)).double().mean()
                    errors[name] = (float(share), 1e-3)
                elif y.numel():
                    error = (y.double() - x.double()).norm() / x.double().norm()
                    errors[name] = (float(error), 4e-3 if y.dtype is torch.bfloat16 else 1e-5)
            wrong += [f"step {i}, {n}: {e:.2g} > {bound:.0e}" for n, (e, bound) in errors.items() if not e <= bound]
        if self.window > 1:
            self.cursor[: self.batch] = 0
        return wrong

    @property
    def inputs(self) -> int:
        """Bytes of q, k, v, g, beta and o."""
        return sum(x.nbytes for x in self.tokens) + self.tokens[2].nbytes

    def _bytes(self, *prefixes: str, but: tuple[str, ...] = ()) -> int:
        """Of one set's rows of the tensors whose names begin so."""
        held = (x for n, x in self.stored.items() if n.startswith(prefixes) and not n.startswith(but))
        return sum(x.nbytes for x in held) // self.sets

    @property
    def read(self) -> int:
        """Bytes of states that every step reads: the codes, in two-precision the read copies'."""
        two = self.call.write == "two_precision"
        return self._bytes("read_") if two else self._bytes("", but=("ring_",))

    @property
    def resident(self) -> float:
        """Bytes that a set takes, as a share of fp32 states'."""
        return self._bytes("") / (self.batch * VALUE_HEADS * KEY * VALUE * 4)

    @property
    def traffic(self) -> float:
        """Bytes that a step must move, averaged over the window: inputs and outputs; the state read, and written at the
        window's end, in two-precision with its anchor read and written; one record appended; the records so far of
        k, u and g read, half a window of them on average; in two-precision those of v and beta once a window."""
        if self.window == 1:
            return self.inputs + 2 * self.read
        places = self.window - 1
        keys, raw = self._bytes("ring_k", "ring_u", "ring_g"), self._bytes("ring_v", "ring_beta")
        appended = (keys + raw) / places * (places / self.window)
        flushed = self.read + (2 * self._bytes("codes") + raw if self.call.write == "two_precision" else 0)
        return self.inputs + self.read + appended + keys / 2 + flushed / self.window


def sets_of(bytes_a_set: int) -> int:
    return max(1, -(-TOUCHED // bytes_a_set))


def microseconds(run: Callable[[int], object], sets: int) -> float:
    """Of one step, in a graph of the sets' steps."""
    launches = sets * max(1, math.ceil(LAUNCHES / sets))

    def cycle() -> None:
        for i in range(launches):
            run(i % sets)

    return 1e3 * milliseconds(cycle) / launches


def fla(kind: str, batch: int, sets: int) -> tuple[Callable[[int], Tensor], Tensor]:
    """FLA's step of set i in place, which returns o; and the states `[sets, B, HV, K, V]`.

    Its GDN function makes a new state, so its kernel is launched here as that does, on one state for both.
    """
    q, k, v, g, beta = tokens(kind, batch)
    states = torch.randn(sets, batch, VALUE_HEADS, KEY, VALUE, device=DEVICE)
    if kind == "kda":
        rule = importlib.import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd

        def step(i: int) -> Tensor:
            return rule(  # type: ignore[no-any-return]
                q=q, k=k, v=v, g=g, beta=beta, initial_state=states[i], scale=SCALE, inplace_final_state=True,
                use_qk_l2norm_in_kernel=True, out=torch.empty_like(v),
            )[0]  # fmt: skip
    else:
        module = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
        kernel, columns = module.fused_recurrent_gated_delta_rule_fwd_kernel, 8

        def step(i: int) -> Tensor:
            o = torch.empty_like(v)
            kernel[(VALUE // columns * batch * VALUE_HEADS,)](
                q=q, k=k, v=v, g=g, gk=None, gv=None, beta=beta, A_log=None, dt_bias=None, o=o, h0=states[i],
                ht=states[i], cu_seqlens=None, scale=SCALE, T=1, H=KEY_HEADS, HV=VALUE_HEADS, K=KEY, V=VALUE, BK=KEY,
                BV=columns, IS_BETA_HEADWISE=True, USE_QK_L2NORM_IN_KERNEL=True, APPLY_BETA_SIGMOID=False,
                ALLOW_NEG_EIGVAL=False, STATE_V_FIRST=False, num_warps=1, num_stages=3,
            )  # fmt: skip
            return o

    return step, states


def check_fla(kind: str, step: Callable[[int], Tensor], states: Tensor) -> list[str]:
    """What is off in FLA's step, in words: that what it is asked for is what we compute."""
    batch = states.shape[1]
    last = slice(max(batch - CHECKED, 0), batch)
    want = states[0, last].double()
    cursor = torch.zeros(len(want), dtype=torch.int32, device=DEVICE)
    exact = [x[last].double() for x in tokens(kind, batch)]
    o = torch.ops.lattn.decode_(*exact, [want], cursor, *(None,) * 6, write="exact", scale=SCALE, qk_l2norm=True)
    pairs = ((step(0)[last].double(), o, 3e-3), (states[0, last].double(), want, 1e-5))
    errors = [(float((x - y).norm() / y.norm()), bound) for x, y, bound in pairs]
    return [f"FLA {kind} B = {batch}: {e:.2g} > {bound:.0e}" for e, bound in errors if not e <= bound]


TABLE = dict(packed_launch.CHOSEN)


def use(way: str) -> None:
    """Has every step launched in one way; "table": as the table says."""
    packed_launch.CHOSEN.update(TABLE if way == "table" else dict.fromkeys(TABLE, (way,) * 3))


def different(case: Case, batch: int, ways: list[str]) -> list[str]:
    """Without those that launch the case as one before does."""
    quantize, call = quantizer_of(case), layout.call_of(case.policy)
    found = {}
    for way in ways:
        use(way)
        windowed = call.window is not None
        own = packed_launch.launch_of(quantize, batch * VALUE_HEADS, window=windowed)
        form = (packed_launch.ring_layout if windowed else packed_launch.stored_layout)(KEY, VALUE, quantize, own)
        tiles = packed_launch.tiles_a_program(own, form, KEY_HEADS, VALUE_HEADS, batch, keys=not windowed)
        found.setdefault((form, tiles, own.early, own.sooner, own.heads), way)
    return list(found.values())


def warm(cases: list[Case], batches: list[int], ways: list[str], mine: int, processes: int) -> None:
    """Compiles every `processes`-th kernel that the benchmark launches; launches none."""
    only_compile(mine, processes)
    for way in ways:
        use(way)
        for case in cases:
            for batch in batches:
                Step(case, batch, 1, filled=False).run(0)
    for kind in dict.fromkeys(case.kind for case in cases):
        with contextlib.suppress(ImportError):
            fla(kind, 1, 1)[0](0)


class Found:
    """What was measured so far, printed and written as it comes."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.broken = out, list[str]()
        self.results: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": importlib.import_module("triton").__version__,
            "shape": {"H": KEY_HEADS, "HV": VALUE_HEADS, "K": KEY, "V": VALUE},
            "copy_bytes_per_second": copy_bandwidth(),
            "fla": [],
            "rows": [],
        }

    def wrong(self, *lines: str) -> None:
        self.broken += lines
        print("WRONG", *lines, sep="\n  ", flush=True)

    def share(self, traffic: float, us: float) -> float:
        """Of a copy's bandwidth."""
        return float(traffic / (us / 1e6) / self.results["copy_bytes_per_second"])

    def add(self, which: str, row: dict[str, Any]) -> None:
        self.results[which].append(row)
        print({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            decode_report.write(self.results, self.out / f"decode_{self.results['gpu'].lower().replace(' ', '_')}")


def measure_fla(found: Found, kind: str, batch: int) -> float | None:
    state = batch * VALUE_HEADS * KEY * VALUE * 4
    sets = sets_of(state)
    try:
        step, states = fla(kind, batch, sets)
        if wrong := check_fla(kind, step, states):
            found.wrong(*wrong)
            return None
        us = microseconds(step, sets)
    except Exception as error:
        print(f"without FLA {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    x = tokens(kind, batch)
    traffic = 2 * state + sum(y.nbytes for y in x) + x[2].nbytes
    found.add("fla", {"kind": kind, "batch": batch, "us": us, "bandwidth": found.share(traffic, us)})
    return us


def measure_one(found: Found, case: Case, batch: int, way: str, baseline: float | None) -> None:
    use(way)
    one = Step(case, batch, 1)
    sets = sets_of(one.read)
    step = Step(case, batch, sets) if sets > one.sets else one
    del one
    if wrong := step.check():
        found.wrong(*(f"{case.name} {way} B = {batch}: {line}" for line in wrong))
        return
    us = microseconds(step.run, step.sets)
    row = {
        "kind": case.kind,
        "state": case.what,
        "batch": batch,
        "launch": way,
        "us": us,
        "times_fla": None if baseline is None else baseline / us,
        "bytes": step.traffic,
        "bandwidth": found.share(step.traffic, us),
        "resident": step.resident,
    }
    found.add("rows", row)


def measure(found: Found, cases: list[Case], batches: list[int], ways: list[str], until: float) -> None:
    for batch in batches:
        baseline: dict[str, float | None] = {}
        for case in cases:
            for way in different(case, batch, ways):
                if time.time() > until:
                    print(f"no time for B = {batch} {case.name} {way}", flush=True)
                    continue
                if case.kind not in baseline:
                    baseline[case.kind] = measure_fla(found, case.kind, batch)
                try:
                    measure_one(found, case, batch, way, baseline[case.kind])
                except Exception as error:
                    found.wrong(f"{case.name} {way} B = {batch}: {type(error).__name__}: {str(error)[:300]}")
                    if "CUDA error" in str(error):
                        return
                torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 64, 8, 1, 512, 128, 32, 16, 4, 2])
    parser.add_argument("--only", default="", help="a regular expression, for example 'gdn (exact|int8)$'")
    parser.add_argument("--launch", nargs="+", default=["table"], choices=["table", "all", *packed_launch.LAUNCHES])
    parser.add_argument("--seconds", type=float, default=3600.0, help="nothing is begun after that")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, metavar="RESULTS.json")
    parser.add_argument("--warm", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot is not None:
        decode_report.write(json.loads(args.plot.read_text()), args.plot.with_suffix(""))
        return 0
    cases = [case for case in CASES if re.search(args.only, case.name)]
    if not cases:
        parser.error(f"no case is named so; there are: {', '.join(case.name for case in CASES)}")
    ways = list(packed_launch.LAUNCHES) if "all" in args.launch else args.launch
    if args.warm:
        warm(cases, args.batch, ways, *args.warm)
        return 0
    until = time.time() + args.seconds
    compile_in_parallel([__file__, *sys.argv[1:]], args.processes, until)
    print(f"compiled, {until - time.time():.0f} s left", flush=True)
    found = Found(args.out)
    measure(found, cases, args.batch, ways, until)
    print(decode_report.markdown(found.results))
    return int(bool(found.broken))


if __name__ == "__main__":
    sys.exit(main())

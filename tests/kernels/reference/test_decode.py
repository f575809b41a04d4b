"""The token-by-token reference: it is the float64 loop, its adjoint is autograd of that loop, and it keeps its bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.reference import decode
from lattn_compile.recurrence import BY_NAME
from lattn_compile.testing import HOSTILE, make_inputs, oracle, straight_through

KINDS = tuple(BY_NAME)
READOUTS = ("before_write", "after_write")
NAMES = ("q", "k", "v", "g", "beta")


@dataclasses.dataclass
class Case:
    """Flat tokens of sequences of `lengths` with `gap` tokens of NaN before, between and after them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    state: Tensor
    starts: Tensor
    lengths: Tensor
    options: dict[str, Any]

    @property
    def inside(self) -> Tensor:
        mask = torch.zeros(self.q.shape[0], dtype=torch.bool)
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            mask[start : start + length] = True
        return mask

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name in NAMES if (x := getattr(self, name)) is not None}

    def arguments(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.state, self.starts, self.lengths)

    def forward(self, every: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(o, final state, checkpoints)`, all NaN where nothing was written."""
        o = torch.full_like(self.v, torch.nan, dtype=self.state.dtype)
        checkpoints = None
        if every:
            slots = self.q.shape[0] // every + len(self.lengths)
            checkpoints = torch.full((slots, *self.state.shape[1:]), torch.nan, dtype=self.state.dtype)
        return o, decode.forward(*self.arguments(), o, checkpoints, every, **self.options), checkpoints

    def backward(
        self, grad_o: Tensor, grad_final: Tensor | None, checkpoints: Tensor | None = None, every: int = 0
    ) -> dict[str, Tensor]:
        """Gradients by name, NaN where nothing was written."""
        grads = {f"d{n}": torch.full_like(x, torch.nan, dtype=self.state.dtype) for n, x in self.tensors().items()}
        dstate = decode.backward(grad_o, grad_final, *self.arguments(), checkpoints, every, grads, **self.options)
        return {name[1:]: x for name, x in grads.items()} | {"state": dstate}

    def step(self, t: int, state: Tensor, *, count: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens [t, t + count) of every sequence that has them, as a call of its own on tensors of its own."""
        lengths = (self.lengths - t).clamp(0, count)
        rows = torch.cat([torch.arange(s + t, s + t + n) for s, n in zip(self.starts, lengths, strict=True)])
        own = dataclasses.replace(
            self,
            **{name: x[rows].clone() for name, x in self.tensors().items()},
            state=state,
            starts=lengths.cumsum(0) - lengths,
            lengths=lengths,
        )
        o, final, _ = own.forward()
        return o, final


def make_case(
    kind: str,
    lengths: Sequence[int] = (4, 7),
    *,
    fmt: str | None = None,
    readout: str = "before_write",
    gap: int = 1,
    dtype: torch.dtype = torch.float64,
    beta: bool = True,
    **shape: Any,
) -> Case:
    shape = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6} | shape
    x = make_inputs(kind, lengths=[n for length in lengths for n in (gap, length)] + [gap], dtype=dtype, **shape)
    assert x.cu_seqlens is not None and x.initial_state is not None
    starts = x.cu_seqlens[1:-1:2].long()
    case = Case(
        *(None if t is None else t.squeeze(0) for t in (x.q, x.k, x.v, x.g, x.beta if beta else None)),
        state=x.initial_state[1::2].clone(),
        starts=starts,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        options=x.options() | {"quantize": Quantizer(parse(fmt)) if fmt else None, "readout": readout},
    )
    for tensor in case.tensors().values():
        tensor[~case.inside] = torch.nan
    return case


def loop(case: Case, grad_o: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The oracle, one sequence at a time: o (NaN outside), final states and every gradient (NaN outside)."""
    leaves = {n: x.clone().requires_grad_() for n, x in (case.tensors() | {"state": case.state}).items()}
    fmt = case.options["quantize"]
    options = {name: case.options[name] for name in ("rule", "scale", "qk_l2norm", "readout")}
    options |= {"write": "exact"} if fmt is None else {"write": "token", "state_format": str(fmt.fmt)}
    o = torch.full_like(case.v, torch.nan, dtype=torch.float64)
    finals, loss = [], torch.zeros((), dtype=torch.float64)
    for i, (start, length) in enumerate(zip(case.starts.tolist(), case.lengths.tolist(), strict=True)):
        rows = slice(start, start + length)
        tokens = [leaves[n][rows][None] if n in leaves else None for n in NAMES]
        got = oracle(*tokens, leaves["state"][i : i + 1], cursor=torch.zeros(1, dtype=torch.int32), **options)
        o[rows] = got.o[0].detach()
        finals.append(got.final_state[0].detach())
        loss = loss + (got.o[0] * grad_o[rows]).sum() + (got.final_state[0] * grad_final[i]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    for name in case.tensors():
        gradients[name][~case.inside] = torch.nan
    return o, torch.stack(finals), gradients


def cotangents(case: Case, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random ones, NaN at tokens of no sequence."""
    rng = torch.Generator().manual_seed(seed)
    grad_o = torch.randn(case.v.shape, generator=rng, dtype=torch.float64).to(case.state.dtype)
    grad_o[~case.inside] = torch.nan
    return grad_o, torch.randn(case.state.shape, generator=rng, dtype=torch.float64).to(case.state.dtype)


def assert_near(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-9, floor: float = 0.0) -> None:
    """Relative to the largest element, or `floor`; NaN only where, and everywhere where, NaN is wanted."""
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN where there should be none, or a row not written"
    got, want = got.nan_to_num(), want.nan_to_num()
    assert not want.numel() or (got - want).abs().max() <= tolerance * max(float(want.abs().max()), floor), what


def assert_is_the_loop(case: Case, every: int = 0, floor: float = 0.0) -> None:
    grad_o, grad_final = cotangents(case)
    want_o, want_final, want = loop(case, grad_o, grad_final)
    o, final, checkpoints = case.forward(every)
    assert_near(o, want_o, "o", floor=floor)
    assert_near(final, want_final, "final state", floor=floor)
    got = case.backward(grad_o, grad_final, checkpoints, every)
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        assert_near(gradient, want[name], f"d{name}", floor=floor)


@pytest.mark.parametrize("fmt", [None, "int8/*x4", "fp8", "nvfp4", "bf16"])
@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_all_gradients_are_those_of_the_float64_loop(kind: str, readout: str, fmt: str | None) -> None:
    assert_is_the_loop(make_case(kind, (5, 0, 8), fmt=fmt, readout=readout), every=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    fmt=st.sampled_from([None, None, "fp32", "bf16", "fp16", "int8", "int8/3x4", "fp8/5x1", "nvfp4"]),
    readout=st.sampled_from(READOUTS),
    gap=st.integers(0, 2),
    every=st.sampled_from([0, 1, 2, 5, 16]),
    beta=st.booleans(),
    l2norm=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_shape_segmentation_and_format_is_the_loop(
    kind: str,
    lengths: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    fmt: str | None,
    readout: str,
    gap: int,
    every: int,
    beta: bool,
    l2norm: bool,
    seed: int,
) -> None:
    shape = {"key_heads": heads[0], "value_heads": heads[0] * heads[1], "key_dim": dims[0], "value_dim": dims[1]}
    fmt = fmt if fmt is None else fmt.replace("fp8/", "fp8_e4m3/")
    case = make_case(kind, lengths, fmt=fmt, readout=readout, gap=gap, beta=beta, seed=seed, **shape)
    case.options["qk_l2norm"] = l2norm
    if not l2norm:
        case.k /= case.k.norm(dim=-1, keepdim=True)
    # K = 1 with beta = 1 erases the whole state: gradients that are 0 but for cancellation.
    assert_is_the_loop(case, every, floor=0.1)


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_inputs_give_the_loop_and_finite_gradients(kind: str, hostile: str) -> None:
    for fmt in (None, "int8"):
        case = make_case(kind, (7, 5), fmt=fmt, hostile=hostile, gap=0)
        assert_is_the_loop(case)
        assert all(x.isfinite().all() for x in case.backward(*cotangents(case)).values())


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, case: Case, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        names = [*case.tensors(), "state"]
        ctx.case = dataclasses.replace(case, **dict(zip(names, tensors, strict=True)))
        o, final, _ = ctx.case.forward()
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.case.backward(*grads).values())


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_passes_without_rounding(kind: str) -> None:
    case = make_case(kind, (3, 2), gap=0, key_heads=1, value_heads=2, key_dim=3, value_dim=2)
    leaves = [x.clone().requires_grad_() for x in (*case.tensors().values(), case.state)]
    assert torch.autograd.gradcheck(lambda *x: _Differentiable.apply(case, *x), leaves)


def test_no_final_cotangent_is_a_zero_one() -> None:
    case = make_case("gdn", (3, 5), fmt="int8")
    grad_o, grad_final = cotangents(case)
    want = case.backward(grad_o, torch.zeros_like(grad_final))
    for name, got in case.backward(grad_o, None).items():
        assert_near(got, want[name], name, 0.0)


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fmt", "threads"),
    [
        *(
            (kind, fmt, 1)
            for kind in ("gdn", "kda", "linear")
            for fmt in (None, "int8", "fp8_e4m3/5x1", "nvfp4", "bf16")
        ),
        ("gdn", "int8", 2),
    ],
)
def test_calls_of_one_token_equal_one_call_of_all_tokens_bit_for_bit(kind: str, fmt: str | None, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Odd sizes: neither heads nor tokens keep the alignment of a fresh allocation, and vector loops have tails.
        for heads, key_dim, value_dim in ((1, 7, 5), (3, 33, 17), (2, 64, 65), (2, 20, 65)):
            for readout in READOUTS:
                case = make_case(
                    kind, (9, 1, 6), fmt=fmt, readout=readout, dtype=torch.float32, key_heads=heads,
                    value_heads=3 * heads, key_dim=key_dim, value_dim=value_dim,
                )  # fmt: skip
                o, final, _ = case.forward()
                state, rows = case.state, []
                for t in range(9):
                    part, state = case.step(t, state)
                    rows.append(part)
                assert torch.equal(final, state)
                assert torch.equal(o[case.inside], _sequence_major(rows, case.lengths))
    finally:
        torch.set_num_threads(before)


def _sequence_major(rows: list[Tensor], lengths: Tensor) -> Tensor:
    """Outputs of successive one-token calls, `[alive sequences, ...]` each, in the order of the flat tokens."""
    taken: list[list[Tensor]] = [[] for _ in lengths]
    for t, part in enumerate(rows):
        alive = [i for i, n in enumerate(lengths.tolist()) if n > t]
        for i, row in zip(alive, part, strict=True):
            taken[i].append(row)
    return torch.stack([row for sequence in taken for row in sequence])


@pytest.mark.parametrize("cut", [1, 5, 64, 70])
def test_a_cut_anywhere_carries_the_state_bit_for_bit(cut: int) -> None:
    case = make_case("kda", (71, 66), fmt="fp8", dtype=torch.float32, key_dim=13, value_dim=9, gap=0)
    o, final, _ = case.forward()
    head, state = case.step(0, case.state, count=cut)
    tail, state = case.step(cut, state, count=100)
    assert torch.equal(final, state)
    assert torch.equal(o[:cut], head[:cut])
    assert torch.equal(o[cut:71], tail[: 71 - cut])


def test_a_sequence_without_tokens_keeps_its_bits_and_every_other_its_values() -> None:
    case = make_case("gdn", (4, 0, 3), fmt="int8", dtype=torch.float32)
    alone = case.forward()[1]
    case.state[1] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, 1.0])
    case.state[1, 0, 0, 0] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    o, final, _ = case.forward()
    assert torch.equal(final[1].view(torch.int32), case.state[1].view(torch.int32))
    assert torch.equal(final[0::2], alone[0::2])
    assert not o[case.inside].isnan().any()


def test_no_tokens_at_all_return_a_copy_of_the_state() -> None:
    case = make_case("gdn", (0, 0), gap=0)
    _, final, _ = case.forward()
    assert torch.equal(final, case.state) and final.data_ptr() != case.state.data_ptr()
    grad_o, grad_final = cotangents(case)
    assert torch.equal(case.backward(grad_o, grad_final)["state"], grad_final)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_masked_token_is_the_exact_identity(kind: str) -> None:
    case = make_case(kind, (9, 9), dtype=torch.float32, gap=0)
    assert case.g is not None and case.beta is not None
    holes = torch.tensor([0, 3, 4, 8, 10, 17])
    case.g[holes], case.beta[holes], case.v[holes] = 0.0, 0.0, 1e6
    kept = torch.tensor([t for t in range(18) if t not in holes.tolist()])
    without = dataclasses.replace(
        case,
        **{name: x[kept] for name, x in case.tensors().items()},
        starts=torch.tensor([0, 5]),
        lengths=torch.tensor([5, 7]),
    )
    (o, final, _), (dense_o, dense_final, _) = case.forward(), without.forward()
    assert torch.equal(final, dense_final)
    assert torch.equal(o[kept], dense_o)
    assert not case.backward(*cotangents(case))["v"][holes].any()


def test_a_reset_forgets_what_came_before() -> None:
    case = make_case("kda", (6,), fmt="int8", dtype=torch.float32, gap=0)
    assert case.g is not None
    case.g[3] = -torch.inf
    _, final, _ = case.forward()
    case.state *= 7.0
    assert torch.equal(case.forward()[1], final)
    grad_o, grad_final = cotangents(case)
    grad_o[:3] = 0.0
    gradients = case.backward(grad_o, grad_final)
    assert not gradients["state"].any() and not gradients["g"][3].any()


# What is kept, and what is left alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [None, "int8"])
def test_checkpoints_are_the_states_before_every_cth_token(fmt: str | None) -> None:
    case = make_case("gdn", (7, 0, 4, 9), fmt=fmt, dtype=torch.float32)
    _, _, checkpoints = case.forward(every=3)
    assert checkpoints is not None
    written = 0
    for i, (start, length) in enumerate(zip(case.starts.tolist(), case.lengths.tolist(), strict=True)):
        for j, first in enumerate(range(0, length, 3)):
            _, state, _ = dataclasses.replace(case, lengths=case.lengths.clamp(max=first)).forward()
            assert torch.equal(checkpoints[start // 3 + i + j], state[i])
            written += 1
    assert checkpoints.flatten(1).isnan().all(1).sum() == len(checkpoints) - written


@pytest.mark.parametrize("every", [1, 4, 16, 64])
def test_gradients_do_not_depend_on_where_the_checkpoints_are(every: int) -> None:
    case = make_case("kda", (37, 20), fmt="int8", dtype=torch.float32)
    grad_o, grad_final = cotangents(case)
    want = case.backward(grad_o, grad_final)
    _, _, checkpoints = case.forward(every)
    for name, got in case.backward(grad_o, grad_final, checkpoints, every).items():
        assert_near(got, want[name], name, 1e-6)


@pytest.mark.parametrize("fmt", ["int8", "nvfp4"])
@pytest.mark.parametrize("kind", ["gdn", "gla"])
def test_fp32_gradients_are_those_at_the_states_that_the_forward_stored(kind: str, fmt: str) -> None:
    # A token trajectory is chaotic: had the backward's rerun rounded one code otherwise, this would show it.
    case = make_case(kind, (60,), fmt=fmt, dtype=torch.float32, gap=0, key_dim=20, value_dim=17)
    _, final, stored = case.forward(every=1)
    assert stored is not None
    states = [*stored[1:60], final[0]]

    class Stored:
        def qdq(self, _: Tensor) -> Tensor:
            return states.pop(0).double()

    grad_o, grad_final = cotangents(case)
    leaves = {n: x.double().requires_grad_() for n, x in (case.tensors() | {"state": case.state}).items()}
    state, loss = leaves["state"][0], torch.zeros((), dtype=torch.float64)
    for t in range(60):
        g, beta = (leaves[n][t : t + 1] if n in leaves else None for n in ("g", "beta"))
        token = [leaves[n][t : t + 1][None] for n in ("q", "k", "v")]
        options = {n: case.options[n] for n in ("rule", "scale", "qk_l2norm")}
        got = oracle(*token, *(x if x is None else x[None] for x in (g, beta)), state[None], **options)
        loss = loss + (got.o[0, 0] * grad_o[t]).sum()
        state = straight_through(got.final_state[0], Stored())  # type: ignore[arg-type]
    loss = loss + (state * grad_final[0]).sum()
    want = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name, got_gradient in case.backward(grad_o, grad_final).items():
        assert_near(got_gradient.double(), want[name], name, 1e-5)


@pytest.mark.parametrize(("kind", "fmt"), [("gdn", "int8"), ("kda", "fp8"), ("retention", "nvfp4"), ("delta", "bf16")])
def test_fp32_stays_within_a_tenth_of_the_quantization_effect_for_a_short_suffix(kind: str, fmt: str) -> None:
    case = make_case(kind, (16, 16), fmt=fmt, dtype=torch.float32, gap=0, key_dim=64, value_dim=64)
    zeros = torch.zeros_like(case.v, dtype=torch.float64), torch.zeros_like(case.state, dtype=torch.float64)
    want, _, _ = loop(case, *zeros)
    o, _, _ = case.forward()
    case.options["quantize"] = None
    exact, _, _ = loop(case, *zeros)
    assert 0 < (o - want).norm() <= 0.1 * (exact - want).norm()


def test_exact_fp32_is_within_the_bound_of_float64_over_a_long_sequence() -> None:
    case = make_case("gdn", (1024,), dtype=torch.float32, gap=0, key_dim=32, value_dim=32, slow_decay=True)
    wide = dataclasses.replace(case, **{n: x.double() for n, x in case.tensors().items()}, state=case.state.double())
    (o, final, _), (want_o, want_final, _) = case.forward(), wide.forward()
    bound = 5e-6 + 2.0**-24 * 1024
    assert (o - want_o).norm() <= bound * want_o.norm() and (final - want_final).norm() <= bound * want_final.norm()


class _Largest(TorchDispatchMode):
    """The most elements that any one tensor made inside has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("every", [0, 20])
def test_never_one_state_per_token(every: int) -> None:
    case = make_case(
        "gdn", (400,), fmt="int8", dtype=torch.float32, gap=0, key_heads=1, value_heads=1, key_dim=32, value_dim=32
    )
    grad_o, grad_final = cotangents(case)
    with _Largest() as largest:
        _, _, checkpoints = case.forward(every)
        case.backward(grad_o, grad_final, checkpoints, every)
    assert largest.numel <= 22 * case.state.numel()


def test_inputs_are_left_as_they_were_and_nothing_is_tracked() -> None:
    case = make_case("gdn", (5, 3), fmt="fp32", dtype=torch.float32)
    for x in case.tensors().values():
        x.requires_grad_()
    copies = {name: x.detach().clone() for name, x in case.tensors().items()}
    state, (grad_o, grad_final) = case.state.clone(), cotangents(case)
    kept_o, kept_final = grad_o.clone(), grad_final.clone()
    o, final, checkpoints = case.forward(every=2)
    gradients = case.backward(grad_o, grad_final, checkpoints, 2)
    for name, x in case.tensors().items():
        assert torch.equal(x.nan_to_num(), copies[name].nan_to_num())
    assert torch.equal(case.state, state) and torch.equal(grad_final, kept_final)
    assert torch.equal(grad_o.nan_to_num(), kept_o.nan_to_num())
    assert not any(x.requires_grad for x in (o, final, *gradients.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_the_dtype_of_the_state(dtype: torch.dtype) -> None:
    case = make_case("gdn", (5, 3), fmt="int8", dtype=torch.float32).forward
    low = make_case("gdn", (5, 3), fmt="int8", dtype=dtype)
    wide = dataclasses.replace(low, **{name: x.float() for name, x in low.tensors().items()})
    del case
    (o, final, _), (want_o, want_final, _) = low.forward(), wide.forward()
    assert torch.equal(final, want_final) and torch.equal(o.nan_to_num(), want_o.nan_to_num())
    rows = {f"d{n}": torch.zeros_like(x) for n, x in low.tensors().items()}
    decode.backward(*cotangents(low), *low.arguments(), None, 0, rows, **low.options)
    want = wide.backward(*cotangents(low))
    for name in low.tensors():
        assert torch.equal(rows[f"d{name}"][low.inside], want[name][low.inside].to(dtype))


def test_strides_do_not_matter() -> None:
    case = make_case("kda", (5, 3), fmt="int8", dtype=torch.float32)
    wide = {}
    for name, x in case.tensors().items():
        buffer = torch.full((x.shape[0], *(2 * n + 1 for n in x.shape[1:])), torch.nan)
        view = buffer[(slice(None), *(slice(1, None, 2) for _ in x.shape[1:]))]
        wide[name] = view.copy_(x)
    other = dataclasses.replace(case, **wide, state=case.state.mT.contiguous().mT)
    (o, final, _), (want_o, want_final, _) = other.forward(), case.forward()
    assert torch.equal(final, want_final) and torch.equal(o.nan_to_num(), want_o.nan_to_num())
    grad_o, grad_final = cotangents(case)
    want = case.backward(grad_o, grad_final)
    for name, got in other.backward(grad_o, grad_final.mT.contiguous().mT).items():
        assert_near(got, want[name], name, 1e-6)


def test_only_the_gradients_asked_for_are_written() -> None:
    case = make_case("gdn", (4,), gap=0)
    grads = {"dv": torch.zeros_like(case.v)}
    decode.backward(*cotangents(case), *case.arguments(), None, 0, grads, **case.options)
    assert grads.keys() == {"dv"} and grads["dv"].any()

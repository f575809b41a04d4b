"""Failures that people who train and serve these models reported elsewhere, at the ops and `lc.linear_attention`.

Each stands for a kind; the report's id is in a comment. Reports about whole models, tracing and export are in
`test_field_reports_compile.py`. The judge is the float64 loop of `lattn_compile.testing`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lattn_compile as lc
from lattn_compile.recurrence.gates import l2norm, lower_bound_gate, softplus_gate
from lattn_compile.testing.inputs import Inputs, make_inputs
from lattn_compile.testing.oracle import oracle
from tests.ops.cases import OPS

FORMS = list(OPS)
forms = pytest.mark.parametrize("form", FORMS)
kinds = pytest.mark.parametrize("kind", ["gdn", "kda"])


def run(form: str, x: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    lengths = (options.pop("prefix_lengths", None), options.pop("sequence_lengths", None), None)
    o, state = OPS[form](*x.tensors(), *lengths, **x.options(), **options)[:2]
    return o, state


def off(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN and infinity count as infinite."""
    got, want = got.detach().double(), want.detach().double()
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def gradients(outputs: tuple[Tensor, ...], x: Inputs) -> dict[str, Tensor]:
    """Gradients under fixed random cotangents for (o, final_state)."""
    rng = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(y.shape, generator=rng, dtype=torch.float64).to(y.dtype) for y in outputs]
    found = torch.autograd.grad(outputs, list(x.leaves().values()), cotangents, allow_unused=True)
    return {n: torch.zeros_like(y) if d is None else d for (n, y), d in zip(x.leaves().items(), found, strict=True)}


def check(form: str, x: Inputs, tolerance: float = 1e-5, grad_tolerance: float = 1e-4, **options: Any) -> None:
    """Outputs, final state and every gradient of one call agree with the loop, and none is NaN."""
    ours, judge = x.map(_leaf), x.map(lambda t: _leaf(t.double()))
    got = run(form, ours, **options)
    want = oracle(*judge.tensors(), **judge.options(), **options)
    assert off(got[0], want.o) < tolerance
    assert off(got[1], want.final_state) < tolerance
    theirs = gradients((want.o, want.final_state), judge)
    for name, d in gradients(got, ours).items():
        assert d.isfinite().all(), f"d{name}"
        # Cotangents are of size 1; a gradient that cancels to nearly nothing keeps the rounding of its summands.
        near = off(d, theirs[name]) < grad_tolerance or bool(((d - theirs[name]).abs() < 1e-5).all())
        assert near, f"d{name}: off by {off(d, theirs[name]):.3g}"


def attend(x: Inputs, tokens: slice = slice(None), **options: Any) -> tuple[Tensor, Any]:
    """`lc.linear_attention` on some tokens of `x`, without its initial state."""
    q, k, v, g, beta = (None if t is None else t[:, tokens] for t in x.tensors()[:5])
    assert q is not None and k is not None and v is not None
    return lc.linear_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=x.qk_l2norm, **options)


def _leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def pick(x: Inputs, sequence: int, tokens: slice) -> Inputs:
    """One batch row of `x`, some of its tokens."""
    row = slice(sequence, sequence + 1)
    cut = {n: t[row] if n == "initial_state" else t[row, tokens] for n, t in x.leaves().items()}
    return Inputs(**{**vars(x), **cut})


def replace(x: Inputs, **changes: Any) -> Inputs:
    return Inputs(**{**vars(x), **changes})


# --- padding, packing, cache ------------------------------------------------------------------------------------------


def masked(x: Inputs, mask: list[int], hole_gate: float = 0.0) -> Inputs:
    """Pads as a correct layer hands them over: beta = 0 and, unless the report says otherwise, g = 0."""
    assert x.g is not None and x.beta is not None
    m = torch.tensor(mask, dtype=torch.bool)[None, :, None]
    gate = x.g.masked_fill(~m if x.g.dim() == 3 else ~m[..., None], hole_gate)
    return replace(x, g=gate, beta=x.beta * m)


@kinds
@forms
def test_left_padding_does_not_change_a_single_sequence(form: str, kind: str) -> None:  # B15
    x = make_inputs(kind, batch=1, tokens=8, initial_state=False)
    padded = run(form, masked(x, [0, 0, 0, 1, 1, 1, 1, 1]))
    plain = run(form, pick(x, 0, slice(3, 8)))
    assert off(padded[0][:, -1], plain[0][:, -1]) < 1e-6
    assert off(padded[1], plain[1]) < 1e-6


@kinds
@forms
def test_right_padding_leaves_the_state_of_the_last_real_token(form: str, kind: str) -> None:  # B17
    x = make_inputs(kind, batch=2, tokens=8, seed=1)
    alone = run(form, pick(x, 0, slice(0, 3)))[1]
    by_mask = run(form, masked(x, [1, 1, 1, 0, 0, 0, 0, 0]))[1][:1]
    poisoned = x.map(torch.clone)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(poisoned, name)[0, 3:] = torch.nan  # tokens beyond the length may hold anything
    o, states = run(form, poisoned, sequence_lengths=torch.tensor([3, 8]))
    assert off(by_mask, alone) < 1e-6
    assert off(states[:1], alone) < 1e-6
    assert (o[0, 3:] == 0).all() and o.isfinite().all()
    assert off(states[1:], run(form, pick(x, 1, slice(0, 8)))[1]) < 1e-6


@forms
@pytest.mark.parametrize("write", ["exact", "suffix"])
def test_a_masked_hole_is_an_exact_identity(form: str, write: str) -> None:  # B18
    x = masked(make_inputs("gdn", batch=1, tokens=6, seed=2), [1, 1, 0, 0, 1, 1])
    kept = replace(x, **{n: t[:, [0, 1, 4, 5]] for n, t in x.leaves().items() if n != "initial_state"})
    # A masked token counts as a token of a write mode, so only formats whose rounding is idempotent may be compared,
    # and only where rounding happens after each token.
    options = {} if write == "exact" else {"write": {"chunk": "chunk", "decode": "token"}[form], "state_format": "int8"}
    if options.get("write") == "chunk":
        options["chunk_size"] = 1
    a, b = run(form, x, **options), run(form, kept, **options)
    assert off(a[0][:, [0, 1, 4, 5]], b[0]) < 1e-6
    assert off(a[1], b[1]) < 1e-6


@forms
def test_a_gate_at_a_masked_token_still_decays(form: str) -> None:  # B18: what a layer that forgets its gate would get
    x = make_inputs("gdn", batch=1, tokens=6, seed=2)
    check(form, masked(x, [1, 1, 0, 0, 1, 1], hole_gate=-2.0))


@kinds
@forms
def test_zero_rows_give_finite_gradients_and_do_not_touch_the_first_real_token(form: str, kind: str) -> None:  # B19
    x = masked(make_inputs(kind, tokens=9, seed=3, initial_state=False), [0, 0, 0, 1, 1, 1, 1, 1, 1])
    x.q[:, :3], x.k[:, :3] = 0.0, 0.0
    check(form, x)
    assert off(run(form, x)[0][:1, 3:], run(form, pick(x, 0, slice(3, 9)))[0]) < 1e-6


@pytest.mark.parametrize("policy", [None, "int8", lc.Policy(lc.Int8(), write=lc.Chunk(16))], ids=str)
def test_packed_samples_do_not_leak_into_one_another(policy: Any) -> None:  # B20
    x = make_inputs("gdn", lengths=[40, 56], seed=4, initial_state=False)
    options: dict[str, Any] = {"policy": policy, "output_final_state": True}
    packed, states = attend(x, cu_seqlens=x.cu_seqlens, **options)
    first, second = attend(x, slice(0, 40), **options), attend(x, slice(40, 96), **options)
    together = torch.cat([first[0], second[0]], 1)
    # The same arithmetic on the same rows: what differs is at most how wide a matrix product was.
    assert off(packed, together) < 1e-6
    dense = states if policy is None else states.dense()
    for i, (_, alone) in enumerate((first, second)):
        assert off(dense[i : i + 1], alone if policy is None else alone.dense()) < 1e-6


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize("spare", ["nan", "values"])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("chunk", {}),
        ("decode", {}),
        ("decode", {"checkpoint_every": 16}),
        ("decode", {"write": "token", "state_format": "int8"}),
        ("decode", {"write": "token", "state_format": "int8", "checkpoint_every": 16, "prefix_lengths": 20}),
        ("chunk", {"write": "chunk", "state_format": "int8", "prefix_lengths": 20}),
    ],
    ids=str,
)
def test_rows_beyond_the_last_sequence_are_exactly_zero(form: str, options: dict[str, Any], spare: str) -> None:  # B22
    x = make_inputs("kda", lengths=[50, 50], spare_tokens=28, key_dim=16, value_dim=24)
    x = x.map(_leaf) if spare == "nan" else x.map(lambda t: _leaf(t.nan_to_num(-1.0)))
    options = {n: torch.tensor(v) if n == "prefix_lengths" else v for n, v in options.items()}
    got = run(form, x, **options)
    rng = torch.Generator().manual_seed(0)
    o_cotangent = torch.randn(got[0].shape, generator=rng)
    o_cotangent[:, 100:] = torch.nan  # what a loss over a padded buffer may send back
    found = torch.autograd.grad(got, list(x.leaves().values()), [o_cotangent, torch.randn_like(got[1])])
    assert (got[0][:, 100:] == 0).all()
    assert got[0].isfinite().all() and got[1].isfinite().all()
    for name, d in zip(x.leaves(), found, strict=True):
        assert d.isfinite().all(), f"d{name}"
        assert name == "initial_state" or (d[:, 100:] == 0).all(), f"d{name}"


@kinds
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129])
def test_prefill_and_one_step_equal_the_full_forward(kind: str, tokens: int) -> None:  # B24
    x = make_inputs(kind, batch=1, tokens=tokens, seed=5, key_dim=32, value_dim=48)
    o, state = run("chunk", x)
    before = run("chunk", pick(x, 0, slice(0, tokens - 1)))[1]
    step = run("decode", replace(pick(x, 0, slice(tokens - 1, tokens)), initial_state=before))
    assert (step[0] - o[:, -1:]).abs().max() < 1e-6
    assert off(step[1], state) < 1e-6


def test_the_states_precision_is_an_explicit_choice_and_fp32_by_default() -> None:  # B25
    x = make_inputs("gdn", batch=1, tokens=512, slow_decay=True, initial_state=False, key_dim=32, value_dim=32)
    x = x.map(torch.Tensor.bfloat16)
    _, state = attend(x, output_final_state=True)
    assert isinstance(state, Tensor) and state.dtype is torch.float32, "activations in bf16 do not make the state bf16"
    want = oracle(*x.tensors(), **x.options())
    drift = {}
    for name, policy in (("fp32", lc.Policy(lc.Fp32())), ("bf16", lc.Policy(lc.Bf16()))):
        carried: Any = None
        for t in range(512):
            _, carried = attend(x, slice(t, t + 1), output_final_state=True, initial_state=carried, policy=policy)
        drift[name] = off(carried.dense(), want.final_state)
    assert off(state, want.final_state) < 1e-5 and drift["fp32"] < 1e-5
    assert drift["bf16"] > 100 * drift["fp32"], "that is why it has to be asked for"
    assert "bf16" in repr(lc.Policy(lc.Bf16())).lower()


@pytest.mark.parametrize("fmt", [lc.Int8(), lc.Fp8(), lc.Bf16(), lc.Fp16(), lc.Nvfp4()], ids=str)
@kinds
def test_four_tokens_at_once_equal_four_calls_bit_for_bit(kind: str, fmt: Any) -> None:  # B26
    x = make_inputs(kind, batch=2, tokens=4, seed=6)
    options: dict[str, Any] = {"policy": lc.Policy(fmt), "output_final_state": True}
    o, state = attend(x, initial_state=x.initial_state, **options)
    carried: Any = x.initial_state
    for t in range(4):
        step, carried = attend(x, slice(t, t + 1), initial_state=carried, **options)
        assert torch.equal(step[:, 0], o[:, t]), f"token {t}"
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in _stored(carried, state))


def _stored(a: lc.EncodedState, b: lc.EncodedState) -> Iterator[tuple[Tensor, Tensor]]:
    for name in (*a.tensors, "cursor"):
        pair = (a.cursor, b.cursor) if name == "cursor" else (a.tensors[name], b.tensors[name])
        yield pair[0].contiguous(), pair[1].contiguous()


def test_both_meanings_of_a_multi_token_call_have_a_name() -> None:  # B26
    x = make_inputs("gdn", batch=1, tokens=4, seed=6)
    each = attend(x, policy=lc.Policy(lc.Int8(), write=lc.Token()))[0]
    once = attend(x, policy=lc.Policy(lc.Int8(), write=lc.Chunk(4)))[0]
    assert not torch.equal(each, once)
    assert "token" in str(lc.Policy(lc.Int8())) and "chunk" in str(lc.Policy(lc.Int8(), write=lc.Chunk(4)))


@pytest.mark.parametrize("policy", ["int8", "fp8", lc.Policy(lc.Int8(), write=lc.Chunk(5))], ids=str)
def test_a_saved_state_continues_as_if_nothing_had_stopped(policy: Any) -> None:  # B30
    x = make_inputs("gdn", batch=3, tokens=7, seed=8)
    _, carried = attend(x, policy=policy, output_final_state=True)
    file = io.BytesIO()
    torch.save(carried, file)
    file.seek(0)
    loaded = torch.load(file)
    live, again = (attend(x, policy=policy, initial_state=s)[0] for s in (carried, loaded))
    assert torch.equal(live, again)


def test_codes_and_scales_of_a_slot_move_together() -> None:  # B29
    x = make_inputs("gdn", batch=3, tokens=7, seed=8)
    _, carried = attend(x, policy="int8", output_final_state=True)
    order = torch.tensor([2, 0])
    assert torch.equal(carried.index_select(order).dense(), carried.dense()[order])
    moved = carried.index_select(order)
    assert moved.decoded().shape[0] == moved.cursor.shape[0] == 2
    assert all(t.shape[0] == 2 for t in moved.tensors.values())


# --- numerics: gates, inverse, norms ----------------------------------------------------------------------------------


def with_gate(kind: str, gate: Any, tokens: int = 64, seed: int = 10, **options: Any) -> Inputs:
    x = make_inputs(kind, batch=1, tokens=tokens, seed=seed, key_dim=32, value_dim=32, **options)
    assert x.g is not None
    return replace(x, g=torch.as_tensor(gate, dtype=torch.float32).expand(x.g.shape).clone())


@forms
def test_a_hard_reset_clears_the_state_without_nan(form: str) -> None:  # B14b
    x = make_inputs("gdn", batch=1, tokens=70, seed=9)
    assert x.g is not None
    for t in (0, 13, 64, 69):
        x.g[:, t] = -torch.inf
    check(form, x)
    cleared = pick(x, 0, slice(13, 70))
    assert off(run(form, x)[0][:, 13:], run(form, replace(cleared, initial_state=None))[0]) < 1e-6


@forms
def test_a_zero_key_has_a_finite_gradient(form: str) -> None:  # B14b
    x = make_inputs("gdn", batch=1, tokens=6, seed=9)
    x.k[:, 2], x.q[:, 3] = 0.0, 0.0
    check(form, x)
    row = torch.zeros(1, 8, requires_grad=True)
    (d,) = torch.autograd.grad(l2norm(row).sum(), row)
    assert torch.allclose(d, torch.full_like(d, 1e3))


@forms
@pytest.mark.parametrize("bound", [-0.5, -2.5, -3.0, -5.0])
def test_a_channel_gate_at_its_bound_over_a_whole_chunk(form: str, bound: float) -> None:  # B33, B34
    check(form, with_gate("kda", bound))


@forms
@pytest.mark.parametrize("bound", [-5.0, -20.0])
def test_a_free_channel_beside_one_at_the_bound(form: str, bound: float) -> None:  # B34
    gate = torch.zeros(32)
    gate[1::2] = bound
    check(form, with_gate("kda", gate, tokens=130))


def test_error_does_not_grow_with_the_decay() -> None:  # B34
    errors = []
    for bound in (-0.5, -2.5, -3.0, -5.0):
        x = with_gate("kda", bound)
        errors.append(off(run("chunk", x)[0], oracle(*x.tensors(), **x.options()).o))
    assert max(errors) < 2e-6, errors


@kinds
@forms
@pytest.mark.parametrize("first", [-80.0, -90.0, -200.0])
def test_one_large_gate_in_front_is_no_product_of_exponentials(form: str, kind: str, first: float) -> None:  # B35
    x = with_gate(kind, -0.01)
    assert x.g is not None
    x.g[:, 0] = first
    check(form, x)
    x.g[:, 40] = first
    check(form, x)


@forms
def test_a_large_gate_at_the_first_position_of_a_channel_decay(form: str) -> None:  # B36
    x = with_gate("gla", -0.05)
    assert x.g is not None
    x.g[:, 0] = -80.0
    check(form, x)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_decay_and_nearly_equal_keys_stay_finite(form: str, dtype: torch.dtype) -> None:  # B37
    tokens = 4096
    x = with_gate("gdn", 0.0, tokens=tokens, key_heads=1, value_heads=1, initial_state=False)
    rng = torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, 1, 32, generator=rng) + 1e-3 * torch.randn(x.k.shape, generator=rng)
    x = replace(x, k=key, beta=torch.ones_like(x.beta)).map(lambda t: t.to(dtype))  # type: ignore[arg-type]
    got, want = run(form, x), oracle(*x.tensors(), **x.options())
    assert off(got[0], want.o) < (2.5e-4 if dtype is torch.float32 else 1e-2)
    assert off(got[1], want.final_state) < 2.5e-4  # 2^-24 T, semantics §8


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("gate", [0.0, -0.01])
@pytest.mark.parametrize("cosine", [1.0, 0.9])
def test_repeated_keys_do_not_break_the_inverse(cosine: float, gate: float, beta: float, chunk_size: int) -> None:
    """B38; at beta = 1.9 and one key it is B39, the eigenvalue -0.9."""
    x = with_gate("gdn", gate, tokens=128, initial_state=False)
    rng = torch.Generator().manual_seed(3)
    fixed = F.normalize(torch.randn(1, 1, 2, 32, generator=rng), dim=-1)
    noise = torch.randn(x.k.shape, generator=rng)
    noise = F.normalize(noise - (noise * fixed).sum(-1, keepdim=True) * fixed, dim=-1)
    spread = cosine**0.5  # two rows then have the cosine spread² with one another
    key = spread * fixed + (1 - spread**2) ** 0.5 * noise
    x = replace(x, k=key.expand(x.k.shape).clone(), beta=torch.full_like(x.beta, beta))  # type: ignore[arg-type]
    check("chunk", x, chunk_size=chunk_size)


@forms
def test_write_strengths_up_to_two_are_taken_as_they_are(form: str) -> None:  # B39
    x = with_gate("gdn", -0.01)
    x.k[:] = x.k[:, :1]
    x = replace(x, beta=torch.full_like(x.beta, 1.9))  # type: ignore[arg-type]
    check(form, x)
    halved = replace(x, beta=x.beta / 2)  # type: ignore[operator]
    assert off(run(form, x)[0], run(form, halved)[0]) > 0.1


def test_beta_is_rounded_where_the_model_rounds_it_and_nowhere_else() -> None:  # B40
    x = make_inputs("gdn", batch=1, tokens=1000, seed=11, slow_decay=True, key_dim=16, value_dim=16)
    logits = torch.full(x.v.shape[:3], -0.5, dtype=torch.bfloat16)
    for beta in (logits.sigmoid(), logits.float().sigmoid()):
        y = replace(x, beta=beta)
        prefill, decode = run("chunk", y)[1], run("decode", y)[1]
        want = oracle(*y.tensors(), **y.options()).final_state
        assert off(prefill, want) < 1e-5 and off(decode, want) < 1e-5
        assert off(prefill, decode) < 1e-5
    assert logits.sigmoid().float().unique() != logits.float().sigmoid().unique()


@forms
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_gate_parameters_have_right_gradients_under_strong_decay(form: str, kind: str) -> None:  # B44
    rng = torch.Generator().manual_seed(12)
    x = make_inputs(kind, tokens=96, seed=12, key_dim=16, value_dim=16)
    assert x.g is not None
    a = torch.randn(x.g.shape, generator=rng)

    def parameter_gradients(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        A_log = torch.full((4,), 16.0, dtype=dtype).log().requires_grad_()
        dt_bias = torch.ones(x.g.shape[2:].numel(), dtype=dtype, requires_grad=True)  # type: ignore[union-attr]
        if dtype is torch.float64:  # the layer's formula, written out
            bias = dt_bias.view(x.g.shape[2:])  # type: ignore[union-attr]
            rate = A_log.exp() if kind == "gdn" else A_log.exp()[:, None]
            y = replace(x.map(torch.Tensor.double), g=-rate * F.softplus(a.double() + bias))
            o, state = oracle(*y.tensors(), **y.options())[:2]
        else:
            y = replace(x, g=softplus_gate(a, A_log, dt_bias))
            o, state = run(form, y)
        weight = torch.Generator().manual_seed(1)
        loss = (o.double() * torch.randn(o.shape, generator=weight, dtype=torch.float64)).sum()
        loss = loss + (state.double() * torch.randn(state.shape, generator=weight, dtype=torch.float64)).sum()
        return torch.autograd.grad(loss, (A_log, dt_bias))

    ours, judge = parameter_gradients(torch.float32), parameter_gradients(torch.float64)
    assert off(ours[0], judge[0]) < 1e-3, "A_log"
    assert off(ours[1], judge[1]) < 1e-3, "dt_bias"


def test_a_raw_gate_far_out_has_finite_gradients() -> None:  # B44; semantics §7
    for raw in (120.0, -120.0):
        g = torch.full((1, 4, 2), raw, requires_grad=True)
        A_log = torch.full((2,), 2.0, requires_grad=True)
        for gate in (softplus_gate(g, A_log), lower_bound_gate(g, A_log, -5.0)):
            assert all(d.isfinite().all() for d in torch.autograd.grad(gate.sum(), (g, A_log)))


@forms
def test_the_norm_flag_is_honoured_both_ways(form: str) -> None:  # B45
    x = make_inputs("gdn", batch=1, tokens=24, seed=13)
    x = replace(x, q=30 * F.normalize(x.q, dim=-1), k=30 * F.normalize(x.k, dim=-1))
    check(form, x)
    # Keys of norm 30 without the norm: beta is kept so small that the recurrence itself is stable.
    raw = replace(x, qk_l2norm=False, beta=x.beta / 900)  # type: ignore[operator]
    check(form, raw, tolerance=1e-4, grad_tolerance=1e-3)
    for flag in (True, False):
        options = {"use_qk_l2norm_in_kernel": flag, "initial_state": x.initial_state}
        o, _ = lc.linear_attention(raw.q, raw.k, raw.v, raw.g, raw.beta, **options)  # type: ignore[arg-type]
        assert off(o, oracle(*raw.tensors(), **{**raw.options(), "qk_l2norm": flag}).o) < 1e-4


@forms
def test_half_precision_inputs_keep_a_state_beyond_their_range(form: str) -> None:  # B49
    x = make_inputs("gdn", batch=1, tokens=16, seed=14, dtype=torch.float16, slow_decay=True)
    assert x.initial_state is not None
    x.initial_state[..., 0, 0] = 7e4
    x = x.map(_leaf)
    o, state = run(form, x)
    want = oracle(*x.tensors(), **x.options())
    assert o.dtype is torch.float16 and state.dtype is torch.float32
    assert state.isfinite().all() and o.isfinite().all()
    assert off(state, want.final_state) < 1e-5 and off(o, want.o) < 1e-3
    tiny = 2.0**-25
    (d,) = torch.autograd.grad(state, x.initial_state, torch.full_like(state, tiny), retain_graph=True)
    (w,) = torch.autograd.grad(want.final_state, x.initial_state, torch.full_like(want.final_state, tiny))
    assert (w != 0).any() and off(d, w) < 1e-5


def test_a_large_loss_scale_does_not_overflow_the_gradient_of_the_state() -> None:  # B50
    x = make_inputs("gdn", batch=1, tokens=128, seed=15, dtype=torch.float16, slow_decay=True)
    x = replace(x, scale=1.0).map(_leaf)
    o, _ = run("chunk", x)
    (d,) = torch.autograd.grad(o, x.initial_state, torch.full_like(o, 6e4))
    assert d.isfinite().all() and d.abs().max() > 65504


# --- shapes, strides, ranges ------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize(("key_dim", "value_dim"), [(60, 36), (100, 20), (1, 1), (3, 130)])
def test_sizes_that_are_no_powers_of_two(form: str, key_dim: int, value_dim: int) -> None:  # B51
    options: dict[str, Any] = {"batch": 1, "tokens": 20, "key_dim": key_dim, "value_dim": value_dim, "seed": 16}
    x = make_inputs("kda", **options)
    assert x.g is not None
    # A gate that lies in front of large values: a read past its end would show.
    page = torch.full((2 * x.g.numel(),), 1e30)
    page[: x.g.numel()] = x.g.flatten()
    check(form, replace(x, g=page[: x.g.numel()].view(x.g.shape)))
    # The gate's own neighbours in memory, once more: a strided view of a wider buffer.
    wide = torch.full((*x.g.shape[:-1], 128), 1e30)
    wide[..., :key_dim] = x.g
    check(form, replace(x, g=wide[..., :key_dim]))


@forms
def test_a_wide_head_works(form: str) -> None:  # B54
    x = make_inputs("gdn", batch=1, tokens=70, key_heads=1, value_heads=1, key_dim=256, value_dim=512, seed=17)
    check(form, x)
    half = x.map(lambda t: _leaf(t.bfloat16()))
    o, state = run(form, half)
    want = oracle(*half.tensors(), **half.options())
    assert off(o, want.o) < 1e-2 and off(state, want.final_state) < 1e-4
    assert all(d.isfinite().all() for d in gradients((o, state), half).values())


@kinds
@forms
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_very_short_sequences_have_right_gradients_through_the_final_state(
    form: str, kind: str, tokens: int
) -> None:  # B56, and B60 at T = 1
    check(form, make_inputs(kind, tokens=tokens, key_dim=16, value_dim=24, seed=18))


def test_the_state_keeps_its_layout_from_prefill_to_decode() -> None:  # B59
    x = make_inputs("gdn", tokens=40, key_dim=16, value_dim=24, seed=19)
    _, state = run("chunk", x)
    assert state.shape == (2, 4, 16, 24)
    step = make_inputs("gdn", tokens=1, key_dim=16, value_dim=24, seed=20)
    run("decode", replace(step, initial_state=state))
    with pytest.raises(lc.LattnError, match="value-first"):
        run("decode", replace(step, initial_state=state.transpose(-1, -2)))
    # Square states cannot tell by their shape; that the axes are not mixed up shows in the values.
    square = make_inputs("gdn", tokens=41, key_dim=128, value_dim=128, seed=19)
    whole = run("chunk", square)[0][:, -1:]
    cut = {n: t[:, :40] for n, t in square.leaves().items() if n != "initial_state"}
    last = {n: t[:, 40:] for n, t in square.leaves().items() if n != "initial_state"}
    handed = run("chunk", replace(square, **cut))[1]
    assert off(run("decode", replace(square, **last, initial_state=handed))[0], whole) < 1e-6


@forms
def test_a_training_step_of_one_token_from_a_bf16_state(form: str) -> None:  # B60
    x = make_inputs("kda", tokens=1, seed=21)
    x = replace(x, initial_state=x.initial_state.bfloat16())  # type: ignore[union-attr]
    ours = x.map(_leaf)
    o, state = run(form, ours)
    want = oracle(*x.tensors(), **x.options())
    assert off(o, want.o) < 1e-5 and off(state, want.final_state) < 1e-5
    d = gradients((o, state), ours)["initial_state"]
    assert d.dtype is torch.bfloat16 and d.isfinite().all() and (d != 0).any()


# --- quantized state --------------------------------------------------------------------------------------------------


def test_coarse_int8_is_never_a_silent_default() -> None:  # B62
    assert isinstance(lc.Policy().state, lc.Fp8)
    x = make_inputs("gdn", batch=1, tokens=200, slow_decay=True, initial_state=False, seed=22)
    plain, state = attend(x, output_final_state=True)
    assert isinstance(state, Tensor), "no policy, no quantization"
    assert torch.equal(plain, attend(x, policy="exact")[0])
    # Int8() itself is not one scale a head: with it, a head's small columns keep their digits beside large ones.
    S = torch.randn(1, 1, 64, 128, generator=torch.Generator().manual_seed(0))
    S[..., 64:] *= 1e-3
    assert off(lc.Int8().qdq(S)[..., 64:], S[..., 64:]) < 0.02
    assert off(lc.Int8(block_v=None).qdq(S)[..., 64:], S[..., 64:]) > 0.5


@pytest.mark.parametrize("fmt", [lc.Int8(), lc.Fp8(), lc.Fp8(block_k=128, block_v=1), lc.Nvfp4()], ids=str)
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e30, 3e38])
def test_every_magnitude_has_finite_codes_and_scales(fmt: Any, amax: float) -> None:  # B65
    S = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    S = (S / S.abs().max() * amax).to(torch.float32)
    encoded = fmt.encode(S)
    for name, x in encoded.items():
        assert name == "codes" or x.float().isfinite().all(), name
    decoded = fmt.qdq(S)
    assert decoded.isfinite().all()
    if amax < 2.0**-100:
        assert torch.equal(decoded, torch.zeros_like(S)) and not decoded.signbit().any()
        assert all((x.float() == 1).all() for n, x in encoded.items() if n != "codes")
        assert not encoded["codes"].view(torch.uint8).any()
    else:
        assert off(decoded, S) < 0.15


@forms
@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "nvfp4"])
def test_a_zero_state_starts_without_nan(form: str, fmt: str) -> None:  # B65
    x = make_inputs("gdn", batch=1, tokens=8, seed=23)
    x = replace(x, initial_state=torch.zeros_like(x.initial_state), v=x.v * 1e-42)  # type: ignore[arg-type]
    o, state = run(form, x, write="token" if form == "decode" else "chunk", state_format=fmt)
    assert o.isfinite().all() and state.isfinite().all()


@pytest.mark.parametrize("amax", [1e-3, 1e3, 1e6])
def test_an_fp8_state_always_has_a_scale(amax: float) -> None:  # B67
    S = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0)) * amax
    encoded = lc.Fp8().encode(S)
    assert set(encoded) == {"codes", "state_scale"}
    assert off(lc.Fp8().qdq(S), S) < 0.05
    with pytest.raises(lc.LattnError):
        lc.Fp8(block_v=0)
    state = lc.encode_state(S, lc.Fp8())
    assert off(lc.decode_state(state), S) < 0.05

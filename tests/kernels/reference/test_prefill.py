"""The prefix with rounded operands: outputs, states and gradients are a float64 loop's (`prefill_oracle.py`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.errors import DtypeError, FormatError, LattnWarning, PolicyError
from lattn_compile.formats import Nvfp4, factors
from lattn_compile.kernels.reference import chunk
from lattn_compile.kernels.reference.operands import Operands
from lattn_compile.modes import DELTA_SITES, SITES, BlockDoubling, Neumann, NewtonSchulz, Prefill
from lattn_compile.ops.residuals import inverse_residuals, reset_inverse_residuals
from tests.kernels.reference.prefill_oracle import prefill_oracle
from tests.ops.cases import NAMES, assert_close, inputs

CHUNK, DECODE, REPLAY = torch.ops.lattn.chunk, torch.ops.lattn.decode, torch.ops.lattn.replay
MIXED = dict(zip(SITES, ("int8", "nvfp4", "fp8_e4m3", "int8", "fp8_e4m3", "nvfp4", "int8", "fp8_e4m3"), strict=True))


def everywhere(fmt: str, rule: str = "delta") -> Prefill:
    return Prefill({site: fmt for site in SITES if rule == "delta" or site not in DELTA_SITES})


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    reset_inverse_residuals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LattnWarning)
        yield


def run(op: Any, x: list[Any], *lengths: Any, prefill: Prefill | None, **options: Any) -> tuple[Tensor, ...]:
    own = {} if prefill is None else prefill.op_kwargs()
    return op(*x, *lengths, *(None,) * (4 - len(lengths)), scale=0.3, **own, **options)  # type: ignore[no-any-return]


CASES = [
    *((decay, "delta", everywhere(fmt)) for decay in ("head", "channel") for fmt in ("int8", "fp8_e4m3", "nvfp4")),
    *((decay, "delta", Prefill(MIXED, inverse=Neumann(5))) for decay in (None, "channel")),
    ("head", "delta", Prefill(MIXED, inverse=Neumann(4), gradient="series")),
    ("head", "delta", Prefill({"w": "int8"}, inverse=NewtonSchulz(3))),
    ("channel", "delta", Prefill({"kk": "int8"}, inverse=NewtonSchulz(3), gradient="series")),
    ("channel", "delta", Prefill({"qk": "fp8_e4m3"}, inverse=BlockDoubling(8))),
    ("head", "delta", Prefill(inverse=BlockDoubling(16))),
    *((decay, "additive", everywhere("nvfp4", "additive")) for decay in (None, "channel")),
]


@pytest.mark.parametrize(("decay", "rule", "prefill"), CASES, ids=lambda x: str(x).replace("_e4m3", "")[:70])
def test_outputs_state_and_straight_through_gradients_are_the_loops(decay: Any, rule: str, prefill: Prefill) -> None:
    x = inputs(2, 70, 1, 2, 16, 5, decay=decay, beta=decay is not None, grad=True, seed=len(str(prefill)))
    lengths = [70, 21]
    got = run(CHUNK, x, None, None, torch.tensor(lengths), prefill=prefill, rule=rule, qk_l2norm=decay == "head")
    want = prefill_oracle(*x, lengths, prefill, rule=rule, scale=0.3, qk_l2norm=decay == "head")
    for a, b, name in zip(got, want, ("o", "state"), strict=True):
        assert_close(a.detach(), b.detach(), name)
    cotangents = [torch.randn_like(a) for a in want]
    leaves = {name: leaf for name, leaf in zip(NAMES, x, strict=True) if leaf is not None}
    ours, theirs = (torch.autograd.grad(outs, list(leaves.values()), cotangents) for outs in (got, want))
    for name, a, b in zip(leaves, ours, theirs, strict=True):
        assert_close(a, b, f"d{name}")


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("site", SITES)
def test_each_site_is_its_own(site: str, decay: str) -> None:
    x = inputs(1, 36, 1, 1, 16, 4, decay=decay)
    exact = run(CHUNK, x, prefill=None)
    got = run(CHUNK, x, prefill=Prefill({site: "nvfp4"}))
    want = prefill_oracle(*x, [36], Prefill({site: "nvfp4"}), scale=0.3)
    assert_close(got[0], want[0], site)
    assert_close(got[1], want[1], site)
    moved = [bool((a - b).abs().max() > 1e-8) for a, b in zip(got, exact, strict=True)]
    # In one chunk, what is written is not read, and what is only read is not written.
    assert moved == [site != "kv", site not in ("qk", "qs", "av")]


@pytest.mark.parametrize("decay", [None, "head", "channel"])
@pytest.mark.parametrize(
    "prefill",
    [
        Prefill(inverse=Neumann(2), gradient="series"),
        Prefill(inverse=NewtonSchulz(2), gradient="series"),
        Prefill(inverse=Neumann(63)),
        Prefill(inverse=NewtonSchulz(6)),
        Prefill(inverse=BlockDoubling(8)),
        Prefill(inverse=BlockDoubling(16)),
    ],
    ids=lambda p: f"{p.inverse} {p.gradient}",
)
def test_gradcheck_passes_with_rounding_off(prefill: Prefill, decay: Any) -> None:
    x = inputs(1, 18, 1, 2, 3, 2, decay=decay, grad=True)
    leaves = [leaf for leaf in x if leaf is not None]

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        return run(CHUNK, [None if leaf is None else next(rest) for leaf in x], prefill=prefill)

    torch.manual_seed(0)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_a_truncated_sum_has_the_gradient_of_the_inverse_unless_its_own_is_asked_for() -> None:
    x = inputs(1, 20, 1, 1, 4, 3, grad=True)
    found = []
    for gradient in ("inverse", "series"):
        o, _ = run(CHUNK, x, prefill=Prefill(inverse=Neumann(1), gradient=gradient))
        found.append((o.detach(), torch.autograd.grad(o.sum(), x[1])[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).norm() > 1e-3 * found[0][1].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_along_the_sum_is_one_tile_of_the_formats_own_codec(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x[0, 1], x[0, 2], x[1, 3, 7], x[2, 4, 9] = 0.0, 1e-35, torch.nan, torch.inf
    for fmt in ("int8", "fp8_e4m3", "nvfp4"):
        operands = Operands(Prefill({"kk": fmt}))
        if fmt == "nvfp4":
            encoded = Nvfp4().encode(x[..., None])
            want = Nvfp4().decode(encoded, shape=(32, 1))[..., 0].to(dtype)
        else:
            want = factors.decode(factors.encode(x, fmt), fmt)
        for got in (operands.left("kk", x), operands.right("kk", x.mT).mT):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert operands.left("qk", x) is x and operands.right("qk", x) is x
    codes = factors.encode(x, "fp8_e4m3")["codes"]
    if dtype == torch.float32:
        live = x[2, :4]
        inverse = (1 / factors.encode(live, "fp8_e4m3")["scale"].double()).float()
        assert torch.equal(codes[2, :4].float(), (live * inverse[:, None]).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_operands_are_rounded_in_the_dtype_of_the_call(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = Operands.right, set()

    def spied(self: Operands, site: str, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        seen.add(site)
        return plain(self, site, x)

    monkeypatch.setattr(Operands, "right", spied)
    x = inputs(1, 40, 1, 2, 16, 5, decay=decay, dtype=torch.float32, grad=True)
    o, state = run(CHUNK, x, prefill=everywhere("fp8_e4m3"))
    torch.autograd.grad(o.sum() + state.sum(), x)
    assert seen == set(SITES)


@settings(max_examples=12)
@given(
    operands=st.dictionaries(st.sampled_from(SITES), st.sampled_from(["int8", "fp8_e4m3", "nvfp4"])),
    inverse=st.one_of(
        st.just("exact"), st.builds(Neumann, st.integers(1, 63)), st.builds(NewtonSchulz, st.integers(1, 6)),
        st.builds(BlockDoubling, st.sampled_from([8, 16])),
    ),
    decay=st.sampled_from([None, "head", "channel"]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    groups=st.integers(1, 2),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_any_set_of_operands_and_inverse_is_the_loops(
    operands: dict[str, str], inverse: Any, decay: Any, lengths: list[int], groups: int, seed: int
) -> None:
    prefill = Prefill(operands, inverse=inverse)
    x = inputs(len(lengths), 40, 1, groups, 16, 3, decay=decay, seed=seed)
    got = run(CHUNK, x, None, None, torch.tensor(lengths), prefill=prefill)
    for a, b, name in zip(got, prefill_oracle(*x, lengths, prefill, scale=0.3), ("o", "state"), strict=True):
        assert_close(a, b, name)


# Who is prefix, and what of it is nobody's


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_packed_sequences_are_what_they_are_alone_and_rows_of_nobody_are_zeros(decay: str) -> None:
    lengths, prefill = [70, 0, 5, 20], Prefill(MIXED, inverse=BlockDoubling(8))
    x = inputs(1, 100, 1, 2, 16, 5, sequences=4, decay=decay, grad=True)
    with torch.no_grad():
        for leaf in x[:5]:
            leaf[:, 95:] = torch.nan
    edges = torch.tensor([0, 70, 70, 75, 95])
    o, state = run(CHUNK, x, edges, prefill=prefill)
    grads = torch.autograd.grad([o.sum() + state.sum()], x)
    assert not o[:, 95:].any() and all(not g[:, 95:].any() and g.isfinite().all() for g in grads[:5])
    for i, n in enumerate(lengths):
        part = [leaf.detach()[:, edges[i] : edges[i] + n] for leaf in x[:5]] + [x[5].detach()[i : i + 1]]
        alone = run(CHUNK, part, prefill=prefill)
        assert_close(o[:, edges[i] : edges[i] + n].detach(), alone[0], "o", 1e-12)
        assert_close(state[i : i + 1].detach(), alone[1], "state", 1e-12)


@pytest.mark.parametrize("mode", ["exact", "chunk", "token", "replay", "two_precision"])
def test_only_tokens_before_p_are_rounded_in_every_write_mode(mode: str) -> None:
    prefill, p = Prefill(MIXED), [66, 20]
    x = inputs(2, 72, 1, 2, 16, 5)
    op = {"exact": CHUNK, "chunk": CHUNK, "token": DECODE}.get(mode, REPLAY)
    options: dict[str, Any] = {"write": mode} | ({} if mode == "exact" else {"state_format": "int8/*x8"})

    def call(x: list[Any], lengths: Tensor | None, prefill: Prefill | None) -> tuple[Tensor, ...]:
        carried = (None,) * 6 if op is REPLAY else ()
        return run(op, [*x, *carried], None, lengths, prefill=prefill, **options)[:2]

    o, state = call(x, torch.tensor(p), prefill)
    for i, n in enumerate(p):
        before = [leaf[i : i + 1, :n] for leaf in x[:5]] + [x[5][i : i + 1]]
        want, middle = run(CHUNK, before, prefill=prefill)
        assert_close(o[i : i + 1, :n], want, "prefix", 1e-12)
        behind = [leaf[i : i + 1, n:] for leaf in x[:5]] + [middle]
        want, final = call(behind, torch.tensor(0), prefill)
        assert_close(o[i : i + 1, n:], want, "suffix", 1e-9)
        assert_close(state[i : i + 1], final, "state", 1e-9)
        assert torch.equal(want, call(behind, torch.tensor(0), None)[0]), "a suffix has no operands to round"


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("hostile", ["reset", "no write", "zero keys", "strong decay"])
def test_gradients_stay_finite(hostile: str, decay: str) -> None:
    x = inputs(1, 70, 1, 2, 16, 5, decay=decay, dtype=torch.float32)
    if hostile == "reset":
        x[3][:, ::7] = -torch.inf
    elif hostile == "strong decay":
        x[3].sub_(300.0)
    elif hostile == "no write":
        x[4].zero_()
    else:
        x[1].zero_()
    x = [leaf.requires_grad_() for leaf in x]
    o, state = run(CHUNK, x, prefill=Prefill(MIXED, inverse=NewtonSchulz(6)), qk_l2norm=True)
    grads = torch.autograd.grad(o.square().sum() + state.square().sum(), x)
    assert all(t.isfinite().all() for t in (o, state, *grads))


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_fp32_differs_from_float64_by_a_tenth_of_what_rounding_does(decay: str, fmt: str) -> None:
    x = inputs(1, 200, 1, 2, 32, 16, decay=decay)
    exact = run(CHUNK, x, prefill=None)[0]
    wide = run(CHUNK, x, prefill=everywhere(fmt))[0]
    narrow = run(CHUNK, [leaf.float() for leaf in x], prefill=everywhere(fmt))[0]
    assert (narrow - wide).norm() <= 0.1 * (exact - wide).norm()


def test_bf16_inputs_give_bf16_outputs_and_gradients() -> None:
    x = inputs(1, 40, 1, 2, 16, 8, dtype=torch.bfloat16, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = run(CHUNK, x, prefill=everywhere("fp8_e4m3"))
    want, _ = run(CHUNK, [leaf.detach().float() for leaf in x], prefill=everywhere("fp8_e4m3"))
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert torch.equal(o, want.bfloat16())
    assert all(g.dtype is torch.bfloat16 for g in torch.autograd.grad(o.float().sum(), x[:5]))


# Without it


def test_without_prefill_no_line_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the prefix of another policy")

    monkeypatch.setattr(chunk, "Prefix", refuse)
    x = inputs(1, 20, dtype=torch.float32, grad=True)
    plain = run(CHUNK, x, prefill=None)
    spelled = CHUNK(
        *x, *(None,) * 4, scale=0.3, prefill_operands="", prefill_inverse="exact", prefill_residual=1e-3,
        prefill_gradient="inverse",
    )  # fmt: skip
    for a, b in zip(plain, spelled, strict=True):
        assert torch.equal(a, b)
    plain[0].sum().backward()
    monkeypatch.undo()
    assert not torch.equal(run(CHUNK, x, prefill=Prefill({"kk": "int8"}))[0], plain[0])


# How well the inverse did


def test_residuals_are_counted_by_site_and_the_first_excess_warns_once() -> None:
    x = inputs(2, 70, 1, 2, 16, 5, dtype=torch.float32)
    loose, tight = Prefill(inverse=Neumann(3), max_residual=1e3), Prefill(inverse=Neumann(3), max_residual=1e-6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(CHUNK, x, prefill=loose, site_id=3)
        run(CHUNK, x, prefill=Prefill({"kk": "int8"}), site_id=4)
        with torch.inference_mode():
            run(CHUNK, x, prefill=tight, site_id=5)
        run(CHUNK, x, prefill=tight, site_id=5)
    (warning,) = said
    assert warning.category is LattnWarning and "site 5: neumann(3) left" in str(warning.message)
    assert "max_residual = 1e-06" in str(warning.message)
    first, second = inverse_residuals()
    assert (first.site_id, first.inverse, first.chunks, first.over) == (3, "neumann(3)", 8, 0)
    assert (second.site_id, second.chunks, second.max_residual) == (5, 16, 1e-6)
    assert second.over > 0 and second.largest == first.largest > 1e-6


def test_a_nan_in_the_keys_is_over_every_bound() -> None:
    x = inputs(1, 8, 1, 1, 16, 5, dtype=torch.float32)
    x[1][0, 3, 0, 2] = torch.nan
    run(CHUNK, x, prefill=Prefill(inverse=Neumann(3), max_residual=1e30))
    (found,) = inverse_residuals()
    assert (found.chunks, found.over) == (1, 1) and found.largest != found.largest


# Bad input


@pytest.mark.parametrize(
    ("x", "prefill", "options", "error", "words"),
    [
        ({"key_dim": 8}, Prefill({"kk": "nvfp4"}), {}, FormatError, r"nvfp4 at kk with K = 8"),
        ({"key_dim": 60}, Prefill({"ws": "nvfp4", "qs": "nvfp4"}), {}, FormatError, r"at ws, qs with K = 60"),
        ({}, Prefill({"kk": "int8"}), {"rule": "additive"}, PolicyError, r"operands\['kk'\] for the additive rule"),
        ({}, Prefill(inverse=Neumann(3)), {"rule": "additive"}, PolicyError, r"inverse for the additive rule"),
        ({}, Prefill({"kk": "int8"}), {"implementation": "triton"}, DtypeError, r"kernel='reference'"),
    ],
)
def test_what_a_call_cannot_have_is_refused_before_anything_runs(
    x: Any, prefill: Prefill, options: Any, error: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(chunk, "forward")
    with pytest.raises(error, match=words):
        run(CHUNK, inputs(1, 6, 1, 1, **{"key_dim": 16, **x}), prefill=prefill, **options)


def test_products_over_tokens_take_nvfp4_with_any_key_size_and_few_tokens() -> None:
    x = inputs(1, 3, 1, 1, 6, 5)
    prefill = Prefill({"w": "nvfp4", "u": "nvfp4", "av": "nvfp4", "kv": "nvfp4"})
    want = prefill_oracle(*x, [3], prefill, scale=0.3)
    assert_close(run(CHUNK, x, prefill=prefill)[0], want[0], "o")

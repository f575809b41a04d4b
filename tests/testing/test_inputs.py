"""Inputs of a kind: the shapes and ranges they promise, and that each hostile variant is what its name says."""

from __future__ import annotations

import pytest
import torch

from lattn_compile.errors import UnsupportedError
from lattn_compile.recurrence import BY_NAME
from lattn_compile.recurrence.gates import lower_bound_gate, softplus_gate
from lattn_compile.testing import HOSTILE, RAW_GATES, make_inputs, make_raw_gate


@pytest.mark.parametrize("kind", BY_NAME)
def test_shapes_and_ranges_are_those_of_the_kind(kind: str) -> None:
    x = make_inputs(kind, batch=3, tokens=7, key_heads=2, value_heads=6, key_dim=5, value_dim=4)
    traits = BY_NAME[kind]
    assert x.q.shape == x.k.shape == (3, 7, 2, 5) and x.v.shape == (3, 7, 6, 4)
    assert x.initial_state is not None and x.initial_state.shape == (3, 6, 5, 4)
    assert x.rule == traits.rule and x.qk_l2norm == (traits.rule == "delta") and x.scale == 5**-0.5
    want = {"none": None, "head": (3, 7, 6), "channel": (3, 7, 6, 5)}[traits.decay]
    assert (None if x.g is None else x.g.shape) == want
    assert x.g is None or ((x.g <= 0).all() and x.g.isfinite().all() and (x.g < -1e-3).any())
    assert (x.beta is None) == (traits.rule == "additive")
    assert x.beta is None or ((x.beta > 0) & (x.beta < 1)).all()


def test_slow_decay_is_slow() -> None:
    x = make_inputs("kda", slow_decay=True)
    assert x.g is not None and (x.g >= -1e-3).all() and (x.g < 0).any()


def test_the_same_seed_gives_the_same_numbers_in_every_dtype_and_another_seed_others() -> None:
    x, y = make_inputs("gdn", dtype=torch.float64), make_inputs("gdn", dtype=torch.bfloat16)
    for name, leaf in x.leaves().items():
        other = y.leaves()[name]
        assert torch.equal(leaf.to(other.dtype), other)
    assert y.initial_state is not None and y.initial_state.dtype == torch.float32
    assert not torch.equal(x.q, make_inputs("gdn", dtype=torch.float64, seed=1).q)


def test_packing_gives_one_row_its_boundaries_and_poisoned_spare_tokens() -> None:
    x = make_inputs("gdn", lengths=(3, 0, 4), spare_tokens=2)
    assert x.cu_seqlens is not None and x.cu_seqlens.tolist() == [0, 3, 3, 7]
    assert x.q.shape[:2] == (1, 9) and x.initial_state is not None and x.initial_state.shape[0] == 3
    for leaf in (x.q, x.k, x.v, x.g, x.beta):
        assert leaf is not None and leaf[:, 7:].isnan().all() and not leaf[:, :7].isnan().any()


def test_map_changes_the_differentiable_tensors_only() -> None:
    x = make_inputs("linear", lengths=(2, 3), initial_state=False)
    y = x.map(torch.Tensor.double)
    assert list(x.leaves()) == ["q", "k", "v"] and all(leaf.dtype == torch.float64 for leaf in y.leaves().values())
    assert y.cu_seqlens is x.cu_seqlens and y.options() == x.options()


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", BY_NAME)
def test_every_hostile_variant_exists_for_every_kind_and_stays_legal(kind: str, hostile: str) -> None:
    x = make_inputs(kind, hostile=hostile)
    for name, leaf in x.leaves().items():
        assert not leaf.isnan().any()
        assert name == "g" or leaf.isfinite().all()
    assert x.g is None or (x.g <= 0).all()
    assert x.beta is None or ((x.beta >= 0) & (x.beta < 2)).all()


def test_hostile_variants_are_what_they_say() -> None:
    kda = {name: make_inputs("kda", hostile=name) for name in HOSTILE}
    g, beta = kda["repeated_key"].g, kda["repeated_key"].beta
    assert (kda["repeated_key"].k == kda["repeated_key"].k[:1, :1]).all()
    assert g is not None and beta is not None and (g == g[0, 0, 0, 0]).all() and (beta > 1.8).all()
    assert kda["reset"].g is not None and kda["reset"].g[:, 1::3].isneginf().all()
    assert kda["strong_decay"].g is not None and kda["strong_decay"].g.min() == -90
    assert kda["mixed_channels"].g is not None and kda["mixed_channels"].g.unique().tolist() == [-5, 0]
    masked = kda["masked"]
    assert masked.g is not None and masked.beta is not None
    assert not masked.g[:, ::2].any() and not masked.beta[:, ::2].any()
    assert not kda["zero_keys"].k[:, ::3].any() and not kda["zero_keys"].q[:, ::4].any()
    assert kda["large_state"].initial_state is not None and kda["large_state"].initial_state.abs().max() > 65504
    assert kda["tiny_state"].initial_state is not None and 0 < kda["tiny_state"].initial_state.abs().max() < 1e-34


@pytest.mark.parametrize(("argument", "got", "nearest"), [("kind", "gdm", "gdn"), ("hostile", "resets", "reset")])
def test_an_unknown_name_is_refused_with_the_nearest(argument: str, got: str, nearest: str) -> None:
    options = {"kind": "gdn"} | {argument: got}
    with pytest.raises(UnsupportedError, match=f"{argument}.*Did you mean '{nearest}'"):
        make_inputs(**options)  # type: ignore[arg-type]


def test_ragged_inputs_hold_nan_at_and_beyond_their_length_and_nowhere_else() -> None:
    for x, alive in (
        (make_inputs("kda", tokens=4).ragged((0, 3)), [False] * 4 + [True] * 3 + [False]),
        (make_inputs("kda", lengths=(2, 0, 3)).ragged((2, 0, 1)), [True] * 3 + [False] * 2),
    ):
        for leaf in (x.q, x.k, x.v, x.g, x.beta):
            assert leaf is not None
            flat = leaf.flatten(0, 1).flatten(1)
            assert (~flat.isnan()).all(1).tolist() == alive and flat.isnan().any(1).tolist() == [not a for a in alive]
        assert x.initial_state is not None and not x.initial_state.isnan().any()


@pytest.mark.parametrize("form", RAW_GATES)
@pytest.mark.parametrize("kind", [name for name, kind in BY_NAME.items() if kind.decay != "none"])
def test_a_raw_gate_is_the_gate_of_its_formula_in_float64(kind: str, form: str) -> None:
    for strong in (False, True):
        raw = make_raw_gate(kind, form, batch=2, tokens=5, value_heads=4, key_dim=3, strong=strong, dtype=torch.float32)
        g = raw.decay()
        want = (
            softplus_gate(raw.g_raw, raw.A_log, raw.dt_bias)
            if form == "softplus"
            else lower_bound_gate(raw.g_raw, raw.A_log, raw.lower_bound, raw.dt_bias)
        )
        assert g.dtype == torch.float64 and (g <= 0).all()
        assert g.shape == ((2, 5, 4) if BY_NAME[kind].decay == "head" else (2, 5, 4, 3))
        torch.testing.assert_close(g.float(), want, rtol=1e-5, atol=1e-7)
        assert form != "softplus" or not strong or -40 < g.mean() < -15


def test_a_raw_gate_of_a_kind_without_decay_or_of_no_form_is_refused() -> None:
    for kind, form in (("delta", "softplus"), ("gdn", "sigmoid")):
        with pytest.raises(UnsupportedError, match="form"):
            make_raw_gate(kind, form, batch=1, tokens=1, value_heads=1, key_dim=1)

"""Every kind × write mode × format × policy option × shape through `lc.linear_attention`, held to the float64 loop.

By default a set of cases in which every legal pair of choices occurs, `LATTN_CONFORMANCE_COVERS` (1) times with other
company. `LATTN_CONFORMANCE=full` draws `LATTN_CONFORMANCE_CASES` (2,000) cases from the whole product instead, with
the seed `LATTN_CONFORMANCE_SEED` (0).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile import functional, linear_attention
from lattn_compile.formats import Fp32, TiledFormat
from lattn_compile.formats.factors import FACTORS
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference import chunk as reference_chunk
from lattn_compile.kernels.reference import decode as reference_decode
from lattn_compile.modes import MODES, Chunk, Exact, Replay, Token, TwoPrecision
from lattn_compile.ops import options
from lattn_compile.policy import Policy
from lattn_compile.recurrence import BY_NAME, KINDS
from lattn_compile.testing import make_inputs
from tests.conformance_matrix import AXES, NEUTRAL, Case, is_legal, legal_pairs, pairs_of, pairwise_cover, sample
from tests.conformance_run import check, dense

FULL = os.environ.get("LATTN_CONFORMANCE") == "full"


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"LATTN_CONFORMANCE_{name}", default))


def cases() -> list[Case]:
    if FULL:
        return [Case(**one) for one in sample(AXES, setting("CASES", 2000), seed=setting("SEED", 0))]
    covers = (pairwise_cover(AXES, seed=seed) for seed in range(setting("COVERS", 1)))
    return list(dict.fromkeys(Case(**one) for cover in covers for one in cover))


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Memory that nobody wrote to is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_public_call_is_the_loop(case: Case) -> None:
    check(case)


# The cases ------------------------------------------------------------------------------------------------------------


def test_the_axes_are_the_registries() -> None:
    assert set(AXES["kind"]) == set(BY_NAME)
    assert {type(write) for write in AXES["write"]} == set(MODES.values())
    assert {write.factors for write in AXES["write"] if isinstance(write, Replay)} == set(FACTORS)
    assert {f.block_v for f in AXES["format"] if isinstance(f, TiledFormat)} >= {1, 16, 64, None}
    assert set(NEUTRAL) == set(AXES) == {field.name for field in dataclasses.fields(Case)}


def test_every_value_goes_with_neutral_ones_so_a_partial_choice_that_is_legal_can_be_completed() -> None:
    for name, values in AXES.items():
        for value in values:
            assert is_legal({name: value}), (name, value)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cover_holds_every_legal_pair_and_nothing_illegal(seed: int) -> None:
    cover = pairwise_cover(AXES, seed=seed)
    assert cover == pairwise_cover(AXES, seed=seed)
    assert all(is_legal(one) for one in cover)
    found = set().union(*(pairs_of(one, AXES) for one in cover))
    legal = legal_pairs(AXES)
    assert found == legal
    largest = len(AXES["write"]) * len(AXES["format"])
    assert largest <= len(cover) < 1.5 * largest < len(legal)
    # Pairs that a policy refuses are not among them.
    index = {name: list(values) for name, values in AXES.items()}
    for one in ({"write": Exact(), "rounding": "stochastic"}, {"format": Fp32(), "feedback": "int8"}):
        assert tuple((name, index[name].index(value)) for name, value in one.items()) not in legal


def test_a_cover_of_a_small_range_is_small() -> None:
    ranges = {name: list(range(3)) for name in "abcd"}
    cover = pairwise_cover(ranges, lambda one: not one.get("a") == one.get("b") == 2)
    assert 9 <= len(cover) <= 14
    assert all(one["a"] != 2 or one["b"] != 2 for one in cover)


def test_a_draw_from_the_whole_product_is_legal_and_the_same_every_time() -> None:
    drawn = sample(AXES, 50, seed=3)
    assert drawn == sample(AXES, 50, seed=3) != sample(AXES, 50, seed=4)
    assert all(is_legal(one) for one in drawn)


def test_no_case_needs_what_is_not_built() -> None:
    assert [str(case) for case in cases() if case.policy.unbuilt()] == []


# Gradients where nothing is rounded -----------------------------------------------------------------------------------

UNROUNDED = (Exact(), Chunk(2), Token(), Replay(2), Replay(1), TwoPrecision(2, read=Fp32()))


def test_every_mode_is_checked_by_differences() -> None:
    assert {type(write) for write in UNROUNDED} == set(MODES.values())


@pytest.mark.parametrize("write", UNROUNDED, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gradcheck_passes_with_rounding_off(kind: Any, write: Any) -> None:
    sizes = {"batch": 2, "tokens": 5, "key_heads": 1, "value_heads": 2, "key_dim": 3, "value_dim": 2}
    x = make_inputs(kind.name, dtype=torch.float64, **sizes).map(Tensor.requires_grad_)

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(x.leaves(), leaves, strict=True))
        state = given.pop("initial_state")
        outs = []
        for part in (slice(0, 4), slice(4, 5)):  # continued, so that a carried state is differentiated too
            o, state = linear_attention(
                **{name: leaf[:, part] for name, leaf in given.items()}, rule=x.rule, initial_state=state,
                use_qk_l2norm_in_kernel=x.qk_l2norm, output_final_state=True, policy=Policy(Fp32(), write=write),
                prefix_lengths=[2, 0] if part.start == 0 else 0, sequence_lengths=[4, 3] if part.start == 0 else None,
            )  # fmt: skip
            outs.append(o)
        return torch.cat(outs, 1), dense(state)

    torch.manual_seed(0)  # the directions of the fast mode
    assert torch.autograd.gradcheck(call, list(x.leaves().values()), fast_mode=True)


# What these tests can see ---------------------------------------------------------------------------------------------


def policy_says(**options: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault: an option of the policy reaches the op as another one, where the op has it."""

    def install(patch: pytest.MonkeyPatch) -> None:
        plain = functional._options

        def wrong(policy: Any) -> tuple[Any, ...]:
            call = functional.Call(*plain(policy))
            return tuple(call._replace(**{n: x for n, x in options.items() if getattr(call, n) is not None}))

        patch.setattr(functional, "_options", wrong)

    return install


def later_position(patch: pytest.MonkeyPatch) -> None:
    plain = functional.as_ids
    patch.setattr(functional, "as_ids", lambda x, device: plain(x, device) + 1)


def coarser_codes(patch: pytest.MonkeyPatch) -> None:
    """The ops' quantizer, and not the loop's, rounds what is a thousandth too large."""

    class Wrong(Quantizer):
        def qdq(self, S: Tensor, identity: Identity | None = None) -> Tensor:
            return super().qdq(1.001 * S, identity)

    patch.setattr(options, "Quantizer", Wrong)


def larger_gradient(patch: pytest.MonkeyPatch) -> None:
    for kernel in (reference_decode, reference_chunk):
        plain = kernel.backward
        patch.setattr(kernel, "backward", lambda *a, plain=plain, **k: 1.0001 * plain(*a, **k))


FP32 = {"dtype": torch.float32}
# A fault, and cases, neutral but for what is said, each of which must fail under it.
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[dict[str, Any]]]] = {
    "another readout": (
        policy_says(readout="before_write"),
        [{"readout": "after_write"}, {"readout": "after_write", "write": Replay(4), **FP32}],
    ),
    "another seed": (policy_says(seed=1), [{"rounding": "stochastic", "write": Chunk(5)}]),
    "a later position": (
        later_position,
        [{"rounding": "stochastic", "write": write} for write in (Token(), Replay(4), TwoPrecision(4))],
    ),
    "nothing fed back": (policy_says(feedback=None), [{"feedback": "int8"}, {"feedback": "int4", **FP32}]),
    "no rotation": (policy_says(rotation=None), [{"rotation": "hadamard_k"}, {"rotation": "hadamard_v", **FP32}]),
    "no rounding of the gate": (policy_says(gate=None), [{"gate": "bf16"}, {"gate": "fp16", "write": Exact(), **FP32}]),
    "no rounding of factors": (
        policy_says(factors=None),
        [{"write": Replay(4, factors="int8")}, {"write": Replay(4, factors="bf16"), **FP32}],
    ),
    "another window": (policy_says(window=3), [{"write": Replay(4)}, {"write": TwoPrecision(4), **FP32}]),
    "another anchor": (policy_says(anchor="fp32"), [{"write": TwoPrecision(4, anchor="bf16")}]),
    "coarser codes": (
        coarser_codes,
        [{"write": write, **dtype} for write in (Token(), Chunk(5), Replay(4)) for dtype in ({}, FP32)],
    ),
    "a larger gradient of the state": (larger_gradient, [{}, FP32, {"write": Chunk(5), "kind": "kda"}]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_does_not_go_unseen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install, some = FAULTS[fault]
    for choice in some:
        case = Case(**{**NEUTRAL, **choice})
        check(case)
        with monkeypatch.context() as patch:
            install(patch)
            with pytest.raises(AssertionError):
                check(case)

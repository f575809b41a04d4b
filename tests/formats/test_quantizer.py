"""`Quantizer`: format, rounding, rotation and feedback together."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lattn_compile.errors import DtypeError, FormatError, LattnError, PolicyError, ShapeError
from lattn_compile.formats import Bf16, Format, Fp8, Fp16, Fp32, Int8, Nvfp4
from lattn_compile.formats.philox import uniform
from lattn_compile.formats.quantizer import ROUNDINGS, Identity, Quantizer
from lattn_compile.formats.residual import FEEDBACKS
from lattn_compile.formats.rotation import ROTATIONS, rotate
from tests.formats.states import ALL, QUANTIZED, randn, rough, said, same

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
BOTH = Quantizer(Int8(), "stochastic", "int4", "hadamard_k", seed=3, site_id=4)


def at(n: int, first: int = 5) -> Identity:
    return Identity(torch.arange(first, first + n), 7 * torch.arange(n) + 2**33)


@st.composite
def quantizers(draw: st.DrawFn) -> Quantizer:
    fmt = draw(st.sampled_from(ALL))
    feedback = None if fmt.is_plain else draw(st.sampled_from(FEEDBACKS))
    rounding = "nearest" if isinstance(fmt, Fp32) else draw(st.sampled_from(ROUNDINGS))
    return Quantizer(fmt, rounding, feedback, draw(st.sampled_from(ROTATIONS)), draw(st.integers(0, 2**63 - 1)))


@st.composite
def states(draw: st.DrawFn, q: Quantizer) -> Tensor:
    odd, power = st.integers(1, 40), st.sampled_from([1, 2, 16, 64])
    K = draw(power if q.rotation == "hadamard_k" else odd)
    V = draw(power if q.rotation == "hadamard_v" else odd)
    shape = (draw(st.integers(0, 3)), draw(st.integers(1, 2)), K, V)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    make = draw(st.sampled_from([randn, rough] if math.prod(shape) and K > 1 and V > 3 else [randn]))
    return make(*shape, seed=draw(st.integers(0, 99)), dtype=dtype)


def nearly_all(fmt: Format) -> list[Quantizer]:
    """Every combination of a format's options that has a meaning."""
    return [
        Quantizer(fmt, rounding, feedback, rotation)
        for rounding in ROUNDINGS
        for feedback in FEEDBACKS
        for rotation in ROTATIONS
        if not (fmt.is_plain and feedback) and not (isinstance(fmt, Fp32) and rounding == "stochastic")
    ]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_qdq_is_decode_of_encode_by_the_bit(data: st.DataObject) -> None:
    q = data.draw(quantizers())
    S = data.draw(states(q))
    identity = at(S.shape[0])
    enc, before = q.encode(S, identity), S.clone()
    assert tuple(enc) == q.keys and all(t.is_contiguous() for t in enc.values())
    assert all(t.shape[:2] == S.shape[:2] for t in enc.values())
    out = q.qdq(S, identity)
    assert same(q.decode(enc, shape=S.shape, dtype=S.dtype), out)
    assert same(S, before), "the state was changed"
    if math.prod(S.shape[:2]):
        assert q.nbytes(*S.shape[2:]) == sum(
            t[0, 0].numel() * (4 if t.dtype == torch.float64 else t.element_size()) for t in enc.values()
        )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_state_is_independent_of_its_batch(data: st.DataObject) -> None:
    q = data.draw(quantizers())
    S = data.draw(states(q))
    identity = at(S.shape[0])
    enc, out = q.encode(S, identity), q.qdq(S, identity)
    order = torch.tensor(data.draw(st.permutations(range(S.shape[0]))), dtype=torch.int64)
    assert same(q.qdq(S[order], Identity(*(x[order] for x in identity))), out[order])
    for i in range(S.shape[0]):
        alone = Identity(identity.position[i : i + 1], identity.sequence[i : i + 1])
        assert same(q.qdq(S[i : i + 1], alone), out[i : i + 1])
        assert all(same(t, enc[key][i : i + 1]) for key, t in q.encode(S[i : i + 1], alone).items())
        # Nor does a head depend on the heads after it.
        assert same(q.qdq(S[i : i + 1, :1], alone), out[i : i + 1, :1])


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_each_part_does_what_its_module_says(fmt: Format) -> None:
    S, identity = randn(2, 3, 32, 64), at(2)
    r = uniform(identity, 3, 32, 64, 9, 8)
    for q in nearly_all(fmt):
        drawn = r if q.rounding == "stochastic" else None
        stored = rotate(fmt.qdq(rotate(S, q.rotation), drawn), q.rotation)
        if q.residual is not None:
            stored = stored + q.residual.fmt.qdq(S - stored)
        out = Quantizer(q.fmt, q.rounding, q.feedback, q.rotation, seed=9, site_id=8).qdq(S, identity)
        assert same(out, stored), q


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_nearest_rounding_alone_is_the_formats(fmt: Format) -> None:
    S, q = rough(2, 3, 17, 70), Quantizer(fmt)
    assert q.idempotent and q.keys == fmt.keys and q.nbytes(17, 70) == fmt.nbytes(17, 70)
    assert same(q.qdq(S), fmt.qdq(S)) and same(q.qdq(S, at(2)), fmt.qdq(S))
    assert all(same(t, fmt.encode(S)[key]) for key, t in q.encode(S).items())
    assert same(q.qdq(S[0, 0]), fmt.qdq(S[0, 0]))  # any leading dimensions


@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_what_says_that_it_is_idempotent_is(fmt: Format) -> None:
    S, identity = randn(2, 3, 16, 64), at(2)
    for q in nearly_all(fmt):
        assert q.idempotent == (q == Quantizer(fmt))
        once = q.qdq(S, identity)
        if q.idempotent:
            assert same(q.qdq(once, identity), once)
    moving = [q for q in nearly_all(fmt) if not same(q.qdq(q.qdq(S, identity), identity), q.qdq(S, identity))]
    assert not any(q.idempotent for q in moving)
    # Of what says that it is not, something does move; only plain codes are exact fixed points of random rounding too.
    assert moving


def test_position_sequence_seed_and_site_each_matter_and_the_rest_does_not() -> None:
    S = randn(1, 2, 16, 32)
    q = Quantizer(Fp8(), "stochastic", seed=1, site_id=2)

    def draw(position: int = 5, sequence: int = 6, q: Quantizer = q) -> Tensor:
        return q.qdq(S, Identity(torch.tensor([position]), torch.tensor([sequence])))

    assert same(draw(), draw())
    others = [draw(position=6), draw(sequence=7), draw(sequence=6 + 2**32)]
    others += [draw(q=Quantizer(Fp8(), "stochastic", seed=s, site_id=i)) for s, i in ((2, 2), (1, 3))]
    assert all(not same(draw(), other) for other in others)
    torch.manual_seed(1)
    first = draw()
    torch.manual_seed(2)
    assert same(draw(), first)


def test_recomputation_and_forks_draw_the_same_numbers() -> None:
    S = randn(3, 2, 16, 32)
    again = pickle.loads(pickle.dumps(BOTH))
    assert again == BOTH == copy.deepcopy(BOTH) and hash(again) == hash(BOTH)
    assert same(again.qdq(S, at(3)), BOTH.qdq(S, at(3)))
    assert same(BOTH.qdq(S.mT.contiguous().mT, at(3)), BOTH.qdq(S, at(3)))


@pytest.mark.parametrize("rotation", ["hadamard_k", "hadamard_v"])
@pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
def test_rotation_takes_the_error_of_an_outlier_down(fmt: Format, rotation: str) -> None:
    S = randn(1, 1, 64, 64)
    S[0, 0, 3, 5] = 100.0
    plain, rotated = (Quantizer(fmt, rotation=word).qdq(S) for word in (None, rotation))
    rest = torch.ones(64, 64, dtype=torch.bool)
    rest[3, 5] = False
    errors = [float((x - S)[0, 0][rest].norm()) for x in (plain, rotated)]
    if isinstance(fmt, Int8) and fmt.block_k is None:  # one step for all: the outlier's
        assert errors[1] < errors[0] / 2
    assert float((rotated - S).norm() / S.norm()) < 0.2


@pytest.mark.parametrize("rotation", ["hadamard_k", "hadamard_v"])
def test_the_residual_is_of_the_state_itself(rotation: str) -> None:
    # Not of the rotated state: an outlier in the residual stays where it is, and what rotating there and back rounds
    # away is stored too.
    S = randn(2, 3, 64, 64, seed=2)
    q = Quantizer(Fp8(), feedback="bf16", rotation=rotation)
    stored = rotate(Fp8().qdq(rotate(S, rotation)), rotation)
    assert same(q.encode(S)["residual"], (S - stored).to(torch.bfloat16))
    assert float((q.qdq(S) - S).norm() / S.norm()) < 2.0**-12


def test_a_nan_under_rotation_is_nan_where_the_rotation_took_it() -> None:
    S = randn(1, 1, 16, 130)
    S[0, 0, 3, 70] = torch.nan
    nan = torch.zeros(16, 130, dtype=torch.bool)
    nan[:, 64:128] = True
    for feedback in (None, "int4"):
        assert torch.equal(Quantizer(Int8(), feedback=feedback, rotation="hadamard_k").qdq(S)[0, 0].isnan(), nan)


def test_sums_of_a_rotation_that_overflow_stay_visible() -> None:
    S = torch.full((1, 1, 128, 4), 3e38)
    out = Quantizer(Int8(), rotation="hadamard_k").qdq(S)
    assert bool(out.isnan().all())


@dtypes
def test_a_state_is_decoded_in_the_dtype_of_its_scales(dtype: torch.dtype) -> None:
    S, identity = randn(2, 2, 16, 16, dtype=dtype), at(2)
    for fmt in (Int8(), Nvfp4()):
        q = Quantizer(fmt, "stochastic", "bf16", "hadamard_v")
        enc = q.encode(S, identity)
        assert q.decode(enc).dtype == dtype and same(q.decode(enc), q.qdq(S, identity))
        other = torch.float64 if dtype == torch.float32 else torch.float32
        assert same(q.decode(enc, dtype=other), q.qdq(S, identity).to(other))
    for plain in (Bf16(), Fp16()):
        q = Quantizer(plain, rotation="hadamard_k")
        assert q.decode(q.encode(S)).dtype == torch.float32
        assert same(q.decode(q.encode(S), dtype=dtype), q.qdq(S))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_states_are_rounded_in_fp32(half: torch.dtype) -> None:
    S, identity = randn(2, 2, 16, 16).to(half), at(2)
    for q in nearly_all(Int8()):
        assert same(q.qdq(S, identity), q.qdq(S.float(), identity).to(half))
        want = q.encode(S.float(), identity)
        assert all(same(t, want[key]) for key, t in q.encode(S, identity).items())


def test_nothing_is_differentiable() -> None:
    S = randn(2, 2, 16, 16).requires_grad_()
    for fmt in (Bf16(), Int8(), Nvfp4()):
        for q in nearly_all(fmt):
            assert not q.qdq(S, at(2)).requires_grad
            assert not any(t.requires_grad for t in q.encode(S, at(2)).values())


@dtypes
def test_fake_tensors_give_the_same_shapes_and_dtypes(dtype: torch.dtype) -> None:
    S, identity = randn(2, 3, 32, 64, dtype=dtype), at(2)
    for fmt in ALL:
        for q in nearly_all(fmt)[-1:]:
            enc = q.encode(S, identity)
            with FakeTensorMode() as mode:
                fake = mode.from_tensor(S)
                who = Identity(*(mode.from_tensor(x) for x in identity))
                got = q.encode(fake, who)
                assert {k: (t.shape, t.dtype) for k, t in got.items()} == {
                    k: (t.shape, t.dtype) for k, t in enc.items()
                }
                for out in (q.qdq(fake, who), q.decode(got, shape=(32, 64), dtype=dtype)):
                    assert out.shape == S.shape and out.dtype == dtype


def test_text_names_what_differs_from_the_format() -> None:
    assert str(Quantizer(Int8())) == "int8/*x64"
    assert str(BOTH) == "int8/*x64 rounding='stochastic' feedback='int4' rotation='hadamard_k' seed=3 site_id=4"
    assert eval(repr(BOTH)) == BOTH


def test_options_without_a_meaning_are_refused() -> None:
    def refusal(make: Callable[..., object], *args: Any, **kwargs: Any) -> str:
        with pytest.raises(LattnError) as error:
            make(*args, **kwargs)
        return f"{error.value.code} {said(error.value)}"

    S, one = randn(1, 1, 4, 4), Identity(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    stochastic = Quantizer(Int8(), "stochastic")
    lines = [
        refusal(Quantizer, Int8(), "stochastik"),
        refusal(Quantizer, Int8(), None),
        refusal(Quantizer, Int8(), feedback="fp8"),
        refusal(Quantizer, Int8(), feedback=["int4"]),
        refusal(Quantizer, Int8(), rotation="hadamard"),
        refusal(Quantizer, Bf16(), feedback="int8"),
        refusal(Quantizer, Fp32(), "stochastic"),
        refusal(stochastic.qdq, S),
        refusal(stochastic.encode, S[0], one),
        refusal(stochastic.qdq, S.expand(2, 1, 4, 4), one),
        refusal(stochastic.check, 4, 257),
        refusal(Quantizer(Int8(), rotation="hadamard_v").check, 4, 12),
        refusal(Quantizer(Int8(), feedback="int4").decode, Int8().encode(S)),
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
policy rounding: got 'stochastik'
  want 'nearest' or 'stochastic'
  Choose one of these. Did you mean 'stochastic'?
policy rounding: got None
  want 'nearest' or 'stochastic'
  Choose one of these.
policy feedback: got 'fp8'
  want None or 'int4' or 'int8' or 'bf16'
  Choose one of these.
policy feedback: got ['int4']
  want None or 'int4' or 'int8' or 'bf16'
  Choose one of these.
policy rotation: got 'hadamard'
  want None or 'hadamard_k' or 'hadamard_v'
  Choose one of these. Did you mean 'hadamard_v'?
policy feedback: got 'int8' on the plain format bf16
  want None on fp32, bf16 and fp16: they have no scale for a residual
  Drop feedback, or choose Int8, Fp8 or Nvfp4.
policy rounding: got 'stochastic' on fp32
  want 'nearest': an fp32 state is stored as it is and nothing is rounded
  Drop rounding, or choose a narrower format.
policy identity: got None with stochastic rounding
  want Identity(position, sequence), int64 [n] each
  Say whose write this is: its random numbers must not depend on anything else.
shape S: got [1, 4, 4] with [1] positions
  want [n, HV, K, V] with [n] positions under stochastic rounding
  Random numbers are keyed by sequence and head, so these axes have to be told apart.
shape S: got [2, 1, 4, 4] with [1] positions
  want [n, HV, K, V] with [n] positions under stochastic rounding
  Random numbers are keyed by sequence and head, so these axes have to be told apart.
format V: got 257
  want at most 256 with stochastic rounding
  Round to nearest, which has no limit.
policy rotation: got 'hadamard_v' on a state with V = 12
  want a power of two for V
  Drop rotation, or rotate the other axis.
format enc: got tensors ['codes', 'state_scale']
  want ['codes', 'residual', 'residual_scale', 'state_scale']
  Pass what int8/*x64 feedback='int4'.encode returned.""",
    )


def test_bad_states_are_refused_whatever_the_options() -> None:
    for q in nearly_all(Int8()):
        for call in (q.encode, q.qdq):
            with pytest.raises(DtypeError, match=r"S: got torch\.int8"):
                call(torch.zeros(1, 1, 2, 2, dtype=torch.int8), at(1))
            with pytest.raises(ShapeError, match="S: got"):
                call(torch.zeros(3), at(1))
        with pytest.raises(FormatError, match="K: got 0"):
            q.check(0, 4)
    with pytest.raises(PolicyError, match="K = 12"):
        Quantizer(Int8(), rotation="hadamard_k").qdq(torch.zeros(1, 1, 12, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fmt", ALL, ids=str)
def test_a_gpu_gives_the_same_bits(fmt: Format) -> None:
    for dtype in (torch.float32, torch.float64):
        for S in (rough(2, 3, 32, 128, dtype=dtype), randn(2, 3, 32, 128, dtype=dtype)):
            for q in nearly_all(fmt):
                who = Identity(*(x.cuda() for x in at(2)))
                enc, want = q.encode(S.cuda(), who), q.encode(S, at(2))
                assert all(same(t.cpu(), want[key]) for key, t in enc.items()), q
                assert same(q.qdq(S.cuda(), who).cpu(), q.qdq(S, at(2))), q
                assert same(q.decode(enc, shape=S.shape, dtype=dtype).cpu(), q.qdq(S, at(2))), q


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_replays_with_the_position_of_its_buffer() -> None:
    S, who = randn(2, 3, 16, 64).cuda(), Identity(*(x.cuda() for x in at(2)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        BOTH.qdq(S, who)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = BOTH.qdq(S, who)
    for step in range(3):
        who.position.copy_(at(2, first=5 + step).position)
        graph.replay()
        assert same(out.cpu(), BOTH.qdq(S.cpu(), at(2, first=5 + step)))

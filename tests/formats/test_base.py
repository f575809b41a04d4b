"""What every codec promises, whatever it stores: for each format of the registry."""

from __future__ import annotations

import shutil

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

from lattn_compile.errors import DtypeError, FormatError, ShapeError
from lattn_compile.formats import REGISTRY, Format, Fp8, Int8, Nvfp4
from tests.formats.states import ALL, QUANTIZED, SHAPES, bits, randn, rough, said, same

every = pytest.mark.parametrize("fmt", ALL, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def test_the_formats_under_test_cover_the_registry() -> None:
    assert {type(fmt) for fmt in ALL} == set(REGISTRY)


@every
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qdq_is_decode_of_encode_by_the_bit(fmt: Format, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for S in (randn(2, 3, *shape, dtype=dtype), rough(2, 3, *shape, dtype=dtype)):
        enc = fmt.encode(S)
        assert tuple(enc) == fmt.keys and all(t.is_contiguous() for t in enc.values())
        assert all(t.shape[:2] == (2, 3) for t in enc.values())
        assert same(fmt.decode(enc, shape=shape, dtype=dtype), fmt.qdq(S))


@every
@pytest.mark.parametrize("K", [1, 2, 15, 16, 17, 63, 100, 255, 256])
@pytest.mark.parametrize("V", [1, 63, 64, 65, 129, 256])
def test_any_head_size_works(fmt: Format, K: int, V: int) -> None:
    S = randn(K, V)
    out = fmt.qdq(S)
    assert out.shape == S.shape and out.dtype == S.dtype
    assert same(fmt.decode(fmt.encode(S), shape=(K, V)), out)
    assert float((out - S).norm() / S.norm()) < 0.2


@every
def test_every_head_is_independent_of_its_batch(fmt: Format) -> None:
    S = rough(4, 3, 33, 70)
    enc, out = fmt.encode(S), fmt.qdq(S)
    for n in range(4):
        for h in range(3):
            alone = fmt.encode(S[n, h])
            assert same(fmt.qdq(S[n, h]), out[n, h])
            assert all(same(alone[key], enc[key][n, h]) for key in enc)


@every
def test_strides_do_not_matter(fmt: Format) -> None:
    S = rough(2, 4, 33, 100)
    enc, out = fmt.encode(S), fmt.qdq(S)
    wide = torch.zeros(2, 4, 66, 203)
    wide[..., ::2, 1:201:2] = S
    views = {
        "value-major": S.mT.contiguous().mT,
        "heads outside": S.transpose(0, 1).contiguous().transpose(0, 1),
        "strided slice": wide[..., ::2, 1:201:2],
    }
    for name, view in views.items():
        before = view.clone()
        assert same(fmt.qdq(view), out), name
        assert all(same(t, enc[key]) for key, t in fmt.encode(view).items()), name
        assert same(view, before), "the state was changed"
    repeated = S[:1].expand(3, -1, -1, -1)
    assert same(fmt.qdq(repeated)[2], fmt.qdq(S[0]))


@every
def test_any_leading_dimensions_work(fmt: Format) -> None:
    S = rough(24, 18, 20)
    out = fmt.qdq(S)
    assert same(fmt.qdq(S.view(2, 3, 4, 18, 20)), out.view(2, 3, 4, 18, 20))
    assert same(fmt.qdq(S[5]), out[5])
    empty = fmt.encode(S[:0])
    assert fmt.qdq(S[:0]).shape == (0, 18, 20) and fmt.decode(empty, shape=(18, 20)).shape == (0, 18, 20)


@every
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_states_are_encoded_in_fp32(fmt: Format, half: torch.dtype) -> None:
    S = randn(16, 64).to(half)
    enc, want = fmt.encode(S), fmt.encode(S.float())
    assert all(same(enc[key], want[key]) for key in enc)
    assert same(fmt.qdq(S), fmt.qdq(S.float()).to(half))


@every
def test_the_default_dtype_does_not_matter(fmt: Format) -> None:
    S = rough(33, 70)
    enc, out = fmt.encode(S), fmt.qdq(S)
    torch.set_default_dtype(torch.float64)
    try:
        assert same(fmt.qdq(S), out) and all(same(t, enc[key]) for key, t in fmt.encode(S).items())
        assert same(fmt.decode(enc, shape=(33, 70)), out)
    finally:
        torch.set_default_dtype(torch.float32)


@every
def test_nbytes_is_what_an_encoded_head_takes(fmt: Format) -> None:
    for shape in SHAPES:
        enc = fmt.encode(randn(*shape))
        assert fmt.nbytes(*shape) == sum(t.numel() * t.element_size() for t in enc.values())


def test_nbytes_of_the_usual_head() -> None:
    assert {str(fmt): fmt.nbytes(128, 128) for fmt in ALL} == {
        "fp32": 65536,
        "bf16": 32768,
        "fp16": 32768,
        "int8/*x64": 16392,
        "int8/*x*": 16388,
        "int8/7x5": 16384 + 4 * 19 * 26,
        "fp8_e4m3/*x64": 16392,
        "fp8_e4m3/128x1": 16896,
        "nvfp4": 9224,
    }


@every
def test_nothing_is_differentiable_and_gradients_are_not_needed(fmt: Format) -> None:
    S = randn(8, 8).requires_grad_()
    assert not fmt.qdq(S).requires_grad and not any(t.requires_grad for t in fmt.encode(S).values())
    with torch.inference_mode():
        assert same(fmt.qdq(S.detach()), fmt.qdq(S))


@every
@dtypes
def test_fake_tensors_give_the_same_shapes_and_dtypes(fmt: Format, dtype: torch.dtype) -> None:
    S = randn(2, 33, 100, dtype=dtype)
    enc = fmt.encode(S)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(S)
        fakes = fmt.encode(fake)
        assert {k: (t.shape, t.dtype) for k, t in fakes.items()} == {k: (t.shape, t.dtype) for k, t in enc.items()}
        assert fmt.qdq(fake).shape == fmt.decode(fakes, shape=(33, 100)).shape == S.shape
        assert fmt.qdq(fake).dtype == dtype


def _everything(S: torch.Tensor) -> list[torch.Tensor]:
    out = []
    for fmt in (Int8(), Int8(5, block_k=7), Fp8(), Nvfp4()):
        out += [fmt.qdq(S), *fmt.encode(S).values()]
    return out


def test_the_traced_codec_gives_the_same_bits() -> None:
    S = rough(2, 33, 100)
    for got, want in zip(
        torch.compile(_everything, backend="aot_eager", fullgraph=True)(S), _everything(S), strict=True
    ):
        assert same(got, want)


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_keeps_every_rounding_of_the_quantized_codecs() -> None:
    # Divisions by constants, contraction, partial tiles: Inductor has its own ideas about each of them.
    def qdq(S: torch.Tensor) -> list[torch.Tensor]:
        return [fmt.qdq(S) for fmt in (Int8(), Fp8(), Nvfp4())]

    S = rough(2, 33, 100)
    for got, want in zip(torch.compile(qdq, fullgraph=True)(S), qdq(S), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
def test_a_fp64_state_has_fp64_scales(fmt: Format) -> None:
    enc = fmt.encode(randn(33, 70, dtype=torch.float64))
    assert enc[fmt.keys[-1]].dtype == fmt.decode(enc, shape=(33, 70)).dtype == torch.float64
    assert fmt.decode(enc, shape=(33, 70), dtype=torch.float32).dtype == torch.float32


@every
def test_bad_states_are_refused_by_name(fmt: Format) -> None:
    for call in (fmt.encode, fmt.qdq):
        with pytest.raises(DtypeError, match=r"S: got torch.int8; want a float32, float64, bfloat16 or float16 state"):
            call(torch.zeros(2, 2, dtype=torch.int8))
        with pytest.raises(ShapeError, match=r"S: got \[3\]; want \[\.\.\., K, V\]"):
            call(torch.zeros(3))
    for K, V, name in ((0, 4, "K"), (4, 0, "V")):
        with pytest.raises(FormatError, match=f"{name}: got 0; want at least 1"):
            fmt.check(K, V)
    fmt.check(1, 256)


def test_encoded_states_of_another_format_are_refused() -> None:
    enc = Int8().encode(randn(8, 128))
    with pytest.raises(FormatError) as wrong_keys:
        Nvfp4().decode(enc)
    assert_expected_inline(
        said(wrong_keys.value),
        """\
enc: got tensors ['codes', 'state_scale']
  want ['block_scale', 'codes', 'group_scale']
  Pass what nvfp4.encode returned.""",
    )
    with pytest.raises(FormatError) as wrong_tile:
        Int8(32).decode(enc)
    assert_expected_inline(
        said(wrong_tile.value),
        """\
enc['state_scale']: got shape [1, 2]
  want [..., 1, 4]
  These are not tensors of int8/*x32 for this shape: decode as they were encoded.""",
    )
    with pytest.raises(FormatError):
        Int8().decode(enc, shape=(8, 64))
    assert bits(enc["codes"]).shape == (8, 128)

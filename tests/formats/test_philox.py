"""The random numbers: published answers, the same numbers everywhere, and numbers that are random."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lattn_compile.errors import ShapeError
from lattn_compile.formats.philox import Identity, philox, stream_key, uniform
from tests.formats.states import same

MASK = 0xFFFFFFFF
words = st.integers(0, MASK)
int64s = st.integers(-(2**63), 2**63 - 1)

# Counter, key, output: kat_vectors of Random123, "philox4x32 10".
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def ints(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def written_out(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def identity(positions: list[int], sequences: list[int]) -> Identity:
    return Identity(torch.tensor(positions), torch.tensor(sequences))


@pytest.mark.parametrize(("counter", "key", "want"), PUBLISHED, ids=["zeros", "ones", "pi"])
def test_published_answers(counter: str, key: str, want: str) -> None:
    columns = torch.tensor(ints(counter)).unbind()
    k0, k1 = ints(key)
    assert torch.stack(philox(columns, (k0, k1))).tolist() == ints(want) == written_out(ints(counter), ints(key))
    tensors = torch.tensor(ints(key)).unbind()
    assert torch.stack(philox(columns, tensors)).tolist() == ints(want)


@given(counter=st.lists(words, min_size=4, max_size=4), key=st.lists(words, min_size=2, max_size=2))
def test_any_counter_and_key(counter: list[int], key: list[int]) -> None:
    got = philox(torch.tensor(counter).unbind(), (key[0], key[1]))
    assert torch.stack(got).tolist() == written_out(counter, key)


def test_words_broadcast_and_a_batch_of_keys_is_legal() -> None:
    c = [torch.arange(2).view(2, 1), torch.tensor(7), torch.arange(5), torch.tensor(MASK)]
    full = [x.contiguous() for x in torch.broadcast_tensors(*c)]
    for a, b in zip(philox(tuple(c), (3, 4)), philox(tuple(full), (3, 4)), strict=True):
        assert torch.equal(a, b)
    keys = torch.arange(6).view(6, 1, 1)
    batch = torch.stack(torch.broadcast_tensors(*philox(tuple(c), (keys, keys + 1))))
    assert all(torch.equal(batch[:, i], torch.stack(philox(tuple(c), (i, i + 1)))) for i in range(6))


@settings(max_examples=30, deadline=None)
@given(position=int64s, sequence=int64s, seed=st.integers(0, 2**63 - 1), site=int64s)
def test_every_number_has_its_counter_and_word(position: int, sequence: int, seed: int, site: int) -> None:
    heads, K, V = 2, 6, 3
    r = uniform(identity([position], [sequence]), heads, K, V, seed, site)
    key = (seed + 0x9E3779B97F4A7C15 * site) % 2**64
    for head in range(heads):
        for k in range(K):
            for v in range(V):
                place = head << 16 | (k >> 2) << 8 | v
                counter = [position % 2**32, sequence % 2**32, place, (sequence >> 32) % 2**32]
                word = written_out(counter, [key & MASK, key >> 32])[k & 3]
                assert r[0, head, k, v].item() == (word >> 8) / 2**24


def test_the_last_head_and_channels_have_numbers_of_their_own() -> None:
    r = uniform(identity([5], [9]), 3, 256, 256, 1, 2)
    k0, k1 = stream_key(1, 2)
    word = written_out([5, 9, 2 << 16 | 63 << 8 | 255, 0], [k0, k1])[3]
    assert r[0, 2, 255, 255].item() == (word >> 8) / 2**24
    assert r.shape == (1, 3, 256, 256) and r.dtype == torch.float32


def test_numbers_do_not_depend_on_the_batch() -> None:
    whole = uniform(identity([3, 4, 3, -1], [7, 7, 8, 2**40]), 3, 7, 5, 11, 12)
    for i, (p, s) in enumerate([(3, 7), (4, 7), (3, 8), (-1, 2**40)]):
        assert same(whole[i : i + 1], uniform(identity([p], [s]), 3, 7, 5, 11, 12))
    assert same(whole[[2, 0]], uniform(identity([3, 3], [8, 7]), 3, 7, 5, 11, 12))
    # Nor on how many heads and channels there are beside a value.
    assert same(whole[:, :2, :6, :4], uniform(identity([3, 4, 3, -1], [7, 7, 8, 2**40]), 2, 6, 4, 11, 12))
    assert uniform(identity([], []), 3, 7, 5, 0, 0).shape == (0, 3, 7, 5)


def test_narrow_integers_name_the_same_write() -> None:
    wide = identity([3, -1], [7, 8])
    narrow = Identity(wide.position.to(torch.int32), wide.sequence.to(torch.int16))
    assert same(uniform(wide, 2, 4, 4, 0, 0), uniform(narrow, 2, 4, 4, 0, 0))


def test_position_sequence_seed_and_site_each_change_the_numbers() -> None:
    base = {"position": 5, "sequence": 6, "seed": 7, "site_id": 8}

    def draw(position: int, sequence: int, seed: int, site_id: int) -> Tensor:
        return uniform(identity([position], [sequence]), 2, 16, 16, seed, site_id).flatten()

    drawn = [draw(**base)]
    drawn += [draw(**{**base, name: value + 1}) for name, value in base.items()]
    drawn += [draw(**{**base, "sequence": 6 + 2**32}), draw(**{**base, "seed": 7 + 2**32})]
    table = torch.stack(drawn)
    assert float(torch.corrcoef(table).fill_diagonal_(0).abs().max()) < 0.22  # 5 sigma of 512 numbers
    assert len({tuple(row.tolist()) for row in table}) == len(drawn)


def test_numbers_are_multiples_of_2_to_the_minus_24_below_one_and_uniform() -> None:
    r = uniform(identity(list(range(64)), [0] * 64), 1, 64, 64, 0, 0)
    scaled = r.double() * 2**24
    assert torch.equal(scaled, scaled.floor()) and float(r.min()) >= 0 and float(r.max()) < 1
    count = r.numel()
    bins = torch.bincount((r.flatten() * 256).long(), minlength=256).double()
    chi2 = float(((bins - count / 256) ** 2 / (count / 256)).sum())
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5
    for bit in range(24):  # every bit is as often set as not, the last one included
        share = float((scaled.long() >> bit & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / count**0.5
    # Neighbours in every axis are unrelated.
    x = (r.double() - 0.5)[:, 0]
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[:, :, 1:], x[:, :, :-1])):
        assert abs(float((a * b).mean()) * 12) < 5 / a.numel() ** 0.5


def test_more_heads_or_channels_than_the_counter_has_room_for_are_refused() -> None:
    one = identity([0], [0])
    for heads, K, V, name in ((2**16 + 1, 1, 1, "heads"), (1, 257, 1, "K"), (1, 1, 257, "V")):
        with pytest.raises(ShapeError, match=rf"{name}: got \d+; want at most"):
            uniform(one, heads, K, V, 0, 0)
    with pytest.raises(ShapeError, match=r"identity: got position \[2\], sequence \[1\]; want both \[n\]"):
        uniform(identity([0, 1], [0]), 1, 1, 1, 0, 0)


def test_fake_tensors_and_compilers_see_plain_operations() -> None:
    def draw(position: Tensor, sequence: Tensor) -> Tensor:
        return uniform(Identity(position, sequence), 2, 6, 5, 3, 4)

    want = draw(*identity([1, 2], [3, 4]))
    with FakeTensorMode() as mode:
        fake = draw(*(mode.from_tensor(x) for x in identity([1, 2], [3, 4])))
        assert fake.shape == want.shape and fake.dtype == want.dtype
    backends = ["aot_eager"] + (["inductor"] if shutil.which("c++") else [])
    for backend in backends:
        torch._dynamo.reset()
        assert same(torch.compile(draw, backend=backend, fullgraph=True)(*identity([1, 2], [3, 4])), want), backend

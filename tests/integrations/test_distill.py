"""Distillation for a loop of one's own, and three steps of QAT and QAD on a whole small model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.errors import LattnError, SequenceError
from lattn_compile.integrations.distill import all_prefix, suffix_kl, swapped
from lattn_compile.testing.backend import Record, recorded
from tests import tiny_models

# --- the pieces -------------------------------------------------------------------------------------------------------


def _logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(3).to(dtype)


def _loop(student: Tensor, teacher: Tensor, prefix: list[int], length: list[int], temperature: float) -> float:
    total, count = 0.0, 0
    for b in range(student.shape[0]):
        for t in range(prefix[b], length[b]):
            p = torch.softmax(teacher[b, t] / temperature, 0).tolist()
            q = torch.softmax(student[b, t] / temperature, 0).tolist()
            total += sum(x * (math.log(x) - math.log(y)) for x, y in zip(p, q, strict=True))
            count += 1
    return temperature**2 * total / max(count, 1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(
    ("prefix", "sequence"),
    [(0, None), (2, None), ([0, 3, 6], None), ([1, 2, 4], [6, 4, 5]), (3, [6, 4, 2]), (9, None), (torch.tensor(2), 5)],
)
def test_the_kl_is_that_of_the_suffix_tokens_and_no_others(prefix: Any, sequence: Any, temperature: float) -> None:
    student, teacher = _logits(0).requires_grad_(), _logits(1)
    kl = suffix_kl(student, teacher, prefix, sequence, temperature=temperature)
    kl.backward()
    n = torch.as_tensor(6 if sequence is None else sequence).expand(3)
    p = torch.minimum(torch.as_tensor(prefix).expand(3), n)
    want = _loop(student.detach(), teacher, p.tolist(), n.tolist(), temperature)
    assert kl.item() == pytest.approx(want, rel=1e-9, abs=1e-15)
    inside = (torch.arange(6) >= p[:, None]) & (torch.arange(6) < n[:, None])
    assert student.grad is not None and bool((student.grad[~inside] == 0).all())
    assert bool((student.grad[inside].abs().amax(-1) > 0).all())


def test_what_lies_outside_the_suffix_may_be_anything() -> None:
    student, teacher = _logits(0), _logits(1)
    want = suffix_kl(student, teacher, 2, [4, 6, 5])
    for x in (student, teacher):
        x[:, :2] = math.nan
        x[0, 4:] = math.inf
    student.requires_grad_()
    kl = suffix_kl(student, teacher, 2, [4, 6, 5])
    kl.backward()
    assert torch.equal(kl, want) and student.grad is not None and student.grad.isfinite().all()


def test_the_kl_of_a_model_with_itself_is_zero_and_half_precision_is_computed_in_float32() -> None:
    assert suffix_kl(_logits(0), _logits(0), 0).item() == pytest.approx(0.0, abs=1e-15)
    half = suffix_kl(_logits(0, torch.bfloat16), _logits(1, torch.bfloat16), 0)
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(suffix_kl(_logits(0), _logits(1), 0).item(), rel=0.02)
    with pytest.raises(lc.LattnError, match=r"teacher: got \[3, 6, 4\] beside \[3, 6, 5\]"):
        suffix_kl(_logits(0), _logits(1)[..., :4], 0)


@pytest.mark.parametrize("lengths", [[1], [1, 2], [1, 2, 3, 4]])
def test_the_kl_takes_one_length_or_one_a_sequence(lengths: list[int]) -> None:
    want = rf"got shape \[{len(lengths)}\]; want a scalar or \[B\] = \[3\], one a sequence of logits \[3, 6, 5\]"
    with pytest.raises(SequenceError, match="prefix_lengths: " + want):
        suffix_kl(_logits(0), _logits(1), lengths)
    with pytest.raises(SequenceError, match="sequence_lengths: " + want):
        suffix_kl(_logits(0), _logits(1), 0, torch.tensor(lengths))


def test_swapped_weights_are_the_others_inside_and_the_same_bits_afterwards_also_after_an_error() -> None:
    a, b = torch.nn.Parameter(torch.tensor([1.0, math.nan, -0.0])), torch.tensor([2.0, 3.0, 1e-45])
    before = [x.detach().clone().view(torch.int32) for x in (a, b)]
    pointer = a.data_ptr()
    with pytest.raises(ZeroDivisionError), swapped([(a, b)]):
        assert torch.equal(a.detach().view(torch.int32), before[1]) and a.data_ptr() == pointer
        raise ZeroDivisionError
    assert all(torch.equal(x.detach().view(torch.int32), y) for x, y in zip((a, b), before, strict=True))


def test_all_prefix_is_of_the_kind_that_the_prefix_was() -> None:
    one, each = torch.tensor(3, dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    n = torch.tensor([5, 9], dtype=torch.int32)
    assert [all_prefix(p, s, 9).tolist() for p in (one, each) for s in (None, n)] == [9, 9, [9, 9], [5, 9]]


# --- a model ----------------------------------------------------------------------------------------------------------

TOKENS, PREFIX = 20, 8
LENGTHS = [20, 15]


@pytest.fixture
def graphs() -> Iterator[Record]:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    with recorded() as record:
        yield record


def _model(name: str, policy: Any = "int8") -> Any:
    model, _ = tiny_models.build(name, layers=2)
    model.config.use_cache = False  # type: ignore[union-attr]
    return lc.attach(model, policy).train()


def _compiled(model: Any) -> Any:
    return torch.compile(model, backend="lattn_compile", fullgraph=True)


def _batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids and mask `[2, TOKENS]`, right-padded, and labels, -100 on padding and on what the prefix predicts."""
    ids = torch.randint(2, 97, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    where = torch.arange(TOKENS).expand(2, TOKENS)
    mask = (where < torch.tensor(LENGTHS)[:, None]).long()
    return ids, mask, torch.where((mask == 1) & (where > PREFIX), ids, -100)


def _qat(model: Any, step: Any, seed: int, teacher: Any = None) -> Tensor:
    ids, mask, labels = _batch(seed)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with lc.training_phase(PREFIX, LENGTHS):
        step(inputs_embeds=embedded, attention_mask=mask, labels=labels).loss.backward()
    return embedded.grad


def _qad(model: Any, step: Any, seed: int, teacher: Any = None) -> Tensor:
    ids, mask, _ = _batch(seed)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with swapped(teacher), lc.training_phase(TOKENS, LENGTHS):
        wanted = step(inputs_embeds=embedded, attention_mask=mask).logits.detach()
    with lc.training_phase(PREFIX, LENGTHS):
        logits = step(inputs_embeds=embedded, attention_mask=mask).logits
        suffix_kl(logits, wanted, PREFIX, LENGTHS).backward()
    return embedded.grad


def _train(model: Any, how: Any, step: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Three SGD steps: gradients of the embedded tokens, and the weights afterwards."""
    step, teacher = step or _compiled(model), [(p, p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for seed in range(3):
        found.append(how(model, step, seed, teacher).clone())
        optimizer.step()
        optimizer.zero_grad()
    return found, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", [_qat, _qad], ids=["qat", "qad"])
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_three_steps_train_every_part_through_the_rounding_and_nothing_through_padding(
    graphs: Record, name: str, how: Any
) -> None:
    model = _model(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients, after = _train(model, how)
    assert {c.op for c in graphs.calls} == {"lattn::decode"}
    assert len(graphs.graphs) == 1, "the teacher is the same graph with other lengths"
    linear = [n for n in after if "linear_attn" in n or "layers.0.self_attn" in n]
    assert len(linear) >= 7
    for n in linear:
        assert after[n].isfinite().all() and not torch.equal(after[n], before[n]), n
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert bool((gradient[:, :PREFIX].abs().amax(-1) > 0).all()), "the suffix's loss reaches every prefix token"
        assert bool((gradient[1, LENGTHS[1] :] == 0).all()), "and no padding"
        assert bool((gradient[:, PREFIX : LENGTHS[1] - 1].abs().amax(-1) > 0).all())


@pytest.mark.parametrize("how", [_qat, _qad], ids=["qat", "qad"])
def test_recomputing_activations_changes_no_bit(graphs: Record, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lattn_compile.kernels.reference import decode

    forwards: list[int] = []
    kernel = decode.forward
    monkeypatch.setattr(decode, "forward", lambda *args, **kwargs: forwards.append(1) or kernel(*args, **kwargs))
    found, counts = [], []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        forwards.clear()
        model = _model("qwen3_next")
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(_train(model, how))
        counts.append(len(forwards))
    assert counts[1] == counts[0] + 3, "every student's forward ran twice"
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert all(torch.equal(found[0][1][n], found[1][1][n]) for n in found[0][1])


def test_an_exact_policy_distills_nothing_and_a_quantized_one_does(graphs: Record) -> None:
    for policy, silent in (("exact", True), ("int8", False)):
        torch._dynamo.reset()
        model = _model("qwen3_next", policy)
        gradient = _qad(model, _compiled(model), 0, [])
        assert (gradient.abs().max().item() < 1e-7) == silent


@pytest.mark.parametrize("other", [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3), torch.zeros(1), None])
def test_weights_that_cannot_hold_each_others_bits_are_not_swapped(other: Any) -> None:
    first, second = (torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    pairs, before = [(first, second), (first, other)], first.clone()
    with pytest.raises(LattnError, match=r"pairs(\[1\])?: got"), swapped(pairs):
        pass
    assert torch.equal(first, before), "nothing was swapped and nothing rounded"


def test_a_tensor_in_several_pairs_gets_its_own_values_back() -> None:
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    with swapped([(tensors[0], tensors[1]), (tensors[0], tensors[2])]):
        assert tensors[0][0] == 2.0
    assert [float(x[0]) for x in tensors] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), float("inf"), "1", None, True])
def test_a_temperature_is_a_number_above_zero(temperature: Any) -> None:
    logits = torch.randn(1, 3, 5)
    with pytest.raises(LattnError, match="temperature: got"):
        suffix_kl(logits, logits, 1, temperature=temperature)


@pytest.mark.parametrize("teacher", [None, torch.zeros(1, 3, 5, dtype=torch.long)])
def test_logits_are_floating_point(teacher: Any) -> None:
    with pytest.raises(LattnError, match="teacher: got"):
        suffix_kl(torch.randn(1, 3, 5), teacher, 1)

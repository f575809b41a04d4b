"""The Trainer with a quantized state: phases around every step and no longer, lengths from batches, distillation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile import phase
from lattn_compile.testing.backend import Record, recorded
from tests import tiny_models

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
transformers = pytest.importorskip("transformers")

from transformers import Trainer, TrainingArguments  # noqa: E402

from lattn_compile.integrations.distill import suffix_kl, swapped  # noqa: E402
from lattn_compile.integrations.transformers import LattnCallback, LattnTrainerMixin, right_padded_lengths  # noqa: E402

TOKENS = 16


class Text(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Items of random tokens; `padded`: the i-th has 16, 13 or 10 of them, and a prefix of its own."""

    def __init__(self, items: int, padded: bool = False, **columns: Any) -> None:
        self.items, self.padded, self.columns = items, padded, columns

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = torch.randint(2, 97, (TOKENS,), generator=torch.Generator().manual_seed(i))
        n = TOKENS - 3 * (i % 3) if self.padded else TOKENS
        mask = (torch.arange(TOKENS) < n).long()
        item = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
        return item | ({"prefix_lengths": 2 + i % 4, "sequence_ids": 100 + i} if self.padded else {})


class Own(LattnTrainerMixin, Trainer):  # type: ignore[misc]
    pass


@pytest.fixture
def graphs() -> Iterator[Record]:
    torch._dynamo.reset()
    with recorded() as record:
        yield record
    assert phase.current() == (None, None), "a phase was left behind"


def _model(policy: Any = "int8") -> Any:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    model.config.use_cache = False  # type: ignore[union-attr]
    lc.attach(model, policy)
    model.compile(backend="lattn_compile", fullgraph=True)
    return model


def _trainer(folder: Path, model: Any, *callbacks: Any, cls: Any = Trainer, data: Any = None, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("qad", "teacher", "temperature") if name in options}
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    args = TrainingArguments(str(folder), **(settings | options))
    data = data or Text(16)
    trainer = cls(model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks], **own)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _weights(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _prefixes(record: Record) -> list[Any]:
    return [c.arguments["prefix_lengths"].tolist() for c in record.calls]


# --- the callback -----------------------------------------------------------------------------------------------------


def test_every_step_and_substep_has_the_prefix_of_its_optimizer_step(graphs: Record, tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _model(), LattnCallback([5, 3, 9]), gradient_accumulation_steps=2, max_steps=4)
    trainer.train()
    assert _prefixes(graphs) == [5, 5, 3, 3, 9, 9, 5, 5]
    assert len(graphs.graphs) == 1
    assert {c.op for c in graphs.calls} == {"lattn::decode"}


def test_a_schedule_may_be_an_int_or_any_function_of_the_step() -> None:
    assert [LattnCallback(7).prefix_at(s) for s in range(3)] == [7, 7, 7]
    assert [LattnCallback([1, 2]).prefix_at(s) for s in range(3)] == [1, 2, 1]
    assert LattnCallback(lambda step: [step, 2 * step]).prefix_at(3) == [3, 6]
    assert LattnCallback(4, eval_prefix=6).prefix_at(0, training=False) == 6
    assert LattnCallback([4, 5]).prefix_at(1, training=False) == 5
    for wrong in (-1, True, [], [1, -2], 1.5, "64", None):
        with pytest.raises(lc.LattnError, match=r"prefix: got .*want an int >= 0, a list of them .one a step., or a"):
            LattnCallback(wrong)  # type: ignore[arg-type]
    with pytest.raises(lc.LattnError, match="state_error_every: got 0"):
        LattnCallback(3, state_error_every=0)


def test_evaluation_has_a_phase_too_inside_training_and_alone(graphs: Record, tmp_path: Path) -> None:
    trainer = _trainer(
        tmp_path, _model(), LattnCallback(5, eval_prefix=8), eval_strategy="steps", eval_steps=1, max_steps=1
    )
    trainer.train()
    assert _prefixes(graphs) == [5, 8, 8]
    graphs.calls.clear()
    quantized = trainer.evaluate()["eval_loss"]
    assert _prefixes(graphs) == [8, 8]
    trainer.pop_callback(LattnCallback)
    trainer.add_callback(LattnCallback(TOKENS))
    assert trainer.evaluate()["eval_loss"] != quantized, "an exact state gives another number"
    trainer.predict(Text(2))
    assert _prefixes(graphs)[-1] == TOKENS


def test_a_step_of_the_trainer_is_that_of_a_loop_bit_for_bit(graphs: Record, tmp_path: Path) -> None:
    model = _model()
    trainer = _trainer(tmp_path, model, LattnCallback(6), max_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    torch._dynamo.reset()
    other = _model().train()
    with lc.training_phase(6):
        # Trainer gives the model the number of labels, which the loss is divided by.
        other(**batch, num_items_in_batch=torch.tensor(2 * (TOKENS - 1))).loss.backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    mine, wanted = _weights(model), _weights(other)
    assert all(torch.equal(mine[n], wanted[n]) for n in wanted)


class Boom(Exception):
    pass


@pytest.mark.parametrize("cls", [Trainer, Own])
@pytest.mark.parametrize("where", ["forward", "backward", "measure", "evaluation"])
def test_an_exception_in_a_step_leaves_no_phase_behind(
    graphs: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: Any, where: str
) -> None:
    model = _model()

    def boom(*args: Any, **kwargs: Any) -> Any:
        assert phase.current()[0] is not None, "it is thrown inside the phase"
        raise Boom

    trainer = _trainer(tmp_path, model, LattnCallback(4, state_error_every=1), cls=cls)
    if where == "measure":
        monkeypatch.setattr("lattn_compile.integrations.transformers.state_errors", boom)
    elif where == "backward":
        monkeypatch.setattr(trainer.accelerator, "backward", boom)
    else:
        monkeypatch.setattr(trainer, "compute_loss", boom)
    with pytest.raises(Boom):
        trainer.evaluate() if where == "evaluation" else trainer.train()
    assert phase.current() == (None, None)


def test_other_trainers_are_left_alone(graphs: Record, tmp_path: Path) -> None:
    LattnCallback(3)
    with pytest.warns(lc.LattnWarning, match="training without a phase"):
        _trainer(tmp_path, _model(), max_steps=1).train()
    assert {c.op for c in graphs.calls} == {"lattn::chunk"}


def test_the_trainer_is_wrapped_once() -> None:
    LattnCallback(3)
    step = Trainer.training_step
    LattnCallback(4)
    assert Trainer.training_step is step and step.__name__ == "training_step"


def test_a_training_step_that_bypasses_the_phase_is_refused(graphs: Record, tmp_path: Path) -> None:
    class Bypass(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return model(**inputs).loss, None, None

    with pytest.raises(lc.LattnError, match=r"does not call Trainer\.training_step.*LattnTrainerMixin"):
        _trainer(tmp_path, _model("exact"), LattnCallback(4), cls=Bypass).train()
    with pytest.warns(lc.LattnWarning, match="evaluated without a phase"):
        _trainer(tmp_path, _model("exact"), LattnCallback(4), cls=Bypass).evaluate()


# --- what is measured -------------------------------------------------------------------------------------------------


def test_state_errors_are_logged_at_their_interval_and_training_is_the_same_without(
    graphs: Record, tmp_path: Path
) -> None:
    found = []
    for every in (None, 2):
        torch._dynamo.reset()
        graphs.graphs.clear()
        model, callback = _model(), LattnCallback(4, state_error_every=every)
        trainer = _trainer(tmp_path, model, callback, max_steps=5, gradient_accumulation_steps=2)
        trainer.train()
        found.append(_weights(model))
        assert len(graphs.graphs) == 1
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert [step for step, _ in callback.state_errors] == [0, 2, 4]
    site = "model.layers.0.linear_attn/gdn#0"
    assert all(list(errors) == [site] and 1e-3 < errors[site] < 0.2 for _, errors in callback.state_errors)
    logged = [(e["step"], e[f"state_error/{site}"]) for e in trainer.state.log_history if f"state_error/{site}" in e]
    assert logged == [(step, errors[site]) for step, errors in callback.state_errors]


def test_state_errors_need_a_recipe_and_say_so_before_training(graphs: Record, tmp_path: Path) -> None:
    model = lc.detach(_model())
    with pytest.raises(lc.LattnError, match=r"state_error_every: got 2, and a model without a recipe.*lc\.attach"):
        _trainer(tmp_path, model, LattnCallback(4, state_error_every=2)).train()
    callback = LattnCallback(4, state_error_every=1, recipe="fp8")
    _trainer(tmp_path, model, callback, max_steps=1).train()
    assert len(callback.state_errors) == 1


# --- lengths of a batch -----------------------------------------------------------------------------------------------


def test_lengths_come_from_the_mask_and_the_columns_and_the_model_never_sees_these(
    graphs: Record, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, _model(), cls=Own, data=Text(16, padded=True), max_steps=2)
    batches = list(trainer.get_train_dataloader())[:2]
    seen: set[str] = set()
    trainer.model.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    trainer.train()
    assert {"input_ids", "attention_mask", "labels"} <= seen
    assert not seen & {"prefix_lengths", "sequence_ids"}
    assert _prefixes(graphs) == [b["prefix_lengths"].tolist() for b in batches]
    lengths = [c.arguments["sequence_lengths"].tolist() for c in graphs.calls]
    assert lengths == [b["attention_mask"].sum(1).tolist() for b in batches]
    assert len({n for batch in lengths for n in batch}) > 1
    trainer.evaluate()
    assert len(graphs.calls) == 2 + 2 and {"prefix_lengths", "sequence_ids"} <= set(batches[0])


def test_without_the_column_the_schedule_says_what_the_prefix_is(graphs: Record, tmp_path: Path) -> None:
    _trainer(tmp_path, _model(), LattnCallback([4, 7]), cls=Own).train()
    assert _prefixes(graphs) == [4, 7]
    assert [c.arguments["sequence_lengths"].tolist() for c in graphs.calls] == [[TOKENS] * 2] * 2
    with pytest.raises(lc.LattnError, match=r"no LattnCallback, and a batch without a column prefix_lengths"):
        _trainer(tmp_path, _model(), cls=Own).train()


def test_only_right_padding_has_lengths() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    for kind in (torch.int64, torch.bool, torch.float32):
        lengths = right_padded_lengths(mask.to(kind))
        assert lengths is not None and lengths.tolist() == [3, 4, 0] and lengths.dtype is torch.int32
    assert right_padded_lengths(None) is right_padded_lengths(torch.ones(2, 1, 4, 4)) is None
    for wrong in ([0, 1, 1, 1], [1, 0, 1, 1]):
        with pytest.raises(lc.LattnError, match=r"tokens behind padding.*padding_side"):
            right_padded_lengths(torch.tensor([wrong]))


# --- distillation -----------------------------------------------------------------------------------------------------


def _by_hand(model: Any, batch: Mapping[str, Tensor], start: dict[str, Tensor] | None, qad: float, t: float) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k not in ("prefix_lengths", "sequence_ids")}
    prefix, lengths = batch["prefix_lengths"], batch["attention_mask"].sum(1)
    weights = [] if start is None else [(p, start[n].clone()) for n, p in model.named_parameters()]
    with swapped(weights), lc.training_phase(lengths, lengths):
        teacher = model(**inputs).logits.detach()
    with lc.training_phase(prefix, lengths):
        out = model(**inputs)
        loss = qad * suffix_kl(out.logits, teacher, prefix, lengths, temperature=t) + (1 - qad) * out.loss
        loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("qad", "teacher", "temperature"), [(1.0, "start", 1.0), (0.5, "self", 1.0), (0.75, "state_dict", 2.0)]
)
def test_distillation_is_that_of_a_loop_and_compiles_one_graph(
    graphs: Record, tmp_path: Path, qad: float, teacher: str, temperature: float
) -> None:
    model, start = _model(), None if teacher == "self" else _weights(_model())
    if teacher == "state_dict":
        start = {n: w * 1.01 for n, w in start.items()}  # type: ignore[union-attr]
    given: Any = start if teacher == "state_dict" else teacher
    options = {"qad": qad, "teacher": given, "temperature": temperature, "data": Text(16, padded=True)}
    trainer = _trainer(tmp_path, model, cls=Own, max_steps=2, gradient_accumulation_steps=2, **options)
    batches = list(trainer.get_train_dataloader())[:4]
    torch._dynamo.reset()
    graphs.graphs.clear()
    trainer.train()
    assert len(graphs.graphs) == 1, "the teacher is the same graph"
    assert trainer._teacher_weights == []

    torch._dynamo.reset()
    other = _model().train()
    optimizer, losses = torch.optim.SGD(other.parameters(), lr=0.1), []
    for step in range(2):
        parts = [_by_hand(other, batch, start, qad, temperature) for batch in batches[2 * step : 2 * step + 2]]
        for p in other.parameters():
            p.grad = None if p.grad is None else p.grad / 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(parts).mean().item())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5, abs=1e-9)
    mine, wanted = _weights(model), _weights(other)
    for n in wanted:
        # The Trainer halves the losses, the loop the gradients.
        assert (mine[n] - wanted[n]).norm() <= 1e-5 * wanted[n].norm() + 1e-9, n
    assert not all(torch.equal(mine[n], w) for n, w in _weights(_model()).items())


def test_evaluation_under_distillation_has_the_usual_loss(graphs: Record, tmp_path: Path) -> None:
    options = {"data": Text(4, padded=True), "cls": Own}
    usual = _trainer(tmp_path, _model(), **options).evaluate()["eval_loss"]
    assert _trainer(tmp_path, _model(), qad=1.0, **options).evaluate()["eval_loss"] == usual


def test_dropout_is_the_same_for_teacher_and_student(graphs: Record, tmp_path: Path) -> None:
    losses = []
    for policy in ("exact", "int8"):
        torch._dynamo.reset()
        model = _model(policy)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        trainer = _trainer(tmp_path, model, LattnCallback(4), cls=Own, qad=1.0, max_steps=1)
        trainer.train()
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(0.0, abs=1e-7), "nothing differs where nothing is rounded"
    assert losses[1] > 1e-6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"qad": 1.5}, "qad: got 1.5; want a share of the loss"),
        ({"qad": True}, "qad: got True"),
        ({"qad": 0.5, "temperature": 0}, "temperature: got 0"),
        ({"qad": 0.5, "teacher": "itself"}, "teacher: got 'itself'"),
        ({"qad": 0.5, "teacher": 3}, "teacher: got int"),
        ({"qad": 1.0, "teacher": "self"}, 'got "self" with qad=1.0'),
    ],
)
def test_a_distillation_that_cannot_be_is_refused_before_training(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(lc.LattnError, match=text):
        _trainer(tmp_path, _model(), cls=Own, **options)


def test_a_teacher_of_another_model_is_refused_by_name(graphs: Record, tmp_path: Path) -> None:
    for change, text in ((lambda w: {}, "without 'model"), (lambda w: {n: x[:1] for n, x in w.items()}, "with shape")):
        teacher = change(_weights(_model()))
        with pytest.raises(lc.LattnError, match=text):
            _trainer(tmp_path, _model(), LattnCallback(3), cls=Own, qad=0.5, teacher=teacher).train()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_of_the_trainer_have_the_recipe_and_training_resumes_from_them(
    graphs: Record, tmp_path: Path
) -> None:
    model, options = _model(), {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    _trainer(tmp_path, model, LattnCallback(4), **options).train()
    assert lc.Recipe.from_pretrained(tmp_path / "checkpoint-1") == lc.Recipe(rules=[("*", "int8")])
    torch._dynamo.reset()
    other = _model()
    _trainer(tmp_path, other, LattnCallback(4), **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    mine, wanted = _weights(other), _weights(model)
    assert all(torch.equal(mine[n], wanted[n]) for n in wanted)


@pytest.mark.skipif(
    "LATTN_TEST_HF517" not in os.environ, reason="set LATTN_TEST_HF517 to a folder with transformers 5.17"
)
def test_the_oldest_supported_transformers_does_the_same() -> None:
    """Models, Trainer, from_pretrained and caches of the other version, in one process: importing it takes longer than
    most of these tests. Without LATTN_COMPILE_ALL, those of which another version's methods are a part."""
    path = os.pathsep.join([os.environ["LATTN_TEST_HF517"], os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k != "LATTN_TEST_HF517"} | {"PYTHONPATH": path}
    names = ("integrations/test_transformers", "integrations/test_pretrained", "integrations/test_packed_cache")
    files = [f"tests/{name}.py" for name in (*names, "test_models")]
    chosen = "not test_inductor" if "LATTN_COMPILE_ALL" in os.environ else " or ".join(OLDEST)
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-W", "ignore", *files, "-k", chosen]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


OLDEST = (
    # Library calls: the functions of both kinds, the cache class once
    *("prefill_and_training and kimi", "generation_equals and qwen3_next", "phase_quantizes and qwen3_next"),
    # Trainer: its step, its loss, its evaluation, its checkpoints, what it passes to the model
    *("every_step_and_substep", "evaluation_has_a_phase", "bypasses_the_phase", "lengths_come_from_the_mask"),
    *("0.5-self-1.0", "checkpoints_of_the_trainer", "backward-Trainer", "wrapped_once"),
    # save_pretrained and from_pretrained
    *("recipe_of_its_folder", "beside_weights", "shards_and", "pushing", "unpickled"),
    # Cache classes and generate
    *("teacher_forced", "drafted_generation and exact", "static_caches", "in_pieces", "one_argument", "undone"),
)

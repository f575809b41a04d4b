"""transformers' Trainer with a quantized state: `LattnCallback` for the phase, `LattnTrainerMixin` for lengths and QAD.

model = lc.attach(model, "int8")
model.compile(backend="lattn_compile")          # not TrainingArguments(torch_compile=...), which knows no own backends
trainer = Trainer(model, args, train_dataset=..., callbacks=[LattnCallback(prefix=64, state_error_every=100)])

class LattnTrainer(LattnTrainerMixin, Trainer): ...         # right-padded batches; prefix_lengths a column; QAD

`quantize_cache(model, recipe)`, whose caches then store their recurrent states in few bits, is in `packed_cache.py`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from lattn_compile import phase
from lattn_compile.attach import attached_recipe
from lattn_compile.errors import LattnError, LattnWarning, PhaseError, SequenceError, UnsupportedError
from lattn_compile.integrations.distill import all_prefix, suffix_kl, swapped
from lattn_compile.integrations.packed_cache import cache_bytes, packed_cache, quantize_cache, unquantize_cache
from lattn_compile.integrations.state_error import state_errors
from lattn_compile.phase import Lengths, training_phase
from lattn_compile.policy import Recipe, resolve_recipe

__all__ = [
    "LattnCallback",
    "LattnTrainerMixin",
    "cache_bytes",
    "packed_cache",
    "quantize_cache",
    "unquantize_cache",
]

PREFIX, IDS = "prefix_lengths", "sequence_ids"  # columns of a data set that LattnTrainerMixin takes out of a batch
_WRAPPED = "_lattn_wrapped"


class LattnCallback(TrainerCallback):
    """Runs every training step (each substep of gradient accumulation) and every evaluation step in a training phase.

    Args:
        prefix: tokens of exact prefill, the rest is decoded with a quantized state. An int; or a list of ints, one an
            optimizer step, starting over at its end; or a function of the optimizer step (`state.global_step`) that
            returns anything `lc.training_phase` takes.
        eval_prefix: the same for evaluation and prediction; None: as `prefix` at that step.
        state_error_every: every so many optimizer steps, measure how far each layer's stored state is from the exact
            one (`state_errors`, on the step's first batch), log it as `state_error/<site>` and keep it in
            `state_errors`. It costs an uncompiled forward and changes nothing else. None: never.
        recipe: for `state_error_every`, where no recipe is attached to the model.

    Attributes:
        state_errors: `(step, {site: error})` of every measurement.

    There is no event at which a phase could be left when a step raises, nor one before an evaluation step. So the phase
    is a `with` inside `Trainer.training_step` and `Trainer.prediction_step`, which the first callback made wraps, once
    in a process; a trainer without such a callback goes straight through.

    Raises:
        LattnError: a prefix of another kind. UnsupportedError, in training: the trainer's class replaces
            `training_step` without calling Trainer's own.
    """

    def __init__(
        self,
        prefix: int | Sequence[int] | Callable[[int], Lengths],
        *,
        eval_prefix: int | Sequence[int] | Callable[[int], Lengths] | None = None,
        state_error_every: int | None = None,
        recipe: Any = None,
    ) -> None:
        self._prefix = _schedule("prefix", prefix)
        self._eval_prefix = self._prefix if eval_prefix is None else _schedule("eval_prefix", eval_prefix)
        if state_error_every is not None and (type(state_error_every) is not int or state_error_every < 1):
            raise LattnError(
                "state_error_every",
                got=repr(state_error_every),
                want="a number of steps of at least 1, or None",
                remedy="Leave it out to measure nothing.",
            )
        self._every = state_error_every
        self._recipe: Recipe | None = None if recipe is None else resolve_recipe(recipe, "recipe")
        self.state_errors: list[tuple[int, dict[str, float]]] = []
        self._entered = {True: 0, False: 0}
        _wrap_trainer()

    def prefix_at(self, step: int, *, training: bool = True) -> Lengths:
        """The prefix of optimizer step `step`, as `lc.training_phase` takes it."""
        return (self._prefix if training else self._eval_prefix)(step)

    @contextlib.contextmanager
    def around_step(
        self,
        trainer: Trainer,
        inputs: Mapping[str, Any],
        *,
        training: bool,
        prefix: Lengths | None = None,
        sequence: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Iterator[None]:
        """The phase of one forward (and backward) of `trainer`; lengths that are None come from the schedule."""
        step = trainer.state.global_step
        prefix = self.prefix_at(step, training=training) if prefix is None else prefix
        with training_phase(prefix, sequence, **({} if ids is None else {"sequence_ids": ids})):
            self._entered[training] += 1
            if training:
                self._measure(trainer, inputs, step)
            yield

    def _measure(self, trainer: Trainer, inputs: Mapping[str, Any], step: int) -> None:
        if self._every is None or step % self._every or (self.state_errors and self.state_errors[-1][0] == step):
            return
        batch = {k: v for k, v in trainer._prepare_inputs(dict(inputs)).items() if k != "labels"}
        assert trainer.model is not None
        errors = state_errors(trainer.model, batch, self._recipe)
        self.state_errors.append((step, errors))
        trainer.log({f"state_error/{site}": error for site, error in errors.items()})

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._entered = {True: 0, False: 0}
        if self._every is not None and self._recipe is None and attached_recipe(model) is None:
            raise LattnError(
                "state_error_every",
                got=f"{self._every}, and a model without a recipe",
                want="a recipe attached to the model, or recipe=",
                remedy="Call lc.attach(model, recipe) before training.",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._entered[True]:
            raise UnsupportedError(
                "LattnCallback",
                got="a trainer whose training_step does not call Trainer.training_step",
                want="one that does, or LattnTrainerMixin as its first base",
                remedy="Enter lc.training_phase(callback.prefix_at(state.global_step)) in that training_step instead.",
            )
        self._entered[True] = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Generation has no phase: prefill is exact and every decoded token is suffix without one.
        if not self._entered[False] and not getattr(args, "predict_with_generate", False):
            warnings.warn(
                "LattnCallback: this trainer's prediction_step does not call Trainer.prediction_step, so it is "
                "evaluated without a phase, and chunk-form layers with an exact state.",
                LattnWarning,
                stacklevel=2,
            )
        self._entered[False] = 0


class LattnTrainerMixin:
    """First base of a Trainer: per-sequence lengths from the batch, and quantization-aware distillation.

        class LattnTrainer(LattnTrainerMixin, Trainer): ...
        LattnTrainer(model=..., args=..., callbacks=[LattnCallback(prefix=64)], qad=1.0)

    Lengths of a batch: `sequence_lengths` are what its right-padded `attention_mask` says; the prefix is a column
    `prefix_lengths` where the data set has one, else the callback's schedule; a column `sequence_ids` keys stochastic
    rounding. These columns never reach the model.

    Args:
        qad: share of the distillation in the loss, 0 to 1: `qad · KL(exact ‖ quantized) + (1 − qad) · the usual loss`.
            KL is a mean over the suffix tokens of a batch; with gradient accumulation the losses of batches are
            averaged. Evaluation has the usual loss. The teacher is the same compiled graph under a phase that is all
            prefix, so it costs a forward, and neither a second model nor another compile.
        teacher: whose weights the exact model has. "start": those at the first step of `train()`, kept beside the
            trained ones; a state dict: those, for a training that is resumed; "self": the trained ones at every step.
            "self" needs a share of the usual loss: alone, it asks only that rounding change nothing, which a model
            that forgets everything does best.
        temperature: of both distributions; KL is multiplied by its square.

    Raises:
        LattnError: a share, teacher or temperature that cannot be. LattnError, in training: neither a callback nor a
            column says what the prefix is. SequenceError, in training: a batch that is not right-padded.
    """

    def __init__(
        self,
        *args: Any,
        qad: float = 0.0,
        teacher: str | Mapping[str, Tensor] = "start",
        temperature: float = 1.0,
        **kwargs: Any,
    ) -> None:
        _check_distillation(qad, teacher, temperature)
        self._qad, self._teacher, self._temperature = qad, teacher, temperature
        self._teacher_weights: list[tuple[Tensor, Tensor]] = []
        super().__init__(*args, **kwargs)
        if qad:
            # KL is a mean over a batch, so the Trainer has to average batches, and the usual loss has to be one too.
            self.model_accepts_loss_kwargs = False
        self._lattn_default = LattnCallback(_no_schedule)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._teacher_weights = []
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._teacher_weights = []

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns: list[str] = self._signature_columns  # type: ignore[has-type]
        self._signature_columns = list(dict.fromkeys([*columns, PREFIX, IDS]))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._step(inputs, training=True) as rest:
            return super().training_step(model, rest, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._step(inputs, training=False) as rest:
            return super().prediction_step(model, rest, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _step(self, inputs: Mapping[str, Any], *, training: bool) -> Iterator[dict[str, Any]]:
        rest = dict(inputs)
        prefix, ids = rest.pop(PREFIX, None), rest.pop(IDS, None)
        callback = _callback_of(self) or self._lattn_default
        sequence = right_padded_lengths(rest.get("attention_mask"))
        with callback.around_step(
            self,  # type: ignore[arg-type]
            rest,
            training=training,
            prefix=prefix,
            sequence=sequence,
            ids=ids,
        ):
            yield rest

    def _weights_of_teacher(self, model: Any) -> list[tuple[Tensor, Tensor]]:
        """The trained parameters, each with what the teacher has in its place."""
        if self._teacher == "self" or self._teacher_weights:
            return self._teacher_weights
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if self._teacher == "start":
                weight = parameter.detach().clone()
            else:
                weight = _of_state_dict(self._teacher, name, parameter)
            self._teacher_weights.append((parameter, weight))
        return self._teacher_weights

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        usual = functools.partial(super().compute_loss, model, **kwargs)  # type: ignore[misc]
        if not self._qad or not model.training:
            return usual(inputs, return_outputs=return_outputs)
        tokens = next(x for name in ("input_ids", "inputs_embeds") if (x := inputs.get(name)) is not None)
        prefix, sequence = phase.current()
        position, ids = phase.current_identity()
        if prefix is None:
            raise PhaseError(
                "compute_loss",
                got="a training loss with qad outside of a training phase",
                want="a call from training_step, which enters one",
                remedy="Enter lc.training_phase around a call of your own.",
            )
        everything = all_prefix(prefix, sequence, tokens.shape[1])
        devices = [tokens.device] if tokens.device.type == "cuda" else []
        with (
            training_phase(everything, sequence, sequence_ids=ids, position=position),
            torch.random.fork_rng(devices=devices),  # dropout draws the same numbers for both
            swapped(self._weights_of_teacher(model)),
        ):
            # With autograd on, though nothing goes back through it: under no_grad the graph would be another, to
            # compile.
            teacher = usual(dict(inputs), return_outputs=True)[1]
        teacher = _logits(teacher).detach()
        loss, outputs = usual(dict(inputs), return_outputs=True)
        kl = suffix_kl(_logits(outputs), teacher, prefix, sequence, temperature=self._temperature)
        loss = self._qad * kl + (1.0 - self._qad) * loss if self._qad < 1.0 else kl
        return (loss, outputs) if return_outputs else loss


def right_padded_lengths(attention_mask: Tensor | None) -> Tensor | None:
    """Lengths `[B]` (int32) of the sequences of a right-padded batch; None without a mask `[B, T]`.

    Raises:
        SequenceError: padding on the left, or a hole: the phase knows only where a sequence ends.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return None
    mask = attention_mask != 0
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise SequenceError(
            "attention_mask",
            got="tokens behind padding",
            want="a right-padded batch: ones, then zeros",
            remedy='Set tokenizer.padding_side = "right".',
        )
    return mask.sum(dim=1, dtype=torch.int32)


def _check_distillation(qad: Any, teacher: Any, temperature: Any) -> None:
    if isinstance(qad, bool) or not isinstance(qad, int | float) or not 0.0 <= qad <= 1.0:
        raise LattnError("qad", got=repr(qad), want="a share of the loss, 0 to 1", remedy="1.0 is KL alone.")
    if not isinstance(temperature, int | float) or not temperature > 0.0:
        raise LattnError("temperature", got=repr(temperature), want="a number above 0", remedy="1.0 is usual.")
    if teacher not in ("start", "self") if isinstance(teacher, str) else not isinstance(teacher, Mapping):
        raise LattnError(
            "teacher",
            got=repr(teacher) if isinstance(teacher, str) else type(teacher).__name__,
            want='"start", "self" or a state dict',
            remedy='"start" distills from the model as training found it.',
        )
    if qad == 1.0 and isinstance(teacher, str) and teacher == "self":
        raise LattnError(
            "teacher",
            got='"self" with qad=1.0',
            want="a share of the usual loss beside it",
            remedy='Nothing would hold the model to its data. Use teacher="start", or qad=0.5.',
        )


def _of_state_dict(state_dict: Any, name: str, parameter: Tensor) -> Tensor:
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    found = next((state_dict[key] for key in (name, name.removeprefix("module.")) if key in state_dict), None)
    if found is None or found.shape != parameter.shape:
        raise LattnError(
            "teacher",
            got=f"a state dict {'without' if found is None else f'with shape {list(found.shape)} of'} {name!r}",
            want=f"one of the trained model, {list(parameter.shape)}",
            remedy="Pass model.state_dict() as it was before training.",
        )
    return found.detach().to(device=parameter.device, dtype=parameter.dtype, copy=True)


def _logits(outputs: Any) -> Tensor:
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs[1]


def _no_schedule(step: int) -> Lengths:
    raise LattnError(
        "LattnTrainerMixin",
        got="no LattnCallback, and a batch without a column prefix_lengths",
        want="one of the two: they say how many tokens of a sequence are exact prefill",
        remedy="Pass callbacks=[LattnCallback(prefix=...)]; prefix=0 quantizes from the first token on.",
    )


def _schedule(name: str, prefix: Any) -> Callable[[int], Lengths]:
    if callable(prefix):
        return prefix
    items = [prefix] if isinstance(prefix, int) else prefix
    if (
        not isinstance(items, list | tuple)
        or not items
        or not all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in items)
    ):
        raise LattnError(
            name,
            got=repr(prefix),
            want="an int >= 0, a list of them (one a step), or a function of the step",
            remedy="For one length a sequence, return them from a function, or use LattnTrainerMixin's column.",
        )
    return lambda step: items[step % len(items)]


def _callback_of(trainer: Any) -> LattnCallback | None:
    return next((c for c in trainer.callback_handler.callbacks if isinstance(c, LattnCallback)), None)


def _wrap_trainer() -> None:
    for name, training in (("training_step", True), ("prediction_step", False)):
        original = getattr(Trainer, name)
        if not getattr(original, _WRAPPED, False):
            setattr(Trainer, name, _in_phase(original, training))


def _in_phase(original: Callable[..., Any], training: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Trainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        callback = None if isinstance(self, LattnTrainerMixin) else _callback_of(self)
        if callback is None:
            return original(self, model, inputs, *args, **kwargs)
        with callback.around_step(self, inputs, training=training):
            return original(self, model, inputs, *args, **kwargs)

    setattr(step, _WRAPPED, True)
    return step

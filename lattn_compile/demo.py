"""The main job in small: train a hybrid language model, quantize its recurrent state, train that loss back.

A byte-level model of transformers' own Qwen3-Next (or Qwen3.5, or Kimi-Linear) classes learns English from the text
that every Python ships (`pydoc_data.topics`), through `torch.compile(model, backend="lattn_compile")`. Bits per byte
are then measured on held-out pages: exact state, state rounded at every token without training, and after a short
training that sees the rounding. `lattn-compile demo` and `examples/quickstart.py` run it.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lattn_compile.doctor import cxx_compiler
from lattn_compile.errors import LattnError, RewriteError, UnsupportedError, nearest
from lattn_compile.render import columns

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lattn_compile.api import PolicyLike
    from lattn_compile.report import Report

__all__ = ["BATCH", "LENGTH", "MODELS", "PREFIX", "Lab", "Row", "Text", "build_model", "load_text", "run"]

BATCH, LENGTH, PREFIX = 8, 256, 64
STEPS = 120
HELDOUT_BATCHES = 12
LEARNING_RATE = 3e-3

# What every model below has: three linear layers, one attention layer, 128 channels, no mixture of experts.
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "layer_types": LAYERS,
    "use_cache": False,
    "tie_word_embeddings": True,
    # The defaults are ids of tokenizers with a far larger vocabulary; a byte model has no such tokens.
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GDN_SIZES: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def _qwen3_next() -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    # num_experts stays positive because the constructor wants it; mlp_only_layers leaves no layer to use it.
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **GDN_SIZES, num_experts=1, mlp_only_layers=[0, 1, 2, 3]))


def _qwen3_5() -> PreTrainedModel:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **GDN_SIZES))


def _kimi() -> PreTrainedModel:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    sizes: dict[str, Any] = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "mlp_layer_types": ["dense"] * 4,
    }
    return KimiLinearForCausalLM(KimiLinearConfig(**SIZES, **sizes))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"qwen3_next": _qwen3_next, "qwen3_5": _qwen3_5, "kimi": _kimi}


def build_model(name: str = "qwen3_next", seed: int = 0) -> PreTrainedModel:
    """A new causal language model over bytes, about 0.7 M parameters, from transformers' classes.

    Raises:
        LattnError: no model of that name. UnsupportedError: transformers is not installed.
    """
    import torch

    if name not in MODELS:
        raise LattnError(
            "model",
            got=repr(name),
            want=", ".join(MODELS),
            remedy=f"Choose one of the listed models.{nearest(name, MODELS)}",
        )
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(
            "transformers",
            got="not installed",
            want="transformers 5.17 or newer, whose model classes the demo trains",
            remedy="Install it with: pip install 'lattn-compile[hf]'",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(module, "dt_bias"):
                _slow_decay(module.get_parameter("A_log"), module.get_parameter("dt_bias"))
    return model


def _slow_decay(a_log: Tensor, dt_bias: Tensor) -> None:
    """Gates that remember for 10 to 1000 tokens, log-uniform (exp(A_log) = 1, softplus(dt_bias) in [0.001, 0.1]).

    transformers' own values for the Qwen classes are placeholders for checkpoints to overwrite: they forget nearly all
    within a token, and there would be no memory to quantize. Trained models have heads as slow as these, and slow heads
    are where the roundings of many steps add up.
    """
    import torch

    with torch.no_grad():
        a_log.zero_()
        step = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus


@dataclass(frozen=True)
class Text:
    """Bytes of English as int64 tensors: `train` `[n]`, and `heldout` windows `[batches, BATCH, LENGTH + 1]`."""

    train: Tensor
    heldout: Tensor

    def batch(self, generator: Any) -> Tensor:
        """`[BATCH, LENGTH + 1]` random windows of the training text."""
        import torch

        first = torch.randint(len(self.train) - LENGTH, (BATCH, 1), generator=generator)
        return self.train[first + torch.arange(LENGTH + 1)]


def load_text(batches: int = HELDOUT_BATCHES) -> Text:
    """The manual pages of this Python, every tenth one held out; windows of the held-out text do not overlap.

    Many pages repeat parts of others ("class" and "for" are inside "compound"), so the texts are made of paragraphs,
    each used once: what is held out occurs nowhere in training.
    """
    from pydoc_data.topics import topics

    import torch

    names = sorted(topics)
    heldout = names[5::10]
    used: set[str] = set()

    def join(pages: list[str]) -> Tensor:
        paragraphs = []
        for paragraph in "\n\n".join(topics[name] for name in pages).split("\n\n"):
            words = " ".join(paragraph.split())  # indentation differs between repeats
            if words not in used:
                used.add(words)
                paragraphs.append(paragraph)
        return torch.frombuffer(bytearray("\n\n".join(paragraphs).encode()), dtype=torch.uint8).long()

    rest, windows = join(heldout), batches * BATCH
    first = torch.arange(windows) * ((len(rest) - LENGTH - 1) // windows)
    return Text(
        train=join([name for name in names if name not in heldout]),
        heldout=rest[first[:, None] + torch.arange(LENGTH + 1)].view(batches, BATCH, -1),
    )


class Lab:
    """One model, its optimizer and the text; `compile` puts it under a policy, `fit` trains, `bits` measures.

    There is ONE compiled graph a policy. Whether it computes with an exact or a quantized state is data: under
    `lc.training_phase(LENGTH)` every token is exact prefill, under `lc.training_phase(PREFIX)` the tokens behind the
    prefix write the quantized state, and neither costs another compile. `bits` keeps autograd on for the same reason:
    without it, there would be a second, inference graph to compile.
    """

    def __init__(self, model: PreTrainedModel, text: Text, seed: int = 0) -> None:
        import torch

        self.model, self.text, self.seed = model, text, seed
        self.compiled: Callable[..., Any] = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
        )

    def compile(self, policy: PolicyLike) -> Report:
        """Compile forward and backward now, and check that every linear layer is rewritten.

        Raises:
            RewriteError: a linear layer was left as it was. LattnError: the policy is not valid or not built.
        """
        import torch

        import lattn_compile as lc

        options: Any = {"policy": policy}  # typed in torch as if only Inductor's own options could be here
        self.compiled = torch.compile(
            self.model, backend="lattn_compile", options=options, fullgraph=True, dynamic=False
        )
        with lc.training_phase(PREFIX):
            self.loss(self.text.heldout[0]).mean().backward()
        self.optimizer.zero_grad()
        report = lc.last_report()
        layers = {s.path for s in report.rewritten} if report is not None else set()
        wanted = self.model.config.layer_types.count("linear_attention")
        if report is None or len(layers) != wanted:
            raise RewriteError(
                "demo",
                got=f"{len(layers)} of {wanted} linear layers rewritten",
                want="all of them",
                remedy=f"This is a bug or a recipe that leaves layers alone. The report says:\n{report}",
            )
        return report

    def loss(self, windows: Tensor) -> Tensor:
        """Negative log2-likelihood `[BATCH, LENGTH]` of each next byte of `windows` `[BATCH, LENGTH + 1]`."""
        import torch.nn.functional as F

        logits = self.compiled(input_ids=windows[:, :-1]).logits
        nats = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="none")
        return nats.view(len(windows), LENGTH) / math.log(2)

    def bits(self, prefix: int, tick: Callable[[str], None] = lambda note: None) -> Tensor:
        """Bits of each held-out byte behind PREFIX, whatever `prefix` is: float64 `[windows, LENGTH - PREFIX]`.

        Args:
            prefix: tokens of exact prefill; LENGTH measures the exact model.
        """
        import torch

        import lattn_compile as lc

        out = []
        for windows in self.text.heldout:
            with lc.training_phase(prefix):
                out.append(self.loss(windows)[:, PREFIX:].detach().double())
            tick("")
        return torch.cat(out)

    def fit(
        self,
        steps: int,
        prefix: int,
        *,
        extra: bool = False,
        tick: Callable[[str], None] = lambda note: None,
    ) -> None:
        """Train for `steps` batches; the same batches and learning rates for every `prefix`.

        Args:
            prefix: LENGTH trains the exact model; PREFIX trains it as it will decode, rounding included.
            extra: a continuation at a fifth of the learning rate, on batches of its own.
        """
        import torch

        import lattn_compile as lc

        generator = torch.Generator().manual_seed(2 * self.seed + extra)
        for step in range(steps):
            warmup = min(1.0, (step + 1) / 20)
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            peak = LEARNING_RATE * (0.2 if extra else 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = peak * warmup * (0.1 + 0.9 * cosine)
            with lc.training_phase(prefix):
                loss = self.loss(self.text.batch(generator)).mean()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            tick(f"{loss.item():.2f} bits/byte")

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    def restore(self, snapshot: tuple[dict[str, Any], dict[str, Any]]) -> None:
        self.model.load_state_dict(snapshot[0])
        self.optimizer.load_state_dict(copy.deepcopy(snapshot[1]))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        bits: of each held-out byte, `[windows, bytes]`.
        exact: the same under an exact state after as many training steps; None for that model itself.
        same: the same under an exact state with the very weights of this row.
        nbytes: state of a sequence and layer.
    """

    state: str
    training: str
    bits: Tensor
    exact: Tensor | None
    same: Tensor | None
    nbytes: int

    def cells(self) -> tuple[str, ...]:
        cost = change = "-"
        if self.exact is not None:
            # The windows are the same, so the error of the difference is far below that of either number.
            diff = (self.bits - self.exact).mean(dim=1)
            cost = f"{diff.mean():+.4f} ± {diff.std() / math.sqrt(len(diff)):.4f}"
        if self.same is not None:
            change = f"{(self.bits - self.same).abs().mean():.4f}"
        return self.state, self.training, f"{self.bits.mean():.4f}", cost, change, f"{self.nbytes:,} B"


HEADER = ("state", "trained", "bits/byte", "against exact", "|change| a byte", "state per sequence and layer")


def run(
    model: str = "qwen3_next",
    steps: int | None = None,
    policy: PolicyLike = "int8",
    all_formats: bool = False,
    seed: int = 0,
) -> int:
    """Run the demo, print the report and the table to stdout, progress to stderr. Returns 0.

    Args:
        model: qwen3_next, qwen3_5 or kimi.
        steps: training steps of the exact model (120); the continuation has a quarter of them.
        policy: any policy or recipe with a quantized state; its write mode counts.
        all_formats: also measure every other state format, written token by token.

    Raises:
        UnsupportedError: there is no C++ compiler, no transformers, or a part of the policy is not built.
        RewriteError: a linear layer was left unrewritten, or the quantized state gave exactly the exact numbers.
    """
    _need_compiler()
    steps = STEPS if steps is None else steps
    if steps < 1:
        raise LattnError("steps", got=str(steps), want="at least 1", remedy=f"Leave it out for {STEPS} steps.")
    with _quiet_libraries(), _one_thread():
        return _run(model, steps, [policy, *(_other_formats(policy) if all_formats else ())], seed)


def _run(model: str, steps: int, policies: list[PolicyLike], seed: int) -> int:
    started = time.perf_counter()
    with _stage("building the model", None):
        lab = Lab(build_model(model, seed), load_text(), seed)
    more = max(1, steps // 4)

    def fit(label: str, n: int, prefix: int, extra: bool) -> None:
        with _stage(label, n) as tick:
            lab.fit(n, prefix, extra=extra, tick=tick)

    def bits(label: str, prefix: int) -> Tensor:
        with _stage(label, len(lab.text.heldout)) as tick:
            return lab.bits(prefix, tick)

    report = _compile(lab, policies[0])
    _compare_with_eager(lab)
    fit("training, exact state", steps, LENGTH, False)
    base, exact = lab.snapshot(), bits("measuring, exact state", LENGTH)
    # What QAT gains must not be what any further training gains: the control trains on as long, and exactly.
    fit("training on, exact state (control)", more, LENGTH, True)
    control, exact_control = lab.snapshot(), bits("measuring the control, exact state", LENGTH)
    nbytes = _state(report)[1]
    rows = [
        Row("exact fp32", f"{steps} steps", exact, None, None, nbytes),
        Row("exact fp32", f"{steps} + {more} exact", exact_control, None, None, nbytes),
    ]
    for index, policy in enumerate(policies):
        if index > 0:
            report = _compile(lab, policy)
        name, _, nbytes = _state(report)
        lab.restore(base)
        ptq = bits(f"measuring, {name}", PREFIX)
        rows.append(Row(name, f"{steps} steps (PTQ)", ptq, exact, exact, nbytes))
        _must_differ(rows[-1])
        lab.restore(control)
        ptq = bits(f"measuring the control, {name}", PREFIX)
        rows.append(Row(name, f"{steps} + {more} exact (PTQ)", ptq, exact_control, exact_control, nbytes))
        lab.restore(base)
        fit(f"training on, {name} (QAT)", more, PREFIX, True)
        qat, same = bits(f"measuring after QAT, {name}", PREFIX), bits("measuring after QAT, exact state", LENGTH)
        rows.append(Row(name, f"{steps} + {more} quantized (QAT)", qat, exact_control, same, nbytes))
    print("\n".join(columns(HEADER, [row.cells() for row in rows])))
    print(_footnotes(len(exact), time.perf_counter() - started), flush=True)
    return 0


def _compile(lab: Lab, policy: PolicyLike) -> Report:
    with _stage("compiling forward and backward", None):
        report = lab.compile(policy)
    print(f"{report}\n", flush=True)
    return report


def _footnotes(windows: int, seconds: float) -> str:
    decoded = LENGTH - PREFIX
    return f"""
bits/byte: {windows} held-out windows of {LENGTH} bytes; after {PREFIX} of exact prefill, the other {decoded} count.
against exact: difference to the exact state after as many steps, ± its standard error over windows; between two
    trainings, differences of 0.001 are chance.
|change|: mean absolute difference of a byte's bits to the same weights with an exact state.
State bytes include scales; this release emulates them (it rounds values and stores fp32).
Total {seconds:.0f} s."""


def _need_compiler() -> None:
    if cxx_compiler() is None:
        raise UnsupportedError(
            "C++ compiler",
            got=f"{os.environ.get('CXX') or 'g++'} not found",
            want="a C++ compiler: Inductor compiles CPU code with it",
            remedy="Debian and Ubuntu: apt-get install g++. macOS: xcode-select --install. Or set CXX to a compiler.",
        )


def _other_formats(policy: PolicyLike) -> list[PolicyLike]:
    """Token mode in every format that is not fp32 (which rounds nothing) nor `policy`'s own."""
    from lattn_compile.formats import REGISTRY
    from lattn_compile.policy import Policy, Token, resolve_recipe

    mine = {p.state for _, p in resolve_recipe(policy).rules if p is not None and isinstance(p.write, Token)}
    return [Policy(state=f(), write=Token()) for f in REGISTRY if f().name != "fp32" and f() not in mine]


def _state(report: Report) -> tuple[str, int, int]:
    """Name of the quantized state, and its bytes a sequence and layer before and after (mean over layers)."""
    from lattn_compile.render.labels import policy_label

    sites = report.rewritten
    names = sorted({policy_label(s.policy) for s in sites})
    before, after = (sum(getattr(s, f"state_bytes_{w}") or 0 for s in sites) // len(sites) for w in ("before", "after"))
    return " / ".join(names), before, after


def _compare_with_eager(lab: Lab) -> None:
    """Under an all-prefix phase the compiled model must be transformers' own function; say by how much it is not."""
    import torch

    import lattn_compile as lc

    if importlib.util.find_spec("fla") is not None and not torch.cuda.is_available():
        return  # there transformers itself calls FLA, which does not run on a CPU
    windows = lab.text.heldout[0]
    with lc.training_phase(LENGTH):
        ours = lab.loss(windows).detach()
    compiled, lab.compiled = lab.compiled, lab.model
    with torch.no_grad():
        theirs = lab.loss(windows)
    lab.compiled = compiled
    error = (ours - theirs).abs().max().item()
    print(
        f"exact state, compiled against transformers in eager mode: largest difference {error:.1e} bits\n", flush=True
    )
    if not error < 1e-3:
        raise RewriteError(
            "demo",
            got=f"a difference of {error:.1e} bits between the compiled exact model and transformers",
            want="rounding errors only (below 1e-3)",
            remedy="This is a bug: please report it with the table above.",
        )


def _must_differ(row: Row) -> None:
    import torch

    if row.exact is not None and torch.equal(row.bits, row.exact):
        raise RewriteError(
            "demo",
            got=f"exactly the exact model's numbers under {row.state}",
            want="the effect of a quantized state",
            remedy="The policy rounds nothing (exact, or fp32), or the rounding was lost: choose another policy.",
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes on one core: sums in one order, so the same numbers on every machine of a kind. Matrices
    this small hardly gain from a second core, and lose ten-fold where that core is busy with something else."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Inside, transformers does not advise kernels for GPUs that the demo does not use."""
    try:
        from transformers.utils import logging
    except ImportError:
        yield
        return
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def _stage(label: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr for one stage; yields what to call after each step. `total` None: nobody knows (a
    compile), so the bar only shows that time passes. Without rich or a terminal, one line before and one after."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        show = None
    else:
        show = Console(stderr=True) if sys.stderr.isatty() else None
    if show is None:
        started = time.perf_counter()
        print(f"{label} ...", file=sys.stderr, flush=True)
        last = [""]
        yield lambda note: last.__setitem__(0, note)
        note = f", {last[0]}" if last[0] else ""
        print(f"{label}: {time.perf_counter() - started:.1f} s{note}", file=sys.stderr, flush=True)
        return
    text = TextColumn("{task.description}", table_column=None)
    bar = Progress(
        SpinnerColumn(), text, BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=show
    )
    with bar:
        task = bar.add_task(f"{label:42}", total=total, note="")
        yield lambda note: bar.update(task, advance=1, note=note)
        bar.update(task, total=total or 1, completed=total or 1)

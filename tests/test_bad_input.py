"""Bad input: at every door a `LattnError` subclass that names the argument, the value, what is wanted and the remedy,
before anything is computed or changed; and what cannot be rewritten is left exactly as it was, with a reason code."""

from __future__ import annotations

import json
import os
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile import backend, cli
from lattn_compile.errors import (
    REASONS,
    DtypeError,
    FileFormatError,
    FormatError,
    LattnError,
    PolicyError,
    RecipeError,
    RewriteError,
    SequenceError,
    ShapeError,
    UnsupportedError,
)
from lattn_compile.ops import dispatch
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import make_inputs

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 12


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_SAID", set())
    yield


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(dispatch, "load", load)


def arguments(batch: int = B, **changes: Any) -> dict[str, Any]:
    """Those of a good call of `lc.linear_attention`, with some changed."""
    x = make_inputs("gdn", batch=batch, tokens=T, key_heads=H, value_heads=HV, key_dim=K, value_dim=V)
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, **changes}


def message(call: Callable[[], object], error: type[LattnError] = LattnError) -> str:
    """What a call refuses with; checks that the message holds all four parts."""
    with pytest.raises(error) as caught:
        call()
    e = caught.value
    assert type(e) is not LattnError or error is LattnError
    for part in (e.argument, e.got, e.want, e.remedy):
        assert part and part in str(e), part
    return str(e)


def listing(said: dict[str, str]) -> str:
    """Messages as a person can read them in a test: one paragraph each."""
    lines = []
    for name, text in said.items():
        lines += [f"{name}:", *textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


ones = torch.ones


def packed(*ends: int) -> dict[str, Any]:
    return {"batch": 1, "cu_seqlens": torch.tensor(ends)}


CALLS: dict[str, tuple[type[LattnError], dict[str, Any]]] = {
    "q of three axes": (ShapeError, {"q": ones(B, T, K)}),
    "K": (ShapeError, {"k": ones(B, T, H, 7)}),
    "H": (ShapeError, {"k": ones(B, T, 3, K)}),
    "HV not a multiple of H": (ShapeError, {"v": ones(B, T, 3, V)}),
    "heads before tokens": (ShapeError, {"v": ones(B, HV, T, V)}),
    "g of H heads": (ShapeError, {"g": -ones(B, T, H)}),
    "g of V channels": (ShapeError, {"g": -ones(B, T, HV, V)}),
    "V of the state": (ShapeError, {"initial_state": ones(B, HV, K, 11)}),
    "HV of the state": (ShapeError, {"initial_state": ones(B, H, K, V)}),
    "value-first state": (ShapeError, {"initial_state": ones(B, HV, V, K)}),
    "integer state": (DtypeError, {"initial_state": ones(B, HV, K, V, dtype=torch.int8)}),
    "cu_seqlens with B > 1": (SequenceError, {"cu_seqlens": torch.tensor([0, 6, 12])}),
    "cu_seqlens decreasing": (SequenceError, packed(0, 4, 2, 6)),
    "cu_seqlens past T": (SequenceError, packed(0, 4, 9)),
    "g > 0": (LattnError, {"g": torch.full((B, T, HV), 0.25)}),
    "policy": (PolicyError, {"policy": "int9"}),
    "unbuilt policy": (UnsupportedError, {"policy": lc.Policy(storage="packed")}),
}


@pytest.mark.usefixtures("no_kernel")
def test_every_bad_call_is_refused_by_name_before_any_computation() -> None:
    said = {}
    for name, (error, changes) in CALLS.items():
        args = arguments(**changes)
        before = {n: x.clone() for n, x in args.items() if isinstance(x, Tensor)}
        said[name] = message(lambda args=args: lc.linear_attention(**args), error)  # type: ignore[misc]
        assert all(torch.equal(args[n], x) for n, x in before.items())
    assert_expected_inline(
        listing(said),
        """\
q of three axes:
    [shape] q: got [2, 6, 8]; want [B, T, H, K]. The token axis comes before the heads.
K:
    [shape] k: got [2, 6, 2, 7]; want [B, T, H, K] = [2, 6, 2, 8]. k must have q's shape.
H:
    [shape] k: got [2, 6, 3, 8]; want [B, T, H, K] = [2, 6, 2, 8]. k must have q's shape.
HV not a multiple of H:
    [shape] v: got HV = 3 value heads; want a multiple of q's H = 2 key heads. Value head j reads key head j
    // (HV // H); repeat or drop heads until HV = R * H.
heads before tokens:
    [shape] v: got [2, 4, 6, 12]; want [B, T, HV, V] with B, T = [2, 6]. v must have as many sequences and
    tokens as q; is it [B, HV, T, V]?
g of H heads:
    [shape] g: got [2, 6, 2]; want [B, T, HV] = [2, 6, 4]. A head decay is [B, T, HV], a channel decay [B, T,
    HV, K], both per value head.
g of V channels:
    [shape] g: got [2, 6, 4, 12]; want [B, T, HV, K] = [2, 6, 4, 8]. A channel decay has one gate a key.
V of the state:
    [shape] initial_state: got [2, 4, 8, 11]; want [N, HV, K, V] = [2, 4, 8, 12]. One state a sequence and
    value head, key axis before value axis.
HV of the state:
    [shape] initial_state: got [2, 2, 8, 12]; want [N, HV, K, V] = [2, 4, 8, 12]. One state a sequence and
    value head, key axis before value axis.
value-first state:
    [shape] initial_state: got [2, 4, 12, 8]; want [N, HV, K, V] = [2, 4, 8, 12]. One state a sequence and
    value head, key axis before value axis. This one looks value-first, [N, HV, V, K]: pass
    state.transpose(-1, -2).
integer state:
    [dtype] initial_state: got torch.int8; want bfloat16, float16, float32 or float64. Pass the decoded state,
    or an EncodedState to lc.linear_attention.
cu_seqlens with B > 1:
    [sequence] cu_seqlens: got a batch of 2 sequences, q of shape [2, 6, 2, 8]; want B = 1 when cu_seqlens is
    given. Flatten the batch to [1, B * T, ...] and give the boundaries in cu_seqlens.
cu_seqlens decreasing:
    [sequence] cu_seqlens: got 4 followed by 2 at entry 2; want entries that never decrease. cu_seqlens holds
    cumulative ends, not the lengths themselves.
cu_seqlens past T:
    [sequence] cu_seqlens: got a last entry of 9; want at most T = 6 tokens. q, k and v must hold every token
    that cu_seqlens counts.
g > 0:
    [misuse] g: got 0.25 at token 0, head 0; want a natural-log decay <= 0. g is log(alpha) of one step, not
    alpha itself and not log2; pass -exp(A_log) * softplus(...) or logsigmoid(...).
policy:
    [policy] policy: got 'int9'; want a Policy, None, or a preset: exact, int8, fp8, int8-replay, fp8-replay,
    nvfp4, fp8-two-precision. A Recipe chooses by path; one call takes one policy. Did you mean 'int8'?
unbuilt policy:
    [unsupported] policy: got storage='packed'; want storage 'emulated'. Packed states are stepped by
    lc.QuantizedState and lc.StatePool, and held by caches that quantize_cache made; here the state is dense.""",
    )


IN_REGION = [n for n in CALLS if n not in ("cu_seqlens decreasing", "cu_seqlens past T", "g > 0")]


# Where graphs may break, Dynamo begins anew with the rest, a second a call: one error of each class, else all of them.
BROKEN = IN_REGION if "LATTN_COMPILE_ALL" in os.environ else {CALLS[n][0]: n for n in IN_REGION}.values()


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("name", "fullgraph"), [*((n, True) for n in IN_REGION), *((n, False) for n in BROKEN)])
def test_a_bad_call_inside_a_compiled_region_raises_the_same_error(name: str, fullgraph: bool) -> None:
    """What a fake, a traced constant or a traced `raise` gives, Dynamo wraps in an error of its own (an *internal* one
    for a policy, which blames PyTorch): a caller's `except LattnError` then misses it, although the text is there."""
    error, changes = CALLS[name]
    args = arguments(**changes)

    def call() -> Tensor:
        return lc.linear_attention(**args)[0]

    eager = message(call, error)
    with pytest.raises(Exception) as caught:
        torch.compile(call, backend="lattn_compile", fullgraph=fullgraph)()
    assert eager in str(caught.value), "the whole message reaches the user"
    assert isinstance(caught.value, error), f"as {type(caught.value).__name__}"


@pytest.mark.parametrize("name", ["cu_seqlens decreasing", "cu_seqlens past T", "g > 0"])
def test_values_are_checked_when_a_compiled_call_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, changes = CALLS[name]
    bad = arguments(**changes)
    ends = bad.get("cu_seqlens")
    good = {**bad, **({"g": -bad["g"]} if ends is None else {"cu_seqlens": 2 * torch.arange(len(ends))})}
    with recorded():
        compiled = torch.compile(lambda args: lc.linear_attention(**args)[0], backend="lattn_compile", fullgraph=True)
        compiled(good)
        monkeypatch.setattr(dispatch, "load", None)
        eager = message(lambda: lc.linear_attention(**bad), error)
        assert message(lambda: compiled(bad), error).startswith(eager)


def test_values_on_a_device_are_not_waited_for() -> None:
    """meta stands in for a device whose values cannot be read without a sync."""
    args = {n: x.to("meta") for n, x in arguments(batch=1).items()}
    for bad in (torch.tensor([0, 4, 2, 6]), torch.tensor([0, 4, 9])):
        o, _ = lc.linear_attention(**args, cu_seqlens=bad.to("meta"))
        assert o.shape == (1, T, HV, V)


def test_float64_is_refused_on_the_triton_path() -> None:
    x = arguments()
    tensors = (x["q"].double(), x["k"], x["v"], x["g"], x["beta"], *(None,) * 5)
    lines = []
    for op in (torch.ops.lattn.chunk, torch.ops.lattn.decode):
        lines.append(message(lambda op=op: op(*tensors, scale=1.0, implementation="triton"), DtypeError))  # type: ignore[misc]
    assert lines[0] == lines[1]
    policy = lc.Policy(kernel="triton")
    call = message(lambda: lc.linear_attention(**{**x, "q": tensors[0]}, policy=policy), DtypeError)
    assert_expected_inline(
        listing({"op": lines[0], "call": call}),
        """\
op:
    [dtype] implementation: got 'triton' with float64 inputs; want bfloat16, float16 or float32 inputs on the
    Triton path. Use 'reference' (a policy's kernel='reference') for float64, or convert the inputs.
call:
    [dtype] implementation: got 'triton' with float64 inputs; want bfloat16, float16 or float32 inputs on the
    Triton path. Use 'reference' (a policy's kernel='reference') for float64, or convert the inputs.""",
    )


# --- policies, presets, formats, tiles --------------------------------------------------------------------------------

WORDS: dict[str, tuple[type[LattnError], Callable[[], object]]] = {
    "policy key": (PolicyError, lambda: lc.Policy(lc.Int8(), readuot="after_write")),  # type: ignore[call-arg]
    "policy key in a dict": (PolicyError, lambda: lc.Policy.from_dict({"sate": "int8"})),
    "policy value": (PolicyError, lambda: lc.Policy(readout="after")),
    "preset": (PolicyError, lambda: lc.Recipe(rules=[("*", "int8_replay")])),
    "recipe key": (RecipeError, lambda: lc.Recipe.from_dict({"version": 1, "rule": []})),
    "format": (FormatError, lambda: lc.Policy("int9")),  # type: ignore[arg-type]
    "format of a state": (FormatError, lambda: lc.encode_state(torch.ones(1, 1, 4, 4), "fp8_e5m2")),
    "tile": (FormatError, lambda: lc.Int8(block_v=0)),
    "tile in a spec": (FormatError, lambda: lc.Policy("int8/*xhalf")),  # type: ignore[arg-type]
    "tile key": (FormatError, lambda: lc.Fp8(block_w=64)),  # type: ignore[call-arg]
    "tile of a format without one": (FormatError, lambda: lc.Nvfp4(block_v=16)),  # type: ignore[call-arg]
    "chunk size": (PolicyError, lambda: lc.Chunk(0)),
    "integer state": (DtypeError, lambda: lc.encode_state(torch.ones(1, 1, 4, 4, dtype=torch.int32), "int8")),
    "phase": (DtypeError, lambda: lc.training_phase(3.5).__enter__()),  # type: ignore[arg-type]
}


def test_every_unknown_word_is_refused_by_name() -> None:
    said = {name: message(call, error) for name, (error, call) in WORDS.items()}
    assert_expected_inline(
        listing(said),
        """\
policy key:
    [policy] readuot: got an unknown key of Policy; want one of state, write, readout, rounding, seed,
    feedback, rotation, gate, prefill, storage, kernel. Remove it or correct its name. Did you mean 'readout'?
policy key in a dict:
    [policy] sate: got an unknown key of Policy; want one of state, write, readout, rounding, seed, feedback,
    rotation, gate, prefill, storage, kernel. Remove it or correct its name. Did you mean 'state'?
policy value:
    [policy] readout: got Policy(readout='after'); want 'before_write' or 'after_write'. Choose one of these.
    Did you mean 'after_write'?
preset:
    [policy] rules[0]: got 'int8_replay'; want a preset: exact, int8, fp8, int8-replay, fp8-replay, nvfp4,
    fp8-two-precision. Correct the name, or build a Policy. Did you mean 'int8-replay'?
recipe key:
    [recipe] rule: got an unknown key of a recipe; want one of version, rules. Remove it or correct its name.
    Did you mean 'rules'?
format:
    [format] state: got 'int9'; want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4. Choose a known format.
    Did you mean 'int8'?
format of a state:
    [format] format: got 'fp8_e5m2'; want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4. Choose a known
    format. Did you mean 'fp8_e4m3'?
tile:
    [format] Int8.block_v: got 0; want an int from 1 to 256, or None for the whole axis. Choose a tile that
    fits the head, for example the default block_v=64, block_k=None.
tile in a spec:
    [format] state: got 'int8/*xhalf'; want "int8/KxV" with K key channels by V value columns a tile, "*" for
    a whole axis. For example "int8/*x64".
tile key:
    [format] Fp8.block_w: got an unknown key; want block_v or block_k. Correct or drop it. Did you mean
    'block_v'?
tile of a format without one:
    [format] Nvfp4.block_v: got an unknown key; want no keys. Correct or drop it.
chunk size:
    [policy] chunk_size: got Chunk(chunk_size=0); want an int of at least 1. Give chunk_size such a number.
integer state:
    [dtype] S: got torch.int32; want a floating-point state. Pass decoded values.
phase:
    [dtype] prefix_lengths: got 3.5; want an int, a list of ints or an int tensor. Lengths count tokens.""",
    )


POLICIES: dict[str, tuple[type[LattnError], Any]] = {
    "preset": (PolicyError, "int9"),
    "policy key": (PolicyError, {"sate": "int8"}),
    "format": (FormatError, {"state": "int9"}),
    "tile": (FormatError, {"state": {"format": "int8", "block_v": -1}}),
    "type": (RecipeError, 8),
    "packed": (UnsupportedError, lc.Policy(storage="packed")),
    "prefill": (UnsupportedError, lc.Policy(prefill=lc.Prefill(inverse=lc.Neumann(4)), kernel="triton")),
    "triton": (UnsupportedError, lc.Policy(kernel="triton")),
}
policies = pytest.mark.parametrize(("error", "policy"), POLICIES.values(), ids=POLICIES)


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor | None = None) -> Any:
        return lc.linear_attention(q, k, v, g, beta, initial_state=S, output_final_state=True, **self.options)


def exported(state: Tensor | None = None, **options: Any) -> torch.export.ExportedProgram:
    args = tuple(arguments().values()) + (() if state is None else (state,))
    with torch.no_grad(), lc.capture():
        return torch.export.export(Layer(**options), args, strict=False)


@pytest.mark.usefixtures("no_kernel")
@policies
def test_a_policy_that_cannot_be_used_is_refused_at_every_door(error: type[LattnError], policy: Any) -> None:
    args = arguments()
    layer = Layer()
    for fullgraph in (True, False):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="lattn_compile", fullgraph=fullgraph, options={"policy": policy})
        for _ in range(2):  # every time, not only when it compiles
            in_compile = message(lambda: compiled(*args.values()), error)  # noqa: B023
    program = exported()
    before = str(program.graph)
    assert message(lambda: lc.rewrite(program, policy), error) == in_compile
    assert message(lambda: lc.inspect(program, policy=policy), error) == in_compile
    assert str(program.graph) == before
    if error is not UnsupportedError:  # that is said when the policy is used
        message(lambda: lc.attach(layer, policy), error)
        assert not any(name.startswith("_lattn") for name in layer.__dict__)
    else:
        torch._dynamo.reset()
        attached = torch.compile(lc.attach(Layer(), policy), backend="lattn_compile", fullgraph=True)
        message(lambda: attached(*args.values()), error)
    if isinstance(policy, str | lc.Policy):
        message(lambda: lc.linear_attention(**args, policy=policy), error)


def test_the_backend_hands_back_a_callable_that_raises() -> None:
    """Raised inside the backend, Dynamo would wrap it."""
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    run = backend.lattn_compile(graph, [torch.ones(2)], options={"policy": "int9"})
    with pytest.raises(PolicyError, match="int9"):
        run(torch.ones(2))
    with pytest.raises(PolicyError, match="Did you mean 'policy'"):
        backend.lattn_compile(graph, [torch.ones(2)], options={"polcy": "int8"})(torch.ones(2))


def test_a_compile_with_a_bad_policy_leaves_the_inputs_as_they_were() -> None:
    cache = torch.zeros(B, HV, K, V)

    def step(cache: Tensor, *args: Tensor) -> Tensor:
        o, state = lc.linear_attention(*args, initial_state=cache, output_final_state=True)
        cache.copy_(state)
        return o

    compiled = torch.compile(step, backend="lattn_compile", options={"policy": lc.Policy(storage="packed")})
    message(lambda: compiled(cache, *arguments().values()), UnsupportedError)
    assert not cache.any()


# --- files ------------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, Path]:
    found = {name: folder / f"{name}.pt2" for name in ("missing", "empty", "text", "archive", "weights", "cut")}
    found["folder"] = folder
    found["empty"].write_bytes(b"")
    found["text"].write_text("not a program")
    with zipfile.ZipFile(found["archive"], "w") as archive:
        archive.writestr("hello.txt", "hello")
    torch.save({"weight": torch.ones(2)}, found["weights"])
    whole = folder / "whole.pt2"
    torch.export.save(exported(), whole)
    found["cut"].write_bytes(whole.read_bytes()[:-200])
    return found


FILES = ("missing", "empty", "text", "folder", "archive", "weights", "cut")


def test_a_file_that_is_no_program_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said, files = {}, _files(tmp_path)
    assert set(files) == set(FILES)
    for name, path in files.items():
        said[name] = message(lambda path=path: lc.inspect(path), FileFormatError)  # type: ignore[misc]
        out = tmp_path / "out.pt2"
        assert cli.main(["inspect", str(path)]) == 1
        assert cli.main(["rewrite", str(path), str(out), "--policy", "int8"]) == 1
        assert not out.exists(), "nothing is written"
        assert capsys.readouterr().err.count(str(path)) >= 2
    pinned = {name: said[name].replace(str(tmp_path), "FOLDER") for name in ("missing", "empty", "text")}
    assert_expected_inline(
        listing(pinned),
        """\
missing:
    [file] path: got FOLDER/missing.pt2 (no such file); want a .pt2 written by torch.export.save. Check the
    path.
empty:
    [file] path: got FOLDER/empty.pt2 (not a zip archive); want a .pt2 written by torch.export.save. Export
    the model under lc.capture() and save it with torch.export.save(program, path).
text:
    [file] path: got FOLDER/text.pt2 (not a zip archive); want a .pt2 written by torch.export.save. Export the
    model under lc.capture() and save it with torch.export.save(program, path).""",
    )


@pytest.mark.parametrize("name", ["archive", "weights", "cut", "folder"])
def test_what_is_said_about_a_file_is_about_that_file(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch.export.load logs a traceback and raises "check the warnings above"; a folder is no missing file."""
    path = _files(tmp_path)[name]
    capfd.readouterr()
    text = message(lambda: lc.inspect(path), FileFormatError)
    assert "warnings above" not in text and (name != "folder" or "no such file" not in text)
    assert "Traceback" not in capfd.readouterr().err, "a traceback means a bug"


def test_what_is_no_graph_is_refused() -> None:
    said = {
        "module": message(lambda: lc.rewrite(nn.Linear(2, 2), "int8")),  # type: ignore[arg-type]
        "nothing": message(lambda: lc.rewrite(None, "int8")),  # type: ignore[arg-type]
        "int": message(lambda: lc.inspect(3)),  # type: ignore[arg-type]
        "attach": message(lambda: lc.attach("model", "int8")),  # type: ignore[arg-type]
    }
    assert_expected_inline(
        listing(said),
        """\
module:
    [misuse] target: got Linear; want a torch.fx.GraphModule or a torch.export.ExportedProgram. Export the
    module first: with lc.capture(): torch.export.export(module, args).
nothing:
    [misuse] target: got NoneType; want a torch.fx.GraphModule or a torch.export.ExportedProgram. Export the
    module first: with lc.capture(): torch.export.export(module, args).
int:
    [misuse] target: got int; want a torch.fx.GraphModule or a torch.export.ExportedProgram. Export the module
    first: with lc.capture(): torch.export.export(module, args).
attach:
    [misuse] model: got str; want an nn.Module. Attach to the model, before compiling it.""",
    )


def test_a_recipe_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    said = {}
    unknown_key = '{"version": 1, "rules": [{"match": "*", "policy": {"sate": "int8"}}]}'
    for text in ("{", '{"version": 99, "rules": []}', unknown_key, "[]"):
        file.write_text(text)
        said[text] = message(lambda: lc.Recipe.load(file)).replace(str(tmp_path), "FOLDER")
        compiled = torch.compile(Layer(), backend="lattn_compile", options={"policy": str(file)})
        message(lambda: compiled(*arguments().values()))  # noqa: B023
        torch._dynamo.reset()
    assert_expected_inline(
        listing(said),
        """\
{:
    [file] path: got 'FOLDER/recipe.json', which is not JSON; want a JSON file. Expecting property name
    enclosed in double quotes: line 1 column 2 (char 1).
{"version": 99, "rules": []}:
    [recipe] version: got 99; want 1, the version of recipes that this lattn_compile reads. Upgrade
    lattn_compile: this recipe was written by a newer one.
{"version": 1, "rules": [{"match": "*", "policy": {"sate": "int8"}}]}:
    [policy] sate: got an unknown key of Policy; want one of state, write, readout, rounding, seed, feedback,
    rotation, gate, prefill, storage, kernel. Remove it or correct its name. Did you mean 'state'?
[]:
    [recipe] recipe: got []; want a dict with version and rules. A recipe looks like {"version": 1, "rules":
    [{"match": "*", "policy": "int8"}]}.""",
    )


# --- what silence would hide ------------------------------------------------------------------------------------------


def _warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, lc.LattnWarning)]


IDLE = lc.Recipe(rules=[("encoder.*", "int8"), ("*", "exact")])


def test_a_rule_that_hits_nothing_and_a_graph_without_sites_are_said_once() -> None:
    args = tuple(arguments().values())
    with recorded():
        rule = torch.compile(Layer(), backend="lattn_compile", options={"policy": IDLE})
        plain = torch.compile(torch.sin, backend="lattn_compile", options={"policy": "int8"})
        said = _warned(lambda: (rule(*args), plain(ones(3))))
        torch._dynamo.reset()
        again = _warned(lambda: (rule(*args), plain(ones(3)), rule(*(a[:, :3] for a in args))))
    assert again == []
    assert_expected_inline(
        listing({f"warning {i}": text for i, text in enumerate(said)}),
        """\
warning 0:
    recipe rule 0 ('encoder.*') matched no site of this graph; its sites: <root>. Paths are relative to the
    compiled module; lc.attach(model, recipe) gives them in full.
warning 1:
    nothing was rewritten in a compiled graph: no known recurrence was found in it (lc.inspect shows what is
    recognised)""",
    )


@pytest.mark.parametrize("policy", [IDLE, "int8"], ids=["rule", "graph"])
def test_silence_is_an_error_under_strict(policy: Any) -> None:
    options = {"policy": policy, "strict": True}
    args: tuple[Tensor, ...] = (ones(3),)
    if policy is IDLE:
        args = tuple(arguments().values())
    compiled = torch.compile(
        Layer() if policy is IDLE else torch.sin, backend="lattn_compile", fullgraph=True, options=options
    )
    with recorded():
        for _ in range(2):
            message(lambda: compiled(*args), RewriteError)


# --- what is left -----------------------------------------------------------------------------------------------------

CHUNK = lc.Policy(lc.Int8(), write=lc.Chunk(4))

LEFT: dict[str, tuple[Any, dict[str, Any], Tensor | None]] = {
    "RULE_NONE": (lc.Recipe(rules=[("*", None)]), {}, None),
    "NO_RULE": (lc.Recipe(rules=[("other.*", "int8")]), {}, None),
    "EXPLICIT_POLICY": ("fp8", {"policy": "int8"}, None),
    "DENSE_CACHE": (CHUNK, {}, torch.ones(B, HV, K, V)),
    "STATE_DTYPE": ("int8", {}, torch.ones(B, HV, K, V, dtype=torch.bfloat16)),
}


def _ops(program: torch.export.ExportedProgram) -> list[str]:
    return [f"{n.target} {n.args} {n.kwargs}" for n in program.graph.nodes if "lattn" in str(n.target)]


def _dense(state: Any) -> Tensor:
    return state.dense() if isinstance(state, lc.EncodedState) else state


@pytest.mark.filterwarnings("ignore::lattn_compile.errors.LattnWarning")
@pytest.mark.parametrize("code", LEFT)
@pytest.mark.parametrize("site_id", [0, 5])
def test_a_site_that_is_left_stays_exactly_as_it_was_and_says_why(code: str, site_id: int) -> None:
    policy, options, state = LEFT[code]
    program = exported(state, site_id=site_id, **options)
    args = tuple(arguments().values()) + (() if state is None else (state,))
    result = lc.rewrite(program, policy)
    (site,) = result.report.sites
    assert site.verdict == "left"
    assert site.reason is not None and site.reason.code == code
    assert site.reason.remedy == REASONS[code].remedy and site.reason.text.startswith(REASONS[code].text)
    assert code in json.dumps(json.loads(result.report.to_json()))
    for ours, theirs in zip(result.module.module()(*args), program.module()(*args), strict=True):
        assert torch.equal(_dense(ours), _dense(theirs))
    assert _ops(result.module) == _ops(program)


@pytest.mark.filterwarnings("ignore::lattn_compile.errors.LattnWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("code", LEFT)
def test_a_site_that_is_left_by_a_compile_gives_what_eager_gives(code: str, training: bool) -> None:
    policy, options, state = LEFT[code]
    args = [a.requires_grad_(training) for a in arguments().values()] + ([] if state is None else [state])
    layer = Layer(**options)
    with recorded() as record, torch.set_grad_enabled(training):
        got = torch.compile(layer, backend="lattn_compile", fullgraph=True, options={"policy": policy})(*args)
        want = layer(*args)
        (site,) = record.report.sites
    assert site.reason is not None and site.reason.code == code
    assert torch.equal(got[0], want[0]) and torch.equal(_dense(got[1]), _dense(want[1]))

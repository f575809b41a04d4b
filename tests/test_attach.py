"""The recipe that lives with the module: bare compiles find it, and regional compiles never mix layers up.

And it lives with the checkpoint: whatever saves the weights, the recipe comes back with them, or an error says why.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import lattn_compile as lc
from lattn_compile.attach import GROUP, attached_recipe
from lattn_compile.saved_recipe import KEY, SIZE, from_tensor, to_tensor
from lattn_compile.testing.backend import Record, recorded
from tests import tiny_models

pytest.importorskip("transformers")

MIXED = lc.Recipe(
    rules=[
        ("model.layers.0.linear_attn", lc.Policy(lc.Int8())),
        ("model.layers.1.linear_attn", lc.Policy(lc.Fp8())),
        ("*", lc.Policy(write=lc.Exact())),
    ]
)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _formats(record: Record) -> list[str]:
    return [c.arguments.get("state_format", "fp32") for c in record.calls]


def _run(compiled: Any, prefix: int = 3) -> Any:
    ids = torch.randint(2, 97, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), lc.training_phase(prefix):
        return compiled(ids, use_cache=False).logits


def test_a_bare_compile_uses_the_attached_recipe_with_full_paths() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=4)
    with recorded() as record:
        _run(torch.compile(lc.attach(model, MIXED), backend="lattn_compile", fullgraph=True))
    assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64", "fp32"]
    assert record.report.recipe == MIXED.to_dict()


def test_options_win_over_an_attached_recipe() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    with recorded() as record:
        lc.attach(model, MIXED)
        _run(torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "fp8"}))
    assert _formats(record) == ["fp8_e4m3/*x64"] * 2


def test_regional_compile_gives_every_layer_its_own_policy() -> None:
    """Layers of one class share compiled code; the attached group is guarded, so a policy never leaks to another."""
    model, _ = tiny_models.build("qwen3_next", layers=5)
    lc.attach(model, MIXED)
    for layer in model.model.layers:
        layer.compile(backend="lattn_compile", fullgraph=True)
    with recorded() as record:
        _run(model)
        assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64", "fp32", "fp32"]
        graphs = [g for g in record.graphs if any("lattn" in str(n.target) for n in g.graph.nodes)]
        assert len(graphs) == 3, "layers 2 and 3 have one policy and share a graph"
        record.calls.clear()
        _run(model)
        assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64", "fp32", "fp32"]


def test_regional_compile_without_attach_says_that_a_rule_by_path_cannot_be_met() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    recipe = lc.Recipe(rules=[("model.layers.0.linear_attn", lc.Policy(lc.Int8()))])
    for layer in model.model.layers:
        layer.compile(backend="lattn_compile", fullgraph=True, options={"policy": recipe})
    with recorded() as record, pytest.warns(lc.LattnWarning, match=r"lc\.attach"):
        _run(model)
    assert not record.calls, "no layer may get layer 0's policy"


def test_attaching_another_recipe_recompiles() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    compiled = torch.compile(model, backend="lattn_compile", fullgraph=True)
    with recorded() as record:
        seen = []
        for recipe in (None, "int8", "fp8", "int8"):
            if recipe is not None:
                lc.attach(model, recipe)
            record.calls.clear()
            _run(compiled)
            seen += _formats(record)
    assert seen == ["fp32", "int8/*x64", "fp8_e4m3/*x64", "int8/*x64"]


def test_an_attached_model_copies_and_pickles_with_its_recipe() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    lc.attach(model, MIXED)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert attached_recipe(other) == MIXED
    assert attached_recipe(lc.detach(model)) is None


def test_only_a_module_takes_a_recipe() -> None:
    with pytest.raises(lc.LattnError, match=r"nn\.Module"):
        lc.attach("model", MIXED)  # type: ignore[arg-type]
    with pytest.raises(lc.LattnError):
        lc.attach(torch.nn.Linear(1, 1), "int9")


# --- in a state dict --------------------------------------------------------------------------------------------------

INT8 = lc.Recipe(rules=[("*", lc.Policy(lc.Int8()))])


class Small(nn.Module):
    """Paths as a model has them, and nothing to compute."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))
        self.register_buffer("steps", torch.zeros(1))


SMALL = lc.Recipe(rules=[("layers.0", lc.Policy(lc.Int8())), ("*", None)])


def _small() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def test_the_recipe_is_one_entry_of_the_state_dict_and_readable_without_this_library() -> None:
    state = lc.attach(_small(), SMALL).state_dict()
    assert [k for k in state if k not in _small().state_dict()] == [KEY]
    assert json.loads(bytes(state[KEY].tolist()).decode()) == SMALL.to_dict()
    assert state[KEY].dtype is torch.uint8 and state[KEY].shape == (SIZE,)


@pytest.mark.parametrize("how", ["torch.save", "safetensors", "numpy"])
def test_weights_saved_in_any_way_bring_the_recipe_back(tmp_path: Path, how: str) -> None:
    state = lc.attach(_small(), SMALL).state_dict()
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    elif how == "safetensors":
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(state, tmp_path / "w.safetensors")
        loaded = safetensors.load_file(tmp_path / "w.safetensors")
    else:
        loaded = {k: torch.from_numpy(v.numpy().copy()) for k, v in state.items()}
    model = lc.attach(_small(), "exact")
    with pytest.warns(lc.LattnWarning, match=r"another recipe.*layers\.0: int8.*no longer \{\*: exact\}.*lc\.attach"):
        assert str(model.load_state_dict(loaded)) == "<All keys matched successfully>"
    assert attached_recipe(model) == SMALL
    assert [layer.__dict__[GROUP].rpartition(":")[2] for layer in model.layers] == ["0", "1"]  # type: ignore[union-attr]


def test_the_same_recipe_loads_without_a_word_and_weights_without_one_change_none() -> None:
    model = lc.attach(_small(), SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(lc.attach(_small(), SMALL).state_dict())
        model.load_state_dict(_small().state_dict())
        model.load_state_dict(lc.attach(_small(), SMALL).state_dict(), assign=True)
        model.load_state_dict({}, strict=False)
    assert attached_recipe(model) == SMALL
    with pytest.raises(RuntimeError, match=r'Missing key.*"steps", "layers\.0\.weight"') as error:
        model.load_state_dict({})
    assert KEY not in str(error.value)


def test_a_model_without_recipe_refuses_it_in_words_that_say_what_to_do_and_then_takes_it() -> None:
    state, model = lc.attach(_small(), SMALL).state_dict(), _small()
    with pytest.raises(RuntimeError, match="lattn_recipe__lc_attach_before_load_state_dict"):
        model.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lc.attach(model, state).load_state_dict(state)
    assert attached_recipe(model) == SMALL


def test_detaching_leaves_nothing_behind() -> None:
    model, plain = _small(), _small()
    for recipe in (SMALL, "int8", SMALL):
        lc.attach(model, recipe)
    assert len(model._state_dict_hooks) == len(model._load_state_dict_pre_hooks) == 1, "attached again, hooked once"
    lc.detach(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert vars(model).keys() == vars(plain).keys()
    assert not model._state_dict_hooks and not model._load_state_dict_pre_hooks


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: _torch_saved(m)])
def test_a_copy_has_a_recipe_of_its_own(how: Callable[[nn.Module], nn.Module]) -> None:
    model = lc.attach(_small(), SMALL)
    other = how(model)
    assert torch.equal(other.state_dict()[KEY], model.state_dict()[KEY])
    lc.attach(other, "int8")
    assert attached_recipe(model) == SMALL and attached_recipe(other) == INT8
    with pytest.warns(lc.LattnWarning, match="another recipe"):
        other.load_state_dict(model.state_dict())
    lc.detach(other)
    assert KEY not in other.state_dict() and KEY in model.state_dict()


def _torch_saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_moving_casting_and_emptying_a_model_does_not_touch_the_recipe() -> None:
    model = lc.attach(_small(), SMALL)
    for changed in (model.double(), model.bfloat16(), model.to("meta"), model.to_empty(device="cpu")):
        assert torch.equal(changed.state_dict()[KEY], to_tensor(SMALL))
    on_meta = lc.attach(Small().to("meta"), "exact")
    with pytest.warns(lc.LattnWarning, match="another recipe"):
        on_meta.load_state_dict(model.state_dict(), assign=True)
    assert attached_recipe(on_meta) == SMALL and not on_meta.layers[0].weight.is_meta  # type: ignore[index,union-attr]


def test_swapping_tensors_on_load_is_no_obstacle() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        lc.attach(_small(), SMALL).load_state_dict(lc.attach(_small(), SMALL).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_an_attached_model_exports_and_can_be_called_functionally() -> None:
    model = lc.attach(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "int8")
    x = torch.ones(1, 3)
    want = model(x)
    assert torch.equal(torch.func.functional_call(model, model.state_dict(), (x,)), want)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), want)


def test_a_recipe_attached_inside_is_that_parts_and_one_attached_around_replaces_it() -> None:
    outer = nn.Sequential(Small(), nn.Linear(3, 3))
    lc.attach(outer[0], SMALL)
    assert [k for k in outer.state_dict() if k.endswith(KEY)] == [f"0.{KEY}"]
    lc.attach(outer, "int8")
    assert [k for k in outer.state_dict() if k.endswith(KEY)] == [KEY]
    assert attached_recipe(outer[0]) == INT8 and not outer[0]._state_dict_hooks

    lc.attach(outer[0], SMALL)  # an exception inside: both are saved, and both come back
    state = outer.state_dict()
    other = lc.attach(nn.Sequential(lc.attach(Small(), SMALL), nn.Linear(3, 3)), "exact")
    lc.attach(other[0], "fp8")
    with pytest.warns(lc.LattnWarning, match="another recipe"):
        other.load_state_dict(state)
    assert attached_recipe(other) == INT8 == attached_recipe(other[1])
    assert attached_recipe(other[0]) == SMALL
    with pytest.raises(lc.LattnError, match="recipes that differ"):
        lc.attach(_small(), state)

    lc.attach(other[0], "fp8")
    with pytest.warns(lc.LattnWarning, match="another recipe"):  # weights that know of the outer one only
        other.load_state_dict(lc.attach(nn.Sequential(Small(), nn.Linear(3, 3)), "exact").state_dict())
    assert attached_recipe(other[1]) == lc.Recipe(rules=[("*", "exact")])
    assert attached_recipe(other[0]) == attached_recipe(other[0].layers) == lc.Recipe(rules=[("*", "fp8")])  # type: ignore[arg-type]


def test_the_recipe_is_the_models_whether_it_is_attached_before_or_after_a_compile() -> None:
    model = _small()
    compiled = torch.compile(model, backend="lattn_compile")
    lc.attach(compiled, SMALL)  # type: ignore[arg-type]
    assert attached_recipe(model) == attached_recipe(compiled) == SMALL  # type: ignore[arg-type]
    assert KEY in model.state_dict() and f"_orig_mod.{KEY}" in compiled.state_dict()  # type: ignore[attr-defined]
    assert model.layers[0].__dict__["_lattn_path"] == "layers.0"  # type: ignore[index,union-attr]


# --- what is not a recipe is refused ----------------------------------------------------------------------------------


def _entry(data: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)


def _with(**changes: Any) -> dict[str, Any]:
    return SMALL.to_dict() | changes


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (_entry(_with(version=2)), "version: got 2;.*Upgrade lattn_compile: this recipe was written by a newer one"),
        (_entry(_with(version="1")), "version: got '1'"),
        (_entry({"rules": []}), "version: got a recipe without it"),
        (_entry(_with(colour="red")), "colour: got an unknown key of a recipe"),
        (_entry(_with(rules=[{"match": "*", "policy": {"stata": "int8"}}])), "stata: got an unknown key.*'state'"),
        (_entry([1]), r"recipe: got \[1\]"),
        (torch.zeros(16, dtype=torch.uint8), "bytes that are not JSON"),
        (torch.zeros(16), r"got torch.float32 \[16\]"),
        (torch.zeros(2, 8, dtype=torch.uint8), r"got torch.uint8 \[2, 8\]"),
        (torch.zeros(16, dtype=torch.uint8, device="meta"), "on meta"),
        ("int8", "got 'int8'"),
    ],
)
def test_an_entry_of_another_version_or_kind_is_refused_before_a_weight_is_copied(entry: Any, text: str) -> None:
    model = lc.attach(_small(), SMALL)
    state = {k: v + 1 for k, v in _small().state_dict().items()} | {KEY: entry}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(lc.LattnError, match=text):
        model.load_state_dict(state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert attached_recipe(model) == SMALL


@given(st.lists(st.tuples(st.text(min_size=1), st.sampled_from([None, *lc.PRESETS])), max_size=60))
@settings(max_examples=60, deadline=None)
def test_every_recipe_is_the_same_after_the_tensor(rules: list[tuple[str, Any]]) -> None:
    recipe = lc.Recipe(rules=rules)
    tensor = to_tensor(recipe)
    assert from_tensor(tensor) == recipe
    assert tensor.numel() >= SIZE and tensor.numel().bit_count() == 1


# --- files ------------------------------------------------------------------------------------------------------------


def test_attach_finds_the_recipe_where_a_model_was_saved(tmp_path: Path) -> None:
    state = lc.attach(_small(), SMALL).state_dict()
    torch.save(state, tmp_path / "w.pt")
    torch.save({"model": state, "step": 3, "optimizer": {"state": {}}}, tmp_path / "all.ckpt")
    SMALL.save(tmp_path / "recipe.json")
    (tmp_path / "beside").mkdir()
    SMALL.save(tmp_path / "beside")
    sources: list[Any] = [
        state,
        {"module." + k: v for k, v in state.items()},
        {"model": state},
        tmp_path / "w.pt",
        str(tmp_path / "all.ckpt"),
        tmp_path / "recipe.json",
        tmp_path / "beside",
    ]
    for source in sources:
        assert attached_recipe(lc.attach(_small(), source)) == SMALL


def test_attach_finds_the_recipe_in_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(lc.attach(_small(), SMALL), tmp_path / "w.safetensors")
    for source in (tmp_path / "w.safetensors", tmp_path):
        assert attached_recipe(lc.attach(_small(), source)) == SMALL
    restored = lc.attach(_small(), tmp_path)
    assert safetensors.load_model(restored, tmp_path / "w.safetensors") == (set(), [])


def test_weights_without_a_recipe_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    plain = _small().state_dict()
    torch.save(plain, tmp_path / "w.pt")
    (tmp_path / "folder").mkdir()
    save_file(plain, tmp_path / "folder" / "w.safetensors")
    for source in (plain, {"model": plain}, tmp_path / "w.pt", tmp_path / "folder"):
        with pytest.raises(lc.LattnError, match="weights without the entry 'lattn_recipe"):
            lc.attach(_small(), source)
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    (tmp_path / "empty").mkdir()
    for name, text in {
        "list.pt": "a list; want a state dict",
        "broken.pt": "cannot be read",
        "broken.safetensors": "cannot be read",
        "missing.pt": "cannot be read|is no preset|got",
        "empty": "cannot be read",
    }.items():
        with pytest.raises(lc.LattnError, match=text):
            lc.attach(_small(), str(tmp_path / name))


# --- distributed ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # type: ignore[return-value]


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="lattn_compile")  # type: ignore[return-value]


OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "offloaded": {"cpu_offload": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("wrap", [lambda m: m, _ddp, _compiled, _fsdp2], ids=["plain", "ddp", "compiled", "fsdp2"])
def test_distributed_checkpoints_bring_the_recipe_back(
    tmp_path: Path, gloo: None, wrap: Callable[[nn.Module], nn.Module], options: dict[str, bool]
) -> None:
    source, inner = wrap(lc.attach(_small(), SMALL)), lc.attach(_small(), "exact")
    target, chosen = wrap(inner), StateDictOptions(**options)
    dcp.save(get_model_state_dict(source, options=chosen), checkpoint_id=tmp_path / "ckpt")
    state = get_model_state_dict(target, options=chosen)
    dcp.load(state, checkpoint_id=tmp_path / "ckpt")
    with pytest.warns(lc.LattnWarning, match="another recipe"):
        set_model_state_dict(target, state, options=chosen)
    assert attached_recipe(inner) == SMALL
    assert attached_recipe(lc.attach(_small(), tmp_path / "ckpt")) == SMALL


def test_a_distributed_checkpoint_without_a_recipe_says_so(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": _small().state_dict()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
        dcp.save({"model": lc.attach(_small(), SMALL).state_dict()}, checkpoint_id=tmp_path / "nested", no_dist=True)
    with pytest.raises(lc.LattnError, match="weights without the entry"):
        lc.attach(_small(), tmp_path / "ckpt")
    assert attached_recipe(lc.attach(_small(), tmp_path / "nested")) == SMALL


# --- a restored model is the saved one --------------------------------------------------------------------------------


class Attention(nn.Module):
    """One linear-attention layer and a head; compiles in a tenth of the time of a whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 3 * 16 + 2)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = self.mix(x).split([16, 16, 16, 1, 1], dim=-1)
        o, _ = lc.linear_attention(
            *(t.unflatten(-1, (1, 16)) for t in (q, k, v)),
            nn.functional.logsigmoid(g),
            torch.sigmoid(beta),
            use_qk_l2norm_in_kernel=True,
        )
        return self.head(o.flatten(-2))


def _attention(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Attention()


def _qwen(seed: int) -> nn.Module:
    return tiny_models.build("qwen3_next", layers=2, seed=seed)[0].train()


def _step(model: nn.Module) -> list[torch.Tensor]:
    """Outputs, loss and gradients of a step of which the first five tokens are prefix."""
    compiled: Any = torch.compile(model, backend="lattn_compile", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    model.zero_grad()
    with lc.training_phase(5):
        if isinstance(model, Attention):
            outputs = compiled(torch.randn(2, 16, 16, generator=generator))
            loss = outputs.square().mean()
        else:
            ids = torch.randint(2, 97, (2, 16), generator=generator)
            result = compiled(ids, labels=ids, use_cache=False)
            outputs, loss = result.logits, result.loss
        loss.backward()
    return [outputs.detach(), loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("build", "inductor"), [(_qwen, False), (_attention, True)], ids=["eager", "inductor"])
def test_a_restored_model_has_the_same_outputs_loss_and_gradients_bit_for_bit(
    tmp_path: Path, build: Callable[[int], nn.Module], inductor: bool
) -> None:
    model = lc.attach(build(0), "int8")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    restored = lc.attach(build(1), tmp_path / "w.pt")
    restored.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    with contextlib.nullcontext() if inductor else recorded():
        found = [_step(m) for m in (model, restored)]
    assert len(found[0]) == 2 + sum(p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with recorded() as record:
        lc.attach(restored, "exact")
        exact = _step(restored)
        assert _formats(record) == ["fp32"]
    assert (exact[0] - found[0][0])[:, 5:].abs().max() > 1e-4, "the recipe counts"

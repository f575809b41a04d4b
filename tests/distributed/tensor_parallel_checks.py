"""Checks of `integrations.tensor_parallel` on two ranks, with the demo's models made small (see `ranks.py`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, init_device_mesh

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile.errors import LattnError
from lattn_compile.integrations.packed_cache import quantize_cache
from lattn_compile.integrations.tensor_parallel import HeadParallel, parallelize
from lattn_compile.passes.recognize import heads_cut
from lattn_compile.testing.backend import recorded
from tests.distributed.ranks import DEVICE, GPU

FOLDER = Path()  # where to write; `ranks.py` sets it
MESH = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
demo.SIZES |= {"hidden_size": 32, "intermediate_size": 32, "layer_types": ["linear_attention"] + ["full_attention"] * 3}
demo.GDN_SIZES |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "head_dim": 8}
IDS = torch.arange(36).view(2, 18) * 37 % 251
IDS = IDS.to(DEVICE)
INT8 = dataclasses.replace(lc.PRESETS["int8"], kernel="reference" if GPU else "auto")


def built(name: str, **sizes: Any) -> nn.Module:
    before = dict(demo.GDN_SIZES)
    demo.GDN_SIZES.update(sizes)
    try:
        return demo.build_model(name).to(DEVICE)
    finally:
        demo.GDN_SIZES.update(before)


def loss_of(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, in transformers' order: a state dict knows how to undo the cut of its parameters."""
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
        found = {name: whole(x) for name, x in model.state_dict().items() if name in values}
        for name, p in model.named_parameters():
            p.copy_(values[name])
    return found


def close(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == two.keys()
    for name, x in one.items():
        assert (two[name] - x).norm() <= tolerance * x.norm() + 1e-9, (name, (two[name] - x).norm() / x.norm())


def refused(call: Any, argument: str, *says: str) -> None:
    try:
        call()
    except LattnError as error:
        assert error.argument == argument, error
        assert all(text in str(error) for text in says), error
        return
    raise AssertionError(f"{argument} was not refused")


def check_loss_and_gradients_are_those_of_one_device() -> None:
    for name in demo.MODELS:
        model, cut = built(name), parallelize(built(name), MESH)
        want, loss = loss_of(model), loss_of(cut)
        assert abs(loss - want) <= 1e-5 * want, (name, loss, want)
        want.backward()
        loss.backward()
        close(gradients(model), gradients(cut))


def check_a_rank_holds_its_part_only() -> None:
    for name in demo.MODELS:
        layer = next(m for m in parallelize(built(name), MESH).modules() if heads_cut(m) == 2)
        assert heads_cut(nn.Linear) == 1
        for path, p in layer.named_parameters():
            whole_elsewhere = path in ("norm.weight", "o_norm.weight", "g_a_proj.weight", "forget_gate.f_a_proj.weight")
            local = p.to_local()
            assert local.numel() == p.numel() // (1 if whole_elsewhere else 2), path
            assert local.untyped_storage().nbytes() == local.numel() * 4, path  # no view of the whole


def check_state_dicts_are_those_of_one_device() -> None:
    for name in demo.MODELS:
        model, cut = built(name), parallelize(built(name), MESH)
        state = cut.state_dict()
        for key, x in model.state_dict().items():
            assert torch.equal(whole(state[key]), x), key
        other = parallelize(built(name), MESH)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.load_state_dict(state)
        assert all(torch.equal(whole(p), whole(q)) for p, q in zip(cut.parameters(), other.parameters(), strict=True))


def check_a_checkpoint_of_two_ranks_serves_one_and_the_other_way_round() -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, cut = built("qwen3_5"), lc.attach(parallelize(built("qwen3_5"), MESH), "int8")
    folder = str(FOLDER / "tp2")
    dcp.save(get_model_state_dict(cut), checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)  # as one device has it: plain tensors
    model.load_state_dict(state)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), built("qwen3_5").parameters(), strict=True))
    assert lc.attach(built("qwen3_5"), folder) is not None

    plain = str(FOLDER / "tp1")
    dcp.save(model.state_dict(), checkpoint_id=plain)
    again = parallelize(built("qwen3_5"), MESH)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=plain)
    set_model_state_dict(again, state)
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(cut.parameters(), again.parameters(), strict=True))
    dist.barrier()


def check_decoding_with_a_packed_state_gives_the_tokens_of_one_device() -> None:
    from lattn_compile.integrations.transformers import quantize_cache

    for name in ("qwen3_next", "kimi"):
        said = []
        for model in (built(name), parallelize(built(name), MESH)):
            model.eval()
            quantize_cache(model, INT8)
            out = model.generate(
                IDS[:, :6], max_new_tokens=5, do_sample=False, use_cache=True, return_dict_in_generate=True
            )
            said.append((out.sequences, out.past_key_values.layers[0].recurrent_states[0]))
        (want, one), (ids, two) = said
        assert torch.equal(ids, want), name
        assert isinstance(two, lc.QuantizedState)
        assert two.tensors["codes"].numel() * 2 == one.tensors["codes"].numel()


def check_a_compiled_layer_is_cut_and_quantized() -> None:
    hidden = torch.randn(2, 18, 32, device=DEVICE)
    found = []
    with recorded() as record:
        for model in (built("qwen3_next"), parallelize(built("qwen3_next"), MESH)):
            layer = model.model.layers[0].linear_attn
            step = torch.compile(layer, backend="lattn_compile", fullgraph=True, options={"policy": INT8})
            x = hidden.clone().requires_grad_()
            with lc.training_phase([4, 9]):
                out = step(x)
                out.square().sum().backward()
            found.append({"out": out.detach(), "x": x.grad, **gradients(layer)})
    one, two = (call.arguments for call in record.calls)
    assert [call.op for call in record.calls] == ["lattn::decode"] * 2
    assert (one["state_format"], two["state_format"]) == ("int8/*x64",) * 2
    assert one["q"].shape[2] == 2 * two["q"].shape[2] and one["v"].shape[2] == 2 * two["v"].shape[2]
    close(*found, 1e-4)  # a code may be another: the projections of half a layer sum in another order


def check_a_stochastic_policy_that_comes_later_leaves_a_cut_layer_with_a_reason() -> None:
    options = {"policy": lc.Policy(lc.Int8(), rounding="stochastic")}
    codes, hidden = [], torch.randn(2, 6, 32, device=DEVICE)
    for model in (built("qwen3_next"), parallelize(built("qwen3_next"), MESH)):
        layer = model.model.layers[0].linear_attn
        before = len(lc.reports())
        with recorded(), torch.no_grad(), lc.training_phase(2):
            torch.compile(layer, backend="lattn_compile", fullgraph=True, options=options)(hidden)
        (site,) = (site for report in lc.reports()[before:] for site in report.sites)
        codes.append(site.reason.code if site.reason is not None else None)
    assert codes == [None, "HEADS_CUT"]
    cut = parallelize(built("qwen3_next"), MESH)
    refused(
        lambda: quantize_cache(cut, options["policy"]), "recipe", "stochastic", "model.layers.0.linear_attn", "2 ranks"
    )


def check_what_cannot_be_cut_is_refused() -> None:
    refused(lambda: parallelize(nn.Linear(2, 2), MESH), "model", "Linear", "Qwen3NextGatedDeltaNet")
    odd = built("qwen3_next", linear_num_key_heads=1)
    refused(lambda: parallelize(odd, MESH), "model.layers.0.linear_attn", "1 key heads", "divides 1")
    assert not any(isinstance(p, DTensor) for p in odd.parameters())
    cut = parallelize(built("qwen3_next"), MESH)
    refused(lambda: parallelize(cut, MESH), "module", "already")
    refused(lambda: parallelize(built("kimi"), init_device_mesh(DEVICE, (2, 1))), "mesh", "2 dimensions")
    refused(lambda: parallelize(built("kimi"), MESH, {"lm_head": "sideways"}), "plan", "sideways")
    policy = lc.Policy(rounding="stochastic")
    refused(lambda: parallelize(lc.attach(built("kimi"), policy), MESH), "model", "stochastic")


def check_a_cut_layer_refuses_to_be_exported() -> None:
    layer, hidden = (
        parallelize(built("qwen3_next"), MESH).model.layers[0].linear_attn,
        torch.randn(2, 6, 32, device=DEVICE),
    )
    refused(lambda: torch.export.export(layer, (hidden,), strict=False), "module", "over 2 ranks", "before parallelize")


def check_the_style_works_alone_and_the_rest_can_stay_whole() -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    model = built("qwen3_5")
    want = loss_of(model)
    alone = parallelize_module(built("qwen3_5"), MESH, {"model.layers.0.linear_attn": HeadParallel()})
    rest_whole = parallelize(built("qwen3_5"), MESH, {})
    for cut in (alone, rest_whole):
        assert abs(loss_of(cut) - want) <= 1e-5 * want
        assert not isinstance(cut.model.layers[1].self_attn.q_proj.weight, DTensor)

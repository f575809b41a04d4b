"""Checks of tensor parallelism and FSDP2 together, on a mesh of two dimensions: 2 x 2 on four ranks, 1 x 2 on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

import lattn_compile as lc
from lattn_compile import distributed as lcd
from lattn_compile.integrations.tensor_parallel import parallelize
from lattn_compile.testing.backend import recorded
from tests.distributed.ranks import DEVICE
from tests.distributed.tensor_parallel_checks import INT8, built, close, gradients, whole

FOLDER = Path()  # where to write; `ranks.py` sets it
DATA = dist.get_world_size() // 2
MESH = init_device_mesh(DEVICE, (DATA, 2), mesh_dim_names=("dp", "tp"))
HERE = dist.get_rank() // 2
"""Which of the batches is this rank's."""


def batch(number: int) -> Tensor:
    return (torch.arange(24, device=DEVICE).view(2, 12) * (number + 3)) % 251


def spread(model: nn.Module) -> nn.Module:
    """Heads over "tp", what each rank has of them over "dp"."""
    parallelize(model, MESH["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=MESH["dp"])
    return fully_shard(model, mesh=MESH["dp"])


def backward(model: Any, number: int, prefix: int) -> Tensor:
    with lc.training_phase(prefix):
        loss = model(input_ids=batch(number), labels=batch(number)).loss
        loss.backward()
    return loss.detach()


def check_loss_and_gradients_are_those_of_one_device_on_all_batches() -> None:
    for name in ("qwen3_next", "qwen3_5"):
        one, two = built(name), spread(built(name))
        losses = [backward(one, number, 12) for number in range(DATA)]
        loss = backward(two, HERE, 12)
        assert abs(loss - losses[HERE]) <= 1e-5 * loss
        close({key: x / DATA for key, x in gradients(one).items()}, gradients(two))


def check_a_compiled_and_quantized_layer_trains_on_both() -> None:
    found = []
    with recorded() as record:
        for make in (lambda model: model, spread):
            model = lc.attach(built("qwen3_next"), INT8)
            model = make(model)
            model.model.layers[0].compile(backend="lattn_compile", dynamic=False)  # the linear one
            numbers = range(DATA) if not found else [HERE]
            for number in numbers:
                backward(model, number, 4)
            found.append(gradients(model))
    formats = {call.arguments["state_format"] for call in record.calls if call.op == "lattn::decode"}
    assert formats == {"int8/*x64"}, formats
    # A code may be another: the projections of half a layer sum in another order.
    close({key: x / DATA for key, x in found[0].items()}, found[1], 1e-3)


def check_a_checkpoint_of_both_is_read_by_one_device_and_by_another_mesh() -> None:
    model = spread(lc.attach(built("qwen3_5"), INT8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    backward(model, HERE, 12)
    optimizer.step()
    lcd.save(model, FOLDER / "both", optimizer=optimizer)
    want = {key: whole(x) for key, x in model.state_dict().items()}

    plain = lc.attach(built("qwen3_5"), INT8)
    lcd.load(plain, FOLDER / "both")
    assert all(torch.equal(x, want[key]) for key, x in plain.state_dict().items() if isinstance(x, Tensor))

    flat = init_device_mesh(DEVICE, (dist.get_world_size(),))
    other = fully_shard(lc.attach(built("qwen3_5"), INT8), mesh=flat)
    lcd.load(other, FOLDER / "both")
    assert all(torch.equal(whole(x), want[key]) for key, x in other.state_dict().items() if isinstance(x, Tensor))
    assert any(isinstance(x, DTensor) for x in other.parameters())

    again = spread(lc.attach(built("qwen3_5"), INT8))
    second = torch.optim.AdamW(again.parameters(), lr=1e-2, foreach=False)
    lcd.load(again, FOLDER / "both", optimizer=second)
    for one, two in ((model, optimizer), (again, second)):
        one.zero_grad()
        backward(one, HERE, 12)
        two.step()
    assert all(torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), again.parameters(), strict=True))

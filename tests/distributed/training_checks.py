"""Checks of FSDP2 and DDP with compiled, quantized layers, of checkpoints and of agreement, on two ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import lattn_compile as lc
from lattn_compile import distributed as lcd
from lattn_compile.errors import DistributedError
from lattn_compile.testing.backend import recorded
from tests.distributed.nets import POLICY, Net, batch, loss_of, net
from tests.distributed.ranks import DEVICE, GPU

FOLDER = Path()  # where to write; `ranks.py` sets it
MESH = init_device_mesh(DEVICE, (2,), mesh_dim_names=("dp",))
RANK = dist.get_rank()


def compiled(model: Net) -> Net:
    for layer in model.layers:
        layer.compile(backend="lattn_compile", dynamic=False)
    return model


def sharded(model: Net) -> Net:
    for layer in model.layers:
        fully_shard(layer, mesh=MESH)
    return fully_shard(model, mesh=MESH)


def same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit on a CPU; a GPU adds up the gradient of an embedding in any order."""
    return bool((x - y).norm() <= 1e-12 * x.norm()) if GPU else torch.equal(x, y)


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def of_one_device(numbers: list[int]) -> dict[str, Tensor]:
    """The mean gradient of those batches."""
    model = compiled(net())
    for number in numbers:
        loss_of(model, number)
    return {name: p.grad / len(numbers) for name, p in model.named_parameters()}


def close(model: nn.Module, want: dict[str, Tensor], scale: float = 1.0) -> None:
    found = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    for name, x in want.items():
        y = whole(found[name].grad) * scale
        assert (x - y).norm() <= 1e-5 * x.norm() + 1e-9, (name, (x - y).norm() / x.norm())


def refused(call: Any, argument: str, *says: str) -> None:
    try:
        call()
    except DistributedError as error:
        assert error.argument == argument, error
        assert all(text in str(error) for text in says), error
        return
    raise AssertionError(f"{argument} was not refused")


def check_ranks_that_are_in_unlike_many_groups_meet() -> None:
    if RANK == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    assert lcd.meet(f"rank {RANK}") == ["rank 0", "rank 1"]


def check_ranks_talk_under_another_default_device() -> None:
    with torch.device("meta"):
        assert lcd.meet(RANK) == [0, 1]
        with lcd.together(watch=True):
            pass


def check_fsdp2_accumulates_the_gradients_of_one_device() -> None:
    with recorded():
        want = of_one_device([1, 2, 3, 4])  # ranks get 1, 3 and 2, 4: prefixes differ by rank and by step
        model = sharded(compiled(net()))
        model.set_requires_gradient_sync(False)
        loss_of(model, 1 + RANK)
        model.set_requires_gradient_sync(True)
        loss_of(model, 3 + RANK)
    rewritten()
    close(model, want, 0.5)  # of two accumulated steps FSDP takes the mean over ranks


def check_ddp_accumulates_the_gradients_of_one_device() -> None:
    with recorded():
        want = of_one_device([1, 2, 3, 4])
        model = DistributedDataParallel(compiled(net()))
        with model.no_sync():
            loss_of(model, 1 + RANK)
        loss_of(model, 3 + RANK)
    close(model, want, 0.5)


def check_ddp_compiled_as_a_whole_has_the_gradients_of_one_device() -> None:
    with recorded() as record:
        want = of_one_device([1, 2])
        record.graphs.clear()
        before, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 64
        try:
            model = DistributedDataParallel(net(), bucket_cap_mb=0.001)  # Dynamo cuts the graph at the buckets
            loss_of(torch.compile(model, backend="lattn_compile", dynamic=False), 1 + RANK)
        finally:
            dist._DEFAULT_FIRST_BUCKET_BYTES = before
        assert len(record.graphs) == 5 or GPU  # of float64 parameters fewer fill a bucket
        rewritten()
    close(model, want)


def rewritten() -> None:
    """Each of the two layers has its own policy, in every graph."""
    sites = lc.Report.merge(lc.reports()).sites
    found = {(site.path, site.policy["state"]["format"]) for site in sites}
    assert all(site.verdict == "rewritten" for site in sites)
    assert found == {("layers.0", "int8"), ("layers.1", "fp8_e4m3")}, found


def step(model: Net, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    loss = loss_of(model, number)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def check_a_checkpoint_goes_on_where_training_was() -> None:
    with recorded():
        model = sharded(compiled(net()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, 1 + RANK)
        lcd.save(model, FOLDER / "ckpt", optimizer=optimizer)
        files = sorted(path.name for path in FOLDER.glob("ckpt*"))
        want = step(model, optimizer, 3 + RANK), step(model, optimizer, 5 + RANK)

        again = sharded(compiled(net(lc.Policy(), seed=1)))
        other = torch.optim.AdamW(again.parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lcd.load(again, FOLDER / "ckpt", optimizer=other)
        assert any("another recipe" in str(w.message) for w in caught)
        got = step(again, other, 3 + RANK), step(again, other, 5 + RANK)
    assert files == ["ckpt"] and all(same(x, y) for x, y in zip(want, got, strict=True)), (files, want, got)


def check_a_checkpoint_of_one_device_is_read_by_two_ranks() -> None:
    if RANK == 0:
        dcp.save({"model": net(seed=2).state_dict()}, checkpoint_id=FOLDER / "one", no_dist=True)
    dist.barrier()
    model = sharded(net(seed=3))
    lcd.load(model, FOLDER / "one")
    for p, q in zip(model.parameters(), net(seed=2).parameters(), strict=True):
        assert torch.equal(whole(p), q)


def check_unlike_recipes_are_refused_on_every_rank() -> None:
    lcd.check_same_recipe(net())
    lcd.check_same_recipe(net(None))
    unlike = net("int8" if RANK else "fp8")
    refused(lambda: lcd.check_same_recipe(unlike), "model", "on rank 0", "on rank 1")
    refused(lambda: lcd.check_same_recipe(net(POLICY if RANK else None)), "model", "no recipe on rank 0")
    refused(lambda: lcd.save(unlike, FOLDER / "unlike"), "model", "the same recipe")
    assert not list(FOLDER.glob("unlike*"))


def check_a_part_that_cannot_be_written_leaves_the_old_checkpoint() -> None:
    lcd.save(net(seed=4), FOLDER / "kept")
    dist.barrier()
    write = dcp.FileSystemWriter.write_data

    def full(self: Any, plan: Any, planner: Any) -> Any:
        if RANK == 1:
            raise OSError("no space left on device")
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = full
    try:
        refused(lambda: lcd.save(sharded(net(seed=5)), FOLDER / "kept"), "folder", "no space left")
    finally:
        dcp.FileSystemWriter.write_data = write
    dist.barrier()
    assert sorted(path.name for path in FOLDER.glob("kept*")) == ["kept"]
    model = net(seed=6)
    lcd.load(model, FOLDER / "kept")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), net(seed=4).parameters(), strict=True))


def check_a_checkpoint_without_the_files_of_a_rank_is_refused_on_every_rank() -> None:
    lcd.save(sharded(net()), FOLDER / "torn")
    dist.barrier()
    if RANK == 0:
        (FOLDER / "torn" / "__1_0.distcp").unlink()
    dist.barrier()
    refused(lambda: lcd.load(sharded(net()), FOLDER / "torn"), "folder", "__1_0.distcp", "rank 0", "rank 1")
    refused(lambda: lcd.load(sharded(net()), FOLDER / "nowhere"), "folder", ".metadata")
    if RANK == 0:
        dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=FOLDER / "another", no_dist=True)
    dist.barrier()
    refused(lambda: lcd.load(sharded(net()), FOLDER / "another"), "folder", "rank 0", "rank 1")


def check_calibration_of_two_ranks_is_that_of_one() -> None:
    batches = [batch(i)[0][:, :-1] for i in range(3)]
    kept: list[Any] = []
    options: dict[str, Any] = {"max_error": 0.05, "horizon": 16, "show": kept.append}
    options["candidates"] = ["int8", "fp8", "nvfp4", "int8-replay"]
    with lc.training_phase(2):
        one = lc.calibrate(net(None), batches, **options)
        two = lc.calibrate(net(None), batches[RANK::2], process_group=dist.group.WORLD, **options)
    assert one == two
    want, got = kept
    assert want.batches == got.batches == 3 and abs(want.total_error - got.total_error) <= 1e-12 * want.total_error
    for x, y in zip(want.sites, got.sites, strict=True):
        for a, b in zip(x.measured, y.measured, strict=True):
            assert a.policy == b.policy and abs(a.error - b.error) <= 1e-12 * max(a.error, 1e-30), (a, b)

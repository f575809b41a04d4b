"""What ranks that met leave behind."""

from __future__ import annotations

import socket

import torch.distributed as dist

from lattn_compile.distributed import meet


def test_a_process_group_that_is_gone_leaves_its_address_to_the_next() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    dist.init_process_group("gloo", init_method=f"tcp://{address[0]}:{address[1]}", rank=0, world_size=1)
    try:
        assert meet("here") == ["here"]
    finally:
        dist.destroy_process_group()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(address)  # while the first rank's store is held, its server listens there

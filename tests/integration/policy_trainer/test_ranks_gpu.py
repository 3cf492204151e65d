"""Tests NCCL between ranks that meet at an address, as ranks on two hosts do. The test needs two GPUs and has not been
run yet."""

from __future__ import annotations

import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist

from shared.ranks.layout import Layout
from shared.ranks.meeting import Meeting, announced_interface, opened
from shared.ranks.process_group import open_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]
RANKS = 2


def work(rank: int, meeting: Meeting) -> None:
    torch.cuda.set_device(rank)
    open_group(meeting, Layout(RANKS).place(rank), f"cuda:{rank}", deadline_s=60.0)
    on_gpu = torch.full((1 << 20,), float(rank + 1), device=f"cuda:{rank}")
    dist.all_reduce(on_gpu)
    on_host = torch.tensor([rank + 1])
    dist.all_reduce(on_host)
    assert on_gpu.unique().tolist() == [3.0]
    assert on_host.tolist() == [3]


def follow(listen: str, store: str) -> None:
    work(1, Meeting(announced_interface(listen), store=store))


def test_ranks_that_meet_at_an_address_reduce_on_gpus_and_on_hosts() -> None:
    listen = f"tcp://{socket.gethostbyname(socket.gethostname())}:0"
    meeting = opened(listen)
    other = multiprocessing.get_context("spawn").Process(target=follow, args=(listen, meeting.store), daemon=True)
    other.start()
    try:
        work(0, meeting)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()

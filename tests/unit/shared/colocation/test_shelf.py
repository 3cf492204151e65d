"""Tests the host memory that receives tensors from a GPU. The memory is not locked, because locking needs a GPU."""

from __future__ import annotations

import gc
import resource

import psutil
import pytest
import torch

from shared.colocation.shelf import ALIGN, LockedMemory, Shelf

SIZES = [3 * 2**20 + 1, 0, 17, 5 * 2**20 + ALIGN]


def test_locked_memory_equals_the_sum_of_the_sizes_and_is_not_rounded_up_to_powers_of_two() -> None:
    sizes = [2**20 * 33 // 32 + 3] * 100
    before = psutil.Process().memory_info().rss
    memory = LockedMemory(sizes, lock=False)
    for piece in memory.pieces:
        piece.fill_(1)
    grown = psutil.Process().memory_info().rss - before
    assert memory.nbytes < sum(sizes) * 1.001
    assert grown < sum(sizes) * 1.05


def test_pieces_of_locked_memory_are_aligned_and_do_not_overlap() -> None:
    memory = LockedMemory(SIZES, lock=False)
    for number, piece in enumerate(memory.pieces):
        piece.fill_(number + 1)
    first = memory.pieces[0].data_ptr()
    assert [len(piece) for piece in memory.pieces] == SIZES
    assert all((piece.data_ptr() - first) % ALIGN == 0 for piece in memory.pieces)
    assert all((piece == number + 1).all() for number, piece in enumerate(memory.pieces))


@pytest.mark.gpu
def test_a_shelf_reuses_its_locked_memory_and_keeps_every_bit_of_gpu_tensors(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = [torch.randn(1000 + each, device="cuda") for each in range(20)]
    copies = [each.cpu() for each in tensors]
    shelf = Shelf(tmp_path_factory.mktemp("shelf") / "part.bin")
    peaks = []
    torch.equal(copies[0], copies[0])  # its first call takes memory
    for _ in range(3):
        assert shelf.put(tensors) >= sum(each.numel() * 4 for each in copies)
        assert all(each.untyped_storage().nbytes() == 0 for each in tensors)
        shelf.take()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert all(torch.equal(each.cpu(), copy) for each, copy in zip(tensors, copies, strict=True))
    assert peaks[0] == peaks[-1]
    shelf.remove()
    gc.collect()

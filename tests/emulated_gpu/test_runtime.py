"""Tests the emulated GPU itself: it is strict where CUDA is strict, and late where CUDA may be late."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import Tensor

from tests.emulated_gpu.machine import ROOT, machine

DEVICE = "cuda"
_runtime = ctypes.CDLL(None)
ALLOCATES = """
import sys
import torch
there = torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
print("allocated", flush=True)
sys.stdin.read()
"""
TOO_LARGE = """
import torch
there = torch.zeros(4 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
"""
RACE = """
import torch
shared = torch.zeros(4, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    {wait}
    shared.mul_(2)
"""


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    """Begin with nothing pending, and let nothing happen early."""
    torch.cuda.synchronize()
    _runtime.emulated_gpu_seed(ctypes.c_long(0))
    yield
    torch.cuda.synchronize()


def locked(size: int) -> Tensor:
    return torch.zeros(size).pin_memory()


# ---- strict


def test_a_kernel_without_a_stand_in_raises_with_its_name() -> None:
    gates, cell = torch.zeros(2, 1, 4, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"no stand-in for the kernel .*lstm_cell"):
        torch.ops.aten._thnn_fused_lstm_cell(*gates, cell)


def test_tensors_of_different_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"same device, but add\.Tensor got cpu, cuda:0"):
        torch.ones(2, device=DEVICE) + torch.ones(2)
    with pytest.raises(RuntimeError, match=r"same device, but add\.Tensor got cuda:0, cuda:1"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def test_an_int8_product_in_a_layout_that_cublas_lacks_is_refused() -> None:
    rows, columns = (torch.ones(shape, dtype=torch.int8, device=DEVICE) for shape in ((32, 16), (16, 8)))
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
        torch._int_mm(rows, columns)
    assert torch._int_mm(rows, columns.t().contiguous().t()).unique().tolist() == [16]


def test_a_histogram_of_floats_is_refused_in_deterministic_mode() -> None:
    experts = torch.tensor([0, 2, 2, 3], device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="_histc_cuda with floating point input"):
            torch.histc(experts.float(), bins=4, min=0, max=3)
        assert torch.histc(experts.int(), bins=4, min=0, max=3).tolist() == [1, 0, 2, 1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_attention_refuses_float32() -> None:
    q = torch.ones(1, 2, 8, 16, device=DEVICE)
    with pytest.raises(RuntimeError, match="fp16 and bf16"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)


def test_a_fused_optimizer_refuses_a_gradient_of_another_dtype() -> None:
    weight, step = torch.ones(4, device=DEVICE), torch.ones((), device=DEVICE)
    lists = [[weight], [weight.bfloat16()], [weight.clone()], [weight.clone()], [], [step]]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    with pytest.raises(RuntimeError, match="must have same dtype"):
        torch._fused_adamw_(*lists, maximize=False, **options)


def test_a_fork_cannot_use_the_context_of_its_parent() -> None:
    torch.ones(1, device=DEVICE)
    pid = os.fork()
    if not pid:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        os._exit(_runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
    not_initialised = 3
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == not_initialised


def test_memory_is_counted_over_processes_and_freed_when_its_process_is_killed() -> None:
    with machine(nbytes=64 << 20) as variables:
        command = [sys.executable, "-c", ALLOCATES]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=variables, cwd=ROOT, **pipes) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"allocated\n"
            told = subprocess.check_output([sys.executable, "-c", TOO_LARGE], env=variables, cwd=ROOT, text=True)
            assert "CUDA out of memory. Tried to allocate 30.00 MiB" in told
            first.kill()
        assert not subprocess.check_output([sys.executable, "-c", TOO_LARGE], env=variables, cwd=ROOT)


def test_memory_of_a_device_is_not_zero_at_first() -> None:
    torch.cuda.empty_cache()
    assert torch.empty(1 << 20, device=DEVICE).isnan().all()


# ---- late


def test_a_copy_to_the_host_takes_effect_when_it_is_waited_for() -> None:
    there, here = torch.ones(4, device=DEVICE), locked(4)
    here.copy_(there, non_blocking=True)
    assert here.tolist() == [0] * 4
    torch.cuda.synchronize()
    assert here.tolist() == [1] * 4


def test_a_copy_reads_its_source_late() -> None:
    here, there = locked(4), torch.empty(4, device=DEVICE)
    there.copy_(here, non_blocking=True)
    here.fill_(2)  # too early: the copy has not been made yet
    assert there.tolist() == [2] * 4


def test_a_kernel_runs_after_the_work_of_its_stream() -> None:
    there = torch.zeros(4, device=DEVICE)
    there.copy_(locked(4) + 1, non_blocking=True)
    assert (there + 1).tolist() == [2] * 4


def test_a_stream_waits_for_an_event_of_another() -> None:
    source, first, second = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE), locked(4)
    side = torch.cuda.Stream()
    first.copy_(source)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second.copy_(first, non_blocking=True)
    side.synchronize()
    assert second.tolist() == [1] * 4


def test_an_event_is_late_and_comes_true_when_it_is_asked_for_again() -> None:
    at_first = set()
    for seed in range(10):
        _runtime.emulated_gpu_seed(ctypes.c_long(seed))
        event = torch.cuda.Event()
        event.record()
        answers = [event.query() for _ in range(60)]
        at_first.add(answers[0])
        assert answers[-1]
    assert False in at_first


def test_freed_memory_is_not_reused_while_another_stream_uses_it() -> None:
    side, here = torch.cuda.Stream(), locked(1 << 20)
    there = torch.ones(1 << 20, device=DEVICE)
    with torch.cuda.stream(side):
        here.copy_(there, non_blocking=True)
    there.record_stream(side)
    address = there.data_ptr()
    del there
    assert torch.empty(1 << 20, device=DEVICE).data_ptr() != address
    side.synchronize()
    assert here.unique().tolist() == [1]


def test_seeds_draw_different_orders_and_a_seed_always_the_same() -> None:
    there, here = torch.ones(4, device=DEVICE), [locked(4) for _ in range(20)]

    def order(seed: int) -> list[float]:
        torch.cuda.synchronize()
        for target in here:
            target.zero_()
        _runtime.emulated_gpu_seed(ctypes.c_long(seed))
        seen = []
        for target in here:
            target.copy_(there, non_blocking=True)
            seen.append(float(sum(tensor[0] for tensor in here)))
        return seen

    orders = [order(seed) for seed in range(1, 6)]
    assert orders == [order(seed) for seed in range(1, 6)]
    assert len(set(map(tuple, orders))) > 1


def test_sleep_keeps_a_stream_busy_and_the_host_free() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
    assert not side.query()
    side.synchronize()
    assert side.query()


def test_memory_of_a_device_is_not_part_of_the_process() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    there = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE).fill_(1)  # in place: no copy on the host
    assert process.memory_info().rss - before < 16 << 20
    assert int(there[-1]) == 1


@pytest.mark.parametrize("wait", ["", "torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())"])
def test_the_cuda_sanitizer_reports_a_race(wait: str) -> None:
    code = RACE.format(wait=wait or "pass").replace("torch.cuda.synchronize()", "shared.add_(1)")
    command, variables = [sys.executable, "-c", code], os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ("possible data race" in done.stderr) == (not wait), done.stderr

"""Sends SIGKILL at random times during large saves that run alongside training, and checks that the previous checkpoint
stays intact and that the next save succeeds. Setting SAVE_SEED to the printed number repeats the kills of a failed run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.checkpoint import SavedState
from shared.rundir import checkpoint_steps

ELEMENTS = 25_000_000
"""Number of float32 elements in the weights and in each of the two moments: 300 MB in all."""
KILLS = 20
BASE = torch.arange(ELEMENTS, dtype=torch.float32)


def snapshot(step: int) -> SavedState:
    return SavedState(step, {"w": BASE + step}, {f"{slot}/w": BASE * step for slot in ("exp_avg", "exp_avg_sq")})


def is_whole(folder: Path, step: int) -> bool:
    found = checkpoint.load(folder, step)
    return torch.equal(found.weights["w"], BASE + step) and all(
        torch.equal(found.optimizer[f"{slot}/w"], BASE * step) for slot in ("exp_avg", "exp_avg_sq")
    )


def save_beside_training(folder: Path, state: SavedState) -> int:
    """Fork a process that saves `state` on its writer thread while its main thread computes; return its pid."""
    child = os.fork()
    if child:
        return child
    writer = ThreadPoolExecutor(1, "checkpoint")
    saving = writer.submit(checkpoint.save, folder, state)
    while not saving.done():
        sum(range(10_000))  # The loop is plain Python, because a forked process has no torch threads.
    os._exit(1 if saving.exception() else 0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_kills_at_random_times_during_a_large_save_keep_the_previous_checkpoint(tmp_path: Path) -> None:
    seed = int(os.environ.get("SAVE_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"SAVE_SEED={seed}")
    chance = random.Random(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.monotonic()
        assert os.waitpid(save_beside_training(tmp_path, snapshot(1)), 0)[1] == 0
        whole_s = time.monotonic() - began
        newest, interrupted = 1, 0
        for kill in range(KILLS):
            child = save_beside_training(tmp_path, snapshot(newest + 1))
            time.sleep(chance.uniform(0.0, whole_s))  # The kill occurs at a random time.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found = checkpoint_steps(tmp_path)
            assert newest in found, f"kill {kill}: {found}"
            interrupted += newest + 1 not in found
            newest = found[-1]
            assert is_whole(tmp_path, newest), f"kill {kill}"
        assert interrupted >= KILLS // 4, f"{interrupted} of {KILLS} saves of {whole_s:.2f} s were interrupted"
        assert os.waitpid(save_beside_training(tmp_path, snapshot(newest + 1)), 0)[1] == 0
        assert is_whole(tmp_path, newest + 1)
        assert not list(tmp_path.glob(".*")), "the next save sweeps up what the killed ones left"
    finally:
        torch.set_num_threads(threads)

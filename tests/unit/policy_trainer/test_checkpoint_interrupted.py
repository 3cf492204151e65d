"""A checkpoint that is interrupted at any byte or between any two of its system calls leaves the one before it whole.

The kernel does the killing: the file size limit of a forked process ends it (SIGXFSZ) at exactly the byte of the file
that the test names, in the middle of the write, with nothing of Python running after it. safetensors asks for a file's
whole size before its first byte, which would always die there: for that one file the same bytes are written plainly.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as safetensors_bytes

from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.checkpoint import MODEL, OPTIMIZER, STATE, SavedState
from shared.rundir import checkpoint_steps

pytestmark = pytest.mark.slow


def snapshot(step: int) -> SavedState:
    """As small as they get: some hundred bytes a file, so that every single one can be tried."""
    weights = {"w": torch.arange(4.0) + step, "b": torch.full((2,), float(step))}
    optimizer = {f"{slot}/w": torch.full((4,), step + 0.5) for slot in ("exp_avg", "exp_avg_sq")}
    return SavedState(step, weights, optimizer)


def is_whole(folder: Path, step: int) -> bool:
    found, made = checkpoint.load(folder, step), snapshot(step)
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in ((found.weights, made.weights), (found.optimizer, made.optimizer))
    )


def killed(work: Callable[[], None]) -> bool:
    """Whether a signal ended `work` in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def save_up_to(folder: Path, name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Save step 2 in a process that dies once `name` has `size` bytes and wants more."""
    real_save, real_sync = checkpoint.save_file, checkpoint._sync

    def limit(at: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it from the start

    def save_file(tensors: dict[str, torch.Tensor], path: Path, **options: dict[str, str]) -> None:
        if path.name != name:
            real_save(tensors, path, **options)
            return
        data = safetensors_bytes(tensors, **options)
        limit(size)
        path.write_bytes(data)

    def sync(path: Path) -> None:
        real_sync(path)
        if (path.name, name) == (OPTIMIZER, STATE):  # the manifest is what comes next
            limit(size)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", save_file)
        patch.setattr(checkpoint, "_sync", sync)
        return killed(lambda: _save(folder))


def _save(folder: Path) -> None:
    checkpoint.save(folder, snapshot(2), keep_last=1)


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
def test_a_save_killed_at_any_byte_leaves_the_one_before_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "whole", snapshot(2), keep_last=1)
    size = (tmp_path / "whole" / "step-2" / name).stat().st_size
    folder = tmp_path / "c"
    checkpoint.save(folder, snapshot(1), keep_last=1)
    assert size > 100
    for at in range(size):
        assert save_up_to(folder, name, at, monkeypatch), f"byte {at} of {size}"
        assert (folder / ".step-2.partial" / name).stat().st_size == at
        assert checkpoint_steps(folder) == [1]
        assert is_whole(folder, 1)
    assert not save_up_to(folder, name, max(size, 4096), monkeypatch)
    assert checkpoint_steps(folder) == [2]
    assert is_whole(folder, 2)


def kill_before(call: int, step: int, folder: Path, keep_last: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Save `step` in a process that dies right before the `call`-th change of a folder after the files are written."""
    calls = [0]

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(checkpoint, "_exchange", counted(checkpoint._exchange))
        patch.setattr(os, "unlink", counted(os.unlink))
        patch.setattr(os, "rmdir", counted(os.rmdir))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        return killed(lambda: void(checkpoint.save(folder, snapshot(step), keep_last=keep_last)))


def void(_: object) -> None:
    """A result that nobody looks at."""


@pytest.mark.parametrize("replaced", [False, True])
def test_a_save_killed_between_any_two_changes_leaves_a_whole_one(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replaced`: the only checkpoint there is gets written once more; there is never a moment without it."""
    kills = 0
    for call in range(1, 100):
        folder = tmp_path / f"c{call}"
        checkpoint.save(folder, snapshot(1), keep_last=1)
        if not kill_before(call, 1 if replaced else 2, folder, 1, monkeypatch):
            break
        kills += 1
        found = checkpoint_steps(folder)
        assert found
        assert all(is_whole(folder, step) for step in found)
        _save(folder)  # and the next save cleans up behind it
        assert sorted(path.name for path in folder.iterdir()) == ["step-2"]
    assert kills >= 3

"""A save interrupted at any byte or between any two system calls leaves the previous checkpoint intact. With two
trained models, there is always a step of which both have a whole checkpoint.

The kernel kills the forked process: its file size limit raises SIGXFSZ in the middle of a write, at exactly the byte
that the test names, and no Python code runs afterwards. safetensors allocates a file's whole size before it writes the
first byte, so the process would always be killed there; the test writes the same bytes with a plain write instead.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as safetensors_bytes

from services.policy_trainer.checkpoints import Checkpoints
from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.checkpoint import SavedState
from shared.checkpoint_files import MODEL, OPTIMIZER, STATE
from shared.rundir import checkpoint_steps

pytestmark = pytest.mark.slow


def snapshot(step: int) -> SavedState:
    """Return a minimal checkpoint: a few hundred bytes per file, so that a kill at every byte can be tried."""
    weights = {"w": torch.arange(4.0) + step, "b": torch.full((2,), float(step))}
    optimizer = {f"{slot}/w": torch.full((4,), step + 0.5) for slot in ("exp_avg", "exp_avg_sq")}
    return SavedState(step, weights, optimizer)


def is_whole(folder: Path, step: int) -> bool:
    found, made = checkpoint.load(folder, step), snapshot(step)
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in ((found.weights, made.weights), (found.optimizer, made.optimizer))
    )


def killed(work: Callable[[], object]) -> bool:
    """Run `work` in a forked process; return whether a signal ended that process."""
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
    """Save step 2 in a process that dies if `name` grows beyond `size` bytes; return whether it died."""
    real_save, real_sync = checkpoint.save_file, checkpoint._sync

    def limit(at: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores SIGXFSZ by default.

    def save_file(tensors: dict[str, torch.Tensor], path: Path, **options: dict[str, str]) -> None:
        if path.name != name:
            real_save(tensors, path, **options)
            return
        data = safetensors_bytes(tensors, **options)
        limit(size)
        path.write_bytes(data)

    def sync(path: Path) -> None:
        real_sync(path)
        if (path.name, name) == (OPTIMIZER, STATE):  # The manifest is written next.
            limit(size)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", save_file)
        patch.setattr(checkpoint, "_sync", sync)
        return killed(lambda: checkpoint.save(folder, snapshot(2)))


@pytest.mark.parametrize("name", [*(pytest.param(each, marks=pytest.mark.long) for each in (MODEL, OPTIMIZER)), STATE])
def test_a_save_killed_at_any_byte_leaves_the_previous_checkpoint_intact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model has already saved the same step, and only one checkpoint of each is kept."""
    other, folder = tmp_path / "other", tmp_path / "c"
    for step in (1, 2):
        checkpoint.save(other, snapshot(step))
    size = (other / "step-2" / name).stat().st_size
    both = Checkpoints([folder, other], keep_last=1, keep_every=None)
    checkpoint.save(folder, snapshot(1))
    assert size > 100
    for at in range(size):
        assert save_up_to(folder, name, at, monkeypatch), f"byte {at} of {size}"
        assert (folder / ".step-2.partial" / name).stat().st_size == at
        assert checkpoint_steps(folder) == [1]
        assert is_whole(folder, 1)
        assert both.prune(1) == both.steps() == [1]
    assert not save_up_to(folder, name, max(size, 4096), monkeypatch)
    assert checkpoint_steps(folder) == [1, 2]
    assert is_whole(folder, 2)
    assert both.prune(2) == checkpoint_steps(folder) == checkpoint_steps(other) == [2]


def kill_before(call: int, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run `work` in a process that is killed before its `call`-th folder change; return whether the process was
    killed."""
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
        return killed(work)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_save_killed_between_any_two_changes_leaves_a_whole_checkpoint(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`replaced` means that the only checkpoint is saved again. A whole checkpoint exists at every moment."""
    kills = 0
    for call in range(1, 100):
        folder = tmp_path / f"c{call}"
        checkpoint.save(folder, snapshot(1))
        save = partial(checkpoint.save, folder, snapshot(1 if replaced else 2))
        if not kill_before(call, save, monkeypatch):
            break
        kills += 1
        found = checkpoint_steps(folder)
        assert found
        assert all(is_whole(folder, step) for step in found)
        checkpoint.save(folder, snapshot(2))  # The next save removes the leftovers.
        assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]
    assert kills >= (3 if replaced else 1)  # a new checkpoint appears with one change


@pytest.mark.parametrize("first", [0, 1], ids=["policy first", "critic first"])
def test_two_models_killed_between_any_two_changes_have_a_common_step(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models save step 2 and then step 3, of which only the newest is kept. A run that resumes after the kill
    repeats the saves of the steps that are missing."""
    kills = 0
    for call in range(1, 100):
        folders = [tmp_path / f"c{call}", tmp_path / f"c{call}" / "critic"]
        both = Checkpoints(folders, keep_last=1, keep_every=None)
        orders = [folders[first], folders[1 - first]]
        for folder in folders:
            checkpoint.save(folder, snapshot(1))

        def steps_after(step: int, both: Checkpoints = both, orders: list[Path] = orders) -> None:
            for number in range(step + 1, 4):
                for folder in orders:
                    checkpoint.save(folder, snapshot(number))
                both.prune(number)

        if not kill_before(call, partial(steps_after, 1), monkeypatch):
            break
        kills += 1
        common = both.steps()
        assert common
        assert all(is_whole(folder, step) for folder in folders for step in common)
        assert both.prune(common[-1]) == [common[-1]]
        steps_after(common[-1])
        for folder in folders:
            assert [path.name for path in folder.glob("*step-*")] == ["step-3"]
    assert kills > 20

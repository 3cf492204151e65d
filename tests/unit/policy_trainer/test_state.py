"""Tests the worker state that survives a kill: checkpoints, exports, resuming and the order of calls."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from proto.ids import REVISION
from proto.messages import (
    BatchMeta,
    BatchPart,
    CheckpointSaved,
    ErrorCode,
    HeldSnapshot,
    LossSpec,
    OptimStep,
    WeightsRef,
    WorkerReady,
    WorkerState,
)
from proto.tensors import Array
from services.policy_trainer.resume import ResumePoint, resume
from services.policy_trainer.scheduler_calls import SchedulerCalls
from services.policy_trainer.worker import checkpoint
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.call_queue import CallQueue
from services.policy_trainer.worker.calls.weights import export
from services.policy_trainer.worker.checkpoint import SavedState
from services.policy_trainer.worker.samples import PROX_KEY, stored_keys
from services.policy_trainer.worker.training_state import TrainingState
from services.scheduler.events import Configure, Fail
from shared.batch import Batch
from shared.rpc.errors import RpcError
from shared.rundir import checkpoint_steps
from shared.stages import PROXIMAL, ROLLOUT
from shared.topology.models import Head
from tests.keys import SAMPLED
from tests.unit.policy_trainer.training import accumulate, adamw, one_rank
from tests.unit.scheduler.bench import CANARY, STORE, Bench, plan
from tests.unit.tiny_models import make_model, ragged
from tests.weights_refs import weights_ref

LOSS = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("qwen3", head_dim=12, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def backend(folder: Path, dtype: str = "float32", head: Head = "language") -> TorchBackend:
    return one_rank(folder, dtype, max_tokens=4096, head=head)


def train(made: TorchBackend, step: int, lr: float = 1e-2, *, share: float = 1.0) -> None:
    """Take a training step. The shares of all data-parallel ranks must add up to 1."""
    ids, lengths, mask = ragged(step)
    flat: dict[str, Array] = {
        "token_ids": ids,
        "lengths": lengths,
        "loss_mask": mask,
        "versions": np.zeros(len(ids), np.int32),
        "rollout_logprobs": np.full(len(ids), -2.0, np.float32),
    }
    rng = np.random.default_rng(step)
    advantages = rng.normal(size=len(ids)).astype(np.float32)
    accumulate(made, LOSS, flat, advantages, np.full(len(ids), share / mask.sum(), np.float32))
    made.step(step, adamw(step, lr=lr, weight_decay=0.01))


def state(made: TorchBackend, step: int) -> SavedState:
    whole = made.state()
    return SavedState(step, whole.weights, whole.optimizer)


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("dtype", "head"), [("float32", "language"), ("bfloat16", "language"), ("bfloat16", "value")])
def test_training_from_a_checkpoint_ends_with_the_same_bits(
    folder: Path, tmp_path: Path, dtype: str, head: Head
) -> None:
    straight = backend(folder, dtype, head)
    for step in (1, 2, 3):
        train(straight, step)
    checkpoint.save(tmp_path / "c", state(straight, 3))
    resumed = backend(folder, dtype, head)
    loaded = checkpoint.load(tmp_path / "c", 3)
    assert ("score.weight" in loaded.weights) == (head == "value")
    resumed.load_state(TrainingState(loaded.weights, loaded.optimizer))
    for step in (4, 5, 6):
        train(straight, step)
        train(resumed, step)
    assert same_bits(straight.weights(), resumed.weights())
    assert same_bits(straight.state().optimizer, resumed.state().optimizer)


def test_a_restart_loads_the_model_directory_with_fresh_optimizer_state(folder: Path) -> None:
    made, fresh = backend(folder), backend(folder)
    train(made, 1)
    assert not same_bits(made.weights(), fresh.weights())
    made.restart()
    train(made, 1)
    train(fresh, 1)
    assert same_bits(made.weights(), fresh.weights())


def test_an_interrupted_save_leaves_the_previous_checkpoint_intact(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = backend(folder)
    train(made, 1)
    before = state(made, 1)
    checkpoint.save(tmp_path, before)
    train(made, 2)
    real = checkpoint._sync

    def interrupted_after(calls: int) -> Any:
        left = [calls]

        def sync(path: Path) -> None:
            real(path)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        return sync

    for calls in range(1, 5):  # The two tensor files, the manifest and the folder are synced before the rename.
        monkeypatch.setattr(checkpoint, "_sync", interrupted_after(calls))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, state(made, 2))
        assert checkpoint_steps(tmp_path) == [1]
        assert same_bits(checkpoint.load(tmp_path, 1).weights, before.weights)
    monkeypatch.setattr(checkpoint, "_sync", real)
    checkpoint.save(tmp_path, state(made, 2))
    assert sorted(path.name for path in tmp_path.iterdir() if "step" in path.name) == ["step-1", "step-2"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_with_a_one_line_error(folder: Path, tmp_path: Path, name: str) -> None:
    made = backend(folder)
    train(made, 1)
    path = checkpoint.save(tmp_path, state(made, 1)) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(RpcError) as caught:
        checkpoint.load(tmp_path, 1)
    assert caught.value.code == ErrorCode.CONFLICT
    assert "\n" not in str(caught.value)


def test_a_missing_checkpoint_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(RpcError, match="existing checkpoints: none") as caught:
        checkpoint.load(tmp_path, 4)
    assert caught.value.code == ErrorCode.MISSING


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    made = backend(folder)
    before = made.state().weights
    strange = dict(before)
    strange["model.norm.weight"] = torch.zeros(7)
    with pytest.raises(RpcError, match=r"model\.norm\.weight"):
        made.load_state(TrainingState(strange, {}))
    assert same_bits(made.weights(), before)


def test_a_non_finite_gradient_changes_neither_weights_nor_optimizer_state(folder: Path) -> None:
    made = backend(folder)
    train(made, 1)
    weights, optimizer = made.state().weights, made.state().optimizer
    next(iter(made.model.parameters())).grad = torch.full_like(next(iter(made.model.parameters())), torch.nan)
    with pytest.raises(RpcError, match="step 2 refused, weights untouched: gradient norm is nan"):
        made.step(2, adamw(2))
    assert same_bits(made.weights(), weights)
    assert same_bits(made.state().optimizer, optimizer)
    train(made, 2)


def test_small_updates_of_bfloat16_weights_add_up_in_the_masters(folder: Path) -> None:
    made = one_rank(folder, "bfloat16", max_tokens=4096)
    before = made.state().optimizer | {}
    train(made, 1, lr=1e-6)
    masters = {name: value for name, value in made.state().optimizer.items() if name.startswith("master/")}
    assert masters
    assert not before or all(not torch.equal(masters[name], before[name]) for name in masters)


def test_an_export_produces_the_same_logits_and_replaces_an_earlier_export(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    made = backend(folder)
    train(made, 1)
    for _ in range(2):
        export(made, folder, tmp_path / "export")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.tensor([[5, 9, 11]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, made.model(ids).logits)
    assert (tmp_path / "export" / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "model"]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "export").iterdir())
    shutil.rmtree(tmp_path / "export")


class Workers:
    """A worker group at `step`. It holds the snapshots in `held` (lineage, step); states in `damaged` cannot be loaded.
    A checkpoint is identified by its step, a snapshot by its lineage and step."""

    def __init__(
        self, step: int, *, damaged: Sequence[int | tuple[int, int]] = (), held: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.step = step
        self.damaged = damaged
        self.held = [HeldSnapshot(lineage=lineage, step=step) for lineage, step in held]
        self.calls: list[str] = []

    async def take_over(self, turn: int | None = None) -> WorkerState:
        return WorkerState(step=self.step, driver=1, order=0, dirty=False, snapshots=self.held)

    async def init_model(self) -> WorkerReady:
        return WorkerReady(step=0, parameters=1)

    async def load_checkpoint(self, step: int, *, snapshot_lineage: int = -1) -> WorkerReady:
        if (step if snapshot_lineage < 0 else (snapshot_lineage, step)) in self.damaged:
            raise RpcError(ErrorCode.CONFLICT, f"checkpoint {step}: damaged")
        self.calls.append(f"load {step}" if snapshot_lineage < 0 else f"load {snapshot_lineage}/{step}")
        return WorkerReady(step=step, parameters=1)

    async def publish_weights(self, lineage: int, step: int, *, store: str) -> WeightsRef:
        self.calls.append(f"publish {step}")
        return weights_ref(lineage, step, CANARY, nbytes=100, store=store)


class AskBench:
    """A client of a real scheduler state machine."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    async def call(self, request: Any, reply: type[Any], *, deadline_s: float) -> Any:
        answer = self.bench.ask(request)
        if isinstance(answer, Fail):
            raise RpcError(answer.code, answer.message)
        assert isinstance(answer, reply)
        return answer


def resumed(bench: Bench, workers: Workers, checkpoints: Sequence[int]) -> ResumePoint:
    client: Any = AskBench(bench)
    group: Any = workers
    return asyncio.run(resume(SchedulerCalls(client, 1), group, checkpoints, rate_of=lambda _: 1e-3))


def collecting_at_commit(announced: Sequence[int]) -> Bench:
    bench = Bench(config=Configure(5, 3, 2, True)).start()
    for step in (1, 2, 3):
        bench.step(step)
        if step in announced:
            bench.ask(CheckpointSaved(driver=1, step=step, kept=[step]))
    return bench


@pytest.mark.parametrize(
    ("announced", "on_disk", "damaged", "back_at"),
    [([1], [1], [], 1), ([1], [1, 2], [], 2), ([1, 2], [1, 2], [2], 1), ([1, 2], [1, 2], [1, 2], 0), ([], [], [], 0)],
)
def test_steps_that_cannot_be_replayed_are_trained_again_from_the_newest_checkpoint_that_loads(
    announced: list[int], on_disk: list[int], damaged: list[int], back_at: int
) -> None:
    bench = collecting_at_commit(announced)
    standing = resumed(bench, Workers(-1, damaged=damaged), on_disk)
    assert (standing.version, standing.committed, standing.lineage) == (back_at, back_at, 1)
    assert standing.checkpoint <= back_at
    bench.publish_again(back_at)
    bench.step(back_at + 1)  # The step was refused while the scheduler was at another step.


def three_steps(*, collect_at_commit: bool) -> Bench:
    bench = Bench(config=Configure(5, 3, 2, collect_at_commit)).start()
    for step in (1, 2, 3):
        bench.step(step)
    bench.ask(CheckpointSaved(driver=1, step=1, kept=[1]))
    return bench


@pytest.mark.parametrize("collect_at_commit", [False, True])
def test_a_snapshot_of_the_committed_step_continues_its_lineage(collect_at_commit: bool) -> None:
    """No task is lost, not even tasks that can no longer be replayed."""
    bench, workers = three_steps(collect_at_commit=collect_at_commit), Workers(-1, held=[(0, 3), (0, 2)])
    standing = resumed(bench, workers, [1])
    assert workers.calls == ["load 0/3"]
    assert (standing.version, standing.committed, standing.lineage) == (3, 3, 0)


@pytest.mark.parametrize(
    ("held", "damaged", "calls"),
    [
        ([(0, 2), (0, 3)], [(0, 3)], ["load 0/2"]),  # An earlier step is loaded, and the later ones are replayed.
        ([(0, 4), (0, 2)], [], ["load 0/2"]),  # Step 4 was trained but never committed.
        ([(0, 2), (0, 3)], [(0, 2), (0, 3)], ["load 1"]),
        ([(1, 3), (1, 2)], [], ["load 1"]),  # These snapshots belong to another lineage.
        ([], [], ["load 1"]),
    ],
)
def test_without_a_snapshot_of_the_committed_step_an_earlier_state_is_loaded_under_a_new_lineage(
    held: list[tuple[int, int]], damaged: list[tuple[int, int]], calls: list[str]
) -> None:
    bench, workers = three_steps(collect_at_commit=False), Workers(-1, held=held, damaged=damaged)
    standing = resumed(bench, workers, [1])
    assert workers.calls == calls
    assert (standing.version, standing.committed, standing.lineage) == (int(calls[0][-1]), 3, 1)


def test_a_run_that_went_back_to_a_checkpoint_uses_no_snapshot_of_the_steps_rolled_back() -> None:
    bench = three_steps(collect_at_commit=True)
    assert resumed(bench, Workers(-1), [1]).committed == 1
    bench.publish_again(1)
    for step in (2, 3):
        bench.step(step)
    workers = Workers(-1, held=[(0, 3), (0, 2)])  # These snapshots are from the first time the steps were trained.
    assert resumed(bench, workers, [1]).committed == 1
    assert workers.calls == ["load 1"]


def test_workers_at_the_committed_step_continue_and_save_the_checkpoint_that_was_ordered() -> None:
    config = Configure(9, 3, 2, False)
    bench = Bench(plan(task_bytes=50, weight_bytes=100), config).start(limit_bytes=300 + 8 * 50 + 500)
    assert [bench.step(step).checkpoint_now for step in (1, 2, 3)] == [False, False, True]
    standing = resumed(bench, Workers(3), [])
    assert (standing.version, standing.committed, standing.checkpoint_now) == (3, 3, True)


def test_the_lost_version_of_a_refreshed_reference_is_loaded_from_its_checkpoint() -> None:
    bench = Bench(plan(reference_every=2), Configure(9, 3, 2, False)).start()
    for step in (1, 2, 3):
        bench.step(step)
    bench.ask(CheckpointSaved(driver=1, step=3, kept=[2, 3]))
    bench.machine.run.history.versions.forget(STORE)
    workers = Workers(-1)
    standing = resumed(bench, workers, [2, 3])
    assert workers.calls == ["load 3", "load 2", "publish 2", "load 3"]
    assert standing.version == 3
    assert bench.machine.run.history.versions.at_step(2) == (1, 2)


def batch_of(parts: list[BatchPart]) -> Batch:
    return Batch(BatchMeta(tasks=[], parts=parts))


def test_each_forward_pass_has_its_own_key_and_the_newest_is_read() -> None:
    parts = [BatchPart(ROLLOUT.name, list(SAMPLED))]
    keys = ["lengths", PROX_KEY]
    with pytest.raises(RpcError, match="run forward first"):
        stored_keys(batch_of(parts), keys)
    parts += [
        BatchPart(PROXIMAL.name, [f"{PROX_KEY}{REVISION}{driver:x}-{order}"]) for driver, order in ((10, 3), (11, 1))
    ]
    assert stored_keys(batch_of(parts), keys) == {
        "lengths": "lengths",
        PROX_KEY: f"{PROX_KEY}{REVISION}b-1",
    }
    assert stored_keys(batch_of(parts), ["lengths"]) == {"lengths": "lengths"}


class FakeCall:
    """A call that records its answer. The queue uses no other part of a call."""

    def __init__(self) -> None:
        self.error: RpcError | None = None

    def fail(self, error: RpcError) -> None:
        self.error = error


def step_call(driver: int, order: int) -> OptimStep:
    return OptimStep(driver=driver, order=order, step=1, last=True, optimizer=adamw())


def refused(lane: CallQueue, driver: int, order: int) -> str:
    with pytest.raises(RpcError) as caught:
        lane.add(step_call(driver, order), FakeCall())  # type: ignore[arg-type]
    return caught.value.code


async def _orders(lane: CallQueue, count: int) -> list[int]:
    return [(await lane.next())[0].order for _ in range(count)]


def test_calls_run_in_the_order_in_which_they_were_issued_even_if_they_arrive_in_another() -> None:
    lane = CallQueue()
    lane.take_over(7)
    for order in (3, 1, 2):
        lane.add(step_call(7, order), FakeCall())  # type: ignore[arg-type]
    assert asyncio.run(_orders(lane, 3)) == [1, 2, 3]
    assert refused(lane, 7, 2) == ErrorCode.CONFLICT


def test_a_worker_refuses_an_older_driver_and_an_unknown_one() -> None:
    lane = CallQueue()
    assert refused(lane, 7, 1) == ErrorCode.LOST
    lane.take_over(7)
    waiting = FakeCall()
    lane.add(step_call(7, 1), waiting)  # type: ignore[arg-type]
    lane.take_over(8)
    assert waiting.error is not None
    assert refused(lane, 7, 2) == ErrorCode.CONFLICT
    with pytest.raises(RpcError, match="was replaced"):
        lane.take_over(7)


def test_a_late_takeover_does_not_displace_the_newer_driver() -> None:
    lane = CallQueue()
    lane.take_over(8, turn=2)
    with pytest.raises(RpcError, match="driver 7 was replaced by 8"):
        lane.take_over(7, turn=1)
    lane.take_over(8, turn=2)
    lane.add(step_call(8, 1), FakeCall())  # type: ignore[arg-type]
    lane.take_over(9, turn=3)
    assert refused(lane, 8, 2) == ErrorCode.CONFLICT


def test_no_call_runs_after_a_failed_call_until_the_driver_takes_over_again() -> None:
    lane = CallQueue()
    lane.take_over(7)
    waiting = FakeCall()
    lane.add(step_call(7, 2), waiting)  # type: ignore[arg-type]
    lane.fail("no gradient", epoch=lane.epoch)
    assert waiting.error is not None
    assert refused(lane, 7, 3) == ErrorCode.LOST
    lane.take_over(7)
    lane.fail("of an earlier epoch", epoch=lane.epoch - 1)
    lane.add(step_call(7, 4), FakeCall())  # type: ignore[arg-type]

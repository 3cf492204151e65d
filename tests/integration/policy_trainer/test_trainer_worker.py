"""Runs a real store and a real worker process. The tests call the worker as the driver does, and kill it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    BatchMeta,
    BatchPart,
    Clear,
    ErrorCode,
    LossSpec,
    Ping,
    Pong,
    PutTask,
    TaskHandle,
    WeightsRef,
)
from proto.tensors import Array
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from shared.batch import Batch
from shared.dataplane.client import DataClient, TaskShards
from shared.ranks.layout import Layout
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name
from shared.stages import ROLLOUT
from tests.integration.forks import Fork, forked
from tests.integration.store_process import REPOSITORY, STORE, StoreProcess
from tests.integration.stream_line import Tap, TcpStoreProcess
from tests.keys import SAMPLED
from tests.unit.policy_trainer.training import adamw

WORKER = "policy-trainer-worker/0"
TASKS, GROUP, PROMPT = 4, 3, 5
FETCH_S, PATIENCE_S = 0.25, 4.0
ROLLOUT_ANCHOR = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0)
PROXIMAL_ANCHOR = LossSpec(
    name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="proximal", temperature=1.0, tis_cap=2.0
)


def made_run(folder: Path) -> RunDir:
    """Make a run directory for a store and one worker of the tiny model."""
    model = REPOSITORY / "launch" / "topologies" / "models" / "tiny-qwen3"
    made = RunDir.create(folder / "run")
    made.topology.write_text(
        "run: {name: worker-test, steps: 9}\n"
        f"policy: {{model: {model}, dtype: float32, "
        "passes: {sequences: packed, head: blocks, decoder: written-out}}\n"
        'data: {train: {source: "builtin:addition"}}\n'
        'reward: {function: "builtin:exact_match"}\n'
        "sampling: {max_new_tokens: 8}\n"
        f"algorithm: {{tasks_per_step: {TASKS}, group_size: {GROUP}}}\n"
        "optimizer: {name: adamw, lr: 1.0e-3}\n"
        "services: {batch-store: {memory: 256MiB}}\n"
    )
    return made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = made_run(tmp_path)
    yield made
    made.remove_volatile()


START = ("-m", "services.policy_trainer.worker")


def hurried(fetch_s: float) -> tuple[str, str]:
    """Return the program and arguments of a worker with a different time limit for a single fetch attempt."""
    main = f"runpy.run_module({START[1]!r}, run_name='__main__', alter_sys=True)"
    return "-c", f"import runpy; from {START[1]} import batch_reader; batch_reader.FETCH_S = {fetch_s}; {main}"


class WorkerProcess:
    """The process of the run's worker (instance 0), which a test starts and kills."""

    def __init__(self, run: RunDir, start: Sequence[str], words: Sequence[str] = ()) -> None:
        self._command = [*start, "--run", str(run.path), *words]
        self.process: Fork | subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        if tuple(self._command[:2]) == START:
            self.process = forked(*self._command[1:])
        else:
            self.process = subprocess.Popen(
                [sys.executable, *self._command],
                cwd=REPOSITORY,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def processes(run: RunDir) -> Iterator[WorkerProcess]:
    with store_and_worker(run) as (_, worker):
        yield worker


@contextmanager
def store_and_worker(
    run: RunDir, store: StoreProcess | None = None, start: Sequence[str] = START, words: Sequence[str] = ()
) -> Iterator[tuple[StoreProcess, WorkerProcess]]:
    store = store or StoreProcess(run)
    store.start()
    worker = WorkerProcess(run, start, words)
    try:
        yield store, worker
    finally:
        worker.kill()
        store.kill()


class Bench:
    """Test bench with the dispatches of drivers, and a data client that acts as the rollout."""

    def __init__(self, run: RunDir, context: Any, worker: str) -> None:
        self._run = run
        self._worker = worker
        self._context = context
        self._clients: dict[str, Client] = {}
        self.data = DataClient(lambda service, instance: self.client(f"{service}/{instance}"))

    def client(self, name: str) -> Client:
        if name not in self._clients:
            endpoint = self._run.endpoint(*parse_service_name(name))
            self._clients[name] = Client(self._context, endpoint, name, new_incarnation())
        return self._clients[name]

    async def driver(self, incarnation: int) -> WorkerDispatch:
        """Return the dispatch of a driver that has taken the worker over."""
        workers = WorkerDispatch([self.client(self._worker)], Layout(1), incarnation)
        await workers.take_over()
        return workers

    async def batch(self, step: int, *, broken_task: int = -1, short_task: int = -1, fence: int = 1) -> Batch:
        """Put the shards of a synthetic batch into the store. Return the batch with the advantages and weights of its
        samples.

        The task `broken_task` has a log-prob that is NaN, and `short_task` lacks one version.
        """
        rng = np.random.default_rng(step)
        handles, tasks = [], []
        for index in range(TASKS):
            prompt = rng.integers(4, 14, size=PROMPT)
            answers = [rng.integers(4, 14, size=rng.integers(1, 5)) for _ in range(GROUP)]
            ids = np.concatenate([np.concatenate([prompt, answer]) for answer in answers]).astype(np.int32)
            mask = np.concatenate([[0] * PROMPT + [1] * len(answer) for answer in answers]).astype(np.uint8)
            shards: dict[str, Array] = {
                "token_ids": ids,
                "lengths": np.array([PROMPT + len(answer) for answer in answers], np.int32),
                "sample_index": np.arange(GROUP, dtype=np.int32),
                "loss_mask": mask,
                "rollout_logprobs": (rng.normal(-2, 0.1, len(ids)) * mask).astype(np.float32),
                "versions": np.where(mask, step - 1, -1).astype(np.int32),
            }
            if index == broken_task:
                shards["rollout_logprobs"][PROMPT] = np.nan
            if index == short_task:
                shards["versions"] = shards["versions"][:-1]
            task_id = f"train/{step}/{index}"
            tasks.append(TaskShards(task_id, fence, {key: shards[key] for key in SAMPLED}))
            handles.append(TaskHandle(task_id, fence, GROUP, len(ids), 0, [0]))
        await self.data.put(tasks, store=STORE, deadline_s=20)
        meta = BatchMeta(tasks=handles, parts=[BatchPart(ROLLOUT.name, list(SAMPLED))], stores=[STORE])
        advantages = rng.normal(size=TASKS * GROUP).astype(np.float32)
        weights = np.full(TASKS * GROUP, 0.02, np.float32)
        return Batch(meta, self.data).with_scalars({"advantages": advantages, "weights": weights})

    async def train(self, workers: WorkerDispatch, step: int, loss: LossSpec = ROLLOUT_ANCHOR) -> dict[str, float]:
        batch = await self.batch(step)
        if loss.anchor == "proximal":
            logprobs = Batch((await workers.forward(batch, ["prox_logprobs"], 1.0)).meta)
            batch = batch.union(logprobs)
        gradient = workers.forward_backward(batch, loss)
        done, _ = await asyncio.gather(gradient, workers.optim_step(adamw()))
        return done.sums

    async def weights(self, ref: WeightsRef) -> dict[str, Array]:
        """Fetch a version as an engine does."""
        handle = TaskHandle(task_id=ref.task_id, fence=ref.fence, nbytes=ref.nbytes, stores=[0])
        (found,) = await self.data.fetch(BatchMeta(tasks=[handle], stores=[ref.store]), (), deadline_s=20)
        return found

    async def weight_bytes(self, ref: WeightsRef) -> dict[str, bytes]:
        return {name: array.tobytes() for name, array in (await self.weights(ref)).items()}


@asynccontextmanager
async def bench_of(run: RunDir, worker: str = WORKER) -> AsyncIterator[Bench]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    bench = Bench(run, context, worker)
    try:
        for name in (STORE, worker):
            await bench.client(name).call(Ping(), Pong, deadline_s=60)
        yield bench
    finally:
        bench.data.close()
        for client in bench._clients.values():
            client.close()
        await asyncio.to_thread(context.term)


def test_a_killed_worker_reloads_and_ends_with_the_same_bits(run: RunDir) -> None:
    async def scenario(worker: WorkerProcess) -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            assert (await workers.init_model()).step == 0
            await bench.train(workers, 1)
            await workers.save_checkpoint(1)
            await bench.train(workers, 2)
            undisturbed = await bench.weight_bytes(await workers.publish_weights(0, 2, store=STORE, fence=1))

            worker.kill()
            worker.start()
            with pytest.raises(WorkersLost):
                await bench.train(workers, 3)
            state = await workers.take_over()
            assert (state.step, state.dirty) == (-1, False)
            assert (await workers.load_checkpoint(1)).step == 1
            await bench.train(workers, 2)
            again = await bench.weight_bytes(await workers.publish_weights(1, 2, store=STORE, fence=1))
            assert again == undisturbed

    with processes(run) as worker:
        asyncio.run(scenario(worker))


def test_published_weights_match_their_canary_and_a_new_driver_takes_over(run: RunDir, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench_of(run) as bench:
            old = await bench.driver(5)
            await old.init_model()
            base = await old.publish_weights(0, 0, store=STORE, fence=1)
            sums = await bench.train(old, 1, PROXIMAL_ANCHOR)
            assert sums["clipped"] == 0  # At the first update the proximal policy is the current one.
            assert sums["tokens"] > 0
            batch = await bench.batch(9)
            first = Batch((await old.forward(batch, ["prox_logprobs"], 1.0)).meta)
            (key,) = first.keys
            mine = await bench.data.fetch(first.meta, [key], deadline_s=20)
            ref = await old.publish_weights(0, 1, store=STORE)
            await bench.train(old, 2)
            # The second pass computes different values under the same fences.
            again = Batch((await old.forward(batch, ["prox_logprobs"], 1.0)).meta)
            (other,) = again.keys
            theirs = await bench.data.fetch(again.meta, [other], deadline_s=20)
            assert all((one[key] != two[other]).any() for one, two in zip(mine, theirs, strict=True))
            with pytest.raises(RpcError, match="prox_logprobs:5-"):  # Earlier values never replace later ones.
                await bench.data.fetch(first.meta, [key], deadline_s=20)
            assert ref.task_id == "weights/0/1"
            assert np.abs(ref.canary.logprobs - base.canary.logprobs).max() > ref.canary.tolerance
            assert np.abs(ref.drill.logprobs - base.canary.logprobs).max() > ref.drill.tolerance
            assert np.array_equal(ref.drill.logprobs, base.drill.logprobs)
            await _check_canary(bench, ref)

            new = await bench.driver(6)
            with pytest.raises(RpcError) as caught:
                await bench.train(old, 3)
            assert caught.value.code == ErrorCode.CONFLICT
            with pytest.raises(RpcError, match="was replaced"):
                await old.take_over()
            await bench.train(new, 3)
            with pytest.raises(RpcError, match="the worker is at step 3"):
                await new.publish_weights(0, 1, store=STORE, fence=2)
            with pytest.raises(WorkersLost, match="an earlier call failed"):
                await new.publish_weights(0, 3, store=STORE)
            state = await new.take_over()
            assert (state.step, state.dirty) == (3, False)
            await new.save_hf_model(tmp_path / "export")
            assert (tmp_path / "export" / "tokenizer.json").exists()

    with processes(run):
        asyncio.run(scenario())


async def _check_canary(bench: Bench, ref: WeightsRef) -> None:
    """Load the published bytes into a separate model and compare its log-probs with the trainer's canary."""
    import torch

    from shared.model.load import load_model, named_weights
    from shared.model.logprobs import token_logprobs
    from shared.tensors_torch import to_torch

    found = await bench.weights(ref)
    model = load_model(REPOSITORY / "launch" / "topologies" / "models" / "tiny-qwen3", "float32")
    with torch.no_grad():
        for name, tensor in named_weights(model).items():
            tensor.copy_(to_torch(found[name]))
        length = len(ref.canary.token_ids)
        mask = np.array([0] + [1] * (length - 1))
        logprobs, _ = token_logprobs(model, ref.canary.token_ids, np.array([length]), mask, 1.0, 4096)
    assert np.abs(logprobs.numpy()[1:] - ref.canary.logprobs).max() <= ref.canary.tolerance


def test_missing_shards_fail_the_step_and_leave_the_weights_unchanged(run: RunDir) -> None:
    async def scenario() -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            before = await bench.weight_bytes(await workers.publish_weights(0, 0, store=STORE, fence=1))
            batch = await bench.batch(1)
            gone = TaskHandle("train/9/9", 1, GROUP, 24, 0, [0])
            broken = msgspec.structs.replace(batch.meta, tasks=[gone, *batch.tasks[1:]])
            gradient = workers.forward_backward(Batch(broken), ROLLOUT_ANCHOR)
            results = await asyncio.gather(gradient, workers.optim_step(adamw()), return_exceptions=True)
            assert all(isinstance(result, WorkersLost) for result in results)
            assert "train/9/9" in str(results[0])
            state = await workers.take_over()
            assert (state.step, state.dirty) == (0, False)
            after = await bench.weight_bytes(await workers.publish_weights(0, 0, store=STORE, fence=2))
            assert after == before

    with processes(run):
        asyncio.run(scenario())


@pytest.mark.long
def test_waiting_for_an_absent_store_ends_at_a_takeover_at_the_time_limit_or_when_the_store_returns(
    run: RunDir,
) -> None:
    run.topology.write_text(
        run.topology.read_text().replace(
            "services: {", f"services: {{policy-trainer: {{collective_s: {2 * PATIENCE_S}}}, "
        )
    )

    async def scenario(send: Callable[[int], None]) -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            batch = await bench.batch(1)
            send(signal.SIGSTOP)
            gradient = workers.forward_backward(batch, ROLLOUT_ANCHOR)
            await asyncio.sleep(6 * FETCH_S)
            send(signal.SIGCONT)
            sums = (await gradient).sums

            send(signal.SIGSTOP)
            gradient = workers.forward_backward(batch, ROLLOUT_ANCHOR)
            await asyncio.sleep(2 * FETCH_S)
            began = time.monotonic()
            workers = await bench.driver(6)
            assert time.monotonic() - began < PATIENCE_S / 2
            with pytest.raises(RpcError):
                await gradient

            results = await asyncio.gather(
                workers.forward_backward(batch, ROLLOUT_ANCHOR), workers.optim_step(adamw()), return_exceptions=True
            )
            assert all(isinstance(result, WorkersLost) for result in results)
            send(signal.SIGCONT)
            state = await workers.take_over()
            assert (state.step, state.dirty) == (0, False)
            assert (await workers.forward_backward(batch, ROLLOUT_ANCHOR)).sums == sums

    with store_and_worker(run, start=hurried(FETCH_S)) as (store, _):
        assert store.process is not None
        asyncio.run(scenario(store.process.send_signal))


def test_concurrent_calls_run_in_order_and_parts_of_a_loss_add_up(run: RunDir) -> None:
    """The batch is streamed without encryption, as the topology specifies."""

    async def scenario() -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            batch = await bench.batch(1)

            def gradient(share: float) -> Any:
                weights = (batch.scalars["weights"] * np.float32(share)).astype(np.float32)
                return workers.forward_backward(
                    batch.with_scalars({**batch.scalars, "weights": weights}), ROLLOUT_ANCHOR
                )

            *_, whole = await asyncio.gather(gradient(1.0), workers.optim_step(adamw()))
            first = await bench.weight_bytes(await workers.publish_weights(0, 1, store=STORE, fence=1))
            await workers.init_model()
            # All five calls are sent before the first is answered.
            *_, parts, ref = await asyncio.gather(
                gradient(0.25),
                gradient(0.5),
                gradient(0.25),
                workers.optim_step(adamw()),
                workers.publish_weights(0, 1, store=STORE, fence=2),
            )
            assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
            second = await bench.weight_bytes(ref)
            moved = [
                np.abs(np.frombuffer(first[name], np.float32) - np.frombuffer(second[name], np.float32)).max()
                for name in first
            ]
            assert max(moved) <= 1e-5

    store = TcpStoreProcess(run, plain=True)
    tap = Tap(f"tcp://127.0.0.1:{store.port}")
    store.advertised = tap.endpoint
    try:
        with store_and_worker(run, store, ("-m", "tests.integration.far_reader"), ["policy_trainer.worker"]):
            asyncio.run(scenario())
    finally:
        tap.close()
    assert tap.clear_bytes > 0 == tap.sealed_bytes


def test_a_version_that_was_collected_is_put_again_before_its_weights_change(run: RunDir) -> None:
    """The worker retries the publication itself; a retry as a new call would run after the update."""

    async def scenario() -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            first = await bench.weight_bytes(await workers.publish_weights(0, 0, store=STORE))
            recoveries = 40  # each recovery may have put this version again, and the store has since collected it
            await bench.client(STORE).call(Clear(tasks=[PutTask("weights/0/0", recoveries)]), Ack, deadline_s=20)
            batch = await bench.batch(1)
            ref, _, update = await asyncio.gather(
                workers.publish_weights(0, 0, store=STORE),
                workers.forward_backward(batch, ROLLOUT_ANCHOR),
                workers.optim_step(adamw()),
            )
            assert ref.fence == recoveries + 1
            assert update.grad_norm > 0
            assert await bench.weight_bytes(ref) == first

    with processes(run):
        asyncio.run(scenario())


def test_values_that_are_not_finite_are_refused_with_their_task_and_leave_the_weights_unchanged(run: RunDir) -> None:
    async def scenario() -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            before = await bench.weight_bytes(await workers.publish_weights(0, 0, store=STORE))

            async def refused(batch: Batch, step: int = 0) -> RpcError:
                calls = (workers.forward_backward(batch, ROLLOUT_ANCHOR), workers.optim_step(adamw()))
                results = await asyncio.gather(*calls, return_exceptions=True)
                errors = [each for each in results if isinstance(each, RpcError)]
                assert errors
                assert errors[0].code == ErrorCode.BAD_DATA
                await workers.go_on(step)
                return errors[0]

            # In this batch, an engine's log-prob is not finite.
            error = await refused(await bench.batch(1, broken_task=2))
            assert error.names == ["train/1/2"]
            assert "rollout_logprobs has values that are not finite: 1," in str(error)
            # In this batch, every shard is valid, but a gradient is not finite.
            batch = await bench.batch(2)
            huge = np.full(TASKS * GROUP, 3e38, np.float32)
            error = await refused(batch.with_scalars({**batch.scalars, "weights": huge}))
            assert error.names == list(batch.task_ids)
            assert "gradient norm is" in str(error)
            # In this batch, a shard's shape differs from its lengths.
            error = await refused(await bench.batch(3, short_task=1))
            assert error.names == ["train/3/1"]
            assert "versions has shape" in str(error)
            await workers.skip_update()  # The skipped update still counts as step 1.
            after = await bench.weight_bytes(await workers.publish_weights(0, 1, store=STORE))
            assert after == before
            workers.begin_step(updates=2)  # The second of two updates is skipped; the first is kept.
            batch = await bench.batch(4)
            await asyncio.gather(workers.forward_backward(batch, ROLLOUT_ANCHOR), workers.optim_step(adamw()))
            await refused(await bench.batch(5, broken_task=0), step=1)
            workers.begin_step(updates=1)
            await workers.skip_update()
            moved = await bench.weight_bytes(await workers.publish_weights(0, 2, store=STORE))
            assert moved != before
            assert (await bench.train(workers, 6))["tokens"] > 0  # The next batch is trained on.
            state = await workers.take_over()
            assert (state.step, state.dirty) == (3, False)

    with processes(run):
        asyncio.run(scenario())

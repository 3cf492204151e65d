"""Makes the samples of a lease with a workflow: one coroutine a sample, all at once. A sample that raises, hangs or
returns nonsense is lost alone; must never let a workflow hold a lease past its samples' time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from proto.tensors import Array
from services.rollout.engine import Engine, GenerationCancelled
from services.rollout.prompts import PromptBuilder
from services.rollout.rewards.score import WORKFLOW, Score, failed, total
from services.rollout.tasks import PreparedTasks, ReadyTask
from services.rollout.trajectory import Rolled, Tokens
from services.rollout.workflows.batching import CallBatcher
from services.rollout.workflows.calls import OnText, SampleCalls
from services.rollout.workflows.conversation import Conversation
from services.rollout.workflows.load import Workflow
from services.rollout.workflows.user_thread import UserContext, UserLLM, UserThread
from shared.lease import Lease, LeaseLost
from shared.sample import Sample
from shared.workflow import Trajectory, WorkflowError

WATCH_S = 0.25
GRACE_S = 1.0  # for what a workflow does when it is cancelled
STALL_S = 10.0


class Endpoint(Protocol):
    """Where agents of their own call the policy: `services.rollout.openai_endpoint`."""

    def open(self, calls: SampleCalls) -> str:
        """The base URL of one sample's calls, the same for each call. From any thread."""

    def close(self, calls: SampleCalls) -> None: ...


@dataclass(frozen=True)
class Made:
    """One sample of a workflow: what was sampled, for whom (`sample`), and its score if it has one already."""

    rolled: Rolled
    sample: Sample
    score: Score | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Running:
    """One sample under way."""

    task: ReadyTask
    number: int
    made: Made | None = None

    @property
    def name(self) -> str:
        return f"{self.task.handle.task_id}/{self.number}"


class WorkflowRunner:
    """Belongs to the service's loop; users' coroutines run on a `UserThread`."""

    def __init__(
        self,
        name: str,
        workflow: Workflow,
        *,
        engine: Engine,
        prompts: PromptBuilder,
        endpoint: Endpoint,
        on_text: OnText,
        timeout_s: float,
        max_tokens: int,
    ) -> None:
        """`name`: the function's import path, for messages."""
        self._name = name
        self._workflow = workflow
        self._engine = engine
        self._prompts = prompts
        self._endpoint = endpoint
        self._on_text = on_text
        self._timeout_s = timeout_s
        self._max_tokens = max_tokens
        self._thread = UserThread()
        self.generate_s = 0.0
        """Seconds that the engine has worked for workflows, in all."""

    async def run(self, lease: Lease, tasks: PreparedTasks, version: int) -> list[list[Made]]:
        """Every sample of the lease's tasks, in the shape [tasks][samples]. Raises LeaseLost."""
        every = [[_Running(task, number) for number in range(tasks.sampling.samples)] for task in tasks.ready]
        batcher = CallBatcher(self._engine, lease.cancel, self._generated)
        pump = asyncio.create_task(batcher.run())
        try:
            waiting = [running for group in every for running in group]
            while waiting:
                await self._attempt(lease, tasks, version, batcher, pump, waiting)
                waiting = [running for running in waiting if running.made is None]
        except GenerationCancelled as error:
            raise LeaseLost(str(error)) from None
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        return [[running.made for running in group if running.made is not None] for group in every]

    def close(self) -> None:
        """End the users' thread, if it can be ended."""
        self._thread.stop()

    def _generated(self, seconds: float) -> None:
        self.generate_s += seconds

    async def _attempt(
        self,
        lease: Lease,
        tasks: PreparedTasks,
        version: int,
        batcher: CallBatcher,
        pump: asyncio.Task[None],
        waiting: Sequence[_Running],
    ) -> None:
        """Run `waiting` on the thread until all have ended, or one has stuck it: then that one has failed."""
        ends = {asyncio.create_task(self._one(running, tasks, version, batcher)): running for running in waiting}
        everything = asyncio.gather(*ends)
        either: set[asyncio.Future[Any]] = {everything, pump}
        try:
            while not everything.done():
                await asyncio.wait(either, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
                lease.check()
                lease.advance()  # every wait of a sample is bounded by its time
                if self._thread.stalled_s() > min(STALL_S, self._timeout_s):
                    self._leave_thread([running for task, running in ends.items() if not task.done()])
                    break
            for task, running in ends.items():
                if task.done():
                    running.made = task.result()
        finally:
            everything.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    def _leave_thread(self, left: Sequence[_Running]) -> None:
        """A coroutine has not let go of the thread: it fails, the others are started again on another thread."""
        culprit = self._thread.running()
        self._thread.stop()
        self._thread = UserThread()
        why = (
            f"kept the thread of all workflows for {min(STALL_S, self._timeout_s):g} s; "
            "await ctx.call(tool, ...) instead of calling it"
        )
        found = [running for running in left if running.name == culprit] or list(left)
        for running in found:
            running.made = self._lost(running, why)

    async def _one(self, running: _Running, tasks: PreparedTasks, version: int, batcher: CallBatcher) -> Made:
        sampling = tasks.sampling
        conversation = Conversation(
            self._prompts,
            context_tokens=self._engine.context_tokens,
            max_tokens=self._max_tokens,
            max_new_tokens=sampling.max_new_tokens,
        )
        calls = SampleCalls(
            running.name,
            conversation,
            prompts=self._prompts,
            batcher=batcher,
            sampling=sampling,
            version=version,
            on_text=self._on_text,
        )
        loop = asyncio.get_running_loop()
        context = UserContext(
            running.task.handle.task_id, running.number, self._timeout_s, lambda: self._endpoint.open(calls)
        )
        work = self._thread.start(self._bounded(running.task, UserLLM(calls, loop), context), running.name)
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                trajectory = await asyncio.wrap_future(work)
            made = _made(running.task, trajectory, conversation, context.state, self._max_tokens)
        except TimeoutError:
            return self._lost(running, f"no trajectory within {self._timeout_s:g} s (workflow.timeout_s)")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever a user's code raises
            return self._lost(running, f"raised {type(error).__name__}: {error}")
        finally:
            self._thread.give_up(work)
            calls.closed = f"the sample {running.name} has ended"
            self._endpoint.close(calls)
        return made

    async def _bounded(self, task: ReadyTask, llm: UserLLM, context: UserContext) -> Any:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._workflow(dict(task.row), llm, context)
        except TimeoutError as error:
            if deadline.expired():
                raise
            raise RuntimeError(f"TimeoutError: {error}") from None  # a tool's, which the workflow let through

    def _lost(self, running: _Running, why: str) -> Made:
        sample = Sample(running.task.handle.task_id, running.task.row, [], "", [], "")
        return Made(Rolled([], truncated=False), sample, failed(f"{self._name} sample {running.number}", WORKFLOW, why))


def _made(task: ReadyTask, trajectory: Any, conversation: Conversation, state: dict[str, Any], max_tokens: int) -> Made:
    """Raises WorkflowError for what is no trajectory to train on."""
    if not isinstance(trajectory, Trajectory):
        raise WorkflowError(f"returned {type(trajectory).__name__}, must return a Trajectory (llm.trajectory())")
    sequences = [
        tokens_of(each.token_ids, each.loss_mask, each.logprobs, each.versions) for each in trajectory.sequences
    ]
    if not any(each.loss_mask.any() for each in sequences):
        raise WorkflowError("returned a trajectory without a sampled token")
    tokens = sum(len(each.token_ids) for each in sequences)
    if tokens > max_tokens:
        raise WorkflowError(f"returned a trajectory of {tokens} tokens, workflow.max_tokens allows {max_tokens}")
    score = None if trajectory.reward is None else total(trajectory.reward)
    sampled = [int(token) for each in sequences for token in each.token_ids[each.loss_mask == 1]]
    sample = Sample(
        task_id=task.handle.task_id,
        row=task.row,
        messages=list(conversation.last_messages),
        completion=conversation.last_text,
        token_ids=sampled,
        finish_reason=conversation.finish_reason,
        turns=conversation.turns,
        state=dict(state),
    )
    metrics = {str(name): float(value) for name, value in trajectory.metrics.items() if math.isfinite(float(value))}
    return Made(Rolled(sequences, truncated=conversation.finish_reason == "length"), sample, score, metrics)


def tokens_of(
    token_ids: Sequence[int], loss_mask: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> Tokens:
    """A user's sequence as arrays. Raises WorkflowError for lists that do not fit together."""
    try:
        made = Tokens(
            np.array(token_ids, np.int32),
            np.array(loss_mask, np.uint8),
            np.array(logprobs, np.float32),
            np.array(versions, np.int32),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise WorkflowError(f"a sequence's lists must hold numbers ({error})") from None
    sizes = {each.shape for each in (made.token_ids, made.loss_mask, made.logprobs, made.versions)}
    if len(sizes) != 1 or not len(made.token_ids) or made.token_ids.ndim != 1:
        raise WorkflowError(f"a sequence's lists have the shapes {sorted(sizes)}, must be equally long and not empty")
    sampled: Array = made.loss_mask == 1
    if made.loss_mask.max() > 1 or (made.versions[sampled] < 0).any() or not np.isfinite(made.logprobs).all():
        raise WorkflowError("a sequence trains on tokens that no policy version sampled, or has no log-probs for them")
    return made

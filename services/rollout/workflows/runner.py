"""Makes all samples of a lease concurrently, with a workflow.

A sample that raises, hangs or returns an invalid trajectory does not affect other samples. A workflow cannot keep a
lease beyond the timeout of its samples.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from proto.messages import Trouble, TroubleKind
from proto.tensors import Array
from services.rollout.engine import Engine, FinishReason, GenerationCancelled
from services.rollout.rewards.score import WORKFLOW, Score, failed
from services.rollout.sampling.prompts import PromptBuilder
from services.rollout.sampling.tasks import OnText, PreparedTasks, ReadyTask
from services.rollout.sampling.trajectory import BlockVersions, Made, SequenceTokens
from services.rollout.user_code import frames
from services.rollout.user_code.frames import Failed, Returned
from services.rollout.user_code.host import UserHost
from services.rollout.user_code.pool import Failing, UserPool
from services.rollout.workflows.batching import CallBatcher
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.conversation import Conversation
from services.rollout.workflows.openai_endpoint import OpenAIEndpoint
from shared.lease import Lease, LeaseLost
from shared.sample import Sample
from shared.workflow import ContextFull, Sequence, Turn, WorkflowError

WATCH_S = 0.25
LEAST_LOGPROB, MOST_LOGPROB = -1000.0, 1e-4
"""Limits of a sampled token's log-prob, in nats. The upper one leaves room for rounding."""


class WorkflowRunner:
    """Runs workflows. It is used only on the service's loop; user coroutines run in the processes of a `UserPool`."""

    def __init__(
        self,
        name: str,
        pool: UserPool,
        endpoint: OpenAIEndpoint,
        *,
        engine: Engine,
        prompts: PromptBuilder,
        on_text: OnText,
        max_tokens: int,
    ) -> None:
        """`name` is the function's import path, for messages. External agents call the policy at `endpoint`."""
        self.name = name
        self._pool = pool
        self._endpoint = endpoint
        self._engine = engine
        self._prompts = prompts
        self._on_text = on_text
        self._max_tokens = max_tokens
        self.generate_s = 0.0
        """Total seconds that the engine has worked for workflows."""
        self._failing = Failing(TroubleKind.WORKFLOWS, "workflows")

    @property
    def lost_processes(self) -> int:
        """Number of processes that ended while they had samples."""
        return self._pool.lost

    def troubles(self) -> list[Trouble]:
        """Return the troubles to report in the heartbeat."""
        return self._failing.troubles()

    async def run(self, lease: Lease, tasks: PreparedTasks, versions: BlockVersions) -> list[list[Made]]:
        """Return every sample of the lease's tasks, in the shape [tasks][samples]. For `versions`, see
        `EngineVersions.bring`.

        Raises LeaseLost.
        """
        batcher = CallBatcher(self._engine, lease.cancel, self._generated)
        pump = asyncio.create_task(batcher.run())
        groups = [
            [
                asyncio.create_task(self._one(task, number, tasks, versions, batcher))
                for number in range(tasks.sampling.samples)
            ]
            for task in tasks.ready
        ]
        each = [one for group in groups for one in group]
        everything = asyncio.gather(*each)
        either: set[asyncio.Future[Any]] = {everything, pump}
        try:
            while not everything.done():
                await asyncio.wait(either, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
                if pump.done():
                    pump.result()
                lease.check()
                if not batcher.asks:  # a sample's other waits are all limited by its timeout
                    lease.advance()
            everything.result()
            batcher.give_up()
            # A sample that timed out while the engine hung has not failed; its lease is lost.
            while not pump.done():
                await asyncio.wait({pump}, timeout=WATCH_S)
                lease.check()
            pump.result()
            made = [[one.result() for one in group] for group in groups]
            lost = any(one.score is not None and one.score.value is None for group in made for one in group)
            self._failing.lease_ended(well=not lost)
            return made
        except GenerationCancelled as error:
            raise LeaseLost(str(error)) from None
        except LeaseLost:
            for one in each:
                one.cancel()
            batcher.give_up()
            await asyncio.wait({pump})  # bounded by `LeasePipeline`
            raise
        finally:
            for task in (*each, pump):
                task.cancel()
            await asyncio.gather(*each, pump, everything, return_exceptions=True)

    def _generated(self, seconds: float) -> None:
        self.generate_s += seconds

    async def _one(
        self, task: ReadyTask, number: int, tasks: PreparedTasks, versions: BlockVersions, batcher: CallBatcher
    ) -> Made:
        def new_attempt() -> Attempt:
            conversation = Conversation(
                self._prompts,
                context_tokens=self._engine.context_tokens,
                max_tokens=self._max_tokens,
                max_new_tokens=tasks.sampling.max_new_tokens,
            )
            calls = SampleCalls(
                f"{task.handle.task_id}/{number}",
                conversation,
                prompts=self._prompts,
                batcher=batcher,
                sampling=tasks.sampling,
                versions=versions,
                on_text=self._on_text,
            )
            return Attempt(task, number, calls, self._endpoint)

        ended, attempt = await self._pool.make(new_attempt)
        if isinstance(ended, Returned):
            try:
                made = _made(
                    task, ended, attempt.calls.conversation, self._max_tokens, self._engine.vocab_size, versions
                )
            except WorkflowError as error:
                ended = Failed(0, f"{error}")
            else:
                self._failing.count([made.score or Score(0.0)])
                return made
        if not isinstance(ended, Failed):
            raise TypeError("a workflow was rated like a reward function")
        score = failed(f"{self.name} sample {number}", WORKFLOW, ended.why, at=ended.at, trace=ended.trace)
        self._failing.count([score])
        conversation = attempt.calls.conversation
        sample = _so_far(task, conversation, _sampled(conversation.sequences()))
        return Made([], truncated=False, sample=sample, score=score)


def _made(
    task: ReadyTask,
    returned: Returned,
    conversation: Conversation,
    max_tokens: int,
    vocab_size: int,
    versions: BlockVersions,
) -> Made:
    """Return the finished sample. Raises WorkflowError if its trajectory cannot be trained on."""
    if returned.score is not None and returned.score.value is None:
        raise WorkflowError(returned.score.failure)
    sequences = [tokens_of(sequence, versions.newest) for sequence in returned.sequences]
    if not any(sequence.loss_mask.any() for sequence in sequences):
        raise WorkflowError("returned a trajectory without a sampled token")
    if any(sequence.token_ids.min() < 0 or sequence.token_ids.max() >= vocab_size for sequence in sequences):
        raise WorkflowError(f"returned token ids outside the vocabulary of {vocab_size}")
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    if tokens > max_tokens:
        raise WorkflowError(f"returned a trajectory of {tokens} tokens, but workflow.max_tokens allows {max_tokens}")
    sampled = [int(token) for sequence in sequences for token in sequence.token_ids[sequence.loss_mask == 1]]
    sample = replace(_so_far(task, conversation, sampled), state=returned.state)
    metrics = {name: value for name, value in returned.metrics.items() if math.isfinite(value)}
    truncated = conversation.finish_reason == FinishReason.LENGTH
    rewards = [rewards_of(sequence) for sequence in returned.sequences]
    given = any(array.any() for array in rewards)
    return Made(
        sequences,
        truncated=truncated,
        sample=sample,
        score=returned.score,
        metrics=metrics,
        turns=turns_of(returned.sequences),
        turn_rewards=rewards if given else [],
    )


def _so_far(task: ReadyTask, conversation: Conversation, sampled: list[int]) -> Sample:
    """Return the sample whose calls `conversation` has recorded, with these sampled tokens."""
    return Sample(
        task_id=task.handle.task_id,
        row=task.row,
        messages=list(conversation.last_messages),
        completion=conversation.last_text,
        token_ids=sampled,
        finish_reason=conversation.finish_reason,
        turns=conversation.turns,
        source=task.source,
    )


def _sampled(sequences: list[Sequence]) -> list[int]:
    """Return the sampled tokens. An abandoned call may append tokens at the same time."""
    return [
        token
        for sequence in sequences
        for token, sampled in zip(sequence.token_ids, sequence.loss_mask, strict=False)
        if sampled
    ]


def turns_of(sequences: list[Sequence]) -> list[tuple[int, int]]:
    """Return the last token of each turn, (sequence, position), in the order of the turns.

    Raises WorkflowError if a position is outside its sequence.
    """
    ends = sorted((turn, at, position) for at, sequence in enumerate(sequences) for turn, position in sequence.turns)
    for _, at, position in ends:
        if not 0 <= position < len(sequences[at].token_ids):
            tokens = len(sequences[at].token_ids)
            raise WorkflowError(f"a turn ends at token {position} of a sequence of {tokens} tokens")
    return [(at, position) for _, at, position in ends]


def rewards_of(sequence: Sequence) -> Array:
    """Return the rewards of a sequence's tokens, float32 [N]. Raises WorkflowError if they are not N finite numbers."""
    size = len(sequence.token_ids)
    with np.errstate(over="ignore"):
        rewards = np.array(sequence.rewards or [0.0] * size, np.float32)
    if rewards.shape != (size,) or not np.isfinite(rewards).all():
        raise WorkflowError(f"a sequence of {size} tokens needs {size} finite rewards or none, not {len(rewards)}")
    return rewards


def tokens_of(sequence: Sequence, newest: int) -> SequenceTokens:
    """Return a user's sequence as arrays. The policy's newest version is `newest`.

    Raises WorkflowError if its lists do not fit together, or hold values that no policy has sampled.
    """
    try:
        made = SequenceTokens(
            np.array(sequence.token_ids, np.int32),
            np.array(sequence.loss_mask, np.uint8),
            np.array(sequence.logprobs, np.float32),
            np.array(sequence.versions, np.int32),
        )
    except OverflowError as error:
        raise WorkflowError(f"a sequence's lists hold invalid tokens, masks or versions ({error})") from None
    sizes = {array.shape for array in (made.token_ids, made.loss_mask, made.logprobs, made.versions)}
    if len(sizes) != 1 or not len(made.token_ids) or made.token_ids.ndim != 1:
        raise WorkflowError(
            f"a sequence's lists have the shapes {sorted(sizes)}, but must be equally long and not empty"
        )
    sampled: Array = made.loss_mask == 1
    if made.loss_mask.max() > 1 or not np.isfinite(made.logprobs).all():
        raise WorkflowError("a sequence's loss_mask must be 0 or 1, and its log-probs finite numbers")
    versions, logprobs = made.versions[sampled], made.logprobs[sampled]
    if len(versions) and not 0 <= versions.min() <= versions.max() <= newest:
        raise WorkflowError(
            f"a sequence's sampled tokens have versions from {versions.min()} to {versions.max()}, but the policy's "
            f"are 0 to {newest}; return those of the answers (Turn.versions)"
        )
    if len(logprobs) and not LEAST_LOGPROB <= logprobs.min() <= logprobs.max() <= MOST_LOGPROB:
        raise WorkflowError(
            f"a sequence's sampled tokens have log-probs from {logprobs.min():.4g} to {logprobs.max():.4g}, but must "
            f"be at most 0 and at least {LEAST_LOGPROB:g}; return those of the answers (Turn.logprobs)"
        )
    if sampled[0]:
        raise WorkflowError("a sequence's first token has loss_mask 1, but nothing predicts it: begin with the prompt")
    return made


class Attempt:
    """An attempt at sample number `sample` of a task, as work for a process (`user_code.host.Work`)."""

    function = 0

    def __init__(self, task: ReadyTask, sample: int, calls: SampleCalls, endpoint: OpenAIEndpoint) -> None:
        self.calls = calls
        self._task = task
        self._sample = sample
        self._endpoint = endpoint
        self._under_way: dict[int | None, asyncio.Task[None]] = {}

    def begin(self, slot: int) -> frames.BeginSample:
        base_url = self._endpoint.open(self.calls)
        return frames.BeginSample(slot, self._task.handle.task_id, self._sample, self._task.row, base_url)

    def asked(self, message: frames.Asked, host: UserHost) -> None:
        match message:
            case frames.Chat() | frames.CompleteText():
                self._start(message.call, self._answer(message, host))
            case frames.Leave():
                if message.call in self._under_way:
                    self._under_way[message.call].cancel()
            case frames.Ask():
                self._start(None, self._send_captured(message.slot, host))

    def end(self) -> None:
        self.calls.closed = f"the sample {self.calls.name} has ended"
        self._endpoint.close(self.calls)
        for call in list(self._under_way.values()):
            call.cancel()

    def _start(self, call: int | None, work: Coroutine[Any, Any, None]) -> None:
        task = self._under_way[call] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._under_way.pop(call, None))

    async def _send_captured(self, slot: int, host: UserHost) -> None:
        def framed(sequences: list[Sequence]) -> bytes:
            return frames.frame(frames.Captured(slot, sequences), frames.TO_PROCESS_BYTES)

        try:
            host.write(await self.calls.captured(framed))
        except asyncio.CancelledError:  # abandoned, but the whole process is waiting for this answer
            host.write(framed([]))

    async def _answer(self, asked: frames.Chat | frames.CompleteText, host: UserHost) -> None:
        turn: Turn | None = None
        refused = why = ""
        try:
            if isinstance(asked, frames.Chat):
                turn = await self.calls.chat(asked.messages, asked.tools)
            else:
                turn = await self.calls.complete(asked.prompt)
        except (ContextFull, WorkflowError) as error:
            refused, why = type(error).__name__, str(error)
        except Exception as error:  # an error of the call, raised in the workflow
            why = f"{type(error).__name__}: {error}"
        host.send(frames.Answered(asked.slot, asked.call, turn, refused, why))

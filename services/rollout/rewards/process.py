"""A reward process: `python -m services.rollout.rewards.process SOCKET STACK`.

It loads the functions and processes one Work after the other. The service kills it when it is late and does not rely on
it to exit. It does not import torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from services.rollout.confined import confine, limit_memory, read
from services.rollout.rewards.frames import Answer, Ready, Setup, Work
from services.rollout.rewards.judge import unavailable
from services.rollout.rewards.load import RewardFunction, load_reward
from services.rollout.rewards.score import ANSWER, JUDGE, MEMORY, RAISED, TIMEOUT, Score, failed, totals
from services.rollout.user_frames import TO_SERVICE_BYTES, UNFIT, frame
from services.rollout.user_trace import raised_at, traced, write_stacks
from shared.rpc.errors import RpcError
from shared.sample import Sample

MAX_CONCURRENT_CALLS = 64


def main(descriptor: int, stack: int) -> None:
    """Serve the service at the other end of the socket until it closes. For `stack` see `user_trace.write_stacks`."""
    link = confine(descriptor)
    setup = read(link, Setup) if link is not None else None
    if link is None or setup is None:
        return
    write_stacks(stack)
    try:
        functions = [load_reward(name, params) for name, params in setup.functions]
    except RpcError as error:
        link.sendall(frame(Ready([], [], str(error)), TO_SERVICE_BYTES))
        return
    limit_memory(setup.memory_bytes)
    ready = Ready(
        [each.group for each in functions],
        [each.is_async for each in functions],
        homes=[each.home for each in functions],
        pid=os.getpid(),
    )
    link.sendall(frame(ready, TO_SERVICE_BYTES))
    loop = asyncio.Runner()  # one loop for all calls, because clients and locks of user modules belong to a loop
    while (work := read(link, Work)) is not None:
        function = functions[work.function]
        if function.is_async:
            loop.run(_serve_async(link, function, work, setup.timeout_s))
        else:
            _serve_plain(link, function, work)


def _serve_plain(link: socket.socket, function: RewardFunction, work: Work) -> None:
    for number, samples in enumerate(work.calls):
        try:
            answer = function.call(samples if function.group else samples[0], **function.params)
            scores = totals(function.name, answer, len(samples), group=function.group)
        except BaseException as error:  # a sys.exit() in user code, too, costs only its sample
            scores = _raised(function, samples, error)
        _send(link, function, number, scores)


async def _serve_async(link: socket.socket, function: RewardFunction, work: Work, timeout_s: float) -> None:
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def one(number: int, samples: list[Sample]) -> None:
        async with slots:
            deadline = asyncio.timeout(timeout_s)
            try:
                async with deadline:
                    answer = await function.call(samples if function.group else samples[0], **function.params)
                scores = totals(function.name, answer, len(samples), group=function.group)
            except TimeoutError as error:
                why = f"no answer within {timeout_s:g} s (reward.timeout_s)"
                at, trace = raised_at(error, function.home), traced(error)
                late = [failed(function.name, TIMEOUT, why, at=at, trace=trace)] * len(samples)
                scores = late if deadline.expired() else _raised(function, samples, error)
            except (Exception, SystemExit) as error:
                scores = _raised(function, samples, error)
        _send(link, function, number, scores)

    await asyncio.gather(*(one(number, samples) for number, samples in enumerate(work.calls)))


def _raised(function: RewardFunction, samples: list[Sample], error: BaseException) -> list[Score]:
    if isinstance(error, MemoryError):
        why = "more memory than reward.memory allows (MemoryError)"
        return [failed(function.name, MEMORY, why, at=raised_at(error, function.home))] * len(samples)
    after_s = unavailable(error)
    score = failed(
        function.name,
        RAISED if after_s is None else JUDGE,
        f"raised {type(error).__name__}: {error}",
        at=raised_at(error, function.home),
        trace=traced(error),
        retry_after_s=after_s or 0.0,
    )
    return [score] * len(samples)


def _send(link: socket.socket, function: RewardFunction, number: int, scores: list[Score]) -> None:
    # The state of the process after a failed allocation is unknown: the next call gets a fresh process.
    last = any(score.kind == MEMORY for score in scores)
    try:
        answer = frame(Answer(number, scores, last), TO_SERVICE_BYTES)
    except UNFIT as error:
        why = f"answered what cannot be handed over: {error}"
        answer = frame(Answer(number, [failed(function.name, ANSWER, why)] * len(scores)), TO_SERVICE_BYTES)
    link.sendall(answer)
    if last:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

"""A rank's side of its group: joins it, meets the others before every collective, learns of its end. Event loop only.

Everything goes through mailboxes, so that it has deadlines and names; only the collectives themselves, which begin when
all ranks have met, run in the process group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import structlog

from proto.messages import ErrorCode, Meet, Met, Ping, Pong
from shared.actor.service import PEER_LOST_STATUS, Service
from shared.ranks.rendezvous import END, JOIN, Rendezvous
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded, RpcError
from shared.rpc.mailbox import DEFERRED, Call, Deferred

T = TypeVar("T")

JOIN_S = 600.0
"""All ranks must be there within this."""
WATCH_S = 20.0
PING_S = 2.0


class GroupEnded(RpcError):
    """This rank's group is no more: the process ends, and its next life joins a new one."""

    def __init__(self, cause: str) -> None:
        super().__init__(ErrorCode.LOST, cause)


class CollectiveFailed(GroupEnded):
    """A collective failed here while every other rank lives: this rank may be the one that is to blame."""


@contextmanager
def ends_with_its_peers(service: Service) -> Iterator[None]:
    """Tell by the exit status when it is not this rank that failed."""
    try:
        yield
    except CollectiveFailed:
        raise
    except GroupEnded:
        service.exit_status = PEER_LOST_STATUS
        raise


class Group:
    """The ranks of one worker group. With one rank there is nobody to wait for."""

    def __init__(
        self,
        names: Sequence[str],
        client_of: Callable[[int], Client],
        rank: int,
        incarnation: int,
        *,
        deadline_s: float,
    ) -> None:
        """`names`: of the ranks' processes, by rank; `client_of`: the mailbox of a rank."""
        self.rank = rank
        self.world_size = len(names)
        self._names = names
        self.generation = 0
        self._client_of = client_of
        self.deadline_s = deadline_s
        """The longest wait of one rank for another."""
        self._round = ""
        self._lives: dict[int, int] = {}
        self._rendezvous = Rendezvous(names, incarnation, deadline_s=deadline_s) if rank == 0 else None
        self._timer: asyncio.TimerHandle | None = None

    # ---- rank 0's mailbox

    def on_meet(self, request: Meet, call: Call) -> Deferred:
        """Handler of `Meet`. Raises RpcError(bad_request) on other ranks."""
        if self._rendezvous is None:
            raise RpcError(ErrorCode.BAD_REQUEST, f"rank {self.rank}: ranks meet at {self._names[0]}")

        def answer(outcome: Met | RpcError) -> None:
            if isinstance(outcome, RpcError):
                call.fail(outcome)
            else:
                call.reply(outcome)

        self._rendezvous.arrive(request, answer, asyncio.get_running_loop().time())
        self._set_timer()
        return DEFERRED

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._rendezvous.next_deadline() if self._rendezvous is not None else None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.expire(asyncio.get_running_loop().time())
            self._set_timer()

    # ---- every rank

    async def join(self) -> None:
        """Wait until all ranks are there. Raises DeadlineExceeded, GroupEnded (of rank 0's life that is ending)."""
        if self.world_size == 1:
            return
        try:
            met = await self._ask(Meet(generation=0, round=JOIN, rank=self.rank), JOIN_S)
        except DeadlineExceeded:
            raise
        except RpcError as error:
            raise GroupEnded(str(error)) from None
        self.generation = met.generation
        self._lives = await self._living()

    async def watch(self) -> None:
        """Never returns; raises GroupEnded when the group has."""
        if self.world_size == 1:
            await asyncio.Event().wait()
        while True:
            try:
                await self._ask(Meet(generation=self.generation, round=END, rank=self.rank), WATCH_S)
            except DeadlineExceeded:
                continue  # a long poll: ask again, rank 0 may be in its next life by now
            except RpcError as error:
                if error.code not in (ErrorCode.DEADLINE, ErrorCode.DRAINING):
                    raise GroupEnded(str(error)) from None

    async def meet(self, round_name: str, failure: str = "") -> None:
        """Wait for all ranks at `round_name`. Raises RpcError(lost) when a rank cannot go on, GroupEnded."""
        if self.world_size == 1:
            return
        self._round = round_name
        try:
            met = await self._ask(self._meet(round_name, failure), 2 * self.deadline_s)
        except DeadlineExceeded as error:
            raise GroupEnded(f"{round_name}: rank 0 does not answer: {error}") from None
        except RpcError as error:
            raise GroupEnded(str(error)) from None
        finally:
            self._round = ""
        if met.failures and not failure:
            raise RpcError(ErrorCode.LOST, f"{round_name} refused: {'; '.join(met.failures)}"[:1000])

    async def withdraw(self, cause: str) -> None:
        """Give up the round that this rank waits in, if any: it fails on every rank, unless all have met already."""
        if self._round:
            await self._ask(self._meet(self._round, cause), self.deadline_s)

    async def together(self, name: str, work: Awaitable[T]) -> T:
        """The result of collective `work`, which every rank has begun. An RpcError is raised on all ranks alike.

        Raises GroupEnded when a collective failed: no rank holds then what the others believe.
        """
        try:
            return await work
        except RpcError:
            raise
        except Exception as error:
            if self.world_size == 1:
                raise
            structlog.get_logger("group").error("collective failed", call=name, exc_info=error)
            lost = [self._names[rank] for rank in await self.lost()]
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            what = f"{name}: a collective failed ({first[:300]})"
            if not lost:
                raise CollectiveFailed(f"{what}; all ranks answer, see their logs") from error
            raise GroupEnded(f"{what}; {', '.join(lost)} died or does not answer") from error

    async def until_ended(self, work: Awaitable[None]) -> None:
        """`work`, unless the group ends first: then nothing that this rank holds can be trusted to be together."""
        tasks = {asyncio.ensure_future(work), asyncio.ensure_future(self.watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors:  # what this rank knows of itself before what it hears of the group
                raise next((each for each in errors if type(each) is not GroupEnded), errors[0])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def lost(self) -> list[int]:
        """Ranks whose mailbox does not answer now, or is that of a later life than the one which joined."""
        lives = await self._living()
        return [
            rank for rank in self._others() if rank not in lives or lives[rank] != self._lives.get(rank, lives[rank])
        ]

    async def _living(self) -> dict[int, int]:
        """The incarnations of the other ranks that answer."""

        async def ping(rank: int) -> int | None:
            try:
                return (await self._client_of(rank).call(Ping(), Pong, deadline_s=PING_S)).incarnation
            except RpcError:
                return None

        ranks = list(self._others())
        answers = await asyncio.gather(*(ping(rank) for rank in ranks))
        return {rank: life for rank, life in zip(ranks, answers, strict=True) if life is not None}

    def end(self, cause: str) -> None:
        """This rank cannot go on; on rank 0 the others are told, elsewhere they see it when this process comes back."""
        if self._rendezvous is not None:
            self._rendezvous.end(cause)

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank)

    def _meet(self, round_name: str, failure: str) -> Meet:
        return Meet(generation=self.generation, round=round_name, rank=self.rank, failure=failure[:500])

    async def _ask(self, request: Meet, deadline_s: float) -> Met:
        return await self._client_of(0).call(request, Met, deadline_s=deadline_s)

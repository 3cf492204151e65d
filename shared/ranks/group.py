"""A rank's side of its group: it joins the group, meets the other ranks before every collective, and detects the end of
the group. Use everything here only on the event loop.

Ranks communicate through their mailboxes, so that waits have deadlines and errors name ranks. Only the collectives
themselves, which begin when all ranks have met, run in the process group.
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
"""Maximum seconds that a rank waits for all ranks to join."""
WATCH_S = 20.0
PING_S = 2.0


class GroupEnded(RpcError):
    """The group of this rank has ended. The process exits, too, and its next life joins a new group."""

    def __init__(self, cause: str) -> None:
        super().__init__(ErrorCode.LOST, cause)


class CollectiveFailed(GroupEnded):
    """A collective failed although all other ranks answer, so this rank may be the cause."""


@contextmanager
def ends_with_its_peers(service: Service) -> Iterator[None]:
    """Set the exit status PEER_LOST_STATUS if the group ends because another rank failed."""
    try:
        yield
    except CollectiveFailed:
        raise
    except GroupEnded:
        service.exit_status = PEER_LOST_STATUS
        raise


class Group:
    """The ranks of one worker group, of which this process is one. A group of one rank never waits."""

    def __init__(
        self,
        names: Sequence[str],
        client_of: Callable[[int], Client],
        rank: int,
        incarnation: int,
        *,
        deadline_s: float,
    ) -> None:
        """`names` are the names of the processes by rank. `client_of` returns the client of a rank's mailbox."""
        self.rank = rank
        self.world_size = len(names)
        self._names = names
        self.generation = 0
        self.store = ""
        """Address of the process group's store (`shared.ranks.meeting`). It is empty if all ranks are on one host."""
        self._client_of = client_of
        self.deadline_s = deadline_s
        """Maximum seconds that one rank waits for another."""
        self._round = ""
        self._lives: dict[int, int] = {}
        self._rendezvous = Rendezvous(names, incarnation, deadline_s=deadline_s) if rank == 0 else None
        self._timer: asyncio.TimerHandle | None = None

    # ---- rank 0's mailbox

    def on_meet(self, request: Meet, call: Call) -> Deferred:
        """Handle `Meet` on rank 0. Raises RpcError(bad_request) on other ranks."""
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

    async def join(self, store: str = "") -> None:
        """Wait until all ranks have joined. Rank 0 passes `store` if ranks on other hosts need it.

        Raises DeadlineExceeded if not all ranks join in time, and GroupEnded if rank 0's group is ending.
        """
        if self.world_size == 1:
            return
        if self._rendezvous is not None:
            self._rendezvous.store = store
        try:
            met = await self._ask(Meet(generation=0, round=JOIN, rank=self.rank), JOIN_S)
        except DeadlineExceeded:
            raise
        except RpcError as error:
            raise GroupEnded(str(error)) from None
        self.generation, self.store = met.generation, met.store
        self._lives = await self._answering_lives()

    async def watch(self) -> None:
        """Wait until the group ends, then raise GroupEnded. This never returns."""
        if self.world_size == 1:
            await asyncio.Event().wait()
        while True:
            try:
                await self._ask(Meet(generation=self.generation, round=END, rank=self.rank), WATCH_S)
            except DeadlineExceeded:
                continue  # a long poll ended: ask again, as rank 0 may be in its next life
            except RpcError as error:
                if error.code not in (ErrorCode.DEADLINE, ErrorCode.DRAINING):
                    raise GroupEnded(str(error)) from None

    async def meet(self, round_name: str, failure: str = "") -> None:
        """Wait for all ranks at `round_name`. A non-empty `failure` makes the round fail on all ranks.

        Raises RpcError(lost) if another rank failed, and GroupEnded if the group has ended.
        """
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
        """Make the round in which this rank is waiting, if any, fail on every rank, unless all ranks have already
        met."""
        if self._round:
            await self._ask(self._meet(self._round, cause), self.deadline_s)

    async def together(self, name: str, work: Awaitable[T]) -> T:
        """Return the result of the collective `work`, which every rank has begun. All ranks raise the same RpcErrors.

        Raises GroupEnded if a collective failed, because the ranks may then be in different states.
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
            raise GroupEnded(f"{what}; {', '.join(lost)} died or did not answer") from error

    async def until_ended(self, work: Awaitable[T]) -> T:
        """Run `work` until it completes or the group ends, and return its result. Once the group has ended, this rank's
        state cannot be trusted."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.watch())
        try:
            done, _ = await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            errors = [error for task in done if (error := task.exception()) is not None]
            if errors:  # prefer this rank's own error to the end of the group
                raise next((error for error in errors if type(error) is not GroupEnded), errors[0])
            return working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def lost(self) -> list[int]:
        """Return the ranks whose mailbox does not answer, or belongs to a later life than the one that joined the
        group."""
        lives = await self._answering_lives()
        return [
            rank for rank in self._others() if rank not in lives or lives[rank] != self._lives.get(rank, lives[rank])
        ]

    async def _answering_lives(self) -> dict[int, int]:
        """Return the incarnations of the other ranks that answer."""

        async def ping(rank: int) -> int | None:
            try:
                return (await self._client_of(rank).call(Ping(), Pong, deadline_s=PING_S)).incarnation
            except RpcError:
                return None

        ranks = list(self._others())
        answers = await asyncio.gather(*(ping(rank) for rank in ranks))
        return {rank: life for rank, life in zip(ranks, answers, strict=True) if life is not None}

    def end(self, cause: str) -> None:
        """End the group because this rank cannot continue. Rank 0 tells the other ranks. The end of another rank is
        detected when its process restarts."""
        if self._rendezvous is not None:
            self._rendezvous.end(cause)

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank)

    def _meet(self, round_name: str, failure: str) -> Meet:
        return Meet(generation=self.generation, round=round_name, rank=self.rank, failure=failure[:500])

    async def _ask(self, request: Meet, deadline_s: float) -> Met:
        return await self._client_of(0).call(request, Met, deadline_s=deadline_s)

"""The driver's view of all models that a run trains: one step, one commit.

Each model has a group of workers and a dispatch of its own, which knows nothing of the others. Their calls run at the
same time. A step counts only if every model has finished it, so the models differ by at most one step, and a state is
loaded only if all of them have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from proto import messages
from proto.messages import WeightsRef
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost, group_dispatch
from shared.rpc.client import Client
from shared.topology.models import POLICY, TrainedModel

T = TypeVar("T")


class TrainedModels(Mapping[str, WorkerDispatch]):
    """The dispatch of each trained model, by the model's name. Calls made here concern all of them."""

    def __init__(self, dispatches: Mapping[str, WorkerDispatch]) -> None:
        """`dispatches` must contain the policy."""
        self._dispatches = dict(dispatches)

    def __getitem__(self, name: str) -> WorkerDispatch:
        return self._dispatches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dispatches)

    def __len__(self) -> int:
        return len(self._dispatches)

    async def take_over(self, turn: int | None = None) -> messages.WorkerState:
        """Take over the workers of all models and return their common state, as `WorkerDispatch.take_over` does for the
        ranks of one. `order` is the policy's.

        The state is dirty if the models are at different steps, and lists the snapshots that all of them have.
        """
        states = await together([dispatch.take_over(turn) for dispatch in self.values()])
        steps = {state.step for state in states}
        first = states[0]
        return messages.WorkerState(
            step=min(steps),
            driver=first.driver,
            order=first.order,
            dirty=len(steps) > 1 or any(state.dirty for state in states),
            snapshots=[one for one in first.snapshots if all(one in state.snapshots for state in states)],
        )

    async def init_model(self) -> messages.WorkerReady:
        """Load every model at step 0. Return the policy's answer."""
        return (await together([dispatch.init_model() for dispatch in self.values()]))[0]

    async def load_checkpoint(self, step: int, *, snapshot_lineage: int = -1) -> messages.WorkerReady:
        """Load the state of every model after `step`. Return the policy's answer. Raises the errors of
        `WorkerDispatch.load_checkpoint`, after which the models may be at different steps."""
        calls = [dispatch.load_checkpoint(step, snapshot_lineage=snapshot_lineage) for dispatch in self.values()]
        return (await together(calls))[0]

    async def save_checkpoint(self, step: int, *, at_stop: bool = False) -> None:
        """Save `step` of every model. Once this returns, all checkpoints are durable and verified."""
        await together([dispatch.save_checkpoint(step, at_stop=at_stop) for dispatch in self.values()])

    def publish_weights(self, lineage: int, step: int, *, store: str) -> Awaitable[WeightsRef]:
        """Publish the policy (`WorkerDispatch.publish_weights`)."""
        return self[POLICY].publish_weights(lineage, step, store=store)

    async def save_hf_models(self, folders: Mapping[str, Path]) -> None:
        """Export each model to its folder."""
        await together([self[name].save_hf_model(folder) for name, folder in folders.items()])


def dispatches(models: Sequence[TrainedModel], client: Callable[[str, int], Client], driver: int) -> TrainedModels:
    """Return the dispatches of `models`. `client` returns the client for a service instance."""
    return TrainedModels({model.name: group_dispatch(model, client, driver) for model in models})


async def together(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of `calls`, which run at the same time.

    If one fails, cancel the others, which have not finished, and raise its error. An error that says more than that
    workers are lost comes first, because a loss may be its consequence.
    """
    if not calls:
        return []
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, WorkersLost))
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

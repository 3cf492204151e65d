"""How far the training of one model has come on one rank. The module does not import torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proto.messages import AdapterSpec, HeldSnapshot
from services.policy_trainer.worker.snapshots import Snapshots
from shared.names import number
from shared.ranks.layout import RankPlace

if TYPE_CHECKING:
    from torch import Tensor


NO_ADAPTER = AdapterSpec(rank=0, alpha=0.0, seed=0, groups=[])
"""What stands for an adapter of the model that the topology trains."""


@dataclass
class Standing:
    """The position of a model, which only the calls to this model change."""

    snapshots: Snapshots
    step: int = -1
    """Number of finished training steps, or -1 before the model is loaded."""
    dirty: bool = False
    """Whether the weights have changed since the last finished step."""
    pristine: bool = True
    """Whether the weights are those of the model directory and the optimizer state is fresh."""
    accumulated: list[str] = field(default_factory=list)
    """Tasks of this data-parallel rank whose gradients are waiting for the next update."""
    adapter: AdapterSpec = NO_ADAPTER
    """The adapter of a client's model."""
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """The accumulated gradient of a client's model while another model is on the device, in host memory."""
    failed: str = ""
    """Why a forward_backward of a client's model has failed since its last optimizer step, or an empty string."""


class Standings:
    """The models of a rank: the one that the topology trains, and those of clients, by numbers above 0."""

    def __init__(self, folder: Path | None, clients: Path, place: RankPlace) -> None:
        """`folder` is for the snapshots of the trained model, or None if it keeps none. Those of client's model n are
        in `clients`/<n>."""
        self.trained = Standing(Snapshots(folder, place))
        """The model that the topology trains."""
        self._folder, self._place = clients, place
        self._clients: dict[int, Standing] = {}
        self.resident = 0
        """The client's model whose state is on the device, or 0 if there is none."""

    @property
    def current(self) -> Standing:
        return self._clients[self.resident] if self.resident else self.trained

    @property
    def has_clients(self) -> bool:
        """Whether a client's model is open."""
        return bool(self._clients)

    def get(self, model: int) -> Standing | None:
        """Return a client's model, or None if it is not open."""
        return self._clients.get(model)

    def new(self, model: int, adapter: AdapterSpec, step: int) -> Standing:
        """Return the standing of a client's model, which `put` adds."""
        return Standing(Snapshots(self._folder / str(model), self._place), step, pristine=False, adapter=adapter)

    def put(self, model: int, standing: Standing) -> None:
        """Add a client's model, which is now on the device."""
        self._clients[model] = standing
        self.resident = model

    def close(self, model: int) -> None:
        """Forget a client's model and remove its snapshots."""
        self._clients.pop(model, None)
        folder = self._folder / str(model)
        Snapshots(folder, self._place).remove()
        with suppress(OSError):  # another rank's snapshots may be there
            folder.rmdir()
        if self.resident == model:
            self.resident = 0

    def forget_clients(self) -> None:
        """Forget the models of clients, but keep their snapshots."""
        self._clients = {}
        self.resident = 0

    def held(self) -> list[HeldSnapshot]:
        """Return the sealed snapshots of all models."""
        held = self.trained.snapshots.held()
        for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            model = number(folder.name)
            if model is not None:
                held += [
                    HeldSnapshot(lineage=one.lineage, step=one.step, model=model)
                    for one in Snapshots(folder, self._place).held()
                ]
        return held

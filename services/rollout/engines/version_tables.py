"""The versions that the embedded engine samples with at the same time: one slot table each, stepped in turn.

All tables compute with the same modules. Before a step, the tensors of the table's version become the modules'
parameters, which copies nothing. An engine whose versions are whole models has one table, and each version replaces the
last one, also for running samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from proto.messages import ErrorCode
from services.rollout.engine import BASE, Generation
from services.rollout.engines.compute import EngineCall
from services.rollout.engines.slots import SlotTable
from shared.model.adapter import adapters_of
from shared.rpc.errors import RpcError

MakeTable = Callable[[Callable[[], int]], SlotTable]
"""Returns a table, given a function that returns the number of the version that it samples with."""


@dataclass(eq=False)
class _Version:
    """A version with its tensors by name; None: the modules have them."""

    table: SlotTable
    tensors: Mapping[str, Tensor] | None = None
    calls: set[EngineCall] = field(default_factory=set)


class VersionTables:
    """A `compute.Stepper`. Versions are numbered as by `Engine.swaps`. Everything runs on the compute thread, except
    `current` and `retained`."""

    def __init__(
        self, model: nn.Module, holders: Mapping[str, list[Tensor]], make_table: MakeTable, *, live: int, steady: bool
    ) -> None:
        """`holders` are the parameters that hold each tensor of a version. With `live` 1, a version replaces the last
        one; otherwise the engine has adapters, and `live` is the maximum number of versions. A `steady` engine works on
        one call at a time."""
        self._holders = holders
        self._layers = list(adapters_of(model).values())
        self._make_table = make_table
        self._live = live
        self._steady = steady
        self.current = 0
        """Number of times that the weights have been replaced."""
        self.retained: frozenset[int] = frozenset()
        """The versions to keep when the next one is placed."""
        first = None if live == 1 else {name: tied[0].detach() for name, tied in holders.items()}
        self._versions = {0: _Version(self._table(0), first)}
        if self._layers:
            self._versions[BASE] = _Version(self._table(BASE))
        self._turns = list(self._versions)
        """The numbers of the versions, the one whose turn is next first."""
        self._installed: int | None = 0
        self._off = False
        """Whether the adapters are off."""
        self._of: dict[EngineCall, _Version] = {}
        self._ended = 0
        """Number of tokens of the tables that are gone."""

    @property
    def tokens(self) -> int:
        """Total number of tokens in samples that have ended."""
        return self._ended + sum(version.table.tokens for version in list(self._versions.values()))

    def place(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Make `tensors` the current version, or what the parameters hold now, which took the place of the last one.

        Other versions are dropped, unless they are retained or have calls.
        """
        number = self.current + 1
        if tensors is None:
            version = self._versions.pop(self.current)
        else:
            for gone in [each for each in self._versions if self._may_drop(each)]:
                self._ended += self._versions.pop(gone).table.tokens
            version = _Version(self._table(number), tensors)
        self._versions[number] = version
        self.current = number
        self._turns = [each for each in self._turns if each in self._versions] + [number]
        self._installed = None
        self.install(number)

    def forget(self) -> None:
        """Drop all versions but the current one and the base. There is no call."""
        for gone in [each for each in self._versions if each not in (self.current, BASE)]:
            self._ended += self._versions.pop(gone).table.tokens
        self._turns = list(self._versions)
        self.install(self.current)

    def install(self, number: int) -> None:
        """Let the modules compute with a version. Raises RpcError if it is gone."""
        version = self._version(number)
        if number == self._installed:
            return
        if self._off != (number == BASE):
            self._off = number == BASE
            for layer in self._layers:
                layer.applies = not self._off
        if version.tensors is not None:
            for name, tied in self._holders.items():
                for parameter in tied:
                    parameter.data = version.tensors[name]
        self._installed = number

    # ---- `compute.Stepper`

    def add(self, call: EngineCall) -> bool:
        if self._steady and self._of:
            return False
        named = call.sampling.swaps
        version = self._version(self.current if named is None or (self._live == 1 and named != BASE) else named)
        if not version.table.add(call):
            return False
        self._of[call] = version
        version.calls.add(call)
        return True

    def step(self) -> None:
        """Take a step for the calls of one version."""
        number = next(each for each in self._turns if self._versions[each].calls)
        self._turns.remove(number)
        self._turns.append(number)
        self.install(number)
        version = self._versions[number]
        version.table.step()
        for call in [call for call in version.calls if call.answer.done()]:
            self._forget(call)

    def so_far(self, call: EngineCall) -> list[list[Generation]]:
        return self._of[call].table.so_far(call)

    def drop(self, call: EngineCall) -> None:
        self._of[call].table.drop(call)
        self._forget(call)

    def _forget(self, call: EngineCall) -> None:
        self._of.pop(call).calls.discard(call)

    def _may_drop(self, number: int) -> bool:
        return number != BASE and number not in self.retained and not self._versions[number].calls

    def _table(self, number: int) -> SlotTable:
        return self._make_table(lambda: self.current if self._live == 1 and number != BASE else number)

    def _version(self, number: int) -> _Version:
        version = self._versions.get(number)
        if version is None:
            raise RpcError(ErrorCode.INTERNAL, f"engine transformers: version number {number} is no longer in memory")
        return version

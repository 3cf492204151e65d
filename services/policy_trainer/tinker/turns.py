"""Fair turns: deficit round robin, which gives every competitor the same share whatever the size of its calls.

M. Shreedhar and G. Varghese, "Efficient fair queuing using deficit round robin", IEEE/ACM Transactions on Networking 4,
1996.
"""

from __future__ import annotations

from collections.abc import Mapping


class FairTurns:
    """The turns of competitors, by name. Costs are in tokens. One whose deficit covers its next call keeps its turn."""

    def __init__(self, quantum: int) -> None:
        """`quantum` is what a competitor may spend in one turn; no call may cost more."""
        self._quantum = quantum
        self._deficits: dict[str, int] = {}
        """The competitors in the order of their turns, with what each may still spend."""
        self._turn = ""
        """The competitor whose turn began last."""

    def pick(self, costs: Mapping[str, int]) -> str:
        """Return whose call is next. `costs` are the costs of the next calls of all who have one, at least one."""
        for name in [name for name in self._deficits if name not in costs]:
            del self._deficits[name]  # who has nothing to do saves nothing for later
        for name in costs:
            self._deficits.setdefault(name, 0)
        while True:
            name = next(iter(self._deficits))
            if name != self._turn:
                self._turn = name
                self._deficits[name] += self._quantum
            if self._deficits[name] >= min(costs[name], self._quantum):
                return name
            self._deficits[name] = self._deficits.pop(name)
            self._turn = ""

    def spend(self, name: str, cost: int) -> None:
        """Note that the call of `name` was made."""
        if name in self._deficits:
            self._deficits[name] -= cost

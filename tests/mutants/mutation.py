"""Defines a mutation: one possible defect in the code and the test that must find it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.promises import Promise


@dataclass(frozen=True)
class Mutation:
    """`name` describes what the changed code does wrong, and `promise` is what it breaks.

    `file` is relative to the repository; `old` occurs in it exactly once and is replaced by `new`. `test` is the node
    id of a test that fails with the change and passes without it.
    """

    name: str
    promise: Promise
    file: str
    old: str
    new: str
    test: str

    def apply(self, text: str) -> str:
        """Return the changed text of the file. Raises ValueError if `old` does not occur exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {found} times, not once: {self.name}")
        return text.replace(self.old, self.new)

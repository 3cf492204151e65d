"""A mutation: one defect that could be put into the code, and the test that must find it. No list of them, no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`name` says what the changed code would do wrong.

    `file` is relative to the repository; `old` occurs in it exactly once and is replaced by `new`. `test` is the node
    id that must fail then (pass without the change).
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, text: str) -> str:
        """The changed text of the file. Raises ValueError when `old` does not occur exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {found} times, not once: {self.name}")
        return text.replace(self.old, self.new)

"""Reward functions by the name `builtin:<name>`. Each is an ordinary reward function: no access to the service."""

from __future__ import annotations

from shared.sample import Sample


def exact_match(sample: Sample) -> float:
    """1.0 when the completion, stripped, is the row's `answer` as text, stripped; else 0.0. KeyError without one."""
    return float(sample.completion.strip() == str(sample.row["answer"]).strip())


BUILTINS = {"exact_match": exact_match}

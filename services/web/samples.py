"""Prepares samples for the page: a list with one row per sample of a step or a task, and single samples with their
tokens.

All sizes are bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shared.samples import reader
from shared.samples.reader import Order, select
from shared.samples.record import SampleRecord, group_scores, split_of

MAX_RECORDS = 500
"""Maximum number of samples that are listed."""
MAX_STEPS = 2000
HEAD_CHARS = 160
"""Maximum number of characters in a listed prompt or completion."""
MAX_CHARS = 60_000
"""Maximum number of characters in each text of a shown sample."""
MAX_TOKENS = 8000
"""Maximum number of tokens in a shown sample."""
_FACTS = (
    *("task", "sample", "step", "state", "reason", "reward", "rewards", "failure", "info", "advantage", "length"),
    *("finish_reason", "versions", "turns", "tool_calls"),
)


def listed(run: Path, split: str, step: int | None, *, task: str = "", order: Order | None = None) -> dict[str, Any]:
    """Return the samples of a step (None: the newest step), with the splits and steps that have samples.

    With `task`, return the samples of that task in all steps of its own split instead.
    """
    splits = reader.splits(run)
    if task:
        split, step = split_of(task), None
    if split not in splits:  # the split becomes part of a path
        split = splits[0] if splits else ""
    steps = reader.steps(run, split) if split else []
    if step not in steps and not task:
        step = steps[-1] if steps else None
    selection = select(run, split=split, step=step, task=task or None, order=order, limit=MAX_RECORDS)
    return {
        "splits": splits,
        "split": split,
        "steps": steps[-MAX_STEPS:],
        "step": step,
        "samples": [_head(record) for record in selection.records],
        "total": selection.total,
    }


def shown(run: Path, split: str, step: int, task: str, sample: int) -> dict[str, Any] | None:
    """Return one sample with its tokens, or None if there is no such sample."""
    if split not in reader.splits(run):
        return None
    records = [record for record in reader.read(run, step=step, task=task, split=split) if record.sample == sample]
    return body(records[-1]) if records else None


def _head(record: SampleRecord) -> dict[str, Any]:
    return {
        **_facts(record),
        "prompt": _text(record.prompt)[-HEAD_CHARS:],
        "completion": record.completion[:HEAD_CHARS],
    }


def body(record: SampleRecord, *, max_chars: int = MAX_CHARS, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Return a sample with its tokens. All texts are cut to `max_chars`."""
    texts = {
        "prompt": _text(record.prompt),
        "completion": record.completion,
        "conversation": "" if not record.messages else _text(record.messages),
        "answer": "" if record.answer is None else _text(record.answer),
    }
    tokens = slice(max_tokens)
    pieces = [piece[:HEAD_CHARS] for piece in record.pieces[tokens]]
    cut = sum(max(0, len(text) - max_chars) for text in texts.values()) + record.cut
    cut += sum(len(piece) for piece in record.pieces) - sum(map(len, pieces))
    return {
        **_facts(record),
        **{name: text[:max_chars] for name, text in texts.items()},
        "pieces": pieces,
        "logprobs": record.logprobs[tokens],
        "train_logprobs": None if record.train_logprobs is None else record.train_logprobs[tokens],
        "sampled": None if record.sampled is None else record.sampled[tokens],
        "cut": cut,
        "tokens": len(record.pieces),
    }


def _facts(record: SampleRecord) -> dict[str, Any]:
    facts = {name: getattr(record, name) for name in _FACTS}
    return {**facts, "group": group_scores(record)}


def _text(value: Any) -> str:
    """Return plain text unchanged, the messages of a conversation joined into one text, and other data as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n\n".join(f"[{message.get('role', '?')}]\n{_text(message.get('content', ''))}" for message in value)
    return msgspec.json.encode(value).decode()

"""Shows recorded samples in a terminal (`ctl samples`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError
from shared.samples.reader import Order, SampleSelection, select, splits, steps
from shared.samples.record import SHOWN_CHARACTERS, SampleRecord, conversation, group_scores, plain, shortened

if TYPE_CHECKING:
    from rich.text import Text

INFO_CHARACTERS = 80
"""Number of characters shown of a text that a reward function returned."""
FEW = 5
"""Number of samples that are shown if no number is given."""
STYLES = ("", "yellow", "dark_orange", "red", "bold white on red")
PROBABILITIES = (0.5, 0.2, 0.05, 0.01)
"""A token with at most this probability gets the next style."""
MISMATCHES = (0.01, 0.05, 0.2, 1.0)
"""A token for which the log-probs of the engine and the trainer differ by at least this much gets the next style."""


class Color(StrEnum):
    """The values by which tokens are coloured."""

    LOGPROB = "logprob"
    MISMATCH = "mismatch"
    NONE = "none"


def choose(
    run: Path, *, step: int | None, task: str | None, split: str, order: Order | None, count: int
) -> SampleSelection:
    """Return the samples to show: those of one task, or those of one step (default: the newest).

    Raises a one-line RpcError(bad_request) if there are no such samples.
    """
    recorded = steps(run, split)
    if task is None and step is None and recorded:
        step = recorded[-1]
    limit = None if task is not None and order is None else count
    selection = select(run, step=step, task=task, split=split, order=order, limit=limit)
    if not selection.total:
        raise RpcError(ErrorCode.BAD_REQUEST, _nothing(run, step, task, split, recorded))
    return selection


def _nothing(run: Path, step: int | None, task: str | None, split: str, recorded: Sequence[int]) -> str:
    what = f"of task {task}" if task is not None else f"of step {step}" if step is not None else "yet"
    if recorded:
        return f"{run}: no samples {what} in {split}; available: steps {_ranges(recorded)}"
    others = splits(run)
    there = f"available: {', '.join(others)}" if others else "monitor.samples says which are recorded"
    return f"{run}: no samples {what} in {split}; {there}"


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers compactly: `1-4, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    shown = [f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in parts]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "…", *shown[-3:]])


def as_json(records: Sequence[SampleRecord]) -> list[dict[str, Any]]:
    """Return the records as plain data."""
    plain_data: list[dict[str, Any]] = msgspec.to_builtins(records)
    return plain_data


def show(selection: SampleSelection, color: Color, *, full: bool) -> None:
    """Print the samples and how many are left out. Colours are left out if the output is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    most = 10**9 if full else SHOWN_CHARACTERS
    legend = _legend(color)
    if legend is not None and console.is_terminal:
        console.print(legend)
    for number, record in enumerate(selection.records):
        if number:
            console.print()
        console.print(described(record, color, most))
    if selection.total > len(selection.records):
        console.print(Text(f"\n{selection.shown}", style="dim"))


def described(record: SampleRecord, color: Color, most: int) -> Text:
    """Return a sample as text: its numbers, prompt, completion and answer, each cut to `most` characters."""
    from rich.text import Text

    parts = [Text(_title(record), style="bold"), Text(_facts(record), style="dim")]
    if prompt := conversation(record.messages or record.prompt):
        parts.append(Text(plain(shortened(prompt, most)), style="cyan"))
    if record.sample >= 0:
        parts.append(completion(record, color, most))
    if record.answer is not None:
        parts.append(Text(f"answer: {plain(shortened(str(record.answer), most))}", style="dim"))
    return Text("\n").join(parts)


def _title(record: SampleRecord) -> str:
    sample = f" sample {record.sample}" if record.sample >= 0 else ""
    of = "version" if record.split != "train" else "step"
    why = f": {plain(record.reason)}" if record.reason else ""
    return f"{plain(record.task)}{sample} · {of} {record.step} · {record.state}{why}"


def _facts(record: SampleRecord) -> str:
    if record.sample < 0:
        return "no samples"
    parts = [f"failed: {plain(record.failure)}" if record.reward is None else f"reward {record.reward:g}"]
    numbers = {**record.rewards, **record.metrics, **group_scores(record)}
    parts += [f"{plain(name)} {value:g}" for name, value in numbers.items()]
    parts += [f"{plain(name)} {plain(shortened(value, INFO_CHARACTERS))}" for name, value in record.info.items()]
    parts += [f"advantage {record.advantage:+.3g}"] if record.advantage is not None else []
    parts += [f"{record.length} tokens", *([plain(record.finish_reason)] if record.finish_reason else [])]
    parts += [f"version {', '.join(map(str, record.versions))}"] if record.versions else []
    parts += [f"{record.turns} turns, {record.tool_calls} tool calls"] if record.turns > 1 or record.tool_calls else []
    parts += [f"lineage {record.lineage}"] if record.lineage else []
    parts += [f"{record.cut:,} characters left out"] if record.cut else []
    return " · ".join(parts)


def completion(record: SampleRecord, color: Color, most: int) -> Text:
    """Return the first `most` characters of the completion, with coloured tokens."""
    from rich.text import Text

    if not record.pieces or color == Color.NONE:
        return Text(plain(shortened(record.completion, most)))
    text = Text()
    left = most
    for at, piece in enumerate(record.pieces):
        shown = plain(piece[:left])[:left]
        text.append(shown, style=_style(record, at, color))
        left -= len(shown)
        if left <= 0:
            text.append(f"… ({len(record.pieces) - at - 1:,} more tokens)")
            break
    return text


def _style(record: SampleRecord, at: int, color: Color) -> str:
    if record.sampled is not None and not record.sampled[at]:
        return "dim italic"
    logprob = record.logprobs[at]
    if color == Color.LOGPROB:
        return STYLES[sum(math.exp(logprob) <= bound for bound in PROBABILITIES)]
    if record.train_logprobs is None:
        return ""
    return STYLES[sum(abs(record.train_logprobs[at] - logprob) >= bound for bound in MISMATCHES)]


def _legend(color: Color) -> Text | None:
    from rich.text import Text

    match color:
        case Color.NONE:
            return None
        case Color.LOGPROB:
            bounds = [f" p ≤ {bound:g} " for bound in PROBABILITIES]
        case Color.MISMATCH:
            bounds = [f" |engine - trainer| ≥ {bound:g} " for bound in MISMATCHES]
    text = Text("log-prob: " if color == Color.LOGPROB else "mismatch of log-probs: ", style="dim")
    for bound, style in zip(bounds, STYLES[1:], strict=True):
        text.append(bound, style=style)
    return text

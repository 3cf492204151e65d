"""Formats samples as text: one line per sample, or a page that shows one sample with coloured tokens."""

from __future__ import annotations

from rich.text import Text

from launch.viewers.samples import INFO_CHARACTERS, Color, completion
from launch.viewers.terminal.plot import number
from launch.viewers.terminal.visible import visible, visible_text
from shared.samples.reader import Order
from shared.samples.record import SampleRecord, group_scores, shortened

MAX_SHOWN_CHARS = 20_000
"""Maximum number of characters shown of a prompt or a completion."""
ORDERS: dict[Order | None, str] = {
    None: "as written",
    Order.WORST: "worst first",
    Order.BEST: "best first",
    Order.LONGEST: "longest first",
}
COLORS = {
    Color.LOGPROB: "log-prob of the engine",
    Color.MISMATCH: "difference between engine and trainer",
    Color.NONE: "nothing",
}
"""The quantity that a token's colour shows."""
COLUMNS = {
    **{"task": 18, "sample": 6, "state": 16, "reward": 8, "advantage": 9, "length": 6, "finish": 8, "turns": 5},
    "versions": 12,
}
"""Columns of the sample list, with their widths."""


def cells(record: SampleRecord) -> list[Text]:
    """Return the cells of a sample, in the order of `COLUMNS`."""
    values = (
        record.task,
        str(record.sample),
        f"{record.state} {record.reason}".strip(),
        "-" if record.reward is None else number(record.reward),
        "-" if record.advantage is None else f"{record.advantage:+.3f}",
        str(record.length),
        record.finish_reason,
        str(record.turns),
        ",".join(map(str, record.versions)),
    )
    return [Text(visible(value)) for value in values]


def page(record: SampleRecord, color: Color) -> Text:
    """Return a whole sample: its numbers, prompt and completion."""
    text = Text()
    text.append(f"{record.task}", style="bold")
    text.append(
        f"  sample {record.sample}  step {record.step}  lineage {record.lineage}  {record.state} {record.reason}\n"
    )
    numbers = {**record.rewards, **record.metrics, **group_scores(record)}
    parts = [f"{name} {number(value)}" for name, value in numbers.items()]
    advantage = "" if record.advantage is None else f"  advantage {record.advantage:+.4f}"
    parts += [f"{name} {shortened(value, INFO_CHARACTERS)}" for name, value in record.info.items()]
    reward = f"failed: {record.failure}" if record.reward is None else f"reward {number(record.reward)}"
    text.append(f"{reward}{advantage}  {'  '.join(parts)}\n")
    text.append(
        f"{record.length} tokens  {record.finish_reason}  versions {','.join(map(str, record.versions))}  "
        f"{record.turns} turns  {record.tool_calls} tool calls\n\n"
    )
    for title, value in _prompt(record):
        text.append(f"{title}\n", style="bold cyan")
        text.append(f"{_short(value)}\n\n")
    text.append("completion", style="bold cyan")
    text.append(f"  colours: {COLORS[color]}\n", style="dim")
    text.append_text(completion(record, color, MAX_SHOWN_CHARS))
    if record.answer is not None:
        text.append("\n\nanswer\n", style="bold cyan")
        text.append(_short(str(record.answer)))
    if record.cut:
        text.append(f"\n\n{record.cut:,} characters were not kept", style="dim")
    return visible_text(text)


def _prompt(record: SampleRecord) -> list[tuple[str, str]]:
    if record.messages:
        return [(str(message.get("role", "")), str(message.get("content", ""))) for message in record.messages]
    if isinstance(record.prompt, str):
        return [("prompt", record.prompt)]
    return [(str(message.get("role", "")), str(message.get("content", ""))) for message in record.prompt]


def _short(text: str) -> str:
    cut = len(text) - MAX_SHOWN_CHARS
    return text if cut <= 0 else f"{text[:MAX_SHOWN_CHARS]} … and {cut:,} more characters"

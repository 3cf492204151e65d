"""Shows the progress of a run: a line that stays in place on a terminal, or a line every few seconds elsewhere.

It reads metrics.jsonl and the scheduler's status, but never telemetry, which may be dropped.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from proto.messages import Status, TroubleKind, TroubleRow
from shared.actor.service import ProcessState
from shared.rundir import service_name
from shared.runfiles.files import RunFiles
from shared.runfiles.logs import shorten
from shared.view.curves import Point

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PLAIN_EVERY_S = 5.0
TROUBLE_CHARS = 200
ETA_ROWS = 20
_NUMBER = re.compile(r"(?<!\.py:)\b\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
"""A number in a notice, except the line number of a place in a file."""


def without_numbers(text: str) -> str:
    """Return `text` with `#` in place of numbers. Notices that are then equal report the same thing."""
    return _NUMBER.sub("#", text)


class Repeats:
    """Counts notices that differ in numbers only, so that each kind is shown at its first, tenth, hundredth, ...
    occurrence."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def shown(self, text: str) -> str | None:
        """Count `text`. Return the notice to show, or None."""
        kind = without_numbers(text)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            return text
        return f"{text} ({count} times so far)" if re.fullmatch("10+", str(count)) else None


class Metrics:
    """The rows of metrics.jsonl, read as they are written."""

    def __init__(self, run: Path, *, steps: int) -> None:
        """Read the existing rows of a resumed run. They count towards the summary but not towards the pace."""
        self._files = RunFiles(run)
        self.steps = steps
        self._times: deque[tuple[float, int]] = deque(maxlen=ETA_ROWS)
        self.poll(0.0)
        self._times.clear()

    def poll(self, now: float) -> None:
        """Read the new rows."""
        epoch, step = self._files.epoch, self.step
        while self._files.read():
            pass
        if self._files.epoch != epoch:
            self._times.clear()
        if self.step != step:
            self._times.append((now, self.step))

    @property
    def last(self) -> dict[str, float]:
        """The finite values of the newest row."""
        return self._files.view.curves.last

    @property
    def evaluations(self) -> dict[str, tuple[str, list[Point]]]:
        """For each evaluation set, the name and the values of its mean rewards, each with its step, oldest first.

        They are accuracies if every reward was 0 or 1.
        """
        curves, pattern = self._files.view.curves, re.compile("eval/([^/]+)/(?:reward|accuracy)")
        found: dict[str, tuple[str, list[Point]]] = {}
        for name in dict.fromkeys(match[1] for match in map(pattern.fullmatch, curves.names) if match):
            accuracies = curves.points(f"eval/{name}/accuracy")
            rewards = curves.points(f"eval/{name}/reward") or accuracies
            found[name] = ("accuracy" if accuracies == rewards else "reward", rewards)
        return found

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    def eta_s(self) -> float | None:
        """Return the time to the last step, in seconds, at the pace of the latest rows.

        Return None until there are two rows.
        """
        if len(self._times) < 2:
            return None
        (begin, first), (end, last) = self._times[0], self._times[-1]
        return (self.steps - last) * (end - begin) / (last - first) if last > first else None

    def text(self) -> str:
        """Return the progress line.

        `step 12/200  ETA 3m12s  reward 0.520  heldout 0.610 (0)  5,100 tok/s  staleness 0.90  0.70 s/step`
        """
        parts = [f"step {self.step}/{self.steps}"]
        eta = self.eta_s()
        if eta is not None:
            parts.append(f"ETA {duration(eta)}")
        if "preference/loss" in self.last:
            parts.append(f"loss {self.last['preference/loss']:.3f}  preferred {self.last['preference/accuracy']:.3f}")
        elif "reward/mean" in self.last:
            parts.append(f"reward {self.last['reward/mean']:.3f}")
        elif "loss/policy" in self.last:  # supervised fine-tuning has no rewards
            parts.append(f"loss {self.last['loss/policy']:.3f}")
        newest = {name: points[-1] for name, (_, points) in self.evaluations.items()}
        parts += [f"{name} {value:.3f} ({step:g})" for name, (step, value) in newest.items()]
        for key, form in (
            ("throughput/tokens_per_s", "{:,.0f} tok/s"),
            ("rollout/staleness_mean", "staleness {:.2f}"),
            ("time/step", "{:.2f} s/step"),
        ):
            if key in self.last:
                parts.append(form.format(self.last[key]))
        return "  ".join(parts)


class Screen:
    """Output for progress and notices. On a terminal the progress line stays below the notices."""

    def __init__(self, *, plain: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._plain = not sys.stdout.isatty() if plain is None else plain
        self._console: Console | None = None
        self._live: Live | None = None
        self._shown = ("", "")
        self._shown_at = -PLAIN_EVERY_S

    def __enter__(self) -> Screen:
        if not self._plain:
            from rich.console import Console
            from rich.live import Live

            self._console = Console(highlight=False)
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def notice(self, text: str) -> None:
        """Print a permanent line."""
        with contextlib.suppress(OSError):  # stdout is closed or its disk is full, but the run continues.
            if self._console is not None:
                self._console.print(text, markup=False, soft_wrap=True)
            else:
                print(text, flush=True)

    def progress(self, text: str, *, troubles: str = "", losses: str = "") -> None:
        """Replace the progress line. Without a terminal, print it every few seconds if `text` has changed, or if
        `losses` has changed in more than its numbers; `troubles` are notices then, too, and are not repeated."""
        if self._live is not None:
            from rich.text import Text

            line = "  ".join(filter(None, (troubles, losses, text)))
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        now, shown = self._clock(), (text, without_numbers(losses))
        if shown != self._shown and now - self._shown_at >= PLAIN_EVERY_S:
            self._shown, self._shown_at = shown, now
            with contextlib.suppress(OSError):
                print("  ".join(filter(None, (losses, text))), flush=True)


def starting_text(states: Mapping[str, str], status: Status | None) -> str:
    """Return the line shown before the first metrics: services that are not ready, or the state of the first tasks."""
    waiting = [
        f"{name} {state}" for name, state in states.items() if state not in (ProcessState.READY, ProcessState.DRAINED)
    ]
    if waiting:
        return f"starting: {', '.join(waiting)}"
    if status is None:
        return "all services are ready"
    tasks = " ".join(f"{state} {count}" for state, count in status.tasks.items() if count)
    return f"step {status.step}/{status.steps}  {tasks}"


def rewind_text(step: int, committed: int, *, deterministic: bool, cause: str = "") -> str:
    """Return `back to step 20 of 48: the weights of steps 21-48 died with their processes; they will be trained
    again`, or a line with `cause`."""
    back = f"back to step {step} of {committed}"
    lost = f"steps {step + 1}-{committed}" if committed > step + 1 else f"step {committed}"
    if cause and not deterministic:
        return f"{back}: {cause}; {lost} will be trained again"
    if deterministic:
        because = f"{cause}; " if cause else ""
        return f"{back}: {because}{lost} will be trained again, with bit-identical results"
    whose = "they" if committed > step + 1 else "it"
    return f"{back}: the weights of {lost} died with their processes; {whose} will be trained again"


class Troubles:
    """Troubles in the scheduler's status, shown as permanent notices and as a part of the progress line."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int, str], str] = {}
        """The text of each trouble that was announced and is not over, as it was last."""
        self._begun: set[tuple[str, int, str]] = set()
        self._repeats = Repeats()
        self.text = ""
        """The part of the progress line about current troubles: `rollout/0: rewards failing: 64 of 64, ...`."""
        self.losses = ""
        """All losses so far: `dropped tasks 12 (reward_failed 12)  lost samples 64 (timeout 64)`."""

    def take(self, status: Status) -> list[str]:
        """Process a new status. Return notices about the troubles that began or ended since the previous status.

        A trouble that comes and goes is announced as `Repeats` says, and its end only if its beginning was.
        """
        now = {(trouble.service, trouble.instance, trouble.kind): trouble for trouble in status.troubles}
        notices: list[str] = []
        for key, trouble in now.items():
            if key not in self._begun and (shown := self._repeats.shown(f"{_who(trouble)}: {trouble.text}")):
                notices.append(shown)
                self._told[key] = trouble.text
        over = {key for key in self._begun if key not in now and key[2] != TroubleKind.OVERRIDDEN}
        for key in sorted(over & self._told.keys()):
            notices.append(f"{service_name(*key[:2])}: has ended: {shorten(self._told.pop(key))}")
        self._begun = (self._begun - over) | now.keys()
        self._told |= {key: now[key].text for key in now.keys() & self._told.keys()}
        current = [trouble for trouble in status.troubles if trouble.kind != TroubleKind.OVERRIDDEN]
        self.text = "  ".join(shorten(f"{_who(trouble)}: {trouble.text}", TROUBLE_CHARS) for trouble in current)
        self.losses = counts_text(status)
        return notices


def counts_text(status: Status) -> str:
    """Return the dropped tasks and lost samples so far, by reason, or an empty string if there are none."""
    parts = []
    if status.dropped:
        parts.append(f"dropped tasks {_by_reason(status.dropped)}")
    if status.lost:
        parts.append(f"lost samples {_by_reason(status.lost)}")
    return "  ".join(parts)


def _by_reason(counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{sum(counts.values())} ({listed})"


def _who(row: TroubleRow) -> str:
    return service_name(row.service, row.instance)


def duration(seconds: float) -> str:
    """Format seconds: `192.4` -> `3m12s`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def evaluation_lines(metrics: Metrics) -> list[str]:
    """Return the first and last evaluation of each set, one line per set."""
    lines = []
    for name, (label, points) in metrics.evaluations.items():
        (first_step, first), (step, value) = points[0], points[-1]
        if first_step == step:
            lines.append(f"{label:<10} {name}: {value:.3f} (step {step:g})")
        else:
            change = f"{first:.3f} (step {first_step:g}) -> {value:.3f} (step {step:g}), {value - first:+.3f}"
            lines.append(f"{label:<10} {name}: {change}")
    return lines

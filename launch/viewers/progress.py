"""Shows the progress of a run: a line that stays in place on a terminal, or a line every few seconds elsewhere.

It reads metrics.jsonl and the scheduler's status, but never telemetry, which may be dropped.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from proto.messages import Status, TroubleKind, TroubleRow
from shared.actor.service import ProcessState
from shared.rundir import service_name
from shared.runfiles.logs import shorten
from shared.runfiles.metrics import MetricsFollower, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PLAIN_EVERY_S = 5.0
TROUBLE_CHARS = 200
ETA_ROWS = 20


class Metrics:
    """The rows of metrics.jsonl, read as they are written."""

    def __init__(self, path: Path, *, steps: int) -> None:
        """Read the existing rows of a resumed run. They count towards the summary but not towards the pace."""
        self._follower = MetricsFollower(path)
        self.steps = steps
        self.last: dict[str, float] = {}
        """The finite values of the newest row."""
        self.accuracy: dict[str, tuple[int, float]] = {}
        self.first_accuracy: dict[str, tuple[int, float]] = {}
        self._times: deque[tuple[float, int]] = deque(maxlen=ETA_ROWS)
        self._read()
        self._times.clear()

    def poll(self, now: float) -> bool:
        """Read the new rows. Return whether there were any."""
        new = self._read()
        if new:
            self._times.append((now, self.step))
        return new

    def _read(self) -> bool:
        any_rows = False
        while (new := self._follower.poll()).more:
            if new.restarted:
                self.accuracy.clear()
                self.first_accuracy.clear()
                self._times.clear()
            for row in new.rows:
                self._take(row)
            any_rows = any_rows or bool(new.rows)
        return any_rows

    def _take(self, row: Row) -> None:
        self.last = {name: value for name, value in row.items() if value is not None}
        for key, value in self.last.items():
            if key.startswith("eval/") and key.endswith("/accuracy"):
                name = key[len("eval/") : -len("/accuracy")]
                self.accuracy[name] = (self.step, value)
                self.first_accuracy.setdefault(name, (self.step, value))

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
        if "reward/mean" in self.last:
            parts.append(f"reward {self.last['reward/mean']:.3f}")
        parts += [f"{name} {value:.3f} ({step})" for name, (step, value) in self.accuracy.items()]
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

    def __init__(self, *, plain: bool | None = None) -> None:
        self._plain = not sys.stdout.isatty() if plain is None else plain
        self._console: Console | None = None
        self._live: Live | None = None
        self._shown = ""
        self._shown_at = 0.0

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

    def progress(self, text: str) -> None:
        """Replace the progress line. Without a terminal, print it every few seconds if it has changed."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))
            return
        now = time.monotonic()
        if text != self._shown and now - self._shown_at >= PLAIN_EVERY_S:
            self._shown, self._shown_at = text, now
            with contextlib.suppress(OSError):
                print(text, flush=True)


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
    """Return `back to step 20 of 48: the weights of steps 21-48 died with their processes`, or a line with `cause`."""
    lost = f"steps {step + 1}-{committed}" if committed > step + 1 else f"step {committed}"
    if cause and not deterministic:
        return f"back to step {step} of {committed}: {cause}; {lost} will be trained again"
    if deterministic:
        because = f"{cause}; " if cause else ""
        return f"back to step {step} of {committed}: {because}{lost} will be trained again, with bit-identical results"
    return f"back to step {step} of {committed}: the weights of {lost} died with their processes"


class Troubles:
    """Troubles in the scheduler's status, shown as permanent notices and as a part of the progress line."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int, str], str] = {}
        self._now: list[TroubleRow] = []
        self._counts = ""

    def take(self, status: Status) -> list[str]:
        """Process a new status. Return notices about the troubles that began or ended since the previous status."""
        now = {(trouble.service, trouble.instance, trouble.kind): trouble for trouble in status.troubles}
        notices = [f"{_who(trouble)}: {trouble.text}" for key, trouble in now.items() if key not in self._told]
        over = [key for key in self._told if key not in now and key[2] != TroubleKind.OVERRIDDEN]
        notices += [f"{service_name(*key[:2])}: over: {shorten(self._told.pop(key))}" for key in over]
        self._told |= {key: trouble.text for key, trouble in now.items()}
        self._now = [trouble for trouble in status.troubles if trouble.kind != TroubleKind.OVERRIDDEN]
        self._counts = counts_text(status)
        return notices

    def text(self) -> str:
        """Return the part of the progress line about current troubles and all losses so far.

        `rollout/0: rewards failing: 64 of 64, ...  dropped 12 (reward_failed 12)  lost samples 64 (timeout 64)`
        """
        parts = [shorten(f"{_who(trouble)}: {trouble.text}", TROUBLE_CHARS) for trouble in self._now]
        return "  ".join([*parts, self._counts] if self._counts else parts)


def counts_text(status: Status) -> str:
    """Return the dropped tasks and lost samples so far, by reason, or an empty string if there are none."""
    parts = []
    if status.dropped:
        parts.append(f"dropped {_by_reason(status.dropped)}")
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


def accuracy_lines(metrics: Metrics) -> list[str]:
    """Return the first and last evaluation of each set, one line per set."""
    lines = []
    for name, (step, value) in metrics.accuracy.items():
        first_step, first = metrics.first_accuracy[name]
        if first_step == step:
            lines.append(f"accuracy   {name}: {value:.3f} (step {step})")
        else:
            lines.append(
                f"accuracy   {name}: {first:.3f} (step {first_step}) -> {value:.3f} (step {step}), {value - first:+.3f}"
            )
    return lines

"""Writes the `report.html` of a run: one page without scripts or links, readable offline. It reads run files only.

The page is written at the end of every run, and again by `ctl report`, which also works while the run is under way. Its
size is limited, and so is the time that a finishing run waits for it.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

import structlog

from launch.supervisor.plan import SUPERVISOR
from launch.viewers.curves import History, Row, chosen, read_history
from launch.viewers.drawing import picture, short, visible
from launch.viewers.progress import duration
from services.scheduler.journal import rewinds
from services.tracker.redaction import without_secrets
from shared.rundir import RunDir, checkpoint_steps
from shared.samples.plain import conversation
from shared.samples.reader import read, splits, steps
from shared.samples.record import FOLDER, Record, file_of, rank
from shared.topology import document

REPORT = "report.html"
AT_END_S = 1.0
"""Maximum seconds that a finishing run waits for the report."""
LOG_BYTES = 8 << 20
"""Maximum bytes read from the end of a log."""
SAMPLES_BYTES = 16 << 20
"""Maximum size, in bytes, of a sample file that is read."""
MOST_LINES = 200
"""Maximum number of rows of each table."""
MOST_METRICS = 24
TEXT_CHARS = 4000
CONFIGURATION_CHARS = 200_000
BEST, WORST, LONGEST, EVALUATED = 4, 4, 2, 4
"""Numbers of samples shown from the newest step with samples, and from each evaluation set."""
_CAUSES = ("process died", "killed", "to be killed", "cannot start", "host lost", "the run goes on without it")
"""Events in the supervisor's log that are listed. Each names the process or host in its field `name` or `host`."""


@dataclass(frozen=True)
class Shown:
    """The texts of one sample, for the page."""

    title: str
    facts: str
    prompt: str
    completion: str


def write_report(run: RunDir) -> Path:
    """Write the page and return its path. Raises OSError."""
    path = run.path / REPORT
    partial = path.with_name(f".{REPORT}.{os.getpid()}.partial")
    try:
        partial.write_text(page(run), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_in_time(run: RunDir, limit_s: float = AT_END_S) -> str:
    """Write the page within `limit_s`. Return a line for the console about the result. A failure is also logged."""
    told = [f"not ready after {limit_s:g} s; python -m launch.ctl --run {run.path} report writes it"]

    def work() -> None:
        try:
            told[0] = str(write_report(run))
        except Exception as error:  # a damaged file may cause any error, but must not change the run's outcome
            structlog.get_logger(SUPERVISOR).warning("no report", exc_info=error)
            told[0] = f"not written ({type(error).__name__}: {error}), log: {run.log_file(SUPERVISOR, 0)}"

    # The process does not wait for a daemon thread at exit. The thread writes to its own file and renames it last.
    thread = threading.Thread(target=work, name="report", daemon=True)
    thread.start()
    thread.join(limit_s)
    return told[0]


def page(run: RunDir) -> str:
    """Return the HTML of the page."""
    from jinja2 import Environment  # other commands do not import it
    from markupsafe import Markup

    history = read_history(run.path) if run.metrics.is_file() else History(run.name, [], {})
    log = list(_lines(run.log_file(SUPERVISOR, 0)))
    environment = Environment(autoescape=True)
    template = environment.from_string(resources.files("launch").joinpath(REPORT).read_text(encoding="utf-8"))
    return template.render(
        name=visible(run.name, 100),
        written=_time(datetime.now().timestamp()),
        summary=_summary(run, history, log),
        curves=Markup(picture([history], chosen([history], [])[:MOST_METRICS])),  # noqa: S704 (it escapes its texts)
        evaluations=_evaluations(history),
        metrics=_last_values(history),
        causes=_causes(log),
        restarts=_restarts(log),
        rewinds=[(to, of, visible(cause, 300)) for to, of, cause in rewinds(run.journal)[-MOST_LINES:]],
        warnings=_warnings(run.warnings),
        samples=list(_samples(run.path)),
        configuration=visible(_configuration(run.topology), CONFIGURATION_CHARS),
    )


def _summary(run: RunDir, history: History, log: Sequence[Row]) -> list[tuple[str, str]]:
    ended = next((line for line in reversed(log) if line.get("event") in ("ended", "started")), {})
    outcome = str(ended.get("outcome", "under way"))
    rows = [("outcome", outcome)]
    if ended.get("cause"):
        rows.append(("cause", visible(str(ended["cause"]), 500)))
    times = [at for line in log if (at := _at(line)) is not None]
    if times:
        rows += [("begun", _time(times[0])), ("last event", _time(times[-1])), ("time", duration(times[-1] - times[0]))]
    last = history.rows[-1] if history.rows else {}
    rows.append(("steps", str(last.get("step", 0))))
    for name in history.metrics:
        if name.endswith("/accuracy") and (points := history.points(name)):
            rows.append((visible(name, 100), f"{points[0][1]:.3f} → {points[-1][1]:.3f} (step {points[-1][0]})"))
    for name in ("reward/mean", "throughput/tokens_per_s"):
        if points := history.points(name):
            rows.append((name, f"{short(points[0][1])} → {short(points[-1][1])}"))
    saved = ", ".join(map(str, checkpoint_steps(run.checkpoints)[-5:]))
    return [*rows, ("checkpoints", saved or "none"), ("folder", visible(str(run.path), 500))]


def _evaluations(history: History) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the newest evaluations."""
    names = [name for name in history.metrics if name.startswith("eval/")][:MOST_METRICS]
    found = [row for row in history.rows if any(name in row for name in names)][-MOST_LINES:]
    table = [[str(row["step"]), *(_number(row.get(name)) for name in names)] for row in found]
    return [visible(name, 60) for name in names], table


def _last_values(history: History) -> list[list[str]]:
    """Return the name and the first, last, lowest and highest value of each metric."""
    table: list[list[str]] = []
    for name in history.metrics[:MOST_LINES]:
        if values := [value for _, value in history.points(name)]:
            table.append([visible(name, 80), *map(short, (values[0], values[-1], min(values), max(values)))])
    return table


def _causes(log: Iterable[Row]) -> list[tuple[str, str, str, str]]:
    """Return the time, process, event and cause of each log line whose event is in `_CAUSES`."""
    found = [
        (
            _time(_at(line)),
            visible(str(line.get("name", line.get("host", ""))), 80),
            str(line["event"]),
            visible(str(line.get("cause", line.get("error", ""))), 400),
        )
        for line in log
        if line.get("event") in _CAUSES
    ]
    return found[-MOST_LINES:]


def _restarts(log: Iterable[Row]) -> list[tuple[str, int]]:
    """Return how many times each process was restarted."""
    started = Counter(visible(str(line.get("name")), 80) for line in log if line.get("event") == "started")
    return sorted((name, count - 1) for name, count in started.items())[:MOST_LINES]


def _warnings(path: Path) -> list[list[str]]:
    """Return the time, step, kind, text and remedy of each of the newest warnings."""
    keys = ("step", "kind", "text", "remedy")
    newest = list(_lines(path))[-MOST_LINES:]
    return [[_time(line.get("at")), *(visible(str(line.get(key, "")), 500) for key in keys)] for line in newest]


def _samples(folder: Path) -> Iterator[Shown]:
    """Yield the samples with the highest and the lowest rewards, the longest samples, and some samples from each
    evaluation."""
    for split in splits(folder):
        newest = next((step for step in reversed(steps(folder, split)) if _is_small(folder, split, step)), None)
        if newest is None:
            continue
        records = [each for each in read(folder, step=newest, split=split) if each.sample >= 0]
        by_reward = sorted(records, key=rank)
        if split != "train":
            yield from _shown(by_reward[:EVALUATED], f"{split}, version {newest}")
            continue
        by_length = sorted(records, key=lambda each: -each.length)
        yield from _shown(by_reward[::-1][:BEST], f"step {newest}, highest reward")
        yield from _shown(by_reward[:WORST], f"step {newest}, lowest reward")
        yield from _shown(by_length[:LONGEST], f"step {newest}, longest")


def _is_small(folder: Path, split: str, step: int) -> bool:
    try:
        return (folder / FOLDER / file_of(split, step)).stat().st_size <= SAMPLES_BYTES
    except OSError:
        return False


def _shown(records: Iterable[Record], title: str) -> Iterator[Shown]:
    for each in records:
        parts = {"reward": each.reward, **each.rewards, "advantage": each.advantage, "tokens": each.length}
        facts = [f"{name} {_number(value)}" for name, value in parts.items() if value is not None]
        facts += [f"failed: {each.failure}"] if each.reward is None else []
        facts += [f"finish {each.finish_reason}", f"versions {', '.join(map(str, each.versions[:8]))}"]
        if each.turns > 1 or each.tool_calls:
            facts.append(f"{each.turns} turns, {each.tool_calls} tool calls")
        yield Shown(
            visible(f"{title}: {each.task} sample {each.sample}", 200),
            visible(", ".join(facts), 600),
            visible(conversation(each.prompt), TEXT_CHARS),
            visible(each.completion, TEXT_CHARS),
        )


def _lines(path: Path) -> Iterator[Row]:
    """Yield the JSON objects in a file's last `LOG_BYTES`, or nothing if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            lines = file.read(LOG_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the line is cut off
        if isinstance(found, dict):
            yield found


def _configuration(path: Path) -> str:
    """Return the topology without secrets, for readers of the report."""
    try:
        data = document.plain(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"{path} is {error}"
    return document.dump(without_secrets(data))


def _at(line: Row) -> float | None:
    try:
        return datetime.fromisoformat(str(line.get("timestamp"))).timestamp()
    except ValueError:
        return None


def _time(at: object) -> str:
    try:
        return datetime.fromtimestamp(float(at)).strftime("%Y-%m-%d %H:%M:%S")  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _number(value: object) -> str:
    return short(float(value)) if isinstance(value, int | float) else ""

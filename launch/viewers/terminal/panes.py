"""Formats the views of a live run as text of a given width and height. It reads no file and uses no terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.text import Text

from launch.viewers.progress import duration
from launch.viewers.samples import Color, described
from launch.viewers.terminal.plot import Series, append_cells, bar, number, plot
from launch.viewers.terminal.visible import visible
from shared.samples.reader import Order
from shared.samples.record import SampleRecord
from shared.view import RunView
from shared.view.curves import PANELS, Panel
from shared.view.look import LOOKS, WorkKind, of_service, of_span
from shared.view.notices import LogLine
from shared.view.run_view import Progress
from shared.view.services import Health, ServiceView
from shared.view.timeline import Lane, StepEnd

HEALTH_STYLES = {Health.WELL: "green", Health.CHANGING: "yellow", Health.WRONG: "bold red", Health.ENDED: "dim"}
LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
MIN_PLOT_WIDTH, MIN_PLOT_HEIGHT = 38, 7
WORK, WAIT, STEP_END = "█", "░", "│"
NAME_WIDTH = 24
MIN_WAIT_S = 0.05
"""Shorter waits are not listed."""


def headline(run: str, progress: Progress, *, width: int, note: str = "") -> Text:
    """Return one line with the run's name, step, progress bar, ETA, reward and speed."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(run, style="bold")
    if progress.step is not None:
        line.append(f"  step {progress.step}/{progress.steps if progress.steps is not None else '?'} ")
        if progress.steps:
            line.append(bar(progress.step / progress.steps, 10 if width < 100 else 24), style="green")
    if progress.eta_s is not None and progress.step != progress.steps:
        line.append(f"  ETA {duration(progress.eta_s)}")
    for name, form in (
        ("reward/mean", "reward {:.3f}") if "reward/mean" in progress.values else ("loss/policy", "loss {:.3f}"),
        ("throughput/tokens_per_s", "{:,.0f} tok/s"),
        ("time/step", "{:.2f} s/step"),
    ):
        if name in progress.values:
            line.append(f"  {form.format(progress.values[name])}")
    if not progress.reachable and not note:
        line.append("  the scheduler is not responding", style="bold red")
    if note:
        line.append(f"  {note}", style="bold yellow")
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


# ---- overview


def overview(view: RunView, now: float, width: int, height: int) -> list[Text]:
    """Return as much of the troubles and warnings, processes, pipeline and most important curves as fits."""
    lines = [*notices(view, width, limit=3), *_processes(view.services(now), width), *pipeline(view, width)]
    room = height - len(lines) - 1
    if room >= MIN_PLOT_HEIGHT:
        lines += [Text(), *curves(view, width, room)]
    return lines


def _processes(services: Sequence[ServiceView], width: int) -> list[Text]:
    """Return the processes by service with their states, on as many lines as needed."""
    groups: dict[str, list[ServiceView]] = defaultdict(list)
    for process in services:
        groups[process.name.rpartition("/")[0]].append(process)
    line = Text("processes", style="bold", no_wrap=True)
    lines = [line]
    for service, members in groups.items():
        part = Text(f"  {service} ")
        states: dict[tuple[str, Health], int] = defaultdict(int)
        for member in members:
            states[(member.state, member.health)] += 1
        for (state, health), count in states.items():
            part.append(state if len(members) == 1 else f"{count}×{state} ", style=HEALTH_STYLES[health])
        restarts = sum(member.restarts or 0 for member in members)
        if restarts:
            part.append(f" ↻{restarts}", style="yellow")
        if line.cell_len + part.cell_len > width:
            line = Text(" " * 9, no_wrap=True)
            lines.append(line)
        line.append_text(part)
    return lines


# ---- pipeline


def pipeline(view: RunView, width: int) -> list[Text]:
    """Return tasks, leases, staleness and stores in a few lines."""
    seen = view.pipeline()
    lines = [_row("tasks", [f"{state} {count:,}" for state, count in seen.tasks.items() if count], width)]
    stages = [f"{stage} {count}" for stage, count in seen.leases_by_stage.items() if count]
    lines.append(_row("leases", [f"{seen.leases} live", *stages, f"{seen.waiting} workers wait"], width))
    if seen.staleness:
        total = max(sum(seen.staleness.values()), 1)
        parts = [f"{age}: {count / total:.0%}" for age, count in seen.staleness.items()]
        lines.append(_row("staleness", [*parts, f"of step {seen.staleness_step}"], width))
    for store in seen.stores:
        share = store.bytes / store.limit_bytes if store.limit_bytes else 0.0
        parts = [
            f"{store.name} {bar(share, 10)} {memory(store.bytes)} of {memory(store.limit_bytes)}",
            f"{store.shards:,.0f} shards",
            f"BUSY {store.busy:,.0f}",
            *([f"spilled {memory(store.spilled_bytes)}"] if store.spilled_bytes else []),
        ]
        lines.append(_row("store", parts, width, style="yellow" if share > 0.9 else ""))
    for title, counts in (("dropped", seen.dropped), ("lost", seen.lost)):
        if counts:
            lines.append(_row(title, [f"{reason} {count:,}" for reason, count in counts.items()], width))
    return lines


def pipeline_page(view: RunView, width: int) -> list[Text]:
    """Return tasks by state, staleness and leases as bars, followed by the lines of `pipeline`."""
    seen = view.pipeline()
    lines: list[Text] = []
    lines += _bars("tasks by state", {state: float(count) for state, count in seen.tasks.items()}, width)
    title = f"staleness of the samples of step {seen.staleness_step}, in versions"
    lines += _bars(title, {str(age): float(count) for age, count in seen.staleness.items()}, width)
    leases = {f"leases of {stage}": float(count) for stage, count in seen.leases_by_stage.items()}
    lines += _bars("leases", {**leases, "workers waiting for one": float(seen.waiting)}, width)
    return [*lines, *pipeline(view, width)]


def _bars(title: str, counts: dict[str, float], width: int) -> list[Text]:
    if not counts:
        return []
    names = max(len(name) for name in counts)
    most = max(max(counts.values()), 1.0)
    lines = [Text(title, style="bold")]
    for name, count in counts.items():
        line = Text(f"  {name.ljust(names)} {count:>9,.0f} ", no_wrap=True)
        line.append(bar(count / most, max(width - names - 14, 4), empty=" "), style="cyan")
        lines.append(line)
    return [*lines, Text()]


# ---- curves


def curves(view: RunView, width: int, height: int, *, panels: Iterable[Panel] = PANELS) -> list[Text]:
    """Return as many pictures as fit, side by side."""
    available = view.curves.names
    wanted = [(panel.title, names) for panel in panels if (names := panel.matching(available))]
    if not wanted:
        return [Text("no step has completed yet", style="dim")]
    across = min(max(width // MIN_PLOT_WIDTH, 1), len(wanted), 4)
    down = max(min(height // MIN_PLOT_HEIGHT, -(-len(wanted) // across)), 1)
    each_width, each_height = (width - 2 * (across - 1)) // across, max(height // down, 4)
    lines: list[Text] = []
    shown = wanted[: across * down]
    for at in range(0, len(shown), across):
        row = [
            plot(title, [Series(name, view.curves.points(name)) for name in names], each_width, each_height)
            for title, names in shown[at : at + across]
        ]
        lines += [Text("  ").join(parts) for parts in zip(*row, strict=True)]
    return lines


# ---- timeline


def timeline(view: RunView, now: float, width: int, seconds: float) -> list[Text]:
    """Return a lane per process that shows what the process worked on and when it waited, with the ends of steps."""
    lanes = view.timeline(now, seconds)
    if not lanes:
        return [Text(f"no process has reported work or waits in the last {seconds:g} s", style="dim")]
    across = max(width - NAME_WIDTH - 14, 10)
    ends = view.step_ends(now, seconds)
    columns = {min(int((step_end.at - now + seconds) / seconds * across), across - 1): step_end for step_end in ends}
    kinds: dict[WorkKind, dict[str, None]] = defaultdict(dict)
    lines = []
    for lane in lanes:
        line = Text(f"{lane.name[:NAME_WIDTH]:<{NAME_WIDTH}} ", no_wrap=True)
        cells = []
        for at, (what, waits) in enumerate(_cells(lane, now - seconds, seconds, across)):
            if not what:
                cells.append((STEP_END if at in columns else " ", ""))
                continue
            kind = of_span(what, waits=waits)
            kinds[kind][what] = None
            cells.append((WAIT if waits else WORK, LOOKS[kind].color))
        append_cells(line, cells)
        line.append(f" {lane.working_s / lane.known_s:4.0%}", style="bold")
        line.append(f" {lane.waiting_s / lane.known_s:4.0%}", style="dim")
        lines.append(line)
    if columns:
        lines.append(_steps(columns, across))
    axis = Text(" " * (NAME_WIDTH + 1) + f"{-seconds:g} s".ljust(across - 3) + "now  works waits", style="dim")
    legend = Text(no_wrap=False)
    for kind, whats in kinds.items():
        legend.append(f"{WAIT if kind is WorkKind.IDLE else WORK} ", style=LOOKS[kind].color)
        legend.append(f"{kind}: {', '.join(whats)}  ")
    return [*lines, axis, legend, Text(), *_waits(lanes)]


def _cells(lane: Lane, begin: float, seconds: float, across: int) -> list[tuple[str, bool]]:
    """Return what the process did in each of `across` parts of the window, and whether it waited. If it did both in a
    part, only the work is returned."""
    cells: list[tuple[str, bool]] = [("", False)] * across
    for span in sorted(lane.spans, key=lambda part: not part.waits):
        first = int((span.begin - begin) / seconds * across)
        last = max(int((span.end - begin) / seconds * across), first + 1)
        for at in range(max(first, 0), min(last, across)):
            cells[at] = (span.what, span.waits)
    return cells


def _steps(columns: dict[int, StepEnd], across: int) -> Text:
    """Return a line that marks the ends of steps, with their numbers where there is room."""
    marks = [" "] * across
    room = across
    for at, end in sorted(columns.items(), reverse=True):
        label = f"{STEP_END}{end.step if end.step is not None else ''}"
        marks[at : at + len(label)] = label if at + len(label) <= room else STEP_END
        room = at
    return Text(f"{'ends of steps':<{NAME_WIDTH}} {''.join(marks[:across])}", style="dim", no_wrap=True)


def _waits(lanes: Sequence[Lane]) -> list[Text]:
    """Return a line for each kind of wait, longest first."""
    waits = [(wait, lane) for lane in lanes for wait in lane.waits if wait.seconds >= MIN_WAIT_S]
    lines = [Text("which process waited for which", style="bold")]
    for wait, lane in sorted(waits, key=lambda pair: -pair[0].seconds):
        text = f"  {lane.name} waited {wait.seconds:.1f} s of {lane.known_s:.3g} s for a {wait.what} from {wait.of}"
        lines.append(Text(text))
    return lines if waits else []


# ---- services


def service_cells(service: ServiceView) -> list[Text]:
    """Return the cells of a process, in the order of `SERVICE_COLUMNS`."""
    style = HEALTH_STYLES[service.health]
    silent = service.health is Health.WRONG and service.state in ("READY", "STARTING", "DRAINING")
    return [
        Text.assemble(("█ ", LOOKS[of_service(service.name)].color), (service.name, "bold")),
        Text("SILENT" if silent else service.state, style=style),
        Text("-" if service.restarts is None else str(service.restarts), style="yellow" if service.restarts else ""),
        Text("-" if service.progress_age_s is None else f"{service.progress_age_s:.0f} s ago"),
        Text("-" if service.cpu_share is None else f"{service.cpu_share:.0%}"),
        Text("-" if service.rss_bytes is None else memory(service.rss_bytes)),
        Text("-" if service.gpu_bytes is None else memory(service.gpu_bytes)),
        Text(service.host or "-"),
        Text(str(service.pid or "-")),
        Text(service.incarnation[:8] or "-"),
        Text(service.cause, style="dim"),
    ]


SERVICE_COLUMNS = {
    **{"service": 25, "state": 9, "restarts": 8, "progress": 9, "CPU": 5, "memory": 10, "GPU memory": 10},
    **{"host": 16, "pid": 8, "incarnation": 11, "last end": 80},
}
"""Columns of the process list, with their widths."""


# ---- notices and logs


def notices(view: RunView, width: int, *, limit: int | None = None) -> list[Text]:
    """Return current troubles, warnings and returns to earlier steps, or only the newest `limit` of these."""
    lines = [
        Text(f"✗ {trouble.service}: {trouble.text}", style="bold red", no_wrap=True, overflow="ellipsis")
        for trouble in view.troubles()
    ]
    timed: list[tuple[float, Text]] = []
    for warning in view.warnings():
        line = Text(f"{clock(warning.at)} step {warning.step} ", style="dim")
        line.append(f"▲ {warning.kind}: ", style="bold yellow")
        line.append(warning.text, style="yellow")
        line.append(f" → {warning.remedy}" if warning.remedy else "", style="default not dim")
        timed.append((warning.at, line))
    for rewind in view.rewinds():
        text = f"{clock(rewind.at)} ↺ back to step {rewind.step} of {rewind.committed}; later steps are trained again"
        timed.append((rewind.at, Text(text, style="yellow")))
    lines += [line for _, line in sorted(timed, key=lambda item: item[0])]
    if limit is not None:
        lines = lines[-limit:]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
    return lines


def log_line(line: LogLine) -> Text:
    """Return a log line with its level's colour, and a mark in the colour of its service's work."""
    text = Text(f"{line.at[11:23]} ", style="dim")
    text.append(f"{line.level.upper():<8}", style=LEVEL_STYLES.get(line.level, "default not dim"))
    text.append("█ ", style=f"{LOOKS[of_service(line.service)].color} not dim")
    text.append(f"{line.service:<{NAME_WIDTH}} ", style="default not dim")
    text.append(line.text, style="default not dim")
    return text


# ---- samples

MAX_SHOWN_CHARS = 20_000
"""Maximum number of characters shown of a prompt or a completion."""
SAMPLE_ORDERS: dict[Order | None, str] = {
    None: "as written",
    Order.WORST: "worst first",
    Order.BEST: "best first",
    Order.LONGEST: "longest first",
}
SAMPLE_COLORS = {
    Color.LOGPROB: "log-prob of the engine",
    Color.MISMATCH: "difference between engine and trainer",
    Color.NONE: "nothing",
}
"""The quantity that a token's colour shows."""
SAMPLE_COLUMNS = {
    **{"task": 18, "sample": 6, "state": 16, "reward": 8, "advantage": 9, "length": 6, "finish": 8, "turns": 5},
    "versions": 12,
}
"""Columns of the sample list, with their widths."""


def sample_cells(record: SampleRecord) -> list[Text]:
    """Return the cells of a sample, in the order of `SAMPLE_COLUMNS`."""
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


def sample_page(record: SampleRecord, color: Color) -> Text:
    """Return a whole sample, and what the colours of its tokens show."""
    colours = Text(f"colours: {SAMPLE_COLORS[color]}", style="dim")
    return Text("\n").join([colours, described(record, color, MAX_SHOWN_CHARS)])


def clock(at: float) -> str:
    """Format a time in seconds since 1970 as the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def memory(nbytes: float) -> str:
    """Format bytes: `512 KiB`, `1.5 GiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.0f} KiB"


def _row(title: str, parts: Sequence[str], width: int, *, style: str = "") -> Text:
    line = Text(f"{title:<10}", style="bold", no_wrap=True, overflow="ellipsis")
    line.append("  ".join(parts) or "-", style=style or "default not bold")
    line.truncate(width, overflow="ellipsis")
    return line

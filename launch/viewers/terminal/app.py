"""The terminal interface: tabs that show one live run. The visible tab is redrawn once a second."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, RichLog, Static, TabbedContent, TabPane

from launch.processes.plan import LEASING, SUPERVISOR
from launch.viewers.peer import Run, with_client
from launch.viewers.samples import Color
from launch.viewers.terminal import panes
from launch.viewers.terminal.feed import Feed
from launch.viewers.terminal.visible import visible, visible_text
from launch.viewers.terminal.widgets import Confirm, Help, Picture
from proto.messages import Ack, DrainService, RestartService
from shared.rpc.errors import RpcError
from shared.rundir import RunDir, parse_service_name
from shared.samples import reader
from shared.samples.reader import Order, select
from shared.samples.record import FOLDER, SampleRecord, file_of, split_of
from shared.stages import TRAIN
from shared.view.curves import PANELS, Panel
from shared.view.notices import LEVELS, LogLine

REDRAW_S = 1.0
LONGEST_REDRAW_S = 5.0
CPU_SHARE = 0.025
"""Fraction of a core above which the visible view is drawn less often, down to once in `LONGEST_REDRAW_S`."""
WINDOWS_S = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_SAMPLES = 200
"""Maximum number of samples that are listed."""
MAX_LOG_SHOWN = 1000
TABS = ("overview", "services", "pipeline", "curves", "timeline", "log", "samples", "warnings")
INPUTS = {"log": ("#filter", "#log-lines"), "samples": ("#task", "#sample-list")}
"""The input that `/` selects in a view, and the widget that has the focus afterwards."""
TITLES = ("Overview", "Services", "Pipeline", "Curves", "Time", "Log", "Samples", "Warnings")


class MonitorApp(App[None]):
    """The views of one run. They change nothing unless an operator asks for it."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $panel; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0 1; }
    #sample-list { height: 40%; }
    #filter, #task { height: 1; border: none; padding: 0; }
    #log-lines { height: 1fr; }
    Help, Confirm { align: center middle; }
    #help, #confirm { width: auto; max-width: 90%; height: auto; max-height: 95%; padding: 1 2;
                      border: round $primary; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show('{tab}')", show=False) for number, tab in enumerate(TABS, 1)),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("r", "restart", "restart"),
        Binding("d", "drain", "drain"),
        Binding("down", "scroll_panels(1)", "next", priority=True),
        Binding("up", "scroll_panels(-1)", "previous", priority=True, show=False),
        Binding("z", "zoom", "one or many"),
        Binding("minus", "window(1)", "longer", key_display="-"),
        Binding("plus,equals_sign", "window(-1)", "shorter", key_display="+"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("l", "level", "level"),
        Binding("w", "wrap", "whole lines"),
        Binding("comma", "step(-1)", "earlier", key_display=","),
        Binding("full_stop", "step(1)", "later", key_display="."),
        Binding("o", "order", "order"),
        Binding("c", "colours", "colours"),
        Binding("e", "split", "data set"),
        Binding("t", "theme", "light/dark", show=False),
        Binding("escape", "leave_input", show=False),
        Binding("q,ctrl+c", "quit", "quit"),
    ]

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self.shown_at = 0.0
        """Time (time.monotonic) at which the first whole picture was drawn, or 0."""
        self._drawn_at = (0.0, 0.0)
        """Times (time.monotonic, time.process_time) at which the last drawing of the visible view began."""
        self._first_panel, self._zoomed = 0, False
        self._window_s = WINDOWS_S[1]
        self._level = "info"
        self._filter = ""
        self._log_shown: LogLine | None = None
        self._log_width = 0
        """The width to which log lines are wrapped, or 0 if they are not."""
        self._split, self._sample_step, self._sample_task = TRAIN, -1, ""
        self._records: list[SampleRecord] = []
        self._order: Order | None = None
        self._color = Color.LOGPROB
        self._samples_read: tuple[object, ...] = ()
        self._reading = False
        """Whether samples are being read."""

    # ---- life

    def compose(self) -> ComposeResult:
        view = self.feed.view
        yield Picture(self._headline, id="head")
        with TabbedContent(id="tabs"):
            with TabPane(TITLES[0], id=TABS[0]), VerticalScroll():
                yield Picture(lambda w, h: panes.overview(view, time.time(), w, h), id="overview-text")
            with TabPane(TITLES[1], id=TABS[1]):
                yield DataTable(id="service-list", cursor_type="row")
            with TabPane(TITLES[2], id=TABS[2]), VerticalScroll():
                yield Picture(lambda width, _: panes.pipeline_page(view, width), id="pipeline-text")
            with TabPane(TITLES[3], id=TABS[3]), VerticalScroll():
                yield Picture(self._curves, id="curves-text")
            with TabPane(TITLES[4], id=TABS[4]), VerticalScroll():
                yield Picture(
                    lambda width, _: panes.timeline(view, time.time(), width, self._window_s), id="timeline-text"
                )
            with TabPane(TITLES[5], id=TABS[5]):
                yield Input(placeholder="/ filter by service or text", id="filter", compact=True)
                yield RichLog(id="log-lines", max_lines=MAX_LOG_SHOWN, min_width=0)
            with TabPane(TITLES[6], id=TABS[6]):
                yield Input(placeholder="/ all samples of one task, such as train/0/17", id="task", compact=True)
                yield Static("", id="sample-title", markup=False)
                yield DataTable(id="sample-list", cursor_type="row")
                with VerticalScroll():
                    yield Static("", id="sample-text", markup=False)
            with TabPane(TITLES[7], id=TABS[7]), VerticalScroll():
                yield Picture(lambda width, _: self._notices(width), id="warnings-text")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.theme = "textual-light" if _is_light(os.environ.get("COLORFGBG", "")) else "textual-dark"
        for table, columns in (("#service-list", panes.SERVICE_COLUMNS), ("#sample-list", panes.SAMPLE_COLUMNS)):
            for name, width in columns.items():
                self._main.query_one(table, DataTable).add_column(name, width=width)
        self.feed.read_files()
        self.run_worker(self._follow(), exit_on_error=True)
        self.run_worker(self._draw_first(), exit_on_error=True)
        self.set_interval(REDRAW_S, self._tick)

    async def _follow(self) -> None:
        await self.feed.follow()
        await self.feed.read_all_files()
        if not isinstance(self.feed.run, RunDir):
            self.exit()
            return
        self.redraw()

    async def _draw_first(self) -> None:
        await self.feed.connected.wait()
        self.redraw()
        self.shown_at = time.monotonic()

    def _note(self) -> str:
        if self.feed.ended:
            return "the run has ended; q closes"
        if not self.feed.connected.is_set():
            return "connecting …"
        return f"{self.feed.lost:,} updates lost here" if self.feed.lost else ""

    # ---- drawing

    @property
    def _main(self) -> Screen[object]:
        """The screen beneath the help and the questions."""
        return self.screen_stack[0]

    @property
    def tab(self) -> str:
        """The id of the visible view."""
        return self._main.query_one(TabbedContent).active

    def _tick(self) -> None:
        """Draw the visible view, unless this process has used its share of a core since the last drawing."""
        elapsed_s, used_s = time.monotonic() - self._drawn_at[0], time.process_time() - self._drawn_at[1]
        if elapsed_s >= LONGEST_REDRAW_S or used_s <= CPU_SHARE * elapsed_s:
            self.redraw()

    def redraw(self) -> None:
        """Read new data and draw the visible view."""
        self._drawn_at = (time.monotonic(), time.process_time())
        if not self._main.query("#head"):
            return  # The interface is being torn down.
        if not self.feed.ended:
            self.feed.read_files()
        self._main.query_one("#head", Picture).redraw(self.size.width - 2, 1)
        match self.tab:
            case "services":
                self._draw_services()
            case "log":
                self.feed.read_logs()
                self._draw_log()
            case "samples":
                if not self._reading:
                    self.run_worker(self._read_samples())
            case tab:
                pane = self._main.query_one(f"#{tab}-text", Picture)
                pane.redraw(self.size.width - 4, self.size.height - 5)

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    @on(TabbedContent.TabActivated)
    def _on_tab(self) -> None:
        self.refresh_bindings()
        self.redraw()
        for name in ("#service-list", "#sample-list"):
            if name.startswith(f"#{self.tab[:-1]}"):
                self._main.query_one(name).focus()

    def _headline(self, width: int, _: int) -> list[Text]:
        progress = self.feed.view.progress()
        return [panes.headline(self.feed.run.name, progress, width=width, note=self._note())]

    def _curves(self, width: int, height: int) -> list[Text]:
        panels = self._measured_panels()
        first = self._first_panel % max(len(panels), 1)
        panels = panels[first : first + 1] if self._zoomed else panels[first:]
        return panes.curves(self.feed.view, width, height, panels=panels)

    def _measured_panels(self) -> list[Panel]:
        """Return the panels of which the run has a curve."""
        return [panel for panel in PANELS if panel.matching(self.feed.view.curves.names)]

    def _notices(self, width: int) -> list[Text]:
        count, earlier = len(self.feed.view.warnings()), self.feed.view.warnings_left_out
        head = f"warnings: {count + earlier}" + (f"; the first {earlier} are only in warnings.jsonl" if earlier else "")
        return [Text(head, style="dim"), *panes.notices(self.feed.view, width)]

    def _draw_services(self) -> None:
        table = self._main.query_one("#service-list", DataTable)
        columns = list(table.columns)
        for each in self.feed.view.services(time.time()):
            cells = [visible_text(cell) for cell in panes.service_cells(each)]
            if each.name not in table.rows:
                table.add_row(*cells, key=each.name)
                continue
            for column, cell in zip(columns, cells, strict=True):
                if table.get_cell(each.name, column) != cell:
                    table.update_cell(each.name, column, cell)

    def _draw_log(self) -> None:
        pane = self._main.query_one("#log-lines", RichLog)
        width = pane.scrollable_content_region.width if pane.wrap else 0
        if width != self._log_width:
            self._log_width = width
            self._redraw_log()
            return
        lines = self.feed.view.log.lines(level=self._level, containing=self._filter)[-MAX_LOG_SHOWN:]
        new = lines
        if self._log_shown is not None:
            at = next((index for index in range(len(lines) - 1, -1, -1) if lines[index] is self._log_shown), None)
            new = lines[at + 1 :] if at is not None else lines
            if at is None:
                pane.clear()
        follows = pane.is_vertical_scroll_end or not pane.lines
        for line in new:
            pane.write(visible_text(panes.log_line(line)), scroll_end=follows)
        if lines:
            self._log_shown = lines[-1]
        elif not isinstance(self.feed.run, RunDir) and not pane.lines:
            pane.write("the logs of a run on another machine: python -m launch.ctl --access FILE logs NAME -f")

    def _redraw_log(self) -> None:
        """Draw all lines again. The view stays at the end of the log, or about as far from the end as before."""
        pane = self._main.query_one("#log-lines", RichLog)
        above = 1.0 if pane.is_vertical_scroll_end else pane.scroll_y / len(pane.lines)
        self._log_shown = None
        pane.clear()
        self._draw_log()
        if above < 1.0:
            pane.scroll_to(y=above * len(pane.lines), animate=False, immediate=True)

    # ---- samples

    async def _read_samples(self) -> None:
        """Show the samples of the chosen task, or those of the chosen or newest step."""
        self._reading = True
        try:
            await self._show_samples(self.feed.run)
        finally:
            self._reading = False

    async def _show_samples(self, run: Run) -> None:
        if not isinstance(run, RunDir):
            text = "samples can be read only on the machine that holds the run directory"
            self._main.query_one("#sample-text", Static).update(text)
            return
        task, order = self._sample_task, self._order
        split, step, stamp = split_of(task) if task else self._split, None, 0.0
        if not task:
            steps = await asyncio.to_thread(reader.steps, run.path, split)
            step = self._sample_step if self._sample_step in steps else steps[-1] if steps else None
            if step is None:
                self._main.query_one("#sample-text", Static).update("no samples yet")
                return
            stamp = await asyncio.to_thread(_stamp, run.path, split, step)
        wanted = (task, split, step, order, stamp)
        if wanted == self._samples_read:
            return
        found = await asyncio.to_thread(
            select, run.path, split=split, step=step, task=task or None, order=order, limit=MAX_SAMPLES
        )
        self._samples_read = wanted
        self._records = found.records
        table = self._main.query_one("#sample-list", DataTable)
        row = table.cursor_row
        table.clear()
        for record in self._records:
            table.add_row(*panes.sample_cells(record))
        of = f"task {task}" if task else f"{split}  step {step}"
        title = visible(f"{of}  {panes.SAMPLE_ORDERS[order]}  {found.shown}")
        self._main.query_one("#sample-title", Static).update(title)
        table.move_cursor(row=min(row, len(self._records) - 1))
        self._show_record()

    @on(DataTable.RowHighlighted, "#sample-list")
    def _on_sample(self) -> None:
        self._show_record()

    def _show_record(self) -> None:
        row = self._main.query_one("#sample-list", DataTable).cursor_row
        if 0 <= row < len(self._records):
            text = panes.sample_page(self._records[row], self._color)
        else:
            text = Text("no samples here")
        self._main.query_one("#sample-text", Static).update(text)

    # ---- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key has a function in the visible view."""
        views = {
            "restart": ("services",),
            "drain": ("services",),
            "scroll_panels": ("curves",),
            "zoom": ("curves",),
            "window": ("timeline",),
            "filter": tuple(INPUTS),
            "level": ("log",),
            "wrap": ("log",),
            "step": ("samples",),
            "order": ("samples",),
            "colours": ("samples",),
            "split": ("samples",),
        }
        if action in ("restart", "drain") and not self.feed.may_operate:
            return False
        if action not in views or not self.screen_stack or not self._main.query("#tabs"):
            return True
        return self.tab in views[action]

    def action_show(self, tab: str) -> None:
        self.set_focus(None)  # Otherwise, a pane that contains the focus would become active again.
        self._main.query_one(TabbedContent).active = tab

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_theme(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"

    def action_scroll_panels(self, by: int) -> None:
        self._first_panel = (self._first_panel + by) % max(len(self._measured_panels()), 1)
        self.redraw()

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self.redraw()

    def action_window(self, by: int) -> None:
        at = WINDOWS_S.index(self._window_s) + by
        self._window_s = WINDOWS_S[min(max(at, 0), len(WINDOWS_S) - 1)]
        self.redraw()

    def action_filter(self) -> None:
        self._main.query_one(INPUTS[self.tab][0], Input).focus()

    def action_leave_input(self) -> None:
        if self.tab in INPUTS:
            self._main.query_one(INPUTS[self.tab][1]).focus()

    @on(Input.Changed, "#filter")
    def _on_filter(self, event: Input.Changed) -> None:
        self._filter = event.value
        self._redraw_log()

    @on(Input.Submitted)
    def _on_submitted(self) -> None:
        self.action_leave_input()

    @on(Input.Submitted, "#task")
    def _on_task(self, event: Input.Submitted) -> None:
        self._sample_task, self._samples_read = event.value.strip(), ()
        self.redraw()

    def action_level(self) -> None:
        self._level = LEVELS[(LEVELS.index(self._level) + 1) % len(LEVELS)]
        self.notify(f"log lines of level {self._level} and above")
        self._redraw_log()

    def action_wrap(self) -> None:
        pane = self._main.query_one("#log-lines", RichLog)
        pane.wrap = not pane.wrap
        pane.scroll_to(x=0, animate=False, immediate=True)
        self._draw_log()

    def action_step(self, by: int) -> None:
        run = self.feed.run
        steps = reader.steps(run.path, self._split) if isinstance(run, RunDir) else []
        if steps:
            at = steps.index(self._sample_step) if self._sample_step in steps else len(steps) - 1
            at = min(max(at + by, 0), len(steps) - 1)
            self._sample_step = steps[at] if at < len(steps) - 1 else -1
            self._leave_task()

    def action_order(self) -> None:
        orders = list(panes.SAMPLE_ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self.redraw()

    def action_colours(self) -> None:
        colors = list(Color)
        self._color = colors[(colors.index(self._color) + 1) % len(colors)]
        self._show_record()

    def action_split(self) -> None:
        run = self.feed.run
        known = reader.splits(run.path) if isinstance(run, RunDir) else []
        if known:
            at = known.index(self._split) if self._split in known else -1
            self._split, self._sample_step = known[(at + 1) % len(known)], -1
            self._leave_task()

    def _leave_task(self) -> None:
        """Show the samples of a step again."""
        self._main.query_one("#task", Input).value = self._sample_task = ""
        self.redraw()

    # ---- for operators

    def action_restart(self) -> None:
        name = self._chosen_service()
        if name:
            service, instance = parse_service_name(name)
            self._after_yes(
                f"restart {name}?", RestartService(service=service, instance=instance), f"restarting {name}"
            )

    def action_drain(self) -> None:
        name = self._chosen_service()
        if not name:
            return
        service, instance = parse_service_name(name)
        if service not in LEASING:
            self.notify(f"{name} leases no tasks: only {' and '.join(LEASING)} can be drained", severity="error")
            return
        self._after_yes(f"drain {name}?", DrainService(service=service, instance=instance), f"draining {name}")

    def _chosen_service(self) -> str:
        table = self._main.query_one("#service-list", DataTable)
        if not table.row_count:
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)

    def _after_yes(self, question: str, request: RestartService | DrainService, done: str) -> None:
        async def send() -> None:
            try:
                await with_client(self.feed.run, SUPERVISOR, request, Ack)
            except RpcError as error:
                self.notify(visible(str(error)), severity="error", markup=False)
            else:
                self.notify(visible(done), markup=False)

        def on_answer(yes: bool | None) -> None:
            if yes:
                self.run_worker(send())

        self.push_screen(Confirm(visible(question)), on_answer)


def _stamp(run: Path, split: str, step: int) -> float:
    """Return the time at which the samples of a step were last written, or 0 if they are gone."""
    with contextlib.suppress(OSError):
        return (run / FOLDER / file_of(split, step)).stat().st_mtime
    return 0.0


def _is_light(colorfgbg: str) -> bool:
    """Return whether the terminal reports (as `foreground;background`) a light background."""
    ground = colorfgbg.rpartition(";")[2]
    return ground.isdigit() and int(ground) in (7, *range(9, 16))

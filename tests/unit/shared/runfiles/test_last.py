"""Tests the file that holds what was known about a run when it ended."""

from __future__ import annotations

from pathlib import Path

from proto.messages import ProcessRow, TopicRow
from shared.runfiles.files import RunFiles
from shared.runfiles.last import LAST, as_lines
from shared.view.services import Health, process_rows
from shared.view.timeline import MAX_HISTORY

END = 1_700_000_000.0


def span(at: float, what: str = "generate") -> TopicRow:
    return TopicRow(service="rollout", instance=0, topic="span", at=at, values={"what": what, "seconds": 0.5})


def states(state: str, *, restarts: int, at: float, cause: str = "") -> list[TopicRow]:
    return process_rows([ProcessRow("rollout", 0, state, 7, 1, restarts, cause)], at)


def test_the_states_that_the_supervisor_adds_replace_those_that_the_monitor_has_written(tmp_path: Path) -> None:
    file = tmp_path / LAST
    own = TopicRow(service="rollout", instance=0, topic="process", at=END - 1, values={"host": "node-1", "pid": 7.0})
    file.write_bytes(as_lines([*states("READY", restarts=1, at=END - 1), own, span(END - 3), span(END - 2)]))
    files = RunFiles(tmp_path)
    files.read_last()
    [service] = files.view.services(files.view.newest_at)
    assert (service.state, service.health, service.restarts, service.host) == ("READY", Health.WELL, 1, "node-1")
    with file.open("ab") as added:
        added.write(b"\xff\n{}\n[1]\n" + as_lines(states("FAILED", restarts=2, at=END, cause="exit status 1")))
    files.read_last()
    [service] = files.view.services(files.view.newest_at)
    assert (service.state, service.health, service.restarts) == ("FAILED", Health.WRONG, 2)
    assert (service.cause, service.host) == ("exit status 1", "node-1")
    assert (files.view.newest_at, files.view.timeline_end) == (END, END - 2)
    [lane] = files.view.timeline(END - 2, 30.0)
    assert (lane.name, lane.working_s) == ("rollout/0", 1.0)


def test_the_cause_of_a_restart_is_kept_at_the_orderly_end_of_a_run(tmp_path: Path) -> None:
    killed = states("READY", restarts=1, at=END - 1, cause="killed by SIGKILL")
    (tmp_path / LAST).write_bytes(as_lines([*killed, *states("STOPPED", restarts=1, at=END)]))
    files = RunFiles(tmp_path)
    files.read_last()
    [service] = files.view.services(END)
    assert (service.state, service.restarts, service.cause) == ("STOPPED", 1, "killed by SIGKILL")


def test_time_before_the_oldest_recorded_span_counts_as_unknown(tmp_path: Path) -> None:
    rows = [span(END - (MAX_HISTORY - number) / 100) for number in range(1, MAX_HISTORY + 1)]
    (tmp_path / LAST).write_bytes(as_lines(rows))
    files = RunFiles(tmp_path)
    files.read_last()
    [lane] = files.view.timeline(END, 300.0)
    assert lane.known_s < 21


def test_a_run_without_the_file_has_no_last_states(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.read_last()
    assert (files.view.newest_at, files.view.timeline_end, files.view.services(0.0)) == (0.0, None, [])

"""Tests the model of a live run, which receives rows from the stream and provides the values to draw."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from proto.messages import History, TopicRow
from shared.runfiles.warnings import WarningRecord
from shared.view import RunView
from shared.view.curves import MAX_POINTS, PANELS, Curves
from shared.view.notices import MAX_WARNINGS, LogLine
from shared.view.services import RESTARTED_S, SILENT_S, Health
from shared.view.timeline import KEPT_S, MAX_HISTORY, StepEnd, Wait, covered_s, thinned

NOW = 1_000_000.0


def row(topic: str, values: Mapping[str, float | str], *, name: str = "scheduler/0", at: float = NOW) -> TopicRow:
    service, _, instance = name.rpartition("/")
    return TopicRow(service=service, instance=int(instance), topic=topic, at=at, values=dict(values))


def metrics(step: int, reward: float = 0.0, seconds: float = 2.0) -> dict[str, float | None]:
    return {"step": step, "reward/mean": reward, "time/step": seconds}


def history(steps: list[float]) -> History:
    columns = {"reward/mean": np.asarray(steps), "time/step": np.asarray(steps)}
    return History(newest={"step": steps[-1]}, steps=columns, values=columns, spans=[])


def test_progress_contains_the_steps_and_the_remaining_time() -> None:
    view = RunView()
    view.apply(row("cluster/status", {"reachable": 1.0, "run": "r", "step": 4, "steps": 10, "version": 3}))
    for step in range(1, 5):
        view.curves.add(metrics(step, seconds=step))
    seen = view.progress()
    assert (seen.run, seen.step, seen.steps, seen.version, seen.lineage) == ("r", 4, 10, 3, None)
    assert seen.step_s == 2.5
    assert seen.eta_s == 15.0


def test_progress_keeps_the_steps_when_the_scheduler_falls_silent() -> None:
    view = RunView()
    view.apply(row("cluster/status", {"reachable": 1.0, "step": 4, "steps": 10}))
    view.apply(row("cluster/status", {"reachable": 0.0}))
    assert not view.progress().reachable
    assert view.progress().step == 4


def test_curves_replace_the_points_that_the_run_rolls_back() -> None:
    curves = Curves()
    for step in range(1, 6):
        curves.add(metrics(step, reward=step))
    curves.add(metrics(3, reward=30.0))
    assert curves.points("reward/mean") == [(1, 1), (2, 2), (3, 30)]
    assert curves.taken_back == 1
    assert curves.last["step"] == 3


def test_curves_count_a_repeated_row_once() -> None:
    curves = Curves()
    curves.add(metrics(1))
    curves.add(metrics(1))
    assert curves.points("reward/mean") == [(1, 0.0)]
    assert curves.taken_back == 0


def test_curves_leave_out_values_that_are_not_finite() -> None:
    curves = Curves()
    curves.add({"step": 1, "a": float("nan"), "b": None, "c": 1.0})
    assert curves.names == ["c"]
    assert curves.points("a") == []


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    curves = Curves()
    count = 5 * MAX_POINTS
    for step in range(1, count + 1):
        curves.add(metrics(step, reward=step))
    points = curves.points("reward/mean")
    assert len(points) <= MAX_POINTS
    assert points[0] == (1, 1)
    assert points[-MAX_POINTS // 4 :] == [(s, s) for s in range(count - MAX_POINTS // 4 + 1, count + 1)]
    assert points == sorted(points)


def test_panels_select_the_names_that_exist() -> None:
    reward = next(panel for panel in PANELS if panel.title == "reward")
    known = ["eval/held/reward", "eval/held/rows_scored", "loss/kl", "reward/mean"]
    assert reward.matching(known) == ["reward/mean", "eval/held/reward"]


def test_metrics_from_the_stream_are_used_only_if_the_view_asks_for_them() -> None:
    file_reader, far_away = RunView(), RunView(metrics_from_stream=True)
    for view in (file_reader, far_away):
        view.curves.add(metrics(1))
        view.apply(row("step", {"step": 2, "reward/mean": 0.5}))
    assert file_reader.curves.points("reward/mean") == [(1, 0.0)]
    assert far_away.curves.points("reward/mean") == [(1, 0.0), (2, 0.5)]
    assert not far_away.history_is_old


def test_a_gap_or_a_rewind_in_the_stream_makes_the_history_outdated() -> None:
    view = RunView(metrics_from_stream=True)
    view.curves.add(metrics(1))
    view.apply(row("step", {"step": 3, "reward/mean": 0.5}))
    assert view.history_is_old
    view.load_history(history([1, 2, 3]))
    assert not view.history_is_old
    assert view.curves.points("reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    view.apply(row("scheduler/rewound", {"step": 1, "committed": 3}))
    assert view.history_is_old
    assert [(each.step, each.committed) for each in view.rewinds()] == [(1, 3)]
    view.load_history(history([1]))
    view.apply(row("step", {"step": 2, "reward/mean": 0.5}))
    assert view.curves.points("reward/mean") == [(1, 1.0), (2, 0.5)]
    assert not view.history_is_old


def test_the_history_adds_the_timeline_to_a_view_that_reads_the_metrics_file() -> None:
    view = RunView()
    view.curves.add(metrics(1))
    span = row("span", {"what": "generate", "seconds": 1.0}, name="rollout/0")
    view.load_history(msgspec.structs.replace(history([1, 2]), spans=[span]))
    assert view.curves.points("reward/mean") == [(1, 0.0)]
    assert [lane.name for lane in view.timeline(NOW, 10)] == ["rollout/0"]


def test_the_view_of_a_process_combines_its_own_telemetry_with_that_of_the_supervisor() -> None:
    view = RunView()
    name = "rollout/1"
    view.apply(row("service", {"state": "READY", "cause": ""}, name=name, at=NOW - 60))
    own = {"host": "h", "pid": 7, "incarnation": "ab", "rss_bytes": 5e6, "cpu_share": 0.5, "progress_age_s": 1.0}
    view.apply(row("process", own, name=name, at=NOW - 1))
    view.apply(row("cluster/process", {"state": "READY", "restarts": 2, "cause": "killed", "pid": 7}, name=name))
    [seen] = view.services(NOW)
    assert (seen.name, seen.state, seen.health, seen.host, seen.restarts) == (name, "READY", Health.WELL, "h", 2)
    assert (seen.rss_bytes, seen.cpu_share, seen.gpu_bytes) == (5e6, 0.5, None)
    assert seen.progress_age_s == 2.0


@pytest.mark.parametrize(
    ("state", "health"),
    [("BACKOFF", Health.WRONG), ("FAILED", Health.WRONG), ("STARTING", Health.CHANGING), ("DRAINED", Health.ENDED)],
)
def test_the_state_that_the_supervisor_reports_overrides_the_state_that_a_process_reports(
    state: str, health: Health
) -> None:
    view = RunView()
    view.apply(row("service", {"state": "READY", "cause": ""}, name="rollout/0"))
    view.apply(row("cluster/process", {"state": state, "restarts": 1, "cause": "", "pid": 0}, name="rollout/0"))
    assert view.services(NOW)[0].health == health


def test_a_process_that_falls_silent_is_shown_as_unhealthy() -> None:
    view = RunView()
    view.apply(row("process", {"pid": 3, "progress_age_s": -1}, name="rollout/0"))
    view.apply(row("cluster/process", {"state": "READY", "restarts": 0, "cause": "", "pid": 3}, name="rollout/0"))
    assert view.services(NOW + SILENT_S)[0].health == Health.WELL
    later = view.services(NOW + SILENT_S + 1)[0]
    assert later.health == Health.WRONG
    assert later.progress_age_s is None


def test_a_restart_between_two_updates_is_shown_for_a_while() -> None:
    view = RunView()
    for restarts in (3, 4):
        values = {"state": "READY", "restarts": restarts, "cause": "killed", "pid": restarts}
        view.apply(row("cluster/process", values, name="rollout/0"))
        assert view.services(NOW)[0].health == (Health.WELL if restarts == 3 else Health.CHANGING)
    assert view.services(NOW + RESTARTED_S)[0].health == Health.WELL


def test_the_pipeline_counts_tasks_leases_staleness_and_stores() -> None:
    view = RunView()
    view.apply(row("cluster/status", {"tasks/PENDING": 9, "store/bytes": 1.0}))
    assert view.pipeline().tasks == {"PENDING": 9}
    view.apply(row("scheduler/tasks", {"READY": 2, "LEASED": 8, "dropped": 1}))
    view.apply(row("scheduler/leases", {"live": 3, "waiting": 1, "stage/rollout": 2, "stage/reference": 1}))
    view.apply(row("staleness", {"step": 5, "0": 10, "1": 6, "10": 1}, name="policy-trainer/0"))
    view.apply(row("store", {"bytes": 10, "limit_bytes": 100, "shards": 4, "busy": 7}, name="batch-store/0"))
    view.apply(row("cluster/losses", {"dropped/stale": 4, "lost/timeout": 2, "rollout/0/rewards": "all fail"}))
    seen = view.pipeline()
    assert list(seen.tasks.items()) == [("LEASED", 8), ("READY", 2)]
    assert (seen.leases, seen.waiting, seen.leases_by_stage) == (3, 1, {"reference": 1, "rollout": 2})
    assert (seen.staleness_step, seen.staleness) == (5, {0: 10, 1: 6, 10: 1})
    assert (seen.busy, seen.stores[0].limit_bytes) == (7, 100)
    assert (seen.dropped, seen.lost) == ({"stale": 4}, {"timeout": 2})
    assert [(each.service, each.kind, each.text) for each in view.troubles()] == [("rollout/0", "rewards", "all fail")]


def test_the_timeline_distinguishes_work_from_waits() -> None:
    view = RunView()
    view.apply(row("span", {"what": "generate", "seconds": 4.0}, name="rollout/0", at=NOW - 1))
    view.apply(row("span", {"what": "lease", "seconds": 3.0, "of": "scheduler"}, name="rollout/0", at=NOW))
    view.apply(row("span", {"what": "score", "seconds": 2.0}, name="reference/0", at=NOW - 20))
    [lane] = view.timeline(NOW, 10.0)
    assert (lane.name, lane.working_s, lane.waiting_s) == ("rollout/0", 4.0, 1.0)
    assert [(each.what, each.waits) for each in lane.spans] == [("generate", False), ("lease", True)]
    assert lane.spans[0].begin == NOW - 5


def busy(name: str, *, seconds: float, rate: int = 30) -> list[TopicRow]:
    """Return the spans of a process that works and waits in turn until NOW, with `rate` spans per second."""
    each_s = 1 / rate
    work: dict[str, float | str] = {"what": "score", "seconds": each_s}
    wait: dict[str, float | str] = {"what": "call", "seconds": each_s, "of": "policy-trainer/0"}
    count = int(seconds * rate)
    return [
        row("span", wait if number % 2 else work, name=name, at=NOW - (count - 1 - number) * each_s)
        for number in range(count)
    ]


def busy_view(*names: str, seconds: float) -> RunView:
    view = RunView()
    for each in (each for name in names for each in busy(name, seconds=seconds)):
        view.apply(each)
    return view


def shares(view: RunView, seconds: float) -> list[tuple[float, float]]:
    found = view.timeline(NOW, seconds)
    return [(round(each.working_s / each.known_s, 2), round(each.waiting_s / each.known_s, 2)) for each in found]


@pytest.mark.parametrize("window_s", [10.0, 60.0, 300.0, 600.0])
def test_the_shares_of_a_process_with_thirty_spans_per_second_are_right_in_every_window(window_s: float) -> None:
    view = busy_view("reference/0", "rollout/0", seconds=KEPT_S + 100)
    assert shares(view, window_s) == [(0.5, 0.5)] * 2
    assert [each.known_s for each in view.timeline(NOW, window_s)] == pytest.approx([window_s] * 2, abs=0.1)


def test_shares_refer_to_the_seconds_whose_spans_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.view.timeline.MAX_SPANS", 3000)
    view = busy_view("rollout/0", seconds=300)
    [lane] = view.timeline(NOW, 300.0)
    assert len(lane.spans) == 3000
    assert lane.known_s == pytest.approx(100.0)
    assert shares(view, 300.0) == [(0.5, 0.5)]
    assert shares(view, 60.0) == [(0.5, 0.5)]


def test_an_observer_that_arrives_late_computes_shares_from_the_part_that_the_history_covers() -> None:
    view = RunView()
    view.load_history(msgspec.structs.replace(history([1]), spans=busy("rollout/0", seconds=200)[-MAX_HISTORY:]))
    [lane] = view.timeline(NOW, 300.0)
    assert lane.known_s == pytest.approx(MAX_HISTORY / 30, abs=0.1)
    assert shares(view, 300.0) == [(0.5, 0.5)]


def test_a_span_that_is_reported_late_or_twice_takes_its_place_once() -> None:
    view = RunView()
    for at in (NOW, NOW - 2, NOW - 2):
        view.apply(row("span", {"what": "generate", "seconds": 1.0}, name="rollout/0", at=at))
    [lane] = view.timeline(NOW, 10.0)
    assert [each.end for each in lane.spans] == [NOW - 2, NOW]


def test_the_timeline_clips_spans_to_its_window_and_limits_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.view.timeline.MAX_SPANS", 400)
    view = RunView()
    for number in range(500):
        view.apply(row("span", {"what": "generate", "seconds": 1.0}, name="rollout/0", at=NOW + number))
    [lane] = view.timeline(NOW + 500, 1e9)
    assert len(lane.spans) == 400
    [lane] = view.timeline(NOW + 498.5, 1.0)
    assert lane.working_s == 1.0
    assert covered_s([(0, 2), (1, 3), (5, 6)]) == 4


def test_the_timeline_says_where_steps_ended_and_which_process_waited_for_which() -> None:
    view = RunView()
    name = "policy-trainer/0"
    for step, at in ((3, NOW - 20), (4, NOW - 6), (5, NOW - 1)):
        batch: dict[str, float | str] = {"what": "batch", "seconds": 3.0, "of": "scheduler/0", "step": step}
        view.apply(row("span", batch, name=name, at=at - 2))
        view.apply(row("span", {"what": "step", "seconds": 2.0}, name=name, at=at))
    assert view.step_ends(NOW, 10.0) == [StepEnd(NOW - 6, 4), StepEnd(NOW - 1, 5)]
    [lane] = view.timeline(NOW, 10.0)
    assert lane.waits == (Wait("batch", "scheduler/0", 5.0),)


def test_spans_of_the_same_kind_that_nearly_touch_are_joined() -> None:
    view = busy_view("rollout/0", seconds=60)
    [lane] = view.timeline(NOW, 60.0)
    joined = thinned(lane.spans, 0.06)
    assert [(each.what, count) for each, count in joined] == [("score", 900), ("call", 900)]
    assert thinned(lane.spans, 0.01) == [(each, 1) for each in lane.spans]


def test_old_warnings_that_are_no_longer_kept_are_counted() -> None:
    view = RunView()
    for step in range(MAX_WARNINGS + 7):
        view.add_warning(WarningRecord(at=NOW + step, step=step, kind="kl", text="KL rises", remedy="lower lr"))
    assert view.warnings_left_out == 7
    assert [each.step for each in view.warnings()] == list(range(7, MAX_WARNINGS + 7))


def test_a_warning_that_arrives_in_two_ways_is_kept_once() -> None:
    view = RunView()
    values: dict[str, float | str] = {"at": NOW, "step": 3.0, "kind": "kl", "text": "KL rises", "remedy": "lower lr"}
    view.add_warning(WarningRecord(at=NOW, step=3, kind="kl", text="KL rises", remedy="lower lr"))
    view.apply(row("warning/kl", values, name="monitor/0"))
    view.apply(row("warning/kl", {"step": "x"}, name="monitor/0"))
    assert [(each.kind, each.step, each.text, each.remedy) for each in view.warnings()] == [
        ("kl", 3, "KL rises", "lower lr")
    ]


def test_warnings_about_two_services_are_kept_separately() -> None:
    view = RunView()
    for about in ("rollout/0", "rollout/1", "rollout/0"):
        view.add_warning(WarningRecord(at=NOW, step=3, kind="memory-trend", text="t", remedy="r", about=about))
    assert [each.about for each in view.warnings()] == ["rollout/0", "rollout/1"]


def test_log_lines_are_filtered_by_level_and_text() -> None:
    view = RunView()
    view.log.add(
        [
            LogLine("2026-01-01T00:00:02", "warning", "rollout/0", "samples failed"),
            LogLine("2026-01-01T00:00:01", "info", "scheduler/0", "state READY"),
        ]
    )
    assert [line.service for line in view.log.lines()] == ["scheduler/0", "rollout/0"]
    assert [line.text for line in view.log.lines(level="warning")] == ["samples failed"]
    assert [line.text for line in view.log.lines(containing="SCHED")] == ["state READY"]

"""Tests the spans of traces, and the file of spans for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from proto.messages import TopicRow
from services.exporter.perfetto import EARLIER, FILE, MAX_LANES, TraceFile
from services.exporter.spans import Interval, Tracer, TraceSpan, intervals, span_id, trace_id
from shared.actor.telemetry import MAX_TASKS, PART, SPAN, TelemetrySender

RUN, TASK = "run", "train/0/17"


def row(
    what: str, at: float, seconds: float, topic: str = PART, who: str = "rollout", **about: float | str
) -> TopicRow:
    return TopicRow(service=who, instance=0, topic=topic, at=at, values={"what": what, "seconds": seconds, **about})


def spans(*rows: TopicRow, tracer: Tracer | None = None) -> list[TraceSpan]:
    placing = tracer or Tracer(RUN)
    return [span for each in rows for interval in intervals(each) for span in placing.spans(interval)]


def life() -> list[TopicRow]:
    """Return the parts of one task's life, as the processes report them."""
    leased = {"tasks": f"{TASK} train/0/18", "lease": 7.0, "stage": "rollout"}
    scored = {"tasks": TASK, "lease": 9.0, "stage": "reference"}
    return [
        row("generate", 12.0, 1.0, SPAN, **leased),
        row("reward", 12.5, 0.4, **leased),
        row("put", 12.7, 0.1, **leased),
        row("lease", 13.0, 3.0, **leased),
        row("score", 15.0, 1.0, SPAN, "reference", **scored),
        row("lease", 15.5, 2.0, PART, "reference", **scored),
        row("train", 18.0, 2.0, PART, "policy-trainer", tasks=TASK, step=4.0),
        row("collect", 20.0, 0.1, PART, "batch-store", tasks=TASK),
    ]


def test_a_task_has_one_trace_from_its_lease_to_its_collection() -> None:
    found = [span for span in spans(*life()) if span.subject == TASK]
    assert {span.trace for span in found} == {trace_id(RUN, TASK)}
    names = {span.name: span for span in found}
    assert list(names) == [
        "generate", "reward", "put", "lease rollout", "score", "lease reference", "train", "task", "collect",
    ]  # fmt: skip
    root = names["task"]
    assert (root.interval.begin, root.interval.end, root.parent) == (10.0, 20.0, b"")
    assert {names[each].parent for each in ("lease rollout", "lease reference", "train", "collect")} == {root.id}
    assert {names[each].parent for each in ("generate", "reward", "put")} == {names["lease rollout"].id}
    assert names["score"].parent == names["lease reference"].id
    assert len({span.id for span in found}) == len(found)


def test_parts_of_a_task_get_the_same_parents_whether_one_process_or_several_trace_them() -> None:
    together = {(span.name, span.id, span.parent) for span in spans(*life())}
    apart = {(span.name, span.id, span.parent) for each in reversed(life()) for span in spans(each)}
    assert together == apart


def test_a_trained_task_is_linked_to_its_step() -> None:
    [train] = [span for span in spans(*life()) if span.name == "train"]
    assert train.link == trace_id(RUN, "step/4")


def test_a_step_has_one_trace_across_processes() -> None:
    sync = TopicRow(service="rollout", instance=1, topic="weights", at=21.0, values={"seconds": 0.2, "step": 4.0})
    found = spans(
        row("batch", 18.5, 0.5, SPAN, "policy-trainer", step=4.0, of="scheduler/0"),
        row("ForwardBackward", 19.0, 1.0, SPAN, "policy-trainer-worker", step=4.0),
        row("commit", 20.0, 0.1, PART, "policy-trainer", step=4.0),
        row("step", 20.0, 2.0, PART, "policy-trainer", step=4.0, reward=0.5),
        sync,
    )
    assert [span.name for span in found] == ["batch", "ForwardBackward", "commit", "step", "sync"]
    assert {span.trace for span in found} == {trace_id(RUN, "step/4")}
    [root] = [span for span in found if span.name == "step"]
    assert (root.interval.begin, root.interval.end, root.parent) == (18.0, 20.0, b"")
    assert {span.parent for span in found if span is not root} == {root.id}
    assert [span.name for span in found if span.interval.waits_for] == ["batch"]


def test_two_leases_of_one_task_have_separate_spans() -> None:
    first, second = (row("lease", 10.0 + n, 1.0, tasks=TASK, lease=float(n), stage="rollout") for n in (1, 2))
    assert len({span.id for span in spans(first, second)}) == 2


def test_rows_with_unexpected_values_produce_no_span() -> None:
    for seconds in (float("nan"), float("inf"), -1.0, 1e12):
        assert not spans(row("x", 1.0, seconds, step=1.0))
    for at in (float("nan"), float("inf"), -1.0, 1e300):
        assert not spans(row("x", at, 1.0, step=1.0))
    assert not spans(TopicRow(service="a", instance=0, topic="span", at=1.0, values={"seconds": "long", "step": 1.0}))
    assert not spans(TopicRow(service="a", instance=0, topic="weights", at=1.0, values={}))
    assert not spans(row("x", 1.0, 1.0, topic="spanner", step=1.0))
    many = row("x", 1.0, 1.0, tasks=" ".join(f"train/0/{n}" for n in range(10_000)))
    assert len(spans(many)) == MAX_TASKS


def test_a_tracer_does_not_remember_a_collected_task() -> None:
    tracer = Tracer(RUN)
    spans(*life(), tracer=tracer)
    [again] = [span for span in spans(life()[-1], tracer=tracer) if span.name == "task"]
    assert (again.interval.begin, again.interval.end) == (19.9, 20.0)


def test_every_process_traces_the_same_tasks() -> None:
    ids = [f"train/0/{number}" for number in range(20_000)]

    def chosen(share: float, instance: int, among: list[str]) -> list[str]:
        sender = TelemetrySender("rollout", instance, 1)
        sender.traced_share = share
        return sender.traced(among).split()

    one_by_one = [task for task in ids if chosen(0.05, 0, [task])]
    assert 800 < len(one_by_one) < 1200
    assert chosen(0.05, 1, ids[:500]) == [task for task in ids[:500] if task in set(one_by_one)]
    assert chosen(1.0, 0, ids) == ids[:MAX_TASKS]
    assert chosen(0.0, 0, ids) == []


def test_trace_and_span_ids_are_the_same_in_every_release() -> None:
    trace = trace_id(RUN, TASK)
    assert trace.hex() == "871fbe122261f806b2fb0ee45a577f6b"
    assert span_id(trace, "task").hex() == "7422a3475d28bc0f"


def test_parts_of_a_task_are_sent_only_if_its_trace_is_exported() -> None:
    sender = TelemetrySender("rollout", 0, 1)
    sender.part("reward", 1.0, {"tasks": sender.traced(["train/0/1"]), "lease": 1.0})
    sender.part("commit", 1.0, {"step": 1.0})
    assert sender.dropped == 0
    sender.traced_share = 0.0
    sender.part("reward", 1.0, {"tasks": sender.traced(["train/0/1"])})
    assert sender.dropped == 0
    sender.traced_share = 1.0
    sender.part("reward", 1.0, {"tasks": sender.traced([]), "lease": 1.0})
    assert sender.dropped == 0
    sender.part("reward", 1.0, {"tasks": sender.traced(["train/0/1"])})  # No monitor receives this message.
    assert sender.dropped == 1


Event = dict[str, Any]
LIMIT = 1 << 20


def placed(*given: Interval) -> list[tuple[Interval, list[TraceSpan]]]:
    tracer = Tracer("run")
    return [(each, list(tracer.spans(each))) for each in given]


def events(path: Path) -> list[Event]:
    """Return the events of a file, each checked against the Trace Event Format."""
    found: list[Event] = json.loads(path.read_text())
    for event in found:
        assert event["ph"] in {"X", "M", "b", "e", "i"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)
        else:
            assert isinstance(event["ts"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "be":
            assert event["id"]
            assert event["cat"]
    return found


def work(begin: float, end: float, what: str = "generate", process: str = "rollout/0", **more: Any) -> Interval:
    return Interval(process, what, begin, end, **more)


def test_each_process_and_kind_of_work_has_a_named_track(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "traces", LIMIT)
    file.write(placed(work(1, 2), work(3, 4), work(1, 2, "reward"), work(1, 2, "score", "reference/0")))
    found = events(tmp_path / "traces" / FILE)
    assert [event["args"]["name"] for event in found if event["name"] == "process_name"] == ["rollout/0", "reference/0"]
    named = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert named == ["generate", "reward", "score"]
    assert next((event["ts"], event["dur"]) for event in found if event["ph"] == "X") == (1_000_000, 1_000_000)


def test_overlapping_work_never_shares_a_track(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(*(work(begin / 10, begin / 10 + 1.05) for begin in range(60))))
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for event in events(tmp_path / FILE):
        if event["ph"] == "X":
            key = (event["pid"], event["tid"])
            assert event["ts"] >= ends[key]
            ends[key] = event["ts"] + event["dur"]
    assert len(ends) == 11


def test_the_number_of_tracks_is_limited(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(*(work(0, 100) for _ in range(200))))
    assert sum(event["name"] == "thread_name" for event in events(tmp_path / FILE)) == MAX_LANES


def test_the_parts_of_a_task_nest_in_the_tracks_of_their_services(tmp_path: Path) -> None:
    parts = [
        work(1, 3, "lease", tasks=("train/0/1",), lease=1, stage="rollout"),
        work(1.5, 2, tasks=("train/0/1",), lease=1),
        work(2.9, 4, "lease", "reference/0", tasks=("train/0/1",), lease=2, stage="reference"),
        work(3, 3.5, "score", "reference/0", tasks=("train/0/1",), lease=2),
        work(4, 5, "train", "policy-trainer/0", tasks=("train/0/1",), step=3),
        work(6, 6.5, "collect", "batch-store/0", tasks=("train/0/1",)),
    ]
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(*parts))
    mine = sorted((event for event in events(tmp_path / FILE) if event["ph"] in "be"), key=lambda event: event["ts"])
    open_names: dict[str, list[str]] = defaultdict(list)
    for event in mine:
        if event["ph"] == "b":
            open_names[event["id"]].append(event["name"])
        else:
            assert open_names[event["id"]].pop() == event["name"]
    assert {track: names for track, names in open_names.items() if names} == {}
    services = ("rollout", "reference", "policy-trainer", "batch-store")
    assert set(open_names) == {"train/0/1", *(f"train/0/1 {service}" for service in services)}


def test_the_file_is_valid_after_every_write_and_stays_within_its_limit(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, 64 << 10)
    assert events(tmp_path / FILE) == []
    newest = 0
    for number in range(300):
        file.write(placed(*(work(number, number + 0.5, facts={"text": "x" * 50}) for _ in range(4))))
        found = [event["ts"] for event in events(tmp_path / FILE) if event["ph"] == "X"]
        assert max(found) == number * 1_000_000
        newest = number
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 << 10
    assert newest == 299
    assert events(tmp_path / EARLIER)
    names = [event for event in events(tmp_path / FILE) if event["name"] == "process_name"]
    assert len(names) == 1, "each file names its tracks itself"
    [told] = [event["name"] for event in events(tmp_path / FILE) if event["ph"] == "i"]
    dropped = int(told.replace(",", "").removesuffix(" earlier bytes were dropped"))
    kept = sum(len(events(tmp_path / name)) for name in (FILE, EARLIER))
    assert dropped > 2 * (64 << 10)
    assert 4 * 300 - kept == pytest.approx(dropped / (32 << 10) * len(events(tmp_path / EARLIER)), rel=0.05)


def test_a_restarted_exporter_keeps_the_file_of_the_previous_one(tmp_path: Path) -> None:
    TraceFile(tmp_path, LIMIT).write(placed(work(1, 2)))
    TraceFile(tmp_path, LIMIT).write(placed(work(5, 6)))
    assert [event["ts"] for event in events(tmp_path / EARLIER) if event["ph"] == "X"] == [1_000_000]
    assert [event["ts"] for event in events(tmp_path / FILE) if event["ph"] == "X"] == [5_000_000]


@pytest.mark.parametrize("kept", range(0, 420, 7))
def test_a_file_that_was_truncated_anywhere_is_repaired(tmp_path: Path, kept: int) -> None:
    file = TraceFile(tmp_path, LIMIT)
    file.write(placed(work(1, 2), work(3, 4), work(5, 6)))
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[: min(kept, len(data))])
    TraceFile(tmp_path, LIMIT)
    events(tmp_path / EARLIER)


def test_hostile_text_is_escaped_and_shortened(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, LIMIT)
    text = '"},\n{"ph":"X\u202e\x00\ud800'
    file.write(placed(work(1, 2, text, text, facts={text: text * 1000})))
    [event] = [event for event in events(tmp_path / FILE) if event["ph"] == "X"]
    assert event["name"].startswith('"},\n{"ph":"X')
    assert (tmp_path / FILE).stat().st_size < 4096

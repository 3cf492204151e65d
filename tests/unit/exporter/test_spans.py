"""Tests that rows of telemetry become spans whose ids and parents follow from the task, lease and step alone."""

from __future__ import annotations

from proto.messages import TopicRow
from services.exporter.spans import Tracer, TraceSpan, intervals, span_id, trace_id
from shared.actor.telemetry import MAX_TASKS, PART, SPAN, TelemetrySender, is_traced, traced

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
    chosen = [each for each in ids if is_traced(each, 0.05)]
    assert 800 < len(chosen) < 1200
    assert traced(ids[:500], 0.05) == [each for each in ids[:500] if each in set(chosen)]
    assert traced(ids, 1.0) == ids[:MAX_TASKS]
    assert traced(ids, 0.0) == []


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

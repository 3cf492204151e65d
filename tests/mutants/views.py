"""Lists defects in what people and tools see: pictures, reports, traces, Prometheus."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

SPANS = "tests/unit/exporter/test_spans.py"
PERFETTO = "tests/unit/exporter/test_perfetto.py"
FAMILIES = "tests/unit/exporter/test_families.py"
OTLP = "tests/unit/exporter/test_otlp.py"
REPORT = "tests/unit/launch/test_report.py"
SAVED = "tests/unit/web/test_saved.py"

VIEWS = [
    Mutation(
        "a report does not escape text from a run",
        "services/web/saved.py",
        '.replace("<", "\\\\u003c")',
        "",
        f"{SAVED}::test_hostile_text_neither_ends_the_data_nor_becomes_an_element",
    ),
    Mutation(
        "the end of a run waits for its report",
        "launch/viewers/report.py",
        "thread.join(limit_s)",
        "thread.join()",
        f"{REPORT}::test_the_end_of_a_run_does_not_wait_for_a_slow_report",
    ),
    Mutation(
        "a long curve loses its peaks",
        "services/web/saved.py",
        "max(piece, key=_value)",
        "piece[-1]",
        f"{SAVED}::test_a_long_curve_keeps_its_ends_and_its_peaks",
    ),
    Mutation(
        "the spans of a lease are children of the task's span",
        "services/exporter/spans.py",
        "yield TraceSpan(trace, self._leaf(trace, interval), lease, interval.what, interval, task_id)",
        "yield TraceSpan(trace, self._leaf(trace, interval), root, interval.what, interval, task_id)",
        f"{SPANS}::test_a_task_has_one_trace_from_its_lease_to_its_collection",
    ),
    Mutation(
        "overlapping work shares a track",
        "services/exporter/perfetto.py",
        "if end <= interval.begin), len(lanes))",
        "if end <= interval.end), len(lanes))",
        f"{PERFETTO}::test_overlapping_work_never_shares_a_track",
    ),
    Mutation(
        "the trace file grows beyond its limit",
        "services/exporter/perfetto.py",
        "self._path, self._half = folder / FILE, limit_bytes // 2",
        "self._path, self._half = folder / FILE, limit_bytes",
        f"{PERFETTO}::test_the_file_is_valid_after_every_write_and_stays_within_its_limit",
    ),
    Mutation(
        "names chosen by users create an unlimited number of series",
        "services/exporter/families.py",
        "if len(made.samples) >= MOST_SERIES:",
        "if False:",
        f"{FAMILIES}::test_hostile_names_become_label_values_and_their_number_is_limited",
    ),
    Mutation(
        "spans for a collector that is unavailable are lost at once",
        "services/exporter/otlp.py",
        "self._queue.extendleft(reversed(batch))",
        "self.dropped += len(batch)",
        f"{OTLP}::test_spans_are_kept_while_the_collector_is_unreachable_and_sent_later",
    ),
    Mutation(
        "spans for a collector that hangs fill up the memory",
        "services/exporter/otlp.py",
        "while len(self._queue) > QUEUED_SPANS:",
        "while False:",
        f"{OTLP}::test_a_collector_that_hangs_delays_neither_the_callers_nor_the_shutdown",
    ),
]

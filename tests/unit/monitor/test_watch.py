"""A warning is given once for each episode of its condition, even after repeats, restarts and rewinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from proto.messages import TopicRow
from services.monitor.warnings.episodes import Episodes, Sighting
from services.monitor.warnings.facts import Facts
from services.monitor.warnings.watch import (
    MAX_OF_KIND,
    OF_ROWS,
    OF_TELEMETRY,
    ROWS_OVER,
    SECONDS_OVER,
    TEXT_CHARS,
    Watch,
)
from shared.topology.monitor import WarningKind
from shared.warnings import WarningRecord

FACTS = Facts()


def row(step: int, **values: float | None) -> dict[str, float | None]:
    """Return a row of a run that learns."""
    return {
        "step": step,
        "time/step": 1.0,
        "time/wait_batch": 0.2,
        "reward/mean": 0.3 + 0.002 * step,
        "reward/std": 0.45,
        "rollout/zero_variance_fraction": 0.2,
        "rollout/length_mean": 3.6,
        "rollout/truncated_fraction": 0.01,
        "policy/entropy": 0.6,
        "policy/lr": 3e-4,
        "policy/grad_norm": 2.0,
        "policy/clip_fraction": 0.03,
        "policy/updates_skipped": 0.0,
        "loss/kl": 0.3,
        "loss/policy": 0.1,
        **values,
    }


def taken(watch: Watch, rows: Iterable[dict[str, float | None]]) -> list[tuple[int, str]]:
    return [(each.step, each.kind) for one in rows for each in watch.take_row(one, 0.0)]


def cut(first: int, last: int, share: float = 1.0) -> list[dict[str, float | None]]:
    return [row(step, **{"rollout/truncated_fraction": share}) for step in range(first, last + 1)]


def test_a_healthy_run_has_no_warnings() -> None:
    assert taken(Watch(FACTS), map(row, range(1, 300))) == []


def test_an_episode_is_reported_once_and_again_only_after_it_has_ended() -> None:
    watch = Watch(FACTS)
    told = taken(watch, [*cut(1, 60), *map(row, range(61, 61 + ROWS_OVER + 10)), *cut(200, 260)])
    assert [kind for _, kind in told] == ["truncation", "truncation"]
    assert told[0][0] == 10
    assert told[1][0] > 200


def test_a_value_that_fluctuates_around_its_bound_is_reported_once() -> None:
    watch = Watch(FACTS)
    rows = [row(step, **{"rollout/truncated_fraction": 0.36 if step // 30 % 2 else 0.24}) for step in range(1, 400)]
    assert [kind for _, kind in taken(watch, rows)] == ["truncation"]


def test_an_episode_ends_only_after_consecutive_rows_without_the_condition() -> None:
    episodes = Episodes(over_after=3)
    sighting = Sighting("seen", "do")
    seen = [episodes.observe("k", [sighting] if present else []) != [] for present in (1, 0, 0, 1, 0, 0, 0, 1)]
    assert seen == [True, False, False, False, False, False, False, True]


def test_episodes_about_different_services_are_reported_separately() -> None:
    episodes = Episodes(over_after=3)
    assert len(episodes.observe("k", [Sighting("a", "", "store/0")])) == 1
    both = [Sighting("a", "", "store/0"), Sighting("b", "", "store/1")]
    assert [each.about for each in episodes.observe("k", both)] == ["store/1"]
    assert episodes.held("k") == {"store/0", "store/1"}


def test_a_restarted_monitor_does_not_repeat_its_warnings() -> None:
    rows, first = cut(1, 40), Watch(FACTS)
    told = [each for one in rows for each in first.take_row(one, 1.0)]
    assert len(told) == 1
    assert taken(Watch(FACTS, told), rows + cut(41, 60)) == []


def test_a_restarted_monitor_reports_what_happened_while_it_was_down() -> None:
    assert taken(Watch(FACTS, []), cut(1, 40)) == [(10, "truncation")]


def test_steps_that_are_trained_again_after_a_rewind_do_not_repeat_their_warnings() -> None:
    watch = Watch(FACTS)
    assert taken(watch, [*map(row, range(1, 31)), *cut(31, 50)]) == [(35, "truncation")]
    watch.start_over()
    assert taken(watch, [*map(row, range(1, 31)), *cut(31, 50)]) == []


def test_a_kind_that_is_turned_off_is_not_reported() -> None:
    assert taken(Watch(FACTS, off=["truncation"]), cut(1, 40)) == []


def test_a_kind_is_reported_a_limited_number_of_times() -> None:
    before = [WarningRecord(0.0, -1000 * n, "truncation", "t", "r") for n in range(MAX_OF_KIND)]
    assert taken(Watch(FACTS, before), cut(1, 40)) == []
    assert taken(Watch(FACTS, before[1:]), cut(1, 40)) == [(10, "truncation")]


@pytest.mark.parametrize("name", ["policy/grad_norm", "loss/policy"])
def test_a_value_that_is_not_finite_is_reported(name: str) -> None:
    watch = Watch(FACTS)
    [told] = [each for one in [*map(row, range(1, 30)), row(30, **{name: None})] for each in watch.take_row(one, 0.0)]
    assert (told.step, told.kind) == (30, "gradient")
    assert name in told.text


def test_rows_without_metrics_cause_no_warnings() -> None:
    assert taken(Watch(FACTS), ({"step": step} for step in range(100))) == []


def telemetry(topic: str, at: float, values: Mapping[str, float | str], service: str = "rollout") -> TopicRow:
    return TopicRow(service=service, instance=0, topic=topic, at=at, values=dict(values))


def failing(at: float, failed: float = 16.0, failure: str = "raised ValueError: x") -> TopicRow:
    return telemetry("reward", at, {"samples": 64.0, "samples_failed": failed, "seconds": 0.1, "last_failure": failure})


def ticks(watch: Watch, begin: float, seconds: int) -> list[str]:
    return [each.kind for second in range(seconds) for each in watch.tick(begin + second, None)]


def test_a_condition_in_the_telemetry_is_reported_once_and_again_only_after_it_has_ended() -> None:
    watch = Watch(FACTS)
    watch.take_topic(failing(0.0))
    assert ticks(watch, 0.0, 300) == ["reward-failing"]
    watch.take_topic(failing(300.0, failed=0.0))
    assert ticks(watch, 300.0, SECONDS_OVER) == []
    watch.take_topic(failing(500.0))
    assert ticks(watch, 500.0, 5) == ["reward-failing"]


def test_a_condition_that_lasts_through_a_restart_is_not_reported_again() -> None:
    watch = Watch(FACTS)
    watch.take_topic(failing(0.0))
    told = watch.tick(1.0, None)
    again = Watch(FACTS, told)
    assert ticks(again, 2.0, 60) == []
    again.take_topic(failing(62.0))
    assert ticks(again, 62.0, 60) == []


def test_user_text_cannot_send_control_characters_to_the_terminal() -> None:
    watch = Watch(FACTS)
    watch.take_topic(failing(0.0, failure="\x1b[2J\u202eevil\nline " + "x" * 10_000))
    [told] = watch.tick(1.0, None)
    assert told.text.isprintable()
    assert "evil line" in told.text
    assert len(told.text) <= TEXT_CHARS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "text", -1e308])
@pytest.mark.parametrize("topic", ["rollout", "reward", "store", "cluster/services", "cluster/status"])
def test_telemetry_with_odd_values_does_not_cause_errors(topic: str, value: float | str) -> None:
    watch = Watch(FACTS)
    names = (
        "step",
        "generate_s",
        "samples",
        "samples_failed",
        "seconds",
        "bytes",
        "limit_bytes",
        "busy",
        "a/rss_bytes",
    )
    for second in range(30):
        watch.take_topic(telemetry(topic, float(second), dict.fromkeys(names, value)))
        watch.take_topic(telemetry(topic, float(second), {}))
        watch.tick(float(second), 1.0)


def test_every_kind_has_one_detector() -> None:
    assert sorted([*OF_ROWS, *OF_TELEMETRY]) == sorted(WarningKind)

"""Lists defects in the monitor's warnings: repetition, omission, rows that were rolled back."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

WATCH, FINDINGS = "services/monitor/warnings/watch.py", "services/monitor/warnings/episodes.py"
LEARNING = "services/monitor/warnings/learning.py"
TOLD = "tests/unit/monitor/test_watch.py"
SERIES = "tests/unit/monitor/test_warning_series.py"

WARNED = [
    Mutation(
        "an episode is over after a single row without its condition",
        FINDINGS,
        "if self._absent[kind, about] >= self._over_after:",
        "if True:",
        f"{TOLD}::test_an_episode_ends_only_after_consecutive_rows_without_the_condition",
    ),
    Mutation(
        "a restarted monitor repeats the warnings about rows",
        WATCH,
        "again = kind in OF_ROWS and any(earlier > step - ROWS_OVER for earlier in before)",
        "again = False",
        f"{TOLD}::test_a_restarted_monitor_does_not_repeat_its_warnings",
    ),
    Mutation(
        "a restarted monitor forgets the conditions of the telemetry",
        WATCH,
        "if record.kind in OF_TELEMETRY:",
        "if False:",
        f"{TOLD}::test_a_condition_that_lasts_through_a_restart_is_not_reported_again",
    ),
    Mutation(
        "kinds cannot be switched off",
        WATCH,
        "if kind in self._off or again",
        "if again",
        f"{TOLD}::test_a_kind_that_is_turned_off_is_not_reported",
    ),
    Mutation(
        "user text is shown unchanged",
        WATCH,
        'return "".join(character if character.isprintable() else "?" for character in line)',
        "return line",
        f"{TOLD}::test_user_text_cannot_send_control_characters_to_the_terminal",
    ),
    Mutation(
        "a bound has no hysteresis",
        LEARNING,
        "if now < TRUNCATED[bool(lasting)] and not rising:",
        "if now < TRUNCATED[0] and not rising:",
        f"{TOLD}::test_a_value_that_fluctuates_around_its_bound_is_reported_once",
    ),
    Mutation(
        "a rising share of groups with equal rewards is not reported below the fixed bound",
        LEARNING,
        "if share < ZERO_VARIANCE[bool(lasting)] and not rising:",
        "if share < ZERO_VARIANCE[bool(lasting)]:",
        "tests/unit/monitor/test_detectors.py::test_each_change_in_a_metric_is_reported_by_exactly_one_kind_of_warning",
    ),
    Mutation(
        "rolled-back rows are noticed only by the size of the file",
        "shared/runfiles/lines.py",
        "restarted = self._was_truncated(descriptor, head) and self._restart()",
        "restarted = os.fstat(descriptor).st_size < self._position and self._restart()",
        "tests/unit/shared/runfiles/test_metrics.py"
        "::test_rows_that_the_scheduler_rolls_back_are_noticed_even_if_the_file_has_grown_since",
    ),
    Mutation(
        "a reward that does not rise is never reported as flat",
        LEARNING,
        "cause = _why_flat(history, facts)",
        "return",
        f"{SERIES}::test_a_recorded_run_that_goes_wrong_causes_the_expected_warnings",
    ),
]

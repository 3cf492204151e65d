"""Lists defects in the launcher: folders without an owner, inherited signals, silence."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

RUN_DIR = "shared/rundir.py"
WATCH = "launch/supervisor/watch.py"
INTERRUPTS = "launch/commands/interrupts.py"
SWEEP = "tests/unit/shared/test_rundir.py"
LAUNCH = "tests/integration/launch/test_launch.py"
INTERRUPTED = "tests/integration/launch/test_launch_interrupted.py"

LAUNCHER = [
    Mutation(
        "the sweep removes folders that a process holds",
        RUN_DIR,
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "os.fstat(descriptor)",
        f"{SWEEP}::test_sweep_removes_only_runs_that_no_process_holds",
    ),
    Mutation(
        "folders are not locked while they are created",
        RUN_DIR,
        "    fcntl.flock(descriptor, fcntl.LOCK_SH)\n    return descriptor",
        "    return descriptor",
        f"{INTERRUPTED}::test_the_sweep_leaves_a_start_in_progress_alone",
    ),
    Mutation(
        "a signal that was inherited as ignored is handled",
        INTERRUPTS,
        "if handler != signal.SIG_IGN]",
        "]",
        f"{INTERRUPTED}::test_nohup_keeps_a_run_alive_when_its_terminal_closes",
    ),
    Mutation(
        "signals revert to their default action after the loop",
        INTERRUPTS,
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(number, signal.SIG_DFL)",
        f"{INTERRUPTED}::test_a_signal_after_the_loop_has_closed_does_not_change_the_outcome",
    ),
    Mutation(
        "a service that was slow before is not given more time",
        WATCH,
        "max(SILENCE_S, SLOWNESS * self._longest_gap_s.get(key[0], 0.0))",
        "SILENCE_S",
        f"{LAUNCH}::test_the_time_limit_for_an_answer_grows_with_the_gaps_between_a_services_answers",
    ),
    Mutation(
        "time in which the launcher was stopped counts as silence",
        WATCH,
        "min(seen_at - self._seen_at, 2 * TICK_S)",
        "seen_at - self._seen_at",
        f"{LAUNCH}::test_slow_services_and_a_stopped_launcher_cause_no_false_alarm",
    ),
]

"""Tests the doctor's diagnosis of given answers: causes, waits that are not problems in themselves, and the stalls that
depend on a cause."""

from __future__ import annotations

from launch.viewers.doctor import STALL_S, Examined, Finding, as_lines, diagnose
from proto.messages import TroubleRow, WaitKind, WaitRow, Waits

LONG = STALL_S + 3


def answer(*rows: WaitRow, progress_s: float = -1.0) -> Waits:
    return Waits(incarnation=1, state="READY", state_s=60.0, waits=list(rows), progress_s=progress_s)


def examined(**answers: Waits | None) -> Examined:
    names = {"scheduler": "scheduler/0", "driver": "policy-trainer/0", "worker": "policy-trainer-worker/0"}
    names |= {"rollout": "rollout/0", "store": "batch-store/0", "supervisor": "supervisor/0"}
    return Examined("run", {names[key]: value for key, value in answers.items()}, step=3, steps=9)


def wrong(run: Examined) -> list[Finding]:
    return [each for each in diagnose(run) if each.wrong]


def step(of: str, since_s: float = LONG) -> WaitRow:
    return WaitRow(
        WaitKind.STEP, f"step 4 is waiting for 3 of 8 tasks that are leased to {of} for rollout", since_s, 0.0, of
    )


def batch(since_s: float = LONG) -> WaitRow:
    return WaitRow(WaitKind.CALL, "NextBatch", since_s, 20.0, "scheduler/0")


def test_no_problem_is_reported_while_the_tasks_of_a_step_are_being_sampled() -> None:
    run = examined(scheduler=answer(step("rollout/0", 60)), driver=answer(batch()), rollout=answer())
    assert wrong(run) == []
    assert any("nothing is wrong" in line for line in as_lines(run, diagnose(run)))


def test_code_that_delays_the_step_is_reported_long_before_its_limit() -> None:
    code = WaitRow(WaitKind.CODE, "process 7 is working on 1 reward calls, at my.py:3", LONG, 600.0)
    held_up = examined(scheduler=answer(step("rollout/0")), driver=answer(batch()), rollout=answer(code))
    [finding] = wrong(held_up)
    assert finding.text == "rollout/0: process 7 is working on 1 reward calls, at my.py:3"
    assert finding.stalls[0].startswith("scheduler/0: step 4 is waiting for 3 of 8 tasks")
    assert finding.stalls[1].startswith("policy-trainer/0: NextBatch to scheduler/0 [8.0 s of 20 s]")
    assert wrong(examined(scheduler=answer(), rollout=answer(code))) == []


def test_code_that_has_used_half_of_its_time_is_reported_even_if_nothing_waits_for_it() -> None:
    code = WaitRow(WaitKind.CODE, "process 7 is working on 1 reward calls, at my.py:3", LONG, 10.0)
    assert [each.limit_s for each in wrong(examined(rollout=answer(code)))] == [10.0]


def test_process_that_does_not_answer_is_reported_and_a_stopped_process_is_reported_only_once() -> None:
    silent = examined(scheduler=answer(step("rollout/0")), rollout=None)
    assert [each.text.partition(" within ")[0] for each in wrong(silent)] == ["rollout/0 did not answer"]
    stopped = WaitRow(WaitKind.STOPPED, "rollout/0 (process 7) is stopped by a signal", 0.0, 0.0, "rollout/0")
    both = examined(scheduler=answer(step("rollout/0")), rollout=None, supervisor=answer(stopped))
    both.silent_s["rollout/0"] = 4.0
    [finding] = wrong(both)
    assert finding.since_s == 4.0
    assert finding.text == stopped.what
    assert len(finding.stalls) == 1


def test_starting_process_is_reported_only_after_a_while() -> None:
    for since_s, count in ((5.0, 0), (45.0, 1)):
        row = WaitRow(WaitKind.PROCESS, "rollout/0 starts", since_s, 600.0, "rollout/0")
        run = examined(supervisor=answer(row), rollout=None)
        run.states["rollout/0"] = "STARTING"
        assert len(wrong(run)) == count


def test_full_store_is_reported_with_its_usage_and_the_producers_that_are_waiting() -> None:
    room = WaitRow(WaitKind.ROOM, "64.0 of 64.0 MiB in use", 0.0)
    refused = WaitRow(WaitKind.REFUSED, "PutBegin: no room", 3.0, 0.0, "batch-store/0")
    [finding] = wrong(examined(store=answer(room), rollout=answer(refused)))
    assert finding.text == "batch-store/0 is full: 64.0 of 64.0 MiB in use"
    assert finding.stalls == ("rollout/0: PutBegin: no room to batch-store/0 [3.0 s]",)
    assert wrong(examined(store=answer(room), rollout=answer())) == []


def test_judge_outage_is_reported_with_the_tasks_that_are_not_leased() -> None:
    outage = WaitRow(WaitKind.OUTAGE, "the judge of my:fn is not responding", 2.0, 600.0)
    paused = WaitRow(WaitKind.OUTAGE, "nothing is leased", 0.0, 0.0, "rollout/0")
    [finding] = wrong(examined(scheduler=answer(paused), rollout=answer(outage)))
    assert finding.service == "rollout/0"
    assert finding.stalls == ("scheduler/0: nothing is leased",)


def test_computation_is_reported_only_if_it_makes_no_progress() -> None:
    row = WaitRow(WaitKind.COMPUTE, "computes ForwardBackward", 60.0)
    call = WaitRow(WaitKind.CALL, "ForwardBackward", 60.0, 3600.0, "policy-trainer-worker/0")
    moving = examined(driver=answer(call), worker=answer(row, progress_s=0.5))
    assert wrong(moving) == []
    assert any("ForwardBackward" in each.text for each in diagnose(moving))
    [finding] = wrong(examined(driver=answer(call), worker=answer(row, progress_s=12.0)))
    assert "made no progress for 12.0 s" in finding.text
    assert len(finding.stalls) == 1


def test_lease_without_progress_and_failing_rewards_are_reported() -> None:
    lease = WaitRow(WaitKind.LEASE, "lease 7 (rollout, 4 tasks) is making no progress", LONG, 30.0, "rollout/0")
    assert len(wrong(examined(scheduler=answer(lease), rollout=answer()))) == 1
    run = examined(scheduler=answer(), rollout=answer())
    run.troubles.append(TroubleRow("rollout", 0, "rewards", "rewards failing: 8 of 8"))
    assert [each.text for each in wrong(run)] == ["rollout/0: rewards failing: 8 of 8"]


def test_step_that_waits_for_a_service_without_processes_is_reported() -> None:
    row = WaitRow(WaitKind.STEP, "step 4 is waiting for 8 of 8 tasks that no rollout has leased", LONG, 0.0, "rollout")
    [finding] = wrong(examined(scheduler=answer(row), driver=answer(batch())))
    assert "no rollout is running" in finding.text


def test_a_host_without_an_agent_is_reported_after_a_while() -> None:
    for since_s, count in ((5.0, 0), (45.0, 1)):
        row = WaitRow(WaitKind.PROCESS, "host b is LOST: no agent is reporting from it", since_s)
        found = wrong(examined(supervisor=answer(row)))
        assert [each.text for each in found] == [row.what] * count

from __future__ import annotations

import pytest

from services.policy_trainer.tinker.errors import BadRequest, NotThere
from services.policy_trainer.tinker.events import Beat, ClockTick, Fetched, Step, Stopping, WorkersReady
from services.policy_trainer.tinker.records import RequestKind
from services.policy_trainer.tinker.state import FETCHED_S, GAP_S, IDLE_S, KEEP_S, QUANTUM_TOKENS
from services.policy_trainer.tinker.turns import FairTurns
from tests.unit.tinker.workers import Workers, ready, state

FB, FWD, STEP = RequestKind.FORWARD_BACKWARD, RequestKind.FORWARD, RequestKind.OPTIM_STEP


def test_requests_run_in_the_order_of_their_numbers_whatever_the_order_in_which_they_arrive() -> None:
    workers = ready()
    model = workers.model()
    for seq in (3, 2, 5):
        workers.ask(model, seq, FB, [4])
    assert workers.settled == [f"{model}/0"]
    workers.ask(model, 4, FB, [4])
    workers.ask(model, 1, FB, [4])
    assert workers.settled == [f"{model}/{seq}" for seq in range(6)]


def test_a_step_applies_the_gradients_of_all_calls_since_the_last_one() -> None:
    workers = ready()
    model = workers.model()
    for seq, kind in enumerate((FB, FB, STEP, FWD, FB, STEP), 1):
        workers.ask(model, seq, kind, [4])
    assert workers.weights[model] == [("1[0:1]", "2[0:1]"), ("5[0:1]",)]


@pytest.mark.parametrize("at", ["worker", "contents"])
def test_a_failed_forward_backward_fails_the_next_step_only_and_its_gradients_are_dropped(at: str) -> None:
    workers = ready()
    model = workers.model()
    workers.ask(model, 1, FB, [4])
    if at == "worker":
        workers.bad.add(f"{model}/2")
    second = workers.ask(model, 2, FB, [4], refused="no such loss" if at == "contents" else "")
    third = workers.ask(model, 3, FB, [4])
    failed = workers.ask(model, 4, STEP)
    workers.ask(model, 5, FB, [4])
    good = workers.ask(model, 6, STEP)
    assert second.error
    assert not third.error
    assert f"seq_id 2 failed: {second.error}" in failed.error
    assert failed.category == "user"
    assert not good.error
    assert workers.weights[model] == [("5[0:1]",)]


def test_a_failure_of_one_model_costs_no_other_model_anything() -> None:
    workers = ready()
    one, other = workers.model(number=0), workers.model(number=1)
    workers.ask(other, 1, FB, [4])
    workers.bad.add(f"{one}/1")
    workers.ask(one, 1, FB, [4])
    assert workers.ask(one, 2, STEP).error
    assert not workers.ask(other, 2, STEP).error
    assert workers.weights[other] == [("1[0:1]",)]


def test_a_refused_step_leaves_the_weights_and_drops_the_gradient() -> None:
    workers = ready()
    model = workers.model()
    workers.ask(model, 1, FB, [4])
    workers.bad.add(f"{model}/2")
    assert workers.ask(model, 2, STEP).error
    workers.ask(model, 3, FB, [4])
    assert not workers.ask(model, 4, STEP).error
    assert workers.weights[model] == [("3[0:1]",)]


@pytest.mark.parametrize("when", range(1, 8))
def test_lost_workers_change_no_weights_whenever_they_die(when: int) -> None:
    def run(dies_at: int | None) -> Workers:
        workers = ready()
        one, other = workers.model(number=0), workers.model(number=1)
        for seq, kind in enumerate((FB, FWD, FB, STEP, FB, FB, STEP), 1):
            for model in (one, other):
                workers.holds = dies_at == seq
                workers.ask(model, seq, kind, [3, 4])
                workers.holds = False
                if dies_at == seq:
                    workers.die()
        return workers

    undisturbed, killed = run(None), run(when)
    assert killed.weights == undisturbed.weights
    assert killed.settled == undisturbed.settled
    assert killed.settled.count("s:train:0/1") == 1


def test_only_gradients_since_the_last_change_are_computed_again() -> None:
    workers = ready()
    model = workers.model()
    for seq, kind in enumerate((FB, STEP, FB, FWD, FB), 1):
        workers.ask(model, seq, kind, [4])
    workers.die()
    workers.calls.clear()
    workers.ask(model, 6, STEP)
    numbers = [(call.step, call.request.seq if call.request else None) for call in workers.calls]
    assert numbers == [(Step.OPEN, None), (Step.REPLAY, 3), (Step.REPLAY, 5), (Step.RUN, 6)]


@pytest.mark.parametrize("replayed", [0, 1])
def test_workers_that_are_lost_during_a_replay_leave_the_answered_result_as_it_is(replayed: int) -> None:
    workers = ready()
    model = workers.model()
    first = workers.ask(model, 1, FB, [QUANTUM_TOKENS, QUANTUM_TOKENS])
    sums, parts = dict(first.sums), list(first.parts)
    workers.die()
    workers.holds = True
    workers.ask(model, 2, STEP)
    for _ in range(1 + replayed):  # the model is opened, and pieces of the gradient are computed again
        workers.go_on(most=1)
    assert workers.waiting[0].step == Step.REPLAY
    workers.holds = False
    workers.die()
    assert (first.sums, first.parts) == (sums, parts)
    assert len(parts) == 2
    assert workers.weights[model] == [("1[0:1]", "1[1:2]")]


def test_a_restarted_server_goes_on_where_its_journal_ends() -> None:
    workers = ready()
    model = workers.model()
    workers.ask(model, 1, FB, [4])
    workers.ask(model, 2, STEP)
    workers.ask(model, 3, FB, [4])
    workers.holds = True
    workers.ask(model, 4, FB, [4])
    workers.ask(model, 5, STEP)
    again = Workers(state(), weights=workers.weights)
    again.state.restore(workers.journal.values())  # type: ignore[arg-type]
    again.handle(WorkersReady())
    assert again.weights[model] == [("1[0:1]",), ("3[0:1]", "4[0:1]")]
    assert again.settled == [f"{model}/4", f"{model}/5"]
    assert not again.state.request("k", f"{model}/5").error


def test_contents_that_were_refused_are_refused_after_a_restart_too() -> None:
    workers = ready()
    model = workers.model()
    workers.holds = True
    workers.ask(model, 1, FB, [4])
    workers.ask(model, 2, FB, [4], refused="no such loss")
    workers.ask(model, 3, STEP)
    again = Workers(state(), weights=workers.weights)
    again.state.restore(workers.journal.values())  # type: ignore[arg-type]
    again.handle(WorkersReady())
    assert again.weights[model] == []
    assert again.state.request("k", f"{model}/2").error == "no such loss"


def test_the_same_request_again_is_the_first_one() -> None:
    workers = ready()
    model = workers.model()
    first = workers.ask(model, 1, FB, [4])
    workers.ask(model, 1, FB, [4])
    workers.ask(model, 2, STEP)
    assert workers.ask(model, 1, FB, [4]) is first
    assert workers.weights[model] == [("1[0:1]",)]


def test_a_large_request_runs_in_pieces_of_a_quantum_whose_results_are_joined_in_order() -> None:
    workers = ready()
    model = workers.model()
    half = QUANTUM_TOKENS // 2
    request = workers.ask(model, 1, FB, [half, half, half, 2 * half, 3 * half])
    assert [call.piece for call in workers.calls if call.request is request] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert [task.task_id for part in request.parts for task in part.tasks] == [f"api/1/{10_000 + i}" for i in range(5)]
    assert request.sums == {"loss": 5.0}


def test_a_client_with_much_work_delays_another_by_a_quantum_at_most() -> None:
    workers = ready()
    workers.session("t", key="small")
    busy, small = workers.model(), workers.model("t", key="small")
    workers.holds = True
    for seq in range(1, 9):
        workers.ask(busy, seq, FB, [512] * 1024)
    workers.ask(small, 1, FB, [512])
    workers.calls.clear()
    workers.holds = False
    workers.go_on()
    before = [call for call in workers.calls[: [call.model for call in workers.calls].index(small)]]
    assert sum(512 * (call.piece[1] - call.piece[0]) for call in before) <= QUANTUM_TOKENS


def test_a_competitor_that_arrives_during_a_call_is_served_before_the_next_one() -> None:
    turns = FairTurns(100)
    for _ in range(3):
        assert turns.pick({"much": 100}) == "much"
        turns.spend("much", 100)
        # While that call runs, another one arrives. It is served before the next call of the first.
        assert turns.pick({"much": 100, "small": 1}) == "small"
        turns.spend("small", 1)


def test_keys_with_equal_work_get_equal_shares_however_many_models_they_have() -> None:
    workers = ready()
    workers.session("t", key="other")
    mine = [workers.model(number=number) for number in range(4)]
    other = workers.model("t", key="other")
    workers.holds = True
    for seq in range(1, 5):
        for model in (*mine, other):
            workers.ask(model, seq, FB, [QUANTUM_TOKENS])
    workers.calls.clear()
    workers.holds = False
    workers.go_on()
    first = [call.model for call in workers.calls[:8]]
    assert first.count(other) >= 3


def test_one_model_too_many_parks_the_one_that_was_used_longest_ago() -> None:
    workers = ready(max_models=2)
    names = []
    for number in range(3):
        workers.now += 1
        names.append(workers.model(number=number))
    assert list(workers.gradients) == names[1:]
    assert workers.state.own.models[names[0]].parked
    workers.ask(names[0], 1, FB, [4])
    workers.ask(names[0], 2, STEP)
    assert workers.weights[names[0]] == [("1[0:1]",)]
    assert len(workers.gradients) == 2


def test_gradients_of_a_parked_model_are_computed_again() -> None:
    workers = ready(max_models=1)
    one = workers.model(number=0)
    workers.ask(one, 1, FB, [4])
    workers.now += 1
    other = workers.model(number=1)
    workers.ask(other, 1, FB, [4])
    workers.ask(one, 2, STEP)
    workers.ask(other, 2, STEP)
    assert (workers.weights[one], workers.weights[other]) == ([("1[0:1]",)], [("1[0:1]",)])


def test_all_models_are_parked_before_the_run_ends() -> None:
    workers = ready()
    names = [workers.model(number=number) for number in range(3)]
    workers.ask(names[0], 1, FB, [4])
    workers.die()
    workers.handle(Stopping())
    assert workers.state.is_over
    waits = workers.ask(names[1], 1, FB, [4])
    assert not waits.done


def test_a_session_without_a_sign_of_life_parks_its_models_and_a_later_call_brings_them_back() -> None:
    workers = ready()
    model = workers.model()
    workers.now += IDLE_S
    workers.handle(Beat("s"))
    workers.handle(ClockTick())
    assert not workers.state.own.models[model].parked
    workers.now += IDLE_S + 1
    workers.handle(ClockTick())
    assert workers.state.own.models[model].parked
    workers.ask(model, 1, FB, [4])
    assert workers.settled[-1] == f"{model}/1"


def test_a_number_that_never_arrives_fails_after_a_while_and_spoils_the_step() -> None:
    workers = ready()
    model = workers.model()
    late = workers.ask(model, 2, FB, [4])
    step = workers.ask(model, 3, STEP)
    workers.handle(ClockTick())
    workers.now += GAP_S + 1
    workers.handle(ClockTick())
    assert not late.error
    assert "seq_id 1 did not arrive" in step.error
    assert workers.weights[model] == []


def test_data_are_released_a_while_after_the_result_was_fetched_and_once_a_step_covers_them() -> None:
    workers = ready()
    model = workers.model()

    def released(after_s: float) -> list[int]:
        workers.now += after_s
        workers.handle(ClockTick())
        return [release.first for release in workers.released]

    one = workers.ask(model, 1, FB, [4])
    workers.handle(Fetched(one.id))
    assert released(FETCHED_S + 1) == []
    workers.ask(model, 2, STEP)
    assert released(0) == [10_000]
    two = workers.ask(model, 3, FWD, [4])
    workers.handle(Fetched(two.id))
    assert released(FETCHED_S - 1) == [10_000]
    assert released(2) == [10_000, 30_000]


def test_a_result_that_nobody_fetches_is_dropped_after_an_hour_and_says_so() -> None:
    workers = ready()
    model = workers.model()
    request, step = workers.ask(model, 1, FWD, [4]), workers.ask(model, 2, STEP)
    workers.now += KEEP_S - 1
    workers.handle(ClockTick())
    assert workers.state.request("k", step.id) is step
    workers.now += 2
    workers.handle(ClockTick())
    assert [release.first for release in workers.released] == [10_000]
    with pytest.raises(BadRequest, match="no longer kept"):
        workers.state.request("k", request.id)
    assert not any(name == request.id for _, name in workers.journal)


def test_another_keys_things_are_not_there() -> None:
    workers = ready()
    model = workers.model()
    state = workers.state
    with pytest.raises(NotThere):
        state.own.session("other", "s")
    with pytest.raises(NotThere):
        state.own.model("other", model)
    with pytest.raises(NotThere):
        state.request("other", f"{model}/0")


def test_a_checkpoint_is_kept_until_it_expires() -> None:
    workers = ready()
    model = workers.model()
    path = f"tinker://{model}/weights/a"
    workers.ask(model, 1, RequestKind.SAVE, tinker_path=path, folder="models/1/weights/a", ttl_seconds=100)
    assert workers.state.own.checkpoint("k", path).step == 0
    workers.now += 101
    workers.handle(ClockTick())
    with pytest.raises(NotThere):
        workers.state.own.checkpoint("k", path)


def test_the_oldest_published_weights_without_a_name_are_released() -> None:
    workers = ready()
    model = workers.model()
    for number in range(6):
        session = f"s:sample:{number}"
        workers.ask(model, 2 * number + 1, RequestKind.SAVE_SAMPLER, sampling_session_id=session, number=number)
        workers.ask(model, 2 * number + 2, STEP)
    assert sorted(version.step for version in workers.state.own.versions.values()) == [2, 3, 4, 5]


def test_limits_of_a_key_ask_for_patience_but_never_for_the_number_that_is_next() -> None:
    workers = ready(model_requests=4, key_requests=4)
    model = workers.state.own.models[workers.model()]
    for seq in (2, 3, 4, 5):
        workers.ask(model.id, seq, FB, [4])
    with pytest.raises(BadRequest, match="may have 4") as refused:
        workers.state.admit(model, 6, 0)
    assert refused.value.status == 429
    workers.state.admit(model, 1, 0)


def test_data_beyond_a_keys_share_wait_unless_waiting_would_never_end() -> None:
    workers = ready(key_bytes=100)
    one, other = (workers.state.own.models[workers.model(number=number)] for number in range(2))
    workers.ask(one.id, 1, FB, [80])
    with pytest.raises(BadRequest, match="may take 100"):
        workers.state.admit(other, 1, 40)
    workers.state.admit(one, 2, 40)
    assert "one optim_step" in workers.state.too_much(one, 40)

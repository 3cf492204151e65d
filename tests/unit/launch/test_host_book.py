"""Tests the placement of processes on hosts: the first placement, lost hosts, returning hosts, GPUs, and agents that
are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.placement.book import HostBook, HostLost, HostState, Told, Unable
from launch.processes.plan import Key
from proto.messages import ErrorCode, HostOrders, HostReport, HostRow, ProcessRow
from shared.rpc.errors import RpcError
from shared.topology import load
from tests.opcodes import opcodes
from tests.unit.shared.topology.small_topology import BASE, make, write

PLACES = (
    "placement.hosts={b: {gpus: 4}, c: {gpus: 4}, spare: {gpus: 2}}",
    "services.rollout={host: [b, c], instances: 4, gpus: 2, engine: vllm, parallel: {tp: 2}}",
    "transport.listen=10.0.0.1",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make(tmp_path)
    write(folder, BASE)
    return folder


def book(folder: Path, *overrides: str) -> HostBook:
    topology = load(folder / "t.yaml", [*PLACES, "services.rollout.threads=3", *overrides])
    return HostBook(topology)


def report(host: str, life: int = 1, gpus: int = 4, failed: str = "", *, ended: bool = False) -> HostReport:
    return HostReport(
        host=host,
        incarnation=life,
        endpoint=f"tcp://{host}:1",
        gpus=gpus,
        processes=[
            ProcessRow("batch-store", 1, "READY", 7, 100 + life, 0),
            ProcessRow("rollout", 0, "BACKOFF", 0, 0, 1),
        ],
        ended=ended,
        failed=failed,
    )


def runs(orders: HostOrders) -> dict[Key, list[int]]:
    return {(each.service, each.instance): each.gpus for each in orders.processes}


def joined(made: HostBook, *hosts: str, now: float = 0.0) -> dict[str, dict[Key, list[int]]]:
    return {host: runs(made.report(report(host), now)[0]) for host in hosts}


def test_instances_alternate_between_the_hosts_of_their_service_and_every_host_has_a_store(folder: Path) -> None:
    made = book(folder)
    assert joined(made, "b", "c", "spare") == {
        "b": {("batch-store", 1): [], ("rollout", 0): [0, 1], ("rollout", 2): [2, 3]},
        "c": {("batch-store", 2): [], ("rollout", 1): [0, 1], ("rollout", 3): [2, 3]},
        "spare": {("batch-store", 3): []},
    }
    [threads] = {each.threads for each in made.report(report("b"), 0)[0].processes if each.service == "rollout"}
    assert threads == 3


def test_ranks_of_a_trainer_outside_the_home_host_move_together(folder: Path) -> None:
    places = (
        "placement.hosts={a: {gpus: 2}, b: {gpus: 2}, c: {gpus: 2}, spare: {gpus: 2}}",
        "services.policy-trainer={host: [a, b], gpus: 4}",
        "services.rollout={host: c, instances: 1, gpus: 2, engine: vllm, parallel: {tp: 2}}",
    )
    made = book(folder, *places)
    ranks = {("policy-trainer-worker", 2): [0], ("policy-trainer-worker", 3): [1]}
    assert made.host_of(("policy-trainer-worker", 1)) is None
    assert {host: set(keys) & ranks.keys() for host, keys in joined(made, "b", "c", "spare").items()} == {
        "b": ranks.keys(),
        "c": set(),
        "spare": set(),
    }
    made.lose("b", "power cut", 1.0)
    assert joined(made, "spare")["spare"] == {("batch-store", 3): [], **ranks}


def test_processes_of_a_lost_host_move_to_other_hosts_with_enough_gpus(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c", "spare")
    effects = made.lose("b", "power cut", 1.0)
    assert effects[0] == HostLost("b", [101], "power cut")
    assert joined(made, "c", "spare") == {
        "c": {("batch-store", 2): [], ("rollout", 1): [0, 1], ("rollout", 3): [2, 3]},
        "spare": {("batch-store", 3): [], ("rollout", 0): [0, 1]},
    }
    assert made.lose("b", "power cut", 2.0) == []
    assert [(row.what, row.since_s) for row in made.waits(3.0)] == [
        ("host b is LOST: no agent is reporting from it (last: power cut)", 2.0)
    ]
    rows = {(row.service, row.instance): row.state for row in made.rows()}
    assert rows["rollout", 2] == "WAITING"


def test_every_host_is_listed_with_its_state_silence_and_processes(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c", now=1.0)
    made.lose("b", "power cut", 3.0)
    made.report(report("c"), 5.0)
    assert made.host_rows(6.0) == [
        HostRow("b", "LOST", 3.0, 5.0, ["batch-store/1", "rollout/0", "rollout/2"], "power cut"),
        HostRow("c", "JOINED", 5.0, 1.0, ["batch-store/2", "rollout/1", "rollout/3"]),
        HostRow("spare", "AWAITED", 6.0, -1.0, ["batch-store/3"]),
    ]


def test_the_user_is_told_once_why_a_host_cannot_join(folder: Path) -> None:
    made = book(folder)
    told = [Told("host b is not part of the run: no answer")]
    assert [made.lose("b", "no answer", at) for at in (1.0, 2.0)] == [told, []]
    assert next(row.what for row in made.waits(3.0)).endswith("(last: no answer)")
    joined(made, "b")
    assert made.lose("b", "no answer", 4.0)[1] == Told("host b is lost: no answer")
    made.ending = True
    assert made.lose("b", "the run ends", 5.0) == []


def test_a_process_without_a_place_is_shown_until_its_host_ends_and_never_instead_of_another(folder: Path) -> None:
    made = book(folder, "services.rollout={host: [b, c], instances: 1}")
    joined(made, "b", "c")
    gone, here = ProcessRow("rollout", 5, "DRAINED", 0, 0, 0), ProcessRow("rollout", 0, "DRAINED", 0, 0, 0)
    report_c = HostReport(host="c", incarnation=1, endpoint="", gpus=4, processes=[gone, here])
    made.report(report_c, 1.0)
    rows = {(row.service, row.instance): row.state for row in made.rows()}
    assert (rows["rollout", 5], rows["rollout", 0]) == ("DRAINED", "BACKOFF")
    made.lose("c", "gone", 2.0)
    assert ("rollout", 5) not in {(row.service, row.instance) for row in made.rows()}


def test_a_run_is_ready_without_a_spare_host_that_has_not_joined(folder: Path) -> None:
    made = book(folder, "services.rollout={host: b, instances: 1}", "placement.hosts={b: {}, spare: {}}")

    def report_ready(host: str, *keys: Key) -> None:
        rows = [ProcessRow(*key, "READY", 7, 100, 0) for key in keys]
        made.report(HostReport(host=host, incarnation=1, endpoint="", gpus=0, processes=rows), 0.0)

    assert not made.all_ready
    report_ready("b", ("batch-store", 1))
    assert not made.all_ready
    report_ready("b", ("batch-store", 1), ("rollout", 0))
    assert made.all_ready
    report_ready("spare")
    assert not made.all_ready
    report_ready("spare", ("batch-store", 2))
    assert made.all_ready


def test_without_gpus_the_least_loaded_host_takes_the_lost_processes(folder: Path) -> None:
    made = book(folder, "services.rollout={host: [b, c], instances: 4}")
    joined(made, "b", "c", "spare")
    made.lose("c", "gone", 1.0)
    placed = joined(made, "b", "spare")
    assert {key for key in placed["spare"] if key[0] == "rollout"} == {("rollout", 1), ("rollout", 3)}
    assert {key for key in placed["b"] if key[0] == "rollout"} == {("rollout", 0), ("rollout", 2)}


def test_a_returning_host_runs_processes_that_found_no_other_place(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c", "spare")
    made.lose("b", "gone", 1.0)
    with pytest.raises(RpcError, match="considered lost") as caught:
        made.report(report("b"), 1)
    assert caught.value.code == ErrorCode.LOST
    orders, effects = made.report(report("b", life=2), 2)
    assert runs(orders) == {("batch-store", 4): [], ("rollout", 2): [2, 3]}
    assert effects == [Told("host b has joined")]


def test_a_host_that_joins_late_takes_over_from_a_lost_host(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c")
    made.lose("b", "gone", 1.0)
    assert runs(made.report(report("spare"), 1)[0]) == {("batch-store", 3): [], ("rollout", 0): [0, 1]}


def test_a_host_is_lost_when_its_agent_exits_before_the_run_ends(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c", "spare")
    _, effects = made.report(report("b", ended=True), 1.0)
    assert effects[0] == HostLost("b", [101], "its agent ended")
    assert made.lose("b", "its agent ended", 2.0) == []
    assert runs(made.report(report("b", life=2), 3.0)[0]) == {("batch-store", 4): [], ("rollout", 2): [2, 3]}


def test_a_silent_host_counts_as_lost_after_the_limit(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c")
    joined(made, "c", now=5.0)
    assert made.look(20.0) == []
    assert [each.host for each in made.look(20.1) if isinstance(each, HostLost)] == ["b"]


def test_the_ranks_of_a_model_are_always_placed_together(folder: Path) -> None:
    ranks = "services.reference={host: [b, c], gpus: 4, backend: megatron, parallel: {tp: 2}}"
    made = book(folder, "services.rollout={host: [spare], instances: 1}", ranks)
    placed = joined(made, "b", "c")
    assert placed["b"] == {("batch-store", 1): [], ("reference", 0): [0], ("reference", 1): [1]}
    made.lose("b", "gone", 1.0)
    assert joined(made, "c")["c"] == {("batch-store", 2): []} | {("reference", i): [(i + 2) % 4] for i in range(4)}


def test_a_service_that_is_scaled_keeps_its_places(folder: Path) -> None:
    made = book(folder)
    joined(made, "b", "c", "spare")
    more = ["services.rollout.host=[b, c, spare]", "services.rollout.instances=5"]
    made.plan(load(folder / "t.yaml", [*PLACES, *more]))
    assert set(made.keys()) >= {("rollout", i) for i in range(5)}
    assert runs(made.report(report("c"), 0)[0])["rollout", 1] == [0, 1]
    made.plan(load(folder / "t.yaml", [*PLACES, "services.rollout.instances=2"]))
    assert set(made.keys()) == {("batch-store", i) for i in (1, 2, 3)} | {("rollout", 0), ("rollout", 1)}


def test_an_agent_with_fewer_gpus_than_the_topology_gives_it_is_refused(folder: Path) -> None:
    with pytest.raises(RpcError, match=r"host b: placement\.hosts gives it 4 GPUs, but its agent may use 3"):
        book(folder).report(report("b", gpus=3), 0)


@pytest.mark.parametrize(("host", "code"), [("nobody", ErrorCode.BAD_REQUEST), ("b", ErrorCode.CONFLICT)])
def test_an_agent_for_an_unknown_host_or_for_a_host_that_has_an_agent_is_refused(
    folder: Path, host: str, code: str
) -> None:
    made = book(folder)
    joined(made, "b")
    with pytest.raises(RpcError) as caught:
        made.report(report(host, life=2), 1)
    assert caught.value.code == code
    assert made.hosts["b"].state == HostState.JOINED


def test_a_host_that_cannot_continue_ends_the_run_and_a_host_that_has_ended_runs_no_process(folder: Path) -> None:
    made = book(folder)
    joined(made, "b")
    assert made.report(report("b", failed="rollout/0: no model"), 1)[1] == [Unable("host b: rollout/0: no model")]
    made.ending = True
    assert made.report(report("b"), 2)[0].ends
    assert made.running
    made.report(report("b", ended=True), 3)
    assert not made.running


def test_the_work_for_a_report_and_for_a_lost_host_does_not_depend_on_the_number_of_other_hosts(folder: Path) -> None:
    counts = []
    for hosts in (4, 64):
        names = [f"h{number}" for number in range(hosts)]
        places = (
            f"placement.hosts={{{', '.join(f'{name}: {{}}' for name in names)}}}",
            f"services.rollout={{host: [{', '.join(names)}], instances: {2 * hosts}}}",
            "services.batch-store.memory=1GiB",
        )
        made = book(folder, *places)
        joined(made, *names)
        reported = opcodes(lambda made=made: made.report(report("h1"), 1.0))  # type: ignore[misc]
        lost = opcodes(lambda made=made: made.lose("h2", "power cut", 2.0))  # type: ignore[misc]
        counts.append((reported, lost / hosts))
    (report_few, lose_few), (report_many, lose_many) = counts
    assert report_many < 1.2 * report_few
    assert lose_many < 1.2 * lose_few  # the book looks at each host, but not at the processes of other hosts

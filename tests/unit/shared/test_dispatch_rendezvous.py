"""Ranks meet before every collective: either all continue or none does, and the error names a missing rank."""

from __future__ import annotations

from proto.messages import Meet, Met
from shared.ranks.rendezvous import END, JOIN, Rendezvous
from shared.rpc.errors import RpcError

GENERATION = 77


class Ranks:
    """A recorder of the answers to every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        names = [f"policy-trainer-worker/{rank}" for rank in range(size)]
        self.rendezvous = Rendezvous(names, GENERATION, deadline_s=5.0)
        self.answers: dict[tuple[int, str], list[Met | RpcError]] = {}

    def come(self, rank: int, name: str, *, failure: str = "", now: float = 0.0, generation: int = GENERATION) -> None:
        answers = self.answers.setdefault((rank, name), [])
        request = Meet(generation=0 if name == JOIN else generation, round=name, rank=rank, failure=failure)
        self.rendezvous.arrive(request, answers.append, now)

    def formed(self) -> Ranks:
        for rank in range(self.size):
            self.come(rank, JOIN)
        assert all(self.answers[rank, JOIN] == [Met(generation=GENERATION)] for rank in range(self.size))
        return self


def test_ranks_that_have_joined_know_the_address_of_their_process_group() -> None:
    ranks = Ranks(2)
    ranks.rendezvous.store = "10.0.0.1:4711"
    ranks.come(1, JOIN)
    ranks.come(0, JOIN)
    assert ranks.answers[0, JOIN] == ranks.answers[1, JOIN] == [Met(generation=GENERATION, store="10.0.0.1:4711")]


def test_no_rank_continues_before_all_have_arrived() -> None:
    ranks = Ranks(3).formed()
    ranks.come(0, "a")
    ranks.come(2, "a")
    assert ranks.answers[0, "a"] == ranks.answers[2, "a"] == []
    ranks.come(1, "a")
    assert all(ranks.answers[rank, "a"] == [Met(generation=GENERATION)] for rank in range(3))


def test_one_failure_fails_every_rank_at_once_including_ranks_that_arrive_later() -> None:
    ranks = Ranks(3).formed()
    ranks.come(0, "a")
    ranks.come(1, "a", failure="no shards")
    ranks.come(2, "a")
    wanted = Met(generation=GENERATION, failures=["rank 1: no shards"])
    assert all(ranks.answers[rank, "a"] == [wanted] for rank in range(3))
    assert not ranks.rendezvous.ended


def test_a_rank_that_withdraws_from_a_round_gets_the_answer_to_its_pending_request() -> None:
    ranks = Ranks(2).formed()
    ranks.come(1, "a")
    ranks.come(1, "a", failure="a driver takes over")
    wanted = Met(generation=GENERATION, failures=["rank 1: a driver takes over"])
    assert ranks.answers[1, "a"] == [wanted, wanted]


def test_a_rank_that_withdraws_after_all_have_met_changes_nothing() -> None:
    ranks = Ranks(2).formed()
    ranks.come(0, "a")
    ranks.come(1, "a")
    ranks.come(0, "a", failure="a driver takes over")
    assert ranks.answers[0, "a"] == [Met(generation=GENERATION)] * 2


def test_a_missing_rank_ends_the_group_with_an_error_that_names_it() -> None:
    ranks = Ranks(3).formed()
    ranks.come(1, END)
    ranks.come(0, "Forward 7/3", now=10.0)
    assert ranks.rendezvous.next_deadline() == 15.0
    ranks.rendezvous.expire(14.9)
    assert ranks.answers[0, "Forward 7/3"] == []
    ranks.rendezvous.expire(15.0)
    wanted = "Forward 7/3: policy-trainer-worker/1, policy-trainer-worker/2 did not join within 5 s"
    assert wanted in str(ranks.answers[0, "Forward 7/3"][0])
    assert wanted in str(ranks.answers[1, END][0])
    assert ranks.rendezvous.next_deadline() is None


def test_a_second_incarnation_of_a_rank_ends_the_group_and_is_not_admitted() -> None:
    ranks = Ranks(2).formed()
    ranks.come(0, END)
    ranks.come(1, JOIN)
    assert "policy-trainer-worker/1 was restarted" in str(ranks.answers[0, END][0])
    assert len(ranks.answers[1, JOIN]) == 1  # The only answer is to the first incarnation.


def test_a_rank_from_an_earlier_group_learns_that_its_group_has_ended() -> None:
    ranks = Ranks(2).formed()
    ranks.come(1, END, generation=GENERATION - 1)
    assert "has ended" in str(ranks.answers[1, END][0])


def test_an_invalid_rank_is_refused_and_does_not_affect_any_round() -> None:
    ranks = Ranks(2).formed()
    ranks.come(0, "a")
    for rank in (-1, 2, 10**9):
        for name in (JOIN, END, "a"):
            ranks.come(rank, name, failure="x")
            [answer] = ranks.answers[rank, name]
            assert isinstance(answer, RpcError)
            assert answer.code == "bad_request"
    assert not ranks.rendezvous.ended
    ranks.come(1, "a")
    assert ranks.answers[1, "a"] == [Met(generation=GENERATION)]

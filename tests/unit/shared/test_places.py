"""Tests which connection loses its place to a newcomer."""

from __future__ import annotations

from shared.places import Place, Places


def taken(places: Places, address: str, now: float, *, proven: bool = False, in_use: bool = False) -> Place:
    place, _ = places.take(address, now)
    assert place is not None
    place.proven, place.in_use = proven, in_use
    return place


def test_newcomer_displaces_the_oldest_stranger_of_the_host_with_the_most_strangers() -> None:
    places = Places(4)
    taken(places, "crowd", 0, proven=True)
    lone = taken(places, "other", 1)
    first, second = taken(places, "crowd", 2), taken(places, "crowd", 3)
    assert places.take("crowd", 4)[1] is first
    assert places.take("crowd", 5)[1] is second
    assert places.unused(11.5, proven_s=20, unproven_s=10) == {lone}
    assert (places.evicted, len(places)) == (2, 4)


def test_places_are_lost_in_order_of_rank_and_never_by_a_proven_connection_in_use() -> None:
    places = Places(4)
    taken(places, "a", 0, proven=True, in_use=True)
    idle = taken(places, "a", 1, proven=True)
    served = taken(places, "a", 2, in_use=True)
    stranger = taken(places, "b", 3)
    for victim in (stranger, served, idle):
        place, displaced = places.take("c", 4)
        assert displaced is victim
        assert place is not None
        place.proven = place.in_use = True
    assert places.take("c", 5) == (None, None)
    assert (places.turned_away, len(places)) == (1, 4)


def test_a_place_is_free_again_once_its_connection_has_ended() -> None:
    places = Places(1)
    only = taken(places, "a", 0, proven=True, in_use=True)
    places.leave(only)
    assert places.take("a", 1)[0] is not None

"""Tests of which connection a server closes when it has too many."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.wire.bounds import WaitingConnections


@dataclass(eq=False)
class Held:
    owner: str
    busy: bool = False
    until: float = 0.0


def admitted(limit: WaitingConnections[Held], *held: Held) -> list[Held | None]:
    return [limit.add(each) for each in held]


def test_owner_with_the_most_connections_loses_its_oldest_one():
    flood, other = [Held("a"), Held("a"), Held("a")], Held("b")
    limit: WaitingConnections[Held] = WaitingConnections(3)
    assert admitted(limit, *flood, other) == [None, None, None, flood[0]]


def test_owner_above_its_own_limit_loses_its_oldest_one():
    held = [Held("b"), Held("a"), Held("a"), Held("a")]
    limit: WaitingConnections[Held] = WaitingConnections(10, 2)
    assert admitted(limit, *held) == [None, None, None, held[1]]


def test_busy_connections_are_not_closed():
    limit: WaitingConnections[Held] = WaitingConnections(3, may_close=lambda each: not each.busy)
    held = [Held("a", busy=True), Held("a", busy=True), Held("b")]
    late = Held("c")
    assert admitted(limit, *held, late) == [None, None, None, held[2]]


def test_new_connection_is_the_one_to_close_if_all_others_are_busy():
    limit: WaitingConnections[Held] = WaitingConnections(2, 1, may_close=lambda each: not each.busy)
    first, again, second, third = Held("a", busy=True), Held("a"), Held("b", busy=True), Held("c")
    assert admitted(limit, first, again) == [None, again]
    limit.remove(again)
    assert admitted(limit, second, third) == [None, third]

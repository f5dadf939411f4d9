"""The benchmark of the ladder, as every rank does it: rungs in turn, round by round, so that noise hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch

from dalsegno.bench.ask import LadderAsk
from dalsegno.bench.contest import Contestant, Watched, enter, make_countable, names, why_not
from dalsegno.bench.ladder_report import LadderReport, Mark, RungResult, Traffic
from dalsegno.bench.place import Place

EachRound = Callable[[int], None]  # told the number of the step to come
WARM_UP_ROUNDS = 2  # DDP makes its buckets anew after the first step
WATCHED_ROUNDS = 3


def measure(ask: LadderAsk, meeting: str, each_round: EachRound) -> LadderReport | None:
    """Take part as the rank that the environment says. Rank 0 gets the report."""
    place = Place(ask.device, meeting)
    try:
        return _measure(ask, place, each_round)
    finally:
        place.leave()


def _measure(ask: LadderAsk, place: Place, each_round: EachRound) -> LadderReport | None:
    rows = [(*row, why_not(row[1], place)) for row in names(ask)]
    contestants = [enter(name, rung, cap, ask, place) for name, rung, cap, why in rows if not why]
    for contestant in contestants * WARM_UP_ROUNDS:
        contestant.step(place)
    for number in range(ask.steps):
        each_round(number)
        for contestant in _turned(contestants, number):
            contestant.timed_step(place)
    for contestant in contestants:
        make_countable(contestant)
        for _ in range(WATCHED_ROUNDS):
            contestant.watched_step(place)
    found = [place.of_all_ranks(_facts(each)) for each in contestants]
    if place.rank:
        return None
    return _report(place, contestants, [_result(*row[::3], found, contestants) for row in rows])


def _turned(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """Another one begins each round: who comes first must not matter."""
    first = number % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _facts(contestant: Contestant) -> tuple[list[float], list[int | None], list[Watched]]:
    return contestant.steps_s, contestant.tcp_bytes, contestant.watched


def _report(place: Place, contestants: Sequence[Contestant], results: list[RungResult]) -> LadderReport:
    parameters = contestants[0].rung.parameters
    return LadderReport(
        processes=place.size,
        backend=place.backend,
        device=torch.cuda.get_device_name() if place.device.type == "cuda" else "cpu",
        torch=torch.__version__,
        parameters=sum(each.numel() for each in parameters),
        gradient_bytes=sum(each.numel() * each.element_size() for each in parameters),
        rungs=tuple(results),
    )


def _result(name: str, why: str, found: list[Any], contestants: Sequence[Contestant]) -> RungResult:
    if why:
        return RungResult(name, why_not=why)
    by_rank = next(facts for facts, each in zip(found, contestants, strict=True) if each.name == name)
    steps = zip(*(steps_s for steps_s, _, _ in by_rank), strict=True)
    watched = _typical([watched for _, _, watched in by_rank])
    return RungResult(
        name,
        steps_s=tuple(max(of_ranks) for of_ranks in steps),
        traffic=tuple(_traffic(each, tcp) for each, (_, tcp, _) in zip(watched, by_rank, strict=True)),
        marks=tuple(Mark(rank, *span) for rank, each in enumerate(watched) for span in each.spans),
    )


def _typical(by_rank: list[list[Watched]]) -> list[Watched]:
    """Of the watched steps the one of middle length, on every rank."""
    lengths = [max(each.took_s for each in of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    at = lengths.index(median_low(lengths))
    return [of_rank[at] for of_rank in by_rank]


def _traffic(watched: Watched, tcp_bytes: list[int | None]) -> Traffic:
    known = [each for each in tcp_bytes if each is not None]
    return Traffic(**watched.tally, tcp_bytes=median_low(known) if known else None)

"""A drill in words and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from dalsegno.drill.story import Drill, Recovery, Stop

COLUMNS = ["#", "FAULT", "NODE", "KNOWN", "DRAINED", "TRAINS ON", "BACK IN SERVICE", "STEPS LOST"]


def rows(drill: Drill) -> list[list[str]]:
    """A line for each fault, under COLUMNS."""
    return [_row(drill, each) for each in drill.recoveries]


def _row(drill: Drill, each: Recovery) -> list[str]:
    blow = each.blow
    waited = ", no spare ready" if blow.without_spare else ""
    trains_on = seconds(each.resumed_s) + waited if each.stopped else "no stop"
    unseen = "held back" if blow.node in drill.held_back else "not seen"
    healed = [seconds(each.drained_s, unseen), seconds(each.returned_s, unseen)] if blow.heals else ["", ""]
    times = [seconds(each.known_s), healed[0], trains_on, healed[1]]
    return [str(blow.number), blow.fault, blow.node, *times, str(each.steps_lost)]


def seconds(value: float | None, unseen: str = "not seen") -> str:
    return unseen if value is None else f"{value:.1f} s"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def sentences(drill: Drill) -> list[str]:
    """What to take home."""
    found = [_outcome(drill), _time(drill)]
    resumed = [each.resumed_s for each in drill.recoveries if each.resumed_s is not None]
    resumed += [stop.for_s for stop in drill.more_stops]
    if resumed:
        found.append(f"training went on after {median(resumed):.1f} s (median), {max(resumed):.1f} s at the most")
        found += _with_a_spare(drill)
        found += [_once_more(stop) for stop in drill.more_stops]
    if drill.exact is not None:
        same = (
            "are those of an undisturbed run, bit for bit" if drill.exact else "DIFFER from those of an undisturbed run"
        )
        found.append(f"the weights {same}")
    if drill.troubles:
        found.append(f"the undisturbed run was not quite that: {drill.troubles}")
    if drill.orphans:
        found.append(f"{drill.orphans} processes were left behind")
    found += [f"{node} is left as it is: {why}" for node, why in drill.held_back.items()]
    return found


def _with_a_spare(drill: Drill) -> list[str]:
    """Said where some had none."""
    bare = sum(each.blow.without_spare for each in drill.recoveries)
    rest = [each.resumed_s for each in drill.recoveries if each.resumed_s is not None and not each.blow.without_spare]
    if not bare:
        return []
    others = f"; after the others it took {max(rest):.1f} s at the most" if rest else ""
    return [f"{bare} of these hit while no spare was ready, and another node had to come first{others}"]


def _once_more(stop: Stop) -> str:
    """One that stands in no fault's line."""
    blow = stop.blow
    after = f" {max(stop.after_s, 0.0):.1f} s after {blow.fault} on {blow.node}" if blow else ""
    return f"training also stopped{after}, for {stop.for_s:.1f} s" + (f" ({stop.why})" if stop.why else "")


def _outcome(drill: Drill) -> str:
    faults = counted(len(drill.blows), "fault")
    if drill.exit_code:
        return f"the run ended with exit code {drill.exit_code} after {faults}"
    return f"the run survived {faults}; {drill.steps_lost} of {len(drill.steps)} steps were done again"


def _time(drill: Drill) -> str:
    spent = [f"{kind} {drill.goodput[kind]:.1f} s" for kind in drill.goodput if drill.goodput[kind] >= 0.05]
    return f"goodput {drill.share:.0%} of the run's {sum(drill.goodput.values()):.0f} s ({', '.join(spent)})"


def as_json(drill: Drill) -> dict[str, Any]:
    """All of it, for programs."""
    recoveries = [{**asdict(each.blow), **_figures(each)} for each in drill.recoveries]
    whole = {"seed": drill.seed, "survived": drill.survived, "exit_code": drill.exit_code, "exact": drill.exact}
    times = {"started": drill.started, "ended": drill.ended, "goodput": dict(drill.goodput), "share": drill.share}
    steps = {
        "steps": len(drill.steps),
        "steps_lost": drill.steps_lost,
        "orphans": drill.orphans,
        "troubles": drill.troubles,
    }
    more = [_stop(each) for each in drill.more_stops]
    marks: Sequence[object] = [asdict(mark) for mark in drill.marks]
    told = {"faults": recoveries, "more_stops": more, "held_back": dict(drill.held_back), "events": marks}
    return {**whole, **times, **steps, **told}


def _stop(each: Stop) -> dict[str, Any]:
    number = each.blow.number if each.blow else None
    return {"after_fault": number, "after_s": each.after_s, "for_s": each.for_s, "why": each.why}


def _figures(each: Recovery) -> dict[str, float | int | None]:
    times = {"known_s": each.known_s, "drained_s": each.drained_s, "resumed_s": each.resumed_s}
    return {**times, "returned_s": each.returned_s, "steps_lost": each.steps_lost}

"""What to try next for a node: reset, reboot, replace, each where the one before did not help. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.health import Remedy
from dalsegno.recovery.book import Book, NodeBook
from dalsegno.recovery.budget import breaker, reboot_refusal
from dalsegno.recovery.fault import Fault
from dalsegno.recovery.policy import Policy


@dataclass(frozen=True)
class Step:
    """What to try, and why nothing lighter that might have helped."""

    how: Remedy
    why: str = ""


def next_step(
    node: NodeBook, fault: Fault, partitions: Collection[str], book: Book, policy: Policy, now: float
) -> Step | str:
    """The next thing to try, or why nothing is left."""
    most = policy.caps.get(fault.check, Remedy.REPLACE)
    steps = [Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE]
    refusals = []
    for step in steps:
        if step < fault.remedy:
            continue
        if most < step:
            refusals.append(f"no more than {most.value} may be done for {fault.check}")
            break
        why = _refusal(step, node, fault, partitions, book, policy, now)
        if not why:
            return Step(step, "; ".join(refusals))
        refusals.append(why)
    if fault.remedy > Remedy.REBOOT and Remedy.REPLACE not in policy.can and Remedy.REBOOT in policy.can:
        why = _refusal(Remedy.REBOOT, node, fault, partitions, book, policy, now)  # better than nothing
        return why or Step(Remedy.REBOOT, "; ".join(refusals))
    return refusals[-1]


def _refusal(
    step: Remedy, node: NodeBook, fault: Fault, partitions: Collection[str], book: Book, policy: Policy, now: float
) -> str:
    if step not in policy.can:
        return f"this cluster's machines cannot be {PAST[step]} from here"
    if step is Remedy.RESET:
        return "its GPUs were reset already" if Remedy.RESET in node.steps else ""
    if step is Remedy.REBOOT:
        if Remedy.REPLACE in node.steps:
            return "its replacement was bad"
        return reboot_refusal(book, node.node, fault.key, policy, now)
    if node.steps.count(Remedy.REPLACE) >= policy.replaces_per_fault:
        return f"it was replaced {policy.replaces_per_fault} times, and none of them was good"
    tripped = breaker(book, partitions, policy)
    return f"{policy.breaker} replacements in {tripped} failed one after the other" if tripped else ""


PAST = {Remedy.RESET: "reset", Remedy.REBOOT: "rebooted", Remedy.REPLACE: "replaced"}

"""Track the snapshots in the memory of a run's nodes, and tell agents what to keep and where to resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dalsegno.runs.coordinator.agents.messages import WorkersResumed
from dalsegno.runs.coordinator.generations.group import Members
from dalsegno.runs.coordinator.generations.snapshots import (
    HeldSnapshot,
    MissingParts,
    Place,
    Resume,
    buddies,
    find_incomplete,
    whole_steps,
)
from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.memory.safe_steps import NOWHERE, SafeSteps, render_safe_steps
from dalsegno.wire.frames import Message

# Safe steps: which snapshots the ranks of one generation must not overwrite


COPY_TIMEOUT_S = 5.0  # time without a new safe step until `SafeSteps.floor` is raised; each raise doubles the time
MAX_COPY_TIMEOUT_S = 300.0
AHEAD = 8  # number of steps from the newest step up to a raised floor; each raise doubles the number
MAX_AHEAD = 4096
_SHARED = -1

_Part = tuple[Place, int]  # part of a step: a rank's own part, or the part shared by all ranks

_Counted = TypeVar("_Counted")


class Safety:
    """Tracks which steps of one generation are replicated, beginning with the `SafeSteps` already announced."""

    def __init__(self, nodes: Sequence[str], world: int, announced: SafeSteps, now: float) -> None:
        self.safe = announced
        self._nodes, self._parts_of_a_step, self._world = frozenset(nodes), world + 1, world
        self._enough = min(2, len(nodes))
        self._held: dict[str, frozenset[_Part]] = {}
        self._holders: Counter[_Part] = Counter()
        self._replicated: Counter[Place] = Counter()  # step -> how many of its parts are held by enough nodes
        self._newest = announced.place
        self._since, self._timeout_s, self._ahead = now, COPY_TIMEOUT_S, AHEAD
        self._last_ahead = AHEAD  # the value of `_ahead` at the last raise

    def update(self, node: str, held: Iterable[HeldSnapshot]) -> None:
        """Record the snapshots that a node holds now. The cost depends on the number of changes, not on the total."""
        if node not in self._nodes:
            return
        parts, before = frozenset(self._parts(held)), self._held.get(node, frozenset())
        self._held[node] = parts
        for part in before - parts:
            _count(self._replicated, part[0], -(self._holders[part] == self._enough))
            _count(self._holders, part, -1)
        for part in parts - before:
            _count(self._holders, part, 1)
            _count(self._replicated, part[0], self._holders[part] == self._enough)
            self._newest = max(self._newest, part[0])

    def advance(self, now: float) -> SafeSteps:
        """Return the current safe steps. Raise the floor if no step has become safe for too long."""
        found = [place for place, parts in self._replicated.items() if parts == self._parts_of_a_step]
        place = max(filter(self._may_become_safe, found), default=self.safe.place)
        if place != self.safe.place:
            self.safe = replace(self.safe, place=place)
            self._reset_limits(now)
            self._since = now
        elif self._newest <= max(self.safe.place, self.safe.resumed):
            self._since = now  # waiting time does not count while there is no newer step that could become safe
        elif now - self._since > self._timeout_s:
            self._raise_floor(now)
        return self.safe

    def _reset_limits(self, now: float) -> None:
        """Set the timeout and the step margin back to values that were just enough for the new safe step.

        Every disturbance doubles them. Without this reset, thousands of steps would have no snapshot after ten
        disturbances of a long generation.
        """
        self._timeout_s = min(max(2 * (now - self._since), COPY_TIMEOUT_S), MAX_COPY_TIMEOUT_S)
        self._ahead = self._last_ahead

    def _raise_floor(self, now: float) -> None:
        self.safe = replace(self.safe, floor=max(self.safe.floor, self._newest[1]) + self._ahead)
        self._since, self._last_ahead = now, self._ahead
        self._timeout_s, self._ahead = min(2 * self._timeout_s, MAX_COPY_TIMEOUT_S), min(2 * self._ahead, MAX_AHEAD)

    def _may_become_safe(self, place: Place) -> bool:
        return place > self.safe.place and self.safe.needs(place)

    def _parts(self, held: Iterable[HeldSnapshot]) -> Iterable[_Part]:
        for each in held:
            counts = each.generation == self.safe.generation or each.place == self.safe.resumed
            if counts and each.world == self._world:
                if each.own:
                    yield each.place, each.rank
                if each.shared:
                    yield each.place, _SHARED


def _count(counter: Counter[_Counted], key: _Counted, change: int) -> None:
    """Change a count, and delete the entry if it becomes zero."""
    counter[key] += change
    if not counter[key]:
        del counter[key]


# Snapshots in the memory of all nodes


Address = tuple[str, int]
MAX_NAMED = 8  # maximum number of ranks named in a message
SOURCES = 8  # maximum number of keepers that a node may ask, in turn, for the shared part


class MemoryTable:
    """The snapshots of all nodes.

    Only `used` is saved for the next coordinator, because agents report the rest again.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[HeldSnapshot, ...]] = {}
        self._keepers: dict[str, Address] = {}
        self._reported: dict[str, SafeSteps] = {}  # the last `SafeSteps` that each agent says it has received
        self._sent: dict[str, Message] = {}  # the last message to each agent about its buddy
        self._keepers_changed = False
        self._sent_safe: SafeSteps | None = None
        self._begun = 0  # the last generation that was started or taken over
        self._resume: Resume | None = None  # the snapshot from which the generation `_begun` resumed
        # What is missing from the newest incomplete step, if it is newer than `_resume`.
        self._missing: MissingParts | None = None
        self._safety: Safety | None = None  # None if snapshots are not replicated
        self.used: set[str] = set()  # nodes whose memory may hold data of the run
        self.distrusted = 0  # snapshots of generations up to this one may be corrupt

    def update(
        self, node: str, held: Sequence[HeldSnapshot], keeper: Address | None = None, safe: SafeSteps | None = None
    ) -> None:
        self._held[node] = tuple(held)
        if keeper is not None:
            self._keepers[node], self._keepers_changed = keeper, True
        if safe is not None:
            self._reported[node] = safe
        if self._safety is not None:
            self._safety.update(node, held)

    def lost(self, node: str) -> None:
        tables: tuple[dict[str, Any], ...] = (self._held, self._keepers, self._reported, self._sent)
        for table in tables:
            table.pop(node, None)

    def forget_keeper(self, node: str) -> None:
        """Forget a node's keeper, because a node without a warm parent cannot run one."""
        self._keepers.pop(node, None)

    # Starting a generation

    def start(self, group: Members, agent: str, now: float) -> Message:
        """Return a node's part of the start message: the snapshot to resume from, its buddy and safe steps."""
        if self._begun != group.generation:
            self._begin(group, now)
        place = group.place_of(agent)
        ranks = range(place.first_rank, place.first_rank + group.nproc_per_node)
        buddy = self._sent.get(agent)
        return {
            "resume": self._order(self._resume, ranks, place.group_rank) if self._resume else None,
            "buddy": buddy["buddy"]["address"] if buddy else None,
            "safe": render_safe_steps(self._sent_safe) if self._sent_safe else None,
        }

    def _begin(self, group: Members, now: float) -> None:
        trusted = {
            node: tuple(each for each in held if each.generation > self.distrusted) for node, held in self._held.items()
        }
        whole = {each.place: each for each in whole_steps(trusted, group.world_size)}
        found = next((each for each in whole.values() if self._within_reach(each, group)), None)
        self._missing = find_incomplete(trusted, group.world_size, found.place if found else NOWHERE)
        before = self._last_safe()
        self._begun, self._resume, self._safety = group.generation, found, None
        if len(group.agents) > 1 and len(self._buddies(group)) == len(group.agents):
            kept = before if found and before in whole and before <= found.place else NOWHERE
            announced = SafeSteps(group.generation, kept, found.place if found else NOWHERE)
            self._safety = self._watch(group, announced, now)
        self._sent_safe = self._safety.advance(now) if self._safety else None
        self._sent = {node: _buddy(address) for node, address in self._buddies(group).items()}

    def explain_resume(self, resumed: WorkersResumed) -> str:
        """Return why the current generation resumed from disk and repeats steps.

        Return "" if it resumed from memory, or if no node had a snapshot in memory.
        """
        if resumed.from_memory or resumed.generation != self._begun:
            return ""
        chosen, missing, reasons = self._resume, self._missing, []
        if missing is not None and missing.place[1] > resumed.step:
            newest = f"the newest memory snapshot (step {missing.place[1]}) was incomplete"
            reasons.append(f"{newest}: {_describe(missing)}")
        if chosen is not None and chosen.place[1] < resumed.step:
            subject = "one" if reasons else "memory snapshot"
            reasons.append(f"the newest complete {subject} was older (step {chosen.place[1]})")
        elif chosen is not None:
            reasons.append(f"a rank could not load the memory snapshot of step {chosen.place[1]}")
        return f"resumed from disk at step {resumed.step}: {'; '.join(reasons)}" if reasons else ""

    def _last_safe(self) -> Place:
        if self._safety is not None:
            return self._safety.safe.place
        return max(((each.generation, each.place) for each in self._reported.values()), default=(0, NOWHERE))[1]

    def _order(self, found: Resume, ranks: Sequence[int], number: int) -> Message:
        """Return the resume order for these ranks. Nodes get the shared part from different sources to spread load."""
        shared = self._addresses(found.shared)
        first = number % len(shared) if shared else 0
        return {
            "generation": found.place[0],
            "step": found.place[1],
            "own": {str(rank): self._addresses(found.own[rank]) for rank in ranks},
            "of": {str(rank): found.source_ranks[rank] for rank in ranks if found.source_ranks[rank] != rank},
            "shared": (shared[first:] + shared[:first])[:SOURCES],
        }

    def _within_reach(self, found: Resume, group: Members) -> bool:
        """Return whether every rank's parts are on its own node or on a node whose keeper can send them."""
        if not self._addresses(found.shared) and not set(group.agents) <= set(found.shared):
            return False
        for place in group.places:
            for rank in range(place.first_rank, place.first_rank + group.nproc_per_node):
                if place.agent not in found.own[rank] and not self._addresses(found.own[rank]):
                    return False
        return True

    def _addresses(self, nodes: Sequence[str]) -> list[list[str | int]]:
        return [[*self._keepers[node], node] for node in nodes if node in self._keepers]

    def _buddies(self, group: Members) -> dict[str, KeeperAddress]:
        ring = buddies(group.agents)
        return {
            node: KeeperAddress(*self._keepers[buddy], buddy) for node, buddy in ring.items() if buddy in self._keepers
        }

    # While a generation runs

    def updates(self, group: Members, now: float) -> list[tuple[str, Message]]:
        """Return the messages to send now, each with its node. They announce new buddies and new safe steps."""
        messages = self._new_pairs(group) if self._keepers_changed else []
        if self._begun != group.generation:
            self._take_over(group, now)
        safe = self._safety and self._safety.advance(now)
        if safe and safe != self._sent_safe:
            self._sent_safe = safe
            messages += [(node, {"safe": render_safe_steps(safe)}) for node in group.agents]
        return messages

    def _new_pairs(self, group: Members) -> list[tuple[str, Message]]:
        pairs = {node: _buddy(address) for node, address in self._buddies(group).items()}
        messages = [(node, message) for node, message in pairs.items() if self._sent.get(node) != message]
        self._sent.update(messages)
        self._keepers_changed = False
        return messages

    def _take_over(self, group: Members, now: float) -> None:
        """Take over a running generation once all nodes have reported.

        Use the highest `SafeSteps` that they have received.
        """
        if not all(node in self._held for node in group.agents):
            return
        reported = [each for node, each in self._reported.items() if each.generation == group.generation]
        self._begun = group.generation
        if reported:
            place, floor = max(each.place for each in reported), max(each.floor for each in reported)
            highest = SafeSteps(group.generation, place, reported[0].resumed, floor)
            self._safety = self._watch(group, highest, now)

    def _watch(self, group: Members, announced: SafeSteps, now: float) -> Safety:
        safety = Safety(group.agents, group.world_size, announced, now)
        for node in group.agents:
            safety.update(node, self._held.get(node, ()))
        return safety


def _describe(missing: MissingParts) -> str:
    if missing.ranks:
        named = [str(rank) for rank in missing.ranks[:MAX_NAMED]] + (["…"] if len(missing.ranks) > MAX_NAMED else [])
        if len(named) == 1:
            return f"rank {named[0]}'s copy was missing on its buddy"
        return f"the copies of ranks {', '.join(named)} were missing on their buddies"
    return "no node has the part that all ranks share"


def _buddy(address: KeeperAddress) -> Message:
    return {"buddy": {"address": list(address)}}

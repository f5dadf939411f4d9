"""Whether it is the nodes that are gone, or we who see nothing: a controller whose own cable is out misses all of them.

All, or nearly all, at once: then it is us, and nothing is done until we see again. What Slurm itself has set down is
lost for certain: its jobs have been taken from it already. Pure.
"""

from __future__ import annotations

from dalsegno.recovery.actions import Sight
from dalsegno.recovery.agent_view import AgentView, Presence
from dalsegno.recovery.book import Book, NodeBook
from dalsegno.recovery.facts import Facts, NodeFacts

NEARLY_ALL = 0.8
FEWEST = 2  # of a single node nobody can say
SETTLE_S = 15.0  # from when we see again; agents call every few seconds, and hosts are probed every two
FRESH_S = 0.75  # a beat is due every 0.4 s, and no node is given up in less than 1.3


def is_blind(facts: Facts, book: Book) -> bool:
    """Some node would be taken for gone now, and of those that should be there hardly one is heard."""
    expected = [node for node in (facts.nodes or {}).values() if _is_expected(node, book.of(node.name))]
    unseen = [node for node in expected if not _is_seen(node.agent)]
    gone = any(node.gone for node in unseen) or (book.blind and bool(unseen))
    return gone and len(expected) >= FEWEST and len(unseen) >= NEARLY_ALL * len(expected)


def is_doubtful(node: NodeFacts, facts: Facts, book: Book, now: float) -> bool:
    """It was missed while we saw nothing, and has not had the time to be heard again; or nobody was heard since."""
    if not node.gone:
        return False
    silent_since = node.agent.heard or node.agent.since  # it may be given up only now for what we missed then
    missed_blindly = silent_since <= book.saw_at and now < book.saw_at + SETTLE_S
    return missed_blindly or not (node.slurm.down or _are_others_heard(node, facts, book))


def _are_others_heard(node: NodeFacts, facts: Facts, book: Book) -> bool:
    """After it was given up. What is read after that was sent while it was being asked: we could have heard it too.

    Last words from before prove nothing: on a busy machine they come at very different times.
    """
    others = [
        each.agent
        for each in (facts.nodes or {}).values()
        if each.name != node.name and _is_expected(each, book.of(each.name))
    ]
    heard = [signed for view in others if (signed := max(view.heard, view.answered))]
    return not heard or max(heard) >= node.agent.since


def change_of_sight(facts: Facts, blind: bool) -> Sight:
    if blind:
        why = "all nodes fell silent at once: taken for a fault of the controller's own network; nothing is done"
    elif any(_is_seen(node.agent) for node in (facts.nodes or {}).values()):
        why = "nodes are seen again; goes on"
    else:
        why = "Slurm has set the silent nodes down too: they are gone; goes on"
    return Sight("", blind, why)


def _is_expected(node: NodeFacts, own: NodeBook) -> bool:
    """It was there, and neither we nor Slurm have taken it out of its jobs."""
    return own.seen and bool(own.last_boot) and not own.phase.out and not node.slurm.down


def _is_seen(view: AgentView) -> bool:
    """One word of it, of its host or of its slurmd is enough: we hear."""
    if view.presence is Presence.CONNECTED:
        return view.quiet_s <= FRESH_S
    return view.presence is Presence.AGENT_DEAD or (view.presence is Presence.NEVER and view.host_answers is True)

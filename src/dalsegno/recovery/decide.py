"""What to do now: facts, our book and the policy in, actions out. Pure; it asks nobody and looks at no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dalsegno.health import Remedy
from dalsegno.recovery.actions import Action, Again, Drain, Expedite, Found, Note, Requeue, SetDown, Sight, Turn
from dalsegno.recovery.agent_view import AgentView, Presence
from dalsegno.recovery.book import DAY_S, Book, MarkKind, NodeBook
from dalsegno.recovery.budget import Outs, restraint
from dalsegno.recovery.facts import Facts, NodeFacts, NodeFault, heaviest, is_plain
from dalsegno.recovery.judge import (
    NONE,
    Quick,
    count_relapse,
    find_suspicion,
    is_over,
    is_steady,
    is_told,
    quick_failures,
    standing,
)
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.policy import OFF, Policy
from dalsegno.recovery.reason import (
    ANYTHING,
    CHECK,
    SLURM_DRAIN,
    Owner,
    Subject,
    fault_of_drain,
    owner,
    read_reason,
    rule_of,
)
from dalsegno.recovery.repair import repair
from dalsegno.recovery.spares import keep_spare, lend
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.pending import PendingReason, parse_pending

# ---- Jobs that nobody but Slurm looks after, on nodes that fail them. Runs look after themselves. Pure.


AGAIN_S = 3.0  # Slurm holds a requeued job back for a while, whatever it is told: it is told until it starts


def care_for_jobs(node: NodeFacts, own: NodeBook, jobs: Iterable[JobInfo], policy: Policy, now: float) -> Action | None:
    return _after_loss(own, jobs, now) or _before_its_end(node, own, policy)


def _after_loss(own: NodeBook, jobs: Iterable[JobInfo], now: float) -> Action | None:
    """Slurm requeues what may be requeued, and has it wait for two minutes."""
    if not own.victims:
        return None
    known = {job.id: job for job in jobs}
    for each in own.victims:
        job = known.get(each)
        if job is None:
            return Note(own.node, f"job {each} is over", settles=(each,))
        if job.state.ended:
            text = f"job {each} has ended with its node ({job.state.value}): it may not be requeued, and is left alone"
            return Note(own.node, text, settles=(each,))
        if job.state is JobState.RUNNING and (own.node not in job.nodes or not own.phase.out):
            return Note(own.node, f"job {each} runs again on {', '.join(job.nodes)}", settles=(each,))
        held = job.state is JobState.PENDING and parse_pending(job.reason) is PendingReason.BEGIN_TIME
        if held and now - own.told_at >= AGAIN_S:
            return Expedite(own.node, each)
    return None


def _before_its_end(node: NodeFacts, own: NodeBook, policy: Policy) -> Action | None:
    """A live node on which no job can go on: what may start anew does; the others are waited for."""
    doomed = own.fault and {own.fault.key, own.fault.check} & policy.doomed
    if own.phase is not NodePhase.DRAINED or not doomed:
        return None
    for job in node.jobs:
        known = job.id in own.victims or job.id in own.left
        if is_plain(job) and job.batch_host and job.state is JobState.RUNNING and not known:
            return Requeue(node.name, job.id)
    return None


# ---- Whether it is the nodes that are gone, or we who see nothing: a controller whose own cable is out misses all
# of them.


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


# ---- What to do now: facts, our book and the policy in, actions out. Pure; it asks nobody and looks at no clock.


@dataclass(frozen=True)
class Round:
    """All that one decision is taken from."""

    facts: Facts
    book: Book
    policy: Policy
    now: float
    outs: Outs
    quick: dict[str, Quick]


def decide(facts: Facts, book: Book, policy: Policy, now: float) -> list[Action]:
    """In the order in which it is to be done; at most one thing a node. Without Slurm's word there is nothing, nor
    while we see hardly a node."""
    if facts.nodes is None or policy.mode == OFF:
        return []
    if (blind := is_blind(facts, book)) or book.blind:
        return [] if blind and book.blind else [change_of_sight(facts, blind)]
    outs = Outs(facts.nodes.values(), book, policy, now)
    this = Round(facts, book, policy, now, outs, quick_failures(facts.jobs, book, policy, now))
    lent = lend(facts, book, policy, now)
    actions = []
    for node in facts.nodes.values():
        own = book.of(node.name)
        if is_doubtful(node, facts, book, now):
            continue
        actions += [lent[node.name]] if node.name in lent else list(_for_node(this, node, own))
    return [held for action in actions if (held := _hold_back(action, book, policy)) is not None]


def _hold_back(action: Action, book: Book, policy: Policy) -> Action | None:
    """Paused, or told only to observe: say once what would have been done."""
    held = restraint(book, policy) if action.touches else None
    if held is None:
        return action
    return _say(book.of(action.node), f"{held.why}; would {action.words}", getattr(action, "fault", None), held.held)


def _say(
    own: NodeBook,
    text: str,
    fault: NodeFault | None = None,
    held: HeldAction = HeldAction.NO,
    about: Subject = ANYTHING,
) -> Action | None:
    if own.phase is NodePhase.IN_SERVICE and fault:
        return Turn(own.node, NodePhase.SUSPECTED, text, fault, held_back=held, about=about)
    return Note(own.node, text, held_back=held, about=about) if own.said != text else None


def _for_node(this: Round, node: NodeFacts, own: NodeBook) -> Iterator[Action]:
    """At most one action: the next one is decided when Slurm has been asked again."""
    if own.pending:
        yield from _resume(this, node, own)
    elif own.since < this.facts.slurm_at and own.retry_at <= this.now:
        step = _next(this, node, own) or care_for_jobs(node, own, this.facts.jobs, this.policy, this.now)
        if step:
            yield step


def _resume(this: Round, node: NodeFacts, own: NodeBook) -> Iterator[Action]:
    """An action whose end is not known, and that is not being done: the controller died in between.

    What does no harm when it is done twice is done again. Whether a machine was rebooted or replaced, its boot tells:
    another is the proof that it was; the same, that it was not, once whoever was told has had the time to begin; and
    silence may mean that it is on its way.
    """
    pending = own.pending
    if pending is None or pending.id in this.facts.underway:
        return
    mend = pending.how in (Remedy.REBOOT.value, Remedy.REPLACE.value)
    if mend and node.connected and node.agent.boot != pending.boot:
        yield Found(node.name, pending.id)
    elif mend and this.now - pending.at < (this.policy.told_s if node.connected else this.policy.boot_s):
        return
    else:
        yield Again(node.name, pending.id)


def _next(this: Round, node: NodeFacts, own: NodeBook) -> Action | None:
    whose = owner(node.slurm, this.policy.slurm_users)
    if own.phase in (NodePhase.SPARE, NodePhase.LENT) or (node.name in this.policy.spares and whose is Owner.SPARE):
        kept, action = keep_spare(node, own, whose, this.facts, this.policy, this.now)
        if kept:
            return action
    if own.phase in (NodePhase.IN_SERVICE, NodePhase.SUSPECTED, NodePhase.SPARE, NodePhase.LENT):
        return _watch(this, node, own, whose)
    return _yield_to_others(node, own, whose, this.policy) or repair(
        node, own, this.facts, this.book, this.policy, this.now
    )


def _watch(this: Round, node: NodeFacts, own: NodeBook, whose: Owner) -> Action | None:
    """A node in service."""
    if whose is Owner.US:
        fault = read_reason(node.slurm.reason)
        return Turn(node.name, NodePhase.DOWN if node.slurm.down else NodePhase.DRAINED, "found taken out by us", fault)
    quick = this.quick.get(node.name, NONE)
    faults = standing(node, own, this.policy, quick)
    if own.excuses and is_over(node, own, faults):
        return _forget_excuses(own)
    if whose is Owner.SOMEONE:
        return _leave_to_them(node, own, faults)
    if fault := heaviest(each for each in faults if each.key not in own.excuses):
        return _take_out(this, node, own, fault)
    if whose is Owner.SLURM and node.connected:
        return _take_over(this, node, own)
    if suspicion := find_suspicion(node, own, this.policy, quick):
        if is_told(suspicion.about, own):
            return None
        if own.phase in (NodePhase.SPARE, NodePhase.LENT):  # which it still is
            return _say(own, suspicion.text, about=suspicion.about)
        relapses = count_relapse(own, this.policy, this.now)
        return Turn(node.name, NodePhase.SUSPECTED, suspicion.text, relapses=relapses, about=suspicion.about)
    if own.phase is NodePhase.SUSPECTED and is_steady(node, own, this.policy, this.now):
        why = "nothing is wrong with it any more"
        why = "what is wrong with it is left to whoever has returned it" if own.excuses else why
        return Turn(node.name, NodePhase.IN_SERVICE, why, excuses=own.excuses, relapses=own.relapses)
    return None


def _forget_excuses(own: NodeBook) -> Action:
    why = "what was wrong with it is over"
    if own.phase is NodePhase.IN_SERVICE:
        return Turn(own.node, NodePhase.IN_SERVICE, why)
    return Note(own.node, why, excuses=())


def _leave_to_them(node: NodeFacts, own: NodeBook, faults: list[NodeFault]) -> Action | None:
    """Whoever has drained a node may return it in spite of what is wrong with it: then it is theirs.

    Not so where nobody returns it: one that is gone, or only reserved, booting or without power.
    """
    worst = heaviest(faults)
    if worst is None:
        return None
    text = f"{worst.words}; left alone, someone else keeps it out of service"
    if worst.gone or not (node.slurm.draining or node.slurm.down):
        return _say(own, text)
    keys = {fault.key for fault in faults}
    return None if keys <= {*own.excuses} else Note(own.node, text, excuses=tuple(sorted({*own.excuses, *keys})))


def _take_out(this: Round, node: NodeFacts, own: NodeBook, fault: NodeFault) -> Action | None:
    if refusal := this.outs.refusal(node):
        said = _say(own, f"{fault.words}; left as it is: {refusal.why}", fault, refusal.held)
        return replace(said, fault=True) if isinstance(said, Note) else said
    this.outs.take(node)
    if fault.gone:
        plain = tuple(job.id for job in node.jobs if is_plain(job))
        return SetDown(node.name, fault, plain, node.held, this.facts.runs_on(node))
    return Drain(node.name, fault, node.held, this.facts.runs_on(node))


def _take_over(this: Round, node: NodeFacts, own: NodeBook) -> Action | None:
    """What Slurm itself has taken out of service: from now on it is ours to validate and return."""
    rule = rule_of(node.slurm, this.policy.slurm_users)
    if rule is None:
        return None
    key = NodeFault(CHECK, Remedy.NONE, "", rule.code).key
    times = this.book.count(MarkKind.TAKEN, this.now - DAY_S, node=node.name, key=key)
    fault = fault_of_drain(node.slurm, rule, times)
    if fault is None:
        again = f"Slurm has taken it out of service again, {times + 1} times today"
        return _say(own, f"{again} ({node.slurm.reason}): a person is needed", about=SLURM_DRAIN)
    if refusal := this.outs.refusal(node):
        said = f"Slurm has taken it out of service ({node.slurm.reason}); stays so: {refusal.why}"
        return _say(own, said, held=refusal.held, about=SLURM_DRAIN)
    this.outs.take(node)
    return Drain(node.name, fault, node.held, this.facts.runs_on(node))


def _yield_to_others(node: NodeFacts, own: NodeBook, whose: Owner, policy: Policy) -> Action | None:
    """Who takes one of our nodes over, or puts it back into service, has the last word, on all that is wrong then."""
    if whose is Owner.SOMEONE:
        return Turn(node.name, NodePhase.IN_SERVICE, f"someone else has taken it over: {node.slurm.reason}")
    if whose is Owner.NOBODY and own.fault and node.slurm.in_service:
        keys = {own.fault.key, *(fault.key for fault in standing(node, own, policy))}
        return Turn(node.name, NodePhase.IN_SERVICE, "someone has returned it to service", excuses=tuple(sorted(keys)))
    return None

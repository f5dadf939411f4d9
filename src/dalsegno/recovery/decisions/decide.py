"""Decide what to do now: facts, records and policy in, actions out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dalsegno.health import Remedy
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.actions import (
    Action,
    ChangePhase,
    ContactChange,
    Drain,
    Expedite,
    Note,
    RecordDone,
    Repeat,
    Requeue,
    SetDown,
)
from dalsegno.recovery.decisions.budget import OutOfService, find_restraint
from dalsegno.recovery.decisions.facts import Facts, NodeFacts, NodeFault, heaviest, is_plain
from dalsegno.recovery.decisions.judge import (
    NONE,
    EarlyFailures,
    count_relapse,
    current_faults,
    find_fault,
    find_suspicion,
    is_over,
    is_reported,
    is_steady,
    quick_failures,
)
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import OFF, Policy
from dalsegno.recovery.decisions.reason import (
    CHECK,
    Owner,
    Subject,
    Topic,
    fault_of_drain,
    find_owner,
    read_reason,
    rule_of,
)
from dalsegno.recovery.decisions.records import DAY_S, MarkKind, NodeRecord, NodeRecords
from dalsegno.recovery.decisions.repair import repair
from dalsegno.recovery.decisions.spares import keep_promoted, keep_spare, lend, promote
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag
from dalsegno.slurm.parse.messages import PendingReason, parse_pending
from dalsegno.wire.liveness import Presence

# Jobs that belong to no run, on failing nodes. Runs recover by themselves.


AGAIN_S = 3.0  # interval at which a requeued job's start delay is removed again, because Slurm may keep the delay


def follow_jobs(node: NodeFacts, own: NodeRecord, jobs: Iterable[JobInfo], policy: Policy, now: float) -> Action | None:
    return _follow_victims(own, jobs, now) or _requeue_jobs(node, own, policy)


def _follow_victims(own: NodeRecord, jobs: Iterable[JobInfo], now: float) -> Action | None:
    """Return the next action for the jobs that lost the node. Slurm requeues jobs that allow it, with a start
    delay of two minutes."""
    if not own.victims:
        return None
    known = {job.id: job for job in jobs}
    for each in own.victims:
        job = known.get(each)
        if job is None:
            return Note(own.node, f"job {each} has ended", settles=(each,))
        if job.state.ended:
            text = f"job {each} ended with its node ({job.state.value}) and may not be requeued"
            return Note(own.node, text, settles=(each,))
        if job.state is JobState.RUNNING and (own.node not in job.nodes or not own.phase.out):
            return Note(own.node, f"job {each} runs again on {', '.join(job.nodes)}", settles=(each,))
        held = job.state is JobState.PENDING and parse_pending(job.reason) is PendingReason.BEGIN_TIME
        if held and now - own.told_at >= AGAIN_S:
            return Expedite(own.node, each)
    return None


def _requeue_jobs(node: NodeFacts, own: NodeRecord, policy: Policy) -> Action | None:
    """Return the requeue of the next job that cannot continue although the node is up; None if there is none.

    Jobs that may not be requeued are left on the node until they end.
    """
    fatal = own.fault and {own.fault.key, own.fault.check} & policy.job_ending
    if own.phase is not NodePhase.DRAINED or not fatal:
        return None
    for job in node.jobs:
        known = job.id in own.victims or job.id in own.left
        if is_plain(job) and job.batch_host and job.state is JobState.RUNNING and not known:
            return Requeue(node.name, job.id)
    return None


# Distinguish lost nodes from a failure of the controller's own network


NEARLY_ALL = 0.8
MIN_NODES = 2  # with fewer nodes, silence does not show whether the controller's network has failed
# Time to wait after contact is regained. Agents try to connect every few seconds; hosts are probed every 2 s.
SETTLE_S = 15.0
FRESH_S = 0.75  # a message at most this old counts as recent; heartbeats are sent every 0.4 s


def is_blind(facts: Facts, records: NodeRecords) -> bool:
    """Return whether the controller has lost contact: a node seems lost, and hardly any expected node is heard from."""
    expected = [node for node in (facts.nodes or {}).values() if _is_expected(node, records.get(node.name))]
    unseen = [node for node in expected if not _is_seen(node.agent)]
    gone = any(node.gone for node in unseen) or (records.blind and bool(unseen))
    return gone and len(expected) >= MIN_NODES and len(unseen) >= NEARLY_ALL * len(expected)


def is_doubtful(node: NodeFacts, facts: Facts, records: NodeRecords, now: float) -> bool:
    """Return whether the loss of a node is doubtful, for one of two reasons:

    - The node fell silent while the controller could hear hardly any node, and may still reconnect.
    - No other node was heard from since this node was declared lost, although some were before, and Slurm has not set
      this node down.
    """
    if not node.gone:
        return False
    # For a node that was never heard, only `since` is set, to the time at which the node was declared lost.
    silent_since = node.agent.last_seen or node.agent.since
    missed_blindly = silent_since <= records.saw_at and now < records.saw_at + SETTLE_S
    return missed_blindly or not (node.slurm.down or _are_others_heard(node, facts, records))


def _are_others_heard(node: NodeFacts, facts: Facts, records: NodeRecords) -> bool:
    """Return whether another node was heard from after this one was declared lost, or none was ever heard from.

    A later message shows that the controller's network worked while this node was being probed. Earlier messages prove
    nothing: on a busy machine, the controller reads messages of different nodes at very different times.
    """
    others = [
        each.agent
        for each in (facts.nodes or {}).values()
        if each.name != node.name and _is_expected(each, records.get(each.name))
    ]
    last_signs = [signed for view in others if (signed := max(view.last_seen, view.answered))]
    return not last_signs or max(last_signs) >= node.agent.since


def report_contact(facts: Facts, blind: bool) -> ContactChange:
    if blind:
        why = "all nodes fell silent at once: most likely the controller's own network; no action is taken"
    elif any(_is_seen(node.agent) for node in (facts.nodes or {}).values()):
        why = "nodes are heard again; recovery continues"
    else:
        why = "Slurm has set the silent nodes down too: they are lost; recovery continues"
    return ContactChange("", blind, why)


def _is_expected(node: NodeFacts, own: NodeRecord) -> bool:
    """Return whether the node was seen before, is in service, and is neither down nor powered down in Slurm."""
    silent = node.slurm.down or node.slurm.powered_down or node.slurm.on_demand
    return own.seen and bool(own.last_boot) and not own.phase.out and not silent


def _is_seen(view: AgentView) -> bool:
    """Return whether the agent, its host or its slurmd was heard from recently."""
    if view.presence is Presence.CONNECTED:
        return view.quiet_s <= FRESH_S
    return view.presence is Presence.AGENT_DEAD or (view.presence is Presence.NEVER and view.host_answers is True)


@dataclass(frozen=True)
class DecisionRound:
    """The input of one round of decisions."""

    facts: Facts
    records: NodeRecords
    policy: Policy
    now: float
    outs: OutOfService
    quick: dict[str, EarlyFailures]


def decide(facts: Facts, records: NodeRecords, policy: Policy, now: float) -> list[Action]:
    """Return the actions in the order to carry them out, at most one per node.

    The list is empty if recovery is off or Slurm did not answer. While hardly any node is heard from, no action is
    taken. Only the loss and the return of contact are reported.
    """
    if facts.nodes is None or policy.mode == OFF:
        return []
    if (blind := is_blind(facts, records)) or records.blind:
        return [] if blind and records.blind else [report_contact(facts, blind)]
    outs = OutOfService(facts.nodes.values(), records, policy, now)
    this = DecisionRound(facts, records, policy, now, outs, quick_failures(facts.jobs, records, policy, now))
    lent = lend(facts, records, policy, now)
    lent |= promote(facts, records, policy, now, lent)
    actions = []
    for node in facts.nodes.values():
        own = records.get(node.name)
        if is_doubtful(node, facts, records, now):
            continue
        actions += [lent[node.name]] if node.name in lent else list(_decide_node(this, node, own))
    return [held for action in actions if (held := _hold_back(action, facts, records, policy)) is not None]


def _hold_back(action: Action, facts: Facts, records: NodeRecords, policy: Policy) -> Action | None:
    """Return the action unless recovery is paused or only observes.

    If it is, return a remark that names the action instead; None if the last remark said the same.
    """
    node = (facts.nodes or {}).get(action.node)
    held = find_restraint(records, policy, node.slurm.partitions if node else ()) if action.touches else None
    if held is None:
        return action
    fault: NodeFault | None = getattr(action, "fault", None)
    about = Subject(
        Topic.HELD_BACK, action=action.kind.value, fault=fault.key if fault else "", jobs=tuple(action.concerns)
    )
    return _remark(records.get(action.node), f"{held.why}; would {action.summary}", about, fault, held.held)


def _remark(
    own: NodeRecord,
    text: str,
    about: Subject,
    fault: NodeFault | None = None,
    held: HeldAction = HeldAction.NO,
) -> Action | None:
    """Return a remark about a node, or None if the last remark had the same subject and the same reason for holding
    back the action.

    For a node in service with a fault, return its change to phase SUSPECTED instead.
    """
    if own.phase is NodePhase.IN_SERVICE and fault:
        return ChangePhase(own.node, NodePhase.SUSPECTED, text, fault, held_back=held, about=about)
    is_new = (about, held) != (own.about, own.held_back)
    return Note(own.node, text, held_back=held, about=about) if is_new else None


def _decide_node(this: DecisionRound, node: NodeFacts, own: NodeRecord) -> Iterator[Action]:
    """Yield at most one action for the node. The next action is decided after Slurm has been queried again."""
    if own.pending:
        yield from _resume(this, node, own)
    elif own.since < this.facts.slurm_at and own.retry_at <= this.now:
        step = _decide_next(this, node, own) or follow_jobs(node, own, this.facts.jobs, this.policy, this.now)
        if step:
            yield step


def _resume(this: DecisionRound, node: NodeFacts, own: NodeRecord) -> Iterator[Action]:
    """Handle an action whose outcome is unknown, because the controller died while it was under way.

    Actions that are harmless when repeated are repeated. For a reboot or a replacement, the node's boot id decides. A
    new id proves that the action was done. The old id proves that it was not done, once the target has had time to
    begin. A node that does not answer may be booting.
    """
    pending = own.pending
    if pending is None or pending.id in this.facts.underway:
        return
    rebuild = pending.how in (Remedy.REBOOT.value, Remedy.REPLACE.value)
    if rebuild and node.connected and node.agent.boot != pending.boot:
        yield RecordDone(node.name, pending.id)
    elif rebuild and this.now - pending.at < (this.policy.begin_s if node.connected else this.policy.boot_s):
        return
    else:
        yield Repeat(node.name, pending.id)


def _decide_next(this: DecisionRound, node: NodeFacts, own: NodeRecord) -> Action | None:
    owner = find_owner(node.slurm, this.policy.slurm_users)
    if own.stands_for:
        kept, action = keep_promoted(node, own, owner, this.records, this.policy)
        if kept:
            return action
    elif own.phase in (NodePhase.SPARE, NodePhase.LENT) or (node.name in this.policy.spares and owner is Owner.SPARE):
        kept, action = keep_spare(node, own, owner, this.facts, this.policy, this.now)
        if kept:
            return action
    if node.slurm.on_demand:
        return _leave_to_slurm(node, own)
    if own.phase in (NodePhase.IN_SERVICE, NodePhase.SUSPECTED, NodePhase.SPARE, NodePhase.LENT):
        return _watch(this, node, own, owner)
    if ended := _respect_administrator(node, own, owner, this.policy):
        return ended
    kept, action = _keep_to_limits(this, node, own)
    return action if kept else repair(node, own, this.facts, this.records, this.policy, this.now)


def _keep_to_limits(this: DecisionRound, node: NodeFacts, own: NodeRecord) -> tuple[bool, Action | None]:
    """Apply the limits to a node that waits for a file server and now has a fault of its own.

    Return whether a limit keeps it from being repaired, and the remark that says so. Count the node against the limits
    if they permit a repair.
    """
    waits = own.phase is NodePhase.DRAINED and own.fault is not None and own.fault.server_away
    fault = find_fault(node, own, this.policy) if waits else None
    if fault is None or fault.server_away or fault.notice or not (fault.gone or fault.remedy > Remedy.DRAIN):
        return False, None
    if refusal := this.outs.refusal(node):
        about = Subject(Topic.NO_ROOM, fault=fault.key)
        return True, _remark(own, f"{fault.summary}; no action: {refusal.why}", about, held=refusal.held)
    this.outs.take(node)
    return False, None


def _leave_to_slurm(node: NodeFacts, own: NodeRecord) -> Action | None:
    """End the repair of a node that Slurm has powered down, even if it is booting again.

    Its machine no longer exists, and Slurm boots the node only for the next job. So the node is neither lost nor
    overdue.
    """
    new_machine = node.slurm.flags & {NodeFlag.POWERED_DOWN, NodeFlag.POWERING_UP}
    if not new_machine or own.phase is NodePhase.IN_SERVICE:
        return None
    return ChangePhase(node.name, NodePhase.IN_SERVICE, "Slurm has powered it down, and boots it for the next job")


def _watch(this: DecisionRound, node: NodeFacts, own: NodeRecord, owner: Owner) -> Action | None:
    """Decide for a node in service."""
    if owner is Owner.US:
        fault = read_reason(node.slurm.reason)
        return ChangePhase(
            node.name,
            NodePhase.DOWN if node.slurm.down else NodePhase.DRAINED,
            "found drained by the health check or an earlier controller",
            fault,
        )
    if owner is Owner.PLATFORM:
        return None  # the drain reason is the order to the platform; a drain by us would overwrite it
    quick = this.quick.get(node.name, NONE)
    faults = current_faults(node, own, this.policy, quick)
    if own.excuses and is_over(node, own, faults, this.policy.agents):
        return _forget_excuses(own)
    if owner is Owner.SOMEONE:
        return _accept_faults(node, own, faults)
    if fault := heaviest(each for each in faults if each.key not in own.excuses):
        return _take_out(this, node, own, fault)
    if owner is Owner.SLURM and node.connected:
        return _take_over(this, node, own)
    if suspicion := find_suspicion(node, own, this.policy, quick):
        if is_reported(suspicion.about, own):
            return None
        if own.phase in (NodePhase.SPARE, NodePhase.LENT):  # spares and lent spares keep their phase
            return _remark(own, suspicion.text, suspicion.about)
        relapses = count_relapse(own, this.policy, this.now)
        return ChangePhase(node.name, NodePhase.SUSPECTED, suspicion.text, relapses=relapses, about=suspicion.about)
    if own.phase is NodePhase.SUSPECTED and is_steady(node, own, this.policy, this.now):
        why = "no fault any more"
        why = "its faults were accepted by the administrator who returned it" if own.excuses else why
        return ChangePhase(node.name, NodePhase.IN_SERVICE, why, excuses=own.excuses, relapses=own.relapses)
    return None


def _forget_excuses(own: NodeRecord) -> Action:
    why = "its accepted faults are over"
    if own.phase is NodePhase.IN_SERVICE:
        return ChangePhase(own.node, NodePhase.IN_SERVICE, why)
    return Note(own.node, why, excuses=())


def _accept_faults(node: NodeFacts, own: NodeRecord, faults: list[NodeFault]) -> Action | None:
    """Accept the faults of a node that an administrator keeps drained. They do not prevent its return to service.

    Faults are not accepted for a node that is lost, or only reserved, booting or powered down.
    """
    worst = heaviest(faults)
    if worst is None:
        return None
    text = f"{worst.summary}; no action: an administrator keeps it out of service"
    if worst.gone or not (node.slurm.draining or node.slurm.down):
        return _remark(own, text, Subject(Topic.KEPT_OUT, fault=worst.key))
    keys = {fault.key for fault in faults}
    return None if keys <= {*own.excuses} else Note(own.node, text, excuses=tuple(sorted({*own.excuses, *keys})))


def _take_out(this: DecisionRound, node: NodeFacts, own: NodeRecord, fault: NodeFault) -> Action | None:
    # The limits hold back recovery, but not after a notice: an instance that the cloud provider ends is lost in any
    # case. Nodes whose file server is away are not repaired: only their number at a time is limited.
    refusal = this.outs.refusal_to_wait(node) if fault.server_away else this.outs.refusal(node)
    if refusal and not fault.notice:
        about = Subject(Topic.NO_ROOM, fault=fault.key)
        remark = _remark(own, f"{fault.summary}; no action: {refusal.why}", about, fault, refusal.held)
        return replace(remark, fault=True) if isinstance(remark, Note) else remark
    if fault.server_away:
        this.outs.take_to_wait(node)
    else:
        this.outs.take(node)
    if fault.gone:
        plain = tuple(job.id for job in node.jobs if is_plain(job))
        return SetDown(node.name, fault, plain, node.held, this.facts.runs_on(node), node.agent.last_seen)
    return Drain(node.name, fault, node.held, this.facts.runs_on(node))


def _take_over(this: DecisionRound, node: NodeFacts, own: NodeRecord) -> Action | None:
    """Take over a node that Slurm has taken out of service: drain it for recovery, which then returns it to service.

    If Slurm has taken the node out too often within a day, leave the node to an administrator.
    """
    rule = rule_of(node.slurm, this.policy.slurm_users)
    if rule is None:
        return None
    about = Subject(Topic.SLURM_DRAIN, fault=rule.code)
    if not this.policy.agents:
        text = f"Slurm has taken it out of service ({node.slurm.reason}); would validate it and return it"
        return _remark(own, text, about, held=HeldAction.OBSERVING)
    key = NodeFault(CHECK, Remedy.NONE, "", rule.code).key
    times = this.records.count(MarkKind.TAKEN, this.now - DAY_S, node=node.name, key=key)
    fault = fault_of_drain(node.slurm, rule, times)
    if fault is None:
        again = f"Slurm has taken it out of service again, {times + 1} times today"
        return _remark(own, f"{again} ({node.slurm.reason}): an administrator must look at it", about)
    if refusal := this.outs.refusal(node):
        text = f"Slurm has taken it out of service ({node.slurm.reason}); it stays out: {refusal.why}"
        return _remark(own, text, about, held=refusal.held)
    this.outs.take(node)
    return Drain(node.name, fault, node.held, this.facts.runs_on(node))


def _respect_administrator(node: NodeFacts, own: NodeRecord, owner: Owner, policy: Policy) -> Action | None:
    """End the repair of a node that an administrator has drained, or returned to service in spite of its faults.

    The repair also ends when a platform that repairs nodes by itself has taken the node over or returned it. A node
    that the platform returns has a new machine or was rebooted, so no fault is accepted: the checks decide again.
    """
    ordered = bool(own.steps)  # whether this controller ordered the repair
    if owner is Owner.PLATFORM and not ordered:
        return ChangePhase(node.name, NodePhase.IN_SERVICE, f"the platform has taken it over: {node.slurm.reason}")
    if owner is Owner.NOBODY and ordered and policy.platform_returns and node.slurm.in_service:
        return ChangePhase(node.name, NodePhase.IN_SERVICE, "the platform has repaired it and returned it to service")
    if owner is Owner.SOMEONE:
        return ChangePhase(node.name, NodePhase.IN_SERVICE, f"an administrator has taken it over: {node.slurm.reason}")
    if owner is Owner.NOBODY and own.fault and node.slurm.in_service:
        keys = {own.fault.key, *(fault.key for fault in current_faults(node, own, policy))}
        return ChangePhase(
            node.name, NodePhase.IN_SERVICE, "an administrator has returned it to service", excuses=tuple(sorted(keys))
        )
    return None

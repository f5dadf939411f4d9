"""The `slurm:` block to facts: priority, preemption, QOS, and the network's tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dalsegno.spec import facts
from dalsegno.spec.layout import own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.partition import Partition
from dalsegno.spec.slurm import Preemption, Priority, Qos, Slurm, Topology


def resolve_slurm(spec: ClusterSpec) -> facts.Slurm:
    """Cluster-wide Slurm policy."""
    slurm = spec.slurm
    preemption = _preemption(slurm)
    return facts.Slurm(
        accounting=slurm.accounting,
        enforce=tuple(slurm.enforce),
        rest=slurm.rest,
        backup_controller=slurm.backup_controller,
        priority=_priority(slurm.priority, slurm.accounting),
        preempt_by=preemption.by if preemption else "",
        preempt_mode=preemption.mode if preemption else "",
        preempt_exempt_time_s=preemption.exempt_time if preemption else None,
        topology=_topology(slurm.topology, spec.partitions),
        qos=tuple(_qos(each) for each in slurm.qos),
        slurmd_timeout_s=slurm.slurmd_timeout,
        extra=dict(slurm.extra),
    )


def _preemption(slurm: Slurm) -> Preemption | None:
    """A QOS that preempts another would do nothing with preemption off, so it switches it on."""
    if slurm.preemption is None and any(qos.preempts for qos in slurm.qos):
        return Preemption()
    return slurm.preemption


def _priority(priority: Priority, accounting: bool) -> facts.Priority:
    found = facts.Priority(
        age=priority.age,
        fair_share=priority.fair_share,
        job_size=priority.job_size,
        partition=priority.partition,
        qos=priority.qos,
        tres=dict(priority.tres),
        half_life_min=priority.half_life,
        usage_reset=priority.usage_reset,
        calc_period_min=priority.calc_period,
        max_age_min=priority.max_age,
        favor_small=priority.favor_small,
    )
    # Both live in the database; without one Slurm complains of every job.
    return found if accounting else replace(found, fair_share=0, qos=0)


def _qos(qos: Qos) -> facts.Qos:
    return facts.Qos(
        name=qos.name,
        priority=qos.priority,
        preempts=tuple(qos.preempts),
        preempt_mode=qos.preempt_mode,
        max_time_min=qos.max_time,
        max_tres_per_user=dict(qos.max_tres_per_user),
        max_jobs_per_user=qos.max_jobs_per_user,
        group_tres=dict(qos.group_tres),
        usage_factor=qos.usage_factor,
    )


def _topology(topology: Topology | None, partitions: Sequence[Partition]) -> tuple[facts.Switch, ...]:
    if topology is None:
        return ()
    if topology.nodes_per_switch:
        return _built(partitions, topology.nodes_per_switch)
    return tuple(facts.Switch(each.name, tuple(each.nodes), tuple(each.switches)) for each in topology.switches)


def _built(partitions: Sequence[Partition], per_switch: int) -> tuple[facts.Switch, ...]:
    """Leaf after leaf in the order of the nodes, those of two partitions apart; a spine above."""
    leaves: list[facts.Switch] = []
    for partition in partitions:
        names = own_nodes(partition) + own_spares(partition)
        for at in range(0, len(names), per_switch):
            leaves.append(facts.Switch(f"leaf-{len(leaves) + 1}", nodes=tuple(names[at : at + per_switch])))
    spine = facts.Switch("spine", switches=tuple(leaf.name for leaf in leaves))
    return (*leaves, spine) if len(leaves) > 1 else tuple(leaves)

"""Tests of the policy from the cluster file and the target, and of drain reasons."""

from __future__ import annotations

from dalsegno.health import Remedy
from dalsegno.recovery.act import remedies_of
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import SLURM_USERS, Owner, find_owner, read_reason, write_reason
from dalsegno.recovery.fakes import FakeCluster, FakeTarget
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.spec.facts import CheckSetting, Health

DRAIN = frozenset({NodeFlag.DRAIN})


def test_the_policy_has_the_limits_of_the_cluster_file():
    checks = {"disk": CheckSetting(action="drain"), "zombies": CheckSetting(enabled=False)}
    health = Health("observe", 0.5, 7, 3, 6, 60, checks)
    policy = Policy.of(health, frozenset({Remedy.REBOOT}), frozenset({"n4"}), boot_s=30.0)
    assert (policy.mode, policy.max_out, policy.per_hour) == ("observe", 0.5, 7)
    assert (policy.reboots_per_fault, policy.reboots_per_day, policy.reboots_apart_s) == (3, 6, 60.0)
    assert (policy.caps, policy.off, policy.spares) == ({"disk": Remedy.DRAIN}, {"zombies"}, {"n4"})
    assert policy.remedy(NodeFault("disk", Remedy.REPLACE, "full")) is Remedy.DRAIN
    assert policy.remedy(NodeFault("xid", Remedy.REPLACE, "54")) is Remedy.REPLACE


def test_the_remedies_of_a_target_follow_from_its_type():
    assert remedies_of(FakeTarget(FakeCluster())) == {Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE}
    assert remedies_of(object()) == frozenset()


def test_a_drain_reason_survives_writing_and_reading():
    fault = NodeFault("xid", Remedy.REBOOT, "GPU has fallen off the bus", "79")
    assert write_reason(fault) == "dalsegno:reboot:xid[79] GPU has fallen off the bus"
    assert read_reason(write_reason(fault)) == fault
    plain = NodeFault("disk", Remedy.DRAIN, "full")
    assert read_reason(write_reason(plain)) == plain
    assert len(write_reason(NodeFault("disk", Remedy.DRAIN, "x" * 1000))) == 200


def owned(node: NodeInfo) -> Owner:
    return find_owner(node, SLURM_USERS)


def test_the_owner_of_a_drain_is_recognized():
    def node(state: NodeState = NodeState.IDLE, flags: frozenset[NodeFlag] = frozenset(), reason: str = "") -> NodeInfo:
        return NodeInfo("n1", state, flags, reason=reason)

    assert owned(node()) is Owner.NOBODY
    assert owned(node(flags=DRAIN, reason="dalsegno:reset:ecc two bits")) is Owner.US
    assert owned(node(flags=DRAIN, reason=SPARE_REASON)) is Owner.SPARE
    assert owned(node(flags=DRAIN, reason="mine")) is Owner.SOMEONE
    assert owned(node(flags=DRAIN)) is Owner.SOMEONE
    assert owned(node(NodeState.DOWN, reason="mine")) is Owner.SOMEONE
    assert owned(node(NodeState.DOWN, reason="Not responding")) is Owner.NOBODY, "this reason is Slurm's own"
    assert owned(node(NodeState.DOWN, DRAIN, "Not responding")) is Owner.SOMEONE
    assert owned(node(flags=DRAIN, reason="dalsegno:remove")) is Owner.SOMEONE, "`up` is about to remove it"
    assert owned(node(NodeState.DOWN, reason="dalsegno:boot")) is Owner.SOMEONE, "`up` is about to boot it"
    assert owned(node(flags=frozenset({NodeFlag.MAINTENANCE}))) is Owner.SOMEONE
    assert owned(node(flags=frozenset({NodeFlag.POWERED_DOWN, NodeFlag.NOT_RESPONDING}))) is Owner.SOMEONE
    assert owned(node(flags=frozenset({NodeFlag.NOT_RESPONDING}))) is Owner.NOBODY

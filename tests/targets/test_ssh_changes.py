"""The order in which the hosts of a cluster on ssh are changed and cleaned."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.setup.delivery import ChangeAction, ChangeKind, MachineChange
from dalsegno.spec.facts import Storage
from dalsegno.targets.ssh.apply import removal_order
from dalsegno.targets.ssh.desired import host_plan
from dalsegno.targets.ssh.folder import SshStage, SshState
from dalsegno.targets.ssh.plan import SshPlan
from tests.targets.test_ssh_plans import CLUSTER, HOSTS, ON, SECRETS

NODES = ["login-1", "gpu-1", "gpu-2"]
STATE = SshState(SshStage.UP, "c0ffee", "head", CLUSTER.ssh)
SERVING = replace(CLUSTER, storage=(Storage("homes", "/people", home=True),))


def test_head_that_serves_folders_is_cleaned_last_so_that_the_others_can_unmount_them():
    assert removal_order(SERVING, STATE) == [NODES, ["head"]]
    assert removal_order(CLUSTER, STATE) == [["head", *NODES]]
    assert removal_order(None, STATE) == [["head", *NODES]]


def test_hosts_unmount_a_folder_before_the_head_stops_serving_it():
    unmount = MachineChange(ChangeKind.MOUNT, "/people", ChangeAction.UNMOUNT)
    plans = {"head": host_plan(ON, "head")}
    plan = SshPlan(CLUSTER, plans, {"head": (), "gpu-1": (unmount,)}, HOSTS, "c0ffee", SECRETS)
    assert plan.head_last and not plan.head_first
    mount = replace(unmount, action=ChangeAction.CREATE)
    serving = host_plan(replace(ON, cluster=SERVING), "head")
    plan = replace(plan, plans={"head": serving}, changes={"gpu-1": (mount, unmount)})
    assert plan.head_first and not plan.head_last

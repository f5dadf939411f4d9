"""What `up` does with the other hosts of a cluster on ssh when some fail, and what it reports and records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.setup.delivery import Answer, ChangeAction, ChangeKind, MachineChange
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.processes import FakeRunner
from dalsegno.system.ssh import FakeHostRunner, HostCall
from dalsegno.targets.folder import read_applied
from dalsegno.targets.ssh.apply import ApplyOnHosts, state_during
from dalsegno.targets.ssh.desired import host_plan
from dalsegno.targets.ssh.folder import SshFolder, SshStage, SshState, read_ssh_state
from dalsegno.targets.ssh.plan import SshPlan
from dalsegno.targets.ssh.status import read_status
from dalsegno.targets.ssh.survey import hosts_to_upgrade
from tests.targets.test_ssh_changes import SERVING
from tests.targets.test_ssh_plans import CLUSTER, HOSTS, ON, SECRETS

NODES = "NodeName={} State=IDLE CPUTot=8 RealMemory=1000 Partitions=train\n"
WRITTEN = MachineChange(ChangeKind.FILE, "/etc/hosts", ChangeAction.CHANGE)
UNMOUNTED = MachineChange(ChangeKind.MOUNT, "/people", ChangeAction.UNMOUNT)
PLAN = SshPlan(
    CLUSTER, {host: host_plan(ON, host) for host in HOSTS}, dict.fromkeys(HOSTS, (WRITTEN,)), HOSTS, "c0ffee", SECRETS
)
UPGRADE = replace(PLAN, upgrades=tuple(HOSTS), may_upgrade=True)


BEFORE = SshState(SshStage.UP, "c0ffee", "head", CLUSTER.ssh, slurm_version="22.05.8")


@dataclass
class Lab:
    """Hosts of which some fail, and what was done with them."""

    folder: SshFolder
    changed: list[str] = field(default_factory=list)

    def up(self, plan: SshPlan, broken: Collection[str] = ()) -> TargetError | None:
        """Apply a plan, and return its error."""
        hosts = FakeHostRunner(lambda call: self.answer(call, broken))
        slurm = SlurmClient(FakeRunner(slurm_answer), {})
        state = state_during(plan, BEFORE)
        try:
            ApplyOnHosts(hosts, slurm, self.folder, state, lambda line: None).apply(plan)
        except TargetError as error:
            return error
        return None

    def answer(self, call: HostCall, broken: Collection[str]) -> str | TargetError:
        self.changed.append(call.host)
        return TargetError(f"{call.host}: no space left") if call.host in broken else '{"result": {}}'

    @property
    def state(self) -> SshState:
        state = read_ssh_state(self.folder)
        assert state is not None
        return state


def slurm_answer(argv: tuple[str, ...], stdin: str | None) -> str:
    if "--version" in argv:
        return "slurm-wlm 22.05.8\n"
    return "".join(NODES.format(node.name) for node in CLUSTER.nodes)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(SshFolder(tmp_path / "clusters" / "lab"))


def test_failed_host_does_not_stop_the_others(lab):
    error = lab.up(PLAN, broken=["gpu-1"])
    assert error and error.what == "gpu-1: no space left\nAll other hosts were set up."
    assert lab.changed == list(HOSTS)
    assert (lab.state.phase, lab.state.failed, lab.state.skipped) == (SshStage.UP, ("gpu-1",), ())
    assert read_applied(lab.folder) == CLUSTER


def test_upgrade_continues_with_other_nodes_and_leaves_the_head(lab):
    error = lab.up(UPGRADE, broken=["login-1"])
    assert lab.changed == ["login-1", "gpu-1", "gpu-2"]
    assert error and error.what == "login-1: no space left\nNot changed because of this: head"
    assert error.hint == "`dalsegno up --upgrade` again"
    assert (lab.state.phase, lab.state.failed, lab.state.skipped) == (SshStage.UP, ("login-1",), ("head",))
    assert read_applied(lab.folder) is None, "the head does not have the new files"


def test_upgrade_stops_after_a_second_failed_host_and_names_those_it_skipped(lab):
    error = lab.up(UPGRADE, broken=["login-1", "gpu-1"])
    assert lab.changed == ["login-1", "gpu-1"]
    assert error and "2 of 4 hosts were not set up: 2 hosts (login-1, gpu-1)" in error.what
    assert error.what.endswith("Not changed because of this: head,gpu-2")
    assert (lab.state.failed, lab.state.skipped) == (("login-1", "gpu-1"), ("head", "gpu-2"))
    assert any("2 hosts (head, gpu-2)" in line for line in read_status(lab.state, "lab", CLUSTER, None, []).problems)


@pytest.mark.parametrize(("broken", "changed"), [([], ["head", "gpu-1", "gpu-2"]), (["head"], ["head"])])
def test_upgrade_changes_the_head_first_if_the_others_mount_what_it_exports(lab, broken, changed):
    mounted = replace(UNMOUNTED, action=ChangeAction.CREATE)
    serving = {**PLAN.plans, "head": host_plan(replace(ON, cluster=SERVING), "head")}
    changes = {"gpu-1": (mounted,), "gpu-2": (mounted,), "head": (WRITTEN,)}
    lab.up(replace(UPGRADE, plans=serving, changes=changes), broken)
    assert lab.changed == changed


def test_interrupted_upgrade_is_continued_host_by_host():
    old = dict.fromkeys(["gpu-2", "head"], Answer((MachineChange(ChangeKind.CODE, "0.2", ChangeAction.INSTALL),)))
    state = state_during(UPGRADE, BEFORE)
    assert (state.phase, state.skipped, state.slurm_version) == (SshStage.UP, tuple(HOSTS), "22.05.8")
    assert hosts_to_upgrade(state, {"gpu-1": Answer(()), **old}) == ("head", "gpu-2")
    assert state_during(PLAN, BEFORE).phase is SshStage.MAKING


def test_upgrade_without_failures_records_none(lab):
    assert lab.up(UPGRADE) is None
    assert lab.changed == ["login-1", "gpu-1", "gpu-2", "head"]
    assert (lab.state.phase, lab.state.failed, lab.state.skipped) == (SshStage.UP, (), ())


def test_head_serves_a_folder_until_all_hosts_have_unmounted_it(lab):
    plan = replace(PLAN, changes={"head": (WRITTEN,), "gpu-1": (UNMOUNTED,), "gpu-2": (UNMOUNTED,)})
    error = lab.up(plan, broken=["gpu-1"])
    assert lab.changed == ["gpu-1", "gpu-2"]
    assert error and error.what == "gpu-1: no space left\nNot changed because of this: head"
    assert (lab.state.phase, lab.state.failed, lab.state.skipped) == (SshStage.MAKING, ("gpu-1",), ("head",))
    assert read_applied(lab.folder) is None


def test_failed_head_is_reported_alone_if_no_host_was_skipped(lab):
    error = lab.up(PLAN, broken=["head"])
    assert error and error.what == "head: no space left"
    assert lab.changed == list(HOSTS)
    assert (lab.state.phase, lab.state.failed) == (SshStage.MAKING, ("head",))


def test_failed_head_of_an_upgrade_leaves_only_the_head_to_do(lab):
    error = lab.up(UPGRADE, broken=["head"])
    assert error and error.what == "head: no space left"
    assert (lab.state.phase, lab.state.failed, lab.state.skipped) == (SshStage.UP, ("head",), ())

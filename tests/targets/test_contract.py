"""The contract of `targets/base.py`, the same tests for every target: plan, apply, status, shell, abilities, destroy.

The local target runs twice, with virtual hosts and with loopback nodes, on one real cluster each. The recorded target
lives in the tests and needs no machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cluster import ClusterPlace, places
from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import (
    CanInject,
    CanNameUsers,
    CanReadLogs,
    CanReboot,
    CanReplace,
    CanReset,
    CanResize,
    CanSeeDaemons,
    CanSeePower,
    ClusterPhase,
    ClusterStatus,
    Plan,
    ShellEntry,
    Target,
    require,
)
from dalsegno.targets.folder import ClusterFolder, read_target
from dalsegno.targets.local.machine_room import HostControlClient
from dalsegno.targets.registry import open_existing, open_target
from tests.cluster.conftest import leftovers, make_home
from tests.targets.recorded import RecordedTarget
from tests.waiting import eventually

SPEC = """
name: one
target: local
partitions: [{{name: train, nodes: {nodes}, gpus: 2, gpu_type: h100, cpus: 2, memory: 1G, default: true}}]
slurm: {{accounting: false}}
containers: {{enabled: false}}
health: {{mode: observe}}  # nobody but the tests touches a node
local: {{hosts: {hosts}}}
"""
ABILITIES = (
    CanReset, CanReboot, CanReplace, CanResize, CanSeePower, CanReadLogs, CanInject, CanSeeDaemons, CanNameUsers,
)  # fmt: skip
LOCAL = {CanReset, CanReboot, CanReplace, CanSeePower, CanReadLogs, CanInject, CanSeeDaemons, CanNameUsers}
HAS = {"recorded": {CanReboot, CanResize, CanSeePower}, "loopback": LOCAL, "virtual": LOCAL}
NODE = "train-1"


@dataclass
class Made:
    """A cluster that was created through its target, with its first plan."""

    kind: str
    place: ClusterPlace
    open: Callable[[], Target]  # opens the target from the state folder, as another process would
    target: Target
    first: Plan
    said: list[str] = field(default_factory=list)

    def cluster(self, nodes: int = 2) -> Cluster:
        return cluster_of(self.kind, nodes)

    def apply(self, plan: Plan) -> list[str]:
        """Carry out a plan and return the lines of progress."""
        said: list[str] = []
        with self.place.lock():
            self.target.apply(plan, said.append)
        return said

    def has(self, ability: type[Any]) -> bool:
        """Return whether the target has an ability. If not, check that `require` raises a clear error."""
        if isinstance(self.target, ability):
            return True
        with pytest.raises(TargetError, match=f"target `{self.target.kind}` cannot "):
            require(self.target, ability)
        return False

    @contextmanager
    def out_of_service(self, node: str) -> Iterator[None]:
        """Set the node down inside the block, as the controller does before a repair, and resume it afterwards."""
        self.target.slurm.set_down([node], "dalsegno:contract")
        yield
        eventually(lambda: self.resumed(node))

    def resumed(self, node: str) -> bool:
        states = {each.name: each.state for each in self.target.status().nodes}
        if states[node] == "idle":
            return True
        with contextlib.suppress(DalsegnoError):  # it has not registered yet
            self.target.slurm.resume(node)
        return False


def cluster_of(kind: str, nodes: int) -> Cluster:
    hosts = kind if kind in ("virtual", "loopback") else "auto"
    return resolve(parse_spec(SPEC.format(nodes=nodes, hosts=hosts), "cluster.yaml"))


def open_new(kind: str, folder: Path) -> tuple[Target, Callable[[], Target]]:
    if kind == "recorded":
        return RecordedTarget(folder), lambda: RecordedTarget(folder)
    return open_target("local", folder), lambda: open_existing(folder)


@pytest.fixture(
    scope="module",
    params=["recorded", *(pytest.param(kind, marks=pytest.mark.cluster) for kind in ("loopback", "virtual"))],
)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    if request.param == "virtual" and os.geteuid() != 0:
        pytest.skip("virtual hosts need root")
    home = make_home("ds-")
    place = ClusterPlace("one", home)
    target, reopen = open_new(request.param, place.folder)
    found = Made(request.param, place, reopen, target, target.plan(cluster_of(request.param, 2)))
    try:
        found.said = found.apply(found.first)
        yield found
    finally:
        target.destroy(lambda text: None)
        left = leftovers(home)
        shutil.rmtree(home)
    assert left == []


def output(entry: ShellEntry) -> str:
    return LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).checked().stdout.strip()


def shape(status: ClusterStatus) -> tuple[object, ...]:
    """Return the parts of the status that a plan without changes must not change."""
    daemons = sorted((each.host, each.name, each.running) for each in status.daemons)
    return status.phase, [each.name for each in status.nodes], daemons, status.problems


def test_first_plan_says_what_it_creates(made: Made):
    assert not made.first.empty and made.first.sentences() and made.said
    assert made.first.import_images == () and isinstance(made.first.details(), list)


def test_status_shows_all_nodes_of_an_applied_plan(made: Made):
    status = made.target.status()
    assert (status.name, status.target, status.phase) == ("one", made.target.kind, ClusterPhase.UP), status.problems
    assert [each.name for each in status.nodes] == ["train-1", "train-2"]
    eventually(lambda: {each.state for each in made.target.status().nodes} == {"idle"})


def test_second_apply_changes_nothing(made: Made):
    before, plan = shape(made.target.status()), made.target.plan(made.cluster())
    assert plan.empty and "nothing to do" in plan.sentences()[0]
    assert made.apply(plan) == []
    assert shape(made.target.status()) == before


def test_plan_of_another_target_is_refused(made: Made):
    class OtherPlan:
        empty = False

    with pytest.raises(TypeError):
        made.target.apply(OtherPlan(), lambda text: None)  # type: ignore[arg-type]


def test_target_opened_from_the_folder_knows_its_cluster(made: Made):
    again = made.open()
    assert (again.kind, again.summary(), again.owner()) == (made.target.kind, made.target.summary(), os.geteuid())
    assert again.summary().phase is ClusterPhase.UP and again.summary().nodes == 2
    assert again.slurm_runs() and again.plan(made.cluster()).empty


def test_cluster_is_found_by_its_state_file(made: Made):
    assert places({"DALSEGNO_HOME": str(made.place.home)}) == [made.place]
    assert read_target(ClusterFolder(made.place.folder)) == made.target.kind


def test_shell_uses_the_cluster(made: Made):
    env: Mapping[str, str] = {"PATH": os.environ["PATH"]}
    assert made.target.user_env(env)["DALSEGNO_CLUSTER"] == "one"
    assert output(made.target.shell(["printenv", "DALSEGNO_CLUSTER"], env, "/")) == "one"
    entry = made.target.shell(["true"], env, "/")
    assert entry.uid is None and entry.env["SLURM_CONF"] == made.target.user_env(env)["SLURM_CONF"]


def test_command_on_a_node_knows_its_node(made: Made):
    env = {"PATH": os.environ["PATH"]}
    assert output(made.target.on_node(NODE, ["printenv", "SLURMD_NODENAME"], env, "/")) == NODE
    with pytest.raises(NotThere, match="no node `train-9`"):
        made.target.on_node("train-9", ["true"], env, "/")


def test_abilities_are_those_that_are_declared(made: Made):
    assert {ability for ability in ABILITIES if made.has(ability)} == HAS[made.kind]


def test_node_that_is_reset_stays_up(made: Made):
    if made.has(CanReset):
        require(made.target, CanReset).reset_gpus(NODE)
        assert made.target.status().phase is ClusterPhase.UP


@pytest.mark.parametrize(("ability", "action"), [(CanReboot, "reboot"), (CanReplace, "replace")])
def test_node_is_in_service_again_after_a_reboot_or_replacement(made: Made, ability: type[Any], action: str):
    if made.has(ability):
        with made.out_of_service(NODE):
            getattr(made.target, action)(NODE)
            assert not require(made.target, CanSeePower).is_off(NODE)


def test_unknown_node_is_refused(made: Made):
    with pytest.raises(DalsegnoError, match="no node `train-9`"):
        require(made.target, CanReboot).reboot("train-9")


def test_logs_of_a_node_can_be_read_from_outside(made: Made):
    if made.has(CanReadLogs):
        logs = require(made.target, CanReadLogs).read_logs(NODE)
        assert logs and all(isinstance(text, str) for text in logs.values())


def test_every_daemon_has_a_log(made: Made):
    logs = {(log.host, log.name): log.path for log in made.target.daemon_logs()}
    assert logs.keys() >= {(daemon.host, daemon.name) for daemon in made.target.status().daemons}
    assert (NODE, "slurmd") in logs
    if made.kind != "recorded":
        assert "slurmd version" in logs[NODE, "slurmd"].read_text()
        assert all(path.exists() for path in logs.values())


def test_injected_fault_lasts_until_it_is_cleared(made: Made):
    if made.has(CanInject):
        target = require(made.target, CanInject)
        target.inject(FAULTS["gpu-hot"], NODE, FaultOptions(gpu=1))
        assert [(one.fault, one.node) for one in target.injected()] == [("gpu-hot", NODE)]
        assert [one.fault for one in target.clear(NODE)] == ["gpu-hot"]
        assert target.injected() == []


def test_daemon_that_does_not_run_is_seen_also_from_inside_a_host(made: Made):
    if made.has(CanSeeDaemons):
        target, injecting = require(made.target, CanSeeDaemons), require(made.target, CanInject)
        assert list(target.dead_daemons()) == []
        injecting.inject(FAULTS["agent-dead"], NODE, FaultOptions())
        try:
            eventually(lambda: [(one.host, one.name) for one in target.dead_daemons()] == [(NODE, "node-agent")])
            if made.kind == "virtual":  # the machine room, which is outside of all hosts, serves the head
                room = HostControlClient(made.place.folder)
                assert room.dead_daemons() == list(target.dead_daemons())
        finally:
            injecting.clear(NODE)
        eventually(lambda: not target.dead_daemons())


def test_partition_can_be_resized_without_a_new_file_or_it_is_refused(made: Made):
    if made.has(CanResize):
        require(made.target, CanResize).resize("train", 3)
    else:
        with pytest.raises(TargetError) as caught:
            require(made.target, CanResize)
        assert "cluster file" in caught.value.hint


def test_changed_file_adds_and_removes_nodes(made: Made):
    more = made.target.plan(made.cluster(3))
    assert not more.empty and any("train-3" in line for line in more.sentences())
    made.apply(more)
    assert made.target.summary().nodes == 3
    made.apply(made.target.plan(made.cluster(2)))
    assert [each.name for each in made.target.status().nodes] == ["train-1", "train-2"]
    assert made.target.plan(made.cluster(2)).empty


def test_destroy_leaves_nothing_and_may_be_repeated(made: Made):
    assert made.target.removal().sentences([]) == []
    with made.place.lock():
        assert made.target.destroy(lambda text: None)
    assert made.open().summary().phase is ClusterPhase.GONE
    assert not made.target.destroy(lambda text: None)

"""The contract of `targets/base.py`: the same cases for every target, from plan to removal, and faults of platforms.

The local target runs twice, with virtual hosts and with loopback nodes, on one real cluster each. Clouds run against
their emulators. `lacks` of each stage says which cases it does not have, and why.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cluster import places
from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import (
    CanForward,
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
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.folder import ClusterFolder, read_target
from dalsegno.targets.local.machine_room import HostControlClient
from tests.targets.cloud_stages import HyperPodStage, OciSdkStage, OciStage, PclusterStage, cloud_stage
from tests.targets.stages import (
    Case,
    LoopbackStage,
    PlatformFault,
    RecordedStage,
    SshStage,
    TargetStage,
    VirtualStage,
    local_stage,
)
from tests.waiting import eventually

KINDS: dict[str, type[TargetStage]] = {
    kind.name: kind
    for kind in (
        RecordedStage, SshStage, PclusterStage, HyperPodStage, OciStage, OciSdkStage, LoopbackStage, VirtualStage,
    )
}  # fmt: skip
REAL = (LoopbackStage.name, VirtualStage.name)
ABILITIES = (
    CanReset, CanReboot, CanReplace, CanResize, CanSeePower, CanReadLogs, CanInject, CanSeeDaemons, CanNameUsers,
)  # fmt: skip
NODE = "train-1"
TESTED: set[Case] = set()
ROOT = Path(__file__).parents[2]


def with_stage(fixture: str, names: list[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=pytest.mark.cluster) if name in REAL else name for name in names]
    return pytest.mark.parametrize(fixture, marked, indirect=True)


def contract(case: Case, fixture: str = "made") -> pytest.MarkDecorator:
    """Run a test for every target that has this case."""
    TESTED.add(case)
    return with_stage(fixture, [name for name, kind in KINDS.items() if case not in kind.lacks])


def every(condition: Callable[[type[TargetStage]], bool] = lambda kind: True) -> pytest.MarkDecorator:
    """Run a test for every target whose cluster the suite creates."""
    names = [name for name, kind in KINDS.items() if Case.APPLY not in kind.lacks and condition(kind)]
    return with_stage("made", names)


def used_here(kind: type[TargetStage]) -> bool:
    return kind.used_here


@dataclass
class Made:
    """A cluster that was created through its target, with its first plan."""

    stage: TargetStage
    target: Target
    first: Plan
    changes_of_plan: int
    said: list[str]

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


@contextmanager
def open_stage(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[TargetStage]:
    kind = KINDS[name]
    if kind is SshStage:
        yield SshStage(folder)
        return
    with cloud_stage(name, folder, request) if kind.is_cloud else local_stage(kind) as stage:
        yield stage


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with open_stage(request.param, tmp_path_factory.mktemp("home"), request) as stage:
        target = stage.target()
        plan = target.plan(stage.cluster())
        changes = stage.changes() if stage.is_cloud else 0
        yield Made(stage, target, plan, changes, stage.apply(plan))


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TargetStage]:
    with open_stage(request.param, tmp_path, request) as found:
        yield found


def output(entry: ShellEntry) -> str:
    return LocalRunner().run(entry.argv, env=entry.env, timeout_s=60).checked().stdout.strip()


def shape(status: ClusterStatus) -> tuple[object, ...]:
    """Return the parts of the status that a plan without changes must not change."""
    daemons = sorted((each.host, each.name, each.running) for each in status.daemons)
    return status.phase, [each.name for each in status.nodes], daemons, status.problems


# Plan, apply, status
@contract(Case.PLAN)
def test_first_plan_says_what_it_creates_and_changes_nothing(made: Made):
    assert not made.first.empty and made.first.sentences() and made.said
    assert made.first.import_images == () and isinstance(made.first.details(), list)
    assert made.changes_of_plan == 0
    if made.stage.is_cloud:
        said = made.first.sentences()
        assert said[0].startswith(f"creates demo on {made.target.kind}: 2 nodes (")
        assert any("USD per hour" in line for line in said) and any("takes about" in line for line in said)
        assert any("check" in line for line in made.first.details()), "quotas or limits"


@contract(Case.APPLY)
def test_second_apply_changes_nothing(made: Made):
    before, plan = shape(made.target.status()), made.target.plan(made.stage.cluster())
    changes = made.stage.changes() if made.stage.is_cloud else 0
    assert plan.empty and "nothing to do" in plan.sentences()[0]
    assert made.stage.apply(plan) == []
    assert shape(made.target.status()) == before
    assert changes == (made.stage.changes() if made.stage.is_cloud else 0)


@contract(Case.STATUS)
def test_status_shows_all_nodes_of_an_applied_plan(made: Made):
    status, name = made.target.status(), made.stage.place.name
    assert (status.name, status.target, status.phase) == (name, made.target.kind, ClusterPhase.UP), status.problems
    assert tuple(each.name for each in status.nodes) == made.stage.nodes[:2] and status.jobs == ()
    eventually(lambda: {each.state for each in made.target.status().nodes} == {"idle"})


@every()
def test_plan_of_another_target_is_refused(made: Made):
    class OtherPlan:
        empty = False

    with pytest.raises(TypeError):
        made.target.apply(OtherPlan(), lambda text: None)  # type: ignore[arg-type]


@every()
def test_target_opened_from_the_folder_knows_its_cluster(made: Made):
    again = made.stage.target()
    assert (again.kind, again.summary(), again.owner()) == (made.target.kind, made.target.summary(), os.geteuid())
    assert again.summary().phase is ClusterPhase.UP and again.summary().nodes == 2
    assert again.slurm_runs() and again.plan(made.stage.cluster()).empty


@every()
def test_cluster_is_found_by_its_state_file(made: Made):
    assert places({"DALSEGNO_HOME": str(made.stage.place.home)}) == [made.stage.place]
    assert read_target(ClusterFolder(made.stage.place.folder)) == made.target.kind


# Shells
@every(used_here)
def test_shell_uses_the_cluster(made: Made):
    env: Mapping[str, str] = {"PATH": os.environ["PATH"]}
    assert made.target.user_env(env)["DALSEGNO_CLUSTER"] == "one"
    assert output(made.target.shell(["printenv", "DALSEGNO_CLUSTER"], env, "/")) == "one"
    entry = made.target.shell(["true"], env, "/")
    assert entry.uid is None and entry.env["SLURM_CONF"] == made.target.user_env(env)["SLURM_CONF"]


@every(lambda kind: not kind.used_here)
def test_commands_of_a_cluster_elsewhere_run_on_its_head(made: Made):
    with pytest.raises(TargetError, match="cannot be used from this shell"):
        made.target.user_env({})
    assert made.target.shell(["sinfo"], {}, "/").argv[0] == "ssh"
    assert isinstance(made.target, CanForward)
    forwarded = made.target.forward(["users", "add", "ada"], root=True)
    assert forwarded is not None and re.search(r"sudo -- (\S+/)?dalsegno users add ada$", forwarded.argv[-1])
    as_ada = made.target.shell(["id"], {}, "/", host="head", user="ada").argv[-1]
    assert as_ada == "sudo runuser -u ada -- id"


@every(used_here)
def test_command_on_a_node_knows_its_node(made: Made):
    env = {"PATH": os.environ["PATH"]}
    assert output(made.target.on_node(NODE, ["printenv", "SLURMD_NODENAME"], env, "/")) == NODE
    with pytest.raises(NotThere, match="no node `train-9`"):
        made.target.on_node("train-9", ["true"], env, "/")


# Nodes
@every()
def test_abilities_are_those_that_are_declared(made: Made):
    assert {ability for ability in ABILITIES if made.has(ability)} == made.stage.abilities


@every(used_here)
def test_node_that_is_reset_stays_up(made: Made):
    if made.has(CanReset):
        require(made.target, CanReset).reset_gpus(NODE)
        assert made.target.status().phase is ClusterPhase.UP


@every(used_here)
def test_node_is_in_service_again_after_a_reboot(made: Made):
    with made.out_of_service(NODE):
        require(made.target, CanReboot).reboot(NODE)
        assert not require(made.target, CanSeePower).is_off(NODE)


@contract(Case.REPLACE)
def test_node_is_replaced(made: Made):
    node = made.stage.nodes[0]
    if made.stage.is_cloud:
        made.stage.replace(node)
        assert made.stage.replaced() == [node], "the platform boots another machine in its place"
        return
    repairing = require(made.stage.head(), CanReplace)
    with made.out_of_service(node):
        repairing.replace(node)
        assert not require(made.target, CanSeePower).is_off(node)


@every(used_here)
def test_unknown_node_is_refused(made: Made):
    with pytest.raises(DalsegnoError, match="no node `train-9`"):
        require(made.target, CanReboot).reboot("train-9")


@every(used_here)
def test_logs_of_a_node_can_be_read_from_outside(made: Made):
    if made.has(CanReadLogs):
        logs = require(made.target, CanReadLogs).read_logs(NODE)
        assert logs and all(isinstance(text, str) for text in logs.values())


@every()
def test_every_daemon_has_a_log(made: Made):
    logs = {(log.host, log.name): log.path for log in made.target.daemon_logs()}
    assert logs.keys() >= {(daemon.host, daemon.name) for daemon in made.target.status().daemons}
    assert ((NODE, "slurmd") in logs) is made.stage.used_here
    if made.stage.name in REAL:
        assert "slurmd version" in logs[NODE, "slurmd"].read_text()
        assert all(path.exists() for path in logs.values())


@every(used_here)
def test_injected_fault_lasts_until_it_is_cleared(made: Made):
    if made.has(CanInject):
        target = require(made.target, CanInject)
        target.inject(FAULTS["gpu-hot"], NODE, FaultOptions(gpu=1))
        assert [(one.fault, one.node) for one in target.injected()] == [("gpu-hot", NODE)]
        assert [one.fault for one in target.clear(NODE)] == ["gpu-hot"]
        assert target.injected() == []


@every(used_here)
def test_daemon_that_does_not_run_is_seen_also_from_inside_a_host(made: Made):
    if made.has(CanSeeDaemons):
        target, injecting = require(made.target, CanSeeDaemons), require(made.target, CanInject)
        assert list(target.dead_daemons()) == []
        injecting.inject(FAULTS["agent-dead"], NODE, FaultOptions())
        try:
            eventually(lambda: [(one.host, one.name) for one in target.dead_daemons()] == [(NODE, "node-agent")])
            if made.stage.name == VirtualStage.name:  # the head asks the machine room, which is outside of all hosts
                room = HostControlClient(made.stage.place.folder)
                assert room.dead_daemons() == list(target.dead_daemons())
        finally:
            injecting.clear(NODE)
        eventually(lambda: not target.dead_daemons())


# Resize
@every()
def test_partition_can_be_resized_without_a_new_file_or_it_is_refused(made: Made):
    if made.has(CanResize):
        partition, changes = made.stage.cluster().partitions[0].name, made.stage.changes() if made.stage.is_cloud else 0
        require(made.target, CanResize).resize(partition, 3)
        require(made.target, CanResize).resize(partition, 2)
        assert not made.stage.is_cloud or made.stage.changes() == changes + 2
    else:
        with pytest.raises(TargetError) as caught:
            require(made.target, CanResize)
        assert "cluster file" in caught.value.hint


@contract(Case.RESIZE)
def test_changed_file_adds_and_removes_nodes(made: Made):
    more = made.target.plan(made.stage.cluster(3))
    assert not more.empty and any(re.search(r"train-3|2 → 3|2 to 3|→ 3", line) for line in more.sentences())
    made.stage.apply(more)
    assert made.target.summary().nodes == 3 and (not made.stage.is_cloud or made.stage.size() == 3)
    assert tuple(each.name for each in made.target.status().nodes) == made.stage.nodes[:3]
    made.stage.apply(made.target.plan(made.stage.cluster(2)))
    assert tuple(each.name for each in made.target.status().nodes) == made.stage.nodes[:2]
    assert made.target.plan(made.stage.cluster(2)).empty


# Remove
@contract(Case.DOWN)
def test_destroy_leaves_nothing_and_may_be_repeated(made: Made):
    removal = made.target.removal()
    assert removal.jobs == () and removal.storage == ()
    assert removal.needs_yes is made.stage.is_cloud, "a script must say `--yes` before anything in a cloud is deleted"
    with made.stage.place.lock():
        assert made.target.destroy(lambda text: None)
    assert made.stage.target().summary().phase is ClusterPhase.GONE
    assert not made.stage.is_cloud or not made.stage.exists()
    assert not made.target.destroy(lambda text: None)


# What a platform does wrong
@contract(Case.HALF_FAILED, "stage")
def test_failed_creation_is_reported_with_its_logs_and_continued_by_the_next_up(stage: TargetStage):
    stage.fail(PlatformFault.CREATION)
    with pytest.raises(TargetError, match="failed") as caught:
        stage.up()
    folder = re.search(r"all events and logs are in (\S+);", caught.value.hint)
    assert folder is not None and any(Path(folder[1]).iterdir())
    assert stage.target().summary().phase is ClusterPhase.HALF_MADE
    assert stage.target().status().phase is ClusterPhase.HALF_MADE
    stage.repair()
    stage.up()
    assert stage.target().status().phase is ClusterPhase.UP
    assert stage.target().plan(stage.cluster()).empty


@contract(Case.HALF_FAILED, "stage")
def test_half_made_cluster_is_removed(stage: TargetStage):
    stage.fail(PlatformFault.CREATION)
    with pytest.raises(TargetError):
        stage.up()
    stage.repair()
    assert stage.target().destroy(lambda text: None)
    assert not stage.exists() and not stage.place.folder.exists()


@contract(Case.GONE, "stage")
def test_cluster_that_somebody_deleted_is_removed(stage: TargetStage):
    stage.up()
    stage.vanish()
    assert stage.target().status().phase is not ClusterPhase.UP
    assert stage.target().destroy(lambda text: None)
    assert not stage.target().destroy(lambda text: None)
    assert stage.target().summary().phase is ClusterPhase.GONE and not stage.exists()


@contract(Case.CREDENTIALS, "stage")
def test_wrong_credentials_are_named_with_the_fix_and_change_nothing(stage: TargetStage):
    stage.fail(PlatformFault.CREDENTIALS)
    with pytest.raises(DalsegnoError) as caught:
        stage.target().plan(stage.cluster())
    assert stage.credentials_fix in caught.value.hint
    assert stage.changes() == 0 and not stage.place.folder.exists()


@contract(Case.CREDENTIALS, "stage")
def test_status_never_raises_because_of_credentials(stage: TargetStage):
    if stage.is_cloud:
        stage.up()
    stage.fail(PlatformFault.CREDENTIALS)
    status = stage.target().status()
    assert status.phase in (ClusterPhase.UP, ClusterPhase.DEGRADED, ClusterPhase.GONE)
    assert len(status.nodes) == (2 if stage.is_cloud else 0)
    if status.phase is ClusterPhase.DEGRADED:
        assert "wrong credentials" in status.problems[0]


@contract(Case.THROTTLED, "stage")
def test_throttled_requests_are_repeated(stage: TargetStage):
    stage.fail(PlatformFault.THROTTLED)
    stage.up()
    assert stage.target().status().phase is ClusterPhase.UP


@contract(Case.CAPACITY, "stage")
def test_refused_capacity_is_named_with_the_fix_and_up_continues(stage: TargetStage):
    stage.fail(PlatformFault.CAPACITY)
    with pytest.raises(CloudError, match=r"(?i)capacity") as caught:
        stage.up()
    assert caught.value.refusal is CloudRefusal.CAPACITY
    assert "reserve capacity, or ask for fewer nodes" in caught.value.hint
    stage.repair()
    stage.up()
    assert stage.target().status().phase is ClusterPhase.UP


# The suite itself
def test_every_target_has_every_case_or_says_why_not():
    assert set(Case) == TESTED
    for kind in KINDS.values():
        for case, why in kind.lacks.items():
            assert why, (kind.name, case)
            if found := re.fullmatch(r"(tests/\S+\.py)::(\w+)", why):
                assert f"def {found[2]}(" in (ROOT / found[1]).read_text(), why


def test_every_cloud_has_all_cases_but_throttled_requests_on_oci():
    lacking = {name: set(kind.lacks) for name, kind in KINDS.items() if kind.is_cloud and kind.lacks}
    assert lacking == {"oci": {Case.THROTTLED}}

"""The state and the plan of a cluster on OCI. Pure, except for the functions that read and write the state file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.targets.base import ClusterPhase, named
from dalsegno.targets.cloud.consequences import ChangeEffect, CloudPlan, CloudResource, Minutes, SettingChange
from dalsegno.targets.cloud.cost import CostLine, HourlyCost, PriceTable
from dalsegno.targets.cloud.slurm_policy import has_people
from dalsegno.targets.folder import ClusterFolder, ClusterRole, read_facts
from dalsegno.targets.oci.resource_manager import StackOperation
from dalsegno.targets.oci.variables import (
    HEAD_BOOT_GIB,
    Setting,
    creates_lustre,
    policy_statements,
    settings_of,
    stack_table,
    uses_rdma,
)

BOOT_VOLUME = "oci-block-volume"  # name in the price table
LUSTRE = "oci-lustre"  # name in the price table; only the operator's own table can have a price for it
AT_ONCE = 8  # number of machines that are set up in parallel; sshd refuses some if more than ten log in at once


class OciStage(Enum):
    """The stage that the last `up` or `down` reached."""

    MAKING = "making"
    CHANGING = "changing"
    UP = "up"
    REMOVING = "removing"


@dataclass(frozen=True)
class OciState:
    """The content of the state file. `job` is the id of the Resource Manager job that was started last."""

    phase: OciStage
    stack: str = ""
    created_stack: bool = False
    job: str = ""
    job_operation: StackOperation = StackOperation.PLAN
    controller: str = ""  # address of the controller
    variables: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)  # tags of the cluster file that the stack has
    setup: str = ""  # digest of the scripts that have run on all machines; "" while a machine is not set up
    role: ClusterRole = ClusterRole.OPERATOR
    target: str = "oci"


PHASES = {
    OciStage.MAKING: ClusterPhase.HALF_MADE,
    OciStage.CHANGING: ClusterPhase.CHANGING,
    OciStage.UP: ClusterPhase.UP,
    OciStage.REMOVING: ClusterPhase.HALF_REMOVED,
}


@dataclass(frozen=True)
class OciPlan(CloudPlan):
    """The plan of one `up`: the stack's variables, the job of an earlier `up` that still runs, and the setup
    scripts."""

    variables: Mapping[str, Setting] = field(default_factory=dict)
    state: OciState | None = None
    scripts: Mapping[str, str] = field(default_factory=dict)  # the scripts that set up the machines
    installs: bool = False  # whether the machines lack Dal Segno, or have not run the newest setup scripts
    unfinished: bool = False  # whether an earlier `up` or `down` ended before the stack was complete

    @property
    def changes_stack(self) -> bool:
        return self.unfinished or not super().empty

    @property
    def empty(self) -> bool:
        return not (self.changes_stack or self.installs)

    @property
    def import_images(self) -> tuple[str, ...]:
        return () if self.empty else self.cluster.containers.images

    def _sentences(self) -> Iterator[str]:
        if self.unfinished and not self.fresh:
            yield "finishes what an earlier command began"
        if not super().empty or self.empty:
            yield from super()._sentences()
        if self.changes_stack:
            yield "runs a PLAN job, whose log is shown, and then the APPLY job of exactly that plan"
            yield "asks before the APPLY job if Terraform would destroy something"
        if self.installs:
            yield "installs Dal Segno, its agents and the RDMA variables of jobs on the machines; jobs continue"
            if has_people(self.cluster):
                yield "adds and changes accounts, users and QOS in Slurm's accounting"
        if self.import_images:
            yield f"imports {named('image', self.import_images)} on the controller"
        if super().empty and not self.empty:
            yield self.time.sentence()

    def details(self) -> list[str]:
        """Return the price of each part, what to check, the IAM policies of a first creation, and all variables."""
        shown = {name: value for name, value in self.variables.items() if not name.endswith("ssh_key")}
        lustre, compartment = creates_lustre(self.cluster), settings_of(self.cluster).compartment
        policies = policy_statements(compartment, lustre=lustre) if self.fresh else []
        return [
            *super().details(),
            *(f"IAM policy: {statement}" for statement in policies),
            *(f"{name} = {json.dumps(value)}" for name, value in shown.items()),
        ]


def read_oci_state(folder: ClusterFolder) -> OciState | None:
    return read_facts(OciState, folder.state)


def write_oci_state(folder: ClusterFolder, state: OciState) -> None:
    make_folder(folder.root)
    write_atomic(folder.state, json.dumps(facts_to_json(state), indent=1), 0o600)


def notes_of(cluster: Cluster) -> tuple[str, ...]:
    """Return what the stack does differently from the cluster file."""
    found = []
    if not settings_of(cluster).allowed_ips:
        found.append("sshd of the controller and the login node accepts all addresses; `oci.allowed_ips` limits them")
    if cluster.slurm.topology:
        how = "as release v3 always does" if settings_of(cluster).stack_version == "v3" else "with `rack_aware`"
        found.append(f"the stack tells Slurm which nodes share a rack, {how}; `nodes_per_switch` is ignored")
    if cluster.slurm.enforce:
        found.append(
            "`sacct_limits` of the stack enforces associations, limits, qos and safe, and no part of them alone"
        )
    if cluster.monitoring.prometheus:
        found.append("the stack sets up its own monitoring; `monitoring.prometheus` starts no second one")
    return tuple(found)


def find_variable_changes(
    before: Mapping[str, str], wanted: Mapping[str, str], release: str
) -> Iterator[SettingChange]:
    """Yield what differs from the variables of the last `up`, with the effect of each difference."""
    for store, mount in created_stores(before, release).items():
        if store not in created_stores(wanted, release):
            effect = ChangeEffect.LOSES_DATA
            yield SettingChange(f"{store} at {mount}", "created by the stack", "", effect, "all its files are deleted")
    for name in dict.fromkeys([*before, *wanted]):
        old, new = before.get(name, ""), wanted.get(name, "")
        if old != new:
            yield _variable_change(name, old, new)


def find_tag_changes(before: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[SettingChange]:
    """Yield the differences between the tags of the stack that an earlier `up` set and those of the cluster file."""
    for name in dict.fromkeys([*before, *wanted]):
        old, new = before.get(name, ""), wanted.get(name, "")
        if old != new:
            yield SettingChange(f"tag {name} of the stack", old, new, ChangeEffect.IN_PLACE)


def _variable_change(name: str, old: str, new: str) -> SettingChange:
    if name != "node_count":
        detail = "Terraform replaces nodes whose shape, image or boot volume changes; the PLAN job shows which"
        return SettingChange(name, old, new, ChangeEffect.ENDS_JOBS, detail)
    if old.isdecimal() and new.isdecimal() and int(new) < int(old):
        detail = "OCI chooses the nodes that leave; their jobs end, and their local files are lost"
        return SettingChange(name, old, new, ChangeEffect.LOSES_DATA, detail)
    return SettingChange(name, old, new, ChangeEffect.IN_PLACE)


def created_stores(variables: Mapping[str, str], release: str) -> dict[str, str]:
    """Return the mount points of the file systems that the stack creates with these variables, by their kind."""
    value = {each.setting: variables.get(each.name, "") for each in stack_table(release).values()}
    found = {}
    if value.get("storage") == "true" and value.get("new storage") in ("true", "new"):
        found["file storage"] = value.get("storage mount", "")
    if value.get("home") == "fss" or value.get("home on file storage") == "true":
        found["file storage of homes"] = "/home"
    if value.get("lustre") == "true" and value.get("new lustre") == "new":
        found["Lustre file system"] = value.get("lustre mount", "")
    return found


def new_resources(
    cluster: Cluster, before: Mapping[str, str], wanted: Mapping[str, str], *, fresh: bool
) -> Iterator[CloudResource]:
    """Yield what the stack creates: everything for a new cluster, and otherwise only file systems that are new."""
    own = settings_of(cluster)
    if fresh:
        yield CloudResource("controller", (own.head_instance,))
        if cluster.logins:
            yield CloudResource("login node", (own.login_instance or own.head_instance,))
        kind = "cluster network" if uses_rdma(cluster) else "instance pool"
        yield CloudResource(kind, (f"{len(cluster.nodes)} x {cluster.nodes[0].instance}",))
        if not own.vcn:
            yield CloudResource("virtual cloud network", (cluster.name,))
    known = {} if fresh else created_stores(before, own.stack_version)
    for store, mount in created_stores(wanted, own.stack_version).items():
        if store not in known:
            yield CloudResource("file system", (f"{store} at {mount}",))


def duration(cluster: Cluster, *, fresh: bool, changes_stack: bool) -> Minutes:
    """Return how long `up` takes. In Oracle's tutorial, the stack with two nodes takes 30 minutes."""
    rounds = -(-len(cluster.nodes) // AT_ONCE)
    setup = Minutes(rounds, 3 * rounds)
    if not changes_stack:
        return setup
    stack = Minutes(30, 60) if fresh else Minutes(10, 40)
    # The 30 minutes of the tutorial include the set-up of the first group of machines.
    return Minutes(stack.least + setup.least - 1, stack.most + setup.most - 3)


def cost_of(cluster: Cluster, prices: PriceTable) -> HourlyCost:
    """Return the price of the cluster per hour: machines, boot volumes and file systems that the stack creates."""
    own, nodes = settings_of(cluster), len(cluster.nodes)
    boot_gib = HEAD_BOOT_GIB + nodes * own.boot_volume_gib
    lines = [
        prices.instance(cluster.nodes[0].instance, nodes),
        prices.instance(own.head_instance),
        prices.resource(BOOT_VOLUME, boot_gib, "GiB of boot volumes"),
    ]
    if cluster.logins:
        count = len(cluster.logins)
        lines.append(prices.instance(own.login_instance or own.head_instance, count))
        lines.append(CostLine("boot volume of the login node", count, None))  # the stack's default size
    return HourlyCost((*lines, *_storage_cost(cluster, prices)))


def _storage_cost(cluster: Cluster, prices: PriceTable) -> Iterator[CostLine]:
    for each in cluster.storage:
        if each.source:
            continue
        if each.type == "lustre":
            yield prices.resource(LUSTRE, (each.size_mib or 0) / 1024, f"GiB of Lustre at {each.mount}")
        elif each.type == "fss":
            yield CostLine(f"file storage at {each.mount} (billed by its content)", 1, None)

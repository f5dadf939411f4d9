"""The state and the plan of a cluster on OCI. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.consequences import ChangeEffect, CloudPlan, SettingChange
from dalsegno.targets.cloud.cost import HourlyCost, PriceTable
from dalsegno.targets.folder import ClusterFolder, ClusterRole, read_facts
from dalsegno.targets.oci.resource_manager import StackOperation
from dalsegno.targets.oci.variables import Setting, settings_of


class OciStage(Enum):
    """How far the last `up` or `down` got."""

    MAKING = "making"
    CHANGING = "changing"
    UP = "up"
    REMOVING = "removing"


@dataclass(frozen=True)
class OciState:
    """The state file. `job` is the job of Resource Manager that was started last."""

    phase: OciStage
    stack: str = ""
    created_stack: bool = False
    job: str = ""
    job_operation: StackOperation = StackOperation.PLAN
    controller: str = ""  # address of the controller
    variables: Mapping[str, str] = field(default_factory=dict)
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
    """The plan of one `up`: the variables of the stack, and the job of an earlier `up` that still runs."""

    variables: Mapping[str, Setting] = field(default_factory=dict)
    state: OciState | None = None

    def _sentences(self) -> Iterator[str]:
        yield from super()._sentences()
        if not self.empty:
            yield "runs a PLAN job, whose log is shown, and then the APPLY job of exactly that plan"

    def details(self) -> list[str]:
        shown = {name: value for name, value in self.variables.items() if not name.endswith("ssh_key")}
        return [*super().details(), *(f"{name} = {json.dumps(value)}" for name, value in shown.items())]


def read_oci_state(folder: ClusterFolder) -> OciState | None:
    return read_facts(OciState, folder.state)


def find_variable_changes(before: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[SettingChange]:
    """Yield the variables that differ from those of the last `up`, with the effect of each."""
    for name in dict.fromkeys([*before, *wanted]):
        old, new = before.get(name, ""), wanted.get(name, "")
        if old == new:
            continue
        detail = "Terraform replaces nodes whose shape, image or boot volume changes; the PLAN job shows which"
        effect = ChangeEffect.IN_PLACE if name == "node_count" else ChangeEffect.ENDS_JOBS
        yield SettingChange(name, old, new, effect, "" if effect is ChangeEffect.IN_PLACE else detail)


def cost_of(cluster: Cluster, prices: PriceTable) -> HourlyCost:
    """Return what the cluster costs per hour."""
    own = settings_of(cluster)
    lines = [prices.instance(cluster.nodes[0].instance, len(cluster.nodes)), prices.instance(own.head_instance)]
    if cluster.logins:
        lines.append(prices.instance(own.login_instance or own.head_instance, len(cluster.logins)))
    return HourlyCost(tuple(lines))

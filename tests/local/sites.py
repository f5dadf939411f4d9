"""A local cluster's folder as `up` leaves it, without anything that runs."""

from pathlib import Path

from dalsegno.spec.facts import Cluster
from dalsegno.system.files import make_folder
from dalsegno.system.machine import MachineFacts
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.folder import write_applied
from dalsegno.targets.local.fault_access import LocalAccess
from dalsegno.targets.local.folder import ApplyStage, ClusterState, Folder, write_state
from dalsegno.targets.local.nodes import LocalNodes, open_nodes
from tests.local.test_desired import ROOT, cluster, put

SLURM = "slurm-wlm 22.05.8"


def folder_of(
    home: Path, there: Cluster | None = None, machine: MachineFacts = ROOT, phase: ApplyStage = ApplyStage.UP
) -> Folder:
    folder = Folder(home / "clusters" / "demo")
    there = there or cluster(2)
    make_folder(folder.secret, 0o700)
    for node in there.nodes:
        make_folder(folder.host(node.name))
    write_state(folder, ClusterState(phase, put(there, machine), SLURM))
    write_applied(folder, there)
    return folder


def nodes_of(home: Path) -> LocalNodes:
    return open_nodes(LocalRunner(), folder_of(home))


def access_to(home: Path) -> LocalAccess:
    return LocalAccess(nodes_of(home))

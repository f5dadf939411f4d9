"""Host files for mpirun and for scripts that read the names of a job's nodes, one in each line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import expand
from dalsegno.slurm.facts import NodeInfo

# Hosts of OCI's HPC stack have this folder. The stack gives each node a second name for its RDMA address.
STACK_FOLDER = "/etc/opt/oci-hpc"
RDMA_SUFFIX = "-rdma.local.rdma"


@dataclass(frozen=True)
class HostLine:
    """A node of a host file. `slots` is the number of processes for it: its GPUs, or its CPUs if it has no GPU."""

    name: str
    slots: int = 0


def lines_of_job(env: Mapping[str, str]) -> list[HostLine] | None:
    """Return the nodes of the job that this process belongs to; None outside of a job.

    Slurm's variables describe only the node of this process, so all nodes get its number of slots.
    """
    names = env.get("SLURM_JOB_NODELIST", "")
    slots = next(
        (env[name] for name in ("SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE") if env.get(name, "").isdigit()), "0"
    )
    return [HostLine(name, int(slots)) for name in expand(names)] if names else None


def lines_of_nodes(nodes: Iterable[NodeInfo], partition: str = "") -> list[HostLine]:
    """Return the nodes in service, of one partition or of all. Raise an error if there is none."""
    chosen = [node for node in nodes if not partition or partition in node.partitions]
    if partition and not chosen:
        raise DalsegnoError(f"there is no node in partition `{partition}`", hint="`sinfo` lists the partitions")
    found = [HostLine(node.name, node.gpus or node.cpus) for node in chosen if node.in_service]
    if not found:
        raise DalsegnoError("no node is in service", hint="`sinfo -R` shows why")
    return found


def render_hostfile(lines: Iterable[HostLine], *, slots: bool = False, suffix: str = "") -> str:
    """Return the host file: plain names, or names with the number of slots, as Open MPI reads them."""
    return "".join(f"{line.name}{suffix}{f' slots={line.slots}' if slots and line.slots else ''}\n" for line in lines)

"""The stack's own commands for partitions beside the first one, for an administrator on the controller. Pure.

The stack's Terraform creates one partition. Its programs add others, as clusters of their own that Terraform does not
know.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.hardware import find_instance
from dalsegno.spec.facts import Cluster, Node, Partition
from dalsegno.spec.layout import ALLOCATABLE

_BIN = "/opt/oci-hpc/bin"
_QUEUES = "/opt/oci-hpc/conf/queues.conf"


@dataclass(frozen=True)
class PartitionCommands:
    """What to run on the controller after `up`, and before `down`, which leaves these machines running."""

    add: tuple[str, ...]
    remove: str


def commands_for(cluster: Cluster, partition: Partition, release: str, image: str) -> PartitionCommands:
    """Return the commands for one more partition. `image` is that of its nodes: an OCID, or a marketplace listing."""
    name, count = partition.name, str(len(partition.nodes))
    node = next(each for each in cluster.nodes if each.name in partition.nodes)
    rdma = bool(find_instance(node.instance).nics)
    sizes = _sizes(node)
    if release != "v3":
        return _older_commands(name, count, node.instance, image, sizes, rdma=rdma)
    fields = {
        "partition": name,
        "default_partition": "false",
        "shape": node.instance,
        "rdma_enabled": str(rdma).lower(),
        "image_id" if image.startswith("ocid1.") else "marketplace_listing": image,
        **sizes,
    }
    update = ",".join(f"{key}={value}" for key, value in fields.items())
    return PartitionCommands(
        (
            _line("mgmt", "configurations", "create", "from-existing", "--configuration", "default", "--name", name),
            _line("mgmt", "configurations", "update", "--name", name, "--fields", update),
            "sudo mgmt configurations update-slurm",
            _line("mgmt", "clusters", "create", "--cluster", name, "--count", count, "--instancetype", name),
        ),
        _line("mgmt", "clusters", "delete", "--cluster", name),
    )


def _sizes(node: Node) -> dict[str, str]:
    """Return the cores and the memory of a flexible machine, from what Slurm may allocate of it; {} for others."""
    if not node.instance.endswith(".Flex"):
        return {}
    memory_gib = round(node.memory_mib / ALLOCATABLE / 1024)
    return {
        "instance_pool_ocpus": str(max(1, node.cpus // 2)),
        "instance_pool_custom_memory": "true",
        "instance_pool_memory": str(memory_gib),
    }


def _older_commands(
    name: str, count: str, shape: str, image: str, sizes: Mapping[str, str], *, rdma: bool
) -> PartitionCommands:
    """Return the commands of release 2.10, which keeps its partitions in a file."""
    machines = f"{name}-1-{name}"
    key = "image" if image.startswith("ocid1.") else "marketplace_listing"
    settings = {"shape": shape, key: image, "cluster_network": str(rdma).lower(), **sizes}
    shown = ", ".join(f"{setting} {value}" for setting, value in settings.items())
    return PartitionCommands(
        (
            f"sudo vi {_QUEUES}   # add a queue `{name}` with an instance type `{name}`: {shown}",
            f"{_BIN}/slurm_config.sh",
            _line(f"{_BIN}/create_cluster.sh", count, machines, name, name),
            "bash /opt/dalsegno-scripts/nodes.sh",
        ),
        _line(f"{_BIN}/delete_cluster.sh", machines),
    )


def _line(*words: str) -> str:
    return shlex.join(words)


def advice(cluster: Cluster, release: str, images: dict[str, str]) -> str:
    """Return a hint with the commands for all partitions after the first. `images` are by the name of the partition."""
    first, *others = cluster.partitions
    lines = [f"leave only `{first.name}` in the file, and run this on the controller after `up` (`dalsegno ssh head`):"]
    removals = []
    for partition in others:
        commands = commands_for(cluster, partition, release, images[partition.name])
        lines += [f"  {each}" for each in commands.add]
        removals.append(f"  {commands.remove}")
    return "\n".join([*lines, "before `down`, end their machines, which Terraform does not know:", *removals])

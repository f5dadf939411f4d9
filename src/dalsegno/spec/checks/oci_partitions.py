"""The stack's own commands for partitions beside the first one, for an administrator on the controller. Pure.

The stack's Terraform creates one partition. Its programs add others, as clusters of their own that Terraform does not
know.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.spec.layout import ALLOCATABLE, Size, catalog_instance, own_nodes, size_of
from dalsegno.spec.model import PartitionSpec
from dalsegno.spec.oci import Oci
from dalsegno.spec.platform_facts import image_name

_BIN = "/opt/oci-hpc/bin"
_QUEUES = "/opt/oci-hpc/conf/queues.conf"


@dataclass(frozen=True)
class PartitionCommands:
    """The commands to run on the controller: `add` after `up`, and `remove` before `down`.

    `down` itself leaves the machines of these partitions running.
    """

    add: tuple[str, ...]
    remove: str
    first: str = ""  # an instruction to edit a file before `add`, as the start of a sentence


def partition_commands(own: Oci, partition: PartitionSpec) -> PartitionCommands:
    """Return the commands for one more partition with nodes of its own."""
    name, count = partition.name, str(len(own_nodes(partition)))
    size, known = size_of(partition, "oci"), catalog_instance(partition)
    image = image_name(own.image, own.stack_version, gpus=bool(size.gpus))
    rdma = bool(known and known.nics)
    if own.stack_version != "v3":
        return _older_commands(name, count, size, image, rdma=rdma)
    fields = {
        "partition": name,
        "default_partition": "false",
        "shape": size.instance,
        "rdma_enabled": str(rdma).lower(),
        "image_id" if image.startswith("ocid1.") else "marketplace_listing": image,
        **_sizes(size),
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


def _sizes(size: Size) -> dict[str, str]:
    """Return the cores and the memory of a flexible machine, from what Slurm may allocate of it; {} for others."""
    if not size.instance.endswith(".Flex"):
        return {}
    return {
        "instance_pool_ocpus": str(max(1, size.cpus // 2)),
        "instance_pool_custom_memory": "true",
        "instance_pool_memory": str(round(size.memory_mib / ALLOCATABLE / 1024)),
    }


def _older_commands(name: str, count: str, size: Size, image: str, *, rdma: bool) -> PartitionCommands:
    """Return the commands of release 2.10, which keeps its partitions in a file."""
    machines = f"{name}-1-{name}"
    key = "image" if image.startswith("ocid1.") else "marketplace_listing"
    settings: Mapping[str, str] = {
        "shape": size.instance,
        key: image,
        "cluster_network": str(rdma).lower(),
        **_sizes(size),
    }
    shown = ", ".join(f"{setting} {value}" for setting, value in settings.items())
    return PartitionCommands(
        (
            f"{_BIN}/slurm_config.sh",
            _line(f"{_BIN}/create_cluster.sh", count, machines, name, name),
            "bash /opt/dalsegno-scripts/nodes.sh",
        ),
        _line(f"{_BIN}/delete_cluster.sh", machines),
        f"add a queue `{name}` with an instance type `{name}` to {_QUEUES} ({shown}), and then ",
    )


def _line(*words: str) -> str:
    return shlex.join(words)


def advice(own: Oci, partition: PartitionSpec) -> str:
    """Return a hint with the commands for a partition after the first."""
    commands = partition_commands(own, partition)
    return (
        f"remove it from the file; after `up`, on the controller (`dalsegno ssh head`), {commands.first}run "
        f"`{' && '.join(commands.add)}`; before `down`, end its machines, which Terraform does not know: "
        f"`{commands.remove}`"
    )

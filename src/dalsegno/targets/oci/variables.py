"""Turn a cluster file into the variables of Oracle's HPC stack, under the names of each release. Pure.

variables.csv has our settings and, for each release, the name and the type of the stack's variable.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.hardware import find_instance
from dalsegno.spec.facts import Cluster, Storage
from dalsegno.spec.platform_facts import OciFacts

Setting = str | bool | int
RELEASES = ("v2.10", "v3")
# The images that each release of the stack lists. Ubuntu needs an image of your own.
GPU_IMAGES = {"v2.10": "GPU_OL8_NV550", "v3": "GPU_OL8_NV570"}
HPC_IMAGE = "HPC_OL8"
PRIVILEGE_GID = 9876  # the stack's group whose members may run containers
HEAD_BOOT_GIB = 150
SECOND_MOUNT = "/fss"  # the stack's default for its file storage


@dataclass(frozen=True)
class StackVariable:
    """A variable of one release of the stack."""

    setting: str
    name: str
    type: str  # Terraform's type: string, bool or number


@cache
def stack_table(release: str) -> Mapping[str, StackVariable]:
    """Return the variables of a release by our setting. Settings that the release lacks are left out."""
    lines = Path(__file__).with_name("variables.csv").read_text(encoding="utf-8").splitlines()
    header = lines[0].split(",")
    at = header.index(release)
    rows = [line.split(",") for line in lines[1:]]
    return {row[0]: StackVariable(row[0], row[at], row[at + 1]) for row in rows if row[at]}


def settings_of(cluster: Cluster) -> OciFacts:
    """Return the facts of the `oci:` block."""
    if cluster.oci is None:
        raise TargetError(f"cluster {cluster.name} is not on OCI", hint="set `target: oci`")
    return cluster.oci


def stack_variables(cluster: Cluster, public_key: str, ad: str, tenancy: str) -> dict[str, Setting]:
    """Return the variables of the stack by name. Raise TargetError for what the stack cannot do."""
    refuse_unbuilt(cluster)
    own = settings_of(cluster)
    table = stack_table(own.stack_version)
    found = {**_machines(cluster, ad), **_place(own, cluster, public_key, ad, tenancy), **_software(cluster)}
    found |= _storage(cluster, own, ad)
    return {table[setting].name: value for setting, value in found.items() if setting in table}


def _place(own: OciFacts, cluster: Cluster, public_key: str, ad: str, tenancy: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {
        "region": own.region,
        "tenancy": own.tenancy or tenancy,
        "compartment": own.compartment,
        "ad": ad,
        "public key": public_key,
        "named": True,
        "name": cluster.name,
        "own network": bool(own.vcn),
        "allowed addresses": own.allowed_ips or "0.0.0.0/0",
    }
    if own.vcn:
        found |= {"network": own.vcn, "network compartment": own.compartment}
        found |= {"public subnet": own.public_subnet, "private subnet": own.private_subnet}
    return found


def _machines(cluster: Cluster, ad: str) -> dict[str, Setting]:
    own, partition = settings_of(cluster), cluster.partitions[0]
    shape = cluster.nodes[0].instance
    rdma = uses_rdma(cluster)
    found: dict[str, Setting] = {
        "head ad": ad,
        "head shape": own.head_instance,
        "head boot volume": HEAD_BOOT_GIB,
        "head backup": False,
        "head object storage": False,
        "login": bool(cluster.logins),
        "rdma": rdma,
        "rdma shape" if rdma else "pool shape": shape,
        "nodes": len(partition.nodes),
        "boot volume": own.boot_volume_gib,
        "hyperthreading": own.hyperthreading,
        "compute user": login_user(own),
        **_sized("head", own.head_cpus, own.head_memory_gib),
        **_image(cluster),
    }
    if cluster.logins:
        found |= {"login ad": ad, "login shape": own.login_instance or own.head_instance}
        found |= _sized("login", own.login_cpus, own.login_memory_gib)
    return found


def _sized(machine: str, cpus: int | None, memory_gib: int | None) -> dict[str, Setting]:
    found: dict[str, Setting] = {f"{machine} cores": max(1, cpus // 2)} if cpus else {}  # a core has two CPUs
    if memory_gib:
        found |= {f"{machine} sized memory": True, f"{machine} memory": memory_gib}
    return found


def _image(cluster: Cluster) -> dict[str, Setting]:
    own = settings_of(cluster)
    if own.image:
        return {"marketplace image": False, "image": own.image}
    listed = GPU_IMAGES[own.stack_version] if any(node.gpus for node in cluster.nodes) else HPC_IMAGE
    return {"marketplace image": True, "image version": listed}


def uses_rdma(cluster: Cluster) -> bool:
    """Return whether the nodes are in a cluster network: as the file says, or else if the shape has RDMA cards."""
    own = settings_of(cluster)
    return own.rdma if own.rdma is not None else bool(find_instance(cluster.nodes[0].instance).nics)


def login_user(own: OciFacts) -> str:
    """Return the user of the image that may log in and has sudo."""
    return "ubuntu" if own.os.startswith("ubuntu") else "opc"


def _software(cluster: Cluster) -> dict[str, Setting]:
    containers = bool(cluster.containers.enabled)
    return {
        "slurm": True,
        "partition": cluster.partitions[0].name,
        "rack aware": bool(cluster.slurm.topology),
        "enroot": containers,
        "pyxis": containers,
        "sudo for container users": False,  # the stack's default would make every user of containers root
        "directory": True,
        "health checks": cluster.health.mode != "off",
        "active health checks": cluster.health.mode == "auto",
        "monitoring": cluster.monitoring.enabled,
    }


def stack_home(cluster: Cluster) -> Storage | None:
    """Return the homes that the stack itself puts on file storage: those at /home. Other homes are a plain store."""
    return next((each for each in cluster.storage if each.home and each.type == "fss" and each.mount == "/home"), None)


def _stores(cluster: Cluster) -> list[Storage]:
    """Return the file systems of type fss or nfs beside the stack's own homes."""
    return [each for each in cluster.storage if each.type in ("fss", "nfs") and each is not stack_home(cluster)]


def _storage(cluster: Cluster, own: OciFacts, ad: str) -> dict[str, Setting]:
    on_file_storage = stack_home(cluster) is not None
    found: dict[str, Setting] = {
        "home on the head": not on_file_storage,
        "home on file storage": on_file_storage,
        "home": "fss" if on_file_storage else "nfs",
        "local disk": True,
        "redundancy": False,
        "storage": False,
    }
    stores = _stores(cluster)
    if on_file_storage and not stores:
        # The stack creates file storage for homes only if there is a second file system, so an empty one is added.
        stores = [Storage("fss", SECOND_MOUNT, "fss")]
    for each in [*stores, *cluster.storage]:
        if each in stores:
            found |= _file_storage(each, own, ad)
        elif each.type == "lustre":
            found |= _lustre(each)
    return found


def _file_storage(storage: Storage, own: OciFacts, ad: str) -> dict[str, Setting]:
    new: Setting = not storage.source
    if own.stack_version == "v3":
        new = "existing" if storage.source else "new"
    found: dict[str, Setting] = {"storage": True, "new storage": new, "storage mount": storage.mount}
    if storage.source:
        server, _, path = storage.source.partition(":")
        return {**found, "storage server": server, "storage path": path, "storage options": storage.options}
    return {**found, "storage ad": ad, "storage compartment": own.compartment, "storage path": storage.mount}


def _lustre(storage: Storage) -> dict[str, Setting]:
    found: dict[str, Setting] = {"lustre": True, "lustre mount": storage.mount}
    if storage.source:
        server, _, path = storage.source.partition(":")
        return {**found, "new lustre": "existing", "lustre server": server, "lustre path": path.strip("/")}
    return {**found, "new lustre": "new", "lustre size": (storage.size_mib or 0) // 1024}


def refuse_unbuilt(cluster: Cluster) -> None:
    """Raise for parts of the cluster file that the stack does not have, so that nobody relies on them."""
    own, stores = settings_of(cluster), _stores(cluster)
    lustre = [each for each in cluster.storage if each.type == "lustre"]
    parts = {  # a part of the cluster file -> whether it is used, and why the stack cannot do it
        "more than one partition": (
            len(cluster.partitions) > 1,
            "its Terraform creates one, and `down` would leave the machines of others, which cost money",
        ),
        "`spares`": (any(node.spare for node in cluster.nodes), "all its nodes are in the partition"),
        "`reservations`": (bool(cluster.reservations), "it names nodes only when they run"),
        "more than one login node": (len(cluster.logins) > 1, "its Terraform creates one"),
        "`slurm.rest`": (cluster.slurm.rest, "it has no variable for it"),
        "more than one file system of type fss or nfs": (
            len(stores) > 1,
            "it mounts one, beside homes of type fss at /home and Lustre",
        ),
        "a file system with `source` beside homes of type fss": (
            stack_home(cluster) is not None and any(each.source for each in stores),
            "it creates both file systems or none",
        ),
        "`storage` of type lustre": (bool(lustre) and own.stack_version == "v2.10", "only release v3 mounts Lustre"),
        "more than one file system of type lustre": (len(lustre) > 1, "it mounts one"),
        "`slurm.topology`": (
            bool(cluster.slurm.topology) and own.stack_version == "v3",
            "release v3 computes it from the network itself",
        ),
    }
    if found := [f"{name}: {why}" for name, (used, why) in parts.items() if used]:
        raise TargetError(
            f"the HPC stack of release {own.stack_version} cannot have {'; '.join(found)}",
            hint="remove it from the cluster file, and add it on the controller afterwards",
        )
    if not own.image and own.os != "ol8":
        raise TargetError(
            f"the marketplace has no image with {own.os} for the HPC stack",
            hint="set `oci: {os: ol8}`, or name your own image: `oci: {image: ocid1.image…}`",
        )


# Files for people who run Terraform themselves, and for the owner of the tenancy


def terraform_variables(variables: Mapping[str, Setting]) -> str:
    """Return terraform.tfvars.json."""
    return json.dumps(dict(variables), indent=1) + "\n"


def resource_manager_variables(variables: Mapping[str, Setting]) -> dict[str, str]:
    """Return the variables for Resource Manager, which accepts only text as values."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in variables.items()}


def policy_statements(compartment: str, group: str = "GROUP") -> list[str]:
    """Return the IAM policy statements that the stack needs. `compartment` is an OCID or a name."""
    place = f"compartment id {compartment}" if compartment.startswith("ocid1.") else f"compartment {compartment}"
    service = "allow service compute_management to"
    return [
        f"{service} use tag-namespace in {place}",
        f"{service} manage compute-management-family in {place}",
        f"{service} read app-catalog-listing in {place}",
        f"allow group {group} to manage all-resources in {place}",
    ]


def user_commands(cluster: Cluster) -> list[str]:
    """Return the commands that add the users of the cluster file to the stack's directory, on the head node.

    The stack's command asks for a password, which nobody needs afterwards: people log in with their keys.
    """
    found = []
    for user in cluster.users:
        containers = ["--gid", str(PRIVILEGE_GID)] if cluster.containers.enabled else []
        found.append(shlex.join(["cluster", "user", "add", user.name, *containers]))
        # As the user: root must not follow links in a folder of the user.
        become = f"sudo -u {user.name}"
        found += [f"{become} mkdir -p -m 700 ~{user.name}/.ssh"] if user.ssh_keys else []
        found += [
            f"echo {shlex.quote(key)} | {become} tee -a ~{user.name}/.ssh/authorized_keys" for key in user.ssh_keys
        ]
    return found

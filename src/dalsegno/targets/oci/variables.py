"""Turn a cluster file into the variables of Oracle's HPC stack, with the names of each release. Pure.

variables.csv lists our settings and, for each release, the name and the type of the stack's variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.hardware import find_instance
from dalsegno.spec.facts import Cluster, Storage
from dalsegno.spec.platform_facts import OciFacts, image_name

Setting = str | bool | int
RELEASES = ("v2.10", "v3")
HEAD_BOOT_GIB = 150
SECOND_MOUNT = "/fss"  # default mount point of the stack's file storage


@dataclass(frozen=True)
class StackVariable:
    """A variable of one release of the stack."""

    setting: str
    name: str
    type: str  # Terraform's type: string, bool or number


@cache
def stack_table(release: str) -> Mapping[str, StackVariable]:
    """Return the variables of a release, by the name of our setting. Settings that the release does not have are left
    out."""
    lines = Path(__file__).with_name("variables.csv").read_text(encoding="utf-8").splitlines()
    header = lines[0].split(",")
    at = header.index(release)
    rows = [line.split(",") for line in lines[1:]]
    return {row[0]: StackVariable(row[0], row[at], row[at + 1]) for row in rows if row[at]}


def settings_of(cluster: Cluster) -> OciFacts:
    """Return the settings of the `oci:` section."""
    if cluster.oci is None:
        raise TargetError(f"cluster {cluster.name} is not on OCI", hint="set `target: oci`")
    return cluster.oci


def stack_variables(cluster: Cluster, public_key: str, ad: str, tenancy: str) -> dict[str, Setting]:
    """Return the variables of the stack by name."""
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
    if not rdma and shape.endswith(".Flex"):
        found |= _sized("pool", own.pool_cpus, own.pool_memory_gib)
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
    image = image_name(own.image, own.stack_version, gpus=any(node.gpus for node in cluster.nodes))
    if own.image:
        return {"marketplace image": False, "image": image}
    return {"marketplace image": True, "image version": image}


def uses_rdma(cluster: Cluster) -> bool:
    """Return whether the nodes are in a cluster network: the value of `oci.rdma`, or else whether the shape has RDMA
    cards."""
    own = settings_of(cluster)
    return own.rdma if own.rdma is not None else bool(find_instance(cluster.nodes[0].instance).nics)


def login_user(own: OciFacts) -> str:
    """Return the image's login user, who has sudo."""
    return "ubuntu" if own.os.startswith("ubuntu") else "opc"


def _software(cluster: Cluster) -> dict[str, Setting]:
    containers = bool(cluster.containers.enabled)
    return {
        "slurm": True,
        "partition": cluster.partitions[0].name,
        "rack aware": bool(cluster.slurm.topology),
        # Sent only if it is on: a new variable in the stack of a running cluster would look like a change.
        **({"limits": True} if cluster.slurm.enforce else {}),
        "enroot": containers,
        "pyxis": containers,
        "sudo for container users": False,  # with the stack's default, every user of containers would be root
        "directory": True,
        "health checks": cluster.health.mode != "off",
        "active health checks": cluster.health.mode == "auto",
        "monitoring": cluster.monitoring.enabled,
    }


def stack_home(cluster: Cluster) -> Storage | None:
    """Return the storage of /home if the stack itself puts home folders on file storage. Homes elsewhere are ordinary
    storage."""
    return next((each for each in cluster.storage if each.home and each.type == "fss" and each.mount == "/home"), None)


def _stores(cluster: Cluster) -> list[Storage]:
    """Return the storage of type fss or nfs, without the stack's own home folders."""
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
        # The stack puts home folders on file storage only if there is a second file system. So an empty one is added.
        stores = [Storage("fss", SECOND_MOUNT, "fss")]
    for each in [*stores, *cluster.storage]:
        if each in stores:
            found |= _file_storage(each, own, ad)
        elif each.type == "lustre":
            found |= _lustre(each, own, ad)
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


def _lustre(storage: Storage, own: OciFacts, ad: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {"lustre": True, "lustre mount": storage.mount}
    if storage.source:
        server, _, path = storage.source.partition(":")
        return {**found, "new lustre": "existing", "lustre server": server, "lustre path": path.strip("/")}
    found |= {"new lustre": "new", "lustre ad": ad, "lustre compartment": own.compartment}
    if storage.throughput_mb_per_s_per_tib:
        found |= {"lustre tier": f"MBPS_PER_TB_{storage.throughput_mb_per_s_per_tib}"}
    return {**found, "lustre size": (storage.size_mib or 0) // 1024}


# Files for people who run Terraform themselves, and for the owner of the tenancy


def terraform_variables(variables: Mapping[str, Setting]) -> str:
    """Return terraform.tfvars.json."""
    return json.dumps(dict(variables), indent=1) + "\n"


def resource_manager_variables(variables: Mapping[str, Setting]) -> dict[str, str]:
    """Return the variables as text, because Resource Manager accepts no other values."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in variables.items()}


def policy_statements(compartment: str, group: str = "GROUP", *, lustre: bool = False) -> list[str]:
    """Return the IAM policy statements that the stack needs. With `lustre`, they allow a Lustre file system, too.

    `compartment` is an OCID or a name.
    """
    place = f"compartment id {compartment}" if compartment.startswith("ocid1.") else f"compartment {compartment}"
    service = "allow service compute_management to"
    return [
        f"{service} use tag-namespace in {place}",
        f"{service} manage compute-management-family in {place}",
        f"{service} read app-catalog-listing in {place}",
        f"allow group {group} to manage all-resources in {place}",
        *(["allow service lustrefs to use virtual-network-family in tenancy"] if lustre else []),
    ]


def creates_lustre(cluster: Cluster) -> bool:
    return any(each.type == "lustre" and not each.source for each in cluster.storage)

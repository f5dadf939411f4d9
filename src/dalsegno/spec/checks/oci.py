"""Check for settings that Oracle's HPC stack or OCI would refuse, often only after minutes."""

from __future__ import annotations

import re

from dalsegno.spec.checks.oci_partitions import advice
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.layout import catalog_instance, login_nodes
from dalsegno.spec.model import ClusterSpec, PartitionSpec, StorageSpec
from dalsegno.spec.oci import Oci
from dalsegno.spec.platform_facts import LUSTRE_TIERS, OLDER_RDMA_SHAPES

# How availability domains and OCIDs write some regions -> the region's own name
_REGION_KEYS = {"phx": "us-phoenix-1", "iad": "us-ashburn-1", "us-ashburn": "us-ashburn-1"}
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_WITH_REGION = ("vcn", "public_subnet", "private_subnet", "image", "stack")
# Sizes of Lustre file systems, in GB: https://docs.oracle.com/en-us/iaas/Content/lustre/file-system-capacity.htm
_LUSTRE_FIRST, _LUSTRE_STEP = 31_200, 10_400
_LUSTRE_LARGE, _LUSTRE_LARGE_STEP = 124_800, 41_600


def check_oci(spec: ClusterSpec, report: Problems) -> None:
    """Check the section `oci`, and what the stack cannot have of the other sections."""
    own = spec.oci
    if spec.target != "oci" or own is None or not report.whole("target"):
        return
    _check_place(own, report)
    _check_network(own, spec, report)
    _check_image(own, report)
    _check_partitions(own, spec, report)
    if len(login_nodes(spec)) > 1:
        what = f"`login.count` is {spec.login.count}, but the HPC stack's Terraform creates one login node at most"
        report.add(spec.login, "count", what, "write `count: 1`; more people can share it", reads=("names",))
    _check_storage(own, spec, report)


def _check_place(own: Oci, report: Problems) -> None:
    """Check that the availability domain and all ids are in the region."""
    places = {field: _region_of_id(getattr(own, field) or "") for field in _WITH_REGION}
    places["ad"] = _region_of_domain(own.ad)
    for field, region in places.items():
        if region and region != own.region:
            what = f"`oci.{field}` is in region `{region}`, but `oci.region` is `{own.region}`"
            report.add(own, field, what, f"name one in {own.region}, or write `region: {region}`", reads=("region",))


def _region_of_domain(name: str) -> str:
    """Return the region of an availability domain such as xYzA:EU-FRANKFURT-1-AD-1; "" if its name does not say it."""
    return _known_region(re.sub(r"-AD-\d$", "", name.rpartition(":")[2]))


def _region_of_id(ocid: str) -> str:
    """Return the region in an OCID such as ocid1.vcn.oc1.iad.aaaa; "" if it has none, or one that is not known."""
    return _known_region((ocid.split(".") + [""] * 4)[3])


def _known_region(text: str) -> str:
    lower = text.lower()
    return _REGION_KEYS.get(lower, lower if _REGION.fullmatch(lower) else "")


def _check_network(own: Oci, spec: ClusterSpec, report: Problems) -> None:
    topology = spec.slurm.topology
    if topology and topology.switches:
        what = "`switches` name nodes, but on oci the nodes have names only when they run"
        hint = "write `topology: {nodes_per_switch: 1}`: the HPC stack finds the racks itself"
        report.add(topology, "switches", what, hint)
    subnets = [field for field in ("public_subnet", "private_subnet") if getattr(own, field)]
    if subnets and not own.vcn:
        what = f"`oci.{subnets[0]}` is given without the `vcn` it belongs to"
        report.add(own, subnets[0], what, "add `vcn:`, or leave the subnets out", reads=("vcn",))


def _check_image(own: Oci, report: Problems) -> None:
    if own.image is None and own.os != "ol8":
        what = f"the marketplace has no image with {own.os} for the HPC stack"
        report.add(own, "os", what, "write `os: ol8`, or name your own image: `image: ocid1.image…`", reads=("image",))


def _check_partitions(own: Oci, spec: ClusterSpec, report: Problems) -> None:
    for partition in spec.partitions[1:]:
        what = f"the HPC stack's Terraform creates one partition, and `{partition.name}` is another one"
        report.add(partition, "name", what, _instead(own, partition, report))
    if not spec.partitions or not report.whole("partitions"):
        return
    shape, known = spec.partitions[0].instance, catalog_instance(spec.partitions[0])
    if shape and known is None and own.rdma is None:
        what = f"the catalog does not have `{shape}`, so nothing says whether its nodes have an RDMA network"
        report.add(own, "rdma", what, "add `rdma: true` or `rdma: false` below `oci:`")
    rdma = own.rdma if own.rdma is not None else bool(known and known.nics)
    if own.stack_version == "v2.10" and rdma and shape and shape not in OLDER_RDMA_SHAPES:
        what = f"the HPC stack of release v2.10 does not know the RDMA network of `{shape}`"
        hint = "use a release v3: `oci: {stack_version: v3}`, with its `template`"
        report.add(spec.partitions[0], "instance", what, hint)


def _instead(own: Oci, partition: PartitionSpec, report: Problems) -> str:
    if partition.nodes_from:
        return "remove it: the stack writes slurm.conf, and would drop a second partition of the same nodes"
    if not partition.instance or not partition.nodes or not report.whole("partitions"):
        return "remove it; the stack's own programs on the controller add partitions"
    return advice(own, partition)


def _check_storage(own: Oci, spec: ClusterSpec, report: Problems) -> None:
    """Check that the stack can mount all storage: homes on file storage at /home, one Lustre, and one other file
    system."""
    homes = [each for each in spec.storage if each.home and each.type == "fss" and each.mount == "/home"]
    stores = [each for each in spec.storage if each.type in ("fss", "nfs") and each not in homes]
    lustre = [each for each in spec.storage if each.type == "lustre"]
    for other in stores[1:]:
        what = f"the HPC stack mounts one file system of type fss or nfs, and `{other.name}` is another one"
        hint = "remove it; homes of type fss at /home and, with v3, Lustre are possible beside it"
        report.add(other, "type", what, hint)
    for store in stores[:1]:
        if homes and store.source:
            what = f"storage `{store.name}` exists, but beside new homes the HPC stack creates both file systems"
            hint = f"remove `source`, or mount the homes elsewhere than /home, or remove `{store.name}`"
            report.add(store, "source", what, hint)
    for other in lustre[1:]:
        what = f"the HPC stack mounts one file system of type lustre, and `{other.name}` is another one"
        report.add(other, "type", what, "remove it")
    for storage in spec.storage:
        if storage.type in ("fss", "lustre") and storage.source and ":/" not in storage.source:
            example = "10.0.0.9@tcp:/lustre" if storage.type == "lustre" else "10.0.0.5:/export"
            what = f"the source of storage `{storage.name}` names no server and path: `{storage.source}`"
            report.add(storage, "source", what, f"it looks like `{example}`", reads=("type",))
    for storage in lustre[:1]:
        _check_lustre(storage, own, report)


def _check_lustre(storage: StorageSpec, own: Oci, report: Problems) -> None:
    if own.stack_version == "v2.10":
        what = f"storage `{storage.name}` is of type lustre, which the HPC stack of release v2.10 cannot mount"
        report.add(storage, "type", what, "use a release v3: `oci: {stack_version: v3}`, with its `template`")
    gib = (storage.size or 0) / 1024
    if storage.size and not storage.source and gib != (right := lustre_size(gib)):
        what = f"storage `{storage.name}` is {gib:g}G, but OCI has Lustre of 31200G, in steps of 10400G up to 124800G"
        hint = f"write `{right}G`; from 124800G on, sizes are multiples of 41600G"
        report.add(storage, "size", what, hint, reads=("source", "type"))
    if storage.throughput is not None and storage.throughput not in LUSTRE_TIERS:
        what = f"storage `{storage.name}` cannot have the throughput {storage.throughput}"
        choices = ", ".join(map(str, LUSTRE_TIERS))
        report.add(storage, "throughput", what, f"choose one of {choices}", reads=("type",))


def lustre_size(wanted: float) -> int:
    """Return the smallest possible size of a Lustre file system that is at least `wanted`, in GB."""
    step = _LUSTRE_STEP if wanted <= _LUSTRE_LARGE else _LUSTRE_LARGE_STEP
    return max(_LUSTRE_FIRST, -int(-wanted // step) * step)

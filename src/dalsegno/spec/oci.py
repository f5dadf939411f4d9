"""Settings of the OCI target: `oci:`, a Resource Manager stack of the HPC kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dalsegno.spec.aws import Cidr, Region, Tags
from dalsegno.spec.own_machines import File
from dalsegno.spec.patterns import shaped
from dalsegno.spec.quantities import SizeMiB
from dalsegno.spec.section import Section

_OCID = r"ocid1\.{kind}\.[a-z0-9]{{1,20}}\.[a-z0-9-]{{0,40}}\.[a-z0-9]{{1,100}}"

CompartmentId = Annotated[
    str, shaped(_OCID.format(kind="(compartment|tenancy)"), "ocid1.compartment.oc1..aaaaaaaaexample")
]
TenancyId = Annotated[str, shaped(_OCID.format(kind="tenancy"), "ocid1.tenancy.oc1..aaaaaaaaexample")]
VcnId = Annotated[str, shaped(_OCID.format(kind="vcn"), "ocid1.vcn.oc1.eu-frankfurt-1.aaaaaaaaexample")]
SubnetId = Annotated[str, shaped(_OCID.format(kind="subnet"), "ocid1.subnet.oc1.eu-frankfurt-1.aaaaaaaaexample")]
ImageId = Annotated[str, shaped(_OCID.format(kind="image"), "ocid1.image.oc1.eu-frankfurt-1.aaaaaaaaexample")]
StackId = Annotated[str, shaped(_OCID.format(kind="ormstack"), "ocid1.ormstack.oc1.eu-frankfurt-1.aaaaaaaaexample")]
DomainName = Annotated[str, shaped(r"([A-Za-z0-9]{1,8}:)?[A-Za-z0-9-]{1,40}-AD-\d", "xYzA:EU-FRANKFURT-1-AD-1")]


class Oci(Section):
    """Oracle Cloud Infrastructure with the HPC stack."""

    region: Region = Field(description="OCI region: eu-frankfurt-1.")
    compartment: CompartmentId = Field(description="OCID of the compartment everything is made in.")
    tenancy: TenancyId | None = Field(default=None, description="OCID of the tenancy; else from ~/.oci/config.")
    ad: DomainName | None = Field(default=None, description="Availability domain; else one that has the shape.")
    profile: Annotated[str, shaped(r"[A-Za-z0-9_-]{1,64}", "DEFAULT")] = Field(
        default="DEFAULT", description="Profile in ~/.oci/config."
    )
    ssh_key: File = Field(
        default="~/.ssh/id_ed25519.pub", description="Public key file that may log in to the head node."
    )
    image: ImageId | None = Field(default=None, description="Your own image; else the marketplace's.")
    os: Literal["ubuntu2204", "ubuntu2404", "ol8", "ol9"] = Field(
        default="ubuntu2204", description="Marketplace image."
    )
    vcn: VcnId | None = Field(default=None, description="Existing network; else one is made.")
    public_subnet: SubnetId | None = Field(default=None, description="Subnet of head and login nodes; needs vcn.")
    private_subnet: SubnetId | None = Field(default=None, description="Subnet of compute nodes; needs vcn.")
    allowed_ips: Cidr | None = Field(default=None, description="Who may reach the head node's sshd.")
    rdma: bool | None = Field(default=None, description="Cluster network; else by the shape.")
    boot_volume: SizeMiB = Field(default=250 * 1024, description="Boot volume of compute nodes.")
    hyperthreading: bool = Field(default=True, description="Two CPUs per core.")
    stack: StackId | None = Field(default=None, description="Stack that exists already.")
    tags: Tags = Field(default={}, description="Free-form tags on everything made.")

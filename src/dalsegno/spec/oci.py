"""The section of `target: oci`, which uses the HPC stack of Resource Manager."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dalsegno.spec.section import Section
from dalsegno.spec.targets import Cidr, File, Tags
from dalsegno.spec.values import SizeMiB, shaped

_OCID = r"ocid1\.{kind}\.[a-z0-9]{{1,20}}\.[a-z0-9-]{{0,40}}\.[a-z0-9]{{1,100}}"

CompartmentId = Annotated[
    str, shaped(_OCID.format(kind="(compartment|tenancy)"), "ocid1.compartment.oc1..aaaaaaaaexample")
]
TenancyId = Annotated[str, shaped(_OCID.format(kind="tenancy"), "ocid1.tenancy.oc1..aaaaaaaaexample")]
VcnId = Annotated[str, shaped(_OCID.format(kind="vcn"), "ocid1.vcn.oc1.eu-frankfurt-1.aaaaaaaaexample")]
OciSubnetId = Annotated[str, shaped(_OCID.format(kind="subnet"), "ocid1.subnet.oc1.eu-frankfurt-1.aaaaaaaaexample")]
ImageId = Annotated[str, shaped(_OCID.format(kind="image"), "ocid1.image.oc1.eu-frankfurt-1.aaaaaaaaexample")]
StackId = Annotated[str, shaped(_OCID.format(kind="ormstack"), "ocid1.ormstack.oc1.eu-frankfurt-1.aaaaaaaaexample")]
DomainName = Annotated[str, shaped(r"([A-Za-z0-9]{1,8}:)?[A-Za-z0-9-]{1,40}-AD-\d", "xYzA:EU-FRANKFURT-1-AD-1")]

OciRegion = Annotated[str, shaped(r"[a-z]{2}(-[a-z]+)+-\d", "eu-frankfurt-1")]


class Oci(Section):
    """Oracle Cloud Infrastructure with the HPC stack."""

    region: OciRegion = Field(description="OCI region: eu-frankfurt-1.")
    compartment: CompartmentId = Field(description="OCID of the compartment for all created resources.")
    tenancy: TenancyId | None = Field(default=None, description="OCID of the tenancy. Default: from ~/.oci/config.")
    ad: DomainName = Field(description="Availability domain. `oci iam availability-domain list` shows their names.")
    profile: Annotated[str, shaped(r"[A-Za-z0-9_-]{1,64}", "DEFAULT")] = Field(
        default="DEFAULT", description="Profile in ~/.oci/config."
    )
    ssh_key: File = Field(default="~/.ssh/id_ed25519.pub", description="Public key file for login to the head node.")
    image: ImageId | None = Field(default=None, description="Custom image. Default: the marketplace image.")
    os: Literal["ubuntu2204", "ubuntu2404", "ol8", "ol9"] = Field(
        default="ol8", description="Operating system of the image. The marketplace has ol8; others need `image`."
    )
    vcn: VcnId | None = Field(default=None, description="Existing network (VCN). Default: a new one.")
    public_subnet: OciSubnetId | None = Field(default=None, description="Subnet of head and login nodes; needs vcn.")
    private_subnet: OciSubnetId | None = Field(default=None, description="Subnet of compute nodes; needs vcn.")
    allowed_ips: Cidr | None = Field(
        default=None, description="Addresses that may reach the head node's sshd. By default, all addresses."
    )
    rdma: bool | None = Field(default=None, description="Use a cluster network. Default: depends on the shape.")
    boot_volume: SizeMiB = Field(default=250 * 1024, description="Boot volume size of compute nodes.")
    hyperthreading: bool = Field(default=True, description="Two CPUs per core.")
    stack: StackId | None = Field(default=None, description="Existing stack.")
    stack_version: Literal["v2.10", "v3"] = Field(
        default="v3", description="Release of the HPC stack, whose variables differ."
    )
    template: File | None = Field(
        default=None, description="Terraform files of the HPC stack, as a zip file. Default: `stack` has them."
    )
    tags: Tags = Field(
        default={},
        max_length=9,
        description="Free-form tags on the stack. What its Terraform creates does not get them.",
    )

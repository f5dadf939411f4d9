"""Settings of the targets that use machines you have: `local:` (this one) and `ssh:` (hosts you can reach)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dalsegno.hostlist import expand
from dalsegno.spec.names import AbsolutePath, Label, PartitionName, PlainName, UserName, matching, shaped
from dalsegno.spec.quantities import Seconds, SizeMiB
from dalsegno.spec.section import Section, fault, show

# No leading dash: ssh would read an option.
_ADDRESS = r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,252}(\[[0-9,-]{1,200}\][A-Za-z0-9_.:-]{0,100})?"
_HOST_KEY = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}(\[[0-9,-]{1,200}\])?"
_FILE = r"[A-Za-z0-9_./~][A-Za-z0-9_./@%+=~-]{0,254}"
_JUMP = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}(:\d{1,5})?"
_LARGEST, _SMALLEST = 8, 29  # prefix lengths


def _subnet(value: str) -> str:
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError:
        raise fault(f"is not a subnet: {show(value)}", "write `10.77.0.0/16`") from None
    if not _LARGEST <= network.prefixlen <= _SMALLEST:
        raise fault(f"must be between /{_LARGEST} and /{_SMALLEST}, not {show(value)}", "write `10.77.0.0/16`")
    return str(network)


def _address_only(value: Any) -> Any:
    """`train-1: 10.0.0.1` is short for `train-1: {address: 10.0.0.1}`."""
    return {"address": value} if isinstance(value, str) else value


Address = Annotated[str, matching(_ADDRESS, "write a host name or an address")]
HostKey = Annotated[str, matching(_HOST_KEY, "write a node's name: `train-1`, `train-[1-4]`")]
File = Annotated[str, matching(_FILE, "write a path, such as `~/.ssh/id_ed25519`")]
Jump = Annotated[str, matching(_JUMP, "write `user@bastion.example.com`")]
Port = Annotated[int, Field(ge=1, le=65535)]


class LocalSpec(Section):
    """Real Slurm on this machine."""

    hosts: Literal["auto", "virtual", "loopback"] = Field(
        default="auto",
        description="virtual: a namespace per node (root); loopback: processes on ports; auto: the best we may.",
    )
    gpus: Literal["auto", "simulated", "real"] = Field(
        default="auto", description="real: the machine's own; simulated: device files; auto: real where there are any."
    )
    subnet: Annotated[str, AfterValidator(_subnet)] = Field(
        default="", description="Subnet of the virtual hosts; left out, a free one is chosen."
    )


class SshHostSpec(Section):
    """How one machine is reached, where it differs from the rest."""

    address: Address = Field(default="", description="Host name or address; else the node's name.")
    user: UserName | None = Field(default=None, description="User to log in as.")
    port: Port | None = Field(default=None, description="Port of its sshd.")
    key: File | None = Field(default=None, description="Private key file.")
    jump: Jump | None = Field(default=None, description="Host to go through.")


class Ssh(Section):
    """Machines that are there already and are reached over SSH."""

    hosts: dict[
        HostKey, Annotated[SshHostSpec, BeforeValidator(_address_only, json_schema_input_type=str | SshHostSpec)]
    ] = Field(default={}, description="Node name to address: {head: 10.0.0.1, 'train-[1-4]': '10.0.0.[11-14]'}.")
    user: UserName = Field(default="root", description="User to log in as; needs sudo if it is not root.")
    port: Port = Field(default=22, description="Port of sshd.")
    key: File | None = Field(default=None, description="Private key file; else ssh's own choice.")
    jump: Jump | None = Field(default=None, description="Host to go through: user@bastion.")


# ---- Settings of the AWS targets: `parallelcluster:` and `hyperpod:`.


_ARN = r"arn:aws[a-z-]*:{service}:[a-z0-9-]*:\d{{12}}:{rest}"

Region = Annotated[str, shaped(r"[a-z]{2}(-[a-z]+)+-\d", "us-east-1")]
SubnetId = Annotated[str, shaped(r"subnet-[0-9a-f]{8,17}", "subnet-0123456789abcdef0")]
SecurityGroupId = Annotated[str, shaped(r"sg-[0-9a-f]{8,17}", "sg-0123456789abcdef0")]
ReservationId = Annotated[str, shaped(r"cr-[0-9a-f]{8,17}", "cr-0123456789abcdef0")]
AmiId = Annotated[str, shaped(r"ami-[0-9a-f]{8,17}", "ami-0123456789abcdef0")]
KeyName = Annotated[str, shaped(r"[A-Za-z0-9_.@-]{1,255}", "my-key")]
Zone = Annotated[str, shaped(r"[a-z]{2}(-[a-z]+)+-\d[a-z]|[a-z]{3,4}\d-az\d", "us-east-1a")]
Bucket = Annotated[str, shaped(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", "my-bucket")]
Cidr = Annotated[str, shaped(r"\d{1,3}(\.\d{1,3}){3}/\d{1,2}|pl-[0-9a-f]{8,17}", "203.0.113.0/24")]
RoleArn = Annotated[
    str, shaped(_ARN.format(service="iam", rest="role/.{1,512}"), "arn:aws:iam::123456789012:role/hyperpod")
]
SecretArn = Annotated[
    str,
    shaped(
        _ARN.format(service="secretsmanager", rest="secret:.{1,512}"),
        "arn:aws:secretsmanager:us-east-1:123456789012:secret:slurm-db",
    ),
]
PolicyArn = Annotated[str, shaped(r"arn:aws[a-z-]*:iam::(aws|\d{12}):policy/.{1,512}", "arn:aws:iam::aws:policy/…")]
TrainingPlanArn = Annotated[
    str,
    shaped(
        _ARN.format(service="sagemaker", rest="training-plan/.{1,256}"),
        "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p5",
    ),
]
CapacityType = Literal["ONDEMAND", "SPOT", "CAPACITY_BLOCK"]
Tags = dict[Label, Label]


class Database(Section):
    """A MySQL server for Slurm's accounting; left out, one runs on the head node."""

    uri: Annotated[str, shaped(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?", "db.example.com:3306")] = Field(
        description="Host and port."
    )
    user: Annotated[str, shaped(r"[A-Za-z0-9_]{1,32}", "slurm")] = Field(description="Database user.")
    password_secret: SecretArn = Field(description="Secrets Manager ARN of its password.")


class QueueSpec(Section):
    """What differs for one partition."""

    capacity_type: CapacityType | None = Field(default=None, description="ONDEMAND, SPOT or CAPACITY_BLOCK.")
    capacity_reservation: ReservationId | None = Field(default=None, description="Capacity reservation or block.")
    subnets: list[SubnetId] = Field(default=[], description="Subnets of its nodes.")
    placement_group: bool | None = Field(default=None, description="Keep the nodes close to each other.")
    max_count: int | None = Field(
        default=None, ge=1, description="Grow to so many nodes on demand; `nodes` always run."
    )


class ParallelCluster(Section):
    """AWS ParallelCluster."""

    region: Region = Field(description="AWS region.")
    os: Literal["alinux2023", "ubuntu2204", "ubuntu2404", "rhel8", "rocky8", "rhel9", "rocky9"] = Field(
        default="ubuntu2204", description="Operating system of all machines."
    )
    availability_zone: Zone | None = Field(default=None, description="Zone of a network that is made for you.")
    head_subnet: SubnetId | None = Field(default=None, description="Subnet of the head node; else a network is made.")
    subnets: list[SubnetId] = Field(default=[], description="Subnets of the compute nodes; else as the head's.")
    key: KeyName | None = Field(default=None, description="EC2 key pair (ed25519); without one, connect with SSM.")
    allowed_ips: Cidr | None = Field(default=None, description="Who may reach the head node's sshd.")
    capacity_type: CapacityType = Field(default="ONDEMAND", description="How compute nodes are bought.")
    capacity_reservation: ReservationId | None = Field(default=None, description="Capacity reservation or block.")
    placement_group: bool = Field(default=True, description="Keep compute nodes close to each other.")
    scaledown_idletime: Seconds = Field(default=600, description="Idle dynamic nodes go after this time.")
    ami: AmiId | None = Field(default=None, description="Your own image.")
    bucket: Bucket | None = Field(default=None, description="S3 bucket for the bootstrap scripts; else one is made.")
    database: Database | None = Field(default=None, description="MySQL server for accounting.")
    policies: list[PolicyArn] = Field(default=[], description="Further IAM policies of the nodes.")
    queues: dict[PartitionName, QueueSpec] = Field(default={}, description="What differs, by partition.")
    tags: Tags = Field(default={}, description="Tags on everything made.")


class InstanceGroupSpec(Section):
    """What differs for one partition's instance group."""

    training_plan: TrainingPlanArn | None = Field(default=None, description="Training plan that holds its capacity.")
    subnets: list[SubnetId] = Field(default=[], description="Subnets of its nodes.")
    threads_per_core: Literal[1, 2] | None = Field(default=None, description="1 switches hyper-threading off.")


class HyperPod(Section):
    """SageMaker HyperPod with Slurm."""

    region: Region = Field(description="AWS region.")
    execution_role: RoleArn = Field(description="IAM role of the instances.")
    bucket: Annotated[str, shaped(r"sagemaker-[a-z0-9.-]{0,52}[a-z0-9]", "sagemaker-my-bucket")] = Field(
        description="S3 bucket for lifecycle scripts; SageMaker wants its name to begin with sagemaker-."
    )
    prefix: Annotated[str, shaped(r"[A-Za-z0-9_./-]{0,200}", "lifecycle/demo")] = Field(
        default="", description="Folder in the bucket; else the cluster's name."
    )
    node_recovery: Literal["Automatic", "None"] = Field(default="Automatic", description="HyperPod's own recovery.")
    config_strategy: Literal["Overwrite", "Managed", "Merge"] = Field(
        default="Managed", description="Whose slurm.conf wins (SlurmConfigStrategy)."
    )
    subnets: list[SubnetId] = Field(default=[], description="Subnets; needs security_groups.")
    security_groups: list[SecurityGroupId] = Field(default=[], description="Security groups in those subnets.")
    volume: SizeMiB | None = Field(default=None, description="Extra EBS volume of each instance.")
    volume_mount: AbsolutePath = Field(default="/opt/sagemaker", description="Where that volume is mounted.")
    groups: dict[PartitionName, InstanceGroupSpec] = Field(default={}, description="What differs, by partition.")
    controller_group: PlainName = Field(default="controller", description="Name of the head node's instance group.")
    login_group: PlainName = Field(default="login", description="Name of the login nodes' instance group.")
    tags: Tags = Field(default={}, description="Tags on everything made.")


# ---- Settings of the OCI target: `oci:`, a Resource Manager stack of the HPC kind.


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
    public_subnet: OciSubnetId | None = Field(default=None, description="Subnet of head and login nodes; needs vcn.")
    private_subnet: OciSubnetId | None = Field(default=None, description="Subnet of compute nodes; needs vcn.")
    allowed_ips: Cidr | None = Field(default=None, description="Who may reach the head node's sshd.")
    rdma: bool | None = Field(default=None, description="Cluster network; else by the shape.")
    boot_volume: SizeMiB = Field(default=250 * 1024, description="Boot volume of compute nodes.")
    hyperthreading: bool = Field(default=True, description="Two CPUs per core.")
    stack: StackId | None = Field(default=None, description="Stack that exists already.")
    tags: Tags = Field(default={}, description="Free-form tags on everything made.")


# ---- Where a cluster can run.


Target = Literal["local", "ssh", "parallelcluster", "hyperpod", "oci"]
TARGETS: tuple[Target, ...] = ("local", "ssh", "parallelcluster", "hyperpod", "oci")


# ---- `train-[1-4]: 10.0.0.[11-14]`: which machine has which address.


_BRACKETS = re.compile(r"\[[^\]]*\]")


def addresses(names: str, address: str) -> dict[str, str]:
    """Each name with its address; without one, a machine is reached by its name. ValueError if they do not pair up."""
    machines = expand(names)
    if not address:
        return {name: name for name in machines}
    # Colons of an IPv6 address are no host name; only brackets need spelling out.
    found = _spell_out(address) if _BRACKETS.search(address) else [address]
    if len(found) != len(machines):
        raise ValueError(f"{len(machines)} machines, {len(found)} addresses")
    return dict(zip(machines, found, strict=True))


def _spell_out(address: str) -> list[str]:
    """A hostlist that may end in a domain, `gpu[1-4].example.com`, which Slurm's own may not."""
    head, bracket, tail = address.rpartition("]")
    return [f"{name}{tail}" for name in expand(head + bracket)]


def hosts_of(ssh: Ssh, machines: Iterable[str]) -> dict[str, SshHostSpec]:
    """How each machine is reached: what `hosts` says of it, else what is said of all, else by its name. A port that is
    not written is left to ssh, whose own settings may have another."""
    common = {key: getattr(ssh, key) for key in ("user", "port", "key", "jump")}
    if "port" not in ssh.model_fields_set:
        del common["port"]
    named = {
        name: host.model_copy(update={"address": address})
        for key, host in ssh.hosts.items()
        for name, address in addresses(key, host.address).items()
    }
    return {
        name: host.model_copy(update={key: value for key, value in common.items() if getattr(host, key) is None})
        for name in machines
        for host in [named.get(name) or SshHostSpec(address=name)]
    }

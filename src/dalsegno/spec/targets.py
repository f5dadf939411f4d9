"""Sections of the cluster file: the settings of each target."""

from __future__ import annotations

import ipaddress
import re
import shlex
import string
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dalsegno.hostlist import expand
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.values import (
    AbsolutePath,
    InstanceName,
    Label,
    PartitionName,
    PlainName,
    Seconds,
    SizeMiB,
    UserName,
    matching,
    shaped,
)

# An address must not start with a dash, because ssh would read it as an option.
_ADDRESS = r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,252}(\[[0-9,-]{1,200}\][A-Za-z0-9_.:-]{0,100})?"
_HOST_KEY = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}(\[[0-9,-]{1,200}\])?"
_FILE = r"[A-Za-z0-9_./~][A-Za-z0-9_./@%+=~-]{0,254}"
_JUMP = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}(:\d{1,5})?"
_LONGEST_COMMAND = 1000
_LARGEST, _SMALLEST = 8, 29  # prefix lengths of the largest and the smallest subnet


def _subnet(value: str) -> str:
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError:
        raise fault(f"is not a subnet: {show(value)}", "write `10.77.0.0/16`") from None
    if not _LARGEST <= network.prefixlen <= _SMALLEST:
        raise fault(f"must be between /{_LARGEST} and /{_SMALLEST}, not {show(value)}", "write `10.77.0.0/16`")
    return str(network)


def _address_only(value: Any) -> Any:
    """Expand `train-1: 10.0.0.1` to `train-1: {address: 10.0.0.1}`."""
    return {"address": value} if isinstance(value, str) else value


_POWER_WORDS = ("node", "address", "bmc")
_POWER_EXAMPLE = "write `ipmitool -I lanplus -H {bmc} -U admin -f /root/bmc-password chassis power cycle`"


def _power_command(value: str) -> str:
    """Check a command with placeholders. It runs without a shell, so each placeholder stays inside its word."""
    if not value.isprintable() or len(value) > _LONGEST_COMMAND:
        raise fault(f"must be one line of at most {_LONGEST_COMMAND} characters", _POWER_EXAMPLE)
    try:
        words = shlex.split(value)
        names = [name for word in words for _, name, form, how in string.Formatter().parse(word) if name is not None]
        plain = all(not form and not how for word in words for _, name, form, how in string.Formatter().parse(word))
    except ValueError as error:
        raise fault(f"cannot be read: {error}", _POWER_EXAMPLE) from None
    unknown = [name for name in names if name not in _POWER_WORDS]
    if unknown or not plain:
        shown = f" `{{{unknown[0]}}}`" if unknown else ""
        raise fault(f"has an unknown placeholder{shown}", "use `{node}`, `{address}` or `{bmc}`")
    if not words or "{" in words[0] or words[0].startswith("-"):
        raise fault("must start with the name of a program", _POWER_EXAMPLE)
    return value


PowerCommand = Annotated[str, AfterValidator(_power_command)]
_PACKAGE = (
    r"[a-z0-9][A-Za-z0-9+._-]{0,99}(=[A-Za-z0-9+.:~_-]{1,100})?|(/[A-Za-z0-9][A-Za-z0-9+.:~_-]{0,150}){1,12}\.(deb|rpm)"
)
Package = Annotated[
    str, matching(_PACKAGE, "write a package's name: `htop`, or the path of a file on the hosts: `/srv/htop.deb`")
]
SlurmRelease = Annotated[str, matching(r"\d{2}\.\d{2}(\.\d{1,2})?", "write a release such as `24.11.5`")]
Address = Annotated[str, matching(_ADDRESS, "write a host name or an address")]
HostKey = Annotated[str, matching(_HOST_KEY, "write a node's name: `train-1`, `train-[1-4]`")]
File = Annotated[str, matching(_FILE, "write a path, such as `~/.ssh/id_ed25519`")]
Jump = Annotated[str, matching(_JUMP, "write `user@bastion.example.com`")]
Port = Annotated[int, Field(ge=1, le=65535)]


class LocalSpec(Section):
    """Real Slurm on this machine."""

    hosts: Literal["auto", "virtual", "loopback"] = Field(
        default="auto",
        description="virtual: namespaces per node (root); loopback: processes on ports; auto: virtual if possible.",
    )
    gpus: Literal["auto", "simulated", "real"] = Field(
        default="auto", description="real: the machine's GPUs; simulated: device files; auto: real if there are any."
    )
    subnet: Annotated[str, AfterValidator(_subnet)] = Field(
        default="", description="Subnet of the virtual hosts. Default: a free one."
    )
    cloud: Literal["none", "ec2"] = Field(
        default="none", description="ec2: virtual hosts have a metadata service that can announce their end."
    )


class SshHostSpec(Section):
    """SSH settings of one machine that differ from the common ones."""

    address: Address = Field(default="", description="Host name or address. Default: the node's name.")
    user: UserName | None = Field(default=None, description="User to log in as.")
    port: Port | None = Field(default=None, description="Port of its sshd.")
    key: File | None = Field(default=None, description="Private key file.")
    jump: Jump | None = Field(default=None, description="Jump host.")
    bmc: Address = Field(default="", description="Address of its management controller: '10.1.0.[11-14]'.")
    power_cycle: PowerCommand | None = Field(default=None, description="Command that switches it off and on.")


class Ssh(Section):
    """Existing machines that are reached over SSH."""

    hosts: dict[
        HostKey, Annotated[SshHostSpec, BeforeValidator(_address_only, json_schema_input_type=str | SshHostSpec)]
    ] = Field(default={}, description="Node name to address: {head: 10.0.0.1, 'train-[1-4]': '10.0.0.[11-14]'}.")
    user: UserName = Field(default="root", description="User to log in as. Needs sudo if it is not root.")
    port: Port = Field(default=22, description="Port of sshd.")
    key: File | None = Field(default=None, description="Private key file. Default: ssh's choice.")
    jump: Jump | None = Field(default=None, description="Jump host: user@bastion.")
    known_hosts: File | None = Field(default=None, description="File with the host keys. Default: ssh's files.")
    sudo_password_file: File | None = Field(
        default=None, description="File with the password for sudo, readable only by you."
    )
    power_cycle: PowerCommand | None = Field(
        default=None,
        description="Command that switches a host off and on; runs on the head node, with {node}, {address} and {bmc}.",
    )
    packages: list[Package] = Field(default=[], description="Further packages to install on every host.")
    slurm_packages: list[Package] = Field(
        default=[],
        description="Slurm packages for every host: names, or paths on the hosts.",
    )
    slurm_version: SlurmRelease | None = Field(
        default=None,
        description="Slurm release, if no package name or file gives it.",
    )
    logins_need_job: bool = Field(
        default=False, description="Let users log in to a compute node only while they have a job there."
    )


# AWS: `parallelcluster:` and `hyperpod:`
_ARN = r"arn:aws[a-z-]*:{service}:[a-z0-9-]*:\d{{12}}:{rest}"

# A pattern and not a list of regions, because AWS adds regions. Every name has a part of the world and a direction.
_AWS_AREA = r"us|eu|ap|sa|ca|me|af|il|mx|cn|us-gov|us-iso[bf]?|eu-isoe"
_DIRECTION = r"(north|south)(east|west)?|east|west|central"
Region = Annotated[str, shaped(rf"({_AWS_AREA})-({_DIRECTION})-\d", "us-east-1")]
SubnetId = Annotated[str, shaped(r"subnet-[0-9a-f]{8,17}", "subnet-0123456789abcdef0")]
SecurityGroupId = Annotated[str, shaped(r"sg-[0-9a-f]{8,17}", "sg-0123456789abcdef0")]
ReservationId = Annotated[str, shaped(r"cr-[0-9a-f]{8,17}", "cr-0123456789abcdef0")]
PlacementGroupName = Annotated[str, shaped(r"[A-Za-z0-9_.-]{1,255}", "my-group")]
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


StackName = Annotated[str, shaped(r"[A-Za-z][A-Za-z0-9-]{0,127}", "parallelcluster-prerequisites")]
DomainDn = Annotated[
    str, shaped(r"[A-Za-z0-9.-]{3,253}|((dc|ou|cn|DC|OU|CN)=[^,=\s]{1,63},?){1,20}", "dc=corp,dc=example,dc=com")
]
LdapUri = Annotated[str, shaped(r"ldaps?://[A-Za-z0-9.:-]{1,253}/?", "ldaps://corp.example.com")]
ScriptUri = Annotated[str, shaped(r"(s3|https)://[A-Za-z0-9._~/%+-]{3,1000}", "s3://my-bucket/install.sh")]
S3Uri = Annotated[
    str, shaped(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]{0,900})?", "s3://my-bucket/data")
]
ScriptWord = Annotated[str, shaped(r"[^\x00-\x1f\x7f]{1,1000}", "v2.26.6-1")]
PclusterVersion = Annotated[str, shaped(r"3\.\d{1,2}\.\d{1,2}", "3.16.1")]
RepositoryEvent = Literal["NEW", "CHANGED", "DELETED"]
ALL_EVENTS: list[RepositoryEvent] = ["NEW", "CHANGED", "DELETED"]


class Database(Section):
    """A MySQL server for Slurm's accounting. Without one, ParallelCluster has no accounting."""

    uri: Annotated[str, shaped(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?", "db.example.com:3306")] = Field(
        description="Host and port."
    )
    user: Annotated[str, shaped(r"[A-Za-z0-9_]{1,32}", "slurm")] = Field(description="Database user.")
    password_secret: SecretArn = Field(description="Secrets Manager ARN of its password.")


class DirectoryService(Section):
    """A directory of users, such as AWS Managed Microsoft AD."""

    domain: DomainDn = Field(description="Domain name, or its distinguished name.")
    address: LdapUri = Field(description="URI of the directory; ldaps unless you accept passwords in clear text.")
    password_secret: SecretArn = Field(description="Secrets Manager ARN of the reader's password.")
    reader: Annotated[str, shaped(r"[^\x00-\x1f\x7f]{1,255}", "cn=ReadOnly,ou=Users,dc=corp,dc=example,dc=com")] = (
        Field(description="User that reads the directory.")
    )
    ca_certificate: AbsolutePath | None = Field(default=None, description="File with the CA's certificate on the head.")
    access_filter: Annotated[str, shaped(r"[^\x00-\x1f\x7f]{1,1000}", "memberOf=cn=ml,dc=corp")] | None = Field(
        default=None, description="LDAP filter of users that may log in."
    )
    create_ssh_keys: bool = Field(default=True, description="Give each user an SSH key at the first login.")


class ActionSpec(Section):
    """A script of your own that runs on the machines, before or after Dal Segno's."""

    script: ScriptUri = Field(description="s3:// or https:// address of the script.")
    args: list[ScriptWord] = Field(default=[], description="Arguments of the script.")
    on: Literal["head", "compute", "login", "all"] = Field(default="all", description="Machines that run it.")
    at: Literal["start", "configured", "updated"] = Field(
        default="configured", description="When it runs: OnNodeStart, OnNodeConfigured or OnNodeUpdated (head only)."
    )


class RepositorySpec(Section):
    """A folder of an FSx for Lustre file system that mirrors a bucket (data repository association)."""

    storage: PlainName = Field(description="Name of the `lustre` storage.")
    path: AbsolutePath = Field(default="/data", description="Folder in the file system.")
    s3: S3Uri = Field(description="Bucket and prefix: s3://my-bucket/data.")
    import_events: list[RepositoryEvent] = Field(default=ALL_EVENTS, description="Changes in S3 that appear as files.")
    export_events: list[RepositoryEvent] = Field(default=ALL_EVENTS, description="Changes of files that go to S3.")


class QueueSpec(Section):
    """Settings of one partition that differ from the common ones."""

    instances: list[InstanceName] = Field(
        default=[],
        max_length=20,
        description="Further instance types, with as many CPUs and GPUs, used as capacity allows.",
    )
    efa: bool | None = Field(default=None, description="Elastic Fabric Adapter. Default: if all its types have it.")
    security_groups: list[SecurityGroupId] = Field(default=[], description="Additional security groups of its nodes.")
    spot_price: float | None = Field(default=None, gt=0, description="Maximum price per hour of SPOT nodes, in USD.")
    root_volume: SizeMiB | None = Field(default=None, description="Size of the root volume.")
    ami: AmiId | None = Field(default=None, description="Custom AMI of its nodes.")
    capacity_type: CapacityType | None = Field(default=None, description="ONDEMAND, SPOT or CAPACITY_BLOCK.")
    capacity_reservation: ReservationId | None = Field(default=None, description="Capacity reservation or block.")
    subnets: list[SubnetId] = Field(default=[], description="Subnets of its nodes.")
    placement_group: bool | None = Field(default=None, description="Keep the nodes close to each other.")
    placement_group_name: PlacementGroupName | None = Field(
        default=None, description="Existing placement group of its nodes, such as that of the capacity reservation."
    )
    max_count: int | None = Field(
        default=None, ge=1, description="Maximum nodes, started on demand; `nodes` of them always run."
    )


class ParallelCluster(Section):
    """AWS ParallelCluster."""

    region: Region = Field(description="AWS region.")
    version: PclusterVersion = Field(default="3.16.1", description="Version of ParallelCluster for this cluster.")
    os: Literal["alinux2023", "ubuntu2204", "ubuntu2404", "rhel8", "rocky8", "rhel9", "rocky9"] = Field(
        default="ubuntu2204", description="Operating system of all machines."
    )
    stacks: list[StackName] = Field(
        default=[], description="Existing CloudFormation stacks with the network, file systems and bucket to use."
    )
    availability_zone: Zone | None = Field(default=None, description="Availability zone of a new network.")
    head_subnet: SubnetId | None = Field(default=None, description="Subnet of the head node. Default: a new network.")
    subnets: list[SubnetId] = Field(default=[], description="Subnets of the compute nodes. Default: the head node's.")
    security_groups: list[SecurityGroupId] = Field(
        default=[], description="Additional security groups of all machines. Default: one for EFA in a new network."
    )
    key: KeyName | None = Field(
        default=None,
        description="EC2 key pair, with Ubuntu ed25519; a new one if there is none. Without it, connect with SSM.",
    )
    allowed_ips: Cidr | None = Field(default=None, description="Addresses that may reach the head node's sshd.")
    capacity_type: CapacityType = Field(default="ONDEMAND", description="Purchase option of compute nodes.")
    capacity_reservation: ReservationId | None = Field(default=None, description="Capacity reservation or block.")
    placement_group: bool = Field(default=True, description="Keep compute nodes close to each other.")
    placement_group_name: PlacementGroupName | None = Field(
        default=None, description="Existing placement group of compute nodes. Default: a new one per queue."
    )
    scaledown_idletime: Seconds = Field(default=600, description="Idle time after which dynamic nodes are stopped.")
    queue_update: Literal["DRAIN", "TERMINATE", "COMPUTE_FLEET_STOP"] = Field(
        default="DRAIN", description="How nodes change: when their jobs end, at once, or only while all are stopped."
    )
    ami: AmiId | None = Field(default=None, description="Custom AMI of all machines.")
    root_volume: SizeMiB = Field(default=200 * 1024, description="Size of the root volume of compute nodes.")
    head_root_volume: SizeMiB = Field(default=500 * 1024, description="Size of the root volume of the head node.")
    gpu_health_checks: bool = Field(
        default=False, description="ParallelCluster's own GPU check before each job (`dcgmi diag -r 2`)."
    )
    bucket: Bucket | None = Field(default=None, description="S3 bucket for the bootstrap scripts. Default: a new one.")
    database: Database | None = Field(default=None, description="MySQL server for accounting.")
    directory_service: DirectoryService | None = Field(default=None, description="Directory of users.")
    actions: list[ActionSpec] = Field(default=[], max_length=30, description="Scripts of your own.")
    data_repositories: list[RepositorySpec] = Field(
        default=[], max_length=8, description="Folders of Lustre file systems that mirror a bucket."
    )
    policies: list[PolicyArn] = Field(default=[], description="Additional IAM policies of the nodes.")
    queues: dict[PartitionName, QueueSpec] = Field(
        default={}, description="Settings by partition that differ from the common ones."
    )
    tags: Tags = Field(default={}, description="Tags on all created resources.")


class InstanceGroupSpec(Section):
    """Settings of one partition's instance group that differ from the common ones."""

    training_plan: TrainingPlanArn | None = Field(default=None, description="Training plan that holds its capacity.")
    subnets: list[SubnetId] = Field(default=[], description="Subnets of its nodes.")
    threads_per_core: Literal[1, 2] | None = Field(default=None, description="1 turns hyper-threading off.")


class HyperPod(Section):
    """SageMaker HyperPod with Slurm."""

    region: Region = Field(description="AWS region.")
    execution_role: RoleArn = Field(description="IAM role of the instances.")
    bucket: Annotated[str, shaped(r"sagemaker-[a-z0-9.-]{0,52}[a-z0-9]", "sagemaker-my-bucket")] = Field(
        description="S3 bucket for lifecycle scripts. SageMaker requires a name that starts with sagemaker-."
    )
    prefix: Annotated[str, shaped(r"[A-Za-z0-9_./-]{0,200}", "lifecycle/demo")] = Field(
        default="", description="Folder in the bucket. Default: the cluster's name."
    )
    configuration: Literal["api", "provisioning"] = Field(
        default="api",
        description="Where HyperPod reads partitions and file systems: in the request (`api`), or in "
        "provisioning_parameters.json (`provisioning`, for clusters of the first generation).",
    )
    node_recovery: Literal["Automatic", "None"] = Field(
        default="Automatic", description="HyperPod's own node recovery."
    )
    config_strategy: Literal["Overwrite", "Managed", "Merge"] = Field(
        default="Managed", description="How HyperPod updates slurm.conf (SlurmConfigStrategy); with `api` only."
    )
    subnets: list[SubnetId] = Field(default=[], description="Subnets; needs security_groups.")
    security_groups: list[SecurityGroupId] = Field(default=[], description="Security groups in those subnets.")
    volume: SizeMiB | None = Field(
        default=None,
        description="Size of an additional EBS volume per instance, which HyperPod mounts at /opt/sagemaker.",
    )
    ssh_key: File | None = Field(
        default=None,
        description="Public key file that may log in as `ubuntu`, through SSM. Default: SSM sessions only.",
    )
    groups: dict[PartitionName, InstanceGroupSpec] = Field(
        default={}, description="Settings by partition that differ from the common ones."
    )
    controller_group: PlainName = Field(default="controller", description="Name of the head node's instance group.")
    login_group: PlainName = Field(default="login", description="Name of the login nodes' instance group.")
    tags: Tags = Field(default={}, description="Tags on all created resources.")


class Existing(Section):
    """A Slurm cluster that Dal Segno did not create. `dalsegno adopt` writes its file; nothing is installed on it."""

    platform: Literal["plain", "parallelcluster", "hyperpod", "oci"] = Field(
        default="plain",
        description="What created the cluster: parallelcluster, hyperpod, oci; plain: none of them.",
    )


Target = Literal["local", "ssh", "parallelcluster", "hyperpod", "oci", "existing"]
TARGETS: tuple[Target, ...] = ("local", "ssh", "parallelcluster", "hyperpod", "oci", "existing")
DEFAULT_TARGET: Target = "local"


_BRACKETS = re.compile(r"\[[^\]]*\]")


def addresses(names: str, address: str) -> dict[str, str]:
    """Return the address of each name in `train-[1-4]: 10.0.0.[11-14]`; without an address, the name itself.

    Raise ValueError if the counts differ.
    """
    machines = expand(names)
    if not address:
        return {name: name for name in machines}
    # Only an address with brackets is expanded, because an IPv6 address is not a valid host list.
    found = _expand_address(address) if _BRACKETS.search(address) else [address]
    if len(found) != len(machines):
        raise ValueError(f"{len(machines)} machines, {len(found)} addresses")
    return dict(zip(machines, found, strict=True))


def _expand_address(address: str) -> list[str]:
    """Expand a host list that, unlike Slurm's, may end with a domain: `gpu[1-4].example.com`."""
    head, bracket, tail = address.rpartition("]")
    return [f"{name}{tail}" for name in expand(head + bracket)]


def hosts_of(ssh: Ssh, machines: Iterable[str]) -> dict[str, SshHostSpec]:
    """Return the SSH settings of each machine: its settings in `hosts`, then the common ones.

    The default address is the machine's name. If no port is given, ssh's own configuration decides.
    """
    common = {key: getattr(ssh, key) for key in ("user", "port", "key", "jump", "power_cycle")}
    if "port" not in ssh.model_fields_set:
        del common["port"]
    named = {
        name: host.model_copy(update={"address": address, "bmc": bmcs[name] if host.bmc else ""})
        for key, host in ssh.hosts.items()
        for bmcs in [addresses(key, host.bmc)]
        for name, address in addresses(key, host.address).items()
    }
    return {
        name: host.model_copy(update={key: value for key, value in common.items() if getattr(host, key) is None})
        for name in machines
        for host in [named.get(name) or SshHostSpec(address=name)]
    }


def power_cycle_argv(node: str, host: SshHostSpec) -> list[str]:
    """Return the command that switches a host off and on, as a list; empty if there is none."""
    values = {"node": node, "address": host.address, "bmc": host.bmc}
    return [word.format_map(values) for word in shlex.split(host.power_cycle or "")]

"""Settings of the AWS targets: `parallelcluster:` and `hyperpod:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dalsegno.spec.names import AbsolutePath, Label, PartitionName, PlainName
from dalsegno.spec.patterns import shaped
from dalsegno.spec.quantities import Seconds, SizeMiB
from dalsegno.spec.section import Section

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


class Queue(Section):
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
    queues: dict[PartitionName, Queue] = Field(default={}, description="What differs, by partition.")
    tags: Tags = Field(default={}, description="Tags on everything made.")


class Group(Section):
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
    groups: dict[PartitionName, Group] = Field(default={}, description="What differs, by partition.")
    controller_group: PlainName = Field(default="controller", description="Name of the head node's instance group.")
    login_group: PlainName = Field(default="login", description="Name of the login nodes' instance group.")
    tags: Tags = Field(default={}, description="Tags on everything made.")

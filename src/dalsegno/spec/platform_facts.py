"""Facts about the platform of a cluster: the resolved `hyperpod:` and `oci:` blocks of a cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class InstanceGroupFacts:
    """Settings of one partition's instance group. None and () mean the cluster's common settings."""

    training_plan: str = ""
    subnets: tuple[str, ...] = ()
    threads_per_core: int | None = None


@dataclass(frozen=True)
class HyperPodFacts:
    """The `hyperpod:` block."""

    region: str
    execution_role: str
    bucket: str
    prefix: str  # folder in the S3 bucket
    head_instance: str
    login_instance: str = ""
    # Where HyperPod reads partitions from: the request (api) or provisioning_parameters.json (provisioning).
    configuration: str = "api"
    node_recovery: str = "Automatic"
    config_strategy: str = "Managed"
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    volume_gib: int | None = None
    controller_group: str = "controller"
    login_group: str = "login"
    groups: Mapping[str, InstanceGroupFacts] = field(default_factory=dict)  # settings by partition
    ssh_key: str = ""  # path of a public key; "" means SSM sessions only
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def source_uri(self) -> str:
        """The S3 address of the folder with the lifecycle scripts."""
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True)
class OciFacts:
    """The `oci:` block, with the machines of the head and the login nodes."""

    region: str
    compartment: str
    head_instance: str
    head_cpus: int | None = None
    head_memory_gib: int | None = None
    login_instance: str = ""
    login_cpus: int | None = None
    login_memory_gib: int | None = None
    pool_cpus: int | None = None  # of each node of the first partition, as in the file
    pool_memory_gib: int | None = None
    tenancy: str = ""
    ad: str = ""
    profile: str = "DEFAULT"
    ssh_key: str = ""
    image: str = ""
    os: str = "ol8"
    vcn: str = ""
    public_subnet: str = ""
    private_subnet: str = ""
    allowed_ips: str = ""
    rdma: bool | None = None
    boot_volume_gib: int = 250
    hyperthreading: bool = True
    stack: str = ""
    stack_version: str = "v3"
    template: str = ""  # path of the stack's Terraform files, as a zip file
    tags: Mapping[str, str] = field(default_factory=dict)


# The instance types of AWS in the catalog that HyperPod's CreateCluster refuses
NOT_OFFERED = frozenset({
    "p3.2xlarge", "p3.8xlarge", "p3.16xlarge", "p3dn.24xlarge", "g4dn.metal", "trn1.2xlarge", "t3.micro", "t3.small",
    "r5.large", "r5.xlarge", "r5.2xlarge", "r5.4xlarge", "r5.8xlarge", "r5.12xlarge", "r5.16xlarge", "r5.24xlarge",
    "c7i.large", "c7i.xlarge", "c7i.2xlarge", "c7i.4xlarge", "c7i.8xlarge", "c7i.12xlarge", "c7i.16xlarge",
    "c7i.24xlarge", "c7i.48xlarge", "hpc6a.48xlarge", "hpc7a.96xlarge",
})  # fmt: skip
# The images that each release of the stack offers. For Ubuntu, users need their own image.
GPU_IMAGES = {"v2.10": "GPU_OL8_NV550", "v3": "GPU_OL8_NV570"}
HPC_IMAGE = "HPC_OL8"
# The shapes with an RDMA network that release 2.10 knows. Its Slurm configuration has no node of another one.
OLDER_RDMA_SHAPES = (
    "BM.HPC2.36", "BM.GPU4.8", "BM.GPU.B4.8", "BM.GPU.A100-v2.8", "BM.GPU.H100.8", "BM.Optimized3.36", "BM.HPC.E5.144",
)  # fmt: skip
LUSTRE_TIERS = (125, 250, 500, 1000)  # MB/s per TB


def image_name(image: str | None, release: str, *, gpus: bool) -> str:
    """Return the OCID of the nodes' image, or its name in the marketplace."""
    return image or (GPU_IMAGES[release] if gpus else HPC_IMAGE)

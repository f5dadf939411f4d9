"""The list of all health checks, in the order in which they are shown."""

from dalsegno.health.checks.cloud import CLOUD_CHECKS
from dalsegno.health.checks.file_systems import SHARED_CHECKS
from dalsegno.health.checks.gpu import GPU_CHECKS, GPU_LINK_CHECKS, XID
from dalsegno.health.checks.host import FABRIC_CHECKS, HOST_CHECKS, KERNEL_CHECKS, NETWORK
from dalsegno.health.checks.services import CONTAINER_CHECKS, SERVICE_CHECKS

CHECKS = (
    XID,
    *GPU_CHECKS,
    *GPU_LINK_CHECKS,
    *FABRIC_CHECKS,
    NETWORK,
    *KERNEL_CHECKS,
    *HOST_CHECKS,
    *SERVICE_CHECKS,
    *SHARED_CHECKS,
    *CONTAINER_CHECKS,
    *CLOUD_CHECKS,
)

__all__ = ["CHECKS"]

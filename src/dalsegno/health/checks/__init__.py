"""All checks there are, in the order in which they are shown."""

from dalsegno.health.checks.containers import CONTAINER_CHECKS
from dalsegno.health.checks.fabric import FABRIC_CHECKS
from dalsegno.health.checks.gpu import GPU_CHECKS
from dalsegno.health.checks.gpu_links import GPU_LINK_CHECKS
from dalsegno.health.checks.host import HOST_CHECKS
from dalsegno.health.checks.kernel import KERNEL_CHECKS
from dalsegno.health.checks.network import NETWORK
from dalsegno.health.checks.services import SERVICE_CHECKS
from dalsegno.health.checks.shared import SHARED_CHECKS
from dalsegno.health.checks.xid import XID

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
)

__all__ = ["CHECKS"]

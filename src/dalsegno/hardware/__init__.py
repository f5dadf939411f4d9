"""The hardware catalog: GPUs, instance types and fabrics as data. A lookup of an unknown name suggests a similar
one."""

from dalsegno.hardware.catalog import (
    Fabric,
    Gpu,
    Instance,
    closest,
    did_you_mean,
    fabrics,
    find_fabric,
    find_gpu,
    find_instance,
    gpu_of,
    gpus,
    instances,
)

__all__ = [
    "Fabric",
    "Gpu",
    "Instance",
    "closest",
    "did_you_mean",
    "fabrics",
    "find_fabric",
    "find_gpu",
    "find_instance",
    "gpu_of",
    "gpus",
    "instances",
]

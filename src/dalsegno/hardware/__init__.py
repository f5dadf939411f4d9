"""The hardware catalog: GPUs, instance types and fabrics as data, looked up with "did you mean"."""

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

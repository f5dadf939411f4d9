"""Finding a thing of the catalog by the name people call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from dalsegno.errors import NotThere
from dalsegno.hardware.catalog import Fabric, Gpu, Instance, fabrics, gpus, instances
from dalsegno.hardware.closest import did_you_mean

_T = TypeVar("_T")

# One Slurm type may stand for two sizes of a card; the larger one is what is sold today.
_LARGEST = {"a100": "a100-80", "v100": "v100-32"}


def find_instance(name: str) -> Instance:
    """The instance type called `name`; HyperPod's `ml.p5.48xlarge` is `p5.48xlarge`."""
    return _find(name.removeprefix("ml."), instances(), "instance type")


def find_gpu(name: str) -> Gpu:
    """The accelerator called `name`, by catalog name (a100-40) or Slurm's type (a100)."""
    lower = name.lower()
    return _find(_LARGEST.get(lower, lower), gpus(), "GPU")


def find_fabric(name: str) -> Fabric:
    """The fabric called `name`."""
    return _find(name, fabrics(), "fabric")


def gpu_of(instance: Instance) -> Gpu | None:
    """The accelerator inside an instance type, None if it has none."""
    return gpus()[instance.gpu] if instance.gpu else None


def _find(name: str, table: Mapping[str, _T], noun: str) -> _T:
    if name in table:
        return table[name]
    raise NotThere(f"the catalog has no {noun} `{name}`", hint=did_you_mean(name, table))

"""The catalog's tables, read once from the CSV files in this folder. An empty cell means unknown or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from dalsegno.errors import NotThere

_Row = dict[str, str]


@dataclass(frozen=True)
class Gpu:
    """An accelerator. `kind` is Slurm's gres name (gpu, neuron), `slurm_type` the gres type (h100)."""

    name: str
    slurm_type: str
    kind: str
    product: str
    memory_gib: float
    memory_gbytes_per_s: float
    bf16_tflops: float | None  # the peak without sparsity
    link: str  # link between accelerators, such as "NVLink 4" or "NeuronLink-v2"; "" if there is none
    link_gbytes_per_s: float | None  # bandwidth in one direction, per accelerator


@dataclass(frozen=True)
class Instance:
    """An instance type of a cloud. For a flexible type, cpus and memory are the maximum."""

    provider: str
    name: str
    gpu: str  # name in the table of GPUs; "" if it has none
    gpus: int
    gpu_memory_gib: float | None  # memory of each GPU
    nvlink_gbytes_per_s: float  # bandwidth per GPU in one direction, with the links that this instance type has
    network_gbps: float | None
    nics: int | None  # number of RDMA network cards
    fabric: str
    cpus: int | None
    memory_gib: float | None
    flexible: bool = False


@dataclass(frozen=True)
class Fabric:
    """A network between machines. `nccl_net` is the transport that NCCL should report."""

    name: str
    provider: str
    product: str
    rdma: bool
    nccl_net: str


@dataclass(frozen=True)
class ListPrice:
    """The on-demand list price of one GPU for an hour, by instance type or by GPU type.

    `source` names the provider, the region and the instance type of this price. `date` is the day on which the price
    was read, because providers change their prices.
    """

    name: str
    usd_per_gpu_hour: float
    date: str
    source: str


class PriceBasis(Enum):
    """The source of a price: it was read from a published list, or it has not been checked yet."""

    LISTED = "listed"
    ESTIMATE = "estimate"


@dataclass(frozen=True)
class CloudPrice:
    """The price of one unit of a cloud resource. The unit is `hour`, `gib-month` or `mbps-month`."""

    name: str
    unit: str
    usd: float
    basis: PriceBasis
    date: str
    source: str


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return all accelerators by name."""
    return MappingProxyType({row["name"]: _gpu(row) for row in read_rows("gpus.csv")})


@cache
def instances() -> Mapping[str, Instance]:
    """Return all instance types by name."""
    return MappingProxyType({row["name"]: _instance(row) for row in read_rows("instances.csv")})


@cache
def fabrics() -> Mapping[str, Fabric]:
    """Return all fabrics by name."""
    return MappingProxyType({row["name"]: _fabric(row) for row in read_rows("fabrics.csv")})


@cache
def prices() -> Mapping[str, ListPrice]:
    """Return the known list prices, by instance type and by GPU."""
    rows = read_rows("prices.csv")
    found = (ListPrice(row["name"], float(row["usd_per_gpu_hour"]), row["date"], row["source"]) for row in rows)
    return MappingProxyType({price.name: price for price in found})


@cache
def cloud_prices() -> Mapping[str, CloudPrice]:
    """Return the prices of clouds for machines without GPUs, for storage and for networks."""
    return MappingProxyType({price.name: price for price in parse_cloud_prices(_text("cloud_prices.csv"))})


def parse_cloud_prices(text: str) -> list[CloudPrice]:
    """Parse a table in the form of cloud_prices.csv. Raise ValueError if a line is invalid."""
    return [
        CloudPrice(r["name"], r["unit"], float(r["usd"]), PriceBasis(r["basis"]), r["date"], r["source"])
        for r in _parse_rows(text)
    ]


def _gpu(row: _Row) -> Gpu:
    return Gpu(
        name=row["name"],
        slurm_type=row["slurm_type"],
        kind=row["kind"],
        product=row["product"],
        memory_gib=float(row["memory_gib"]),
        memory_gbytes_per_s=float(row["memory_gbytes_per_s"]),
        bf16_tflops=_number(row["bf16_tflops"]),
        link=row["link"],
        link_gbytes_per_s=_number(row["link_gbytes_per_s"]),
    )


def _instance(row: _Row) -> Instance:
    return Instance(
        provider=row["provider"],
        name=row["name"],
        gpu=row["gpu"],
        gpus=int(row["gpus"]),
        gpu_memory_gib=_number(row["gpu_memory_gib"]),
        nvlink_gbytes_per_s=float(row["nvlink_gbytes_per_s"]),
        network_gbps=_number(row["network_gbps"]),
        nics=_whole(row["nics"]),
        fabric=row["fabric"],
        cpus=_whole(row["cpus"]),
        memory_gib=_number(row["memory_gib"]),
        flexible=row["flexible"] == "yes",
    )


def _fabric(row: _Row) -> Fabric:
    return Fabric(row["name"], row["provider"], row["product"], row["rdma"] == "yes", row["nccl_net"])


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _whole(cell: str) -> int | None:
    return int(cell) if cell else None


def _text(file: str) -> str:
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


def read_rows(file: str) -> list[_Row]:
    """Return the rows of a table in this folder."""
    return _parse_rows(_text(file))


def _parse_rows(text: str) -> list[_Row]:
    # Importing csv would slow the start. No cell contains a quote or a comma; a test checks this.
    lines = text.splitlines()
    header = lines[0].split(",")
    return [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]


# Suggestions for misspelled names

_SURE = 0.7
_MAX_COMPARED = 2000  # maximum number of names to compare: comparing is slow, and a cluster may have 65,000 nodes


def closest(name: str, names: Iterable[str]) -> str:
    """Return the most similar of `names`, or "" if none is similar.

    Short words may share letters by chance (`foo`, `oom`), so a weak match must have the same first letter.
    """
    from difflib import SequenceMatcher, get_close_matches

    wanted = name.lower()[:100]
    by_lower = {each.lower(): each for each in islice(names, _MAX_COMPARED)}
    for near in get_close_matches(wanted, list(by_lower), n=3, cutoff=0.6):
        if near[:1] == wanted[:1] or SequenceMatcher(None, near, wanted).ratio() >= _SURE:
            return by_lower[near]
    return ""


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the hint "did you mean `…`?", or `otherwise` if no name is similar."""
    near = closest(name, names)
    return f"did you mean `{near}`?" if near else otherwise


# Lookup of instance types, GPUs, prices and fabrics by name

_T = TypeVar("_T")

# Slurm's type does not distinguish the memory sizes of a card. Assume the larger one, which is sold today.
_LARGEST = {"a100": "a100-80", "v100": "v100-32"}


def find_instance(name: str) -> Instance:
    """Return the instance type with this name. HyperPod's names have the prefix `ml.`, as in `ml.p5.48xlarge`."""
    return _find(name.removeprefix("ml."), instances(), "instance type")


def find_gpu(name: str) -> Gpu:
    """Return the accelerator with this catalog name (a100-40) or Slurm type (a100)."""
    lower = name.lower()
    return _find(_LARGEST.get(lower, lower), gpus(), "GPU")


def find_price(instance: str, gpu_type: str) -> ListPrice | None:
    """Return the list price of an instance type, or else of its GPU type; None if neither is known."""
    found = prices().get(instance.removeprefix("ml."))
    if found is None and gpu_type:
        lower = gpu_type.lower()
        found = prices().get(_LARGEST.get(lower, lower))
    return found


def find_fabric(name: str) -> Fabric:
    """Return the fabric with this name."""
    return _find(name, fabrics(), "fabric")


def gpu_of(instance: Instance) -> Gpu | None:
    """Return the accelerator of an instance type; None if it has none."""
    return gpus()[instance.gpu] if instance.gpu else None


def _find(name: str, table: Mapping[str, _T], noun: str) -> _T:
    if name in table:
        return table[name]
    raise NotThere(f"the catalog has no {noun} `{name}`", hint=did_you_mean(name, table))

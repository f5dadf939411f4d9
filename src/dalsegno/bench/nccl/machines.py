"""Find the ranks, nodes and instance type that a table of nccl-tests was measured on. Pure.

The number of ranks is in the header. Without a header it is computed from busbw / algbw, a ratio that depends only on
the number of ranks. The instance type follows from its name in the log, or from the GPUs and the host names; otherwise
the user must name it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dalsegno.bench.nccl.table import NcclRow, NcclTable, NcclTest, find_test
from dalsegno.errors import NotThere, UsageError
from dalsegno.hardware import Gpu, Instance, find_instance, gpu_of, gpus, instances

HEAD_CHARS = 300_000  # names of tests and instance types are searched in this many characters at the start of a log

_AWS_HOST = re.compile(r"^ip-\d+-\d+-\d+-\d+|-(?:st|dy)-|^i-[0-9a-f]{8,17}$")
_OCI_HOST = re.compile(r"^compute-permanent-node-|^inst-[a-z0-9]{5}-|^gpu-\d+$", re.IGNORECASE)
_PROGRAM = re.compile(r"\b[a-z]{3,10}(?:_[a-z]{3,10})?_perf\b")
_SEPARATORS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True)
class BenchMachines:
    """The machines of one test. `instance` is None if only the GPU is known; `gpu` is None if nothing is known."""

    nodes: int
    gpus_per_node: int
    instance: Instance | None = None
    gpu: Gpu | None = None
    assumed: bool = False  # whether `instance` is only one of several types that have these GPUs and limits
    other_product: str = ""  # the product that the log lists, if it is not the GPU of the named instance type

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def link_gbytes_per_s(self) -> float:
        """Return the NVLink bandwidth of one GPU; 0 if it has no NVLink, or if machine and GPU are unknown."""
        if self.instance:
            return self.instance.nvlink_gbytes_per_s
        return (self.gpu.link_gbytes_per_s or 0.0) if self.gpu else 0.0

    @property
    def network_gbytes_per_s(self) -> float:
        return (self.instance.network_gbps or 0.0) / 8 if self.instance else 0.0

    @property
    def used_network_gbytes_per_s(self) -> float:
        """Return the network bandwidth of the tested GPUs of one node. Each GPU has its own network cards."""
        if self.instance is None or self.gpus_per_node >= self.instance.gpus:
            return self.network_gbytes_per_s
        return self.network_gbytes_per_s * self.gpus_per_node / self.instance.gpus

    @property
    def in_switch(self) -> bool:
        """Return whether the NVLink switches can reduce data (NVLS): on Hopper or later, with more than two GPUs."""
        return self.gpu is not None and self.gpu.link in ("NVLink 4", "NVLink 5") and self.gpus_per_node > 2

    def __str__(self) -> str:
        if self.instance and not self.assumed:
            return f"{self.nodes} x {self.instance.name}"
        if self.gpu:
            return f"{self.nodes} x {self.gpus_per_node} {self.gpu.slurm_type.upper()}"
        return f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"


@dataclass(frozen=True)
class LogHints:
    """The tests and instance types that are named near the start of a log."""

    tests: frozenset[NcclTest] = frozenset()
    instances: frozenset[str] = frozenset()


def read_hints(text: str) -> LogHints:
    """Return the hints at the start of a log. The log is searched only once, even if it has many tables."""
    head = text[:HEAD_CHARS]
    tests = {find_test(name) for name in set(_PROGRAM.findall(head))} - {NcclTest.UNKNOWN}
    named = {each.name for each in instances().values() if each.gpus and each.name in head}
    return LogHints(frozenset(tests), frozenset(named))


def count_ranks(table: NcclTable) -> int | None:
    """Return the number of ranks, from the header or from the ratio of the bandwidths; None if neither shows it."""
    return table.listed_ranks or ranks_of_ratio(table)


def ranks_of_ratio(table: NcclTable) -> int | None:
    """Return the number of ranks computed from busbw / algbw; None if the figures are too small or the ratio is 1."""
    timings = [timing for row in table.rows for timing in row.timings if timing.algbw >= 1]
    if not timings:
        return None
    best = max(timings, key=lambda timing: timing.algbw)
    ratio = best.busbw / best.algbw
    if table.test in (NcclTest.ALL_REDUCE, NcclTest.UNKNOWN) and 1.2 < ratio < 1.999:
        return round(2 / (2 - ratio))
    if table.test.bus_factor(4) < 1 and 0.3 < ratio < 0.999:
        return round(1 / (1 - ratio))
    return None


def name_test(table: NcclTable, hints: LogHints = LogHints(), asked: NcclTest | None = None) -> NcclTable:
    """Return the table with its field `test` set. `asked` is the test that the user named, if any.

    Versions of nccl-tests before 2.16.7 do not print the test's name. The name then follows from the command in the log
    or from the rows. If neither shows it, it stays UNKNOWN.
    """
    if asked:
        return replace(table, test=asked)
    if table.test is not NcclTest.UNKNOWN or not table.rows:
        return table
    (test,) = hints.tests if len(hints.tests) == 1 else (_test_of_row(table.rows[-1]),)
    return replace(table, test=test)


def _test_of_row(row: NcclRow) -> NcclTest:
    ratio = next((each.busbw / each.algbw for each in row.timings if each.algbw > 0), 0.0)
    reduces, rooted = row.redop != "none", row.root >= 0
    if reduces and rooted:
        return NcclTest.REDUCE
    if reduces:
        # With two ranks, all_reduce and sendrecv both have ratio 1; all_reduce is more common.
        return NcclTest.ALL_REDUCE if ratio > 0.99 or ratio == 0 else NcclTest.REDUCE_SCATTER
    if rooted:
        # Scatter and gather have lower ratios, but cannot be distinguished from each other.
        return NcclTest.BROADCAST if ratio > 0.999 else NcclTest.UNKNOWN
    if row.in_place and row.in_place.wrong is not None:
        return NcclTest.ALL_GATHER  # alltoall is excluded, because it does not check in-place data
    checked = row.out_of_place and row.out_of_place.wrong is not None
    return NcclTest.ALLTOALL if checked and row.in_place else NcclTest.UNKNOWN


def find_machines(
    table: NcclTable,
    hints: LogHints = LogHints(),
    instance: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    ranks: int | None = None,
) -> BenchMachines:
    """Return the machines of the test, as far as known. `ranks` is the number of ranks that NCCL logged, if any."""
    named = named_instance(instance) if instance else None
    if named and not named.gpus:
        raise UsageError(f"`{named.name}` has no GPUs", where="--instance", hint="name the type of the GPU nodes")
    count = count_ranks(table) or ranks
    gpu = gpu_of(named) if named else _gpu_of_devices(table)
    hosts = table.hosts
    named = named or _named_in(hints, hosts, gpu)
    nodes = nodes or len(hosts) or _nodes_for(count, named, gpus_per_node)
    per_node = gpus_per_node or (max(1, count // (len(hosts) or nodes)) if count else named.gpus if named else 1)
    if named:
        other = _other_product(table, gpu_of(named)) if instance else ""
        return BenchMachines(nodes, per_node, named, gpu_of(named), other_product=other)
    candidates = _candidates(gpu, per_node, hosts) if gpu else []
    limits = {(each.nvlink_gbytes_per_s, each.network_gbps if nodes > 1 else None) for each in candidates}
    if len(limits) == 1:
        several = len({each.provider for each in candidates}) > 1
        return BenchMachines(nodes, per_node, candidates[0], gpu, assumed=several)
    return BenchMachines(nodes, per_node, None, gpu)


def named_instance(name: str) -> Instance:
    """Return the instance type that the option `--instance` names. Raise UsageError if the catalog does not list it."""
    try:
        return find_instance(name)
    except NotThere as error:
        raise UsageError(error.what, where="--instance", hint=error.hint) from None


def find_gpu_of_product(product: str) -> Gpu | None:
    """Return the catalog's GPU for a product name, such as `NVIDIA A100-SXM4-40GB`; None if it is not listed."""
    words = _SEPARATORS.sub(" ", product.lower()).split()
    joined = "".join(words)
    found = [gpu for gpu in gpus().values() if gpu.slurm_type in words or joined.endswith(gpu.slurm_type)]
    found = [gpu for gpu in found if len(gpu.slurm_type) == max(len(each.slurm_type) for each in found)]
    by_memory = [gpu for gpu in found if f"{gpu.memory_gib:.0f}gb" in words]
    return next(iter(by_memory or found), None)


def _gpu_of_devices(table: NcclTable) -> Gpu | None:
    """Return the GPU of all devices; None if the products differ. PCIe cards count as unknown, because they lack the
    NVLink that the catalog lists for their chip."""
    products = {each.product for each in table.devices}
    product = next(iter(products)) if len(products) == 1 else ""
    return find_gpu_of_product(product) if "pcie" not in product.lower() else None


def _other_product(table: NcclTable, gpu: Gpu | None) -> str:
    """Return the first listed product that is not this GPU; "" if there is none. Unknown products are skipped."""
    for product in dict.fromkeys(each.product for each in table.devices):
        listed = find_gpu_of_product(product)
        if listed and gpu and listed.slurm_type != gpu.slurm_type:
            return product
    return ""


def _named_in(hints: LogHints, hosts: tuple[str, ...], gpu: Gpu | None) -> Instance | None:
    """Return the GPU instance type if the log or its host names contain exactly one.

    ParallelCluster's node names contain the instance type without its dot.
    """
    names = " ".join(hosts[:64])
    having = [each for each in instances().values() if each.gpus and (gpu is None or each.gpu == gpu.name)]
    found = [
        each
        for each in having
        if each.name in hints.instances or ("." in each.name and each.name.replace(".", "") in names)
    ]
    return found[0] if len(found) == 1 else None


def _nodes_for(ranks: int | None, instance: Instance | None, gpus_per_node: int | None) -> int:
    per_node = gpus_per_node or (instance.gpus if instance else 0)
    return max(1, -(-ranks // per_node)) if ranks and per_node else 1


def _candidates(gpu: Gpu, per_node: int, hosts: tuple[str, ...]) -> list[Instance]:
    aws, oci = (any(pattern.search(host) for host in hosts) for pattern in (_AWS_HOST, _OCI_HOST))
    provider = "aws" if aws and not oci else "oci" if oci and not aws else ""
    fitting = [
        each
        for each in instances().values()
        if each.gpu == gpu.name and each.gpus >= per_node and (not provider or each.provider == provider)
    ]
    whole = [each for each in fitting if each.gpus == per_node]
    return whole or fitting

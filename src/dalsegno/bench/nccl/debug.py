"""Parse what NCCL logged about its network, links and ranks, and suggest what to check. Pure.

NCCL logs these lines with `NCCL_DEBUG=INFO`. Links and algorithms need `NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH,TUNING` too.
The log is not trusted: lines are truncated, and the number of values kept from them is limited.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.bench.nccl.machines import BenchMachines
from dalsegno.bench.nccl.table import NcclTable

MAX_LINE = 2048
MAX_WARNINGS = 5
MAX_PROCESSES = 4096

_MESSAGE = re.compile(r"NCCL (INFO|WARN|ERROR|TRACE) (.*)")
_NETWORK = re.compile(r"Using network ([\w /.-]{1,32})")
_PROVIDER = re.compile(r"Selected [Pp]rovider is ([\w;-]{1,32})\*?(?:.{0,80}?found (\d{1,4}) nics)?")
_NRANKS = re.compile(r"\bnranks (\d{1,7})\b")
_PROCESS = re.compile(r"(\S{1,80}:\d{1,9}):\d{1,9} \[\d+\] NCCL ")
_VIA = re.compile(r" via (P2P|SHM|NET)/([\w ]{1,24})(\S{0,64})")
_LINKS = re.compile(r"nChannels \d+.{0,60}type (NVB|NVL|PIX|PXB|PXN|PHB|SYS|LOC|C2C|DIS)/")
_ALGORITHM = re.compile(r"(\d{1,15}) Bytes -> Algo (\w{1,16})")
_SET = re.compile(r"((?:NCCL|FI)_\w{1,40}) set by environment to (\S{1,80})")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_ALGORITHMS = {"0": "TREE", "1": "RING", "2": "COLLNET_DIRECT", "3": "COLLNET_CHAIN", "4": "NVLS", "5": "NVLS_TREE"}
_PLUGIN_MISSING = ("could not find: libnccl-net", "no plugin found (libnccl-net", "libnccl-net.so: cannot open")
_PROVIDER_MISSING = (
    "no eligible providers were found", "could not find any optimal provider", "aws-ofi-nccl initialization failed",
    "provider efa output empty list",
)  # fmt: skip


class NcclNetwork(str, Enum):
    """The network that NCCL uses between nodes."""

    EFA = "EFA"
    LIBFABRIC = "libfabric"
    INFINIBAND = "InfiniBand or RoCE"
    SOCKET = "TCP sockets"
    OTHER = "another plugin"
    UNKNOWN = "unknown"


class NcclProblem(str, Enum):
    """A problem that the log shows."""

    SOCKETS = "sockets instead of RDMA"
    NO_EFA = "no EFA provider"
    NO_PLUGIN = "network plugin missing"
    FEW_CARDS = "network cards missing"
    NO_GPU_DIRECT = "no GPUDirect RDMA"
    NO_NVLINK = "PCIe instead of NVLink"
    SHARED_MEMORY = "shared memory instead of peer access"
    NO_IN_SWITCH = "no reduction in the NVLink switch"
    SEPARATE_RANKS = "each process ran alone"
    SWITCHED_OFF = "switched off by a variable"
    WARNED = "NCCL warned"


@dataclass(frozen=True)
class NcclFinding:
    """A problem that the log shows, and what to do about it."""

    problem: NcclProblem
    text: str
    hint: str = ""


@dataclass
class NcclDebug:
    """The facts that NCCL logged. `links` and `transports` count how often the log names each of them."""

    network: NcclNetwork = NcclNetwork.UNKNOWN
    provider: str = ""
    cards: int | None = None
    plugin_missing: bool = False
    provider_missing: bool = False
    gpu_direct: Counter[bool] = field(default_factory=Counter)
    ranks: dict[int, set[str]] = field(default_factory=dict)  # size of a communicator -> the processes that logged it
    transports: Counter[str] = field(default_factory=Counter)
    links: Counter[str] = field(default_factory=Counter)
    algorithms: dict[int, str] = field(default_factory=dict)  # message size -> algorithm
    in_switch: bool | None = None
    settings: dict[str, str] = field(default_factory=dict)
    version: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def size(self) -> int | None:
        """Return the number of ranks of the largest communicator."""
        return max(self.ranks, default=None)

    def algorithm(self, size: int) -> str:
        """Return the algorithm for this message size; "" if it was not logged."""
        return self.algorithms.get(size, "")


def read_debug(text: str) -> NcclDebug:
    """Return the facts in the NCCL lines of a log."""
    found = NcclDebug()
    if "NCCL" not in text:
        return found
    for line in text.split("\n"):
        if "NCCL" in line or "libfabric" in line:
            _read_line(line[:MAX_LINE], found)
    return found


def _read_line(line: str, found: NcclDebug) -> None:
    if " via " in line:
        _read_channel(line, found)
    elif "nranks " in line:
        if (match := _NRANKS.search(line)) and len(found.ranks) < 1024:
            processes = found.ranks.setdefault(int(match[1]), set())
            if (process := _PROCESS.search(line)) and len(processes) < MAX_PROCESSES:
                processes.add(process[1])
    elif "NET/" in line or "Using network" in line or "libfabric" in line:
        _read_network(line, found)
    elif "Algo " in line:
        if (match := _ALGORITHM.search(line)) and len(found.algorithms) < 4096:
            found.algorithms[int(match[1])] = _ALGORITHMS.get(match[2], match[2])
    elif "nChannels" in line:
        if match := _LINKS.search(line):
            found.links[match[1]] += 1
    elif " set by environment to " in line:
        if (match := _SET.search(line)) and len(found.settings) < 256:
            found.settings[match[1]] = match[2].rstrip(".")
    elif "NVLS multicast support is" in line:
        found.in_switch = "is not available" not in line
    elif "NCCL version" in line and not found.version:
        found.version = match[1] if (match := _VERSION.search(line)) else ""
    if "NCCL WARN" in line and len(found.warnings) < MAX_WARNINGS and (match := _MESSAGE.search(line)):
        message = match[2].strip()
        if message and message not in found.warnings:
            found.warnings.append(message[:200])


def _read_channel(line: str, found: NcclDebug) -> None:
    match = _VIA.search(line)
    if match is None or len(found.transports) > 64:
        return
    kind, name, rest = match.groups()
    found.transports[f"{kind}/{name.strip()}" if kind == "NET" else kind] += 1
    if kind == "NET":
        found.gpu_direct["GDRDMA" in rest] += 1
        if "Socket" in name:
            found.network = NcclNetwork.SOCKET


def _read_network(line: str, found: NcclDebug) -> None:
    lower = line.lower()
    if any(words in lower for words in _PROVIDER_MISSING):
        found.provider_missing = True
    if any(words in lower for words in _PLUGIN_MISSING):
        found.plugin_missing = True
    if match := _PROVIDER.search(line):
        found.provider = match[1]
        found.cards = int(match[2]) if match[2] else found.cards
    if match := _NETWORK.search(line):
        found.network = _network(match[1].strip(), found.provider)


def _network(name: str, provider: str) -> NcclNetwork:
    if name == "Socket":
        return NcclNetwork.SOCKET
    if name == "IB":
        return NcclNetwork.INFINIBAND
    if "Libfabric" in name or name == "OFI":
        return NcclNetwork.EFA if provider.startswith("efa") or "AWS" in name else NcclNetwork.LIBFABRIC
    return NcclNetwork.OTHER


# The text and the suggested fix of each problem.
_ADVICE: Mapping[NcclProblem, tuple[str, str]] = {
    NcclProblem.SEPARATE_RANKS: (
        "{count} processes ran a test of their own instead of one test together",
        "build nccl-tests with `make MPI=1`, and start them with a PMI that this MPI knows: `srun --mpi=pmix`",
    ),
    NcclProblem.SOCKETS: (
        "NCCL sends over TCP sockets between the nodes",
        "{advice}",
    ),
    NcclProblem.NO_EFA: (
        "libfabric found no EFA provider (selected: {provider})",
        "check `fi_info -p efa` on the node and in the container. The security group must allow all traffic to itself, "
        "and the container needs /dev/infiniband",
    ),
    NcclProblem.NO_PLUGIN: (
        "NCCL found no network plugin (libnccl-net.so)",
        "put the library folder of aws-ofi-nccl into LD_LIBRARY_PATH, in the container too",
    ),
    NcclProblem.FEW_CARDS: (
        "libfabric found {found} of {count} network cards",
        "check `fi_info -p efa` and the network interfaces of the node",
    ),
    NcclProblem.NO_GPU_DIRECT: (
        "no channel between nodes uses GPUDirect RDMA",
        "load the module nvidia_peermem (or use a driver with dma-buf), and check the topology file",
    ),
    NcclProblem.NO_NVLINK: (
        "NCCL connects the GPUs of a node over PCIe ({links}), not over NVLink",
        "check `nvidia-smi nvlink --status` and `nvidia-smi topo -m`; on HGX machines nvidia-fabricmanager must run",
    ),
    NcclProblem.SHARED_MEMORY: (
        "GPUs of a node exchange data through the memory of the host",
        "peer access does not work: check `nvidia-smi topo -p2p r`, IOMMU and ACS, and NCCL_P2P_DISABLE",
    ),
    NcclProblem.NO_IN_SWITCH: (
        "NVLink's switches do not reduce (NVLS is not available)",
        "check that nvidia-fabricmanager runs and has the version of the driver",
    ),
}
_RDMA_ADVICE = "check `ibv_devinfo` on the node and in the container, NCCL_IB_HCA and NCCL_IB_GID_INDEX"
_EFA_ADVICE = "install the EFA software and aws-ofi-nccl in the image, and set FI_PROVIDER=efa"
_OFF: Mapping[tuple[str, str], str] = {
    ("NCCL_P2P_DISABLE", "1"): "peer access between GPUs is off",
    ("NCCL_IB_DISABLE", "1"): "InfiniBand and RoCE are off",
    ("NCCL_NET_GDR_LEVEL", "0"): "GPUDirect RDMA is off",
    ("NCCL_NVLS_ENABLE", "0"): "reduction in the NVLink switch is off",
    ("NCCL_NET", "Socket"): "NCCL must use TCP sockets",
}


def find_problems(debug: NcclDebug, machines: BenchMachines, separate: int = 0) -> tuple[NcclFinding, ...]:
    """Return the problems that the log shows on these machines, the most likely cause first."""
    alone = separate or (len(debug.ranks[1]) if debug.size == 1 else 0)
    return (
        *([_finding(NcclProblem.SEPARATE_RANKS, count=alone)] if alone > 1 else ()),
        *(_of_network(debug, machines) if machines.nodes > 1 else ()),
        *_of_links(debug, machines),
        *(
            NcclFinding(NcclProblem.SWITCHED_OFF, f"{name}={value}: {text}", f"unset {name}")
            for (name, value), text in _OFF.items()
            if debug.settings.get(name) == value
        ),
        *(NcclFinding(NcclProblem.WARNED, f"NCCL warned: {text}") for text in debug.warnings),
    )


def separate_tables(tables: Sequence[NcclTable]) -> int:
    """Return how many processes ran the same test separately, each with its own table; 0 if they ran it together."""
    first = {
        (table.devices[0].host, table.devices[0].pid): (table.test, table.settings)
        for table in tables
        if table.devices and table.settings and (table.stream or not table.rows)
    }
    mixed = (len({(each.host, each.pid) for each in table.devices if each.rank == 0}) for table in tables)
    most = max(*Counter(first.values()).values(), *mixed, 0, 0)
    return most if most > 1 else 0


def _finding(problem: NcclProblem, **values: object) -> NcclFinding:
    text, hint = _ADVICE[problem]
    return NcclFinding(problem, text.format(**values), hint.format(**values))


def _of_network(debug: NcclDebug, machines: BenchMachines) -> list[NcclFinding]:
    fabric = machines.instance.fabric if machines.instance else ""
    cards = machines.instance.nics if machines.instance else None
    efa = fabric.startswith("efa")
    found = []
    if debug.provider_missing or (efa and debug.provider and not debug.provider.startswith("efa")):
        found.append(_finding(NcclProblem.NO_EFA, provider=debug.provider or "none"))
    if debug.plugin_missing and efa:
        found.append(_finding(NcclProblem.NO_PLUGIN))
    if debug.network is NcclNetwork.SOCKET and fabric != "tcp":
        found.append(_finding(NcclProblem.SOCKETS, advice=_EFA_ADVICE if efa else _RDMA_ADVICE))
    if debug.cards and cards and debug.cards < cards and efa:
        found.append(_finding(NcclProblem.FEW_CARDS, found=debug.cards, count=cards))
    if debug.gpu_direct[False] and not debug.gpu_direct[True] and debug.network is not NcclNetwork.SOCKET:
        found.append(_finding(NcclProblem.NO_GPU_DIRECT))
    return found


def _of_links(debug: NcclDebug, machines: BenchMachines) -> list[NcclFinding]:
    if machines.link_gbytes_per_s <= 0 or machines.gpus_per_node < 2:
        return []
    found = []
    if debug.links and not any(name in debug.links for name in ("NVL", "NVB", "C2C")):
        found.append(_finding(NcclProblem.NO_NVLINK, links=", ".join(sorted(debug.links))))
    if debug.transports["SHM"] and not debug.transports["P2P"]:
        found.append(_finding(NcclProblem.SHARED_MEMORY))
    if debug.in_switch is False and machines.in_switch:
        found.append(_finding(NcclProblem.NO_IN_SWITCH))
    return found

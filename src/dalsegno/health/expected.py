"""The hardware and services that slurm.conf specifies for a node, so that checks notice missing ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dalsegno.hostlist import HostlistError, expand

_PAIR = re.compile(r'(\w+)\s*=\s*("[^"]*"|\S+)')
_GPU = re.compile(r"(?:^|,)gpu(?::([A-Za-z0-9][\w.-]*))??:(\d+)(?=$|,|\()")
_SLICE = re.compile(r"\d+g\.|mig", re.IGNORECASE)  # types of MIG slices, which are not counted as GPUs


@dataclass(frozen=True)
class Expected:
    """The expected hardware and services of a node; None where nothing is specified."""

    node: str
    named: bool = False  # whether slurm.conf has a line for this node
    gpus: int | None = None
    gpu_type: str = ""
    memory_mib: int | None = None
    slurmd: tuple[str, int] | None = None  # slurmd's address and port
    munge: str | None = None  # munge's socket; "": the default socket; None: munge is not needed
    controllers: tuple[str, ...] = ()
    spool: str = "/var/spool/slurmd"  # slurmd's spool directory
    cloud_file: str = ""  # file that says which cloud the node is on; "" if there is none
    missing_reason: str = ""  # why slurm.conf has no line for the node, although Slurm runs on it


def expected_of(node: str, slurm_conf: str) -> Expected:
    """Return what slurm.conf expects of this node; a node without a line gets the common settings."""
    lines = [_pairs(line) for line in _logical_lines(slurm_conf)]
    everyone = {key: value for pairs in lines if "nodename" not in pairs for key, value in pairs.items()}
    munge = everyone.get("authtype", "auth/munge") == "auth/munge" and bool(lines)
    socket = re.search(r"socket=([^,]+)", everyone.get("authinfo", ""))
    common = Expected(
        node,
        munge=(socket[1] if socket else "") if munge else None,
        controllers=tuple(re.sub(r"\(.*", "", pairs["slurmctldhost"]) for pairs in lines if "slurmctldhost" in pairs),
        spool=re.sub("%[nh]", node, everyone.get("slurmdspooldir", Expected.spool)),
    )
    default_port = everyone.get("slurmdport", "6818")
    defaults: dict[str, str] = {}
    for pairs in lines:
        if pairs.get("nodename", "").upper() == "DEFAULT":
            defaults |= pairs
        elif node in (names := _expand(pairs.get("nodename", ""))):
            return _with_node(common, {**defaults, **pairs}, names.index(node), default_port)
    return common


def slurmd_places(slurm_conf: str) -> dict[str, tuple[str, int]]:
    """Return the address or host name and the port of each node's slurmd."""
    lines = [_pairs(line) for line in _logical_lines(slurm_conf)]
    usual = next((pairs["slurmdport"] for pairs in reversed(lines) if "slurmdport" in pairs), "6818")
    found, defaults = dict[str, tuple[str, int]](), dict[str, str]()
    for pairs in lines:
        if pairs.get("nodename", "").upper() == "DEFAULT":
            defaults |= pairs
        else:
            found |= _places_of_line({**defaults, **pairs}, usual) if "nodename" in pairs else {}
    return found


def _places_of_line(pairs: dict[str, str], usual: str) -> dict[str, tuple[str, int]]:
    names = _expand(pairs["nodename"])
    addresses = _expand(pairs.get("nodeaddr") or pairs.get("nodehostname") or "") or names
    ports = [int(port) for port in _expand(pairs.get("port") or usual) if port.isdigit()] or [0]
    return {
        name: (addresses[min(at, len(addresses) - 1)], ports[min(at, len(ports) - 1)]) for at, name in enumerate(names)
    }


def _with_node(common: Expected, pairs: dict[str, str], at: int, default_port: str) -> Expected:
    gpus, gpu_type = _gpus(pairs.get("gres", ""))
    address = _nth(pairs.get("nodeaddr") or pairs.get("nodehostname") or common.node, at)
    port = _nth(pairs.get("port") or default_port, at)
    return replace(
        common,
        named=True,
        gpus=gpus,
        gpu_type=gpu_type,
        memory_mib=int(pairs["realmemory"]) if pairs.get("realmemory", "").isdigit() else None,
        slurmd=(address, int(port)) if port.isdigit() else None,
    )


def _gpus(gres: str) -> tuple[int | None, str]:
    """Return the number of GPUs and their type; the type is "" if they have different types. If the GPUs are divided
    (MIG), the number is None."""
    found = _GPU.findall(gres)
    types = {kind for kind, _ in found}
    if any(_SLICE.search(kind) for kind in types):
        return None, ""
    return sum(int(count) for _, count in found), types.pop() if len(types) == 1 else ""


def _nth(listed: str, at: int) -> str:
    """Return the value for the node at this position. A line has one value for all its nodes, or one for each."""
    values = _expand(listed)
    return values[at] if at < len(values) else values[0] if values else listed


def _expand(listed: str) -> list[str]:
    try:
        return expand(listed) if listed else []
    except HostlistError:
        return []


def _logical_lines(text: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", text)
    bare = (re.sub(r"(?<!\\)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in bare if line]


def _pairs(line: str) -> dict[str, str]:
    return {key.lower(): value.strip('"') for key, value in _PAIR.findall(line)}

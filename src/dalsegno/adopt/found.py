"""Ask a running Slurm cluster about itself, and find out which platform created it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.printable import one_line
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import AccountsInfo, NodeInfo
from dalsegno.slurm.parse.load import ReservationInfo
from dalsegno.slurm.parse.partitions import PartitionSettings, SwitchInfo
from dalsegno.slurm.parse.text import known
from dalsegno.slurm.versions import Version

HasPath = Callable[[str], bool]
_T = TypeVar("_T")


class PlatformKind(Enum):
    """The platform that created a cluster. The values are those of `existing.platform` in the cluster file."""

    PLAIN = "plain"
    PARALLELCLUSTER = "parallelcluster"
    HYPERPOD = "hyperpod"
    OCI = "oci"

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES = {
    PlatformKind.PLAIN: "plain Slurm",
    PlatformKind.PARALLELCLUSTER: "AWS ParallelCluster",
    PlatformKind.HYPERPOD: "SageMaker HyperPod",
    PlatformKind.OCI: "the OCI HPC stack",
}


@dataclass(frozen=True)
class Platform:
    """The platform of a cluster, and the evidence for it."""

    kind: PlatformKind
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Signs:
    """The signs of a platform on a head or login node: paths that exist there, the folder of the programs that
    slurm.conf names, and a pattern of node names."""

    paths: tuple[str, ...]
    programs: str
    node_names: str = ""


_SIGNS = {
    PlatformKind.PARALLELCLUSTER: _Signs(
        ("/opt/parallelcluster", "/etc/parallelcluster"), "/opt/parallelcluster/", r"[a-z].*-(st|dy)-.+-\d+"
    ),
    PlatformKind.HYPERPOD: _Signs(
        ("/opt/sagemaker_cluster", "/opt/ml/config/resource_config.json"), "/opt/sagemaker_cluster/"
    ),
    PlatformKind.OCI: _Signs(("/etc/opt/oci-hpc", "/opt/oci-hpc"), "/opt/oci-hpc/"),
}
PATHS = tuple(path for signs in _SIGNS.values() for path in signs.paths)


def detect_platform(paths: frozenset[str], settings: Mapping[str, str], nodes: tuple[NodeInfo, ...]) -> Platform:
    """Return the platform with the most evidence. `paths` are the entries of PATHS that exist on this machine."""
    found = [Platform(kind, _evidence(signs, paths, settings, nodes)) for kind, signs in _SIGNS.items()]
    best = max(found, key=lambda platform: len(platform.evidence))
    return best if best.evidence else Platform(PlatformKind.PLAIN)


def _evidence(
    signs: _Signs, paths: frozenset[str], settings: Mapping[str, str], nodes: tuple[NodeInfo, ...]
) -> tuple[str, ...]:
    found = [f"{path} exists" for path in signs.paths if path in paths]
    found += [f"{key} is {value}" for key, value in settings.items() if value.startswith(signs.programs)]
    if signs.node_names and nodes and all(re.fullmatch(signs.node_names, node.name[:128]) for node in nodes):
        found.append(f"all nodes are named like {one_line(nodes[0].name)}")
    return tuple(found)


@dataclass(frozen=True)
class FoundCluster:
    """A cluster, as Slurm's commands and the files of this machine describe it."""

    settings: Mapping[str, str]  # the output of `scontrol show config`
    partitions: tuple[PartitionSettings, ...]
    nodes: tuple[NodeInfo, ...]
    platform: Platform = Platform(PlatformKind.PLAIN)
    accounts: AccountsInfo = field(default_factory=AccountsInfo)
    reservations: tuple[ReservationInfo, ...] = ()
    switches: tuple[SwitchInfo, ...] = ()
    container_options: bool = False  # whether plugstack.conf loads Pyxis or our own plugin
    user: str = ""
    is_root: bool = False
    unread: tuple[str, ...] = ()  # what could not be read, with the reason

    @property
    def version(self) -> str:
        try:
            return str(Version.parse(self.settings.get("SLURM_VERSION", "")))
        except DalsegnoError:
            return "unknown"

    def setting(self, name: str) -> str:
        """Return a setting; "" if it is not set. Case is ignored, because it differs between Slurm releases."""
        value = self.settings.get(name)
        if value is None:
            value = next((each for key, each in self.settings.items() if key.lower() == name.lower()), "")
        return known(value)

    @property
    def has_accounting(self) -> bool:
        return self.setting("AccountingStorageType") == "accounting_storage/slurmdbd"

    @property
    def controllers(self) -> tuple[str, ...]:
        """The hosts of slurmctld, the primary first. Slurm shows one as `SlurmctldHost[0] = head(10.0.0.1)`."""
        hosts = [(key, value) for key, value in self.settings.items() if key.startswith("SlurmctldHost[")]
        return tuple(value.partition("(")[0].strip() for _, value in sorted(hosts) if known(value))

    @property
    def enforced(self) -> tuple[str, ...]:
        return tuple(word.strip() for word in self.setting("AccountingStorageEnforce").split(",") if word.strip())


def look(
    slurm: SlurmClient, has_path: HasPath, read_text: Callable[[str], str], user: str, is_root: bool
) -> FoundCluster:
    """Read the state of slurmctld and slurmdbd, and some files. Raise only if partitions, nodes or settings cannot be
    read."""
    settings, partitions, nodes = slurm.config(), tuple(slurm.partition_settings()), tuple(slurm.nodes())
    paths = frozenset(path for path in PATHS if has_path(path))
    found = FoundCluster(
        settings, partitions, nodes, detect_platform(paths, settings, nodes), user=user, is_root=is_root
    )
    unread: list[str] = []
    return replace(
        found,
        accounts=_accounts(slurm, found, unread),
        reservations=tuple(_try(slurm.reservations, "reservations", unread) or ()),
        switches=tuple((_try(slurm.topology, "the topology", unread) or ()) if _is_tree(found) else ()),
        container_options=_has_container_options(found, read_text),
        unread=tuple(unread),
    )


def _accounts(slurm: SlurmClient, found: FoundCluster, unread: list[str]) -> AccountsInfo:
    if not found.has_accounting:
        return AccountsInfo()
    cluster = found.setting("ClusterName")
    return _try(lambda: slurm.accounts(cluster), "accounts, users and QOS", unread) or AccountsInfo()


def _is_tree(found: FoundCluster) -> bool:
    return "tree" in found.setting("TopologyPlugin")


def _has_container_options(found: FoundCluster, read_text: Callable[[str], str]) -> bool:
    conf = found.setting("SLURM_CONF")
    path = found.setting("PlugStackConfig") or (f"{conf.rpartition('/')[0]}/plugstack.conf" if conf else "")
    lines = [line.strip() for line in read_text(path).splitlines()] if path else []
    return any(("pyxis" in line or "dalsegno" in line) and not line.startswith("#") for line in lines)


def _try(ask: Callable[[], _T], what: str, unread: list[str]) -> _T | None:
    """Return the result of `ask`. If it fails, for example because slurmdbd does not answer, add `what` to `unread` and
    return None."""
    try:
        return ask()
    except DalsegnoError as error:
        unread.append(f"{what}: {one_line(error.what.strip().splitlines()[-1].strip())}")
        return None

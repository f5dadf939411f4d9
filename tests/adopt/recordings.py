"""Clusters as `dalsegno adopt` finds them, from recorded outputs; tests/recorded/adopt.md says where they are from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dalsegno.adopt.found import PATHS, FoundCluster, look
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.parse.controller import ASSOC_ARGV, CONFIG_ARGV, QOS_ARGV, USER_ARGV
from dalsegno.slurm.parse.load import RESERVATIONS_ARGV
from dalsegno.slurm.parse.nodes import NODES_ARGV
from dalsegno.slurm.parse.partitions import PARTITION_SETTINGS_ARGV, TOPOLOGY_ARGV
from dalsegno.system.processes import Completed, FakeRunner

RECORDED = Path(__file__).parent.parent / "recorded"
SLURM = {path.name: path for path in sorted(RECORDED.glob("slurm-*")) if path.is_dir()}
WRITTEN = {path.name: path for path in sorted((RECORDED / "adopt").iterdir())}
ALL = {**SLURM, **WRITTEN}
FILES = {
    CONFIG_ARGV: "config",
    PARTITION_SETTINGS_ARGV: "partitions",
    NODES_ARGV: "nodes",
    QOS_ARGV: "qos",
    ASSOC_ARGV: "assoc",
    USER_ARGV: "user",
    RESERVATIONS_ARGV: "reservations",
    TOPOLOGY_ARGV: "topology",
}


def found_in(name: str, user: str = "ana", plugstack: str = "") -> FoundCluster:
    """Return what `adopt` finds. A file that was not recorded behaves like a command that fails."""
    folder = ALL[name]

    def answer(argv: tuple[str, ...], stdin: str | None) -> Completed | str:
        bare = tuple(word for word in argv if not word.startswith("cluster="))
        file = folder / f"{FILES[bare]}.txt"
        return file.read_text() if file.exists() else Completed(argv, 1, "", "not recorded")

    paths = folder / "paths.txt"
    there = paths.read_text().split() if paths.exists() else []
    assert set(there) <= set(PATHS)
    files = {"/etc/slurm/plugstack.conf": plugstack}
    return look(SlurmClient(FakeRunner(answer), {}), there.__contains__, lambda path: files.get(path, ""), user, False)


def without(found: FoundCluster, **settings: str) -> FoundCluster:
    """Return the cluster with other settings of slurm.conf."""
    return replace(found, settings={**found.settings, **settings})

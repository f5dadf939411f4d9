"""gres.conf: which device files are a node's GPUs."""

from __future__ import annotations

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.lines import header, line
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster, Node

_DEVICES = {"gpu": "nvidia", "neuron": "neuron"}  # what the kernel calls the devices of each kind


def render_gres_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """gres.conf. Every GPU needs its file: Slurm drops GPUs that are only counted, and drains the node."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for node in cluster.nodes:
        if node.gpus:
            groups.setdefault((node.gres, node.gpu_type, _files(node, layout)), []).append(node.name)
    records = [_record(names, *shape) for shape, names in groups.items()]
    return header("gres.conf", cluster.name, layout.spec) + "".join(f"{record}\n" for record in records)


def _files(node: Node, layout: Layout) -> tuple[str, ...]:
    files = layout.place(node.name).gpu_files or tuple(
        f"/dev/{_DEVICES[node.gres]}{index}" for index in range(node.gpus)
    )
    if len(files) != node.gpus:
        raise DalsegnoError(
            f"node {node.name} has {node.gpus} GPUs but {len(files)} device files",
            hint="`gpus:` of its partition is what one node has; `nvidia-smi -L` shows those of a machine",
        )
    for file in files:
        _refuse_unreadable(file)
    return files


def _refuse_unreadable(file: str) -> None:
    """Of all of Slurm's paths only this one cannot hold blanks, even in quotes: slurmd reads it as a host list."""
    if any(letter.isspace() or letter in '[],"#' for letter in file):
        raise DalsegnoError(f"slurmd cannot read a GPU's device file called {file!r}", hint="use a path without blanks")


def _record(names: list[str], gres: str, kind: str, files: tuple[str, ...]) -> str:
    return line({"NodeName": compress(names), "Name": gres, "Type": kind, "File": _compressed_files(files)})


def _compressed_files(files: tuple[str, ...]) -> str:
    folder = files[0].rpartition("/")[0]
    if any(file.rpartition("/")[0] != folder for file in files):
        return ",".join(files)
    return f"{folder}/{compress(file.rpartition('/')[2] for file in files)}"

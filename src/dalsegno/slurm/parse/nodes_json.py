"""Nodes as JSON: `sinfo --json` of 22.05, `scontrol --json show nodes` since; fields changed shape on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dalsegno.slurm.node_info import NodeInfo
from dalsegno.slurm.parse.text import ParseError, known, malformed
from dalsegno.slurm.parse.tres import gpu_type_in_gres, gpus_in_gres
from dalsegno.slurm.states import parse_node_state
from dalsegno.slurm.version import Version

Json = Mapping[str, object]


def nodes_json_argv(slurm: Version) -> tuple[str, ...]:
    return ("sinfo", "--json") if slurm < Version(23, 2) else ("scontrol", "--json", "show", "nodes")


def parse_nodes_json(text: str) -> list[NodeInfo]:
    """The answer to `nodes_json_argv`."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed("--json", text) from error
    found = answer.get("nodes") if isinstance(answer, dict) else None
    if not isinstance(found, list) or not all(isinstance(node, dict) and node.get("name") for node in found):
        raise ParseError("Slurm's JSON names no nodes", hint="use the text form: `scontrol show node`")
    return [_node(node) for node in found]


def _node(node: Json) -> NodeInfo:
    text = "+".join(_words(node, "state") + _words(node, "state_flags"))
    state, flags = parse_node_state(text)
    gres = known(_text(node, "gres"))
    return NodeInfo(
        name=_text(node, "name"),
        state=state,
        flags=flags,
        state_text=text,
        reason=_text(node, "reason"),
        reason_user=_text(node, "reason_set_by_user"),
        reason_at=_number(node, "reason_changed_at") or None,
        partitions=tuple(_words(node, "partitions")),
        gpus=gpus_in_gres(gres),
        gpus_used=gpus_in_gres(known(_text(node, "gres_used"))),
        gpu_type=gpu_type_in_gres(gres),
        cpus=_number(node, "cpus"),
        cpus_used=_number(node, "alloc_cpus"),
        memory_mib=_number(node, "real_memory"),
        memory_used_mib=_number(node, "alloc_memory"),
        address=_text(node, "address"),
        hostname=_text(node, "hostname"),
        port=_number(node, "port"),
        features=tuple(_words(node, "features")),
        weight=_number(node, "weight"),
        version=_text(node, "version") or _text(node, "slurmd_version"),
        booted_at=_number(node, "boot_time") or None,
        slurmd_started_at=_number(node, "slurmd_start_time") or None,
    )


def _text(node: Json, key: str) -> str:
    value = node.get(key)
    return value if isinstance(value, str) else ""


def _number(node: Json, key: str) -> int:
    """A bare number, or `{"set": true, "infinite": false, "number": 5}` since 23.02."""
    value = node.get(key)
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) else 0
    return value if isinstance(value, int) else 0


def _words(node: Json, key: str) -> list[str]:
    """A list, or one text with commas."""
    value = node.get(key)
    if isinstance(value, str):
        return [word for word in value.split(",") if word]
    return [word for word in value if isinstance(word, str) and word] if isinstance(value, list) else []

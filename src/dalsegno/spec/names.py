"""Validators for names that Slurm, Unix and the shell accept, and that cannot break a config line."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from dalsegno.hostlist import MAX_NODES, expand
from dalsegno.spec.section import fault, show


def matching(pattern: str, hint: str) -> AfterValidator:
    """Return a validator for text that matches `pattern`. Bound its repeats, because the text is untrusted."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value):
            return value
        raise fault(f"cannot be {show(value)}", hint)

    return AfterValidator(check)


def shaped(pattern: str, example: str) -> AfterValidator:
    """Return a validator for a cloud's id: the cloud would refuse a malformed one only after minutes."""
    return matching(pattern, f"it looks like `{example}`")


_RESERVED = {"default", "all", "localhost"} | {"switch", "head-backup", "rest"}  # Slurm's keywords, our own hosts
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HOSTS_HINT = "write `gpu[1-4]`, or a list of names"


def _not_reserved(value: str) -> str:
    if value.lower() in _RESERVED:
        raise fault(f"cannot be {show(value)}", "the name is reserved; choose another name")
    return value


def _host_name(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError(f"`{value[:60]}` is not a node name")
    return _not_reserved(value)


def _hostnames(value: object) -> list[str]:
    """Expand a host list, or a list of them."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise fault(f"must be node names, not {show(value)}", _HOSTS_HINT)
    try:
        names = [_host_name(name) for part in parts for name in expand(part)]
    except ValueError as error:
        raise fault(f"cannot be read: {error}", _HOSTS_HINT) from None
    if not names:
        raise fault(f"must be node names, not {show(value)}", _HOSTS_HINT)
    if len(names) > MAX_NODES:
        raise fault(f"names more than {MAX_NODES:,} nodes", _HOSTS_HINT)
    return names


def _count_or_names(value: object, least: int) -> int | list[str]:
    if isinstance(value, bool) or not isinstance(value, (int, str, list)):
        raise fault(f"must be a number of nodes, or their names, not {show(value)}", "write `4`, or `gpu[1-4]`")
    if not isinstance(value, int):
        return _hostnames(value)
    if not least <= value <= MAX_NODES:
        raise fault(f"must be between {least} and {MAX_NODES:,}, not {show(value)}")
    return value


def _listed(value: Any) -> Any:
    """Turn text into a list: commas separate entries, as in Slurm."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_CLUSTER_RULE = "use lowercase letters, digits, `-` and `_`, starting with a letter, at most 40"
_SLURM_RULE = "use letters, digits, `-` and `_`, starting with a letter or digit, at most 48"
_LOWER_RULE = "use lowercase letters, digits, `-`, `_` and `.`, starting with a letter or digit, at most 48"
_UNIX_RULE = "use lowercase letters, digits, `-` and `_`, starting with a letter, at most 32"
_PATH_RULE = "write an absolute path of letters, digits and `_./@%+=~-`"

# The name is the prefix of Slurm's database tables.
ClusterName = Annotated[
    str,
    matching(r"[a-z][a-z0-9_-]{0,39}", _CLUSTER_RULE),
    Field(json_schema_extra={"pattern": "^[a-z][a-z0-9_-]{0,39}$"}),
]
PlainName = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}", _SLURM_RULE)]
PartitionName = Annotated[PlainName, AfterValidator(_not_reserved)]
# Slurm's database stores accounts and QOS in lower case; other spellings would not be found.
AccountName = Annotated[str, matching(r"[a-z0-9][a-z0-9_.-]{0,47}", _LOWER_RULE)]
UserName = Annotated[str, matching(r"[a-z_][a-z0-9_-]{0,31}", _UNIX_RULE)]
Feature = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}", "use letters, digits, `-`, `_` and `.`")]
GpuType = Annotated[str, matching(r"[a-z0-9][a-z0-9_.-]{0,31}", "write it as Slurm's gres: `h100`, `a100`, `l4`")]
InstanceName = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "write it as the cloud does: `p5.48xlarge`, `BM.GPU.H100.8`")
]
Label = Annotated[str, matching(r"[^\x00-\x1f\x7f\"'`\\]{0,200}", "use one line without quotes, at most 200 letters")]
AbsolutePath = Annotated[str, matching(r"/[A-Za-z0-9_./@%+=~-]{0,254}", _PATH_RULE)]

_NAMES: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_LIST_SCHEMA = WithJsonSchema({"anyOf": _NAMES})

HostNames = Annotated[list[str], PlainValidator(_hostnames), _LIST_SCHEMA]
NodeCount = Annotated[
    "int | list[str]",
    PlainValidator(lambda value: _count_or_names(value, 1)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, *_NAMES]}),
]
SpareCount = Annotated[
    "int | list[str]",
    PlainValidator(lambda value: _count_or_names(value, 0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, *_NAMES]}),
]
Accounts = Annotated[list[AccountName], BeforeValidator(_listed), _LIST_SCHEMA]
Users = Annotated[list[UserName], BeforeValidator(_listed), _LIST_SCHEMA]
Groups = Users
Features = Annotated[list[Feature], BeforeValidator(_listed), _LIST_SCHEMA]
PartitionNames = Annotated[list[PartitionName], BeforeValidator(_listed), _LIST_SCHEMA]
PlainNames = Annotated[list[PlainName], BeforeValidator(_listed), _LIST_SCHEMA]

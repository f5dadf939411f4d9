"""The base class of all sections in the cluster file. Sections are strict and frozen, and store their path."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from dalsegno.hardware import closest
from dalsegno.spec.document import KeyPath, Table

_S = TypeVar("_S", bound="Section")


class Section(BaseModel):
    """A section of the cluster file. Unknown keys are refused, and values are not converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    _path: KeyPath = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _remember_place(cls: type[_S], data: Any, handler: ModelWrapValidatorHandler[_S]) -> _S:
        section = handler(data)
        if isinstance(data, Table):
            section._path = data.path
        return section


def place(section: Section) -> KeyPath:
    """Return the path of a section in its file; () for the root or a section without a file."""
    return section._path


def fault(what: str, hint: str = "") -> PydanticCustomError:
    """Return a validation error. `what` follows the name of the value in the message: "must be …, not …"."""
    return PydanticCustomError("fault", "{what}", {"what": what, "hint": hint})


def show(value: object) -> str:
    """Return a value for a message: its text, shortened and in backticks, or a word for its kind, such as `a list`."""
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = one_line(str(value)[:60])
    return f"`{text}…`" if len(str(value)) > 60 else f"`{text}`"


def one_line(text: str) -> str:
    """Replace line breaks and other unprintable characters in a text, so that it is safe for a terminal."""
    return "".join(c if c.isprintable() else "\\n" if c == "\n" else "?" for c in text)


# name of a setting in Slurm, a cloud or another tool -> its key in the cluster file
_ALIASES = {
    "maxtime": "time_limit",
    "max_time": "time_limit",
    "walltime": "time_limit",
    "timelimit": "time_limit",
    "defaulttime": "default_time",
    "maxnodes": "max_nodes",
    "minnodes": "min_nodes",
    "queues": "partitions",
    "slurmqueues": "partitions",
    "instance_type": "instance",
    "instancetype": "instance",
    "shape": "instance",
    "machine_type": "instance",
    "num_nodes": "nodes",
    "count": "nodes",
    "instance_count": "nodes",
    "hosts": "nodes",
    "mem": "memory",
    "ram": "memory",
    "realmemory": "memory",
    "vcpus": "cpus",
    "cores": "cpus",
    "gpus_per_node": "gpus",
    "gres": "gpus",
    "qos": "allow_qos",
    "preempt": "preempts",
    "fairshare": "fair_share",
    "shared": "oversubscribe",
    "constraint": "features",
    "mountdir": "mount",
    "mount_dir": "mount",
    "path": "mount",
    "username": "name",
    "ssh_key": "ssh_keys",
    "id": "uid",
    "cluster_name": "name",
}
# target without spot instances -> the hint for ParallelCluster's settings of them
_NO_SPOT = {
    "hyperpod": "HyperPod with Slurm has no spot instances; `training_plan` below `groups:` reserves capacity",
    "oci": "target `oci` has no spot instances",
}
_SPOT_KEYS = ("capacity_type", "spot_price")
_LISTED = 14


def meant_key(root: type[Section], path: KeyPath, key: str) -> str:
    """Return the known key that an unknown `key` in the section at `path` probably means, or ""."""
    model = _model_at(root, path)
    if model is None:
        return ""
    wanted = _normalized(key)
    candidates = (wanted, _ALIASES.get(wanted, ""), closest(key, model.model_fields))
    return next((name for name in candidates if name in model.model_fields), "")


def hint_unknown(root: type[Section], path: KeyPath, key: str) -> str:
    """Return a hint for the unknown `key` in the section at `path`."""
    if path and _normalized(key) in _SPOT_KEYS and path[0] in _NO_SPOT:
        return _NO_SPOT[str(path[0])]
    if meant := meant_key(root, path, key):
        return f"did you mean `{meant}`?"
    model = _model_at(root, path)
    return "" if model is None else _elsewhere(root, model, _normalized(key)) or _listing(list(model.model_fields))


def _normalized(key: str) -> str:
    return key.lower().replace("-", "_")


def required_keys(root: type[Section], block: str) -> list[str]:
    """Return the required keys in a block of the file."""
    model = _section_in(root.model_fields[block].annotation)
    return [name for name, info in model.model_fields.items() if info.is_required()] if model else []


def _elsewhere(root: type[Section], model: type[Section], key: str) -> str:
    below = [name for name, child in _children(model) if key in child.model_fields]
    if below:
        return f"it belongs under `{below[0]}:`"
    if key in root.model_fields and model is not root:
        return "it belongs at the top of the file"
    deeper = [name for name, child in _children(root) if key in child.model_fields]
    return f"it belongs under `{deeper[0]}:`" if deeper and model is not root else ""


def _listing(known: list[str]) -> str:
    return f"known here: {', '.join(known)}" if len(known) <= _LISTED else "`dalsegno schema` lists all keys"


def _children(model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, info in model.model_fields.items():
        if child := _section_in(info.annotation):
            yield name, child


def _model_at(root: type[Section], path: KeyPath) -> type[Section] | None:
    """Return the model of the mapping at `path`. Steps that are list indices or free keys do not change the model."""
    model: type[Section] | None = root
    for step in path:
        if model is not None and isinstance(step, str) and step in model.model_fields:
            model = _section_in(model.model_fields[step].annotation)
    return model


def _section_in(annotation: Any) -> type[Section] | None:
    # On Python 3.10, `list[int]` is also an instance of `type`.
    if typing.get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (_section_in(part) for part in typing.get_args(annotation))
    return next((section for section in found if section), None)

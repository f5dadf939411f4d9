"""The plan of one machine as a value: its packages, accounts, folders, files, services and commands.

A target computes a `NodePlan` for each machine. `setup/applier.py` makes a machine match its plan. For this module, it
makes no difference whether the plan reaches the machine over ssh or in a bootstrap script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dalsegno.spec.facts import facts_to_json


@dataclass(frozen=True)
class PlannedUser:
    """An account that must exist. The gid of its private group equals its uid.

    An account that already exists on the machine is not changed. A different uid of that account is an error.
    """

    name: str
    uid: int
    full_name: str = ""
    home: str = ""  # "" means /home/NAME
    shell: str = "/bin/bash"
    ssh_keys: tuple[str, ...] = ()
    make_home: bool = True  # false if another machine creates the home on shared storage
    cluster_key: bool = False  # whether to create an SSH key with which the user can log in to the other machines
    directory: bool = False  # whether the account is in a directory, so that this machine only stores the home


@dataclass(frozen=True)
class PlannedGroup:
    """A group, and the members that the cluster adds to it. An existing group keeps its other members."""

    name: str
    gid: int | None = None  # None if the machine already has the group
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedFolder:
    """A folder with its owner and mode. A removal deletes a folder that the plan created, with its content, unless
    `keep` is set."""

    path: str
    mode: int = 0o755
    owner: str = "root"
    group: str = "root"
    keep: bool = False  # whether a removal leaves the folder, because users' files are in it


@dataclass(frozen=True)
class PlannedMount:
    """A line of /etc/fstab, and the mount point of that line. A removal unmounts the file system."""

    path: str
    line: str


@dataclass(frozen=True)
class PlannedFile:
    """A file with its owner and mode. If `block` is set, the content is only a marked block in a file that others also
    edit."""

    path: str
    content: str
    mode: int = 0o644
    owner: str = "root"
    group: str = "root"
    block: bool = False
    secret: bool = False  # whether the content must not be shown


@dataclass(frozen=True)
class PlannedLink:
    """A symbolic link."""

    path: str
    to: str


@dataclass(frozen=True)
class PlannedCommand:
    """A command that runs only if needed: if the path `creates` does not exist, or, without `creates`, if the command
    `unless` fails.

    It runs before the services are started, or when the service named by `after` is ready.
    """

    name: str
    argv: tuple[str, ...]
    creates: str = ""
    unless: tuple[str, ...] = ()
    after: str = ""


@dataclass(frozen=True)
class PlannedService:
    """A daemon. It is restarted when `revision` changes.

    Under systemd, `unit` names a unit of the distribution. If it is empty, the applier writes a unit that runs `argv`.
    On a machine without systemd, Dal Segno's own init runs `argv`. The command `ready` succeeds when the daemon
    answers.
    """

    name: str
    argv: tuple[str, ...]
    log: str
    env: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""
    unit: str = ""
    ready: tuple[str, ...] = ()
    keep: bool = False  # whether it is restarted if it dies


@dataclass(frozen=True)
class HostParts:
    """The part of a machine's plan that serves one purpose, such as storage or monitoring. `+` combines two parts."""

    packages: tuple[str, ...] = ()
    folders: tuple[PlannedFolder, ...] = ()
    files: tuple[PlannedFile, ...] = ()
    commands: tuple[PlannedCommand, ...] = ()
    services: tuple[PlannedService, ...] = ()
    mounts: tuple[PlannedMount, ...] = ()

    def __add__(self, other: HostParts) -> HostParts:
        return HostParts(
            (*self.packages, *(name for name in other.packages if name not in self.packages)),
            (*self.folders, *other.folders),
            (*self.files, *other.files),
            (*self.commands, *other.commands),
            (*self.services, *other.services),
            (*self.mounts, *other.mounts),
        )


@dataclass(frozen=True)
class NodePlan:
    """The plan of one machine. `bundle` is the key of our code in /opt/dalsegno; "" if the machine does not need the
    code."""

    cluster: str
    cluster_id: str
    host: str
    packages: tuple[str, ...] = ()
    users: tuple[PlannedUser, ...] = ()
    groups: tuple[PlannedGroup, ...] = ()
    folders: tuple[PlannedFolder, ...] = ()
    files: tuple[PlannedFile, ...] = ()
    links: tuple[PlannedLink, ...] = ()
    bundle: str = ""
    python: str = "/usr/bin/python3"
    commands: tuple[PlannedCommand, ...] = ()
    services: tuple[PlannedService, ...] = ()
    mounts: tuple[PlannedMount, ...] = ()

    def file(self, path: str) -> PlannedFile:
        """Return the planned file with this path."""
        return next(each for each in self.files if each.path == path)


def plan_to_json(plan: NodePlan) -> dict[str, Any]:
    """Return the whole plan as JSON, including its secrets."""
    return facts_to_json(plan)


def outline(plan: NodePlan) -> dict[str, Any]:
    """Return the plan as JSON with digests in place of file contents. This is enough to compare a machine with the
    plan, and it contains no secret."""
    bare = facts_to_json(replace(plan, files=tuple(replace(each, content="") for each in plan.files)))
    for each, file in zip(bare["files"], plan.files, strict=True):
        del each["content"]
        each["digest"] = content_digest(file.content)
    return bare


def content_digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()

"""The cluster's users inside virtual hosts: the machine's passwd and group files with ours added. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.spec.facts import User

FIRST_UID = 20001  # above what distributions hand out, below the range of subordinate ids


@dataclass(frozen=True)
class People:
    """The machine's own users and groups, as its two files tell."""

    passwd: str = ""
    group: str = ""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(_column(self.passwd, 0))

    @property
    def ids(self) -> frozenset[int]:
        numbers = _column(self.passwd, 2) + _column(self.passwd, 3) + _column(self.group, 2)
        return frozenset(int(number) for number in numbers if number.isdigit())


def _column(text: str, index: int) -> list[str]:
    return [fields[index] for line in text.splitlines() if len(fields := line.split(":")) > index]


def assign_uids(users: Sequence[User], machine: People, before: Mapping[str, int]) -> dict[str, int]:
    """A uid for each user whom the machine does not know. Who has one keeps it, and it is never given to another."""
    fixed = {user.name: user.uid for user in users if user.uid is not None and user.name not in machine.names}
    taken = {*machine.ids, *fixed.values(), *before.values()}
    free = (uid for uid in range(FIRST_UID, FIRST_UID + 1_000_000) if uid not in taken)
    uids = {**before, **fixed}
    for user in users:
        if user.name not in machine.names and user.name not in uids:
            uids[user.name] = next(free)
    return uids


def passwd_file(machine: People, users: Sequence[User], uids: Mapping[str, int], homes: str) -> str:
    added = [f"{name}:x:{uids[name]}:{uids[name]}::{homes}/{name}:/bin/bash" for name in _new(machine, users)]
    return "\n".join([machine.passwd.rstrip("\n"), *added]) + "\n"


def group_file(machine: People, users: Sequence[User], uids: Mapping[str, int]) -> str:
    """A group of its own for each new user, and the groups that the cluster file puts users into."""
    own = [f"{name}:x:{uids[name]}:" for name in _new(machine, users)]
    joined: dict[str, list[str]] = {}
    for user in users:
        for group in user.groups:
            joined.setdefault(group, []).append(user.name)
    lines = [_with_members(line, joined.pop(line.split(":")[0], [])) for line in machine.group.splitlines()]
    first_gid = max([FIRST_UID + 1_000_000, *(uid + 1 for uid in uids.values())])
    fresh = [
        f"{name}:x:{first_gid + index}:{','.join(members)}" for index, (name, members) in enumerate(joined.items())
    ]
    return "\n".join([*lines, *own, *fresh]) + "\n"


def _new(machine: People, users: Sequence[User]) -> list[str]:
    return [user.name for user in users if user.name not in machine.names]


def _with_members(line: str, members: Sequence[str]) -> str:
    if not members:
        return line
    return line + ("" if line.endswith(":") else ",") + ",".join(members)

"""The cluster's users inside virtual hosts: the machine's passwd and group files with ours added. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.spec.facts import User

FIRST_UID = 20001  # above what distributions hand out, below the range of subordinate ids


def new_users(machine_passwd: str, users: Sequence[User]) -> list[tuple[User, int]]:
    """Users the machine does not know, each with a uid of its own; the machine's own accounts stay as they are."""
    known = {line.split(":")[0] for line in machine_passwd.splitlines()}
    taken = {
        int(field[2])
        for line in machine_passwd.splitlines()
        if len(field := line.split(":")) > 2 and field[2].isdigit()
    }
    taken |= {user.uid for user in users if user.uid is not None}
    free = (uid for uid in range(FIRST_UID, FIRST_UID + 100_000) if uid not in taken)
    return [(user, next(free) if user.uid is None else user.uid) for user in users if user.name not in known]


def passwd_file(machine_passwd: str, users: Sequence[User], homes: str) -> str:
    added = [
        f"{user.name}:x:{uid}:{uid}::{homes}/{user.name}:/bin/bash" for user, uid in new_users(machine_passwd, users)
    ]
    return "\n".join([machine_passwd.rstrip("\n"), *added]) + "\n"


def group_file(machine_passwd: str, machine_group: str, users: Sequence[User]) -> str:
    added = [f"{user.name}:x:{uid}:" for user, uid in new_users(machine_passwd, users)]
    return "\n".join([machine_group.rstrip("\n"), *added]) + "\n"

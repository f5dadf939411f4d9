"""The user and group files of virtual hosts: those of the machine, with the cluster's users and groups added. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.spec.facts import User
from dalsegno.users.accounts import AccountSet
from dalsegno.users.checks import People


def shared_accounts(users: Sequence[User], machine: People) -> list[str]:
    """Return a sentence for each user of the cluster who already has an account on this machine."""
    found = [(user, account) for user in users if (account := machine.account(user.name))]
    kept = "; its full name and SSH keys are not changed"
    return [
        f"user {user.name} is this machine's account of that name (uid {account.uid})"
        f"{kept if user.full_name or user.ssh_keys else ''}"
        for user, account in found
    ]


def passwd_file(machine: People, accounts: AccountSet) -> str:
    added = [
        f"{user.name}:x:{user.uid}:{user.gid}:{user.full_name}:{user.home}:{user.shell}"
        for user in accounts.users.values()
    ]
    return "\n".join([machine.passwd.rstrip("\n"), *added]) + "\n"


def group_file(machine: People, users: Sequence[User], accounts: AccountSet) -> str:
    """Return /etc/group with the groups of the cluster, and with its users added to groups of the machine."""
    lines = [_with_members(line, users) for line in machine.group.splitlines()]
    added = [f"{group.name}:x:{group.gid}:{','.join(group.members)}" for group in accounts.groups.values()]
    return "\n".join([*lines, *added]) + "\n"


def _with_members(line: str, users: Sequence[User]) -> str:
    name, _, listed = line.partition(":")
    there = listed.rpartition(":")[2].split(",")
    members = [user.name for user in users if name in user.groups and user.name not in there]
    if not members:
        return line
    return line + ("" if line.endswith(":") else ",") + ",".join(members)

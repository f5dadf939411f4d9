"""Accounts as values, and the difference between the wanted accounts and the existing ones. Pure.

The difference is an `AccountPlan`. `LdapDirectory` carries it out, and `dalsegno plan` shows it as sentences. Accounts
in /etc/passwd are compared on the machines themselves (`setup/machine_accounts.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.users.checks import People

SHELL = "/bin/bash"
# The text for each field in the sentences of a plan.
_FIELDS = {"full_name": "full name", "home": "home", "shell": "shell", "ssh_keys": "SSH keys"}
_NAMED = 4  # a sentence lists at most this many names


@dataclass(frozen=True)
class PosixUser:
    """An account: its ids, its home folder, and the public SSH keys with which the user can log in."""

    name: str
    uid: int
    gid: int
    full_name: str = ""
    home: str = ""
    ssh_keys: tuple[str, ...] = ()
    shell: str = SHELL


@dataclass(frozen=True)
class PosixGroup:
    """A group and its members. A user's own group does not list that user."""

    name: str
    gid: int
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class AccountSet:
    """Users and groups by name."""

    users: Mapping[str, PosixUser] = field(default_factory=dict)
    groups: Mapping[str, PosixGroup] = field(default_factory=dict)

    @staticmethod
    def of(users: Iterable[PosixUser], groups: Iterable[PosixGroup]) -> AccountSet:
        return AccountSet({user.name: user for user in users}, {group.name: group for group in groups})

    @property
    def ids(self) -> frozenset[int]:
        """All uids and gids of these accounts."""
        users = [number for user in self.users.values() for number in (user.uid, user.gid)]
        return frozenset([*users, *(group.gid for group in self.groups.values())])


@dataclass(frozen=True)
class UserEdit:
    before: PosixUser
    after: PosixUser

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields that change."""
        return tuple(name for name in _FIELDS if getattr(self.before, name) != getattr(self.after, name))


@dataclass(frozen=True)
class GroupEdit:
    before: PosixGroup
    after: PosixGroup

    @property
    def joined(self) -> tuple[str, ...]:
        return tuple(name for name in self.after.members if name not in self.before.members)

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(name for name in self.before.members if name not in self.after.members)


@dataclass(frozen=True)
class AccountPlan:
    """The changes that turn the existing accounts into the wanted ones."""

    add_groups: tuple[PosixGroup, ...] = ()
    add_users: tuple[PosixUser, ...] = ()
    edit_users: tuple[UserEdit, ...] = ()
    edit_groups: tuple[GroupEdit, ...] = ()
    remove_users: tuple[PosixUser, ...] = ()
    remove_groups: tuple[PosixGroup, ...] = ()

    @property
    def empty(self) -> bool:
        return not (
            self.add_groups or self.add_users or self.edit_users or self.edit_groups or self.remove_users
            or self.remove_groups
        )  # fmt: skip

    def sentences(self) -> list[str]:
        """Return the changes as sentences, without the private groups of added and removed users."""
        people = {user.name for user in (*self.add_users, *self.remove_users)}
        edits = [f"{edit.after.name} ({', '.join(_FIELDS[name] for name in edit.fields)})" for edit in self.edit_users]
        moved = [
            *(f"{name} joins {edit.after.name}" for edit in self.edit_groups for name in edit.joined),
            *(f"{name} leaves {edit.after.name}" for edit in self.edit_groups for name in edit.left),
        ]
        lines = [
            ("adds user", [f"{user.name} (uid {user.uid})" for user in self.add_users], ""),
            ("changes user", edits, ""),
            ("removes user", [user.name for user in self.remove_users], "; home folders are kept"),
            (
                "adds group",
                [f"{each.name} (gid {each.gid})" for each in self.add_groups if each.name not in people],
                "",
            ),
            ("removes group", [group.name for group in self.remove_groups if group.name not in people], ""),
        ]
        return [f"{verb}{_listed(names)}{end}" for verb, names, end in lines if names] + [
            f"changes groups: {_joined(moved)}" for _ in moved[:1]
        ]


def _listed(names: list[str]) -> str:
    return f" {names[0]}" if len(names) == 1 else f"s {_joined(names)}"


def _joined(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def plan_accounts(wanted: AccountSet, found: AccountSet, former: AccountSet | None = None) -> AccountPlan:
    """Return the plan that changes the existing accounts `found` into the wanted ones.

    `former` are the accounts that the last plan wanted. Those that are no longer wanted are removed. Existing accounts
    that are neither wanted nor in `former` belong to others and are not changed. Keys and members that others added are
    kept.
    """
    former = former or AccountSet()
    _refuse_conflicts(wanted, found)
    users = {name: _with_foreign_keys(user, found, former) for name, user in wanted.users.items()}
    groups = {name: _with_foreign_members(group, found, former) for name, group in wanted.groups.items()}
    return AccountPlan(
        add_groups=tuple(group for name, group in groups.items() if name not in found.groups),
        add_users=tuple(user for name, user in users.items() if name not in found.users),
        edit_users=tuple(
            UserEdit(found.users[name], user)
            for name, user in users.items()
            if name in found.users and _differs(found.users[name], user)
        ),
        edit_groups=tuple(
            GroupEdit(found.groups[name], group)
            for name, group in groups.items()
            if name in found.groups and set(found.groups[name].members) != set(group.members)
        ),
        remove_users=tuple(found.users[name] for name in _gone(former.users, wanted.users, found.users)),
        remove_groups=tuple(found.groups[name] for name in _gone(former.groups, wanted.groups, found.groups)),
    )


def _gone(former: Collection[str], wanted: Collection[str], found: Collection[str]) -> list[str]:
    return [name for name in former if name not in wanted and name in found]


def _differs(found: PosixUser, wanted: PosixUser) -> bool:
    return replace(found, ssh_keys=()) != replace(wanted, ssh_keys=()) or set(found.ssh_keys) != set(wanted.ssh_keys)


def _with_foreign_keys(user: PosixUser, found: AccountSet, former: AccountSet) -> PosixUser:
    there = found.users.get(user.name)
    if there is None:
        return user
    ours = {*user.ssh_keys, *(former.users[user.name].ssh_keys if user.name in former.users else ())}
    return replace(user, ssh_keys=(*user.ssh_keys, *(key for key in there.ssh_keys if key not in ours)))


def _with_foreign_members(group: PosixGroup, found: AccountSet, former: AccountSet) -> PosixGroup:
    there = found.groups.get(group.name)
    if there is None:
        return group
    before = former.groups.get(group.name)
    ours = {*group.members, *(before.members if before else ()), *former.users}
    return replace(group, members=(*group.members, *(name for name in there.members if name not in ours)))


def _refuse_conflicts(wanted: AccountSet, found: AccountSet) -> None:
    """Raise if a wanted account has the name or the id of another account in the directory."""
    owners = {user.uid: user.name for user in found.users.values()}
    group_owners = {group.gid: group.name for group in found.groups.values()}
    for user in wanted.users.values():
        there = found.users.get(user.name)
        if there is not None and (there.uid, there.gid) != (user.uid, user.gid):
            raise TargetError(
                f"user `{user.name}` is in the directory already, with uid {there.uid} and gid {there.gid}",
                hint=f"choose another name, or give the uid {there.uid} if it is the same person",
            )
        if owners.get(user.uid, user.name) != user.name:
            raise TargetError(
                f"uid {user.uid} of user `{user.name}` belongs to {owners[user.uid]} in the directory",
                hint="leave the uid out, or choose a free one",
            )
    for group in wanted.groups.values():
        existing = found.groups.get(group.name)
        if existing is not None and existing.gid != group.gid:
            raise TargetError(
                f"group `{group.name}` is in the directory already, with gid {existing.gid}",
                hint=f"choose another name, or give the gid {existing.gid}",
            )
        if group_owners.get(group.gid, group.name) != group.name:
            raise TargetError(
                f"gid {group.gid} of group `{group.name}` belongs to {group_owners[group.gid]} in the directory",
                hint="leave the gid out, or choose a free one",
            )


def cluster_accounts(
    cluster: Cluster, machine: People, uids: Mapping[str, int], gids: Mapping[str, int], homes: str
) -> AccountSet:
    """Return the users and groups of the cluster that do not exist on the machine. Each user has their own group."""
    own = [user for user in cluster.users if user.name not in machine.names and user.name in uids]
    users = [
        PosixUser(user.name, uids[user.name], uids[user.name], user.full_name, f"{homes}/{user.name}", user.ssh_keys)
        for user in own
    ]
    named = dict.fromkeys(
        [*(each.name for each in cluster.groups), *(g for each in cluster.users for g in each.groups)]
    )
    groups = [PosixGroup(user.name, uids[user.name]) for user in own]
    groups += [
        PosixGroup(name, gids[name], tuple(user.name for user in cluster.users if name in user.groups))
        for name in named
        if name in gids and name not in machine.groups
    ]
    return AccountSet.of(users, groups)

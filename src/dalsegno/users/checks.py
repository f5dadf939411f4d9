"""The accounts of a machine, the ids of new users and groups, and the rules by which users and groups are refused.
Pure.

A new user must never silently get the rights of an existing account: its uid, its name, or a privileged group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Group, User

FIRST_UID = 20001  # the first uid to assign: above the distributions' own, below the range of subordinate ids
FIRST_GID = FIRST_UID + 1_000_000
FIRST_PERSON, NOBODY = 1000, 65534  # uids below 1000, and 65534, are system accounts
OCI_PRIVILEGE, OCI_PRIVILEGE_GID = "privilege", 9876  # the group that may run containers on OCI's HPC stack
# Members of these groups can become root on the machine, or can read files of root or of the cluster's daemons. On
# Debian, `staff` may write to /usr/local. The group of slapd can read the key of its certificate.
PRIVILEGED = frozenset({
    "root", "wheel", "sudo", "admin", "docker", "podman", "lxd", "incus", "libvirt", "disk", "shadow", "kmem", "mem",
    "adm", "systemd-journal", "staff", "ssl-cert", "slurm", "munge", "mysql", "openldap", "ldap", OCI_PRIVILEGE,
})  # fmt: skip


@dataclass(frozen=True)
class PasswdEntry:
    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class People:
    """The machine's own users and groups, from /etc/passwd and /etc/group."""

    passwd: str = ""
    group: str = ""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(_column(self.passwd, 0))

    @property
    def ids(self) -> frozenset[int]:
        numbers = _column(self.passwd, 2) + _column(self.passwd, 3) + _column(self.group, 2)
        return frozenset(int(number) for number in numbers if number.isdigit())

    @property
    def groups(self) -> dict[str, int]:
        rows = (line.split(":") for line in self.group.splitlines())
        return {row[0]: int(row[2]) for row in rows if len(row) > 2 and row[2].isdigit()}

    def accounts(self) -> list[PasswdEntry]:
        rows = [row for line in self.passwd.splitlines() if len(row := line.split(":")) > 3]
        return [PasswdEntry(row[0], int(row[2]), int(row[3])) for row in rows if row[2].isdigit() and row[3].isdigit()]

    def account(self, name: str) -> PasswdEntry | None:
        return next((account for account in self.accounts() if account.name == name), None)

    def privileges(self, account: PasswdEntry) -> list[str]:
        """Return the privileged groups that an account is in."""
        rows = [row for line in self.group.splitlines() if len(row := line.split(":")) > 3 and row[2].isdigit()]
        mine = [row[0] for row in rows if account.name in row[3].split(",") or int(row[2]) == account.gid]
        powerful = {name for name, gid in self.groups.items() if gid in (0, OCI_PRIVILEGE_GID)} | PRIVILEGED
        return sorted(powerful.intersection(mine))


def _column(text: str, index: int) -> list[str]:
    return [fields[index] for line in text.splitlines() if len(fields := line.split(":")) > index]


def _is_system(account: PasswdEntry) -> bool:
    return is_system_uid(account.uid)


def is_system_uid(uid: int) -> bool:
    return uid < FIRST_PERSON or uid == NOBODY


def check_people(
    users: Sequence[User], machine: People, before: Mapping[str, int], groups: Sequence[Group] = ()
) -> None:
    """Raise if a user would get the rights of another person on this machine, or if two users have the same uid.

    `before` has the uids that were assigned earlier. `groups` are the groups of the cluster.
    """
    gids = {**{group.name: group.gid for group in groups}, **machine.groups}
    for user in users:
        account = machine.account(user.name)
        if account is not None:
            _check_account(user, account, machine, before)
        else:
            _check_new(user, before, machine)
        check_groups(user, gids)
    fixed = [user.uid for user in users if user.uid is not None]
    if twice := {uid for uid in fixed if fixed.count(uid) > 1}:
        names = " and ".join(f"`{user.name}`" for user in users if user.uid in twice)
        raise TargetError(f"{names} have the same uid", hint="give each user a `uid` of its own, or leave it out")


def _check_account(user: User, account: PasswdEntry, machine: People, before: Mapping[str, int]) -> None:
    """Check a user whose name is also the name of an account on the machine.

    Raise for a system account, for a user who already has a uid in the cluster, and for a uid that differs from the
    account's. For a privileged account, also raise if the user has no `uid`, which would confirm that both are the same
    person.
    """
    name, other = f"`{user.name}`", "choose another name"
    if _is_system(account):
        raise TargetError(f"{name} is a system account of this machine (uid {account.uid})", hint=other)
    if user.name in before:
        raise TargetError(
            f"{name} is a user of the cluster with uid {before[user.name]}, and an account of this machine with uid "
            f"{account.uid}", hint=f"{other}, or remove that account",
        )  # fmt: skip
    same = f"{other}, or give the uid {account.uid} if it is the same person"
    if user.uid not in (None, account.uid):
        raise TargetError(f"{name} has uid {account.uid} on this machine, not {user.uid}", hint=same)
    if user.uid is None and (powers := machine.privileges(account)):
        raise TargetError(f"{name} is an account of this machine with the rights of {', '.join(powers)}", hint=same)


def check_added(users: Sequence[User], machine: People) -> None:
    """Raise if `dalsegno user` adds a user who already has an account on this machine, unless the command states its
    uid.

    `check_people` refuses system accounts.
    """
    for user in users:
        account = machine.account(user.name)
        if user.added and user.uid is None and account is not None and not _is_system(account):
            raise TargetError(
                f"`{user.name}` is an account of this machine (uid {account.uid})",
                hint=f"choose another name, or give the uid {account.uid} if it is the same person",
            )


def _check_new(user: User, uids: Mapping[str, int], machine: People) -> None:
    before = uids.get(user.name)
    other = next((name for name, uid in uids.items() if uid == user.uid and name != user.name), None)
    if other is not None:  # this includes removed users, because their files still exist
        raise TargetError(
            f"uid {user.uid} of user `{user.name}` belongs to {other}, who is or was a user of the cluster",
            hint="leave the uid out, or choose a free one",
        )
    if user.name in machine.groups:
        raise TargetError(f"`{user.name}` is a group of this machine", hint="choose another name")
    if before is not None and user.uid not in (None, before):
        raise TargetError(
            f"the uid of user `{user.name}` cannot change from {before} to {user.uid}: existing files keep their owner",
            hint=f"give the uid {before}, or leave it out",
        )
    uid = user.uid or before
    if uid is not None and uid in machine.ids:
        owner = next((account.name for account in machine.accounts() if account.uid == uid), "a group")
        hint = "leave the uid out, or choose a free one" if user.uid else "give that account another uid"
        raise TargetError(f"uid {uid} of user `{user.name}` belongs to {owner} on this machine", hint=hint)


def check_groups(user: User, gids: Mapping[str, int | None]) -> None:
    """Raise if a user is in a privileged group without being allowed to by name (`allow_privileged`). `gids` has the
    gids of known groups."""
    for group in user.groups:
        privileged = group in PRIVILEGED or gids.get(group) in (0, OCI_PRIVILEGE_GID)
        if privileged and group not in user.allow_privileged:
            raise TargetError(
                f"group `{group}` would give user `{user.name}` rights over this machine",
                hint=f"leave it out, or allow it by name: `--allow-privileged {group}`, in the cluster file "
                f"`allow_privileged: [{group}]`",
            )


def check_new_groups(
    groups: Sequence[Group], machine: People, before: Mapping[str, int], uids: Mapping[str, int]
) -> None:
    """Raise if a group would get the gid of another group or account or the name of an account, or if its gid changes.

    `before` has the gids that were assigned earlier. `uids` has the uids of the cluster's users, which are also gids.
    """
    for group in groups:
        others = [*before.items(), *uids.items()]
        other = next((name for name, gid in others if gid == group.gid and name != group.name), None)
        if other is not None:
            raise TargetError(
                f"gid {group.gid} of group `{group.name}` belongs to {other} in the cluster", hint="choose a free gid"
            )
        found = machine.groups.get(group.name)
        if found is not None and group.gid not in (None, found):
            raise TargetError(
                f"group `{group.name}` has gid {found} on this machine, not {group.gid}",
                hint=f"choose another name, or give the gid {found}",
            )
        if found is None and group.name in machine.names:
            raise TargetError(f"group `{group.name}` has the name of an account", hint="choose another name")
        if found is None and group.gid is not None and group.gid in machine.ids:
            raise TargetError(
                f"gid {group.gid} of group `{group.name}` is in use on this machine", hint="choose a free gid"
            )
        if group.gid is not None and before.get(group.name, group.gid) != group.gid:
            raise TargetError(
                f"the gid of group `{group.name}` cannot change from {before[group.name]} to {group.gid}: existing "
                "files keep their group",
                hint=f"give the gid {before[group.name]}, or leave it out",
            )


def assign_uids(
    users: Sequence[User], machine: People, before: Mapping[str, int], in_use: Collection[int] = ()
) -> dict[str, int]:
    """Return a uid for each user without an account on the machine, and all uids that were assigned `before`.

    Users keep the uid that they have, and no uid is assigned twice. `in_use` has further ids that must not be assigned,
    for example those in a directory.
    """
    fixed = {user.name: user.uid for user in users if user.uid is not None and user.name not in machine.names}
    taken = {*machine.ids, *fixed.values(), *before.values(), *in_use}
    free = (uid for uid in range(FIRST_UID, FIRST_GID) if uid not in taken)
    uids = {**before, **fixed}
    for user in users:
        if user.name not in machine.names and user.name not in uids:
            uids[user.name] = next(free)
    return uids


def assign_gids(
    users: Sequence[User],
    groups: Sequence[Group],
    machine: People,
    uids: Mapping[str, int],
    before: Mapping[str, int],
    in_use: Collection[int] = (),
) -> dict[str, int]:
    """Return a gid for each group that the cluster or its users name and that does not exist on the machine.

    The result also has all gids that were assigned `before`. Groups keep the gid that they have, and no gid is assigned
    twice. The group `privilege` gets the gid that OCI gives it, if that gid is free.
    """
    fixed = {group.name: group.gid for group in groups if group.gid is not None}
    wanted = dict.fromkeys([*(group.name for group in groups), *(name for user in users for name in user.groups)])
    taken = {*machine.ids, *uids.values(), *fixed.values(), *before.values(), *in_use}
    if OCI_PRIVILEGE_GID not in taken:
        fixed.setdefault(OCI_PRIVILEGE, OCI_PRIVILEGE_GID)
    free = (gid for gid in count(FIRST_GID) if gid not in taken)
    gids = dict(before)
    for name in wanted:
        if name not in machine.groups and name not in uids and name not in gids:
            gids[name] = fixed.get(name) or next(free)
    return gids

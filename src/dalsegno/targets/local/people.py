"""The users of virtual hosts: the machine's passwd and group files with the cluster's users added. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.errors import TargetError
from dalsegno.spec.facts import User

FIRST_UID = 20001  # above the uids that distributions assign, below the range of subordinate ids
FIRST_PERSON, NOBODY = 1000, 65534  # uids below 1000, and 65534, are system accounts
# Members of these groups are as powerful as root on the machine, or may read files that only root should read.
PRIVILEGED = frozenset({
    "root", "wheel", "sudo", "admin", "docker", "podman", "lxd", "incus", "libvirt", "disk", "shadow", "kmem", "mem",
    "adm", "systemd-journal",
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
        powerful = {name for name, gid in self.groups.items() if gid == 0} | PRIVILEGED
        return sorted(powerful.intersection(mine))


def _column(text: str, index: int) -> list[str]:
    return [fields[index] for line in text.splitlines() if len(fields := line.split(":")) > index]


def check_people(users: Sequence[User], machine: People, before: Mapping[str, int]) -> None:
    """Raise if a user would get the rights of another person on this machine. `before`: uids assigned earlier."""
    for user in users:
        account = machine.account(user.name)
        if account is not None:
            _check_account(user, account, machine, before)
        else:
            _check_new(user, user.uid or before.get(user.name), machine)
        _check_groups(user, machine)
    fixed = [user.uid for user in users if user.uid is not None]
    if twice := {uid for uid in fixed if fixed.count(uid) > 1}:
        names = " and ".join(f"`{user.name}`" for user in users if user.uid in twice)
        raise TargetError(f"{names} have the same uid", hint="give each user a `uid` of its own, or leave it out")


def _check_account(user: User, account: PasswdEntry, machine: People, before: Mapping[str, int]) -> None:
    """Check a user whose name is also an account of the machine.

    Refuse a system account, a name that already has its own uid in the cluster, a uid that differs, and a privileged
    account unless the cluster file gives its uid.
    """
    name, other = f"`{user.name}`", "choose another name in the cluster file"
    if account.uid < FIRST_PERSON or account.uid == NOBODY:
        raise TargetError(f"{name} is a system account of this machine (uid {account.uid})", hint=other)
    if user.name in before:
        raise TargetError(
            f"{name} is a user of the cluster with uid {before[user.name]}, and an account of this machine with uid "
            f"{account.uid}", hint=f"{other}, or remove that account",
        )  # fmt: skip
    if user.uid not in (None, account.uid):
        raise TargetError(
            f"{name} has uid {user.uid} in the cluster file and uid {account.uid} on this machine",
            hint=f"{other}, or write `uid: {account.uid}` if it is the same person",
        )
    if user.uid is None and (powers := machine.privileges(account)):
        raise TargetError(
            f"{name} is an account of this machine with the rights of {', '.join(powers)}",
            hint=f"{other}, or write `uid: {account.uid}` if it is the same person",
        )


def _check_new(user: User, uid: int | None, machine: People) -> None:
    if user.name in machine.groups:
        raise TargetError(f"`{user.name}` is a group of this machine", hint="choose another name in the cluster file")
    if uid is not None and uid in machine.ids:
        owner = next((account.name for account in machine.accounts() if account.uid == uid), "a group")
        hint = "leave `uid` out, or choose a free one" if user.uid else "give that account another uid"
        raise TargetError(f"uid {uid} of user `{user.name}` belongs to {owner} on this machine", hint=hint)


def _check_groups(user: User, machine: People) -> None:
    for group in user.groups:
        if group in PRIVILEGED or machine.groups.get(group) == 0:
            raise TargetError(
                f"group `{group}` would give user `{user.name}` rights over this machine",
                hint="leave it out of the user's `groups`",
            )


def shared_accounts(users: Sequence[User], machine: People) -> list[str]:
    """Return a sentence for each user of the cluster who already has an account on this machine."""
    found = [account for user in users if (account := machine.account(user.name))]
    return [f"user {each.name} is this machine's account of that name (uid {each.uid})" for each in found]


def assign_uids(users: Sequence[User], machine: People, before: Mapping[str, int]) -> dict[str, int]:
    """Return a uid for each user without an account on the machine. Users keep their uids, and no uid is assigned
    twice."""
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
    """Return /etc/group with a group for each new user, and with users added to the groups that the cluster file
    names."""
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

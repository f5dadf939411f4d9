"""Users and groups that commands add to those of the cluster file. Pure.

Commands must not change users that the cluster file names, because the next `up` would undo the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dalsegno.errors import NotThere, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.spec.facts import BUILT_IN_QOS, DEFAULT_ACCOUNT, Account, Cluster, Group, User
from dalsegno.users.checks import OCI_PRIVILEGE, OCI_PRIVILEGE_GID

_DEFAULT = Account(DEFAULT_ACCOUNT, description="users without an account of their own")
_IN_FILE = "change it in the cluster file, then run `dalsegno up`"


@dataclass(frozen=True)
class Roster:
    """All users and groups of a cluster: those of its file, and those that commands added."""

    users: tuple[User, ...] = ()
    groups: tuple[Group, ...] = ()

    def user(self, name: str) -> User:
        found = next((user for user in self.users if user.name == name), None)
        if found is None:
            known = [user.name for user in self.users]
            raise NotThere(
                f"there is no user `{name}`", hint=did_you_mean(name, known, "`dalsegno user ls` lists them")
            )
        return found

    def group(self, name: str) -> Group:
        found = next((group for group in self.groups if group.name == name), None)
        if found is None:
            known = [group.name for group in self.groups]
            hint = did_you_mean(name, known, "`dalsegno group ls` lists them")
            raise NotThere(f"there is no group `{name}`", hint=hint)
        return found

    def members(self, group: str) -> list[str]:
        return [user.name for user in self.users if group in user.groups]


def roster_of(cluster: Cluster) -> Roster:
    return Roster(cluster.users, cluster.groups)


def with_roster(cluster: Cluster, roster: Roster) -> Cluster:
    """Return the cluster with the users and groups of `roster` that commands added. Users and groups whose names are in
    the cluster file are left out."""
    names, group_names = {user.name for user in cluster.users}, {group.name for group in cluster.groups}
    users = [user for user in roster.users if user.added and user.name not in names]
    groups = [group for group in roster.groups if group.added and group.name not in group_names]
    accounts = list(cluster.accounts)
    needs_default = any(DEFAULT_ACCOUNT in user.accounts for user in users)
    if needs_default and all(account.name != DEFAULT_ACCOUNT for account in accounts):
        accounts.append(_DEFAULT)
    return replace(
        cluster,
        users=(*cluster.users, *users),
        groups=(*cluster.groups, *groups),
        accounts=tuple(accounts),
    )


def from_file(cluster: Cluster) -> Cluster:
    """Return the cluster as its file describes it: without the users, groups and accounts that commands added."""
    users = tuple(user for user in cluster.users if not user.added)
    groups = tuple(group for group in cluster.groups if not group.added)
    used = any(DEFAULT_ACCOUNT in user.accounts for user in users)
    accounts = tuple(account for account in cluster.accounts if used or account != _DEFAULT)
    return replace(cluster, users=users, groups=groups, accounts=accounts)


def removed_by_command(before: Cluster | None, wanted: Cluster) -> tuple[str, ...]:
    """Return the users that `dalsegno user rm` removed. Other users stay in Slurm, even if the cluster file no longer
    has them."""
    names = {user.name for user in wanted.users}
    return tuple(user.name for user in before.users if user.added and user.name not in names) if before else ()


def group_name(word: str) -> str:
    """Return the name of a group. The gid 9876 means `privilege`, as in OCI's own command `cluster user add -g`."""
    return OCI_PRIVILEGE if word == str(OCI_PRIVILEGE_GID) else word


def add_user(roster: Roster, user: User, cluster: Cluster) -> Roster:
    if any(each.name == user.name for each in roster.users):
        raise UsageError(
            f"there is a user `{user.name}` already", hint=f"`dalsegno user edit {user.name}` changes that user"
        )
    if any(group.name == user.name for group in roster.groups):
        raise UsageError(f"`{user.name}` is a group of the cluster", hint="choose another name")
    _check_limits(user, cluster)
    return replace(roster, users=(*roster.users, replace(user, added=True)))


def edit_user(roster: Roster, user: User, cluster: Cluster) -> Roster:
    _refuse_file(roster.user(user.name))
    _check_limits(user, cluster)
    users = tuple(replace(user, added=True) if each.name == user.name else each for each in roster.users)
    return replace(roster, users=users)


def remove_user(roster: Roster, name: str) -> Roster:
    _refuse_file(roster.user(name))
    return replace(roster, users=tuple(user for user in roster.users if user.name != name))


def add_group(roster: Roster, group: Group) -> Roster:
    if any(each.name == group.name for each in roster.groups):
        raise UsageError(f"there is a group `{group.name}` already", hint="`dalsegno group ls` shows it")
    if any(user.name == group.name for user in roster.users):
        raise UsageError(f"`{group.name}` is a user, who has a group of that name", hint="choose another name")
    return replace(roster, groups=(*roster.groups, replace(group, added=True)))


def edit_group(roster: Roster, name: str, join: Sequence[str], leave: Sequence[str], allow: bool = False) -> Roster:
    """Add users to a group, and remove users from it. `allow` permits a privileged group."""
    roster.group(name)
    changed = {}
    for who in dict.fromkeys([*join, *leave]):
        user = roster.user(who)
        _refuse_file(user)
        groups = tuple(group for group in user.groups if group != name) + ((name,) if who in join else ())
        allowed = tuple(group for group in user.allow_privileged if group != name)
        changed[who] = replace(
            user, groups=groups, allow_privileged=(*allowed, *([name] if allow and who in join else []))
        )
    return replace(roster, users=tuple(changed.get(user.name, user) for user in roster.users))


def remove_group(roster: Roster, name: str) -> Roster:
    group = roster.group(name)
    if not group.added:
        raise UsageError(f"group `{name}` is in the cluster file", hint=_IN_FILE)
    if members := roster.members(name):
        raise UsageError(
            f"group `{name}` has members: {', '.join(members[:4])}",
            hint=f"remove them first: `dalsegno group edit {name} --remove {members[0]}`",
        )
    return replace(roster, groups=tuple(each for each in roster.groups if each.name != name))


def _refuse_file(user: User) -> None:
    if not user.added:
        raise UsageError(f"user `{user.name}` is in the cluster file", hint=_IN_FILE)


def _check_limits(user: User, cluster: Cluster) -> None:
    """Raise if Slurm would refuse or ignore the user's accounts, QOS or limits."""
    if not cluster.slurm.accounting:
        if user.accounts or user.qos or user.max_gpus is not None:
            raise UsageError(
                f"cluster {cluster.name} has no accounting, so there are no accounts, QOS and limits",
                hint="leave these options out",
            )
        return
    accounts = [*(account.name for account in cluster.accounts), DEFAULT_ACCOUNT]
    for name in user.accounts:
        if name not in accounts:
            hint = did_you_mean(name, accounts, f"add it to the cluster file: `accounts: [{{name: {name}}}]`")
            raise UsageError(f"there is no account `{name}`", hint=hint)
    qos = [*(each.name for each in cluster.slurm.qos), BUILT_IN_QOS]
    for name in user.qos:
        if name not in qos:
            hint = did_you_mean(name, qos, f"add it to the cluster file: `slurm: {{qos: [{{name: {name}}}]}}`")
            raise UsageError(f"there is no QOS `{name}`", hint=hint)
    if user.max_gpus is not None and not {"limits", "safe"} & set(cluster.slurm.enforce):
        raise UsageError(
            "Slurm does not enforce limits on this cluster",
            hint="set `slurm: {enforce: [associations, limits, qos]}` in the cluster file, then run `dalsegno up`",
        )

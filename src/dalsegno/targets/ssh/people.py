"""The users and groups of a cluster on ssh hosts: their ids, which are the same on all machines, and their accounts.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.inspect import HostFacts
from dalsegno.setup.node_plan import PlannedGroup, PlannedUser
from dalsegno.spec.facts import Cluster, SshHost, Storage
from dalsegno.users.checks import (
    People,
    assign_gids,
    assign_uids,
    check_added,
    check_groups,
    check_new_groups,
    check_people,
)

HOMES = "/home"  # the folder of homes on each machine, if they are not on storage


@dataclass(frozen=True)
class AssignedIds:
    """The uids and gids of the cluster. Removed users and groups keep theirs, because their files may still exist."""

    uids: Mapping[str, int] = field(default_factory=dict)
    gids: Mapping[str, int] = field(default_factory=dict)


def foreign_accounts(facts: HostFacts) -> People:
    """Return the accounts of a machine that Dal Segno did not create."""
    users = [f"{each.name}:x:{each.uid}:{each.gid}" for each in facts.users if not each.ours]
    own = {each.name for each in facts.users if each.ours}  # their groups, which have the same names, are left out too
    groups = [
        f"{each.name}:x:{each.gid}:{','.join(each.members)}"
        for each in facts.groups
        if not each.ours and each.name not in own
    ]
    return People("\n".join(users), "\n".join(groups))


def known_ids(cluster: Cluster, facts: Mapping[str, HostFacts], before: AssignedIds) -> AssignedIds:
    """Return the ids that were assigned before, including those of an earlier cluster's accounts that are still on the
    head.

    Only the head's accounts are used, because another machine could claim any uid for any name.
    """
    head = facts.get(cluster.head)
    if head is None:
        return before
    uids = {user.name: user.uid for user in head.users if user.ours}
    gids = {group.name: group.gid for group in head.groups if group.ours}
    return AssignedIds({**uids, **before.uids}, {**gids, **before.gids})


def check_accounts(cluster: Cluster, facts: Mapping[str, HostFacts], before: AssignedIds) -> dict[str, DalsegnoError]:
    """Return the hosts on which a user would get the rights of another account, with the reason for each."""
    faults: dict[str, DalsegnoError] = {}
    for host, each in facts.items():
        machine = foreign_accounts(each)
        try:
            check_people(cluster.users, machine, before.uids, cluster.groups)
            check_added(cluster.users, machine)
            check_new_groups(cluster.groups, machine, before.gids, before.uids)
        except TargetError as error:
            faults[host] = TargetError(f"{host}: {error.what}", hint=error.hint)
    return faults


def refuse_privileges(cluster: Cluster) -> None:
    """Raise an error if a user is in a group with rights over the machines, unless the cluster file allows this group
    by name."""
    for user in cluster.users:
        check_groups(user, {group.name: group.gid for group in cluster.groups})


def assign_ids(cluster: Cluster, facts: Mapping[str, HostFacts], before: AssignedIds) -> AssignedIds:
    """Return an id for each user and group.

    The first of these that exists is used: the id in the file, the id that was assigned before, the id of an existing
    account on a host, the next free id. If hosts differ, the head decides, and the others refuse the account.
    """
    order = sorted(facts, key=lambda host: host != cluster.head)
    machines = [foreign_accounts(facts[host]) for host in order]
    union = People("\n".join(each.passwd for each in machines), "\n".join(each.group for each in machines))
    uids = assign_uids(cluster.users, union, before.uids)
    there = {user.name: account.uid for user in cluster.users if (account := union.account(user.name))}
    gids = assign_gids(cluster.users, cluster.groups, union, {**uids, **there}, before.gids)
    return AssignedIds({**uids, **there}, gids)


def home_storage(cluster: Cluster) -> Storage | None:
    return next((storage for storage in cluster.storage if storage.home), None)


def homes_of(cluster: Cluster) -> str:
    storage = home_storage(cluster)
    return storage.mount if storage else HOMES


def planned_users(cluster: Cluster, host: str, ids: AssignedIds) -> tuple[PlannedUser, ...]:
    """Return the accounts of a host. If homes are on shared storage, the head creates them, each with an SSH key with
    which its user can log in to the other hosts."""
    shared = home_storage(cluster) is not None
    return tuple(
        PlannedUser(
            user.name,
            ids.uids[user.name],
            user.full_name,
            f"{homes_of(cluster)}/{user.name}",
            ssh_keys=user.ssh_keys,
            make_home=not shared or host == cluster.head,
            cluster_key=shared,
            directory=cluster.directory.ldap,
        )
        for user in cluster.users
    )


def planned_groups(cluster: Cluster, ids: AssignedIds) -> tuple[PlannedGroup, ...]:
    """Return the groups in the files of a host. With LDAP there are none."""
    if cluster.directory.ldap:
        return ()
    named = dict.fromkeys(
        [*(group.name for group in cluster.groups), *(name for user in cluster.users for name in user.groups)]
    )
    return tuple(
        PlannedGroup(name, ids.gids.get(name), tuple(user.name for user in cluster.users if name in user.groups))
        for name in named
    )


def known_hosts_lines(hosts: Collection[SshHost], facts: Mapping[str, HostFacts]) -> str:
    """Return the lines for /etc/ssh/ssh_known_hosts, so that ssh between the machines does not ask about host keys."""
    lines = []
    for host in hosts:
        if host.name in facts:
            own = facts[host.name].hostname.partition(".")[0]
            names = ",".join(_with_port(name, host.port) for name in dict.fromkeys((host.name, own, host.address)))
            lines += [f"{names} {key}\n" for key in facts[host.name].host_keys]
    return "".join(lines)


def _with_port(name: str, port: int | None) -> str:
    return f"[{name}]:{port}" if port not in (None, 22) else name

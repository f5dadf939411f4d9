"""Render the sacctmgr and scontrol commands that apply the cluster file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dalsegno.hostlist import compress
from dalsegno.slurm.facts import AccountsInfo
from dalsegno.slurm.render.lines import number, tres
from dalsegno.spec.facts import Account, Cluster, Qos, Reservation, User

Command = list[str]
Wanted = dict[str, str]

_LIFTED = {"Priority": "0", "Preempt": "", "PreemptMode": "cluster", "QOS": "", "DefaultQOS": "", "UsageFactor": "1"}


def accounting_commands(cluster: Cluster, found: AccountsInfo | None = None) -> list[Command]:
    """Return the arguments of the `sacctmgr` commands, in order; empty if the database is up to date.

    The commands only add or change entries. Users who are no longer in the file stay in the database with their
    history.
    """
    there = found or AccountsInfo()
    return [
        *_qos_commands(cluster.slurm.qos, there),
        *_root_commands(cluster, there),
        *_account_commands(_parents_first(cluster.accounts), there),
        *_user_commands(cluster.users, limited_devices(cluster), there),
        *_former_admins(cluster.users, there),
    ]


def limited_devices(cluster: Cluster) -> tuple[str, ...]:
    """Return Slurm's names for the devices that `max_gpus` limits. GPUs are among them even if there are none.

    On ParallelCluster, Slurm does not know Trainium devices.
    """
    nodes = () if cluster.parallelcluster else cluster.nodes
    return tuple(sorted({"gpu", *(node.gres for node in nodes if node.gpus)}))


def deletion_commands(cluster: Cluster, removed: Iterable[str], found: AccountsInfo) -> list[Command]:
    """Return the arguments of the `sacctmgr` commands that delete associations. Slurm keeps the history of their jobs.

    The commands delete all associations of removed users. For users that `dalsegno user add` added, they delete the
    associations with accounts that these users have left. Run `accounting_commands` first, because a user's default
    account cannot be deleted.
    """
    gone = [["delete", "user", "where", f"name={name}"] for name in removed if name in found.users]
    accounts = {user.name: user.accounts for user in cluster.users if user.added}
    left = [
        ["delete", "user", "where", f"name={name}", f"account={account}"]
        for name, account in found.members
        if name in accounts and account not in accounts[name]
    ]
    return gone + left


def _qos_commands(wanted: Iterable[Qos], found: AccountsInfo) -> list[Command]:
    """Return commands for QOS. All names are added first, because a QOS may preempt one that is added later."""
    new = [qos.name for qos in wanted if qos.name not in found.qos]
    adds = [["add", "qos", ",".join(new)]] if new else []
    changes = [(qos.name, _changes(_qos(qos), found.qos.get(qos.name, {}))) for qos in wanted]
    return adds + [["modify", "qos", "where", f"name={name}", "set", *words] for name, words in changes if words]


def _qos(qos: Qos) -> Wanted:
    return {
        "Priority": number(qos.priority),
        "Preempt": ",".join(sorted(qos.preempts)),
        "PreemptMode": qos.preempt_mode.lower(),
        "MaxWall": number(qos.max_time_min),
        "MaxTRESPerUser": tres(qos.max_tres_per_user),
        "MaxJobsPerUser": number(qos.max_jobs_per_user),
        "GrpTRES": tres(qos.group_tres),
        "UsageFactor": number(qos.usage_factor),
    }


def _root_commands(cluster: Cluster, found: AccountsInfo) -> list[Command]:
    """Return commands that allow every QOS for the root account, from which accounts without a QOS list inherit."""
    if not cluster.slurm.qos:
        return []
    names = sorted({"normal", *(qos.name for qos in cluster.slurm.qos)})
    words = _changes({"QOS": ",".join(names)}, found.accounts.get("root", {}))
    return [["modify", "account", "where", "name=root", "set", *words]] if words else []


def _account_commands(wanted: Iterable[Account], found: AccountsInfo) -> list[Command]:
    commands: list[Command] = []
    for account in wanted:
        there = found.accounts.get(account.name)
        words = _changes(_account(account), there or {})
        if there is None:
            about = [f"Description={account.description}"] if account.description else []
            commands.append(["add", "account", account.name, f"parent={account.parent}", *about, *words])
        else:
            moved = [f"parent={account.parent}"] if there.get("ParentName") != account.parent else []
            commands += _modify("account", account.name, moved + words)
    return commands


def _account(account: Account) -> Wanted:
    return {
        "Fairshare": str(account.fair_share),
        "QOS": ",".join(sorted(account.qos)),
        "GrpTRES": tres(account.group_tres),
    }


def _user_commands(wanted: Iterable[User], devices: Sequence[str], found: AccountsInfo) -> list[Command]:
    """Return commands for users. One command adds all new users with the same settings."""
    groups: dict[tuple[str, ...], list[str]] = {}
    changes: list[Command] = []
    for user in wanted:
        missing = [account for account in user.accounts if (user.name, account) not in found.members]
        if missing:
            groups.setdefault(tuple(_added(user, missing, devices, found)), []).append(user.name)
        changes += _user_changes(user, devices, found)
    return [["add", "user", ",".join(names), *words] for words, names in groups.items()] + changes


def _former_admins(wanted: Iterable[User], found: AccountsInfo) -> list[Command]:
    """Return commands that remove the admin level of users who are no longer in the file."""
    named = {"root", *(user.name for user in wanted)}
    former = [name for name, user in found.users.items() if name not in named and user.get("AdminLevel") != "None"]
    return [["modify", "user", "where", f"name={name}", "set", "AdminLevel=None"] for name in sorted(former)]


def _added(user: User, accounts: list[str], devices: Sequence[str], found: AccountsInfo) -> list[str]:
    person = [] if user.name in found.users else [f"DefaultAccount={user.default_account}", *_admin(user)]
    return [f"Account={','.join(accounts)}", *person, *_changes(_member(user, devices), {})]


def _admin(user: User) -> list[str]:
    return ["AdminLevel=Administrator"] if user.admin else []


def _member(user: User, devices: Sequence[str]) -> Wanted:
    limits = {f"gres/{each}": user.max_gpus for each in devices} if user.max_gpus is not None else {}
    return {
        "Fairshare": str(user.fair_share),
        "QOS": ",".join(sorted(user.qos)),
        "DefaultQOS": user.default_qos,
        "GrpTRES": tres(limits),
    }


def _user_changes(user: User, devices: Sequence[str], found: AccountsInfo) -> list[Command]:
    there = found.users.get(user.name)
    commands: list[Command] = []
    for account in user.accounts:
        if (user.name, account) in found.members:
            words = _changes(_member(user, devices), found.members[user.name, account])
            commands += _modify("user", user.name, words, f"account={account}")
    if there is None:
        return commands
    level = "Administrator" if user.admin else "None"
    person = _changes({"DefaultAccount": user.default_account, "AdminLevel": level}, there)
    return commands + _modify("user", user.name, person)


def _modify(kind: str, name: str, words: list[str], *where: str) -> list[Command]:
    return [["modify", kind, "where", f"name={name}", *where, "set", *words]] if words else []


def _changes(wanted: Wanted, found: Mapping[str, str]) -> list[str]:
    """Return `Key=Value` for each difference. Limits that are no longer in the file are removed."""
    there = {key: found.get(key, "") for key in wanted}
    differing = [key for key, value in wanted.items() if _plain(key, value) != _plain(key, there[key])]
    return [f"{key}={_value(key, wanted[key], there[key])}" for key in differing]


def _value(key: str, wanted: str, found: str) -> str:
    if "TRES" in key:  # the limit of each resource is removed separately
        gone = {entry.partition("=")[0] for entry in found.split(",")} - {"", *wanted.replace("=", ",").split(",")}
        return ",".join(filter(None, [wanted, *(f"{name}=-1" for name in sorted(gone))]))
    return wanted or _LIFTED.get(key, "-1")


def _plain(key: str, value: str) -> object:
    """Return a value in a normal form, so that equal settings compare as equal: `00:10:00` and `10` minutes, `b,a` and
    `a,b`, or `1.0` and `1`."""
    if key == "MaxWall":
        return _minutes(value)
    if key == "UsageFactor":
        return float(value or 1)
    lowered = value.lower()
    if lowered == _LIFTED.get(key, ""):
        return frozenset[str]()
    return frozenset(lowered.split(",")) - {""}


def _minutes(value: str) -> int | None:
    from dalsegno.slurm.parse.text import duration_s

    if ":" not in value and "-" not in value:
        return int(value) if value else None
    seconds = duration_s(value)
    return None if seconds is None else seconds // 60


def _parents_first(accounts: Iterable[Account]) -> list[Account]:
    waiting = {account.name: account for account in accounts}
    ordered: list[Account] = []
    while waiting:
        ready = [account for account in waiting.values() if account.parent not in waiting]
        for account in ready or list(waiting.values()):  # in a cycle none is ready, and sacctmgr reports the error
            ordered.append(waiting.pop(account.name))
    return ordered


def reservation_commands(cluster: Cluster) -> list[list[str]]:
    """Return the `scontrol` arguments that create each reservation: `create reservation ReservationName=…`."""
    return [["create", "reservation", *_words(reservation)] for reservation in cluster.reservations]


def _words(reservation: Reservation) -> list[str]:
    settings = {
        "ReservationName": reservation.name,
        "StartTime": reservation.start,
        "Duration": number(reservation.duration_min) or "UNLIMITED",
        "Nodes": compress(reservation.nodes),
        "NodeCnt": number(reservation.node_count) if not reservation.nodes else "",
        "PartitionName": reservation.partition,
        **_who(reservation),
        "Flags": ",".join(reservation.flags),
    }
    return [f"{key}={value}" for key, value in settings.items() if value]


def _who(reservation: Reservation) -> dict[str, str]:
    """Return the users and accounts of a reservation. Slurm requires at least one; the default is root."""
    users = reservation.users if reservation.users or reservation.accounts else ("root",)
    return {"Users": ",".join(users), "Accounts": ",".join(reservation.accounts)}

"""`dalsegno user`, `dalsegno group`: add, change, remove and list the users and groups of a running cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError, TargetError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from dalsegno.spec.facts import User
    from dalsegno.targets.base import PeopleView, Target
    from dalsegno.users.roster import Roster

LISTS = ("groups", "allow_privileged", "accounts", "qos", "ssh_keys")
MAX_KEYS_BYTES = 1 << 20
_OPTIONS = (
    click.option("--full-name", metavar="TEXT", help="Full name."),
    click.option("--group", "-g", "groups", multiple=True, help="Unix group, or OCI's gid 9876; may be repeated."),
    click.option(
        "--allow-privileged", multiple=True, metavar="GROUP",
        help="Privileged group, such as `docker`, that --group may name; may be repeated.",
    ),
    click.option(
        "--ssh-key", "ssh_keys", multiple=True, metavar="FILE|-",
        help="File with SSH public keys, `-` for standard input; may be repeated.",
    ),
    click.option("--account", "accounts", multiple=True, help="Slurm account, the default first; may be repeated."),
    click.option("--qos", multiple=True, help="QOS that the user may use; may be repeated."),
    click.option("--max-gpus", metavar="N", help="GPUs that all running jobs may use, in each account, or `none`."),
    click.option("--password", is_flag=True, help="Ask for a password for LDAP, or read it from standard input."),
)  # fmt: skip


def _settings(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.group()
def command() -> None:
    """Add, change, remove and list users of a running cluster.

    A user gets an account on every host, a home folder, the SSH keys that may log in, and an association in Slurm's
    accounting. Users of the cluster file are changed there.
    """


@command.command()
@click.argument("user")
@cluster_option
@click.option("--uid", type=int, help="Unix user id. Default: a free one.")
@_settings
def add(user: str, name: str | None, uid: int | None, password: bool, **options: Any) -> None:
    """Add a user."""
    from dalsegno.users.roster import add_user

    # open the cluster before reading standard input: sudo may start the command again, and that process must read the
    # password
    _open(name)
    given = {**_given(options), **({"uid": uid} if uid is not None else {})}
    secret = _ask_password() if password else ""
    target = _change(name, lambda roster, view: add_user(roster, _user({"name": user, **given}, view), view.cluster))
    _set_password(target, user, secret)


@command.command()
@click.argument("user")
@cluster_option
@_settings
def edit(user: str, name: str | None, password: bool, **options: Any) -> None:
    """Change a user that `user add` has added. A list, such as --group, replaces the old one; '' clears it."""
    from dalsegno.users.roster import edit_user

    # open the cluster before reading standard input: sudo may start the command again, and that process must read the
    # password
    _open(name)
    given = _given(options)
    secret = _ask_password() if password else ""

    def change(roster: Roster, view: PeopleView) -> Roster:
        return edit_user(roster, _user({**_values(roster.user(user)), **given}, view), view.cluster)

    if not given and not secret:
        raise UsageError("nothing to change", hint="`dalsegno user edit --help` lists the options")
    target = _change(name, change) if given else _open(name)
    _set_password(target, user, secret)


@command.command()
@click.argument("user")
@cluster_option
@click.option("--remove-home", is_flag=True, help="Delete the home folder too, with everything in it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def rm(user: str, name: str | None, remove_home: bool, yes: bool) -> None:
    """Remove a user that `user add` has added. The home folder is kept, and the user's uid is not used again."""
    from dalsegno.cluster import find_place
    from dalsegno.targets.base import CanManageUsers, require
    from dalsegno.users.roster import remove_user, roster_of

    target = _open(name)
    view = require(target, CanManageUsers).people()
    # raises an error for a user who does not exist or is in the cluster file
    remove_user(roster_of(view.cluster), user)
    _refuse_jobs(target, user)
    home = view.homes / user
    if remove_home:
        _remove_home(target, home, view.uids.get(user), only_check=True)
    if remove_home and not yes and sys.stdin.isatty() and not click.confirm(f"delete {home} and all its files?"):
        raise SystemExit(1)
    _change(name, lambda roster, _: remove_user(roster, user))
    if uid := view.uids.get(user):
        end_sessions(find_place(name).folder, uid)
    if remove_home:
        _remove_home(target, home, view.uids.get(user))
        out.talk(f"deleted {home}")
    elif view.elsewhere or home.exists():
        out.talk(f"kept {home}")


def _remove_home(target: Target, home: Path, uid: int | None, *, only_check: bool = False) -> None:
    """Delete a home folder on the machine that serves it. With `only_check`, delete nothing, and raise an error if the
    folder belongs to another user."""
    from dalsegno.system.files import remove_tree
    from dalsegno.targets.machines import ServesHomes
    from dalsegno.users.homes import check_home

    if isinstance(target, ServesHomes):
        target.remove_home(home, uid, only_check=only_check)
    elif only_check:
        check_home(home, uid)
    else:
        remove_tree(home)


def end_sessions(folder: Path, uid: int) -> None:
    """End the sessions of a removed user in the web page, if the cluster has one."""
    from dalsegno.web.login import SOCKET, revoke_logins

    if (folder / SOCKET).exists():
        try:
            revoke_logins(folder, uid)
        except DalsegnoError as error:
            out.warn(f"the user may still be logged in to the web page: {error.what}; `dalsegno web --revoke` ends all")


@command.command()
@cluster_option
@json_option
def ls(name: str | None, json_: bool) -> None:
    """List the users of the cluster."""
    view = _view(name)
    users = [_as_json(user, view) for user in view.cluster.users]
    if json_:
        out.as_json(users)
    elif not users:
        out.talk("no users yet; add one: `dalsegno user add NAME`")
    else:
        headers = ("USER", "UID", "FULL NAME", "GROUPS", "ACCOUNTS", "QOS", "MAX GPUS", "FROM")
        out.table(headers, [_row(each) for each in users])


@command.command()
@click.argument("user")
@cluster_option
@json_option
def show(user: str, name: str | None, json_: bool) -> None:
    """Show a user: ids, home, keys, groups, accounts and limits."""
    from dalsegno.users.roster import roster_of

    view = _view(name)
    found = _as_json(roster_of(view.cluster).user(user), view)
    if json_:
        out.as_json(found)
        return
    for key, value in found.items():
        text = ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)
        out.data(f"{key.replace('_', ' ') + ':':18}{text}".rstrip())


@click.group()
def group() -> None:
    """Add, change, remove and list Unix groups of a running cluster."""


@group.command("add")
@click.argument("group_name")
@cluster_option
@click.option("--gid", type=int, help="Unix group id. Default: a free one.")
def group_add(group_name: str, name: str | None, gid: int | None) -> None:
    """Add a group."""
    from dalsegno.spec.facts import Group
    from dalsegno.spec.load import validate_section
    from dalsegno.spec.model import GroupSpec
    from dalsegno.users.roster import add_group

    spec = validate_section(GroupSpec, {"name": group_name, "gid": gid})
    _change(name, lambda roster, _: add_group(roster, Group(spec.name, spec.gid)))


@group.command("edit")
@click.argument("group_name")
@cluster_option
@click.option("--add", "join", multiple=True, metavar="USER", help="User that joins the group; may be repeated.")
@click.option("--remove", "leave", multiple=True, metavar="USER", help="User that leaves the group; may be repeated.")
@click.option("--allow-privileged", metavar="GROUP", help="Name GROUP here too if it is a privileged group.")
def group_edit(
    group_name: str, name: str | None, join: tuple[str, ...], leave: tuple[str, ...], allow_privileged: str | None
) -> None:
    """Add users to a group, or remove them from it."""
    from dalsegno.users.roster import edit_group

    if not join and not leave:
        raise UsageError("nothing to change", hint="name users with --add or --remove")
    allow = allow_privileged == group_name
    _change(name, lambda roster, _: edit_group(roster, group_name, join, leave, allow))


@group.command("rm")
@click.argument("group_name")
@cluster_option
def group_rm(group_name: str, name: str | None) -> None:
    """Remove a group that `group add` has added and that has no members."""
    from dalsegno.users.roster import remove_group

    _change(name, lambda roster, _: remove_group(roster, group_name))


@group.command("ls")
@cluster_option
@json_option
def group_ls(name: str | None, json_: bool) -> None:
    """List the groups of the cluster and their members."""
    from dalsegno.users.roster import roster_of

    view = _view(name)
    roster = roster_of(view.cluster)
    added = {each.name for each in roster.groups if each.added}
    names = dict.fromkeys([*(each.name for each in roster.groups), *(g for user in roster.users for g in user.groups)])
    found = [
        {
            "name": each,
            "gid": view.gids.get(each),
            "members": roster.members(each),
            "from": "command" if each in added else "file",
        }
        for each in names
    ]
    if json_:
        out.as_json(found)
    elif not found:
        out.talk("no groups yet; add one: `dalsegno group add NAME`")
    else:
        rows = [(str(each["name"]), _text(each["gid"]), _text(each["members"]), str(each["from"])) for each in found]
        out.table(("GROUP", "GID", "MEMBERS", "FROM"), rows)


# Conversion of options to users, and of users to text


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the cluster file for the options that were given. An empty value clears a list."""
    from dalsegno.users.roster import group_name

    given: dict[str, Any] = {key: value for key, value in options.items() if value not in (None, ())}
    for key in LISTS:
        if key in given:
            given[key] = [value for value in given[key] if value]
    for key in ("groups", "allow_privileged"):
        if key in given:
            given[key] = [group_name(value) for value in given[key]]
    if "ssh_keys" in given:
        given["ssh_keys"] = [key for file in given["ssh_keys"] for key in _read_keys(file)]
    if "max_gpus" in given:
        given["max_gpus"] = _limit(given["max_gpus"])
    return given


def _limit(text: str) -> int | None:
    if text == "none":
        return None
    if text.isascii() and text.isdigit() and len(text) < 9:
        return int(text)
    raise UsageError(f"invalid number of GPUs `{text}`", hint="write a number, or `none`")


def _read_keys(file: str) -> list[str]:
    """Return the public keys in a file, one per line. Blank lines and comments are left out."""
    try:
        if file == "-":
            text = sys.stdin.read(MAX_KEYS_BYTES)
        else:
            with open(file, encoding="utf-8", errors="replace") as opened:
                text = opened.read(MAX_KEYS_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", hint="name a file with SSH public keys") from error
    keys = [line.strip() for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"{file} has no SSH public key", hint="name a file such as ~/.ssh/id_ed25519.pub")
    return keys


def _user(values: Mapping[str, Any], view: PeopleView) -> User:
    """Return the user with these fields. The values are checked by the rules of the cluster file."""
    from dalsegno.spec.load import validate_section
    from dalsegno.spec.model import UserSpec
    from dalsegno.spec.resolve import resolve_user

    return resolve_user(validate_section(UserSpec, dict(values)), view.cluster.slurm.accounting)


def _values(user: User) -> dict[str, Any]:
    return {
        "name": user.name, "uid": user.uid, "full_name": user.full_name, "max_gpus": user.max_gpus,
        **{key: list(getattr(user, key)) for key in LISTS},
    }  # fmt: skip


def _as_json(user: User, view: PeopleView) -> dict[str, Any]:
    uid = view.uids.get(user.name, user.uid)
    own = user.name in view.uids
    return {
        "name": user.name,
        "uid": uid,
        "full_name": user.full_name,
        "home": str(view.homes / user.name) if own else None,
        "entry": f"uid={user.name},{view.directory}" if own and view.directory else None,
        "ssh_keys": [_fingerprint(key) for key in user.ssh_keys],
        "groups": list(user.groups),
        "accounts": list(user.accounts),
        "qos": list(user.qos),
        "max_gpus": user.max_gpus,
        "admin": user.admin,
        "from": "command" if user.added else "file",
    }


def _fingerprint(key: str) -> str:
    """Return a key's fingerprint, as `ssh-keygen -l` prints it, and its comment."""
    import base64
    import binascii
    import hashlib

    kind, _, rest = key.partition(" ")
    blob, _, comment = rest.partition(" ")
    try:
        digest = hashlib.sha256(base64.b64decode(blob)).digest()
    except binascii.Error:
        return f"{kind} (unreadable) {comment}".strip()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')} {comment}".strip()


def _row(user: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ("name", "uid", "full_name", "groups", "accounts", "qos", "max_gpus", "from")
    return tuple(_text(user[column]) for column in columns)


def _text(value: Any) -> str:
    if value is None or value == [] or value == "":
        return "-"
    return ",".join(value) if isinstance(value, list) else str(value)


# Opening the cluster for a change


def _open(name: str | None) -> Target:
    """Open the cluster for a change, as root if the cluster runs as root."""
    from dalsegno.cluster import find_place, may_change, open_cluster

    place = find_place(name)
    elevate_to_change(place)
    may_change(place)
    return open_cluster(place)


def _view(name: str | None) -> PeopleView:
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.targets.base import CanManageUsers, require

    return require(open_cluster(find_place(name)), CanManageUsers).people()


def _change(name: str | None, change: Callable[[Roster, PeopleView], Roster]) -> Target:
    """Change the users and groups of a cluster, and print the changes."""
    from dalsegno.cluster import find_place
    from dalsegno.targets.base import CanManageUsers, require
    from dalsegno.users.roster import roster_of

    target = _open(name)
    people = require(target, CanManageUsers)
    with find_place(name).lock(), interruptible(), out.progress() as say:
        view = people.people()
        plan = people.change_people(change(roster_of(view.cluster), view))
        for line in plan.sentences():
            out.talk(line)
        if not plan.empty:
            target.apply(plan, say)
    return target


def _refuse_jobs(target: Target, user: str) -> None:
    """Raise an error if the user has jobs: Slurm could not account for the jobs of a removed user."""
    jobs = target.status().jobs
    if jobs is None:
        raise TargetError("slurmctld does not answer, so the user may have jobs", hint="`dalsegno status` shows why")
    if own := [job.id for job in jobs if job.user == user]:
        raise TargetError(
            f"user `{user}` has jobs: {', '.join(own[:4])}",
            hint=f"end them first: `dalsegno shell -- scancel --user {user}`",
        )


def _ask_password() -> str:
    if sys.stdin.isatty():
        secret: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return secret
    return sys.stdin.readline().rstrip("\n")


def _set_password(target: Target, user: str, password: str) -> None:
    from dalsegno.targets.base import CanManageUsers, require

    if password:
        require(target, CanManageUsers).set_password(user, password)
        out.talk(f"set the password of {user}")

"""The accounts of one machine: users with their homes and keys, and groups with their members.

Like `applier.py`, this module uses only the standard library of Python 3.9. An account that the machine had before is
never changed. /var/lib/dalsegno/accounts.json names the accounts created here. The file outlives the cluster, as the
accounts do, so that their uids are not assigned to other people.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.setup.machine_record import SETUP, Change, Json, Record, Refused, checked, digest, emit, read, run, write
from dalsegno.users.homes import check_home, install_keys, make_home, remove_home

ACCOUNTS = os.path.join(os.path.dirname(SETUP), "accounts.json")
PUBLIC_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]+={0,2}")
# This and the next command run as the user, so that links in the home cannot make root change other people's files.
COPY_SKELETON = 'cp -rnT /etc/skel "$1" 2>/dev/null || true'
MAKE_KEY = (
    'umask 077; mkdir -p "$1/.ssh" && key="$1/.ssh/id_ed25519" && '
    '{ [ -e "$key" ] || ssh-keygen -q -t ed25519 -N "" -C "$2" -f "$key"; } && head -c 4096 "$key.pub"'
)


class MachineAccounts:
    """Compares the accounts of a plan with those of the machine. If the root folder is not /, there is nothing to
    compare."""

    def __init__(self, plan: Json, record: Record, root: str) -> None:
        self.plan, self.record = plan, record
        self.users: list[Json] = [] if root else list(plan["users"])
        self.groups: list[Json] = [] if root else list(plan["groups"])
        self.made: Json = {"users": {}, "groups": {}}
        if not root:
            self.made.update(json.loads(read(ACCOUNTS) or b"{}"))

    def changes(self) -> list[Change]:
        found = [("group", each["name"], what) for each in self.groups if (what := self.group_differs(each))]
        found += [("user", each["name"], what) for each in self.users if (what := self.user_differs(each))]
        found += [("user", name, "remove") for name in self.stale("users")]
        found += [("group", name, "remove") for name in self.stale("groups")]
        return found

    def apply(self) -> None:
        for group in self.groups:
            if find_group(group["name"]) is None:
                self.add_group(group["name"], group["gid"])
        for user in self.users:
            if self.user_differs(user):
                self.make_user(user)
        for group in self.groups:
            self.set_members(group)
        for name in self.stale("users"):
            self.remove_user(name)
        for name in self.stale("groups"):
            self.remove_group(name)

    def complete_homes(self) -> None:
        """Create the missing SSH keys of users whose accounts are in a directory.

        Call this when the directory answers, because ssh-keygen works only for an account that it can look up.
        """
        for user in self.users:
            if user["directory"] and self.home_differs(user):
                self.prepare_home(user)

    def stale(self, kind: str) -> list[str]:
        """Return the accounts that an earlier plan of this cluster created and that are not in this plan."""
        wanted = {each["name"] for each in (self.users if kind == "users" else self.groups)}
        return [name for name in self.record.part(f"cluster_{kind}") if name not in wanted]

    def kept(self) -> list[str]:
        """Return a sentence that names the users created here for this cluster, and one that names the groups.

        An account in a directory is not one of the machine's.
        """
        found = []
        for kind, find in (("users", find_user), ("groups", find_group)):
            created = [name for name, how in self.made[kind].items() if how is True]
            names = [name for name in created if name in self.record.part(f"cluster_{kind}") and find(name)]
            if names:
                found.append(f"{kind} stay: {' '.join(sorted(names))}")
        return found

    def note(self, kind: str, name: str, uid: int | None = None) -> None:
        """Record that an account is ours, before the account is created. For an account in a directory, record its uid
        too, because the directory may be removed later."""
        self.made[kind][name] = True if uid is None else uid
        os.makedirs(os.path.dirname(ACCOUNTS), exist_ok=True)
        write(ACCOUNTS, json.dumps(self.made).encode())
        self.record.part(f"cluster_{kind}")[name] = {}
        self.record.save()

    # Unix groups

    def group_differs(self, group: Json) -> str:
        found = find_group(group["name"])
        if found is None:
            if group["gid"] is None:
                hint = "create the group on that machine, or give it a `gid` below `groups:` of the cluster file"
                raise Refused(f"there is no group {group['name']}, which other hosts have", hint)
            return "create"
        if group["gid"] is not None and found.gr_gid != group["gid"]:
            hint = "give the group the same gid on all hosts, or set `gid` in the cluster file"
            raise Refused(f"group {group['name']} has gid {found.gr_gid} here, and {group['gid']} on other hosts", hint)
        wanted, ours = set(group["members"]), set(self.joined(group["name"]))
        return "change" if wanted - set(found.gr_mem) or (ours - wanted) & set(found.gr_mem) else ""

    def joined(self, group: str) -> list[str]:
        """Return the members that an earlier plan added to a group."""
        names: list[str] = self.record.part("members").get(group, [])
        return names

    def add_group(self, name: str, gid: int) -> None:
        self.note("groups", name)
        checked(["groupadd", "--gid", str(gid), name], "choose another gid in the cluster file")

    def set_members(self, group: Json) -> None:
        name, wanted = group["name"], list(group["members"])
        found = find_group(name)
        there = set(found.gr_mem) if found else set()
        earlier = self.joined(name)
        new = [each for each in wanted if each not in there]
        self.record.part("members")[name] = [each for each in wanted if each in new or each in earlier]
        self.record.save()
        for each in new:
            checked(["gpasswd", "--add", each, name])
        for each in (each for each in earlier if each in there and each not in wanted):
            checked(["gpasswd", "--delete", each, name])

    def remove_group(self, name: str) -> None:
        if name in self.made["groups"] and find_group(name) is not None:
            checked(["groupdel", name])
        self.forget("groups", name)

    def forget(self, kind: str, name: str) -> None:
        self.made[kind].pop(name, None)
        write(ACCOUNTS, json.dumps(self.made).encode())
        self.record.part(f"cluster_{kind}").pop(name, None)
        self.record.part("homes").pop(name, None)
        self.record.save()

    # Unix users

    def user_differs(self, user: Json) -> str:
        found, listed = find_user(user["name"]), user["name"] in self.record.part("cluster_users")
        if found is not None and found.pw_uid != user["uid"]:
            raise Refused(
                f"user {user['name']} has uid {found.pw_uid} here, and {user['uid']} on other hosts",
                "give the account the same uid on all hosts, or set `uid` in the cluster file",
            )
        if user["directory"]:
            return "create" if not listed else "change" if self.home_differs(user) else ""
        if found is None:
            return "create"
        if user["name"] not in self.made["users"]:
            return ""
        same = (found.pw_gecos, found.pw_dir, found.pw_shell) == (user["full_name"], home_of(user), user["shell"])
        return "" if listed and same and not self.home_differs(user) else "change"

    def home_differs(self, user: Json) -> bool:
        kept = self.record.part("homes").get(user["name"])
        return user["make_home"] and (kept != home_stamp(user) or not os.path.isdir(home_of(user)))

    def make_user(self, user: Json) -> None:
        name, home = user["name"], home_of(user)
        if user["directory"]:
            emit(step=f"adding user {name}")
            self.note("users", name, user["uid"])
            if self.home_differs(user):
                self.prepare_home(user)
            return
        settings = ["--comment", user["full_name"], "--shell", user["shell"]]
        found = find_user(name)
        if found is None:
            emit(step=f"adding user {name}")
            if find_group(name) is None:
                checked(["groupadd", "--gid", str(user["uid"]), name], "choose another `uid` in the cluster file")
            self.note("users", name)
            ids = ["--uid", str(user["uid"]), "--gid", name, "--no-create-home", "--home-dir", home]
            checked(["useradd", *ids, *settings, name], "choose another `uid` in the cluster file")
        elif (found.pw_gecos, found.pw_dir, found.pw_shell) != (user["full_name"], home, user["shell"]):
            checked(["usermod", *settings, "--home", home, name])
        self.note("users", name)
        if self.home_differs(user):
            self.prepare_home(user)

    def prepare_home(self, user: Json) -> None:
        """Create the home, and install the user's public SSH keys. Root opens nothing below the home by path, because
        the user can put links there."""
        home = Path(home_of(user))
        found = None if user["directory"] else pwd.getpwnam(user["name"])
        ids: tuple[int, int] = (found.pw_uid, found.pw_gid) if found else (user["uid"], user["uid"])
        os.makedirs(home.parent, exist_ok=True)
        refuse_open(home.parent)
        if make_home(home.parent, home.name, *ids):
            as_user(ids, COPY_SKELETON, str(home))
        elif home.lstat().st_uid != ids[0]:
            hint = f"set `uid: {home.lstat().st_uid}` for {user['name']} if it is the same person"
            raise Refused(f"{home} belongs to uid {home.lstat().st_uid}, not to {user['name']} ({ids[0]})", hint)
        keys, known = list(user["ssh_keys"]), find_user(user["name"]) is not None
        if user["cluster_key"] and known:
            keys += self.cluster_key(ids, user["name"], str(home))
        try:
            install_keys(home.parent, home.name, *ids, keys)
        except DalsegnoError as error:  # a user must not be able to stop `up` with a link in the home
            emit(step=f"{error.what}: {error.hint}")
            return
        if known:
            self.record.part("homes")[user["name"]] = home_stamp(user)
            self.record.save()

    def cluster_key(self, ids: tuple[int, int], name: str, home: str) -> list[str]:
        """Return the user's public key for the other machines of the cluster; create the key pair if there is none."""
        printed = as_user(ids, MAKE_KEY, home, f"{name}@{self.plan['cluster']}")
        key = PUBLIC_KEY.match(printed)  # checked, because the user can write anything to this file
        return [f"{key.group()} {name}@{self.plan['cluster']}"] if key else []

    def remove_user(self, name: str) -> None:
        """End the processes of an account that was created here, and delete the account if it is a local one.

        The home is kept. An account that the machine had before is not touched.
        """
        emit(step=f"removing user {name}")
        found, uid = find_user(name), self.made["users"].get(name)
        if uid is not None and uid is not True:
            run(["pkill", "-KILL", "-U", str(uid)])
        elif found is not None and name in self.made["users"]:
            run(["pkill", "-KILL", "-U", str(found.pw_uid)])
            checked(["userdel", "--force", name])
            with contextlib.suppress(Refused):  # userdel has already removed the group, unless it has other members
                if find_group(name) is not None:
                    checked(["groupdel", name])
        self.forget("users", name)


def refuse_open(homes: Path) -> None:
    """Raise if anyone but root could create or replace a home in this folder."""
    about = homes.stat()
    if about.st_uid != 0 or about.st_mode & 0o022:
        raise Refused(
            f"users can change {homes}, where root would create home folders",
            f"`chown root {homes}; chmod 755 {homes}`, or choose another folder for homes",
        )


def as_user(ids: tuple[int, int], script: str, *arguments: str) -> str:
    uid, gid = map(str, ids)
    prefix = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", "--no-new-privs", "--"]
    return run([*prefix, "/bin/sh", "-c", script, "sh", *arguments], 30.0)[1]


def home_of(user: Json) -> str:
    return str(user["home"] or f"/home/{user['name']}")


def home_stamp(user: Json) -> str:
    return digest(json.dumps([home_of(user), user["uid"], user["ssh_keys"], user["cluster_key"]]).encode())


def find_user(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def find_group(name: str) -> grp.struct_group | None:
    try:
        return grp.getgrnam(name)
    except KeyError:
        return None


def main(arguments: list[str]) -> int:
    """Run `remove-home (check|delete) HOME UID` on a machine that has our code and stores the home.

    Refuse the home of an account that existed before the cluster did.
    """
    action, path, uid = arguments
    home = Path(path)
    try:
        if find_user(home.name) and home.name not in json.loads(read(ACCOUNTS) or b"{}").get("users", {}):
            what = f"{home.name} is an account that this machine had before, so {home} is not deleted"
            raise DalsegnoError(what, hint="leave out `--remove-home`")
        (remove_home if action == "delete" else check_home)(home, int(uid))
    except DalsegnoError as error:
        raise SystemExit(f"{error.what}\n{error.hint}") from None
    return 0

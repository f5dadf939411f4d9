"""Convert accounts to LDAP entries and back, and escape text for LDAP. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dalsegno.users.accounts import SHELL, PosixGroup, PosixUser

PEOPLE, GROUPS = "ou=People", "ou=Groups"  # the same names as on OCI's HPC stack
USER_CLASSES = ("inetOrgPerson", "posixAccount", "ldapPublicKey")
GROUP_CLASSES = ("posixGroup",)
Attributes = Mapping[str, Sequence[bytes]]


@dataclass(frozen=True)
class LdapEntry:
    """An entry: its distinguished name, and its attributes as bytes."""

    dn: str
    attributes: Attributes


def escape_dn(value: str) -> str:
    """Return a value escaped for a distinguished name (RFC 4514). Every special character becomes `\\XX`."""
    safe = "-_. @"  # not escaped, except a blank at the start or the end
    last = len(value) - 1
    return "".join(
        char if (char.isascii() and char.isalnum()) or (char in safe and not (char == " " and at in (0, last)))
        else "".join(f"\\{byte:02x}" for byte in char.encode())
        for at, char in enumerate(value)
    )  # fmt: skip


def user_dn(name: str, base: str) -> str:
    return f"uid={escape_dn(name)},{PEOPLE},{base}"


def group_dn(name: str, base: str) -> str:
    return f"cn={escape_dn(name)},{GROUPS},{base}"


def base_entries(base: str) -> list[LdapEntry]:
    """Return the entry at the base DN and the parent entries of all users and groups, in the order in which to add
    them."""
    kind, _, name = base.partition(",")[0].partition("=")
    classes = {"dc": ["organization", "dcObject"], "o": ["organization"], "ou": ["organizationalUnit"]}[kind]
    top = {"objectClass": classes, kind: [name], **({"o": [name]} if kind == "dc" else {})}
    units = [(unit, {"objectClass": ["organizationalUnit"], "ou": [unit[3:]]}) for unit in (PEOPLE, GROUPS)]
    return [LdapEntry(base, _encoded(top)), *(LdapEntry(f"{dn},{base}", _encoded(unit)) for dn, unit in units)]


def user_entry(user: PosixUser, base: str) -> LdapEntry:
    """Return the entry of a user. If the entry is modified, an attribute with an empty value is removed from the
    server."""
    name = user.full_name.strip() or user.name
    gecos = user.full_name if user.full_name.isascii() else ""  # the syntax of gecos allows ASCII only
    attributes = {
        "objectClass": USER_CLASSES,
        "uid": [user.name],
        "cn": [name],
        "sn": [name.split()[-1]],
        "displayName": [user.full_name] if user.full_name else [],
        "gecos": [gecos] if gecos else [],
        "uidNumber": [str(user.uid)],
        "gidNumber": [str(user.gid)],
        "homeDirectory": [user.home],
        "loginShell": [user.shell],
        "sshPublicKey": user.ssh_keys,
    }
    return LdapEntry(user_dn(user.name, base), _encoded(attributes))


def group_entry(group: PosixGroup, base: str) -> LdapEntry:
    attributes = {
        "objectClass": GROUP_CLASSES,
        "cn": [group.name],
        "gidNumber": [str(group.gid)],
        "memberUid": group.members,
    }
    return LdapEntry(group_dn(group.name, base), _encoded(attributes))


def _encoded(attributes: Mapping[str, Iterable[str]]) -> Attributes:
    return {name: [value.encode() for value in values] for name, values in attributes.items()}


def read_user(attributes: Attributes) -> PosixUser | None:
    """Return the user of an entry; None if a required attribute is missing."""
    one = _EntryReader(attributes)
    name, uid, gid = one.text("uid"), one.number("uidNumber"), one.number("gidNumber")
    if not name or uid is None or gid is None:
        return None
    keys = tuple(value.decode(errors="replace") for value in attributes.get("sshPublicKey", ()))
    shell = one.text("loginShell") or SHELL
    return PosixUser(name, uid, gid, one.text("displayName"), one.text("homeDirectory"), keys, shell)


def read_group(attributes: Attributes) -> PosixGroup | None:
    """Return the group of an entry; None if a required attribute is missing."""
    one = _EntryReader(attributes)
    name, gid = one.text("cn"), one.number("gidNumber")
    members = tuple(value.decode(errors="replace") for value in attributes.get("memberUid", ()))
    return PosixGroup(name, gid, members) if name and gid is not None else None


@dataclass(frozen=True)
class _EntryReader:
    attributes: Attributes

    def text(self, name: str) -> str:
        values = self.attributes.get(name, ())
        return values[0].decode(errors="replace") if values else ""

    def number(self, name: str) -> int | None:
        text = self.text(name)
        return int(text) if text.isascii() and text.isdigit() else None

"""Keep accounts in an LDAP server. Every connection is encrypted, and the server's certificate is checked."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dalsegno.errors import DalsegnoError, install_hint
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import read_text, write_atomic
from dalsegno.system.ownership import trusted_owners
from dalsegno.users.accounts import AccountPlan, AccountSet, plan_accounts
from dalsegno.users.ldap_entries import (
    GROUPS,
    PEOPLE,
    Attributes,
    LdapEntry,
    base_entries,
    group_dn,
    group_entry,
    read_group,
    read_user,
    user_dn,
    user_entry,
)

TIMEOUT_S = 10
LDAP_PACKAGES = ("ldap3", "pyasn1")  # Python packages that the head of a cluster needs for LDAP
_SUCCESS, _NO_SUCH_OBJECT, _INVALID_CREDENTIALS, _EXISTS = 0, 32, 49, 68  # result codes (RFC 4511)


class LdapError(DalsegnoError):
    """An LDAP server refused a request, cannot be reached, or has the wrong certificate."""


@dataclass(frozen=True)
class LdapSettings:
    """The address of an LDAP server and the login for it. With `ldap://`, StartTLS encrypts the connection."""

    url: str  # address of the server: ldaps://host:port or ldap://host:port
    base: str
    bind_dn: str
    password_file: Path
    ca_file: Path
    page: int = 500  # entries per page; servers limit the number of entries in one answer


def check_ldap3() -> None:
    """Raise if the Python package ldap3 is missing."""
    if find_spec("ldap3") is None:
        raise LdapError("accounts in LDAP need the Python package ldap3", hint=install_hint("ldap"))


def read_password(path: Path) -> str:
    """Return the password in a file. Raise LdapError if others may read the file."""
    fix = f"write the password to {path}, then `chmod 600 {path}`"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LdapError(f"cannot read the password of the directory in {path}: {error.strerror}", hint=fix) from error
    with open(handle, encoding="utf-8") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in trusted_owners() or about.st_mode & 0o077:
            raise LdapError(f"other users may read or own {path}, which holds a password", hint=fix)
        password = file.readline().rstrip("\n")
    if not password:  # a bind without a password succeeds, but anonymously
        raise LdapError(f"{path} holds no password", hint=fix)
    return password


class LdapDirectory:
    """The accounts in an LDAP server."""

    def __init__(self, settings: LdapSettings) -> None:
        self.settings = settings

    def read(self) -> AccountSet:
        with self._connection() as connection:
            users = [read_user(found) for found in self._search(connection, PEOPLE, "posixAccount")]
            groups = [read_group(found) for found in self._search(connection, GROUPS, "posixGroup")]
        return AccountSet.of([user for user in users if user], [group for group in groups if group])

    def apply(self, plan: AccountPlan) -> None:
        base = self.settings.base
        with self._connection() as connection:
            for entry in base_entries(base):
                self._add(connection, entry, replace=False)
            for group in plan.add_groups:
                self._add(connection, group_entry(group, base))
            for user in plan.add_users:
                self._add(connection, user_entry(user, base))
            for user_edit in plan.edit_users:
                self._modify(connection, user_entry(user_edit.after, base))
            for group_edit in plan.edit_groups:
                self._modify(connection, group_entry(group_edit.after, base))
            for user in plan.remove_users:
                self._remove(connection, user_dn(user.name, base))
            for group in plan.remove_groups:
                self._remove(connection, group_dn(group.name, base))

    def set_password(self, user: str, password: str) -> None:
        """Set the password of a user. The server stores only a hash of it."""
        with self._connection() as connection:
            connection.extend.standard.modify_password(user_dn(user, self.settings.base), new_password=password)
            self._check(connection, f"the password of {user} cannot be set")

    def _search(self, connection: Any, unit: str, kind: str) -> Iterator[Attributes]:
        """Yield the attributes of all entries of a class below a unit, page by page."""
        from ldap3 import LEVEL

        cookie: bytes | None = None
        while True:
            connection.search(
                f"{unit},{self.settings.base}", f"(objectClass={kind})", LEVEL, attributes=["*"],
                paged_size=self.settings.page, paged_cookie=cookie,
            )  # fmt: skip
            if connection.result["result"] == _NO_SUCH_OBJECT:  # the directory is new and has no entries
                return
            self._check(connection, f"{unit},{self.settings.base} cannot be read")
            for found in connection.response or ():
                if found.get("type") == "searchResEntry":
                    yield found["raw_attributes"]
            controls = connection.result.get("controls") or {}
            cookie = controls.get("1.2.840.113556.1.4.319", {}).get("value", {}).get("cookie")
            if not cookie:
                return

    def _add(self, connection: Any, entry: LdapEntry, *, replace: bool = True) -> None:
        """Add an entry. If it already exists, as after an interrupted plan, replace its attributes.

        If `replace` is false, an existing entry is kept as it is.
        """
        filled = {name: list(values) for name, values in entry.attributes.items() if values}
        connection.add(entry.dn, attributes=filled)
        if connection.result["result"] != _EXISTS:
            self._check(connection, f"{entry.dn} cannot be added")
        elif replace:
            self._refuse_other_ids(connection, entry)
            self._modify(connection, entry)

    def _refuse_other_ids(self, connection: Any, entry: LdapEntry) -> None:
        """Raise if the existing entry has different ids, because it then belongs to somebody else."""
        from ldap3 import BASE

        numbers = [name for name in ("uidNumber", "gidNumber") if name in entry.attributes]
        connection.search(entry.dn, "(objectClass=*)", BASE, attributes=numbers)
        self._check(connection, f"{entry.dn} cannot be read")
        found = next(each["raw_attributes"] for each in connection.response if each.get("type") == "searchResEntry")
        if any(list(found.get(name, ())) != list(entry.attributes[name]) for name in numbers):
            raise LdapError(
                f"{entry.dn} is in the directory already, with another uid or gid",
                where=self.settings.url,
                hint="choose another name, or give the ids of that entry if it is the same person",
            )

    def _modify(self, connection: Any, entry: LdapEntry) -> None:
        """Replace the attributes of an entry, except objectClass and the one in its distinguished name."""
        from ldap3 import MODIFY_REPLACE

        naming = entry.dn.partition("=")[0]
        kept = ("objectClass", naming)
        changes = {
            name: [(MODIFY_REPLACE, list(values))] for name, values in entry.attributes.items() if name not in kept
        }
        connection.modify(entry.dn, changes)
        self._check(connection, f"{entry.dn} cannot be changed")

    def _remove(self, connection: Any, dn: str) -> None:
        connection.delete(dn)
        if connection.result["result"] != _NO_SUCH_OBJECT:
            self._check(connection, f"{dn} cannot be removed")

    def _check(self, connection: Any, failed: str) -> None:
        result = connection.result
        if result["result"] != _SUCCESS:
            why = f"{result['description']} {result['message']}".strip()
            raise LdapError(
                f"{failed}: {why}", where=self.settings.url, hint=f"check the rights of {self.settings.bind_dn}"
            )

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Yield a connection that is encrypted and authenticated."""
        check_ldap3()
        import ldap3
        from ldap3.core.exceptions import LDAPException

        connection = None
        try:
            connection = self._connect(ldap3)
            yield connection
        except LDAPException as error:
            raise LdapError(
                f"the directory cannot be used: {_first_line(error)}",
                where=self.settings.url,
                hint=f"is slapd running, and is its certificate signed by {self.settings.ca_file}?",
            ) from error
        finally:
            if connection is not None:
                connection.unbind()

    def _connect(self, ldap3: Any) -> Any:
        settings, address = self.settings, urlsplit(self.settings.url)
        password = read_password(settings.password_file)
        if not settings.ca_file.is_file():
            raise LdapError(f"there is no certificate of the directory's CA: {settings.ca_file}", hint="name that file")
        secure, tls = address.scheme == "ldaps", _verified_tls(ldap3, settings.ca_file)
        server = ldap3.Server(
            address.hostname, port=address.port or (636 if secure else 389), use_ssl=secure, tls=tls,
            get_info=ldap3.NONE, connect_timeout=TIMEOUT_S,
        )  # fmt: skip
        # Names and values are already escaped and encoded; ldap3 must not parse them again.
        connection = ldap3.Connection(
            server, user=settings.bind_dn, password=password, check_names=False, receive_timeout=TIMEOUT_S,
            raise_exceptions=False, read_only=False, auto_range=False, auto_encode=False, auto_escape=False,
        )  # fmt: skip
        connection.open()
        if not secure:
            connection.start_tls()
        if not connection.bind():
            wrong = connection.result["result"] == _INVALID_CREDENTIALS
            why = "wrong name or password" if wrong else connection.result["description"]
            raise LdapError(
                f"the directory refuses {settings.bind_dn}: {why}",
                where=settings.url,
                hint=f"check the password in {settings.password_file}",
            )
        return connection


def _verified_tls(ldap3: Any, ca_file: Path) -> Any:
    """Return TLS settings for ldap3 that let Python check the certificate. ldap3 itself cannot check a certificate for
    an IP address with Python 3.12 or later."""
    import ssl

    class VerifiedTls(ldap3.Tls):  # type: ignore[misc]
        def wrap_socket(self, connection: Any, do_handshake: bool = False) -> None:
            context = ssl.create_default_context(cafile=str(ca_file))
            connection.socket = context.wrap_socket(connection.socket, server_hostname=connection.server.host)

    return VerifiedTls(validate=ssl.CERT_REQUIRED, ca_certs_file=str(ca_file))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


@dataclass(frozen=True)
class DirectoryAccounts:
    """The accounts that a directory must hold, and the address of the directory. `main` reads this from a file."""

    url: str
    base: str
    admin: str
    accounts: AccountSet = field(default_factory=AccountSet)


def main(arguments: Sequence[str]) -> int:
    """Run `directory-accounts FOLDER DONE` on the head of a cluster.

    Make the directory hold the accounts in FOLDER/ldap/accounts.json, then create the file DONE. Accounts that the last
    call wrote and that are no longer in the file are removed.
    """
    folder, done = Path(arguments[0]), Path(arguments[1])
    wanted = facts_from_json(DirectoryAccounts, json.loads((folder / "ldap/accounts.json").read_text()))
    former_file = folder / "ldap/former.json"
    former = facts_from_json(AccountSet, json.loads(read_text(former_file) or "{}"))
    settings = LdapSettings(
        wanted.url, wanted.base, wanted.admin, folder / "secret/ldap-password", folder / "ldap-ca.pem"
    )
    directory = LdapDirectory(settings)
    try:
        directory.apply(plan_accounts(wanted.accounts, directory.read(), former))
    except DalsegnoError as error:
        raise SystemExit(f"{error.what}\n{error.hint}") from None
    write_atomic(former_file, json.dumps(facts_to_json(wanted.accounts)), 0o600)
    for old in done.parent.glob("applied-*"):
        old.unlink()
    write_atomic(done, "", 0o600)
    return 0

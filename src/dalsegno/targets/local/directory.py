"""The LDAP directory of a local cluster: a slapd on the head, from the distribution's package.

slapd runs as the user that the package creates, in a folder of the cluster. The machine's own slapd is not touched.
Hosts have the accounts in their user and group files too, so they need no LDAP client.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import make_folder, read_text, write_atomic
from dalsegno.system.machine import program
from dalsegno.system.passwords import draw_password
from dalsegno.system.processes import Runner
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import Placement
from dalsegno.users.ldap_directory import LdapDirectory, LdapSettings
from dalsegno.users.slapd import (
    LDAPS_PORT,
    MODULE_FOLDERS,
    SCHEMA_FOLDERS,
    SSH_KEY_SCHEMA,
    SlapdLayout,
    ca_command,
    certificate_command,
    render_rootpw,
    render_slapd_conf,
    slapd_args,
)

PROGRAMS = ("slapd", "openssl")
OWNERS = ("openldap", "ldap")  # the package's user on Debian and Ubuntu, and on the RHEL family


def slapd_layout(cluster: Cluster, folder: Folder) -> SlapdLayout:
    """Return the paths of slapd's files. The folders of schemas and modules are those of this machine."""
    return SlapdLayout(
        cluster.name,
        cluster.directory.base,
        str(folder.ldap),
        next((path for path in SCHEMA_FOLDERS if os.path.isdir(path)), SCHEMA_FOLDERS[0]),
        next((path for path in MODULE_FOLDERS if os.path.isdir(path)), MODULE_FOLDERS[0]),
    )


def directory_files(cluster: Cluster, folder: Folder) -> dict[str, str]:
    """Return the files of slapd that `up` writes, by file name."""
    return {"slapd.conf": render_slapd_conf(slapd_layout(cluster, folder)), "ssh-key.schema": SSH_KEY_SCHEMA}


def slapd_command(cluster: Cluster, folder: Folder, placement: Placement) -> list[str]:
    owner = _owner()
    args = slapd_args(slapd_layout(cluster, folder), [placement.addresses[cluster.head]], owner[0] if owner else "")
    return [program("slapd") or "slapd", *args]


def _owner() -> tuple[str, int, int] | None:
    """Return the name, uid and gid of the user that slapd runs as; None if it runs as the current user."""
    import pwd

    if os.geteuid() != 0:
        return None
    for name in OWNERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return name, entry.pw_uid, entry.pw_gid
    raise TargetError(
        f"slapd has no user of its own on this machine ({' or '.join(OWNERS)})",
        hint="install the package again: its set-up creates the user",
    )


def open_directory(cluster: Cluster, folder: Folder, placement: Placement) -> LdapDirectory:
    """Return a connection to the cluster's directory, with the rights of its administrator."""
    address = placement.addresses[cluster.head]
    admin = slapd_layout(cluster, folder).admin
    return LdapDirectory(
        LdapSettings(
            f"ldaps://{address}:{LDAPS_PORT}", cluster.directory.base, admin, folder.ldap_password, folder.ldap_ca
        )
    )


def make_directory(runner: Runner, folder: Folder, cluster: Cluster, placement: Placement) -> None:
    """Create what slapd needs before its first start: folders, the administrator's password, and certificates."""
    make_folder(folder.ldap, 0o750)
    make_folder(folder.ldap / "tls", 0o750)
    make_folder(folder.ldap / "db", 0o700)
    if not folder.ldap_password.exists() or not (folder.ldap / "rootpw.conf").exists():
        password = draw_password()
        write_atomic(folder.ldap_password, password + "\n", 0o600)
        write_atomic(folder.ldap / "rootpw.conf", render_rootpw(password, secrets.token_bytes(8)), 0o600)
    _make_certificates(runner, folder, cluster, placement.addresses[cluster.head])
    _give_to_slapd(folder.ldap)


def _make_certificates(runner: Runner, folder: Folder, cluster: Cluster, address: str) -> None:
    """Create a CA and slapd's certificate. If the name or the address of the head has changed, the same CA signs a new
    certificate."""
    tls, ca_key, known = folder.ldap / "tls", folder.secret / "ldap-ca.key", f"{cluster.head} {address}\n"
    if read_text(tls / "names") == known and folder.ldap_ca.exists():
        return
    if not ca_key.exists() or not folder.ldap_ca.exists():
        _openssl(runner, ca_command(str(ca_key), str(folder.ldap_ca), cluster.name))
        ca_key.chmod(0o600)
    key, certificate = tls / "server.key", tls / "server.pem"
    names = [cluster.head, "localhost"]
    _openssl(
        runner,
        certificate_command(str(key), str(certificate), str(ca_key), str(folder.ldap_ca), names, [address]),
    )
    key.chmod(0o600)
    write_atomic(tls / "ca.pem", read_text(folder.ldap_ca) or "")
    folder.ldap_ca.chmod(0o644)
    write_atomic(tls / "names", known)  # written last, so that an interrupted creation is repeated


def _openssl(runner: Runner, argv: list[str]) -> None:
    runner.run(argv, timeout_s=60).checked(hint="OpenSSL 3.0 or later makes the certificates of the directory")


def _give_to_slapd(path: Path) -> None:
    """Let slapd write to its database and read its other files. Only slapd and root can enter the folder.

    All folders except the database's still belong to root, because root writes to them. Only slapd and root can read
    the files with secrets.
    """
    owner = _owner()
    if owner is None:
        return
    _, uid, gid = owner
    os.chown(path / "db", uid, gid)
    for each in (path, path / "tls"):
        os.chown(each, 0, gid)
    for secret in (path / "rootpw.conf", path / "tls/server.key"):
        secret.chmod(0o600)
        os.chown(secret, uid, gid)

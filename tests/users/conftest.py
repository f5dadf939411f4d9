"""A real slapd, as the head of a cluster runs it, for all tests of a module."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.system.machine import program
from dalsegno.users.ldap_directory import LdapDirectory, LdapSettings
from dalsegno.users.slapd import (
    SSH_KEY_SCHEMA,
    SlapdLayout,
    ca_command,
    certificate_command,
    render_rootpw,
    render_slapd_conf,
    slapd_args,
)
from tests.cluster.conftest import make_home
from tests.waiting import eventually

PASSWORD = "correct horse"


@dataclass(frozen=True)
class Slapd:
    """A running slapd: its folder and its ports."""

    folder: Path
    ldap: int
    ldaps: int

    def settings(self, **changed: object) -> LdapSettings:
        values = {
            "url": f"ldaps://127.0.0.1:{self.ldaps}", "base": "dc=local", "bind_dn": "cn=admin,dc=local",
            "password_file": self.folder / "password", "ca_file": self.folder / "tls/ca.pem",
        }  # fmt: skip
        return LdapSettings(**{**values, **changed})  # type: ignore[arg-type]

    @property
    def directory(self) -> LdapDirectory:
        return LdapDirectory(self.settings())


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def write_private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def make_ca(folder: Path, name: str) -> None:
    subprocess.run(ca_command(f"{folder}/{name}.key", f"{folder}/{name}.pem", "one"), check=True, capture_output=True)


@pytest.fixture(scope="module")
def slapd() -> Iterator[Slapd]:
    if program("slapd") is None or program("openssl") is None:
        pytest.skip("slapd is not installed: `./test` installs it")
    folder = make_home("ds-ldap-")
    (folder / "tls").mkdir()
    (folder / "db").mkdir()
    layout = SlapdLayout("one", "dc=local", str(folder))
    (folder / "slapd.conf").write_text(render_slapd_conf(layout))
    (folder / "ssh-key.schema").write_text(SSH_KEY_SCHEMA)
    (folder / "rootpw.conf").write_text(render_rootpw(PASSWORD, b"saltsalt"))
    # Without a line break, which `ldapsearch -y` would treat as part of the password.
    write_private(folder / "password", PASSWORD)
    make_ca(folder / "tls", "ca")
    tls = folder / "tls"
    server = certificate_command(
        f"{tls}/server.key", f"{tls}/server.pem", f"{tls}/ca.key", f"{tls}/ca.pem", ["localhost"], ["127.0.0.1"]
    )
    subprocess.run(server, check=True, capture_output=True)
    user = ""
    if os.geteuid() == 0:
        user, owner = "openldap", pwd.getpwnam("openldap")
        for path in (folder / "db", tls / "server.key"):
            os.chown(path, owner.pw_uid, owner.pw_gid)
    ldap, ldaps = free_ports()
    argv = [str(program("slapd")), *slapd_args(layout, ["ADDRESS"], user)]
    urls = f"ldap://127.0.0.1:{ldap}/ ldaps://127.0.0.1:{ldaps}/"
    argv[argv.index("-h") + 1] = urls
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(ldaps) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text(errors="replace")[-2000:]
        yield Slapd(folder, ldap, ldaps)
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True

"""Accounts in LDAP on ssh hosts: slapd on the head, and nslcd on every host, which looks up accounts in slapd.

A new CA signs the head's certificate, and the CA's key is then deleted. Every host has the CA's certificate, and checks
the head's certificate with it. A program of ours on the head writes the accounts after slapd has started.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.inspect import HostFacts
from dalsegno.setup.node_plan import (
    HostParts,
    PlannedCommand,
    PlannedFile,
    PlannedFolder,
    PlannedService,
    content_digest,
)
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.system.files import read_text, write_atomic
from dalsegno.system.hosts import revision
from dalsegno.system.passwords import draw_password
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.folder import LOGS
from dalsegno.targets.ssh.folder import SshFolder, head_folder
from dalsegno.targets.ssh.people import AssignedIds, foreign_accounts, homes_of
from dalsegno.targets.ssh.releases import DEBIAN
from dalsegno.targets.ssh.services import PATH
from dalsegno.users.accounts import cluster_accounts
from dalsegno.users.ldap_directory import DirectoryAccounts
from dalsegno.users.login_files import DirectoryClient, render_nslcd_conf, render_nsswitch
from dalsegno.users.slapd import (
    LDAP_PORT,
    LDAPS_PORT,
    SSH_KEY_SCHEMA,
    SlapdLayout,
    ca_command,
    certificate_command,
    render_rootpw,
    render_slapd_conf,
    slapd_args,
)

SERVER_PACKAGES, CLIENT_PACKAGES = ("slapd",), ("nslcd", "libnss-ldapd")
DIRECTORY_PORTS = (LDAP_PORT, LDAPS_PORT)
SLAPD_USER, NSLCD_USER = "openldap", "nslcd"  # users that the packages create
NSSWITCH, NSLCD_CONF = "/etc/nsswitch.conf", "/etc/nslcd.conf"
_PARTS = ("password", "rootpw", "ca", "certificate", "key", "names")


@dataclass(frozen=True)
class DirectorySecrets:
    """The administrator's password, the part of slapd.conf with the password's hash, and the head's certificate.

    `names` are the names and addresses that the certificate is valid for.
    """

    password: str
    rootpw: str
    ca: str
    certificate: str
    key: str
    names: str

    def __repr__(self) -> str:
        return "DirectorySecrets(…)"


def directory_secrets(folder: SshFolder, cluster: Cluster, runner: Runner | None = None) -> DirectorySecrets:
    """Return the secrets in the folder on the operator's machine. If there are none, or if the name or address of the
    head has changed, return new ones, which are not written yet."""
    found = [read_text(folder.secret / f"ldap-{part}") or "" for part in _PARTS]
    address = _head_address(cluster)
    names = f"{cluster.head} {address}"
    if all(found) and found[-1] == names:
        return DirectorySecrets(*found)
    password = draw_password()
    made = _certificates(runner or LocalRunner(), cluster, address)
    return DirectorySecrets(password, render_rootpw(password, secrets.token_bytes(8)), *made, names)


def write_directory_secrets(folder: SshFolder, held: DirectorySecrets) -> None:
    for part in _PARTS:
        write_atomic(folder.secret / f"ldap-{part}", getattr(held, part), 0o600)


def _certificates(runner: Runner, cluster: Cluster, address: str) -> tuple[str, str, str]:
    """Return three texts: the certificate of a new CA, a certificate of the head, and the key of the head's
    certificate."""
    with tempfile.TemporaryDirectory() as name:
        paths = {part: str(Path(name, part)) for part in ("ca.key", "ca.pem", "server.key", "server.pem")}
        ca = (paths["ca.key"], paths["ca.pem"])
        numeric = _is_numeric(address)
        names = [cluster.head, "localhost", *([] if numeric else [address])]
        signed = certificate_command(paths["server.key"], paths["server.pem"], *ca, names, [address] if numeric else [])
        for argv in (ca_command(*ca, cluster.name), signed):
            runner.run(argv, timeout_s=60).checked(hint="OpenSSL 3.0 or later makes the certificates of the directory")
        ca_text, certificate, key = (Path(paths[part]).read_text() for part in ("ca.pem", "server.pem", "server.key"))
        return ca_text, certificate, key


def _is_numeric(address: str) -> bool:
    """Return whether this is an IP address and not a name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _head_address(cluster: Cluster) -> str:
    host = cluster.ssh.host(cluster.head)
    return host.address if host else cluster.head


def check_directory(cluster: Cluster, facts: Mapping[str, HostFacts]) -> dict[str, DalsegnoError]:
    """Return the hosts that cannot look up accounts in LDAP, with the reason for each."""
    if not cluster.directory.ldap:
        return {}
    return {
        host: TargetError(
            f"{host}: accounts in LDAP are set up on Debian and Ubuntu only, and it has {each.os_id}",
            hint="leave `directory` out: accounts are then in the files of every host",
        )
        for host, each in facts.items()
        if each.os_id not in DEBIAN or not each.files.get(NSSWITCH)
    }


def refuse_machine_groups(cluster: Cluster, ids: AssignedIds) -> None:
    """Raise an error if a user is in a group that exists only in the hosts' files. Users in LDAP cannot be members of
    such a group."""
    for user in cluster.users if cluster.directory.ldap else ():
        if missing := [name for name in user.groups if name not in ids.gids]:
            raise TargetError(
                f"user `{user.name}` is in LDAP, and group `{missing[0]}` is in the files of the hosts",
                hint="use a group of the cluster, which is in LDAP too: `groups:` of the file, or `dalsegno group add`",
            )


def directory_parts(
    cluster: Cluster,
    host: str,
    facts: Mapping[str, HostFacts],
    ids: AssignedIds,
    held: DirectorySecrets,
    launcher: Sequence[str],
) -> HostParts:
    """Return the parts of a host's plan for the directory. The head is the server, and every host is a client."""
    server = _server(cluster, facts[host], ids, held, launcher) if host == cluster.head else HostParts()
    return server + _client(cluster, facts[host], held)


def _client(cluster: Cluster, facts: HostFacts, held: DirectorySecrets) -> HostParts:
    ca = str(head_folder(cluster.name).root / "ldap-ca.pem")
    url = f"ldaps://{_head_address(cluster)}:{LDAPS_PORT}/"
    conf = render_nslcd_conf(DirectoryClient(cluster.name, url, cluster.directory.base, ca))
    argv = ("/usr/sbin/nslcd", "--nofork")
    service = PlannedService(
        "nslcd",
        argv,
        f"{LOGS}/nslcd.log",
        {"PATH": PATH, "LC_ALL": "C.UTF-8"},
        revision(argv, conf, held.ca),
        "nslcd.service",
        ("/usr/bin/test", "-S", "/run/nslcd/socket"),
        keep=True,
    )
    return HostParts(
        CLIENT_PACKAGES,
        () if facts.systemd else (PlannedFolder("/run/nslcd", 0o755, NSLCD_USER, NSLCD_USER),),
        (
            PlannedFile(ca, held.ca),
            PlannedFile(NSLCD_CONF, conf, 0o640, group=NSLCD_USER),
            PlannedFile(NSSWITCH, render_nsswitch(facts.files[NSSWITCH])),
        ),
        services=(service,),
    )


def _server(
    cluster: Cluster, facts: HostFacts, ids: AssignedIds, held: DirectorySecrets, launcher: Sequence[str]
) -> HostParts:
    folder = head_folder(cluster.name)
    base = folder.root / "ldap"
    layout = SlapdLayout(cluster.name, cluster.directory.base, str(base))
    texts = {
        "slapd.conf": render_slapd_conf(layout),
        "ssh-key.schema": SSH_KEY_SCHEMA,
        "rootpw.conf": held.rootpw,
        "tls/ca.pem": held.ca,
        "tls/server.pem": held.certificate,
        "tls/server.key": held.key,
    }
    secret = ("rootpw.conf", "tls/server.key")  # slapd reads them after it has dropped root privileges
    server = HostParts(
        SERVER_PACKAGES,
        (
            PlannedFolder(str(base), 0o750, group=SLAPD_USER),
            PlannedFolder(str(base / "tls"), 0o750, group=SLAPD_USER),
            PlannedFolder(str(base / "db"), 0o700, SLAPD_USER, SLAPD_USER),
        ),
        (
            *(
                PlannedFile(f"{base}/{name}", text, 0o600, SLAPD_USER, SLAPD_USER, secret=True)
                if name in secret
                else PlannedFile(f"{base}/{name}", text, 0o640, group=SLAPD_USER)
                for name, text in texts.items()
            ),
            PlannedFile(str(folder.secret / "ldap-password"), f"{held.password}\n", 0o600, secret=True),
        ),
        services=(_slapd(cluster, layout, texts),),
    )
    return server + _accounts(cluster, facts, ids, layout, launcher)


def _slapd(cluster: Cluster, layout: SlapdLayout, texts: Mapping[str, str]) -> PlannedService:
    """Return the service of slapd. `texts` are the files of slapd. The service restarts when one of them changes."""
    address = _head_address(cluster)
    argv = ("/usr/sbin/slapd", *slapd_args(layout, [address], SLAPD_USER))
    answers = ("/bin/bash", "-c", f"exec 3<>/dev/tcp/{address}/{LDAPS_PORT}")
    env = {"PATH": PATH, "LC_ALL": "C.UTF-8"}
    return PlannedService(
        "slapd", argv, f"{LOGS}/slapd.log", env, revision(argv, *texts.values()), "", answers, keep=True
    )


def _accounts(
    cluster: Cluster, facts: HostFacts, ids: AssignedIds, layout: SlapdLayout, launcher: Sequence[str]
) -> HostParts:
    """Return the file of the accounts that belong in the directory, and the command that writes them there."""
    root, base = head_folder(cluster.name).root, layout.folder
    url = f"ldaps://{_head_address(cluster)}:{LDAPS_PORT}"
    wanted = cluster_accounts(cluster, foreign_accounts(facts), ids.uids, ids.gids, homes_of(cluster))
    accounts = DirectoryAccounts(url, cluster.directory.base, layout.admin, wanted)
    text = json.dumps(facts_to_json(accounts), indent=1)
    done = f"{base}/applied-{content_digest(text)[:16]}"
    write = (*launcher, "directory-accounts", str(root), done)
    return HostParts(
        files=(PlannedFile(f"{base}/accounts.json", text, 0o600),),
        commands=(PlannedCommand("writing accounts to the directory", write, creates=done, after="slapd"),),
    )

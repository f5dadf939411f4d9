"""Files that let hosts use an LDAP directory (sssd), and that let users log in only to nodes of their jobs. Pure.

The PAM module of Slurm, pam_slurm_adopt, puts an ssh session into the user's job on the node, and refuses users without
a job there. Root and the members of an administrators' group can always log in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MADE_BY = "# Written by Dal Segno for {cluster}'s cluster file; `dalsegno up` overwrites it."


@dataclass(frozen=True)
class DirectoryClient:
    """A host's settings for the directory. Without `bind_dn`, the host reads accounts but no SSH keys."""

    cluster: str
    url: str
    base: str
    ca_file: str
    bind_dn: str = ""
    password: str = ""


def render_sssd_conf(client: DirectoryClient) -> str:
    """Return /etc/sssd/sssd.conf, which must have mode 0600. Logins by password need the server's certificate."""
    services = "nss, pam, ssh" if client.bind_dn else "nss, pam"
    lines = [
        MADE_BY.format(cluster=client.cluster),
        "[sssd]",
        f"services = {services}",
        f"domains = {client.cluster}",
        "",
        f"[domain/{client.cluster}]",
        "id_provider = ldap",
        "auth_provider = ldap",
        "chpass_provider = ldap",
        f"ldap_uri = {client.url}",
        f"ldap_search_base = {client.base}",
        "ldap_schema = rfc2307",
        f"ldap_tls_cacert = {client.ca_file}",
        "ldap_tls_reqcert = demand",
        f"ldap_id_use_start_tls = {'false' if client.url.startswith('ldaps:') else 'true'}",
        "cache_credentials = true",
        "enumerate = false",
        "min_id = 1000",
    ]
    if client.bind_dn:
        lines += [
            f"ldap_default_bind_dn = {client.bind_dn}",
            "ldap_default_authtok_type = password",
            f"ldap_default_authtok = {client.password}",
            "ldap_user_ssh_public_key = sshPublicKey",
        ]
    return "\n".join(lines) + "\n"


_NSS = ("passwd", "group", "shadow")


def render_nsswitch(found: str) -> str:
    """Return /etc/nsswitch.conf with `sss` added after the existing sources of accounts."""
    lines = [_with_sss(line) for line in found.splitlines()]
    missing = [f"{name}: files sss" for name in _NSS if not any(line.startswith(f"{name}:") for line in lines)]
    return "\n".join([*lines, *missing]) + "\n"


def _with_sss(line: str) -> str:
    name, colon, sources = line.partition(":")
    used, comment, text = sources.partition("#")
    if not colon or name not in _NSS or "sss" in used.split():
        return line
    return f"{name}:{used.rstrip()} sss{f' {comment}{text}' if comment else ''}"


def render_sshd_keys(cluster: str) -> str:
    """Return a file for /etc/ssh/sshd_config.d with which sshd also reads keys from the directory, through sssd."""
    return (
        f"{MADE_BY.format(cluster=cluster)}\n"
        "AuthorizedKeysCommand /usr/bin/sss_ssh_authorizedkeys %u\n"
        "AuthorizedKeysCommandUser nobody\n"
    )


ADOPT_FIRST = "# Dal Segno: only users with a job on this node may log in."
ADOPT_LAST = "# Dal Segno: end"
DISABLED = "#dalsegno# "


def render_pam_sshd(found: str, admins: Sequence[str] = ()) -> str:
    """Return /etc/pam.d/sshd with pam_slurm_adopt as the last account module. Members of the groups `admins` can always
    log in."""
    lines = _without_part(found.splitlines())
    adopt = [
        ADOPT_FIRST,
        "account    sufficient    pam_succeed_if.so quiet uid = 0",
        *(f"account    sufficient    pam_succeed_if.so quiet user ingroup {group}" for group in admins),
        "account    required      pam_slurm_adopt.so action_no_jobs=deny action_adopt_failure=deny",
        ADOPT_LAST,
    ]
    last = max((at for at, line in enumerate(lines) if _is_account(line)), default=len(lines) - 1)
    return "\n".join([*lines[: last + 1], *adopt, *lines[last + 1 :]]) + "\n"


def without_pam_systemd(found: str) -> str:
    """Return a PAM file, such as common-session, without pam_systemd. pam_systemd would move a session out of the job's
    cgroup, into which pam_slurm_adopt has put it."""
    lines = [f"{DISABLED}{line}" if _is_pam_systemd(line) else line for line in found.splitlines()]
    return "\n".join(lines) + "\n"


def restore_pam(found: str) -> str:
    """Return a PAM file as it was before `render_pam_sshd` or `without_pam_systemd`."""
    lines = [line.removeprefix(DISABLED) for line in _without_part(found.splitlines())]
    return "\n".join(lines) + "\n"


def _without_part(lines: Sequence[str]) -> list[str]:
    kept, inside = [], False
    for line in lines:
        inside = inside or line == ADOPT_FIRST
        if not inside:
            kept.append(line)
        inside = inside and line != ADOPT_LAST
    return kept


def _is_account(line: str) -> bool:
    words = line.split()
    return bool(words) and (words[0] in ("account", "-account") or words[:2] == ["@include", "common-account"])


def _is_pam_systemd(line: str) -> bool:
    words = line.split()
    return len(words) > 2 and words[0] in ("session", "-session") and words[2] == "pam_systemd.so"

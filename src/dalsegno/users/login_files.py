"""Render files that let hosts use an LDAP directory (nslcd), and files that let users log in only to nodes where they
have a job. Pure.

Slurm's PAM module, pam_slurm_adopt, puts an ssh session into the user's job on the node, and refuses users without a
job there. Root and the members of an administrators' group can always log in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.users.ldap_entries import GROUPS, PEOPLE

MADE_BY = "# Written by Dal Segno for {cluster}'s cluster file; `dalsegno up` overwrites it."


@dataclass(frozen=True)
class DirectoryClient:
    """A host's settings for the directory."""

    cluster: str
    url: str
    base: str
    ca_file: str


def render_nslcd_conf(client: DirectoryClient) -> str:
    """Return /etc/nslcd.conf. nslcd checks the server's certificate, and no LDAP entry can replace a system account."""
    lines = [
        MADE_BY.format(cluster=client.cluster),
        "uid nslcd",
        "gid nslcd",
        f"uri {client.url}",
        f"base {client.base}",
        f"base passwd {PEOPLE},{client.base}",
        f"base group {GROUPS},{client.base}",
        "tls_reqcert demand",
        f"tls_cacertfile {client.ca_file}",
        "nss_min_uid 1000",
        "nss_initgroups_ignoreusers ALLLOCAL",  # root can log in without the server
        "bind_timelimit 5",
        "timelimit 5",
        "reconnect_retrytime 2",
    ]
    return "\n".join(lines) + "\n"


_NSS = ("passwd", "group")


def render_nsswitch(found: str) -> str:
    """Return /etc/nsswitch.conf with `ldap` added after the existing sources of accounts."""
    lines = [_with_ldap(line) for line in found.splitlines()]
    missing = [f"{name}: files ldap" for name in _NSS if not any(line.startswith(f"{name}:") for line in lines)]
    return "\n".join([*lines, *missing]) + "\n"


def _with_ldap(line: str) -> str:
    name, colon, sources = line.partition(":")
    used, comment, text = sources.partition("#")
    if not colon or name not in _NSS or "ldap" in used.split():
        return line
    return f"{name}:{used.rstrip()} ldap{f' {comment}{text}' if comment else ''}"


ADOPT_FIRST = "# Dal Segno: only users with a job on this node may log in."
SESSION_FIRST = "# Dal Segno: without pam_systemd, in place of: "
ADOPT_LAST = "# Dal Segno: end"
PAM_SSHD = "/etc/pam.d/sshd"
PAM_SESSION_FILES = ("/etc/pam.d/common-session", "/etc/pam.d/password-auth")  # Debian and Ubuntu; the RHEL family
ADMIN_GROUPS = ("sudo", "wheel")  # their members can become root anyway


def render_pam_sshd(found: str, session_files: Mapping[str, str], admins: Sequence[str] = ()) -> str:
    """Return /etc/pam.d/sshd with pam_slurm_adopt as the last account module.

    Root, the users `admins` and the members of administrators' groups can always log in. `session_files` are PAM files
    that /etc/pam.d/sshd may include. If such a file has pam_systemd, the line that includes it is replaced by the
    file's other session lines. pam_systemd would move the session out of the job's cgroup, into which pam_slurm_adopt
    has moved it. The session files themselves do not change.
    """
    lines = restore_pam(found).splitlines()
    adopt = [
        ADOPT_FIRST,
        "account    sufficient    pam_succeed_if.so quiet uid = 0",
        *(f"account    sufficient    pam_succeed_if.so quiet user = {user}" for user in admins),
        *(f"account    sufficient    pam_succeed_if.so quiet user ingroup {group}" for group in ADMIN_GROUPS),
        "account    required      pam_slurm_adopt.so action_no_jobs=deny action_adopt_failure=deny",
        ADOPT_LAST,
    ]
    last = max((at for at, line in enumerate(lines) if _is_account(line)), default=len(lines) - 1)
    lines = [*lines[: last + 1], *adopt, *lines[last + 1 :]]
    inlined = (each for line in lines for each in _without_systemd(line, session_files))
    return "\n".join(inlined) + "\n"


def _without_systemd(line: str, session_files: Mapping[str, str]) -> list[str]:
    """Return the lines that replace one line of a PAM file, so that pam_systemd is not loaded.

    A line that includes a session file is replaced by that file's lines without pam_systemd. The replaced line is kept
    as a comment.
    """
    if _is_pam_systemd(line):
        return [f"{SESSION_FIRST}{line}", ADOPT_LAST]
    included = _included_session(line)
    text = next((text for path, text in session_files.items() if path.rpartition("/")[2] == included), "")
    own = [each for each in text.splitlines() if each.split()[:1] in (["session"], ["-session"])]
    if not any(map(_is_pam_systemd, own)):
        return [line]
    return [f"{SESSION_FIRST}{line}", *(each for each in own if not _is_pam_systemd(each)), ADOPT_LAST]


def restore_pam(found: str) -> str:
    """Return a PAM file as it was before `render_pam_sshd`."""
    kept, inside = [], False
    for line in found.splitlines():
        if line.startswith(SESSION_FIRST):
            kept.append(line.removeprefix(SESSION_FIRST))
        inside = inside or line == ADOPT_FIRST or line.startswith(SESSION_FIRST)
        if not inside:
            kept.append(line)
        inside = inside and line != ADOPT_LAST
    return "\n".join(kept) + "\n"


def _is_account(line: str) -> bool:
    words = line.split()
    return bool(words) and (words[0] in ("account", "-account") or words[:2] == ["@include", "common-account"])


def _included_session(line: str) -> str:
    """Return the name of the file that a line includes for its session modules; "" if it includes none."""
    words = line.split()
    if words[:1] == ["@include"] and len(words) > 1:
        return words[1]
    return words[2] if words[:1] == ["session"] and len(words) > 2 and words[1] in ("include", "substack") else ""


def _is_pam_systemd(line: str) -> bool:
    words = line.split()
    return len(words) > 2 and words[0] in ("session", "-session") and words[2] == "pam_systemd.so"

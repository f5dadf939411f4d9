"""Shells on a local cluster: the environment variables that make a shell use the cluster, and how root enters its
hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from shlex import join
from typing import NamedTuple

from dalsegno.errors import TargetError, UsageError
from dalsegno.programs import launcher, own_argv
from dalsegno.runs.auto_resume.srun_step import NOTES
from dalsegno.runs.coordinator.agents.liveness import NODE_TIMEOUT
from dalsegno.system.children import Process
from dalsegno.system.files import read_text
from dalsegno.system.hosts import host_process
from dalsegno.system.machine import program
from dalsegno.targets.folder import read_applied
from dalsegno.targets.local.daemons import slurm_env
from dalsegno.targets.local.folder import ClusterState, Folder, read_state
from dalsegno.targets.local.placement import SHELL, VIRTUAL

ON_ONE_MACHINE_S = "1"  # default of DALSEGNO_NODE_TIMEOUT; short, because no real network is between the hosts
RENAME = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'  # run in a new UTS namespace
# Entering a mount namespace resets the working folder, so the command first changes to it by name.
CHANGE_FOLDER = 'cd -- "$1" 2>/dev/null || cd /; shift; exec "$@"'


def user_env(folder: Folder, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a shell use the cluster. PATH has the cluster's commands first."""
    rest = [part for part in env.get("PATH", os.defpath).split(os.pathsep) if part and part != str(folder.bin)]
    return {
        **slurm_env(folder),
        "DALSEGNO_CLUSTER": folder.name,
        "DALSEGNO_CONTROLLER": str(folder.controller_socket),
        NODE_TIMEOUT: env.get(NODE_TIMEOUT) or ON_ONE_MACHINE_S,
        "PATH": os.pathsep.join([str(folder.bin), *rest]),
    }


def enter(
    folder: Folder,
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    host: str | None = None,
    user: str | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a shell, or of one command, on the cluster."""
    inner = list(command) or [env.get("SHELL") or "/bin/bash"]
    prefix = entry_command(folder, cwd, host=host, user=user)
    return [*prefix, *inner], {**(_person_env(folder, user, env) if user else env), **user_env(folder, env)}


def _person_env(folder: Folder, user: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of another user. Of root's variables, only those of the terminal, the locale and the time
    zone are kept, because others may be secret."""
    person = _person(folder, user)
    plain = {name: env[name] for name in ("TERM", "LANG", "LC_ALL", "TZ") if name in env}
    return {**plain, "USER": user, "LOGNAME": user, "HOME": person.home, "SHELL": person.shell}


class _Person(NamedTuple):
    uid: str
    gid: str
    home: str
    shell: str


def _person(folder: Folder, user: str) -> _Person:
    """Return a user from the passwd file of the cluster's hosts."""
    lines = (read_text(folder.etc / "passwd") or "").splitlines()
    fields = next((fields for line in lines if (fields := line.split(":"))[0] == user), None)
    if fields is None or len(fields) < 7:
        raise UsageError(
            f"{folder.name} has no user `{user}`",
            hint="`dalsegno user add NAME` adds one, or `users:` in the cluster file",
        )
    return _Person(fields[2], fields[3], fields[5], fields[6] or "/bin/sh")


def person_uid(folder: Folder, user: str) -> int:
    return int(_person(folder, user).uid)


def person_name(folder: Folder, uid: int) -> str:
    """Return the name of a user on the cluster's hosts; "" if no user has this uid."""
    rows = (line.split(":") for line in (read_text(folder.etc / "passwd") or "").splitlines())
    return next((row[0] for row in rows if len(row) > 2 and row[2] == str(uid)), "")


def entry_command(folder: Folder, cwd: str, *, host: str | None = None, user: str | None = None) -> list[str]:
    """Return the arguments to put before a command, so that it runs on `host`, or else on the first login node or the
    head.

    The list is empty if the caller is not root or if the nodes are on loopback ports. The environment then suffices.
    """
    state = read_state(folder)
    virtual = state is not None and state.placement.hosts == VIRTUAL
    if not (virtual and os.geteuid() == 0):
        if host or user:
            raise UsageError(
                "only root can enter a host or become another user, and only on virtual hosts",
                hint="use sudo" if virtual else "create the cluster as root, on a machine that permits virtual hosts",
            )
        return []
    process = _host(folder, host, state)
    if process is None:
        if host or user:
            raise TargetError(
                f"host {host or 'head'} of {folder.name} is not running",
                hint="`dalsegno status` shows what is, `dalsegno up` boots it",
            )
        return []  # in an incomplete cluster, Slurm's commands report the error
    become: list[str] = []
    if user:
        person = _person(folder, user)
        become = ["setpriv", f"--reuid={person.uid}", f"--regid={person.gid}", "--init-groups", "--"]
    # If no host is named, the shell keeps this machine's network, so that pip and git work. Its host name is one by
    # which slurmctld can reach every srun in the shell (`submit_hosts`).
    named = ["--uts", "--net"] if host else []
    renamed = [] if host else ["unshare", "--uts", "/bin/sh", "-c", RENAME, SHELL]
    nsenter = [program("nsenter") or "nsenter", "-t", str(process.pid), "--mount", "--ipc", "--pid", *named, "--"]
    return [*nsenter, *renamed, *become, "/bin/sh", "-c", CHANGE_FOLDER, "sh", cwd]


def _host(folder: Folder, name: str | None, state: ClusterState | None) -> Process | None:
    applied = read_applied(folder)
    known = list(state.placement.addresses) if state else []
    if name is not None and name not in known:
        raise UsageError(f"{folder.name} has no host `{name}`", hint=f"it has: {', '.join(known[:12])}")
    chosen = name or (applied.logins[0] if applied and applied.logins else applied.head if applied else "head")
    return host_process(folder.host(chosen))


RESUME = "dalsegno-resume"


def own_command() -> str:
    """Return a script that starts `dalsegno` with this Python. It works for every user who can read Dal Segno and this
    Python."""
    return f'#!/bin/sh\nexec {join(own_argv())} "$@"\n'


def resume_command() -> str:
    """Return a script that replaces srun for `--auto-resume=1`. If the user cannot execute this Python, the script runs
    the real srun."""
    words = list(launcher())
    return (
        f'#!/bin/sh\n[ -x {join(words[:1])} ] && exec {join([*words, "step-again"])} "$@"\n'
        f'srun=$1; shift 2\nexport {NOTES}=-1\nexec "$srun" "$@"\n'
    )

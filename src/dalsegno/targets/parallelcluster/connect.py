"""Connect to machines of a cluster on ParallelCluster: with ssh and a key, or through AWS Systems Manager."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence

from dalsegno.targets.parallelcluster.folder import PclusterFolder, PclusterState

LOGIN_USERS = {"ubuntu": "ubuntu", "alinux": "ec2-user", "rhel": "ec2-user", "rocky": "rocky"}


def login_user(system: str) -> str:
    """Return the login user of an operating system's images. This user has sudo."""
    return next(name for family, name in LOGIN_USERS.items() if system.startswith(family))


def ssh_argv(
    state: PclusterState,
    address: str,
    folder: PclusterFolder,
    command: Sequence[str],
    host: str | None,
    terminal: bool,
) -> list[str]:
    """Return the ssh command to the head node, or through it to another machine of the cluster."""
    key = os.path.expanduser(state.key)
    # The head's key is unknown at the first connection and is accepted then. Later it must not change.
    options = ["-i", key, "-o", "StrictHostKeyChecking=accept-new", "-o", f"UserKnownHostsFile={folder.known_hosts}"]
    if not terminal:
        options += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    head = f"{state.login_user}@{address}"
    if host:
        words = ["ssh", *(["-t"] if terminal else []), host, *([shlex.join(command)] if command else [])]
        command = words  # run ssh again on the head, because only the head can be reached from outside
    remote = [shlex.join(command)] if command else []
    return ["ssh", *options, *(["-t"] if terminal else []), head, *remote]


def ssm_argv(state: PclusterState, instance: str, command: Sequence[str]) -> list[str]:
    """Return the command that opens a session through AWS Systems Manager, which needs no open port and no key."""
    argv = ["aws", "ssm", "start-session", "--region", state.region, "--target", instance]
    inner = f"sudo -iu {state.login_user}" + (f" -- {shlex.join(command)}" if command else "")
    parameters = json.dumps({"command": [inner]})
    return [*argv, "--document-name", "AWS-StartInteractiveCommand", "--parameters", parameters]

"""Connections to instances of HyperPod: SSM sessions, and ssh through SSM. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import NotThere
from dalsegno.hostlist import closest
from dalsegno.targets.hyperpod.answers import InstanceInfo
from dalsegno.targets.hyperpod.folder import HyperPodFolder

LOGIN_USER = "ubuntu"  # the login user of HyperPod's images
SSH_DOCUMENT = "AWS-StartSSHSession"
COMMAND_DOCUMENT = "AWS-StartInteractiveCommand"


@dataclass(frozen=True)
class Reached:
    """An instance, with the names that people and ssh use for it. Messages and commands use the first name."""

    instance: InstanceInfo
    names: tuple[str, ...]


def name_instances(instances: Iterable[InstanceInfo], controller_group: str) -> list[Reached]:
    """Return the instances with all their names: GROUP-NUMBER, the name in Slurm, and the instance id.

    The controller is also called `head`.
    """
    counts: dict[str, int] = {}
    found = []
    for each in instances:
        counts[each.group] = counts.get(each.group, 0) + 1
        first = "head" if each.group == controller_group and counts[each.group] == 1 else ""
        number = f"{each.group}-{counts[each.group]}"
        names = dict.fromkeys(name for name in (first, number, each.host, each.id) if name)
        found.append(Reached(each, tuple(names)))
    return found


def find_instance(reached: Sequence[Reached], name: str) -> Reached:
    """Return the instance with this name. Raise NotThere if there is none."""
    for each in reached:
        if name in each.names:
            return each
    known = [name for each in reached for name in each.names]
    close = closest(name, known)
    hint = f"did you mean `{close}`? " if close else ""
    raise NotThere(f"there is no instance `{name}`", hint=f"{hint}`dalsegno nodes` shows their names")


def ssm_target(cluster_id: str, instance: InstanceInfo) -> str:
    """Return the name of an instance in SSM."""
    return f"sagemaker-cluster:{cluster_id}_{instance.group}-{instance.id}"


def session_argv(region: str, cluster_id: str, instance: InstanceInfo, command: Sequence[str] = ()) -> list[str]:
    """Return the command that opens an SSM session, or runs one command in a session. It needs the
    session-manager-plugin."""
    argv = ["aws", "ssm", "start-session", "--region", region, "--target", ssm_target(cluster_id, instance)]
    if command:
        parameters = json.dumps({"command": [shlex.join(command)]})
        argv += ["--document-name", COMMAND_DOCUMENT, "--parameters", parameters]
    return argv


def render_ssh_config(
    region: str, cluster: str, cluster_id: str, reached: Iterable[Reached], key: str, folder: HyperPodFolder
) -> str:
    """Return the settings of ssh for every instance. Connections are SSM sessions, so no port is open."""
    lines = [
        f"# Written by Dal Segno for cluster {cluster}. `dalsegno up` and `dalsegno ssh` write it again.",
        f"# For plain ssh, write `Include {folder.ssh_config}` at the top of ~/.ssh/config, then `ssh {cluster}-head`.",
    ]
    identity = [f"  IdentityFile {_quoted(key.removesuffix('.pub'))}", "  IdentitiesOnly yes"] if key else []
    for each in reached:
        target = ssm_target(cluster_id, each.instance)
        proxy = (
            f"aws ssm start-session --region {region} --target {target} "
            f"--document-name {SSH_DOCUMENT} --parameters portNumber=%p"
        )
        names = " ".join(f"{cluster}-{name}" for name in each.names)
        lines += [
            "",
            f"Host {names}",
            f"  ProxyCommand {proxy}",
            f"  User {LOGIN_USER}",
            *identity,
            # The first host key of an instance is accepted, because IAM has authenticated the instance. A replacement
            # has another id, and therefore its own entry in the file.
            f"  HostKeyAlias {each.instance.id}",
            "  StrictHostKeyChecking accept-new",
            f"  UserKnownHostsFile {_quoted(str(folder.known_hosts))}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    return '"' + path.replace("%", "%%") + '"'


def ssh_argv(
    config: Path, cluster: str, name: str, command: Sequence[str] = (), *, terminal: bool = False, batch: bool = False
) -> list[str]:
    """Return the ssh command for a shell or one command on an instance.

    With `batch`, ssh asks no questions and fails after 30 s.
    """
    options = ["-t"] if terminal and command else []
    options += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=30"] if batch else []
    argv = ["ssh", "-F", str(config), *options, "--", f"{cluster}-{name}"]
    return [*argv, shlex.join(command)] if command else argv

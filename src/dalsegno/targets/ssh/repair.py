"""Let the head reset and reboot a node over ssh, with a key that permits nothing else. Pure."""

from __future__ import annotations

import json
from dataclasses import replace

from dalsegno.setup.node_plan import HostParts, PlannedFile, PlannedFolder
from dalsegno.spec.facts import SshAccess, SshHost, facts_to_json
from dalsegno.targets.ssh.folder import PowerCommands, SshFolder

REBOOT, RESET = "reboot", "reset"
PROGRAM = "/opt/dalsegno/node-repair"
KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
# A reboot may hang, for example if a file server does not answer. So it is forced after two minutes.
_PROGRAM = f"""#!/bin/sh
# Written by Dal Segno. sshd starts this for the key of the cluster's head, whatever the head asks for.
case "$SSH_ORIGINAL_COMMAND" in
{REBOOT})
    setsid sh -c 'sleep 1; reboot; sleep 120; reboot -f' </dev/null >/dev/null 2>&1 &
    ;;
{RESET})
    exec nvidia-smi --gpu-reset
    ;;
*)
    echo "only {REBOOT} and {RESET} are allowed" >&2
    exit 2
    ;;
esac
"""


def head_parts(folder: SshFolder, key: str, ssh: SshAccess) -> HostParts:
    """Return what the head needs to repair nodes. Only root can read the power commands, which may contain a
    password."""
    power = PowerCommands({host.name: host.power_cycle for host in ssh.hosts if host.power_cycle})
    texts = {folder.repair_key: key, **({folder.power: json.dumps(facts_to_json(power))} if power.nodes else {})}
    return HostParts(files=tuple(PlannedFile(str(path), text, 0o600, secret=True) for path, text in texts.items()))


def without_power(ssh: SshAccess) -> SshAccess:
    """Return the hosts without their power commands, for a file that all users of the head can read."""
    return replace(ssh, hosts=tuple(replace(host, power_cycle=()) for host in ssh.hosts))


def node_parts(public_key: str) -> HostParts:
    """Return what lets the head reset and reboot a node. The key gives no access to a shell, a port or a file there."""
    line = f'restrict,command="{PROGRAM}" {public_key}\n'
    return HostParts(
        folders=(PlannedFolder("/root/.ssh", 0o700, keep=True),),
        files=(
            PlannedFile(PROGRAM, _PROGRAM, 0o755),
            PlannedFile("/root/.ssh/authorized_keys", line, 0o600, block=True),
        ),
    )


def repair_argv(host: SshHost, folder: SshFolder, order: str) -> list[str]:
    """Return the ssh command with which the head orders a node to reset its GPUs or to reboot."""
    options = ["BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10"]
    options.append(f"UserKnownHostsFile={KNOWN_HOSTS}")
    words = [word for option in options for word in ("-o", option)]
    port = ["-p", str(host.port)] if host.port else []
    return ["ssh", "-F", "none", "-i", str(folder.repair_key), *words, *port, "-l", "root", "--", host.address, order]

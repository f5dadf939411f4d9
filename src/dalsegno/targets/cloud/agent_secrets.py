"""The secrets of node agents, for platforms that choose node names only at run time.

These platforms also have no shared folder that only root can change. So each secret is derived from munge's key, which
the platform puts on all machines. A node derives its own secret when it is set up. On the controller, a service derives
it when the node appears in Slurm: `agent-secrets` on OCI, and `hyperpod-partitions` on HyperPod.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.log import start_logging
from dalsegno.setup.bootstrap import HOST, PYTHON
from dalsegno.setup.node_plan import PlannedCommand
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.files import make_folder, write_if_changed
from dalsegno.system.processes import LocalRunner

log = logging.getLogger("agent-secrets")

EVERY_S = 30.0
MUNGE_KEY = "/etc/munge/munge.key"  # all machines of the cluster have this file; only root and munge can read it
# This program runs on a node and writes the secret of the node's agent. Without munge's key, it writes nothing.
DERIVE = """\
import hashlib, hmac, os, sys
key, cluster, node, path = sys.argv[1:]
if os.path.exists(key):
    with open(key, "rb") as file:
        secret = hmac.new(file.read(), f"dalsegno {cluster} {node}".encode(), hashlib.sha256).hexdigest()
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secret)
    os.replace(path + ".new", path)
"""


def agent_secret(munge_key: bytes, cluster: str, node: str) -> str:
    """Return the secret of a node's agent, as DERIVE computes it on the node."""
    return hmac.new(munge_key, f"dalsegno {cluster} {node}".encode(), hashlib.sha256).hexdigest()


def derive_command(cluster: str, folder: str) -> PlannedCommand:
    """Return the command that writes a node's own secret to `folder`."""
    argv = (PYTHON, "-I", "-c", DERIVE, MUNGE_KEY, cluster, HOST, f"{folder}/{HOST}")
    return PlannedCommand("deriving the secret of the node agent", argv, creates=f"{folder}/{HOST}")


def write_secrets(folder: Path, munge_key: Path, cluster: str, nodes: Iterable[str]) -> None:
    """Write the secret of each node's agent, for the controller."""
    make_folder(folder, 0o700)
    key = munge_key.read_bytes()
    for node in nodes:
        write_if_changed(folder / node, agent_secret(key, cluster, node), 0o600)


def main(arguments: list[str], pause: Callable[[float], None] = time.sleep) -> int:
    """Run `agent-secrets CLUSTER FOLDER [--once]` and return the exit code."""
    start_logging("agent-secrets")
    cluster, folder, *rest = arguments
    slurm = SlurmClient(LocalRunner(), {name: os.environ[name] for name in ("PATH", "SLURM_CONF")}, timeout_s=30)
    while True:
        try:
            write_secrets(Path(folder), Path(MUNGE_KEY), cluster, [node.name for node in slurm.nodes()])
        except (DalsegnoError, OSError) as error:  # slurmctld is restarting, or the key is not there yet
            log.warning("%s", error)
        if "--once" in rest:
            return 0
        pause(EVERY_S)

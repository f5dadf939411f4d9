"""Watch for the notice in which a cloud announces that it will reclaim this node.

The notice is the interruption of a spot instance, or the end of reserved capacity, which `up` writes into CLOUD_FILE.
If the node has a node agent, that agent reads notices too, and the controller may then drain the node. The run agent
does not rely on this: the controller may only observe, and a cluster may have no daemons of Dal Segno.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from dalsegno.wire.cloud_notice import CLOUD_FILE, BadNotice, CloudNotice, parse_cloud
from dalsegno.wire.instance_metadata import InstanceMetadata, NoMetadata, is_ec2, read_spot_notice

log = logging.getLogger("run-agent")

EVERY_S = 5.0  # interval between two queries, as EC2 advises
# Slurm's files on ParallelCluster and HyperPod. SLURM_CONF of a job may name a copy that slurmd fetched instead.
PLATFORM = Path("/opt/slurm/etc")


def find_cloud_file(env: Mapping[str, str], platform: Path = PLATFORM) -> Path | None:
    """Return the administrator's file about the cloud that this node is on; None if there is none.

    SLURM_CONF need not be trusted, because a user who sets it affects only this run.
    """
    beside = Path(env.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    files = (folder / CLOUD_FILE for folder in (beside, platform))
    # Unlike `Path.exists`, this raises no error for a folder that the user may not enter.
    return next((file for file in files if os.path.exists(file)), None)


class NoticeWatch:
    """Reads notices in a thread, because metadata service and file system may be slow. `take` never waits."""

    def __init__(self, node: str, cloud_file: Path | None, metadata: InstanceMetadata | None = None) -> None:
        self._node, self._cloud_file, self._metadata = node, cloud_file, metadata or InstanceMetadata()
        self._spot: CloudNotice | None = None
        self._code = self._sent = ""
        self._failed = False

    def start(self) -> None:
        """Start watching if this machine is an EC2 instance, or if there is a file about its cloud.

        Virtual hosts need the file, because the firmware that they see is not their own.
        """
        if is_ec2() or self._cloud_file is not None:
            threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def take(self) -> str:
        """Return the code of a notice that was not returned before; "" if there is none."""
        code = self._code
        if code == self._sent:
            return ""
        self._sent = code
        return code

    def repeat(self) -> None:
        """Make `take` return the notice again, because a new coordinator does not know it."""
        self._sent = ""

    def look(self) -> None:
        """Read the notices once. A missing or invalid answer changes nothing, and only the first one is logged.

        As in the health check, the interruption of a spot instance takes precedence over the end of a reservation.
        """
        try:
            self._spot = read_spot_notice(self._metadata)
        except (NoMetadata, BadNotice) as error:
            self._log_once(error)
        if self._spot is not None:
            self._code = self._spot.code
            return
        try:
            end = self._read_end()
        except (OSError, ValueError) as error:
            self._log_once(error)
            return
        self._code = end.code if end else ""

    def _read_end(self) -> CloudNotice | None:
        """Return the notice that this node's reserved time ends soon; None if it does not."""
        if self._cloud_file is None:
            return None
        text = self._cloud_file.read_text(encoding="utf-8")
        return parse_cloud(text, self._node).end_notice(time.time())

    def _log_once(self, error: Exception) -> None:
        if not self._failed:
            log.info("notices of the cloud cannot be read: %s", error)
        self._failed = True

    def _watch(self) -> None:
        while True:
            self.look()
            time.sleep(EVERY_S)

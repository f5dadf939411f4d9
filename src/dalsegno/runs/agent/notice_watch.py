"""Watch for the notice in which a cloud announces that it will reclaim this node.

If the node has a node agent, that agent reads notices too, and the controller then drains the node. The run agent does
not rely on the node agent, because a user may run on a cluster without Dal Segno's daemons.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from dalsegno.wire.cloud_notice import CLOUD_FILE, BadNotice
from dalsegno.wire.instance_metadata import InstanceMetadata, NoMetadata, is_ec2, read_spot_notice

log = logging.getLogger("run-agent")

EVERY_S = 5.0  # interval between two queries, as EC2 advises


def is_said_to_be_on_a_cloud(env: Mapping[str, str]) -> bool:
    """Return whether the cluster's administrator declares that this node is on a cloud.

    Virtual hosts need this declaration, because the firmware that they see is not their own. SLURM_CONF need not be
    trusted, because a user who sets it only makes this agent query a fixed address.
    """
    return Path(env.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name(CLOUD_FILE).exists()


class NoticeWatch:
    """Queries the metadata service in a thread, because it may be slow to answer. `take` never waits."""

    def __init__(self, metadata: InstanceMetadata | None = None, every_s: float = EVERY_S) -> None:
        self._metadata, self._every_s = metadata or InstanceMetadata(), every_s
        self._code = self._sent = ""
        self._failed = False

    def start(self) -> None:
        """Start watching if this machine is an EC2 instance. No other cloud is supported."""
        if is_ec2() or is_said_to_be_on_a_cloud(os.environ):
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
        """Query the service once. A missing or invalid answer changes nothing, and only the first one is logged."""
        try:
            notice = read_spot_notice(self._metadata)
        except (NoMetadata, BadNotice) as error:
            if not self._failed:
                log.info("notices of the cloud cannot be read: %s", error)
            self._failed = True
            return
        self._code = notice.code if notice else ""

    def _watch(self) -> None:
        while True:
            self.look()
            time.sleep(self._every_s)

"""Apply a cluster file's partition settings and accounting where the platform itself writes slurm.conf.

The service `slurm-policy` on the head compares the partitions with the cluster file twice a minute. `scontrol update`
changes a partition only until slurmctld reads slurm.conf again. So the service repeats it then. With `--accounts`, the
same program adds accounts, users and QOS to slurmdbd once.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.log import start_logging
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.render.slurm_conf import partition_policy
from dalsegno.spec.facts import Cluster, Partition
from dalsegno.system.files import read_text, write_if_changed
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.accounting import update_people
from dalsegno.targets.folder import ClusterFolder, read_applied

log = logging.getLogger("slurm-policy")

EVERY_S = 30.0
RECORD = "partition-settings.json"  # partition -> names of the settings that this service has changed


class PartitionPolicy:
    """Keeps the settings of partitions as the cluster file says. `turn` may be called at any time."""

    def __init__(self, slurm: SlurmClient, folder: ClusterFolder) -> None:
        self._slurm, self._record = slurm, folder.root / RECORD
        # Partition -> the settings that were last applied, and what slurmctld printed for them afterwards. Slurm prints
        # many values in another form than it accepts, so its output is compared with that earlier output.
        self._settled: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {}
        self._complaints: dict[str, str] = {}

    def turn(self, partitions: Sequence[Partition]) -> list[str]:
        """Apply what differs, and return the names of the partitions that were changed.

        Settings that left the cluster file get the values of slurm.conf again.
        """
        wanted = {each.name: partition_policy(each) for each in partitions}
        made: dict[str, list[str]] = json.loads(read_text(self._record) or "{}")
        if gone := [name for name, keys in made.items() if not {*keys} <= wanted.get(name, {}).keys()]:
            self._slurm.reconfigure()
            self._settled.clear()
            log.warning("settings left the cluster file; slurmctld reads slurm.conf again for %s", ", ".join(gone))
        # Written first: a setting that is applied, but not in the record, would stay when it leaves the file.
        write_if_changed(self._record, json.dumps({name: [*keys] for name, keys in wanted.items()}, indent=1))
        present = self._slurm.raw_partitions()
        return [name for name, settings in wanted.items() if name in present and self._apply(name, settings, present)]

    def _apply(self, name: str, settings: Mapping[str, str], present: Mapping[str, Mapping[str, str]]) -> bool:
        if not settings or self._settled.get(name) == (settings, _seen(present[name], settings)):
            return False
        words = [f"{key}={value}" for key, value in settings.items()]
        try:
            self._slurm.scontrol("update", f"PartitionName={name}", *words)
        except DalsegnoError as error:  # such as a QOS that does not exist yet; other partitions are still changed
            if self._complaints.get(name) != error.what:
                log.error("partition %s keeps its settings: %s", name, error)
            self._complaints[name] = error.what
            return False
        self._complaints.pop(name, None)
        self._settled[name] = (settings, _seen(self._slurm.raw_partitions().get(name, {}), settings))
        log.warning("partition %s: %s", name, " ".join(words))
        return True


def _seen(facts: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the values that slurmctld prints for these settings. The case of the settings' names does not matter."""
    printed = {key.lower(): value for key, value in facts.items()}
    return {key: printed.get(key.lower(), "") for key in settings}


def has_people(cluster: Cluster) -> bool:
    """Return whether the cluster has accounting, and its file has accounts, users or QOS to add to it."""
    return bool(cluster.slurm.accounting and (cluster.accounts or cluster.users or cluster.slurm.qos))


def add_people(slurm: SlurmClient, cluster: Cluster) -> None:
    """Add and change the accounts, users and QOS of the cluster file. Other entries, and all admin levels, stay."""
    # The platform has chosen the name under which slurmdbd knows the cluster.
    name = slurm.config().get("ClusterName", "") or cluster.name
    update_people(slurm, replace(cluster, name=name), fresh=False, keep_admins=True)


def main(arguments: list[str], pause: Callable[[float], None] = time.sleep) -> int:
    """Run `slurm-policy FOLDER [--once | --accounts]` and return the exit code."""
    start_logging("slurm-policy")
    folder = ClusterFolder(Path(arguments[0]))
    slurm = SlurmClient(LocalRunner(), {name: os.environ[name] for name in ("PATH", "SLURM_CONF")}, timeout_s=60)
    if "--accounts" in arguments:
        return _add_accounts(slurm, folder)
    policy = PartitionPolicy(slurm, folder)
    while True:
        try:
            if cluster := read_applied(folder):
                policy.turn(cluster.partitions)
        except (DalsegnoError, OSError) as error:  # slurmctld is restarting
            log.warning("%s", error)
        if "--once" in arguments:
            return 0
        pause(EVERY_S)


def _add_accounts(slurm: SlurmClient, folder: ClusterFolder) -> int:
    try:
        cluster = read_applied(folder)
        if cluster is not None and has_people(cluster):
            add_people(slurm, cluster)
    except DalsegnoError as error:
        log.error("%s", error)
        return 1
    return 0

"""Data that a page reads only when it is opened: a node's records, a run's history, GPU hours, drill reports."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.hardware.catalog import find_price
from dalsegno.health.result import Verdict
from dalsegno.recovery.client import ask
from dalsegno.recovery.journal.event import read_event
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import read_json
from dalsegno.targets.base import CanInject
from dalsegno.targets.folder import ClusterFolder
from dalsegno.web.run_files import read_entries, read_gpus_per_node, read_points
from dalsegno.web.snapshot import RunPicture
from dalsegno.web.sources import ANSWER_S, record_of
from dalsegno.web.view import (
    CheckRecord,
    DrillSummary,
    EvidenceBundle,
    GpuPrice,
    GpuRecord,
    NodeDetails,
    RunDetails,
    UserHours,
)

MAX_DRILLS = 50
MAX_BUNDLES = 10
MAX_EVIDENCE_BYTES = 1 << 20
GPU_JOURNAL_BYTES = 256 << 10  # limit per journal, because the goodput page reads the ends of up to 200 journals
MAX_GPU_COUNTS = 1000
MAX_NODES = 65536
HOURS_KEPT_S = 60.0  # an answer of sacct is reused for this long


class ClusterData:
    """The data of a real cluster. Methods may be called by any thread."""

    def __init__(
        self, folder: ClusterFolder, slurm: SlurmClient, target: Callable[[], object], cluster: Callable[[], Cluster]
    ) -> None:
        self._folder, self._slurm, self._target = folder, slurm, target
        self._cluster, self._lock = cluster, threading.Lock()
        self._hours: dict[int, tuple[float, Sequence[UserHours] | None]] = {}
        self._gpus: dict[str, tuple[tuple[int, int, bool], int]] = {}  # run folder -> state, number of GPUs

    @property
    def gpu_price(self) -> GpuPrice:
        return price_of(self._cluster())

    def node_details(self, node: str) -> NodeDetails:
        """Return the controller's records of a node, its saved evidence and the faults that can be injected. If the
        controller does not answer, leave out its records."""
        evidence, faults = list_evidence(self._folder.evidence / node), self._faults()
        try:
            answer = ask(self._folder.controller_socket, {"node": node}, ANSWER_S)
        except DalsegnoError:
            answer = {}
        return parse_details(answer, evidence, faults)

    def _faults(self) -> tuple[str, ...]:
        if not isinstance(self._target(), CanInject):
            return ()
        from dalsegno.inject.faults import FAULTS

        # The form has no field for a second node.
        return tuple(name for name, fault in FAULTS.items() if "peer" not in fault.options)

    def run_details(self, view: RunPicture) -> RunDetails:
        record = record_of(view)
        return RunDetails(read_points(record), tuple(read_entries(record)))

    def gpus_of(self, view: RunPicture) -> int:
        """Return the largest number of GPUs that a run has held.

        The run's files are read again only if its generation or its number of nodes has changed, or if it has ended.
        """
        stamp = (view.status.generation, len(view.status.nodes), view.status.over)
        known = self._gpus.get(view.folder)
        if known is None or known[0] != stamp:
            record = record_of(view)
            nodes = most_nodes(read_entries(record, GPU_JOURNAL_BYTES), len(view.status.nodes))
            known = stamp, nodes * read_gpus_per_node(record)
            if len(self._gpus) >= MAX_GPU_COUNTS:
                self._gpus.clear()
            self._gpus[view.folder] = known
        return known[1]

    def user_hours(self, days: int) -> Sequence[UserHours] | None:
        if not self._cluster().slurm.accounting:
            return None
        with self._lock:  # run one sacct at a time, because it may take seconds
            at, found = self._hours.get(days, (float("-inf"), None))
            if time.monotonic() - at >= HOURS_KEPT_S:
                since = int(time.time()) - days * 86400
                found = sum_hours(self._slurm.history(since_s=since), since, time.time())
                self._hours[days] = (time.monotonic(), found)
            return found

    def drills(self) -> Sequence[DrillSummary]:
        return read_drills(self._folder.drills)


def price_of(cluster: Cluster) -> GpuPrice:
    """Return the price of a GPU hour: the one in the cluster file or, if there is none, the mean list price of the
    cluster's GPUs. If a GPU has no list price, return no price."""
    own = cluster.monitoring.gpu_hour_price
    if own is not None:
        return GpuPrice(own, f"at {own:g} per GPU hour, as the cluster file says") if own else GpuPrice()
    found = [(node.gpus, find_price(node.instance, node.gpu_type)) for node in cluster.nodes if node.gpus]
    known = [(gpus, price) for gpus, price in found if price is not None]
    if not known or len(known) < len(found):
        return GpuPrice()
    amount = sum(gpus * price.usd_per_gpu_hour for gpus, price in known) / sum(gpus for gpus, _ in known)
    names = list(dict.fromkeys(f"{price.source} ({price.date})" for _, price in known))
    source = names[0] if len(names) == 1 else f"the mean of {', '.join(names[:3])}" + (" …" if len(names) > 3 else "")
    text = f"at {amount:.4g} USD per GPU hour, the list price of {source}; monitoring.gpu_hour_price sets your own"
    return GpuPrice(amount, text)


def parse_details(
    answer: Mapping[str, Any], evidence: tuple[EvidenceBundle, ...] = (), faults: tuple[str, ...] = ()
) -> NodeDetails:
    """Parse the controller's answer about one node."""
    own = answer.get("node") or {}
    return NodeDetails(
        tuple(map(str, own.get("tried", ()))),
        tuple(map(str, own.get("excused", ()))),
        tuple(_gpu(each) for each in answer.get("gpus", ())),
        tuple(
            CheckRecord(float(each["at"]), str(each["check"]), _verdict(each["verdict"]), str(each["text"]))
            for each in answer.get("checks", ())
        ),
        tuple(map(read_event, answer.get("events", ()))),
        evidence,
        faults,
    )


def _gpu(each: Mapping[str, Any]) -> GpuRecord:
    uuid, serial, model = (str(each.get(name) or "") for name in ("uuid", "serial", "model"))
    return GpuRecord(int(each["slot"]), uuid, serial, model, each.get("since"), each.get("sent_away_at"))


def _verdict(word: object) -> Verdict:
    return next((each for each in Verdict if each.value == word), Verdict.UNKNOWN)


def list_evidence(folder: Path) -> tuple[EvidenceBundle, ...]:
    """Return the last MAX_BUNDLES bundles of evidence about a node, newest first."""
    try:
        names = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), reverse=True)
        return tuple(
            EvidenceBundle(path.name, tuple(sorted((file.name, file.stat().st_size) for file in path.iterdir())))
            for path in names[:MAX_BUNDLES]
        )
    except OSError:
        return ()


def read_evidence(folder: Path, bundle: str, file: str) -> bytes | None:
    """Return the start of a file of evidence; None if it does not exist. Only names in the list of files are opened."""
    for known in list_evidence(folder):
        if known.name == bundle and file in (name for name, _ in known.files):
            with contextlib.suppress(OSError), open(folder / bundle / file, "rb") as text:
                return text.read(MAX_EVIDENCE_BYTES)
    return None


def most_nodes(entries: Sequence[Entry], now: int = 0) -> int:
    """Return the largest number of nodes, with spares, that a run has held at a time; `now` is how many it has now."""
    # both events list nodes, but only GRANTED includes spares
    held = (RunEvent.GRANTED.value, RunEvent.GENERATION.value)
    groups = [entry.get("nodes") for entry in entries if entry.get("event") in held]
    return min(max([now, *(len(nodes) for nodes in groups if isinstance(nodes, list))]), MAX_NODES)


def sum_hours(jobs: Sequence[JobInfo], since: float, now: float) -> list[UserHours]:
    """Return the hours of each user and account after `since`, most GPU hours first."""
    found: dict[tuple[str, str], UserHours] = {}
    for job in jobs:
        began = max(job.started_at or now, since)
        hours = max(0.0, min(job.ends_at if job.state.ended and job.ends_at else now, now) - began) / 3600
        key = (job.user, job.account)
        old = found.get(key, UserHours(*key, 0, 0.0, 0.0))
        found[key] = UserHours(
            *key, old.jobs + 1, old.gpu_hours + hours * job.gpus, old.node_hours + hours * job.node_count
        )
    return sorted(found.values(), key=lambda each: (-each.gpu_hours, -each.node_hours, each.user))


def read_drills(folder: Path) -> list[DrillSummary]:
    """Return the last MAX_DRILLS saved drill reports, newest first."""
    try:
        paths = sorted(folder.glob("*.json"), reverse=True)[:MAX_DRILLS]
    except OSError:
        return []
    return [found for path in paths if (found := _drill(path)) is not None]


def _drill(path: Path) -> DrillSummary | None:
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            return None
        faults = value.get("faults")
        resumed = [each["resumed_s"] for each in faults if isinstance(each, dict)] if isinstance(faults, list) else []
        times = sorted(float(each) for each in resumed if isinstance(each, (int, float)))
        exact = value.get("exact")
        return DrillSummary(
            path.stem,
            float(json.dumps(value.get("started", 0.0))),
            value.get("survived") is True,
            len(faults) if isinstance(faults, list) else 0,
            float(json.dumps(value.get("share", 0.0))),
            times[len(times) // 2] if times else None,
            exact if isinstance(exact, bool) else None,
        )
    except (DalsegnoError, OSError, KeyError, TypeError, ValueError):
        return None

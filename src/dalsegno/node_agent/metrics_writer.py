"""Collect the metrics of this node and write them to a file.

This runs in the process that runs the checks, and shares their connection to NVML. A hanging driver therefore stops
neither the agent nor its heartbeats.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from dalsegno.health.facts import GpuFacts
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.readers.fabric import PortCounters, ask_port_counters
from dalsegno.health.readers.gpus import ask_gpus, ask_telemetry, has_gpus
from dalsegno.health.readers.host import ask_kernel_log, has_ports
from dalsegno.health.xids import events
from dalsegno.node_agent.metrics import (
    GpuLabels,
    XidCounts,
    bus_key,
    gpu_families,
    gpu_labels,
    port_families,
    status_families,
    xid_families,
)
from dalsegno.node_agent.textfile import Textfile
from dalsegno.observe.exposition import MetricFamily, render
from dalsegno.system.hanging_calls import NoAnswer

log = logging.getLogger("node-agent.metrics")

WRITE_S = 5.0
FABRIC_SHARE, FABRIC_MAX_S = 0.005, 30.0  # maximum share of one processor's time, and maximum age of the counters
DCGM_PORT, DCGM_EVERY_S = 9400, 60.0
FIRST_USER = 1000  # first uid of an ordinary user; lower uids belong to the system


class NodeMetrics:
    """Collects the metrics of one node and writes them when they are due by the clock `monotonic`."""

    def __init__(
        self, node: NodeReader, host: str, file: Textfile, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._node, self._host, self._file, self._monotonic = node, host, file, monotonic
        self._due = 0.0
        self._xids = XidCounts()
        self._known: dict[str, GpuLabels] = {}
        self._ports: tuple[float, tuple[PortCounters, ...]] = (0.0, ())  # expiry time, and the counters
        self._dcgm: tuple[float, bool] = (0.0, False)
        self._logged = ""

    def write_due(self) -> None:
        """Collect and write the metrics, every few seconds. A failed write is logged, but is not a fault of the
        node."""
        if self._monotonic() < self._due:
            return
        self._due = self._monotonic() + WRITE_S
        try:
            self._file.write(render(self.collect()))
            self._logged = ""
        except OSError as error:
            self._log_once(f"{self._file.folder}: {error}")

    def collect(self) -> list[MetricFamily]:
        """Return all families. A source that does not answer adds no families, and its success gauge is 0."""
        sources: list[tuple[str, Callable[[], Iterator[MetricFamily]]]] = [
            ("gpus", self._gpu_families),
            ("xids", self._xid_families),
            ("fabric", self._port_families),
        ]
        families: list[MetricFamily] = []
        success = {}
        for name, read in sources:
            try:
                families += list(read())
                success[name] = True
            except NoAnswer as error:
                success[name] = False
                log.debug("%s: %s", name, error)
            except Exception as error:  # an unexpected answer from the hardware must not hide the other metrics
                success[name] = False
                self._log_once(f"{name}: {type(error).__name__}: {error}")
        return [*families, *status_families(success, self._node.now())]

    def _gpu_families(self) -> Iterator[MetricFamily]:
        if has_gpus(self._node) and not self._has_dcgm():
            gpus = ask_gpus(self._node, detailed=True)
            self._known |= {bus_key(gpu.bus_id): gpu_labels(gpu, self._host) for gpu in gpus if _is_known(gpu)}
            yield from gpu_families(gpus, self._host)

    def _xid_families(self) -> Iterator[MetricFamily]:
        if has_gpus(self._node) and not self._has_dcgm():
            self._xids.note(events(ask_kernel_log(self._node).lines))
            yield from xid_families(self._known, self._xids, self._host)

    def _port_families(self) -> Iterator[MetricFamily]:
        """Read the ports, less often if that takes long: a node may have 32 ports with 60 files each."""
        began = self._monotonic()
        if began >= self._ports[0]:
            ports = ask_port_counters(self._node) if has_ports(self._node) else ()
            took_s = self._monotonic() - began
            self._ports = began + min(took_s / FABRIC_SHARE, FABRIC_MAX_S), ports
        yield from port_families(self._ports[1])

    def _has_dcgm(self) -> bool:
        """Return whether dcgm-exporter serves the metrics of the GPUs. It never serves those of simulated GPUs."""
        telemetry = ask_telemetry(self._node)
        if telemetry is not None and telemetry.gpus:
            return False
        until, found = self._dcgm
        if self._monotonic() >= until:
            found = any(is_served(self._read(f"/proc/net/{table}"), DCGM_PORT) for table in ("tcp", "tcp6"))
            self._dcgm = self._monotonic() + DCGM_EVERY_S, found
        return found

    def _read(self, path: str) -> str:
        try:
            return self._node.read(path)
        except NoAnswer:
            return ""

    def _log_once(self, text: str) -> None:
        if text != self._logged:
            self._logged = text
            log.warning("metrics: %s", text)


def _is_known(gpu: GpuFacts) -> bool:
    return bool(gpu.bus_id and gpu.uuid)


def is_served(table: str, port: int) -> bool:
    """Return whether a system daemon listens on a port, according to the text of /proc/net/tcp.

    An ordinary user's listener does not count: otherwise users could hide a node's metrics.
    """
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(
        row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port and int(row[7]) < FIRST_USER
        for row in rows
        if len(row) > 7
    )

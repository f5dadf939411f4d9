"""How each fault is done and undone on a local cluster. What is not here is told by the hardware alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.targets.local.breaking import files, network, processes
from dalsegno.targets.local.breaking.records import Injected
from dalsegno.targets.local.nodes import Nodes

Step = Callable[[Nodes, Injected], None]


@dataclass(frozen=True)
class Kind:
    """`apart`: why it needs a host of its own, and is refused where nodes are processes."""

    do: Step
    undo: Step
    apart: str = ""


def _nothing(nodes: Nodes, fault: Injected) -> None:
    """The hardware tells of it, and that is all."""


NO_NETWORK, NO_DISK = "it has no network of its own", "it has no files of its own"
HARDWARE = Kind(_nothing, _nothing)

KINDS = {
    "slurmd-dead": Kind(processes.kill_daemon, processes.start_daemon),
    "agent-dead": Kind(processes.kill_daemon, processes.start_daemon),
    "worker-hang": Kind(processes.stop_worker, processes.let_worker_go_on),
    "oom": Kind(processes.run_out_of_memory, _nothing),
    "link-down": Kind(network.unplug, network.plug, NO_NETWORK),
    "link-flap": Kind(network.flap, network.plug, NO_NETWORK),
    "net-cut": Kind(network.cut, network.mend, NO_NETWORK),
    "net-slow": Kind(network.slow, network.hasten, NO_NETWORK),
    "net-loss": Kind(network.lose, network.keep, NO_NETWORK),
    "disk-full": Kind(files.fill, files.empty, NO_DISK),
    "fs-hang": Kind(files.hang, files.unhang, NO_DISK),
    "munge-dead": Kind(files.silence_munge, files.wake_munge, NO_DISK),
}
OF_A_GPU = ("xid", "ecc", "gpu-lost", "gpu-hot", "nvlink", "slow-gpu")


def kind_of(fault: str) -> Kind:
    return KINDS.get(fault, HARDWARE)

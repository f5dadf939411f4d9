"""How each fault is done and undone on a local cluster. What is not here is told by the hardware alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dalsegno.targets.local.breaking import files, network, processes
from dalsegno.targets.local.breaking.records import Injected
from dalsegno.targets.local.nodes import LocalNodes

Step = Callable[[LocalNodes, Injected], None]


@dataclass(frozen=True)
class LocalFault:
    """`apart`: why it needs a host of its own, and is refused where nodes are processes."""

    do: Step
    undo: Step
    apart: str = ""


def _nothing(nodes: LocalNodes, fault: Injected) -> None:
    """The hardware tells of it, and that is all."""


NO_NETWORK, NO_DISK = "it has no network of its own", "it has no files of its own"
HARDWARE = LocalFault(_nothing, _nothing)

KINDS = {
    "slurmd-dead": LocalFault(processes.kill_daemon, processes.start_daemon),
    "agent-dead": LocalFault(processes.kill_daemon, processes.start_daemon),
    "worker-hang": LocalFault(processes.stop_worker, processes.let_worker_go_on),
    "oom": LocalFault(processes.run_out_of_memory, _nothing),
    "link-down": LocalFault(network.unplug, network.plug, NO_NETWORK),
    "link-flap": LocalFault(network.flap, network.plug, NO_NETWORK),
    "net-cut": LocalFault(network.cut, network.mend, NO_NETWORK),
    "net-slow": LocalFault(network.slow, network.hasten, NO_NETWORK),
    "net-loss": LocalFault(network.lose, network.keep, NO_NETWORK),
    "disk-full": LocalFault(files.fill, files.empty, NO_DISK),
    "fs-hang": LocalFault(files.hang, files.unhang, NO_DISK),
    "munge-dead": LocalFault(files.silence_munge, files.wake_munge, NO_DISK),
}
OF_A_GPU = ("xid", "ecc", "gpu-lost", "gpu-hot", "nvlink", "slow-gpu")


def kind_of(fault: str) -> LocalFault:
    return KINDS.get(fault, HARDWARE)

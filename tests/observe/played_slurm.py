"""A Slurm that answers with given rows, in the separators that the client chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.parse.text import PLAIN
from dalsegno.system.processes import Completed

RECORDED = Path(__file__).parent.parent / "recorded"
NODE = ("n1", "train*", "mixed", "mixed", "8/24/0/32", "2000", "64000", "gpu:h100:8", "gpu:h100:2(IDX:0,3)", "nvlink")
CONFIG = (
    "Configuration data as of now\nAccountingStorageType = accounting_storage/none\nPriorityType = priority/basic\n"
)


def queue_row(
    id: int = 7,
    user: str = "ada",
    partition: str = "train",
    state: str = "RUNNING",
    nodes: str = "n1",
    cpus: int = 8,
    gpus: int = 2,
    times: tuple[str, str, str] = ("1794946000", "1794946060", "1794953000"),
    reason: str = "None",
    account: str = "vision",
) -> tuple[str, ...]:
    tres = f"cpu={cpus},mem=2000M,node=1,billing={cpus}" + (f",gres/gpu={gpus}" if gpus else "")
    return (str(id), user, partition, state, nodes, str(cpus), tres, *times, reason, account)


class PlayedSlurm:
    """Answers sinfo, squeue, sdiag and scontrol. A command in `broken` fails. `asked` names the commands so far."""

    def __init__(self, queue: Sequence[Sequence[str]] = (), nodes: Sequence[Sequence[str]] = (NODE,)) -> None:
        self.queue, self.nodes = queue, nodes
        self.broken: set[str] = set()
        self.asked: list[str] = []

    @property
    def client(self) -> SlurmClient:
        return SlurmClient(self, {"PATH": "/usr/bin"})

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        self.asked.append(argv[0])
        if argv[0] in self.broken:
            return Completed(tuple(argv), 1, "", "slurm_load: Unable to contact slurm controller (connect failure)")
        return Completed(tuple(argv), 0, self._answer(argv, env or {}))

    def _answer(self, argv: Sequence[str], env: Mapping[str, str]) -> str:
        if argv[0] == "squeue":
            record = env["SQUEUE_FORMAT2"].rpartition(":")[2]
            return "".join(PLAIN.field.join(row) + f"{record}\n" for row in self.queue)
        if tuple(argv[:2]) == ("sinfo", "--version"):
            return "slurm-wlm 24.11.5\n"
        if argv[0] == "sinfo":
            return "".join(PLAIN.field.join(row) + f"{PLAIN.record}\n" for row in self.nodes)
        if argv[0] == "sdiag":
            return (RECORDED / "slurm-24.11.5" / "sdiag.txt").read_text()
        return CONFIG if "config" in argv else "No reservations in the system\n"


def recorded_rows(version: str, name: str) -> list[list[str]]:
    """Return the recorded rows of squeue or sinfo of a release of Slurm."""
    text = (RECORDED / f"slurm-{version}" / f"{name}.txt").read_text()
    return [row.split(PLAIN.field) for row in text.split(f"{PLAIN.record}\n")[:-1]]

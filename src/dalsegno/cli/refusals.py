"""What to do about a job that Slurm refused, by the words it said so in."""

from __future__ import annotations

from dalsegno.launch.folder import RunFolder
from dalsegno.launch.status import Status
from dalsegno.system.files import read_text

REFUSED = "Slurm refused"  # how the last message of such a run begins
_HINTS = {  # Slurm's words -> ours; the first that fits, so the more telling ones stand first
    "Memory specification": "no node has so much memory: `sinfo -N -o '%N %m'` shows how many MiB; give `--mem` less",
    "Invalid feature": "`sinfo -N -o '%N %f'` lists the features that `--constraint` may name",
    "Invalid node name": "`sinfo -N` lists the nodes that `--exclude` may name",
    "Invalid account": "`sacctmgr show associations user=$USER` lists what `--account` and `--partition` may be",
    "Invalid qos": "`sacctmgr show associations user=$USER format=account,qos` lists what `--qos` may be",
    "Requested time limit": "`sinfo -o '%P %l'` shows the partitions' limits; give `--time` less",
    "QOS policy": "`sacctmgr show qos` and `sacctmgr show associations` show the limits",
    "node configuration": "no nodes have all that: `sinfo -N -o '%N %c %m %G %f'` shows CPUs, MiB, GPUs and features",
}


def end_hint(run: RunFolder, status: Status) -> str:
    """After a run that did not end well: where to look."""
    if not status.message.startswith(REFUSED):
        spoke = any(run.logs.glob("g*/*"))
        return (
            f"`dalsegno logs {run.run}` shows all it said" if spoke else f"`dalsegno why {run.run}` shows how it went"
        )
    log = run.salloc_log(1)
    said = f"{read_text(log) or ''}{status.message}"
    return next((hint for words, hint in _HINTS.items() if words in said), f"all of Slurm's words are in {log}")

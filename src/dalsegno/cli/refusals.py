"""What to do about a job that Slurm refused."""

from __future__ import annotations

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunCause, Status
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal
from dalsegno.system.files import read_text

_HINTS = {
    SlurmRefusal.MEMORY: "no node has so much memory: `sinfo -N -o '%N %m'` shows how many MiB; give `--mem` less",
    SlurmRefusal.FEATURE: "`sinfo -N -o '%N %f'` lists the features that `--constraint` may name",
    SlurmRefusal.NODE_NAME: "`sinfo -N` lists the nodes that `--exclude` may name",
    SlurmRefusal.ACCOUNT: "`sacctmgr show associations user=$USER` lists what `--account` and `--partition` may be",
    SlurmRefusal.QOS: "`sacctmgr show associations user=$USER format=account,qos` lists what `--qos` may be",
    SlurmRefusal.TIME_LIMIT: "`sinfo -o '%P %l'` shows the partitions' limits; give `--time` less",
    SlurmRefusal.POLICY: "`sacctmgr show qos` and `sacctmgr show associations` show the limits",
    SlurmRefusal.NO_SUCH_NODES: "no nodes have all that: `sinfo -N -o '%N %c %m %G %f'` shows what they have",
}


def end_hint(run: RunFolder, status: Status) -> str:
    """After a run that did not end well: where to look."""
    if status.cause is not RunCause.REFUSED:
        spoke = any(run.logs.glob("g*/*"))
        return (
            f"`dalsegno logs {run.run}` shows all it said" if spoke else f"`dalsegno why {run.run}` shows how it went"
        )
    log = run.salloc_log(1)
    refusal = parse_refusal(f"{read_text(log) or ''}{status.message}")
    return _HINTS.get(refusal, f"all of Slurm's words are in {log}")

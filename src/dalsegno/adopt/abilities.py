"""Find out which commands work on a cluster that Dal Segno did not create, and who can use them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dalsegno.adopt.found import FoundCluster, PlatformKind


class Reach(Enum):
    """The users who can use a command on a cluster that Dal Segno did not create."""

    USER = "works"  # any user who may submit jobs can use the command
    ADMINISTRATOR = "needs an administrator"
    NOBODY = "not on this cluster"


@dataclass(frozen=True)
class Ability:
    """A command or a part of a command, and what it does or needs on this cluster."""

    command: str
    reach: Reach
    text: str


_WEB = "a page with nodes, queue and your runs, for you alone; the command serves it"


def find_abilities(found: FoundCluster) -> list[Ability]:
    """Return which commands work on the cluster: first those for users, then those for administrators, then the
    others."""
    return [*_for_users(found), *_for_administrators(found), *_for_nobody()]


def _for_users(found: FoundCluster) -> list[Ability]:
    where = "" if any(each.default for each in found.partitions) else "; name a partition with `--partition`"
    if _has_no_account(found):
        who = found.user or "this user"
        return [
            Ability("run", Reach.ADMINISTRATOR, f"{who} has no Slurm account, and Slurm refuses jobs without one"),
            Ability("doctor", Reach.USER, "finds what is wrong with a script or a log, and prints the fix"),
            Ability("status", Reach.USER, "nodes and queue, as Slurm reports them; `top` shows them live"),
            Ability("exporter", Reach.USER, _exporter(found)),
            Ability("web", Reach.USER, _WEB),
        ]
    return [
        Ability("run", Reach.USER, f"training that survives lost nodes, as an ordinary batch job{where}"),
        Ability("torchrun", Reach.USER, "in your own sbatch script: `srun dalsegno torchrun …`"),
        Ability("submit", Reach.USER, "job files and sbatch scripts"),
        Ability("runs", Reach.USER, "your runs; `logs`, `cancel` and `ckpt` work with them"),
        Ability("why", Reach.USER, "explains a run, a job or a node, from what Slurm and the run recorded"),
        Ability("doctor", Reach.USER, "finds what is wrong with a script, a job or a log, and prints the fix"),
        Ability("bench", Reach.USER, "benchmarks in a job of your own"),
        Ability("status", Reach.USER, "nodes and queue, as Slurm reports them; `top` shows them live"),
        Ability("exporter", Reach.USER, _exporter(found)),
        Ability("web", Reach.USER, _WEB),
        Ability("health", Reach.USER, "checks one node from inside a job: `srun dalsegno health`"),
        Ability("inject", Reach.USER, "three faults, into your own runs only: `--allow-real-nodes`"),
        *_containers(found),
        Ability("adopt watch", Reach.USER, "says what recovery would do, from Slurm's facts alone"),
    ]


def _has_no_account(found: FoundCluster) -> bool:
    """Return whether Slurm refuses every job of this user. If the accounts could not be read, return False."""
    enforced = {"associations", "limits", "qos", "safe"} & set(found.enforced)
    members = {user for user, _ in found.accounts.members}
    return bool(enforced and found.accounts.accounts and found.user) and found.user not in members


def _exporter(found: FoundCluster) -> str:
    hidden = found.setting("PrivateData")
    private = [word for word in ("jobs", "nodes", "accounts", "users") if word in hidden.split(",")]
    if private and not found.is_root:
        return f"metrics for Prometheus; PrivateData hides {', '.join(private)} of others from you"
    return "metrics of nodes, queue and scheduler for Prometheus"


def _containers(found: FoundCluster) -> list[Ability]:
    if found.container_options:
        return [Ability("run --container-image", Reach.USER, "plugstack.conf loads a container plugin")]
    why = "plugstack.conf loads no container plugin; `dalsegno containers check` shows what to install"
    return [Ability("run --container-image", Reach.ADMINISTRATOR, why)]


def _for_administrators(found: FoundCluster) -> list[Ability]:
    drains = {
        PlatformKind.PARALLELCLUSTER: "; clustermgtd replaces a drained node once it is idle",
        PlatformKind.HYPERPOD: "; HyperPod replaces a node only for the reason `Action:Replace`",
        PlatformKind.OCI: "; its own health check returns nodes whose reason starts with `Healthcheck::`",
    }.get(found.platform.kind, "")
    return [
        Ability(
            "adopt arm PARTITION",
            Reach.ADMINISTRATOR,
            f"only a Slurm operator may drain nodes{drains}",
        ),
        Ability("health (HealthCheckProgram)", Reach.ADMINISTRATOR, _health_program(found)),
    ]


def _health_program(found: FoundCluster) -> str:
    present = found.setting("HealthCheckProgram")
    return f"slurm.conf names {present} already" if present else "checks on every node: a setting of slurm.conf"


def _for_nobody() -> list[Ability]:
    why = "needs the node agents and services of a cluster that `dalsegno up` created"
    return [Ability(command, Reach.NOBODY, why) for command in ("monitor", "drill")]

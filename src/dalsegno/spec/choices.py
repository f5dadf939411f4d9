"""The places where you can train, their traits, and the target that fits given needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from dalsegno.errors import UsageError


@dataclass(frozen=True)
class Choice:
    """A place to train. `target` is "" if Dal Segno does not create clusters there."""

    name: str
    target: str
    orchestrator: str
    management: str
    recovery_alone: str
    recovery_with_us: str
    health: str
    spot: str
    price: str
    not_for: str
    # When to choose this place, although Dal Segno does not create clusters there; "" for the targets of Dal Segno.
    choose_it: str = ""


@cache
def choices() -> tuple[Choice, ...]:
    """Return all choices, with the targets of Dal Segno first."""
    import yaml

    text = Path(__file__).with_name("choices.yaml").read_text(encoding="utf-8")
    return tuple(Choice(**row) for row in yaml.safe_load(text))


class TrainingPlace(Enum):
    """The location of the machines."""

    LAPTOP = "laptop"
    OWN_HOSTS = "own-hosts"
    AWS = "aws"
    OCI = "oci"
    RUNNING_SLURM = "running-slurm"


class TrainingPurpose(Enum):
    """The purpose of the cluster."""

    LEARNING = "learning"
    FINE_TUNING = "fine-tuning"
    PRETRAINING = "pretraining"
    INFERENCE = "inference"


class TrainingDuration(Enum):
    """The duration of one training run."""

    HOURS = "hours"
    DAYS = "days"
    WEEKS = "weeks"


@dataclass(frozen=True)
class Needs:
    """The needs of a user. None means that the user did not state the need."""

    place: TrainingPlace | None = None
    purpose: TrainingPurpose | None = None
    duration: TrainingDuration | None = None
    managed: bool | None = None
    containers: bool = False
    spot: bool = False
    mig: bool = False


@dataclass(frozen=True)
class Recommendation:
    """The recommended target, two lines of reasons, and the limits of that target."""

    target: str
    why: tuple[str, str]
    cautions: tuple[str, ...] = ()


def recommend(needs: Needs) -> Recommendation:
    """Return the target that fits the needs. Raise UsageError if Dal Segno is not the right tool."""
    if needs.purpose is TrainingPurpose.INFERENCE:
        raise UsageError(
            "Dal Segno is for training; services that answer requests belong on Kubernetes",
            hint="`dalsegno compare` shows the choices that are based on Kubernetes",
        )
    target, why = _target(needs)
    return Recommendation(target, why, tuple(cautions(needs, target)))


def _target(needs: Needs) -> tuple[str, tuple[str, str]]:
    place = needs.place or (TrainingPlace.AWS if needs.spot or needs.managed else TrainingPlace.LAPTOP)
    if place is TrainingPlace.LAPTOP:
        return "local", (
            "local: a whole cluster with real Slurm on this machine, in seconds and for free.",
            "The same file moves to other machines later: only `target` and the machines change.",
        )
    if place is TrainingPlace.OWN_HOSTS:
        return "ssh", (
            "ssh: your machines become a Slurm cluster over SSH, and `down` restores what was there.",
            "Nothing else has to manage them; lost nodes are taken out of runs within seconds.",
        )
    if place is TrainingPlace.RUNNING_SLURM:
        return "existing", (
            "existing: Slurm runs there already, and training survives lost nodes as an ordinary job.",
            "Nothing is installed on the cluster, and you need no rights of an administrator.",
        )
    if place is TrainingPlace.OCI:
        return "oci", (
            "oci: Oracle's HPC stack creates bare-metal GPU nodes with an RDMA network.",
            "It is the only way to these shapes that comes with Slurm set up.",
        )
    return _on_aws(needs)


def _on_aws(needs: Needs) -> tuple[str, tuple[str, str]]:
    long = needs.duration is TrainingDuration.WEEKS or needs.purpose is TrainingPurpose.PRETRAINING
    managed = needs.managed if needs.managed is not None else long
    if managed and not needs.spot:
        return "hyperpod", (
            "hyperpod: AWS replaces broken GPU machines by itself, which matters in runs of weeks.",
            "While it does, our runs continue on the other nodes from snapshots in memory.",
        )
    reason = "spot instances" if needs.spot else "EC2 prices, and nodes that stop when they are idle"
    return "parallelcluster", (
        f"parallelcluster: {reason}, in your own account and network.",
        "Runs continue from memory when a node is lost or reclaimed.",
    )


def cautions(needs: Needs, target: str) -> list[str]:
    """Return a sentence for each of the needs that the target does not meet."""
    found = []
    if needs.mig:
        found.append("Dal Segno does not create MIG slices; create them in the image, or compare `eks`")
    if needs.spot and target not in ("parallelcluster", "existing"):
        found.append(f"target `{target}` has no spot instances")
    if needs.managed and target not in ("hyperpod", "existing"):
        found.append(f"with target `{target}`, nobody but you manages the machines")
    return found


def fit_starter(text: str, needs: Needs, target: str) -> str:
    """Return a starter file with the settings that the needs require."""
    if needs.spot and target == "parallelcluster":
        lines = ["  capacity_type: SPOT" if "# capacity_type:" in line else line for line in text.splitlines()]
        text = "\n".join(line for line in lines if "# capacity_reservation:" not in line) + "\n"
    if needs.containers and "\ncontainers:" not in text:
        text = f"{text.rstrip()}\n\ncontainers:\n  enabled: true\n"
    return text

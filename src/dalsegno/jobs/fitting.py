"""Whether a run fits its partition, and what follows from the partition for it."""

from __future__ import annotations

from dalsegno.errors import UsageError
from dalsegno.jobs.cluster_facts import PartitionFacts
from dalsegno.jobs.job_ask import slurm_time
from dalsegno.jobs.request import RunRequest
from dalsegno.jobs.values import UNLIMITED_S


def check_fits(request: RunRequest, partition: PartitionFacts | None) -> None:
    """Raises UsageError for what Slurm would leave waiting for ever."""
    if partition is None:
        return
    _check_nodes(request, partition)
    _check_gpus(request, partition)
    cpus = request.processes_per_node * job_cpus(request, partition)
    if partition.cpus and cpus > partition.cpus:
        what = f"a node would need {cpus} CPUs, but nodes of partition `{partition.name}` have {partition.cpus}"
        raise UsageError(what, hint="ask for fewer processes per node, or a smaller `--cpus-per-task`")


def _check_nodes(request: RunRequest, partition: PartitionFacts) -> None:
    least = request.nodes.min if request.nodes.min < request.nodes.max else request.nodes.max + request.spares
    spares = f" (with {request.spares} spare)" if least > request.nodes.max else ""
    for limit, said in ((partition.nodes, "has"), (partition.max_nodes, "gives a job at most")):
        if limit and least > limit:
            what = f"the run wants {least} nodes{spares}, but partition `{partition.name}` {said} {limit}"
            raise UsageError(what, hint="ask for fewer nodes or spares, or for another partition")


def _check_gpus(request: RunRequest, partition: PartitionFacts) -> None:
    wanted = request.gpus_per_node
    if partition.nodes and wanted.count > partition.gpus:
        has = f"have {partition.gpus}" if partition.gpus else "have none"
        what = f"the run wants {wanted.count} GPUs per node, but nodes of partition `{partition.name}` {has}"
        raise UsageError(what, hint="ask for fewer, or for another partition: `sinfo -o '%P %G'` lists them")


def job_cpus(request: RunRequest, partition: PartitionFacts | None) -> int:
    """CPUs of each process: as asked, else its share of a node by the node's GPUs, else one.

    Who takes all GPUs of a node takes all its CPUs: nobody else has a use for them, and data loaders do.
    """
    if request.cpus_per_task:
        return request.cpus_per_task
    gpus = request.gpus_per_node.count
    if not (partition and partition.gpus and gpus):
        return 1
    share = partition.cpus * min(gpus, partition.gpus) // partition.gpus
    return max(1, share // request.processes_per_node)


def job_time(request: RunRequest, partition: PartitionFacts | None) -> int | None:
    """Time of one job: as asked, but no longer than the partition gives; the run goes on in further jobs."""
    return partition.time_limit_s if partition and _outlasts(request, partition) else request.time_limit_s


def _outlasts(request: RunRequest, partition: PartitionFacts) -> bool:
    asked, limit = request.time_limit_s, partition.time_limit_s
    return asked is not None and limit is not None and (asked == UNLIMITED_S or asked > limit)


def notes_on(request: RunRequest, partition: PartitionFacts | None) -> tuple[str, ...]:
    """What a user may not expect, in sentences."""
    notes = []
    if partition and partition.time_limit_s and _outlasts(request, partition):
        limit = slurm_time(partition.time_limit_s)
        notes.append(f"partition `{partition.name}` gives a job {limit}; the run goes on in further jobs")
    if partition and partition.gpus and not request.gpus_per_node.count:
        kind = f" {partition.gpu_type}" if partition.gpu_type else ""
        has = f"nodes of partition `{partition.name}` have {partition.gpus}{kind} GPUs"
        notes.append(f"{has} and the run asks for none: `--gpus-per-node {partition.gpus}`")
    if request.spares and request.nodes.min < request.nodes.max:
        notes.append("a run that may start smaller does not wait for its spares")
    return tuple(notes)

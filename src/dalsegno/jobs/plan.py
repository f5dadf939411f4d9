"""What a run asks of Slurm, as a value: computed here, shown by `--dry-run`, done elsewhere exactly so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from posixpath import join

from dalsegno.errors import DalsegnoError
from dalsegno.jobs import checks
from dalsegno.jobs.cluster_facts import ClusterFacts, PartitionFacts
from dalsegno.jobs.container import PYTHON, check_container
from dalsegno.jobs.environment import python_of
from dalsegno.jobs.fitting import check_fits, job_cpus, job_time, notes_on
from dalsegno.jobs.job_ask import JobAsk, slurm_options
from dalsegno.jobs.mpi import choose_mpi
from dalsegno.jobs.request import RunRequest
from dalsegno.jobs.sbatch_args import check_for_salloc
from dalsegno.jobs.values import ONE_NODE, Nodes
from dalsegno.launch.group import Shape, in_order
from dalsegno.launch.run_comment import JobRole


@dataclass(frozen=True)
class RunPlan:
    """A run and the job it asks for. The run outlives the job: `plan_join` and `plan_next` ask for more."""

    run: str  # its id, and the name of all its Slurm jobs
    request: RunRequest
    shape: Shape
    job: JobAsk
    folder: str
    cluster: str = ""  # its id: job ids of a run mean nothing on another cluster of the same name
    on_head: bool = False  # the coordinator runs on the head node and holds an allocation; else in a batch step
    launcher: tuple[str, ...] = ("dalsegno",)
    python: str = "python3"
    mpi: str = ""
    notes: tuple[str, ...] = ()  # consequences a user may not expect


def plan_run(request: RunRequest, cluster: ClusterFacts, run: str) -> RunPlan:
    """The plan for a run of this id. Raises UsageError where the cluster cannot do it."""
    checks.check_name(run)
    partition = cluster.partition(request.partition)
    if cluster.controller:
        check_for_salloc(request.sbatch_args)
    check_fits(request, partition)
    job = _job(request, partition, run)
    folder = join(request.chdir, request.output or cluster.runs_folder, run)
    check_container(request, folder, cluster.containers)
    if request.has_agents:
        checks.check_signal(job.signal_lead_s, job.time_limit_s)
    return RunPlan(
        run=run,
        request=request,
        shape=Shape(request.nodes.min, request.nodes.max, request.processes_per_node),
        job=job,
        cluster=cluster.id,
        folder=folder,
        on_head=cluster.controller,
        launcher=cluster.launcher,
        python=python_of(request, otherwise=PYTHON if request.container_image else cluster.python),
        mpi=choose_mpi(cluster.mpi_types) if request.framework == "mpi" else "",
        notes=notes_on(request, partition),
    )


def plan_join(plan: RunPlan, *, suspects: Iterable[str] = (), members: Iterable[str] = ()) -> RunPlan:
    """One node more for a run that lost one: not one we suspect, and not one that is in the run already."""
    if not plan.request.has_agents:
        what = f"run {plan.run} takes no further nodes: its framework is {plan.request.framework}"
        raise DalsegnoError(what, hint="only runs with agents do; `--framework torch` has them")
    excluded = tuple(sorted({*plan.job.exclude, *suspects, *members}, key=in_order))
    checks.check_node_names(excluded)
    job = replace(plan.job, role=JobRole.JOIN, nodes=ONE_NODE, exclude=excluded, dependency="")
    return replace(plan, job=job)


def plan_next(plan: RunPlan, suspects: Iterable[str] = ()) -> RunPlan:
    """The job in which a run longer than its job goes on: queued now, started when no other job of the run is left."""
    excluded = tuple(sorted({*plan.job.exclude, *suspects}, key=in_order))
    return replace(plan, job=replace(plan.job, role=JobRole.NEXT, dependency="singleton", exclude=excluded))


def salloc_argv(plan: RunPlan) -> list[str]:
    """An allocation without a batch script: no node of it is special, any may die.

    Slurm cannot requeue it: preempted, it is gone, and the coordinator asks for it again.
    """
    return ["salloc", "--no-shell", "--no-kill", *slurm_options(plan.job)]


def _job(request: RunRequest, partition: PartitionFacts | None, run: str) -> JobAsk:
    processes, cpus = request.processes_per_node, job_cpus(request, partition)
    return JobAsk(
        name=run,
        nodes=_with_spares(request),
        tasks_per_node=1 if request.has_agents else processes,
        cpus_per_task=processes * cpus if request.has_agents else cpus,
        memory_mib=request.memory_mib,
        gpus=request.gpus_per_node,
        gres=partition.gres if partition else "gpu",
        time_limit_s=job_time(request, partition),
        signal_lead_s=request.signal_lead_s if request.has_agents else 0,
        partition=request.partition,
        account=request.account,
        qos=request.qos,
        constraint=request.constraint,
        exclude=request.exclude,
        extra=request.sbatch_args,
    )


def _with_spares(request: RunRequest) -> Nodes:
    """A run of fixed size waits for its spares too; one that may be smaller starts with what there is."""
    most = request.nodes.max + request.spares
    return Nodes(most if request.nodes.min == request.nodes.max else request.nodes.min, most)

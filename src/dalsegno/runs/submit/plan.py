"""The plan of a run: what it requests from Slurm. `--dry-run` shows exactly the commands that would be executed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from posixpath import join

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.hardware.job_variables import JobVariable, find_instance_type, missing_variables
from dalsegno.runs.comment import JobRole, left_comment
from dalsegno.runs.coordinator.generations.group import Shape, in_order
from dalsegno.runs.submit.container import PYTHON, check_container, choose_mpi
from dalsegno.runs.submit.program import python_of
from dalsegno.runs.submit.request import RunRequest, check_for_salloc, check_name, check_node_names, check_signal
from dalsegno.runs.submit.values import NO_GPUS, ONE_NODE, UNLIMITED_S, Gpus, NodeCount
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.names import node_list
from dalsegno.slurm.parse.nodes import PartitionInfo
from dalsegno.spec.facts import Cluster, Node

# Facts about the cluster


@dataclass(frozen=True)
class PartitionFacts:
    """A partition. `cpus` and `gpus` are the minimum over its nodes. `nodes` is 0 if the nodes are unknown."""

    name: str
    default: bool = False
    nodes: int = 0
    cpus: int = 0
    gpus: int = 0
    gpu_type: str = ""
    gres: str = "gpu"  # Slurm's name for the resource: gpu or neuron
    time_limit_s: int | None = None  # None means no limit
    max_nodes: int | None = None  # maximum for one job; None means no limit, or unknown
    instance: str = ""  # instance type of all its nodes; "" if unknown, or if they differ


@dataclass(frozen=True)
class ClusterFacts:
    """The facts about a cluster that a run needs. `launcher` is the command that starts `dalsegno` on any node."""

    id: str = ""  # random id of the cluster; "" if Dal Segno did not create it
    controller: bool = False  # whether a controller on the head node starts coordinators
    partitions: tuple[PartitionFacts, ...] = ()  # empty if unknown
    launcher: tuple[str, ...] = ("dalsegno",)
    python: str = "python3"  # the Python for runs that name no environment
    runs_folder: str = "runs"
    mpi_types: tuple[str, ...] = ()  # the types that `srun --mpi=list` prints
    containers: bool = True  # whether srun has --container-image, from Pyxis or Dal Segno's plugin
    instance: str = ""  # instance type of all nodes, if it is not known by partition
    fabric: bool = True  # whether the nodes have the fabric of their instance type; virtual hosts have none
    environ: tuple[str, ...] = ()  # names of the environment variables of the submitting process

    def partition(self, name: str) -> PartitionFacts | None:
        """Return the named partition, or the default for ""; None if it cannot be determined.

        Raise if it does not exist.
        """
        known = {each.name: each for each in self.partitions}
        if not known or "," in name:
            return None
        if not name:
            return next((each for each in self.partitions if each.default), None)
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"the partitions are {', '.join(known)}")
            raise UsageError(f"there is no partition `{name}`", hint=hint)
        return known[name]


def partitions_of(cluster: Cluster) -> tuple[PartitionFacts, ...]:
    """Return the partitions in a cluster file. Spares are not counted, because Slurm does not schedule jobs on them."""
    nodes = {node.name: node for node in cluster.nodes if not node.spare}
    return tuple(
        _with_nodes(
            PartitionFacts(
                name=each.name,
                default=each.default,
                time_limit_s=None if each.time_limit_min is None else each.time_limit_min * 60,
                max_nodes=each.max_nodes,
            ),
            [nodes[name] for name in each.nodes if name in nodes],
        )
        for each in cluster.partitions
    )


def partitions_seen(partitions: Iterable[PartitionInfo], nodes: Iterable[NodeInfo]) -> tuple[PartitionFacts, ...]:
    """Return the partitions that Slurm reports. Their node limits per job are unknown."""
    by_name = {node.name: node for node in nodes}
    return tuple(
        _with_nodes(
            PartitionFacts(name=each.name, default=each.default, time_limit_s=each.time_limit_s),
            [by_name[name] for name in each.nodes if name in by_name],
        )
        for each in partitions
    )


def _with_nodes(facts: PartitionFacts, nodes: list[Node] | list[NodeInfo]) -> PartitionFacts:
    if not nodes:
        return facts
    types = {node.gpu_type for node in nodes}
    kinds = {node.gres for node in nodes if isinstance(node, Node) and node.gpus}
    return PartitionFacts(
        name=facts.name,
        default=facts.default,
        nodes=len(nodes),
        cpus=min(node.cpus for node in nodes),
        gpus=min(node.gpus for node in nodes),
        gpu_type=types.pop() if len(types) == 1 else "",
        gres=kinds.pop() if len(kinds) == 1 else "gpu",
        time_limit_s=facts.time_limit_s,
        max_nodes=facts.max_nodes,
        instance=_instance(nodes),
    )


def _instance(nodes: list[Node] | list[NodeInfo]) -> str:
    names = {each.instance if isinstance(each, Node) else find_instance_type(each.features) for each in nodes}
    return names.pop() if len(names) == 1 else ""


# Options common to salloc and sbatch


# USR1 is avoided because NCCL has used it. Without a `B:` prefix, Slurm signals all steps but not the batch shell.
SAVE_SIGNAL = "USR2"


@dataclass(frozen=True)
class JobRequest:
    """The resources and options that one job of a run requests from Slurm."""

    name: str
    role: JobRole = JobRole.MAIN
    nodes: NodeCount = ONE_NODE
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    memory_mib: int | None = None
    gpus: Gpus = NO_GPUS
    gres: str = "gpu"
    time_limit_s: int | None = None
    signal_lead_s: int = 120
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    dependency: str = ""
    extra: tuple[str, ...] = ()


def slurm_options(job: JobRequest) -> list[str]:
    """Return options of the form `--name=value`. The user's own options come last, so that they take precedence."""
    asked = {
        "job-name": job.name,
        "comment": left_comment(job.role, ()),
        "nodes": _span(job.nodes),
        # For a range of nodes, Slurm 22.05 would compute the tasks from the minimum and grant only the minimum.
        "ntasks-per-node": str(job.tasks_per_node) if job.nodes.min == job.nodes.max else "",
        "cpus-per-task": str(job.cpus_per_task),
        "mem": "" if job.memory_mib is None else f"{job.memory_mib}M",
        **_gpu_option(job),
        "time": "" if job.time_limit_s is None else slurm_time(job.time_limit_s),
        # Only agents handle the signal. It would kill a program that srun starts directly.
        "signal": f"{SAVE_SIGNAL}@{job.signal_lead_s}" if job.signal_lead_s else "",
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": node_list(job.exclude) if job.exclude else "",
        "dependency": job.dependency,
    }
    return [*(f"--{name}={value}" for name, value in asked.items() if value), *job.extra]


def slurm_time(seconds: int) -> str:
    """Return a time in Slurm's format, `1-02:03:04`; 0 means no limit."""
    if seconds == UNLIMITED_S:
        return "0"
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def _span(nodes: NodeCount) -> str:
    return str(nodes.max) if nodes.min == nodes.max else f"{nodes.min}-{nodes.max}"


def _gpu_option(job: JobRequest) -> dict[str, str]:
    if not job.gpus.count:
        return {}
    if job.gres == "gpu":
        return {"gpus-per-node": str(job.gpus)}
    return {"gres": f"{job.gres}:{job.gpus}"}  # --gpus-per-node would request gres/gpu


# Limits and defaults of the partition


def check_fits(request: RunRequest, partition: PartitionFacts | None) -> None:
    """Raise UsageError if the request would wait in the queue forever."""
    if partition is None:
        return
    _check_nodes(request, partition)
    _check_gpus(request, partition)
    cpus = request.processes_per_node * job_cpus(request, partition)
    if partition.cpus and cpus > partition.cpus:
        what = f"a node would need {cpus} CPUs, but nodes of partition `{partition.name}` have {partition.cpus}"
        raise UsageError(what, hint="request fewer processes per node, or a smaller `--cpus-per-task`")


def _check_nodes(request: RunRequest, partition: PartitionFacts) -> None:
    least = request.nodes.min if request.nodes.min < request.nodes.max else request.nodes.max + request.spares
    spares = f" (with {request.spares} spare)" if least > request.nodes.max else ""
    for limit, verb in ((partition.nodes, "has"), (partition.max_nodes, "allows a job at most")):
        if limit and least > limit:
            what = f"the run requests {least} nodes{spares}, but partition `{partition.name}` {verb} {limit}"
            raise UsageError(what, hint="request fewer nodes or spares, or another partition")


def _check_gpus(request: RunRequest, partition: PartitionFacts) -> None:
    wanted = request.gpus_per_node
    if partition.nodes and wanted.count > partition.gpus:
        has = f"have {partition.gpus}" if partition.gpus else "have none"
        what = f"the run requests {wanted.count} GPUs per node, but nodes of partition `{partition.name}` {has}"
        raise UsageError(what, hint="request fewer, or another partition: `sinfo -o '%P %G'` lists them")


def job_cpus(request: RunRequest, partition: PartitionFacts | None) -> int:
    """Return the number of CPUs for each process: as requested, or in proportion to the requested GPUs, or 1.

    A run that takes all GPUs of a node takes all its CPUs too, because data loaders can use them.
    """
    if request.cpus_per_task:
        return request.cpus_per_task
    gpus = request.gpus_per_node.count
    if not (partition and partition.gpus and gpus):
        return 1
    share = partition.cpus * min(gpus, partition.gpus) // partition.gpus
    return max(1, share // request.processes_per_node)


def job_time(request: RunRequest, partition: PartitionFacts | None) -> int | None:
    """Return the time limit of one job: the requested time, but at most the partition's limit."""
    return partition.time_limit_s if partition and _outlasts(request, partition) else request.time_limit_s


def _outlasts(request: RunRequest, partition: PartitionFacts) -> bool:
    asked, limit = request.time_limit_s, partition.time_limit_s
    return asked is not None and limit is not None and (asked == UNLIMITED_S or asked > limit)


def notes_on(request: RunRequest, partition: PartitionFacts | None) -> tuple[str, ...]:
    """Return notes about effects of the request that a user may not expect."""
    notes = []
    if partition and partition.time_limit_s and _outlasts(request, partition):
        limit = slurm_time(partition.time_limit_s)
        notes.append(f"partition `{partition.name}` limits jobs to {limit}; the run continues in further jobs")
    if partition and partition.gpus and not request.gpus_per_node.count:
        kind = f" {partition.gpu_type}" if partition.gpu_type else ""
        has = f"nodes of partition `{partition.name}` have {partition.gpus}{kind} GPUs"
        notes.append(f"{has} but the run requests none; to use them: `--gpus-per-node {partition.gpus}`")
    if request.spares and request.nodes.min < request.nodes.max:
        notes.append("an elastic run does not wait for its spares")
    return tuple(notes)


@dataclass(frozen=True)
class RunPlan:
    """A run and its first job. The run may outlive that job: `plan_join` and `plan_next` plan further jobs."""

    run: str  # id of the run, and name of all its Slurm jobs
    request: RunRequest
    shape: Shape
    job: JobRequest
    folder: str
    cluster: str = ""  # id of the cluster; job ids mean nothing in another cluster with the same name
    # whether the coordinator runs on the head node and requests an allocation; if not, it runs in a batch step
    on_head: bool = False
    launcher: tuple[str, ...] = ("dalsegno",)
    python: str = "python3"
    mpi: str = ""
    notes: tuple[str, ...] = ()  # consequences that a user may not expect
    instance: str = ""  # type of the nodes; "" if unknown, or if they are virtual
    variables: tuple[JobVariable, ...] = ()  # variables for the fabric of the nodes, except those that the user has set


def plan_run(request: RunRequest, cluster: ClusterFacts, run: str) -> RunPlan:
    """Return the plan for a run with this id. Raise UsageError if the cluster cannot run it."""
    check_name(run)
    partition = cluster.partition(request.partition)
    if cluster.controller:
        check_for_salloc(request.sbatch_args)
    check_fits(request, partition)
    job = _job(request, partition, run)
    folder = join(request.chdir, request.output or cluster.runs_folder, run)
    check_container(request, folder, cluster.containers)
    if request.has_agents:
        check_signal(job.signal_lead_s, job.time_limit_s)
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
        instance=(instance := _instance_of(cluster, partition)),
        variables=missing_variables(instance, dict(request.env), dict.fromkeys(cluster.environ, "")),
    )


def _instance_of(cluster: ClusterFacts, partition: PartitionFacts | None) -> str:
    return ((partition.instance if partition else "") or cluster.instance) if cluster.fabric else ""


def plan_join(plan: RunPlan, *, suspects: Iterable[str] = (), members: Iterable[str] = ()) -> RunPlan:
    """Return the plan for a job with one more node, excluding suspected nodes and members of the run."""
    if not plan.request.has_agents:
        what = f"run {plan.run} cannot take further nodes: its framework is {plan.request.framework}"
        raise DalsegnoError(what, hint="only runs with agents can; use `--framework torch`")
    excluded = tuple(sorted({*plan.job.exclude, *suspects, *members}, key=in_order))
    check_node_names(excluded)
    job = replace(plan.job, role=JobRole.JOIN, nodes=ONE_NODE, exclude=excluded, dependency="")
    return replace(plan, job=job)


def plan_next(plan: RunPlan, suspects: Iterable[str] = ()) -> RunPlan:
    """Return the plan for the job in which a run continues.

    Slurm starts it after all other jobs of the run have ended.
    """
    excluded = tuple(sorted({*plan.job.exclude, *suspects}, key=in_order))
    return replace(plan, job=replace(plan.job, role=JobRole.NEXT, dependency="singleton", exclude=excluded))


def salloc_argv(plan: RunPlan) -> list[str]:
    """Return the salloc command. The allocation has no batch script, so that it survives the loss of any node.

    Slurm cannot requeue such a job. After preemption, the coordinator requests another one.
    """
    return ["salloc", "--no-shell", "--no-kill", *slurm_options(plan.job)]


def _job(request: RunRequest, partition: PartitionFacts | None, run: str) -> JobRequest:
    processes, cpus = request.processes_per_node, job_cpus(request, partition)
    return JobRequest(
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


def _with_spares(request: RunRequest) -> NodeCount:
    """Return the number of nodes including spares. Only a run of fixed size waits for its spares."""
    total = request.nodes.max + request.spares
    return NodeCount(total if request.nodes.min == request.nodes.max else request.nodes.min, total)

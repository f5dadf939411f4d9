"""The parts of `dalsegno certify`: the commands behind them, run on the nodes of one cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.errors import CommandFailed, DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.bench.certificate.certificate import CertifiedPart
    from dalsegno.cluster import SlurmHere
    from dalsegno.slurm.facts import NodeInfo
    from dalsegno.targets.base import Say

GRACE_S = 30.0  # an interrupted benchmark needs this time to end its own job
DRILL_GRACE_S = 180.0  # an interrupted drill needs this time to undo its faults
# virtual hosts share processors, so a virtual host counts as slow only below this share of the usual speed
SHARED_LOW = 0.3
IMMEDIATE_S = 300  # maximum time that a job waits for its nodes


@dataclass(frozen=True)
class CertifyAsk:
    """The options of `dalsegno certify`."""

    cluster: str | None
    quick: bool
    nodes: int | None
    partition: str | None
    container_image: str | None
    output: Path  # folder of the report


# The cluster that is certified


@dataclass(frozen=True)
class CertifyStage:
    """The cluster, the nodes of the chosen partition, and how many of them are measured."""

    ask: CertifyAsk
    name: str
    slurm: SlurmHere
    known: Sequence[NodeInfo]
    count: int
    why_none: str  # why no node can be measured; "" if at least one can
    gpus: int  # number of GPUs per node; 0 if it differs between nodes, and on virtual hosts
    simulated: tuple[str, ...]


def open_stage(ask: CertifyAsk) -> CertifyStage:
    from dalsegno.cli.controller_requests import slurm_failure
    from dalsegno.cluster import find_slurm, folder_of, silence
    from dalsegno.slurm.facts import NodeState

    slurm = find_slurm(ask.cluster)
    if (silent := silence(slurm)) is not None:
        raise silent
    try:
        partitions, nodes = slurm.client.partitions(), slurm.client.nodes()
    except CommandFailed as fault:
        raise slurm_failure(fault) from None
    wanted = ask.partition or next((each.name for each in partitions if each.default), "")
    if ask.partition and ask.partition not in [each.name for each in partitions]:
        names = ", ".join(each.name for each in partitions)
        raise UsageError(f"there is no partition `{ask.partition}`", where="--partition", hint=f"there are {names}")
    known = [each for each in nodes if not wanted or wanted in each.partitions]
    idle = [each for each in known if each.in_service and each.state is NodeState.IDLE]
    if ask.nodes and ask.nodes > len(idle):
        raise UsageError(
            f"{len(idle)} of {len(known)} nodes are idle, not {ask.nodes}", where="--nodes",
            hint="use fewer nodes, or wait until the others are idle: `sinfo` shows them",
        )  # fmt: skip
    count = ask.nodes or len(idle)
    folder = folder_of(slurm.env)
    why_none = "" if count else f"none of {len(known)} nodes is idle and in service"
    counts = {each.gpus for each in idle}
    simulated = _simulated(slurm, known)
    gpus = counts.pop() if len(counts) == 1 and not simulated else 0
    return CertifyStage(ask, folder.name if folder else "slurm", slurm, known, count, why_none, gpus, simulated)


def _simulated(slurm: SlurmHere, nodes: Sequence[NodeInfo]) -> tuple[str, ...]:
    """Return sentences that say what is simulated. If this machine has real GPUs, those of virtual hosts are not
    reported as simulated."""
    from dalsegno.cluster import target_of
    from dalsegno.targets.base import HasVirtualNodes

    if not isinstance(target_of(slurm), HasVirtualNodes):
        return ()
    found = ["the nodes are virtual hosts on one machine: they share its processors, memory, disks and network"]
    if any(each.gpus for each in nodes) and not Path("/proc/driver/nvidia/gpus").is_dir():
        found.append("the GPUs are simulated: nothing was measured on a GPU")
    return tuple(found)


# The parts of a certificate


def prefixed(say: Say, part: str) -> Say:
    """Return a function that shows the messages of a command after the name of the part. It removes times, and leaves
    out lines that start with `#`."""

    def passed_on(text: str) -> None:
        line = re.sub(r"^ *[0-9.]+ s  ", "", text).strip()
        if line and not line.startswith("#"):
            say(f"{part}: {line}")

    return passed_on


def measure_part(part: Any, stage: CertifyStage, say: Say) -> CertifiedPart:
    """Measure one part. If that fails, return the part as not measured, with the reason."""
    from dalsegno.bench.certificate.certificate import CertifyPart, not_measured

    measures: dict[CertifyPart, Callable[[CertifyStage, Say], CertifiedPart]] = {
        CertifyPart.HEALTH: _health, CertifyPart.VERSIONS: _versions, CertifyPart.STORAGE: _storage,
        CertifyPart.PAIRS: _pairs, CertifyPart.COLLECTIVES: _collectives, CertifyPart.GEMM: _gemm,
        CertifyPart.CONTAINER: _container, CertifyPart.POWER_CUT: _power_cut,
    }  # fmt: skip
    if stage.why_none and part is not CertifyPart.HEALTH:
        return not_measured(part, stage.why_none)
    try:
        return measures[part](stage, say)
    except DalsegnoError as error:
        return not_measured(part, f"{error.what}{f' ({error.hint})' if error.hint else ''}")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return not_measured(part, f"its report could not be read: {type(error).__name__} {error}")


def _again(stage: CertifyStage, part: str) -> str:
    """Return the command that measures a part of the certificate again."""
    return shlex.join(["dalsegno", "certify", *_cluster(stage), *_partition(stage), "--only", part])


def _cluster(stage: CertifyStage) -> list[str]:
    return ["--cluster", stage.ask.cluster] if stage.ask.cluster else []


def _partition(stage: CertifyStage) -> list[str]:
    return ["--partition", stage.ask.partition] if stage.ask.partition else []


def _health(stage: CertifyStage, say: Say) -> CertifiedPart:
    from dalsegno.bench.certificate.parts import certify_health

    views = [_node_health(stage.slurm, each) for each in stage.known]
    return certify_health(views, [shlex.join(["dalsegno", "nodes", *_cluster(stage)]), _again(stage, "health")])


def _node_health(slurm: SlurmHere, node: NodeInfo) -> Any:
    """Return a node as Slurm sees it, with the last results of its agent's checks if there is a controller."""
    from dalsegno.bench.certificate.parts import NodeHealth
    from dalsegno.cli.controller_requests import ask_controller
    from dalsegno.health.result import Verdict
    from dalsegno.recovery.decisions.phase import NodePhase

    socket = slurm.controller or slurm.watcher
    try:
        answer = ask_controller(socket, {"node": node.name}) if socket else None
    except DalsegnoError:
        answer = None
    if answer is None:
        return NodeHealth(node.name, node.word, node.in_service, node.reason)
    own = answer["node"]
    last = {str(each["check"]): Verdict(each["verdict"]) for each in answer["checks"]}
    phase = NodePhase.parse(own["phase"])
    spare = phase is NodePhase.SPARE
    well = spare or (node.in_service and phase in (NodePhase.IN_SERVICE, NodePhase.LENT, NodePhase.SUSPECTED))
    state = node.word if phase is NodePhase.IN_SERVICE else phase.value
    failed = tuple(name for name, verdict in last.items() if verdict is Verdict.FAILED)
    warned = tuple(name for name, verdict in last.items() if verdict is Verdict.WARNED)
    warned += (f"{phase.value} {own['reason'] or own['note']}".strip(),) if phase is NodePhase.SUSPECTED else ()
    # A boot id shows that the agent was connected. Results are recorded only when they change, so `last` may be
    # empty although the checks ran.
    checked = bool(own["boot"])
    return NodeHealth(node.name, state, well, own["reason"] or node.reason, failed if checked else None, warned)


def _versions(stage: CertifyStage, say: Say) -> CertifiedPart:
    from dalsegno.bench.certificate.parts import certify_versions
    from dalsegno.bench.node.versions_measure import read_versions
    from dalsegno.cli.measure.bench_job import BenchPlace, WorkerProgram, needs_data, run_worker
    from dalsegno.runs.submit.values import NodeCount

    # this program runs with the Python that has torch
    worker = WorkerProgram("bench-versions", [], "versions", all_ranks=True)
    fields: dict[str, object] = {"nodes": NodeCount(stage.count, stage.count), "nproc_per_node": 1}
    fields |= {"partition": stage.ask.partition} if stage.ask.partition else {}
    fields |= {"sbatch_args": (f"--immediate={IMMEDIATE_S}",)}
    done = run_worker(worker, BenchPlace(fields, cluster=stage.ask.cluster), lambda line: None)
    found = read_versions(needs_data(done.text if done else "", "the job"))
    slurmd = {each.name: each.version for each in stage.known}
    merged = {node: {"slurmd": slurmd.get(node, ""), **each} for node, each in found.items()}
    return certify_versions(merged, [_again(stage, "versions")])


def _bench(stage: CertifyStage, words: Sequence[str], say: Say) -> tuple[str, Any]:
    """Run a benchmark on the nodes, and return its command line and its JSON report."""
    where = ["--nodes", str(stage.count), *_partition(stage), *_cluster(stage)]
    argv = ["bench", *words, *where, f"--sbatch-arg=--immediate={IMMEDIATE_S}", "--json"]
    return shlex.join(["dalsegno", *argv]), _dalsegno(argv, say, GRACE_S)


def _dalsegno(argv: Sequence[str], say: Say, grace_s: float) -> Any:
    """Run `dalsegno` and return its JSON report. A report counts as a result even if the exit code is not 0."""
    from dalsegno.cli.measure.ranks import LineFollower, Rank, RankFailed, errors_of, log_of, run_ranks, text_of
    from dalsegno.programs import own_argv

    with tempfile.TemporaryDirectory(prefix="dalsegno-certify-") as name:
        folder = Path(name)
        follow = LineFollower(errors_of(folder, 0), say)
        rank, failed = Rank([*own_argv(), *argv], dict(os.environ)), None
        try:
            run_ranks([rank], folder, follow, cwd=os.getcwd(), errors_apart=True, grace_s=grace_s)
        except RankFailed as fault:
            failed = fault
        try:
            return json.loads(text_of(log_of(folder, 0)))
        except ValueError:
            said = text_of(errors_of(folder, 0)).strip().splitlines()
            lines = [each for each in said if each.startswith(("error:", "hint:"))] or said[-3:]
            reason = " ".join(lines).removeprefix("error: ") or "it printed no report"
            code = f" (exit code {failed.code})" if failed else ""
            command = shlex.join(["dalsegno", *argv])
            raise DalsegnoError(f"{argv[0]} failed{code}: {reason}", hint=f"try it alone: `{command}`") from None


def _storage(stage: CertifyStage, say: Say) -> CertifiedPart:
    from dalsegno.bench.certificate.parts import certify_storage
    from dalsegno.cluster import applied_cluster

    applied = applied_cluster(stage.slurm)
    mounts = [each.mount for each in applied.storage] if applied else []
    size = ["--size", "16M", "--seconds", "1"] if stage.ask.quick else ["--size", "256M"]
    command, report = _bench(stage, ["storage", *(mounts or [os.getcwd()]), "/tmp", *size], say)
    return certify_storage(report, [command], compare_nodes=not stage.simulated)


def _gpus(stage: CertifyStage) -> list[str]:
    return ["--gpus-per-node", str(stage.gpus)] if stage.gpus else []


def _pairs(stage: CertifyStage, say: Say) -> CertifiedPart:
    from dalsegno.bench.certificate.certificate import CertifyPart, not_measured
    from dalsegno.bench.certificate.parts import certify_pairs

    if stage.count < 2:
        return not_measured(CertifyPart.PAIRS, "a pair needs two nodes, and one node is measured")
    size = ["--size", "4M", "--seconds", "0.5"] if stage.ask.quick else []
    low = ["--low", str(SHARED_LOW)] if stage.simulated else []
    command, report = _bench(stage, ["pairs", *size, *low, *_gpus(stage)], say)
    return certify_pairs(report, [command], compare_history=not stage.simulated)


def _collectives(stage: CertifyStage, say: Say) -> CertifiedPart:
    from dalsegno.bench.certificate.parts import certify_collectives

    sizes = ["-b", "8", "-e", "16G" if stage.gpus else "64M", "-f", "2"]
    if stage.ask.quick:
        sizes = ["-b", "1G", "-e", "4G", "-f", "2"] if stage.gpus else ["-b", "1K", "-e", "1M", "-f", "8", "-n", "3"]
    tests = ["all_reduce"] if stage.ask.quick else ["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
    done = [_bench(stage, [test, *sizes, *_gpus(stage)], say) for test in tests]
    return certify_collectives([report for _, report in done], [command for command, _ in done])


def _gemm(stage: CertifyStage, say: Say) -> CertifiedPart:
    from dalsegno.bench.certificate.parts import certify_devices
    from dalsegno.bench.node.devices import LOW

    time_ = ["--seconds", "0.5"] if stage.ask.quick else []
    low = ["--low", str(SHARED_LOW)] if stage.simulated else []
    command, report = _bench(stage, ["gemm", *time_, *low, *_gpus(stage)], say)
    return certify_devices(report, [command], SHARED_LOW if stage.simulated else LOW)


def _container(stage: CertifyStage, say: Say) -> CertifiedPart:
    """Measure how long `true` takes on all nodes, in a container and without one."""
    from dalsegno.bench.certificate.parts import certify_container

    base = ["srun", f"--nodes={stage.count}", "--ntasks-per-node=1", "--mpi=none", f"--immediate={IMMEDIATE_S}"]
    base += [f"--partition={stage.ask.partition}"] if stage.ask.partition else []
    inside = [*base, f"--container-image={stage.ask.container_image}", "true"]
    _srun(inside, stage)  # not timed, because the first start imports the image
    container_s, plain_s = _srun(inside, stage), _srun([*base, "true"], stage)
    shell = ["dalsegno", "shell", *_cluster(stage), "--"]
    return certify_container(container_s, plain_s, stage.count, [shlex.join([*shell, *inside])])


def _srun(argv: Sequence[str], stage: CertifyStage) -> float:
    from dalsegno.cli.measure.ranks import Rank, run_ranks

    with tempfile.TemporaryDirectory(prefix="dalsegno-certify-") as name:
        began = time.monotonic()
        run_ranks([Rank(argv, stage.slurm.env)], Path(name), errors_apart=True)
        return time.monotonic() - began


def _power_cut(stage: CertifyStage, say: Say) -> CertifiedPart:
    """Run a drill with one power cut, unless there is a job on the cluster.

    A job may be submitted after the check. The drill uses its nodes exclusively, so that job runs on other nodes.
    """
    from dalsegno.bench.certificate.parts import certify_power_cut

    others = sorted({each.user for each in stage.slurm.client.jobs()})
    if others:
        raise DalsegnoError(
            f"there are jobs on the cluster, of {', '.join(others)}", hint="wait until the queue is empty"
        )
    argv = ["drill", "--faults", "1", "--only", "power-off", "--exclusive", *_cluster(stage)]
    report = _dalsegno([*argv, "--json", "--report", str(stage.ask.output / "power-cut.html")], say, DRILL_GRACE_S)
    return certify_power_cut(report, [shlex.join(["dalsegno", *argv])])

"""Gather a `Case` from a script, a log, a job or a run."""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.doctor.batch import BatchFacts, is_batch, read_batch
from dalsegno.doctor.case import Case, Evidence, FoundSnapshot, RankTimes
from dalsegno.doctor.logs import LogEnd, LogSign, SignSeen, find_end
from dalsegno.doctor.script import MAX_SCRIPT_BYTES, ScriptFacts, read_script
from dalsegno.doctor.slurm_source import SlurmAccess, find_job, look_at_cluster, probe_nodes
from dalsegno.doctor.sources import (
    end_of,
    find_snapshot,
    look_at_python,
    place_of,
    port_is_taken,
    read_dump_files,
    read_start,
    signs_in,
)
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError
from dalsegno.printable import one_line
from dalsegno.runs import journal
from dalsegno.runs.coordinator.reports.goodput import read_progress
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.hang import judge_hang, ranks_of_generation, read_hang
from dalsegno.runs.status import RunStatus, is_over, read_status
from dalsegno.runs.submit.prepare import read_plan
from dalsegno.runs.submit.program import find_python, prefix_of
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles
from dalsegno.slurm.parse.outputs import with_output_files
from dalsegno.system.processes import Runner
from dalsegno.why import exit_of, never_started
from dalsegno.why.run import generation_to_explain

MAX_LOGS = 256  # at most this many ranks' logs are searched
_SIBLINGS = 20  # at most this many modules in the script's folder are read too


@dataclass(frozen=True)
class DoctorOrder:
    """The options of an examination, and the access to Slurm and this machine. `slurm` is None if there is no
    cluster."""

    slurm: SlurmAccess | None
    runner: Runner
    env: Mapping[str, str]
    words: tuple[str, ...] = ()  # the arguments of the script
    python: str = ""
    partition: str = ""
    dumps: str = ""  # a folder with dumps of the flight recorder
    checkpoint: str = ""  # a folder with checkpoints
    ranks: int = 0
    probe: bool = False
    same_files: bool = False
    no_cluster: str = ""  # why `slurm` is None
    owners: tuple[int, ...] = ()  # uids whose files may be read; () if all files may be read
    mountinfo: str = field(default_factory=lambda: read_start(Path("/proc/self/mountinfo"), 1 << 20) or "")


def gather_file(path: Path, order: DoctorOrder) -> Case:
    """Return the case of a script, a batch script or a log."""
    text = read_start(path, MAX_SCRIPT_BYTES)
    if text is None:
        why = "is not readable" if path.exists() else "does not exist"
        raise UsageError(f"{path} {why}", hint="name a script, a log file, a job or a run")
    if path.suffix == ".py" or (text.startswith("#!") and not is_batch(text)):
        return _surroundings(Case(str(path), script=_script(text, path), words=order.words), order, str(path))
    if is_batch(text) or "\n#SBATCH" in text[:4096]:
        return _batch_case(Case(str(path), words=order.words), read_batch(text, str(path)), order)
    case = Case(
        str(path), signs=tuple(signs_in(path)), world_size=order.ranks, empty_log=_is_empty([path]),
        ends=(end_of(path),),
    )  # fmt: skip
    return _with_dumps(case, order, path.stat().st_uid)


def gather_machine(order: DoctorOrder) -> Case:
    """Return a case without a job: this environment and the cluster."""
    return _surroundings(Case("this environment", words=order.words), order, "")


def gather_job(label: str, order: DoctorOrder) -> Case:
    """Return the case of a job, from Slurm and from its output."""
    if order.slurm is None:
        raise UsageError(f"job {label} cannot be examined: {order.no_cluster}", hint="give the job's log file instead")
    job, submitted = find_job(order.slurm, label, order.runner)
    signs, unchecked = list[SignSeen](), list[str]()
    owners = _owners(_owner_of(job))
    order = replace(order, owners=owners)
    file = Path(job.work_dir or "/", submitted.script) if submitted and submitted.script else None
    text = read_start(file, MAX_SCRIPT_BYTES, owners) if file else None
    batch = read_batch(text, str(file)) if text is not None and is_batch(text) else None
    if batch and not os.path.exists(job.stdout) and not never_started(job):  # the record of an old job has no paths
        named = replace(job, stdout=batch.options.get("output", ""), stderr=batch.options.get("error", ""))
        named = with_output_files(named)
        job = named if os.path.exists(named.stdout) else job
    outputs = [each for each in dict.fromkeys((job.stdout, job.stderr)) if each and each != "/dev/null"]
    for each in outputs:
        signs += signs_in(Path(each), owners=owners)
    there = [Path(each) for each in outputs if os.path.exists(each)]
    if not there and not job.batch:
        unchecked.append("the job's output: srun and salloc write to their terminal; if it was saved, give the file")
    elif not there:
        unchecked.append("the job's output: Slurm does not name it any more, or it is gone; give its path to `doctor`")
    readable = shlex.join(["tail", str(there[0])]) if there else f"sacct -j {label} --format=JobID,State,ExitCode"
    case = Case(
        f"job {label}", job=job, words=submitted.arguments if submitted else (), signs=tuple(signs),
        unchecked=tuple(unchecked), empty_log=bool(there) and _is_empty(there, owners),
        ends=tuple(end_of(each, owners=owners) for each in there),
        failure=f"job {label} failed with {exit_of(job)}" if job.state is JobState.FAILED else "",
        read_next=f"`{readable}`", missing_folders=tuple(_missing_output(job)),
    )  # fmt: skip
    if batch and job.state is not JobState.COMPLETED:  # the script of a completed job is not examined
        order = replace(order, partition=job.partition)
        case = _batch_case(case, batch, order, Path(job.work_dir or Path(batch.path).parent))
    return _with_dumps(replace(case, of_another_user=bool(owners)), order, _owner_of(job))


def gather_run(run: RunFolder, order: DoctorOrder) -> Case:
    """Return the case of a run, from its folder."""
    status, entries = read_status(run.status), list(journal.read(run.journal))
    if status is None:
        raise UsageError(f"run {run.run} has no status yet", hint="`dalsegno runs` lists the runs that have one")
    plan = read_plan(run)
    generation = generation_to_explain(status, entries)
    places = ranks_of_generation(entries, generation)
    progress = read_progress(run.progress)
    figures = progress.figures if progress else {}
    times = RankTimes(
        dict(progress.ranks) if progress else {}, places, figures.get("step_s") or 0.0, figures.get("data_s") or 0.0
    )
    script = Path(plan.request.chdir, plan.request.script)
    owners = _owners(run.root.stat().st_uid)
    case = Case(
        f"run {run.run}",
        run=run.run,
        words=plan.request.args,
        signs=tuple(_signs_of_run(run, generation, sorted(places), owners)),
        hang=read_hang(run, generation, entries),
        dumps=tuple(
            str(run.flight_dump(generation, rank)) for rank in places if run.flight_dump(generation, rank).exists()
        ),
        failure=_failure_of(status),
        ends=tuple(_ends_of_run(run, status, generation, sorted(places), owners)),
        read_next=f"`dalsegno logs {run.run}`",
        times=times,
        world_size=status.world_size or plan.shape.max_nodes * plan.shape.nproc_per_node,
    )
    prefix = prefix_of(plan.request)
    python = os.path.join(prefix, "bin", "python") if prefix else plan.python
    text = read_start(script, MAX_SCRIPT_BYTES, owners)
    facts = _script(text, script, owners) if text is not None and script.suffix == ".py" else None
    order = replace(order, python=order.python or python, partition=plan.request.partition, owners=owners)
    return _surroundings(replace(case, script=facts, of_another_user=bool(owners)), order, str(script))


def _owner_of(job: JobInfo) -> int:
    """Return the uid of a job's user; -1 if this machine does not know the user name in the accounting database."""
    if job.uid is not None:
        return job.uid
    try:
        return pwd.getpwnam(job.user).pw_uid
    except (KeyError, ValueError):
        return -1


def _owners(owner: int) -> tuple[int, ...]:
    """Return the uids whose files may be read for a job of this user; () if all files may be read.

    The owner of a job has chosen its paths, so these could lead to files of other users.
    """
    return () if owner == os.geteuid() else (owner,)


def _is_empty(logs: Sequence[Path], owners: Sequence[int] = ()) -> bool:
    """Return whether the logs contain only white space. A log that cannot be read does not count as empty."""
    texts = [read_start(each, MAX_SCRIPT_BYTES, owners) for each in logs]
    return all(text is not None and not text.strip() and len(text) < MAX_SCRIPT_BYTES for text in texts)


def _signs_of_run(run: RunFolder, generation: int, ranks: Sequence[int], owners: Sequence[int]) -> list[SignSeen]:
    """Return the signs of faults in the logs of a run. The place of a sign names the rank before the line number."""
    logs = [(run.log(generation, rank), f"rank {rank}, line ") for rank in ranks[:MAX_LOGS]]
    logs += [
        (run.agents_log, "agents.log"),
        (run.coordinator_log, "coordinator.log"),
        (run.salloc_log(1), "salloc-1.log"),
    ]
    signs = list[SignSeen]()
    for path, name in logs:
        found = signs_in(path, name, owners)
        signs += [replace(each, where=each.where.replace("line :", "line ")) for each in found]
    return signs


def _failure_of(status: RunStatus) -> str:
    failed = is_over(status) and status.exit_code and not status.cause.cancelled
    return f"run {status.run} failed with exit code {status.exit_code}" if failed else ""


def _ends_of_run(
    run: RunFolder, status: RunStatus, generation: int, ranks: Sequence[int], owners: Sequence[int]
) -> list[LogEnd]:
    """Return the traceback of the rank that failed first or, if there is none, how the logs of the ranks end."""
    reported = find_end(enumerate(status.report.splitlines(), 1), "traceback of the first rank that failed")
    if reported.error:
        return [reported]
    ends = [end_of(run.log(generation, rank), f"rank {rank}", owners) for rank in ranks[:MAX_LOGS]]
    return [each for each in ends if each.error] or [each for each in ends if each.last]


# The parts that all cases share


def _script(text: str, path: Path, owners: Sequence[int] = ()) -> ScriptFacts:
    """Return the script's facts. A process group that a module in its folder starts counts as the script's own."""
    facts = read_script(text, str(path))
    if facts.starts or not facts.distributed:
        return facts
    beside = [path.parent / f"{name}.py" for name in sorted(facts.imports)] + [
        each / "__init__.py" for name in sorted(facts.imports) if (each := path.parent / name).is_dir()
    ]
    for module in beside[:_SIBLINGS]:
        other = read_start(module, MAX_SCRIPT_BYTES, owners)
        if other is not None and (starts := read_script(other, str(module)).starts):
            return replace(facts, starts=tuple(replace(each, function="", line=0) for each in starts))
    return facts


def _batch_case(case: Case, batch: BatchFacts, order: DoctorOrder, folder: Path | None = None) -> Case:
    """Return the case with a batch script, and the Python script that it starts if there is one."""
    folder = folder or Path.cwd()
    case = replace(case, batch=batch)
    # If the path contains a variable, as in `$(dirname "$PWD")/ddp.py`, only the file name is used.
    named = [word.rpartition("/")[2] if "$" in word else word for _, word in batch.scripts]
    tried = [
        place / name for name in named for place in (folder, Path(batch.path).parent, Path(batch.path).parent.parent)
    ]
    script = next((each for each in tried if each.is_file()), None)
    text = read_start(script, MAX_SCRIPT_BYTES, order.owners) if script else None
    if script is not None and text is not None:
        case = replace(case, script=_script(text, script, order.owners))
    line, activated = batch.environment()
    if line and not order.python:
        order = replace(order, python=os.path.join(folder, activated, "bin", "python"))
    order = replace(order, partition=order.partition or batch.options.get("partition", ""))
    case = replace(
        case,
        world_size=order.ranks or _ranks_of(batch),
        missing_folders=case.missing_folders or tuple(_missing_folders(batch, folder, case.started)),
        missing_script=None if case.started else _missing_script(batch, folder),
        missing_launcher=None if case.started else _missing_launcher(batch, folder),
    )
    return _surroundings(case, order, str(script) if script else "")


def _ranks_of(batch: BatchFacts) -> int:
    """Return the number of ranks that a batch script starts; 0 if its text does not show it."""
    nodes = batch.options.get("nodes", "1")
    per_node = [
        word.partition("=")[2]
        for each in batch.launchers
        for word in each.words
        if word.replace("_", "-").startswith("--nproc-per-node=")
    ]
    tasks = batch.options.get("ntasks-per-node", "") if not batch.launchers else (per_node or [""])[0]
    known = all(each.isdecimal() and len(each) < 7 for each in (nodes, tasks))
    return int(nodes) * int(tasks) if known else 0


def _missing_launcher(batch: BatchFacts, folder: Path) -> Evidence | None:
    """Return the torchrun that the script starts by a path that does not exist."""
    for line, path in batch.launcher_paths():
        if not any((place / path).exists() for place in (folder, Path(batch.path).parent)):
            return Evidence(f"{batch.path}:{line.line}", path)
    return None


def _missing_script(batch: BatchFacts, folder: Path) -> Evidence | None:
    """Return a Python script that the job starts and that does not exist, unless the job may create it."""
    if batch.container_lines():
        return None  # the path may be inside the image
    places = (folder / batch.options.get("chdir", ""), Path(batch.path).parent)
    for call in batch.calls:
        unclear = set(call.path) & set("$`~*") or batch.may_create(call)
        if not unclear and not any((place / call.path).exists() for place in places):
            return Evidence(f"{batch.path}:{call.line.line}", call.path)
    return None


def _missing_folders(batch: BatchFacts, folder: Path, started: bool) -> list[Evidence]:
    if started:
        return []
    found = []
    for option in ("output", "error"):
        parent = os.path.dirname(batch.options.get(option, ""))
        if parent and "%" not in parent and not (folder / batch.options.get("chdir", "") / parent).is_dir():
            found.append(Evidence(f"{batch.path}:{batch.option_lines[option]}", parent))
    return found[:1]


def _missing_output(job: JobInfo) -> list[Evidence]:
    """Return the missing folder of the output of a job that Slurm could not start."""
    folders = [os.path.dirname(each) for each in (job.stdout, job.stderr) if each] if never_started(job) else []
    return [Evidence(f"job {job.label}: {exit_of(job)}", each) for each in folders if not os.path.isdir(each)][:1]


def _surroundings(case: Case, order: DoctorOrder, script: str) -> Case:
    """Return the case with the environment, the cluster, the port and the snapshots."""
    unchecked = list(case.unchecked)
    python = order.python or find_python(order.env, "torch")
    active = bool(order.python or order.env.get("VIRTUAL_ENV"))
    found = look_at_python(python, order.env, order.mountinfo, active)
    if found.torch is None:
        missing = "is a shell script that selects one" if os.path.exists(python) else "is not on this machine"
        unchecked.append(f"PyTorch: {python} {missing}; name the job's Python with `--python`")
    elif not active and not case.started and (case.script is None or "torch" in case.script.imports):
        build = ", built without CUDA" if found.cuda is False else ""
        torch = f"torch {found.torch}{build}" if found.torch else "no torch"
        unchecked.append(
            f"the job's own PyTorch: no environment is active, so {python} was examined ({torch}); name the job's"
            " Python with `--python`"
        )
    port, where = _port(case, order)
    case = replace(
        case,
        place=place_of(script, order.mountinfo) if script else None,
        python=found,
        port=port,
        port_where=where,
        port_in_use=port_is_taken(port) if port and not case.started else None,
        snapshots=tuple(_snapshots(case, order)),
        left_snapshot=_left_snapshot(case),
        world_size=order.ranks or case.world_size,
    )
    return replace(_with_cluster(case, order, script, python, unchecked), unchecked=tuple(unchecked))


def _with_cluster(case: Case, order: DoctorOrder, script: str, python: str, unchecked: list[str]) -> Case:
    if order.slurm is None:
        unchecked.append(f"the cluster: {order.no_cluster}")
        return case
    try:
        cluster = look_at_cluster(order.slurm, order.runner, order.partition, order.same_files)
    except DalsegnoError as error:
        absent = isinstance(error, CommandFailed) and SlurmTrouble.NO_SETTINGS in parse_troubles(error.stderr)
        said = "there is no cluster here" if absent else one_line(error.what.strip().splitlines()[-1].strip())
        unchecked.append(f"the cluster: {said}")
        return case
    if cluster is None:
        missing = f"partition `{order.partition}`" if order.partition else "default partition"
        unchecked.append(f"the nodes: Slurm has no {missing}; name one with `--partition`")
        return case
    case = replace(case, cluster=cluster)
    if not order.probe:
        if not case.started:
            unchecked.append("files and ports on the nodes: `--probe` runs a job step of one second there")
        return case
    probes = probe_nodes(order.slurm, order.runner, script, python, case.port, order.partition, cluster.nodes)
    return replace(case, probes=tuple(probes))


def _port(case: Case, order: DoctorOrder) -> tuple[int, str]:
    """Return a MASTER_PORT that the batch script, the script or the environment fixes, and where it is set."""
    if case.batch:
        line, value = case.batch.variable("MASTER_PORT")
        if value.isdecimal() and len(value) < 6:
            return int(value) & 0xFFFF, f"{case.batch.path}:{line}"
    if case.script and case.script.port:
        return case.script.port & 0xFFFF, f"{case.script.path}:{case.script.port_line}"
    value = order.env.get("MASTER_PORT", "")
    fixed = value.isdecimal() and len(value) < 6 and not case.started
    return (int(value) & 0xFFFF, "environment") if fixed else (0, "")


def _snapshots(case: Case, order: DoctorOrder) -> list[FoundSnapshot]:
    folders = [order.checkpoint] if order.checkpoint else [word.partition("=")[2] or word for word in case.words]
    found = [find_snapshot(Path(each), order.owners) for each in folders if each and os.path.isdir(each)]
    return [each for each in found if each is not None]


def _left_snapshot(case: Case) -> str:
    """Return a snapshot file that the script names and that exists in this folder; "" if there is none."""
    names = case.script.files if case.script else ()
    return next((name for name in names if os.path.isfile(name)), "")


def _with_dumps(case: Case, order: DoctorOrder, owner: int) -> Case:
    """Return the case with the dumps of the flight recorder, from the paths in the log or from a given folder."""
    named = [Path(each.values["path"]) for each in case.seen(LogSign.DUMP_WRITTEN) if "path" in each.values]
    paths = sorted(Path(order.dumps).iterdir()) if order.dumps else named
    found = read_dump_files(paths, os.geteuid() if order.dumps else owner)
    if not found:
        return case
    report = judge_hang(0, [dump for _, dump in found], {}, {})
    return replace(case, hang=report, dumps=tuple(str(path) for path, _ in found))

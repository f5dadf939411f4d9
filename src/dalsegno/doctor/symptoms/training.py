"""Symptoms of training: memory, ranks that wait for each other, slow ranks, snapshots."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dalsegno.doctor.case import Case, DoctorFinding, Evidence, Severity, Symptom, evidence_of
from dalsegno.doctor.logs import LogSign, SignSeen
from dalsegno.runs.hang import HangReport, HangSuspect
from dalsegno.slurm.facts import JobState

MAX_RANKS = 1 << 18  # at most this many ranks are examined
SLOW = 1.5  # a rank is slow above this multiple of the median step time
DATA_SHARE = 0.3  # a wait for data during this share of a step, or more, is reported


def _memory(case: Case) -> Iterator[DoctorFinding]:
    if signs := case.seen(LogSign.GPU_MEMORY):
        fix = "use a smaller batch per rank, activation checkpointing or FSDP; against fragmentation: "
        fix += "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield DoctorFinding(Severity.ERROR, "a GPU ran out of memory", fix, evidence_of(signs))
    if signs := case.seen(LogSign.SHARED_MEMORY):
        fix = "use fewer DataLoader workers, or mount a larger /dev/shm into the container"
        yield DoctorFinding(Severity.ERROR, "/dev/shm was full", fix, evidence_of(signs))
    signs = case.seen(LogSign.HOST_MEMORY)
    killed = case.job is not None and case.job.state is JobState.OUT_OF_MEMORY
    if signs or killed:
        had = f" of {case.job.memory_mib} MiB" if case.job and case.job.memory_mib else ""
        fix = "#SBATCH --mem=0  # all memory of the node; or request more than before, or use fewer DataLoader workers"
        slurms = (Evidence(f"job {case.job.label}", case.job.state.value),) if case.job and killed else ()
        what = f"the job ran out of the node's memory, or of its request{had}"
        yield DoctorFinding(Severity.ERROR, what, fix, (*evidence_of(signs), *slurms))


def _collective_timeout(case: Case) -> Iterator[DoctorFinding]:
    signs = case.seen(LogSign.NCCL_TIMEOUT, LogSign.GLOO_TIMEOUT)
    seen = evidence_of(signs[:1]) + tuple(Evidence(path, "flight recorder") for path in case.dumps[:2])
    if case.hang:
        yield DoctorFinding(Severity.ERROR, case.hang.describe(), _hang_fix(case.hang), seen)
    elif signs:
        yield _timeout_in_log(case, signs, seen)


def _hang_fix(hang: HangReport) -> str:
    if hang.suspect is HangSuspect.NODE and hang.nodes:
        return f"dalsegno why {shlex.quote(hang.nodes[0])}"
    if hang.suspect is HangSuspect.NETWORK:
        look = "`dalsegno health --node NODE` checks a node's GPUs"
        return f"run again with NCCL_DEBUG=INFO, which names the interfaces; {look}"
    where = f" at {hang.where}" if hang.where else ""
    return f"make every rank call {hang.collective or 'the same collectives'}{where}: no branch on the rank around it"


def _timeout_in_log(case: Case, signs: list[SignSeen], seen: tuple[Evidence, ...]) -> DoctorFinding:
    """Return the finding from the log alone, in which NCCL prints how far each rank got."""
    reached = {int(sign.values["rank"]): int(sign.values["enqueued"]) for sign in case.seen(LogSign.NCCL_PROGRESS)}
    sequence = min((int(sign.values["sequence"]) for sign in signs if "sequence" in sign.values), default=0)
    operation = next((sign.values["operation"] for sign in signs if "operation" in sign.values), "a collective")
    late = sorted(rank for rank, number in reached.items() if number < sequence)
    silent = [rank for rank in range(min(case.world_size, MAX_RANKS)) if rank not in reached] if reached else []
    missing = late or silent
    fix = (
        "start it with `dalsegno run`, which names the rank; or export TORCH_FR_DUMP_TEMP_FILE=$PWD/flight/rank_, run"
        " it again, then `dalsegno doctor --dumps flight LOGFILE`"
    )
    if missing:
        ranks = ", ".join(map(str, missing[:8]))
        what = (
            f"{operation} (number {sequence}) timed out: {'ranks' if missing[1:] else 'rank'} {ranks} did not call it"
        )
        return DoctorFinding(
            Severity.ERROR, what, "read the last lines of each of these ranks in the log, which show where it was", seen
        )
    number = f" (number {sequence})" if sequence else ""
    return DoctorFinding(Severity.ERROR, f"{operation}{number} timed out: a rank did not arrive in time", fix, seen)


_NETWORK_SIGNS = (LogSign.NO_INTERFACE, LogSign.PEER_UNREACHABLE, LogSign.PEER_LOST)


def _network(case: Case) -> Iterator[DoctorFinding]:
    interface = "export NCCL_SOCKET_IFNAME=NAME GLOO_SOCKET_IFNAME=NAME"
    if signs := case.seen(LogSign.NO_INTERFACE):
        name = next((sign.values["name"] for sign in signs if "name" in sign.values), "")
        what = f"the network interface {name} does not exist on the node" if name else "no network interface was found"
        fix = f"srun ip -brief address  # lists the interfaces of the nodes; then {interface}, or unset both"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
    elif signs := case.seen(LogSign.PEER_UNREACHABLE):
        what = "a rank could not connect to another rank: a wrong network interface, a firewall, or a rank that ended"
        fix = (
            f"choose an interface that all nodes share: {interface}; `dalsegno bench pairs --nodes N` tests the"
            " network between the nodes"
        )
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
    elif signs := case.seen(LogSign.PEER_LOST):
        if any(sign.sign not in _NETWORK_SIGNS for sign in case.signs):
            return  # no finding here: the log shows why the other rank ended
        what = "a rank lost the connection to another rank, which usually ended first"
        fix = "give the log of that rank to `dalsegno doctor`, and check its node: `dalsegno why NODE`"
        yield DoctorFinding(Severity.WARNING, what, fix, evidence_of(signs))


def _slow_rank(case: Case) -> Iterator[DoctorFinding]:
    times = case.times
    slow = {rank: ratio for rank, ratio in times.slow.items() if ratio >= SLOW} if times else {}
    if not times or not slow:
        return
    rank, ratio = max(slow.items(), key=lambda item: item[1])
    node = times.places.get(int(rank), "") if rank.isdecimal() and len(rank) < 10 else ""
    on = f" on {node}" if node else ""
    what = f"rank {rank}{on} takes {ratio:.1f} times as long for a step as the median of all ranks, which wait for it"
    fix = (
        f"dalsegno why {shlex.quote(node)}"
        if node
        else "give all ranks the same amount of data, and compare their nodes"
    )
    seen = tuple(Evidence(f"rank {each}", f"{share:.2f} x the median") for each, share in sorted(slow.items())[:3])
    yield DoctorFinding(Severity.WARNING, what, fix, seen)


def _slow_loader(case: Case) -> Iterator[DoctorFinding]:
    times = case.times
    if times and times.step_s and times.data_s / times.step_s >= DATA_SHARE:
        share = 100 * times.data_s / times.step_s
        what = (
            f"training waits for data {share:.0f} % of the time ({times.data_s:.3f} s of {times.step_s:.3f} s per step)"
        )
        fix = "DataLoader(..., num_workers=4, persistent_workers=True, pin_memory=True), with data on local scratch"
        yield DoctorFinding(Severity.WARNING, what, fix, (Evidence("data_s", f"{times.data_s:.3f} s"),))
    for sign in case.seen(LogSign.LOADER_WORKERS)[:1]:
        workers, cores = sign.values.get("workers", "?"), sign.values.get("cores", "?")
        what = f"the DataLoader starts {workers} processes, but the job has {cores} cores, so that they slow each other"
        fix = f"DataLoader(..., num_workers={cores}), or request more: #SBATCH --cpus-per-task={workers}"
        yield DoctorFinding(Severity.WARNING, what, fix, evidence_of([sign]))


def _snapshot(case: Case) -> Iterator[DoctorFinding]:
    for sign in case.seen(LogSign.WORLD_SIZE)[:1]:
        old, new = sign.values.get("old", "?"), sign.values.get("new", "?")
        what = f"the snapshot was written by {old} ranks, and the job has {new}"
        fix = f"run with {old} ranks, or convert the snapshot; `dalsegno.train.Checkpointer` loads on any number"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of([sign]))
    for found in case.snapshots:
        if not case.world_size or found.world_size == case.world_size:
            continue
        what = f"{found.path} was written by {found.world_size} ranks, and the job has {case.world_size}"
        seen = (Evidence(found.path, f"{found.format}, {found.world_size} ranks"),)
        if found.needs_same_size:
            fix = f"run with {found.world_size} ranks, or convert it first"
            yield DoctorFinding(Severity.ERROR, f"{what}; {found.format} loads on the same number only", fix, seen)
        else:
            fix = f"run with {found.world_size} ranks, unless the order of the data may change"
            yield DoctorFinding(
                Severity.WARNING,
                f"{what}: the data is divided differently, and new ranks have no state of their own",
                fix,
                seen,
            )


def _left_snapshot(case: Case) -> Iterator[DoctorFinding]:
    if case.left_snapshot and not case.started:
        what = f"{case.left_snapshot} exists, and the script continues from it instead of starting from the beginning"
        yield DoctorFinding(
            Severity.NOTE,
            what,
            f"rm {shlex.quote(case.left_snapshot)}  # to start from the beginning",
            (Evidence(case.left_snapshot),),
        )


SYMPTOMS = (
    Symptom("out-of-memory", "Did a GPU or a node run out of memory?", _memory),
    Symptom("collective-timeout", "Did a rank fail to arrive in a collective?", _collective_timeout),
    Symptom("network-error", "Can the ranks reach each other?", _network),
    Symptom("slow-rank", "Is a rank much slower than the others?", _slow_rank),
    Symptom("slow-dataloader", "Does training wait for data?", _slow_loader),
    Symptom("snapshot-world-size", "Was the snapshot written by the same number of ranks?", _snapshot),
    Symptom("left-snapshot", "Does the script continue from an old snapshot?", _left_snapshot),
)

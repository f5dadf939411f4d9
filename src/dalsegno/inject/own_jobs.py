"""Inject faults into a user's own jobs on a Slurm cluster that Dal Segno did not create.

`srun --overlap` starts the program `break-worker` as one more step of the user's job.
"""

from __future__ import annotations

import json
import os
import pwd
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dalsegno.errors import NotThere, TargetError, UsageError
from dalsegno.inject.faults import SAFE, FaultOptions, InjectableFault, InjectedFault
from dalsegno.inject.worker_program import CLEAR, LOOK, PROGRAM, WantedWorker
from dalsegno.programs import launcher
from dalsegno.runs.comment import OURS
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.names import job_id, node_list
from dalsegno.system.children import Child, start

ANSWER_S = 60.0  # time limit for an answer; a job step starts in 0.1 s, or in a few seconds on a busy cluster

Message = dict[str, Any]
Enter = Callable[[str, str, WantedWorker], Message]  # job, node, request -> answer


class OwnJobs:
    """Implements `CanInject` for one user of a Slurm cluster. `enter` sends a request to a node of a job."""

    def __init__(self, slurm: SlurmClient, enter: Enter) -> None:
        self._slurm, self._enter = slurm, enter

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> Mapping[str, Any]:
        check_safe(fault, options)
        jobs = self._jobs(node, options.run)
        wanted = WantedWorker("", fault.name, options.run, options.rank, _gpu(fault, options), options.for_s)
        refusals = []
        for job in jobs:
            answer = self._enter(job, node, WantedWorker(**{**asdict(wanted), "job": job}))
            if "error" not in answer:
                return answer
            refusals.append(answer)
        raise NotThere(str(refusals[0]["error"]), hint=str(refusals[0].get("hint", "")))

    def injected(self) -> Sequence[InjectedFault]:
        """Return the faults on the nodes of the user's runs."""
        found = [(str(job.id), node) for job in self._own() if job.comment.startswith(OURS) for node in job.nodes]
        return [found_fault for job, node in found for found_fault in self._ask(job, node, LOOK)]

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        return [found for job in self._jobs(node, None) for found in self._ask(job, node, CLEAR, fault)]

    def _ask(self, job: str, node: str, what: str, fault: str | None = None) -> list[InjectedFault]:
        answer = self._enter(job, node, WantedWorker(job, what, fault=fault))
        return [InjectedFault(str(found), node, time.time()) for found in answer.get("found", ())]

    def _own(self) -> list[JobInfo]:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return [job for job in self._slurm.jobs() if job.user == user and job.state is JobState.RUNNING]

    def _jobs(self, node: str, run: str | None) -> list[str]:
        """Return the ids of the user's running jobs on a node; with `run`, only those of that run. Raise NotThere if
        there are none."""
        name = self._slurm.node(node).name
        jobs = [str(job.id) for job in self._own() if name in job.nodes and run in (None, job.name)]
        if not jobs:
            which = f"run {run} has no job" if run else "no job of yours runs"
            raise NotThere(f"{which} on {node}", hint="`squeue --me` lists your jobs and their nodes")
        return jobs


def check_safe(fault: InjectableFault, options: FaultOptions) -> None:
    """Raise an error if the fault would affect other users, or if an option has no meaning here."""
    if not fault.safe:
        raise UsageError(
            f"`{fault.name}` is not allowed on real nodes: it would affect more than your own run",
            hint=f"allowed: {SAFE}; for all faults, create a test cluster with `target: local`",
        )
    if options.until is not None:
        raise UsageError("`--until` has no effect on real nodes", hint="`--for TIME` or `--clear` ends it")


def _gpu(fault: InjectableFault, options: FaultOptions) -> int | None:
    """Return the index of the GPU, which is also the index of its worker on the node; None if the fault has no GPU."""
    return (options.gpu or 0) if "gpu" in fault.options else None


def step_argv(job: str, node: str, wanted: WantedWorker) -> list[str]:
    """Return the command that runs `break-worker` as one more step of a running job."""
    return [
        "srun", f"--jobid={job_id(job)}", "--overlap", f"--nodelist={node_list(node)}", "--nodes=1", "--ntasks=1",
        "--mem=0", "--gres=none", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--input=none", "--quiet",
        *launcher(), PROGRAM, json.dumps(asdict(wanted)),
    ]  # fmt: skip


def enter_with_srun(env: Mapping[str, str]) -> Enter:
    """Return a function that runs requests in jobs with srun. srun gets `env` without the variables of an enclosing
    Slurm job."""
    bare = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}

    def enter(job: str, node: str, wanted: WantedWorker) -> Message:
        """Start srun and return the first answer. srun keeps running as long as `break-worker` runs on the node."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            child = start(step_argv(job, node, wanted), bare, output=output)
            if (answer := _wait_for_answer(child, output)) is None:
                child.kill()
                printed = output.read_text(errors="replace").strip().splitlines()
                raise TargetError(
                    f"srun could not reach {node} in job {job}: {printed[-1] if printed else 'no answer'}",
                    hint=f"try `srun --jobid={job} --overlap -w {node} true`",
                )
            child.close()
            return answer

    return enter


def _wait_for_answer(child: Child, output: Path) -> Message | None:
    until = time.monotonic() + ANSWER_S
    while child.alive() and time.monotonic() < until:
        if (answer := _first_answer(output)) is not None:
            return answer
        time.sleep(0.02)
    return _first_answer(output)  # the answer may have come just before srun ended


def _first_answer(output: Path) -> Message | None:
    """Return the answer in the first complete line that is one; None if there is none. Other lines, such as messages
    from Slurm, are skipped."""
    for line in output.read_text(errors="replace").splitlines(keepends=True) if output.exists() else ():
        if line.startswith("{") and line.endswith("\n"):
            try:
                found: Message = json.loads(line)
            except ValueError:
                continue
            return found
    return None

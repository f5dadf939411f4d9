"""Breaking on purpose what is one's own on nodes that are not: workers of one's runs, through the runs' own jobs.

Nothing is done as another user, and nothing outside of a job: `srun --overlap` into it is the way to a node.
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
from dalsegno.programs import launcher
from dalsegno.runs.comment import OURS
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.names import job_id, node_list
from dalsegno.system.children import Child, start
from dalsegno.targets.base import Wound
from dalsegno.targets.faults import SAFE, FaultOptions, InjectedFault
from dalsegno.targets.real.on_node import CLEAR, LOOK, PROGRAM, WantedWorker

ANSWER_S = 60.0  # a step starts in a tenth of a second, on a busy cluster in some

Message = dict[str, Any]
Enter = Callable[[str, str, WantedWorker], Message]  # job, node, what to do there -> what was said there


class RealNodes:
    """`CanBreak` for one user of a Slurm. `enter` has something done inside a job, on one of its nodes."""

    def __init__(self, slurm: SlurmClient, enter: Enter) -> None:
        self._slurm, self._enter = slurm, enter

    def inject(self, fault: InjectedFault, node: str, options: FaultOptions) -> Mapping[str, Any]:
        check_safe(fault, options)
        jobs = self._jobs(node, options.run)
        wish = WantedWorker("", fault.name, options.run, options.rank, _gpu(fault, options), options.for_s)
        refusals = []
        for job in jobs:
            answer = self._enter(job, node, WantedWorker(**{**asdict(wish), "job": job}))
            if "error" not in answer:
                return answer
            refusals.append(answer)
        raise NotThere(str(refusals[0]["error"]), hint=str(refusals[0].get("hint", "")))

    def injected(self) -> Sequence[Wound]:
        """On the nodes of one's runs."""
        found = [(str(job.id), node) for job in self._own() if job.comment.startswith(OURS) for node in job.nodes]
        return [wound for job, node in found for wound in self._ask(job, node, LOOK)]

    def clear(self, node: str, fault: str | None = None) -> Sequence[Wound]:
        what = CLEAR if fault is None else LOOK
        found = [wound for job in self._jobs(node, None) for wound in self._ask(job, node, what)]
        if fault is not None and any(wound.fault == fault for wound in found):
            return self.clear(node)  # a worker is either still or slow: there is nothing else to spare
        return found if fault is None else []

    def _ask(self, job: str, node: str, what: str) -> list[Wound]:
        answer = self._enter(job, node, WantedWorker(job, what))
        return [Wound(str(fault), node, time.time()) for fault in answer.get("found", ())]

    def _own(self) -> list[JobInfo]:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return [job for job in self._slurm.jobs() if job.user == user and job.state is JobState.RUNNING]

    def _jobs(self, node: str, run: str | None) -> list[str]:
        """One's own jobs on a node."""
        name = self._slurm.node(node).name
        jobs = [str(job.id) for job in self._own() if name in job.nodes and run in (None, job.name)]
        if not jobs:
            which = f"run {run} has no job" if run else "no job of yours runs"
            raise NotThere(f"{which} on {node}", hint="`dalsegno runs` shows yours, and `squeue --me` on which nodes")
        return jobs


def check_safe(fault: InjectedFault, options: FaultOptions) -> None:
    """What would hurt others is refused, and an option that means nothing here too."""
    if not fault.safe:
        raise UsageError(
            f"`{fault.name}` is not for real nodes: it would hurt more than your own run",
            hint=f"safe there: {SAFE}; for the others `target: local` makes a cluster that may be broken",
        )
    if options.until is not None:
        raise UsageError("`--until` says nothing of real nodes", hint="`--for TIME` or `--clear` ends it")


def _gpu(fault: InjectedFault, options: FaultOptions) -> int | None:
    """A slow GPU is that of a worker: the one in its place on the node."""
    return (options.gpu or 0) if "gpu" in fault.heeds else None


def step_argv(job: str, node: str, wish: WantedWorker) -> list[str]:
    """One task more in a running job, beside all that it has."""
    return [
        "srun", f"--jobid={job_id(job)}", "--overlap", f"--nodelist={node_list(node)}", "--nodes=1", "--ntasks=1",
        "--mem=0", "--gres=none", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--input=none", "--quiet",
        *launcher(), PROGRAM, json.dumps(asdict(wish)),
    ]  # fmt: skip


def enter_with_srun(env: Mapping[str, str]) -> Enter:
    """`env` is that of Slurm's commands; what it says of a job that we are in ourselves is left out."""
    bare = {name: value for name, value in env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}

    def enter(job: str, node: str, wish: WantedWorker) -> Message:
        """What lasts goes on after us: srun is a process of its own, and is not waited for."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "said"
            child = start(step_argv(job, node, wish), bare, output=output)
            if (answer := _wait_for_answer(child, output)) is None:
                child.kill()
                said = output.read_text(errors="replace").strip().splitlines()
                raise TargetError(
                    f"srun could not reach {node} in job {job}: {said[-1] if said else 'no answer'}",
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
    return _first_answer(output)  # which may have been said just before the end


def _first_answer(output: Path) -> Message | None:
    """The first whole line that is an answer; what Slurm says beside is passed over."""
    for line in output.read_text(errors="replace").splitlines(keepends=True) if output.exists() else ():
        if line.startswith("{") and line.endswith("\n"):
            try:
                found: Message = json.loads(line)
            except ValueError:
                continue
            return found
    return None

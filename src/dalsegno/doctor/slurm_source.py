"""Ask Slurm for the doctor: the nodes of a partition, a job, and what a short job step sees on the nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from dalsegno.doctor.batch import SubmitLine, read_submit_line
from dalsegno.doctor.case import CaseCluster, NodeProbe
from dalsegno.errors import CommandFailed, DalsegnoError, NotThere
from dalsegno.runs.submit.container import OPTIONS_ARGV, takes_containers
from dalsegno.runs.submit.plan import partitions_seen
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo
from dalsegno.slurm.parse.outputs import with_output_files
from dalsegno.system.processes import Runner

PROBE_S = 60
MAX_NODES = 32
_MARK = "dalsegno-probe"
# The arguments are $1 script, $2 python, $3 port in hexadecimal. The program prints `-` for an answer that is unknown,
# or whose argument is empty.
PROBE = f"""
s=-; p=-; t=-; u=-; c=-
if [ -n "$1" ]; then s=0; [ -e "$1" ] && s=; [ -r "$1" ] && s=r; [ -x "$1" ] && s="${{s}}x"; s="${{s:-n}}"; fi
if [ -n "$2" ]; then
  p=0; [ -x "$2" ] && p=1; t=0
  for d in "${{2%/bin/*}}"/lib*/python3*/*-packages/torch /usr/lib/python3*/dist-packages/torch; do
    [ -d "$d" ] && t=1
  done
fi
if [ -n "$3" ]; then u=0; cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep -q ":$3 [0-9A-F]*:0000 0A" && u=1; fi
if h=$(srun --help 2>/dev/null); then c=0; case "$h" in *--container-image*) c=1;; esac; fi
g=$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)
echo "{_MARK} $SLURMD_NODENAME script=$s python=$p torch=$t port=$u containers=$c gpus=$g"
"""
_ANSWER = re.compile(
    rf"^{_MARK} (?P<node>\S+) script=(?P<script>\S+) python=(?P<python>\S) torch=(?P<torch>\S) port=(?P<port>\S)"
    r" containers=(?P<containers>\S) gpus=(?P<gpus>\d+)$",
    re.MULTILINE,
)


class SlurmAccess(Protocol):
    """The doctor's access to Slurm: a client, and the environment of its commands."""

    @property
    def client(self) -> SlurmClient: ...

    @property
    def env(self) -> Mapping[str, str]: ...


def look_at_cluster(slurm: SlurmAccess, runner: Runner, partition: str, same_files: bool) -> CaseCluster | None:
    """Return the nodes of a partition; without a name, those of the default partition. Return None if there is no such
    partition."""
    known = partitions_seen(slurm.client.partitions(), slurm.client.nodes())
    if partition:
        found = [each for each in known if each.name in partition.split(",")]
    else:
        found = [each for each in known if each.default] or (list(known) if len(known) == 1 else [])
    if not found:
        return None
    help_text = runner.run(OPTIONS_ARGV, env=slurm.env, timeout_s=30).stdout
    one = found[0]
    return CaseCluster(f"partition {one.name}", one.nodes, one.gpus, takes_containers(help_text), same_files)


def find_job(slurm: SlurmAccess, label: str, runner: Runner) -> tuple[JobInfo, SubmitLine | None]:
    """Return a job and how it was submitted. If slurmctld no longer knows the job, it is read from the accounting
    database."""
    try:
        job = slurm.client.job(label)
        return job, _submission(slurm, job, runner)[0] or (SubmitLine(script=job.command) if job.batch else None)
    except NotThere:
        pass
    try:
        found = slurm.client.history(jobs=[label])
    except CommandFailed:
        found = []
    if not found:
        raise NotThere(
            f"Slurm has no record of job {label} any more",
            hint=f"give its log file instead, such as `dalsegno doctor slurm-{label}.out`",
        )
    submitted, line, folder = _submission(slurm, found[-1], runner)
    job = replace(found[-1], work_dir=folder, batch=submitted is not None or not line)
    output = submitted.options if submitted else {}
    job = replace(job, stdout=output.get("output", ""), stderr=output.get("error", ""))
    return (with_output_files(job) if folder else job), submitted


def _submission(slurm: SlurmAccess, job: JobInfo, runner: Runner) -> tuple[SubmitLine | None, str, str]:
    """Return the parsed sbatch command line, the command line itself, and the working folder. A value that the database
    does not have is None or ""."""
    argv = ("sacct", "-nXP", f"--jobs={job.id}", "--format=WorkDir,SubmitLine")
    try:
        found = runner.run(argv, env=slurm.env, timeout_s=10).stdout.strip().splitlines()[:1]
    except DalsegnoError:
        found = []
    folder, _, line = found[0].partition("|") if found else ("", "", "")
    return read_submit_line(line), line, folder if folder.startswith("/") else ""


def probe_nodes(
    slurm: SlurmAccess, runner: Runner, script: str, python: str, port: int, partition: str, nodes: int
) -> list[NodeProbe]:
    """Run a short job step as this user on each node, or on MAX_NODES of them, and return what the step saw there."""
    count = max(1, min(nodes, MAX_NODES))
    argv = [
        "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        f"--immediate={PROBE_S // 2}",
        "--time=1", "--mem=64M", "--job-name=dalsegno-doctor", "--chdir=/",
        *([f"--partition={partition}"] if partition else []),
        "sh", "-c", PROBE, "sh", script and os.path.abspath(script), python, f"{port:04X}" if port else "",
    ]  # fmt: skip
    done = runner.run(argv, env=slurm.env, timeout_s=PROBE_S)
    return parse_probes(done.checked(hint="run it without `--probe`, or when nodes are free").stdout)


def parse_probes(text: str) -> list[NodeProbe]:
    """Return the answers of the probe, in the order of the nodes' names."""
    found = [_probe(answer) for answer in _ANSWER.finditer(text)]
    return sorted(found, key=lambda probe: probe.node)


def _probe(answer: re.Match[str]) -> NodeProbe:
    def flag(name: str) -> bool | None:
        return None if answer[name] == "-" else answer[name] == "1"

    script = {"-": None, "0": "", "n": "-"}.get(answer["script"], answer["script"])
    return NodeProbe(
        answer["node"], script, flag("python"), flag("torch"), flag("port"), flag("containers"), int(answer["gpus"])
    )

"""`dalsegno doctor`: find what is wrong with a job, before it starts or after it failed, and print the fix."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import meaning_of
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError
from dalsegno.printable import one_line

if TYPE_CHECKING:
    from dalsegno.doctor import Case, DoctorFinding, Symptom
    from dalsegno.doctor.gather import DoctorOrder

_JOB = re.compile(r"\d+([_+]\d+)?")


_DASHES = "dalsegno.doctor.dashes"


class DoctorCommand(click.Command):
    """The `doctor` command, which records whether its arguments contain `--`: the arguments of a script must follow a
    `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_DASHES] = "--" in args
        return super().parse_args(ctx, args)


@click.command(cls=DoctorCommand)
@click.argument("subject", required=False, metavar="[SCRIPT|JOB|RUN|LOG]")
@click.argument("words", nargs=-1, metavar="[-- ARGS...]")
@click.option("--python", metavar="PATH", help="Python that the job uses. Default: the active environment.")
@click.option("--partition", "-p", metavar="NAME", help="Partition that the job uses. Default: the cluster's default.")
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="Number of processes that the job starts.")
@click.option("--checkpoint", metavar="FOLDER", help="Checkpoint that the job loads.")
@click.option("--dumps", metavar="FOLDER", help="Folder with dumps of PyTorch's flight recorder, one for each rank.")
@click.option("--probe", is_flag=True, help="Also check the nodes, with a job step of about a second.")
@click.option("--list", "list_", is_flag=True, help="List the known symptoms, and exit.")
@cluster_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    subject: str | None,
    words: tuple[str, ...],
    python: str | None,
    partition: str | None,
    ranks: int | None,
    checkpoint: str | None,
    dumps: str | None,
    probe: bool,
    list_: bool,
    name: str | None,
    json_: bool,
) -> None:
    """Find what is wrong with a job, before it starts or after it failed, and print the fix.

    SCRIPT is a Python or batch script, which is read and never run. ARGS are what follows the script on your command
    line. JOB is a Slurm job, RUN a run of `dalsegno run`, and LOG the output of any job. Without an argument, doctor
    checks this environment and the cluster. The exit code is 1 if it finds an error or a warning.

    \b
    dalsegno doctor train.py
    dalsegno doctor job.sbatch -- --nodes=2
    dalsegno doctor 1234
    dalsegno doctor slurm-1234.out
    """
    from dalsegno.doctor import Severity, examine

    if list_:
        _print_symptoms(json_)
        return
    if words and not ctx.meta[_DASHES]:
        raise UsageError(
            f"one thing is examined at a time, and `{words[0]}` is a second one",
            hint=f"examine it by itself; arguments of a script follow `--`: `dalsegno doctor {subject} -- {words[0]}`",
        )
    _check_folders({"--checkpoint": checkpoint, "--dumps": dumps})
    if probe:
        out.talk("checking the nodes with a short job step")
    case = _gather(
        subject,
        _order(name, words, python or "", partition or "", dumps or "", checkpoint or "", ranks or 0, probe),
    )
    found = examine(case)
    if json_:
        out.as_json(_as_json(case, found))
    else:
        _print(case, found)
    ctx.exit(1 if any(finding.severity is not Severity.NOTE for _, finding in found) else 0)


def _print_symptoms(json_: bool) -> None:
    from dalsegno.doctor import SYMPTOMS

    if json_:
        out.as_json([{"name": each.name, "question": each.question} for each in SYMPTOMS])
    else:
        out.table(["SYMPTOM", "QUESTION"], [[each.name, each.question] for each in SYMPTOMS])


def _check_folders(folders: Mapping[str, str | None]) -> None:
    for option, folder in folders.items():
        if folder is not None and not os.path.isdir(folder):
            raise UsageError(f"there is no folder `{folder}`", where=option, hint="check the path")


def _order(
    name: str | None, words: tuple[str, ...], python: str, partition: str, dumps: str, checkpoint: str, ranks: int,
    probe: bool,
) -> DoctorOrder:  # fmt: skip
    from dalsegno.cluster import find_slurm, has_virtual_nodes, silence
    from dalsegno.doctor.gather import DoctorOrder
    from dalsegno.system.processes import LocalRunner

    slurm, why, same_files = None, "", False
    try:
        slurm = find_slurm(name)
        silent = silence(slurm)
        if silent is not None:
            raise silent
        same_files = has_virtual_nodes(slurm)
    except DalsegnoError as error:
        if name or probe:
            raise
        slurm, why = None, error.what
    env = dict(slurm.env if slurm else os.environ)
    return DoctorOrder(
        slurm, LocalRunner(), env, words, python, partition, dumps, checkpoint, ranks, probe, same_files, why
    )


def _gather(subject: str | None, order: DoctorOrder) -> Case:
    from dalsegno.cluster import runs_home
    from dalsegno.doctor.gather import gather_file, gather_job, gather_machine, gather_run
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.submit.prepare import find_run, list_runs

    if subject is None:
        return gather_machine(order)
    runs = {run.run: run for run in list_runs(runs_home())}
    if subject in runs:
        return gather_run(runs[subject], order)
    path = Path(subject)
    if subject and path.is_dir() and (path / "status.json").exists():
        return gather_run(RunFolder(path.absolute()), order)
    if subject and path.is_dir():
        raise UsageError(f"`{subject}` is a folder", hint="name a script, a log file, a job or a run")
    if subject and path.exists():
        return gather_file(path, order)
    if _JOB.fullmatch(subject):
        try:
            return gather_job(subject, order)
        except CommandFailed as fault:
            meant = meaning_of(fault)
            raise DalsegnoError(
                f"job {subject} cannot be examined: {meant.what}",
                hint=f"{meant.hint}; or give the job's log file instead" if meant.hint else "give the job's log file",
            ) from None
    if subject and any(run.startswith(subject) for run in runs):
        return gather_run(find_run(runs_home(), subject), order)
    raise UsageError(
        f"there is no file, job or run `{subject}`", hint="`dalsegno runs` lists the runs, `squeue` the jobs"
    )


def _print(case: Case, found: list[tuple[Symptom, DoctorFinding]]) -> None:
    for symptom, finding in found:
        word = finding.severity.value
        # Line breaks in files of other users must not be able to imitate another finding.
        out.data(one_line(f"{word}: {finding.what}  [{symptom.name}]"))
        for each in finding.evidence:
            out.data(one_line(f"  seen: {each.where}" + (f": {each.text}" if each.text else "")))
        out.data(one_line(f"  fix:  {finding.fix}"))
    if found and case.of_another_user:
        out.talk("the files are another user's, and so are the programs in the fixes: run them as that user only")
    for missing in case.unchecked:
        out.talk(f"not checked: {missing}")
    if case.empty_log:
        out.talk(f"the log of {case.subject} is empty, so its messages could not be examined")
        out.advise("the job may not have started: check its state with `squeue`, and the path of its output")
    elif not found and case.job and case.job.state.ended and not case.ends:
        out.talk(f"{case.subject} ended as {case.job.state.value}; its output was not examined")
    elif not found:
        out.talk(f"nothing found wrong with {case.subject}")


def _as_json(case: Case, found: list[tuple[Symptom, DoctorFinding]]) -> dict[str, object]:
    return {
        "subject": case.subject,
        "findings": [
            {
                "symptom": symptom.name,
                "severity": finding.severity.value,
                "what": finding.what,
                "fix": finding.fix,
                "evidence": [{"where": each.where, "text": each.text} for each in finding.evidence],
            }
            for symptom, finding in found
        ],
        "unchecked": list(case.unchecked),
        "empty_log": case.empty_log,
    }

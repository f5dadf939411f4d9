"""The program that Dal Segno's Slurm plugin starts in place of srun: `PROGRAM SRUN ARGV0 ARGV1 …`.

Every step waits for its imports. What asks Slurm about a step takes 0.1 s to import, and is imported while srun runs.
"""

from __future__ import annotations

import os

from dalsegno.runs.auto_resume.srun_step import NOTES, read_notes, report
from dalsegno.system.process_wrapper import ProcessWrapper, end_as


def main(arguments: list[str]) -> int:
    srun, *argv = arguments
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restarts:
        report(f"job {os.environ.get('SLURM_JOB_ID')} was restarted on {os.environ.get('SLURM_JOB_NODELIST')}")
    end_as(_supervise(ProcessWrapper(), srun, argv, restarts))


def _supervise(here: ProcessWrapper, srun: str, argv: list[str], restarts: int) -> int:
    command, env, times = argv, dict(os.environ), 0
    while True:
        ended = here.run(srun, command, env, NOTES, lambda notes: _is_over(srun, notes))
        step = None if ended.code == 0 or ended.asked else read_notes(ended.notes)
        if step is None:
            return ended.code
        try:
            from dalsegno.runs.auto_resume.decide import arguments, environment
            from dalsegno.runs.auto_resume.restart import decide_restart

            again = decide_restart(here, srun, step, times, restarts, ended.hung_up)
        except Exception as error:  # on any error, the script gets srun's exit code, as it would without auto-resume
            report(f"could not find out whether a node has failed: {error}")
            return ended.code
        if again is None:
            return ended.code
        command, env, times = arguments(argv, again), environment(env, again), times + 1


def _is_over(srun: str, notes: str) -> bool:
    try:
        from dalsegno.runs.auto_resume.restart import is_over

        return is_over(srun, notes)
    except Exception:  # on any error, such as a silent slurmctld, the step must continue
        return False

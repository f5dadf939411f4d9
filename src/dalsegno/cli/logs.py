"""`dalsegno logs`: print the output of a run's ranks in all generations, or the log of a daemon."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.follow import Screen, pause_s, ranks_of, watch_of
from dalsegno.cli.out import cluster_option
from dalsegno.cli.watch import is_over
from dalsegno.errors import UsageError

if TYPE_CHECKING:
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.logs import RunLogs, Wanted
    from dalsegno.runs.submit.plan import RunPlan


@click.command()
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Keep printing new output until the run ends. Ctrl-C stops the printing, not the run.",
)
@click.option("--rank", "-r", type=click.IntRange(0), metavar="R", help="Only this rank.")
@click.option("--node", "-w", metavar="NODE", help="Only ranks that ran on this node.")
@click.option("--generation", "-g", type=click.IntRange(1), metavar="G", help="Only this generation.")
@click.option(
    "--daemon",
    "-d",
    metavar="NAME",
    help="The log of a daemon: slurmctld, slurmd, controller, node-agent …, or coordinator and run-agent of RUN.",
)
@click.option(
    "--lines", "-n", "last", type=click.IntRange(0), metavar="N", help="With --daemon: the last N lines of each log."
)
@cluster_option
@click.argument("run", required=False, default="")
def command(
    name: str | None,
    run: str,
    follow: bool,
    rank: int | None,
    node: str | None,
    generation: int | None,
    daemon: str | None,
    last: int | None,
) -> None:
    """Print the output of RUN (a run id, or the start of one). Default: the newest run.

    Output is sorted by generation and rank, with the rank in front of each line. With -f it is printed as it arrives.

    \b
    dalsegno logs -f
    dalsegno logs train-k3f9x --rank 0 --generation 2
    dalsegno logs --daemon slurmd --node gpu-2 -n 50
    """
    if daemon is not None:
        _print_daemon(daemon, name, run, node, (("--rank", rank), ("--generation", generation)), last, follow)
        return
    if last is not None or name is not None:
        raise UsageError(f"{'--lines' if last is not None else '--cluster'} needs --daemon", hint="add --daemon NAME")
    from dalsegno.cluster import runs_home
    from dalsegno.runs.logs import RunLogs
    from dalsegno.runs.submit.prepare import find_run, read_plan

    found = find_run(runs_home(), run)
    plan = read_plan(found)
    _check_there(found, plan, rank, generation, follow)
    logs = RunLogs(found, _wanted(found, rank, node, generation))
    foreign = found.root.stat().st_uid != os.geteuid()
    screen = Screen(ranks_of(plan), quiet=True, bare=rank is not None, foreign=foreign)
    if follow:
        _follow(found, plan, logs, screen)
    else:
        lines = logs.lines(time.time(), final=True)
        first = next(lines, None)
        if first is not None:
            screen.lines(itertools.chain([first], lines))
        else:
            out.talk(f"no output; `dalsegno why {found.run}` shows what happened")


def _print_daemon(
    daemon: str,
    cluster: str | None,
    run: str,
    node: str | None,
    rank_options: Sequence[tuple[str, object]],
    last: int | None,
    follow: bool,
) -> None:
    from dalsegno.cli.daemon_logs import RUN_DAEMONS, print_logs, refuse_rank_options, run_logs, select_logs
    from dalsegno.cluster import find_place, open_cluster, runs_home
    from dalsegno.runs.submit.prepare import find_run

    refuse_rank_options([*rank_options, *((("--node", node),) if daemon in RUN_DAEMONS else ())])
    if daemon in RUN_DAEMONS:
        logs = run_logs(find_run(runs_home(), run))
    elif run:
        raise UsageError(f"{daemon} is a daemon of the cluster, not of run {run}", hint="leave the run out")
    else:
        logs = list(open_cluster(find_place(cluster)).daemon_logs())
    print_logs(select_logs(logs, daemon, node), last, follow)


def _check_there(run: RunFolder, plan: RunPlan, rank: int | None, generation: int | None, follow: bool) -> None:
    """Refuse a rank or generation that the run does not have: no output would look like a silent run.

    With --follow, a generation that may still be formed is accepted.
    """
    from dalsegno.errors import NotThere
    from dalsegno.runs.status import read_status

    ranks = ranks_of(plan)
    if rank is not None and rank >= ranks and not _has_output(run, rank):
        has = f"its ranks are 0 to {ranks - 1}" if ranks > 1 else "it has only rank 0"
        raise NotThere(f"run {run.run} has no rank {rank}", hint=has)
    status = read_status(run.status)
    latest = status.generation if status else 0
    waits = follow and not (status and status.over)
    if generation and generation > latest and not waits and not run.generation(generation).exists():
        so_far = f"the latest is {latest}" if latest else "none has been formed yet"
        raise NotThere(f"run {run.run} has no generation {generation}", hint=f"{so_far}; `dalsegno runs` shows it")


def _has_output(run: RunFolder, rank: int) -> bool:
    from dalsegno.runs.files import names_in

    return any(f"rank{rank}.log" in names_in(run, run.logs / name) for name in names_in(run, run.logs))


def _wanted(run: RunFolder, rank: int | None, node: str | None, generation: int | None) -> Wanted:
    from dalsegno.errors import NotThere
    from dalsegno.runs.logs import everything, on_node, ranks_on

    there = on_node(run, node) if node else everything
    if node and not any(ranks_on(run, node).values()):
        raise NotThere(f"run {run.run} had no rank on `{node}`", hint="`dalsegno runs --json` lists its nodes")
    return lambda g, r: rank in (None, r) and generation in (None, g) and there(g, r)


def _follow(run: RunFolder, plan: RunPlan, logs: RunLogs, screen: Screen) -> None:
    """Print new output until the run ends, as `tail -f` does. Ctrl-C does not affect the run."""
    from dalsegno.cluster import slurm_of
    from dalsegno.runs.submit.prepare import read_environment

    watch = watch_of(run, slurm_of(read_environment(run)), plan)
    while not is_over(status := watch.look(time.time())):
        screen.lines(logs.lines(time.time()))
        time.sleep(pause_s(logs))
    screen.lines(logs.lines(time.time(), final=True))
    out.talk(f"run {run.run} has ended: {status.message or f'exit code {status.exit_code}'}")

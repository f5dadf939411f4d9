"""`dalsegno logs`: print the output of a run's ranks in all generations, or the log of a daemon."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import cluster_option
from dalsegno.cli.training.follow import Screen, pause_s, ranks_of, watch_of
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.printable import one_line
from dalsegno.runs.status import is_over
from dalsegno.system.ownership import open_beneath

if TYPE_CHECKING:
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.logs import RunLogs, Wanted
    from dalsegno.runs.submit.plan import RunPlan
    from dalsegno.targets.base import DaemonLog

EVERY_S = 0.3
OLD_LOGS = 9  # maximum number of rotated parts of a log that are read
RUN_DAEMONS = ("coordinator", "run-agent")
_NONE = "`dalsegno status` shows the state of the cluster"


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
    help="Print the log of a daemon: slurmctld, slurmd, controller, node-agent …; of RUN: coordinator, run-agent.",
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


def _check_there(run: RunFolder, plan: RunPlan, rank: int | None, generation: int | None, follow: bool) -> None:
    """Raise an error for a rank or generation that the run does not have; empty output would look like a silent run.

    With --follow, a generation that may still be formed is accepted.
    """
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
    from dalsegno.runs.logs import everything, on_node, ranks_on

    there = on_node(run, node) if node else everything
    if node and not any(ranks_on(run, node).values()):
        raise NotThere(f"run {run.run} had no rank on `{node}`", hint="`dalsegno runs --json` lists its nodes")
    return lambda g, r: rank in (None, r) and generation in (None, g) and there(g, r)


def _follow(run: RunFolder, plan: RunPlan, logs: RunLogs, screen: Screen) -> None:
    """Print the output so far, then new output until the run ends. Ctrl-C does not affect the run."""
    from dalsegno.cluster import slurm_of
    from dalsegno.runs.submit.prepare import read_environment

    watch = watch_of(run, slurm_of(read_environment(run)), plan)
    while not is_over(status := watch.poll(time.time())):
        screen.lines(logs.lines(time.time()))
        time.sleep(pause_s(logs))
    screen.lines(logs.lines(time.time(), final=True))
    out.talk(f"run {run.run} has ended: {status.message or f'exit code {status.exit_code}'}")


def _print_daemon(
    daemon: str,
    cluster: str | None,
    run: str,
    node: str | None,
    rank_options: Sequence[tuple[str, object]],
    last: int | None,
    follow: bool,
) -> None:
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


def refuse_rank_options(given: Sequence[tuple[str, object]]) -> None:
    """Raise an error if an option is given that selects ranks or does not apply to this daemon."""
    wrong = [option for option, value in given if value is not None]
    if wrong:
        raise UsageError(f"{wrong[0]} does not apply to --daemon", hint="--node selects a host of a cluster's daemon")


def run_logs(run: RunFolder) -> list[DaemonLog]:
    """Return the logs of the daemons that belong to a run. All agents of a run share one log."""
    from dalsegno.targets.base import DaemonLog

    paths = (run.coordinator_log, run.agents_log)
    return [DaemonLog("", name, path) for name, path in zip(RUN_DAEMONS, paths, strict=True)]


def select_logs(logs: Sequence[DaemonLog], daemon: str, node: str | None) -> list[DaemonLog]:
    """Return the logs of a daemon on host `node`, or on all hosts. Raise NotThere if there are none."""
    found = [log for log in logs if log.name == daemon]
    if not found:
        names = ", ".join(dict.fromkeys(log.name for log in logs))
        raise NotThere(f"the cluster has no daemon `{daemon}`", hint=f"its daemons: {names}" if names else _NONE)
    here = [log for log in found if node in (None, log.host)]
    if not here:
        hosts = ", ".join(log.host for log in found[:8]) + (" …" if len(found) > 8 else "")
        raise NotThere(f"{daemon} does not run on `{node}`", hint=f"it runs on {hosts}")
    return here


def print_logs(logs: Sequence[DaemonLog], last: int | None, follow: bool) -> None:
    """Print logs one after the other and, with `follow`, new lines as they are written.

    With several logs, each line starts with the host.
    """
    width = max(len(log.host) for log in logs)
    readers = [(f"{log.host.ljust(width)}  " if len(logs) > 1 else "", LogReader(log.path)) for log in logs]
    printed = 0
    for prefix, reader in readers:
        lines = reader.all_lines(final=not follow)
        for line in lines if last is None else deque(lines, maxlen=last):
            printed += 1
            out.data(prefix + one_line(line))
    if not printed and not follow:
        out.talk(f"nothing was logged yet in {logs[0].path}")
    while follow:
        time.sleep(EVERY_S)
        for prefix, reader in readers:
            for line in reader.new():
                out.data(prefix + one_line(line))


class LogReader:
    """The reader of a log that grows, and that its writer empties or replaces to rotate it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file = 0  # inode of the file that was read last
        self._rest = b""

    def all_lines(self, *, final: bool) -> Iterator[str]:
        """Yield all lines, rotated parts first. With `final`, also yield a last line without a line break."""
        for number in range(OLD_LOGS, 0, -1):
            yield from LogReader(self._path.with_name(f"{self._path.name}.{number}")).new()
        yield from self.new()
        if final and self._rest:
            yield self._rest.decode(errors="replace")

    def new(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call."""
        try:
            handle = open_beneath(self._path.parent, self._path.name)
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise DalsegnoError(f"{self._path} cannot be read: permission denied", hint="use sudo") from error
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if about.st_ino != self._file or about.st_size < self._offset:
                self._file, self._offset, self._rest = about.st_ino, 0, b""
            file.seek(self._offset)
            for line in file:
                self._offset += len(line)
                self._rest += line
                if line.endswith(b"\n"):
                    yield self._rest.rstrip(b"\r\n").decode(errors="replace")
                    self._rest = b""

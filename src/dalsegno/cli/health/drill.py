"""`dalsegno drill`: train a small model, inject random faults, and report what each cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import stoppable
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.cli.health.drill_traces import Traces
    from dalsegno.drill.impacts import Drill

import sys
import time
from typing import TYPE_CHECKING

from dalsegno.runs.status import NodeRole, RunPhase, RunStatus

if TYPE_CHECKING:
    from dalsegno.cli.health.drill_stage import Training
    from dalsegno.drill.impacts import DrillMark, FaultImpact, TrainedStep


SAY_EVERY_S = 10.0
KEPT_REPORTS = 50  # maximum number of reports kept for each cluster
ELSEWHERE = "choose another file with `--report FILE`"


@click.command()
@click.option("--faults", type=click.IntRange(1, 1000), default=5, show_default=True, help="Number of faults.")
@click.option("--seed", type=int, help="Seed of the random faults. Default: a new one each time.")
@click.option(
    "--nodes", "-N", type=click.IntRange(1, 512), help="Nodes in training. Default: 4, or fewer if not available."
)
@click.option("--spares", type=click.IntRange(0, 64), help="Spare nodes. Default: 1 if available, else 0.")
@click.option("--report", type=click.Path(dir_okay=False), help="Report file. Default: drill-SEED.html.")
@click.option("--only", multiple=True, metavar="FAULT", help="Only this kind of fault; may be repeated.")
@click.option("--with-spares", is_flag=True, help="Inject a fault only while a spare is ready.")
@click.option("--exclusive", is_flag=True, help="Use whole nodes, so that no fault hits a job of somebody else.")
@click.option("--no-compare", is_flag=True, help="Skip the undisturbed run and the comparison of weights.")
@cluster_option
@json_option
def command(
    faults: int,
    seed: int | None,
    nodes: int | None,
    spares: int | None,
    report: str | None,
    only: tuple[str, ...],
    with_spares: bool,
    exclusive: bool,
    no_compare: bool,
    name: str | None,
    json_: bool,
) -> None:
    """Train a small model on the cluster, inject faults, and report what each one cost.

    Exits 0 if the run survived, nothing is left behind, and its weights equal those of an undisturbed run bit for bit.
    Then the runs are removed and only the report is kept. Otherwise the runs are kept.

    \b
    dalsegno drill --faults 10 --seed 7
    dalsegno drill --only power-off --only xid
    """
    import random

    from dalsegno.cli.health.drill_stage import DrillCluster
    from dalsegno.drill.report import as_json, render_page
    from dalsegno.drill.schedule import draw, select_kinds
    from dalsegno.targets.folder import ClusterFolder

    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    path = Path(report or f"drill-{seed}.html").absolute()
    kinds = select_kinds(only)
    check_page(path)
    stage = DrillCluster.open(name, nodes, spares, with_spares, exclusive)
    view = DrillView(SAY_EVERY_S)
    with stoppable(), view:
        found = stage.perform(draw(faults, seed, kinds), seed, compare=not no_compare, say=view.say, tell=view.tell)
    if json_:
        out.as_json({**as_json(found), "report": str(path)})
    else:
        _show(found)
    page = render_page(found, f"Drill on {stage.place.name}")
    write_page(path, page)
    keep_report(ClusterFolder(stage.place.folder).drills, page, as_json(found))
    out.talk(f"report: {path}")
    _remove_or_keep_runs(stage.traces, found.survived)
    raise SystemExit(0 if found.survived else 1)


def _remove_or_keep_runs(traces: Traces, survived: bool) -> None:
    """Remove the drill's runs if the drill succeeded; otherwise keep them for `dalsegno why`."""
    from dalsegno.cluster import runs_home

    if survived:
        traces.discard(runs_home())
        return
    named = " and ".join(f"`dalsegno why {run.run}`" for run in reversed(traces.runs))
    out.talk(f"its runs are kept: {named}")


def check_page(path: Path) -> None:
    """Raise an error, before anything starts, if the caller cannot write the page. Under sudo, the caller is the user
    who called sudo."""
    from dalsegno.system.execute import as_caller

    as_caller(lambda: _check_page(path))


def _check_page(path: Path) -> None:
    import tempfile

    if not path.parent.is_dir():
        raise UsageError(_no_page(path, f"there is no folder {path.parent}"), hint=ELSEWHERE)
    if path.is_dir():
        raise UsageError(_no_page(path, "it is a folder"), hint=ELSEWHERE)
    if path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):  # do not open a pipe for this check: closing the pipe would end its reader
            raise UsageError(_no_page(path, "permission denied"), hint=ELSEWHERE)
        return
    try:
        # The folder must be writable, because the report is written to a new file, which then replaces the old one.
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(_no_page(path, error.strerror or str(error)), hint=ELSEWHERE) from error


def write_page(path: Path, text: str) -> None:
    """Write the report: replace a regular file atomically, but write into a device or a pipe."""
    from dalsegno.system.execute import as_caller

    as_caller(lambda: _write_page(path, text))


def _write_page(path: Path, text: str) -> None:
    from dalsegno.system.files import write_atomic

    try:
        if not path.exists() or path.is_file():
            write_atomic(path, text, mode=0o644)
        else:
            path.write_text(text)
    except OSError as error:
        raise DalsegnoError(_no_page(path, error.strerror or str(error)), hint=ELSEWHERE) from error
    except DalsegnoError as error:
        raise DalsegnoError(_no_page(path, error.what), hint=ELSEWHERE) from error


def keep_report(folder: Path, page: str, facts: Mapping[str, Any]) -> None:
    """Keep the report with the cluster, for the web page. If that is not possible, the drill still succeeds."""
    import contextlib
    import json
    import time

    from dalsegno.system.files import make_folder, write_atomic

    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(facts['started']))}-{facts['seed']}"
    with contextlib.suppress(DalsegnoError, OSError):
        make_folder(folder, 0o700)
        write_atomic(folder / f"{name}.html", page, 0o600)
        write_atomic(folder / f"{name}.json", json.dumps(facts), 0o600)
        for old in sorted(folder.glob("*"))[: -2 * KEPT_REPORTS]:
            old.unlink()


def _no_page(path: Path, why: str) -> str:
    return f"the report cannot be written to {path}: {why}"


def _show(drill: Drill) -> None:
    from dalsegno.drill.report import COLUMNS, rows, sentences

    out.data("")
    out.table(COLUMNS, rows(drill))
    out.data("")
    for line in sentences(drill):
        out.data(line)


DRAW_EVERY_S = 0.2


class DrillView:
    """The display of a drill that runs. If stderr is not a terminal, it prints progress at most every `every_s`
    seconds."""

    def __init__(self, every_s: float) -> None:
        self._live, self._every_s = sys.stderr.isatty(), every_s
        self._began, self._drawn_at, self._drawn = time.monotonic(), 0.0, False
        self._last_text = ""

    def __enter__(self) -> DrillView:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def say(self, impact: FaultImpact | str) -> None:
        self.clear()
        text = impact if isinstance(impact, str) else f"{impact.fault} on {impact.node}"
        if isinstance(impact, str):
            out.step(text)
        else:
            out.step(f"{self._clock()}  >>> {text}", bold=True)

    def tell(self, training: Training, marks: list[DrillMark]) -> None:
        for mark in marks:
            self.clear()
            out.step(f"{self._clock()}  {mark.node or 'the run'}: {mark.text}")
        pause_s = DRAW_EVERY_S if self._live else self._every_s
        if training.over() or time.monotonic() - self._drawn_at < pause_s:
            return
        self._drawn_at = time.monotonic()
        text = now(training.newest(), training.status())
        if self._live:
            out.replace_line(f"  {self._clock()}  {text}")
            self._drawn = True
        elif text != self._last_text:
            out.step(f"{self._clock()}  {text}")
            self._last_text = text

    def clear(self) -> None:
        if self._drawn:
            click.echo(out.ERASE, nl=False, err=True)
            self._drawn = False

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"


def now(step: TrainedStep | None, status: RunStatus) -> str:
    """Return the progress of training. The last step may belong to a generation that has ended."""
    if step is None:
        return f"the run is {status.phase.value}"
    if status.phase is not RunPhase.RUNNING:
        return f"step {step.step} was the last so far; the run is {status.phase.value}"
    nodes = ", ".join(node.name for node in status.nodes if node.state is NodeRole.MEMBER)
    if step.generation < status.generation:
        on = f" on {nodes}" if nodes else ""
        return f"step {step.step} was the last so far; generation {status.generation} begins{on}"
    on = f"; trains on {nodes}" if nodes else ""  # at the end of a run, nodes leave one by one until none is left
    return f"step {step.step}, loss {step.loss:.2f}, generation {step.generation}{on}"

"""`dalsegno top`: a live full-screen view of nodes, GPUs, runs and events."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.out import cluster_option, json_option

if TYPE_CHECKING:
    from dalsegno.cli.live.facts import LiveFacts
    from dalsegno.cli.live.readings import LiveReadings, Poller
    from dalsegno.cli.live.terminal import LiveTerminal

TICK_S = 1.0  # the clock and the ages on the screen change at least this often
MIN_INTERVAL_S = 0.2


@click.command()
@cluster_option
@click.option("--once", is_flag=True, help="Print the view once, as plain text. Default if this is not a terminal.")
@click.option("--interval", metavar="TIME", help="Time between two queries. Default: 1s; up to 5s for many nodes.")
@json_option
def command(name: str | None, once: bool, interval: str | None, json_: bool) -> None:
    """Watch the cluster's nodes, GPUs, runs and events in a full-screen view. Press ? for help, q to quit.

    If slurmctld or the controller does not answer, the view shows the last known state and how old it is.

    \b
    dalsegno top
    dalsegno top --once | less
    """
    from dalsegno.cli.cluster.cluster_sources import open_sources
    from dalsegno.cli.live.readings import LiveReadings

    interval_s = max(MIN_INTERVAL_S, out.parse_time(interval)) if interval else None
    readings = LiveReadings(open_sources(name))
    if json_:
        out.as_json(_message(_ask_once(readings)))
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_once(readings)
    else:
        watch(readings, interval_s)


def _ask_once(readings: LiveReadings) -> LiveFacts:
    from dalsegno.cli.live.facts import LiveSource

    for source in LiveSource:
        readings.poll(source)
    facts = readings.facts()
    assert facts is not None  # without facts, `facts()` raises Slurm's error
    return facts


def _print_once(readings: LiveReadings) -> None:
    from dalsegno.cli.live.frame import ScreenSize, frame_text, render
    from dalsegno.cli.live.view import ViewState

    columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    frame = render(_ask_once(readings), ViewState(), ScreenSize(columns or None, None), time.time())
    out.data(frame_text(frame))


def watch(readings: LiveReadings, interval_s: float | None) -> None:
    """Show the view until the user quits. The terminal is always restored, even after an error."""
    from dalsegno.cli.interrupts import INTERRUPTED, Interrupted, stoppable
    from dalsegno.cli.live.readings import Poller
    from dalsegno.cli.live.terminal import LiveTerminal, check_terminal

    check_terminal(os.environ)
    colour = not os.environ.get("NO_COLOR")
    try:
        with (
            stoppable(),
            LiveTerminal(0, 1, colour=colour, encoding=sys.stdout.encoding or "utf-8") as terminal,
        ):
            poller = Poller(readings, interval_s, terminal.wake)
            poller.start()
            try:
                _show(readings, poller, terminal)
            finally:
                poller.stop()
    except Interrupted as end:
        if end.exit_code != INTERRUPTED:  # Ctrl-C is a usual way to leave
            raise
    except EOFError:
        pass


def _show(readings: LiveReadings, poller: Poller, terminal: LiveTerminal) -> None:
    """Draw frames and handle keys until the user quits."""
    from dalsegno.cli.live.frame import render
    from dalsegno.cli.live.keys import Key
    from dalsegno.cli.live.view import ViewState, press

    view, facts, now = ViewState(), None, time.time()
    while not view.quit:
        if not view.paused:
            facts, now = readings.facts(), time.time()
        size = terminal.size()
        frame = render(facts, view, size, now)
        terminal.draw(frame, size)
        for key in terminal.keys(TICK_S):
            if key is Key.REDRAW:
                terminal.redraw()
            view = press(view, key, frame.sizes)
        poller.paused = view.paused


def _message(facts: LiveFacts) -> dict[str, Any]:
    """Return the view for `--json`."""
    from dalsegno.overview.verdict import verdict_message
    from dalsegno.spec.facts import facts_to_json

    overview = facts.overview
    runs = [
        {**facts_to_json(run.status), "silent": run.silent, "progress": run.progress and facts_to_json(run.progress)}
        for run in overview.runs
    ]
    return {
        "verdict": verdict_message(facts.verdict),
        **facts_to_json(overview.status),
        "recovery": [facts_to_json(record) for record in overview.controller.nodes.values()]
        if overview.controller
        else None,
        "gpus": {node: [facts_to_json(gpu) for gpu in gpus] for node, gpus in overview.gpus.items()},
        "runs": runs,
        "events": [event.message() for event in overview.events],
    }

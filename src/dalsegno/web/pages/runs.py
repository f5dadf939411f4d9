"""The list of runs, and the page of one run with its charts and its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dalsegno.runs.coordinator.reports.goodput import Goodput, TimeKind
from dalsegno.runs.coordinator.reports.history import StepPoint
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.runs.rates import RATES, rate_of_ranks
from dalsegno.runs.status import NodeRole, RunStatus
from dalsegno.web.charts import Span, TimelineKind, TimelineMark, figure_text, run_chart, shares_bar
from dalsegno.web.html import DASH, Markup, clock, link, moment, number, plural, table, tag
from dalsegno.web.pages.labels import run_chip, run_link
from dalsegno.web.snapshot import RunPicture
from dalsegno.web.view import Page, PageContext, PagePart, RunDetails, bare, section

OWN_FIGURES = frozenset(
    {"step_s", "starting_s", "stepping_s", "saving_s", "stall_s", "snapshots", "skipped", "saves", "save_s", *RATES}
)
MAX_MARKS = 200
MAX_ENTRIES, MAX_TEXT = 60, 300  # limits of the journal: entries, and characters of an entry
MAX_NAMES = 4  # an entry with more nodes or values shows only their number
_TAKING_PART = (NodeRole.MEMBER, NodeRole.READY)


def runs_page(context: PageContext) -> Page:
    """Return the list of runs: active ones first."""
    head = ["Run", "State", "User", "Nodes", "Step", "Loss", "Step time", "Goodput", "Gen", "Age", ""]
    rows = [_row(view, context) for view in context.snapshot.runs]
    start = tag("code", "dalsegno run train.py --nodes 2")
    body = table(head, rows, class_="wide") if rows else tag("p", "No runs yet. Start one: ", start, class_="empty")
    return Page("Runs", "runs", (section("runs", "Runs", body),))


def _row(view: RunPicture, context: PageContext) -> list[object]:
    status, progress = view.status, view.progress
    figures = progress.figures if progress else {}
    loss, step_s = figures.get("loss"), figures.get("step_s")
    return [
        tag("th", run_link(view.run), scope="row"),
        run_chip(status),
        status.user,
        number(nodes_text(status)),
        number(f"{progress.step:,}" if progress else DASH),
        number(DASH if loss is None else f"{loss:.4g}"),
        number(DASH if step_s is None else f"{step_s:.3g} s"),
        tag("td", _goodput(progress.account) if progress else DASH),
        number(status.generation or DASH),
        tag("td", moment(status.created, "for")),
        tag("td", _cancel(view, context)),
    ]


def _goodput(account: Goodput) -> Markup:
    return tag("span", f"{account.share:.0%} ", goodput_bar(account), class_="inline-bar")


def goodput_bar(account: Goodput) -> Markup:
    words = ", ".join(f"{kind.value} {clock(account.spent.get(kind, 0.0))}" for kind in TimeKind)
    return shares_bar([(f"time-{kind.value}", account.spent.get(kind, 0.0)) for kind in TimeKind], words)


def _cancel(view: RunPicture, context: PageContext) -> Markup | None:
    if view.status.over or not context.visitor.may_cancel(view.uid):
        return None
    return link(f"/confirm?do=cancel&run={view.run}", "Cancel", class_="button danger", aria_label=f"Cancel {view.run}")


def nodes_text(status: RunStatus) -> str:
    """Return the nodes in training and the number requested, such as `3/4`. After the run, return only the number
    requested."""
    if status.over:
        return str(status.wanted_nodes)
    return f"{sum(node.state in _TAKING_PART for node in status.nodes)}/{status.wanted_nodes}"


def run_page(context: PageContext, view: RunPicture) -> Page:
    """Return the page of one run."""
    details = context.data.run_details(view)
    return Page(view.run, "runs", tuple(_parts(context, view, details)))


def _parts(context: PageContext, view: RunPicture, details: RunDetails) -> Iterator[PagePart]:
    status, progress = view.status, view.progress
    yield bare(
        "run-head",
        tag("div", tag("h2", view.run), run_chip(status), _cancel(view, context), class_="title-row"),
        tag("p", status.message, class_="note") if status.message else None,
        tag("dl", list(_facts(view)), class_="facts"),
    )
    now = context.snapshot.at
    spans, marks = spans_of(details.entries, status, now), marks_of(details.entries)
    legend = tag(
        "p",
        tag("span", class_="key fault"), "node lost ", tag("span", class_="key failure"), "script failed ",
        tag("span", class_="key event"), "other",
        class_="legend",
    )  # fmt: skip
    points = with_latest(details.points, view)
    yield section("run-chart", "Training", run_chart(points, spans, marks, now), legend)
    if progress:
        yield section("run-time", "How its time was spent", *_times(progress.account))
    yield section("run-nodes", "Nodes", _nodes(status))
    if status.report:
        yield section("run-report", "Traceback of the rank that failed first", tag("pre", _lines(status.report)))
    yield section("run-journal", "Journal", journal_list(details.entries))


def with_latest(points: Sequence[StepPoint], view: RunPicture) -> Sequence[StepPoint]:
    """Return the history with the latest figures added, because the history is written only every 5 s."""
    if view.progress is None or not points or view.progress.account.at <= points[-1].at or view.status.over:
        return points
    account, figures = view.progress.account, view.progress.figures
    last = StepPoint(account.at, account.step, view.status.generation, figures.get("loss"), figures.get("step_s"))
    return [*points, last] if account.step > points[-1].step else points


def _lines(text: str) -> list[object]:
    """Return the last lines of a text as separate parts, because escaping does not preserve line breaks."""
    return [part for line in text.splitlines()[-200:] for part in (line[:2000], Markup("\n"))]


def _facts(view: RunPicture) -> Iterator[Markup]:
    status, progress = view.status, view.progress
    jobs = ", ".join(map(str, status.jobs)) or DASH
    facts: list[tuple[str, object]] = [("user", status.user), ("nodes", nodes_text(status)), ("jobs", jobs)]
    facts += [("generation", status.generation), ("lost nodes", status.lost_nodes), ("restarts", status.restarts)]
    facts.append(("submitted", moment(status.created)))
    if status.started:
        ran = clock(status.ended - status.started) if status.ended else moment(status.started, "for")
        facts.append(("training for", ran))
    if progress:
        facts.append(("step", f"{progress.step:,}"))
        facts += [(name, figure_text(value)) for name, value in reported(view)]
    for name, value in facts:
        yield tag("div", tag("dt", name), tag("dd", value))


def reported(view: RunPicture) -> list[tuple[str, float]]:
    """Return the figures that the script reports, by label. Rates are those of rank 0 times the number of
    ranks, as in the metrics."""
    figures = view.progress.figures if view.progress else {}
    shown = [(name, value) for name, value in sorted(figures.items()) if name not in OWN_FIGURES and value is not None]
    rates = [(label, rate_of_ranks(name, view.status, view.progress)) for name, label in RATES.items()]
    known = [*shown[:12], *((label, rate) for label, rate in rates if rate is not None)]
    return [*known, *([("step time (s)", figures["step_s"])] if figures.get("step_s") else [])]


def _times(account: Goodput) -> list[Markup]:
    total = sum(account.spent.values()) or 1.0
    items = [
        tag("li", tag("span", class_=f"key time-{kind.value}"), f"{kind.value} ",
            tag("b", f"{account.spent.get(kind, 0.0) / total:.1%}"), f" {clock(account.spent.get(kind, 0.0))}")
        for kind in TimeKind
    ]  # fmt: skip
    return [goodput_bar(account), tag("ul", items, class_="legend wide-legend")]


def _nodes(status: RunStatus) -> Markup:
    rows = [
        [tag("th", link(f"/node/{node.name}", node.name), scope="row"), node.state.value,
         number(DASH if node.group_rank is None else node.group_rank)]
        for node in status.nodes
    ]  # fmt: skip
    return table(["Node", "Role", "Rank"], rows, empty="The run has no nodes now.")


# The timeline, from the journal


_FAULTS = {
    RunEvent.LOST.value: TimelineKind.FAULT,
    RunEvent.COLD.value: TimelineKind.FAULT,
    RunEvent.FAILED.value: TimelineKind.FAILURE,
}
_NOTED = {RunEvent.CAME_BACK.value, RunEvent.IDLE.value, RunEvent.PAUSE.value, RunEvent.SIGNAL.value}


def spans_of(entries: Sequence[Entry], status: RunStatus, now: float) -> list[Span]:
    """Return the generations of a run. A generation ends when it loses a node, when a rank fails, when the next one
    starts, or when the run ends."""
    found: list[Span] = []
    for entry in entries:
        event, at = entry.get("event"), float(entry["at"])
        if event == RunEvent.GENERATION.value:
            nodes = entry.get("nodes")
            size = plural(len(nodes), "node") if isinstance(nodes, list) else ""
            label = str(entry.get("generation", ""))[:8]
            found = [*_ended(found, at), Span(at, -1.0, label, f"generation {label}: {size}")]
        elif _ends(entry):
            found = _ended(found, at)
    return _ended(found, status.ended or now)


def _ends(entry: Entry) -> bool:
    event = entry.get("event")
    if event == RunEvent.LOST.value:
        return bool(entry.get("was", NodeRole.MEMBER.value) == NodeRole.MEMBER.value)
    return event in (RunEvent.FAILED.value, RunEvent.ENDED.value) and not entry.get("noise")


def _ended(spans: list[Span], at: float) -> list[Span]:
    if not spans or spans[-1].end >= 0:
        return spans
    last = spans[-1]
    return [*spans[:-1], Span(last.start, max(at, last.start), last.label, last.text)]


def marks_of(entries: Sequence[Entry]) -> list[TimelineMark]:
    """Return lost nodes, failures and other events of a run."""
    shown = [entry for entry in entries if entry.get("event") in {*_FAULTS, *_NOTED} and not entry.get("noise")]
    return [
        TimelineMark(float(entry["at"]), _FAULTS.get(str(entry["event"]), TimelineKind.NOTE), entry_text(entry))
        for entry in shown[-MAX_MARKS:]
    ]


# Entries of the journal as sentences. Users own these files, so a value may have any type.


def journal_list(entries: Sequence[Entry]) -> Markup:
    """Return the last entries, newest first."""
    rows = [tag("li", moment(float(entry["at"])), " ", entry_text(entry)) for entry in reversed(entries[-MAX_ENTRIES:])]
    return tag("ul", rows, class_="list") if rows else tag("p", "The journal is empty.", class_="empty")


def entry_text(entry: Entry) -> str:
    """Return a journal entry as a sentence. An entry of an unknown kind is shown with all its details."""
    event = str(entry.get("event", ""))
    known = _SENTENCES.get(event)
    if known is not None:
        return known(entry)[:MAX_TEXT]
    details = [f"{key} {_shown_value(value)}" for key, value in entry.items() if key not in ("at", "event", "text")]
    return f"{event}: {entry.get('text') or ', '.join(details)}"[:MAX_TEXT]


def _shown_value(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries" if len(value) > MAX_NAMES else " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _name_nodes(entry: Entry) -> str:
    """Return `n1, n2`, or the number of nodes if there are many."""
    nodes = entry.get("nodes")
    if not isinstance(nodes, list):
        return "its nodes"
    return plural(len(nodes), "node") if len(nodes) > MAX_NAMES else ", ".join(map(str, nodes))


def _because(entry: Entry) -> str:
    return f": {entry['why']}" if entry.get("why") else ""


def _ready(entry: Entry) -> str:
    seconds = entry.get("seconds")
    after = f" after {seconds:.1f} s" if isinstance(seconds, (int, float)) else ""
    return f"{entry.get('node')} is ready{after}{', with modules imported in advance' if entry.get('warm') else ''}"


def _pause(entry: Entry) -> str:
    seconds = entry.get("seconds")
    for_s = f" {seconds:.0f} s" if isinstance(seconds, (int, float)) else ""
    return f"waits{for_s} before the next restart"


_SENTENCES: dict[str, Callable[[Entry], str]] = {
    RunEvent.BEGAN.value: lambda entry: f"the coordinator started on {entry.get('host')}",
    RunEvent.CAME_BACK.value: lambda entry: f"another coordinator took over on {entry.get('host')}",
    RunEvent.GRANTED.value: lambda entry: f"Slurm granted job {entry.get('job')}: {_name_nodes(entry)}",
    RunEvent.REFUSED.value: lambda entry: f"Slurm refused a job{_because(entry)}",
    RunEvent.JOB_OVER.value: lambda entry: f"job {entry.get('job')} is over: {str(entry.get('state')).lower()}",
    RunEvent.READY.value: _ready,
    RunEvent.COLD.value: lambda entry: f"{entry.get('node')} has to import modules again{_because(entry)}",
    RunEvent.SIGNAL.value: lambda entry: f"{entry.get('node')} received signal {entry.get('signal')}",
    RunEvent.LOST.value: lambda entry: f"{entry.get('node')} is lost{_because(entry)}",
    RunEvent.LEFT.value: lambda entry: f"the run left {entry.get('node')}{_because(entry)}",
    RunEvent.GENERATION.value: lambda entry: f"generation {entry.get('generation')} starts on {_name_nodes(entry)}",
    RunEvent.FIRST_STEP.value: lambda entry: f"first step of generation {entry.get('generation')}: {entry.get('step')}",
    RunEvent.FAILED.value: lambda entry: (
        f"rank {entry.get('rank')} on {entry.get('node')} {entry.get('what', 'failed')}"
    ),
    RunEvent.PAUSE.value: _pause,
    RunEvent.NOTE.value: lambda entry: str(entry.get("text", "")),
    RunEvent.RESTS.value: lambda entry: f"the coordinator stops, another one will continue the run{_because(entry)}",
    RunEvent.ENDED.value: lambda entry: f"the run ended with exit code {entry.get('code')}{_because(entry)}",
}

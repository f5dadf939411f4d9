"""The map of the cluster: every node and GPU, grouped by partition. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dalsegno.health.result import Verdict
from dalsegno.overview.verdict import ClusterVerdict, VerdictCode, VerdictLevel, describe
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.web.assessment import CONTROLLER, SLURM
from dalsegno.web.charts import shares_bar
from dalsegno.web.html import Markup, esc, gib, join, link, moment, plural, tag
from dalsegno.web.pages.labels import state_chip
from dalsegno.web.snapshot import ClusterPicture, GpuView, NodeTone, NodeView, SourceTrouble, order_of
from dalsegno.web.view import Page, PageContext, PagePart, bare, section

COMPACT = 48  # clusters with more nodes show each node as a small tile
HOT_C, WARM_C = 85.0, 76.0
_SILENCES = {SLURM: VerdictCode.SLURM_SILENT, CONTROLLER: VerdictCode.CONTROLLER_SILENT}
_OUT = (NodeTone.DOWN, NodeTone.DRAINED, NodeTone.REPAIRING, NodeTone.VALIDATING)


def cluster_page(context: PageContext) -> Page:
    """Return the start page: figures, the map, and the latest events."""
    snapshot = context.snapshot
    groups = partitions_of(snapshot.nodes)
    parts = [_partition(name, nodes, len(snapshot.nodes)) for name, nodes in groups.items()]
    if not groups:
        parts.append(section("partitions", "Nodes", tag("p", "Slurm has not reported a node yet.", class_="empty")))
    at = 0 if len(snapshot.nodes) > COMPACT else len(parts)  # a large map comes after the nodes that need attention
    parts.insert(at, _attention(snapshot))
    return Page("Cluster", "cluster", (overview(context), *parts, latest_events(snapshot)))


def partitions_of(nodes: Mapping[str, NodeView]) -> dict[str, list[NodeView]]:
    """Return the nodes by partition. The partition with the most GPUs comes first. A node in several partitions is
    listed in its first one."""
    groups: dict[str, list[NodeView]] = {}
    for node in sorted(nodes.values(), key=lambda each: order_of(each.name)):
        groups.setdefault(node.partitions[0] if node.partitions else "no partition", []).append(node)
    return dict(sorted(groups.items(), key=lambda each: (-sum(len(node.gpus) for node in each[1]), each[0])))


# The overview at the top of the page


def verdict_line(snapshot: ClusterPicture) -> Markup:
    """Return the verdict on the cluster, with the text of `dalsegno status`, and the troubles that the verdict does not
    mention."""
    if not snapshot.nodes and not snapshot.troubles:
        text, level = "waiting for the first report", VerdictLevel.WARN
    else:
        text, level = describe(snapshot.verdict), snapshot.verdict.level
    others = [trouble.text for trouble in snapshot.troubles if not _is_in_verdict(trouble, snapshot.verdict)]
    line = tag("strong", "; ".join([text, *others]))
    return tag("p", tag("span", class_=f"dot {level.value}"), line, class_="verdict", role="status")


def _is_in_verdict(trouble: SourceTrouble, verdict: ClusterVerdict) -> bool:
    """Return whether the verdict already says that this source does not answer."""
    return trouble.silent and _SILENCES.get(trouble.source) in verdict.codes


def overview(context: PageContext) -> PagePart:
    """Return the verdict and the figures at the top of the page."""
    snapshot = context.snapshot
    nodes = list(snapshot.nodes.values())
    tones = Counter(node.tone for node in nodes)
    gpus = [gpu for node in nodes for gpu in node.gpus]
    used = sum(gpu.in_use for gpu in gpus)
    out_gpus = sum(len(node.gpus) for node in nodes if node.tone in _OUT)
    states = Counter(job.state for job in snapshot.jobs)
    active = [run for run in snapshot.runs if not run.status.over]
    running, pending = states[JobState.RUNNING], states[JobState.PENDING]
    figures = [
        _figure("Nodes", f"{len(nodes) - sum(tones[tone] for tone in _OUT):,}", f"of {len(nodes):,} in service",
                shares_bar([(tone.value, tones[tone]) for tone in NodeTone], "nodes by state")),
        _figure("GPUs", f"{used:,}", f"of {len(gpus):,} in use",
                shares_bar([("busy", used), ("idle", len(gpus) - used - out_gpus), ("down", out_gpus)], "GPUs by use")),
        _figure("Jobs", f"{running:,}", f"running, {pending:,} pending",
                shares_bar([("busy", running), ("drained", pending)], "jobs by state")),
        _figure("Runs", f"{len(active):,}", "active", _goodput_bar(snapshot)),
        _automation(context),
    ]  # fmt: skip
    return bare("overview", verdict_line(snapshot), tag("div", figures, class_="figures"))


def _figure(name: str, value: str, note: str, extra: Markup) -> Markup:
    words = tag("p", tag("b", value), " ", tag("span", note), class_="figure-value")
    return tag("div", tag("h2", name), words, extra, class_="figure")


def _goodput_bar(snapshot: ClusterPicture) -> Markup:
    accounts = [run.progress.account for run in snapshot.runs if run.progress and not run.status.over]
    spent: Counter[str] = Counter()
    for account in accounts:
        spent.update({kind.value: seconds for kind, seconds in account.spent.items()})
    return shares_bar([(f"time-{kind}", seconds) for kind, seconds in sorted(spent.items())], "time of active runs")


def _automation(context: PageContext) -> Markup:
    automation = context.snapshot.automation
    state = "paused" if automation.paused else {"observe": "observing", "off": "off"}.get(automation.mode, "on")
    taken = max(automation.taken.values(), default=0)
    note = f"{taken} of {automation.per_hour} per hour" if automation.per_hour else ""
    action = "resume" if automation.paused else "pause"
    button = link(f"/confirm?do={action}", action.capitalize(), class_="button") if context.visitor.operates else None
    words = tag("p", tag("b", state), " ", tag("span", note), class_="figure-value")
    return tag("div", tag("h2", "Recovery"), words, button, class_=f"figure {'warned' if automation.paused else ''}")


# The map of nodes


def _partition(name: str, nodes: Sequence[NodeView], total: int) -> PagePart:
    compact = total > COMPACT
    in_service = sum(node.tone not in _OUT for node in nodes)
    id = f"partition-{_word(name)}"
    note = f"{in_service:,} of {plural(len(nodes), 'node')} in service"
    head = tag("header", tag("h2", name), tag("p", note, class_="note"))
    before = f'<section id="{id}" class="panel">{head}<div class="{"tiles" if compact else "cards"}">'
    items = tuple((f"node-{_word(node.name)}", tile(node) if compact else card(node)) for node in nodes)
    return PagePart(id, before, items, "</div></section>")


def _word(name: str) -> str:
    """Return a name in a form that is valid in an element's id."""
    return "".join(letter if letter.isalnum() or letter in "-_" else f"_{ord(letter):x}" for letter in name)


def card(node: NodeView) -> str:
    """Return a node as a card, for clusters of up to COMPACT nodes."""
    bad = [f"{check}: {text}" for check, verdict, text in node.findings if verdict is Verdict.FAILED]
    why = node.reason or (bad[0] if bad else "")
    lines = [
        tag("p", why, class_="why", title=why) if why else None,
        tag("p", [_job_link(job) for job in node.jobs[:3]], class_="jobs") if node.jobs else None,
    ]
    head = tag("div", link(f"/node/{node.name}", node.name, class_="name"), state_chip(node), class_="card-head")
    body = tag("div", [_gpu(gpu) for gpu in node.gpus], class_="gpus") if node.gpus else _cpus(node)
    return tag("article", head, body, lines, id=f"node-{_word(node.name)}", class_=f"card {node.tone.value}")


def _job_link(job: JobInfo) -> Markup:
    return link(f"/queue#job-{job.id}", tag("span", job.label), f" {job.name} ", tag("i", job.user))


def _cpus(node: NodeView) -> Markup:
    share = node.cpus_used / node.cpus if node.cpus else 0.0
    bar = shares_bar([("busy", share), ("idle", 1 - share)], "CPUs in use")
    return tag("p", f"{node.cpus_used} of {node.cpus} CPUs", bar, class_="cpus")


def _gpu(gpu: GpuView) -> str:
    """Return a GPU as a cell. Its fill shows the memory in use, and its text is the temperature or "lost"."""
    reading = gpu.reading
    degrees = "lost" if gpu.lost else "" if reading.temperature_c is None else f"{reading.temperature_c:.0f}°"
    fill = 100 * _memory_share(gpu)
    shape = f'<rect x="0" y="{100 - fill:.0f}%" width="100%" height="{fill:.0f}%"/>' if fill else ""
    about = esc(gpu_text(gpu))
    return Markup(
        f'<svg class="gpu {_gpu_class(gpu)}" role="img" aria-label="{about}"><title>{about}</title>'
        f'{shape}<text x="50%" y="50%" text-anchor="middle" dominant-baseline="central">{degrees}</text></svg>'
    )


def _gpu_class(gpu: GpuView) -> str:
    if gpu.lost:
        return "gone"
    degrees = gpu.reading.temperature_c or 0.0
    heat = " hot" if degrees >= HOT_C else " warm" if degrees >= WARM_C else ""
    return ("used" if gpu.in_use else "free") + heat


def _memory_share(gpu: GpuView) -> float:
    used, total = gpu.reading.memory_used_mib, gpu.reading.memory_total_mib
    return min(max(used / total, 0.0), 1.0) if used is not None and total else 0.0


def gpu_text(gpu: GpuView) -> str:
    """Return a GPU's readings as text, such as `GPU 3: 41 °C, 12 of 80 GiB, in use by job 7`."""
    reading, words = gpu.reading, ["lost, the driver does not reach it"] if gpu.lost else []
    if reading.temperature_c is not None:
        words.append(f"{reading.temperature_c:.0f} °C")
    if reading.memory_used_mib is not None and reading.memory_total_mib:
        words.append(f"{gib(reading.memory_used_mib)} of {gib(reading.memory_total_mib)} GiB")
    if reading.utilization_percent is not None:
        words.append(f"{reading.utilization_percent:.0f} % busy")
    jobs = " or ".join(map(str, gpu.jobs))
    words.append(f"in use by job {jobs}" if jobs else "in use" if gpu.in_use else "free")
    return f"GPU {reading.index}: {', '.join(words)}"


def tile(node: NodeView) -> str:
    """Return a node as a small tile, for large clusters. It does not use `tag`, because a page may have 1,000 tiles."""
    cells = "".join(f'<i class="{_gpu_class(gpu)}"></i>' for gpu in node.gpus)
    users = ", ".join(dict.fromkeys(f"{job.label} {job.user}" for job in node.jobs[:3]))
    about = ", ".join(filter(None, (node.label, users, node.reason)))
    name = esc(node.name)
    return (
        f'<a id="node-{_word(node.name)}" class="tile {node.tone.value}" href="/node/{name}"'
        f' title="{name}: {esc(about)}"><span>{name}</span><span class="hidden"> {esc(node.label)}</span>'
        f'<b aria-hidden="true">{cells}</b></a>'
    )


# Nodes that need attention, and events


def _attention(snapshot: ClusterPicture) -> PagePart:
    out = [node for node in snapshot.nodes.values() if node.tone in (*_OUT, NodeTone.SUSPECT)]
    if not out:
        return bare("attention", class_="hidden")
    rows = [
        tag(
            "li",
            link(f"/node/{node.name}", node.name),
            " ",
            state_chip(node),
            " ",
            moment(node.since),
            " ",
            node.reason,
        )
        for node in sorted(out, key=lambda each: -(each.since or 0.0))[:20]
    ]
    return section("attention", "Needs attention", tag("ul", rows, class_="list"))


def latest_events(snapshot: ClusterPicture) -> PagePart:
    rows = [
        tag("li", moment(event.at), " ", node_word(event.node, snapshot.nodes), " ", event.text)
        for event in reversed(snapshot.events[-8:])
    ]
    more = link("/events", "All events")
    empty = tag("p", "No events yet.", class_="empty")
    return section("latest", "Latest events", tag("ul", rows, class_="list") if rows else empty, note=more)


def node_word(name: str, nodes: Iterable[str]) -> Markup:
    """Return a link to the node of an event, or only its name if the node no longer exists."""
    return link(f"/node/{name}", name) if name and name in nodes else join([name])

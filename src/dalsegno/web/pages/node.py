"""The page of one node: state, GPUs, checks, history, evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dalsegno.health.result import Verdict
from dalsegno.web.charts import shares_bar
from dalsegno.web.html import DASH, Markup, gib, link, moment, number, table, tag
from dalsegno.web.pages.labels import ChipKind, chip, event_chip, job_chip, state_chip
from dalsegno.web.snapshot import GpuView, NodeTone, NodeView
from dalsegno.web.view import CheckRecord, EvidenceBundle, NodeDetails, Page, PageContext, PagePart, bare, section
from dalsegno.wire.liveness import Presence

VERDICT_CHIPS = {
    Verdict.PASSED: ChipKind.GOOD,
    Verdict.WARNED: ChipKind.WARN,
    Verdict.FAILED: ChipKind.BAD,
    Verdict.UNKNOWN: ChipKind.PLAIN,
}


_IN_SERVICE = (NodeTone.BUSY, NodeTone.MIXED, NodeTone.IDLE)


def node_page(context: PageContext, node: NodeView) -> Page:
    """Return the page of one node."""
    details = context.data.node_details(node.name)
    return Page(node.name, "cluster", tuple(_parts(context, node, details)))


def _parts(context: PageContext, node: NodeView, details: NodeDetails) -> Iterator[PagePart]:
    yield bare(
        "node-head",
        tag("div", tag("h2", node.name), state_chip(node), _buttons(context, node, details), class_="title-row"),
        tag("p", node.reason, class_="note") if node.reason else None,
        tag("dl", list(_facts(node, details)), class_="facts"),
    )
    if node.gpus:
        yield section("node-gpus", "GPUs", _gpus(node, details))
    yield section("node-jobs", "Jobs", _jobs(node))
    yield section("node-checks", "Checks", _failing(node), _checks(details.checks))
    rows = [
        [tag("td", moment(event.at)), event_chip(event), tag("td", event.text, class_="text")]
        for event in reversed(details.events)
    ]
    yield section("node-history", "History", table(["When", "Kind", "What"], rows, empty="Nothing happened yet."))
    yield section("node-evidence", "Evidence", _evidence(context, node.name, details.evidence))


def _buttons(context: PageContext, node: NodeView, details: NodeDetails) -> Markup | None:
    if not context.visitor.operates:
        return None
    drain = link(f"/confirm?do=drain&node={node.name}", "Drain", class_="button danger")
    resume = link(f"/confirm?do=undrain&node={node.name}", "Resume", class_="button")
    inject = link(f"/confirm?do=inject&node={node.name}", "Inject a fault", class_="button danger")
    shown = (drain, None if node.tone in _IN_SERVICE else resume, inject if details.faults else None)
    return tag("span", *shown, class_="buttons")


def _facts(node: NodeView, details: NodeDetails) -> Iterator[Markup]:
    facts: list[tuple[str, object]] = [
        ("partitions", ", ".join(node.partitions) or DASH),
        ("agent", node.presence.value),
        ("since", moment(node.since)),
        ("validated", moment(node.validated_at)),
        ("CPUs", f"{node.cpus_used} of {node.cpus} in use"),
        ("memory", f"{gib(node.memory_used_mib)} of {gib(node.memory_mib)} GiB allocated"),
    ]
    if details.tried:
        facts.append(("tried", ", ".join(details.tried)))
    if details.excused:
        facts.append(("ignored", ", ".join(details.excused)))
    for name, value in facts:
        yield tag("div", tag("dt", name), tag("dd", value))


def _gpus(node: NodeView, details: NodeDetails) -> Markup:
    known = {gpu.slot: gpu for gpu in details.gpus if gpu.replaced_at is None}
    rows = []
    for gpu in node.gpus:
        own, reading = known.get(gpu.reading.index), gpu.reading
        rows.append([
            number(reading.index), own.model if own else node.gpu_type,
            number(DASH if reading.temperature_c is None else f"{reading.temperature_c:.0f} °C"),
            _memory(gpu), number(_percent(reading.utilization_percent)),
            chip("lost", ChipKind.BAD) if gpu.lost else _use(gpu),
            tag("td", tag("code", own.uuid if own else DASH)), moment(own.since if own else None),
        ])  # fmt: skip
    head = ["GPU", "Model", "Temperature", "Memory", "Busy", "Job", "UUID", "In this node"]
    old = [gpu for gpu in details.gpus if gpu.replaced_at is not None]
    gone = [tag("li", tag("code", gpu.uuid), " was replaced ", moment(gpu.replaced_at)) for gpu in old]
    return tag("div", table(head, rows, class_="wide"), tag("ul", gone, class_="list") if gone else None)


def _use(gpu: GpuView) -> str:
    return " or ".join(map(str, gpu.jobs)) or ("in use" if gpu.in_use else "free")


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.0f} %"


def _memory(gpu: GpuView) -> object:
    used, total = gpu.reading.memory_used_mib, gpu.reading.memory_total_mib
    if used is None or not total:
        return DASH
    bar = shares_bar([("busy", used), ("free", total - used)], "memory in use")
    return tag("td", tag("span", f"{gib(used)} of {gib(total)} GiB ", bar, class_="inline-bar"))


def _jobs(node: NodeView) -> Markup:
    rows = [
        [tag("th", link(f"/queue#job-{job.id}", job.label), scope="row"), job.name, job.user, job_chip(job.state),
         number(job.gpus or DASH), moment(job.started_at, "for")]
        for job in node.jobs
    ]  # fmt: skip
    return table(["Job", "Name", "User", "State", "GPUs", "Running for"], rows, empty="No job is on this node.")


def _failing(node: NodeView) -> Markup | None:
    items = [
        tag("li", chip(verdict.value, VERDICT_CHIPS[verdict]), " ", tag("b", check), " ", text)
        for check, verdict, text in node.findings
    ]
    if items:
        return tag("ul", items, class_="list")
    unknown = node.presence is Presence.NEVER
    return tag("p", "No node agent reports checks." if unknown else "All checks pass.", class_="note")


def _checks(checks: Sequence[CheckRecord]) -> Markup:
    rows = [
        [tag("td", moment(each.at)), each.check, chip(each.verdict.value, VERDICT_CHIPS[each.verdict]),
         tag("td", each.text, class_="text")]
        for each in reversed(checks)
    ]  # fmt: skip
    return table(["When", "Check", "Result", "Found"], rows, empty="No check has changed its result.")


def _evidence(context: PageContext, node: str, bundles: Sequence[EvidenceBundle]) -> Markup:
    if not bundles:
        return tag("p", "No evidence was saved.", class_="empty")
    items = []
    for bundle in bundles:
        names = [
            link(f"/node/{node}/evidence/{bundle.name}/{name}", name) if context.visitor.operates else tag("span", name)
            for name, _ in bundle.files
        ]
        items.append(tag("li", tag("b", bundle.name), " ", [part for name in names for part in (name, " ")]))
    note = None if context.visitor.operates else tag("p", "Only operators can open the files.", class_="note")
    return tag("div", tag("ul", items, class_="list"), note)

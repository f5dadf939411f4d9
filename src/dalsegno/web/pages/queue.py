"""The queue: running and pending jobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.hostlist import compress
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.web.html import DASH, Markup, clock, link, moment, number, plural, table, tag
from dalsegno.web.pages.labels import job_chip, run_link
from dalsegno.web.view import Page, PageContext, PagePart, section

MAX_SHOWN = 500


def queue_page(context: PageContext) -> Page:
    """Return the page with the running and pending jobs."""
    jobs = [job for job in context.snapshot.jobs if not job.state.ended]
    running = [job for job in jobs if job.state is not JobState.PENDING]
    pending = sorted((job for job in jobs if job.state is JobState.PENDING), key=lambda job: -job.priority)
    return Page("Queue", "queue", (_running(context, running), _pending(context, pending)))


def _running(context: PageContext, jobs: Sequence[JobInfo]) -> PagePart:
    head = ["Job", "Name", "User", "Partition", "State", "Nodes", "GPUs", "Running for", "Ends", ""]
    rows = [
        [
            _id(job), _name(job, context), job.user, job.partition, job_chip(job.state), compress(job.nodes),
            number(job.gpus or DASH), moment(job.started_at, "for"), moment(job.ends_at), _cancel(job, context),
        ]
        for job in jobs[:MAX_SHOWN]
    ]  # fmt: skip
    body = table(head, rows, empty="No job runs.", class_="wide")
    return section("running", "Running", body, note=_count(jobs))


def _pending(context: PageContext, jobs: Sequence[JobInfo]) -> PagePart:
    head = ["Job", "Name", "User", "Partition", "Reason", "Nodes", "GPUs", "Priority", "Waiting for", "Limit", ""]
    rows = [
        [
            _id(job), _name(job, context), job.user, job.partition, job.reason, number(job.node_count),
            number(job.gpus or DASH), number(f"{job.priority:,}"), moment(job.submitted_at, "for"),
            DASH if job.time_limit_s is None else clock(job.time_limit_s), _cancel(job, context),
        ]
        for job in jobs[:MAX_SHOWN]
    ]  # fmt: skip
    body = table(head, rows, empty="No job waits.", class_="wide")
    return section("pending", "Pending", body, note=_count(jobs))


def _count(jobs: Sequence[JobInfo]) -> str:
    shown = f", the first {MAX_SHOWN} are shown" if len(jobs) > MAX_SHOWN else ""
    return f"{plural(len(jobs), 'job')}{shown}"


def _id(job: JobInfo) -> Markup:
    return tag("th", job.label, scope="row", id=f"job-{job.id}")


def _name(job: JobInfo, context: PageContext) -> object:
    view = context.snapshot.run(job.name)
    return run_link(job.name) if view is not None and view.uid == job.uid else job.name


def _cancel(job: JobInfo, context: PageContext) -> Markup | None:
    if not context.visitor.may_cancel(job.uid):
        return None
    label = f"Cancel job {job.label}"
    return link(f"/confirm?do=cancel&job={job.id}", "Cancel", class_="button danger", aria_label=label)

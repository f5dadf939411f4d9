"""`sdiag`: how slurmctld itself is doing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.slurm.parse.text import integer, malformed

DIAG_ARGV = ("sdiag",)

_SECTIONS = {"Main schedule statistics": "main", "Backfilling stats": "backfill"}
_STAMP = re.compile(r"\((\d{1,18})\)")


@dataclass(frozen=True)
class Diagnostics:
    """Load, job counts since `since`, and the pace of both schedulers (cycles in microseconds)."""

    at: int
    since: int
    server_threads: int = 0
    agent_queue: int = 0
    dbd_queue: int = 0  # messages waiting for slurmdbd: grows while it is away
    jobs_submitted: int = 0
    jobs_started: int = 0
    jobs_completed: int = 0
    jobs_canceled: int = 0
    jobs_failed: int = 0
    jobs_pending: int = 0
    jobs_running: int = 0
    main_last_cycle_us: int = 0
    main_max_cycle_us: int = 0
    main_cycles: int = 0
    main_queue_length: int = 0
    backfill_last_cycle_us: int = 0
    backfill_max_cycle_us: int = 0
    backfill_cycles: int = 0
    backfill_queue_length: int = 0
    backfilled_jobs: int = 0


def parse_diag(text: str) -> Diagnostics:
    counts = _counts(text)
    at, since = _stamp(text, "sdiag output at"), _stamp(text, "Data since")
    if not at:
        raise malformed("sdiag", text)

    def count(name: str) -> int:
        return integer(counts.get(name, ""))

    return Diagnostics(
        at=at,
        since=since,
        server_threads=count("Server thread count"),
        agent_queue=count("Agent queue size"),
        dbd_queue=count("DBD Agent queue size"),
        jobs_submitted=count("Jobs submitted"),
        jobs_started=count("Jobs started"),
        jobs_completed=count("Jobs completed"),
        jobs_canceled=count("Jobs canceled"),
        jobs_failed=count("Jobs failed"),
        jobs_pending=count("Jobs pending"),
        jobs_running=count("Jobs running"),
        main_last_cycle_us=count("main/Last cycle"),
        main_max_cycle_us=count("main/Max cycle"),
        main_cycles=count("main/Total cycles"),
        main_queue_length=count("main/Last queue length"),
        backfill_last_cycle_us=count("backfill/Last cycle"),
        backfill_max_cycle_us=count("backfill/Max cycle"),
        backfill_cycles=count("backfill/Total cycles"),
        backfill_queue_length=count("backfill/Last queue length"),
        backfilled_jobs=count("backfill/Total backfilled jobs (since last slurm start)"),
    )


def _counts(text: str) -> dict[str, str]:
    """`name: value` lines; inside the two schedulers' sections the names carry the section's."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        heading = line.split("(", 1)[0].strip().rstrip(":")
        if heading in _SECTIONS:
            section = _SECTIONS[heading] + "/"
        elif line and not line[0].isspace() and section:
            section = ""
        name, colon, value = line.strip().rpartition(":") if "(since" in line else line.strip().partition(":")
        if colon:
            found.setdefault(section + name.strip(), value.strip())
    return found


def _stamp(text: str, before: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith(before)), "")
    found = _STAMP.search(line)
    return int(found[1]) if found else 0

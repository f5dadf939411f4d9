"""Parse `scontrol show config`, `scontrol ping`, `sdiag` and `sacctmgr show`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from dalsegno.slurm.facts import AccountsInfo
from dalsegno.slurm.parse.text import integer, malformed

CONFIG_ARGV = ("scontrol", "show", "config")

_SETTING = re.compile(r"^([\w\[\]/]+)\s*= ?(.*)$")


def parse_config(text: str) -> dict[str, str]:
    """Return slurmctld's settings by name. `(null)` is not converted."""
    if not text.startswith("Configuration data as of"):
        raise malformed("scontrol show config", text)
    found = (_SETTING.match(line) for line in text.splitlines()[1:])
    settings: dict[str, str] = {}
    for match in found:
        if match:
            settings.setdefault(match[1], match[2].strip())
    return settings


PING_ARGV = ("scontrol", "ping")

_CONTROLLER = re.compile(r"^Slurmctld\((\w+)\) at (.+?) (?:is|are) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class ControllerPing:
    role: str  # primary, backup, backup2 and so on
    host: str
    up: bool


def parse_ping(text: str) -> list[ControllerPing]:
    """Parse the output of PING_ARGV. If the primary is down, the command exits with 1, but prints all controllers."""
    found = [ControllerPing(role, host, state == "UP") for role, host, state in _CONTROLLER.findall(text)]
    if not found:
        raise malformed("scontrol ping", text)
    return found


DIAG_ARGV = ("sdiag",)

_SECTIONS = {"Main schedule statistics": "main", "Backfilling stats": "backfill"}
_STAMP = re.compile(r"\((\d{1,18})\)")
_RPCS_BY_TYPE = "Remote Procedure Call statistics by message type"
_RPCS_BY_USER = "Remote Procedure Call statistics by user"
_RPC = re.compile(r"\s+(\S+)\s+\(\s*\d+\)\s+count:(\d{1,18})\s+ave_time:(\d{1,18})\s+total_time:(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class RpcLoad:
    """The number of requests to slurmctld, by message type or by user, and how long its answers took."""

    name: str
    count: int
    average_us: int
    total_us: int


@dataclass(frozen=True)
class Diagnostics:
    """The load of slurmctld, its job counts since `since`, and the cycle times of the main and the backfill
    scheduler."""

    at: int
    since: int
    server_threads: int = 0
    agent_queue: int = 0
    dbd_queue: int = 0  # number of messages waiting for slurmdbd; it grows while slurmdbd is down
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
    main_mean_cycle_us: int = 0
    main_cycles_per_minute: int = 0
    main_queue_length: int = 0
    backfill_last_cycle_us: int = 0
    backfill_max_cycle_us: int = 0
    backfill_cycles: int = 0
    backfill_mean_cycle_us: int = 0
    backfill_mean_depth: int = 0
    backfill_queue_length: int = 0
    backfilled_jobs: int = 0
    backfilled_jobs_since_reset: int = 0  # count since midnight, when sdiag's counts restart
    backfilled_het_components: int = 0
    rpcs_by_type: tuple[RpcLoad, ...] = ()
    rpcs_by_user: tuple[RpcLoad, ...] = ()


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
        main_mean_cycle_us=count("main/Mean cycle"),
        main_cycles_per_minute=count("main/Cycles per minute"),
        main_queue_length=count("main/Last queue length"),
        backfill_last_cycle_us=count("backfill/Last cycle"),
        backfill_max_cycle_us=count("backfill/Max cycle"),
        backfill_cycles=count("backfill/Total cycles"),
        backfill_mean_cycle_us=count("backfill/Mean cycle"),
        backfill_mean_depth=count("backfill/Depth Mean"),
        backfill_queue_length=count("backfill/Last queue length"),
        backfilled_jobs=count("backfill/Total backfilled jobs (since last slurm start)"),
        backfilled_jobs_since_reset=count("backfill/Total backfilled jobs (since last stats cycle start)"),
        backfilled_het_components=count("backfill/Total backfilled heterogeneous job components"),
        rpcs_by_type=_rpcs(text, _RPCS_BY_TYPE),
        rpcs_by_user=_rpcs(text, _RPCS_BY_USER),
    )


def _rpcs(text: str, heading: str) -> tuple[RpcLoad, ...]:
    """Return the rows below a heading, up to the first line in another format."""
    below = text.partition(f"\n{heading}\n")[2].splitlines()
    rows = takewhile(lambda found: found is not None, (_RPC.match(line) for line in below))
    return tuple(RpcLoad(row[1], int(row[2]), int(row[3]), int(row[4])) for row in rows if row)


def _counts(text: str) -> dict[str, str]:
    """Return the `name: value` lines. In the sections of the two schedulers, the section is put in front of the
    names."""
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


_QOS = (
    "Name",
    "Priority",
    "Preempt",
    "PreemptMode",
    "MaxWall",
    "MaxTRESPerUser",
    "MaxJobsPerUser",
    "GrpTRES",
    "UsageFactor",
)
_ASSOC = ("Account", "User", "ParentName", "Fairshare", "QOS", "DefaultQOS", "GrpTRES")
_USER = ("User", "DefaultAccount", "AdminLevel")


def _show(what: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    return ("sacctmgr", "--noheader", "--parsable2", "show", what, f"format={','.join(fields)}")


QOS_ARGV = _show("qos", _QOS)
ASSOC_ARGV = (*_show("assoc", _ASSOC), "WOPLimits")  # this command does not print limits inherited from parents
USER_ARGV = _show("user", _USER)


def parse_accounts(qos: str, assoc: str, user: str) -> AccountsInfo:
    """Parse the output of QOS_ARGV, ASSOC_ARGV and USER_ARGV."""
    associations = list(_rows(assoc, _ASSOC))
    return AccountsInfo(
        qos={row["Name"]: row for row in _rows(qos, _QOS)},
        accounts={row["Account"]: row for row in associations if not row["User"]},
        members={(row["User"], row["Account"]): row for row in associations if row["User"]},
        users={row["User"]: row for row in _rows(user, _USER)},
    )


def _rows(text: str, fields: tuple[str, ...]) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(fields):
            raise malformed("sacctmgr show", line)
        yield dict(zip(fields, values, strict=True))

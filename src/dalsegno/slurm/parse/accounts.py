"""`sacctmgr show qos | assoc | user`: what the accounting database holds."""

from __future__ import annotations

from collections.abc import Iterator

from dalsegno.slurm.accounts_info import AccountsInfo
from dalsegno.slurm.parse.text import malformed

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
ASSOC_ARGV = (*_show("assoc", _ASSOC), "WOPLimits")  # what is set at each, without what comes down from parents
USER_ARGV = _show("user", _USER)


def parse_accounts(qos: str, assoc: str, user: str) -> AccountsInfo:
    """The answers to QOS_ARGV, ASSOC_ARGV and USER_ARGV."""
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

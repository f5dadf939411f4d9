"""What needs Slurm's database, on a cluster that has none."""

from __future__ import annotations

from collections.abc import Iterator

from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import Section

_HINT = "set `slurm: {accounting: true}`, or leave it out"
_ENFORCE = "Slurm applies limits only with `slurm: {enforce: [associations, limits, qos]}`"
_LIMITS = {"max_time", "max_tres_per_user", "max_jobs_per_user", "group_tres"}
_WEIGHTS = ("fair_share", "qos", "half_life", "usage_reset")
_OF_USERS = ("accounts", "default_account", "qos", "default_qos", "fair_share")


def check_accounting(spec: ClusterSpec, report: Report) -> None:
    """Everything that would silently do nothing: with accounting off, or limits that Slurm is not told to apply."""
    if spec.slurm.accounting:
        _check_limits(spec, report)
        return
    if not report.whole("slurm", "accounting"):
        return
    for section, field, subject in _needing(spec):
        report.add(section, field, f"{subject} needs accounting, which is off", _HINT)


def _check_limits(spec: ClusterSpec, report: Report) -> None:
    if {"limits", "safe"} & set(spec.slurm.enforce) or not report.whole("slurm", "enforce"):
        return
    for section, name in [
        *((qos, f"QOS `{qos.name}`") for qos in spec.slurm.qos),
        *((account, f"account `{account.name}`") for account in spec.accounts),
    ]:
        for field in sorted(_LIMITS & section.model_fields_set):
            report.add(section, field, f"`{field}` of {name} is a limit, and `slurm.enforce` names no limits", _ENFORCE)


def _needing(spec: ClusterSpec) -> Iterator[tuple[Section, str, str]]:
    slurm = spec.slurm
    for field in ("qos", "enforce"):
        if getattr(slurm, field):
            yield slurm, field, f"`slurm.{field}`"
    for field in _WEIGHTS:
        if field in slurm.priority.model_fields_set:
            yield slurm.priority, field, f"`slurm.priority.{field}`"
    if slurm.preemption is not None and slurm.preemption.by == "qos":
        yield slurm, "preemption", "preemption by QOS"
    if spec.accounts:
        yield spec, "accounts", "`accounts`"
    for user in spec.users:
        for field in _OF_USERS:
            if field in user.model_fields_set:
                yield user, field, f"`{field}` of user `{user.name}`"
    for partition in spec.partitions:
        for field in ("allow_accounts", "allow_qos"):
            if getattr(partition, field):
                yield partition, field, f"`{field}` of partition `{partition.name}`"
    for reservation in spec.reservations:
        if reservation.accounts:
            yield reservation, "accounts", f"`accounts` of reservation `{reservation.name}`"

"""Accounts, users and QOS that name each other."""

from __future__ import annotations

from collections.abc import Iterable

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.policy import known_qos
from dalsegno.spec.checks.report import Report
from dalsegno.spec.cycles import find_cycle
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.people import User
from dalsegno.spec.section import Section

DEFAULT_ACCOUNT = "users"  # of people for whom the file names none


def known_accounts(spec: ClusterSpec) -> list[str]:
    """Accounts that may be named: those of the file and Slurm's own."""
    extra = [DEFAULT_ACCOUNT] if any(not user.accounts for user in spec.users) else []
    return [*(account.name for account in spec.accounts), "root", *extra]


class _Known:
    """Accounts and QOS that are there, gathered once."""

    def __init__(self, spec: ClusterSpec, report: Report) -> None:
        self.report = report
        self._accounts = dict.fromkeys(known_accounts(spec))
        self._qos = dict.fromkeys(known_qos(spec))

    def accounts(self, section: Section, field: str, names: Iterable[str], whose: str) -> None:
        for name in names:
            if name not in self._accounts and self.report.unnamed(name, "accounts"):
                hint = did_you_mean(name, self._accounts, f"add it: `accounts: [{{name: {name}}}]`")
                self.report.add(section, field, f"{whose} the account `{name}`, which is not there", hint)

    def qos(self, section: Section, field: str, names: Iterable[str], whose: str) -> None:
        for name in names:
            if name not in self._qos and self.report.unnamed(name, "slurm", "qos"):
                hint = did_you_mean(name, self._qos, f"add it: `slurm: {{qos: [{{name: {name}}}]}}`")
                self.report.add(section, field, f"{whose} the qos `{name}`, which is not there", hint)


def check_people(spec: ClusterSpec, report: Report) -> None:
    """Every account and QOS that is named must be there."""
    known = _Known(spec, report)
    for partition in spec.partitions:
        whose = f"partition `{partition.name}` allows"
        known.accounts(partition, "allow_accounts", partition.allow_accounts, whose)
        known.qos(partition, "allow_qos", partition.allow_qos, whose)
    for account in spec.accounts:
        known.accounts(account, "parent", [account.parent], f"account `{account.name}` is below")
        known.qos(account, "qos", account.qos, f"account `{account.name}` uses")
    for reservation in spec.reservations:
        known.accounts(reservation, "accounts", reservation.accounts, f"reservation `{reservation.name}` is for")
    for user in spec.users:
        known.accounts(user, "accounts", user.accounts, f"user `{user.name}` is in")
        known.qos(user, "qos", user.qos, f"user `{user.name}` uses")
        _defaults(user, known)
    _circle(spec, report)


def _defaults(user: User, known: _Known) -> None:
    if user.default_account and user.default_account not in (user.accounts or [DEFAULT_ACCOUNT]):
        what = f"`default_account` of user `{user.name}` is `{user.default_account}`, which is not among their accounts"
        known.report.add(user, "default_account", what, f"add it to `accounts` of `{user.name}`", reads=("accounts",))
    if user.default_qos and user.qos and user.default_qos not in user.qos:
        what = f"`default_qos` of user `{user.name}` is `{user.default_qos}`, which is not among their QOS"
        known.report.add(user, "default_qos", what, f"add it to `qos` of `{user.name}`", reads=("qos",))
    elif user.default_qos and not user.qos:
        known.qos(user, "default_qos", [user.default_qos], f"user `{user.name}` uses")


def _circle(spec: ClusterSpec, report: Report) -> None:
    circle = find_cycle({account.name: [account.parent] for account in spec.accounts})
    if circle:
        first = next(account for account in spec.accounts if account.name == circle[0])
        said = ", ".join(f"`{name}`" for name in circle)
        report.add(first, "parent", f"accounts {said} are each other's parents", "let one be below `root`")

"""Check QOS, preemption, accounting, accounts, users and reservations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.machines import nodes_known
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.facts import BUILT_IN_QOS, DEFAULT_ACCOUNT
from dalsegno.spec.layout import find_cycle, members
from dalsegno.spec.model import ClusterSpec, UserSpec
from dalsegno.spec.section import Section
from dalsegno.spec.slurm import QosSpec, ReservationSpec


def known_qos(spec: ClusterSpec) -> list[str]:
    """Return the QOS that the file may refer to: those that it defines, and Slurm's own."""
    return [*(qos.name for qos in spec.slurm.qos), BUILT_IN_QOS]


def check_policy(spec: ClusterSpec, report: Problems) -> None:
    """Check QOS that preempt others, and partitions with a preempt mode."""
    for qos in spec.slurm.qos:
        _preempts(qos, spec, report)
    for partition in spec.partitions:
        if partition.preempt_mode not in ("", "OFF") and not preempts(spec) and report.whole("slurm"):
            what = f"partition `{partition.name}` has a `preempt_mode`, but nothing preempts on this cluster"
            report.add(partition, "preempt_mode", what, "add `slurm: {preemption: {by: partition}}`")


def preempts(spec: ClusterSpec) -> bool:
    """Return whether preemption is on, because it is configured or because a QOS preempts another."""
    return spec.slurm.preemption is not None or any(qos.preempts for qos in spec.slurm.qos)


def _preempts(qos: QosSpec, spec: ClusterSpec, report: Problems) -> None:
    known = known_qos(spec)
    for other in qos.preempts:
        if other == qos.name:
            report.add(qos, "preempts", f"qos `{qos.name}` preempts itself", "name another QOS")
        elif other not in known and report.unnamed(other, "slurm", "qos"):
            what = f"qos `{qos.name}` preempts `{other}`, which is not a QOS"
            report.add(qos, "preempts", what, did_you_mean(other, known, "add it under `slurm: qos:`"))
    by_partition = spec.slurm.preemption is not None and spec.slurm.preemption.by == "partition"
    if qos.preempts and by_partition and report.whole("slurm", "preemption"):
        what = f"qos `{qos.name}` preempts others, but preemption is by partition"
        report.add(qos, "preempts", what, "set `slurm: {preemption: {by: qos}}`, or leave `preempts` out")


_NO_DATABASE = "remove it: HyperPod runs slurmdbd on newer images, but Dal Segno neither sets it up nor changes it yet"
_ENFORCE = "Slurm applies limits only with `slurm: {enforce: [associations, limits, qos]}`"
_LIMITS = {"max_time", "max_tres_per_user", "max_jobs_per_user", "group_tres", "max_gpus"}
_WEIGHTS = ("fair_share", "qos", "half_life", "usage_reset")
_OF_USERS = ("accounts", "default_account", "qos", "default_qos", "fair_share", "max_gpus")


def check_accounting(spec: ClusterSpec, report: Problems) -> None:
    """Report settings that have no effect: settings that need accounting, and limits that Slurm does not enforce."""
    if not report.whole("target") or not report.whole("slurm", "accounting"):
        return
    missing = _why_no_accounting(spec)
    if missing is None:
        _check_limits(spec, report)
        return
    what, hint = missing
    if spec.target == "hyperpod" and spec.slurm.accounting and "accounting" in spec.slurm.model_fields_set:
        report.add(spec.slurm, "accounting", "`slurm.accounting` is not built yet on HyperPod", hint)
    for section, field, subject in _needing(spec):
        report.add(section, field, f"{subject} needs accounting, which {what}", hint)


def _why_no_accounting(spec: ClusterSpec) -> tuple[str, str] | None:
    """Return why the cluster has no accounting, and what to do; None if the cluster has accounting."""
    if spec.target == "hyperpod":
        return "is not built yet on HyperPod", _NO_DATABASE
    if not spec.slurm.accounting:
        return "is off", "set `slurm: {accounting: true}`, or leave it out"
    if spec.parallelcluster is not None and spec.parallelcluster.database is None:
        return "on ParallelCluster needs a MySQL server of your own", "add `database:` below `parallelcluster:`"
    return None


def _check_limits(spec: ClusterSpec, report: Problems) -> None:
    if {"limits", "safe"} & set(spec.slurm.enforce) or not report.whole("slurm", "enforce"):
        return
    for section, name in [
        *((qos, f"QOS `{qos.name}`") for qos in spec.slurm.qos),
        *((account, f"account `{account.name}`") for account in spec.accounts),
        *((user, f"user `{user.name}`") for user in spec.users),
    ]:
        for field in sorted(_LIMITS & section.model_fields_set):
            report.add(
                section, field, f"`{field}` of {name} is a limit, but `slurm.enforce` does not include limits", _ENFORCE
            )


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


def known_accounts(spec: ClusterSpec) -> list[str]:
    """Return the accounts that the file may refer to: those that it defines, Slurm's own, and the default account."""
    extra = [DEFAULT_ACCOUNT] if any(not user.accounts for user in spec.users) else []
    return [*(account.name for account in spec.accounts), "root", *extra]


class _KnownNames:
    """The existing accounts and QOS. The methods report names that are not among them."""

    def __init__(self, spec: ClusterSpec, report: Problems) -> None:
        self.report = report
        self._accounts = dict.fromkeys(known_accounts(spec))
        self._qos = dict.fromkeys(known_qos(spec))

    def accounts(self, section: Section, field: str, names: Iterable[str], whose: str) -> None:
        for name in names:
            if name not in self._accounts and self.report.unnamed(name, "accounts"):
                hint = did_you_mean(name, self._accounts, f"add it: `accounts: [{{name: {name}}}]`")
                self.report.add(section, field, f"{whose} the account `{name}`, which does not exist", hint)

    def qos(self, section: Section, field: str, names: Iterable[str], whose: str) -> None:
        for name in names:
            if name not in self._qos and self.report.unnamed(name, "slurm", "qos"):
                hint = did_you_mean(name, self._qos, f"add it: `slurm: {{qos: [{{name: {name}}}]}}`")
                self.report.add(section, field, f"{whose} the qos `{name}`, which does not exist", hint)


def check_people(spec: ClusterSpec, report: Problems) -> None:
    """Check that all named accounts and QOS exist, and that accounts are not each other's parents.

    A user's default account and QOS must be among those of the user. The groups in a user's `allow_privileged` must
    also be among the user's groups.
    """
    known = _KnownNames(spec, report)
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
        for group in user.allow_privileged:
            if group not in user.groups:
                what = f"`allow_privileged` of user `{user.name}` names `{group}`, which is not among their groups"
                report.add(user, "allow_privileged", what, f"add it to `groups` of `{user.name}`", reads=("groups",))
    _check_parents(spec, report)


def _defaults(user: UserSpec, known: _KnownNames) -> None:
    if user.default_account and user.default_account not in (user.accounts or [DEFAULT_ACCOUNT]):
        what = f"`default_account` of user `{user.name}` is `{user.default_account}`, which is not among their accounts"
        known.report.add(user, "default_account", what, f"add it to `accounts` of `{user.name}`", reads=("accounts",))
    if user.default_qos and user.qos and user.default_qos not in user.qos:
        what = f"`default_qos` of user `{user.name}` is `{user.default_qos}`, which is not among their QOS"
        known.report.add(user, "default_qos", what, f"add it to `qos` of `{user.name}`", reads=("qos",))
    elif user.default_qos and not user.qos:
        known.qos(user, "default_qos", [user.default_qos], f"user `{user.name}` uses")


def _check_parents(spec: ClusterSpec, report: Problems) -> None:
    circle = find_cycle({account.name: [account.parent] for account in spec.accounts})
    if circle:
        first = next(account for account in spec.accounts if account.name == circle[0])
        names = ", ".join(f"`{name}`" for name in circle)
        report.add(first, "parent", f"accounts {names} are each other's parents", "put one of them below `root`")


def check_reservations(spec: ClusterSpec, report: Problems) -> None:
    """Check the nodes, the partition and the users of each reservation."""
    for reservation in spec.reservations:
        _nodes_or_count(reservation, report)
        _check_users(reservation, report)
        _partition(reservation, spec, report)
    if spec.reservations and nodes_known(spec, report):
        held = {name: dict.fromkeys(nodes) for name, nodes in members(spec).items()}
        everything = {node: None for nodes in held.values() for node in nodes}
        for reservation in spec.reservations:
            _nodes(reservation, held.get(reservation.partition, everything), report)


def _nodes_or_count(reservation: ReservationSpec, report: Problems) -> None:
    if bool(reservation.nodes) == bool(reservation.node_count):
        what = f"reservation `{reservation.name}` must have either `nodes` or `node_count`"
        report.add(reservation, "name", what, "name the nodes, or give their number", reads=("nodes", "node_count"))


def _check_users(reservation: ReservationSpec, report: Problems) -> None:
    if not reservation.users and not reservation.accounts:
        what = f"reservation `{reservation.name}` has no users and no accounts"
        report.add(reservation, "name", what, "add `users: [root]` or `accounts:`", reads=("users", "accounts"))


def _partition(reservation: ReservationSpec, spec: ClusterSpec, report: Problems) -> None:
    names = [partition.name for partition in spec.partitions]
    if (
        reservation.partition
        and reservation.partition not in names
        and report.unnamed(reservation.partition, "partitions")
    ):
        what = f"reservation `{reservation.name}` is in `{reservation.partition}`, which is not a partition"
        report.add(reservation, "partition", what, did_you_mean(reservation.partition, names))


def _nodes(reservation: ReservationSpec, there: dict[str, None], report: Problems) -> None:
    unknown = next((name for name in reservation.nodes if name not in there), None)
    if unknown:
        why = f"is not in `{reservation.partition}`" if reservation.partition else "does not exist"
        what = f"reservation `{reservation.name}` has the node `{unknown}`, which {why}"
        report.add(reservation, "nodes", what, did_you_mean(unknown, there), reads=("partition",))
    if reservation.node_count and reservation.node_count > len(there):
        what = f"reservation `{reservation.name}` has {reservation.node_count} nodes, but there are only {len(there)}"
        report.add(reservation, "node_count", what, f"write at most {len(there)}", reads=("partition",))

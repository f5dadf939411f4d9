"""What pydantic cannot see: values that are each fine and together impossible. Every check reports all it finds."""

from __future__ import annotations

from dalsegno.spec.checks.accounting import check_accounting
from dalsegno.spec.checks.containers import check_containers
from dalsegno.spec.checks.duplicates import check_duplicates
from dalsegno.spec.checks.health import check_health
from dalsegno.spec.checks.machines import check_machines
from dalsegno.spec.checks.partitions import check_partitions
from dalsegno.spec.checks.people import check_people
from dalsegno.spec.checks.platforms import check_platforms
from dalsegno.spec.checks.policy import check_policy
from dalsegno.spec.checks.raw_settings import check_raw_settings
from dalsegno.spec.checks.report import Report
from dalsegno.spec.checks.reservations import check_reservations
from dalsegno.spec.checks.ssh_hosts import check_ssh_hosts
from dalsegno.spec.checks.storage import check_storage
from dalsegno.spec.checks.targets import check_targets
from dalsegno.spec.checks.topology import check_topology
from dalsegno.spec.model import ClusterSpec

_CHECKS = (
    check_duplicates,
    check_targets,
    check_platforms,
    check_ssh_hosts,
    check_partitions,
    check_machines,
    check_policy,
    check_accounting,
    check_people,
    check_topology,
    check_reservations,
    check_storage,
    check_raw_settings,
    check_health,
    check_containers,
)


def run_checks(spec: ClusterSpec, report: Report) -> None:
    """Runs every check; what they find is in the report."""
    for check in _CHECKS:
        check(spec, report)

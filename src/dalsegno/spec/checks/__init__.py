"""The checks that pydantic cannot do, such as those of several values together. They report all problems."""

from __future__ import annotations

from dalsegno.spec.checks.hyperpod import check_hyperpod
from dalsegno.spec.checks.machines import check_machines, check_partitions, check_topology
from dalsegno.spec.checks.oci import check_oci
from dalsegno.spec.checks.parallelcluster import check_aws_storage, check_parallelcluster
from dalsegno.spec.checks.platforms import check_refusals
from dalsegno.spec.checks.policy import check_accounting, check_people, check_policy, check_reservations
from dalsegno.spec.checks.report import Problems, check_duplicates, check_health, check_monitoring, check_raw_settings
from dalsegno.spec.checks.storage import check_storage
from dalsegno.spec.checks.targets import (
    check_containers,
    check_platforms,
    check_ssh_hosts,
    check_targets,
    check_unbuilt,
)
from dalsegno.spec.model import ClusterSpec

_CHECKS = (
    check_duplicates,
    check_targets,
    check_platforms,
    check_parallelcluster,
    check_hyperpod,
    check_oci,
    check_refusals,
    check_ssh_hosts,
    check_partitions,
    check_machines,
    check_policy,
    check_accounting,
    check_people,
    check_topology,
    check_reservations,
    check_storage,
    check_aws_storage,
    check_raw_settings,
    check_health,
    check_containers,
    check_monitoring,
    check_unbuilt,
)


def run_checks(spec: ClusterSpec, report: Problems) -> None:
    """Run every check and collect the problems in the report."""
    for check in _CHECKS:
        check(spec, report)

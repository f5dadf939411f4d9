"""The NCCL, EFA and RDMA variables that jobs need on an instance type, as data with reasons and sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from dalsegno.hardware.catalog import instances, read_rows

INSTANCE = "DALSEGNO_INSTANCE"  # users set this to the nodes' instance type if Slurm does not report it


@dataclass(frozen=True)
class JobVariable:
    """An environment variable that jobs need. `required_by` names the fabric or the instance type that needs it."""

    name: str
    value: str
    required_by: str
    reason: str
    source: str


@cache
def job_variables() -> tuple[JobVariable, ...]:
    """Return the whole table. The file has spaces in place of the commas in a value, because its cells cannot contain
    commas."""
    return tuple(
        JobVariable(row["variable"], row["value"].replace(" ", ","), row["for"], row["reason"], row["source"])
        for row in read_rows("job_variables.csv")
    )


def variables_for(instance: str) -> tuple[JobVariable, ...]:
    """Return the variables for jobs on this instance type; none if the type is unknown.

    A row for the type overrides a row for its fabric.
    """
    known = instances().get(instance.removeprefix("ml."))
    if known is None:
        return ()
    found = {each.name: each for each in job_variables() if each.required_by == known.fabric}
    found.update({each.name: each for each in job_variables() if each.required_by == known.name})
    return tuple(found.values())


def missing_variables(instance: str, *given: Mapping[str, str]) -> tuple[JobVariable, ...]:
    """Return the variables that jobs on this instance type need and that no environment in `given` contains.

    A variable with an empty value counts as set.
    """
    return tuple(each for each in variables_for(instance) if not any(each.name in env for env in given))


def find_instance_type(features: Iterable[str]) -> str:
    """Return the instance type that ParallelCluster stores in the features of a Slurm node; "" if there is none."""
    return next((each for each in features if each.removeprefix("ml.") in instances()), "")

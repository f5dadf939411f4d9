"""Sections of the cluster file: the health policy, containers, and environment modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from dalsegno.errors import UsageError
from dalsegno.image_name import parse_name
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.slurm import one_of, word
from dalsegno.spec.values import AbsolutePath, PartitionNames, Seconds, Share, matching

_CHECK = r"[a-z][a-z0-9_-]{0,47}"
_MODULE = r"[A-Za-z0-9][A-Za-z0-9_./+-]{0,99}"


def _switch(value: Any) -> Any:
    """Expand `zombies: off` to `zombies: {enabled: false}`."""
    return {"enabled": value} if isinstance(value, bool) else value


def _image(value: str) -> str:
    """Check that a value is a valid name of an image to import. Files and relative paths are refused."""
    try:
        name = parse_name(value)
    except UsageError as error:
        raise fault(f"cannot be {show(value)}", error.hint) from error
    if name.is_path:
        raise fault(f"cannot be {show(value)}", "remove it: a file needs no import")
    if name.path and not name.path.startswith("/"):
        raise fault(f"cannot be {show(value)}", "write an absolute path: `up` may run in any folder")
    return value


CheckName = Annotated[str, matching(_CHECK, "use lowercase letters, digits, `-` and `_`")]
ImageName = Annotated[str, AfterValidator(_image)]
ModuleName = Annotated[str, matching(_MODULE, "write it as for `module load`: `cuda/12.4`")]


class CheckSpec(Section):
    """One health check: on or off, how often, and its thresholds."""

    enabled: bool = Field(default=True, description="Run this check.")
    every: Seconds | None = Field(default=None, description="Interval between two runs of the check.")
    action: Literal["watch", "drain", "reset", "reboot", "replace"] | None = Field(
        default=None, description="Strongest action allowed when this check fails."
    )
    thresholds: dict[CheckName, float] = Field(default={}, description="Thresholds of the check, by name.")


class Reboots(Section):
    """Limits on reboots of a node. A node that reaches a limit is replaced."""

    per_fault: int = Field(default=2, ge=0, le=100, description="Reboots for one kind of fault.")
    per_day: int = Field(default=5, ge=0, le=1000, description="Reboots in a day, for any fault.")
    apart: Seconds = Field(default=7200, description="Minimum time between two reboots.")


class HealthSpec(Section):
    """The health policy: which checks run, and which actions are allowed."""

    mode: Annotated[str, PlainValidator(word("auto", "observe", "off", no="off")), one_of("auto", "observe", "off")] = (
        Field(default="auto", description="auto: act; observe: only report what would be done; off: only watch.")
    )
    armed: PartitionNames = Field(
        default=[], description="With `mode: observe`: partitions in which recovery acts anyway."
    )
    max_out: Share = Field(
        default=0.25, description="Largest share of a partition that automation takes out at a time."
    )
    per_hour: int = Field(
        default=4, ge=0, le=10000, description="Most nodes of a partition that automation takes out in an hour."
    )
    reboots: Reboots = Field(default_factory=Reboots, description="Limits on reboots.")
    checks: dict[CheckName, Annotated[CheckSpec, BeforeValidator(_switch, json_schema_input_type=bool | CheckSpec)]] = (
        Field(default={}, description="Checks by name: `zombies: off`, or a mapping.")
    )


class ContainersSpec(Section):
    """Container jobs: `srun --container-image=…`."""

    enabled: bool | None = Field(
        default=None, description="Offer Pyxis's options. If not given: only if the required tools are installed."
    )
    folder: AbsolutePath | None = Field(default=None, description="Folder for imported images (.sqsh).")
    images: list[ImageName] = Field(
        default=[], description="Images that `up` imports, named as for `--container-image`."
    )


class Modules(Section):
    """Environment modules (Lmod)."""

    enabled: bool = Field(default=False, description="Set up Lmod on every node.")
    paths: list[AbsolutePath] = Field(default=[], description="Folders with modulefiles.")
    load: list[ModuleName] = Field(default=[], description="Modules loaded for every user.")


# Health checks and their thresholds. A test compares this table with the checks in `dalsegno.health`.
CHECK_THRESHOLDS: Mapping[str, tuple[str, ...]] = {
    "xid": ("window_s", "repeats"),
    "gpu-count": (),
    "gpu-ecc": ("corrected",),
    "gpu-rows": ("rows",),
    "gpu-temperature": ("margin_c", "least_c"),
    "gpu-heating": ("within_min", "near_c", "window_s", "least_s"),
    "gpu-clocks": ("least_share",),
    "gpu-leftovers": ("used_mib",),
    "nvlink": ("errors",),
    "pcie-width": ("lanes",),
    "fabric-manager": (),
    "dcgm": (),
    "fabric-ports": ("count",),
    "fabric-flaps": ("most", "window_s", "after_boot_s"),
    "fabric-errors": ("most",),
    "network": ("percent", "least", "window_s"),
    "kernel-log": ("window_s",),
    "oom": ("window_s",),
    "disk": ("warn_percent", "fail_percent"),
    "inodes": ("fail_percent",),
    "memory": ("warn_share", "fail_share"),
    "stuck": ("older_than_s",),
    "zombies": ("older_than_s",),
    "clock": ("warn_s", "fail_s"),
    "nvme": (),
    "slurmd": (),
    "munge": (),
    "file-systems": (),
    "containers": (),
    "host-names": (),
    "cloud-notice": ("maintenance_s", "reservation_s"),
}
# Load tests of the validation that can be switched off under `checks`, like health checks. They have no other settings.
LOAD_TESTS = ("load-product", "load-memory", "load-loopback", "pair-collective")
# `corruption`: whether a node is drained if a run has found that the node computes wrong gradients. By default, only
# runs of root and of the cluster's owner have that effect.
SWITCHES = (*LOAD_TESTS, "corruption")

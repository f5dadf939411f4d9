"""The faults that can be injected, as a table that all targets share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.health.result import Remedy


@dataclass(frozen=True)
class FaultOptions:
    """The options of a fault; None stands for the default of that fault."""

    for_s: float | None = None
    code: int | None = None
    gpu: int | None = None
    count: int | None = None
    percent: float | None = None
    rate: str | None = None
    peer: str | None = None
    by_s: float | None = None
    until: Remedy | None = None
    same: bool | None = None
    run: str | None = None
    rank: int | None = None

    def given(self) -> dict[str, object]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class InjectableFault:
    """A kind of fault. `ended_by` is the lightest remedy that ends the fault; NONE if the fault needs no remedy.

    A `safe` fault affects only the user's own run, so it is allowed on real nodes.
    """

    name: str
    what: str
    options: tuple[str, ...] = ()
    ended_by: Remedy = Remedy.REBOOT
    safe: bool = False
    undone: str = "`--clear`"  # how a user undoes the fault


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected into a node and lasts, for some time or until it is undone."""

    fault: str
    node: str
    at: float  # seconds since 1970
    for_s: float | None = None
    ended_by: str = ""  # the lightest remedy that ends the fault, such as "reboot"; "" if unknown


# An injected Xid ends with the remedy that would end a real one. A GPU reset ends every Xid that is not listed.
XID_DEPTH = {54: Remedy.REPLACE, 79: Remedy.REBOOT, 151: Remedy.REBOOT, 168: Remedy.REBOOT}
_UP = "`dalsegno up`"
_NOTHING = "nothing to undo"
_GPU = ("for_s", "gpu", "until")

FAULTS = {
    each.name: each
    for each in (
        InjectableFault("power-off", "The node loses power, without warning.", undone=_UP),
        InjectableFault("slurmd-dead", "slurmd is killed and stays dead; jobs on the node continue.", ("for_s",)),
        InjectableFault("agent-dead", "The node agent is killed and stays dead.", ("for_s",)),
        InjectableFault(
            "xid", "A GPU reports an Xid in the kernel's log: `inject xid 79 NODE`.", (*_GPU, "code"), Remedy.RESET
        ),
        InjectableFault("ecc", "A GPU counts uncorrected memory errors (--count).", (*_GPU, "count"), Remedy.RESET),
        InjectableFault("gpu-lost", "A GPU has disappeared from the PCI bus.", _GPU, Remedy.REBOOT),
        InjectableFault("gpu-hot", "A GPU is at its temperature limit and slows down.", _GPU, Remedy.REPLACE),
        InjectableFault("nvlink", "NVLinks of a GPU (--count) are down, with errors.", (*_GPU, "count"), Remedy.RESET),
        InjectableFault(
            "slow-gpu", "A GPU's power brake limits its clock to a third.", _GPU, Remedy.REPLACE, safe=True
        ),
        InjectableFault("link-down", "The node's network cable is unplugged: no carrier.", ("for_s",)),
        InjectableFault("link-flap", "The cable is unplugged and plugged in again, --count times.", ("count",)),
        InjectableFault("net-cut", "All packets of the node are dropped while its link stays up.", ("for_s",)),
        InjectableFault("net-slow", "The node's network is slow: --rate (1mbit) both ways.", ("for_s", "rate")),
        InjectableFault(
            "link-slow", "The node's link to one other node, --peer, is slow: --rate (1mbit) both ways.",
            ("for_s", "rate", "peer"),
        ),
        InjectableFault("net-loss", "--percent (30) of the node's packets are lost, both ways.", ("for_s", "percent")),
        InjectableFault("disk-full", "The node's own disk is full to the last byte.", ("for_s",)),
        InjectableFault("fs-hang", "The shared home folders hang: processes that access them wait.", ("for_s",)),
        InjectableFault(
            "munge-dead", "munge does not answer on the node, so Slurm rejects its messages.", ("for_s",)
        ),
        InjectableFault("clock-skew", "The node's clock is wrong, --by 5m or so.", ("for_s", "by_s", "until")),
        InjectableFault(
            "oom",
            "The kernel's log reports that memory ran out; the largest process of a job there, if any, is killed.",
            ended_by=Remedy.REBOOT,
        ),
        InjectableFault(
            "worker-kill", "One worker of a run is killed: the lowest rank there, or --rank.", ("run", "rank"),
            Remedy.NONE, safe=True, undone=_NOTHING,
        ),
        InjectableFault(
            "worker-hang", "One worker of a run is stopped: the lowest rank there, or --rank.",
            ("for_s", "run", "rank"), safe=True,
        ),
        InjectableFault(
            "bit-flip",
            "One bit is wrong in the gradients of one worker that calls `verify`: the lowest rank there, or --rank.",
            ("for_s", "run", "rank"),
        ),
        InjectableFault(
            "cloud-notice",
            "The cloud announces that it takes the node in --by (2m), but the node keeps running.",
            ("for_s", "by_s", "until"), Remedy.REPLACE,
        ),
        InjectableFault(
            "bad-replacement",
            "The next --count (1) machines that replace this one have a bad GPU; "
            "with --same-gpus, they have the old machine's GPUs.",
            ("count", "same"), Remedy.NONE,
        ),
    )
}  # fmt: skip
SAFE = ", ".join(each.name for each in FAULTS.values() if each.safe)

OPTION_NAMES = {
    "for_s": "--for", "code": "CODE", "gpu": "--gpu", "count": "--count", "percent": "--percent", "rate": "--rate",
    "peer": "--peer",     "by_s": "--by", "until": "--until", "same": "--same-gpus", "run": "--run", "rank": "--rank",
}  # fmt: skip


def find_fault(name: str) -> InjectableFault:
    if name in FAULTS:
        return FAULTS[name]
    hint = did_you_mean(name, FAULTS, "`dalsegno inject --list` shows them")
    raise UsageError(f"there is no fault `{name}`", hint=hint)


def check_options(fault: InjectableFault, options: FaultOptions) -> None:
    """Raise an error if an option has no effect on this fault, or if a required option is missing."""
    for name in options.given():
        if name not in fault.options:
            whose = next(each.name for each in FAULTS.values() if name in each.options)
            raise UsageError(
                f"`{OPTION_NAMES[name]}` has no effect on `{fault.name}`", hint=f"leave it out; try `{whose}`"
            )
    if "code" in fault.options and options.code is None:
        raise UsageError(f"`{fault.name}` needs a code", hint=f"such as `dalsegno inject {fault.name} 79 NODE`")
    if "peer" in fault.options and options.peer is None:
        raise UsageError(
            f"`{fault.name}` needs the other end of the link",
            hint=f"such as `dalsegno inject {fault.name} NODE --peer NODE`",
        )

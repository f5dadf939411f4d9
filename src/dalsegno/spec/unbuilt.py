"""Parts of the cluster file that no code implements yet. The change that implements an entry removes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnbuiltField:
    """A field that is refused if it is set, because users would expect it to work."""

    path: str  # such as `users.ssh_keys`, which means this field of every user
    reason: str
    targets: tuple[str, ...] = ()  # the targets for which the field is refused; empty for all


_NO_SIZE = "head and login nodes of a local cluster have no size of their own"
UNBUILT_FIELDS = (
    UnbuiltField("modules", "nothing sets up environment modules"),
    *(
        UnbuiltField(f"{machine}.{size}", _NO_SIZE, ("local",))
        for machine in ("head", "login")
        for size in ("instance", "cpus", "memory")
    ),
)

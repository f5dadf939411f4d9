"""Which plugin a cluster has, or shall have: Pyxis where it is installed, ours where there is none. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.containers.plugstack.facts import HostFacts, Kind, StackLine

# Without it root's kernel reads the image of every user who starts a job: a file system made to break it would.
AS_USER = "squashfs=user"


def choose(hosts: Sequence[HostFacts]) -> Kind | None:
    """The one that works, Pyxis first: a cluster must have the same everywhere. None: there is none to be had."""
    works = {host.working.kind for host in hosts if host.working}
    if Kind.PYXIS in works or (not works and any(host.installed(Kind.PYXIS) for host in hosts)):
        return Kind.PYXIS
    return Kind.OURS if Kind.OURS in works else None


def example(hosts: Sequence[HostFacts], kind: Kind | None) -> StackLine | None:
    """The line that other hosts shall have too: one that works, else one that is written."""
    working = [host.working for host in hosts if host.working]
    written = [line for host in hosts for line in host.registered]
    return next((line for line in (*working, *written) if line.kind is kind), None)


def line_for(host: HostFacts, hosts: Sequence[HostFacts]) -> str:
    """What this host's plugstack.conf shall say, of a plugin that is on it; "" if it has none."""
    kind = choose(hosts)
    model = example(hosts, kind)
    if kind is None:
        return ""
    if model and host.is_there(model.plugin):
        return " ".join(["required", model.plugin, *model.arguments])
    found = host.installed(kind) if kind is Kind.PYXIS else ""
    return " ".join(["required", found, *(model.arguments if model else ())]) if found else ""


def wrong_lines(host: HostFacts, hosts: Sequence[HostFacts], own: bool) -> tuple[StackLine, ...]:
    """Lines that name a plugin that is not there, or another than the cluster's; ours, if root reads images by it.
    `own`: a cluster that we made, whose lines `up` writes."""
    kind = choose(hosts)
    missing, unsafe = host.missing, reads_as_root(host, own)
    return tuple(
        line for line in host.lines if line in missing or line == unsafe or (kind and line.kind not in (None, kind))
    )


def reads_as_root(host: HostFacts, own: bool) -> StackLine | None:
    """The line by which root's kernel mounts users' images, on a cluster that is not ours."""
    line = host.working
    return line if line and line.kind is Kind.OURS and AS_USER not in line.arguments and not own else None


def slurm_version(hosts: Sequence[HostFacts]) -> str:
    """Of the host where our plugin is compiled: the first that answered, and those where jobs are handed in first."""
    return next((host.slurm for host in sorted(hosts, key=lambda host: not host.login) if not host.silent), "")

"""Which hosts have one plugstack.conf: what is written to it on one of them holds on all. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dalsegno.containers.plugstack.facts import HostFacts

# What `stat` calls file systems that no other host has; of any other it may be that the file is shared.
OWN = frozenset(
    ("ext2/ext3", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "tmpfs", "ramfs", "overlayfs")
)


def shares(host: HostFacts, hosts: Sequence[HostFacts]) -> bool:
    """Whether its plugstack.conf is, or may be, another's too. A server has on its own disk what its clients share."""
    if host.configless or host.file_system not in OWN:
        return True
    return any(each.place == host.place for each in hosts if each.host != host.host)


def readers(writer: HostFacts, hosts: Sequence[HostFacts]) -> list[HostFacts]:
    """The hosts that have a line which is written on this one; of those that answered."""
    shared = shares(writer, hosts)
    return [
        each
        for each in hosts
        if each.host == writer.host or each.configless or (shared and each.stack and shares(each, hosts))
    ]


def without(plugin: str, readers: Sequence[HostFacts], installed: Collection[tuple[str, str]]) -> list[HostFacts]:
    """Those that have it not, and did not get it since they were asked: with a line that requires it they start no job.
    `installed`: hosts, and plugins that came to them."""
    return [each for each in readers if (each.host, plugin) not in installed and not each.is_there(plugin)]

"""What would put a cluster's hosts right, as values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from posixpath import basename

from dalsegno.containers.plugstack.choice import AS_USER, choose, line_for, reads_as_root, slurm_version, wrong_lines
from dalsegno.containers.plugstack.facts import HostFacts, Kind, StackLine
from dalsegno.containers.plugstack.sharing import shares

FOLDER = "/var/lib/dalsegno/containers"  # of our plugin and what it keeps, on hosts that are not ours


@dataclass(frozen=True)
class Repair:
    """On one host: a line for its plugstack.conf, others out of use, our plugin's files first, folders for users."""

    host: str
    file: str = ""
    add: str = ""
    drop: tuple[StackLine, ...] = ()
    install: str = ""  # the folder that our plugin's files come to
    folders: tuple[str, ...] = ()
    restart: bool = False  # Pyxis makes folders of its own when slurmd starts
    hand_out: bool = False  # has slurmctld give its files to the nodes anew
    open: str = ""  # why images cannot be imported by their names there: others can write to this

    @property
    def plugin(self) -> str:
        """Ours, where its files come to."""
        return f"{self.install}/{Kind.OURS.value}" if self.install else ""

    def files(self) -> Repair:
        """Its first half: files, which nobody uses yet."""
        return Repair(self.host, install=self.install)

    def lines(self) -> Repair:
        """The other half, when all who read the line have the files."""
        return replace(self, install="")

    def sentences(self) -> list[str]:
        done = [
            (self.install, f"installs Dal Segno's plugin in {self.install}"),
            (self.add, f"adds `{self.add}` to {self.file}"),
            (self.open, f"names no `dalsegno` in it, so that images are files there: others can write to {self.open}"),
            *((line, f"puts `{line.text}` in {line.file} out of use") for line in self.drop),
            *((folder, f"opens {folder} to users") for folder in self.folders),
            (self.restart, "restarts slurmd, where systemd keeps it; jobs go on"),
            (self.hand_out, "has slurmctld hand its files out (scontrol reconfigure)"),
        ]
        return [text for condition, text in done if condition]


def decide_repairs(
    hosts: Sequence[HostFacts], own: bool, built: str, folder: str = FOLDER
) -> tuple[list[Repair], bool]:
    """What can be done, and whether slurmctld must hand its files out anew. `built`: the name of our plugin's build."""
    repairs = [repair for host in hosts if (repair := _repair(host, hosts, own, built, folder))]
    handed_out = any(host.configless and ("srun" not in host.knows or reads_as_root(host, own)) for host in hosts)
    return [*repairs, *([] if own else _files_for_readers(hosts, repairs, f"{folder}/{built}"))], handed_out


def _files_for_readers(hosts: Sequence[HostFacts], repairs: Sequence[Repair], target: str) -> list[Repair]:
    """Our plugin's files for hosts that have, or will have, its line from others; it loads in the same Slurm only."""
    plugin = f"{target}/{Kind.OURS.value}"
    named = [each.add.split()[1] for each in repairs if each.add] + [
        line.plugin for h in hosts for line in h.registered
    ]
    served = {each.host for each in repairs if each.install}
    return [
        Repair(host.host, install=target)
        for host in hosts
        if choose(hosts) is not Kind.PYXIS and plugin in named and host.host not in served and not host.is_there(plugin)
        and not host.silent and host.slurm == slurm_version(hosts) and shares(host, hosts)
    ]  # fmt: skip


def in_vain(hosts: Sequence[HostFacts], mended: Sequence[Repair]) -> list[HostFacts]:
    """Those that were given a line, and do not know the option all the same: what was added does not load there."""
    given = {each.host for each in mended if each.add}
    return [host for host in hosts if host.host in given and not host.silent and "srun" not in host.knows]


def _repair(host: HostFacts, hosts: Sequence[HostFacts], own: bool, built: str, folder: str) -> Repair | None:
    if host.silent or host.configless or not host.stack.startswith("/"):
        return None
    folders = tuple(dict.fromkeys(each.common for each in host.closed if "enroot" in each.common))
    drop = wrong_lines(host, hosts, own)
    kept = [line for line in host.registered if line not in drop]
    if "srun" in host.knows and not drop:
        return Repair(host.host, folders=folders) if folders else None
    target = f"{folder}/{built}"
    if (unsafe := reads_as_root(host, own)) and host.slurm == slurm_version(hosts) and choose(hosts) is Kind.OURS:
        line = " ".join(["required", f"{target}/{Kind.OURS.value}", *unsafe.arguments, AS_USER])
        return Repair(host.host, host.stack, line, drop, target, folders)
    if (line := line_for(host, hosts)) and not any(each.plugin == line.split()[1] for each in kept):
        restart = choose(hosts) is Kind.PYXIS and not own
        again = target if line.split()[1] == f"{target}/{Kind.OURS.value}" and not own else ""  # it may be half there
        return Repair(host.host, host.stack, line, drop, again, folders, restart)
    if line:
        return Repair(host.host, host.stack, "", drop) if drop else None  # it is named, and does not load
    if others := tuple(each for each in drop if each.kind is None):
        return Repair(host.host, host.stack, "", others)  # with these, no plugin shows whether it works
    if choose(hosts) is Kind.PYXIS or own or host.slurm != slurm_version(hosts):
        return None  # to be installed there; or to be had from the cluster file; or ours would not load there
    if right := [each for each in host.registered if each.plugin == f"{target}/{Kind.OURS.value}"]:
        wrong = tuple(each for each in host.registered if each not in right)
        return Repair(host.host, host.stack, "", wrong, install=target)  # the line is there, and its files are not
    line = our_line(host, target, folder)
    return Repair(host.host, host.stack, line, host.registered, install=target, open=host.open)


def our_line(host: HostFacts, target: str, folder: str) -> str:
    importing = [f"import={host.dalsegno}"] if basename(host.dalsegno) == "dalsegno" else []
    return " ".join(
        [
            "required",
            f"{target}/{Kind.OURS.value}",
            f"data={folder}/kept",
            f"cache={folder}/unpacked",
            AS_USER,
            *importing,
        ]
    )

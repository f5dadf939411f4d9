"""What hosts would answer after repairs, if each of them helps: so that all of a plan is told before any is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dalsegno.containers.plugstack.facts import HostFacts, StackLine
from dalsegno.containers.plugstack.repairs import Repair
from dalsegno.containers.plugstack.sharing import readers

BOTH = frozenset(("srun", "sbatch"))


def imagine(hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> list[HostFacts]:
    """After these. A line that is written to a file that hosts share is there for all of them."""
    after = {host.host: host for host in hosts}
    for repair in repairs:
        writer = after[repair.host]
        after[writer.host] = replace(
            writer,
            plugins=(*writer.plugins, *([repair.plugin] if repair.plugin else [])),
            closed=tuple(each for each in writer.closed if each.common not in repair.folders),
        )
        for reader in readers(writer, list(after.values())) if repair.add or repair.drop else ():
            if not reader.configless:
                after[reader.host] = _with_lines(after[reader.host], repair)
    return [_answering(host) if host not in hosts else host for host in after.values()]


def imagine_handed_out(hosts: Sequence[HostFacts]) -> list[HostFacts]:
    """After slurmctld has given its files out: what is written where jobs are handed in is everywhere."""
    source = next((host for host in hosts if host.login), None)
    lines = source.lines if source else ()
    return [_answering(replace(host, lines=lines, files=(host.stack,))) if host.configless else host for host in hosts]


def _with_lines(host: HostFacts, repair: Repair) -> HostFacts:
    dropped = {line.text for line in repair.drop}
    kept = tuple(line for line in host.lines if line.text not in dropped and line.text != repair.add)
    added = (StackLine(host.stack, repair.add),) if repair.add else ()
    return replace(host, lines=(*kept, *added), files=host.files or (host.stack,))


def _answering(host: HostFacts) -> HostFacts:
    """As its srun would: it gives up at the first required plugin that is not there."""
    away = [line.plugin for line in host.lines if line.text.startswith("required") and not host.is_there(line.plugin)]
    if away:
        return replace(host, errors=(f"srun: error: {away[0]}: cannot open shared object file",), knows=frozenset())
    knows = BOTH if any(host.is_there(line.plugin) for line in host.registered) else frozenset()
    return replace(host, errors=(), knows=knows)

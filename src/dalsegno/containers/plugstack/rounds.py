"""Who is mended when: those where jobs are handed in, until they need nothing more, and only then the nodes. The files
of our plugin come to all of them before any line: one that requires what is not there keeps every job from starting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.containers.plugstack.facts import HostFacts
from dalsegno.containers.plugstack.repairs import Repair, in_vain
from dalsegno.containers.plugstack.sharing import readers, without


class Hands(Protocol):
    """What is asked of hosts and done to them."""

    def ask(self) -> list[HostFacts]: ...

    def decide(self, hosts: Sequence[HostFacts]) -> tuple[list[Repair], bool]:
        """As `decide_repairs`."""
        ...

    def mend(self, hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> list[Repair]:
        """Those that were done."""
        ...

    def hand_out(self) -> None:
        """Has slurmctld give its files to the nodes anew."""
        ...

    def hold_back(self, lacking: Sequence[HostFacts], plugin: str) -> None:
        """Tells that no line is written, for these would read it, and have not the plugin that it requires."""
        ...

    def leave_nodes(self, unmended: Sequence[HostFacts], vain: bool) -> None:
        """Tells that no node gets a line, for these do not know the option; `vain`: in spite of their repair."""
        ...


def mend_in_rounds(hands: Hands, hosts: Sequence[HostFacts]) -> list[Repair]:
    """All that was done. A line that goes may show what else is to be done, so each round is decided anew. Where hosts
    share their files, the nodes are mended with the logins; and what does not help there is not done to the rest."""
    work = _Work(hands, hosts)
    if work.logins():
        work.nodes()
    return work.mended


@dataclass
class _Work:
    hands: Hands
    hosts: Sequence[HostFacts]
    mended: list[Repair] = field(default_factory=list)
    tried: list[Repair] = field(default_factory=list)

    def logins(self) -> bool:
        """Whether it is the nodes' turn."""
        names = {host.host for host in self.hosts if host.login}
        handed_out = False
        while True:
            repairs, stale = self.hands.decide(self.hosts)
            theirs = [each for each in repairs if each.host in names]
            if (stale or any(each.add or each.install for each in theirs)) and self._bring_files(theirs):
                self._bring_files(repairs)
            lines = self._lines(theirs)
            if self._held_back(lines, stale):
                return False
            done = self._do(lines)
            if stale and (done or (not handed_out and any(host.login and host.working for host in self.hosts))):
                self.hands.hand_out()
                handed_out = True
            if not done:
                break
            self.hosts = self.hands.ask()
            if vain := in_vain(self.hosts, done):
                self.hands.leave_nodes(vain, vain=True)
                return False
        wanted = {each.host for each in theirs}
        unmended = [host for host in self.hosts if host.host in wanted and "srun" not in host.knows]
        if unmended:
            self.hands.leave_nodes(unmended, vain=False)
        return not unmended

    def nodes(self) -> None:
        names = {host.host for host in self.hosts if not host.login}
        while True:
            repairs, _ = self.hands.decide(self.hosts)
            self._bring_files(repairs)
            lines = self._lines([each for each in repairs if each.host in names])
            if self._held_back(lines, stale=False):
                return
            done = self._do(lines)
            if not any(each.drop and not each.add for each in done):
                return  # else more may show now
            self.hosts = self.hands.ask()

    def _bring_files(self, repairs: Sequence[Repair]) -> bool:
        """Whether all came that were to."""
        files = [each.files() for each in repairs if each.install]
        self._do([each for each in files if each not in self.tried])
        return all(each in self.mended for each in files)

    def _lines(self, repairs: Sequence[Repair]) -> list[Repair]:
        """What is to be done then, but where the host's own files did not come."""
        here = [each for each in repairs if not each.install or each.files() in self.mended]
        return [lines for each in here if (lines := each.lines()).sentences() and lines not in self.tried]

    def _held_back(self, lines: Sequence[Repair], stale: bool) -> bool:
        """Whether some host would read a line without having its plugin."""
        hosts = {host.host: host for host in self.hosts}
        installed = {(each.host, each.plugin) for each in self.mended if each.install}
        added = [(each.add.split()[1], readers(hosts[each.host], self.hosts)) for each in lines if each.add]
        if stale:  # what is right where slurmctld is comes to the others too
            served = [host for host in self.hosts if host.configless and not host.silent]
            added += [(host.working.plugin, served) for host in self.hosts if host.login and host.working]
        for plugin, who in added:
            if lacking := without(plugin, who, installed):
                self.hands.hold_back(lacking, plugin)
                return True
        return False

    def _do(self, repairs: Sequence[Repair]) -> list[Repair]:
        done = self.hands.mend(self.hosts, repairs) if repairs else []
        self.tried += repairs
        self.mended += done
        return done

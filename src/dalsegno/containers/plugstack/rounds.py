"""Who is mended when: those where jobs are handed in, until they need nothing more, and only then the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dalsegno.containers.plugstack.facts import HostFacts
from dalsegno.containers.plugstack.repairs import Repair, in_vain


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

    def leave_nodes(self, unmended: Sequence[HostFacts], vain: bool) -> None:
        """Tells that no node is touched, for these do not know the option; `vain`: in spite of their repair."""
        ...


def mend_in_rounds(hands: Hands, hosts: Sequence[HostFacts]) -> list[Repair]:
    """All that was done. A line that goes may show what else is to be done, so each round is decided anew. Where hosts
    share their files, the nodes are mended with the logins; and what does not help there is not done to the rest."""
    tried: list[Repair] = []
    mended: list[Repair] = []
    while True:
        logins = {host.host for host in hosts if host.login}
        repairs, stale = hands.decide(hosts)
        wanted = [each for each in repairs if each.host in logins]
        fresh = [each for each in wanted if each not in tried]
        done = hands.mend(hosts, fresh) if fresh else []
        if stale and (done or (not mended and any(host.login and host.working for host in hosts))):
            hands.hand_out()
        if not done:
            break
        tried += fresh
        mended += done
        hosts = hands.ask()
        if vain := in_vain(hosts, done):
            hands.leave_nodes(vain, vain=True)
            return mended
    if unmended := _without_the_option(hosts, wanted):
        hands.leave_nodes(unmended, vain=False)
        return mended
    rest = [each for each in repairs if each.host not in logins]
    return [*mended, *(hands.mend(hosts, rest) if rest else [])]


def _without_the_option(hosts: Sequence[HostFacts], wanted: Sequence[Repair]) -> list[HostFacts]:
    names = {each.host for each in wanted}
    return [host for host in hosts if host.host in names and "srun" not in host.knows]

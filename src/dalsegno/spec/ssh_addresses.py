"""`train-[1-4]: 10.0.0.[11-14]`: which machine has which address."""

from __future__ import annotations

import re

from dalsegno.hostlist import expand

_BRACKETS = re.compile(r"\[[^\]]*\]")


def addresses(names: str, address: str) -> dict[str, str]:
    """Each name with its address; without one, a machine is reached by its name. ValueError if they do not pair up."""
    machines = expand(names)
    if not address:
        return {name: name for name in machines}
    # Colons of an IPv6 address are no host name; only brackets need spelling out.
    found = _spell_out(address) if _BRACKETS.search(address) else [address]
    if len(found) != len(machines):
        raise ValueError(f"{len(machines)} machines, {len(found)} addresses")
    return dict(zip(machines, found, strict=True))


def _spell_out(address: str) -> list[str]:
    """A hostlist that may end in a domain, `gpu[1-4].example.com`, which Slurm's own may not."""
    head, bracket, tail = address.rpartition("]")
    return [f"{name}{tail}" for name in expand(head + bracket)]

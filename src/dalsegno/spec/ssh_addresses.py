"""`train-[1-4]: 10.0.0.[11-14]`: which machine has which address."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dalsegno.hostlist import expand
from dalsegno.spec.own_machines import Host, Ssh

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


def hosts_of(ssh: Ssh, machines: Iterable[str]) -> dict[str, Host]:
    """How each machine is reached: what `hosts` says of it, else what is said of all, else by its name. A port that is
    not written is left to ssh, whose own settings may have another."""
    common = {key: getattr(ssh, key) for key in ("user", "port", "key", "jump")}
    if "port" not in ssh.model_fields_set:
        del common["port"]
    named = {
        name: host.model_copy(update={"address": address})
        for key, host in ssh.hosts.items()
        for name, address in addresses(key, host.address).items()
    }
    return {
        name: host.model_copy(update={key: value for key, value in common.items() if getattr(host, key) is None})
        for name in machines
        for host in [named.get(name) or Host(address=name)]
    }

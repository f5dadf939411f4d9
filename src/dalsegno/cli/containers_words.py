"""Hosts and what is wrong with their containers, in words. Hosts of which the same is to be said are named together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from dalsegno.containers.plugstack import Finding, HostFacts, Repair
from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress

HEADERS = ["HOSTS", "--container-image", "PLUGIN", "ENROOT"]
Words = TypeVar("Words", bound=tuple[str, ...])


def rows(hosts: Sequence[HostFacts]) -> list[list[str]]:
    return [[names, *row] for row, names in _grouped((host.host, _row(host)) for host in hosts)]


def sentences(found: Sequence[Finding]) -> list[str]:
    groups = _grouped((each.host, (each.what, each.fix)) for each in found)
    return [f"{names}: {what}\n  fix: {fix}" for (what, fix), names in groups]


def plans(repairs: Sequence[Repair]) -> list[str]:
    """What is done on which hosts."""
    groups = _grouped((each.host, tuple(each.sentences())) for each in repairs)
    return [f"{names}: {line}" for lines, names in groups for line in lines]


def failures(failed: Iterable[tuple[str, DalsegnoError]]) -> list[tuple[str, str]]:
    """What kept hosts from being mended, and what to do about it."""
    groups = _grouped((host, (error.what, error.hint)) for host, error in failed)
    return [(f"{names} could not be mended: {what}", hint) for (what, hint), names in groups]


def _row(host: HostFacts) -> tuple[str, str, str]:
    if host.silent:
        return "?", "?", "?"
    line = host.working
    return ("yes" if "srun" in host.knows else "no"), (line.plugin if line else "-"), host.enroot or "-"


def _grouped(said: Iterable[tuple[str, Words]]) -> list[tuple[Words, str]]:
    """In the order in which it was first said."""
    groups: dict[Words, list[str]] = {}
    for host, words in said:
        groups.setdefault(words, []).append(host)
    return [(words, compress(names)) for words, names in groups.items()]


def _of_each(repairs: Sequence[Repair]) -> dict[str, list[str]]:
    """Host by host, all that is done to it in its order."""
    return {
        each.host: [text for other in repairs if other.host == each.host for text in other.sentences()]
        for each in repairs
    }


def absent(silent: Sequence[str], asleep: Sequence[str], install: str) -> list[str]:
    """What becomes of hosts that our plugin could not be brought to, when others get its line; and what to do."""
    told = "where it reads a plugstack.conf that others read too, no job starts there until it has our plugin"
    drain = f"`scontrol update nodename={compress(silent)} state=drain reason=plugin`"
    again = f"run the same again when it answers, and let no job go there before: {drain}"
    image = f"have {install} in what it boots from, or wake it and run the same again before a job goes there"
    return [
        *([f"{compress(silent)} could not be asked: {told}; {again}"] if silent else []),
        *([f"{compress(asleep)} is powered down: {told}; {image}"] if asleep else []),
    ]


def as_json(
    not_asked: Sequence[str],
    hosts: Sequence[HostFacts],
    found: Sequence[Finding],
    done: Sequence[Repair],
    planned: Sequence[Repair] = (),
) -> dict[str, object]:
    return {
        "ok": not found,
        "hosts": [
            {
                "host": host.host, "login": host.login, "asked": not host.silent, "knows": sorted(host.knows),
                "plugstack": host.stack, "plugin": host.working.plugin if host.working else None, "enroot": host.enroot,
            }
            for host in hosts
        ],
        "not_asked": list(not_asked),
        "findings": [{"host": each.host, "what": each.what, "fix": each.fix} for each in found],
        "repaired": [{"host": name, "done": does} for name, does in _of_each(done).items()],
        "planned": [{"host": name, "does": does} for name, does in _of_each(planned).items()],
    }  # fmt: skip

"""Every host is asked, each in the first way that leads to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources

from dalsegno.containers.plugstack.crowd import Tell, each_of
from dalsegno.containers.plugstack.facts import HostFacts, parse_answer, plugins_in_use
from dalsegno.containers.plugstack.ways import Way, last_words, send
from dalsegno.system.processes import Runner

Routes = Mapping[str, Sequence[Way]]  # the ways to each host


def ask_all(
    runner: Runner, routes: Routes, logins: Sequence[str], nodes: Sequence[str], tell: Tell = lambda *_: None
) -> list[HostFacts]:
    """First those where jobs are handed in, then the nodes; plugins that one of them uses are looked for on all."""

    def ask(names: Sequence[str], plugins: Sequence[str], tell: Tell) -> list[HostFacts]:
        return each_of(runner, lambda runner, name: ask_host(runner, name, routes[name], plugins), names, tell)

    theirs = ask(logins, (), lambda *_: None)
    known = plugins_in_use(theirs)
    found = ask(nodes, known, tell)
    if news := [each for each in plugins_in_use(found) if each not in known]:
        theirs = ask(logins, news, lambda *_: None)
    return [*(replace(each, login=True) for each in theirs), *found]


def ask_host(runner: Runner, name: str, ways: Sequence[Way], plugins: Sequence[str]) -> HostFacts:
    """Its answer, in the first way that gives one; else what each way said."""
    why = []
    for way in ways:
        if name in way.closed:
            why.append(way.closed[name])
            continue
        done = send(runner, way, name, question(plugins))
        if (facts := parse_answer(name, done.stdout)) is not None:
            return facts
        why.append(f"{way.name}: {last_words(done)}")
    return HostFacts(name, silent="; ".join(why))


def question(plugins: Sequence[str]) -> list[str]:
    return ["sh", "-c", script("trust.sh", "ask.sh"), "dalsegno", *plugins]


def script(*names: str) -> str:
    """One behind the other."""
    folder = resources.files("dalsegno.containers.plugstack")
    return "".join(folder.joinpath(name).read_text() for name in names)

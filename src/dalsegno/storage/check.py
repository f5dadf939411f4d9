"""Check storage from every node: run the program `storage-probe` on each node, then judge the answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.hostlist import compress
from dalsegno.spec.facts import Storage
from dalsegno.storage.probe import ProbeAnswer, ProbeOrder, ProbeRole
from dalsegno.storage.verdict import StorageReport, judge_storage

PARALLEL = 8  # number of nodes that measure at the same time; with more, the file server would limit the result
MAX_WRITERS = 3  # number of nodes to try as the writer, because the first one may have the wrong file system


class NodePrograms(Protocol):
    """Runs a helper program on a node and returns its output, or raises DalsegnoError."""

    def __call__(self, node: str, program: str, arguments: Sequence[str]) -> str: ...


Answers = Mapping[str, ProbeAnswer | None]


def check_storage(
    storages: Sequence[Storage],
    nodes: Sequence[str],
    user: str,
    ask: NodePrograms,
    *,
    measure: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> list[StorageReport]:
    """Test each storage on all `nodes` with the rights of `user`, or of root for scratch. Return a report for each."""
    reports = []
    for storage in storages:
        say(f"checking {storage.name} at {storage.mount} on {compress(nodes)}")
        if storage.type == "scratch":  # only root may write there, because the prolog creates the folders of jobs
            order = ProbeOrder(storage.mount, secrets.token_hex(8), ProbeRole.ALONE, "root", measure)
            reports.append(judge_storage(storage, _ask_each(ask, nodes, order), "root"))
        else:
            reports.append(judge_storage(storage, _ask_all(storage, nodes, user, ask, measure), user))
    return reports


def _ask_all(storage: Storage, nodes: Sequence[str], user: str, ask: NodePrograms, measure: bool) -> Answers:
    """Let one node write a token, and let all nodes look for it.

    If most nodes do not find it, let another node write a token, because the first writer may be the node with the
    wrong file system.
    """
    best: Answers = {}
    untried = list(nodes)
    for _ in range(MAX_WRITERS):
        if not untried:
            break
        export = storage.source if storage.type == "nfs" else ""
        order = ProbeOrder(storage.mount, secrets.token_hex(8), ProbeRole.READER, user, measure and not best, export)
        answers = _one_round(ask, untried[0], nodes, order)
        speeds = best or answers
        if not best or len(_seers(answers)) > len(_seers(best)):
            best = {node: _with_speed(answers[node], speeds[node]) for node in nodes}
        if 2 * len(_seers(best)) > len(nodes):
            break
        seers = {*_seers(answers), untried[0]}
        untried = [node for node in untried if node not in seers and (found := answers[node]) and not found.error]
    return best


def _one_round(ask: NodePrograms, writer: str, nodes: Sequence[str], order: ProbeOrder) -> Answers:
    first = _answer(ask, writer, replace(order, role=ProbeRole.WRITER))
    written = first is not None and first.token
    rest = [node for node in nodes if node != writer]
    answers = _ask_each(ask, rest, order if written else replace(order, role=ProbeRole.ALONE))
    if written:
        _answer(ask, writer, replace(order, role=ProbeRole.CLEANER))
    return {**answers, writer: first}


def _ask_each(ask: NodePrograms, nodes: Sequence[str], order: ProbeOrder) -> Answers:
    with ThreadPoolExecutor(PARALLEL) as pool:
        return dict(zip(nodes, pool.map(lambda node: _answer(ask, node, order), nodes), strict=True))


def _seers(answers: Answers) -> list[str]:
    return [node for node, answer in answers.items() if answer and answer.token]


def _with_speed(answer: ProbeAnswer | None, measured: ProbeAnswer | None) -> ProbeAnswer | None:
    """Return an answer with the speed that was measured in the first round. Later rounds do not measure it."""
    if answer is None or measured is None:
        return answer
    return replace(answer, mb_per_s=measured.mb_per_s, files_per_s=measured.files_per_s)


def _answer(ask: NodePrograms, node: str, order: ProbeOrder) -> ProbeAnswer | None:
    try:
        return ProbeAnswer.from_json(ask(node, "storage-probe", [order.to_json()]))
    except UsageError:
        raise
    except (DalsegnoError, ValueError):
        return None

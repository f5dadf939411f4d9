"""Explain a run: its state or its end, and its history. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from dalsegno.runs.hang import HangReport, HangSuspect
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.runs.status import RunPhase, RunStatus
from dalsegno.train.contract import SAVED, TERMINATED
from dalsegno.why.answer import AFTER_S, Conclusion, Moment

_HANGING = (RunPhase.RUNNING, RunPhase.STOPPING)


def explain_run(
    status: RunStatus, entries: Sequence[Entry], hang: HangReport | None = None, slow_rank: str = ""
) -> Conclusion:
    """Return the verdict on a run.

    `hang` says why one of its generations hung, according to the evidence in the run's folder. `slow_rank` is a
    sentence about a rank that the others wait for.
    """
    if status.over:
        return _ended(status, entries, hang)
    logs = f"dalsegno logs -f {status.run}"
    current = hang is not None and hang.generation == status.generation
    if hang and current and not _idle(entries, status.generation) and status.phase in _HANGING:
        return Conclusion(f"run {status.run} hangs: {hang.describe()}", _hang_command(status, hang))
    if status.phase is RunPhase.WAITING:
        job = f" (job {status.jobs[0]})" if status.jobs else ""
        return Conclusion(
            f"run {status.run} waits in Slurm's queue{job}{_message_suffix(status)}",
            f"dalsegno why {status.jobs[0]}" if status.jobs else "squeue",
        )
    if status.phase is RunPhase.RUNNING and (idle := _idle(entries, status.generation)):
        rank = next(iter(idle.get("ranks", {})), "0")
        logs = f"dalsegno logs {status.run} --rank {rank}"
        why = f"; {hang.describe()}" if hang and current else ""
        return Conclusion(f"run {status.run} hangs: {idle.get('text')}{why}", logs)
    if status.phase is RunPhase.RUNNING:
        slow = f"; {slow_rank}" if slow_rank else ""
        node = status.slow_rank.node if slow_rank and status.slow_rank else ""
        return Conclusion(
            f"run {status.run} is training, in generation {status.generation}{_because(entries)}{slow}",
            f"dalsegno why {shlex.quote(node)}" if node else logs,
        )
    return Conclusion(f"run {status.run} is {status.phase.value}{_message_suffix(status)}{_because(entries)}", logs)


def _idle(entries: Sequence[Entry], generation: int) -> Entry | None:
    """Return the journal entry that reports idle ranks of this generation; None if there is none.

    An entry without ranks reports that the ranks work again.
    """
    found = [
        entry for entry in entries if entry.get("event") == RunEvent.IDLE and entry.get("generation") == generation
    ]
    return found[-1] if found and found[-1].get("ranks") != {} else None


def generation_to_explain(status: RunStatus, entries: Sequence[Entry]) -> int:
    """Return the generation whose hang may explain the run: the last one that failed or was idle, or else the current
    one."""
    kinds = (RunEvent.FAILED, RunEvent.HUNG, RunEvent.IDLE)
    failed = [_generation(entry) for entry in entries if entry.get("event") in kinds]
    return failed[-1] if failed else status.generation


def _generation(entry: Entry) -> int:
    """Return the generation that an entry names; 0 if it names none, as in a journal that another user wrote."""
    found = entry.get("generation")
    return found if isinstance(found, int) else 0


def _hang_command(status: RunStatus, hang: HangReport) -> str:
    if hang.suspect is HangSuspect.NODE and hang.nodes:
        return f"dalsegno why {shlex.quote(hang.nodes[0])}"
    return f"dalsegno doctor {status.run}"


def _ended(status: RunStatus, entries: Sequence[Entry], hang: HangReport | None) -> Conclusion:
    run = status.run
    if status.exit_code == 0:
        after = f" after {status.generation} generations" if status.generation > 1 else ""
        return Conclusion(f"run {run} is done{after}")
    if status.exit_code == SAVED:
        return Conclusion(f"run {run} saved its state and stopped; it can be resumed", f"dalsegno runs show {run}")
    if status.exit_code == TERMINATED or status.cause.cancelled:
        return Conclusion(f"run {run} was cancelled or terminated{_message_suffix(status)}", f"dalsegno logs {run}")
    failed = [entry for entry in entries if entry.get("event") == RunEvent.FAILED and not entry.get("noise")]
    if hang and all(_generation(entry) < hang.generation for entry in failed):
        sentence = f"run {run} ended with code {status.exit_code}: {hang.describe()}"
        return Conclusion(sentence, _hang_command(status, hang))
    if not failed:
        return Conclusion(
            f"run {run} ended with code {status.exit_code}{_message_suffix(status)}", f"dalsegno logs {run}"
        )
    first = _first_of_last(failed)
    again = len({entry.get("generation") for entry in failed if _fault(entry) == _fault(first)})
    times = f", {again} times in a row" if again > 1 else ""
    what = f"rank {first.get('rank')} on {first.get('node')} {first.get('what')}{times}"
    return Conclusion(
        f"run {run} ended with code {status.exit_code}: {what}", f"dalsegno logs {run} --rank {first.get('rank')}"
    )


def _fault(entry: Entry) -> object:
    """Return a value that is the same for the same kind of fault: the signature or, in older journals, the exit
    code."""
    return entry.get("signature") or entry.get("code")


def aftermath_s(status: RunStatus) -> float:
    """Return how many seconds after a run's end a node event may still explain the end; 0 if the run did not fail."""
    failed = status.exit_code not in (0, SAVED, TERMINATED) and not status.cause.cancelled
    return AFTER_S if failed else 0.0


def _first_of_last(failed: Sequence[Entry]) -> Entry:
    """Return the first failure in the last generation that failed. It made the other ranks fail."""
    last = max(int(entry.get("generation", 0)) for entry in failed)
    return next(entry for entry in failed if int(entry.get("generation", 0)) == last)


def _because(entries: Sequence[Entry]) -> str:
    """Return a clause about the last fault since the previous generation started; "" if there was none."""
    begins = [at for at, entry in enumerate(entries) if entry.get("event") == RunEvent.GENERATION]
    since = entries[begins[-2] :] if len(begins) > 1 else entries
    texts = [text for entry in since if (text := _left(entry) or _hung(entry) or _hit(entry))]
    texts = texts or [_failed(entry) for entry in _only_noise(since)]
    return f"; last fault: {texts[-1]}" if texts else ""


def _left(entry: Entry) -> str:
    """Return the text for a node that the run itself decided to leave; "" for other entries.

    The timeline shows the run's own note instead of this text.
    """
    return f"it left {entry.get('node')} ({entry.get('why')})" if entry.get("event") == RunEvent.LEFT else ""


def _hung(entry: Entry) -> str:
    """Return the text for a hang; "" for other entries. The timeline shows the run's own note instead."""
    return (
        f"generation {entry.get('generation')} hung: {entry.get('text')}" if entry.get("event") == RunEvent.HUNG else ""
    )


def _hit(entry: Entry) -> str:
    if entry.get("event") == RunEvent.LOST:
        return f"{entry.get('node')} was lost ({entry.get('why')})"
    if entry.get("event") == RunEvent.COLD:
        return f"{entry.get('node')}: {entry.get('why')}, and its workers with it"
    return _failed(entry) if entry.get("event") == RunEvent.FAILED and not entry.get("noise") else ""


def _failed(entry: Entry) -> str:
    return f"rank {entry.get('rank')} on {entry.get('node')} {entry.get('what')}"


def _only_noise(entries: Sequence[Entry]) -> list[Entry]:
    """Return the first failure if no entry names the real cause: the failure then only reports that a peer has ended.
    Otherwise return an empty list."""
    if any(_left(entry) or _hit(entry) for entry in entries):
        return []
    return [entry for entry in entries if entry.get("event") == RunEvent.FAILED][:1]


def _message_suffix(status: RunStatus) -> str:
    return f": {status.message}" if status.message else ""


def nodes_of_run(entries: Sequence[Entry]) -> list[str]:
    """Return all nodes on which the run has trained, those of the last generation first."""
    named = [entry.get("nodes") for entry in entries if entry.get("event") == RunEvent.GENERATION]
    return list(dict.fromkeys(str(node) for nodes in reversed(named) if isinstance(nodes, list) for node in nodes))


def nodes_given(entries: Sequence[Entry], job: int) -> list[str]:
    """Return all nodes that Slurm allocated to the run in this job, including lost ones, which Slurm forgets."""
    granted = [entry for entry in entries if entry.get("event") == RunEvent.GRANTED and entry.get("job") == job]
    return list(dict.fromkeys(str(node) for entry in granted for node in entry.get("nodes", ())))


def moments_of_run(entries: Sequence[Entry]) -> Iterator[Moment]:
    of_generation = list[Entry]()
    for entry in entries:
        if entry.get("event") == RunEvent.GENERATION:
            yield from (Moment(float(each["at"]), "run", _failed(each)) for each in _only_noise(of_generation))
            of_generation = []
        of_generation.append(entry)
        if text := _text(entry):
            yield Moment(float(entry["at"]), "run", text)


def _text(entry: Entry) -> str:
    event = entry.get("event")
    if event == RunEvent.GENERATION:
        return f"generation {entry.get('generation')} started on {', '.join(map(str, entry.get('nodes', ())))}"
    if event == RunEvent.GRANTED:
        return f"Slurm allocated {', '.join(map(str, entry.get('nodes', ())))} (job {entry.get('job')})"
    if event == RunEvent.ENDED:
        return f"ended with code {entry.get('code')}: {entry.get('why')}"
    if event == RunEvent.SIGNAL:
        return f"{entry.get('signal')} on {entry.get('node')}"
    if event in (RunEvent.NOTE, RunEvent.RESTS, RunEvent.REFUSED):
        return str(entry.get("text") or entry.get("why") or "")
    return _hit(entry)

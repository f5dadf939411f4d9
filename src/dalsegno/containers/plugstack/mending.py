"""Doing repairs: each step may be done again, so a way that failed half-way is followed by the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dalsegno.containers.plugstack.asking import script
from dalsegno.containers.plugstack.compiling import Parcel
from dalsegno.containers.plugstack.repairs import Repair
from dalsegno.containers.plugstack.ways import Way, last_words, send
from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Completed, Runner

ROOT = "it takes root there: `sudo dalsegno containers check --repair`, or a user whom sudo asks for no password there"
AGAIN = "when that is mended, run the same again: what is done stays done"
REFUSED = ("ermission denied", "not permitted", "sudo")
# Without a terminal there is nobody to give a password.
AS_ROOT = 'if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then exec sudo -n "$@"; fi; exec "$@"'
OPEN = 'for each in "$@"; do mkdir -p "$each" && chmod 1777 "$each" || exit 1; done; echo ds:done'
RESTART = "if systemctl is-active -q slurmd 2>/dev/null; then systemctl restart slurmd; fi; echo ds:done"
HAND_OUT = "PATH=$PATH:/usr/local/bin:/opt/slurm/bin; scontrol reconfigure && echo ds:done"
DONE = "ds:done"  # srun ends with 0 where a step could not start for the node's plugins: only this word counts
Step = tuple[list[str], str | None]  # a command, and what it reads


class NotMended(DalsegnoError):
    """Why a host is as it was, or half done."""

    def __init__(self, why: str) -> None:
        super().__init__(why, hint=ROOT if any(word in why for word in REFUSED) else AGAIN)


def mend(runner: Runner, ways: Sequence[Way], repair: Repair, parcel: Parcel | None) -> None:
    """In the first way that leads there and may do it."""
    do(runner, ways, repair.host, list(steps(repair, parcel)))


def hand_out(runner: Runner, ways: Sequence[Way], host: str) -> None:
    """Has slurmctld give its files to the nodes anew."""
    do(runner, ways, host, [(["sh", "-c", HAND_OUT], None)])


def do(runner: Runner, ways: Sequence[Way], host: str, steps: Sequence[Step]) -> None:
    failed = []
    for way in ways:
        if host in way.closed:
            failed.append(way.closed[host])
            continue
        bad = next((done for done in _sent(runner, way, host, steps) if DONE not in done.stdout), None)
        if bad is None:
            return
        failed.append(f"{way.name}: {last_words(bad)}")
    raise NotMended("; ".join(failed))


def _sent(runner: Runner, way: Way, host: str, steps: Sequence[Step]) -> Iterator[Completed]:
    """One step after the other; whoever reads them stops at one that failed."""
    for words, stdin in steps:
        yield send(runner, way, host, ["sh", "-c", AS_ROOT, "dalsegno", *words], stdin)


def steps(repair: Repair, parcel: Parcel | None) -> Iterator[Step]:
    if repair.install:
        if parcel is None:  # its line alone, which requires what is not there, would keep every job from starting
            raise ValueError(f"{repair.host} shall get a plugin that was not compiled")
        kept = [f"{repair.install.rpartition('/')[0]}/{name}" for name in ("kept", "unpacked")]
        yield (
            ["sh", "-c", script("trust.sh", "install.sh"), "dalsegno", parcel.sha256, repair.install, *kept],
            parcel.data,
        )
    for file in dict.fromkeys([*(line.file for line in repair.drop), *([repair.file] if repair.add else [])]):
        out_of_use = [line.text for line in repair.drop if line.file == file]
        added = repair.add if file == repair.file else ""
        yield ["sh", "-c", script("stack.sh"), "dalsegno", file, added, *out_of_use], None
    if repair.folders:
        yield ["sh", "-c", OPEN, "dalsegno", *repair.folders], None
    if repair.restart:
        yield ["sh", "-c", RESTART], None

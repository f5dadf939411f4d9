"""What jobs on a node depend on: slurmd, munge, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.health.check import ALWAYS, Check, Context
from dalsegno.health.checks.late import ask_twice
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.world import World
from dalsegno.system.apart import Late, NoAnswer

# slurmd itself waits for a prolog: it need not be asked, and Slurm's commands must not be.
BESIDE_PROLOG = ALWAYS - {Context.PROLOG}

# munge's own words for a munged that is too busy to answer in time, or to take one more connection.
_TOO_SLOW = re.compile(r"timed[ -]?out|temporarily unavailable", re.IGNORECASE)


def ask_slurmd(world: World) -> tuple[str, bool]:
    """Whether somebody listens on its port, as the kernel says. To call it would fill its log: it complains of callers
    who say nothing."""
    if world.expected.slurmd is None:
        raise NoAnswer(world.expected.untold or "slurm.conf does not tell where slurmd should answer")
    address, port = world.expected.slurmd
    return f"{address}:{port}", port in world.listening()


@dataclass(frozen=True)
class MungeAnswer:
    """What unmunge, or the command that failed, printed. `late`: munged gave no answer in time."""

    said: str
    late: bool = False


def ask_munge(world: World) -> MungeAnswer:
    """Encode a credential and decode it."""
    if world.expected.munge is None:
        raise NoAnswer(world.expected.untold)
    socket = [f"--socket={world.expected.munge}"] if world.expected.munge else []

    def encode_and_decode(timeout_s: float) -> str:
        made = world.run(("munge", "-n", *socket), timeout_s=timeout_s)
        if made.exit_code == 0:
            made = world.run(("unmunge", *socket), stdin=made.stdout, timeout_s=timeout_s)
        said = made.stdout + made.stderr
        if _TOO_SLOW.search(said):
            raise Late(" ".join(said.split()))
        return said

    try:
        return MungeAnswer(ask_twice(world, encode_and_decode))
    except Late as error:
        return MungeAnswer(str(error), late=True)


def needs_munge(world: World) -> bool:
    """So does a cluster of which nothing is known, as far as anybody can tell."""
    expected = world.expected
    return expected.munge is not None or bool(expected.untold and not expected.controllers)


@dataclass(frozen=True)
class Names:
    """An address for each host that the node must find, and for itself; "" for one that it does not find."""

    controllers: Mapping[str, str]
    own: str
    own_address: str


def ask_names(world: World) -> Names:
    own = world.read("/proc/sys/kernel/hostname").strip()
    controllers = {name: _address(world, name) for name in world.expected.controllers}
    return Names(controllers, own, controllers.get(own) or _address(world, own))


def _address(world: World, name: str) -> str:
    try:
        done = ask_twice(world, lambda timeout_s: world.run(("getent", "ahosts", name), timeout_s=timeout_s))
    except Late:
        return ""
    if done.exit_code not in (0, 2):
        raise NoAnswer(f"`getent ahosts {name}` ended with {done.exit_code}")
    if done.exit_code == 0 and not re.match(r"[0-9a-fA-F:.%\w]+\s", done.stdout):
        raise NoAnswer(f"`getent ahosts {name}` is not understood")
    return done.stdout.split()[0] if done.exit_code == 0 else ""


def judge_slurmd(answer: tuple[str, bool]) -> Result:
    where, listens = answer
    return passed(f"slurmd listens at {where}") if listens else failed(f"no slurmd at {where}", Remedy.REBOOT)


def judge_munge(answer: MungeAnswer) -> Result:
    text = answer.said
    if answer.late:
        return failed(f"munge: {text}", Remedy.REBOOT)
    if re.search(r"^STATUS:\s+Success", text, re.MULTILINE):
        return passed("munge makes and reads credentials")
    if found := re.search(r"^STATUS:\s+(.+)$|[Mm]unge: Error: (.+)$", text, re.MULTILINE):
        return failed(f"munge: {found[1] or found[2]}", Remedy.REBOOT)
    raise ValueError(f"unmunge says {text[:80]!r}")


def judge_names(names: Names) -> Result:
    if missing := [name for name, address in names.controllers.items() if not address]:
        return failed(f"no address is found for {', '.join(missing)}", Remedy.DRAIN)
    return passed("host names are found") if names.own_address else warned(f"nobody knows this host's name {names.own}")


SERVICE_CHECKS = (
    Check(
        "slurmd", "it answers", ask_slurmd, judge_slurmd, BESIDE_PROLOG, 1,
        applies=lambda world: world.expected.named or bool(world.expected.untold), settle_s=5,
    ),
    Check(
        "munge", "a credential, made and read", ask_munge, judge_munge, every_s=10,
        applies=needs_munge, settle_s=5,
    ),
    Check("host-names", "the cluster's names are found", ask_names, judge_names, every_s=30, settle_s=10),
)  # fmt: skip

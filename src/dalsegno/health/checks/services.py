"""Checks of the services that jobs depend on: slurmd, munge, host names, containers."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.health.check import ALWAYS, Check, Context
from dalsegno.health.checks.late import ask_twice
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.system.hanging_calls import NoAnswer, TooLate

# slurmd runs the prolog and waits for it, so the prolog need not check slurmd and must not run Slurm's commands.
BESIDE_PROLOG = ALWAYS - {Context.PROLOG}

# Messages that munge prints if munged is too busy to answer in time or to accept another connection.
_TOO_SLOW = re.compile(r"timed[ -]?out|temporarily unavailable", re.IGNORECASE)


def ask_slurmd(node: NodeReader) -> tuple[str, bool]:
    """Return slurmd's address, and whether a process on this node listens on slurmd's port.

    The kernel is asked, because connection attempts would fill slurmd's log with errors.
    """
    if node.expected.slurmd is None:
        raise NoAnswer(node.expected.missing_reason or "slurm.conf gives no port for slurmd")
    address, port = node.expected.slurmd
    return f"{address}:{port}", port in node.listening()


@dataclass(frozen=True)
class MungeAnswer:
    """The output of unmunge, or of the command that failed. `late` says whether munged did not answer in time."""

    output: str
    late: bool = False


def ask_munge(node: NodeReader) -> MungeAnswer:
    """Encode a credential, decode it, and return the output."""
    if node.expected.munge is None:
        raise NoAnswer(node.expected.missing_reason)
    socket = [f"--socket={node.expected.munge}"] if node.expected.munge else []

    def encode_and_decode(timeout_s: float) -> str:
        made = node.run(("munge", "-n", *socket), timeout_s=timeout_s)
        if made.exit_code == 0:
            made = node.run(("unmunge", *socket), stdin=made.stdout, timeout_s=timeout_s)
        output = made.stdout + made.stderr
        if _TOO_SLOW.search(output):
            raise TooLate(" ".join(output.split()))
        return output

    try:
        return MungeAnswer(ask_twice(node, encode_and_decode))
    except TooLate as error:
        return MungeAnswer(str(error), late=True)


def needs_munge(node: NodeReader) -> bool:
    """Return whether the node needs munge; True if nothing is known about the cluster."""
    expected = node.expected
    return expected.munge is not None or bool(expected.missing_reason and not expected.controllers)


@dataclass(frozen=True)
class Names:
    """The addresses of the controllers and of the node itself; "" for a name that cannot be resolved."""

    controllers: Mapping[str, str]
    own: str
    own_address: str


def ask_names(node: NodeReader) -> Names:
    own = node.read("/proc/sys/kernel/hostname").strip()
    controllers = {name: _address(node, name) for name in node.expected.controllers}
    return Names(controllers, own, controllers.get(own) or _address(node, own))


def _address(node: NodeReader, name: str) -> str:
    try:
        done = ask_twice(node, lambda timeout_s: node.run(("getent", "ahosts", name), timeout_s=timeout_s))
    except TooLate:
        return ""
    if done.exit_code not in (0, 2):
        raise NoAnswer(f"`getent ahosts {name}` exited with code {done.exit_code}")
    if done.exit_code == 0 and not re.match(r"[0-9a-fA-F:.%\w]+\s", done.stdout):
        raise NoAnswer(f"`getent ahosts {name}` has unexpected output")
    return done.stdout.split()[0] if done.exit_code == 0 else ""


def judge_slurmd(answer: tuple[str, bool]) -> Result:
    where, listens = answer
    return (
        passed(f"slurmd listens at {where}") if listens else failed(f"slurmd does not listen at {where}", Remedy.REBOOT)
    )


def judge_munge(answer: MungeAnswer) -> Result:
    text = answer.output
    if answer.late:
        return failed(f"munge: {text}", Remedy.REBOOT)
    if re.search(r"^STATUS:\s+Success", text, re.MULTILINE):
        return passed("munge encodes and decodes credentials")
    if found := re.search(r"^STATUS:\s+(.+)$|[Mm]unge: Error: (.+)$", text, re.MULTILINE):
        return failed(f"munge: {found[1] or found[2]}", Remedy.REBOOT)
    raise ValueError(f"unexpected output of unmunge: {text[:80]!r}")


def judge_names(names: Names) -> Result:
    if missing := [name for name, address in names.controllers.items() if not address]:
        return failed(f"cannot resolve {', '.join(missing)}", Remedy.DRAIN)
    return passed("host names resolve") if names.own_address else warned(f"cannot resolve this host's name {names.own}")


SERVICE_CHECKS = (
    Check(
        "slurmd", "slurmd listens", ask_slurmd, judge_slurmd, BESIDE_PROLOG, 1,
        applies=lambda node: node.expected.named or bool(node.expected.missing_reason), settle_s=5,
    ),
    Check(
        "munge", "munge encodes and decodes credentials", ask_munge, judge_munge, every_s=10,
        applies=needs_munge, settle_s=5,
    ),
    Check("host-names", "the cluster's host names resolve", ask_names, judge_names, every_s=30, settle_s=10),
)  # fmt: skip


# Tools that containers need


@dataclass(frozen=True)
class ContainerTools:
    """The container tools on a node.

    `enroot` is Enroot's version; "" if it does not start, None if it is not installed. `missing` are required Slurm
    plugins that do not exist.
    """

    enroot: str | None
    namespaces: int  # maximum number of user namespaces that the kernel allows
    missing: tuple[str, ...] = ()


def has_containers(node: NodeReader) -> bool:
    return node.has("enroot") or bool(_plugins(node))


def ask_containers(node: NodeReader) -> ContainerTools:
    missing = [path for path in _plugins(node) if posixpath.basename(path) not in node.names(posixpath.dirname(path))]
    allowed = int(node.read("/proc/sys/user/max_user_namespaces"))
    return ContainerTools(_enroot(node), allowed, tuple(missing))


def _enroot(node: NodeReader) -> str | None:
    if not node.has("enroot"):
        return None
    done = node.run(("enroot", "version"))
    if done.exit_code == 0 and not done.stdout.strip():
        raise NoAnswer("`enroot version` has no output")
    return done.stdout.strip() if done.exit_code == 0 else ""


def _plugins(node: NodeReader) -> list[str]:
    """Return the paths of the plugins without which no job starts.

    They are the `required` ones in plugstack.conf, which is in the folder of slurm.conf.
    """
    folder = posixpath.dirname(node.env.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    try:
        lines = node.read(f"{folder}/plugstack.conf").splitlines()
    except NoAnswer:
        return []
    return [
        words[1] for line in lines if (words := line.split())[:1] == ["required"] and words[1:2] and words[1][0] == "/"
    ]


def judge_containers(found: ContainerTools) -> Result:
    if found.missing:
        return failed(f"Slurm's plugin {found.missing[0]} is missing: no job can start", Remedy.DRAIN, "plugin")
    if found.enroot == "" or found.namespaces < 1:
        why = "enroot does not start" if found.namespaces else "user namespaces are forbidden"
        return failed(f"containers cannot be run: {why}", Remedy.DRAIN)
    if found.enroot and not re.match(r"\d", found.enroot):
        raise ValueError(f"unexpected version of enroot {found.enroot!r}")
    return passed(f"enroot {found.enroot} works" if found.enroot else "Slurm's plugins are installed")


CONTAINER_CHECKS = (
    Check(
        "containers",
        "containers can be started",
        ask_containers,
        judge_containers,
        ALWAYS,
        60,
        has_containers,
        settle_s=10,
    ),
)

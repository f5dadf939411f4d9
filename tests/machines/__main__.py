"""`./test --long`: the set-up, the demo and cluster tests on other machines, with a table of the results.

`python -m tests.machines [MACHINE...]` runs all of them or those that are named. It needs root, debootstrap and qemu,
fetches packages, and takes hours: the virtual machine is emulated. Every check writes a log; the table names it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.machines.chroot import CLONE_THERE, TRAINING_THERE, Chroot, folder, training_python
from tests.machines.vm import PLAIN, SUDOER, Machine, build

PYTEST = ".venv/bin/python -m pytest -q -p no:cacheprovider"
RESEARCHERS = "./dalsegno demo --scene researchers"
CLUSTER = "tests/cluster/test_up_down.py tests/cluster/test_rootless.py tests/cluster/test_recovery.py"
RUNS = "tests/cluster/test_run_starts.py tests/cluster/test_run_faults.py tests/cluster/test_containers.py"
KINDS = "tests/cluster/test_cgroups.py tests/cluster/test_sudo.py"

# In the home of whoever runs it: a cluster is made, used and taken away, and nothing is left.
FROM_NOTHING = """set -e; cd
cat >cluster.yaml <<END
name: of-$(id -un)
target: local
partitions: [{name: train, nodes: 2}]
END
dalsegno() { CLONE/dalsegno "$@"; }
dalsegno up
dalsegno shell -- srun -N2 hostname
dalsegno status
dalsegno down --yes
test -z "$(find /sys/fs/cgroup -name '*dalsegno*')"
""".replace("CLONE", CLONE_THERE)

# Check -> the user and the command.
IN_VM = {
    "up as root": ("root", FROM_NOTHING),
    "up with sudo": (SUDOER, FROM_NOTHING),
    "up as a plain user": (PLAIN, FROM_NOTHING),
    "cgroups, sudo": ("root", f"cd {CLONE_THERE} && {PYTEST} {KINDS}"),
    "demo": ("root", f"cd {CLONE_THERE} && ./dalsegno demo --report /root/demo.html"),
    "demo with sudo": (SUDOER, f"cd && {CLONE_THERE}/dalsegno demo --scene researchers"),
    "cluster tests": ("root", f"cd {CLONE_THERE} && {PYTEST} {CLUSTER}"),
}
WITHOUT_SYSTEMD = ("up as root", "up with sudo", "up as a plain user", "cgroups, sudo")
IN_CHROOT = {
    "set-up": "./dalsegno setup --dev",
    "demo": RESEARCHERS,
    "unit tests": f"{PYTEST} -m 'not cluster'",
    "cluster tests": f"{PYTEST} {CLUSTER} {KINDS}",
}
# This release's Slurm and Python are those of the ordinary suite. Its root is bare, so the set-up has everything to do.
FROM_BARE = ("set-up", "demo")
# In a clone of its own, whose environment is made with an interpreter of this machine for which it has torch.
TRAINING = {
    "set-up with torch": "./dalsegno setup --dev --torch",
    "runs": f"{PYTEST} {RUNS}",
}


@dataclass(frozen=True)
class Result:
    """The outcome of one check on one machine."""

    machine: str
    check: str
    passed: bool
    took_s: float
    log: Path


def main() -> int:
    wanted = sys.argv[1:] or list(MACHINES)
    if unknown := sorted(set(wanted) - MACHINES.keys()):
        sys.exit(f"there is no machine {', '.join(unknown)}; there are {', '.join(MACHINES)}")
    tools = {"debootstrap": "debootstrap"}
    if not CHROOTS.issuperset(wanted):
        tools |= {"qemu-system-x86_64": "qemu-system-x86", "qemu-img": "qemu-utils"}
    if missing := [package for program, package in tools.items() if shutil.which(program) is None]:
        sys.exit(f"error: other machines cannot be built here\nhint: apt-get install {' '.join(missing)}")
    results = []
    for name in wanted:
        for result in MACHINES[name]():
            print(row(result), flush=True)
            results.append(result)
    print("\n" + "\n".join(["| machine | check | result | time | log |", "|---|---|---|--:|---|", *map(row, results)]))
    return 0 if all(result.passed for result in results) else 1


def row(result: Result) -> str:
    word = "passed" if result.passed else "**failed**"
    return f"| {result.machine} | {result.check} | {word} | {result.took_s:.0f} s | {result.log} |"


def checked(machine: str, check: str, do: Callable[[Path], int]) -> Result:
    """Run one check; its output goes to a file of its own."""
    log = folder() / "logs" / f"{machine} {check}.log".replace(" ", "-").replace(",", "")
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    passed = do(log) == 0
    return Result(machine, check, passed, time.monotonic() - began, log)


def chroot(release: str, checks: Iterable[str] = IN_CHROOT, *, training: bool = True) -> Iterator[Result]:
    machine = Chroot(release)
    machine.build(fresh=True)
    machine.push()
    for check in checks:
        words = ["bash", "-c", IN_CHROOT[check]]
        yield checked(release, check, lambda log, w=words, c=check: machine.run(w, network=c == "set-up", log=log))
    if not training or (python := training_python()) is None:
        return
    machine.push(TRAINING_THERE)
    for check, command in TRAINING.items():
        words = ["env", f"DALSEGNO_PYTHON={python}", "bash", "-c", command]
        online = "set-up" in check
        yield checked(
            release, check, lambda log, w=words, n=online: machine.run(w, where=TRAINING_THERE, network=n, log=log)
        )


def vm(name: str, checks: tuple[str, ...], *, systemd: bool) -> Iterator[Result]:
    with booted(systemd=systemd) as machine:
        for check in checks:
            user, command = IN_VM[check]
            yield checked(name, check, lambda log, u=user, c=command: in_vm(machine, u, c, log))


@contextmanager
def booted(*, systemd: bool) -> Iterator[Machine]:
    build()
    machine = Machine("long")
    machine.boot(systemd=systemd)
    try:
        machine.push()
        yield machine
    finally:
        machine.stop()


def in_vm(machine: Machine, user: str, command: str, log: Path) -> int:
    with log.open("w") as out:
        return machine.ssh(command, user, output=out.fileno()).returncode


MACHINES: dict[str, Callable[[], Iterator[Result]]] = {
    "bookworm": lambda: chroot("bookworm", FROM_BARE, training=False),
    "trixie": lambda: chroot("trixie"),
    "sid": lambda: chroot("sid"),
    "systemd": lambda: vm("systemd", tuple(IN_VM), systemd=True),
    "no-systemd": lambda: vm("no-systemd", WITHOUT_SYSTEMD, systemd=False),
}
CHROOTS = {"bookworm", "trixie", "sid"}

if __name__ == "__main__":
    sys.exit(main())

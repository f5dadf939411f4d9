"""`./test --long`: the set-up, the demo and cluster tests on other machines, with a table of the results.

`python -m tests.machines [MACHINE...]` runs all of them or those that are named. It needs root, debootstrap and qemu,
fetches packages, and takes hours: the virtual machine is emulated. Every check writes a log; the table names it.

systemd is tested twice. `container` runs it at full speed on the cgroups of this machine: all cluster tests, the demo,
and ends of sessions. `systemd` and `no-systemd` are the virtual machine, with cgroup v2 wherever they run. All cluster
tests would take days on the emulated machine. It runs the set-up for each kind of user, the tests of cgroups, the demo
and a few cluster tests, which takes about an hour on an idle machine.
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
from tests.machines.container import Container
from tests.machines.vm import PLAIN, SUDOER, Machine, build

PYTEST = ".venv/bin/python -m pytest -q -p no:cacheprovider"
RESEARCHERS = "./dalsegno demo --scene researchers"
CLUSTER = "tests/cluster/test_up_down.py tests/cluster/test_rootless.py tests/cluster/test_recovery.py"
RUNS = "tests/cluster/test_run_starts.py tests/cluster/test_run_faults.py tests/cluster/test_containers.py"
# These tests depend on Slurm's own behaviour, which differs between releases
SECURITY = "tests/security/test_join.py tests/security/test_slurm_text.py"
NATIVE = "tests/containers/test_native_plugin.py tests/containers/test_native_helper.py"
KINDS = "tests/cluster/test_cgroups.py tests/cluster/test_sudo.py"

# One test each of a cluster that is created and removed, a repaired node, a run that continues, and a container.
HANDFUL = (
    "tests/cluster/test_up_down.py::test_up_makes_all_nodes_idle_and_up_again_does_nothing",
    "tests/cluster/test_up_down.py::test_dead_host_is_reported_and_booted_by_up",
    "tests/cluster/test_recovery.py::test_host_without_power_is_replaced_validated_and_returned",
    "tests/cluster/test_run_faults.py::test_ranks_train_across_four_hosts[torch]",
    "tests/cluster/test_run_faults.py::test_killed_worker_costs_one_restart_and_keeps_ranks",
    "tests/cluster/test_containers.py::test_tasks_run_in_the_image_with_their_ranks_gpus_and_environment",
)

# The script runs in the user's home.
FILE = """set -e; cd
cat >cluster.yaml <<END
name: of-$(id -un)
target: local
partitions: [{name: train, nodes: 2}]
END
dalsegno() { CLONE/dalsegno "$@"; }
""".replace("CLONE", CLONE_THERE)
MADE = f"{FILE}dalsegno up\n"
USED = """dalsegno shell -- srun -N2 hostname
dalsegno status
dalsegno down --yes
test -z "$(find /sys/fs/cgroup -name '*dalsegno*')"
test ! -d /run/systemd/system || test -z "$(systemctl list-units --all --plain --no-legend 'dalsegno-*')"
"""
FROM_NOTHING = MADE + USED

# Check -> the user and the command of each session.
Sessions = tuple[tuple[str, str], ...]
UP: dict[str, Sessions] = {
    "up as root": (("root", FROM_NOTHING),),
    "up with sudo": ((SUDOER, FROM_NOTHING),),
    "up as a plain user": ((PLAIN, FROM_NOTHING),),
}
OUTLIVED: dict[str, Sessions] = {
    "session ends, root": (("root", MADE), ("root", FILE + USED)),
    "session ends, sudo": ((SUDOER, MADE), (SUDOER, FILE + USED)),
    "session ends, plain user": ((PLAIN, MADE), (PLAIN, FILE + USED)),
}
CGROUPS: dict[str, Sessions] = {"cgroups, sudo": (("root", f"cd {CLONE_THERE} && {PYTEST} {KINDS}"),)}
DEMO: dict[str, Sessions] = {"demo": (("root", f"cd {CLONE_THERE} && ./dalsegno demo --report /root/demo.html"),)}
IN_VM = {
    **UP,
    **CGROUPS,
    # Only this kernel has the server and the client of NFS.
    "nfs": (("root", f"cd {CLONE_THERE} && {PYTEST} tests/storage/test_nfs.py"),),
    # A step of the full demo's training takes 10 s on this machine. The container runs the whole demo.
    "demo": (("root", f"cd {CLONE_THERE} && {RESEARCHERS}"),),
    # Six agents import torch at once, on two emulated cores that are shared with other work on this machine.
    "cluster tests": (("root", f"cd {CLONE_THERE} && DALSEGNO_PATIENCE=6 {PYTEST} {' '.join(HANDFUL)}"),),
}
WITHOUT_SYSTEMD = {**UP, **CGROUPS}
LANES = ".venv/bin/python -m tests.lanes 'cluster and not alone' --lanes 3 --beside waits -q -p no:cacheprovider"
IN_CONTAINER = {
    **UP,
    **OUTLIVED,
    **CGROUPS,
    **DEMO,
    "demo with sudo": ((SUDOER, f"cd && {CLONE_THERE}/dalsegno demo --scene researchers"),),
    "cluster tests": (("root", f"cd {CLONE_THERE} && {LANES}"),),
}
IN_CHROOT = {
    "set-up": "./dalsegno setup --dev",
    "demo": RESEARCHERS,
    "unit tests": f"{PYTEST} -m 'not cluster'",
    "cluster tests": f"{PYTEST} {CLUSTER} {KINDS} {SECURITY} {NATIVE}",
}
# The ordinary suite already uses this release's Slurm and Python. Its root is bare, so that the set-up has everything
# to do.
FROM_BARE = ("set-up", "demo")
# Runs in a separate clone, whose environment uses an interpreter of this machine for which torch is available.
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
    """Run one check, and write its output to a separate file."""
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


def vm(name: str, checks: dict[str, Sessions], *, systemd: bool) -> Iterator[Result]:
    with booted(systemd=systemd) as machine:

        def run(command: str, user: str, output: int) -> int:
            return machine.ssh(command, user, output=output).returncode

        yield from in_sessions(name, checks, run)


def container() -> Iterator[Result]:
    machine = Container()
    machine.build(fresh=True)
    machine.push()
    yield checked("container", "set-up", machine.set_up)
    with machine.booted() as running:
        yield from in_sessions("container", IN_CONTAINER, running.run)


def in_sessions(name: str, checks: dict[str, Sessions], run: Callable[[str, str, int], int]) -> Iterator[Result]:
    """Run each check in login sessions, one after the other. The first failure ends the check."""

    def all_of(sessions: Sessions, log: Path) -> int:
        with log.open("w") as out:
            codes = (run(command, user, out.fileno()) for user, command in sessions)
            return next((code for code in codes if code), 0)

    for check, sessions in checks.items():
        yield checked(name, check, lambda log, s=sessions: all_of(s, log))


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


MACHINES: dict[str, Callable[[], Iterator[Result]]] = {
    "bookworm": lambda: chroot("bookworm", FROM_BARE, training=False),
    "trixie": lambda: chroot("trixie"),
    "sid": lambda: chroot("sid"),
    "container": container,
    "systemd": lambda: vm("systemd", IN_VM, systemd=True),
    "no-systemd": lambda: vm("no-systemd", WITHOUT_SYSTEMD, systemd=False),
}
CHROOTS = {"bookworm", "trixie", "sid", "container"}

if __name__ == "__main__":
    sys.exit(main())

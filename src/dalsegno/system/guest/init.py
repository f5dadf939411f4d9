"""The first process of a host: boots it and then lives its life.

Started with plan files as arguments, one host each, all forked from this one interpreter, so that 64 hosts cost one
start of Python. With `"isolate": true` a host is PID 1 of namespaces of its own (network, mounts, host name, PIDs);
without, it is a plain process that adopts its orphans.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from dalsegno.system.guest.host import SIGNALS, GuestHost, Plan, write_json, write_text
from dalsegno.system.guest.kernel import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    adopt_orphans,
    give_address,
    link_up,
    mount,
    name_process,
    quiet_ipv6,
    set_hostname,
    unshare_all,
    unshare_cgroups,
    wait_for_link,
)


def main(paths: Sequence[str]) -> int:
    """Boot every host; a line for each says its PID or what went wrong."""
    os.chdir("/")
    os.umask(0o022)
    if paths:
        _enter_unit(_read(paths[0]))
    answers = {path: boot(path) for path in paths}
    sys.stdout.write("".join(f"{path}\t{answer}\n" for path, answer in answers.items()))
    return 0 if all(answer.isdigit() for answer in answers.values()) else 1


def boot(plan_path: str) -> str:
    """Fork one host off; its PID as seen from here, once it waits for its cable, or the error."""
    plan = _read(plan_path)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        _become_host(plan_path, plan, tell)
    os.close(tell)
    with os.fdopen(ready, "rb") as pipe:
        answer = pipe.read().decode()
    if plan["isolate"]:
        os.waitpid(pid, 0)  # the go-between; the host itself is its child
    return answer or "no answer"


def _read(plan_path: str) -> Plan:
    with open(plan_path) as file:
        plan: Plan = json.load(file)
    return plan


def _become_host(plan_path: str, plan: Plan, tell: int) -> NoReturn:
    """The child's life. A failure to boot goes back through the pipe; a later one is in the host's log."""
    try:
        os.setsid()
        _redirect(plan["log"])
        _separate(plan)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        name_process(f"ds:{plan['name']}")
        pid = _announce(plan)
        if plan["isolate"]:
            _furnish(plan)
        else:
            _join_cgroups(plan)
        os.write(tell, str(pid).encode())
        os.close(tell)
        if plan["address"]:
            wait_for_link(plan["interface"])
            give_address(plan["interface"], plan["address"])
        GuestHost(plan_path, plan).live()
        os._exit(0)
    except BaseException as error:  # whatever it is, this copy of the booter must not go on as if it were the booter
        sys.stderr.write(f"{plan['name']}: {error}\n")
        _tell_failure(tell, error)
        os._exit(1)


def _tell_failure(tell: int, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the booter may have its answer already
        os.write(tell, f"error {error}".encode())


def _redirect(log: str) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)


def _separate(plan: Plan) -> None:
    """Leave the machine's namespaces; the process that goes on is PID 1 of the new ones."""
    if not plan["isolate"]:
        adopt_orphans()
        return
    unshare_all()
    if os.fork() != 0:
        os._exit(0)


def _announce(plan: Plan) -> int:
    """Write down who we are while /proc still shows the machine's own PIDs. The kernel's boot id is the machine's, so
    that each host draws one of its own."""
    pid = int(os.readlink("/proc/self"))
    with open(f"/proc/{pid}/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    write_text(os.path.join(plan["dir"], "boot-id"), os.urandom(8).hex())
    write_json(os.path.join(plan["dir"], "init.json"), {"pid": pid, "start": start})
    return pid


def _furnish(plan: Plan) -> None:
    """Mounts and host name of a host of its own."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    _join_cgroups(plan)
    for source, target in plan["binds"]:
        mount(source, target, "", MS_BIND)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")  # goes with the host, as memory does
    for folder, mib in plan.get("disks", {}).items():
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={mib}m,mode=755")
    set_hostname(plan["name"])
    quiet_ipv6()
    link_up("lo")


# Control groups ---------------------------------------------------------------------------------------------


def _enter_unit(plan: Plan) -> None:
    """Leave the caller's login session, which may be killed as a whole, for the scope of the cluster.

    A scope of cgroup v2 must have no process of its own, or its controllers cannot be passed on to the hosts' folders:
    we wait in a folder beside them.
    """
    unified = plan.get("unified", False)
    for folder in plan.get("unit_folders", ()):
        if os.path.isdir(folder):
            _enter(os.path.join(folder, "boot") if unified else folder)


def _join_cgroups(plan: Plan) -> None:
    """Enter a folder of our own in each hierarchy; an isolated host sees it as the root.

    Slurm names its folders after the node alone, so two clusters with equal node names would share them.
    """
    for root, folder in plan["cgroups"].items():
        if plan.get("unified", False):
            _join_unified(root, folder, isolate=plan["isolate"], alone=not plan["unit"])
        else:
            _enter(folder)
            if plan["isolate"]:
                mount(folder, root, "", MS_BIND)


def _join_unified(root: str, folder: str, *, isolate: bool, alone: bool) -> None:
    """Enter a folder of cgroup v2. One with processes of its own cannot pass controllers on, so the host's first
    process ends up in `init.scope`, where systemd's would be; Slurm expects `system.slice` beside it. `alone`: without
    systemd, nobody else has passed controllers on to the cluster's folder."""
    clear(folder)
    if alone:
        pass_controllers_on(root)
    _enter(folder)
    pass_controllers_on(os.path.dirname(folder))
    if isolate:
        mount(folder, root, "", MS_BIND)
        unshare_cgroups()
        folder = root
    _enter(os.path.join(folder, "init.scope"))
    os.makedirs(os.path.join(folder, "system.slice"), exist_ok=True)
    pass_controllers_on(folder)
    pass_controllers_on(os.path.join(folder, "system.slice"))
    if isolate:
        # slurmstepd of 22.05 leaves its step's folder for the root, where on a real machine processes may be. Here the
        # root passes controllers on and takes none: without this the folder of every step would stay for ever.
        mount(os.path.join(folder, "init.scope/cgroup.procs"), os.path.join(folder, "cgroup.procs"), "", MS_BIND)


def _enter(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "cgroup.procs"), "w") as file:
        file.write("0")  # ourselves, whatever our PID is called here


def clear(folder: str) -> None:
    """Remove what a former host of this name has left: a folder that passes controllers on cannot be entered."""
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def pass_controllers_on(folder: str) -> None:
    """Give folders below this one every controller that it has, each by itself: one may be refused."""
    with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.controllers")) as file:
        for name in file.read().split():
            with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.subtree_control"), "w") as control:
                control.write(f"+{name}")

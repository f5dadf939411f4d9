"""Boot hosts and run their first process.

The arguments are plan files, one per host. All hosts are forked from this interpreter, so that 64 hosts cost one start
of Python. With `"isolate": true` a host is PID 1 of its own namespaces (network, mounts, host name, PIDs). Otherwise it
is a plain process that adopts its orphaned descendants.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from dalsegno.log import start_logging
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
    """Boot every host and print a line for each with its PID or the error."""
    os.chdir("/")
    os.umask(0o022)
    if paths:
        _enter_unit(_read(paths[0]))
    answers = {path: boot(path) for path in paths}
    sys.stdout.write("".join(f"{path}\t{answer}\n" for path, answer in answers.items()))
    return 0 if all(answer.isdigit() for answer in answers.values()) else 1


def boot(plan_path: str) -> str:
    """Fork one host. Return its PID in this namespace once its mounts and cgroups are set up, or the error."""
    plan = _read(plan_path)
    ready, result = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        _become_host(plan_path, plan, result)
    os.close(result)
    with os.fdopen(ready, "rb") as pipe:
        answer = pipe.read().decode()
    if plan["isolate"]:
        os.waitpid(pid, 0)  # reap the intermediate process, which is the host's parent
    return answer or "no answer"


def _read(plan_path: str) -> Plan:
    with open(plan_path) as file:
        plan: Plan = json.load(file)
    return plan


def _become_host(plan_path: str, plan: Plan, result: int) -> NoReturn:
    """Run the host in the child. A failure to boot is reported through the pipe, a later failure in the host's log."""
    try:
        os.setsid()
        _redirect(plan["log"])
        start_logging("init")
        _separate(plan)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        name_process(f"ds:{plan['name']}")
        pid = _record_start(plan)
        if plan["isolate"]:
            _set_up_host(plan)
        else:
            _join_cgroups(plan)
        os.write(result, str(pid).encode())
        os.close(result)
        if plan["address"]:
            wait_for_link(plan["interface"])
            give_address(plan["interface"], plan["address"])
        GuestHost(plan_path, plan).live()
        os._exit(0)
    except BaseException as error:  # after any error, this forked child must not return into the parent's code
        logging.getLogger("init").error("%s: %s", plan["name"], error)
        _report_failure(result, error)
        os._exit(1)


def _report_failure(result: int, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the result may have been sent already
        os.write(result, f"error {error}".encode())


def _redirect(log: str) -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)


def _separate(plan: Plan) -> None:
    """Enter new namespaces; the process that returns is their PID 1.

    A host that is not isolated stays in the machine's namespaces and only adopts its orphaned descendants.
    """
    if not plan["isolate"]:
        adopt_orphans()
        return
    unshare_all()
    if os.fork() != 0:
        os._exit(0)


def _record_start(plan: Plan) -> int:
    """Write this process's PID and a random boot id to files, and return the PID.

    Call it while /proc still shows the machine's PIDs. The kernel's boot id is not used, because it is the same for all
    hosts of the machine.
    """
    pid = int(os.readlink("/proc/self"))
    with open(f"/proc/{pid}/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[19])
    write_text(os.path.join(plan["dir"], "boot-id"), os.urandom(8).hex())
    write_json(os.path.join(plan["dir"], "init.json"), {"pid": pid, "start": start})
    return pid


def _set_up_host(plan: Plan) -> None:
    """Set up the mounts, host name and loopback of an isolated host."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    _join_cgroups(plan)
    for source, target in plan["binds"]:
        mount(source, target, "", MS_BIND)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # The content is lost when the host ends, as on a real machine that loses power.
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    for folder, mib in plan.get("disks", {}).items():
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={mib}m,mode=755")
    set_hostname(plan["name"])
    quiet_ipv6()
    link_up("lo")


def _enter_unit(plan: Plan) -> None:
    """Move from the caller's login session, which may be killed as a whole, to the scope of the cluster.

    In cgroup v2, a scope that has processes cannot enable controllers for its folders. This process therefore enters a
    folder of its own, next to those of the hosts.
    """
    unified = plan.get("unified", False)
    for folder in plan.get("unit_folders", ()):
        if os.path.isdir(folder):
            _enter(os.path.join(folder, "boot") if unified else folder)


def _join_cgroups(plan: Plan) -> None:
    """Enter a folder for this host in each hierarchy. An isolated host sees that folder as the root.

    Without these folders, clusters with the same node names would share Slurm's folders, which are named after the
    node.
    """
    for root, folder in plan["cgroups"].items():
        if plan.get("unified", False):
            _join_unified(root, folder, isolate=plan["isolate"], alone=not plan["unit"])
        else:
            _enter(folder)
            if plan["isolate"]:
                mount(folder, root, "", MS_BIND)


def _join_unified(root: str, folder: str, *, isolate: bool, alone: bool) -> None:
    """Enter a folder of cgroup v2.

    A folder with processes of its own cannot enable controllers for its children. The host's first process is therefore
    in `init.scope`, as under systemd. Slurm expects `system.slice` next to it. `alone` means that there is no systemd,
    so nothing else has enabled controllers for the cluster's folder.
    """
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
        # slurmstepd 22.05 moves itself from its step's folder to the root of the hierarchy. The kernel permits that
        # on a real machine, but not here: this root enables controllers, so it cannot have processes. The mount
        # redirects slurmstepd to `init.scope`. Otherwise the folder of every step would remain forever.
        mount(os.path.join(folder, "init.scope/cgroup.procs"), os.path.join(folder, "cgroup.procs"), "", MS_BIND)


def _enter(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "cgroup.procs"), "w") as file:
        file.write("0")  # "0" means this process, whatever its PID is in this namespace


def clear(folder: str) -> None:
    """Remove the cgroups of an earlier host of this name.

    A cgroup that enables controllers for its children accepts no processes.
    """
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def pass_controllers_on(folder: str) -> None:
    """Enable every controller of this folder for its children.

    Controllers are enabled one at a time, because the kernel may refuse some of them. Do nothing if the folder has
    processes, unless it is the root of the whole machine. In a container, the kernel would enable only threaded
    controllers such as `cpu` there, and then refuse every process that enters a child.
    """
    if os.path.exists(os.path.join(folder, "cgroup.type")) and _has_processes(folder):
        return
    with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.controllers")) as file:
        for name in file.read().split():
            with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.subtree_control"), "w") as control:
                control.write(f"+{name}")


def _has_processes(folder: str) -> bool:
    try:
        with open(os.path.join(folder, "cgroup.procs")) as file:
            return bool(file.read().strip())
    except OSError:  # the processes of a threaded cgroup cannot be read, so assume that there are some
        return True

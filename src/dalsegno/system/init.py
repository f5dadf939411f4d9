"""The first process of a host: boots it, keeps its services, reaps what they leave behind.

A stand-alone program (standard library only, nothing of the package), run as
`python -I -S init.py PLAN...`: one host per plan file, all forked from this one interpreter, so that 64 hosts
cost one start of Python. With `"isolate": true` a host is PID 1 of namespaces of its own (network, mounts,
host name, PIDs); without, it is a plain process that adopts its orphans (a subreaper).

A plan is read again on SIGHUP: services that are missing are started, changed ones (another `revision`) are
restarted, those no longer named are stopped; a service on `hold` is left as it is, running or not. What runs is written to `services.json` beside the plan.
"""

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8913, 0x8914, 1
SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGINT}
STOP_GRACE_S = 5.0
LINK_WAIT_S = 30.0

libc = ctypes.CDLL(None, use_errno=True)


def call(result, what):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source, target, kind, flags, data=""):
    call(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


def write_json(path, value):
    temp = f"{path}.{os.getpid()}.tmp"
    with open(temp, "w") as file:
        json.dump(value, file)
    os.replace(temp, path)


# Booting ---------------------------------------------------------------------------------------------------


def boot(plan_path):
    """Fork one host off; returns its PID as seen from here once it is up to its own devices."""
    with open(plan_path) as file:
        plan = json.load(file)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        become_host(plan_path, plan, tell)
    os.close(tell)
    with os.fdopen(ready, "rb") as pipe:
        answer = pipe.read().decode()
    if plan["isolate"]:
        os.waitpid(pid, 0)  # the go-between; the host itself is its child
    return answer


def become_host(plan_path, plan, tell):
    """Never returns: the child's life. A failure to boot goes back through the pipe."""
    try:
        os.setsid()
        redirect(plan["log"])
        if plan["isolate"]:
            call(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET), "unshare")
            if os.fork() != 0:
                os._exit(0)
        else:
            call(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        libc.prctl(PR_SET_NAME, f"ds:{plan['name']}".encode()[:15], 0, 0, 0)
        pid = announce(plan)
        if plan["isolate"]:
            furnish(plan)
        os.write(tell, str(pid).encode())
        os.close(tell)
        if plan["address"]:
            wait_for_link(plan["interface"])
            give_address(plan["interface"], plan["address"])
        Host(plan_path, plan).live()
        os._exit(0)
    except BaseException as error:
        sys.stderr.write(f"{plan['name']}: {error}\n")
        try:
            os.write(tell, f"error {error}".encode())
        except OSError:
            pass  # the booter has its answer already
        os._exit(1)


def announce(plan):
    """Write down who we are while /proc still shows the machine's own PIDs."""
    pid = int(os.readlink("/proc/self"))
    write_json(os.path.join(plan["dir"], "init.json"), {"pid": pid, "start": start_ticks(pid)})
    return pid


def start_ticks(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def redirect(log):
    null = os.open("/dev/null", os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)


def furnish(plan):
    """Mounts and host name of a host of its own."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    join_cgroups(plan.get("cgroups", {}))
    for source, target in plan["binds"]:
        mount(source, target, "", MS_BIND)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    name = plan["name"].encode()
    call(libc.sethostname(name, len(name)), "sethostname")
    quiet_ipv6()
    link_up("lo")


def join_cgroups(folders):
    """Enter a folder of our own in each hierarchy and make it the root that this host sees.

    Slurm names its folders after the node alone, so two clusters with equal node names would share them.
    """
    for root, folder in folders.items():
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "cgroup.procs"), "w") as file:
            file.write("0")  # ourselves, whatever our PID is called here
        mount(folder, root, "", MS_BIND)


def quiet_ipv6():
    try:
        with open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w") as file:
            file.write("1")
    except OSError:
        pass  # a kernel without IPv6


def link_request(name, payload):
    return struct.pack("16s24s", name.encode(), payload)


def link_up(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFFLAGS, link_request(name, b""))
        flags = struct.unpack_from("H", answer, 16)[0] | IFF_UP
        fcntl.ioctl(sock, SIOCSIFFLAGS, link_request(name, struct.pack("H", flags)))


def wait_for_link(name):
    """The other end of the cable is plugged in from outside, once the host exists."""
    until = time.monotonic() + LINK_WAIT_S
    while True:
        try:
            socket.if_nametoindex(name)
            return
        except OSError:
            if time.monotonic() > until:
                raise OSError(errno.ETIMEDOUT, f"no interface {name} after {LINK_WAIT_S:.0f} s") from None
            time.sleep(0.002)


def give_address(name, cidr):
    address, bits = cidr.split("/")
    mask = socket.inet_ntoa(struct.pack("!I", 0xFFFFFFFF << (32 - int(bits)) & 0xFFFFFFFF))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, mask)):
            packed = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(sock, request, link_request(name, packed))
    link_up(name)


# Living ----------------------------------------------------------------------------------------------------


class Host:
    """Keeps the services that the plan names, and reaps everything else that ends here."""

    def __init__(self, plan_path, plan):
        self.plan_path = plan_path
        self.plan = plan
        self.running = {}  # name -> (pid, revision)
        self.facts = {}  # name -> what services.json says of it

    def live(self):
        self.reconcile()
        while True:
            number = signal.sigwaitinfo(SIGNALS).si_signo
            self.reap()
            if number == signal.SIGHUP:
                self.reload()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self.stop(list(self.running))
                return

    def reload(self):
        try:
            with open(self.plan_path) as file:
                self.plan = json.load(file)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"plan not read again: {error}\n")
            return
        self.reconnect()
        self.reconcile()

    def reconnect(self):
        """After the switch was replaced there is a new cable, and it has no address yet."""
        names = [name for _, name in socket.if_nameindex()] if self.plan["address"] else []
        if self.plan["interface"] in names:
            give_address(self.plan["interface"], self.plan["address"])

    def reconcile(self):
        wanted = {service["name"]: service for service in self.plan["services"]}
        changed = [
            name for name, (_, revision) in self.running.items()
            if name not in wanted or not (wanted[name]["hold"] or wanted[name]["revision"] == revision)
        ]  # fmt: skip
        self.stop(changed)
        self.facts = {name: fact for name, fact in self.facts.items() if name in wanted}
        for name, service in wanted.items():
            if name not in self.running and not service["hold"]:
                self.start(service)
        self.write()

    def start(self, service):
        name = service["name"]
        try:
            pid = spawn(service)
        except OSError as error:
            self.facts[name] = {"exit_code": 127, "error": str(error), "revision": service["revision"]}
            return
        self.running[name] = (pid, service["revision"])
        self.facts[name] = {"pid": pid, "revision": service["revision"], "started": time.time()}

    def stop(self, names):
        """TERM, a grace, KILL. Only the service itself: what it launched (a job's steps) lives on."""
        for name in names:
            os.kill(self.running[name][0], signal.SIGTERM)
        until = time.monotonic() + STOP_GRACE_S
        while any(name in self.running for name in names):
            left = until - time.monotonic()
            if left <= 0:
                for name in names:
                    if name in self.running:
                        os.kill(self.running[name][0], signal.SIGKILL)
                left = 1.0
            signal.sigtimedwait({signal.SIGCHLD}, left)
            self.reap()

    def reap(self):
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for name in [name for name, (service, _) in self.running.items() if service == pid]:
                del self.running[name]
                self.facts[name] = {**self.facts[name], "pid": 0, "exit_code": os.waitstatus_to_exitcode(status)}
                ended = True
        if ended:
            self.write()

    def write(self):
        try:
            write_json(os.path.join(self.plan["dir"], "services.json"), self.facts)
        except OSError as error:  # a full disk must not end the host
            sys.stderr.write(f"services.json not written: {error}\n")


def spawn(service):
    log = os.open(service["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.posix_spawn(
            service["argv"][0],
            service["argv"],
            service["env"],
            file_actions=[(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE],
        )
    finally:
        os.close(log)
        os.close(null)


def main(paths):
    os.chdir("/")
    os.umask(0o022)
    failed = 0
    for path in paths:
        answer = boot(path)
        failed += answer.startswith("error") or not answer
        sys.stdout.write(f"{path}\t{answer}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tests of fault injection on virtual hosts: what their peers see, and that every fault can be undone."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import pytest

from dalsegno.errors import TargetError
from dalsegno.health.telemetry import Telemetry, read_telemetry
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.recovery.client import ask
from dalsegno.system.children import arguments, descendants, end, find, marked
from dalsegno.system.hosts import host_process, service_facts
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.machine_room import HostControlClient
from dalsegno.targets.local.target import LocalTarget
from tests.cluster.conftest import Answer, Cli, at_home, leftovers, taken_down
from tests.cluster.test_up_down import idle_nodes
from tests.waiting import eventually

LISTEN = """
import socket, time
sock = socket.create_server(("0.0.0.0", 9999))
print("ready", flush=True)
peer, _ = sock.accept()
print("in", flush=True)
time.sleep(1000)
"""
# Prints the state of a connection to a host two seconds after a request: "silence", or how it ended.
CONNECT = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 9999), 60)
print("connected", flush=True)
sys.stdin.readline()
sock.settimeout(2)
try:
    print("closed" if sock.recv(1) == b"" else "data", flush=True)
except TimeoutError:
    print("silence", flush=True)
except OSError as error:
    print("reset", error, flush=True)
"""
WORKER = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, f"ds:w{sys.argv[1]}".encode(), 0, 0, 0)
time.sleep(1000)
"""


def folder(cli: Cli) -> Folder:
    return Folder(cli.home / "clusters/one")


def inside(cli: Cli, host: str) -> list[str]:
    """Run a command on a host, faster than `dalsegno shell --node`."""
    process = host_process(folder(cli).host(host))
    assert process is not None
    return ["nsenter", "-t", str(process.pid), "-m", "-u", "-i", "-n", "-p", "--"]


def in_host(cli: Cli, node: str, *command: str) -> Answer:
    argv = [*inside(cli, node), *command]
    done = subprocess.run(argv, env=cli.env, cwd="/", capture_output=True, text=True, timeout=100, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)


def target_of(cli: Cli) -> LocalTarget:
    return LocalTarget(cli.home / "clusters/one", cli.home / "cache")


@contextmanager
def on(cli: Cli, host: str, script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Start a Python script on a host and read its lines as they arrive."""
    argv = [*inside(cli, host), sys.executable, "-I", "-u", "-c", script, *args]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def what_became(peer: subprocess.Popen[str]) -> str:
    """Return how the connection ended."""
    assert peer.stdin is not None
    print(file=peer.stdin, flush=True)
    return next_line(peer)


def reaches(cli: Cli, host: str) -> bool:
    """Return whether slurmd's port on a host answers another host."""
    script = f"import socket; socket.create_connection(({host!r}, 6818), 0.3)"
    return in_host(cli, "head", sys.executable, "-I", "-c", script).code == 0


FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, cpus: 2, memory: 2G, gpus: 2, gpu_type: h100}
slurm: {accounting: false}
health: {mode: observe}
"""  # automation must not repair what these tests break


@pytest.fixture(scope="module")
def two(cache: Path) -> Iterator[Cli]:
    """Return a cluster of two nodes. Each test leaves both up, with nothing injected."""
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(FILE))
        yield cli


def test_power_cut_closes_no_connection_and_up_boots_the_host(two: Cli):
    with on(two, "train-2", LISTEN) as listener:
        assert next_line(listener) == "ready"
        with on(two, "train-1", CONNECT, "train-2") as peer:
            assert next_line(peer) == "connected"
            said = two.run("inject", "power-off", "train-2")
            assert said.code == 0 and said.err.startswith("train-2 is off; ")
            assert what_became(peer) == "silence"
    assert host_process(two.home / "clusters/one/hosts/train-2") is None
    answer = two.run("inject", "power-off", "train-2")
    assert answer.code == 1 and "off already" in answer.err
    two.ok("up")
    assert idle_nodes(two) == 2
    eventually(lambda: reaches(two, "train-2"))


def test_network_cut_drops_all_packets_and_ends_by_itself(two: Cli):
    eventually(lambda: reaches(two, "train-2"))
    # Injected directly, because the command itself may take as long as the fault lasts.
    target_of(two).inject(FAULTS["net-cut"], "train-2", FaultOptions(for_s=5))
    assert not reaches(two, "train-2")
    eventually(lambda: reaches(two, "train-2"))
    two.ok("inject", "net-cut", "train-2", "--for", "0.1s")
    eventually(lambda: reaches(two, "train-2"))
    eventually(lambda: two.run("up").err.startswith("nothing to do"))


def test_network_cut_keeps_link_and_connections(two: Cli):
    with on(two, "train-2", LISTEN) as listener:
        assert next_line(listener) == "ready"
        with on(two, "train-1", CONNECT, "train-2") as peer:
            assert next_line(peer) == "connected"
            two.ok("inject", "net-cut", "train-2")
            state = two.ok("shell", "--node", "train-2", "--", "cat", "/sys/class/net/eth0/carrier", "/proc/1/comm")
            assert state.split() == ["1", "ds:train-2"]
            assert what_became(peer) == "silence"
    two.ok("inject", "net-cut", "train-2", "--clear")
    eventually(lambda: reaches(two, "train-2"))


def test_timer_of_an_earlier_cut_does_not_end_a_later_one(two: Cli):
    two.ok("inject", "net-cut", "train-2", "--for", "3s")  # this fault is still active when the second one begins
    two.ok("inject", "net-cut", "train-2")
    mark = str(two.home / "clusters/one/hosts/train-2/faults/net-cut.json")
    eventually(lambda: not find(lambda pid: mark in arguments(pid)))  # the timer of the fault has expired
    assert not reaches(two, "train-2")
    assert "undoes the faults injected into 1 host (train-2)" in two.ok("plan")
    two.ok("up")
    eventually(lambda: reaches(two, "train-2"))


def test_rebooted_host_is_not_cut_off(two: Cli):
    two.ok("inject", "net-cut", "train-2")
    two.ok("inject", "power-off", "train-2")
    (state,) = (line.split()[1] for line in two.ok("status").splitlines() if line.startswith("train-2"))
    assert state == "off", "whatever state Slurm still shows"
    two.ok("up")
    assert idle_nodes(two) == 2
    eventually(lambda: reaches(two, "train-2"))
    assert two.run("up").err.startswith("nothing to do")


def test_down_during_a_network_cut_leaves_nothing(two: Cli):
    two.ok("inject", "net-cut", "train-2", "--for", "100s")
    two.ok("inject", "fs-hang", "train-2", "--for", "100s")
    two.ok("down", "one")
    assert leftovers(two.home) == []
    two.ok("up")


def test_worker_kill_affects_only_one_worker(two: Cli):
    start_workers(two)
    eventually(lambda: workers(two, "train-2") == [4, 5, 6])
    result = json.loads(two.ok("inject", "worker-kill", "train-2", "--rank", "5", "--json"))
    assert (result["fault"], result["node"], result["rank"]) == ("worker-kill", "train-2", 5)
    eventually(lambda: 5 not in workers(two, "train-2"))
    answer = two.run("inject", "worker-kill", "train-1")
    assert answer.code == 1 and "there is no worker on train-1" in answer.err
    result = json.loads(two.ok("inject", "worker-hang", "train-2", "--json"))
    assert result["rank"] == 4
    eventually(lambda: state_of(result["pid"]) == "T")
    two.ok("inject", "--clear", "train-2")
    eventually(lambda: state_of(result["pid"]) == "S")
    result = json.loads(two.ok("inject", "oom", "train-2", "--json"))
    eventually(lambda: state_of(result["pid"]) == "")
    assert f"Killed process {result['pid']} ({result['name']})" in telemetry(two, "train-2").kernel_log[0].text
    two.ok("inject", "--clear")
    two.ok("shell", "--", "scancel", "--user=root")
    eventually(lambda: idle_nodes(two) == 2)


def state_of(pid: int) -> str:
    """Return the process state as ps shows it; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].strip("ZX")
    except OSError:
        return ""


def start_workers(cli: Cli) -> None:
    """Start ranks 4 to 6 on train-2, with the variables that a run's agent sets."""
    script = cli.home / "worker.py"
    script.write_text(WORKER)
    job = f"srun sh -c 'for rank in 6 5 4; do {sys.executable} -I {script} $rank & done; wait'"
    cli.ok("shell", "--", "sbatch", "-w", "train-2", "-o", "/dev/null", "--wrap", job)


def test_on_loopback_ports_workers_can_be_killed_and_hosts_cannot(cli: Cli):
    cli.ok("up", cli.file(FILE + "local: {hosts: loopback}\n"))
    for fault in ("power-off", "net-cut"):
        answer = cli.run("inject", fault, "train-2")
        assert answer.code == 1 and "is a process on this machine, not a host" in answer.err
    room = HostControlClient(folder(cli).root)
    mark, before = room.boot_id("train-2"), telemetry(cli, "train-2").gpus[0].uuid
    cli.ok("inject", "slurmd-dead", "train-2")
    room.replace("train-2")
    assert room.boot_id("train-2") != mark and telemetry(cli, "train-2").gpus[0].uuid != before
    eventually(lambda: idle_nodes(cli) == 2)
    start_workers(cli)
    named = {f"ds:w{rank}" for rank in (4, 5, 6)}
    mark = str(cli.home / "worker.py")
    eventually(lambda: {_comm(each.pid) for each in find(lambda pid: mark in arguments(pid))} >= named)
    assert cli.run("inject", "worker-kill", "train-2", "--rank", "6").code == 0
    assert json.loads(cli.ok("inject", "worker-kill", "train-2", "--json"))["rank"] == 4
    eventually(lambda: "there is rank 5" in cli.run("inject", "worker-kill", "train-2", "--rank", "4").err)
    assert "no worker on train-1" in cli.run("inject", "worker-kill", "train-1").err


def workers(cli: Cli, node: str) -> list[int]:
    host = host_process(cli.home / "clusters/one/hosts" / node)
    assert host is not None
    names = [_comm(pid) for pid in descendants(host.pid)]
    return sorted(int(name[4:]) for name in names if name.startswith("ds:w"))


COUNT = """
import socket, sys
mark = sys.argv[1].encode()  # packets of an earlier test that arrive late have another mark
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, 33, 8 << 20)  # SO_RCVBUFFORCE: a busy receiver drops no packets
sock.bind(("0.0.0.0", 9998))
print("ready", flush=True)
count = 0
while (packet := sock.recv(1500)) != mark + b"end":
    count += packet == mark.ljust(1000)
print(count, flush=True)
"""
SEND = """
import socket, sys, time
for _ in range(10):  # until ARP has resolved both addresses
    try:
        socket.create_connection((sys.argv[1], 6818), 2).close()
        break
    except OSError:
        pass
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(500):
    sock.sendto(sys.argv[2].encode().ljust(1000), (sys.argv[1], 9998))
    time.sleep(0.0003)
while True:  # until the receiver has ended
    sock.sendto(sys.argv[2].encode() + b"end", (sys.argv[1], 9998))
    time.sleep(0.02)
"""


def arrives(cli: Cli, sender: str, receiver: str) -> int:
    """Return how many of 500 packets of 1000 bytes arrive."""
    mark = token_hex(8)
    with on(cli, receiver, COUNT, mark) as counting:
        assert next_line(counting) == "ready"
        with on(cli, sender, SEND, receiver, mark):
            return int(next_line(counting))


def findings(cli: Cli, node: str) -> list[list[str]]:
    """Return the check results of a node's agent that did not pass."""
    views = ask(cli.home / "clusters/one/run/controller.sock", {"agents": True}, 60)["agents"]
    return [found[:2] for each in views if each["node"] == node for found in each["findings"]]


def telemetry(cli: Cli, node: str) -> Telemetry:
    return read_telemetry(folder(cli).telemetry(node))


def test_packet_loss_and_delay_are_injected(two: Cli):
    two.ok("inject", "net-loss", "train-2", "--percent", "25")
    for sender, receiver in (("train-1", "train-2"), ("train-2", "train-1")):
        assert 300 < arrives(two, sender, receiver) < 450
    eventually(lambda: ["network", "warned"] in findings(two, "train-2"), 100)
    two.ok("inject", "--clear", "train-2")
    two.ok("inject", "net-slow", "train-2", "--rate", "100kbit")
    for sender, receiver in (("train-1", "train-2"), ("train-2", "train-1")):
        assert arrives(two, sender, receiver) < 300, "half a megabyte at 12 kB/s"
    two.ok("inject", "--clear")
    eventually(lambda: arrives(two, "train-1", "train-2") > 475)


RECEIVE = """
import socket, time
sock = socket.create_server(("0.0.0.0", 9997))
print("ready", flush=True)
peer, _ = sock.accept()
began = time.monotonic()
while peer.recv(65536):
    pass
print(time.monotonic() - began, flush=True)
"""
TRANSMIT = """
import socket, sys
socket.create_connection((sys.argv[1], 9997), 60).sendall(bytes(512 << 10))
"""


def transfer_s(cli: Cli, sender: str, receiver: str) -> float:
    """Return how long half a mebibyte takes over TCP, in seconds."""
    with on(cli, receiver, RECEIVE) as receiving:
        assert next_line(receiving) == "ready"
        with on(cli, sender, TRANSMIT, receiver):
            return float(next_line(receiving))


def test_slow_link_slows_only_the_packets_between_its_two_ends(two: Cli):
    two.ok("inject", "link-slow", "train-2", "--peer", "train-1", "--rate", "1mbit")
    for sender, receiver in (("train-1", "train-2"), ("train-2", "train-1")):
        assert transfer_s(two, sender, receiver) > 2.5, "half a mebibyte at 125 kB/s"
    for sender, receiver in (("head", "train-2"), ("train-2", "head")):
        assert transfer_s(two, sender, receiver) < 2.5
    two.ok("inject", "--clear", "train-2")
    for sender, receiver in (("train-1", "train-2"), ("train-2", "train-1")):
        assert transfer_s(two, sender, receiver) < 2.5


def test_link_down_is_injected(two: Cli):
    two.ok("inject", "link-down", "train-2")
    eventually(lambda: "NO-CARRIER" in in_host(two, "train-2", "ip", "-br", "link", "show", "eth0").out)
    assert telemetry(two, "train-2").ports[0].state == "DOWN" and not reaches(two, "train-2")
    two.ok("inject", "link-down", "train-2", "--clear")
    two.ok("inject", "link-flap", "train-2", "--count", "2")
    eventually(lambda: reaches(two, "train-2"))  # Linux checks the carrier once a second
    assert len(telemetry(two, "train-2").ports[0].flaps) == 2
    two.ok("inject", "--clear", "train-2")
    assert telemetry(two, "train-2").ports[0].flaps == ()


def test_disk_faults_affect_only_one_node(two: Cli):
    spool, home, munge = folder(two).spool("train-2"), folder(two).homes, folder(two).munge_socket
    write = ("sh", "-c", f"echo x > {spool}/$$ && rm {spool}/$$")
    look = ("timeout", "-s", "KILL", "2", "ls", str(home))
    for fault, command in (("disk-full", write), ("fs-hang", look), ("munge-dead", ("munge", "-n", "-S", str(munge)))):
        assert in_host(two, "train-2", *command).code == 0
        target_of(two).inject(FAULTS[fault], "train-2", FaultOptions())
        assert in_host(two, "train-2", *command).code != 0, fault
        assert fault == "disk-full" or in_host(two, "train-1", *command).code == 0
        assert f"injected: {fault} on train-2; `dalsegno inject --clear` undoes it" in two.status("one")["problems"]  # type: ignore[operator]
        target_of(two).clear("train-2")
        assert in_host(two, "train-2", *command).code == 0, fault
    two.ok("inject", "fs-hang", "train-2", "--for", "1s")
    eventually(lambda: in_host(two, "train-2", *look).code == 0)


def test_killed_daemons_stay_dead_until_cleared(two: Cli):
    """This also holds for the node agent, which its host would otherwise restart."""
    for fault, daemon in (("agent-dead", "node-agent"), ("slurmd-dead", "slurmd")):
        two.ok("inject", fault, "train-2")
        assert not runs(two, "train-2", daemon)
        answer = two.run("inject", fault, "train-2")
        assert answer.code == 1 and f"{daemon} does not run on train-2" in answer.err
    assert not reaches(two, "train-2") and not runs(two, "train-2", "node-agent")
    two.ok("inject", "--clear")
    eventually(lambda: reaches(two, "train-2") and runs(two, "train-2", "node-agent"))


def runs(cli: Cli, node: str, daemon: str) -> bool:
    return service_facts(folder(cli).host(node))[daemon].running


def test_gpu_faults_are_injected(two: Cli):
    list_gpus = ("shell", "--", "srun", "-w", "train-2", "--gpus-per-node=2", "nvidia-smi", "-L")
    before = two.ok(*list_gpus)
    result = json.loads(two.ok("inject", "xid", "79", "train-2", "--gpu", "1", "--json"))
    assert (result["code"], result["repaired_by"]) == (79, "reboot")
    assert "GPU has fallen off the bus" in telemetry(two, "train-2").kernel_log[0].text
    assert two.ok(*list_gpus) == before.splitlines(keepends=True)[0]
    two.ok("inject", "ecc", "train-2", "--count", "3", "--for", "1s")
    assert telemetry(two, "train-2").gpus[0].ecc_uncorrected == 3
    eventually(lambda: telemetry(two, "train-2").gpus[0].ecc_uncorrected == 0)
    assert "undoes the faults injected into 1 host (train-2)" in two.ok("plan")
    two.ok("up")
    assert two.ok(*list_gpus) == before


# Injected fault -> the check that finds it
FOUND = {
    ("xid", FaultOptions(code=48)): "xid",
    ("ecc", FaultOptions()): "gpu-ecc",
    ("gpu-hot", FaultOptions()): "gpu-temperature",
    ("slow-gpu", FaultOptions()): "gpu-clocks",
    ("nvlink", FaultOptions()): "nvlink",
    ("gpu-lost", FaultOptions(gpu=1)): "gpu-count",
    ("link-down", FaultOptions()): "fabric-ports",
    ("link-flap", FaultOptions(count=3)): "fabric-flaps",
    ("disk-full", FaultOptions()): "disk",
    ("fs-hang", FaultOptions()): "file-systems",
    ("munge-dead", FaultOptions()): "munge",
    ("clock-skew", FaultOptions()): "clock",
    ("slurmd-dead", FaultOptions()): "slurmd",
}


def test_health_finds_every_injected_fault(two: Cli):
    """All faults are injected at once; one after the other, they would take a minute."""
    health = ("health", "--node", "train-2", "--json")
    assert failed_checks(two.run(*health)) == set()
    for fault, options in FOUND:
        target_of(two).inject(FAULTS[fault], "train-2", options)
    assert failed_checks(two.run(*health)) >= set(FOUND.values())
    two.ok("up")
    eventually(lambda: failed_checks(two.run(*health)) == set())


def failed_checks(answer: Answer) -> set[str]:
    return {each["check"] for each in json.loads(answer.out)["findings"] if each["verdict"] == "failed"}


# Machine room


def test_machine_room_reboots_and_replaces_a_node(two: Cli):
    room = HostControlClient(folder(two).root)
    is_on = f"HostControlClient(Path('{folder(two).root}')).is_on('train-2')"
    script = f"from {HostControlClient.__module__} import *; print({is_on})"
    assert in_host(two, "head", sys.executable, "-c", script).out == "True\n", "the host of the controller"
    two.ok("inject", "gpu-lost", "train-2")
    two.ok("inject", "slow-gpu", "train-2")
    two.ok("inject", "slurmd-dead", "train-2")
    mark, before = room.boot_id("train-2"), telemetry(two, "train-2")
    back(two, room.reboot, "train-2")
    rebooted = telemetry(two, "train-2")
    assert room.boot_id("train-2") != mark and len(rebooted.gpus) == 2 == len(before.gpus) + 1
    assert rebooted.gpus[0].throttle != (), "a fault that a reboot does not repair"

    secret = folder(two).agent_secret("train-2").read_text()
    two.ok("inject", "power-off", "train-2")
    two.ok("inject", "bad-replacement", "train-2")
    assert room.is_on("train-2") is False
    back(two, room.replace, "train-2")
    replaced = telemetry(two, "train-2")
    assert not {gpu.uuid for gpu in replaced.gpus} & {gpu.uuid for gpu in rebooted.gpus}
    assert not {gpu.serial for gpu in replaced.gpus} & {gpu.serial for gpu in rebooted.gpus}
    assert (replaced.gpus[0].throttle, replaced.gpus[0].ecc_uncorrected) == ((), 7)
    assert folder(two).agent_secret("train-2").read_text() != secret
    room.replace("train-2")
    assert telemetry(two, "train-2").gpus[0].ecc_uncorrected == 0
    assert two.run("up").code == 0
    assert telemetry(two, "train-2").gpus[0].uuid not in {gpu.uuid for gpu in (*rebooted.gpus, *replaced.gpus)}


def back(cli: Cli, remedy: Callable[[str], None], node: str) -> None:
    """Wait until Slurm schedules jobs on the node again. It must be set DOWN before."""
    slurm = target_of(cli).slurm
    slurm.set_down([node], "dalsegno:test")
    remedy(node)

    def registered() -> bool:
        slurm.resume(node)
        return any(each.name == node and each.responding and not each.down for each in slurm.nodes())

    eventually(registered, every_s=0.02)
    assert cli.ok("shell", "--", "srun", "-w", node, "hostname") == f"{node}\n"


def test_killed_machine_room_leaves_no_partial_host(two: Cli):
    """The machine room is killed at various moments. Its successor completes the host."""
    room = HostControlClient(folder(two).root)
    for delay_s in (0.0, 0.02, 0.05, 0.08):
        threading.Thread(target=ask_in_vain, args=(room,), daemon=True).start()
        time.sleep(delay_s)
        end(find(lambda pid: arguments(pid)[-2:] == ["machine-room", str(folder(two).root)]))
        room.reboot("train-2")
        eventually(lambda: reaches(two, "train-2"))
        hosts = [one for one in marked(str(folder(two).root)) if _comm(one.pid) == "ds:train-2"]
        assert [host_process(folder(two).host("train-2"))] == hosts
    two.ok("up")


def ask_in_vain(room: HostControlClient) -> None:
    """Send a request that may fail because the machine room is killed."""
    with suppress(TargetError):
        room.reboot("train-2")


def test_impossible_fault_is_refused(two: Cli):
    answer = two.run("inject", "power-off", "train-7")
    assert answer.code == 1 and "there is no node `train-7`" in answer.err and "train-1, train-2" in answer.err
    assert two.run("inject", "power-of", "train-1").code == 2
    plain = Cli(two.home, uid=65534).run("inject", "power-off", "train-1")
    assert plain.code == 1 and "belongs to root" in plain.err and "sudo" in plain.err
    assert idle_nodes(two) == 2


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""

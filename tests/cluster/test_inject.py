"""Breaking real virtual hosts: what their peers see, and that all of it can be mended."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.system.hosts import host_process
from dalsegno.system.procfs import arguments, descendants, find
from tests.cluster.conftest import Cli, eventually
from tests.cluster.test_up_down import idle_nodes, small

LISTEN = """
import socket, time
sock = socket.create_server(("0.0.0.0", 9999))
print("ready", flush=True)
peer, _ = sock.accept()
print("in", flush=True)
time.sleep(100)
"""
# Prints what becomes of a connection to a host: "silence", or how it ended.
CONNECT = """
import socket, sys
sock = socket.create_connection((sys.argv[1], 9999), 5)
print("connected", flush=True)
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
time.sleep(100)
"""


@contextmanager
def on(cli: Cli, host: str, script: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python script on a host, whose lines can be read as they come."""
    process = cli.start("shell", "--node", host, "--", sys.executable, "-I", "-u", "-c", script, *args)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def reaches(cli: Cli, host: str) -> bool:
    """Whether slurmd's port on a host answers another host."""
    script = f"import socket; socket.create_connection(({host!r}, 6818), 0.3)"
    return cli.run("shell", "--node", "head", "--", sys.executable, "-I", "-c", script).code == 0


@pytest.fixture
def two(cli: Cli) -> Cli:
    cli.ok("up", cli.file(small(2)))
    return cli


def test_a_host_that_loses_its_power_says_no_goodbye_and_up_brings_it_back(two: Cli):
    with on(two, "train-2", LISTEN) as listener:
        assert next_line(listener) == "ready"
        with on(two, "train-1", CONNECT, "train-2") as peer:
            assert next_line(peer) == "connected"
            said = two.run("inject", "power-off", "train-2")
            assert (said.code, said.err) == (0, "train-2 is off; `dalsegno up` boots it again\n")
            assert next_line(peer) == "silence"
    assert host_process(two.home / "clusters/one/hosts/train-2") is None
    answer = two.run("inject", "power-off", "train-2")
    assert answer.code == 1 and "off already" in answer.err
    two.ok("up")
    assert idle_nodes(two) == 2 and reaches(two, "train-2")


@pytest.mark.alone
def test_a_cut_drops_everything_both_ways_and_ends_by_itself(two: Cli):
    assert reaches(two, "train-2")
    two.ok("inject", "net-cut", "train-2", "--for", "1.5s")
    assert not reaches(two, "train-2")
    eventually(lambda: reaches(two, "train-2"), timeout_s=10)
    eventually(lambda: two.run("up").err.startswith("nothing to do"), timeout_s=5)


def test_a_cut_leaves_the_link_up_and_connections_alive(two: Cli):
    with on(two, "train-2", LISTEN) as listener:
        assert next_line(listener) == "ready"
        with on(two, "train-1", CONNECT, "train-2") as peer:
            assert next_line(peer) == "connected"
            two.ok("inject", "net-cut", "train-2")
            state = two.ok("shell", "--node", "train-2", "--", "cat", "/sys/class/net/eth0/carrier", "/proc/1/comm")
            assert state.split() == ["1", "ds:train-2"]
            assert next_line(peer) == "silence"
    two.ok("inject", "net-cut", "train-2", "--clear")
    assert reaches(two, "train-2")


def test_a_later_cut_is_not_ended_by_the_timer_of_an_earlier_one(two: Cli):
    two.ok("inject", "net-cut", "train-2", "--for", "1s")
    two.ok("inject", "net-cut", "train-2")
    mark = str(two.home / "clusters/one/hosts/train-2/faults/net-cut.json")
    eventually(lambda: not find(lambda pid: mark in arguments(pid)))  # its time is over
    assert not reaches(two, "train-2")
    assert "undoes the faults injected into 1 host (train-2)" in two.ok("plan")
    two.ok("up")
    assert reaches(two, "train-2")


def test_a_host_that_is_booted_again_is_not_cut_off(two: Cli):
    two.ok("inject", "net-cut", "train-2")
    two.ok("inject", "power-off", "train-2")
    (state,) = (line.split()[1] for line in two.ok("status").splitlines() if line.startswith("train-2"))
    assert state == "off", "whatever Slurm still believes"
    two.ok("up")
    assert idle_nodes(two) == 2 and reaches(two, "train-2")
    assert two.run("up").err.startswith("nothing to do")


def test_a_cut_under_way_leaves_nothing_behind_when_the_cluster_goes(two: Cli):
    two.ok("inject", "net-cut", "train-2", "--for", "100s")
    two.ok("down", "one")  # and the fixture looks for leftovers


def test_one_worker_is_killed_and_the_others_live(two: Cli):
    start_workers(two)
    eventually(lambda: workers(two, "train-2") == [4, 5, 6])
    told = json.loads(two.ok("inject", "worker-kill", "train-2", "--rank", "5", "--json"))
    assert (told["fault"], told["node"], told["rank"]) == ("worker-kill", "train-2", 5)
    eventually(lambda: 5 not in workers(two, "train-2"))
    answer = two.run("inject", "worker-kill", "train-1")
    assert answer.code == 1 and "there is no worker on train-1" in answer.err


def start_workers(cli: Cli) -> None:
    """Ranks 4 to 6 on train-2, named as a run's agent names them."""
    script = cli.home / "worker.py"
    script.write_text(WORKER)
    job = f"srun sh -c 'for rank in 6 5 4; do {sys.executable} -I {script} $rank & done; wait'"
    cli.ok("shell", "--", "sbatch", "-w", "train-2", "-o", "/dev/null", "--wrap", job)


def test_on_loopback_ports_workers_can_be_killed_and_hosts_cannot(cli: Cli):
    cli.ok("up", cli.file(small(2) + "local: {hosts: loopback}\n"))
    for fault in ("power-off", "net-cut"):
        answer = cli.run("inject", fault, "train-2")
        assert answer.code == 1 and "is a process on this machine, not a host" in answer.err
    start_workers(cli)
    eventually(lambda: cli.run("inject", "worker-kill", "train-2", "--rank", "6").code == 0)
    eventually(lambda: json.loads(cli.ok("inject", "worker-kill", "train-2", "--json"))["rank"] == 4)
    eventually(lambda: "there is rank 5" in cli.run("inject", "worker-kill", "train-2", "--rank", "4").err)
    assert "no worker on train-1" in cli.run("inject", "worker-kill", "train-1").err


def workers(cli: Cli, node: str) -> list[int]:
    host = host_process(cli.home / "clusters/one/hosts" / node)
    assert host is not None
    names = [_comm(pid) for pid in descendants(host.pid)]
    return sorted(int(name[4:]) for name in names if name.startswith("ds:w"))


def test_what_cannot_be_broken_is_told(two: Cli):
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

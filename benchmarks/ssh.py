"""Measure how long it takes to connect to many hosts over SSH, to inspect them, and to send each a bundle.

    .venv/bin/python -m benchmarks.ssh --hosts 32
    .venv/bin/python -m benchmarks.ssh --hosts 8 --cluster

The hosts are virtual, on this machine, each with its own sshd. For comparison, a loop does the same with one `ssh`
command after the other. With `--cluster`, whole commands are measured instead: `plan`, `up`, `up` again and `down` of a
cluster on these hosts. Slurm's packages are installed there. Needs root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import HostRack, reason_to_skip, running_hosts

from dalsegno.hostlist import expand
from dalsegno.setup.inspect import HostFacts, inspect_hosts, program
from dalsegno.system.ssh import SshConnections, client_argv

DISK_MIB = 700
PACKAGES = ("slurmctld", "slurmd", "munge", "mariadb-server")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--hosts", type=int, default=32)
    words.add_argument("--bundle-mib", type=int, default=10)
    words.add_argument("--limit", type=int, default=16)
    words.add_argument("--cluster", action="store_true")
    args = words.parse_args()
    if reason := reason_to_skip():
        raise SystemExit(reason)
    if args.cluster:
        return measure_cluster(args.hosts)
    bundle = os.urandom(args.bundle_mib << 20)
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        with running_hosts(args.hosts, Path(folder) / "hosts", disk_mib=256) as rack:
            print(f"{args.hosts} hosts started in {time.monotonic() - start:.1f} s; {os.cpu_count()} cores")
            ours = measure_connections(rack, bundle, args.limit)
            loop = measure_loop(rack, bundle)
    print(f"{'':22}{'Dal Segno':>12}{'ssh in a loop':>16}{'ratio':>8}")
    for name in ours:
        ratio = f"{loop[name] / ours[name]:.1f}" if name in loop else ""
        other = f"{loop[name]:.2f} s" if name in loop else ""
        print(f"{name:22}{ours[name]:>10.2f} s{other:>16}{ratio:>8}")
    return 0


def timed(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def measure_cluster(count: int) -> int:
    """Measure the commands that an operator runs, from the start of the command to its end."""
    nodes = f"n[1-{count - 1}]"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_hosts(count, folder / "hosts", names=["head", *expand(nodes)], disk_mib=DISK_MIB) as rack:
            operator = Operator(folder, rack, timeout_s=3600)
            operator.clear_hosts()
            operator.write(nodes=nodes, more="")
            print(f"{count} hosts; {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}")
            for words in (["plan"], ["up"], ["up"], ["down", "--yes"]):
                file = [] if words[0] == "down" else [str(operator.file)]
                print(f"{words[0]:22}{timed(partial(operator.dalsegno, *words, *file)):>10.2f} s", flush=True)
                if words == ["up"]:
                    assert operator.on_head("srun", f"-N{count - 1}", "hostname").count("\n") == count - 1
            print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 0


def measure_connections(rack: HostRack, bundle: bytes, limit: int) -> dict[str, float]:
    with SshConnections(rack.addresses(), known_hosts=rack.known_hosts, limit=limit) as ssh:

        def everywhere(argv: list[str], stdin: bytes = b"") -> None:
            found = ssh.each(rack.names, lambda host: ssh.run(host, argv, stdin=stdin, root=True).checked())
            assert not [each for each in found.values() if isinstance(each, Exception)]

        def inspect() -> None:
            found = inspect_hosts(ssh, rack.names, PACKAGES)
            assert all(isinstance(each, HostFacts) for each in found.values())

        times = {
            "connect and `true`": timed(lambda: everywhere(["true"])),
            "inspect": timed(inspect),
            "send the bundle": timed(lambda: everywhere(["sh", "-c", "cat > /tmp/bundle"], bundle)),
        }
    return {**times, "all": sum(times.values())}


def measure_loop(rack: HostRack, bundle: bytes) -> dict[str, float]:
    def everywhere(argv: list[str], stdin: bytes = b"") -> None:
        for address in rack.addresses():
            words = client_argv(address, argv, known_hosts=rack.known_hosts)
            subprocess.run(words, input=stdin, check=True, stdout=subprocess.DEVNULL)

    times = {
        "connect and `true`": timed(lambda: everywhere(["true"])),
        "inspect": timed(lambda: everywhere(["python3", "-", *PACKAGES], program())),
        "send the bundle": timed(lambda: everywhere(["sh", "-c", "cat > /tmp/bundle"], bundle)),
    }
    return {**times, "all": sum(times.values())}


if __name__ == "__main__":
    raise SystemExit(main())

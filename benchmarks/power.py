"""Cut the power of a virtual host, and find its processes."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from stage import ROOT, Failed, Stage

from dalsegno.system.hosts import host_process
from dalsegno.targets.local.network import port_name

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET, SIOCGIFFLAGS, IFF_UP = 0x40000000, 0x8913, 1


def power_off(stage: Stage, host: str) -> float:
    """Cut the power of a host. Return when its link went down, which is the first effect."""
    switch = host_process(stage.cluster / "hosts/switch")
    if switch is None:
        raise Failed("the cluster has no switch")
    placement = json.loads((stage.cluster / "state.json").read_text())["placement"]
    port, cut_at = port_name(placement["addresses"][host]), list[float]()

    def watch() -> None:
        if LIBC.setns(os.open(f"/proc/{switch.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter the network of the switch")
        with socket.socket() as network:  # the thread stays in this network namespace until it ends
            while is_up(network, port):
                time.sleep(0.002)
        cut_at.append(time.time())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    stage.dalsegno("inject", "power-off", host)
    thread.join(10)
    if not cut_at:
        raise Failed(f"the link of {host} is still up")
    return cut_at[0]


def is_up(network: socket.socket, port: str) -> bool:
    """Return whether the link `port` in the network namespace of a socket is up; False if there is no such link."""
    asked = struct.pack("16sh14x", port.encode(), 0)
    try:
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(network, SIOCGIFFLAGS, asked))
    except OSError:
        return False
    return bool(flags & IFF_UP)


def namespace(stage: Stage, host: str) -> str:
    """Return the PID namespace of a host."""
    argv = [str(ROOT / "dalsegno"), "ssh", host, "--", "readlink", "/proc/self/ns/pid"]
    return subprocess.run(argv, env=stage.env, capture_output=True, text=True, check=True).stdout.strip()


def processes_of(space: str) -> list[int]:
    """Return the processes in this PID namespace."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == space:
                found.append(int(name))
        except OSError:
            continue  # it has ended
    return found

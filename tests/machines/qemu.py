"""The choice between KVM and emulation for a virtual machine."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PROBE_S = 20.0
BOOTED = "Run /init as init process"  # the kernel's last message before the programs of the initrd


@dataclass(frozen=True)
class Accelerator:
    """How qemu runs a machine: at full speed with KVM, or emulated, which is 10 to 20 times slower."""

    name: str
    options: tuple[str, ...]


KVM = Accelerator("kvm", ("-machine", "q35,accel=kvm", "-cpu", "host,-arch-capabilities"))
# Without cmpxchg16b: with qemu 7.2, Linux 6.12 panicked at boot, because the saved flags were wrong just after this
# instruction. Without it, the kernel uses a substitute.
EMULATION = Accelerator("tcg", ("-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max,-cx16"))


@lru_cache
def accelerator(kernel: Path, initrd: Path) -> Accelerator:
    """Return KVM if it boots this kernel, otherwise emulation.

    A machine that is itself virtual may have /dev/kvm and yet start only kernels that were changed for it. So this
    function starts the kernel. `arch-capabilities` is left out, because some hosts refuse to set it.
    """
    return KVM if os.access("/dev/kvm", os.R_OK | os.W_OK) and _boots(KVM, kernel, initrd) else EMULATION


def _boots(chosen: Accelerator, kernel: Path, initrd: Path) -> bool:
    """Return whether a machine reaches its initrd in time."""
    with tempfile.TemporaryDirectory() as folder:
        console = Path(folder, "console")
        argv = ["qemu-system-x86_64", *chosen.options, "-m", "512", "-display", "none", "-no-reboot"]
        argv += ["-kernel", str(kernel), "-initrd", str(initrd), "-append", "console=ttyS0 panic=-1"]
        argv += ["-serial", f"file:{console}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(argv, **quiet) as machine:
            until = time.monotonic() + PROBE_S
            while time.monotonic() < until and machine.poll() is None:
                if console.exists() and BOOTED in console.read_text(errors="replace"):
                    break
                time.sleep(0.1)
            machine.kill()
        return console.exists() and BOOTED in console.read_text(errors="replace")

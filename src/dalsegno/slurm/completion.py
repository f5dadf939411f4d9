"""Ending an allocation as salloc does when its command has ended: Slurm's books then have the exit code of that.

No command of Slurm's does it for an allocation that has outlived its salloc; `scancel` writes CANCELLED, however well
everything went. So Slurm's own library is asked, in a process of its own: it ends its caller where it does not like it.
"""

from __future__ import annotations

import sys

_PROGRAM = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # its plugins look for its names among all
if hasattr(library, "slurm_init"):
    library.slurm_init(None)
sys.exit(library.slurm_complete_job(ctypes.c_uint32(int(sys.argv[2])), ctypes.c_uint32(int(sys.argv[3]))) != 0)
"""


def complete_argv(plugins: str, job: int, exit_code: int) -> tuple[str, ...]:
    """`plugins` is the folder of Slurm's plugins, where all of Slurm's own commands find the library too."""
    status = (exit_code & 0xFF) << 8  # as wait() tells it
    return (sys.executable, "-I", "-S", "-c", _PROGRAM, f"{plugins}/libslurmfull.so", str(job), str(status))

"""A standby worker: a forked process that starts CUDA and NCCL, then waits for the order to run the script.

Starting CUDA and loading NCCL and cuBLAS take most of the time needed to replace a killed GPU worker. To the script,
the process looks new: torch has no GPU memory allocated, no process group exists, and no random number was drawn.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dalsegno.runs.agent.script import name_process, run_script
from dalsegno.wire.frames import BadFrame, Message, Reader, send

FREE_MIB = 4096  # a standby worker is not prepared on a GPU with less free memory
SIZE = 512  # size of the square matrices multiplied to load cuBLAS
LOWEST_NICENESS = 19
_MIB = 1 << 20


def become_standby(task: Message) -> None:
    """Prepare CUDA and NCCL, report the result, and run the script that the agent sends.

    Return if the agent sends none.
    """
    os.environ.clear()
    os.environ.update(task["env"])
    channel = socket.socket(fileno=task["files"][0])
    outcome: Message = {}
    usual = ThreadPriority.of(threading.get_native_id())
    # The preparation runs in a separate thread, because it changes the thread's current device and priority.
    with _no_output():
        thread = threading.Thread(target=lambda: outcome.update(_prepare(task)), name="standby")
        thread.start()
        thread.join()
    with contextlib.suppress(OSError):
        send(channel, {"standby": outcome})
        order = _wait(channel) if not outcome.get("why") else None
        channel.close()
        if order is not None:
            restore_priority(usual)
            name_process(order["name"])
            run_script(order)


def _wait(channel: socket.socket) -> Message | None:
    """Return the task that the agent sends; None if the agent has closed the connection."""
    reader = Reader()
    while data := channel.recv(65536):
        try:
            messages = list(reader.feed(data))
        except BadFrame:
            return None
        if messages:
            task: Message = messages[0]["go"]
            return task
    return None


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Discard the output of libraries, such as NCCL with NCCL_DEBUG, because it would appear in the agent's log."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in zip((1, 2), kept):
            os.dup2(file, number)
            os.close(file)
        os.close(nowhere)


def _prepare(task: Message) -> Message:
    """Start CUDA and NCCL at low priority. Return the GPU memory that they hold, or why the preparation failed."""
    lower_priority(can_undo_niceness())
    if not task["gpu"]:
        return {"mib": 0}
    try:
        return _start_cuda(sys.modules["torch"], int(task["local_rank"]), task["backend"])
    except Exception as error:  # a driver or NCCL may raise any exception; workers are then forked without a standby
        return {"why": f"{type(error).__name__}: {error}"[:500]}


def _start_cuda(torch: Any, local_rank: int, backend: str) -> Message:
    if not torch.cuda.is_available():
        return {"why": "torch finds no GPU"}
    device = local_rank if local_rank < torch.cuda.device_count() else 0
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    before = gpu_memory(uuid)
    if why := find_lack_of_memory(device, before):
        return {"why": why}
    with torch.cuda.device(device):
        for kind in (torch.float32, torch.bfloat16):
            factor = torch.ones((SIZE, SIZE), dtype=kind, device="cuda")
            product = factor @ factor
            del factor, product
        if backend == "nccl":
            _load_nccl(torch, device)
        torch.cuda.synchronize()
        _forget_allocations(torch, device)
    after = gpu_memory(uuid)
    return {"mib": before.free_mib - after.free_mib if before is not None and after is not None else None}


def find_lack_of_memory(device: int, memory: GpuMemory | None) -> str:
    """Return why a GPU has too little free memory for a standby; "" if it has enough, or if that is unknown."""
    if memory is None or memory.free_mib >= FREE_MIB:
        return ""
    return f"GPU {device} has only {memory.free_mib} MiB of free memory"


def _load_nccl(torch: Any, device: int) -> None:
    """Run one all-reduce in a group of one rank, and destroy the group."""
    dist = torch.distributed
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", device)
    )
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()


def _forget_allocations(torch: Any, device: int) -> None:
    """Free all memory of torch's allocator, including cuBLAS' workspace, and reset its statistics."""
    with contextlib.suppress(AttributeError):  # private to torch, so it may be missing
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.reset_accumulated_memory_stats(device)


# The priority of the preparation. Threads that CUDA and NCCL start then inherit it, and go on to serve the script


@dataclass(frozen=True)
class ThreadPriority:
    """The niceness and the scheduling policy of one thread."""

    niceness: int
    policy: int

    @classmethod
    def of(cls, thread: int) -> ThreadPriority:
        return cls(os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread))


def can_undo_niceness() -> bool:
    """Return whether this process may lower a niceness again. Root may. Others may if RLIMIT_NICE allows it.

    To find out, a thread tries it and ends at once.
    """
    allowed: list[bool] = []

    def attempt() -> None:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            usual = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, LOWEST_NICENESS)
            os.setpriority(os.PRIO_PROCESS, thread, usual)
            allowed.append(True)

    thread = threading.Thread(target=attempt, name="standby")
    thread.start()
    thread.join()
    return bool(allowed)


def lower_priority(can_undo: bool) -> None:
    """Lower the priority of this thread and of the threads that it starts, in a way that can be undone.

    Any user may leave SCHED_BATCH, which is weaker than niceness: a thread gets its share of the CPU, but does not
    preempt another thread when it wakes. SCHED_IDLE is not an alternative, because leaving it requires the same
    permission as for niceness.
    """
    with contextlib.suppress(OSError):
        if can_undo:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_NICENESS)
        elif os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def restore_priority(usual: ThreadPriority) -> None:
    """Give all threads of this process the niceness and the policy that the process had before the preparation.

    This is repeated until nothing changes, because a thread at low priority may start another one meanwhile.
    """
    while any([_restore_thread(int(name), usual) for name in os.listdir("/proc/self/task")]):
        pass


def _restore_thread(thread: int, usual: ThreadPriority) -> bool:
    """Give one thread the usual priority; return whether its priority was changed."""
    try:
        found = ThreadPriority.of(thread)
        if found.policy == os.SCHED_BATCH != usual.policy:
            os.sched_setscheduler(thread, usual.policy, os.sched_param(0))
        elif found.niceness == LOWEST_NICENESS != usual.niceness:
            os.setpriority(os.PRIO_PROCESS, thread, usual.niceness)
        else:
            return False
    except OSError:  # the thread has ended, or a sandbox does not allow the change
        return False
    return True


# GPU memory is read from NVML, because CUDA can report it only after it has allocated memory itself


class GpuMemory(ctypes.Structure):
    """NVML's nvmlMemory_t."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    @property
    def free_mib(self) -> int:
        return int(self.free) // _MIB


def gpu_memory(uuid: str) -> GpuMemory | None:
    """Return the memory of the GPU with this UUID; None if NVML does not report it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), GpuMemory()
    name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
    found = (
        nvml.nvmlInit_v2() == 0
        and nvml.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name), ctypes.byref(handle)) == 0
        and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    )
    return memory if found else None

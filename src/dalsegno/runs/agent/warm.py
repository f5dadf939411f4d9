"""The warm parent: a Python process that has done the slow imports and forks workers that start at once.

The agent sends `{"fork": …}` over a Unix socket to start a worker. The parent reports the end of a worker as
`{"ended": pid, "code": …}`. It never touches a GPU, because a forked process cannot use its parent's CUDA context. When
the agent ends, so do the parent and its workers. The parent adopts the orphans of its workers, so that every process of
the run is a descendant of the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from dalsegno.runs.agent.script import become_program, name_process, run_script
from dalsegno.runs.agent.standby_process import become_standby
from dalsegno.runs.agent.store import serve_store
from dalsegno.train.contract import AGENT
from dalsegno.wire.frames import FileReader, Message, send
from dalsegno.wire.peer import uid_of

# Savers and keepers, which outlive workers


CONNECT_S = 60.0


def become_saver(task: Message) -> None:
    """Become the saver for one worker: the first process of the same user that connects to the socket."""
    os.environ[AGENT] = task["door"]
    with socket.socket(fileno=task["files"][0]) as listener:
        worker = _accept_own_user(listener)
    if worker is not None:
        from dalsegno.train.saver import serve

        serve(worker)


def become_keeper(task: Message) -> None:
    from dalsegno.train.keeper import serve

    serve(task["door"], socket.socket(fileno=task["files"][0]))


def _accept_own_user(listener: socket.socket) -> socket.socket | None:
    """Return the first connection from the same user; None after a timeout. Connections from other users are closed."""
    listener.settimeout(CONNECT_S)
    while True:
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            return None
        sock.settimeout(None)
        if uid_of(sock) == os.getuid():
            return sock
        sock.close()


# The warm parent, from which workers are forked


PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_MAX_WHY_CHARS = 2000  # maximum length of a reported import error
WAKE_S = 0.5  # maximum time between two checks for ended children, in case a signal is missed


def main(channel: int, modules: list[str]) -> None:
    """Import the modules, report the result, then fork processes until the agent ends. Each fork runs its task."""
    die_with_parent()
    adopt_orphans()
    sock = socket.socket(fileno=channel)
    send(sock, {"warm": preload(modules)})
    # Without `freeze`, the first collection in each worker examines all objects of the loaded modules and copies their
    # pages. With torch, that takes 4 ms, in the middle of a restart.
    gc.freeze()
    worker = Parent(sock).serve()
    if worker is not None:
        KINDS[worker.get("kind", "script")](worker)


KINDS = {
    "script": run_script,
    "program": become_program,
    "store": serve_store,
    "standby": become_standby,
    "saver": become_saver,
    "keeper": become_keeper,
}


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def preload(modules: list[str]) -> Message:
    """Import the modules and return whether workers can be forked. Errors are returned, not raised."""
    began = time.monotonic()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything; workers then start as separate programs
            return {"ok": False, "why": f"import {name}: {type(error).__name__}: {error}"[:_MAX_WHY_CHARS]}
    if _cuda_is_initialised():
        return {"ok": False, "why": "a preloaded module has initialised CUDA, which a forked process cannot use"}
    return {"ok": True, "seconds": time.monotonic() - began, "threads": other_threads()}


def _cuda_is_initialised() -> bool:
    """Return whether CUDA is initialised. `is_available` is not called, because it would start the driver."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())


def other_threads() -> list[str]:
    """Return the names of the other threads. They do not exist in a forked worker, where their locks stay locked.

    OpenMP threads, which have the name of the process, are omitted, because libgomp starts new ones after a fork.
    """
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    own = str(threading.get_native_id())
    tasks = [task for task in os.listdir("/proc/self/task") if task != own]
    known = [named.get(int(task)) or _task_name(task) for task in tasks]
    return [name for name in known if name != _task_name(own)]


def _task_name(task: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        return "ended"


class Parent:
    """Forks and reaps workers, and reports their starts and ends to the agent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FileReader()
        self.children: set[int] = set()

    def serve(self) -> Message | None:
        """Serve until the agent has ended, then return None. In a forked process, return the task of that process."""
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            return self._serve(wake_read) or None
        finally:
            os.close(wake_read)
            os.close(wake_write)

    def _serve(self, wake: int) -> Message:
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select(WAKE_S)]
                if wake in ready:
                    os.read(wake, 4096)
                self.reap()
                worker = self.handle() if self.sock.fileno() in ready else None
                if worker is not None:
                    return worker

    def handle(self) -> Message | None:
        """Handle messages from the agent.

        Return the task in a forked process, {} if the agent has ended, otherwise None.
        """
        messages = self.reader.receive(self.sock)
        if messages is None:
            self.end_children()
            return {}
        for message in messages:
            task = self.fork(message["fork"], self.reader.take_files(message.get("files", 0)))
            if task is not None:
                return task
        return None

    def fork(self, task: Message, files: list[int]) -> Message | None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave(parent, task)
            return dict(task, files=files)
        # The child sets its group too. Both processes do it, so that the group exists before either of them continues.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for file in files:
            os.close(file)
        self.children.add(pid)
        send(self.sock, {"forked": task["id"], "pid": pid})
        return None

    def _leave(self, parent: int, task: Message) -> None:
        """Set the process group, name and signals of a forked process, and close its copy of the parent's socket."""
        os.setpgid(0, 0)
        die_with_parent()
        name_process(task.get("name", "worker"))
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the death signal was set
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.sock.close()

    def reap(self) -> None:
        """Reap all ended processes, including adopted orphans. Report the end of those that this parent forked."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:
                self.children.remove(pid)
                send(self.sock, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def end_children(self) -> None:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def start(arguments: list[str]) -> NoReturn:
    """Run the warm parent. The arguments are the folder of our packages, the socket's number, and modules to preload.

    First remove the entries of sys.path that only this program needs. After `pip install dalsegno`, our packages and
    the user's are in the same folder. That folder then has a second entry, which stays.
    """
    sys.path.remove(arguments[0])
    sys.path[:] = [folder for folder in sys.path if folder]
    main(int(arguments[1]), arguments[2:])
    sys.exit(0)

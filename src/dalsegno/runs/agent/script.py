"""Run a user's script in a forked process, just as `python SCRIPT` would."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import runpy
import signal
import sys
import threading
import types
from typing import Any, NoReturn

from dalsegno.runs.agent.flight_dump import dump_own, is_collective_timeout, serve_dumps
from dalsegno.runs.agent.gpu_use import report_gpu_use

Task = dict[str, Any]

FLUSH_S = 10.0
PR_SET_NAME = 15
STACKS_SIGNAL = signal.SIGRTMIN + 10  # a rarely used signal, unlike USR1 and USR2, which NCCL, Slurm and users need


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 characters."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def run_script(task: Task) -> NoReturn:
    """Run the script of a task as `__main__`, and exit as the script would."""
    try:
        _run(task)
        code = 0
    except SystemExit as error:
        code = _exit_code(error.code)
    except KeyboardInterrupt:
        _print_traceback()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 130
    except BaseException as error:  # any exception ends the script as it would under `python SCRIPT`
        _print_traceback()
        if task.get("flight") and is_collective_timeout(error):
            dump_own(*task["flight"][:2])
        code = 1
    _leave(code)


def _exit_code(given: object) -> int:
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1


def _print_traceback() -> None:
    """Print the traceback without our own frames above the script."""
    kind, error, trace = sys.exc_info()
    assert kind is not None and error is not None
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    with contextlib.suppress(Exception):  # the user's excepthook may fail
        sys.excepthook(kind, error.with_traceback(trace), trace)


def _leave(code: int) -> NoReturn:
    """Exit as Python does, but skip the teardown of modules, which takes a second with torch and may never end.

    Non-daemon threads are joined, exit handlers run, and files that are still open are flushed. One of the exit
    handlers is that of multiprocessing, which joins its children.
    """
    with contextlib.suppress(BaseException):  # Python also exits if this fails, for example after Ctrl-C
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):  # before Python 3.10, this raises errors that it has already printed
        atexit._run_exitfuncs()
    # Flushing may block forever on the lock of a file to which another thread is writing.
    flushing = threading.Thread(target=_flush_files, daemon=True)
    with contextlib.suppress(RuntimeError):
        flushing.start()
        flushing.join(FLUSH_S)
    os._exit(code & 0xFF)


def _flush_files() -> None:
    """Flush all open files, as Python does when it destroys them."""
    for each in (*_open_files(), sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            each.flush()


def _open_files() -> list[Any]:
    """Return all open files, text files first, because flushing a text file writes to its underlying binary file."""
    gc.disable()  # a collection now would take longer than the rest of the exit
    gc.unfreeze()  # modules that the warm parent loaded may have opened files too
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # isinstance would read each object's `__class__`, which makes some proxy objects emit a warning.
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return sorted(found, key=lambda each: not issubclass(type(each), io.TextIOWrapper))


def _run(task: Task) -> None:
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    _redirect(task["stdout"], task["stderr"])
    _reseed()
    if task.get("stacks"):
        _register_stacks(task["stacks"])
    if task.get("flight"):
        serve_dumps(*task["flight"])
    report_gpu_use(task["env"])
    sys.argv = [task["script"], *task["args"]]
    if task.get("module"):
        sys.path.insert(0, os.getcwd())
        runpy.run_module(task["script"], run_name="__main__", alter_sys=True)
    else:
        _run_file(task["script"])


def become_program(task: Task) -> None:
    """Replace this process with a program. As in a shell, exit code 127 means "not found" and 126 "not executable"."""
    os.chdir(task["cwd"])
    _redirect(task["stdout"], task["stderr"])
    files = task.get("files", ())
    for file in files:
        os.set_inheritable(file, True)
    argv = [task["script"], *(str(files[0]) if each == "{file}" and files else each for each in task["args"])]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these signals, and the program would inherit that setting.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, task["env"])
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _register_stacks(path: str) -> None:
    """Register a handler that writes the stacks of all threads to a file when the agent signals that the run hangs."""
    with contextlib.suppress(OSError):  # if the folder does not exist, the script runs without the handler
        faulthandler.register(STACKS_SIGNAL, open(path, "a"), all_threads=True, chain=False)  # noqa: SIM115


def _redirect(stdout: str, stderr: str) -> None:
    """Append output to these files, so that a restart keeps earlier output. "" keeps the agent's own output."""
    sys.stdout.flush()
    sys.stderr.flush()
    for path, target in ((stdout, 1), (stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, target)
            os.close(file)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # the log is read while the worker runs


def _reseed() -> None:
    """Seed the random generators, because all forked processes would otherwise have the parent's state."""
    random = sys.modules.get("random")
    if random is not None:
        random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run_file(path: str) -> None:
    """Run the file as `__main__`, as `python PATH` does, so that pickle, multiprocessing and `__file__` work."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=None, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)

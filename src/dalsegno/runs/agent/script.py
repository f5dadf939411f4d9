"""Running a user's script in a process that was forked, so that it cannot tell the difference from `python SCRIPT`."""

from __future__ import annotations

import atexit
import builtins
import contextlib
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

from dalsegno.train.groups import keep_new_groups

Task = dict[str, Any]

FLUSH_S = 10.0
STACKS_SIGNAL = signal.SIGRTMIN + 10  # nobody else's: NCCL, Slurm and people use USR1 and USR2


def run_script(task: Task) -> NoReturn:
    """Become the program: environment, folder, output, arguments, `__main__`. Ends as the script ends."""
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
    except BaseException:  # whatever it is, the script ends of it as it would in a Python of its own
        _print_traceback()
        code = 1
    _leave(code)


def _exit_code(given: object) -> int:
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1


def _print_traceback() -> None:
    """Without the frames that lead from us to the script."""
    kind, error, trace = sys.exc_info()
    assert kind is not None and error is not None
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    with contextlib.suppress(Exception):  # a user's own hook may fail, as anything of a user's
        sys.excepthook(kind, error.with_traceback(trace), trace)


def _leave(code: int) -> NoReturn:
    """What Python does at its end, but for taking modules apart: with torch that takes a second, and may never end.

    Threads that are no daemons are waited for, exit handlers run (multiprocessing joins its children in one), and what
    was written to files that are still open reaches them.
    """
    with contextlib.suppress(BaseException):  # a Ctrl-C, say: Python shows it, and goes on to the next
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):  # before 3.10 it raises what it has already shown
        atexit._run_exitfuncs()
    # A file that another thread is writing to right now may never let go of its lock.
    flushing = threading.Thread(target=_flush_files, daemon=True)
    with contextlib.suppress(RuntimeError):
        flushing.start()
        flushing.join(FLUSH_S)
    os._exit(code & 0xFF)


def _flush_files() -> None:
    """Python does so when it destroys them; here nobody does."""
    for each in (*_open_files(), sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            each.flush()


def _open_files() -> list[Any]:
    """Text before bytes: what is flushed from the one goes into the other."""
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # By type(): isinstance asks an object for its class, and some that stand for others answer with a warning.
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return sorted(found, key=lambda each: not issubclass(type(each), io.TextIOWrapper))


def _run(task: Task) -> None:
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    _redirect(task["stdout"], task["stderr"])
    _reseed()
    if task.get("stacks"):
        _tell_stacks(task["stacks"])
    keep_new_groups()
    sys.argv = [task["script"], *task["args"]]
    if task.get("module"):
        sys.path.insert(0, os.getcwd())
        runpy.run_module(task["script"], run_name="__main__", alter_sys=True)
    else:
        _run_file(task["script"])


def become_program(task: Task) -> None:
    """Become any executable, not only Python; a shell's own codes tell that it is not there or may not be run."""
    os.chdir(task["cwd"])
    _redirect(task["stdout"], task["stderr"])
    files = task.get("files", ())
    for file in files:
        os.set_inheritable(file, True)
    argv = [task["script"], *(str(files[0]) if each == "{file}" and files else each for each in task["args"])]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is ignored stays so
    try:
        os.execvpe(argv[0], argv, task["env"])
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _tell_stacks(path: str) -> None:
    """On a signal, write where every thread is: asked for when the run hangs."""
    with contextlib.suppress(OSError):  # no such folder: then stacks are all that is missing
        faulthandler.register(STACKS_SIGNAL, open(path, "a"), all_threads=True, chain=False)  # noqa: SIM115


def _redirect(stdout: str, stderr: str) -> None:
    """Output goes to files that are appended to: a restart never cuts off what was there. "": where ours goes."""
    sys.stdout.flush()
    sys.stderr.flush()
    for path, target in ((stdout, 1), (stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, target)
            os.close(file)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # whole lines, at once: the log is read while the worker runs


def _reseed() -> None:
    """Forked copies share their parent's random state; a process that was started afresh would not."""
    random = sys.modules.get("random")
    if random is not None:
        random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run_file(path: str) -> None:
    """The script as `__main__`, as `python PATH` makes it: pickle, multiprocessing and `__file__` work."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __loader__=None, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)

"""Running a user's script in a process that was forked, so that it cannot tell the difference from `python SCRIPT`."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
from typing import Any

Task = dict[str, Any]


def run_script(task: Task) -> None:
    """Become the program: environment, folder, output, arguments, `__main__`. Ends as the script ends."""
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    _redirect(task["stdout"], task["stderr"])
    _reseed()
    sys.argv = [task["script"], *task["args"]]
    if task.get("module"):
        sys.path.insert(0, os.getcwd())
        runpy.run_module(task["script"], run_name="__main__", alter_sys=True)
    else:
        _run_file(task["script"])


def _redirect(stdout: str, stderr: str) -> None:
    """Output goes to files that are appended to: a restart never cuts off what was there."""
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for path, target in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, target)
        os.close(file)
    os.close(null)
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

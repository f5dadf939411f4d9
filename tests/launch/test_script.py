"""A script in a forked worker ends, speaks and fails as it would under `python SCRIPT`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.warm_agent import Agent, script

PYTHONS = Path.home() / ".pyenv" / "versions"

ENDS = {
    "an exception": "def step():\n    raise ValueError('bad batch')\nstep()",
    "a chain of exceptions": "try:\n    {}['x']\nexcept KeyError as error:\n    raise OSError('no data') from error",
    "an exception while another is handled": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    [][1]",
    "a group of exceptions": "raise BaseExceptionGroup('two', [ValueError(1), KeyError(2)])",
    "a syntax error": "print('never')\ndef f(:\n",
    "an interrupt": "raise KeyboardInterrupt",
    "exit with a text": "import sys; sys.exit('cannot go on')",
    "exit with nothing": "import sys; sys.exit()",
    "exit with a great number": "import sys; sys.exit(300)",
    "exit with a negative number": "import sys; sys.exit(-1)",
    "exit with a truth": "import sys; sys.exit(True)",
    "exit at once": "import os; print('x', flush=True); os._exit(5)",
    "an exit handler": "import atexit; atexit.register(print, 'at exit'); 1 / 0",
    "an exit handler that fails": "import atexit; atexit.register(lambda: 1 / 0)",
    "a hook for exceptions": "import sys; sys.excepthook = lambda *what: print('hook', what[0].__name__); 1 / 0",
    "a thread that goes on": (
        "import threading\nmain = threading.current_thread()\n"
        "threading.Thread(target=lambda: (main.join(5), print('thread'))).start()\nprint('main')"
    ),
    "output that was not flushed": "import sys; sys.stdout.write('no end of line')",
    "a script that is ended by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "what is main": "import __main__, sys; print(__name__, __main__.__file__ == sys.argv[0], __doc__, __package__)",
    "what is on the path": "import sys, os; print(os.path.basename(sys.path[0]), '' in sys.path)",
}  # fmt: skip


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_a_worker_ends_and_speaks_as_a_python_of_its_own_would(agent: Agent, tmp_path: Path, text: str):
    if "Group" in text and sys.version_info < (3, 11):
        pytest.skip("no exception groups before Python 3.11")
    path = script(tmp_path, text)
    alone = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False)
    code = agent.run(path, env=dict(os.environ))
    told = (tmp_path / "out").read_text(), without_addresses((tmp_path / "err").read_text())
    assert (code, *told) == (alone.returncode, alone.stdout, without_addresses(alone.stderr))


def without_addresses(text: str) -> str:
    return "\n".join(line.partition(" at 0x")[0] for line in text.splitlines())


def test_a_module_is_run_as_main_from_its_folder(agent: Agent, tmp_path: Path):
    script(tmp_path, "import sys; print(__name__, __package__ or 'top', sys.argv[1:])", name="lesson.py")
    assert agent.run("lesson", "--lr", "1", module=True) == 0
    assert (tmp_path / "out").read_text() == "__main__ top ['--lr', '1']\n"


def test_a_script_that_is_not_there_says_so(agent: Agent, tmp_path: Path):
    assert agent.run(tmp_path / "no.py") == 1
    assert "No such file or directory" in (tmp_path / "err").read_text()


# Programs


def program(folder: Path, text: str, mode: int = 0o755) -> Path:
    path = script(folder, text, "program")
    path.chmod(mode)
    return path


def test_a_program_takes_the_place_of_its_worker(agent: Agent, tmp_path: Path):
    path = program(tmp_path, '#!/bin/sh\necho "$0 $1 $RANK $(pwd)"\necho wrong >&2\nexit 7\n')
    env = {"RANK": "3", "PATH": os.environ["PATH"]}
    assert agent.run(path, "a b", kind="program", env=env) == 7
    assert (tmp_path / "out").read_text() == f"{path} a b 3 {tmp_path}\n"
    assert (tmp_path / "err").read_text() == "wrong\n"


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("/etc/passwd", 126), ("/", 126)])
def test_a_program_that_cannot_be_run_ends_as_a_shell_would_tell(agent: Agent, tmp_path: Path, name: str, code: int):
    assert agent.run(name, kind="program", env={"PATH": "/bin"}) == code
    assert (tmp_path / "err").read_text().startswith(f"{name}: ")


def test_a_program_has_the_signals_that_a_shell_would_give_it(agent: Agent, tmp_path: Path):
    """Python ignores SIGPIPE; a program that inherits that does not end when whoever reads from it has."""
    agent.run("/bin/sh", "-c", "grep SigIgn /proc/self/status", kind="program", env={"PATH": os.environ["PATH"]})
    ignored = int((tmp_path / "out").read_text().split()[1], 16)
    assert not ignored >> (13 - 1) & 1


# Other Pythons


def pythons() -> list[str]:
    """The oldest and the newest that a user may have, where they are installed beside ours."""
    wanted = [f"3.{minor}." for minor in (9, 13)]
    found = [next(PYTHONS.glob(f"{version}*/bin/python"), None) for version in wanted]
    return [str(path) for path in found if path is not None]


@pytest.mark.skipif(not pythons(), reason="no other Python is installed")
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parents[1].name)
def test_a_warm_parent_of_another_python_does_the_same(tmp_path: Path, python: str):
    agent = Agent(tmp_path, "json", "random", python=python)
    assert agent.hear("warm")["warm"]["ok"]
    failing = "import atexit, sys; atexit.register(lambda: 1 / 0); print(sys.version_info[1])"
    assert agent.run(script(tmp_path, failing)) == 0
    assert agent.run(script(tmp_path, "raise ValueError('x')")) == 1
    assert (tmp_path / "out").read_text() == Path(python).parents[1].name.split(".")[1] + "\n"
    assert (tmp_path / "err").read_text().rstrip().endswith("ValueError: x")
    agent.close()

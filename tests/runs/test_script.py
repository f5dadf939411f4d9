"""A script in a forked worker exits, prints and fails as under `python SCRIPT`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.warm_agent import Agent, script

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
    "a child process that goes on": (
        "import multiprocessing, time\nfork = multiprocessing.get_context('fork')\n"
        "def child():\n    time.sleep(0.3)\n    print('child', flush=True)\n"
        "fork.Process(target=child).start()\nprint('main', flush=True)"
    ),
    "a child process that is a daemon": (
        "import multiprocessing, time\nfork = multiprocessing.get_context('fork')\n"
        "fork.Process(target=time.sleep, args=(600,), daemon=True).start()\nprint('main')"
    ),
    "work that a pool of threads still has to do": (
        "import concurrent.futures, time\npool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "pool.submit(lambda: (time.sleep(0.2), print('pool')))\nprint('main')"
    ),
    "output that was not flushed": "import sys; sys.stdout.write('no end of line')",
    "a script that is ended by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "what is main": "import __main__, sys; print(__name__, __main__.__file__ == sys.argv[0], __doc__, __package__)",
    "what is on the path": "import sys, os; print(os.path.basename(sys.path[0]), '' in sys.path)",
}  # fmt: skip


@pytest.mark.parametrize("text", ENDS.values(), ids=ENDS.keys())
def test_worker_exits_and_prints_like_a_separate_python(agent: Agent, tmp_path: Path, text: str):
    if "Group" in text and sys.version_info < (3, 11):
        pytest.skip("no exception groups before Python 3.11")
    path = script(tmp_path, text)
    alone = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False)
    code = agent.run(path, env=dict(os.environ))
    printed = (tmp_path / "out").read_text(), without_addresses((tmp_path / "err").read_text())
    assert (code, *printed) == (alone.returncode, alone.stdout, without_addresses(alone.stderr))


def without_addresses(text: str) -> str:
    return "\n".join(line.partition(" at 0x")[0] for line in text.splitlines())


def test_open_files_are_flushed_at_exit(agent: Agent, tmp_path: Path):
    """Python flushes buffered files when it destroys them, even if another object still refers to them."""
    text = """
        import sys
        class Log:
            def __init__(self):
                self.text, self.raw = open("text", "w"), open("raw", "wb")
        log = Log()
        log.text.write("loss 0.5")
        log.raw.write(b"bytes")
        sys.exit(3)
    """
    assert agent.run(script(tmp_path, text)) == 3
    assert (tmp_path / "text").read_text() == "loss 0.5" and (tmp_path / "raw").read_bytes() == b"bytes"


def test_objects_of_preloaded_modules_are_not_collected_in_a_worker_but_their_files_are_flushed(tmp_path: Path):
    """A collection would copy the pages of all these objects, in the middle of a restart."""
    lines = ["class Log:", "    pass", "log = Log()", f"log.file = open({str(tmp_path / 'log')!r}, 'w')"]
    (tmp_path / "opens.py").write_text("\n".join(lines))
    agent = Agent(tmp_path, "opens", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        assert agent.hear("warm")["warm"]["ok"]
        text = """
            import gc, opens
            assert gc.isenabled() and gc.get_freeze_count() > 1000, gc.get_freeze_count()
            opens.log.file.write("loss 0.5")
        """
        assert agent.run(script(tmp_path, text)) == 0, (tmp_path / "err").read_text()
    finally:
        agent.end_workers()
        agent.close()
    assert (tmp_path / "log").read_text() == "loss 0.5"


ROUNDS = 20 if os.environ.get("DALSEGNO_LONG") else 3
DDP = """
    import os, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    class Trainer:
        def __init__(self, model, data):
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.model, self.data = DistributedDataParallel(model), data

        def train(self):
            for batch in self.data:
                self.optimizer.zero_grad()
                self.model(batch).sum().backward()
                self.optimizer.step()

    def main():
        dist.init_process_group("gloo")
        half = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=half)
        data = torch.rand(256, 20)
        trainer = Trainer(torch.nn.Linear(20, 1), DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
        trainer.train()
        dist.destroy_process_group()

    main()  # the model goes when it returns: it held the last reference to the group
    tasks = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    os.write(1, f"returned {tasks.count('pt_gloo_runloop')}\\n".encode())  # whole, whatever the other rank writes
"""


@pytest.mark.cluster  # processes with torch: too slow for the unit part
@pytest.mark.timeout(300)
def test_ranks_exit_after_destroying_a_process_group_in_use(tmp_path: Path):
    """torch joins a group's threads under Python's lock when it destroys the group. Sometimes that never returns.

    The script has the shape of PyTorch's multi-node tutorial. Without our references to the groups, about every third
    run hangs. The four threads, two per group, show that both groups still exist.
    """
    pytest.importorskip("torch")
    agent, path = Agent(tmp_path, "torch", "torch.distributed", "torch._dynamo"), script(tmp_path, DDP)
    agent.sock.settimeout(120)
    try:
        assert agent.hear("warm")["warm"]["ok"]
        for _ in range(ROUNDS):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            for rank in range(2):
                agent.fork(path, env={**os.environ, **meeting, "RANK": str(rank)})
            assert [agent.hear("ended")["code"] for _ in range(2)] == [0, 0], (tmp_path / "err").read_text()
        assert (tmp_path / "out").read_text() == "returned 4\n" * (2 * ROUNDS)
    finally:
        agent.end_workers()
        agent.close()


def test_module_runs_as_main_from_its_folder(agent: Agent, tmp_path: Path):
    script(tmp_path, "import sys; print(__name__, __package__ or 'top', sys.argv[1:])", name="lesson.py")
    assert agent.run("lesson", "--lr", "1", module=True) == 0
    assert (tmp_path / "out").read_text() == "__main__ top ['--lr', '1']\n"


def test_missing_script_is_reported(agent: Agent, tmp_path: Path):
    assert agent.run(tmp_path / "no.py") == 1
    assert "No such file or directory" in (tmp_path / "err").read_text()


# Programs


def program(folder: Path, text: str, mode: int = 0o755) -> Path:
    path = script(folder, text, "program")
    path.chmod(mode)
    return path


def test_program_replaces_its_worker(agent: Agent, tmp_path: Path):
    path = program(tmp_path, '#!/bin/sh\necho "$0 $1 $RANK $(pwd)"\necho wrong >&2\nexit 7\n')
    env = {"RANK": "3", "PATH": os.environ["PATH"]}
    assert agent.run(path, "a b", kind="program", env=env) == 7
    assert (tmp_path / "out").read_text() == f"{path} a b 3 {tmp_path}\n"
    assert (tmp_path / "err").read_text() == "wrong\n"


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("/etc/passwd", 126), ("/", 126)])
def test_program_that_cannot_run_exits_as_in_a_shell(agent: Agent, tmp_path: Path, name: str, code: int):
    assert agent.run(name, kind="program", env={"PATH": "/bin"}) == code
    assert (tmp_path / "err").read_text().startswith(f"{name}: ")


def test_program_has_default_signal_handlers(agent: Agent, tmp_path: Path):
    """Python ignores SIGPIPE. A program that inherits this setting does not end when its reader has ended."""
    agent.run("/bin/sh", "-c", "grep SigIgn /proc/self/status", kind="program", env={"PATH": os.environ["PATH"]})
    ignored = int((tmp_path / "out").read_text().split()[1], 16)
    assert not ignored >> (13 - 1) & 1


# Other Python versions


def pythons() -> list[str]:
    """Return the oldest and the newest supported Python, if installed."""
    wanted = [f"3.{minor}." for minor in (9, 13)]
    found = [next(PYTHONS.glob(f"{version}*/bin/python"), None) for version in wanted]
    return [str(path) for path in found if path is not None]


@pytest.mark.skipif(not pythons(), reason="no other Python is installed")
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).parents[1].name)
def test_warm_parent_works_in_other_python_versions(tmp_path: Path, python: str):
    agent = Agent(tmp_path, "json", "random", python=python)
    assert agent.hear("warm")["warm"]["ok"]
    failing = "import atexit, sys; atexit.register(lambda: 1 / 0); print(sys.version_info[1])"
    assert agent.run(script(tmp_path, failing)) == 0
    assert agent.run(script(tmp_path, "raise ValueError('x')")) == 1
    assert (tmp_path / "out").read_text() == Path(python).parents[1].name.split(".")[1] + "\n"
    assert (tmp_path / "err").read_text().rstrip().endswith("ValueError: x")
    agent.close()

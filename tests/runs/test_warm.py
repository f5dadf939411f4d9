"""The warm parent: workers start at once and behave as if they were not forked."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from dalsegno.system.children import start_ticks
from dalsegno.wire.frames import send
from tests.runs.warm_agent import SOURCE, Agent, script
from tests.waiting import eventually


def test_worker_sees_the_environment_of_python_script(agent: Agent, tmp_path: Path):
    (tmp_path / "beside.py").write_text("word = 'found'")
    path = script(
        tmp_path,
        """
        import os, sys, json, beside, pickle
        class Thing: pass
        print(json.dumps([__name__, __file__, sys.argv, os.getcwd(), dict(os.environ), beside.word]))
        assert pickle.loads(pickle.dumps(Thing())).__class__ is sys.modules["__main__"].Thing
        """,
    )
    work = tmp_path / "work"
    work.mkdir()
    assert agent.run(path, "--lr", "a b", env={"RANK": "3"}, cwd=work) == 0
    assert json.loads((tmp_path / "out").read_text()) == [
        "__main__", str(path), [str(path), "--lr", "a b"], str(work), {"RANK": "3"}, "found",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit", 0),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("1/0", 1),
    ],
)
def test_worker_exit_code_is_reported(agent: Agent, tmp_path: Path, text: str, code: int):
    assert agent.run(script(tmp_path, text)) == code


def test_traceback_in_the_log_starts_with_the_users_file(agent: Agent, tmp_path: Path):
    agent.run(script(tmp_path, "def step():\n    raise ValueError('bad batch')\nstep()"))
    lines = (tmp_path / "err").read_text()
    assert 'train.py", line 3' in lines and "ValueError: bad batch" in lines


def test_output_is_appended_and_never_truncated(agent: Agent, tmp_path: Path):
    path = script(tmp_path, "print('hello')")
    agent.run(path)
    agent.run(path)
    assert (tmp_path / "out").read_text() == "hello\nhello\n"


def test_exit_handlers_run_and_threads_are_joined(agent: Agent, tmp_path: Path):
    text = """
    import atexit, threading, time
    atexit.register(lambda: print("at exit"))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    """
    assert agent.run(script(tmp_path, text)) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["thread", "at exit"]


def test_workers_have_different_random_numbers(agent: Agent, tmp_path: Path):
    path = script(tmp_path, "import random; print(random.random())")
    agent.run(path)
    agent.run(path)
    first, second = (tmp_path / "out").read_text().split()
    assert first != second


def test_worker_has_its_own_process_group(agent: Agent, tmp_path: Path):
    pid = agent.fork(script(tmp_path, "import time; time.sleep(600)"))
    assert os.getpgid(pid) == pid
    os.killpg(pid, signal.SIGKILL)
    assert agent.hear("ended")["code"] == -9


def test_workers_die_with_the_agent(tmp_path: Path):
    agent = Agent(tmp_path, "json")
    agent.hear("warm")
    pid = agent.fork(script(tmp_path, "import time; time.sleep(600)"))
    agent.close()
    eventually(lambda: start_ticks(pid) is None)


def test_workers_die_with_the_warm_parent(tmp_path: Path):
    agent = Agent(tmp_path, "json")
    agent.hear("warm")
    pid = agent.fork(script(tmp_path, "import time; time.sleep(600)"))
    agent.process.kill()
    eventually(lambda: start_ticks(pid) is None)
    agent.close()


def test_failed_import_is_reported(tmp_path: Path):
    agent = Agent(tmp_path, "json", "no_such_module_here")
    warm = agent.hear("warm")["warm"]
    assert not warm["ok"] and "import no_such_module_here: ModuleNotFoundError" in warm["why"]
    agent.close()


def test_packages_installed_beside_ours_can_be_preloaded_and_imported(tmp_path: Path):
    """As in a virtual environment after `pip install dalsegno`, whose site-packages also has torch."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "dalsegno").symlink_to(Path(SOURCE) / "dalsegno")
    (site / "preloaded.py").touch()
    (site / "imported.py").write_text("print('found')")
    agent = Agent(tmp_path, "preloaded", env={**os.environ, "PYTHONPATH": str(site)}, packages=str(site))
    warm = agent.hear("warm")["warm"]
    assert warm["ok"], warm
    code = agent.run(script(tmp_path, "import sys, preloaded, imported; print(sys.path.count(sys.argv[1]))"), str(site))
    assert (code, (tmp_path / "out").read_text()) == (0, "found\n1\n"), (tmp_path / "err").read_text()
    agent.close()


def test_threads_of_a_preloaded_module_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "busy_module.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='tokenizer-pool', daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    agent = Agent(tmp_path, "busy_module")
    assert agent.hear("warm")["warm"]["threads"] == ["tokenizer-pool"]
    agent.close()


def test_files_are_passed_to_workers(agent: Agent, tmp_path: Path):
    listening = socket.create_server(("127.0.0.1", 0))
    path = script(tmp_path, "import os; print(os.environ['FD_WORKS'])")
    task = {"id": "s", "script": str(path), "args": [], "env": {"FD_WORKS": "yes"}, "cwd": str(tmp_path),
            "stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}  # fmt: skip
    send(agent.sock, {"fork": task, "files": 1}, [listening.fileno()])
    assert agent.hear("ended")["code"] == 0
    listening.close()


@pytest.mark.cluster  # real processes: too slow for the unit part
def test_warm_parent_survives_many_restarts(agent: Agent, tmp_path: Path):
    path, times = script(tmp_path, "pass"), 500 if os.environ.get("DALSEGNO_LONG") else 100
    assert [agent.run(path) for _ in range(times)] == [0] * times

"""The warm parent: workers that start at once and cannot tell that they were forked."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.launch.agent.frames import FileReader, Message, send
from dalsegno.system.procfs import start_ticks

SOURCE = str(Path(__file__).parents[2] / "src")
START = "import sys; sys.path.insert(0, sys.argv[1]); from dalsegno.launch.agent.warm import start; start(sys.argv[1:])"


class Agent:
    """The agent's side of the socket."""

    def __init__(self, folder: Path, *modules: str, python: str = sys.executable) -> None:
        self.folder = folder
        self.sock, other = socket.socketpair()
        self.reader, self.heard = FileReader(), []  # type: tuple[FileReader, list[Message]]
        self.process = subprocess.Popen(
            [python, "-c", START, SOURCE, str(other.fileno()), *modules], pass_fds=[other.fileno()]
        )
        other.close()
        self.sock.settimeout(20)

    def hear(self, key: str) -> Message:
        """The next message with this key; others are kept for later."""
        while True:
            for message in self.heard:
                if key in message:
                    self.heard.remove(message)
                    return message
            messages = self.reader.receive(self.sock)
            assert messages is not None, "the warm parent has gone"
            self.heard += messages

    def fork(
        self, script: Path | str, *args: str, env: dict[str, str] | None = None, cwd: Path | None = None, **more: object
    ) -> int:
        task = {
            "id": "w", "script": str(script), "args": list(args), "env": env or {}, "cwd": str(cwd or self.folder),
            "stdout": str(self.folder / "out"), "stderr": str(self.folder / "err"), **more,
        }  # fmt: skip
        send(self.sock, {"fork": task})
        return int(self.hear("forked")["pid"])

    def run(self, script: Path | str, *args: str, **more: object) -> int:
        pid = self.fork(script, *args, **more)  # type: ignore[arg-type]
        ended = self.hear("ended")
        assert ended["ended"] == pid
        return int(ended["code"])

    def close(self) -> None:
        self.sock.close()
        self.process.wait(10)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, "json", "random")
    assert agent.hear("warm")["warm"]["ok"]
    yield agent
    agent.close()


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def test_a_worker_sees_what_python_script_would_give_it(agent: Agent, tmp_path: Path):
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
    import json

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
def test_the_end_of_a_worker_is_told_as_it_was(agent: Agent, tmp_path: Path, text: str, code: int):
    assert agent.run(script(tmp_path, text)) == code


def test_a_traceback_is_in_the_log_and_names_the_users_file_first(agent: Agent, tmp_path: Path):
    agent.run(script(tmp_path, "def step():\n    raise ValueError('bad batch')\nstep()"))
    lines = (tmp_path / "err").read_text()
    assert 'train.py", line 3' in lines and "ValueError: bad batch" in lines


def test_output_is_appended_and_never_cut_off(agent: Agent, tmp_path: Path):
    path = script(tmp_path, "print('hello')")
    agent.run(path)
    agent.run(path)
    assert (tmp_path / "out").read_text() == "hello\nhello\n"


def test_exit_handlers_and_threads_end_as_usual(agent: Agent, tmp_path: Path):
    text = """
    import atexit, threading, time
    atexit.register(lambda: print("at exit"))
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    """
    assert agent.run(script(tmp_path, text)) == 0
    assert (tmp_path / "out").read_text().splitlines() == ["thread", "at exit"]


def test_two_workers_do_not_share_their_random_numbers(agent: Agent, tmp_path: Path):
    path = script(tmp_path, "import random; print(random.random())")
    agent.run(path)
    agent.run(path)
    first, second = (tmp_path / "out").read_text().split()
    assert first != second


def test_a_worker_is_a_process_group_of_its_own(agent: Agent, tmp_path: Path):
    pid = agent.fork(script(tmp_path, "import time; time.sleep(60)"))
    assert os.getpgid(pid) == pid
    os.killpg(pid, signal.SIGKILL)
    assert agent.hear("ended")["code"] == -9


def test_workers_die_with_the_agent(tmp_path: Path):
    agent = Agent(tmp_path, "json")
    agent.hear("warm")
    pid = agent.fork(script(tmp_path, "import time; time.sleep(60)"))
    agent.close()
    until = time.monotonic() + 10
    while start_ticks(pid) is not None:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_workers_die_with_the_warm_parent(tmp_path: Path):
    agent = Agent(tmp_path, "json")
    agent.hear("warm")
    pid = agent.fork(script(tmp_path, "import time; time.sleep(60)"))
    agent.process.kill()
    until = time.monotonic() + 10
    while start_ticks(pid) is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    agent.close()


def test_a_module_that_does_not_import_is_told(tmp_path: Path):
    agent = Agent(tmp_path, "json", "no_such_module_here")
    warm = agent.hear("warm")["warm"]
    assert not warm["ok"] and "import no_such_module_here: ModuleNotFoundError" in warm["why"]
    agent.close()


def test_threads_that_a_preloaded_module_starts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "busy_module.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), name='tokenizer-pool', daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    agent = Agent(tmp_path, "busy_module")
    assert agent.hear("warm")["warm"]["threads"] == ["tokenizer-pool"]
    agent.close()


def test_files_are_handed_on(agent: Agent, tmp_path: Path):
    listening = socket.create_server(("127.0.0.1", 0))
    path = script(tmp_path, "import os; print(os.environ['FD_WORKS'])")
    task = {"id": "s", "script": str(path), "args": [], "env": {"FD_WORKS": "yes"}, "cwd": str(tmp_path),
            "stdout": str(tmp_path / "out"), "stderr": str(tmp_path / "err")}  # fmt: skip
    send(agent.sock, {"fork": task, "files": 1}, [listening.fileno()])
    assert agent.hear("ended")["code"] == 0
    listening.close()


def test_500_restarts_in_a_row(agent: Agent, tmp_path: Path):
    path = script(tmp_path, "pass")
    assert [agent.run(path) for _ in range(500)] == [0] * 500


def test_the_words_survive_any_cutting():
    from hypothesis import given
    from hypothesis import strategies as st

    from dalsegno.launch.agent.frames import Reader, pack

    @given(
        st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20)), max_size=5),
        st.integers(1, 7),
    )
    def check(messages: list[Message], size: int) -> None:
        data = b"".join(pack(message) for message in messages)
        reader = Reader()
        heard = [m for start in range(0, len(data), size) for m in reader.feed(data[start : start + size])]
        assert heard == messages

    check()


def test_a_stranger_is_cut_off():
    from dalsegno.launch.agent.frames import BadFrame, Reader

    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\3{:}"):
        with pytest.raises(BadFrame):
            list(Reader().feed(data))

"""`dalsegno torchrun` on this machine: exit codes, signals, restarts, output. Torch is not needed."""

from __future__ import annotations

import json
import os
import signal
import socket
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.torchrun.launcher import Launcher, ended
from tests.waiting import eventually

pytestmark = pytest.mark.cluster  # real processes, some with torch: too slow for the unit part

C10D = ["--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1"]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python without torch: workers are then separate processes and start at once."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True, with_pip=False)
    return str(folder / "bin" / "python3")


@pytest.fixture
def torchrun(tmp_path: Path, bare_python: str) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, bare_python)
    yield launcher
    launcher.close()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# Exit codes


def test_success_exits_with_0_and_leaves_nothing(torchrun: Launcher) -> None:
    done = torchrun.run(
        "--nproc-per-node", "2", torchrun.script("import os; os.write(1, b'rank %s\\n' % os.environb[b'RANK'])")
    )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["rank 0", "rank 1"])
    assert done.stderr == ""
    assert torchrun.left() == []


def test_failed_worker_exits_with_1_and_a_report(torchrun: Launcher) -> None:
    torchrun.script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)")
    done = torchrun.run("--nproc-per-node", "2", "train.py")
    assert done.returncode == 1
    assert "train.py FAILED" in done.stderr
    assert "  rank      : 1 (local_rank: 1)\n  exitcode  : 3 (pid: " in done.stderr
    assert torchrun.left() == []


@pytest.mark.parametrize("code", ["3", pytest.param("75", marks=pytest.mark.long), "93", "-9"])
def test_every_failure_costs_one_restart(torchrun: Launcher, code: str) -> None:
    torchrun.script(
        f"""
        import os, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
        sys.stdout.flush()
        os.kill(os.getpid(), 9) if {code} < 0 else sys.exit({code})
        """
    )
    done = torchrun.run("--max-restarts", "3", "train.py")
    assert (done.returncode, done.stdout.splitlines()) == (1, [f"attempt {each} of 3" for each in range(4)])
    assert f"exitcode  : {code} " in done.stderr


def test_run_that_recovers_exits_with_0(torchrun: Launcher) -> None:
    torchrun.script("import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '2')")
    assert torchrun.run("--max-restarts", "2", "train.py").returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nowhere.py"], 1, "script `nowhere.py` not found"),
        (["--no-python", "no-such-program"], 1, "program `no-such-program` not found"),
        (["--nproc-per-node", "tpu", "train.py"], 2, "--nproc-per-node"),
        (["--logs-specs", "mine", "train.py"], 2, "--logs-specs"),
        (["--nnodez", "2", "train.py"], 2, "torchrun would refuse this"),
    ],
)
def test_impossible_command_fails_at_once(torchrun: Launcher, words: list[str], code: int, said: str) -> None:
    torchrun.script("")
    done = torchrun.run(*words)
    assert done.returncode == code and said in done.stderr


# Programs


def test_executables_modules_and_macros_work(torchrun: Launcher) -> None:
    done = torchrun.run("--no-python", "--nproc-per-node", "2", "sh", "-c", "echo $$LOCAL_RANK ${local_rank} $$@", "sh")
    assert sorted(done.stdout.splitlines()) == ["0 0", "1 1"], done.stderr
    (torchrun.folder / "pack").mkdir()
    torchrun.script("import sys; print(sys.argv[1:], __name__, __package__)", "pack/part.py")
    assert torchrun.run("-m", "pack.part", "a b").stdout == "['a b'] __main__ pack\n"
    torchrun.script("import sys; print(sys.argv)")
    assert torchrun.run("--run-path", "train.py", "--x").stdout == "['train.py', '--x']\n"
    assert torchrun.run("train.py", "a", "--", "-h").stdout == "['train.py', 'a', '--', '-h']\n"


def test_worker_inherits_standard_input(torchrun: Launcher) -> None:
    torchrun.script("print('read', input())")
    (torchrun.folder / "words").write_text("something\n")
    import subprocess

    from tests.submit.torchrun.launcher import OURS

    with open(torchrun.folder / "words") as words:
        done = subprocess.run(
            [*OURS, "train.py"], cwd=torchrun.folder, env=torchrun.environment(), stdin=words, capture_output=True,
            text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.stdout == "read something\n", done.stderr


# Output


def test_logs_have_files_and_prefixes(torchrun: Launcher) -> None:
    torchrun.script("import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)")
    done = torchrun.run("--nproc-per-node", "2", "--log-dir", "logs", "-r", "1:3", "-t", "0:1", "train.py")
    assert done.stdout == "[default0]:out 0\n" and done.stderr == "err\n"
    (folder,) = (torchrun.folder / "logs").iterdir()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["attempt_0/0/stdout.log", "attempt_0/1/stderr.log", "attempt_0/1/stdout.log"]
    assert (folder / "attempt_0/1/stdout.log").read_text() == "out 1\n"


def test_logs_are_filtered_by_rank_role_and_word(torchrun: Launcher) -> None:
    torchrun.script("import os\nprint('loss', os.environ['RANK'])\nprint('noise')")
    words = ["--nproc-per-node", "2", "--log-dir", "logs", "--role", "t", "--tee", "3", "--local-ranks-filter", "1"]
    done = torchrun.run(*words, "--duplicate-stdout-filters", "loss", "train.py")
    assert done.stdout == "[t1]:loss 1\n[t1]:noise\n"
    (kept,) = (torchrun.folder / "logs").glob("*/attempt_0/filtered_stdout.log")
    assert kept.read_text() == "[t1]:loss 1\n"
    assert torchrun.run("--nproc-per-node", "2", "--local-ranks-filter", "1", "train.py").stdout == "loss 1\nnoise\n"


def test_restart_has_its_own_log_folder(torchrun: Launcher) -> None:
    torchrun.script("import os, sys; print('x'); sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    torchrun.run("--max-restarts", "1", "--log-dir", "logs", "-r", "3", "train.py")
    assert len(list((torchrun.folder / "logs").glob("*/attempt_[01]/0/stdout.log"))) == 2


# Signals

WAITS = """
import os, signal, sys, time
def note(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())
    sys.exit(0)
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], note)
os.write(1, b"up\\n")
time.sleep(100)
"""


@pytest.mark.parametrize(
    "name", ["SIGTERM", "SIGINT", *(pytest.param(name, marks=pytest.mark.long) for name in ("SIGHUP", "SIGQUIT"))]
)
def test_signals_reach_all_workers_and_exit_with_1(torchrun: Launcher, name: str) -> None:
    torchrun.script(WAITS)
    process = torchrun.start("--nproc-per-node", "2", "train.py", name)
    assert process.stdout is not None and process.stdout.readline() + process.stdout.readline() == "up\nup\n"
    process.send_signal(signal.Signals[name])
    done = ended(process)
    assert (done.returncode, done.stdout) == (1, f"got {name}\n" * 2)
    assert f"ended by {name}" in done.stderr and "FAILED" not in done.stderr
    assert torchrun.left() == []


def test_worker_that_ignores_the_signal_is_killed_after_the_grace_period(torchrun: Launcher) -> None:
    torchrun.script(
        """
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "100"], start_new_session=True)
        os.write(1, b"up\\n")
        time.sleep(100)
        """
    )
    process = torchrun.start("--shutdown-timeout", "1", "--max-restarts", "3", "train.py")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert ended(process).returncode == 1
    assert torchrun.left() == []


def test_unhandled_signal_is_forwarded_to_workers(torchrun: Launcher) -> None:
    """torchrun would die from the signal. A script that handles Slurm's warning can save and continue."""
    torchrun.script(WAITS)
    process = torchrun.start("train.py", "SIGUSR1")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    done = ended(process)
    assert (done.returncode, done.stdout) == (0, "got SIGUSR1\n")


def test_nothing_outlives_a_killed_agent(torchrun: Launcher) -> None:
    torchrun.script(WAITS)
    process = torchrun.start("--nproc-per-node", "2", "train.py", "SIGTERM")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.kill()
    eventually(lambda: not [line for line in torchrun.left() if line.startswith("process")])


# Several agents

TOLD = """
import json, os, sys, time
names = ["RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"]
os.write(1, (json.dumps([int(os.environ[name]) for name in names]) + "\\n").encode())  # whole, beside the others'
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


def test_second_agent_on_a_node_connects_to_the_first(torchrun: Launcher, port: int) -> None:
    torchrun.script(TOLD)
    words = ["--nnodes", "2", "--nproc-per-node", "2", *C10D, "--rdzv-endpoint", f"localhost:{port}", "train.py"]
    done = [ended(each) for each in [torchrun.start(*words), torchrun.start(*words)]]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    answer = sorted(json.loads(line) for each in done for line in each.stdout.splitlines())
    assert answer == [[rank, rank // 2, 4, 2, 0] for rank in range(4)]
    assert torchrun.left() == []


def test_static_agents_keep_their_given_ranks(torchrun: Launcher, port: int) -> None:
    torchrun.script(TOLD)
    common = ["--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    order = [2, 0, 1]
    started = [torchrun.start(*common, "--node-rank", str(rank), "train.py") for rank in order]
    answer = [json.loads(ended(each).stdout) for each in started]
    assert answer == [[rank, rank, 3, 3, 0] for rank in order]


def test_growing_and_shrinking_cost_no_restart(torchrun: Launcher, port: int) -> None:
    torchrun.script(TOLD)
    end = torchrun.folder / "end"
    words = ["--nnodes", "1:2", *C10D, "--rdzv-endpoint", f"localhost:{port}", "train.py", str(end)]
    first = torchrun.start(*words)
    assert first.stdout is not None
    assert json.loads(first.stdout.readline()) == [0, 0, 1, 1, 0]
    second = torchrun.start(*words)
    assert json.loads(first.stdout.readline()) == [0, 0, 2, 2, 0]
    second.kill()
    assert json.loads(first.stdout.readline()) == [0, 0, 1, 1, 0]
    end.touch()
    done = ended(first)
    assert done.returncode == 0 and "lost" in done.stderr


def test_failure_on_one_node_ends_all_and_names_the_node(torchrun: Launcher, port: int) -> None:
    torchrun.script("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(100)")
    words = ["--nnodes", "2", *C10D, "--rdzv-endpoint", f"localhost:{port}", "train.py"]
    done = [ended(each) for each in [torchrun.start(*words), torchrun.start(*words)]]
    assert [each.returncode for each in done] == [1, 1]
    reports = [each.stderr for each in done if "FAILED" in each.stderr]
    assert len(reports) == 1 and "exitcode  : 7" in reports[0]
    assert any("rank 1 on " in each.stderr and "see the report on that node" in each.stderr for each in done)


def test_agent_that_loses_the_rendezvous_ends_in_time(torchrun: Launcher, port: int) -> None:
    torchrun.script(TOLD)
    words = ["--nnodes", "2", *C10D, "--rdzv-endpoint", f"localhost:{port}", "train.py", "never"]
    host, other = torchrun.start(*words), None
    eventually(lambda: _listens(port))
    other = torchrun.start(*words)
    assert other.stdout is not None and other.stdout.readline()
    host.kill()
    done = ended(other)
    assert done.returncode == 1 and f"localhost:{port} does not respond any more" in done.stderr
    eventually(lambda: not [line for line in torchrun.left() if line.startswith("process")])


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_both_nodes_can_save_after_a_request_to_end(torchrun: Launcher, port: int, first: int, second: int) -> None:
    torchrun.script(WAITS)
    words = ["--nnodes", "2", *C10D, "--rdzv-endpoint", f"localhost:{port}", "train.py", "SIGTERM"]
    nodes = [torchrun.start(*words), torchrun.start(*words)]
    for node in nodes:
        assert node.stdout is not None and node.stdout.readline() == "up\n"
    nodes[first].terminate()
    nodes[second].terminate()
    done = [ended(node) for node in nodes]
    assert [(each.returncode, each.stdout) for each in done] == [(1, "got SIGTERM\n")] * 2
    assert torchrun.left() == []


def test_too_few_nodes_for_too_long_end_the_run(torchrun: Launcher, port: int) -> None:
    torchrun.script("")
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=1"]
    done = torchrun.run(*words, "--rdzv-endpoint", f"localhost:{port}", "train.py")
    assert done.returncode == 1 and "only 1 of 2 nodes joined within 1 s" in done.stderr
    alone = torchrun.run(*words, "--rdzv-endpoint", f"192.0.2.1:{port}", "train.py")
    assert alone.returncode == 1 and f"no response from 192.0.2.1:{port}" in alone.stderr


def test_differing_command_lines_are_reported(torchrun: Launcher, port: int) -> None:
    torchrun.script("import time; time.sleep(100)")
    words = ["--nnodes", "2", *C10D, "--rdzv-endpoint", f"localhost:{port}"]
    host = torchrun.start(*words, "train.py")
    eventually(lambda: _listens(port))
    other = torchrun.run(*words, "--nproc-per-node", "2", "train.py")
    assert other.returncode == 1 and "--nproc-per-node is 2 here and 1 on the others" in other.stderr
    stranger = torchrun.run(
        "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "mine", "--rdzv-conf", "join_timeout=1",
        "--rdzv-endpoint", f"localhost:{port}", "train.py",
    )  # fmt: skip
    assert stranger.returncode == 1 and "another run than `mine`" in stranger.stderr
    host.terminate()
    assert ended(host).returncode == 1


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_error_file_of_the_launcher_gets_that_of_the_worker(torchrun: Launcher) -> None:
    torchrun.script(
        """
        import json, os, sys
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            more = {"py_callstack": "Traceback: bad", "timestamp": "7"}
            json.dump({"message": {"message": "bad", "extraInfo": more}}, file)
        sys.exit(1)
        """
    )
    target = torchrun.folder / "passed-on.json"
    done = torchrun.run("--log-dir", "logs", "train.py", TORCHELASTIC_ERROR_FILE=str(target))
    assert done.returncode == 1 and "traceback : Traceback: bad" in done.stderr
    assert "/attempt_0/0/error.json" in done.stderr
    assert json.loads(target.read_text())["message"]["message"] == "bad"
    assert os.environ.get("TORCHELASTIC_ERROR_FILE") != str(target)


def test_pipe_in_place_of_the_error_file_does_not_block_the_launcher(torchrun: Launcher) -> None:
    torchrun.script("import os, sys; os.mkfifo(os.environ['TORCHELASTIC_ERROR_FILE']); sys.exit(1)")
    target = torchrun.folder / "passed-on.json"
    done = torchrun.run("--log-dir", "logs", "train.py", TORCHELASTIC_ERROR_FILE=str(target))
    assert done.returncode == 1 and not target.exists()


def test_folder_with_a_main_runs_as_in_python(torchrun: Launcher) -> None:
    (torchrun.folder / "bundle").mkdir()
    torchrun.script("import beside; print(beside.word)", "bundle/__main__.py")
    torchrun.script("word = 'found'", "bundle/beside.py")
    done = torchrun.run("bundle")
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


@pytest.mark.parametrize("id", ["x" * 150, "ünï cödé"])
def test_any_run_id_is_accepted(torchrun: Launcher, port: int, id: str) -> None:
    torchrun.script("import os; print(os.environ['TORCHELASTIC_RUN_ID'])")
    words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=0.1", "--rdzv-id", id]
    done = torchrun.run(*words, "--rdzv-endpoint", f"localhost:{port}", "train.py")
    assert (done.returncode, done.stdout) == (0, id + "\n"), done.stderr


def test_unlisted_signal_leaves_no_orphan(torchrun: Launcher) -> None:
    torchrun.script(WAITS)
    process = torchrun.start("--signals-to-handle", "SIGUSR2,SIGKILL,SIGNONE", "train.py", "SIGTERM")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.terminate()
    assert ended(process).stdout == "got SIGTERM\n"
    assert torchrun.left() == []

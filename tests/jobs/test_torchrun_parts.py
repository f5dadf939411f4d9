"""The parts of `dalsegno torchrun` that only compute: where to meet, whom to trust, what to say, where to write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dalsegno.errors import UsageError
from dalsegno.jobs.torchrun_args import TorchrunArgs
from dalsegno.jobs.torchrun_flags import parse_torchrun
from dalsegno.jobs.torchrun_keys import Keys
from dalsegno.jobs.torchrun_launch import count_gpus
from dalsegno.jobs.torchrun_logs import Logs
from dalsegno.jobs.torchrun_meeting import ALONE, Meeting, find_meeting, is_own_address, parse_endpoint
from dalsegno.jobs.torchrun_munge import NotSealed, find_munge
from dalsegno.jobs.torchrun_names import agent_name, host_of
from dalsegno.jobs.torchrun_report import FailedWorker, render_report
from dalsegno.jobs.torchrun_site import TorchrunSite, fill_macros
from dalsegno.jobs.torchrun_tee import Tail, Tee
from dalsegno.launch.agent.link import Refused
from dalsegno.launch.events import Finish, Joined, Start, Stopped, StoreOpened, WorkerEnded
from dalsegno.launch.generations import Run, advance
from dalsegno.launch.group import Shape, in_order
from dalsegno.launch.site import Seats


def read(line: str) -> TorchrunArgs:
    args = parse_torchrun([*line.split(), "train.py"])
    assert args is not None
    return args


# ---- where they meet


@pytest.mark.parametrize(
    ("line", "meeting"),
    [
        ("", ALONE),
        ("--standalone --nproc-per-node 8", ALONE),
        ("--master-port 29501", ALONE),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0", ALONE),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint localhost:0", ALONE),
        ("--nnodes 2 --rdzv-backend c10d", Meeting("localhost", 29400, ours=False)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint me", Meeting("me", 29400, ours=True)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint me:7", Meeting("me", 7, ours=True)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint you:7", Meeting("you", 7, ours=False)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint you:7 --rdzv-conf is_host=1", Meeting("you", 7, ours=True)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint me:7 --rdzv-conf is_host=False", Meeting("me", 7, ours=False)),
        ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint me:2379", Meeting("me", 2379, ours=True)),
        ("--nnodes 2 --master-addr you --node-rank 0", Meeting("you", 29500, ours=True)),
        ("--nnodes 2 --master-addr me --master-port 7 --node-rank 1", Meeting("me", 7, ours=False)),
    ],
)
def test_where_the_agents_meet_and_who_listens(line: str, meeting: Meeting) -> None:
    assert find_meeting(read(line), lambda host: host == "me") == meeting


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a", ("a", 1)),
        ("a:7", ("a", 7)),
        ("[::1]:7", ("::1", 7)),
        (":7", ("localhost", 7)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
    ],
)
def test_endpoints(text: str, place: tuple[str, int]) -> None:
    assert parse_endpoint(text, 1) == place


@pytest.mark.parametrize("text", ["a:b", "a:99999", "a b", "::1:7", "a:7:8"])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(UsageError):
        parse_endpoint(text, 1)


@pytest.mark.parametrize(
    "line", ["--nnodes 2 --rdzv-endpoint a", "--nnodes 2 --rdzv-backend c10d --rdzv-conf is_host=x"]
)
def test_meetings_that_cannot_be(line: str) -> None:
    with pytest.raises(UsageError):
        find_meeting(read(line), lambda host: False)


def test_a_node_knows_its_own_addresses() -> None:
    assert is_own_address("localhost") and is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1") and not is_own_address("no-such-host.invalid")


# ---- whom they trust


class Wax:
    """A munge for a test: `user` seals, and opens what the same user sealed."""

    def __init__(self, user: str) -> None:
        self.user = user

    def seal(self, data: bytes) -> str:
        return f"{self.user}:{data.hex()}"

    def unseal(self, sealed: str) -> bytes:
        user, _, data = sealed.partition(":")
        if user != self.user:
            raise NotSealed(f"made by {user}")
        return bytes.fromhex(data)


def test_the_secret_comes_sealed_and_is_another_each_time() -> None:
    host, other = Keys("j", "h:1", Wax("ada")), Keys("j", "h:1", Wax("ada"))
    assert other.unlock(host.greeting() | {"nonce": "x"}) == host.secret == b""
    assert host.make() != Keys("j", "h:1", Wax("ada")).make()
    assert other.unlock(host.greeting()) == host.secret != b""


def test_without_munge_the_key_is_what_both_know() -> None:
    host, other = Keys("j", "h:1", None), Keys("j", "h:1", None)
    assert host.make() == other.unlock(host.greeting())
    assert host.secret != Keys("j", "h:2", None).make()
    assert host.secret.hex() not in str(host.greeting()) and host.secret.hex() not in repr(host)


@pytest.mark.parametrize(
    ("host", "other", "why"),
    [
        (Keys("j", "h:1", Wax("eve")), Keys("j", "h:1", Wax("ada")), "munge does not vouch"),
        (Keys("j", "h:1", None), Keys("j", "h:1", Wax("ada")), "nobody knows who answers"),
        (Keys("j", "h:1", Wax("ada")), Keys("j", "h:1", None), "munge, which does not answer on this node"),
        (Keys("k", "h:1", None), Keys("j", "h:1", None), "another run than `j` is at h:1"),
    ],
)
def test_greetings_that_are_not_taken(host: Keys, other: Keys, why: str) -> None:
    host.make()
    with pytest.raises(Refused):
        other.unlock(host.greeting())
    assert why in other.trouble


def test_a_socket_without_a_daemon_is_no_munge(tmp_path: Path) -> None:
    (tmp_path / "socket").touch()
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"ClusterName=x\nAuthInfo=ttl=60,socket={tmp_path / 'socket'}\n")
    found = find_munge({"SLURM_CONF": str(conf)})
    assert found is None or found.socket != str(tmp_path / "socket")


# ---- ranks


def test_names_sort_by_the_order_that_was_given_whatever_the_hosts_are_called() -> None:
    static = [agent_name(TorchrunArgs("t.py", nnodes="12", node_rank=rank), {}, host, 7) for rank, host in
              [(10, "a"), (2, "gpu-node-99"), (0, "z")]]  # fmt: skip
    assert [host_of(name) for name in sorted(static, key=in_order)] == ["z", "gpu-node-99", "a"]
    c10d = TorchrunArgs("t.py", rdzv_backend="c10d", node_rank=5)
    assert agent_name(c10d, {"SLURM_PROCID": "3"}, "n", 7) == "3@n#7"
    assert agent_name(c10d, {}, "n", 7) == "0@n#7"


def test_numbers_in_names_count_as_numbers() -> None:
    names = ["gpu-10", "gpu-9", "a100-2", "gpu-9b", "gpu"]
    assert sorted(names, key=in_order) == ["a100-2", "gpu", "gpu-9", "gpu-9b", "gpu-10"]


@pytest.mark.parametrize(
    ("line", "hosts", "master"),
    [
        ("--standalone", ["127.0.0.1"], "127.0.0.1"),
        ("--master-addr 10.0.0.9", ["127.0.0.1"], "10.0.0.9"),
        ("--nnodes 2 --master-addr head --node-rank 1", ["10.0.0.1", "10.0.0.2"], "head"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1", ["10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head:1", ["127.0.0.1", "10.0.0.2"], "head"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_master_is_where_every_node_finds_it(line: str, hosts: list[str], master: str) -> None:
    args = read(line)
    site = TorchrunSite(args, "j", "id", 2, find_meeting(args, lambda host: True))
    assert site.worker_env(Seats(1, tuple(hosts), 2, 4242, 0), 0, {})["MASTER_ADDR"] == master


# ---- torchrun's rules for restarts


SAME = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: same'


def rounds(run: Run, code: int, traceback: str = "") -> tuple[Run, list[object]]:
    """One node, two workers: a generation starts, and its rank 1 ends with this code."""
    from dalsegno.launch.causes import read_failure

    run, _ = advance(run, StoreOpened("n", run.generation, 1))
    failure = read_failure(1, "n", code, traceback) if code else None
    run, _ = advance(run, WorkerEnded("n", run.generation, 1, code, failure, age_s=700.0))
    run, orders = advance(run, Stopped("n", run.generation))
    return run, list(orders)


@pytest.mark.parametrize("code", [1, 75, 93, -9, -11])
def test_to_the_letter_every_bad_end_is_one_restart_of_so_many_and_none_waits(code: int) -> None:
    trace = (
        'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: same' if code == 1 else ""
    )
    run, _ = advance(Run(Shape(1, 1, 2), max_restarts=3, literal=True), Joined("n"))
    for restart in range(1, 4):
        run, orders = rounds(run, code, trace)
        assert (run.generation, run.restarts) == (restart + 1, restart)
        assert [type(each).__name__ for each in orders] == ["OpenStore"]
    run, orders = rounds(run, code, trace)
    assert isinstance(orders[-1], Finish) and orders[-1].code == (128 - code if code < 0 else code)
    assert not any(isinstance(each, Start) for each in orders)


def test_of_our_own_runs_the_same_fault_twice_is_still_the_end() -> None:
    run, _ = advance(Run(Shape(1, 1, 2), max_restarts=3), Joined("n"))
    run, _ = rounds(run, 1, SAME)
    run, orders = rounds(run, 1, SAME)
    assert isinstance(orders[-1], Finish) and "as it did before" in orders[-1].why


# ---- what is said


def test_a_report_is_laid_out_as_torchruns() -> None:
    root = FailedWorker(3, 1, 4711, 1, 0.0, "/l/error.json", "Traceback:\nValueError: bad")
    other = FailedWorker(2, 0, 4710, -9, 0.0)
    lines = render_report("train.py", "gpu-1", root, [other]).splitlines()
    assert lines[:4] == ["=" * 53, "train.py FAILED", "-" * 53, "Failures:"]
    assert lines[4:] == [
        "[1]:",
        lines[5],
        "  host      : gpu-1",
        "  rank      : 2 (local_rank: 0)",
        "  exitcode  : -9 (pid: 4710)  (SIGKILL)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 4710",
        "-" * 53,
        "Root Cause (first observed failure):",
        "[0]:",
        lines[5],
        "  host      : gpu-1",
        "  rank      : 3 (local_rank: 1)",
        "  exitcode  : 1 (pid: 4711) ",
        "  error_file: /l/error.json",
        "  traceback : Traceback:",
        "  ValueError: bad",
        "=" * 53,
    ]


def test_a_report_is_word_for_word_torchs_own(tmp_path: Path) -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    theirs = errors.ProcessFailure(local_rank=1, pid=4711, exitcode=-9, error_file=str(tmp_path / "none"))
    ours = FailedWorker(3, 1, 4711, -9, theirs.timestamp)
    import socket

    said = str(errors.ChildFailedError("train.py", {3: theirs})).strip()
    assert render_report("train.py", socket.getfqdn(), ours) == said


def test_macros_in_arguments() -> None:
    assert fill_macros(["--r=${local_rank}", "$$", "$x", "${rank}"], 1) == ["--r=1", "$", "$x", "${rank}"]


# ---- where it is written


@pytest.mark.parametrize(
    ("flags", "output", "log"),
    [
        ({}, ["", ""], ["", ""]),
        ({"redirects": "3"}, ["stdout.log"] * 2, ["stderr.log"] * 2),
        ({"redirects": "0:1,1:2"}, ["stdout.log", ""], ["", "stderr.log"]),
        ({"local_ranks_filter": "0"}, ["", "null"], ["", "null"]),
        ({"local_ranks_filter": "0", "redirects": "1"}, ["stdout.log"] * 2, ["", "null"]),
        ({"tee": "1:3"}, ["", "stdout.log"], ["", "stderr.log"]),
        ({"log_dir": os.devnull, "redirects": "3"}, ["", ""], ["", ""]),
    ],
)
def test_where_each_rank_writes(tmp_path: Path, flags: dict[str, str], output: list[str], log: list[str]) -> None:
    logs = Logs(TorchrunArgs("t.py", **{"log_dir": str(tmp_path / "logs"), **flags}), "job/7", Tee(lambda *_: None))  # type: ignore[arg-type]
    found = [logs.files(2, local, 10 + local) for local in range(2)]
    logs.close(ended_well=True)
    assert [Path(each["output"]).name for each in found] == output
    assert [Path(each["log"]).name for each in found] == log
    if "log_dir" not in flags:
        folder = Path(found[1]["error_file"]).relative_to(tmp_path / "logs")
        assert folder.parts[0].startswith("job_7_") and folder.parts[1:] == ("attempt_2", "1", "error.json")


@pytest.mark.parametrize(
    ("wrote", "ended_well", "stays"),
    [("", True, False), ("output", True, True), ("error_file", True, False), ("error_file", False, True)],
)
def test_a_folder_of_our_own_stays_only_if_there_is_something_to_read(
    wrote: str, ended_well: bool, stays: bool
) -> None:
    logs = Logs(TorchrunArgs("t.py", redirects="1"), "none", Tee(lambda *_: None))
    files = logs.files(0, 0, 0)
    if wrote:
        Path(files[wrote]).write_text("something")
    logs.close(ended_well)
    root = Path(files["output"]).parents[3]
    assert root.exists() is stays
    shutil.rmtree(root, ignore_errors=True)


def test_lines_are_shown_whole_behind_their_names_and_filtered_ones_are_kept(tmp_path: Path) -> None:
    shown: list[tuple[int, bytes]] = []
    tee = Tee(lambda stream, data: shown.append((stream, data)))
    log, kept = tmp_path / "log", tmp_path / "kept"
    tee.follow(str(log), Tail(b"[default1]:", 2, str(kept), (b"loss",)))
    tee.follow(str(tmp_path / "never written"), Tail(b"", 1))
    log.write_bytes(b"step 1\nloss 0.5\nend")
    tee.close()
    assert {stream for stream, _ in shown} == {2}
    assert b"".join(data for _, data in shown) == b"[default1]:step 1\n[default1]:loss 0.5\n[default1]:end\n"
    assert kept.read_bytes() == b"[default1]:loss 0.5\n"


@pytest.mark.parametrize(
    ("value", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-a,GPU-b", 2), ("MIG-1", 1)]
)
def test_gpus_that_are_made_visible(value: str, count: int) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": value}) == count

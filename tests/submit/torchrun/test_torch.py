"""`dalsegno torchrun` compared with torch's own: the same variables for the same line, and the documented examples."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.torchrun.launcher import OURS, Launcher, ended, python_with_torch
from tests.waiting import eventually

pytestmark = pytest.mark.cluster  # real processes, some with torch: too slow for the unit part

THEIRS = ["-m", "torch.distributed.run"]

DUMP = """
import json, os, sys
with open(f"{sys.argv[1]}-{os.environ['RANK']}.json", "w") as file:
    json.dump([dict(os.environ), sys.argv[2:], os.getcwd(), __name__, os.getpgid(0) == os.getpid()], file)
"""

DDP = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if "die" in sys.argv and restarts == "0" and dist.get_rank() == 1:
        os._exit(9)
    if "raise" in sys.argv and dist.get_rank() == 1:
        raise ValueError("bad batch")
    dist.barrier()
    os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}: {int(total)} after {restarts}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, python_with_torch())
    yield launcher
    launcher.close()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def dump(torchrun: Launcher, program: list[str], name: str, words: list[str], **env: str) -> list[list[object]]:
    """Return what each rank found, in the order of ranks."""
    done = torchrun.run(*words, torchrun.script(DUMP), name, "a b", "${local_rank}", program=program, **env)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(torchrun.folder.glob(f"{name}-*.json"))]


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--standalone", "--nproc-per-node", "2"], {}),
        pytest.param(
            ["--master-port", "29517", "--max-restarts", "3", "--role", "trainer"],
            {"OMP_NUM_THREADS": "3"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "job"],
            {"PET_NPROC_PER_NODE": "2"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--nproc-per-node", "2", "--virtual-local-rank", "--signals-to-handle", "SIGTERM,SIGUSR2"],
            {"CUDA_VISIBLE_DEVICES": "4,5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_workers_have_the_same_variables_as_with_torchrun(
    torchrun: Launcher, words: list[str], env: dict[str, str]
) -> None:
    theirs = dump(torchrun, [torchrun.python, *THEIRS], "theirs", words, **env)
    ours = dump(torchrun, OURS, "ours", words, **env)
    assert len(ours) == len(theirs)
    given = {**torchrun.environment(), **env}
    for their, our in zip(theirs, ours, strict=True):
        assert our[1:] == their[1:]
        assert comparable(our[0], given) == comparable(their[0], given)


def comparable(found: object, given: dict[str, str]) -> dict[str, str]:
    """Return the variables that a launcher has set, except those that differ each time and those that only we set."""
    assert isinstance(found, dict)
    changed = {name: value for name, value in found.items() if given.get(name) != value}
    assert 0 < int(changed.pop("MASTER_PORT")) < 65536
    address = socket.gethostbyname(changed.pop("MASTER_ADDR"))
    assert address.startswith("127.") or address in socket.gethostbyname_ex(socket.gethostname())[2]
    file = changed.pop("TORCHELASTIC_ERROR_FILE").replace(changed["TORCHELASTIC_RUN_ID"], "RUN")
    uuid = re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", changed["TORCHELASTIC_RUN_ID"])
    run = "a uuid" if uuid else changed["TORCHELASTIC_RUN_ID"]
    where = re.sub(r".*/torchelastic_\w+/RUN_\w+/", "", file)
    own = {name: value for name, value in changed.items() if not name.startswith("DALSEGNO_")}
    return {**own, "TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_ERROR_FILE": where, "MASTER_ADDR": "this node"}


# https://docs.pytorch.org/docs/stable/elastic/run.html: commands as documented, except for their variables

WELL = ["0 of 2: 3 after 0", "1 of 2: 3 after 0"]


def lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_example_single_node_multi_worker(torchrun: Launcher) -> None:
    done = torchrun.run("--standalone", "--nnodes=1", "--nproc-per-node=2", torchrun.script(DDP))
    assert (done.returncode, lines(done.stdout)) == (0, WELL), done.stderr
    assert torchrun.left() == []


@pytest.mark.long
def test_example_stacked_single_node_multi_worker(torchrun: Launcher) -> None:
    torchrun.script(DDP)
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=1", "--nproc-per-node=2", "train.py"]
    stacked = [ended(each) for each in [torchrun.start(*words), torchrun.start(*words)]]
    assert [(each.returncode, lines(each.stdout)) for each in stacked] == [(0, WELL), (0, WELL)]


@pytest.mark.long  # tests/cluster/test_torchrun.py kills a worker
def test_example_fault_tolerant(torchrun: Launcher, port: int) -> None:
    torchrun.script(DDP)
    words = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=7", "--rdzv-backend=c10d",
             f"--rdzv-endpoint=localhost:{port}", "train.py", "die"]  # fmt: skip
    nodes = [ended(each) for each in [torchrun.start(*words), torchrun.start(*words)]]
    assert [each.returncode for each in nodes] == [0, 0], [each.stderr for each in nodes]
    assert lines("".join(each.stdout for each in nodes)) == ["0 of 2: 3 after 1", "1 of 2: 3 after 1"]
    assert torchrun.left() == []


@pytest.mark.long  # test_run.py lets a run grow and shrink
def test_example_elastic(torchrun: Launcher, port: int) -> None:
    words = ["--nnodes=1:4", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=7", "--rdzv-backend=c10d",
             f"--rdzv-endpoint=localhost:{port}", torchrun.script(DDP)]  # fmt: skip
    done = torchrun.run(*words, PET_RDZV_CONF="last_call_timeout=1")
    assert (done.returncode, lines(done.stdout)) == (0, WELL), done.stderr


def test_recorded_traceback_is_in_the_report(torchrun: Launcher) -> None:
    done = torchrun.run("--nproc-per-node", "2", torchrun.script(DDP), "raise")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("train.py FAILED") :]
    assert "rank      : 1 (local_rank: 1)" in report and "ValueError: bad batch" in report
    assert "error.json" in report


# Standby workers


REPORTS = """
import time
from dalsegno.train import report

for step in range(600):
    time.sleep(0.1)
    report(step)
"""


def test_killed_standby_worker_is_named_on_stderr(torchrun: Launcher) -> None:
    started = torchrun.start("--standalone", torchrun.script(REPORTS), DALSEGNO_RUN_STANDBY="1")
    (standby,) = eventually(lambda: torchrun.named("ds:s0"))
    os.kill(standby, signal.SIGKILL)
    assert started.stderr is not None
    line = started.stderr.readline()
    os.kill(started.pid, signal.SIGTERM)
    assert "standby worker 0 was killed by SIGKILL; the next worker is forked without it" in line
    assert socket.gethostname() in line and ended(started).returncode != 0


# Hangs


HANGS = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    total = torch.ones(8)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        time.sleep(600)  # does not arrive
    dist.all_reduce(total)

main()
"""


def test_rank_that_did_not_arrive_is_named_when_a_collective_times_out(torchrun: Launcher) -> None:
    done = torchrun.run("--standalone", "--nproc-per-node", "2", torchrun.script(HANGS))
    assert done.returncode == 1
    host = socket.gethostname()
    (line,) = [line for line in done.stderr.splitlines() if "did not arrive" in line]
    assert f"rank 1 on {host} did not arrive: it is at train.py:" in line
    assert "1 rank waits in collective 2 of process group 0, all_reduce (8); the code is suspected" in line


LEAVES = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")  # collectives time out after half an hour
total = torch.ones(8)
dist.all_reduce(total)
if dist.get_rank() == 1:
    time.sleep(600)
dist.all_reduce(total)
"""


def test_hang_without_a_timeout_is_explained_and_ended_after_the_limit(torchrun: Launcher) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "--log-dir", "logs", torchrun.script(LEAVES)]
    done = torchrun.run(*words, DALSEGNO_RUN_HANG_TIMEOUT="3s")
    host = socket.gethostname()
    (line,) = [line for line in done.stderr.splitlines() if "did not arrive" in line]
    assert "no rank was at work for" in line and f"rank 1 on {host} did not arrive: it is at train.py:9" in line
    assert "1 rank waits in collective 2 of process group 0, all_reduce (8); the code is suspected" in line
    (stacks,) = torchrun.folder.glob("logs/*/attempt_0/1/stacks.txt")
    assert line.endswith(f"; see {host}:{stacks.relative_to(torchrun.folder).parent}")
    assert 'train.py", line 9' in stacks.read_text()
    assert done.returncode == 1 and "failed: no step for" in done.stderr.splitlines()[-1]

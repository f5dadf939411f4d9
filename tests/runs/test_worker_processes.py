"""The workers of one generation on one node, and their reports."""

import json
from pathlib import Path

from dalsegno.runs.agent.evidence import oom_kills
from dalsegno.runs.agent.orders import Setup, WorkerOrder
from dalsegno.runs.agent.worker_processes import GenerationWorkers, run_files, worker_task
from dalsegno.runs.folder import RunFolder

TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 7, in <module>
    step()
ValueError: bad batch"""


def files(folder: Path, rank: int) -> dict[str, str]:
    return run_files(str(folder), 3, rank)


def write_log(folder: Path, rank: int) -> None:
    Path(files(folder, rank)["log"]).write_text(TRACEBACK)


def test_crew_tracks_running_and_ended_workers(tmp_path: Path):
    workers = GenerationWorkers(3)
    for rank in (4, 5):
        workers.add(rank, **files(tmp_path, rank)).pid = 1000 + rank
    worker = workers.by_pid(1005)
    assert worker is not None and worker.rank == 5 and workers.by_pid(9) is None
    assert workers.ended(worker, 0) == {"generation": 3, "rank": 5, "code": 0}
    assert [each.rank for each in workers.running()] == [4] and list(workers.reports) == [5]


def test_failure_is_reported_with_its_traceback(tmp_path: Path):
    workers = GenerationWorkers(3)
    worker = workers.add(0, **files(tmp_path, 0))
    write_log(tmp_path, 0)
    assert workers.ended(worker, 1) == {
        "generation": 3, "rank": 0, "code": 1, "traceback": TRACEBACK, "oom": False,
    }  # fmt: skip


def test_sigkill_with_a_grown_oom_count_is_an_oom_kill(tmp_path: Path):
    workers = GenerationWorkers(3, oom_before=oom_kills() - 1)
    assert workers.ended(workers.add(0, **files(tmp_path, 0)), -9)["oom"]
    assert not workers.ended(workers.add(1, **files(tmp_path, 1)), -11)["oom"]


def test_running_workers_with_a_traceback_are_reported_as_failing(tmp_path: Path):
    workers = GenerationWorkers(3)
    for rank in (0, 1):
        workers.add(rank, **files(tmp_path, rank))
    write_log(tmp_path, 1)
    assert workers.failing() == [{"generation": 3, "rank": 1, "code": 1, "traceback": TRACEBACK}]


def test_traceback_of_an_earlier_worker_is_not_reported(tmp_path: Path):
    write_log(tmp_path, 0)
    workers = GenerationWorkers(3)
    worker = workers.add(0, **files(tmp_path, 0))
    assert workers.failing() == []
    assert workers.ended(worker, 1) == {"generation": 3, "rank": 0, "code": 1, "oom": False}


def test_error_file_of_an_earlier_worker_is_not_reported(tmp_path: Path):
    before = GenerationWorkers(3).add(0, **files(tmp_path, 0))
    Path(before.error_file).write_text(json.dumps({"message": "RuntimeError: of before"}))
    workers = GenerationWorkers(3)
    workers.add(0, **files(tmp_path, 0))
    assert workers.failing() == []


def test_last_error_line_counts_only_for_workers_that_exited(tmp_path: Path):
    workers = GenerationWorkers(3)
    gave_up, killed, runs = (workers.add(rank, **files(tmp_path, rank)) for rank in range(3))
    for worker in (gave_up, killed, runs):
        Path(worker.log).write_text("error: no data\n")
    assert workers.ended(gave_up, 2)["traceback"] == "error: no data"
    assert "traceback" not in workers.ended(killed, -9)
    assert workers.failing() == []


def test_worker_that_is_a_program_of_its_own_has_torchs_dumps_in_the_run_folder(tmp_path: Path, monkeypatch):
    """Without a warm parent, no thread of ours runs in the worker, but NCCL's own dump at a timeout is kept."""
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", raising=False)
    setup = Setup(python="python3", script="train.py", folder=str(tmp_path))
    worker = GenerationWorkers(3).add(5, **files(tmp_path, 5))
    env = {"TORCHELASTIC_RUN_ID": "r", "DALSEGNO_GENERATION": "3"}

    def prefix(order: WorkerOrder, warm: bool = False) -> str | None:
        return worker_task(setup, warm, worker, order, "sock")["env"].get("TORCH_FR_DUMP_TEMP_FILE")

    own = str(RunFolder(tmp_path).flight_dump(3, 5)).removesuffix("5.json")
    assert prefix(WorkerOrder(5, env)) == own
    assert prefix(WorkerOrder(5, {**env, "TORCH_FR_DUMP_TEMP_FILE": "/mine"})) == "/mine"
    assert prefix(WorkerOrder(5, {"DALSEGNO_GENERATION": "3"})) is None, "not a torch worker"
    assert prefix(WorkerOrder(5, env), warm=True) is None, "a forked worker sets it itself"


def test_program_with_an_older_torch_gets_the_recorders_old_settings(tmp_path: Path, monkeypatch):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    packages = tmp_path / "env/lib/python3.9/site-packages/torch"
    packages.mkdir(parents=True)
    (packages / "version.py").write_text("__version__ = '2.4.1'\n")
    setup = Setup(python=str(tmp_path / "env/bin/python"), script="train.py", folder=str(tmp_path))
    worker = GenerationWorkers(3).add(5, **files(tmp_path, 5))
    order = WorkerOrder(5, {"TORCHELASTIC_RUN_ID": "r", "DALSEGNO_GENERATION": "3"})
    found = worker_task(setup, False, worker, order, "sock")["env"]
    assert (found["TORCH_NCCL_TRACE_BUFFER_SIZE"], found["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")
    assert "TORCH_FR_BUFFER_SIZE" not in found

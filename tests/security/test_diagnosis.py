"""Root examines jobs, runs and dumps of others with `doctor` and `why`: their files neither run, block nor mislead."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from dalsegno.doctor import gather
from dalsegno.doctor.batch import read_batch
from dalsegno.doctor.case import Case, ScriptFacts
from dalsegno.doctor.logs import LogSign, SignSeen, find_signs
from dalsegno.doctor.script import read_script
from dalsegno.doctor.sources import find_snapshot, look_at_python, open_text, read_dump_files
from dalsegno.doctor.symptoms import SYMPTOMS
from dalsegno.errors import DalsegnoError
from dalsegno.runs.flight_recorder import BadDump, read_dump
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.hang import HangReport, HangSuspect, ranks_of_generation, read_hang
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunPhase, RunStatus
from dalsegno.runs.submit.prepare import read_plan
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.system.processes import LocalRunner
from dalsegno.why.run import explain_run, generation_to_explain
from tests.cli.runs import end, make_run

ENTRY = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "state": "started"}


def doubled(depth: int) -> tuple[object, ...]:
    """Return a tuple that contains another tuple twice, and so on.

    It is small as a pickle, but endless as text or as a hash.
    """
    found: tuple[object, ...] = ("x",)
    for _ in range(depth):
        found = (found, found)
    return found


def _tuple_code(depth: int) -> bytes:
    """Return the operations of a pickle that build such a tuple."""
    return b"K\x01\x85" + b"".join(b"q%c" % 0 + b"h%c" % 0 + b"\x86" for _ in range(depth))


def test_dump_whose_lists_hold_each_other_is_read_at_once():
    bomb = doubled(60)
    dump = {"version": "2", "entries": [{**ENTRY, "process_group": [bomb]}], "pg_config": {"0": {"ranks": bomb}}}
    began = time.monotonic()
    found = read_dump(pickle.dumps(dump, 2), 0)
    assert time.monotonic() - began < 1
    assert [call.group for call in found.calls] == [""] and found.groups == {}


def test_dump_with_a_key_that_takes_forever_to_hash_is_refused():
    began = time.monotonic()
    with pytest.raises(BadDump):
        read_dump(b"\x80\x02}" + _tuple_code(60) + b"K\x01s.", 0)
    assert time.monotonic() - began < 1


def test_group_with_a_number_of_ten_thousand_digits_is_left_out():
    config = {"0": {"ranks": "[" + "9" * 10_000 + "]"}, "1": {"ranks": "[0, 1]"}}
    assert read_dump(json.dumps({"version": "2", "pg_config": config}).encode(), 0).groups == {"1": (0, 1)}


def test_groups_that_share_one_long_list_of_ranks_are_limited():
    ranks = "[" + ",".join(map(str, range(100_000))) + "]"
    config = {str(number): {"ranks": ranks} for number in range(1000)}
    assert len(read_dump(pickle.dumps({"version": "2", "pg_config": config}, 2), 0).groups) < 11


def test_names_in_a_dump_cannot_begin_a_line_of_their_own():
    frames = [{"filename": "x\nnext: `rm -rf /`", "line": 1}]
    entry = {**ENTRY, "profiling_name": "nccl:a\nb", "process_group": ["0\x1b[2J"], "frames": frames}
    (call,) = read_dump(json.dumps({"version": "2", "entries": [entry]}).encode(), 0).calls
    assert (call.group + call.describe()).isprintable()


def test_name_of_a_dump_with_a_huge_rank_is_not_a_dump(tmp_path: Path):
    for name in ("9" * 200, "rank_0"):
        (tmp_path / name).write_text('{"process": "stopped"}')
    assert [path.name for path, _ in read_dump_files(list(tmp_path.iterdir()), os.geteuid())] == ["rank_0"]


@pytest.mark.parametrize(
    "each, nodes", [(10**15, ["a"]), ("x", ["a"]), (1, 7), (1, {"a": 1}), (0, ["a"]), (1, ["a\nb"])]
)
def test_journal_with_impossible_numbers_of_ranks_names_none(each: object, nodes: object, tmp_path: Path):
    entries = [{"at": 1.0, "event": RunEvent.GENERATION, "generation": 1, "nproc_per_node": each, "nodes": nodes},
               {"at": 2.0, "event": RunEvent.IDLE, "generation": 1, "ranks": 7}]  # fmt: skip
    assert ranks_of_generation(entries, 1) == {}
    assert read_hang(RunFolder(tmp_path), 1, entries) is None


def running(generation: int) -> RunStatus:
    return RunStatus("r", "r", "ada", RunPhase.RUNNING, 1.0, 2.0, generation=generation)


def test_journal_with_an_invalid_generation_is_explained():
    status = running(3)
    assert generation_to_explain(status, [{"at": 1.0, "event": RunEvent.FAILED, "generation": "x"}]) == 0


def test_next_command_quotes_the_node_that_a_journal_names():
    hang = HangReport(1, "rank 1 did not arrive", HangSuspect.NODE, "why", (1,), ("n;reboot",))
    answer = explain_run(running(1), [], hang)
    assert answer.next == "dalsegno why 'n;reboot'"


@pytest.mark.parametrize("name, value", [("python", "a\0b"), ("python", "x\nfix: `reboot`")])
def test_plan_of_a_run_with_impossible_paths_is_examined(name: str, value: str, tmp_path: Path):
    run = make_run(tmp_path)
    end(run, 1)
    run.plan.write_text(json.dumps({**json.loads(run.plan.read_text()), name: value}))
    assert gather.gather_run(run, gather.DoctorOrder(None, LocalRunner(), {}, mountinfo="")).run == run.run


def test_plan_of_a_run_with_a_list_of_the_wrong_length_is_damaged(tmp_path: Path):
    run = make_run(tmp_path)
    plan = json.loads(run.plan.read_text())
    plan["request"]["env"] = [[]]
    run.plan.write_text(json.dumps(plan))
    with pytest.raises(DalsegnoError):
        read_plan(run)


# Files that others name


def test_device_is_not_opened(tmp_path: Path):
    """Merely opening /dev/watchdog starts its timer.

    A pseudo-terminal stands in for it, because it shows who opened it.
    """
    (tmp_path / "train.py").symlink_to("/dev/ptmx")
    before = set(os.listdir("/dev/pts"))
    assert open_text(tmp_path / "train.py") is None
    assert set(os.listdir("/dev/pts")) == before


def test_pipe_in_the_place_of_a_manifest_does_not_block(tmp_path: Path):
    step = tmp_path / "step-000000000007"
    step.mkdir()
    os.mkfifo(step / "MANIFEST.json")
    assert find_snapshot(tmp_path) is None


def test_module_beside_a_script_that_leads_to_a_file_of_another_user_is_not_read(tmp_path: Path):
    text = "import torch.distributed as dist, secret\ndist.all_reduce(1)\n"
    (tmp_path / "secret.py").write_text("import torch.distributed as d\nd.init_process_group()  # password\n")
    assert gather._script(text, tmp_path / "train.py", (os.geteuid(),)).starts
    assert not gather._script(text, tmp_path / "train.py", (64211,)).starts


def test_job_of_an_unknown_user_is_not_taken_for_an_own_one():
    job = JobInfo(7, "x", "no-such-user", JobState.FAILED)
    assert gather._owners(gather._owner_of(job)) == (-1,)


@pytest.mark.parametrize("text", ["x = " + "+".join(["1"] * 20_000), "x = " + "-" * 5000 + "1", "(" * 5000])
def test_deep_source_is_examined_without_an_error(text: str, tmp_path: Path):
    read_script(text, "train.py")
    packages = tmp_path / "lib/python3.11/site-packages/torch"
    packages.mkdir(parents=True)
    (packages / "version.py").write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("ELF")
    assert look_at_python(str(tmp_path / "bin/python"), {}, "").torch == "unknown"


def test_numbers_of_ten_thousand_digits_are_no_ports_and_no_sizes():
    many = "9" * 10_000
    assert read_script(f'import os\nos.environ["MASTER_PORT"] = "{many}"\n', "t.py").port == 0
    start = f"MASTER_PORT={many} torchrun --nproc-per-node={many} t.py"
    batch = read_batch(f"#!/bin/sh\n#SBATCH --nodes={many}\n{start}\n", "job.sh")
    assert gather._ranks_of(batch) == 0


def test_commands_that_doctor_prints_quote_paths_of_others():
    path = "x;reboot;.py"
    cases = [
        Case("j", signs=(SignSeen(LogSign.SCRIPT_MISSING, "log:1", "", {"path": path}),)),
        Case("j", script=ScriptFacts("train.py"), left_snapshot=path),
        Case("j", run="r", hang=HangReport(1, "s", HangSuspect.NODE, "why", (1,), (path,))),
    ]
    fixes = [finding.fix for case in cases for each in SYMPTOMS for finding in each.judge(case) if path in finding.fix]
    assert len(fixes) == 3 and all(f"'{path}'" in fix for fix in fixes)


@pytest.mark.parametrize("words", ["PG ID 1 Rank 1] ", "port: 1 ", "world size of 1 ", "PG ID 1Rank 1]Last enqueued "])
def test_line_that_almost_matches_costs_little(words: str):
    """A log of 8 MiB has 4000 lines of this length, and a run has hundreds of logs."""
    lines = [(number, words * 200) for number in range(100)]
    began = time.process_time()
    list(find_signs(lines, "log"))
    assert time.process_time() - began < 0.5

"""Tests of `runs`, `logs` and `cancel` on run folders."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dalsegno.cli.training.cancel import command as cancel
from dalsegno.cli.training.logs import command as logs
from dalsegno.cli.training.runs import command as runs
from dalsegno.cli.training.runs import row
from dalsegno.cli.training.statusline import age
from dalsegno.errors import NotThere
from dalsegno.runs import journal
from dalsegno.runs.coordinator.reports.goodput import Goodput, TimeKind, TrainingProgress
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, SlowRank, read_status
from dalsegno.spec.facts import facts_to_json
from tests.cli.runs import end, make_run, members, say, status, tell

Call = Callable[..., Result]
SPENT = {TimeKind.PRODUCTIVE: 90.0, TimeKind.LOST: 6.0, TimeKind.STARTING: 4.0}


@pytest.fixture
def call(tmp_path: Path) -> Call:
    def invoke(command: click.Command, *words: str) -> Result:
        done = CliRunner(env={"DALSEGNO_RUNS": str(tmp_path)}).invoke(command, list(words))
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return invoke


def test_runs_without_runs_says_how_to_start_one(call: Call) -> None:
    assert call(runs).stderr == "no runs yet; start one: `dalsegno run train.py`\n"
    assert json.loads(call(runs, "--json").stdout) == []


def test_active_runs_come_first_then_the_newest(call: Call, tmp_path: Path) -> None:
    for name, created in (("old-00000", 100.0), ("new-00000", 300.0), ("mid-00000", 200.0)):
        end(make_run(tmp_path, name), created=created)
    tell(make_run(tmp_path, "live-0000"), created=50.0)
    shown = [line.split()[0] for line in call(runs).stdout.splitlines()]
    assert shown == ["RUN", "live-0000", "new-00000", "mid-00000", "old-00000"]


def test_runs_lists_last_twenty_unless_all(call: Call, tmp_path: Path) -> None:
    for number in range(23):
        end(make_run(tmp_path, f"run-{number:05d}"), created=100.0 + number)
    done = call(runs)
    assert (len(done.stdout.splitlines()), done.stderr) == (
        21, "3 older runs are not shown; list all: `dalsegno runs --all`\n",
    )  # fmt: skip
    assert len(call(runs, "--all").stdout.splitlines()) == 24


def test_runs_table_row(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    running = status(
        nodes=members("n1", "n2"), wanted_nodes=4, generation=2, restarts=1, started=130.0, jobs=(12, 13),
        message="two\nlines",
    )  # fmt: skip
    assert row(run, running, 192.0) == [
        "train-k3f9x", "running", "2/4", "2", "1", "1m", "1:02", "12,13", "-", "two lines",
    ]  # fmt: skip
    journal.append(run.journal, 1.0, "submitted", job=9)
    waiting = status(phase=RunPhase.WAITING, wanted_nodes=4)
    assert row(run, waiting, 107.0)[1:9] == ["waiting", "0/4", "-", "0", "7s", "-", "9", "-"]
    assert row(run, status(phase=RunPhase.ENDED), 107.0)[1] == "ending"
    over = status(phase=RunPhase.ENDED, exit_code=3, started=100.0, ended=160.0)
    assert (row(run, over, 1e6)[1], row(run, over, 1e6)[6], row(run, over, 1e6)[8]) == ("failed", "1:00", "3")


def test_runs_json_has_all_fields(call: Call, tmp_path: Path) -> None:
    end(make_run(tmp_path), 0, nodes=members("n1"))
    (found,) = json.loads(call(runs, "--json").stdout)
    assert (found["run"], found["state"], found["exit_code"], found["folder"]) == (
        "train-k3f9x", "done", 0, str(tmp_path / "train-k3f9x"),
    )  # fmt: skip
    assert found["nodes"] == [{"name": "n1", "state": "member", "group_rank": 0}]


def test_damaged_run_does_not_hide_others(call: Call, tmp_path: Path) -> None:
    make_run(tmp_path, "bad-00000").status.write_text("{")
    make_run(tmp_path, "good-0000")
    done = call(runs)
    assert "good-0000" in done.stdout
    assert done.stderr.startswith("warning: run bad-00000 cannot be read")


def test_column_of_slurm_job_ids_is_named_jobids(call: Call, tmp_path: Path) -> None:
    end(make_run(tmp_path))
    assert "JOBIDS" in call(runs).stdout.split("\n")[0].split()


def test_run_of_removed_cluster_is_lost(call: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path, cluster="a1b2")
    tell(run, started=100.0, updated=160.0, nodes=members("n1"), coordinator_pid=7)
    shown = call(runs).stdout.splitlines()[1].split()
    assert (shown[1], shown[6], shown[-5:]) == ("lost", "1:00", ["lost:", "its", "cluster", "is", "gone"])


def test_ages_are_rounded() -> None:
    assert [age(each) for each in (-1, 5, 90, 7200, 200_000)] == ["0s", "5s", "1m", "2h", "2d"]


# Logs


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    run = make_run(tmp_path, ranks=2)
    nodes = {1: ["n1", "n2"], 2: ["n3", "n2"]}
    for generation, names in nodes.items():
        journal.append(run.journal, 1.0, "generation", generation=generation, nodes=names, nproc_per_node=1)
        for rank in (0, 1):
            say(run, generation, rank, f"{names[rank]} of {generation}\n")
    end(run)
    return tmp_path


def test_logs_are_sorted_by_generation_and_rank(call: Call, logged: Path) -> None:
    everything = "[0] n1 of 1\n[1] n2 of 1\n[0] n3 of 2\n[1] n2 of 2\n"
    assert call(logs).stdout == everything
    assert call(logs, "-f", "train").stdout == everything
    assert call(logs, "-f", "train").stderr == "run train-k3f9x has ended: exit code 0\n"


def test_logs_can_be_filtered(call: Call, logged: Path) -> None:
    assert call(logs, "--rank", "0").stdout == "n1 of 1\nn3 of 2\n"
    assert call(logs, "-g", "2", "train-k3f9x").stdout == "[0] n3 of 2\n[1] n2 of 2\n"
    assert call(logs, "--node", "n3").stdout == "[0] n3 of 2\n"
    assert call(logs, "--node", "n2", "--generation", "1").stdout == "[1] n2 of 1\n"
    with pytest.raises(NotThere, match="had no rank on `n9`"):
        call(logs, "--node", "n9")


def test_logs_of_unknown_rank_or_generation_is_an_error(call: Call, logged: Path) -> None:
    with pytest.raises(NotThere, match="run train-k3f9x has no rank 7") as caught:
        call(logs, "--rank", "7")
    assert caught.value.hint == "its ranks are 0 to 1"
    with pytest.raises(NotThere, match="run train-k3f9x has no generation 9"):
        call(logs, "--generation", "9")


def test_logs_of_single_rank_have_no_prefix(call: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    say(run, 1, 0, "a\nb")
    assert call(logs).stdout == "a\nb\n"


# Cancel


def test_cancel_of_ended_run_changes_nothing(call: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    end(run, 3)
    assert call(cancel, "train").stderr == "run train-k3f9x has ended already: exit code 3\n"
    assert not run.cancel.exists()


@pytest.mark.parametrize("on_head", [False, True])
def test_cancel_records_end_of_run_of_removed_cluster(call: Call, tmp_path: Path, on_head: bool) -> None:
    run = make_run(tmp_path, on_head=on_head)
    started = time.monotonic()
    done = call(cancel, run.run)
    assert time.monotonic() - started < 30
    assert done.stderr.endswith("run train-k3f9x is cancelled\n")
    found = read_status(run.status)
    assert found is not None
    assert (found.phase, found.exit_code, found.message, run.cancel.exists()) == (
        RunPhase.ENDED,
        143,
        "cancelled",
        True,
    )
    assert call(runs).stdout.splitlines()[1].split()[1] == "cancelled"


def test_cancel_with_one_unknown_run_cancels_nothing(call: Call, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(NotThere):
        call(cancel, run.run, "other")
    assert not run.cancel.exists()


# Show


def progress_of(run: RunFolder, **figures: float) -> None:
    account = Goodput(at=1100.0, spent=SPENT, step=1234, failures=2)
    run.progress.write_text(json.dumps(facts_to_json(TrainingProgress(account, figures))))


def test_show_prints_progress_and_time_shares(tmp_path: Path, call: Call) -> None:
    run = make_run(tmp_path, "train-k3f9x")
    tell(run, phase=RunPhase.RUNNING, nodes=members("a", "b"))
    progress_of(run, step_s=0.052, loss=2.3125, stall_s=0.004, snapshots=120, skipped=3, saves=6)
    lines = call(runs, "show", "train").stdout.splitlines()
    assert lines[1:] == [
        "step 1,234  0.052 s each  loss 2.312",
        "time  90.0 % productive, 6.0 % lost, 0.0 % checkpoints, 0.0 % waiting, 4.0 % starting  of 1:40",
        "snapshots  120 in memory in this generation, 0.004 s each, 3 skipped; 6 saved to disk",
        'with 2 failures in 1:40, disk_every="1s" would lose the least time',
    ]


def test_show_names_the_rank_that_the_others_wait_for(tmp_path: Path, call: Call) -> None:
    run, slow = make_run(tmp_path, "train-k3f9x"), SlowRank(1, "b", 1.8)
    tell(run, phase=RunPhase.RUNNING, nodes=members("a", "b"), slow_rank=slow)
    progress_of(run, step_s=0.1)
    assert f"{slow.sentence()}; see `dalsegno why train-k3f9x`" in call(runs, "show").stdout.splitlines()
    end(run, slow_rank=slow)
    assert slow.sentence() not in call(runs, "show").stdout


def test_show_in_json_has_status_and_progress(tmp_path: Path, call: Call) -> None:
    run = make_run(tmp_path, "train-k3f9x")
    tell(run, phase=RunPhase.RUNNING, nodes=members("a"))
    assert json.loads(call(runs, "show", "--json").stdout)["progress"] is None
    progress_of(run, step_s=0.1)
    shown = json.loads(call(runs, "show", "--json").stdout)
    assert (shown["phase"], shown["progress"]["account"]["step"]) == ("running", 1234)


def test_show_of_run_without_steps_names_checkpointer(tmp_path: Path, call: Call) -> None:
    run = make_run(tmp_path, "train-k3f9x")
    tell(run, phase=RunPhase.RUNNING, nodes=members("a"))
    assert "Checkpointer" in call(runs, "show").stderr

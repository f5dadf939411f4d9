"""The run folder: created atomically, with the whole plan, secrets private."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase, read_status
from dalsegno.runs.submit.plan import RunPlan, plan_run
from dalsegno.runs.submit.prepare import (
    aborted_status,
    discard_run,
    find_run,
    first_status,
    list_runs,
    new_run_id,
    prepare_run,
    read_environment,
    read_plan,
)
from dalsegno.runs.submit.program import check_program, find_python
from dalsegno.runs.submit.values import Gpus, NodeCount
from tests.submit.runs import HEAD, asked


def plan_in(home: Path, run: str = "train-k3f9x", output: str = "") -> RunPlan:
    request = asked(
        nodes=NodeCount(2, 4), args=("--lr", "é\n"), env=(("A", "1"), ("B", "x y")), gpus_per_node=Gpus(8, "h100"),
        exclude=("gpu1", "gpu2"), sbatch_args=("--nice=10",), output=output,
    )  # fmt: skip
    return plan_run(request, replace(HEAD, runs_folder=str(home)), run)


def prepared(home: Path, run: str = "train-k3f9x", output: str = "") -> RunFolder:
    plan = plan_in(home, run, output)
    return prepare_run(plan, {"PATH": "/bin", "TOKEN": "secret"}, first_status(plan, "ada", 100.0), home)


def test_plan_and_environment_survive_the_round_trip(tmp_path: Path) -> None:
    run = prepared(tmp_path / "runs")
    assert run.root == tmp_path / "runs" / "train-k3f9x"
    assert read_plan(run) == plan_in(tmp_path / "runs")
    assert read_environment(run) == {"PATH": "/bin", "TOKEN": "secret"}


def test_new_run_is_waiting(tmp_path: Path) -> None:
    status = read_status(prepared(tmp_path).status)
    assert status is not None
    assert (status.run, status.name, status.user, status.phase) == ("train-k3f9x", "train", "ada", RunPhase.WAITING)
    assert (status.wanted_nodes, status.nproc_per_node, status.message) == (4, 8, "handed over")
    assert not status.over
    over = aborted_status(status, 160.0, 143, "cancelled")
    assert (over.phase, over.ended, over.exit_code, over.message) == (RunPhase.ENDED, 160.0, 143, "cancelled")


def test_status_is_public_but_secrets_are_private(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run.root, *run.root.iterdir())}
    assert rights == {
        "train-k3f9x": 0o755, "plan.json": 0o600, "environment.json": 0o600, "status.json": 0o644, "logs": 0o755,
    }  # fmt: skip


def test_run_folder_elsewhere_is_found_by_a_link(tmp_path: Path) -> None:
    run = prepared(tmp_path / "runs", output=str(tmp_path / "mine"))
    assert run.root == tmp_path / "mine" / "train-k3f9x"
    assert [each.run for each in list_runs(tmp_path / "runs")] == ["train-k3f9x"]
    assert read_plan(find_run(tmp_path / "runs", "train")) == read_plan(run)
    discard_run(run, tmp_path / "runs")
    assert (list_runs(tmp_path / "runs"), list((tmp_path / "runs").iterdir())) == ([], [])


def test_dangling_link_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "old-00000").symlink_to(tmp_path / "gone")
    assert list_runs(tmp_path) == []
    assert list_runs(tmp_path / "nowhere") == []


def test_run_never_overwrites_another(tmp_path: Path) -> None:
    before = prepared(tmp_path)
    before.cancel.touch()
    with pytest.raises(DalsegnoError, match="train-k3f9x"):
        prepared(tmp_path)
    assert before.cancel.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["train-k3f9x"], "nothing incomplete is left"


def test_run_ids_are_readable_and_unused() -> None:
    letters = iter(["aaaaa", "bbbbb"])
    assert new_run_id("train", {"train-aaaaa"}.__contains__, lambda: next(letters)) == "train-bbbbb"
    ids = {new_run_id("train", lambda _: False) for _ in range(200)}
    assert len(ids) == 200
    assert all(len(each) == len("train-k3f9x") and not set("ilou") & set(each.removeprefix("train-")) for each in ids)
    assert len(new_run_id("x" * 80, lambda _: False)) <= 80, "the limit of Slurm's job names"
    with pytest.raises(UsageError, match="no free id"):
        new_run_id("train", lambda _: True)


def test_run_is_found_by_a_prefix_of_its_id(tmp_path: Path) -> None:
    for name in ("train-aaaaa", "train-bbbbb", "eval-ccccc"):
        prepared(tmp_path, name)
    assert find_run(tmp_path, "train-a").run == "train-aaaaa"
    assert find_run(tmp_path, "eval").run == "eval-ccccc"
    assert find_run(tmp_path).run == list_runs(tmp_path)[0].run
    with pytest.raises(UsageError, match="matches 2 runs: train-"):
        find_run(tmp_path, "train")
    with pytest.raises(NotThere) as fault:
        find_run(tmp_path, "evel-ccccc")
    assert fault.value.hint == "did you mean `eval-ccccc`?"
    with pytest.raises(NotThere, match="no runs yet"):
        find_run(tmp_path / "nowhere")


# Program checks


def refused(path: str = "", **fields: object) -> str:
    with pytest.raises(UsageError) as fault:
        check_program(asked(**fields), {"PATH": path})  # type: ignore[arg-type]
    return f"{fault.value.what}; {fault.value.hint}"


def test_missing_script_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    check_program(asked("train.py", chdir=str(tmp_path)), {})
    missing = refused(script="trian.py", chdir=str(tmp_path))
    assert missing == "script `trian.py` not found; did you mean `train.py`?"
    assert refused(script=".", chdir=str(tmp_path)) == "`.` is a folder, not a script; name the script in it"
    assert refused(chdir=str(tmp_path / "gone")).startswith("folder `")


def test_program_may_be_on_the_path(tmp_path: Path) -> None:
    tool = tmp_path / "hello"
    tool.write_text("#!/bin/sh\n")
    check = {"script": "hello", "chdir": "/", "framework": "plain"}
    assert refused(**check).startswith("program `hello` not found")
    assert refused(**{**check, "chdir": str(tmp_path)}) == "`hello` is not executable; chmod +x hello"
    tool.chmod(0o755)
    check_program(asked("hello", chdir="/", framework="mpi"), {"PATH": str(tmp_path)})
    check_program(asked("hello", chdir="/", no_preload=True), {"PATH": str(tmp_path)})
    assert refused(str(tmp_path), script="hello", chdir="/").startswith("script `hello` not found")


def test_environment_without_a_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert refused(chdir=str(tmp_path), venv="v").startswith(
        f"no Python found in `{tmp_path}/v`; create one with `python3 -m venv"
    )
    (tmp_path / "v/bin").mkdir(parents=True)
    (tmp_path / "v/bin/python").symlink_to("/bin/sh")
    check_program(asked(chdir=str(tmp_path), venv="v"), {})


def test_python_is_that_of_the_users_shell(tmp_path: Path) -> None:
    for folder in ("path", "venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python3").touch(0o755)
    on_path = {"PATH": str(tmp_path / "path")}
    assert find_python(on_path) == str(tmp_path / "path/python3")
    assert find_python({**on_path, "VIRTUAL_ENV": str(tmp_path / "venv")}) == str(tmp_path / "venv/bin/python3")
    assert find_python({**on_path, "VIRTUAL_ENV": str(tmp_path / "gone")}) == str(tmp_path / "path/python3")
    assert find_python({"PATH": ""}) == "python3"

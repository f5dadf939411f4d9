"""The steps inside an allocation: agents that outlive their peers' nodes, or srun's own tasks."""

from __future__ import annotations

from dalsegno.runs.submit.program import run_environment
from dalsegno.runs.submit.slurm_args import agents_argv, coordinator_argv, step_argv, tasks_argv
from dalsegno.runs.submit.values import Gpus
from tests.submit.runs import HEAD, asked, options, planned


def test_agents_step_from_the_head() -> None:
    plan = planned(HEAD, nodes=3, gpus_per_node=Gpus(8), chdir="/home/ada", preload=("a.b", "c"))
    assert agents_argv(plan, job=17, nodes=["n1", "n2", "n4"]) == [
        "srun", "--jobid=17", "--nodes=3", "--ntasks=3", "--nodelist=n[1-2,4]", "--ntasks-per-node=1",
        "--job-name=train-k3f9", "--chdir=/home/ada", "--no-kill", "--kill-on-bad-exit=0", "--overlap",
        "--cpu-bind=none", "--mpi=none", "--export=ALL", "--input=all",
        "/opt/dalsegno/bin/python", "-m", "dalsegno", "run-agent", "train-k3f9",
    ]  # fmt: skip


def test_srun_in_its_own_job_needs_no_job_id() -> None:
    found = options(agents_argv(planned()))
    assert not {"--jobid", "--nodes", "--nodelist"} & set(found)


def test_agent_step_uses_all_resources_of_its_job() -> None:
    found = options(agents_argv(planned(HEAD, gpus_per_node=Gpus(8), cpus_per_task=4)))
    assert not {"--cpus-per-task", "--exact", "--gpus-per-node", "--mem"} & set(found)


def test_variables_never_appear_in_arguments() -> None:
    plan = planned(HEAD, env=(("WANDB_API_KEY", "hunter2"),))
    assert "hunter2" not in " ".join([*coordinator_argv(plan), *step_argv(plan, job=1)])


def test_mpi_programs_are_srun_tasks_that_end_together() -> None:
    plan = planned(HEAD, nodes=2, nproc_per_node=4, framework="mpi", cpus_per_task=2, script="./hello")
    assert options(step_argv(plan, 5, ["n1", "n2"])) == {
        "--jobid": "5", "--nodes": "2", "--ntasks": "8", "--nodelist": "n[1-2]", "--ntasks-per-node": "4",
        "--job-name": "train-k3f9", "--cpus-per-task": "2", "--kill-on-bad-exit": "1", "--mpi": "pmix",
        "--export": "ALL", "--input": "none", "--open-mode": "append",
        "--output": "/var/lib/dalsegno/runs/train-k3f9/logs/g0001/rank%t.log",
    }  # fmt: skip
    assert (plan.job.tasks_per_node, plan.job.cpus_per_task) == (4, 2)
    assert step_argv(plan)[-1] == "./hello"


def test_plain_run_has_only_variables_of_slurm() -> None:
    plan = planned(framework="plain", venv="/v", script="train.py")
    assert options(step_argv(plan))["--mpi"] == "none"
    assert tasks_argv(plan)[-3:] == ["/v/bin/python", "-u", "train.py"]


def test_coordinator_needs_only_the_run_folder() -> None:
    assert coordinator_argv(planned(HEAD))[3:] == ["run-coordinator", "/var/lib/dalsegno/runs/train-k3f9"]


def test_percent_sign_in_the_folder_is_escaped_for_srun() -> None:
    plan = planned(framework="plain", output="/data/50%t", chdir="/home/ada")
    assert options(tasks_argv(plan))["--output"].startswith("/data/50%%t/")


def test_environment_excludes_variables_of_an_enclosing_job() -> None:
    base = {"PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/c", "SLURM_NTASKS": "9", "PMIX_RANK": "1", "PYTHONHOME": "x"}
    found = run_environment(asked(chdir="/home/ada", venv="env", env=(("HOME", "/mine"), ("B", "2"))), base)
    assert found == {
        "PATH": "/home/ada/env/bin:/bin",
        "HOME": "/mine",
        "SLURM_CONF": "/c",
        "VIRTUAL_ENV": "/home/ada/env",
        "B": "2",
    }


def test_conda_environment_is_activated() -> None:
    found = run_environment(asked(conda="/opt/conda/envs/ml"), {})
    assert found == {
        "PATH": "/opt/conda/envs/ml/bin:/usr/bin:/bin",
        "CONDA_PREFIX": "/opt/conda/envs/ml",
        "CONDA_DEFAULT_ENV": "ml",
    }


def test_environment_is_unchanged_without_venv_or_conda() -> None:
    assert run_environment(asked(), {"PATH": "/bin"}) == {"PATH": "/bin"}

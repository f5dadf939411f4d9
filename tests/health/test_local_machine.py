"""Tests of the local machine: what slurm.conf expects of it, and the settings of its checks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.health import Finding, Verdict, passed, unknown
from dalsegno.health.check import Check, Context
from dalsegno.health.checks import CHECKS
from dalsegno.health.expected import Expected
from dalsegno.health.facts import GpuFacts, GpuProcess
from dalsegno.health.local_machine import env_here, machine_here, settings_here, slurmd_settings
from dalsegno.health.node_reader import LocalNode, RecordedNode, good_for_s
from dalsegno.health.readers.gpus import ask_job_gpus
from dalsegno.health.runner import Checkup, examine, result_line
from dalsegno.health.settings import settings_text
from dalsegno.health.telemetry import healthy, with_gpu, write_telemetry
from dalsegno.spec.facts import CheckSetting, Health
from dalsegno.system.hanging_calls import NoAnswer, TooLate

CONF = "NodeName=gpu-[1-2] NodeAddr=127.0.0.1 Port=1 RealMemory=1 Gres=gpu:h100:2\nAuthType=auth/none\n"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "slurm.conf").write_text(CONF)
    write_telemetry(tmp_path / "telemetry.json", healthy("gpu-1", 2, "h100"))
    telemetry = str(tmp_path / "telemetry.json")
    return {"SLURM_CONF": str(tmp_path / "slurm.conf"), "SLURMD_NODENAME": "gpu-1", "DALSEGNO_TELEMETRY": telemetry}


def test_expectations_come_from_slurm_conf(env: dict[str, str]) -> None:
    assert machine_here(env).expected.gpus == 2
    assert machine_here(env, "gpu-9").expected.gpus is None
    assert machine_here({"SLURM_CONF": "/no/such/file"}, "gpu-1").expected.gpus is None


def test_under_slurm_a_missing_node_line_makes_checks_unknown(tmp_path: Path) -> None:
    """A prolog knows only its node's name: checks that cannot be run are reported, not skipped."""
    asked = [check for check in CHECKS if check.name in ("gpu-count", "slurmd", "munge", "clock")]
    bare = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "SLURMD_NODENAME": "gpu-1"}
    found = examine(asked, Context.IDLE, machine_here(bare), {})
    dark = {each.check for each in found if each.result.verdict is Verdict.UNKNOWN}
    assert {"gpu-count", "slurmd", "munge"} <= dark
    assert all("set SLURM_CONF" in each.result.text for each in found if each.check in ("slurmd", "munge"))
    (tmp_path / "slurm.conf").write_text(f"SlurmctldHost=head\n{CONF}")
    elsewhere = {**bare, "SLURMD_NODENAME": "cpu-1"}
    texts = {each.check: each.result.text for each in examine(asked, Context.IDLE, machine_here(elsewhere), {})}
    assert texts["slurmd"] == f"{tmp_path}/slurm.conf has no line for cpu-1" and "munge" not in texts
    alone = {"SLURM_CONF": str(tmp_path / "none")}
    assert {each.check for each in examine(asked, Context.IDLE, machine_here(alone), {})} <= {"clock"}, (
        "without Slurm they do not apply"
    )


def test_the_summary_line_lists_unknown_checks() -> None:
    fine, dark = Finding("disk", passed("room"), 0.0), Finding("slurmd", unknown("no slurm.conf"), 0.0)
    assert result_line("gpu-1", [fine, dark]) == "HEALTH_CHECK_RESULT:gpu-1:Passed:none:1 checks; 1 unknown: slurmd"


def test_slurmd_settings_are_read_from_its_environment_and_options() -> None:
    given = [b"SLURM_CONF=/a/slurm.conf", b"DALSEGNO_TELEMETRY=/t.json", b"HOME=/root", b""]
    assert slurmd_settings(["slurmd", "-D"], given) == {"SLURM_CONF": "/a/slurm.conf", "DALSEGNO_TELEMETRY": "/t.json"}
    assert slurmd_settings(["slurmd", "-f", "/b/slurm.conf"], given)["SLURM_CONF"] == "/b/slurm.conf"
    assert slurmd_settings(["/usr/sbin/slurmd", "-D", "-f/b/slurm.conf"], [])["SLURM_CONF"] == "/b/slurm.conf"


def test_a_program_started_by_slurmd_finds_its_settings(tmp_path: Path) -> None:
    slurmd = tmp_path / "slurmd"
    slurmd.symlink_to(sys.executable)
    ask = f"import sys; sys.path[:0] = {sys.path!r}; from dalsegno.health.local_machine import env_here as here"
    ask += "; print(here().get('SLURM_CONF'))"
    call = ["sh", "-c", 'env -i SLURMD_NODENAME=n "$0" -c "$1"; true', sys.executable, ask]
    run = f"import subprocess; subprocess.run({call!r})"
    env = {**os.environ, "SLURM_CONF": "/x/slurm.conf"}
    done = subprocess.run([slurmd, "-c", run], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "/x/slurm.conf", done.stderr
    assert env_here({"HOME": "/root"}) == {"HOME": "/root"}, "unchanged if not started by Slurm"


def test_settings_are_read_from_beside_slurm_conf(env: dict[str, str], tmp_path: Path) -> None:
    assert settings_here(env) == {}
    wanted = {"disk": CheckSetting(every_s=5, action="drain", thresholds={"fail_percent": 99.0})}
    (tmp_path / "health.json").write_text(settings_text(Health(checks=wanted)))
    assert settings_here(env) == wanted
    (tmp_path / "health.json").write_text('{"checks": [1]}')
    with pytest.raises(DalsegnoError, match="damaged"):
        settings_here(env)


def test_a_simulated_node_is_checked_on_this_machine(env: dict[str, str], tmp_path: Path) -> None:
    about_gpus = [check for check in CHECKS if check.name.startswith(("gpu", "xid", "nvlink", "fabric"))]
    machine = machine_here(env)
    found = examine(about_gpus, Context.IDLE, machine, {})
    assert {each.result.verdict for each in found} == {Verdict.PASSED}
    write_telemetry(tmp_path / "telemetry.json", with_gpu(healthy("gpu-1", 2, "h100"), 1, ecc_uncorrected=1))
    bad = [
        each.check for each in examine(about_gpus, Context.IDLE, machine, {}) if each.result.verdict.value == "failed"
    ]
    assert bad == ["gpu-ecc"]


def test_a_missing_slurmd_fails_the_check(env: dict[str, str]) -> None:
    slurmd = [check for check in CHECKS if check.name == "slurmd"]
    (found,) = examine(slurmd, Context.CONTINUOUS, machine_here(env), {})
    assert (found.result.verdict, found.result.text) == (Verdict.FAILED, "slurmd does not listen at 127.0.0.1:1")


def test_running_checks_yields_each_name_before_its_finding(env: dict[str, str]) -> None:
    checks = [check for check in CHECKS if check.name in ("gpu-ecc", "gpu-count", "disk")]
    checkup = Checkup(checks, machine_here(env), {})
    assert checkup.names(Context.CONTINUOUS) == ["gpu-count", "gpu-ecc", "disk"]
    seen = list(checkup.run_due(Context.CONTINUOUS, frozenset({"disk"})))
    assert [each if isinstance(each, str) else each.check for each in seen] == ["gpu-count"] * 2 + ["gpu-ecc"] * 2
    assert isinstance(seen[1], Finding)
    assert [each for each in checkup.run_due(Context.CONTINUOUS) if isinstance(each, str)] == ["disk"]


def test_before_a_job_only_its_own_gpus_must_be_free(env: dict[str, str], tmp_path: Path) -> None:
    write_telemetry(tmp_path / "telemetry.json", with_gpu(healthy("gpu-1", 2, "h100"), 1, memory_used_mib=4000))
    leftovers = [check for check in CHECKS if check.name == "gpu-leftovers"]

    def verdict(**job: str) -> Verdict:
        (found,) = examine(leftovers, Context.PROLOG, machine_here({**env, **job}), {})
        return found.result.verdict

    assert verdict() is Verdict.FAILED
    assert verdict(SLURM_JOB_ID="7", SLURM_JOB_GPUS="1") is Verdict.FAILED
    assert verdict(SLURM_JOB_ID="7", SLURM_JOB_GPUS="0") is Verdict.PASSED
    assert verdict(SLURM_JOB_ID="7") is Verdict.PASSED


def test_processes_of_our_own_agent_are_not_leftovers(tmp_path: Path) -> None:
    used = with_gpu(healthy("gpu-1", 1, "h100"), 0, memory_used_mib=900, processes=(GpuProcess(7),))
    write_telemetry(tmp_path / "telemetry.json", used)
    node = RecordedNode(tmp_path, Expected("gpu-1", gpus=1))
    process = tmp_path / "proc/7"
    process.mkdir(parents=True)
    for words, uid, gpus in (("python\0-I\0programs.py\0node-agent\0--node\0gpu-1", 0, 0), ("python\0train.py", 0, 1)):
        (process / "cmdline").write_text(words)
        (process / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        assert len(ask_job_gpus(node)) == gpus
    (process / "cmdline").write_text("python\0-I\0programs.py\0node-agent\0")
    (process / "status").write_text("Name:\tpython\nUid:\t1000\t1000\t1000\t1000\n")
    assert len(ask_job_gpus(node)) == 1, "the name alone proves nothing, the owner must be root"


def test_slow_gpu_queries_are_repeated_less_often() -> None:
    assert good_for_s(0.0001) == 0.3, "the checks of one run_due share the answer"
    assert good_for_s(0.01) == 2.0 and good_for_s(3.0) == 10.0
    asked: list[int] = []

    def gpus() -> tuple[GpuFacts, ...]:
        asked.append(1)
        time.sleep(0.05)
        return (GpuFacts(len(asked)),)

    machine = LocalNode(Expected("gpu-1"), {}, gpus)
    assert machine.nvml() == machine.nvml() == (GpuFacts(1),)
    machine.close()
    assert machine.nvml() == (GpuFacts(2),), "after a release they are queried again"
    assert machine.nvml(detailed=True) == machine.nvml(detailed=True) == (GpuFacts(3),)
    assert machine.nvml() == (GpuFacts(2),), "details do not replace the values of the checks"


def test_the_deadline_holds_for_all_questions_together(tmp_path: Path) -> None:
    """A prolog has ten seconds, and every job waits for it."""
    never, began = threading.Event(), time.monotonic()
    machine = LocalNode(Expected("gpu-1"), {"PATH": os.environ["PATH"]}, lambda: (never.wait(60), ())[1])
    machine.until = began + 0.5
    hang = [Check(name, "", lambda node, name=name: node.run(["sleep", f"6{name}"]), judge=passed) for name in "123"]
    hang.append(Check("gpu", "", lambda node: node.nvml(), judge=passed))
    found = examine(hang, Context.PROLOG, machine, {}, within_s=100)
    never.set()
    assert time.monotonic() - began < 30, "not four timeouts of a minute"
    assert {each.result.verdict for each in found} == {Verdict.UNKNOWN}
    assert found[-1].result.text == "not run: out of time"


def test_a_question_cut_off_by_our_own_deadline_is_not_late() -> None:
    machine = LocalNode(Expected("gpu-1"), {"PATH": os.environ["PATH"]})
    with pytest.raises(TooLate):
        machine.run(["sleep", "60"], timeout_s=0.1)
    machine.until = time.monotonic() + 0.1
    with pytest.raises(NoAnswer, match="out of time") as cut:
        machine.run(["sleep", "61"], timeout_s=1.25)
    assert not isinstance(cut.value, TooLate)

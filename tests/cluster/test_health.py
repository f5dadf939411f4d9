"""Tests of health checks as Slurm's prolog and HealthCheckProgram, without our controller."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.health.telemetry import read_telemetry, with_gpu, write_telemetry
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")

PAGE = Path(__file__).parents[2] / "docs" / "health.md"
CLUSTER = """
name: one
target: local
partitions:
  - {{name: train, nodes: 3, gpus: 2, gpu_type: h100, cpus: 2, memory: 1G}}
slurm:
  accounting: false
  extra: {{Prolog: {home}/health-prolog, HealthCheckProgram: {home}/health-check, HealthCheckInterval: 2,
           HealthCheckNodeState: ANY}}
health: {{mode: off}}
"""


def write_script(cli: Cli, name: str) -> None:
    """Write the script from the documentation, with the path of our command. It does not set the path of slurm.conf."""
    found = re.search(rf"cat > {name} <<'END'\n(.*?)^END$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    ours = cli.home / "clusters/one/bin/dalsegno"
    (cli.home / name).write_text(found[1].replace("/usr/local/bin/dalsegno", str(ours)))
    (cli.home / name).chmod(0o755)


@pytest.fixture(scope="module")
def cli(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        write_script(cli, "health-prolog")
        write_script(cli, "health-check")
        cli.ok("up", cli.file(CLUSTER.format(home=cli.home)))
        yield cli


def reason(cli: Cli, node: str) -> str:
    found = re.search(r"Reason=(.*?)( \[|$)", cli.ok("shell", "--", "scontrol", "show", "node", node), re.MULTILINE)
    return found[1] if found else ""


def test_health_checks_a_node_by_name(cli: Cli) -> None:
    result = json.loads(cli.ok("health", "--node", "train-3", "--json", "-x", "validation"))
    assert result["node"] == "train-3"
    assert {each["verdict"] for each in result["findings"]} == {"passed"}
    assert {"gpu-ecc", "slurmd", "munge", "file-systems"} <= {each["check"] for each in result["findings"]}
    answer = cli.run("health", "--node", "trian-3")
    assert answer.code == 2 and "did you mean `train-3`?" in answer.err


def test_real_faults_are_found_on_a_virtual_host(cli: Cli) -> None:
    """The faults are a hanging mount, a full disk, and dead munge and slurmd."""
    for fault in ("fs-hang", "disk-full", "munge-dead", "slurmd-dead"):
        cli.ok("inject", fault, "train-3")
    answer = cli.run("health", "--node", "train-3", "--json")
    failed = {each["check"] for each in json.loads(answer.out)["findings"] if each["verdict"] == "failed"}
    assert answer.code == 1 and failed == {"file-systems", "disk", "munge", "slurmd"}
    cli.ok("inject", "--clear", "train-3")


def test_slurm_health_check_drains_a_node_with_a_reason(cli: Cli) -> None:
    cli.ok("inject", "nvlink", "train-2")
    eventually(lambda: reason(cli, "train-2").startswith("dalsegno:reset:nvlink[down] 17 of 18 NVLinks are up"))


def test_prolog_check_keeps_jobs_off_a_busy_node(cli: Cli) -> None:
    """While jobs run, Slurm's health check does not report faults that matter only on an idle node."""
    assert cli.ok("shell", "--", "srun", "-w", "train-1", "--gpus=1", "hostname").strip() == "train-1"
    file = cli.home / "clusters/one/hosts/train-1/telemetry.json"
    write_telemetry(file, with_gpu(read_telemetry(file), 0, memory_used_mib=4000))
    job = cli.ok("shell", "--", "sbatch", "--parsable", "-w", "train-1", "--gpus=1", "--wrap", "hostname").strip()
    eventually(lambda: reason(cli, "train-1") == "Prolog error")
    # Restored at the end of the test
    eventually(lambda: "JobState=PENDING" in cli.ok("shell", "--", "scontrol", "show", "job", job))

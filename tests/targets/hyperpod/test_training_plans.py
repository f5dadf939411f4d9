"""The end of a training plan: read by `up`, written on each node of the group, and a reason to drain the node."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

pytest.importorskip("botocore")

from dalsegno.health.checks.cloud import ask_notices, judge_notices
from dalsegno.health.expected import Expected
from dalsegno.health.node_reader import RecordedNode
from dalsegno.health.result import Verdict
from dalsegno.setup.bootstrap import HOST
from dalsegno.spec.facts import Health
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.node_plans import role_plan
from dalsegno.targets.hyperpod.training_plans import ends_command, next_end
from dalsegno.wire.cloud_notice import parse_cloud
from tests.targets.hyperpod.conftest import CPU, cluster_of, open_hyperpod
from tests.targets.hyperpod.test_scripts import own_address, resources

PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p5"
PLANNED = f"  groups: {{cpu: {{training_plan: '{PLAN}'}}}}\n"
DAY = 86400.0


def answer(*days: tuple[int, int], instance_type: str = "ml.c5.4xlarge") -> dict[str, object]:
    parts = [
        {"InstanceType": instance_type, "StartTime": at(begin), "EndTime": at(end), "ReservedCapacityArn": "arn"}
        for begin, end in days
    ]
    return {"EndTime": at(days[-1][1]), "ReservedCapacitySummaries": parts}


def at(day: int) -> datetime:
    return datetime.fromtimestamp(day * DAY, tz=timezone.utc)


def test_next_end_is_that_of_the_present_part_of_the_plan():
    plan = answer((100, 107), (110, 117))
    assert [next_end(plan, "ml.c5.4xlarge", day * DAY) for day in (99, 103, 112)] == [107 * DAY, 107 * DAY, 117 * DAY]
    assert next_end(answer((100, 107), instance_type="ml.p5.48xlarge"), "ml.c5.4xlarge", 0.0) == 107 * DAY
    assert next_end({}, "ml.c5.4xlarge", 0.0) is None


def test_up_gives_the_nodes_the_time_at_which_aws_takes_their_machines(aws, tmp_path):
    target = open_hyperpod(tmp_path)
    cluster = cluster_of(CPU, PLANNED)
    assert target.plan(cluster).ends == {}, "a plan that cannot be read is left out"
    end = 4_000_000_000
    aws.training_plans[PLAN] = {
        "TrainingPlanArn": PLAN, "TrainingPlanName": "p5", "Status": "Active", "EndTime": end,
    }  # fmt: skip
    plan = target.plan(cluster)
    assert plan.ends == {"cpu": end - 1800.0}
    target.apply(plan, lambda text: None)
    assert target.plan(cluster).empty, "`up` uploaded the scripts with this end"
    aws.training_plans[PLAN]["EndTime"] = end + 3600
    assert "bootstrap-compute.sh" in target.plan(cluster).upload


def test_node_writes_the_end_of_its_own_group(tmp_path):
    listed, file = tmp_path / "resources.json", tmp_path / "cloud.json"
    command = ends_command(str(file), Health(), {"gpu": 5000.0, "cpu": 7000.0})

    def run(argv: tuple[str, ...]) -> int:
        words = ["n1" if word == HOST else word for word in argv[1:]]
        env = {"PATH": "/usr/bin:/bin", "SAGEMAKER_RESOURCE_CONFIG_PATH": str(listed)}
        return subprocess.run([sys.executable, *words], env=env, capture_output=True).returncode

    for group, end in (("gpu", 5000.0), ("other", None)):
        listed.write_text(resources(**{group: (own_address(),), "cpu": ("203.0.113.7",)}))
        assert run(command.unless) != 0
        assert run(command.argv) == 0 and run(command.unless) == 0
        site = parse_cloud(file.read_text(), "n1")
        assert (site.cloud, site.ends_at) == ("hyperpod", end)


@pytest.mark.parametrize(("left_s", "verdict"), [(86400, Verdict.PASSED), (60, Verdict.FAILED)])
def test_node_is_drained_before_the_end_without_asking_for_notices(tmp_path: Path, left_s: int, verdict: Verdict):
    """The folder has no metadata service, as a HyperPod instance may have none."""
    now = 1_795_000_000.0
    (tmp_path / "now").write_text(str(now))
    (tmp_path / "cloud.json").write_text(f'{{"cloud": "hyperpod", "ends": {{"n1": {now + left_s}}}}}')
    reader = RecordedNode(tmp_path, Expected(node="n1"))
    assert judge_notices(ask_notices(reader)).verdict is verdict


def test_only_clusters_with_a_known_end_get_the_file():
    with_end = role_plan(cluster_of(), SlurmRole.COMPUTE, "k", ends={"cpu": 5000.0})
    without = role_plan(cluster_of(), SlurmRole.COMPUTE, "k")
    assert "--cloud" in with_end.services[0].argv and "--cloud" not in without.services[0].argv
    assert len(with_end.commands) == len(without.commands) + 1

"""The common parts of cloud targets: prices, consequences, progress of operations, and named refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dalsegno.errors import TargetError, UsageError
from dalsegno.spec.facts import Cluster
from dalsegno.targets.cloud.consequences import (
    CapacityCheck,
    ChangeEffect,
    CloudPlan,
    CloudResource,
    Minutes,
    SettingChange,
    compare_settings,
    worst,
)
from dalsegno.targets.cloud.cost import HourlyCost, PriceTable, read_prices
from dalsegno.targets.cloud.credentials import CloudRefusal, explain, refusal_in_text, refusal_of_code
from dalsegno.targets.cloud.progress import (
    OperationReport,
    OperationState,
    ResourceEvent,
    ResourceEventKind,
    first_failure,
    follow,
)

CLUSTER = Cluster("demo", "parallelcluster", (), ())


# Prices
def test_price_of_a_gpu_instance_is_that_of_all_its_gpus():
    line = PriceTable().instance("p5.48xlarge", 2)
    assert line.usd_per_hour == pytest.approx(2 * 8 * 6.88) and line.date == "2026-08-22"
    assert PriceTable().instance("ml.p5.48xlarge", 2).usd_per_hour == line.usd_per_hour


def test_monthly_prices_are_spread_over_the_hours_of_a_month():
    line = PriceTable().resource("aws-fsx-lustre-125", 1200)
    assert line.usd_per_hour == pytest.approx(1200 * 0.145 / 730)


def test_price_of_an_unknown_machine_is_unknown_and_not_free():
    cost = HourlyCost((PriceTable().instance("m5.2xlarge"), PriceTable().instance("zz9.metal", 4)))
    assert cost.unknown == ("zz9.metal",) and cost.usd_per_hour == pytest.approx(0.384)
    assert cost.sentence() == (
        "costs about 0.38 USD per hour, at list prices of 2026-11-18 and estimates, without zz9.metal"
    )
    assert "4 x zz9.metal: price unknown" in cost.details()


def test_own_prices_replace_list_prices(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("name,unit,usd,basis,date,source\np5.48xlarge,hour,31.46,listed,2026-11-01,our contract\n")
    table = read_prices({"DALSEGNO_PRICES": str(file)})
    assert table.instance("p5.48xlarge", 2).usd_per_hour == 62.92
    assert table.instance("m5.large").usd_per_hour == PriceTable().instance("m5.large").usd_per_hour


@pytest.mark.parametrize(
    "text", ["", "name,usd\nx,1\n", "name,unit,usd,basis,date,source\nx,day,1,listed,d,s\n", "name,unit\nx,y,z\n"]
)
def test_damaged_price_file_is_named(tmp_path, text):
    file = tmp_path / "prices.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"prices\.csv"):
        read_prices({"DALSEGNO_PRICES": str(file)})


def test_missing_price_file_is_named():
    with pytest.raises(UsageError, match="DALSEGNO_PRICES"):
        read_prices({"DALSEGNO_PRICES": "/does/not/exist"})


# Consequences
def test_plan_names_the_worst_change_first_and_the_difference_in_price():
    small, large = (HourlyCost((PriceTable().instance("m5.2xlarge", count),)) for count in (1, 3))
    plan = CloudPlan(
        CLUSTER,
        changes=(
            SettingChange("MaxCount", "2", "4", ChangeEffect.IN_PLACE),
            SettingChange("SubnetIds", "a", "b", ChangeEffect.STOPS_NODES),
        ),
        cost=large,
        cost_before=small,
        time=Minutes(3, 5),
        checks=(CapacityCheck("the quota L-1", "8 vCPU"), CapacityCheck("cr-1", "2", "it holds 1 instance")),
    )
    said = plan.sentences()
    assert said[0].startswith("SubnetIds: a → b; needs all compute nodes stopped")
    assert said[1] == "MaxCount: 2 → 4; changes in place"
    assert said[2].endswith("(+0.77 USD per hour)") and said[3] == "takes about 3 to 5 minutes"
    assert said[4] == "cr-1: it holds 1 instance"
    assert "check the quota L-1: 8 vCPU" in plan.details()
    assert worst(plan.changes) is ChangeEffect.STOPS_NODES and worst(()) is None


def test_plan_without_differences_is_empty():
    assert CloudPlan(CLUSTER).empty and CloudPlan(CLUSTER).sentences() == [
        "nothing to do: the cluster is as the file says"
    ]
    assert not CloudPlan(CLUSTER, resources=(CloudResource("VPC", ("demo",)),)).empty


def test_settings_are_compared_by_name_in_lists():
    old = {"Queues": [{"Name": "a", "Max": 1}, {"Name": "b", "Max": 1}], "Tags": [1, 2]}
    new = {"Queues": [{"Name": "b", "Max": 2}, {"Name": "c", "Max": 1}], "Tags": [1, 2]}
    assert list(compare_settings(old, new)) == [
        ("Queues[a]", {"Name": "a", "Max": 1}, None),
        ("Queues[b]/Max", 1, 2),
        ("Queues[c]", None, {"Name": "c", "Max": 1}),
    ]


# Progress
def event(number: int, resource: str, kind: ResourceEventKind, message: str = "") -> ResourceEvent:
    return ResourceEvent(str(number), resource, kind, message)


STARTED = event(1, "HeadNode (AWS::EC2::Instance)", ResourceEventKind.STARTED)
FAILED = event(2, "HeadNode (AWS::EC2::Instance)", ResourceEventKind.FAILED, "no capacity in this zone")
CANCELLED = event(3, "Queue", ResourceEventKind.CANCELLED, "Resource creation cancelled")
LATER = event(4, "Stack", ResourceEventKind.FAILED, "The following resource(s) failed")


def test_operation_is_followed_to_its_end_and_each_pause_is_asked_for(tmp_path):
    reports = [
        OperationReport(OperationState.RUNNING, (STARTED,)),
        OperationReport(OperationState.RUNNING, (STARTED, event(5, "Vpc", ResourceEventKind.DONE))),
        OperationReport(OperationState.DONE, (STARTED,)),
    ]
    said: list[str] = []
    pauses: list[float] = []
    done = follow("creation", iter(reports).__next__, said.append, tmp_path, pause=pauses.append, every_s=7)
    assert done.state is OperationState.DONE and pauses == [7, 7]
    assert said == [
        "creation: 0 resources done, now HeadNode (AWS::EC2::Instance)",
        "creation: 1 resources done, now HeadNode (AWS::EC2::Instance)",
    ]


def test_failing_resource_is_on_top_and_the_logs_are_kept_for_the_owner_only(tmp_path):
    reports = [
        OperationReport(OperationState.RUNNING, (STARTED, FAILED)),
        OperationReport(OperationState.FAILED, (STARTED, FAILED, CANCELLED, LATER), logs=(("chef.log", "boom"),)),
    ]
    said: list[str] = []
    with pytest.raises(TargetError) as raised:
        follow("creation", iter(reports).__next__, said.append, tmp_path / "logs", pause=lambda s: None)
    assert raised.value.what.startswith(
        "creation failed: HeadNode (AWS::EC2::Instance): no capacity in this zone\n  also failed: Stack"
    )
    assert said[0] == "FAILED: HeadNode (AWS::EC2::Instance): no capacity in this zone"
    lines = (tmp_path / "logs" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "failed", "cancelled", "failed"]
    assert (tmp_path / "logs" / "chef.log").read_text() == "boom"
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "logs").iterdir()} == {"0o600"}


def test_interrupted_operation_is_not_failed(tmp_path):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow("creation", lambda: OperationReport(OperationState.RUNNING), lambda s: None, tmp_path / "no",
               pause=interrupted)  # fmt: skip
    assert not (tmp_path / "no").exists()


def test_messages_of_a_cloud_cannot_control_the_terminal(tmp_path):
    bad = event(1, "Head\x1b[2J", ResourceEventKind.FAILED, "a\nb")
    with pytest.raises(TargetError) as raised:
        follow("x", lambda: OperationReport(OperationState.FAILED, (bad,)), lambda s: None, tmp_path)
    assert "\x1b" not in raised.value.what and first_failure((bad,)) is bad


# Refusals
@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("ExpiredToken", CloudRefusal.EXPIRED),
        ("InvalidClientTokenId", CloudRefusal.WRONG_CREDENTIALS),
        ("AccessDeniedException", CloudRefusal.DENIED),
        ("ThrottlingException", CloudRefusal.THROTTLED),
        ("InsufficientInstanceCapacity", CloudRefusal.CAPACITY),
        ("VcpuLimitExceeded", CloudRefusal.QUOTA),
        ("InvalidSubnetID.NotFound", CloudRefusal.NOT_THERE),
        ("SomethingNew", CloudRefusal.UNKNOWN),
    ],
)
def test_codes_of_the_cloud_become_causes(code, refusal):
    assert refusal_of_code(code) is refusal
    assert refusal_in_text(f"An error occurred ({code}) when calling the X operation: text") is refusal


def test_every_refusal_that_can_be_fixed_has_a_hint():
    without = [each for each in CloudRefusal if not explain(each, "x").hint]
    assert without == [CloudRefusal.ALREADY_THERE, CloudRefusal.UNKNOWN]
    expired = explain(CloudRefusal.EXPIRED, "AWS ec2 describe-vpcs", "The security token expired", "ExpiredToken")
    assert expired.what == "AWS ec2 describe-vpcs: expired credentials: The security token expired"
    assert "aws sso login" in expired.hint


def test_first_code_in_a_message_is_the_cause():
    text = "Rate exceeded (Throttling); later AccessDenied"
    assert refusal_in_text(text) is CloudRefusal.THROTTLED
    assert refusal_in_text("nothing that is known") is CloudRefusal.UNKNOWN


def test_logs_folder_is_created_by_the_first_failure_only(tmp_path: Path):
    follow("x", lambda: OperationReport(OperationState.DONE), lambda s: None, tmp_path / "logs")
    assert not (tmp_path / "logs").exists()

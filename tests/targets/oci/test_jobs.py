"""Jobs of Resource Manager: their logs, failed and interrupted ones, and consent before something is destroyed.

The logs have the form of Terraform's console output. None was recorded in a tenancy.
"""

from __future__ import annotations

import pytest

from dalsegno.cli.cluster.up import let_ask
from dalsegno.errors import TargetError, UsageError
from dalsegno.targets.base import ClusterPhase
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.cloud.progress import ResourceEventKind
from dalsegno.targets.oci.jobs import PlanSummary, read_events, read_plan_summary
from dalsegno.targets.oci.plan import read_oci_state
from dalsegno.targets.oci.resource_manager import FakeResourceManager, StackJobState, StackOperation
from tests.targets.oci.conftest import FULL, GPUS, cluster_of, controller, open_oci

FAILED_LOG = """\
oci_core_vcn.vcn[0]: Creating...
oci_core_vcn.vcn[0]: Creation complete after 1s [id=ocid1.vcn.oc1..a]
oci_core_cluster_network.cluster_network[0]: Creating...
\x1b[31m╷\x1b[0m
│ \x1b[1mError: \x1b[0m500-InternalError, Out of host capacity.
│ Suggestion: The service for this resource encountered an error.
│ Service: Core Compute Management
│
│   with oci_core_cluster_network.cluster_network[0],
│   on cluster-network.tf line 1, in resource "oci_core_cluster_network" "cluster_network":
│    1: resource "oci_core_cluster_network" "cluster_network" {
╵
Error: remote-exec provisioner error

  with module.setup["head"].null_resource.cluster,
  on slurm.tf line 9, in resource "null_resource" "cluster":
"""
DESTROYS = (
    "  # oci_core_instance.controller must be replaced",
    "  # oci_file_storage_file_system.FSS[0] will be destroyed",
    "Plan: 1 to add, 2 to change, 2 to destroy.",
)


def up(target, cluster) -> list[str]:
    said: list[str] = []
    target.apply(target.plan(cluster), said.append)
    return said


def grown(folder):
    return cluster_of(folder, GPUS.replace("nodes: 2", "nodes: 3"))


# Logs


def test_summary_of_a_plan_names_what_is_destroyed_or_replaced():
    found = read_plan_summary(["a", *DESTROYS, "b"])
    assert found == PlanSummary(1, 2, 2, ("oci_core_instance.controller", "oci_file_storage_file_system.FSS[0]"))
    assert found.sentence() == (
        "Terraform's plan: 1 to add, 2 to change, 2 to destroy: "
        "2 resources (oci_core_instance.controller, oci_file_storage_file_system.FSS[0])"
    )
    assert read_plan_summary(["No changes. Your infrastructure matches the configuration."]) == PlanSummary(0, 0, 0)
    assert read_plan_summary(["Error: Invalid index"]) is None


def test_events_of_a_log_name_the_resource_of_each_error():
    events = read_events(FAILED_LOG.splitlines())
    assert [(event.resource, event.kind) for event in events] == [
        ("oci_core_vcn.vcn[0]", ResourceEventKind.STARTED),
        ("oci_core_vcn.vcn[0]", ResourceEventKind.DONE),
        ("oci_core_cluster_network.cluster_network[0]", ResourceEventKind.STARTED),
        ("oci_core_cluster_network.cluster_network[0]", ResourceEventKind.FAILED),
        ('module.setup["head"].null_resource.cluster', ResourceEventKind.FAILED),
    ]
    assert events[3].message == "500-InternalError, Out of host capacity."
    (alone,) = read_events(["Error: No valid credential sources found"])
    assert (alone.resource, alone.message) == ("Terraform", "No valid credential sources found")


def test_failed_job_names_the_resource_that_failed_first(folder):
    manager = FakeResourceManager(ends=[(StackJobState.SUCCEEDED, ""), (StackJobState.FAILED, FAILED_LOG)])
    with pytest.raises(CloudError) as caught:
        up(open_oci(folder, manager), cluster_of(folder))
    first, also = caught.value.what.splitlines()
    assert first == (
        "the APPLY job failed: oci_core_cluster_network.cluster_network[0]: 500-InternalError, Out of host capacity."
    )
    assert "null_resource.cluster" in also
    assert caught.value.refusal is CloudRefusal.CAPACITY
    kept = (folder / "clusters" / "demo" / "operations" / "apply.log").read_text()
    assert "Service: Core Compute Management" in kept


# Failed and interrupted jobs


def test_up_after_a_failed_job_starts_new_jobs(folder):
    manager = FakeResourceManager(ends=[(StackJobState.FAILED, "Error: quota")])
    target = open_oci(folder, manager)
    with pytest.raises(TargetError, match="the PLAN job failed"):
        up(target, cluster_of(folder))
    assert manager.job("job-1").state is StackJobState.FAILED, "a job keeps its state"
    plan = open_oci(folder, manager).plan(cluster_of(folder))
    assert plan.resumes == "" and "finishes what an earlier command began" not in plan.sentences()
    up(open_oci(folder, manager), cluster_of(folder))
    assert target.summary().phase is ClusterPhase.UP
    assert [operation for operation, _ in manager.started] == [
        StackOperation.PLAN, StackOperation.PLAN, StackOperation.APPLY,
    ]  # fmt: skip


def test_change_that_failed_is_finished_even_if_the_file_is_as_before(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder))
    manager.ends = [(StackJobState.SUCCEEDED, ""), (StackJobState.FAILED, "Error: Out of host capacity.")]
    with pytest.raises(CloudError):
        up(target, grown(folder))
    plan = target.plan(cluster_of(folder))
    assert not plan.empty and plan.sentences()[0] == "finishes what an earlier command began"
    target.apply(plan, lambda text: None)
    assert target.summary().phase is ClusterPhase.UP and target.plan(cluster_of(folder)).empty
    assert next(iter(manager.stacks.values()))["node_count"] == "2"


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("operation", [StackOperation.PLAN, StackOperation.APPLY])
def test_interrupted_up_follows_the_job_that_runs(folder, operation):
    manager = FakeResourceManager(lasts=3)
    target = open_oci(folder, manager)
    target._pause = lambda seconds: interrupt(seconds) if manager.started[-1][0] is operation else None
    with pytest.raises(KeyboardInterrupt):
        up(target, cluster_of(folder))
    assert target.summary().phase is ClusterPhase.HALF_MADE
    job, again = f"job-{len(manager.started)}", open_oci(folder, manager)
    before = [each for each, _ in manager.started]
    plan = again.plan(cluster_of(folder))
    what = f"follows the {operation.value} job of Resource Manager, which an earlier command started"
    assert plan.sentences()[0] == what
    said: list[str] = []
    again.apply(plan, said.append)
    assert f"{job}: line 3" in said, "its log is shown to the end"
    assert [each for each, _ in manager.started] == [*before, StackOperation.PLAN, StackOperation.APPLY]
    assert again.plan(cluster_of(folder)).empty


def test_job_that_ended_after_an_interrupted_up_is_not_followed(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    target._pause = interrupt
    with pytest.raises(KeyboardInterrupt):
        up(target, cluster_of(folder))
    manager.job("job-1")
    assert open_oci(folder, manager).plan(cluster_of(folder)).resumes == ""


def test_job_that_resource_manager_has_forgotten_is_not_followed(folder):
    manager = FakeResourceManager(ends=[(StackJobState.FAILED, "Error: quota")])
    with pytest.raises(TargetError):
        up(open_oci(folder, manager), cluster_of(folder))
    manager.refusals = [("get-job", CloudRefusal.NOT_THERE)]
    assert open_oci(folder, manager).plan(cluster_of(folder)).resumes == ""
    assert manager.refusals == []


def test_interrupted_down_follows_its_job_and_ends_the_one_of_up_first(folder):
    manager = FakeResourceManager(lasts=3)
    target = open_oci(folder, manager)
    target._pause = interrupt
    with pytest.raises(KeyboardInterrupt):
        up(target, cluster_of(folder))
    said: list[str] = []
    ending = open_oci(folder, manager)
    ending._pause = lambda seconds: None if "destroy" not in str(manager.started[-1]).lower() else interrupt(seconds)
    with pytest.raises(KeyboardInterrupt):
        ending.destroy(said.append)
    assert "waiting for the PLAN job to end" in said
    assert open_oci(folder, manager).destroy(lambda text: None)
    assert [operation for operation, _ in manager.started] == [StackOperation.PLAN, StackOperation.DESTROY]
    assert manager.stacks == {}


# Consent


def test_plan_that_destroys_something_is_applied_only_with_consent(folder):
    manager = FakeResourceManager()
    target = open_oci(folder, manager, controller(nodes=3))
    up(target, cluster_of(folder))
    before, shown = read_oci_state(target.folder), []
    manager.planned = DESTROYS
    for answer in (False, KeyboardInterrupt):

        def confirm(lines, destroys, answer=answer):
            shown.append((lines, destroys))
            if answer is KeyboardInterrupt:
                raise KeyboardInterrupt
            return answer

        target.confirm = confirm
        with pytest.raises((TargetError, KeyboardInterrupt)):
            up(target, grown(folder))
        assert manager.started[-1] == (StackOperation.PLAN, ""), "nothing was applied"
        assert read_oci_state(target.folder) == before
        assert next(iter(manager.stacks.values()))["node_count"] == "2", "the variables are as before"
    (line,), destroys = shown[0]
    assert destroys and line.startswith("Terraform's plan: 1 to add, 2 to change, 2 to destroy")
    target.confirm = lambda lines, destroys: True
    up(target, grown(folder))
    assert manager.started[-1][0] is StackOperation.APPLY
    assert target.summary().nodes == 3


@pytest.mark.parametrize(("planned", "asked"), [(("Plan: 1 to add, 1 to change, 0 to destroy.",), False), ((), True)])
def test_consent_is_needed_if_the_log_has_no_summary_and_not_if_nothing_is_destroyed(folder, planned, asked):
    manager, questions = FakeResourceManager(), []
    target = open_oci(folder, manager, controller(nodes=3))
    up(target, cluster_of(folder))
    manager.planned = planned
    target.confirm = lambda lines, destroys: not questions.append(destroys)
    up(target, grown(folder))
    assert questions == [asked]


def test_new_stack_needs_no_consent_without_a_summary(folder):
    up(open_oci(folder, FakeResourceManager(planned=())), cluster_of(folder))


# The plan before any job


def plan_text(folder, manager, cluster) -> str:
    plan = open_oci(folder, manager).plan(cluster)
    return "\n".join([*plan.sentences(), *plan.details()])


LUSTRE = "storage: [{name: home, mount: /mnt/home, type: fss, home: true}, "
LUSTRE += "{name: fast, mount: /fast, type: lustre, size: 31200G}]\n"


def test_plan_lists_resources_and_names_costs_that_are_not_known(folder):
    text = plan_text(folder, FakeResourceManager(), cluster_of(folder, rest=f"{LUSTRE}login: {{count: 1}}\n"))
    for line in (
        "creates 1 controller (VM.Standard.E4.Flex)",
        "creates 1 login node (VM.Standard.E4.Flex)",
        "creates 1 cluster network (2 x BM.GPU.H100.8)",
        "creates 1 virtual cloud network (demo)",
        "creates 1 file system (file storage at /mnt/home)",
        "creates 1 file system (Lustre file system at /fast)",
        "650 x GiB of boot volumes: ",
        "31200 x GiB of Lustre at /fast: price unknown",
        "1 x boot volume of the login node: price unknown",
        "file storage at /mnt/home (billed by its content): price unknown",
    ):
        assert line in text
    assert "without VM.Standard.E4.Flex" in text and "file storage at /mnt/home" in text


def test_existing_file_systems_and_networks_are_not_listed(folder):
    given = "storage: [{name: data, mount: /data, type: nfs, source: '10.0.0.5:/export'}]\n"
    own = "  vcn: ocid1.vcn.oc1..a\n  public_subnet: ocid1.subnet.oc1..a\n  private_subnet: ocid1.subnet.oc1..b\n"
    text = plan_text(folder, FakeResourceManager(), cluster_of(folder, settings=own, rest=given))
    assert "file system" not in text and "virtual cloud network" not in text and "file storage" not in text


def test_change_shows_the_difference_of_the_price_and_a_shorter_time(folder):
    manager = FakeResourceManager()
    up(open_oci(folder, manager), cluster_of(folder))
    text = plan_text(folder, manager, grown(folder))
    assert "node_count: 2 → 3; changes in place" in text
    assert "(+" in text and "USD per hour)" in text
    assert "takes about 10 to 40 minutes" in text
    many = cluster_of(folder, GPUS.replace("nodes: 2", "nodes: 64"))
    assert open_oci(folder, manager).plan(many).time.most > 40, "more nodes take longer"


def test_fewer_nodes_and_removed_file_storage_are_data_loss(folder):
    manager = FakeResourceManager()
    up(open_oci(folder, manager), cluster_of(folder, rest=FULL))
    text = plan_text(folder, manager, cluster_of(folder, GPUS.replace("nodes: 2", "nodes: 1")))
    assert "node_count: 2 → 1; deletes data: OCI chooses the nodes that leave; their jobs end" in text
    assert "file storage at /mnt/home: created by the stack → none; deletes data: all its files are deleted" in text


# The command


def test_script_must_say_yes_before_terraform_destroys_something(folder, capsys):
    manager = FakeResourceManager()
    target = open_oci(folder, manager)
    up(target, cluster_of(folder))
    manager.planned = DESTROYS
    let_ask(target, "demo", yes=False)
    with pytest.raises(UsageError, match="would destroy parts of demo") as caught:
        up(target, cluster_of(folder, settings="  boot_volume: 500G\n"))
    assert "--yes" in caught.value.hint
    assert "2 to destroy" in capsys.readouterr().err
    let_ask(target, "demo", yes=True)
    up(target, cluster_of(folder, settings="  boot_volume: 500G\n"))
    assert manager.started[-1][0] is StackOperation.APPLY

"""Data repository associations: their events, and what happens if FSx cannot create or use them."""

from __future__ import annotations

import pytest

from dalsegno.errors import TargetError
from dalsegno.targets.parallelcluster.data_repositories import RepositoryLifecycle, parse_association
from tests.targets.parallelcluster.files import WALKTHROUGH, cluster_of
from tests.targets.parallelcluster.stage import Stage

TEXT = WALKTHROUGH.replace("ml-cluster", "demo").replace("  key: my-keypair\n  allowed_ips: 203.0.113.0/24\n", "")
S3 = "s3://cluster-data-bucket"


def test_files_are_imported_and_exported_on_every_event_unless_the_file_says_otherwise(stage: Stage):
    stage.up(TEXT)
    (found,) = stage.account.associations
    every = ["NEW", "CHANGED", "DELETED"]
    assert found["S3"] == {"AutoImportPolicy": {"Events": every}, "AutoExportPolicy": {"Events": every}}
    assert (found["FileSystemPath"], found["DataRepositoryPath"]) == ("/data", S3)
    assert found["BatchImportMetaDataOnCreate"] is True


def test_changed_events_change_the_association(stage: Stage):
    stage.up(TEXT)
    changed = TEXT.replace("s3: s3://cluster-data-bucket", f"s3: {S3}, import_events: [NEW], export_events: []")
    assert stage.target().plan(cluster_of(changed)).missing_repositories == (S3,)
    stage.up(changed)
    (found,) = stage.account.associations
    assert found["S3"] == {"AutoImportPolicy": {"Events": ["NEW"]}, "AutoExportPolicy": {"Events": []}}
    assert found["Lifecycle"] == "AVAILABLE" and stage.target().plan(cluster_of(changed)).empty


def test_failed_association_is_reported_with_its_cause_and_created_again_by_the_next_up(stage: Stage):
    stage.account.association_ends = [("FAILED", "The bucket is in another region.")]
    with pytest.raises(TargetError, match=f"{S3} is FAILED: The bucket is in another region") as raised:
        stage.up(TEXT)
    assert "dalsegno up" in raised.value.hint
    stage.up(TEXT)
    (found,) = stage.account.associations
    assert found["Lifecycle"] == "AVAILABLE" and found["AssociationId"].endswith("2")
    assert stage.account.calls.count("delete_data_repository_association") == 1


def test_misconfigured_association_is_reported_and_tried_again_by_the_next_up(stage: Stage):
    stage.account.association_ends = [("MISCONFIGURED", "Access denied."), ("MISCONFIGURED", "Access denied.")]
    for _ in range(2):
        with pytest.raises(TargetError, match="is MISCONFIGURED: Access denied"):
            stage.up(TEXT)
    stage.up(TEXT)
    assert stage.account.repositories == {S3: "AVAILABLE"}
    assert stage.account.calls.count("create_data_repository_association") == 1


def test_association_that_breaks_later_is_repaired_by_up(stage: Stage):
    stage.up(TEXT)
    assert stage.target().plan(cluster_of(TEXT)).empty
    stage.account.associations[0]["Lifecycle"] = "MISCONFIGURED"
    plan = stage.target().plan(cluster_of(TEXT))
    assert not plan.empty and "data repository association" in " ".join(plan.sentences())
    stage.up(TEXT)
    assert stage.account.repositories == {S3: "AVAILABLE"}


def test_request_that_fsx_would_refuse_fails_in_the_tests(stage: Stage):
    """The account in memory must not accept what AWS refuses."""
    with pytest.raises(TargetError, match="cannot be `CREATED`"):
        stage.account.call(
            "fsx", "create_data_repository_association", FileSystemId="fs-0123456789abcdef0",
            S3={"AutoImportPolicy": {"Events": ["CREATED"]}},
        )  # fmt: skip


@pytest.mark.parametrize("answer", [{}, {"Lifecycle": "NEW_WORD", "S3": None}, {"FailureDetails": None}])
def test_answer_that_makes_no_sense_is_not_available(answer):
    assert parse_association(answer).lifecycle is RepositoryLifecycle.UNKNOWN

"""Associate folders of an FSx for Lustre file system with buckets, and wait until the associations work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.aws_facts import DataRepository
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.aws import AwsApi
from dalsegno.targets.cloud.progress import POLL_S


class RepositoryLifecycle(Enum):
    """The state of an association, which the API calls Lifecycle."""

    CREATING = "CREATING"
    AVAILABLE = "AVAILABLE"
    MISCONFIGURED = "MISCONFIGURED"  # FSx cannot use the bucket
    UPDATING = "UPDATING"
    DELETING = "DELETING"
    FAILED = "FAILED"  # this association can only be deleted
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> RepositoryLifecycle:
        return cls.UNKNOWN


_WORKS = (RepositoryLifecycle.AVAILABLE, RepositoryLifecycle.CREATING, RepositoryLifecycle.UPDATING)
_BROKEN = (RepositoryLifecycle.FAILED, RepositoryLifecycle.MISCONFIGURED, RepositoryLifecycle.DELETING)


@dataclass(frozen=True)
class RepositoryAssociation:
    """One association, as FSx describes it."""

    id: str
    lifecycle: RepositoryLifecycle
    message: str = ""
    import_events: frozenset[str] = frozenset()
    export_events: frozenset[str] = frozenset()

    def has_events(self, wanted: DataRepository) -> bool:
        return (self.import_events, self.export_events) == (
            frozenset(wanted.import_events),
            frozenset(wanted.export_events),
        )


def parse_association(answer: Mapping[str, Any]) -> RepositoryAssociation:
    s3 = answer.get("S3") or {}

    def events(policy: str) -> frozenset[str]:
        return frozenset((s3.get(policy) or {}).get("Events") or ())

    return RepositoryAssociation(
        str(answer.get("AssociationId", "")),
        RepositoryLifecycle(answer.get("Lifecycle")),
        str((answer.get("FailureDetails") or {}).get("Message", "")),
        events("AutoImportPolicy"),
        events("AutoExportPolicy"),
    )


class DataRepositories:
    """Reads and changes the data repository associations of file systems."""

    def __init__(self, api: AwsApi, pause: Callable[[float], None] = time.sleep) -> None:
        self._api, self._pause = api, pause

    def find(self, file_system: str, s3: str) -> RepositoryAssociation | None:
        """Return the association of a file system with an S3 address; None if there is none."""
        filters = [{"Name": "file-system-id", "Values": [file_system]}]
        answer = self._api.call("fsx", "describe_data_repository_associations", Filters=filters)
        found = {
            str(each.get("DataRepositoryPath", "")).rstrip("/"): parse_association(each)
            for each in answer.get("Associations", ())
        }
        return found.get(s3.rstrip("/"))

    def needs_work(self, file_system: str, wanted: DataRepository) -> bool:
        """Return whether the association must be created or repaired, or has events other than those wanted."""
        found = self.find(file_system, wanted.s3)
        return found is None or found.lifecycle not in _WORKS or not found.has_events(wanted)

    def put(self, file_system: str, wanted: DataRepository, say: Say) -> None:
        """Create or change an association, and wait until it is AVAILABLE.

        FSx cannot repair an association that could not be created, so such an association is deleted first. The files
        stay.
        """
        found = self.find(file_system, wanted.s3)
        if found is not None and found.lifecycle is RepositoryLifecycle.FAILED:
            say(f"deleting the data repository association of {wanted.s3}, whose creation failed")
            self._api.call(
                "fsx", "delete_data_repository_association", AssociationId=found.id, DeleteDataInFileSystem=False
            )
            self._wait_until_gone(file_system, wanted, say)
            found = None
        policies = {
            "AutoImportPolicy": {"Events": list(wanted.import_events)},
            "AutoExportPolicy": {"Events": list(wanted.export_events)},
        }
        if found is None:
            self._api.call(
                "fsx",
                "create_data_repository_association",
                FileSystemId=file_system,
                FileSystemPath=wanted.path,
                DataRepositoryPath=wanted.s3,
                BatchImportMetaDataOnCreate=True,
                S3={name: each for name, each in policies.items() if each["Events"]},
            )
        elif found.lifecycle is RepositoryLifecycle.MISCONFIGURED or not found.has_events(wanted):
            self._api.call("fsx", "update_data_repository_association", AssociationId=found.id, S3=policies)
        self._wait_until_available(file_system, wanted, say)

    def _wait_until_available(self, file_system: str, wanted: DataRepository, say: Say) -> None:
        while True:
            found = self.find(file_system, wanted.s3)
            if found is not None and found.lifecycle is RepositoryLifecycle.AVAILABLE:
                return
            if found is not None and found.lifecycle in _BROKEN:
                because = f": {found.message}" if found.message else ""
                raise TargetError(
                    f"the data repository {wanted.s3} is {found.lifecycle.value}{because}",
                    hint="check that the bucket exists in this region and that FSx may read and write it, then run "
                    "`dalsegno up` again",
                )
            say(f"data repository {wanted.s3}: {found.lifecycle.value if found else 'not there yet'}")
            self._pause(POLL_S)

    def _wait_until_gone(self, file_system: str, wanted: DataRepository, say: Say) -> None:
        while self.find(file_system, wanted.s3) is not None:
            say(f"data repository {wanted.s3}: waiting for its deletion")
            self._pause(POLL_S)

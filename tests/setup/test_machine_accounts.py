"""The accounts that `up` creates on a machine."""

from __future__ import annotations

from pathlib import Path

from dalsegno.setup.machine_accounts import MachineAccounts
from dalsegno.setup.machine_record import Record


def test_removal_names_the_accounts_that_were_created_for_the_cluster(tmp_path: Path):
    record = Record(str(tmp_path))
    accounts = MachineAccounts({"users": [], "groups": []}, record, str(tmp_path))
    assert accounts.kept() == []
    accounts.made = {
        "users": {"root": True, "daemon": True, "bin": True, "deleted-since": True, "sys": 1007},  # sys: in a directory
        "groups": {"daemon": True},
    }
    for name in ("root", "daemon", "deleted-since", "sys", "nobody"):  # bin: of another cluster; nobody: existed before
        record.part("cluster_users")[name] = {}
    record.part("cluster_groups")["daemon"] = {}
    assert accounts.kept() == ["users stay: daemon root", "groups stay: daemon"]

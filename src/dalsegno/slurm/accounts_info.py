"""What the accounting database holds: QOS, accounts, users. Values are in sacctmgr's own spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AccountsInfo:
    """As found. Nothing found is a database that was just made."""

    qos: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    accounts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    members: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)  # by (user, account)
    users: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

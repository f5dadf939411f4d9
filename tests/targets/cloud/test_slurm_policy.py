"""The policy of a cluster file on platforms that write slurm.conf themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Account, Cluster, Partition, User
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.cloud.slurm_policy import PartitionPolicy, add_people
from dalsegno.targets.folder import ClusterFolder


@dataclass
class PlatformSlurm:
    """A slurmctld whose slurm.conf belongs to a platform. It prints times in another form than it accepts."""

    conf: dict[str, str] = field(default_factory=lambda: {"MaxTime": "UNLIMITED", "Default": "NO", "AllowQos": "ALL"})
    refused: str = ""
    updates: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = dict(self.conf)

    def restart(self) -> None:
        self.values = dict(self.conf)

    def answer(self, argv: tuple[str, ...], stdin: str | None) -> Completed | str:
        if "show" in argv:
            text = " ".join(f"{key}={value}" for key, value in self.values.items())
            return f"PartitionName=train Nodes=n[1-2] {text}\n"
        if "reconfigure" in argv:
            self.restart()
            self.updates.append("reconfigure")
            return ""
        words = argv[argv.index("update") + 2 :]
        if self.refused and self.refused in " ".join(words):
            return Completed(argv, 1, stderr="Invalid qos")
        self.updates.append(" ".join(words))
        given = dict(word.split("=", 1) for word in words)
        minutes = given.get("MaxTime")
        self.values |= {**given, **({"MaxTime": f"0-{int(minutes) // 60:02}:00:00"} if minutes else {})}
        return ""


def policy_of(platform: PlatformSlurm, folder: Path) -> PartitionPolicy:
    return PartitionPolicy(SlurmClient(FakeRunner(platform.answer), {}), ClusterFolder(folder))


TRAIN = Partition("train", ("n1", "n2"), time_limit_min=120)


def test_settings_are_applied_once_and_again_when_slurmctld_has_read_its_file_again(tmp_path):
    platform = PlatformSlurm()
    policy = policy_of(platform, tmp_path)
    assert policy.turn([TRAIN]) == ["train"] and policy.turn([TRAIN]) == []
    assert platform.values["MaxTime"] == "0-02:00:00"
    platform.restart()
    assert policy.turn([TRAIN]) == ["train"], "the change of a person or of slurmctld is undone"
    assert platform.updates == ["MaxTime=120"] * 2


def test_setting_that_left_the_file_gets_the_value_of_slurm_conf_again_even_after_a_restart_of_the_service(tmp_path):
    platform = PlatformSlurm()
    policy_of(platform, tmp_path).turn([TRAIN])
    plain = Partition("train", ("n1", "n2"), default=True)
    assert policy_of(platform, tmp_path).turn([plain]) == ["train"]
    assert platform.updates == ["MaxTime=120", "reconfigure", "Default=YES"]
    assert platform.values["MaxTime"] == "UNLIMITED"
    policy_of(platform, tmp_path).turn([])
    assert platform.updates[-1] == "reconfigure", "the partition left the file"


def test_partition_that_slurm_does_not_know_yet_waits(tmp_path):
    platform = PlatformSlurm()
    assert policy_of(platform, tmp_path).turn([TRAIN, Partition("later", ("n3",), hidden=True)]) == ["train"]


def test_refused_setting_is_logged_once_and_tried_again(tmp_path, caplog):
    platform = PlatformSlurm(refused="AllowQos=night")
    policy = policy_of(platform, tmp_path)
    night = Partition("train", ("n1",), allow_qos=("night",))
    assert [policy.turn([night]) for _ in range(3)] == [[], [], []]
    assert len([line for line in caplog.messages if "Invalid qos" in line]) == 1
    platform.refused = ""
    assert policy.turn([night]) == ["train"] and platform.values["AllowQos"] == "night"


FOUND = {
    "config": "Configuration data as of now\nClusterName = stack-7\n",
    "qos": "normal|0||cluster|||||1.000000\n",
    "assoc": "root||||normal||\nroot|root|||||\n",
    "user": "root|root|Administrator\nboss|root|Administrator\n",
}


def test_people_are_added_under_the_name_of_the_platform_and_its_administrators_stay():
    sent: list[str] = []

    def answer(argv: tuple[str, ...], stdin: str | None) -> str:
        if stdin is not None:
            sent.extend(stdin.splitlines())
            return "".join(f"sacctmgr: {line}\n Adding\n" for line in stdin.splitlines())
        assert "assoc" not in argv or "cluster=stack-7" in argv
        return next(text for word, text in FOUND.items() if word in argv)

    people = (User("ann", ("ml",), "ml"), User("boss", ("ml",), "ml"))
    cluster = Cluster("demo", "oci", (), (), accounts=(Account("ml"),), users=people)
    add_people(SlurmClient(FakeRunner(answer), {}), cluster)
    assert any(line.startswith("add account ml") for line in sent)
    assert any(line.startswith("add user ann") for line in sent)
    assert not any("AdminLevel" in line for line in sent), "boss is an administrator that somebody else has made"


@pytest.mark.parametrize("text", ["", "{}"])
def test_missing_record_is_a_first_start(tmp_path, text):
    if text:
        (tmp_path / "partition-settings.json").write_text(text)
    platform = PlatformSlurm()
    policy_of(platform, tmp_path).turn([TRAIN])
    assert json.loads((tmp_path / "partition-settings.json").read_text()) == {"train": ["MaxTime"]}
    assert platform.updates == ["MaxTime=120"]

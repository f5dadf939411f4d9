"""Tests of the sacctmgr commands that bring the accounting database up to date."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.client import failures, script
from dalsegno.slurm.facts import AccountsInfo
from dalsegno.slurm.render import accounting_commands, reservation_commands
from dalsegno.slurm.render.commands import deletion_commands
from dalsegno.spec.aws_facts import PclusterSettings
from dalsegno.spec.facts import Account, Cluster, Node, Qos, Reservation, Slurm, User
from tests.slurm.clusters import CLUSTERS

EMPTY = Cluster("c", "local", (), ())


def commands_for(*, qos: tuple[Qos, ...] = (), found: AccountsInfo | None = None, **facts: object) -> list[str]:
    cluster = replace(EMPTY, slurm=Slurm(qos=qos), **facts)  # type: ignore[arg-type]
    return [" ".join(command) for command in accounting_commands(cluster, found)]


def test_new_database_gets_all_commands_in_a_valid_order() -> None:
    cluster, _ = CLUSTERS["everything"]
    assert [" ".join(command) for command in accounting_commands(cluster)] == [
        "add qos low,high",
        "modify qos where name=high set Priority=1000 Preempt=low PreemptMode=requeue MaxWall=1440"
        " MaxTRESPerUser=gres/gpu=16 MaxJobsPerUser=4 GrpTRES=gres/gpu=32 UsageFactor=2",
        "modify account where name=root set QOS=high,low,normal",
        "add account research parent=root Description=all of research Fairshare=1",
        "add account speech parent=research Fairshare=3 QOS=low GrpTRES=gres/gpu=8",
        "add account vision parent=research Fairshare=1",
        "add user ann Account=vision,speech DefaultAccount=vision Fairshare=2 QOS=high,low DefaultQOS=low",
        "add user bob,cem Account=vision DefaultAccount=vision Fairshare=1",
        "add user dee Account=research DefaultAccount=research AdminLevel=Administrator Fairshare=1",
    ]


def test_cluster_without_users_needs_no_commands() -> None:
    assert commands_for() == []


HIGH = {"Name": "high", "Priority": "10", "PreemptMode": "cluster", "MaxWall": "1-00:00:00", "UsageFactor": "1.000000"}


def test_up_to_date_database_needs_no_commands() -> None:
    found = AccountsInfo(
        qos={"high": {**HIGH, "Preempt": "b,a", "MaxTRESPerUser": "gres/gpu=8,cpu=4"}},
        accounts={"root": {"QOS": "normal,high"}, "lab": {"ParentName": "root", "Fairshare": "1"}},
        members={("ann", "lab"): {"Fairshare": "1"}},
        users={"ann": {"DefaultAccount": "lab", "AdminLevel": "None"}},
    )
    high = Qos("high", 10, ("a", "b"), max_time_min=1440, max_tres_per_user={"cpu": 4, "gres/gpu": 8})
    assert (
        commands_for(qos=(high,), accounts=(Account("lab"),), users=(User("ann", ("lab",), "lab"),), found=found) == []
    )


def test_limit_removed_from_the_file_is_removed_from_the_database() -> None:
    limited = {**HIGH, "MaxTRESPerUser": "cpu=4,gres/gpu=8", "MaxJobsPerUser": "3", "Preempt": "low"}
    found = AccountsInfo(qos={"high": limited}, accounts={"root": {"QOS": "high,normal"}})
    wanted = Qos("high", 10, max_tres_per_user={"cpu": 2})
    assert commands_for(qos=(wanted,), found=found) == [
        "modify qos where name=high set Preempt= MaxWall=-1 MaxTRESPerUser=cpu=2,gres/gpu=-1 MaxJobsPerUser=-1"
    ]


def test_account_can_move_to_another_parent() -> None:
    found = AccountsInfo(accounts={"lab": {"ParentName": "old", "Fairshare": "1"}})
    assert commands_for(accounts=(Account("lab", "new", 2),), found=found) == [
        "modify account where name=lab set parent=new Fairshare=2"
    ]


def test_user_can_join_a_second_account() -> None:
    found = AccountsInfo(
        members={("ann", "a"): {"Fairshare": "1"}}, users={"ann": {"DefaultAccount": "a", "AdminLevel": "None"}}
    )
    assert commands_for(users=(User("ann", ("a", "b"), "b"),), found=found) == [
        "add user ann Account=b Fairshare=1",
        "modify user where name=ann set DefaultAccount=b",
    ]


def test_limit_on_gpus_of_a_user_is_set_changed_and_lifted() -> None:
    user = User("ann", ("lab",), "lab", max_gpus=0)
    assert commands_for(users=(user,)) == ["add user ann Account=lab DefaultAccount=lab Fairshare=1 GrpTRES=gres/gpu=0"]
    found = AccountsInfo(
        members={("ann", "lab"): {"Fairshare": "1", "GrpTRES": "gres/gpu=0"}},
        users={"ann": {"DefaultAccount": "lab", "AdminLevel": "None"}},
    )
    assert commands_for(users=(user,), found=found) == []
    modify = "modify user where name=ann account=lab set GrpTRES=gres/gpu="
    assert commands_for(users=(replace(user, max_gpus=8),), found=found) == [f"{modify}8"]
    assert commands_for(users=(replace(user, max_gpus=None),), found=found) == [f"{modify}-1"]


def test_limit_on_gpus_of_a_user_covers_trainium_devices() -> None:
    user = User("ann", ("lab",), "lab", max_gpus=8)
    chips = (Node("t", cpus=8, memory_mib=1000, gpus=16, gres="neuron"),)
    (added,) = commands_for(users=(user,), nodes=chips)
    assert added.endswith(" GrpTRES=gres/gpu=8,gres/neuron=8")
    (without,) = commands_for(
        users=(user,),
        nodes=chips,
        parallelcluster=PclusterSettings("us-east-1", "3.16.1", "ubuntu2404", "m5.xlarge", ()),
    )
    assert without.endswith(" GrpTRES=gres/gpu=8"), "ParallelCluster's slurm.conf does not declare them"


def test_only_associations_that_a_command_ended_are_deleted() -> None:
    found = AccountsInfo(
        members={("ann", "lab"): {}, ("ann", "old"): {}, ("bob", "old"): {}, ("eve", "old"): {}},
        users={"ann": {}, "bob": {}, "eve": {}},
    )
    users = (User("ann", ("lab",), "lab", added=True), User("bob", ("lab",), "lab"))
    cluster = replace(EMPTY, users=users)
    assert [" ".join(command) for command in deletion_commands(cluster, ["eve", "unknown"], found)] == [
        "delete user where name=eve",
        "delete user where name=ann account=old",
    ]


def test_account_cycle_does_not_hang() -> None:
    assert len(commands_for(accounts=(Account("a", "b"), Account("b", "a")))) == 2


def test_reservations_become_scontrol_commands() -> None:
    cluster, _ = CLUSTERS["everything"]
    assert [" ".join(command) for command in reservation_commands(cluster)] == [
        "create reservation ReservationName=upgrade StartTime=2030-01-01T00:00:00 Duration=120"
        " Nodes=train-[1-2] Users=root Flags=MAINT",
        "create reservation ReservationName=class StartTime=now Duration=UNLIMITED NodeCnt=2 PartitionName=cpu"
        " Users=ann Accounts=vision",
    ]


def test_reservation_without_users_belongs_to_root() -> None:
    cluster = replace(EMPTY, reservations=(Reservation("r", ("n1",)),))
    assert "Users=root" in reservation_commands(cluster)[0]


def test_sacctmgr_prompt_gets_quotes_where_needed() -> None:
    assert script([["add", "account", "a", "Description=x y"]]) == 'add account a Description="x y"\n'
    with pytest.raises(DalsegnoError, match="cannot read"):
        script([["add", "account", "a", 'Description=say "hi"']])


def test_unanswered_sacctmgr_command_counts_as_failed() -> None:
    assert failures([["add", "qos", "x"]], "", "sacctmgr: error: Connection refused\n") == [
        "not done: sacctmgr add qos x",
        "sacctmgr: error: Connection refused",
    ]

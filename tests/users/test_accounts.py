"""The difference between accounts that are wanted and those that are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.errors import TargetError
from dalsegno.users.accounts import AccountPlan, AccountSet, GroupEdit, PosixGroup, PosixUser, UserEdit, plan_accounts

BEA = PosixUser("bea", 20001, 20001, "Bea Lind", "/home/bea", ("ssh-ed25519 AAAA bea",))
CEM = PosixUser("cem", 20002, 20002, "", "/home/cem")
LAB = PosixGroup("lab", 5000, ("bea",))


def own_group(user: PosixUser) -> PosixGroup:
    return PosixGroup(user.name, user.gid)


def accounts(*users: PosixUser, groups: tuple[PosixGroup, ...] = ()) -> AccountSet:
    return AccountSet.of(users, (*map(own_group, users), *groups))


def test_missing_accounts_are_added():
    plan = plan_accounts(accounts(BEA, groups=(LAB,)), AccountSet())
    assert plan == AccountPlan(add_groups=(own_group(BEA), LAB), add_users=(BEA,))
    assert plan.sentences() == ["adds user bea (uid 20001)", "adds group lab (gid 5000)"]


def test_accounts_that_are_as_wanted_need_no_change():
    wanted = accounts(BEA, CEM, groups=(LAB,))
    shuffled = replace(LAB, members=tuple(reversed(LAB.members)))
    assert plan_accounts(wanted, accounts(CEM, BEA, groups=(shuffled,)), wanted).empty
    assert plan_accounts(wanted, wanted).sentences() == []


def test_changed_name_and_key_are_edited():
    after = replace(BEA, full_name="Bea Lind-Ek", ssh_keys=("ssh-ed25519 BBBB new",))
    plan = plan_accounts(accounts(after), accounts(BEA), accounts(BEA))
    assert plan == AccountPlan(edit_users=(UserEdit(BEA, after),))
    assert plan.sentences() == ["changes user bea (full name, SSH keys)"]


def test_only_accounts_that_were_ours_are_removed():
    foreign = PosixUser("eve", 30001, 30001)
    plan = plan_accounts(accounts(CEM), accounts(BEA, CEM, foreign), accounts(BEA, CEM))
    assert plan == AccountPlan(remove_users=(BEA,), remove_groups=(own_group(BEA),))
    assert plan.sentences() == ["removes user bea; home folders are kept"]


def test_keys_and_members_that_others_added_are_kept():
    own_key = "ssh-ed25519 CCCC mine"
    found = accounts(replace(BEA, ssh_keys=(*BEA.ssh_keys, own_key)), groups=(replace(LAB, members=("bea", "guest")),))
    former = accounts(BEA, groups=(LAB,))
    assert plan_accounts(former, found, former).empty
    fewer = accounts(replace(BEA, ssh_keys=()), groups=(replace(LAB, members=()),))
    plan = plan_accounts(fewer, found, former)
    assert [edit.after.ssh_keys for edit in plan.edit_users] == [(own_key,)]
    assert plan.edit_groups == (GroupEdit(found.groups["lab"], PosixGroup("lab", 5000, ("guest",))),)
    assert plan.sentences() == ["changes user bea (SSH keys)", "changes groups: bea leaves lab"]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (replace(BEA, uid=20009, gid=20009), "user `bea` is in the directory already, with uid 20001 and gid 20001"),
        (PosixUser("zoe", 20001, 20001), "uid 20001 of user `zoe` belongs to bea in the directory"),
    ],
)
def test_account_of_somebody_else_is_never_taken(wanted: PosixUser, says: str):
    with pytest.raises(TargetError) as refused:
        plan_accounts(accounts(wanted), accounts(BEA))
    assert refused.value.what == says and refused.value.hint


def test_gid_of_another_group_is_never_taken():
    with pytest.raises(TargetError, match="gid 5000 of group `new` belongs to lab in the directory"):
        plan_accounts(accounts(groups=(PosixGroup("new", 5000),)), accounts(groups=(LAB,)))
    with pytest.raises(TargetError, match="group `lab` is in the directory already, with gid 5000"):
        plan_accounts(accounts(groups=(PosixGroup("lab", 5001),)), accounts(groups=(LAB,)))


def test_many_changes_are_summed_up():
    users = [PosixUser(f"u{number}", 20000 + number, 20000 + number) for number in range(10)]
    (line,) = plan_accounts(accounts(*users), AccountSet()).sentences()
    assert line == "adds users u0 (uid 20000), u1 (uid 20001), u2 (uid 20002), u3 (uid 20003) and 6 more"

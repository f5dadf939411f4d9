"""Users and groups that commands add to those of the cluster file."""

from __future__ import annotations

import pytest

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.spec.facts import Account, Cluster, Group, Qos, Slurm, User
from dalsegno.users.roster import (
    Roster,
    add_group,
    add_user,
    edit_group,
    edit_user,
    from_file,
    group_name,
    remove_group,
    remove_user,
    roster_of,
    with_roster,
)

ADA = User("ada", ("lab",), "lab")
BEA = User("bea", ("lab",), "lab", groups=("team",), added=True)
TEAM = Group("team", 5000, added=True)
CLUSTER = Cluster(
    "one", "local", (), (), slurm=Slurm(enforce=("limits",), qos=(Qos("high"),)), accounts=(Account("lab"),),
    users=(ADA,),
)  # fmt: skip
ROSTER = Roster((ADA, BEA), (TEAM,))


def test_added_users_stay_when_the_cluster_file_is_applied_again():
    merged = with_roster(CLUSTER, ROSTER)
    assert (merged.users, merged.groups) == ((ADA, BEA), (TEAM,))
    assert with_roster(merged, roster_of(merged)) == merged
    assert from_file(merged) == CLUSTER


def test_user_of_the_file_replaces_an_added_user_of_that_name():
    added = Roster((User("ada", ("users",), "users", added=True),))
    assert with_roster(CLUSTER, added).users == (ADA,)


def test_user_without_an_account_gets_the_default_account():
    merged = with_roster(CLUSTER, Roster((User("zoe", ("users",), "users", added=True),)))
    assert [account.name for account in merged.accounts] == ["lab", "users"]
    assert from_file(merged) == CLUSTER


def test_user_is_added_changed_and_removed():
    more = add_user(ROSTER, User("cem", ("lab",), "lab", max_gpus=4, qos=("high",)), CLUSTER)
    assert more.user("cem").added and more.user("cem").max_gpus == 4
    edited = edit_user(more, User("cem", ("lab",), "lab", full_name="Cem"), CLUSTER)
    assert edited.user("cem") == User("cem", ("lab",), "lab", full_name="Cem", added=True)
    assert remove_user(edited, "cem") == ROSTER


@pytest.mark.parametrize(
    ("user", "says"),
    [
        (User("bea", ("lab",), "lab"), "there is a user `bea` already"),
        (User("team", ("lab",), "lab"), "`team` is a group of the cluster"),
        (User("cem", ("lap",), "lap"), "there is no account `lap`"),
        (User("cem", ("lab",), "lab", qos=("hgh",)), "there is no QOS `hgh`"),
    ],
)
def test_user_that_cannot_be_added_is_refused(user: User, says: str):
    with pytest.raises(UsageError) as refused:
        add_user(ROSTER, user, CLUSTER)
    assert refused.value.what == says and refused.value.hint


def test_limit_that_slurm_would_ignore_is_refused():
    lax = Cluster("one", "local", (), (), accounts=(Account("lab"),))
    with pytest.raises(UsageError, match="Slurm does not enforce limits"):
        add_user(ROSTER, User("cem", ("lab",), "lab", max_gpus=1), lax)
    without = Cluster("one", "local", (), (), slurm=Slurm(accounting=False))
    with pytest.raises(UsageError, match="has no accounting"):
        add_user(Roster(), User("cem", ("lab",), "lab"), without)
    assert add_user(Roster(), User("cem", (), ""), without).user("cem").added


@pytest.mark.parametrize("change", [lambda: remove_user(ROSTER, "ada"), lambda: edit_user(ROSTER, ADA, CLUSTER)])
def test_user_of_the_cluster_file_is_changed_only_there(change):
    with pytest.raises(UsageError, match="user `ada` is in the cluster file") as refused:
        change()
    assert "change it in the cluster file" in refused.value.hint


def test_unknown_user_is_reported_with_the_nearest_name():
    with pytest.raises(NotThere) as refused:
        remove_user(ROSTER, "beaa")
    assert (refused.value.what, refused.value.hint) == ("there is no user `beaa`", "did you mean `bea`?")


def test_group_is_added_changed_and_removed():
    roster = add_group(ROSTER, Group("new"))
    roster = edit_group(roster, "new", ["bea"], [])
    assert roster.user("bea").groups == ("team", "new") and roster.members("new") == ["bea"]
    with pytest.raises(UsageError, match="group `new` has members: bea"):
        remove_group(roster, "new")
    assert remove_group(edit_group(roster, "new", [], ["bea"]), "new") == ROSTER


def test_privileged_group_is_joined_only_by_its_name():
    roster = add_group(ROSTER, Group("privilege"))
    assert edit_group(roster, "privilege", ["bea"], []).user("bea").allow_privileged == ()
    allowed = edit_group(roster, "privilege", ["bea"], [], allow=True)
    assert allowed.user("bea").allow_privileged == ("privilege",)
    assert edit_group(allowed, "privilege", [], ["bea"]) == roster


@pytest.mark.parametrize(
    "change",
    [
        lambda: add_group(ROSTER, Group("team")),
        lambda: add_group(ROSTER, Group("bea")),
        lambda: edit_group(ROSTER, "team", ["ada"], []),
        lambda: edit_group(ROSTER, "none", ["bea"], []),
        lambda: remove_group(Roster(groups=(Group("file"),)), "file"),
    ],
)
def test_group_that_cannot_be_changed_is_refused(change):
    with pytest.raises(DalsegnoError) as refused:
        change()
    assert refused.value.hint


def test_gid_of_oci_means_its_group():
    assert [group_name(word) for word in ("9876", "lab")] == ["privilege", "lab"]

"""Tests of cluster users that exist next to the machine's own users."""

from dataclasses import replace

import pytest

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Group, User
from dalsegno.targets.local.people import cluster_accounts, group_file, passwd_file, shared_accounts
from dalsegno.users.checks import People, assign_gids, assign_uids, check_added, check_new_groups, check_people

MACHINE = People(
    passwd="root:x:0:0:root:/root:/bin/bash\nada:x:1000:1000::/home/ada:/bin/bash\n",
    group="root:x:0:\nada:x:1000:\nvideo:x:44:ada\n",
)


def user(name: str, uid: int | None = None, *groups: str, allow: tuple[str, ...] = (), full_name: str = "") -> User:
    return User(
        name, ("lab",), default_account="lab", uid=uid, groups=groups, allow_privileged=allow, full_name=full_name
    )


def files(users: list[User], groups: tuple[Group, ...] = (), machine: People = MACHINE) -> tuple[str, str]:
    """Return the passwd and group files of hosts."""
    uids = assign_uids(users, machine, {})
    gids = assign_gids(users, groups, machine, uids, {})
    cluster = Cluster("one", "local", (), (), users=tuple(users), groups=groups)
    accounts = cluster_accounts(cluster, machine, uids, gids, "/c/home")
    return passwd_file(machine, accounts), group_file(machine, users, accounts)


def test_a_new_user_gets_a_uid_and_a_home_of_the_cluster():
    passwd, _ = files([user("bea", full_name="Bea Ödegård")])
    assert passwd == MACHINE.passwd + "bea:x:20001:20001:Bea Ödegård:/c/home/bea:/bin/bash\n"


def test_machine_user_keeps_uid_and_home():
    check_people([user("ada")], MACHINE, {})
    assert assign_uids([user("ada")], MACHINE, {}) == {}
    assert files([user("ada")])[0] == MACHINE.passwd
    assert shared_accounts([user("ada"), user("bea")], MACHINE) == [
        "user ada is this machine's account of that name (uid 1000)"
    ]
    assert shared_accounts([user("ada", full_name="Ada")], MACHINE)[0].endswith(
        "full name and SSH keys are not changed"
    )


def test_requested_uid_is_assigned_once():
    assert assign_uids([user("bea", uid=20001), user("cem")], MACHINE, {}) == {"bea": 20001, "cem": 20002}


def test_assigned_uid_is_kept_and_never_reused():
    first = assign_uids([user("bea"), user("cem")], MACHINE, {})
    assert assign_uids([user("zoe"), user("cem")], MACHINE, first) == {"bea": 20001, "cem": 20002, "zoe": 20003}


def test_group_ids_of_the_machine_are_not_used():
    machine = People(MACHINE.passwd, "big:x:20001:\n")
    assert assign_uids([user("bea")], machine, {}) == {"bea": 20002}


def test_groups_get_ids_and_members():
    _, text = files([user("bea", None, "video", "research"), user("ada", None, "video")], (Group("lab", 5000),))
    assert text.splitlines() == [
        "root:x:0:",
        "ada:x:1000:",
        "video:x:44:ada,bea",
        "bea:x:20001:",
        "lab:x:5000:",
        "research:x:1020001:bea",
    ]


def test_group_keeps_its_gid_when_another_group_goes():
    before = assign_gids([user("bea", None, "one", "two")], (), MACHINE, {"bea": 20001}, {})
    after = assign_gids([user("bea", None, "two", "three")], (), MACHINE, {"bea": 20001}, before)
    assert after == {"one": 1020001, "two": 1020002, "three": 1020003}


def test_group_privilege_has_the_gid_that_it_has_on_oci():
    assert assign_gids([user("bea", None, "privilege")], (), MACHINE, {}, {}) == {"privilege": 9876}


@pytest.mark.parametrize(
    ("group", "before", "says"),
    [
        (Group("video", 4000), {}, "group `video` has gid 44 on this machine, not 4000"),
        (Group("ada2", 1000), {}, "gid 1000 of group `ada2` is in use on this machine"),
        (Group("lab", 5000), {"old": 5000}, "gid 5000 of group `lab` belongs to old in the cluster"),
        (Group("lab", 20001), {}, "gid 20001 of group `lab` belongs to bea in the cluster"),
        (Group("lab", 5000), {"lab": 5001}, "the gid of group `lab` cannot change from 5001 to 5000"),
    ],
)
def test_group_with_the_id_of_another_group_is_refused(group: Group, before: dict[str, int], says: str):
    with pytest.raises(TargetError) as refused:
        check_new_groups([group], MACHINE, before, {"bea": 20001})
    assert refused.value.what.startswith(says) and refused.value.hint


def test_privileged_group_must_be_allowed_by_its_name():
    check_people([user("bea", None, "docker", allow=("docker",))], ADMIN, {})
    with pytest.raises(TargetError, match="group `sudo` would give user `bea` rights over this machine"):
        check_people([user("bea", None, "docker", "sudo", allow=("docker",))], ADMIN, {})
    with pytest.raises(TargetError, match="group `privilege`"):
        check_people([user("bea", None, "privilege")], ADMIN, {})
    with pytest.raises(TargetError, match="group `pilots`"):  # the group is recognized by its gid
        check_people([user("bea", None, "pilots")], ADMIN, {}, [Group("pilots", 9876)])


def test_uid_of_another_user_is_never_given_again_even_after_removal():
    with pytest.raises(TargetError, match="uid 20001 of user `cem` belongs to bea, who is or was a user"):
        check_people([user("cem", 20001)], MACHINE, {"bea": 20001})


def test_uid_of_an_existing_user_cannot_change():
    with pytest.raises(TargetError, match="the uid of user `bea` cannot change from 20001 to 20009"):
        check_people([user("bea", 20009)], MACHINE, {"bea": 20001})


ADMIN = People(
    MACHINE.passwd + "eve:x:1001:1001::/home/eve:/bin/bash\ndaemon:x:1:1::/:/bin/false\nzoe:x:1002:0::/:/bin/sh\n"
    "nobody:x:65534:65534::/:/bin/false\n",
    MACHINE.group + "sudo:x:27:eve\neve:x:1001:\ndaemon:x:1:\ndocker:x:900:\nstaff:x:50:\n",
)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (user("root"), "`root` is a system account of this machine (uid 0)"),
        (user("daemon"), "`daemon` is a system account of this machine (uid 1)"),
        (user("nobody"), "`nobody` is a system account of this machine (uid 65534)"),
        (user("eve"), "`eve` is an account of this machine with the rights of sudo"),
        (user("zoe"), "`zoe` is an account of this machine with the rights of root"),
        (user("ada", 1005), "`ada` has uid 1000 on this machine, not 1005"),
        (user("bea", 1000), "uid 1000 of user `bea` belongs to ada on this machine"),
        (user("staff"), "`staff` is a group of this machine"),
        (user("bea", None, "docker"), "group `docker` would give user `bea` rights over this machine"),
        (user("ada", None, "root"), "group `root` would give user `ada` rights over this machine"),
    ],
)
def test_user_with_rights_of_another_account_is_refused(wanted: User, says: str):
    with pytest.raises(TargetError) as refused:
        check_people([wanted], ADMIN, {})
    assert refused.value.what == says and refused.value.hint


def test_privileged_account_needs_its_uid_in_the_file():
    check_people([user("eve", 1001)], ADMIN, {})
    check_people([user("bea", None, "video", "research")], ADMIN, {})


def test_later_machine_account_does_not_replace_a_cluster_user():
    later = People(MACHINE.passwd + "bob:x:20001:20001::/:/bin/sh\n", MACHINE.group)
    with pytest.raises(TargetError, match="uid 20001 of user `bea` belongs to bob on this machine"):
        check_people([user("bea")], later, {"bea": 20001})
    with pytest.raises(TargetError, match="`bob` is a user of the cluster with uid 20005, and an account"):
        check_people([user("bob")], later, {"bob": 20005})


def test_command_names_the_uid_of_an_account_that_it_takes_over():
    with pytest.raises(TargetError, match=r"`ada` is an account of this machine \(uid 1000\)") as refused:
        check_added([replace(user("ada"), added=True)], MACHINE)
    assert "give the uid 1000" in refused.value.hint
    check_added([replace(user("ada", 1000), added=True), user("ada"), replace(user("bea"), added=True)], MACHINE)
    check_added([replace(user("root"), added=True)], MACHINE)  # `check_people` refuses this user, and names the reason


def test_two_users_do_not_share_a_uid():
    with pytest.raises(TargetError, match="`bea` and `cem` have the same uid"):
        check_people([user("bea", 20001), user("cem", 20001)], MACHINE, {})

"""Users of the cluster beside those of the machine."""

import pytest

from dalsegno.errors import TargetError
from dalsegno.spec.facts import User
from dalsegno.targets.local.people import People, assign_uids, check_people, group_file, passwd_file, shared_accounts

MACHINE = People(
    passwd="root:x:0:0:root:/root:/bin/bash\nada:x:1000:1000::/home/ada:/bin/bash\n",
    group="root:x:0:\nada:x:1000:\nvideo:x:44:ada\n",
)


def user(name: str, uid: int | None = None, *groups: str) -> User:
    return User(name, accounts=("lab",), default_account="lab", uid=uid, groups=groups)


def test_a_new_user_gets_a_uid_and_a_home_of_the_cluster():
    uids = assign_uids([user("bea")], MACHINE, {})
    assert passwd_file(MACHINE, [user("bea")], uids, "/c/home") == (
        MACHINE.passwd + "bea:x:20001:20001::/c/home/bea:/bin/bash\n"
    )


def test_machine_user_keeps_uid_and_home():
    check_people([user("ada")], MACHINE, {})
    assert assign_uids([user("ada")], MACHINE, {}) == {}
    assert passwd_file(MACHINE, [user("ada")], {}, "/c/home") == MACHINE.passwd
    assert shared_accounts([user("ada"), user("bea")], MACHINE) == [
        "user ada is this machine's account of that name (uid 1000)"
    ]


def test_requested_uid_is_assigned_once():
    assert assign_uids([user("bea", uid=20001), user("cem")], MACHINE, {}) == {"bea": 20001, "cem": 20002}


def test_assigned_uid_is_kept_and_never_reused():
    first = assign_uids([user("bea"), user("cem")], MACHINE, {})
    assert assign_uids([user("zoe"), user("cem")], MACHINE, first) == {"bea": 20001, "cem": 20002, "zoe": 20003}


def test_group_ids_of_the_machine_are_not_used():
    machine = People(MACHINE.passwd, "big:x:20001:\n")
    assert assign_uids([user("bea")], machine, {}) == {"bea": 20002}


def test_groups_get_ids_and_members():
    text = group_file(MACHINE, [user("bea", None, "video", "research")], {"bea": 20001})
    assert text.splitlines() == [
        "root:x:0:",
        "ada:x:1000:",
        "video:x:44:ada,bea",
        "bea:x:20001:",
        "research:x:1020001:bea",
    ]


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
        (user("ada", 1005), "`ada` has uid 1005 in the cluster file and uid 1000 on this machine"),
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


def test_two_users_do_not_share_a_uid():
    with pytest.raises(TargetError, match="`bea` and `cem` have the same uid"):
        check_people([user("bea", 20001), user("cem", 20001)], MACHINE, {})

"""Users of the cluster beside those of the machine."""

from dalsegno.spec.facts import User
from dalsegno.targets.local.people import People, assign_uids, group_file, passwd_file

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


def test_a_user_of_the_machine_stays_as_he_is():
    assert assign_uids([user("ada", uid=5)], MACHINE, {}) == {}
    assert passwd_file(MACHINE, [user("ada", uid=5)], {}, "/c/home") == MACHINE.passwd


def test_a_uid_that_was_asked_for_is_given_and_not_given_twice():
    assert assign_uids([user("bea", uid=20001), user("cem")], MACHINE, {}) == {"bea": 20001, "cem": 20002}


def test_who_has_a_uid_keeps_it_and_no_one_else_ever_gets_it():
    first = assign_uids([user("bea"), user("cem")], MACHINE, {})
    assert assign_uids([user("zoe"), user("cem")], MACHINE, first) == {"bea": 20001, "cem": 20002, "zoe": 20003}


def test_ids_of_the_machines_groups_are_taken_too():
    machine = People(MACHINE.passwd, "big:x:20001:\n")
    assert assign_uids([user("bea")], machine, {}) == {"bea": 20002}


def test_groups_follow_the_users_and_take_members():
    text = group_file(MACHINE, [user("bea", None, "video", "research")], {"bea": 20001})
    assert text.splitlines() == [
        "root:x:0:",
        "ada:x:1000:",
        "video:x:44:ada,bea",
        "bea:x:20001:",
        "research:x:1020001:bea",
    ]

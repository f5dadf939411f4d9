"""Users of the cluster beside those of the machine."""

from dalsegno.spec.facts import User
from dalsegno.targets.local.people import group_file, passwd_file

PASSWD = "root:x:0:0:root:/root:/bin/bash\nada:x:1000:1000::/home/ada:/bin/bash\n"
GROUP = "root:x:0:\nada:x:1000:\n"


def user(name: str, uid: int | None = None) -> User:
    return User(name, accounts=("lab",), default_account="lab", uid=uid)


def test_a_new_user_gets_a_uid_and_a_home_of_the_cluster():
    assert passwd_file(PASSWD, [user("bea")], "/c/home") == PASSWD + "bea:x:20001:20001::/c/home/bea:/bin/bash\n"


def test_a_user_of_the_machine_stays_as_he_is():
    assert passwd_file(PASSWD, [user("ada", uid=5)], "/c/home") == PASSWD


def test_a_uid_that_was_asked_for_is_given_and_not_given_twice():
    text = passwd_file(PASSWD, [user("bea", uid=20001), user("cem")], "/h")
    assert "bea:x:20001:" in text and "cem:x:20002:" in text


def test_groups_follow_the_users():
    assert group_file(PASSWD, GROUP, [user("bea")]) == GROUP + "bea:x:20001:\n"

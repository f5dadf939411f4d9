"""Accounts in a real slapd, over ldaps and over ldap with StartTLS."""

from __future__ import annotations

import re
import subprocess
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dalsegno.errors import TargetError
from dalsegno.system.machine import program
from dalsegno.users.accounts import AccountPlan, AccountSet, PosixGroup, PosixUser, UserEdit, plan_accounts
from dalsegno.users.ldap_directory import LdapDirectory, LdapError
from dalsegno.users.ldap_entries import user_dn
from tests.conftest import LONG
from tests.users.conftest import Slapd, make_ca, write_private

pytestmark = pytest.mark.cluster

BEA = PosixUser("bea", 20001, 20001, "Bea Lind", "/home/bea", ("ssh-ed25519 AAAA bea",))
CEM = PosixUser("cem", 20002, 20002, "", "/home/cem")
LAB = PosixGroup("lab", 5000, ("bea",))


@pytest.fixture(autouse=True)
def empty(slapd: Slapd) -> None:
    """Begin every test with an empty directory."""
    found = slapd.directory.read()
    slapd.directory.apply(plan_accounts(AccountSet(), found, found))


def update(slapd: Slapd, wanted: AccountSet, former: AccountSet | None = None) -> AccountPlan:
    plan = plan_accounts(wanted, slapd.directory.read(), former)
    slapd.directory.apply(plan)
    return plan


def accounts(*users: PosixUser, groups: tuple[PosixGroup, ...] = ()) -> AccountSet:
    return AccountSet.of(users, groups)


def ldap(slapd: Slapd, tool: str, *args: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program of ldap-utils over TLS."""
    argv = [str(program(tool)), "-x", "-H", f"ldaps://127.0.0.1:{slapd.ldaps}", *args]
    env = {"LDAPTLS_CACERT": str(slapd.folder / "tls/ca.pem"), "PATH": "/usr/bin:/bin", **env}
    return subprocess.run(argv, env=env, input=text, capture_output=True, text=True, timeout=30, check=False)


def test_accounts_are_added_changed_and_removed_and_a_second_run_changes_nothing(slapd: Slapd):
    wanted = accounts(BEA, CEM, groups=(LAB,))
    assert not update(slapd, wanted).empty
    assert slapd.directory.read() == wanted
    assert update(slapd, wanted, wanted).empty
    after = accounts(
        replace(BEA, full_name="Béa Lind", ssh_keys=("ssh-ed25519 BBBB b", "ssh-rsa CCCC c")),
        groups=(replace(LAB, members=("bea", "cem")),),
    )
    update(slapd, after, wanted)
    found = slapd.directory.read()
    assert (found.users["bea"].full_name, set(found.users["bea"].ssh_keys), list(found.users), found.groups["lab"]) == (
        "Béa Lind", {"ssh-ed25519 BBBB b", "ssh-rsa CCCC c"}, ["bea"], PosixGroup("lab", 5000, ("bea", "cem")),
    )  # fmt: skip
    update(slapd, AccountSet(), after)
    assert slapd.directory.read() == AccountSet()


def test_interrupted_plan_can_be_carried_out_again(slapd: Slapd):
    plan = AccountPlan(add_groups=(LAB,), add_users=(BEA,))
    slapd.directory.apply(AccountPlan(add_users=(replace(BEA, full_name="old"),)))
    slapd.directory.apply(plan)
    assert slapd.directory.read() == accounts(BEA, groups=(LAB,))
    removal = AccountPlan(remove_users=(BEA, CEM), remove_groups=(LAB,))
    slapd.directory.apply(removal)
    slapd.directory.apply(removal)
    assert slapd.directory.read() == AccountSet()


def test_entry_of_somebody_else_is_not_taken_over(slapd: Slapd):
    slapd.directory.apply(AccountPlan(add_users=(BEA,)))
    with pytest.raises(TargetError, match="user `bea` is in the directory already, with uid 20001"):
        update(slapd, accounts(replace(BEA, uid=30001, gid=30001)))
    with pytest.raises(TargetError, match="uid 20001 of user `zoe` belongs to bea in the directory"):
        update(slapd, accounts(PosixUser("zoe", 20001, 20001, home="/home/zoe")))
    with pytest.raises(LdapError, match="is in the directory already, with another uid or gid"):
        slapd.directory.apply(AccountPlan(add_users=(replace(BEA, uid=30001),)))
    assert slapd.directory.read() == accounts(BEA)


def test_many_accounts_are_read_page_by_page(slapd: Slapd):
    users = [PosixUser(f"u{number}", 30000 + number, 30000 + number, home="/h") for number in range(23)]
    slapd.directory.apply(AccountPlan(add_users=tuple(users)))
    assert len(LdapDirectory(slapd.settings(page=10)).read().users) == 23


def test_certificate_passes_the_strict_checks_of_newer_versions_of_python(slapd: Slapd):
    tls = slapd.folder / "tls"
    argv = ["openssl", "verify", "-x509_strict", "-CAfile", str(tls / "ca.pem"), str(tls / "server.pem")]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("scheme", ["ldaps", "ldap"])
def test_both_schemes_are_encrypted(slapd: Slapd, scheme: str):
    url = f"{scheme}://127.0.0.1:{getattr(slapd, scheme)}"
    directory = LdapDirectory(slapd.settings(url=url))
    directory.apply(AccountPlan(add_users=(BEA,)))
    assert directory.read() == accounts(BEA)
    lines = [line for line in (slapd.folder / "log").read_text(errors="replace").splitlines() if " BIND dn=" in line]
    strengths = [line.rpartition(" ssf=")[2] for line in lines if "mech=SIMPLE" in line]
    assert strengths and "0" not in strengths


def test_password_in_clear_text_is_refused_by_the_server(slapd: Slapd):
    argv = [str(program("ldapwhoami")), "-x", "-H", f"ldap://127.0.0.1:{slapd.ldap}", "-D", "cn=admin,dc=local", "-y"]
    done = subprocess.run([*argv, str(slapd.folder / "password")], capture_output=True, text=True, check=False)
    assert done.returncode == 13 and "confidentiality required" in done.stderr.lower()


def wrong_ca(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    make_ca(tmp_path, "other")
    return {"ca_file": tmp_path / "other.pem"}


def wrong_name(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    return {"url": f"ldaps://127.0.0.2:{slapd.ldaps}"}


def no_ca(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    return {"ca_file": tmp_path / "none.pem"}


def wrong_password(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    return {"password_file": write_private(tmp_path / "password", "wrong\n")}


def open_password(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    file = write_private(tmp_path / "password", "correct horse\n")
    file.chmod(0o644)
    return {"password_file": file}


def linked_password(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    (tmp_path / "password").symlink_to(slapd.folder / "password")
    return {"password_file": tmp_path / "password"}


def empty_password(slapd: Slapd, tmp_path: Path) -> dict[str, object]:
    return {"password_file": write_private(tmp_path / "password", "\n")}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrong_ca, "the directory cannot be used: "),
        (wrong_name, "the directory cannot be used: "),
        (no_ca, "there is no certificate of the directory's CA"),
        (wrong_password, "the directory refuses cn=admin,dc=local: wrong name or password"),
        (open_password, "other users may read or own "),
        (linked_password, "cannot read the password of the directory in "),
        (empty_password, " holds no password"),
    ],
)
@pytest.mark.parametrize("scheme", ["ldaps", "ldap"])
def test_unsafe_connection_is_refused(
    slapd: Slapd, tmp_path: Path, change: Callable[[Slapd, Path], dict[str, object]], says: str, scheme: str
):
    changed = change(slapd, tmp_path)
    host = "127.0.0.2" if change is wrong_name else "127.0.0.1"
    url = f"{scheme}://{host}:{getattr(slapd, scheme)}"
    with pytest.raises(LdapError) as refused:
        LdapDirectory(slapd.settings(**{**changed, "url": url})).read()
    assert says in refused.value.what and refused.value.hint


def test_server_that_is_not_there_is_reported(slapd: Slapd):
    with pytest.raises(LdapError, match="the directory cannot be used") as refused:
        LdapDirectory(slapd.settings(url="ldaps://127.0.0.1:1")).read()
    assert "is slapd running" in refused.value.hint


# All characters are tested in every field. `uid` and `cn` compare without case and extra blanks, as LDAP defines it.
SPECIAL = st.sampled_from([*'\\,+"<>;=#*()/& \u00e9\u4e16\u0301\U0001f600', "\\2a", "uid=x,", ")(uid=*", " #", "  "])
TEXT = st.lists(st.one_of(SPECIAL, st.characters(min_codepoint=1, exclude_categories=("Cs",))), max_size=12).map(
    "".join
)
NAMES = TEXT.filter(lambda text: text.strip())


# The schema allows only ASCII in homes, shells and members of groups. Members compare without extra blanks.
ASCII_TEXT = st.lists(st.one_of(SPECIAL.filter(str.isascii), st.characters(min_codepoint=1, max_codepoint=127))).map(
    "".join
)
ASCII_NAMES = ASCII_TEXT.filter(lambda text: text.strip())
MEMBERS = st.lists(ASCII_NAMES, max_size=3, unique_by=lambda name: " ".join(name.split()))


@settings(max_examples=500 if LONG else 25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    full_name=TEXT, keys=st.lists(NAMES, max_size=3, unique=True), home=ASCII_NAMES, shell=ASCII_NAMES, members=MEMBERS
)
def test_special_characters_in_every_field_are_stored_as_they_are(
    slapd: Slapd, full_name: str, keys: list[str], home: str, shell: str, members: list[str]
):
    user = replace(BEA, full_name=full_name, ssh_keys=tuple(keys), home=home, shell=shell)
    slapd.directory.apply(AccountPlan(add_users=(user,), add_groups=(replace(LAB, members=tuple(members)),)))
    read = slapd.directory.read()
    assert list(read.users) == ["bea"] and list(read.groups) == ["lab"]
    found, group = read.users["bea"], read.groups["lab"]
    assert found.full_name == full_name and sorted(found.ssh_keys) == sorted(keys)
    assert (found.home, found.shell) == (home, shell)
    assert sorted(group.members) == sorted(members)
    slapd.directory.apply(AccountPlan(edit_users=(UserEdit(found, replace(found, home="/h", shell="/bin/sh")),)))
    assert slapd.directory.read().users["bea"].home == "/h"
    slapd.directory.apply(AccountPlan(remove_users=(user,), remove_groups=(group,)))
    assert slapd.directory.read() == AccountSet()


@pytest.mark.parametrize("change", [{"home": "/h\u00e9"}, {"shell": "/bin/\u4e16"}])
def test_value_that_the_schema_does_not_allow_is_refused_and_leaves_nothing(slapd: Slapd, change: dict[str, str]):
    with pytest.raises(LdapError, match="bea"):
        slapd.directory.apply(AccountPlan(add_users=(replace(BEA, **change),)))
    assert slapd.directory.read() == AccountSet()


def escape_filter(value: str) -> str:
    """Return a value escaped for a search filter (RFC 4515), byte by byte."""
    return "".join(f"\\{byte:02x}" for byte in value.encode())


@settings(max_examples=500 if LONG else 15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=NAMES)
def test_special_characters_in_a_name_never_reach_another_entry(slapd: Slapd, name: str):
    """Names with special characters are refused earlier. Even if one were accepted, it would only be a name."""
    slapd.directory.apply(AccountPlan(add_users=(CEM,)))
    odd = PosixUser(name, 20009, 20009, home="/h")
    slapd.directory.apply(AccountPlan(add_users=(odd,), add_groups=(PosixGroup(name, 20009),)))
    found = slapd.directory.read()
    assert {user.name for user in found.users.values()} == {"cem", name}
    assert found.groups[name].gid == 20009
    answer = ldap(slapd, "ldapsearch", "-LLL", "-b", "dc=local", f"(uid={escape_filter(name)})", "uidNumber")
    assert answer.stdout.count("uidNumber: 20009") == 1 and answer.stdout.count("dn:") == 1
    slapd.directory.apply(AccountPlan(edit_users=(UserEdit(odd, replace(odd, full_name="x")),)))
    slapd.directory.apply(AccountPlan(remove_users=(odd,), remove_groups=(PosixGroup(name, 20009),)))
    assert slapd.directory.read() == accounts(CEM)


# What others may do


def test_users_change_only_their_own_password_and_keys(slapd: Slapd, tmp_path: Path):
    slapd.directory.apply(AccountPlan(add_users=(BEA, CEM)))
    slapd.directory.set_password("bea", "first")
    bea, cem = user_dn("bea", "dc=local"), user_dn("cem", "dc=local")

    def modify(dn: str, attribute: str, value: str, password: str = "first") -> int:
        change = f"dn: {dn}\nchangetype: modify\nreplace: {attribute}\n{attribute}: {value}\n"
        secret = write_private(tmp_path / "secret", password)
        return ldap(slapd, "ldapmodify", "-D", bea, "-y", str(secret), text=change).returncode

    assert modify(bea, "sshPublicKey", "ssh-ed25519 DDDD mine") == 0
    assert modify(bea, "userPassword", "second") == 0
    assert modify(bea, "loginShell", "/bin/sh", "first") == 49, "the old password still works"
    for dn, attribute, value in [
        (bea, "uidNumber", "0"), (bea, "gidNumber", "0"), (bea, "homeDirectory", "/root"), (bea, "loginShell", "/x"),
        (bea, "displayName", "root"), (cem, "sshPublicKey", "ssh-ed25519 EEEE evil"), (cem, "userPassword", "x"),
    ]:  # fmt: skip
        assert modify(dn, attribute, value, "second") == 50, f"{attribute} of {dn} was changed"
    found = slapd.directory.read()
    assert found == accounts(replace(BEA, ssh_keys=("ssh-ed25519 DDDD mine",)), CEM)


def test_password_that_a_user_sets_is_stored_as_a_hash(slapd: Slapd, tmp_path: Path):
    slapd.directory.apply(AccountPlan(add_users=(BEA,)))
    slapd.directory.set_password("bea", "first")
    bea, secret = user_dn("bea", "dc=local"), str(write_private(tmp_path / "secret", "first"))
    change = f"dn: {bea}\nchangetype: modify\nreplace: userPassword\nuserPassword: clear-text\n"
    assert ldap(slapd, "ldapmodify", "-D", bea, "-y", secret, text=change).returncode == 0
    admin = ("-D", "cn=admin,dc=local", "-y", str(slapd.folder / "password"))
    shown = ldap(slapd, "ldapsearch", "-LLL", *admin, "-b", bea, "userPassword").stdout
    (stored,) = re.findall(r"userPassword:: (\S+)", shown)
    assert b64decode(stored).startswith(b"{SSHA}") and b"clear-text" not in b64decode(stored)
    assert ldap(slapd, "ldapwhoami", "-D", bea, "-w", "clear-text").returncode == 0


def test_anonymous_readers_see_only_what_passwd_shows(slapd: Slapd):
    slapd.directory.apply(AccountPlan(add_users=(BEA,), add_groups=(LAB,)))
    slapd.directory.set_password("bea", "first")
    shown = ldap(slapd, "ldapsearch", "-LLL", "-b", "dc=local", "(objectClass=*)").stdout
    attributes = {line.split(":")[0] for line in shown.splitlines() if ":" in line}
    assert {"uidNumber", "homeDirectory", "loginShell", "memberUid"} <= attributes
    assert attributes.isdisjoint({"userPassword", "sshPublicKey", "displayName", "sn"})
    change = f"dn: {user_dn('bea', 'dc=local')}\nchangetype: modify\nreplace: loginShell\nloginShell: /bin/sh\n"
    assert ldap(slapd, "ldapmodify", text=change).returncode != 0


def test_ssh_key_schema_is_found_by_key(slapd: Slapd):
    slapd.directory.apply(AccountPlan(add_users=(BEA,)))
    secret = str(slapd.folder / "password")
    query = f"(sshPublicKey={escape_filter(BEA.ssh_keys[0])})"
    found = ldap(slapd, "ldapsearch", "-LLL", "-D", "cn=admin,dc=local", "-y", secret, "-b", "dc=local", query, "uid")
    assert "uid: bea" in found.stdout

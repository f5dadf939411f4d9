"""The script that adds users to the stack's directory, run by bash with a stand-in for the stack's program `cluster`.

The stand-in has the options and prompts of the programs of releases 2.10.6 and 3.1.0, with the same library, click. Its
directory is a file, and another one for groups. What sssd and LDAP do is not shown here.
"""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.targets.oci.users import users_script
from tests.targets.oci.conftest import FULL, KEY, cluster_of

pytestmark = pytest.mark.cluster  # the tests start hundreds of processes

STAND_IN = """#!{python}
import pathlib
import click

HOME = '/home/{{}}'
directory = pathlib.Path("{folder}/directory")
groups = pathlib.Path("{folder}/groups")

@click.group()
def main(): pass

@main.group()
def user(): pass

@user.command()
def list():
    for line in directory.read_text().splitlines():
        name, uid, gid, home = line.split()
        print("DN: cn=x - STATUS: Read\\n    cn: x\\n    gidNumber: " + gid)
        print("    uid: " + name + "\\n    uidNumber: " + uid + "\\n")

@user.command()
@click.argument("user")
@click.option("-p", "--password", prompt="Password", required=True, hide_input=True, confirmation_prompt=True)
@click.option("-n", "--name", prompt="Full Name", required=True)
@click.option("-i", "--uid", default=None)
@click.option("-g", "--gid", default="9876")
def add(user, password, uid, gid, name):
    assert len(password) > 20
    print(user, uid, gid, HOME.format(user), file=directory.open("a"))

@user.command()
@click.argument("user")
def delete(user):
    left = [line for line in directory.read_text().splitlines() if line.split()[0] != user]
    directory.write_text("".join(line + chr(10) for line in left))

@main.group()
def group(): pass

@group.command(name="list")
def list_groups():
    for line in groups.read_text().splitlines():
        name, gid = line.split()
        print("DN: cn=x - STATUS: Read\\n    cn: " + name + "\\n    gidNumber: " + gid + "\\n")

@group.command()
@click.argument("group")
@click.option("-i", "--gid", default=None)
def create(group, gid):
    print(group, gid, file=groups.open("a"))

main()
"""
SUDO = """#!/bin/bash
if [ "$1" = -u ]; then shift 3; fi
exec "$@"
"""
# Names of users are those of the directory; numbers and groups are those of this machine.
GETENT = """#!/bin/bash
case "$1:$2" in
  passwd:[0-9]* | group:*) exec /usr/bin/getent "$@" ;;
esac
echo "$2:x:10001:9876::{folder}/homes/$2:/bin/bash"
"""
ID = """#!/bin/bash
grep "^$2 " {folder}/directory | cut -d ' ' -f 3
"""
PLAIN = FULL.replace("containers: {enabled: true}\n", "")


@pytest.fixture
def controller(tmp_path: Path) -> Path:
    """A folder with programs of a controller, an empty directory, and the home of ann with a key of the stack."""
    tools = tmp_path / "bin"
    tools.mkdir()
    programs = {"cluster": STAND_IN.format(python=sys.executable, folder=tmp_path), "sudo": SUDO}
    programs |= {"getent": GETENT.format(folder=tmp_path), "id": ID.format(folder=tmp_path)}
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "directory").write_text("")
    (tmp_path / "groups").write_text("privilege 9876\n")
    for name in ("ann", "bob"):
        (tmp_path / "homes" / name / ".ssh").mkdir(parents=True)
        (tmp_path / "homes" / name / ".ssh" / "authorized_keys").write_text("ssh-rsa AAAA the stack's own\n")
    return tmp_path


def run(controller: Path, script: str) -> subprocess.CompletedProcess[str]:
    script = script.replace("/var/lib/dalsegno", f"{controller}/state")
    env = {"PATH": f"{controller}/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    return subprocess.run(["bash", "-s"], input=script, env=env, capture_output=True, text=True, timeout=100)


def test_users_are_added_once_with_their_homes_and_keys(folder, controller):
    script = users_script(cluster_of(folder, rest=FULL))
    first = run(controller, script)
    assert first.returncode == 0, first.stderr
    assert (controller / "directory").read_text() == "ann None 9876 /mnt/home/ann\n", "homes are those of the file"
    keys = controller / "homes" / "ann" / ".ssh" / "authorized_keys"
    assert keys.read_text().splitlines() == [
        "ssh-rsa AAAA the stack's own", "# Dal Segno: begin", KEY, "# Dal Segno: end",
    ]  # fmt: skip
    before = keys.read_text(), (controller / "bin" / "cluster").read_text()
    second = run(controller, script)
    assert (second.returncode, second.stdout) == (0, ""), second.stderr
    assert (keys.read_text(), (controller / "bin" / "cluster").read_text()) == before
    assert (controller / "directory").read_text().count("ann") == 2, "one line, with the name and the home"


def test_user_without_containers_gets_a_group_of_their_own(folder, controller):
    (controller / "directory").write_text("eve 10009 30000 /home/eve\n")  # a gid that has no group
    script = users_script(cluster_of(folder, rest=PLAIN))
    first = run(controller, script)
    assert first.returncode == 0, first.stderr
    assert "ann None 30001 /mnt/home/ann\n" in (controller / "directory").read_text()
    assert (controller / "groups").read_text() == "privilege 9876\nann 30001\n"
    second = run(controller, script)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert (controller / "groups").read_text().count("ann") == 1


def test_own_group_is_kept_for_a_user_who_returns_and_not_given_to_another(folder, controller):
    script = users_script(cluster_of(folder, rest=PLAIN))
    assert run(controller, script).returncode == 0
    assert run(controller, script.replace("ann", "bob")).returncode == 0  # ann has left the file
    assert (controller / "directory").read_text() == "bob None 30001 /mnt/home/bob\n"
    assert run(controller, script).returncode == 0
    assert (controller / "directory").read_text() == "ann None 30000 /mnt/home/ann\n"
    assert (controller / "groups").read_text() == "privilege 9876\nann 30000\nbob 30001\n"


def test_user_with_the_name_of_a_group_of_somebody_else_is_refused(folder, controller):
    (controller / "groups").write_text("privilege 9876\nann 10010\n")
    done = run(controller, users_script(cluster_of(folder, rest=PLAIN)))
    assert done.returncode == 1 and "there is a group ann already" in done.stderr
    taken = next(group.gr_name for group in grp.getgrall() if group.gr_name not in Path("/etc/passwd").read_text())
    done = run(controller, users_script(cluster_of(folder, rest=PLAIN)).replace("ann", taken))
    assert done.returncode == 1 and f"there is a group {taken} already" in done.stderr
    assert (controller / "directory").read_text() == ""


def test_user_from_an_earlier_version_with_the_privileged_group_is_reported(folder, controller):
    assert run(controller, users_script(cluster_of(folder, rest=FULL))).returncode == 0
    done = run(controller, users_script(cluster_of(folder, rest=PLAIN)))
    assert done.returncode == 0 and "ann is still in the group privilege (9876)" in done.stderr


@pytest.mark.parametrize("rest", [FULL, PLAIN])
def test_uid_of_another_account_is_refused(folder, controller, rest):
    (controller / "directory").write_text("eve 10009 9876 /home/eve\n")
    for uid in (10009, 65534):  # eve's in the directory, and nobody's on the controller
        script = users_script(cluster_of(folder, rest=rest.replace("name: ann", f"name: ann, uid: {uid}")))
        done = run(controller, script)
        assert done.returncode == 1 and f"the uid {uid} of ann belongs to another account" in done.stderr
    script = users_script(cluster_of(folder, rest=rest.replace("name: ann", "name: ann, uid: 1234567")))
    assert run(controller, script).returncode == 0
    assert "ann 1234567 " in (controller / "directory").read_text()


def test_only_users_that_were_added_here_are_removed_again(folder, controller):
    (controller / "directory").write_text("eve 10009 9876 /home/eve\n")  # an account that an administrator has added
    run(controller, users_script(cluster_of(folder, rest=FULL)))
    done = run(controller, users_script(cluster_of(folder)))
    assert done.returncode == 0, done.stderr
    assert (controller / "directory").read_text() == "eve 10009 9876 /home/eve\n"
    assert "removed the user ann" in done.stdout and (controller / "homes" / "ann").is_dir()
    assert run(controller, users_script(cluster_of(folder))).stdout == ""


def test_user_who_blocks_the_writing_of_keys_does_not_prevent_the_removal_of_others(folder, controller):
    script = users_script(cluster_of(folder, rest=FULL))
    assert run(controller, script.replace("ann", "bob")).returncode == 0
    keys = controller / "homes" / "ann" / ".ssh"
    (keys / "authorized_keys").unlink()
    keys.rmdir()
    keys.write_text("a file in place of the folder")
    done = run(controller, script)
    assert done.returncode == 1 and "the keys of these users were not written: ann" in done.stderr
    assert "removed the user bob" in done.stdout
    assert (controller / "directory").read_text() == "ann None 9876 /mnt/home/ann\n"


def test_user_of_the_controller_itself_is_refused(folder, controller):
    taken = pwd.getpwuid(1).pw_name  # daemon, as on every system
    script = users_script(cluster_of(folder, rest=FULL)).replace("ann", taken)
    done = run(controller, script)
    assert done.returncode != 0 and f"{taken} is a user of the controller itself" in done.stderr
    assert (controller / "directory").read_text() == ""


def test_cluster_without_users_needs_no_directory(folder, controller):
    os.unlink(controller / "bin" / "cluster")
    assert run(controller, users_script(cluster_of(folder))).returncode == 0
    without = run(controller, users_script(cluster_of(folder, rest=FULL)))
    assert without.returncode == 1 and "is its LDAP directory on?" in without.stderr

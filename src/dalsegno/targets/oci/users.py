"""The script that adds the users of the cluster file to the LDAP directory of the HPC stack. Pure.

It uses the stack's own program `cluster` on the controller. That program asks for a password. Nobody needs the password
later, because people log in with their keys. So the script gives a random password on stdin, where no other user can
read it.

The program puts a new user into the group `privilege` (gid 9876) unless it is told another gid. So the script always
names one: 9876 if the cluster has containers, because only that group may run them, and otherwise the gid of a group
for this user alone.
"""

from __future__ import annotations

import shlex

from dalsegno.spec.facts import Cluster, User
from dalsegno.users.checks import OCI_PRIVILEGE_GID

STACK_HOMES = "/home"  # where the stack's program puts homes


def homes_of(cluster: Cluster) -> str:
    """Return the folder of the users' homes."""
    return next((each.mount for each in cluster.storage if each.home), STACK_HOMES)


def users_script(cluster: Cluster) -> str:
    """Return the script, which the login user runs on the controller. It may run any number of times."""
    adds = "add_container_user" if cluster.containers.enabled else "add_plain_user"
    lines = [f"{adds} {_add_arguments(user)}\n{_keys_of(user)}" for user in cluster.users]
    homes, wanted = homes_of(cluster), " ".join(user.name for user in cluster.users)
    moved = "" if homes == STACK_HOMES else _MOVE_HOMES.format(homes=homes.replace("#", r"\#"))
    return _SCRIPT.format(
        cluster=cluster.name, move=moved, users="".join(lines), wanted=wanted, privilege=OCI_PRIVILEGE_GID
    )


def _add_arguments(user: User) -> str:
    """Return the name of a user, the uid or an empty word, and options of the stack's program."""
    words = [user.name, str(user.uid or ""), "--name", user.full_name or user.name]
    return shlex.join([*words, "--uid", str(user.uid)] if user.uid else words)


def _keys_of(user: User) -> str:
    keys = "".join(f"{key}\n" for key in user.ssh_keys)
    name = shlex.quote(user.name)
    return f"write_keys {name} <<'END_OF_KEYS' || failed=\"$failed \"{name}\n{keys}END_OF_KEYS\n"


# The pattern includes the quote before /home, so it does not match its own result, and a second run changes nothing.
_MOVE_HOMES = """\
sudo sed -i "s#'/home/{{}}#'{homes}/{{}}#g" "$program"
"""

_SCRIPT = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}: users of the cluster file in the directory of the stack.
# Run it on the controller as the user that may use sudo. It may run any number of times.
set -euo pipefail
record=/var/lib/dalsegno/oci-users # names of the users that this script has added
groups=/var/lib/dalsegno/oci-groups # their own groups and gids; kept, because a gid is never used for another user
wanted=" {wanted} "
if [ ! -e "$record" ] && [ -z "${{wanted// /}}" ]; then exit 0; fi
program="$(command -v cluster)" || {{ echo "the stack has no program cluster: is its LDAP directory on?" >&2; exit 1; }}

# The directory is asked, and not the machine: the machine would remember for a while that a new user is unknown.
in_directory() {{
  local users
  users="$("$program" user list)"
  grep -qE "^ *uid: $1\\$" <<< "$users"
}}

uid_in_directory() {{
  local users
  users="$("$program" user list)"
  grep -E "^ *uidNumber: $1\\$" <<< "$users"
}}

check_new() {{ # NAME, UID or nothing: a new user must not get the name or the uid of another account
  if grep -q "^$1:" /etc/passwd; then
    echo "$1 is a user of the controller itself; choose another name in the cluster file" >&2
    return 1
  fi
  if [ -n "$2" ] && {{ getent passwd "$2" | grep -v "^$1:" || uid_in_directory "$2"; }} > /dev/null; then
    echo "the uid $2 of $1 belongs to another account; give another uid in the cluster file, or none" >&2
    return 1
  fi
}}

make_own_group() {{ # NAME: sets own_gid to the gid of a group for this user alone
  local listed used
  listed="$("$program" group list)"
  own_gid="$(sudo cat "$groups" 2> /dev/null | sed -n "s/^$1 //p" || true)"
  if [ -z "$own_gid" ]; then
    # A group that somebody else has made may have rights that a new user must not get.
    if getent group "$1" > /dev/null || grep -qE "^ *cn: $1\\$" <<< "$listed"; then
      echo "there is a group $1 already; choose another user name in the cluster file, or remove the group" >&2
      return 1
    fi
    used="$(grep -oE 'gidNumber: [0-9]+' <<< "$listed$("$program" user list)"; sudo cat "$groups" 2> /dev/null || true)"
    own_gid=30000
    while grep -qE " $own_gid\\$" <<< "$used" || getent group "$own_gid" > /dev/null; do own_gid=$((own_gid + 1)); done
    sudo mkdir -p "$(dirname "$groups")"
    echo "$1 $own_gid" | sudo tee -a "$groups" > /dev/null
  fi
  if grep -qE "^ *cn: $1\\$" <<< "$listed"; then return; fi
  "$program" group create "$1" --gid "$own_gid" > /dev/null
  listed="$("$program" group list)"
  grep -qE "^ *cn: $1\\$" <<< "$listed" || {{ echo "the group $1 could not be added to the directory" >&2; return 1; }}
}}

add_plain_user() {{ # NAME, UID or nothing, options of the program
  if in_directory "$1"; then
    if grep -qx "$1" "$record" 2> /dev/null && [ "$(id -g "$1")" = {privilege} ]; then
      echo "$1 is still in the group privilege ({privilege}), and the cluster file has no containers" >&2
    fi
    return
  fi
  check_new "$1" "$2"
  make_own_group "$1"
  add_user "$1" "${{@:3}}" --gid "$own_gid"
}}

add_container_user() {{ # NAME, UID or nothing, options of the program
  if in_directory "$1"; then return; fi
  check_new "$1" "$2"
  add_user "$1" "${{@:3}}" --gid {privilege}
}}

add_user() {{ # NAME, options of the program
  local password
  password="$(head -c 32 /dev/urandom | base64)"
  # Without a terminal the program reads the password and its confirmation from stdin.
  printf '%s\\n%s\\n' "$password" "$password" | setsid --wait "$program" user add "$@"
  in_directory "$1" || {{ echo "$1 could not be added to the directory" >&2; return 1; }}
  sudo mkdir -p "$(dirname "$record")"
  echo "$1" | sudo tee -a "$record" > /dev/null
  echo "added the user $1"
}}

write_keys() {{ # NAME, with the keys on stdin: replace our block in the user's file
  local home
  for _ in $(seq 60); do # the machine may learn about a new user only after some seconds
    home="$(getent passwd "$1" | cut -d : -f 6)"
    if [ -n "$home" ]; then break; fi
    sleep 1
  done
  [ -n "$home" ] || {{ echo "the controller does not know the user $1 of the directory" >&2; return 1; }}
  # As the user: root must not follow links in a folder of the user.
  # shellcheck disable=SC2016
  # The user could stop the command, or put a pipe in place of a file.
  sudo timeout -k 5 60 sudo -u "$1" -- bash -c '
    set -euo pipefail
    umask 077
    cd -- "$1"
    mkdir -p .ssh
    touch .ssh/authorized_keys
    {{ sed "/^# Dal Segno: begin/,/^# Dal Segno: end/d" .ssh/authorized_keys
      echo "# Dal Segno: begin"; cat; echo "# Dal Segno: end"; }} > .ssh/authorized_keys.new
    mv .ssh/authorized_keys.new .ssh/authorized_keys' bash "$home"
}}

{move}# Users that left the file go first: nothing that another user does to their own home may prevent that.
for name in $(cat "$record" 2> /dev/null || true); do
  if [[ "$wanted" != *" $name "* ]]; then
    "$program" user delete "$name"
    sudo sed -i "/^$name\\$/d" "$record"
    echo "removed the user $name from the directory; the home is kept"
  fi
done
failed=''
{users}if [ -n "$failed" ]; then
  echo "the keys of these users were not written:$failed" >&2
  exit 1
fi
"""

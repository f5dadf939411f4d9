"""Render a `NodePlan` as one script that a platform runs as root while a machine boots.

ParallelCluster runs the script as OnNodeConfigured, HyperPod as a lifecycle script, and other platforms through
cloud-init. The script needs only a shell and Python 3.10 or later. If it runs again, it changes nothing, or continues
where an earlier run was interrupted. It contains no secret, because everyone with access to the bucket or to the user
data can read it.
"""

from __future__ import annotations

import binascii
import shlex
from dataclasses import dataclass
from enum import Enum

from dalsegno.errors import DalsegnoError
from dalsegno.setup.delivery import applier_argv, apply_request
from dalsegno.setup.node_plan import NodePlan

PYTHON = "/opt/dalsegno/python"  # a link to the interpreter that the script has chosen
HOST = "@dalsegno-host@"  # a placeholder for the machine's name, which is known only when the machine runs
HEAD = "@dalsegno-head@"  # a placeholder for the head's address
LOG = "/var/log/dalsegno/bootstrap.log"
_LINE = 90  # this many bytes make a base64 line of 120 characters
# ParallelCluster's own interpreters come first, because those of the operating system are often older than 3.10.
_PYTHONS = ("/opt/parallelcluster/pyenv/versions/3.*/bin/python3", "/usr/bin/python3.1[0-9]", "/usr/bin/python3",
            "/usr/local/bin/python3")  # fmt: skip


class CodeSource(Enum):
    """The place where a machine finds our code."""

    INSIDE = "inside"  # in the script itself
    BESIDE = "beside"  # in the file `dalsegno.tar.gz` in the script's folder
    S3 = "s3"  # in an S3 object that the machine's role may read


@dataclass(frozen=True)
class BootstrapCode:
    """Our code for the machines: the archive itself, or the address of an object in S3."""

    source: CodeSource
    archive: bytes = b""
    uri: str = ""


def refuse_secrets(plan: NodePlan) -> None:
    """Raise if a plan contains a secret, because other people can read a bootstrap script."""
    if found := next((file for file in plan.files if file.secret), None):
        raise DalsegnoError(
            f"{found.path} is a secret, and a bootstrap script can be read by others",
            hint="let the head create the secret, and hand it out over a file system that only root can read",
        )


def render_bootstrap(plan: NodePlan, code: BootstrapCode, head: str = "", wait_for: str = "") -> str:
    """Return the script that makes a machine match the plan.

    HOST and HEAD in the plan are placeholders for values that are known only on the machine. `head` is a shell command
    that prints the head's address. `wait_for` is a path that must exist before the script starts its work, such as a
    file on a shared file system.
    """
    refuse_secrets(plan)
    request = _encoded(apply_request(plan, wait_s=600.0))
    boot = shlex.quote(applier_argv(PYTHON)[-1])
    return _SCRIPT.format(
        cluster=shlex.quote(plan.cluster),
        log=LOG,
        link=PYTHON,
        pythons=" ".join(_PYTHONS),
        wait=_WAIT.format(path=shlex.quote(wait_for)) if wait_for else "",
        head=head or "printf ''",
        code=_code(code),
        fill=_FILL,
        request=request,
        boot=boot,
    )


def _encoded(data: bytes) -> str:
    lines = (data[at : at + _LINE] for at in range(0, len(data), _LINE))
    return "".join(binascii.b2a_base64(line).decode() for line in lines).rstrip("\n")


def _code(code: BootstrapCode) -> str:
    if code.source is CodeSource.INSIDE:
        packed = _encoded(code.archive)
        return f"base64 -d > \"$work/code\" <<'END_OF_CODE'\n{packed}\nEND_OF_CODE"
    if code.source is CodeSource.BESIDE:
        return 'cp "$(dirname "$0")/dalsegno.tar.gz" "$work/code"'
    return f'aws s3 cp --only-show-errors {shlex.quote(code.uri)} "$work/code"'


_WAIT = """
wanted={path}
waited=0
until [ -e "$wanted" ]; do
  [ "$waited" -lt 900 ] || fail "there is no $wanted after 15 minutes: see the log of the head node"
  sleep 5
  waited=$((waited + 5))
done
"""

# This program replaces HOST and HEAD in the request and appends our code to it.
_FILL = f"""\
import json, sys
host, head, work = sys.argv[1:4]
with open(work + "/request", "rb") as file:
    program = file.read(int(size := file.readline()))
    text = file.read(int(file.readline())).decode()
text = text.replace("{HOST}", json.dumps(host)[1:-1]).replace("{HEAD}", json.dumps(head)[1:-1])
request = json.loads(text)
with open(work + "/code", "rb") as file:
    code = file.read()
request["bundle"] = len(code)
body = json.dumps(request).encode()
sys.stdout.buffer.write(size + program + b"%d\\n" % len(body) + body + code)
"""

_SCRIPT = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}. It installs the node agent and the settings of this machine.
# It may run any number of times. It holds no secret.
set -euo pipefail
umask 022
fail() {{
  echo "dalsegno: $*" >&2
  exit 1
}}
[ "$(id -u)" -eq 0 ] || fail "this script needs root"
mkdir -p "$(dirname {log})" "$(dirname {link})"
exec > >(tee -a {log}) 2>&1
echo "dalsegno: bootstrap of $(hostname) started at $(date -u +%FT%TZ)"

# The first Python of version 3.10 or later
found=""
for candidate in {pythons}; do
  if [ -x "$candidate" ] && "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    found="$candidate"
    break
  fi
done
[ -n "$found" ] || fail "there is no Python 3.10 or later on this machine"
ln -sfn "$found" {link}
{wait}
host="$(hostname -s)"
head="$({head})"
work="$(mktemp -d /var/tmp/dalsegno-bootstrap.XXXXXX)"
trap 'rm -rf "$work"' EXIT

# Our code
{code}

# The plan of this machine, with the program that applies it
base64 -d > "$work/request" <<'END_OF_REQUEST'
{request}
END_OF_REQUEST

cat > "$work/fill.py" <<'END_OF_FILL'
{fill}END_OF_FILL

{link} -I "$work/fill.py" "$host" "$head" "$work" > "$work/stdin"
{link} -I -c {boot} < "$work/stdin"
echo "dalsegno: bootstrap of $host ended"
"""

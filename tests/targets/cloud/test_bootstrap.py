"""The bootstrap script: valid for shellcheck, without secrets, and run twice on a virtual host."""

from __future__ import annotations

import base64
import json
import os
import pwd
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.setup.bootstrap import HOST, PYTHON, BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.delivery import find_bundle
from dalsegno.setup.node_plan import NodePlan, PlannedFile
from dalsegno.spec.facts import Health
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.cloud.node_plans import ManagedSlurm, compute_plan, head_plan, login_plan, prolog_text
from dalsegno.targets.cloud.refresh import refresh_script
from dalsegno.targets.folder import ClusterFolder, with_uids, write_uids
from dalsegno.targets.parallelcluster.folder import PclusterStage, PclusterState
from dalsegno.targets.parallelcluster.head import PclusterHead
from dalsegno.targets.parallelcluster.scripts import bootstrap_scripts, machine_plans, site_of
from tests.ssh.hosts import VirtualHost, reason_to_skip, running_hosts
from tests.waiting import eventually

SPEC = """
name: demo
target: parallelcluster
partitions: [{name: train, nodes: 2, instance: p5.48xlarge}]
parallelcluster: {region: us-east-1}
"""
INSIDE = BootstrapCode(CodeSource.INSIDE, b"an archive")


def site(code: str = "0.1-abc", nodes: tuple[str, ...] = ("host-1",)) -> ManagedSlurm:
    cluster = resolve(parse_spec(SPEC, "cluster.yaml"))
    prolog = "/opt/slurm/etc/scripts/prolog.d/50_dalsegno"
    return ManagedSlurm(cluster, "c0ffee", code, "{}", nodes, prolog=prolog, scratch="/scratch", pyxis=True)


def shellcheck(text: str, tmp_path: Path) -> str:
    file = tmp_path / "script.sh"
    file.write_text(text)
    program = Path(sys.executable).with_name("shellcheck")
    return subprocess.run([program, "--severity=style", file], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "code",
    [INSIDE, BootstrapCode(CodeSource.BESIDE), BootstrapCode(CodeSource.S3, uri="s3://bucket/it's/dalsegno.tar.gz")],
    ids=lambda code: code.source.value,
)
def test_script_is_clean_for_shellcheck(tmp_path, code):
    for plan in (head_plan(site()), compute_plan(site()), login_plan(site())):
        script = render_bootstrap(plan, code, "printf 10.0.0.1", wait_for="/opt/slurm/etc/dalsegno/a b")
        assert shellcheck(script, tmp_path) == ""
    assert shellcheck(prolog_text(site()), tmp_path) == ""
    assert shellcheck(refresh_script('cp a "$work/b.sh"', "b.sh"), tmp_path) == ""


def test_script_refuses_to_carry_a_secret():
    plan = NodePlan("demo", "id", HOST, files=(PlannedFile("/etc/key", "secret", 0o600, secret=True),))
    with pytest.raises(DalsegnoError, match=r"/etc/key is a secret"):
        render_bootstrap(plan, INSIDE)
    assert not [file for make in (head_plan, compute_plan, login_plan) for file in make(site()).files if file.secret]


def test_plans_of_machines_touch_neither_slurm_nor_munge():
    for plan in (head_plan(site()), compute_plan(site()), login_plan(site())):
        assert plan.packages == () and plan.users == ()
        names = {service.name for service in plan.services}
        assert names <= {"controller", "observer", "node-agent"}
        assert not any(file.path.endswith(("slurm.conf", "munge.key")) for file in plan.files)


def test_prolog_stops_a_job_only_for_a_failed_check(tmp_path):
    program = tmp_path / "dalsegno"
    text = prolog_text(replace(site(), pyxis=False)).replace("/usr/local/bin/dalsegno", str(program))
    script = tmp_path / "prolog"
    script.write_text(text)

    def code(answer: str) -> int:
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o755)
        return subprocess.run(["sh", script], capture_output=True, timeout=20).returncode

    assert code("echo HEALTH_CHECK_RESULT:n:Failed:reset:gpu; exit 1") == 1
    assert code("echo HEALTH_CHECK_RESULT:n:Passed:none:; exit 0") == 0
    assert code("echo error: damaged settings >&2; exit 1") == 0  # a fault in our own settings must not cost a machine
    assert code("exit 127") == 0
    program.unlink()
    assert subprocess.run(["sh", script], capture_output=True, timeout=20).returncode == 0


def test_prolog_checks_nothing_where_recovery_only_observes():
    def text(health: Health) -> str:
        cluster = replace(site().cluster, health=health)
        return prolog_text(replace(site(), cluster=cluster))

    parts = tuple(part.name for part in site().cluster.partitions)
    assert "dalsegno health" in text(Health()) and "dalsegno health" in text(Health(mode="observe", armed=parts))
    observed = text(Health(mode="observe"))
    assert "dalsegno health" not in observed and "install -d -m 0700" in observed, "containers still need their folders"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("trap", ["folder of a user", "link to a folder", "link below", "none"])
def test_prolog_creates_folders_of_users_only_below_a_folder_of_root(tmp_path, trap):
    """/scratch is open to all users and empty after a restart, so a user may create the folder first."""
    base, prize, job = (
        tmp_path / "scratch/enroot",
        tmp_path / "etc",
        {"SLURM_JOB_UID": "64211", "PATH": os.environ["PATH"]},
    )
    base.parent.mkdir()
    prize.mkdir()
    if trap == "link to a folder":
        base.symlink_to(prize)
    else:
        base.mkdir()
    if trap == "folder of a user":
        os.chown(base, 64212, 64212)
    if trap == "link below":
        (base / "user-64211").symlink_to(prize)
    script = tmp_path / "prolog"
    text = prolog_text(replace(site(), scratch=str(base.parent))).replace("/run/enroot", str(tmp_path / "none"))
    script.write_text(text.replace("/usr/local/bin/dalsegno", str(tmp_path / "none")))
    assert subprocess.run(["sh", script], env=job, timeout=20).returncode == 0
    owners = [each.lstat().st_uid for each in (*base.iterdir(), prize, *prize.iterdir())]
    assert owners == ([64211, 0] if trap == "none" else [0, 0] if trap == "link below" else [0])


def test_root_installs_packages_without_modules_of_the_working_folder(tmp_path):
    (tmp_path / "pip.py").write_text("print('run as root')")
    for plan in (head_plan(site()), compute_plan(site()), login_plan(site())):
        (pip,) = [each.argv for each in plan.commands if "pip" in each.argv]
        argv = [sys.executable, *pip[1 : pip.index("install")], "--version"]
        assert "run as root" not in subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True).stdout


def test_nodes_get_the_versions_of_packages_that_the_operator_has():
    for plan in (head_plan(site()), compute_plan(site()), login_plan(site())):
        (pip,) = [each.argv for each in plan.commands if "pip" in each.argv]
        pins = dict(word.split("==") for word in pip[pip.index("--target") + 2 :])
        assert pins["pydantic"] == metadata.version("pydantic") and pins["click"] == metadata.version("click")
        needed = [each for name in list(pins) for each in metadata.requires(name) or () if "extra ==" not in each]
        names = {re.split(r"[^\w.-]", each)[0].replace("-", "_").lower() for each in needed if ";" not in each}
        assert names <= {name.replace("-", "_").lower() for name in pins}, "no dependency is left to pip"


def users_of(*names: str) -> str:
    return f"{SPEC}users: [{', '.join(f'{{name: {name}}}' for name in names)}]\n"


def test_homes_that_machines_share_are_created_on_the_head(tmp_path):
    cluster = with_uids(resolve(parse_spec(users_of("ada", "bob"), "cluster.yaml")), ClusterFolder(tmp_path))
    shared = replace(site(), cluster=cluster, shared_homes=True)
    head, compute, login = (make(shared) for make in (head_plan, compute_plan, login_plan))
    assert [(user.name, user.uid) for user in head.users] == [("ada", 10001), ("bob", 10002)]
    assert all(user.make_home for user in head.users)
    assert login.users == compute.users == tuple(replace(user, make_home=False) for user in head.users)


def test_users_keep_their_uids_and_nobody_gets_that_of_a_removed_user(tmp_path):
    folder = ClusterFolder(tmp_path / "clusters" / "demo")

    def uids(*names: str) -> dict[str, int | None]:
        cluster = with_uids(resolve(parse_spec(users_of(*names), "cluster.yaml")), folder)
        write_uids(folder, cluster)
        return {user.name: user.uid for user in cluster.users}

    assert uids("ada", "bob") == {"ada": 10001, "bob": 10002}
    assert uids("bob", "cem") == {"bob": 10002, "cem": 10003}
    assert uids("ada", "bob") == {"ada": 10001, "bob": 10002}


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ("{name: cem, groups: [sudo]}", "group `sudo` would give user `cem` rights over this machine"),
        ("{name: cem, uid: 10001}", "uid 10001 of user `cem` belongs to ada, who is or was a user of the cluster"),
    ],
)
def test_user_of_a_cloud_gets_neither_privileges_nor_the_uid_of_a_removed_user(tmp_path, user: str, says: str):
    folder = ClusterFolder(tmp_path / "clusters" / "demo")
    write_uids(folder, with_uids(resolve(parse_spec(users_of("ada"), "cluster.yaml")), folder))
    cluster = resolve(parse_spec(f"{SPEC}users: [{user}]\n", "cluster.yaml"))
    with pytest.raises(TargetError, match=re.escape(says)):
        with_uids(cluster, folder)


def test_prometheus_on_the_head_reads_the_nodes_that_always_run():
    text = SPEC.replace("us-east-1}", "us-east-1, queues: {train: {max_count: 4}}}")
    cluster = resolve(parse_spec(f"{text}monitoring: {{prometheus: true}}\n", "cluster.yaml"))
    state = PclusterState(PclusterStage.UP, "c0ffee", "us-east-1", "3.16.1", bucket="b")
    plans = machine_plans(site_of(cluster, state, "0.1-abc"), "b")
    head = plans["head"]
    assert {"prometheus", "slurm-exporter", "node-exporter"} <= {service.name for service in head.services}
    targets = json.loads(next(file.content for file in head.files if file.path.endswith("targets/nodes.json")))
    assert [each["targets"] for each in targets] == [["train-st-train-1:9100"], ["train-st-train-2:9100"]]
    argv = {role: next(each.argv for each in plans[role].services if each.name == "node-exporter") for role in plans}
    assert "--web.listen-address=127.0.0.1:9100" in argv["head"], "only Prometheus beside it reads it"
    assert "--web.listen-address=:9100" in argv["compute"]
    for plan in plans.values():
        (disable,) = [each for each in plan.commands if "systemctl disable" in each.argv[-1]]
        assert disable.argv[-1].split()[3:] == list(plan.packages), "their own units would take our ports at a boot"
    assert plans["compute"].packages == plans["login"].packages == ("prometheus-node-exporter",)
    for plan in plans.values():
        paths = [folder.path for folder in plan.folders]
        assert len(paths) == len(set(paths))


def test_head_creates_a_folder_for_all_users_on_each_new_lustre_file_system():
    storage = (
        "storage:\n  - {name: fsx, mount: /fsx, type: lustre, size: 1200G}\n"
        "  - {name: data, mount: /data, type: lustre, source: fs-0123456789abcdef0}\n"
    )
    cluster = resolve(parse_spec(f"{SPEC}{storage}", "cluster.yaml"))
    state = PclusterState(PclusterStage.UP, "c0ffee", "us-east-1", "3.16.1", bucket="b")
    plans = machine_plans(site_of(cluster, state, "0.1-abc"), "b")
    made = {role: [each for each in plan.folders if each.mode == 0o1777] for role, plan in plans.items()}
    assert [(each.path, each.owner, each.keep) for each in made["head"]] == [("/fsx/shared", "root", True)]
    assert made["compute"] == made["login"] == [], "the head is enough"


def test_shell_of_a_user_gets_neither_terminal_nor_environment_of_root(tmp_path):
    """Otherwise a process that the user leaves could type on root's terminal, or read root's keys."""
    head = PclusterHead(tmp_path)
    entry = head.shell([], {"AWS_SECRET_ACCESS_KEY": "x", "TERM": "xterm", "PATH": "/root/bin"}, "/", user="nobody")
    assert entry.uid == pwd.getpwnam("nobody").pw_uid
    assert "AWS_SECRET_ACCESS_KEY" not in entry.env and "/root/bin" not in entry.env["PATH"]
    assert entry.env["TERM"] == "xterm" and entry.env["HOME"] == pwd.getpwnam("nobody").pw_dir
    with pytest.raises(NotThere):
        head.shell([], {}, "/", user="no-such-user")


ASK = """
import sys
from pathlib import Path
sys.path[:0] = ["/opt/dalsegno/current"]
from dalsegno.recovery.client import ask
print(ask(Path("/var/lib/dalsegno/clusters/demo/run/controller.sock"), {"agents": True}, 20))
"""
FAKE_AWS = """#!/bin/sh
# aws s3 cp --only-show-errors URI FILE
case "$1 $2 $4" in
  "s3 cp "*.sh) cp /root/bootstrap.sh "$5" ;;
  "s3 cp "*) cp /root/code.tar.gz "$5" ;;
esac
"""


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_scripts_of_parallelcluster_connect_a_node_to_the_controller_and_run_twice(tmp_path):
    """Virtual hosts in the place of a head node, a compute node and a login node, with containers. The test stands in
    for three things that ParallelCluster's machines have: the AWS CLI, the file with the head's address, and the shared
    /opt/slurm."""
    text = f"{users_of('ada')}containers: {{enabled: true}}\n"
    cluster = with_uids(resolve(parse_spec(text, "cluster.yaml")), ClusterFolder(tmp_path))
    bundle = find_bundle()
    state = PclusterState(PclusterStage.UP, "c0ffee", "us-east-1", "3.16.1", bucket="b")
    scripts = bootstrap_scripts(cluster, state, bundle.key)
    archive = tmp_path / "code.tar.gz"
    archive.write_bytes(bundle.archive())
    node_name = "train-st-train-1"
    with running_hosts(3, tmp_path / "hosts", ["head-node", node_name, "login-node"]) as rack:
        head, node, login = rack["head-node"], rack[node_name], rack["login-node"]

        def copy(host: VirtualHost, path: str, data: bytes, mode: str = "600") -> None:
            packed = base64.b64encode(data).decode()
            host.run("sh", "-c", f"mkdir -p $(dirname {path}); base64 -d > {path}; chmod {mode} {path}", stdin=packed)

        def boot(host: VirtualHost, script: str) -> str:
            copy(host, "/root/bootstrap.sh", scripts[f"dalsegno/demo/{script}.sh"])
            return host.run("bash", "/root/bootstrap.sh")

        for host in rack.hosts:
            copy(host, "/usr/local/bin/aws", FAKE_AWS.encode(), "755")
            copy(host, "/root/code.tar.gz", archive.read_bytes())
            copy(host, "/etc/parallelcluster/cfnconfig", f"cfn_head_node_private_ip={head.address}\n".encode())
        copy(head, "/opt/slurm/etc/slurm.conf", b"ClusterName=demo\n", "644")
        first, again = boot(head, "head"), boot(head, "head")
        assert "creating the secrets of the node agents" in first and '"changes": []' in again
        agents = "/opt/slurm/etc/dalsegno/agents"
        assert head.run("ls", agents).split() == [node_name, "train-st-train-2"]
        assert head.run("stat", "-c", "%a %U", agents, f"{agents}/{node_name}") == "700 root\n600 root\n"
        assert head.run("/usr/local/bin/dalsegno", "--version").strip().endswith(bundle.key.partition("-")[0])
        assert json.loads(head.run("cat", "/opt/slurm/etc/health.json"))["mode"] == "auto"
        assert head.run("stat", "-c", "%a", "/opt/slurm/etc/scripts/prolog.d/50_dalsegno") == "755\n"
        copy(node, f"{agents}/{node_name}", head.run("cat", f"{agents}/{node_name}").encode())
        boot(node, "compute")
        assert boot(login, "login") and '"changes": []' in boot(login, "login")
        assert login.run("/usr/local/bin/dalsegno", "--version") == head.run("/usr/local/bin/dalsegno", "--version")
        assert "spank_pyxis.so" in head.run("cat", "/opt/slurm/etc/plugstack.conf.d/pyxis.conf")
        assert "ENROOT_RUNTIME_PATH /run/enroot/user-" in node.run("cat", "/etc/enroot/enroot.conf")
        assert node.run("stat", "-c", "%a %U", "/run/enroot", "/var/lib/enroot") == "755 root\n" * 2
        assert '"changes": []' in node.run("dalsegno-refresh")
        assert {host.run("id", "-u", "ada") for host in rack.hosts} == {"10001\n"}
        assert node.run("readlink", PYTHON).startswith("/usr/")
        connected = f"'node': '{node_name}', 'presence': 'connected'"
        eventually(lambda: connected in head.run(PYTHON, "-I", "-c", ASK))

"""The bootstrap script: valid for shellcheck, without secrets, and run twice on a virtual host."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.setup.bootstrap import HEAD, HOST, PYTHON, BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.delivery import find_bundle
from dalsegno.setup.node_plan import NodePlan, PlannedFile, PlannedService
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.cloud.node_plans import ManagedSlurm, compute_plan, head_plan, login_plan, prolog_text
from tests.ssh.conftest import ssh_hosts
from tests.ssh.hosts import reason_to_skip
from tests.waiting import eventually

__all__ = ["ssh_hosts"]
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
    assert code("echo error: damaged settings >&2; exit 1") == 0  # our own fault must not cost a machine
    assert code("exit 127") == 0
    program.unlink()
    assert subprocess.run(["sh", script], capture_output=True, timeout=20).returncode == 0


@pytest.mark.cluster
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")
def test_scripts_run_twice_on_a_host_and_the_agent_gets_its_secret(ssh_hosts, tmp_path):
    """The head's and a node's script, one after the other on the same host, as if both were one machine."""
    host = ssh_hosts(1).hosts[0]
    bundle = find_bundle()
    code = BootstrapCode(CodeSource.INSIDE, bundle.archive())
    on = site(bundle.key, ("host-1", "train-dy-train-1"))
    quiet = replace(on, cluster=replace(on.cluster, monitoring=replace(on.cluster.monitoring, enabled=False)))
    script = render_bootstrap(replace(head_plan(quiet), services=()), code, "printf 127.0.0.1")

    def run(text: str) -> str:
        host.run("sh", "-c", "cat > /root/bootstrap.sh", stdin=text)
        return host.run("bash", "/root/bootstrap.sh")

    first, again = run(script), run(script)
    assert "creating the secrets of the node agents" in first and '"changes": []' in again
    secret = host.run("cat", "/opt/slurm/etc/dalsegno/agents/train-dy-train-1")
    assert (
        len(secret) == 64 and host.run("stat", "-c", "%a %U", "/opt/slurm/etc/dalsegno/agents/host-1") == "600 root\n"
    )
    assert host.run("/usr/local/bin/dalsegno", "--version").strip().endswith(bundle.key.partition("-")[0])
    assert host.run("stat", "-c", "%a", "/opt/slurm/etc/scripts/prolog.d/50_dalsegno") == "755\n"
    assert "spank_pyxis" in host.run("cat", "/opt/slurm/etc/plugstack.conf.d/pyxis.conf")
    compute = compute_plan(quiet)
    agent = compute.services[0]
    assert HOST in " ".join(agent.argv) and HEAD in " ".join(agent.argv)
    record = "printf '%s\\n' \"$@\" > /run/agent-arguments; exec sleep 1000"
    fake = PlannedService("node-agent", ("/bin/sh", "-c", record, *agent.argv), agent.log, agent.env, agent.revision)
    # The head's files stay: on this host they belong to the same record, as the plan of one machine would have them.
    both = replace(head_plan(quiet), folders=(*head_plan(quiet).folders, *compute.folders),
                   files=tuple({file.path: file for file in (*head_plan(quiet).files, *compute.files)}.values()),
                   services=(fake,))  # fmt: skip
    script = render_bootstrap(both, code, "printf 10.1.2.3", wait_for="/opt/slurm/etc/dalsegno/agents/host-1")
    run(script)
    eventually(lambda: host.run("cat", "/run/agent-arguments"))
    words = host.run("cat", "/run/agent-arguments").split()
    assert words[words.index("--node") + 1] == "host-1" and words[words.index("--controller") + 1] == "10.1.2.3:6870"
    assert words[words.index("--secret") + 1] == "/opt/slurm/etc/dalsegno/agents/host-1"
    assert '"changes": []' in run(script)
    assert json.loads(host.run("cat", "/opt/slurm/etc/health.json"))["mode"] == "auto"
    assert host.run("readlink", PYTHON).startswith("/usr/")

"""Recovery on virtual hosts over ssh: Slurm's own programs keep jobs off a bad node, and the controller repairs nodes
with a reset, a reboot over ssh, and a power command. Only the hardware is replaced: `nvidia-smi`, `reboot` and the
management controller are small scripts.

The tests share three hosts and run in order. Node n1 has a GPU, and n2 has a power command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import reason_to_skip, running_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECORDED = Path(__file__).parents[1] / "recorded/nvidia-smi-580/h200-q.xml"
HANG_S = 180.0  # a validation on a busy machine takes more than a minute
HEALTH = """\
slurm: {accounting: false, extra: {HealthCheckInterval: 10}}
health:
  max_out: 1.0
  per_hour: 100
  checks: {pair-collective: off, load-product: off, load-memory: off, memory: off}
"""

# A file system that should be mounted and is not. Every check of the node reports this fault.
FAULT = "192.0.2.1:/gone /mnt/gone nfs defaults 0 0"
BREAK = f"echo '{FAULT}' >> /etc/fstab"
REPAIR = "sed -i '/^192.0.2.1:/d' /etc/fstab"

# A machine that has booted has another boot id, and its node agent reads it.
BOOT = """\
cat /proc/sys/kernel/random/uuid > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
pkill -f '[p]rograms.py node-agent'
"""
REBOOT = f"#!/bin/sh\n{REPAIR}\necho booted >> /run/reboots\n{BOOT}kill $PPID\n"

# One GPU whose memory has a row to remap until it is reset
NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
*--query-gpu*) echo "NVIDIA H200, 143771, 580.95.05" ;;
*--gpu-reset*) rm -f /run/row-pending; echo "$*" >> /run/resets ;;
"-q -x")
    if [ -e /run/row-pending ]; then
        sed 's/row_pending>No/row_pending>Yes/' /opt/gpu.xml
    else
        cat /opt/gpu.xml
    fi ;;
esac
"""


# A package of the site, in a repository that apt finds on the host itself
SITE_PACKAGE = """\
set -e
mkdir -p /tmp/site/DEBIAN /tmp/site/usr/bin /opt/packages
printf '#!/bin/sh\\necho site tool\\n' > /tmp/site/usr/bin/site-tool
chmod 755 /tmp/site/usr/bin/site-tool
cat > /tmp/site/DEBIAN/control << END
Package: site-tool
Version: 1.0
Architecture: all
Maintainer: ops <ops@example.org>
Description: a tool of this site
END
dpkg-deb --build /tmp/site /opt/packages/site-tool.deb
cd /opt/packages
{ cat /tmp/site/DEBIAN/control
  echo "Filename: ./site-tool.deb"
  echo "Size: $(stat -c %s site-tool.deb)"
  echo "SHA256: $(sha256sum site-tool.deb | cut -d' ' -f1)"
} > Packages
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:/opt/packages ./' > /etc/apt/sources.list
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("recovery")
    with running_hosts(3, folder / "hosts", names=["head", "n1", "n2"]) as rack:
        operator = Operator(folder, rack)
        operator.clear_hosts()
        rack["n1"].run("sh", "-c", "cat > /opt/gpu.xml; mknod /dev/nvidia0 c 1 3", stdin=RECORDED.read_text())
        install(operator, "n1", "/usr/local/bin/nvidia-smi", NVIDIA_SMI)
        install(operator, "n1", "/usr/local/sbin/reboot", REBOOT)
        for host in rack.hosts:
            host.run("sh", "-c", SITE_PACKAGE)
        operator.write(more=HEALTH)
        address = rack["n2"].address
        with_power = f"n2: {{address: {address}, power_cycle: 'touch /run/cycled-{{node}}-{{address}}'}}"
        text = operator.file.read_text().replace(f"n2: {address}", with_power)
        operator.file.write_text(text.replace("ssh:\n", "ssh:\n  packages: [site-tool]\n"))
        operator.up()
        yield operator


def install(lab: Operator, host: str, path: str, script: str) -> None:
    lab.rack[host].run("sh", "-c", f"cat > {path}; chmod 755 {path}", stdin=script)


def phase(lab: Operator, node: str) -> str:
    """Return the phase of a node. On a busy machine, a node in service is also suspected at times."""
    found = {each["node"]: each["phase"] for each in json.loads(lab.dalsegno("nodes", "--json").out)}
    return "in service" if found[node] == "suspected" else str(found[node])


def in_service(lab: Operator, node: str) -> Callable[[], bool]:
    return lambda: phase(lab, node) == "in service"


def texts(lab: Operator, node: str) -> list[str]:
    lines = lab.dalsegno("events", "--node", node, "--json").out.splitlines()
    return [json.loads(line)["text"] for line in lines]


def reason(lab: Operator, node: str) -> str:
    found = re.search(r"Reason=(.*?)( \[|$)", lab.on_head("scontrol", "show", "node", node), re.MULTILINE)
    return found[1] if found else ""


def test_slurm_starts_the_health_check_and_the_prolog_of_root_on_every_node(lab):
    for name in ("n1", "n2"):
        config = lab.rack[name].run("scontrol", "show", "config")
        for key, file in (("Prolog", "slurm-prolog"), ("HealthCheckProgram", "slurm-health-check")):
            assert re.search(rf"^{key}\s*= /etc/slurm/{file}$", config, re.MULTILINE)
            assert lab.rack[name].run("stat", "-c", "%U %a", f"/etc/slurm/{file}") == "root 755\n"
    eventually(lambda: in_service(lab, "n1")() and in_service(lab, "n2")(), timeout_s=HANG_S, every_s=1)


def test_packages_of_the_file_are_installed_on_every_host(lab):
    assert {host.run("site-tool") for host in lab.rack.hosts} == {"site tool\n"}


def test_failed_check_keeps_a_job_off_the_node_although_automation_is_paused(lab):
    """The controller only reports while it is paused, but Slurm's prolog still drains the node and requeues the job."""
    lab.dalsegno("automation", "pause")
    lab.rack["n2"].run("sh", "-c", BREAK)
    eventually(lambda: any("paused; would" in each for each in texts(lab, "n2")), timeout_s=HANG_S, every_s=1)
    assert reason(lab, "n2") == "", "the health check leaves the node to the controller"
    words = ("sbatch", "--parsable", "-D", "/tmp", "-o", "/dev/null", "-w", "n2", "--wrap", "touch /run/job-ran")
    job = lab.on_head(*words).strip()
    eventually(lambda: reason(lab, "n2") == "Prolog error", every_s=0.5)
    eventually(lambda: lab.on_head("squeue", "-hj", job, "-o", "%T").strip() == "PENDING", every_s=0.5)
    assert "eld" not in lab.on_head("squeue", "-hj", job, "-o", "%r"), "nobody has to release the job"
    assert lab.rack["n2"].run("sh", "-c", "ls /run/job-ran 2>/dev/null || true") == ""
    lab.on_head("scancel", job)
    lab.rack["n2"].run("sh", "-c", REPAIR)
    lab.on_head("scontrol", "update", "node=n2", "state=resume")


FREEZE = "kill -STOP $(sed -n 's/.*\"pid\": *\\([0-9]*\\).*/\\1/p' /var/lib/dalsegno/setup/services/init.json)"


def test_health_check_drains_a_node_that_no_controller_watches(lab):
    """The init of n2 is stopped, so that it does not start the killed node agent again."""
    eventually(lambda: "idle" in lab.on_head("sinfo", "-hn", "n2", "-o", "%T"), every_s=0.5)
    lab.rack["n2"].run("sh", "-c", f"{FREEZE}; pkill -9 -f '[p]rograms.py node-agent'; {BREAK}")
    eventually(lambda: reason(lab, "n2").startswith("dalsegno:reboot:file-systems /mnt/gone"), HANG_S, every_s=0.5)


def test_controller_reboots_a_node_with_its_power_command(lab):
    """The controller takes over the drained node when automation resumes."""
    lab.rack["n2"].run("sh", "-c", FREEZE.replace("STOP", "CONT"))
    lab.dalsegno("automation", "resume")
    mark = f"/run/cycled-n2-{lab.rack['n2'].address}"
    eventually(lambda: lab.on_head("sh", "-c", f"ls {mark} 2>/dev/null || true"), timeout_s=HANG_S, every_s=1)
    lab.rack["n2"].run("sh", "-c", f"{REPAIR}\n{BOOT}")
    eventually(in_service(lab, "n2"), timeout_s=HANG_S, every_s=1)
    assert any("rebooted" in each for each in texts(lab, "n2"))
    assert lab.on_head("srun", "-w", "n2", "hostname") == "n2\n"


def test_controller_reboots_a_node_over_ssh(lab):
    lab.rack["n1"].run("sh", "-c", BREAK)
    eventually(lambda: lab.rack["n1"].run("sh", "-c", "cat /run/reboots || true") == "booted\n", HANG_S, every_s=1)
    eventually(in_service(lab, "n1"), timeout_s=HANG_S, every_s=1)
    assert any("rebooted" in each for each in texts(lab, "n1"))
    assert lab.on_head("srun", "-w", "n1", "hostname") == "n1\n"


def test_controller_resets_the_gpus_of_a_node_over_ssh(lab):
    before = len(texts(lab, "n1"))
    lab.rack["n1"].run("touch", "/run/row-pending")
    eventually(lambda: lab.rack["n1"].run("sh", "-c", "cat /run/resets || true") == "--gpu-reset\n", HANG_S, every_s=1)
    eventually(lambda: "GPUs reset" in "".join(texts(lab, "n1")[before:]), timeout_s=HANG_S, every_s=1)
    eventually(in_service(lab, "n1"), timeout_s=HANG_S, every_s=1)
    assert lab.on_head("srun", "-w", "n1", "--gpus=1", "hostname") == "n1\n"
    assert lab.rack["n1"].run("cat", "/run/reboots") == "booted\n", "a reset was enough"


def test_down_removes_the_programs_that_slurm_started(lab):
    lab.dalsegno("down", "--yes")
    for name in ("n1", "n2"):
        assert lab.rack[name].run("sh", "-c", "ls /etc/slurm 2>/dev/null || true") == ""

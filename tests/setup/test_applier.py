"""The applier, run as the program that hosts get, below a scratch root folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.setup.delivery import (
    Answer,
    ChangeAction,
    ChangeKind,
    CodeBundle,
    MachineChange,
    applier_argv,
    apply_request,
    compare_request,
    find_bundle,
    read_answer,
    read_step,
    remove_request,
)
from dalsegno.setup.machine_record import Record, Refused
from dalsegno.setup.machine_services import MachineServices, Systemd, step_scopes, unit_text
from dalsegno.setup.node_plan import (
    NodePlan,
    PlannedCommand,
    PlannedFile,
    PlannedFolder,
    PlannedLink,
    PlannedService,
    outline,
    plan_to_json,
)
from dalsegno.spec.facts import facts_from_json

PLAN = NodePlan(
    "demo",
    "c0ffee",
    "head",
    folders=(PlannedFolder("/var/spool/demo", 0o750),),
    files=(
        PlannedFile("/etc/slurm/slurm.conf", "ClusterName=demo\n"),
        PlannedFile("/etc/munge/munge.key", "very secret", 0o400, secret=True),
        PlannedFile("/etc/hosts", "10.0.0.1 head\n", block=True),
    ),
    links=(PlannedLink("/opt/dalsegno/current", "0.1-abc"),),
)


def ask(request: bytes) -> Answer:
    done = subprocess.run(applier_argv(sys.executable), input=request, capture_output=True, timeout=60)
    return read_answer("head", done.stdout.decode() or done.stderr.decode())


def apply(plan: NodePlan, root: Path, bundle: bytes = b"") -> Answer:
    return ask(apply_request(plan, bundle, str(root)))


def compare(plan: NodePlan, root: Path) -> tuple[MachineChange, ...]:
    return ask(compare_request(plan, str(root))).changes


def remove(root: Path, cluster_id: str = "c0ffee") -> Answer:
    return ask(remove_request(cluster_id, str(root)))


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def everything(root: Path) -> dict[str, str]:
    """Return all files below a root folder, except our own lock."""
    return {
        str(path.relative_to(root)): path.read_text() if path.is_file() else "link"
        for path in sorted(root.rglob("*"))
        if (path.is_file() or path.is_symlink()) and path.name != "setup.lock"
    }


def test_plan_survives_json():
    command = PlannedCommand("x", ("a", "b"), unless=("c",), after="d")
    service = PlannedService("munge", ("/usr/sbin/munged",), "/l", {"A": "b"}, "1", "munge.service", ("true",))
    plan = replace(PLAN, commands=(command,), services=(service,), packages=("munge",))
    assert facts_from_json(NodePlan, json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_comparing_sends_no_contents():
    text = json.dumps(outline(PLAN))
    assert "very secret" not in text
    assert "ClusterName" not in text
    assert b"very secret" not in compare_request(PLAN)


def test_second_apply_changes_nothing(tmp_path):
    assert apply(PLAN, tmp_path).changes == compare(PLAN, tmp_path / "empty")
    assert (tmp_path / "etc/slurm/slurm.conf").read_text() == "ClusterName=demo\n"
    assert (tmp_path / "etc/munge/munge.key").stat().st_mode & 0o777 == 0o400
    assert (tmp_path / "var/spool/demo").stat().st_mode & 0o777 == 0o750
    assert os.readlink(tmp_path / "opt/dalsegno/current") == "0.1-abc"
    assert compare(PLAN, tmp_path) == ()
    assert apply(PLAN, tmp_path).changes == ()


def test_removal_restores_what_was_there(tmp_path):
    write(tmp_path / "etc/slurm/slurm.conf", "ClusterName=old\n", 0o640)
    write(tmp_path / "etc/hosts", "127.0.0.1 localhost\n192.0.2.9 printer")
    write(tmp_path / "etc/slurm/other.conf", "mine\n")
    before = everything(tmp_path)
    replaced = MachineChange(ChangeKind.FILE, "/etc/slurm/slurm.conf", ChangeAction.REPLACE)
    assert replaced in apply(PLAN, tmp_path).changes
    hosts = (tmp_path / "etc/hosts").read_text()
    assert hosts.startswith("127.0.0.1 localhost\n192.0.2.9 printer\n")
    assert "10.0.0.1 head\n" in hosts
    with (tmp_path / "etc/hosts").open("a") as file:
        file.write("192.0.2.10 scanner\n")
    remove(tmp_path)
    after = everything(tmp_path)
    assert after.pop("etc/hosts") == "127.0.0.1 localhost\n192.0.2.9 printer\n192.0.2.10 scanner\n"
    assert after == {name: text for name, text in before.items() if name != "etc/hosts"}
    assert (tmp_path / "etc/slurm/slurm.conf").stat().st_mode & 0o777 == 0o640
    assert not (tmp_path / "var/spool/demo").exists()


def test_backup_is_the_file_before_the_first_apply(tmp_path):
    write(tmp_path / "etc/slurm/slurm.conf", "ClusterName=old\n")
    apply(PLAN, tmp_path)
    changed = replace(PLAN, files=(PlannedFile("/etc/slurm/slurm.conf", "ClusterName=demo\nNew=1\n"), *PLAN.files[1:]))
    assert compare(changed, tmp_path) == (MachineChange(ChangeKind.FILE, "/etc/slurm/slurm.conf", ChangeAction.CHANGE),)
    apply(changed, tmp_path)
    remove(tmp_path)
    assert (tmp_path / "etc/slurm/slurm.conf").read_text() == "ClusterName=old\n"


def test_file_edited_by_hand_is_kept_beside_the_restored_one(tmp_path):
    write(tmp_path / "etc/slurm/slurm.conf", "ClusterName=old\n")
    apply(PLAN, tmp_path)
    write(tmp_path / "etc/slurm/slurm.conf", "ClusterName=edited\n")
    left = remove(tmp_path).left
    assert (tmp_path / "etc/slurm/slurm.conf").read_text() == "ClusterName=old\n"
    assert (tmp_path / "etc/slurm/slurm.conf.dalsegno-saved").read_text() == "ClusterName=edited\n"
    assert "edited" in left[0]


def test_file_that_the_plan_drops_is_restored(tmp_path):
    apply(PLAN, tmp_path)
    smaller = replace(PLAN, files=PLAN.files[1:])
    restored = MachineChange(ChangeKind.FILE, "/etc/slurm/slurm.conf", ChangeAction.RESTORE)
    assert compare(smaller, tmp_path) == (restored,)
    apply(smaller, tmp_path)
    assert not (tmp_path / "etc/slurm/slurm.conf").exists()
    assert compare(smaller, tmp_path) == ()


def test_machine_of_another_cluster_is_refused_and_left_alone(tmp_path):
    apply(PLAN, tmp_path)
    before = everything(tmp_path)
    with pytest.raises(TargetError, match="belongs to another cluster of Dal Segno, `demo`"):
        apply(replace(PLAN, cluster="two", cluster_id="other"), tmp_path)
    assert remove(tmp_path, "other").found is False
    assert everything(tmp_path) == before


def test_apply_continues_after_a_failure(tmp_path):
    write(tmp_path / "etc/slurm/slurm.conf", "ClusterName=old\n")
    before = everything(tmp_path)
    failing = replace(PLAN, commands=(PlannedCommand("breaking", ("false",), creates="/never"),))
    with pytest.raises(TargetError, match="`false` ended with code 1"):
        apply(failing, tmp_path)
    assert apply(PLAN, tmp_path).changes == ()  # all changes before the failure were made
    remove(tmp_path)
    assert everything(tmp_path) == before


def test_command_runs_until_it_has_created_its_file(tmp_path):
    made = tmp_path / "made"
    command = PlannedCommand("making", ("/bin/sh", "-c", f"echo once >> {made}"), creates="/made")
    plan = replace(PLAN, commands=(command,))
    apply(plan, tmp_path)
    apply(plan, tmp_path)
    assert made.read_text() == "once\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_full_disk_is_reported_and_later_repaired(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "small", str(tmp_path)], check=True)
    try:
        write(tmp_path / "etc/slurm/slurm.conf", "ClusterName=old\n")
        (tmp_path / "filler").write_bytes(b"x" * 60_000)
        large = replace(PLAN, files=(*PLAN.files, PlannedFile("/etc/large", "y" * 90_000)))
        with pytest.raises(TargetError, match="No space left on device") as refused:
            apply(large, tmp_path)
        assert "free some space" in refused.value.hint
        (tmp_path / "filler").unlink()
        apply(large, tmp_path)
        assert compare(large, tmp_path) == ()
        remove(tmp_path)
        assert (tmp_path / "etc/slurm/slurm.conf").read_text() == "ClusterName=old\n"
        assert not (tmp_path / "etc/large").exists()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_code_is_installed_once_and_under_its_key(tmp_path):
    source = tmp_path / "program.py"
    source.write_text("print('here')\n")
    bundle = CodeBundle("0.1-abc", ((source, "dalsegno/program.py"),))
    root, plan = tmp_path / "root", replace(PLAN, bundle="0.1-abc")
    root.mkdir()
    assert MachineChange(ChangeKind.CODE, "0.1-abc", ChangeAction.INSTALL) in compare(plan, root)
    with pytest.raises(TargetError, match="was not sent along"):
        apply(plan, root)
    apply(plan, root, bundle.archive())
    assert (root / "opt/dalsegno/0.1-abc/dalsegno/program.py").read_text() == "print('here')\n"
    assert compare(plan, root) == ()


def test_code_before_the_last_version_is_deleted_unless_a_process_runs_from_it(tmp_path):
    source = tmp_path / "program.py"
    source.write_text("input()\n")
    root = tmp_path / "root"
    root.mkdir()

    def versions_after(key: str) -> set[str]:
        bundle = CodeBundle(key, ((source, "program.py"),))
        apply(replace(PLAN, bundle=key, links=()), root, bundle.archive())
        return set(os.listdir(root / "opt/dalsegno"))

    assert versions_after("1") == {"1"}
    with subprocess.Popen([sys.executable, root / "opt/dalsegno/1/program.py"], stdin=subprocess.PIPE):
        assert versions_after("2") == {"1", "2"}
        assert versions_after("3") == {"1", "2", "3"}
    assert versions_after("4") == {"3", "4"}
    assert versions_after("4") == {"3", "4"}


@pytest.mark.cluster  # many processes or connections: too slow for the unit part
def test_own_code_runs_from_its_archive_alone(tmp_path):
    import io
    import tarfile

    bundle = find_bundle()
    assert find_bundle().key == bundle.key
    with tarfile.open(fileobj=io.BytesIO(bundle.archive())) as archive:
        archive.extractall(tmp_path)
    start = "import sys; sys.path[:0] = [sys.argv.pop(1)]; from dalsegno.cli.main import main; main()"
    argv = [sys.executable, "-I", "-S", "-c", start, str(tmp_path), "schema"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert '"title"' in done.stdout, done.stderr


def test_second_request_at_the_same_time_is_refused(tmp_path):
    import fcntl

    lock = tmp_path / "var/lib/dalsegno/setup.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TargetError, match="works on this machine"):
            ask(apply_request(PLAN, root=str(tmp_path), wait_s=0.3))


def test_answer_that_was_cut_off_is_an_error():
    with pytest.raises(TargetError, match="ended without an answer"):
        read_answer("gpu-1", '{"step": "installing munge"}\nConnection reset')
    assert read_step('{"step": "installing munge"}') == "installing munge"
    assert read_step("motd: welcome") == ""


def test_unit_of_an_own_service(golden):
    service = PlannedService(
        "controller",
        ("/usr/bin/python3", "-I", "/opt/dalsegno/0.1-abc/dalsegno/programs.py", "controller", "/var/lib/a b"),
        "/var/log/dalsegno/controller.log",
        {"PATH": "/usr/bin", "QUOTED": '50% of "x" for $5'},
        keep=True,
    )
    golden(
        "ssh/dalsegno-controller.service",
        unit_text(plan_to_json(replace(PLAN, services=(service,)))["services"][0], "demo"),
    )


def test_file_whose_backup_is_gone_is_not_replaced_by_an_empty_one(tmp_path: Path):
    target = tmp_path / "etc/slurm.conf"
    target.parent.mkdir()
    target.write_text("theirs")
    record = Record(str(tmp_path))
    record.back_up(str(target), "files")
    target.write_text("ours")
    Path(record.part("files")[str(target)]["copy"]).unlink()
    with pytest.raises(Refused, match="backup"):
        record.restore(str(target), "files")
    assert target.read_text() == "ours"


def test_systemd_understands_the_unit_of_a_service(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd's programs")
    env = {"PATH": "/usr/bin", "TOLD": 'a "b" 100% $HOME'}
    service = PlannedService("controller", ("/bin/true", "--agents", "a b", "50%", "$HOME"), "/var/log/a.log", env)
    unit = tmp_path / "dalsegno-controller.service"
    unit.write_text(unit_text(plan_to_json(replace(PLAN, services=(service,)))["services"][0], "demo"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_scopes_of_slurmd_end_with_it():
    """`tests/ssh/test_virtual_machines.py` shows on real machines that no process is left."""
    assert step_scopes("slurmd.service", "n1") == ["n1_slurmstepd.scope", "slurmstepd.scope"]
    assert step_scopes("slurmctld.service", "n1") == []


class OnePort:
    """systemctl on a machine whose units all listen on the same port."""

    def __init__(self, *running: str) -> None:
        self.active, self.enabled, self.failed = set(running), set(running), set[str]()

    def __call__(self, argv: list[str], timeout_s: float = 120.0) -> tuple[int, str]:
        verb, unit = argv[1], argv[-1]
        if verb == "restart":
            self.active.discard(unit)
            (self.failed if self.active else self.active).add(unit)
        elif verb in ("enable", "disable"):
            (self.enabled.add if verb == "enable" else self.enabled.discard)(unit)
            if "--now" in argv:
                self.active.discard(unit)
        elif verb == "reset-failed":
            self.failed.discard(unit)
        asked = {"is-active": self.active, "is-failed": self.failed, "is-enabled": self.enabled}
        return int(verb in asked and unit not in asked[verb]), ""


@pytest.mark.parametrize("enabled", [(), ("dalsegno-node-exporter.service",)])
def test_service_that_gets_another_unit_stops_the_recorded_one(tmp_path: Path, enabled: tuple[str, ...]):
    """The second case is a machine on which the new unit could not take the port of the recorded one."""
    old, new = "prometheus-node-exporter.service", "dalsegno-node-exporter.service"
    service = PlannedService("node-exporter", ("/bin/true",), "/var/log/a.log", {}, "2", ready=("/bin/true",))
    record = Record(str(tmp_path))
    record.part("services")["node-exporter"] = {
        "unit": old, "own": False, "revision": "1", "was_enabled": False, "was_active": False,
    }  # fmt: skip
    services = MachineServices(plan_to_json(replace(PLAN, services=(service,))), record, "")
    systemctl = OnePort(old)
    systemctl.enabled |= {*enabled}
    services.supervisor = Systemd(services, systemctl, str(tmp_path))
    services.apply(lambda name: None)
    assert (systemctl.active, systemctl.enabled, systemctl.failed) == ({new}, {new}, set())
    kept = Record(str(tmp_path)).part("services")["node-exporter"]
    assert (kept["unit"], kept["own"], kept["revision"]) == (new, True, "2")
    assert (kept["was_enabled"], kept["was_active"]) == (False, False), "a removal must not start our own unit"
    assert services.changes() == []

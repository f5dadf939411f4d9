"""Containers on HyperPod: which plugin an instance uses, the line in plugstack.conf, and images that `up` imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.containers.native import HEADER, HELPER, PLUGIN
from dalsegno.errors import DalsegnoError
from dalsegno.setup.machine_record import BEGIN
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.hyperpod.answers import SlurmRole
from dalsegno.targets.hyperpod.containers import ContainerSetup, InstancePaths, read_stack, with_line
from dalsegno.targets.hyperpod.lifecycle import render_entry
from tests.targets.hyperpod.conftest import CPU, cluster_of, open_hyperpod
from tests.targets.hyperpod.test_changes import LUSTRE, NETWORK
from tests.targets.hyperpod.test_connections import key_file

THEIRS = "required /opt/slurm/lib/slurm/spank_auto_resume.so"
KEY = "  ssh_key: ~/.ssh/id_ed25519.pub\n"
FSX = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G, source: fs-0123456789abcdef0}]\n"
IMAGES = "containers: {folder: /fsx/images, images: ['docker://a/b:1']}\n"


class Instance:
    """An instance below a folder, with the headers of this machine's Slurm. Its commands are recorded."""

    def __init__(self, root: Path, answer: Callable[[tuple[str, ...]], Completed | str] = lambda argv: "") -> None:
        self.paths = InstancePaths(*(root / name for name in ("slurm", "local", "own", "data", "unpacked", "received")))
        self.answer = answer
        self.runner = FakeRunner(lambda argv, stdin: self._run(argv))
        headers = self.paths.slurm / "include/slurm"
        headers.mkdir(parents=True)
        (headers / HEADER.name).write_text("#define SLURM_VERSION_NUMBER 0x180b00\n")
        self.paths.stack.parent.mkdir()
        self.paths.stack.write_text(f"{THEIRS}\n")

    def _run(self, argv: tuple[str, ...]) -> Completed | str:
        if argv[0].endswith("gcc"):
            Path(argv[-1]).touch()
        return self.answer(argv)

    def install_pyxis(self, folder: Path) -> str:
        plugin = folder / "lib/slurm/spank_pyxis.so"
        plugin.parent.mkdir(parents=True)
        plugin.touch()
        return str(plugin)

    def setup(self, tools: dict[str, str] | None = None) -> ContainerSetup:
        return ContainerSetup(self.runner, self.paths, lambda: None, tools or {})

    @property
    def stack(self) -> str:
        return self.paths.stack.read_text()

    def commands(self) -> list[str]:
        return [" ".join([Path(argv[0]).name, *argv[1:]]) for argv in self.runner.calls]


def test_image_without_pyxis_gets_our_plugin_for_its_slurm_and_slurmctld_is_told_once(tmp_path: Path):
    host = Instance(tmp_path)
    for _ in range(2):
        host.setup().switch_on(SlurmRole.CONTROLLER, "/fsx/images")
    (line,) = (line for line in host.stack.splitlines() if PLUGIN in line)
    assert line.startswith(f"optional {host.paths.link}/{PLUGIN} data=") and line.endswith("images=/fsx/images")
    assert "resume=none" in line.split(), "HyperPod's own plugin has --auto-resume"
    assert "squashfs=user" in line.split(), "machines of others may write to FSx as root"
    assert (host.paths.link / PLUGIN).exists() and (host.paths.link / HELPER).exists()
    *compiled, told = host.commands()
    assert len(compiled) == 2 and all(f"-I{host.paths.slurm}/include " in command for command in compiled)
    assert told == "scontrol reconfigure"


def test_pyxis_that_the_image_has_registered_is_left_alone(tmp_path: Path):
    for number, line in enumerate(("required {pyxis}", "include plugstack.conf.d/*.conf")):
        host = Instance(tmp_path / str(number))
        pyxis = host.install_pyxis(host.paths.slurm)
        folder = host.paths.stack.parent / "plugstack.conf.d"
        folder.mkdir()
        (folder / "pyxis.conf").write_text(f"required {pyxis}\n")
        before = f"{THEIRS}\n{line.format(pyxis=pyxis)}\n"
        host.paths.stack.write_text(before)
        host.paths.received.mkdir()
        (host.paths.received / "plugstack.conf").write_text(before)  # without the files that it includes
        for role in SlurmRole:
            host.setup().switch_on(role)
        assert (host.stack, host.commands()) == (before, [])


def test_pyxis_that_nobody_has_registered_is_registered_without_a_second_plugin(tmp_path: Path):
    host = Instance(tmp_path)
    pyxis = host.install_pyxis(host.paths.local)
    host.setup().switch_on(SlurmRole.CONTROLLER)
    assert read_stack(host.paths.stack) == [THEIRS] and f"\noptional {pyxis}\n" in host.stack
    assert host.commands() == ["scontrol reconfigure"] and PLUGIN not in host.stack


def test_our_plugin_leaves_when_the_image_gets_pyxis(tmp_path: Path):
    host = Instance(tmp_path)
    host.setup().switch_on(SlurmRole.CONTROLLER)
    host.paths.stack.write_text(f"{host.stack}required {host.install_pyxis(host.paths.slurm)}\n")
    host.setup().switch_on(SlurmRole.CONTROLLER)
    assert PLUGIN not in host.stack and host.stack.count("spank_pyxis.so") == 1


def test_lines_of_others_survive_and_our_line_is_removed_with_the_section(tmp_path: Path):
    host = Instance(tmp_path)
    host.paths.stack.write_text(THEIRS)  # without a newline at the end
    host.setup().switch_on(SlurmRole.CONTROLLER)
    assert host.stack.splitlines()[0] == THEIRS
    host.setup().switch_off(SlurmRole.CONTROLLER)
    assert host.stack == f"{THEIRS}\n"
    host.setup().switch_off(SlurmRole.CONTROLLER)
    assert host.commands().count("scontrol reconfigure") == 2
    assert with_line("", "") == ""


def test_instance_without_plugstack_conf_gets_one_that_only_root_can_change(tmp_path: Path):
    host = Instance(tmp_path)
    host.paths.stack.unlink()
    host.setup().switch_on(SlurmRole.COMPUTE)
    assert PLUGIN in host.stack and host.paths.stack.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("role", "restarts"), [(SlurmRole.CONTROLLER, 0), (SlurmRole.COMPUTE, 1), (SlurmRole.LOGIN, 3)]
)
def test_login_node_fetches_until_slurmctld_has_the_line_and_compute_node_once(tmp_path: Path, role, restarts):
    """The third fetch brings the line."""
    host = Instance(tmp_path)
    received = host.paths.received / "plugstack.conf"
    received.parent.mkdir()

    def answer(argv: tuple[str, ...]) -> str:
        if host.commands().count("systemctl restart slurmd") == 3:
            received.write_text(host.stack)
        return ""

    host.answer = answer
    host.setup().switch_on(role)
    assert host.commands().count("systemctl restart slurmd") == restarts


def test_login_node_stops_waiting_for_a_controller_that_never_answers(tmp_path: Path):
    host = Instance(tmp_path)
    host.paths.received.mkdir()
    host.setup().switch_on(SlurmRole.LOGIN)
    assert host.commands().count("systemctl restart slurmd") == 30


def test_missing_packages_are_installed_with_newer_lists_if_the_first_attempt_fails(tmp_path: Path):
    def answer(argv: tuple[str, ...]) -> Completed | str:
        return Completed(argv, 100, stderr="no such package") if len(host.commands()) == 1 else ""

    host = Instance(tmp_path, answer)
    host.setup({"no-such-program": "gcc", "/etc": "base-files"}).switch_on(SlurmRole.CONTROLLER)
    asked = [command.split("Timeout=600 ")[1] for command in host.commands() if command.startswith("apt-get")]
    assert asked == ["install --no-install-recommends gcc", "update", "install --no-install-recommends gcc"]


def test_image_without_headers_of_slurm_is_refused(tmp_path: Path):
    host = Instance(tmp_path)
    (host.paths.slurm / "include/slurm" / HEADER.name).unlink()
    with pytest.raises(DalsegnoError, match="Slurm's headers"):
        host.setup().switch_on(SlurmRole.COMPUTE)
    assert host.stack == f"{THEIRS}\n", "srun would load no plugin at all"


@pytest.mark.parametrize(
    ("rest", "arguments"),
    [
        ("", 'off "$role"'),
        ("containers: {enabled: false}\n", 'off "$role"'),
        ("containers: {enabled: true}\n", 'on "$role"'),
        ("containers: {enabled: true, folder: /fsx/images}\n", 'on "$role" /fsx/images'),
    ],
)
def test_lifecycle_script_switches_containers_as_the_file_says(rest: str, arguments: str):
    lines = render_entry(cluster_of(CPU, "", rest), []).splitlines()
    (line,) = (line for line in lines if "hyperpod-containers" in line)
    assert line.endswith(f"programs.py hyperpod-containers {arguments}")
    assert any(BEGIN in line for line in lines) == arguments.startswith("off"), "nothing runs if nothing is to remove"


def test_images_of_the_file_are_imported_on_the_controller(aws, tmp_path: Path):
    runner, said = FakeRunner(lambda argv, stdin: ""), list[str]()
    target = open_hyperpod(tmp_path, runner)
    cluster = cluster_of(CPU, f"{NETWORK}{key_file(tmp_path)}", f"{LUSTRE}{IMAGES}")
    plan = target.plan(cluster)
    target.apply(plan, said.append)
    target.import_images(plan, said.append)
    command = (
        "sudo env DALSEGNO_IMAGES=/fsx/images /usr/local/bin/dalsegno image import --or-kept --quiet docker://a/b:1"
    )
    assert runner.calls[-1][-2:] == ("demo-head", command) and "importing" in said[-1]
    assert target.plan(cluster).import_images == ()

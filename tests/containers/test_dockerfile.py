"""`dalsegno image build` with Dockerfiles: builds by real builders, what ends them, and which folders are built."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.containers.dockerfile import DockerfileBuild, find_builder, find_dockerfile
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError
from dalsegno.system.children import arguments, descendants
from dalsegno.system.machine import program
from dalsegno.system.processes import LocalRunner
from tests.conftest import Command, CommandResult
from tests.containers.dockerfiles import NEEDS_BUILDER, builder_env, write_context
from tests.containers.images import LOWER, Layout, unpack
from tests.containers.registries import push, registry
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
LISTS_CONTAINERS = {
    "buildah": ["buildah", "containers", "--quiet"],
    "podman": ["podman", "ps", "--all", "--external", "--quiet"],
}


class Builds:
    """`dalsegno image build` with its own store, a folder with a Dockerfile, and storage of builders."""

    def __init__(self, command: Command, folder: Path) -> None:
        self._command = command
        self.context = write_context(folder / "context")
        self.store = folder / "store"

    def run(self, *words: str | Path) -> CommandResult:
        return self._command("image", *words)

    def build(self, *words: str | Path) -> CommandResult:
        return self.run("build", self.context, *words)

    def show(self, image: str | Path) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.run("show", "--json", image).stdout)
        return found

    def leftovers(self, builder: str = "buildah") -> tuple[list[Path], str]:
        """Return what a build left in the store apart from images, and in the builder's storage apart from images."""
        containers = subprocess.run(LISTS_CONTAINERS[builder], capture_output=True, text=True, check=True, timeout=60)
        return list((self.store / "blobs").iterdir()), containers.stdout


@pytest.fixture
def builds(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Builds:
    for name, value in builder_env(tmp_path / "builder").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DALSEGNO_IMAGES", str(tmp_path / "store"))
    return Builds(command, tmp_path)


WITH_PODMAN = pytest.mark.skipif(program("podman") is None, reason="podman is not installed")


@NEEDS_BUILDER
@pytest.mark.cluster
@pytest.mark.parametrize("builder", ["buildah", pytest.param("podman", marks=[pytest.mark.long, WITH_PODMAN])])
def test_image_has_the_files_and_settings_of_its_dockerfile(
    builds: Builds, builder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OF", "the environment")
    target = tmp_path / "x.sqsh"
    args = ["--builder", builder, "--target", "base", "--build-arg", "WHO=wörld", "--build-arg", "OF"]
    done = builds.build(*args, "-o", target)
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    assert f"building {builds.context}/Dockerfile with {builder}\n" in done.stderr
    assert "\nSTEP 1/9: FROM scratch AS base\n" in done.stderr
    assert (unpack(target, tmp_path / "out") / "greeting").read_text() == "hello wörld of the environment\n"
    shown = builds.show(target)
    assert (shown["workdir"], shown["entrypoint"], shown["cmd"]) == (
        "/work", ["/bin/sh", "-e"], ["-c", "cat /greeting"],
    )  # fmt: skip
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert shown["env"] == {"PATH": path, "A": "1", "B": "two words"}
    assert builds.leftovers(builder) == ([], "")


@NEEDS_BUILDER
@pytest.mark.cluster
def test_stored_image_is_named_after_its_dockerfile_and_stage(builds: Builds):
    """A second build of the same files repeats no step, and finds its image in the store."""
    other = builds.context / "other.Dockerfile"
    other.write_text("FROM scratch\nCOPY bin/busybox /b\n")
    first = builds.build("--target", "base")
    assert first.returncode == 0, first.stderr
    again = builds.build("--target", "base")
    assert again.stdout == first.stdout and "Using cache" in again.stderr and "packing" not in again.stderr
    quiet = builds.build("--file", other, "--quiet")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    names = {name for each in json.loads(builds.run("ls", "--json").stdout) for name in each["names"]}
    assert names == {f"{builds.context}:base", str(other)}
    assert builds.show(f"{builds.context}:base")["path"] == first.stdout.strip()
    assert builds.run("verify").returncode == 0


@NEEDS_BUILDER
@pytest.mark.cluster
def test_dockerfile_continues_an_image_of_a_registry(builds: Builds, tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    with registry(tmp_path) as address:
        push(tmp_path / "oci", "x", address, "team/app:v1")
        (builds.context / "Containerfile").write_text(f"FROM {address}/team/app:v1\nCOPY bin/busybox /added\n")
        done = builds.build("-o", tmp_path / "x.sqsh")
    assert done.returncode == 0, done.stderr
    root = unpack(tmp_path / "x.sqsh", tmp_path / "out")
    assert (root / "added").is_file() and (root / "over").read_bytes() == b"old"
    assert builds.show(tmp_path / "x.sqsh")["workdir"] == "/work dir"


@NEEDS_BUILDER
@pytest.mark.cluster
def test_failed_step_shows_the_last_lines_and_leaves_nothing(builds: Builds):
    """A background process of the step, which keeps the builder's output open, does not delay the error."""
    done = builds.build("--quiet", "--target", "failing", "--build-arg", "SECRET=hush hush")
    assert (done.returncode, done.stdout) == (1, "")
    assert " --build-arg SECRET --target failing " in done.stderr and "ended with code 3:\n" in done.stderr
    assert "\n  about to fail\n" in done.stderr and "exit status 3\nhint: " in done.stderr
    assert "hush" not in done.stderr
    assert builds.leftovers() == ([], "")


@NEEDS_BUILDER
@pytest.mark.cluster
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_build_ends_the_builder_and_leaves_nothing(builds: Builds, number: signal.Signals, code: int):
    argv = [sys.executable, "-m", "dalsegno", "image", "build", str(builds.context), "--target", "slow"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True)
    try:
        (sleep,) = eventually(lambda: [pid for pid in descendants(process.pid) if arguments(pid)[-1:] == ["4321"]][-1:])
        process.send_signal(number)
        _, output = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == code and "\nerror: " in output
    assert arguments(sleep) == [] and builds.leftovers() == ([], "")


# Builders that are not installed


def stand_in(folder: Path, name: str, script: str) -> Path:
    """Put a script in the place of a builder, and return the file in which it records its arguments."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\n{script}\n')
    (folder / name).chmod(0o755)
    return folder / "asked"


WRITES_ID = '{ while [ "$1" != --iidfile ]; do shift; done; echo sha256:1234 > "$2"; }'


@pytest.mark.cluster
def test_image_that_docker_has_built_is_imported_by_its_id(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for `docker` saves an image that another tool made."""
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    copy = ["skopeo", "--insecure-policy", "copy", "-q", f"oci:{tmp_path}/oci:x", f"docker-archive:{tmp_path}/saved"]
    subprocess.run(copy, check=True, timeout=60)
    script = f'[ "$1" = save ] && cat {tmp_path}/saved > "$3" || {WRITES_ID}'
    asked = stand_in(tmp_path / "bin", "docker", script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("dalsegno.system.machine.SEARCH", (f"{tmp_path}/bin", "/usr/bin"))
    done = builds.build("--builder", "docker", "--build-arg", "A=b", "-o", tmp_path / "x.sqsh")
    assert done.returncode == 0, done.stderr
    assert builds.show(tmp_path / "x.sqsh")["workdir"] == "/work dir"
    build, save = asked.read_text().splitlines()
    assert build.startswith(f"build --force-rm --file {builds.context}/Dockerfile --iidfile ")
    assert build.endswith(f".id --build-arg A=b {builds.context}") and save.endswith(".part sha256:1234")
    assert list((builds.store / "blobs").iterdir()) == []


def test_file_that_cannot_be_created_is_refused_before_the_build(
    builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = stand_in(tmp_path / "bin", "docker", "exit 1")
    monkeypatch.setattr("dalsegno.system.machine.SEARCH", (f"{tmp_path}/bin", "/usr/bin"))
    done = builds.build("--builder", "docker", "-o", "/proc/x.sqsh")
    assert (done.returncode, done.stdout) == (1, "") and "error: cannot write /proc/x.sqsh" in done.stderr
    assert "or name another file with `-o`" in done.stderr and "DALSEGNO" not in done.stderr
    assert not asked.exists()


def test_first_builder_that_is_installed_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dalsegno.system.machine.SEARCH", (str(tmp_path),))
    with pytest.raises(DalsegnoError, match="no builder for Dockerfiles is installed") as caught:
        find_builder()
    assert "install the package buildah" in caught.value.hint
    with pytest.raises(DalsegnoError, match="`docker` is not installed") as caught:
        find_builder("docker")
    assert caught.value.hint == "install the package docker.io"
    for name in ("docker", "podman", "buildah"):
        stand_in(tmp_path, name, "")
        assert find_builder() == f"{tmp_path}/{name}"
    assert find_builder("docker") == f"{tmp_path}/docker"


# The command of a builder


def test_build_arguments_and_stage_are_passed_on(tmp_path: Path):
    build = DockerfileBuild("/usr/bin/buildah", tmp_path, tmp_path / "x.Dockerfile", ("A=b c", "D"), "last")
    assert build.argv(Path("/id")) == [
        "/usr/bin/buildah", "build", "--format", "docker", "--layers", "--force-rm",
        "--file", f"{tmp_path}/x.Dockerfile", "--iidfile", "/id",
        "--build-arg", "A=b c", "--build-arg", "D", "--target", "last", str(tmp_path),
    ]  # fmt: skip


def test_builder_without_an_id_of_the_image_is_an_error(tmp_path: Path):
    stand_in(tmp_path / "bin", "docker", "echo done")
    build = DockerfileBuild(f"{tmp_path}/bin/docker", tmp_path, tmp_path / "Dockerfile")
    with pytest.raises(CommandFailed, match="ended with code 0:\n  done") as caught:
        build.save(tmp_path / "x.part", LocalRunner())
    assert "wrote no id" in caught.value.hint


@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_store_with_a_colon_in_its_path_is_refused_before_the_build(tmp_path: Path, builder: str):
    asked = stand_in(tmp_path / "bin", builder, "")
    build = DockerfileBuild(f"{tmp_path}/bin/{builder}", tmp_path, tmp_path / "Dockerfile")
    with pytest.raises(DalsegnoError, match=rf"{builder} cannot save images in .*/a:b, because the path contains `:`"):
        build.save(tmp_path / "a:b/x.part", LocalRunner())
    assert not asked.exists()


# Which folders are built


def test_folder_with_a_dockerfile_is_built_and_any_other_folder_is_packed(tmp_path: Path):
    assert find_dockerfile(tmp_path, None) is None and find_dockerfile(tmp_path / "nowhere", None) is None
    for name in ("Dockerfile", "Containerfile"):  # as with buildah and Podman, the second has precedence
        (tmp_path / name).touch()
        assert find_dockerfile(tmp_path, None) == tmp_path / name
    assert find_dockerfile(tmp_path, tmp_path / "Dockerfile") == tmp_path / "Dockerfile"
    (tmp_path / "etc").mkdir()
    assert find_dockerfile(tmp_path, None) == tmp_path / "Containerfile"


def test_root_file_system_with_a_dockerfile_is_refused_until_one_of_the_two_is_chosen(tmp_path: Path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "bin").symlink_to("etc")  # as on most distributions, a link
    (tmp_path / "Dockerfile").touch()
    with pytest.raises(UsageError, match="has a Dockerfile, and the folders of a root file system") as caught:
        find_dockerfile(tmp_path, None)
    assert f"`--file {tmp_path}/Dockerfile` builds" in caught.value.hint and "`--rootfs` packs" in caught.value.hint
    assert find_dockerfile(tmp_path, tmp_path / "Dockerfile") == tmp_path / "Dockerfile"


@pytest.mark.cluster
def test_rootfs_option_packs_a_folder_with_a_dockerfile(builds: Builds, tmp_path: Path):
    done = builds.build("--rootfs", "--cmd", "/bin/busybox id", "-o", tmp_path / "x.sqsh")
    assert done.returncode == 0 and "building" not in done.stderr
    assert (unpack(tmp_path / "x.sqsh", tmp_path / "out") / "Dockerfile").is_file()
    assert builds.show(tmp_path / "x.sqsh")["cmd"] == ["/bin/busybox", "id"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["context", "--env", "A=1"], "`--env` has no effect: context/Dockerfile is built"),
        (["context", "--cmd", "id"], "`--cmd` has no effect"),
        (["context", "--rootfs", "--target", "base"], "`--target` has no effect: context is packed as it is"),
        (["/bin", "--build-arg", "A=1"], "`--build-arg` has no effect: /bin is packed as it is"),
        (["context", "--rootfs", "--file", "context/Dockerfile"], "`--rootfs` packs a folder, and `--file` builds"),
        (["context", "--file", "nowhere"], "no file nowhere"),
        (["context/Dockerfile"], "give its folder: `dalsegno image build context`"),
        (["context/bin/busybox"], "give its folder: `dalsegno image build context/bin --file context/bin/busybox`"),
        (["context", "--build-arg", "=hush"], "invalid build argument\n"),
        (["context", "--builder", "kaniko"], "'kaniko' is not one of 'buildah', 'podman', 'docker'"),
    ],
)
def test_every_error_in_the_options_of_a_build_has_a_hint(
    builds: Builds, words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    done = builds.run("build", *words)
    assert done.returncode in (1, 2) and error in done.stderr and "\nhint: " in done.stderr
    assert "hush" not in done.stderr and not builds.store.exists()

"""`dalsegno image`: images built from a folder and from a Python environment, imports, and errors."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.containers import parse_name
from dalsegno.containers.build import Builder
from dalsegno.containers.import_image import Importer
from dalsegno.containers.manifest import Config
from dalsegno.containers.squash import MEMORY_VARIABLE, memory_options
from dalsegno.containers.store import ImageStore, NoProgress
from tests.conftest import Command, CommandResult
from tests.containers.images import LOWER, Layout, member, symlink, tree, unpack
from tests.containers.registries import push, registry

pytestmark = pytest.mark.cluster  # real programs: sqfstar, ldd, Python's own venv


class Image:
    """`dalsegno image` with its own store."""

    def __init__(self, command: Command) -> None:
        self._command = command

    def run(self, *words: str | Path) -> CommandResult:
        return self._command("image", *words)

    def path(self, *words: str | Path) -> Path:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())


@pytest.fixture
def image(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Image:
    monkeypatch.setenv("DALSEGNO_IMAGES", str(tmp_path / "store"))
    return Image(command)


def test_a_folder_becomes_an_image_and_can_be_listed_verified_and_removed(image: Image, tmp_path: Path):
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_bytes(b"x" * 300_000)
    (root / "bin/tool").chmod(0o4755)
    os.link(root / "bin/tool", root / "bin/same")
    (root / "link").symlink_to("bin")
    path = image.path("build", root, "--env", "A=1", "--workdir", "/w")
    found = tree(unpack(path, tmp_path / "out"))
    assert found["bin/tool"][0] == "-rwxr-xr-x" and found["bin/tool"][3:] == (b"x" * 300_000, "bin/same")
    assert found["link"][3] == "bin" and found["etc/environment"][3] == b"A=1\n" and found["w"][0] == "drwxr-xr-x"

    (listed,) = json.loads(image.run("ls", "--json").stdout)
    assert listed["names"] == [str(root)] and listed["path"] == str(path) and listed["workdir"] == "/w"
    assert image.run("verify").stdout == f"{root}: whole\n"
    with open(path, "r+b") as file:
        file.seek(2000)
        file.write(b"\xff\0\xff")
    broken = image.run("verify")
    assert broken.returncode == 1 and broken.stdout == f"{root}: damaged; remove it and import it again\n"
    assert image.run("rm", root).returncode == 0 and not path.exists()
    assert image.run("ls").stdout == ""


def test_image_built_for_a_job_uses_a_quarter_of_the_jobs_memory(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert memory_options({}) == [] and memory_options({MEMORY_VARIABLE: "much"}) == []
    assert memory_options({MEMORY_VARIABLE: "8192"}) == ["-mem", "2048M"]
    assert memory_options({MEMORY_VARIABLE: "100"}) == ["-mem", "64M"]
    (tmp_path / "root").mkdir()
    monkeypatch.setenv(MEMORY_VARIABLE, "100")
    assert image.path("build", tmp_path / "root").exists(), "sqfstar knows the option"


def test_image_whose_name_moved_is_hidden_and_swept(image: Image, tmp_path: Path):
    (tmp_path / "root").mkdir()
    first = image.path("build", tmp_path / "root")
    (tmp_path / "root/new").touch()
    second = image.path("build", tmp_path / "root")
    assert json.loads(image.run("show", tmp_path / "root", "--json").stdout)["path"] == str(second) != str(first)
    assert json.loads(image.run("gc", "--json").stdout)["files"] > 0
    assert not first.exists() and second.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its root")
def test_python_environment_runs_in_its_image_alone(image: Image, tmp_path: Path):
    venv, added, left = tmp_path / "env", tmp_path / "added", tmp_path / "left"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "mine.py").write_text("import ssl, sqlite3, ctypes, edited\nWORD = 'mine'\n")
    (site / "projects.pth").write_text(f"{added}\n{left}\n")
    for project in (added, left):
        project.mkdir()
        (project / "edited.py").write_text("")
    done = image.run("from-venv", venv, "--add", added, "-o", tmp_path / "env.sqsh")
    assert done.stderr.count("warning:") == 1 and f"{left} is on sys.path but outside the environment" in done.stderr
    root = unpack(tmp_path / "env.sqsh", tmp_path / "out")
    script = "set -a; . /etc/environment; exec python -c 'import mine; print(mine.WORD)'"
    inside = subprocess.run(["chroot", root, "/bin/sh", "-c", script], capture_output=True, text=True)
    assert inside.stdout == "mine\n", inside.stderr
    assert (root / str(added)[1:]).is_dir() and not (root / str(left)[1:]).exists()


def test_import_accepts_enroot_arguments_and_writes_a_complete_file(image: Image, tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    target = tmp_path / "x.sqsh"
    done = image.run("import", "--arch", "x86_64", "--output", target, "--", f"oci:{tmp_path}/oci:x")
    assert (done.returncode, done.stdout) == (0, f"{target}\n") and "packing" in done.stderr
    shown = json.loads(image.run("show", "--json", target).stdout)
    assert shown["workdir"] == "/work dir" and shown["env"]["GREETING"] == "hi there"
    assert (shown["entrypoint"], shown["cmd"]) == ([], ["sh", "-c", "echo $0"])
    assert "\ncmd         sh -c 'echo $0'\n" in image.run("show", target).stdout
    again = image.run("import", "-o", target, f"oci:{tmp_path}/oci:x")
    assert again.returncode == 2 and "already exists" in again.stderr
    nowhere = image.run("import", "-o", tmp_path / "no/x.sqsh", f"oci:{tmp_path}/oci:x")
    assert nowhere.returncode == 2 and "no folder" in nowhere.stderr


def test_output_file_is_a_copy_of_the_stored_image_without_leftovers(image: Image, tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    (tmp_path / "of").mkdir()
    kept, target = image.path("import", f"oci:{tmp_path}/oci:x"), tmp_path / "of/x.sqsh"
    for _ in range(2):
        assert image.run("import", "-f", "-o", target, f"oci:{tmp_path}/oci:x").returncode == 0
    assert list(target.parent.iterdir()) == [target] and target.read_bytes() == kept.read_bytes()
    with open(target, "r+b") as file:
        file.write(b"another image")
    assert image.run("verify").returncode == 0, "writing to the copy does not change the stored image"


def test_damaged_stored_image_is_not_copied_and_force_imports_it_again(image: Image, tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    name, target = f"oci:{tmp_path}/oci:x", tmp_path / "x.sqsh"
    kept = image.path("import", name)
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100] + b"damaged!" + whole[108:])
    assert image.path("import", name) == kept and kept.read_bytes() != whole, "not all of it is read each time"
    done = image.run("import", name, "-o", target)
    assert done.returncode == 0 and f"the stored image {kept} is damaged, and is not used" in done.stderr
    assert image.run("verify", target).returncode == 0 and image.run("verify", name).returncode == 1
    assert image.path("import", "--force", name) == kept
    assert image.run("verify", name).returncode == 0


def test_import_fails_without_registry_unless_or_kept_is_given(image: Image, tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    with registry(tmp_path) as address:
        push(tmp_path / "oci", "x", address, "team/app:v1")
        kept = image.path("import", f"{address}#team/app:v1")
    for more in ([], ["--force", "--or-kept"]):
        away = image.run("import", *more, f"{address}#team/app:v1")
        assert (away.returncode, away.stdout) == (1, "") and f"no answer from {address}" in away.stderr
    assert str(kept) in image.run("import", f"{address}#team/app:v1").stderr
    taken = image.run("import", "--or-kept", f"{address}#team/app:v1")
    assert (taken.returncode, taken.stdout) == (0, f"{kept}\n") and "as it was imported before" in taken.stderr


def test_rm_removes_one_name_and_the_image_with_its_last_name(image: Image, tmp_path: Path):
    layout = Layout(tmp_path / "oci")
    for tag in ("x", "y", "z"):
        layout.image(tag, [(LOWER, "gzip")])
    names = [f"oci:{tmp_path}/oci:{tag}" for tag in ("x", "y", "z")]
    kept = image.path("import", names[0])
    assert [image.path("import", name) for name in names[1:]] == [kept, kept]
    removed = image.run("rm", names[0]).stderr
    assert f"removed the name {names[0]}; the image keeps the name {names[1]}, {names[2]}\n" in removed
    assert kept.exists() and image.run("show", names[0]).returncode == 1
    assert image.run("rm", names[1], names[2]).returncode == 0 and not kept.exists()
    for name in names[:2]:
        image.path("import", name)
    digest = json.loads(image.run("ls", "--json").stdout)[0]["digest"]
    assert image.run("rm", digest, names[1]).returncode == 0 and not kept.exists()


def test_verify_compares_a_file_with_its_record_or_unpacks_it(image: Image, tmp_path: Path):
    root, file = tmp_path / "root", tmp_path / "x.sqsh"
    root.mkdir()
    (root / "data").write_bytes(os.urandom(300_000))
    image.path("build", root, "-o", file)
    assert image.run("verify", file).stdout == f"{file}: whole: {root}\n"
    moved = tmp_path / "moved.sqsh"
    moved.write_bytes(file.read_bytes())
    assert image.run("verify", moved).stdout == f"{moved}: whole: {root}\n"
    strange = tmp_path / "strange.sqsh"  # made by another tool
    subprocess.run(["mksquashfs", root, strange, "-comp", "zstd", "-quiet", "-no-progress"], check=True, timeout=60)
    assert "readable to its end" in image.run("verify", strange).stdout

    for path in (file, strange):
        path.write_bytes(path.read_bytes()[:200_000])
    broken = image.run("verify", "--json", file, strange)
    first, second = json.loads(broken.stdout)
    assert broken.returncode == 1
    assert first["fault"] == f"differs from what was written there for {root}; import it again"
    assert second["fault"].startswith("damaged: FATAL ERROR") and second["names"] == []
    cut = image.run("show", strange)
    assert (cut.returncode, cut.stdout) == (1, "") and f"{strange} is damaged: " in cut.stderr
    file.unlink()
    assert "removed 1 file, " in image.run("gc").stderr


class RecordingProgress(NoProgress):
    """Records the total and the progress of each stage."""

    def __init__(self) -> None:
        self.stages: list[list[int]] = []

    def stage(self, text: str, total: int = 0, here: int = 0) -> None:
        self.stages.append([total, 0])

    def advance(self, count: int) -> None:
        self.stages[-1][1] += count


def test_import_progress_ends_at_its_total(tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [
        ([member("a", b"a" * 3000), member("b", b"b" * 500_000)], "gzip"),
        ([member("c", b"c" * 3000), symlink("d", "c")], "gzip"),
    ])  # fmt: skip
    progress = RecordingProgress()
    importer = Importer(ImageStore(tmp_path / "store"), progress)
    importer.to_file(parse_name(f"oci:{tmp_path}/oci:x"), tmp_path / "x.sqsh")
    fetching, packing, reading = progress.stages[-3:]
    assert fetching[0] == fetching[1] > 0 and packing[0] == packing[1] > 500_000
    assert reading == [(tmp_path / "x.sqsh").stat().st_size] * 2
    stored = importer.to_store(parse_name(f"oci:{tmp_path}/oci:x"))
    assert progress.stages[-1] == [stored.record.size] * 2


def test_file_is_built_where_no_store_can_be_created(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a").write_bytes(b"a" * 3000)
    (tmp_path / "file").touch()
    progress = RecordingProgress()
    builder = Builder(ImageStore(tmp_path / "file/store"), progress)
    target = tmp_path / "x.sqsh"
    assert builder.build_folder(tmp_path / "root", Config(), target) == target
    packing, reading = progress.stages[-2:]
    assert packing[0] == packing[1] > 3000, "the settings files are counted too"
    assert reading == [target.stat().st_size] * 2


def test_image_for_another_architecture_is_not_imported(image: Image, tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")], arch="amd64")
    name = f"oci:{tmp_path}/oci:x"
    error = f"error: {name} has no image for arm64\nhint: it is for amd64; use `--arch amd64`\n"
    for where in ([], ["-o", tmp_path / "x.sqsh"]):
        done = image.run("import", "-a", "arm64", *where, name)
        assert done.returncode == 1 and done.stderr.endswith(error)
    assert image.run("ls").stdout == "" and not (tmp_path / "x.sqsh").exists()
    assert image.run("import", "-a", "amd64", name).returncode == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["import", "./x.sqsh"], "is a path, but there is no such file"),
        (["import", "/bin"], "is already a file or a folder"),
        (["import", "docker-archive:nothing.tar"], "no file"),
        (["import", "oci:nowhere"], "is not an OCI layout"),
        (["import", "-a", "vax", "ubuntu"], "unknown architecture `vax`"),
        (["build", "nowhere"], "no folder nowhere"),
        (["build", "/sys/class/mem", "-o", "/tmp"], "/tmp is a folder"),
        (["import", "-f", "-o", "/tmp", "docker-archive:nothing.tar"], "/tmp is a folder"),
        (["build", "/bin", "--env", "A"], "invalid variable 'A'"),
        (["from-venv", "/bin"], "is not a Python environment"),
        (["from-venv", sys.prefix, "--add", "/nowhere"], "no folder /nowhere"),
        (["show", "/bin/sh"], "/bin/sh is not a .sqsh file"),
        (["verify", "/bin/sh"], "/bin/sh is not a .sqsh file"),
        (["verify", "/nowhere.sqsh"], "/nowhere.sqsh: no such file"),
        (["show", "./nowhere.sqsh"], "./nowhere.sqsh: no such file"),
        (["verify", "/dev/null"], "/dev/null is not a regular file"),
        (["rm", "nothing"], "no image `nothing`"),
    ],
)
def test_every_usage_error_has_a_hint(image: Image, words: list[str], error: str):
    done = image.run(*words)
    assert done.returncode in (1, 2) and error in done.stderr and "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_file_as_image_store_is_refused(image: Image, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DALSEGNO_IMAGES", "/bin/sh")
    done = image.run("ls")
    assert (
        done.returncode == 2 and "/bin/sh is not a folder" in done.stderr and "hint: set DALSEGNO_IMAGES" in done.stderr
    )


def test_enroot_imports_where_it_is_installed(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for `enroot` records its arguments and writes the file."""
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    (tmp_path / "bin").mkdir()
    enroot = tmp_path / "bin/enroot"
    enroot.write_text(f'#!/bin/sh\necho "$1 $2 $3 $6" > {tmp_path}/asked\necho made > "$5"\n')
    enroot.chmod(0o755)
    monkeypatch.setattr("dalsegno.system.machine.SEARCH", (f"{tmp_path}/bin", "/usr/bin"))
    with registry(tmp_path) as address:
        push(tmp_path / "oci", "x", address, "app:x")
        made = image.path("import", "-a", "amd64", f"{address}#app:x")
        assert made.read_text() == "made\n"
        assert (tmp_path / "asked").read_text() == f"import --arch amd64 docker://{address}#app:x\n"
        shutil.rmtree(tmp_path / "store")
        assert image.path("import", "--own", "-a", "amd64", f"{address}#app:x").read_bytes()[:4] == b"hsqs"

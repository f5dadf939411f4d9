"""The whole plugin under AddressSanitizer: a small slurmstepd of ours (`stepd.c`) takes it through a step's life."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.containers.native import FLAGS, HELPER, NO_CONTAINER, PARTS, PLUGIN, source_folder

SOMEONE = 54321
LONG = "DALSEGNO_LONG" in os.environ
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of the machine's own kind need root")


@pytest.fixture(scope="module")
def stepd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the helper beside it, as the plugin has it."""
    folder = tmp_path_factory.mktemp("stepd")
    own = str(Path(__file__).with_name("stepd.c"))
    parts = [word for word in PARTS[PLUGIN] if word.endswith(".c")]
    sanitize = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-U_FORTIFY_SOURCE"]
    words = [*FLAGS, *sanitize, "-rdynamic", f"-I{source_folder()}", own, *parts, "-lslurm"]
    for line in ([*words, "-o", str(folder / "stepd")], [*FLAGS, *PARTS[HELPER], "-o", str(folder / HELPER)]):
        subprocess.run(["gcc", *line], cwd=source_folder(), check=True)
    return folder / "stepd"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder as image."""
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to("/tmp/") and path.owner() == "root":
            path.chmod(path.stat().st_mode | 0o055)
    busybox = shutil.which("busybox")
    assert busybox, "busybox-static is not installed"
    for name in ("bin", "etc", "work"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    shutil.copy(busybox, tmp_path / "tree/bin/busybox")
    for name in ("sh", "ls", "touch"):
        (tmp_path / "tree/bin" / name).symlink_to("busybox")
    (tmp_path / "tree/etc/environment").write_text("PATH=/bin\nLANG=image\nSLURM_PROCID=7\nno variable\nODD=a=b c\n")
    (tmp_path / "tree/etc/rc").write_text('cd "/work" && unset OLDPWD\necho entry\nexec "$@"\n')
    return tmp_path / "tree"


def step(stepd: Path, *words: str, uid: int = SOMEONE, **env: str) -> subprocess.CompletedProcess[str]:
    every = {"PATH": os.environ["PATH"], "LANG": "job", "ASAN_OPTIONS": "exitcode=99", **env}
    return subprocess.run(
        [stepd, str(uid), "2", *words], env=every, capture_output=True, text=True, errors="replace", timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


SAY = ("--", "/bin/sh", "-c", "echo $LANG $ODD $(pwd) ${SLURM_PROCID:-none}")


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_tasks_enter_with_what_their_options_say(stepd: Path, tree: Path, uid: int):
    image = f"--container-image={tree}"
    for words, told in {
        (): "image a=b c /work none",
        ("--container-env=LANG,OTHER", "--container-workdir=/etc"): "job a=b c /etc none",
        ("--container-entrypoint", "--container-readonly"): "entry\nimage a=b c /work none",
        ("--container-mount-home", "--container-remap-root", "--container-mounts=/usr/share:/a/b:ro"): (
            "image a=b c /work none"
        ),
    }.items():
        done = step(stepd, image, *words, *SAY, uid=uid)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{told}\n" * 2
    named = step(stepd, *SAY, uid=uid, PYXIS_CONTAINER_IMAGE=str(tree))
    assert (named.returncode, named.stdout) == (0, "image a=b c /work none\n" * 2)


LENT = ",".join(path for path in ("/usr", "/lib", "/lib64") if os.path.isdir(path))  # this machine's Python and tar
OWNERS = """
import os
open("/f", "w").close()
for name, *words in (["chown", "/f", 42, 42], ["lchown", "/f", 42, 42], ["fchown", os.open("/f", 0), 42, 42],
                     ["setgroups", [42]], ["setegid", 42], ["seteuid", 42], ["setregid", 42, 42], ["setreuid", 42, 42],
                     ["setresgid", 42, 42, 42], ["setresuid", 42, 42, 42], ["setgid", 42], ["setuid", 42]):
    try:
        getattr(os, name)(*words)
        print("yes")
    except OSError:
        print("no")
print(os.getuid(), os.stat("/f").st_uid)
"""


@pytest.mark.parametrize(("options", "said", "who"), [(["--container-remap-root"], "yes", 0), ([], "no", SOMEONE)])
def test_who_is_root_inside_may_name_other_users(stepd: Path, tree: Path, options: list[str], said: str, who: int):
    """There is one user only: without the option the kernel says so, with it nothing changes and all succeeds."""
    (tree / "work/owners.py").write_text(OWNERS)
    words = [f"--container-image={tree}", f"--container-mounts={LENT}", *options]
    done = step(stepd, *words, "--", "/usr/bin/python3", "/work/owners.py")
    assert (done.returncode, done.stdout.split()) == (0, ([said] * 12 + [str(who)] * 2) * 2), done.stderr


def test_who_is_root_inside_needs_no_other_user_for_apt(stepd: Path, tree: Path):
    (tree / "etc/apt/apt.conf.d").mkdir(parents=True)
    words = [f"--container-image={tree}", f"--container-mounts={LENT}", "--container-remap-root"]
    done = step(stepd, *words, "--", "/usr/bin/apt-config", "dump", "--format=%v%n", "APT::Sandbox::User")
    assert (done.returncode, done.stdout) == (0, "root\n" * 2), done.stderr


def test_who_is_root_inside_unpacks_what_others_own(stepd: Path, tree: Path):
    with tarfile.open(tree / "work/others.tar", "w") as archive:
        entry = tarfile.TarInfo("theirs")
        entry.uid, entry.gid = 100, 101
        archive.addfile(entry)
    words = [f"--container-image={tree}", f"--container-mounts={LENT}", "--container-remap-root"]
    done = step(stepd, *words, "--", "/usr/bin/tar", "-C", "/", "-xvf", "/work/others.tar")
    assert (done.returncode, done.stdout) == (0, "theirs\n" * 2), done.stderr


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_a_step_saves_its_container(stepd: Path, tree: Path, tmp_path: Path, uid: int):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    target = tmp_path / "out/saved.sqsh"
    done = step(stepd, f"--container-image={tree}", f"--container-save={target}", "--", "/bin/touch", "/new", uid=uid)
    assert done.returncode == 0 and target.exists(), done.stderr


def test_an_import_has_the_jobs_proxy_and_nobody_else_reads_its_password(stepd: Path, tree: Path, tmp_path: Path):
    program = tmp_path / "import"
    note = """(tr '\\0' ' ' </proc/$PPID/cmdline; echo; echo "$http_proxy $HOME $*")"""
    program.write_text(f"#!/bin/sh\n{note} >{tmp_path}/seen/it\necho {tree}\n")
    program.chmod(0o755)
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen").chmod(0o777)
    given = {"PLUGSTACK": f"import={program}", "http_proxy": "http://me:word@proxy", "HOME": "/home/me"}
    done = step(stepd, "--container-image=team/app:v1", "--", "/bin/sh", "-c", "echo ${http_proxy-none}", **given)
    assert (done.returncode, done.stdout) == (0, "http://me:word@proxy\n" * 2), done.stderr
    helper, imports = (tmp_path / "seen/it").read_text().splitlines()
    assert "image=team/app:v1" in helper and "word" not in helper and "/home/me" not in helper
    assert imports == "http://me:word@proxy /home/me image import --quiet --or-kept -- team/app:v1"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few pages."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_a_step_whose_container_cannot_be_saved_fails(stepd: Path, tree: Path, small: Path, uid: int):
    """By one of its two tasks, with the reason; what the tasks themselves ended with goes before it."""
    words = [f"--container-image={tree}", f"--container-save={small}/saved.sqsh", "--", "/bin/sh", "-c"]
    done = step(stepd, *words, "exit 0", uid=uid)
    assert (done.returncode, done.stderr.count("No space left on device")) == (NO_CONTAINER, 1), done.stderr
    assert list(small.iterdir()) == []
    assert [step(stepd, *words, end, uid=uid).returncode for end in ("exit 7", "kill -TERM $$")] == [7, 128 + 15]


def test_a_task_that_is_saved_is_its_programs_own(stepd: Path, tree: Path, tmp_path: Path):
    words = [f"--container-image={tree}", f"--container-save={tmp_path}/saved.sqsh", "--", "/bin/sh", "-c"]
    done = step(stepd, *words, "test $SLURM_TASK_PID = $$ && kill -KILL $$", uid=0)
    assert done.returncode == 128 + 9, done.stderr
    assert (tmp_path / "saved.sqsh").exists()


def test_where_nothing_can_be_saved_no_step_begins(stepd: Path, tree: Path, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    (tmp_path / "public/roots").touch()
    for target, why in {
        "/nowhere/x.sqsh": "/nowhere: No such file",
        "/tmp": "/tmp: is a folder",
        "/tmp/": "/tmp/: is a folder",
        "/usr/x.sqsh": "/usr: Permission denied",
        "/tmp/" + "x" * 250: "File name too long",
        f"{tmp_path}/public/roots": "is another user's",
    }.items():
        done = step(
            stepd, f"--container-image={tree}", f"--container-save={target}", "--", "/bin/sh", "-c", "echo began"
        )
        assert (done.returncode, done.stdout, done.stderr.count(why)) == (NO_CONTAINER, "", 1), done.stderr
    done = step(stepd, f"--container-image={tree}", f"--container-save={tmp_path}/pipe", *SAY, uid=0)
    assert done.returncode == NO_CONTAINER and "is no regular file" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (
            ["--container-image=/nowhere.sqsh"],
            NO_CONTAINER,
            "container: image /nowhere.sqsh: No such file or directory",
        ),
        (["--container-image=ubuntu:24.04"], NO_CONTAINER, "is no path"),
        (["--container-name=none"], NO_CONTAINER, "this cluster keeps no containers"),
        (
            ["--container-image=TREE", "--container-workdir=/nowhere"],
            NO_CONTAINER,
            "--container-workdir=/nowhere: No such file",
        ),
        (["--container-image=TREE", "--container-mounts=/nowhere:/x"], NO_CONTAINER, "cannot mount /nowhere"),
        (["--container-image=TREE", "--container-mounts=" + ",".join(["/usr"] * 65)], NO_CONTAINER, "more than 64"),
        (["--container-image=TREE", "--container-env=" + "A" * 100_000 + "="], NO_CONTAINER, "no name of an env"),
        (["--container-image="], NO_CONTAINER, "the image's name is empty"),
        (["--container-image=/nowhere\x1b[2J.sqsh"], NO_CONTAINER, "a blank or a control character"),
        (["--container-image=TREE", "--container-mounts=/a\x1b[2J:/b"], NO_CONTAINER, "cannot mount /a?[2J: No such"),
    ],
)
def test_what_is_wrong_is_told_once(stepd: Path, tree: Path, words: list[str], code: int, why: str):
    done = step(stepd, *(word.replace("TREE", str(tree)) for word in words), *SAY)
    assert done.returncode == code and done.stderr.count(why) == 1, done.stderr


def test_whatever_an_image_says_of_itself_does_no_harm(stepd: Path, tree: Path):
    seed = os.getpid() if LONG else 1
    draw = random.Random(seed)
    for number in range(200 if LONG else 12):
        long = b"x" * draw.choice([1, 5000, 300_000])
        pieces = [b"A=b", b"=", b"\n", b"PATH=/bin\n", b"\0", b'cd "/', b"\\", b'"', long]
        for name in ("environment", "rc"):
            (tree / "etc" / name).write_bytes(b"".join(draw.choice(pieces) for _ in range(draw.randrange(40))))
        done = step(stepd, f"--container-image={tree}", "--", "/bin/busybox", "true")
        assert done.returncode in (0, NO_CONTAINER, 127), f"seed {seed}, image {number}: {done.stderr}"
        assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr

"""The whole plugin under AddressSanitizer, driven through a step by a stand-in for slurmstepd (`stepd.c`)."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dalsegno.containers.native import FLAGS, HELPER, NO_CONTAINER, PARTS, PLUGIN, source_folder
from tests.waiting import eventually

SOMEONE = 54321
LONG = "DALSEGNO_LONG" in os.environ
pytestmark = [
    pytest.mark.cluster,  # these tests compile code, which is too slow for the unit part
    pytest.mark.skipif(os.geteuid() != 0, reason="creating these namespaces needs root"),
]


@pytest.fixture(scope="module")
def stepd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for slurmstepd, with the helper in the same folder, where the plugin expects it."""
    folder = tmp_path_factory.mktemp("stepd")
    own = str(Path(__file__).with_name("stepd.c"))
    parts = [word for word in PARTS[PLUGIN] if word.endswith(".c")]
    sanitize = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-U_FORTIFY_SOURCE"]
    link = ["-Wl,--wrap=pthread_create", "-rdynamic"]
    words = [*FLAGS, *sanitize, *link, f"-I{source_folder()}", own, *parts, "-lslurm"]
    for line in ([*words, "-o", str(folder / "stepd")], [*FLAGS, *PARTS[HELPER], "-o", str(folder / HELPER)]):
        subprocess.run(["gcc", *line], cwd=source_folder(), check=True)
    return folder / "stepd"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that every user may enter. pytest's own folder is closed to other users whenever a pytest starts."""
    with TemporaryDirectory(prefix="ds-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder used as image."""
    busybox = shutil.which("busybox")
    assert busybox, "busybox-static is not installed"
    for name in ("bin", "etc", "work"):
        (tmp_path / "tree" / name).mkdir(parents=True)
    shutil.copy(busybox, tmp_path / "tree/bin/busybox")
    for name in ("sh", "ls", "touch", "id", "grep"):
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
def test_tasks_enter_the_container_with_their_options(stepd: Path, tree: Path, uid: int):
    image = f"--container-image={tree}"
    for words, expected in {
        (): "image a=b c /work none",
        ("--container-env=LANG,OTHER", "--container-workdir=/etc"): "job a=b c /etc none",
        ("--container-entrypoint", "--container-readonly"): "entry\nimage a=b c /work none",
        ("--container-mount-home", "--container-remap-root", "--container-mounts=/usr/share:/a/b:ro"): (
            "image a=b c /work none"
        ),
    }.items():
        done = step(stepd, image, *words, *SAY, uid=uid)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{expected}\n" * 2
    named = step(stepd, *SAY, uid=uid, PYXIS_CONTAINER_IMAGE=str(tree))
    assert (named.returncode, named.stdout) == (0, "image a=b c /work none\n" * 2)


READ_ONLY = "touch /new 2>/dev/null && echo writable || echo read-only"


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({"READONLY": "1"}, [], "read-only"),
        ({"READONLY": "0"}, [], "writable"),
        ({"WRITABLE": "no"}, [], "read-only"),
        ({"READONLY": "yes", "WRITABLE": "0"}, [], "read-only"),
        ({"READONLY": "1"}, ["--container-writable"], "writable"),
        ({"WRITABLE": "1"}, ["--container-readonly"], "read-only"),
    ],
)
def test_environment_variables_set_readonly_and_writable(
    stepd: Path, tree: Path, variables: dict[str, str], options: list[str], expected: str
):
    given = {f"PYXIS_CONTAINER_{name}": value for name, value in variables.items()}
    (tree / "etc/rc").unlink()
    tree.chmod(0o777)
    done = step(stepd, f"--container-image={tree}", *options, "--", "/bin/sh", "-c", READ_ONLY, **given)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n" * 2), done.stderr


def test_environment_variables_set_the_other_switches(stepd: Path, tree: Path):
    (tree / "root").mkdir()
    os.chown(tree / "root", SOMEONE, SOMEONE)
    home = tree.parent / "home"
    home.mkdir()
    names = ("REMAP_ROOT", "MOUNT_HOME", "ENTRYPOINT")
    script = "echo $(id -u) $HOME $(ls -d /root/mine)"
    (home / "mine").touch()
    os.chown(home, SOMEONE, SOMEONE)
    image = f"--container-image={tree}"
    words = [image, "--", "/bin/sh", "-c", script]
    on, off = ({f"PYXIS_CONTAINER_{name}": value for name in names} for value in ("1", "0"))
    done = step(stepd, *words, HOME=str(home), **on)
    assert done.stdout == "entry\n0 /root /root/mine\n" * 2, done.stderr
    done = step(stepd, *words, HOME=str(home), **off)
    assert done.stdout == f"{SOMEONE} {home}\n" * 2
    done = step(stepd, *words[:1], "--container-entrypoint", *words[1:], HOME=str(home), **off)
    assert done.stdout == f"entry\n{SOMEONE} {home}\n" * 2


@pytest.mark.parametrize(
    ("words", "variables", "why"),
    [
        (["writable", "readonly"], {}, "both --container-readonly and --container-writable were given"),
        (["readonly", "writable"], {}, "both --container-writable and --container-readonly were given"),
        ([], {"READONLY": "1", "WRITABLE": "1"}, "both --container-readonly and --container-writable were given"),
        ([], {"READONLY": "perhaps"}, "PYXIS_CONTAINER_READONLY: `perhaps` is not 1 or 0"),
        ([], {"MOUNTS": "/usr:/x," * 9000}, "PYXIS_CONTAINER_MOUNTS is too long"),
        ([], {"MOUNTS": "/usr:x"}, "--container-mounts: cannot mount at `x`: the target must be an absolute path"),
        ([], {"UNSHARE": "net,pid"}, "--container-unshare: unknown namespace 'pid'"),
        (["unshare=foo"], {}, "--container-unshare: unknown namespace 'foo'"),
    ],
)
def test_contradictory_or_invalid_options_start_no_task(
    stepd: Path, tree: Path, words: list[str], variables: dict[str, str], why: str
):
    given = {f"PYXIS_CONTAINER_{name}": value for name, value in variables.items()}
    done = step(stepd, f"--container-image={tree}", *(f"--container-{word}" for word in words), *SAY, **given)
    assert (done.returncode, done.stdout, done.stderr.count(why)) == (NO_CONTAINER, "", 1), done.stderr


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_mounts_of_all_kinds(stepd: Path, tree: Path, uid: int):
    def output_lines(mounts: str, script: str, *more: str) -> list[str]:
        words = [f"--container-image={tree}", f"--container-mounts={mounts}", *more]
        done = step(stepd, *words, "--", "/bin/sh", "-c", script, uid=uid, HOME="/usr/share")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()  # two tasks, one after the other
        return lines[: len(lines) // 2]

    mounted = "grep ' {} ' /proc/self/mountinfo || echo nothing"
    (line,) = output_lines("tmpfs:/new/one:size=64k+mode=0700+noexec", mounted.format("/new/one"))
    assert "noexec" in line and "nosuid" in line and "size=64k" in line and " tmpfs " in line
    assert output_lines("tmpfs:/x", "touch /x/mine && ls /x") == ["mine"]
    (line,) = output_lines("/usr/share:/x:unbindable+ro", mounted.format("/x"))
    assert " unbindable " in line and " ro," in line
    (line,) = output_lines("/usr/share:/x:rprivate", mounted.format("/x"))
    assert "master:" not in line and "shared:" not in line
    assert output_lines("/usr/share:./x/../y", "ls -d /y/misc") == ["/y/misc"]
    assert output_lines("umount:/usr/share", mounted.format("/usr/share"), "--container-mount-home") == ["nothing"]
    assert output_lines("/usr:/x,umount:/x,/usr/share:/x", "ls -d /x/misc") == ["/x/misc"]


NAMESPACES = ("net", "ipc", "uts")
HOST = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES}
SPACES = "for kind in net ipc uts; do readlink /proc/self/ns/$kind; done"
NOTHING_AS_ROOT = {"PLUGSTACK": "squashfs=user"}


def spaces_seen(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the kinds of namespaces that differ from the node's."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ":[" in line]
    assert lines[:3] == lines[3:], "tasks of one container share its namespaces"
    return {kind for kind, line in zip(NAMESPACES, lines[:3], strict=True) if line != HOST[kind]}


@pytest.mark.parametrize("remap", [(), ("--container-remap-root",)])
@pytest.mark.parametrize(("uid", "site"), [(0, {}), (SOMEONE, {}), (SOMEONE, NOTHING_AS_ROOT)])
def test_unshare_creates_only_the_requested_namespaces(
    stepd: Path, tree: Path, uid: int, site: dict[str, str], remap: tuple[str, ...]
):
    def run(script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ("--", "/bin/busybox", "sh", "-c", script)
        return step(stepd, f"--container-image={tree}", *remap, *words, *command, uid=uid, **site, **env)

    (tree / "bin/readlink").symlink_to("busybox")
    assert spaces_seen(run(SPACES)) == set()
    for kind in NAMESPACES:
        assert spaces_seen(run(SPACES, f"--container-unshare={kind}")) == {kind}
    assert spaces_seen(run(SPACES, "--container-unshare=uts,net,ipc")) == set(NAMESPACES)
    assert spaces_seen(run(SPACES, PYXIS_CONTAINER_UNSHARE="net")) == {"net"}
    assert spaces_seen(run(SPACES, "--container-unshare=uts", PYXIS_CONTAINER_UNSHARE="net")) == {"uts"}


@pytest.mark.parametrize(("uid", "site"), [(0, {}), (SOMEONE, {}), (SOMEONE, NOTHING_AS_ROOT)])
def test_new_namespaces_are_isolated_from_the_node(stepd: Path, tree: Path, uid: int, site: dict[str, str]):
    def run(kind: str, script: str, *words: str) -> str:
        command = ("--", "/bin/busybox", "sh", "-c", script)
        image = f"--container-image={tree}"
        done = step(stepd, image, f"--container-unshare={kind}", *words, *command, uid=uid, **site)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("net", "busybox ls /sys/class/net; busybox wc -l </proc/net/route") == "lo\n1\n" * 2
    assert run("net", "busybox ping -c 1 127.0.0.1 >/dev/null && echo up", "--container-remap-root") == "up\n" * 2
    devices = [os.stat(path).st_dev for path in ("/dev", "/dev/shm")]
    seen = run("ipc", "busybox stat -c %d /dev /dev/shm; touch /dev/shm/mine; echo x >/dev/null; ls /dev/pts")
    own = [line for line in seen.splitlines() if line != "ptmx"]
    assert own[:2] == own[2:] and not set(map(str, devices)) & set(own)
    assert not Path("/dev/shm/mine").exists()
    name = os.uname().nodename
    assert run("uts", "busybox hostname") == f"{name}\n" * 2
    renamed = run("uts", "busybox hostname inside; busybox hostname", "--container-remap-root")
    assert renamed == "inside\n" * 2 and os.uname().nodename == name


def test_a_task_has_no_rights_over_the_nodes_namespaces(stepd: Path, tree: Path):
    """Root in the container owns only the new namespaces; the others still belong to the node."""
    script = "busybox hostname $(busybox hostname) 2>&1; busybox ip addr add 127.77.77.77/32 dev lo 2>&1; true"
    for kind, refused in {"net": "sethostname", "uts": "ip:", "ipc": "sethostname"}.items():
        words = (f"--container-image={tree}", "--container-remap-root", f"--container-unshare={kind}")
        done = step(stepd, *words, "--", "/bin/busybox", "sh", "-c", script)
        assert refused in done.stdout and "not permitted" in done.stdout, done


def test_umount_accepts_only_mounts_of_the_container(stepd: Path, tree: Path):
    for path, why in {
        "/etc": "nothing is mounted there",
        "/": "nothing is mounted",
        "/nowhere": "No such file",
    }.items():
        done = step(stepd, f"--container-image={tree}", f"--container-mounts=umount:{path}", *SAY)
        assert done.returncode == NO_CONTAINER and f"cannot unmount {path} in the container: {why}" in done.stderr


def test_relative_workdir_is_below_the_containers_root(stepd: Path, tree: Path):
    for folder, expected in {"etc": "/etc", "../": "/", "./work/../etc": "/etc"}.items():
        done = step(stepd, f"--container-image={tree}", f"--container-workdir={folder}", "--", "/bin/sh", "-c", "pwd")
        assert done.stdout == f"{expected}\n" * 2, done.stderr


def test_locale_of_the_node_is_passed_only_by_container_env(stepd: Path, tree: Path):
    (tree / "etc/environment").write_text("PATH=/bin\n")
    job = {name: "xx_XX.UTF-8" for name in ("LANG", "LANGUAGE", "LC_ALL")}
    words = ["--", "/bin/sh", "-c", "echo ${LANG-none} ${LANGUAGE-none} ${LC_ALL-none}"]
    assert step(stepd, f"--container-image={tree}", *words, **job).stdout == "none none none\n" * 2
    asked = step(stepd, f"--container-image={tree}", "--container-env=LANG,LC_ALL", *words, **job)
    assert asked.stdout == "xx_XX.UTF-8 none xx_XX.UTF-8\n" * 2


def test_pmix_finds_its_folder_and_its_modules(stepd: Path, tree: Path):
    folder = tree.parent / "spool/pmix.1.0"
    folder.mkdir(parents=True)
    (folder / "server").touch()
    os.chown(folder, SOMEONE, SOMEONE)
    folder.chmod(0o700)
    job = {"PMIX_SERVER_TMPDIR": f"{folder}/", "PMIX_GDS_MODULE": "hash", "PMIX_SECURITY_MODE": "munge,native"}
    script = "ls $PMIX_SERVER_TMPDIR; echo $PMIX_MCA_gds $PMIX_MCA_psec"
    done = step(stepd, f"--container-image={tree}", "--", "/bin/sh", "-c", script, **job)
    assert done.stdout == "server\nhash munge,native\n" * 2, done.stderr
    folder.chmod(0o755)
    os.chown(folder, 0, 0)
    folder.parent.chmod(0o700)  # closed to the user, so that it is not mounted
    done = step(stepd, f"--container-image={tree}", "--", "/bin/sh", "-c", "ls $PMIX_SERVER_TMPDIR 2>&1", **job)
    assert "No such file" in done.stdout


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


@pytest.mark.parametrize(("options", "expected", "who"), [(["--container-remap-root"], "yes", 0), ([], "no", SOMEONE)])
def test_remapped_root_may_change_owners_and_ids(stepd: Path, tree: Path, options: list[str], expected: str, who: int):
    """The container has one user only. With the option, all calls succeed without effect; without it they fail."""
    (tree / "work/owners.py").write_text(OWNERS)
    words = [f"--container-image={tree}", f"--container-mounts={LENT}", *options]
    done = step(stepd, *words, "--", "/usr/bin/python3", "/work/owners.py")
    assert (done.returncode, done.stdout.split()) == (0, ([expected] * 12 + [str(who)] * 2) * 2), done.stderr


def test_remapped_root_needs_no_apt_sandbox_user(stepd: Path, tree: Path):
    (tree / "etc/apt/apt.conf.d").mkdir(parents=True)
    words = [f"--container-image={tree}", f"--container-mounts={LENT}", "--container-remap-root"]
    done = step(stepd, *words, "--", "/usr/bin/apt-config", "dump", "--format=%v%n", "APT::Sandbox::User")
    assert (done.returncode, done.stdout) == (0, "root\n" * 2), done.stderr


def test_remapped_root_unpacks_files_of_other_owners(stepd: Path, tree: Path):
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


def test_import_gets_the_jobs_proxy_without_exposing_its_password(stepd: Path, tree: Path, tmp_path: Path):
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


# Cgroups

HIERARCHIES = [
    (words[1], words[2], words[3].split(","))
    for words in (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    if words[2] in ("cgroup", "cgroup2")
]


@pytest.fixture
def cgroups() -> Iterator[list[Path]]:
    """A cgroup in every hierarchy of the machine, v1 and v2, as Slurm creates them for a step's tasks."""
    made = []
    for point, _, options in HIERARCHIES:
        folder = Path(point, f"ds-step-{os.getpid()}")
        if "cpuset" not in options:  # a v1 cpuset accepts no process before it has cores
            folder.mkdir()
            made.append(folder)
    if not made:
        pytest.skip("this machine has no control groups to use")
    yield made
    for folder in made:
        eventually(lambda folder=folder: (folder / "cgroup.procs").read_text() == "")
        folder.rmdir()


def members(cgroups: list[Path]) -> dict[str, str]:
    """Return the variable that puts the tasks into these cgroups."""
    return {"STEP_CGROUPS": ":".join(map(str, cgroups))}


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_an_import_is_in_its_steps_cgroups(stepd: Path, tree: Path, tmp_path: Path, cgroups: list[Path], uid: int):
    program = tmp_path / "import"
    program.write_text(f"#!/bin/sh\ncat /proc/self/cgroup >{tmp_path}/seen/it\necho {tree}\n")
    program.chmod(0o755)
    (tmp_path / "seen").mkdir()
    (tmp_path / "seen").chmod(0o777)
    given = {"PLUGSTACK": f"import={program}", **members(cgroups)}
    done = step(stepd, "--container-image=team/app:v1", "--", "/bin/sh", "-c", "true", uid=uid, **given)
    assert done.returncode == 0, done.stderr
    paths = [line.split(":", 2)[2] for line in (tmp_path / "seen/it").read_text().splitlines()]
    assert paths.count(f"/{cgroups[0].name}") == len(cgroups), paths


def limit_memory(cgroups: list[Path], mib: int) -> None:
    for name in ("memory.limit_in_bytes", "memory.max"):
        for file in (folder / name for folder in cgroups):
            if file.exists():
                file.write_text(str(mib << 20))
                return
    pytest.skip("this machine has no controller for memory")


def test_saving_a_container_counts_towards_the_steps_memory(
    stepd: Path, tree: Path, tmp_path: Path, cgroups: list[Path]
):
    """All processes are within the step's limit, and the user gets an error."""
    limit_memory(cgroups, 64)
    (tree / "work/ballast").write_bytes(os.urandom(200 << 20))
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    words = [f"--container-image={tree}", f"--container-save={tmp_path}/out/saved.sqsh", "--", "/bin/sh", "-c", "true"]
    done = step(stepd, *words, **members(cgroups))
    assert done.returncode == NO_CONTAINER and "does the step have enough memory?" in done.stderr, done
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_a_step_whose_container_cannot_be_saved_fails(stepd: Path, tree: Path, small: Path, uid: int):
    """One of the two tasks fails with the reason. An exit code of the tasks themselves takes precedence."""
    words = [f"--container-image={tree}", f"--container-save={small}/saved.sqsh", "--", "/bin/sh", "-c"]
    done = step(stepd, *words, "exit 0", uid=uid)
    assert (done.returncode, done.stderr.count("No space left on device")) == (NO_CONTAINER, 1), done.stderr
    assert list(small.iterdir()) == []
    assert [step(stepd, *words, end, uid=uid).returncode for end in ("exit 7", "kill -TERM $$")] == [7, 128 + 15]


def test_saved_task_has_the_pid_and_exit_code_of_its_program(stepd: Path, tree: Path, tmp_path: Path):
    words = [f"--container-image={tree}", f"--container-save={tmp_path}/saved.sqsh", "--", "/bin/sh", "-c"]
    done = step(stepd, *words, "test $SLURM_TASK_PID = $$ && kill -KILL $$", uid=0)
    assert done.returncode == 128 + 9, done.stderr
    assert (tmp_path / "saved.sqsh").exists()


def test_invalid_save_target_starts_no_task(stepd: Path, tree: Path, tmp_path: Path):
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
        f"{tmp_path}/public/roots": "belongs to another user",
    }.items():
        done = step(
            stepd, f"--container-image={tree}", f"--container-save={target}", "--", "/bin/sh", "-c", "echo began"
        )
        assert (done.returncode, done.stdout, done.stderr.count(why)) == (NO_CONTAINER, "", 1), done.stderr
    done = step(stepd, f"--container-image={tree}", f"--container-save={tmp_path}/pipe", *SAY, uid=0)
    assert done.returncode == NO_CONTAINER and "is not a regular file" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (
            ["--container-image=/nowhere.sqsh"],
            NO_CONTAINER,
            "container[125]: image /nowhere.sqsh: No such file or directory",
        ),
        (["--container-image=ubuntu:24.04"], NO_CONTAINER, "is not a path"),
        (["--container-name=none"], NO_CONTAINER, "named containers are disabled"),
        (
            ["--container-image=TREE", "--container-workdir=/nowhere"],
            NO_CONTAINER,
            "--container-workdir=/nowhere: No such file",
        ),
        (["--container-image=TREE", "--container-mounts=/nowhere:/x"], NO_CONTAINER, "cannot mount /nowhere"),
        (["--container-image=TREE", "--container-mounts=" + ",".join(["/usr"] * 65)], NO_CONTAINER, "more than 64"),
        (
            ["--container-image=TREE", "--container-env=" + "A" * 100_000 + "="],
            NO_CONTAINER,
            "not a valid name",
        ),
        (["--container-image="], NO_CONTAINER, "the image name is empty"),
        (["--container-image=/nowhere\x1b[2J.sqsh"], NO_CONTAINER, "a space or a control character"),
        (
            ["--container-image=TREE", "--container-mounts=/a\x1b[2J:/b"],
            NO_CONTAINER,
            "cannot mount /a?[2J: the source path does",
        ),
    ],
)
def test_errors_are_reported_once(stepd: Path, tree: Path, words: list[str], code: int, why: str):
    done = step(stepd, *(word.replace("TREE", str(tree)) for word in words), *SAY)
    assert done.returncode == code and done.stderr.count(why) == 1, done.stderr


def test_plugin_survives_random_image_settings(stepd: Path, tree: Path):
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

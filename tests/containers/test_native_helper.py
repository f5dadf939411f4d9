"""The helper without Slurm, under AddressSanitizer, in a mount namespace that stands for a node."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import pytest

from dalsegno.containers.named import unpacked_key
from dalsegno.containers.native import FLAGS, HELPER, PARTS, source_folder
from tests.containers import entering

SOMEONE = 54321
pytestmark = [
    pytest.mark.cluster,  # these tests compile code, which is too slow for the unit part
    pytest.mark.skipif(os.geteuid() != 0, reason="creating these namespaces needs root"),
]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that all users can enter. pytest's own folder is closed to other users whenever a pytest starts."""
    with TemporaryDirectory(prefix="ds-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def tmp_path(place: Path) -> Path:
    return Path(mkdtemp(dir=place))


@pytest.fixture(scope="module")
def helper(place: Path) -> Path:
    target = place / HELPER
    words = [word for word in PARTS[HELPER] if not word.startswith("-")]
    sanitize = ("-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-U_FORTIFY_SOURCE")
    subprocess.run(["gcc", *FLAGS, *sanitize, *words, "-o", str(target)], cwd=source_folder(), check=True)
    return target


@pytest.fixture(scope="module")
def image(place: Path) -> Path:
    """An image whose /etc is a link out of its root."""
    folder = place / "image"
    busybox = shutil.which("busybox")
    assert busybox, "busybox-static is not installed"
    (folder / "tree/bin").mkdir(parents=True)
    (folder / "tree/real-etc").mkdir()
    (folder / "tree/etc").symlink_to("/../../real-etc")
    shutil.copy(busybox, folder / "tree/bin/busybox")
    for name in ("sh", "cat", "ls", "id", "touch"):
        (folder / "tree/bin" / name).symlink_to("busybox")
    words = ["mksquashfs", str(folder / "tree"), str(folder / "image.sqsh"), "-all-root", "-quiet", "-no-progress"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder / "image.sqsh"


def on_a_node(
    helper: Path, words: Sequence[str], script: str, before: str = "true"
) -> subprocess.CompletedProcess[str]:
    """Run a script as a task in a container. `before` prepares the node, as root, in its own mount namespace."""
    inner = [sys.executable, str(Path(entering.__file__)), str(helper), *words, "--", "/bin/sh", "-c", script]
    outer = ["unshare", "--mount", "sh", "-ec", f'{before}; exec "$@"', "sh", *inner]
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the helper exits without freeing its memory
    return subprocess.run(
        outer, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )


def for_user(uid: int, *more: str) -> list[str]:
    return [f"uid={uid}", f"gid={uid}", *more]


@pytest.mark.parametrize("uid", [0, SOMEONE])
def test_links_of_the_image_stay_within_its_root(helper: Path, image: Path, uid: int):
    done = on_a_node(helper, for_user(uid, f"image={image}"), "id -u; ls /real-etc; ls /")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(uid)
    assert {"hosts", "proc", "dev", "sys", "tmp"} <= set(done.stdout.split())
    assert not list(Path("/").glob("real-etc"))


def fuse_for(mode: int, folder: Path) -> str:
    """Return a script that gives /dev/fuse these permissions; users can usually open it."""
    device = folder / "fuse"
    if not device.exists():
        os.mknod(device, 0o600 | stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    device.chmod(mode)
    return f"mount --bind {device} /dev/fuse"


@pytest.mark.parametrize("way", ["fuse", "unpacked"])
def test_image_read_with_user_rights_looks_the_same(helper: Path, image: Path, tmp_path: Path, way: str):
    tmp_path.chmod(0o711)
    words = for_user(SOMEONE, f"image={image}", "as_user=1", f"cache={tmp_path}")
    script = "id -u; touch /real-etc/new && ls /real-etc/new; ls -ln /bin/busybox"
    done = on_a_node(helper, words, script, before=fuse_for(0o666 if way == "fuse" else 0o600, tmp_path))
    assert (done.stdout.split()[:2], done.stderr) == ([str(SOMEONE), "/real-etc/new"], "")
    assert done.stdout.split()[4:6] == [str(SOMEONE)] * 2  # uid and gid of the file's owner
    made = {path.name: path for path in tmp_path.glob(f"{SOMEONE}/*-*")}
    assert set(made) == ({unpacked_key(image), f"{unpacked_key(image)}.image"} if way == "unpacked" else set())
    assert not made or made[f"{unpacked_key(image)}.image"].read_text() == str(image)


def with_rights(image: Path, folder: Path, owner: int = 0, folders_owner: int = 0, mode: int = 0o644) -> Path:
    (folder / "images").mkdir()
    copy = folder / "images/copy.sqsh"
    shutil.copy(image, copy)
    copy.chmod(mode)
    os.chown(copy, owner, owner)
    os.chown(copy.parent, folders_owner, folders_owner)
    return copy


@pytest.mark.parametrize(
    ("rights", "kernel"),
    [
        ({}, True),
        ({"owner": SOMEONE}, False),
        ({"owner": SOMEONE + 1}, False),
        ({"folders_owner": SOMEONE}, False),
        ({"mode": 0o664}, False),
        ({"mode": 0o646}, False),
    ],
)
def test_kernel_mounts_only_images_that_root_alone_can_change(
    helper: Path, image: Path, tmp_path: Path, rights: dict[str, int], kernel: bool
):
    """The helper reads any other image with the user's rights: here it unpacks the image, which the test can detect."""
    tmp_path.chmod(0o711)
    copy = with_rights(image, tmp_path, **rights)
    for name in ("", "link.sqsh"):  # the rights of the target count, not those of the link
        path = tmp_path / name if name else copy
        if name:
            path.symlink_to(copy)
            os.lchown(path, SOMEONE, SOMEONE)
        words = for_user(SOMEONE, f"image={path}", f"cache={tmp_path}")
        done = on_a_node(helper, words, "ls /bin/busybox", before=fuse_for(0o600, tmp_path))
        assert (done.stdout, done.stderr) == ("/bin/busybox\n", "")
        assert (tmp_path / str(SOMEONE) / unpacked_key(copy)).exists() != kernel


def test_fuse_file_system_of_a_user_cannot_pass_a_file_as_root_owned(helper: Path, image: Path, tmp_path: Path):
    """A FUSE server can claim any owner for its files. Here it claims root, in a folder owned by root."""
    tmp_path.chmod(0o711)
    inner = with_rights(image, tmp_path)
    outer = tmp_path / "outer.sqsh"
    subprocess.run(["mksquashfs", inner.parent, outer, "-all-root", "-quiet", "-no-progress"], check=True)
    (tmp_path / "mounted").mkdir()
    words = for_user(SOMEONE, f"image={tmp_path}/mounted/copy.sqsh", f"cache={tmp_path}")
    node = f"squashfuse -o allow_other {outer} {tmp_path}/mounted; {fuse_for(0o600, tmp_path)}"
    done = on_a_node(helper, words, "ls /bin/busybox", before=node)
    assert (done.stdout, done.stderr) == ("/bin/busybox\n", "")
    assert list((tmp_path / str(SOMEONE)).glob("*-*.image"))


def test_cache_that_another_step_has_just_created_is_given_to_its_user(helper: Path, image: Path, tmp_path: Path):
    """Steps on several nodes may share the folder. Between its creation and its change of owner, it belongs to root."""
    tmp_path.chmod(0o711)
    (tmp_path / str(SOMEONE)).mkdir(0o700)
    words = for_user(SOMEONE, f"image={image}", "as_user=1", f"cache={tmp_path}")
    done = on_a_node(helper, words, "ls /bin/busybox", before=fuse_for(0o600, tmp_path))
    assert (done.stdout, done.stderr) == ("/bin/busybox\n", "")
    assert (tmp_path / str(SOMEONE)).stat().st_uid == SOMEONE


@pytest.mark.parametrize("owner", [0, SOMEONE + 1])
def test_cache_of_another_user_is_refused(helper: Path, image: Path, tmp_path: Path, owner: int):
    """A folder that contains files of root belongs to root.

    It is not a new folder that is about to be given to the user.
    """
    tmp_path.chmod(0o711)
    cache = tmp_path / str(SOMEONE)
    cache.mkdir(0o700)
    (cache / "file").touch()
    os.chown(cache, owner, owner)
    words = for_user(SOMEONE, f"image={image}", "as_user=1", f"cache={tmp_path}")
    done = on_a_node(helper, words, "true", before=fuse_for(0o600, tmp_path))
    assert done.returncode == 1 and "can be changed by users other than its owner" in done.stderr
    assert cache.stat().st_uid == owner


def test_link_in_the_users_cache_reveals_nothing_about_closed_folders(helper: Path, image: Path, tmp_path: Path):
    """The helper must not reveal whether a file exists in a folder that is closed to the user."""
    (tmp_path / "closed").mkdir(0o700)
    (tmp_path / "closed/secret").mkdir()
    tmp_path.chmod(0o711)
    cache = tmp_path / str(SOMEONE)
    cache.mkdir(0o700)
    os.chown(cache, SOMEONE, SOMEONE)
    words = for_user(SOMEONE, f"image={image}", "as_user=1", f"cache={tmp_path}")
    answers = []
    for target in ("secret", "nothing"):
        (cache / unpacked_key(image)).unlink(missing_ok=True)
        (cache / unpacked_key(image)).symlink_to(tmp_path / "closed" / target)
        answers.append(on_a_node(helper, words, "true", before=fuse_for(0o600, tmp_path)).stderr)
    assert answers[0] == answers[1] and len(answers[0].splitlines()) == 1


def test_failed_unpacking_leaves_no_files(helper: Path, image: Path, tmp_path: Path):
    tmp_path.chmod(0o711)
    damaged = tmp_path / "damaged.sqsh"
    whole = image.read_bytes()
    damaged.write_bytes(whole[:96] + os.urandom(200_000) + whole[200_096:])
    words = for_user(SOMEONE, f"image={damaged}", "as_user=1", f"cache={tmp_path}")
    done = on_a_node(helper, words, "true", before=fuse_for(0o600, tmp_path))
    assert done.returncode == 1 and "unsquashfs into" in done.stderr, done.stderr
    assert [path.name for path in (tmp_path / str(SOMEONE)).iterdir()] == ["lock"]


def test_node_that_can_neither_mount_nor_unpack_reports_what_is_missing(helper: Path, image: Path, tmp_path: Path):
    tmp_path.chmod(0o711)
    words = for_user(SOMEONE, f"image={image}", "as_user=1", f"cache={tmp_path}")
    without = f"{fuse_for(0o600, tmp_path)}; mount --bind /dev/null $(command -v unsquashfs)"
    done = on_a_node(helper, words, "true", before=without)
    assert done.returncode == 1 and "neither squashfuse with a usable /dev/fuse nor unsquashfs" in done.stderr


# Answers like kernels before 6.2, which have no ID-mapped mounts of squashfs.
OLD_KERNEL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>
long syscall(long number, long a, long b, long c, long d, long e, long f) {
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_mount_setattr && *(unsigned long long *)d & 0x00100000) return errno = EINVAL, -1;
    return real(number, a, b, c, d, e, f);
}
"""


def test_older_kernel_reads_the_image_with_user_rights(helper: Path, image: Path, tmp_path: Path):
    (tmp_path / "old.c").write_text(OLD_KERNEL)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "old.so", "old.c", "-ldl"], cwd=tmp_path, check=True)
    tmp_path.chmod(0o711)
    old = tmp_path / "old-helper"
    options = "detect_leaks=0:verify_asan_link_order=0"
    old.write_text(f'#!/bin/sh\nLD_PRELOAD={tmp_path}/old.so ASAN_OPTIONS={options} exec {helper} "$@"\n')
    old.chmod(0o755)
    words = for_user(SOMEONE, f"image={image}", f"cache={tmp_path}")
    done = on_a_node(old, words, "ls -ln /bin/busybox", before=fuse_for(0o666, tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[2:4] == [str(SOMEONE)] * 2


def test_mounts_appear_at_their_target_and_never_over_the_root(helper: Path, image: Path):
    words = for_user(SOMEONE, f"image={image}", "mounts=/usr/share:/a/b/c:ro,/etc/hostname")
    done = on_a_node(helper, words, "ls -d /a/b/c/misc; cat /etc/hostname; touch /a/b/c/x 2>/dev/null || echo refused")
    assert done.stdout.splitlines()[0] == "/a/b/c/misc" and done.stdout.splitlines()[-1] == "refused"
    for bad in ("/usr:/", "/usr:/../..", "/usr:/bin/sh", "/etc/hostname:/bin"):
        done = on_a_node(helper, for_user(SOMEONE, f"image={image}", f"mounts={bad}"), "true")
        assert done.returncode == 1 and "cannot mount /" in done.stderr


def test_folder_hidden_by_a_mount_of_the_node_stays_hidden(helper: Path, image: Path, tmp_path: Path):
    """A container can unmount only mounts of its own, and not the mounts of the node below them."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/secret").touch()
    tmp_path.chmod(0o755)
    hide = f"mount -t tmpfs t {tmp_path}/hidden"
    for mounts, ok in ((f"{tmp_path}:/x,umount:/x/hidden", False), (f"{tmp_path}:/x,umount:/x", True)):
        done = on_a_node(helper, for_user(SOMEONE, f"image={image}", f"mounts={mounts}"), "ls /x", before=hide)
        assert "secret" not in done.stdout
        assert (done.returncode == 0) == ok, done.stderr
        assert ok or "cannot unmount /x/hidden in the container: nothing is mounted there" in done.stderr


@pytest.mark.parametrize("more", [(), ("as_user=1",), ("remap_root=1",)])
def test_new_namespaces_show_nothing_that_the_node_hides(
    helper: Path, image: Path, tmp_path: Path, more: tuple[str, ...]
):
    """A new /sys would show what a mount hides in the node's /sys.

    The kernel refuses it, and the node's /sys is used.
    """
    tmp_path.chmod(0o755)
    hide = "mount -t tmpfs none /sys/kernel; mount -t tmpfs none /dev/shm; echo 1 >/dev/shm/nodes"
    words = for_user(SOMEONE, f"image={image}", f"cache={tmp_path}", "unshare=net,ipc", *more)
    done = on_a_node(helper, words, "ls /sys/kernel /dev/shm; ls -d /sys/class", hide)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["/dev/shm:", "/sys/kernel:", "/sys/class"]


def test_a_folder_image_shows_nothing_that_a_mount_hides(helper: Path, image: Path, tmp_path: Path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/secret").touch()
    tmp_path.chmod(0o755)
    words = for_user(SOMEONE, f"image={tmp_path}", f"mounts={image.parent}/tree/bin:/bin")
    done = on_a_node(helper, words, "ls '/a b'", before=f"mount -t tmpfs t '{tmp_path}/a b'")
    assert done.returncode == 1 and f"{tmp_path}/a b is a mount point" in done.stderr, done.stdout
    assert on_a_node(helper, words, "ls '/a b'").stdout == "secret\n"


def test_a_refused_propagation_leaves_no_process(helper: Path, image: Path, tmp_path: Path):
    """A leftover process would keep the answer's socket open, and this test would wait for it."""
    (tmp_path / "x").symlink_to("/proc/self/root")
    tmp_path.chmod(0o755)
    words = for_user(SOMEONE, f"image={image}", f"mounts=tmpfs:/d/x:rprivate,{tmp_path}:/d")
    done = on_a_node(helper, words, "true")
    assert done.returncode == 1 and "cannot set the propagation of mounts" in done.stderr, done


def test_import_with_user_rights_has_no_oom_protection(helper: Path, tmp_path: Path):
    """slurmstepd may be protected, and its children inherit that."""
    program = tmp_path / "import"
    program.write_text('#!/bin/sh\necho "error: $(id -u) has $(cat /proc/self/oom_score_adj)" >&2\nexit 1\n')
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    words = for_user(SOMEONE, "image=some:image", f"import={program}")
    done = on_a_node(helper, words, "true", before="echo -500 > /proc/self/oom_score_adj || exit 99")
    if done.returncode == 99:
        pytest.skip("oom_score_adj cannot be lowered here (no CAP_SYS_RESOURCE)")
    assert f"{SOMEONE} has 0" in done.stderr, done


def test_mount_points_are_created_over_a_folder_image_of_another_user(helper: Path, image: Path):
    """Mount points are created in the container's own layer. The folder is not changed; closed folders stay closed."""
    tree = image.parent / "tree"
    words = for_user(SOMEONE, f"image={tree}", "mounts=/usr/share:/bin/new/share,/etc/hostname:/bin/name")
    done = on_a_node(helper, words, "ls -d /bin/new/share/misc; cat /bin/name; touch /bin/own 2>&1 || echo refused")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "/bin/new/share/misc" and done.stdout.splitlines()[-1] == "refused"
    assert not (tree / "bin/new").exists() and not (tree / "bin/name").exists()
    closed = image.parent / "closed"
    (closed / "private").mkdir(parents=True)
    for folder, mode in ((closed, 0o755), (closed / "private", 0o700)):
        folder.chmod(mode)
    shutil.copytree(tree, closed, symlinks=True, dirs_exist_ok=True)
    done = on_a_node(helper, for_user(SOMEONE, f"image={closed}", "mounts=/usr/share:/private/share"), "true")
    assert done.returncode == 1 and "cannot mount /usr/share at /private/share" in done.stderr


def test_gpu_driver_libraries_are_mounted_by_name(helper: Path, image: Path):
    node = """mount -t tmpfs t /usr/local; mkdir -p /usr/local/nvidia/lib64; cd /usr/local/nvidia/lib64
        echo driver > libcuda.so.580; ln -s libcuda.so.580 libcuda.so.1; echo no > libother.so; cd /
        cp -a /dev/null /dev/loop* /dev/urandom "$TMP_DEV"; touch "$TMP_DEV/nvidiactl"; mount --bind "$TMP_DEV" /dev"""
    dev = image.parent / "dev"
    dev.mkdir()
    script = "cd /.dalsegno-gpu; cat libcuda.so.1; ls libother.so; ls /dev/nvidiactl"
    done = on_a_node(helper, for_user(SOMEONE, f"image={image}"), script, before=f"TMP_DEV={dev}; {node}")
    assert done.stdout.splitlines() == ["driver", "/dev/nvidiactl"]
    assert "libother.so: No such file" in done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["image=/nowhere.sqsh"], "image /nowhere.sqsh: No such file or directory"),
        (["image=/etc/passwd"], "is not a squashfs file"),
        (["image=/dev/null"], "is not a squashfs file"),
        (["image=ubuntu:24.04"], "is not a path"),
        ([], "no image: --container-image is missing"),
        (["image=/etc/passwd", "nonsense"], "different versions"),
        (["name=../up"], "letters, digits"),
    ],
)
def test_errors_of_the_helper_are_one_line(helper: Path, words: list[str], why: str):
    done = on_a_node(helper, for_user(SOMEONE, *words), "true")
    assert done.returncode == 1 and why in done.stderr and len(done.stderr.splitlines()) == 1

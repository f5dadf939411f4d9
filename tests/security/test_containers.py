"""Attacks of a plain user on the container plugin and its root helper, with harmless targets, on a real cluster.

`eve` is the attacker. `root` owns a folder that she can read but not write. `ada` has a folder that is closed to her.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.system.children import arguments, find
from tests.cluster.conftest import at_home, taken_down
from tests.cluster.test_containers import (
    Contained,
    address_of_this_machine,
    loops,
    make_image,
    open_files,
    owning,
    processes,
    waiting_tasks,
)
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only a slurmd of root has rights to attack"),
]

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 1, cpus: 8, memory: 4G, default: true}
users:
  - {name: ada}
  - {name: eve}
slurm: {accounting: false}
health: {mode: observe}
containers: {enabled: true}
"""


@pytest.fixture(scope="module")
def eve(cache: Path) -> Iterator[Contained]:
    with taken_down(at_home(cache)) as cli:
        image = make_image(cli.home)
        cli.ok("up", cli.file(FILE))
        yield Contained(cli, image, "eve")


@pytest.fixture
def work(eve: Contained) -> Iterator[Path]:
    """A folder that belongs to eve."""
    folder = Path(eve.lines(f"mktemp -d -p {eve.cli.home}/tmp")[0])
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def roots(eve: Contained) -> Iterator[Path]:
    """A folder of root that everyone can read, like /etc."""
    folder = eve.cli.home / "roots"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "below").mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def closed(eve: Contained) -> Iterator[Path]:
    """A folder of ada that is closed to others, with a readable file in it."""
    folder = eve.cli.home / "adas"
    folder.mkdir()
    (folder / "notes").write_text("ada's notes\n")
    (folder / "notes").chmod(0o644)
    uid = int(Contained(eve.cli, eve.image, "ada").uid)
    for path in (folder, folder / "notes"):
        os.chown(path, uid, uid)
    folder.chmod(0o700)
    yield folder
    shutil.rmtree(folder)


# Mount points


@pytest.mark.parametrize("image", ["file", "folder"])
@pytest.mark.parametrize("options", ["", "--container-remap-root", "--container-name=planting:no_exec"])
def test_root_creates_no_mount_point_in_a_mounted_folder(
    eve: Contained, work: Path, roots: Path, image: str, options: str
):
    """Root creates mount points only in the container's own layer; in a mounted folder the user creates them."""
    source_image = eve.image if image == "file" else eve.image.with_name("tree")
    eve.lines(f"cd {work}; touch file; mkdir -p folder; ln -sfn /mnt/below link")
    for source, place in (
        ("file", "/mnt/planted"),
        ("folder", "/mnt/planted"),
        ("file", "/mnt/below/planted"),
        ("file", "/mnt/new/planted"),
        ("folder", "/work/link/planted"),
        ("file", "/work/../mnt/planted"),
    ):
        mounts = f"{roots}:/mnt,{work}:/work,{work}/{source}:{place}"
        answer = eve.sh(f"srun --container-image={source_image} --container-mounts={mounts} {options} true")
        assert sorted(path.name for path in roots.rglob("*")) == ["below"]
        assert answer.code == NO_CONTAINER and f"at {place} in the container: Permission denied" in answer.err, answer


def test_mount_points_are_created_where_the_user_may_write(eve: Contained, work: Path):
    """In a folder of the user they are created with the user's rights, in a folder of root in the container's layer."""
    eve.lines(f"cd {work}; mkdir shown; touch shown/it")
    mounts = f"{work}:/mnt,{work}/shown:/mnt/new/here,{work}/shown:/etc/new/here"
    shown = eve.lines(
        f"srun --container-image={eve.image.with_name('tree')} --container-mounts={mounts} "
        "ls /mnt/new/here/it /etc/new/here/it"
    )
    assert shown == ["/etc/new/here/it", "/mnt/new/here/it"]
    assert (work / "new/here").stat().st_uid == int(eve.uid)
    assert not (eve.image.with_name("tree") / "etc/new").exists()


# The store of named containers


def kept(eve: Contained, name: str) -> Path:
    return eve.cli.home / f"clusters/one/hosts/train-1/containers/{eve.uid}/{name}"


def test_job_environment_does_not_change_where_root_stores_containers(eve: Contained, work: Path, roots: Path):
    """The path once contained the node's name from the job's environment, and a link there could lead root anywhere."""
    (work / "containers").symlink_to(roots)
    away = os.path.relpath(work, eve.cli.home / "clusters/one/hosts")
    for number, variable in enumerate(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME")):
        name, output = f"moved-{number}", work / f"output-{number}"
        eve.lines(f"{variable}={away} sbatch -o {output} --container-name={name} $I --wrap 'touch /kept; echo end'")
        eventually(lambda output=output: output.exists() and output.read_text() != "")
        assert sorted(path.name for path in roots.rglob("*")) == ["below"]
        assert output.read_text() == "end\n" and (kept(eve, name) / "upper/kept").exists()


def test_link_in_the_container_store_is_not_followed(eve: Contained, roots: Path):
    """It does not matter who created the link."""
    eve.lines("srun --container-name=first $I true")
    folder = kept(eve, "first").parent
    for place in (folder, folder / "linked"):
        moved = place.with_name("moved-aside")
        if place.exists():
            place.rename(moved)
        place.symlink_to(roots)
        try:
            answer = eve.sh("srun --container-name=linked $I true")
        finally:
            place.unlink()
            if moved.exists():
                moved.rename(place)
        assert answer.code == NO_CONTAINER and "cannot store the container" in answer.err, answer
        assert sorted(path.name for path in roots.rglob("*")) == ["below"]


def test_folder_of_another_user_is_not_used_to_store_containers(eve: Contained):
    eve.lines("srun --container-name=first $I true")
    for place in (kept(eve, "first").parent, kept(eve, "first")):
        os.chown(place, int(eve.uid), -1)
        try:
            answer = eve.sh("srun --container-name=first true")
        finally:
            os.chown(place, 0, -1)
        assert answer.code == NO_CONTAINER and "can be changed by users other than root" in answer.err, answer


def test_users_list_and_remove_only_their_own_containers(eve: Contained, roots: Path, closed: Path):
    """Links in containers are not followed, and deep folders are removed too."""
    ada = Contained(eve.cli, eve.image, "ada")
    ada.lines("srun --container-name=adas $I touch /hers")
    deep = "i=0; while test $i -lt 1500; do mkdir d && cd d || exit; i=$((i+1)); done"
    eve.lines(
        f"srun --container-name=hostile --container-mounts={roots}:/mnt $I "
        f"sh -c 'cd /workspace; {deep}; ln -s {roots} /etc/to-roots; ln -s {closed} /workspace/to-adas; mkdir -m 0 /no'"
    )
    upper = kept(eve, "hostile") / "upper"
    assert (upper / "etc/to-roots").is_symlink()
    listed = eve.lines("srun --container-list true")
    assert [line.split("\t")[0] for line in listed if "hostile" in line or "adas" in line] == ["hostile"]
    for name in ("adas", "../20001/adas", "/etc", "", "hostile:exec"):
        eve.sh(f"srun --container-remove={name} true")
    assert ada.lines("srun --container-name=adas ls /hers") == ["/hers"]
    assert eve.lines("srun --container-remove=hostile true") == ["hostile"]
    assert not upper.parent.exists() and not list(upper.parent.parent.glob(".removed*"))
    assert (roots / "below").exists() and (closed / "notes").exists()


# Images

FLIP = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
while not os.path.exists("stop"):
    for _ in range(1000):
        libc.renameat2(-100, b"image", -100, b"other", 2)
"""


def test_folder_image_swapped_during_start_shows_no_closed_folder(eve: Contained, work: Path, closed: Path):
    """One name refers to eve's own folder and to ada's in turn; the folder that is checked is the one mounted."""
    shutil.copytree(eve.image.parent / "tree/bin", work / "own/x", symlinks=True)
    (work / "flip.py").write_text(FLIP)
    step = f"srun --container-image={work}/image --container-mounts={work}/own/x:/x /x/busybox cat /notes"
    script = f"""cd {work}; ln -s own image; ln -s {closed} other
        timeout 120 python3 flip.py & for i in $(seq 12); do {step}; done; touch stop; wait"""
    answer = eve.sh(script, timeout_s=300)
    assert "ada's notes" not in answer.out
    assert "No such file" in answer.err and "Permission denied" in answer.err  # both folders appeared at that path


@pytest.mark.parametrize("mode", [0o744, 0o711, 0o700])
def test_folder_image_needs_read_and_search_permission(eve: Contained, closed: Path, mode: int):
    closed.chmod(mode)
    mounts = f"{eve.image.with_name('tree')}/bin:/x"
    answer = eve.sh(f"srun --container-image={closed} --container-mounts={mounts} /x/busybox cat /notes")
    assert (answer.code, answer.out) == (NO_CONTAINER, "") and "Permission denied" in answer.err, answer


def test_folder_image_closed_later_is_hidden_from_new_containers(eve: Contained, work: Path, closed: Path):
    """A container that still runs may show the folder, because its overlay caches permissions."""
    closed.chmod(0o755)
    (closed / "inner").mkdir()
    shutil.copy(closed / "notes", closed / "inner/notes")
    shutil.copytree(eve.image.parent / "tree/bin", closed / "bin", symlinks=True)
    shown = Contained(eve.cli, closed, "eve")
    cat = "srun --container-name=looks $I cat /inner/notes"
    look = f"srun --container-name=looks --container-mounts={work}:/x $I sh -c '{{}}'"
    meanwhile = "cat /inner/notes; echo >/x/looked; until test -e /x/closed; do sleep 0.1; done; cat /inner/notes"
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(shown.sh, look.format(meanwhile))
        eventually((work / "looked").exists)
        (closed / "inner").chmod(0o700)
        (work / "closed").touch()
        assert ended.result().out == "ada's notes\n" * 2
    for line in (cat, cat.replace("--container-name=looks", "")):
        answer = shown.sh(line)
        assert answer.out == "" and "Permission denied" in answer.err, answer
    eve.lines("srun --container-remove=looks true")


def test_descriptors_of_the_helper_cannot_be_mounted(eve: Contained):
    """A path below /proc/self would refer to descriptors of the helper, which root opened."""
    for place in ("self/fd/3", "self/fd/5", "self/cwd", "self/root", "thread-self/fd/5"):
        mounted = eve.sh(f"srun $I --container-mounts=/proc/{place}:/mnt ls /mnt")
        as_image = eve.sh(f"srun --container-image=/proc/{place} true")
        for answer in (mounted, as_image):
            assert (answer.code, answer.out) == (NO_CONTAINER, ""), answer
            assert "Too many levels of symbolic links" in answer.err or "No such file" in answer.err, answer


def test_links_of_a_user_do_not_lead_to_open_descriptors(eve: Contained, work: Path):
    """Paths are resolved again when everything is mounted, and by a task before its program runs. A link in a folder of
    eve could then lead to descriptors of the helper or of slurmstepd."""
    eve.lines(f"cd {work}; mkdir evil; ln -s /proc/self/root evil/x")
    mounts = f"--container-mounts=tmpfs:/d/x:rprivate,{work}/evil:/d"
    answer = eve.sh(f"srun $I {mounts} true")
    assert answer.code == NO_CONTAINER and "propagation" in answer.err, answer
    for place in ("/proc/self/root", "/proc/self/cwd", "/d/x"):
        answer = eve.sh(f"srun $I --container-mounts={work}/evil:/d --container-workdir={place} pwd")
        assert (answer.code, answer.out) == (NO_CONTAINER, ""), answer
        assert "Too many levels of symbolic links" in answer.err, answer


# Image files that the kernel mounts


@pytest.fixture
def crafting(eve: Contained) -> Contained:
    """Eve with an image that she wrote herself."""
    return owning(eve, "eve")


@contextmanager
def in_a_container(someone: Contained, work: Path, options: str = "") -> Iterator[int]:
    """Run a step in a container until the block ends; yields the PID of its task."""
    mark = f"96{os.getpid()}"
    go = work / "go"
    wait = f"sleep {mark} & until test -e /x/go; do sleep 0.1; done; kill $!"
    script = f"srun $I {options} --container-mounts={work}:/x sh -c '{wait}'"
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(someone.sh, script)
        try:
            eventually(lambda: ended.done() or len(processes("sleep", mark)) == 1)
            assert not ended.done(), ended.result()
            yield processes("sleep", mark)[0]
        finally:
            go.touch()
            answer = ended.result()
            go.unlink()
    assert answer.code == 0, answer


def test_kernel_never_mounts_an_image_written_by_a_user(eve: Contained, crafting: Contained, work: Path):
    """The kernel's squashfs code is not hardened against hostile files. The kernel mounts only images of root."""
    with in_a_container(eve, work):
        assert loops(eve.image) == 1
    for options in ("", "--container-name=crafted", "--container-name=crafted", "--container-remap-root"):
        with in_a_container(crafting, work, options):
            assert loops(crafting.image) == 0
    eve.lines(f"mkdir {work}/mine; ln {crafting.image} {work}/mine/linked; ln -s {eve.image} {work}/mine/roots")
    for name, kernel in (("linked", False), ("roots", True)):
        with in_a_container(Contained(eve.cli, work / "mine" / name, "eve"), work):
            assert loops(eve.image) == kernel and loops(work / "mine" / name) == loops(crafting.image) == 0
    eve.lines("srun --container-remove=crafted true")


def test_stored_container_is_not_started_from_an_image_of_a_user(eve: Contained, work: Path):
    """After the image is given to eve, the named container is neither mounted by the kernel nor started otherwise."""
    image = eve.image.with_name("given.sqsh")
    shutil.copy(eve.image, image)
    given = Contained(eve.cli, image, "eve")
    given.lines("srun --container-name=given $I touch /kept")
    os.chown(image, int(eve.uid), -1)
    for options in ("", "$I"):
        answer = given.sh(f"srun --container-name=given {options} ls /kept")
        assert (answer.code, answer.out) == (NO_CONTAINER, "") and "remove the container, or restore" in answer.err, (
            answer
        )
    os.chown(image, 0, -1)
    assert given.lines("srun --container-name=given ls /kept; srun --container-remove=given true") == ["/kept", "given"]
    image.unlink()


def test_fuse_server_of_an_image_is_in_the_jobs_cgroup(crafting: Contained, work: Path):
    """Otherwise a task of the same user could take it over, escape the job's limits and outlive the job."""
    device = crafting.cli.home / "fuse"
    os.mknod(device, 0o600 | stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    device.chmod(0o666)
    crafting.on("train-1", "mount", "--bind", str(device), "/dev/fuse")
    try:
        with in_a_container(crafting, work) as task:
            servers = find(lambda pid: "squashfuse" in str(arguments(pid)) and str(crafting.image) in open_files(pid))
            cgroups = [Path(f"/proc/{pid}/cgroup").read_text() for pid in (task, *(each.pid for each in servers))]
            assert len(cgroups) == 2 and cgroups[0] == cgroups[1] and "step_" in cgroups[0]
    finally:
        crafting.on("train-1", "umount", "/dev/fuse")
        device.unlink()


def test_an_import_is_in_the_jobs_cgroup(eve: Contained):
    with socket.create_server(("", 0)) as silent, ThreadPoolExecutor(1) as aside:  # a registry that never answers
        image = f"{address_of_this_machine(eve)}:{silent.getsockname()[1]}#team/app:v1"
        ended = aside.submit(eve.sh, f"srun -J silent --container-image={image} true")
        try:
            eventually(lambda: len(processes("--", image)) == 1 and len(waiting_tasks(eve)) == 1)
            pids = (*waiting_tasks(eve), *processes("--", image))
            cgroups = {Path(f"/proc/{pid}/cgroup").read_text() for pid in pids}
        finally:
            eve.lines("scancel --name=silent")
            ended.result()
    assert len(cgroups) == 1 and "step_" in cgroups.pop()


FORGE = """
import fcntl, os, subprocess, sys
folder, numbers = sys.argv[1:3]
os.makedirs(f"{folder}/holders")
for name in ("door", "lock"):
    open(f"{folder}/{name}", "w").close()
with open(f"{folder}/image", "w") as image:
    image.write("/nowhere")
for pid in sys.argv[3:]:
    with open(f"{folder}/holders/{pid}", "w") as note:
        note.write(numbers)
lock = open(f"{folder}/lock")
fcntl.flock(lock, fcntl.LOCK_SH)
print("held", flush=True)
subprocess.run(["srun", "--container-name=forged", "id", "-u"])
"""


def test_forged_holder_file_leads_into_no_namespace_of_root(crafting: Contained, work: Path):
    """In her own folder eve can claim that a container runs in namespaces of root."""
    (work / "forge.py").write_text(FORGE)
    crafting.lines("srun --container-name=first $I true; srun --container-remove=first true")
    folder = kept(crafting, "forged").parent.with_name(f"{crafting.uid}.own") / "forged"
    stepds = [process.pid for process in find(lambda pid: "slurmd" in "".join(arguments(pid)[:1]))]
    mounts, users = (int(os.readlink(f"/proc/{stepds[0]}/ns/{kind}").split("[")[1][:-1]) for kind in ("mnt", "user"))
    for numbers in (f"{mounts} 0 {mounts} 0", f"{mounts} {users} {mounts} {users}", "0 0 0 0", "x"):
        script = f"python3 {work}/forge.py {folder} '{numbers}' self 1 {' '.join(map(str, stepds[:3]))}; rm -r {folder}"
        answer = crafting.sh(script)
        assert answer.out == "held\n" and "is in use on this node and cannot be joined" in answer.err, answer


def test_named_container_is_usable_while_its_last_step_ends(eve: Contained):
    """The process of a step that ends may hold the lock for a moment after its namespaces are gone."""
    eve.lines("srun --container-name=brief $I touch /kept")
    with (kept(eve, "brief") / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        ending = threading.Timer(0.7, fcntl.flock, (lock, fcntl.LOCK_UN))
        ending.start()
        assert eve.lines("srun --container-name=brief ls /kept; srun --container-remove=brief true") == [
            "/kept",
            "brief",
        ]
        ending.join()


# Stops all processes of its user that save into a file. Saving takes a fraction of a second, so this does not pause.
STOP_SAVING = """
import os, signal, sys
program, file = (word.encode() for word in sys.argv[1:])
stopped = 0
while not stopped:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                with open(f"/proc/{pid}/cmdline", "rb") as words:
                    first, _, others = words.read().partition(b"\\0")
                if program in first and file in others:
                    os.kill(int(pid), signal.SIGSTOP)
                    stopped += 1
        except OSError:
            pass  # the process has ended
"""


@pytest.mark.parametrize("which", [pytest.param("dalsegno-container", marks=pytest.mark.long), "mksquashfs"])
def test_user_who_stops_saving_does_not_block_the_node(eve: Contained, work: Path, which: str):
    """The saving process has eve's rights, so she can stop it. Cancelling the job must still end it."""
    eve.lines(f"head -c 300000000 /dev/urandom >{work}/ballast")
    mounts = f"--container-mounts={work}:/x"
    line = f"srun -J saving $I {mounts} --container-save={work}/saved.sqsh sh -c 'cat /x/ballast >/ballast'"
    watch = ["python3", "-ISc", STOP_SAVING, which, f"{work}/saved"]
    watcher = subprocess.Popen(watch, user=int(eve.uid), cwd="/")
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(eve.sh, line)
        try:
            while watcher.poll() is None and not ended.done():
                time.sleep(0.01)
            assert not ended.done(), ended.result()
            assert watcher.wait() == 0
        finally:
            watcher.kill()
            watcher.wait()
            eve.lines("scancel --name=saving")
        ended.result()
    eventually(lambda: eve.lines("squeue -h; sinfo -h -o '%D %T'") == ["1 idle"])
    assert not find(lambda pid: which in "".join(arguments(pid)[:1]) and f"{work}/saved" in " ".join(arguments(pid)))


# Steps that do not end


def test_a_step_whose_container_is_never_ready_can_be_cancelled(eve: Contained, work: Path):
    """A hanging file system, or a helper stopped by its user, must not block the node."""
    eve.lines("srun --container-name=stuck $I true")
    with (kept(eve, "stuck") / "door").open() as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        eve.lines(f"sbatch -J stuck -o {work}/out --wrap 'srun --container-name=stuck echo began'")
        eventually(lambda: eve.lines("squeue -h -s -o %i | grep -cv batch || true") == ["1"])
        eve.lines("scancel --name=stuck")
        eventually(lambda: eve.lines("squeue -h; sinfo -h -o '%D %T'") == ["1 idle"])
    assert "began" not in (work / "out").read_text()


def test_control_characters_in_errors_do_not_reach_the_terminal(eve: Contained):
    for option in ("--container-mounts='/no\x1b]0;x\x07:/b'", "--container-workdir='/no\x1b]0;x\x07'"):
        answer = eve.sh(f"srun $I {option} true")
        assert answer.code != 0 and "\x1b" not in answer.err and "/no?]0;x?" in answer.err, answer
    answer = eve.sh("srun $I --container-workdir='/ä\x9b2J' true")
    assert answer.code != 0 and "/ä??2J" in answer.err, answer

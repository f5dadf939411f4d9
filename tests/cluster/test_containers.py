"""Container jobs on a real cluster, with Pyxis's options: as root, as another user, and on a cluster without root."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.containers.named import unpacked_key
from dalsegno.containers.native import NO_CONTAINER
from dalsegno.system.children import arguments, environment, find
from dalsegno.targets.local.target import LocalTarget
from tests.cluster.conftest import PINGED_S, Answer, Cli, at_home, make_home, taken_down
from tests.cluster.test_rootless import NOBODY, Rootless, copy_program
from tests.containers.dockerfiles import NEEDS_BUILDER, builder_env, write_context
from tests.containers.images import Layout, folder, member
from tests.containers.registries import Meddler, push, registry, serving
from tests.waiting import PATIENCE_S, eventually

FILE = """
name: one
target: local
partitions:
  - {name: train, nodes: 2, gpus: 4, gpu_type: h100, cpus: 8, memory: 4G, default: true}
users: [{name: ada}, {name: eve}]
slurm: {accounting: false}
"""
APPLETS = (
    "cat",
    "chown",
    "echo",
    "grep",
    "id",
    "kill",
    "ls",
    "mkdir",
    "pwd",
    "rm",
    "sh",
    "sleep",
    "test",
    "touch",
    "true",
)
CANCELLED = ("143\n", "137\n")  # srun may kill the task before slurmd's SIGTERM takes effect
ENVIRONMENT = "PATH=/bin:/usr/bin\nFROM_IMAGE=as it says\nLANG=image\n"
# The file that Enroot writes.
RC = 'mkdir -p "/workspace"\ncd "/workspace" && unset OLDPWD || exit 1\necho entry\nexec "$@"\n'


@dataclass(frozen=True)
class Contained:
    """A cluster with container jobs, one of its users ("" for the owner), and a small image."""

    cli: Cli
    image: Path
    user: str = ""

    def sh(self, script: str, *args: str, timeout_s: float = 120) -> Answer:
        """Run a script as `dalsegno shell` does, without its start-up time; $I is the option that names the image."""
        words = ["sh", "-c", f"I=--container-image={self.image}\n{script}", "sh", *args]
        target = LocalTarget(self.cli.home / "clusters/one", self.cli.home / "cache")
        entry = target.shell(words, self.cli.env, str(self.cli.home), user=self.user or None)
        done = subprocess.run(
            [*self.cli.become, *entry.argv], env=entry.env, cwd=self.cli.home, capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return Answer(done.returncode, done.stdout, done.stderr)

    def on(self, host: str, *words: str) -> None:
        """Run a command as root on one of the hosts."""
        target = LocalTarget(self.cli.home / "clusters/one", self.cli.home / "cache")
        entry = target.shell(words, self.cli.env, "/", host=host)
        subprocess.run(entry.argv, env=entry.env, check=True, timeout=120)

    def lines(self, script: str) -> list[str]:
        answer = self.sh(script)
        assert answer.code == 0, answer
        return answer.out.splitlines()

    @property
    def uid(self) -> str:
        return self.lines("id -u")[0]

    @property
    def home(self) -> str:
        """The user's home folder, as jobs see it."""
        return self.lines("echo $HOME")[0]


def make_image(folder: Path, program: str | None = shutil.which("busybox")) -> Path:
    assert program, "busybox-static is not installed"
    tree = folder / "tree"
    for name in ("bin", "etc", "root", "workspace"):
        (tree / name).mkdir(parents=True)
    shutil.copy(program, tree / "bin/busybox")
    for name in APPLETS:
        (tree / "bin" / name).symlink_to("busybox")
    shutil.copy(program, tree / "root/busybox")
    (tree / "root/busybox").chmod(0o4755)
    (tree / "etc/environment").write_text(ENVIRONMENT)
    (tree / "etc/rc").write_text(RC)
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    words = ["mksquashfs", str(tree), str(folder / "tiny.sqsh"), "-all-root", "-quiet", "-no-progress", "-comp", "lz4"]
    subprocess.run([*words, "-p", "bad-device c 666 0 0 1 3"], check=True, stdout=subprocess.DEVNULL)
    (folder / "tiny.sqsh").chmod(0o644)
    return folder / "tiny.sqsh"


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Contained]:
    with taken_down(at_home(cache)) as cli:
        image = make_image(cli.home)
        cli.ok("up", cli.file(FILE))
        yield Contained(cli, image)


@pytest.fixture(scope="module")
def rootless(cache_of_nobody: Path) -> Iterator[Contained]:
    home = make_home("ds-")
    (home / "cache").symlink_to(cache_of_nobody)
    copy_program(home / "lib")
    image = make_image(home)
    (home / "tmp").mkdir()
    uid = NOBODY if os.geteuid() == 0 else os.geteuid()
    for path in (home, home / "tmp"):
        os.chown(path, uid, uid)
    with taken_down(Rootless(home, uid)) as cli:
        cli.ok("up", cli.file("".join(line for line in FILE.splitlines(True) if "users" not in line)))
        yield Contained(cli, image)


@pytest.fixture(params=["ada", "rootless", *(pytest.param(name, marks=pytest.mark.long) for name in ("root", "eve"))])
def someone(request: pytest.FixtureRequest) -> Contained:
    """A user on one of several clusters, with the same expected results for all.

    Ada uses an image of root, eve her own.
    """
    if request.param == "rootless":
        alone: Contained = request.getfixturevalue("rootless")
        return alone
    shared: Contained = request.getfixturevalue("cluster")
    if request.param == "eve":
        return owning(shared, "eve")
    return Contained(shared.cli, shared.image, "" if request.param == "root" else request.param)


def owning(cluster: Contained, user: str) -> Contained:
    """Return a user with their own copy of the image, which the kernel therefore does not mount."""
    image = cluster.image.with_name(f"{user}s.sqsh")
    if not image.exists():
        shutil.copy(cluster.image, image)
        uid = int(Contained(cluster.cli, cluster.image, user).uid)
        os.chown(image, uid, uid)
    return Contained(cluster.cli, image, user)


@pytest.fixture
def ada(cluster: Contained) -> Contained:
    return Contained(cluster.cli, cluster.image, "ada")


# For every kind of user


def test_tasks_run_in_the_image_with_their_ranks_gpus_and_environment(someone: Contained):
    devices = next((someone.cli.home / "clusters").iterdir()) / "dev"
    what = (
        "$SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $CUDA_VISIBLE_DEVICES $SLURMD_NODENAME $(pwd) $FROM_IMAGE $(id -u)"
    )
    seen = someone.lines(
        f"srun -N2 -n4 --ntasks-per-node=2 --gpus-per-node=2 $I sh -c 'test -c {devices}/nvidia1 && echo {what}'"
    )
    uid = someone.uid
    assert sorted(seen) == [
        f"{rank} {rank % 2} {rank // 2} 0,1 train-{rank // 2 + 1} /workspace as it says {uid}" for rank in range(4)
    ]


def test_containers_are_on_though_the_cluster_file_does_not_mention_them(cluster: Contained):
    assert "containers" not in FILE
    assert "--container-image" in cluster.sh("srun --help").out


def test_exit_codes_and_signals_are_the_tasks_own(someone: Contained):
    script = "for end in true 'exit 7' 'kill -9 $$' 'kill -TERM $$'; do srun $I sh -c \"$end\"; echo $?; done"
    assert someone.lines(script) == ["0", "7", "137", "143"]


def test_a_signal_that_is_sent_reaches_the_program(someone: Contained):
    output = someone.cli.home / f"tmp/told-{someone.uid}"
    script = """srun -J told $I sh -c 'trap "echo told; exit 5" USR1; echo ready; while :; do sleep 0.02; done' > $1 &
        until test -s $1; do sleep 0.02; done; scancel --signal=USR1 --name=told; wait $!; echo $?; cat $1"""
    assert someone.sh(script, str(output)).out.splitlines() == ["5", "ready", "told"]


def test_tasks_of_a_node_share_memory_files_and_what_they_write(someone: Contained):
    """Each task writes a file and waits for the other's file, in /dev/shm and in the container itself."""
    meet = "touch $1.$SLURM_LOCALID; until test -e $1.0 && test -e $1.1; do sleep 0.02; done; echo met"
    both = f"srun -N1 -n2 $I sh -c '{meet}' sh $1; rm -f $1.0 $1.1"
    for place in (f"/dev/shm/dalsegno-test-{os.getpid()}", "/etc/here"):
        answer = someone.sh(both, place)
        assert answer.out.split() == ["met", "met"], answer


def test_bad_image_is_a_one_line_error_and_drains_no_node(someone: Contained):
    home = someone.cli.home
    (home / "tmp/text.sqsh").write_text("no image")
    (home / "tmp/cut.sqsh").write_bytes(someone.image.read_bytes()[:9000])
    for name, why in {
        "missing.sqsh": "No such file or directory",
        "text.sqsh": "is not a squashfs file",
        "cut.sqsh": "cut.sqsh: ",
    }.items():
        answer = someone.sh(f"srun -n2 -N1 --container-image={home}/tmp/{name} true")
        ours = [line for line in answer.err.splitlines() if line.startswith("dalsegno: ")]
        assert answer.code == NO_CONTAINER and len(ours) == 1, answer
        assert re.match(r"dalsegno: train-[12]: container\[125\]: image /", ours[0]) and why in ours[0]
    someone.lines(f"cd {home}/tmp; sbatch -o bad.out --container-image=./missing.sqsh --wrap true")
    eventually(lambda: "missing.sqsh: No such file or directory" in text_of(home / "tmp/bad.out"))
    eventually(lambda: someone.lines("sinfo -h -o '%D %T'") == ["2 idle"], PINGED_S)


def test_cancelled_step_leaves_nothing_behind(cluster: Contained, ada: Contained, rootless: Contained):
    """All three steps run at the same time, because Slurm takes seconds to notice that a step has ended."""
    mark, everyone = f"98{os.getpid()}", (cluster, ada, rootless)
    line = f"sbatch --parsable -N2 -o /dev/null --wrap \"srun $I sh -c '(sleep {mark} &); sleep {mark}'\""
    jobs = [who.lines(line)[0] for who in everyone]
    eventually(lambda: len(processes("sleep", mark)) == 4 * len(everyone))
    assert containers(cluster) > 0 and containers(rootless) > 0
    for who, job in zip(everyone, jobs, strict=True):
        who.lines(f"scancel {job}")
    eventually(lambda: (processes("sleep", mark), containers(cluster), containers(rootless)) == ([], 0, 0))
    eventually(lambda: (loops(cluster.image), loops(rootless.image)) == (0, 0))


def test_detached_process_ends_with_its_step(someone: Contained):
    """The process ends with or without a container. A cancelled step has the exit code of its signal."""
    mark = f"97{os.getpid()}"
    detach = f"sh -c '(sleep {mark} &)'"
    assert someone.lines(f"srun $I {detach}; echo $?; srun {detach}; echo $?") == ["0", "0"]
    eventually(lambda: processes("sleep", mark) == [])
    began = someone.cli.home / f"tmp/began-{someone.uid}"
    cancelled = f"""srun -J detached $I sh -c '(sleep {mark} &); echo began; sleep {mark}' > $1 &
        until test -s $1; do sleep 0.02; done; scancel --name=detached; wait $!; echo $?"""
    assert someone.sh(cancelled, str(began)).out in CANCELLED
    eventually(lambda: processes("sleep", mark) == [])
    eventually(lambda: someone.lines("sinfo -h -o '%D %T'") == ["2 idle"], PINGED_S)


def test_set_user_id_files_and_devices_of_an_image_grant_no_rights(someone: Contained):
    uid = someone.uid
    out = someone.lines("srun $I sh -c 'grep \" / \" /proc/self/mounts; cat /bad-device 2>&1; /root/busybox id -u'")
    assert "nosuid" in out[0] and "nodev" in out[0]
    assert "ermission denied" in out[1] or "No such file" in out[1]  # an image unpacked without root has no devices
    assert out[2] == uid


# Options


def test_container_options_take_effect(someone: Contained):
    """All jobs run at the same time."""
    shared = someone.cli.home / "tmp"
    (shared / "outside").touch()
    steps = [
        ("--container-workdir=/etc pwd", "/etc"),
        ("sh -c 'echo $LANG'", "image"),
        ("--container-env=LANG sh -c 'echo $LANG'", "job"),
        ("--container-remap-root id -u", "0"),
        ("--container-remap-root sh -c 'touch /f && chown 42:42 /f && echo done'", "done"),
        ("--container-entrypoint echo after", "entry after"),
        ("--container-readonly sh -c 'touch /new 2>/dev/null || echo refused'", "refused"),
        ("--container-writable sh -c 'touch /etc/new && echo done'", "done"),
        ("--container-mounts=tmpfs:/x:size=1M sh -c 'touch /x/new && grep -c \" /x tmpfs.*size=1\" /proc/mounts'", "1"),
        ("--container-workdir=../etc pwd", "/etc"),
        ("--container-writable --container-readonly true", ""),
        (f"--container-mounts={shared}:/mnt/a/b sh -c 'touch /mnt/a/b/$SLURM_JOB_ID && echo done'", "done"),
        (f"--container-mounts={shared}:/mnt:ro sh -c 'touch /mnt/x 2>/dev/null || ls /mnt/outside'", "/mnt/outside"),
        (f"--container-mount-home grep -c ' {someone.home} ' /proc/self/mounts", "1"),
        (f"grep -c ' {someone.home} ' /proc/self/mounts", "0"),
    ]
    variable = ("PYXIS_CONTAINER_READONLY=1", "sh -c 'touch /new 2>/dev/null || echo refused'", "refused")
    script = "\n".join(f"srun $I {words} > $1/{number} &" for number, (words, _) in enumerate(steps))
    script += f"\n{variable[0]} srun $I {variable[1]} > $1/{len(steps)} &"
    steps.append((variable[1], variable[2]))
    folder = shared / f"steps-{someone.uid}"
    answer = someone.sh(f"mkdir $1; export LANG=job\n{script}\nwait", str(folder))
    seen = [" ".join((folder / str(number)).read_text().split()) for number in range(len(steps))]
    assert seen == [out for _, out in steps], answer
    assert "both --container-readonly and --container-writable were given" in answer.err


def test_image_name_cut_off_by_a_shell_comment_is_explained(ada: Contained):
    r"""In an #SBATCH line, `#` starts a comment; `\#` does not."""
    script = f"""cd {ada.cli.home}/tmp; printf '#!/bin/sh\n#SBATCH --container-image=%s\ntrue\n' "$1" >cut.sh
        sbatch -H -o /dev/null cut.sh"""
    assert "write \\# for #: localhost:5000\\#IMAGE" in ada.sh(script, "localhost:5000#team/app:v1").err
    assert "write \\# for #: nvcr.io\\#IMAGE" in ada.sh(script, "nvcr.io#nvidia/pytorch:24.01").err
    for name in (r"nvcr.io\#nvidia/pytorch:24.01", "ubuntu:24.04", "/fsx/my.sqsh"):
        assert ada.sh(script, name).err == ""
    ada.lines("scancel -u ada")


def test_mount_sources_are_opened_with_the_users_rights(ada: Contained):
    secret = ada.cli.home / "clusters/one/secret"
    answer = ada.sh(f"srun $I --container-mounts={secret}/munge.key:/key cat /key")
    assert answer.code == NO_CONTAINER and "cannot mount" in answer.err and "Permission denied" in answer.err
    (ada.cli.home / "hidden.sqsh").write_bytes(ada.image.read_bytes())
    (ada.cli.home / "hidden.sqsh").chmod(0o600)
    answer = ada.sh(f"srun --container-image={ada.cli.home}/hidden.sqsh true")
    assert answer.code == NO_CONTAINER and "hidden.sqsh: Permission denied" in answer.err


def test_named_container_persists_is_shared_while_running_and_private(someone: Contained):
    own = f"mine-{someone.uid}"
    line = f"srun -w train-1 --container-name={own}"
    assert someone.lines(f"{line} $I touch /kept; {line} ls /kept") == ["/kept"]
    other = someone.image.with_name("tree")
    reused = someone.sh(f"{line} --container-image={other} ls /kept")
    assert reused.out == "/kept\n", reused
    assert f"created from {someone.image}, and --container-image={other} is ignored" in reused.err
    assert "dalsegno:" not in someone.sh(f"{line} $I ls /kept").err
    at_once = f"""{line} sh -c 'until test -e /second; do sleep 0.05; done; echo seen' &
        until {line}:exec touch /second 2>/dev/null; do sleep 0.1; done; wait"""
    assert someone.lines(at_once) == ["seen"]
    beside = f"""{line} sh -c 'until test -e /third; do sleep 0.05; done; echo seen' &
        until told=$({line}:exec --container-mounts=/usr/share:/mnt true 2>&1); do sleep 0.1; done
        {line}:no_exec --container-mounts=/usr/share:/mnt sh -c 'touch /third; test -d /mnt/misc && echo beside'
        wait; echo "$told" >&2"""
    answer = someone.sh(beside)
    assert sorted(answer.out.splitlines()) == ["beside", "seen"], answer
    assert f"container {own} is already running: --container-mounts is ignored" in answer.err
    for name, why in {
        f"{own}:create": "already",
        f"{own}:exec": f"container {own} is not running",
        "other": "container other does not exist",
    }.items():
        answer = someone.sh(f"srun -w train-1 --container-name={name} true")
        assert answer.code == NO_CONTAINER and why in answer.err
    if someone.user:  # root has no container with that name
        assert f"container {own} does not exist" in Contained(someone.cli, someone.image).sh(f"{line} true").err


def test_container_has_the_requested_namespaces(someone: Contained):
    """All tasks of the container and steps that join it share the namespaces. A step that joins gets no new ones."""
    name = f"apart-{someone.uid}"
    line = f"srun -w train-1 --container-name={name}"
    see = "for kind in net ipc uts user; do ls -l /proc/self/ns/$kind; done | grep -o '[a-z]*:\\[.*\\]'"
    wait = "until test -e /seen; do sleep 0.05; done; "
    script = f"""srun -w train-1 sh -c {shlex.quote(see)}
        tasks=$(mktemp)
        {line} $I --container-unshare=net,ipc -n 2 sh -c {shlex.quote(wait + see)} >$tasks &
        until told=$({line}:exec --container-unshare=uts true 2>&1) || echo "$told" | grep -q separate
        do sleep 0.1; done
        {line}:exec --container-unshare=net sh -c {shlex.quote(see)}
        {line}:no_exec --container-unshare=uts sh -c {shlex.quote(see + "; touch /seen")}
        wait; cat $tasks; rm $tasks; echo "$told" >&2
        srun --container-unshare=net,pid $I true"""
    answer = someone.sh(script)
    ids = [line.strip() for line in answer.out.splitlines()]
    assert len(ids) == 20, answer
    host, joined, beside = (dict(zip(("net", "ipc", "uts", "user"), ids[at:], strict=False)) for at in (0, 4, 8))
    for kind in ("net", "ipc"):
        assert joined[kind] != host[kind] and ids.count(joined[kind]) == 3, "both tasks and the step that joined"
        assert beside[kind] == host[kind]
    assert joined["uts"] == host["uts"] and ids.count(beside["uts"]) == 1
    root = not someone.user and someone.uid == "0"
    assert (joined["user"] == host["user"]) == root, "a user's namespaces belong to a user namespace of theirs"
    assert "--container-unshare=uts requested but the container is not in a separate UTS namespace" in answer.err
    assert answer.code != 0 and "--container-unshare: unknown namespace 'pid'" in answer.err


def test_named_containers_are_listed_and_removed(someone: Contained):
    """The owner lists and removes containers on the nodes that have them. A container in use is kept."""

    def listed() -> list[list[object]]:
        found = json.loads(someone.sh("dalsegno containers ls --json").out)
        return [
            [each["node"], each["name"], each["image"], each["in_use"]] for each in found if "kept-" in each["name"]
        ]

    mine, image = f"kept-{someone.uid}", str(someone.image)
    fill = "mkdir -p /a/b; ln -s /etc /a/link; touch /a/b/c; mkdir /a/closed; chmod 0 /a/closed; true"
    someone.lines(f"srun -N2 --container-name={mine} $I sh -c '{fill}'")
    assert sorted(listed()) == [[f"train-{number}", mine, image, False] for number in (1, 2)]
    assert mine in someone.sh("dalsegno containers ls -w train-2").out
    used = f"srun -w train-1 --container-name={mine} sh -c 'until test -e /go; do sleep 0.1; done'"
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(someone.sh, used, timeout_s=120)
        eventually(lambda: ["train-1", mine, image, True] in listed())
        answer = someone.sh(f"dalsegno containers rm {mine}")
        assert answer.code == 1 and f"train-2: removed {mine}" in answer.err, answer
        assert f"train-1: container {mine} is in use on this node" in answer.err
        someone.lines(f"srun -w train-1 --container-name={mine}:exec touch /go")
        assert ended.result().code == 0
    eventually(lambda: listed() == [["train-1", mine, image, False]])
    assert someone.sh(f"dalsegno containers rm {mine}").code == 0
    assert listed() == []
    gone = someone.sh(f"dalsegno containers rm {mine}")
    assert gone.code == 1 and f"no node has a container {mine}" in gone.err
    assert someone.sh("dalsegno containers rm ../up").code == 2
    kept = next((someone.cli.home / "clusters/one/hosts/train-1/containers").glob(f"{someone.uid}*"))
    assert not [path for path in kept.iterdir() if path.name.startswith((".removed", mine))]


def test_a_saved_container_is_an_image_again(someone: Contained):
    saved = someone.cli.home / f"tmp/saved-{someone.uid}.sqsh"
    assert someone.lines(
        f"srun $I --container-save={saved} touch /etc/more; srun --container-image={saved} sh -c 'ls /etc/more; pwd'"
    ) == ["/etc/more", "/workspace"]
    refused = someone.sh("srun $I --container-save=/nowhere/x.sqsh sh -c 'echo began'")
    assert (refused.code, refused.out) == (
        NO_CONTAINER,
        "",
    ) and "--container-save: /nowhere: No such file" in refused.err
    refused = someone.sh("srun $I --container-save=/tmp sh -c 'echo began'")
    assert (refused.code, refused.out) == (NO_CONTAINER, "") and "/tmp: is a folder" in refused.err


def test_a_step_whose_container_cannot_be_saved_fails(someone: Contained):
    """The folder for the image is removed while the step runs.

    An exit code or signal of the program takes precedence.
    """
    folder = Path(someone.lines(f"mktemp -d -p {someone.cli.home}/tmp")[0])
    words = f"$I --container-mounts={folder}:/x --container-save={folder}/d/saved.sqsh"
    make = f"mkdir -p {folder}/d; "
    for nodes, end, code in (
        (1, "true", NO_CONTAINER),
        (2, "true", NO_CONTAINER),
        (1, "exit 7", 7),
        (1, "kill $$", 143),
    ):
        failed = someone.sh(f"{make}srun -N {nodes} --ntasks-per-node=2 {words} sh -c 'rm -rf /x/d; {end}'")
        assert failed.code == code and "saved.sqsh: mksquashfs failed" in failed.err, failed
    script = 'trap "echo told >>/x/told" USR1; echo >/x/began; while true; do sleep 0.1; done'
    cancelled = someone.sh(f"""{make}srun -J saved {words} sh -c '{script}' &
        until test -e {folder}/began; do sleep 0.1; done
        scancel -s USR1 --name=saved; until test -e {folder}/told; do sleep 0.1; done
        scancel --name=saved; wait $!; echo $?""")
    assert cancelled.out in CANCELLED and (folder / "told").read_text() == "told\n", cancelled
    assert (folder / "d/saved.sqsh").exists()


def test_step_with_container_save_keeps_its_terminal(someone: Contained):
    """A program must be in the foreground to read from a terminal; ^C (\\003) reaches the program exactly once."""
    if "BusyBox v1.38." in subprocess.run(["busybox"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("the shell of BusyBox 1.38 reads nothing after a signal that it has trapped, with or without Slurm")
    folder = Path(someone.lines(f"mktemp -d -p {someone.cli.home}/tmp")[0])
    first, second = "read line\necho got-$line\n", "until read line; do :; done\necho then-$line\nexit 3\n"
    (folder / "typed").write_text(f"trap 'echo interrupted' INT\necho ready\n{first}{second}")
    (folder / "typed").chmod(0o755)
    line = (
        f"srun --pty --container-image={someone.image} --container-mounts={folder}:/x --container-save={folder}/s.sqsh"
    )
    typed = (
        f"until grep -q ready {folder}/seen; do sleep 0.1; done; printf 'one\\n'; until grep -q got {folder}/seen; do"
    )
    typed += f" sleep 0.1; done; printf '\\003'; until grep -q inter {folder}/seen; do sleep 0.1; done; printf 'two\\n'"
    done = someone.sh(f": >{folder}/seen; ({typed}) | SHELL=/bin/sh script -qefc '{line} sh /x/typed' {folder}/seen")
    assert done.code == 3 and (folder / "s.sqsh").exists(), done
    assert [done.out.count(word) for word in ("got-one", "interrupted", "then-two")] == [1, 1, 1], done


def test_sbatch_salloc_and_a_folder_as_image(someone: Contained):
    home, uid = someone.cli.home, someone.uid
    script, out = home / f"tmp/job-{uid}.sh", home / f"tmp/job-{uid}.out"
    lines = [f"--container-image={someone.image}", f"--container-mounts={home}:/mnt:ro", "--container-workdir=/mnt"]
    options = "".join(f"#SBATCH {line}\n" for line in (*lines, f"-o {out}"))
    script.write_text(f"#!/bin/sh\n{options}echo $FROM_IMAGE $1 $(pwd)\n")
    someone.lines(f"sbatch {script} word")
    assert someone.lines("salloc -N1 $I srun sh -c 'echo $FROM_IMAGE' 2>/dev/null") == ["as it says"]
    assert someone.lines("PYXIS_CONTAINER_IMAGE=${I#*=} srun sh -c 'echo $FROM_IMAGE'") == ["as it says"]
    folder = someone.sh(
        f"srun --auto-resume=1 --container-image={home}/tree sh -c 'echo $FROM_IMAGE $DALSEGNO_AUTO_RESUME'"
    )
    assert folder.out == "as it says 1\n" and "Pyxis does not accept a folder as image" in folder.err
    twice = someone.sh("srun $I --container-mounts=/tmp:/a --container-mounts=/tmp:/b:nodev sh -c 'cd /b && ! cd /a'")
    assert twice.code == 0 and "was given twice: only /tmp:/b:nodev is used" in twice.err
    refused = someone.sh("srun $I --container-mounts=a:b true")
    assert refused.code != 0 and "the source must be /PATH, ./PATH or tmpfs" in refused.err
    eventually(lambda: text_of(out) == "as it says word /mnt\n")


@NEEDS_BUILDER
def test_image_built_from_a_dockerfile_runs_with_its_settings(ada: Contained, tmp_path: Path):
    home = ada.cli.home
    env = {**ada.cli.env, **builder_env(tmp_path / "builder"), "DALSEGNO_IMAGES": str(tmp_path / "store")}
    context, image = write_context(tmp_path / "context"), home / "built.sqsh"
    argv = ada.cli.argv("image", "build", str(context), "--target", "base", "--build-arg", "OF=lab", "-o", str(image))
    subprocess.run(argv, env=env, check=True, capture_output=True, timeout=PATIENCE_S)
    script = f"srun --container-image={image} sh -c 'cat /greeting; echo $A $B; pwd'"
    assert ada.lines(script) == ["hello nobody of lab", "1 two words", "/work"]


def slow(path: str, body: bytes) -> bytes:
    """Delay manifests until the plugin reports that it waits."""
    time.sleep(5.0 if "/manifests/" in path else 0)
    return body


def test_a_registrys_image_is_fetched_once_for_sixteen_tasks(rootless: Contained, tmp_path: Path):
    busybox = (rootless.image.parent / "tree/bin/busybox").read_bytes()
    layout = Layout(tmp_path / "oci")
    layers = [([folder("bin"), member("bin/sh", busybox, mode=0o755)], "gzip"), ([member("second", b"2")], "zstd")]
    layout.image("v1", layers, config={"Env": ["FROM=v1"]})
    with registry(tmp_path) as behind:
        push(layout.path, "v1", behind, "team/app:v1")
        push(layout.path, "v1", behind, "team/app:v2")
        meddler = Meddler(behind)
        with serving(meddler.handler()) as address:
            line = f"srun -N2 -n16 --container-image={address}#team/app:v1 sh -c 'echo $FROM; test -e /second'"
            assert rootless.lines(line) == ["v1"] * 16
            fetched = meddler.blobs()
            meddler.meddle = slow
            answer = rootless.sh(f"srun -n2 --container-image={address}#team/app:v2 sh -c 'echo $FROM'")
    assert answer.out == "v1\nv1\n"
    assert answer.err.count(f"dalsegno: importing {address}#team/app:v2; this may take a while\n") == 1
    assert len(fetched) == len(set(fetched)) == 3  # two layers and the configuration


def test_cancelled_step_ends_its_import_or_its_wait_for_one(someone: Contained):
    with socket.create_server(("", 0)) as silent:  # a registry that accepts connections and never answers
        image = f"{address_of_this_machine(someone)}:{silent.getsockname()[1]}#team/app:v1"
        both = "".join(f"srun -w train-{n} -n2 -J silent --container-image={image} true & " for n in (1, 2))
        with ThreadPoolExecutor(1) as aside:
            ended = aside.submit(someone.sh, f"{both} wait %1; echo $?; wait %2; echo $?", timeout_s=90)
            eventually(lambda: (len(processes("--", image)), len(waiting_tasks(someone))) == (2, 4))
            someone.lines("scancel --name=silent")
            codes = ended.result().out.splitlines(True)
            assert len(codes) == 2 and set(codes) <= set(CANCELLED)
    eventually(lambda: processes("--", image) == [])
    eventually(lambda: someone.lines("sinfo -h -o '%D %T'") == ["2 idle"], PINGED_S)


def test_cancelled_import_is_resumed(rootless: Contained, tmp_path: Path):
    busybox, ballast = (rootless.image.parent / "tree/bin/busybox").read_bytes(), os.urandom(8 << 20)
    layout = Layout(tmp_path / "oci")
    layout.image("v1", [([folder("bin"), member("bin/sh", busybox, mode=0o755), member("ballast", ballast)], "gzip")])
    with registry(tmp_path) as behind:
        push(layout.path, "v1", behind, "team/app:v1")
        meddler = Meddler(behind, stall=True)
        with serving(meddler.handler()) as address, ThreadPoolExecutor(1) as aside:
            line = f"srun -J stalled --container-image={address}#team/app:v1 sh -c 'echo whole'"
            ended = aside.submit(rootless.sh, line, timeout_s=90)
            eventually(lambda: any(path.stat().st_size for path in rootless.cli.home.glob("images/blobs/*.part")))
            eventually(lambda: len(waiting_tasks(rootless)) == 1)
            rootless.lines("scancel --name=stalled")
            assert ended.result().out == ""
            meddler.stall = False
            assert rootless.lines(line) == ["whole"]
    assert [asked for path, asked in meddler.seen if "/blobs/" in path and asked.startswith("bytes=")]


def test_unpacked_image_is_removed_with_its_image_once_unused(rootless: Contained):
    folder = Path(
        rootless.lines(f"mktemp -d -p {rootless.cli.home}/tmp; cp {rootless.image} {rootless.cli.home}/tmp")[0]
    )
    image = rootless.cli.home / "tmp" / rootless.image.name
    unpacked = rootless.cli.home / "clusters/one/unpacked" / rootless.uid / unpacked_key(image)
    script = "echo >/x/began; until test -e /x/go; do sleep 0.1; done; ls /bin/busybox"
    words = f"--container-image={image} --container-mounts={folder}:/x --container-name=outlives"
    with ThreadPoolExecutor(1) as aside:
        made = f"srun -w train-1 {words} sh -c 'echo >/x/made; until test -e /x/began; do sleep 0.1; done' &"
        joined = f"until test -e {folder}/made; do sleep 0.1; done; srun -w train-1 {words} sh -c '{script}'"
        ended = aside.submit(rootless.sh, f"{made} {joined}", timeout_s=60)
        eventually((folder / "began").exists)
        eventually(
            lambda: len(rootless.lines("squeue -h")) == 1
        )  # the step that joined the container outlives the step that created it
        there = unpacked.exists()
        image.unlink()
        rootless.cli.ok("image", "gc")
        assert unpacked.exists() == there
        (folder / "go").touch()
        assert ended.result().out == "/bin/busybox\n"
    if not there:
        pytest.skip("images are mounted by FUSE here")

    def swept() -> bool:
        rootless.cli.ok("image", "gc")
        return not unpacked.exists()

    eventually(swept)


def waiting_tasks(someone: Contained) -> list[int]:
    """Return the tasks of this cluster that wait for their image."""

    def waits(pid: int) -> bool:
        try:
            folder = Path(f"/proc/{pid}")
            return (folder / "comm").read_text() == "awaits-an-image\n" and (
                str(someone.cli.home) in (folder / "maps").read_text()
            )
        except OSError:  # the process has ended
            return False

    return [process.pid for process in find(waits)]


def address_of_this_machine(someone: Contained) -> str:
    """Return this machine's address as the cluster's nodes reach it."""
    node = someone.sh("getent hosts train-1").out.split()
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((node[0] if node else "127.0.0.1", 9))
        return str(probe.getsockname()[0])


def test_image_name_is_imported_once_for_all_tasks(ada: Contained):
    layer = packed({"bin/busybox": Path(ada.image.parent / "tree/bin/busybox").read_bytes()}, 0o755)
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["FROM_IMAGE=imported"], "WorkingDir": "/bin"}}
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    manifest = [{"Config": "config.json", "RepoTags": ["tiny:1"], "Layers": ["layer.tar"]}]
    files = {"config.json": {**config, "rootfs": rootfs}, "manifest.json": manifest}
    archive = ada.cli.home / "tmp/tiny.tar"
    archive.write_bytes(packed({"layer.tar": layer, **{name: json.dumps(it).encode() for name, it in files.items()}}))
    line = f"srun -N2 -n4 --container-image=docker-archive:{archive} ./busybox sh -c 'echo $FROM_IMAGE'"
    assert ada.lines(line) == ["imported"] * 4
    assert len(ada.lines("ls ~/.local/state/dalsegno/images/images/*.sqsh")) == 1
    assert "no file /nowhere.tar" in ada.sh("srun --container-image=docker-archive:/nowhere.tar true").err


def test_import_error_on_a_virtual_node_names_where_to_import(ada: Contained):
    answer = ada.sh("srun --container-image=192.0.2.1:5000#team/app:v1 true")
    assert (
        answer.code == NO_CONTAINER
        and "`dalsegno image import 192.0.2.1:5000#team/app:v1` on that machine first" in answer.err
    )
    assert "a virtual host reaches only its own machine" in answer.err
    assert "`containers.images` in the cluster file" in answer.err


def test_images_of_the_cluster_file_are_imported_once_for_all_users(cluster: Contained, ada: Contained, tmp_path: Path):
    """One of two images exists. It is imported, the missing one is reported, and the cluster is up."""
    busybox = (cluster.image.parent / "tree/bin/busybox").read_bytes()
    layout = Layout(tmp_path / "oci")
    layout.image("v1", [([folder("bin"), member("bin/sh", busybox, mode=0o755)], "gzip")], config={"Env": ["FROM=v1"]})
    with registry(tmp_path) as address:
        push(layout.path, "v1", address, "team/app:v1")
        there, missing = f"{address}#team/app:v1", f"{address}#team/none:v1"
        listed = FILE + f"containers: {{images: ['{missing}', '{there}']}}\n"
        assert f"imports 2 images ({missing}, {there})" in cluster.cli.ok("plan", cluster.cli.file(listed))
        answer = cluster.cli.run("up", cluster.cli.file(listed))
    assert answer.code == 1 and f"{there}: packing" in answer.err
    assert "one is up, but 1 image could not be imported" in answer.err and f"  {missing}: " in answer.err
    try:
        # The registry no longer runs, so `up` must not import anything.
        again = cluster.cli.run("up", cluster.cli.file(listed.replace(f"'{missing}', ", "")))
        assert (again.code, again.err) == (0, "nothing to do: the cluster is as the file says\n")
        without = ada.sh(f"srun -N2 --container-image={there} sh -c 'echo $FROM'")
        assert without.out == "v1\nv1\n" and without.err.count("as it was imported before") == 1
        assert ada.sh("ls ~/.local/state/dalsegno/images/blobs").out == ""  # the image came from root's store
        assert "team/app:v1" in ada.sh("dalsegno image ls").out
    finally:
        cluster.cli.ok("up", cluster.cli.file(FILE))


SCRIPT = """
import os, sys, time
generation = int(os.environ["DALSEGNO_GENERATION"])
print(generation, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["FROM_IMAGE"], flush=True)
if os.environ["RANK"] == "1" and generation == 1:
    os._exit(3)
if len(sys.argv) > 1 and generation == 2:
    open(sys.argv[1], "w").write(os.environ["SLURMD_NODENAME"])
    time.sleep(600)
"""


def run_words(someone: Contained) -> tuple[list[str], Path]:
    """Return options of a run whose image uses this machine's Python, and a folder for the run."""
    work = Path(tempfile.mkdtemp(prefix="run-", dir=someone.cli.home / "tmp"))
    work.chmod(0o777)
    (work / "train.py").write_text(SCRIPT)
    mounts = ",".join(path for path in ("/usr", "/lib", "/lib64") if os.path.isdir(path))
    return ["--no-preload", f"--container-image={someone.image}", f"--container-mounts={mounts}"], work


@pytest.mark.parametrize("someone", ["ada", pytest.param("rootless", marks=pytest.mark.long)], indirect=True)
def test_run_in_a_container_resumes_after_a_crash(someone: Contained):
    words, work = run_words(someone)
    answer = someone.sh(f"cd {work}; dalsegno run --nodes=2 {' '.join(words)} train.py")
    assert answer.code == 0, answer
    assert "generation 2" in answer.err
    assert "[1] 1 1 2 as it says" in answer.out and "[1] 2 1 2 as it says" in answer.out
    assert "[0] 2 0 2 as it says" in answer.out  # the first generation may end before it prints


def test_run_with_a_missing_image_reports_it(cluster: Contained):
    _, work = run_words(cluster)
    answer = cluster.sh(f"cd {work}; dalsegno run --nodes=2 --container-image=/nowhere.sqsh train.py")
    assert answer.code == NO_CONTAINER
    error = "the container could not be started on any node: image /nowhere.sqsh: No such file or directory"
    assert answer.err.count("/nowhere.sqsh") == 1 and error in answer.err, answer
    assert "continues without" not in answer.err and "more node" not in answer.err
    plain = cluster.sh("dalsegno run --framework=plain -N2 --container-image=/nowhere.sqsh true")
    assert plain.code == NO_CONTAINER
    assert "the container could not be started: image /nowhere.sqsh: No such file or directory" in plain.err, plain
    own = cluster.sh(f"dalsegno run --framework=plain --container-image={cluster.image} sh -c 'exit {NO_CONTAINER}'")
    assert own.code == NO_CONTAINER and "the program ended with exit code 125" in own.err, own
    eventually(lambda: cluster.lines("sinfo -h -o '%D %T'") == ["2 idle"], PINGED_S)


def test_run_in_a_container_survives_the_loss_of_its_node(cluster: Contained):
    words, work = run_words(cluster)
    more = ["--nodes=1", "--nproc-per-node=2", "--spares=1"]
    run = subprocess.Popen(
        cluster.cli.argv("run", *more, *words, "train.py", str(work / "where")),
        env=cluster.cli.env, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        eventually(lambda: text_of(work / "where").startswith("train-"))
        cluster.cli.ok("inject", "power-off", text_of(work / "where"))
        output = run.communicate(timeout=180)[0]
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert all(f"[{rank}] 3 {rank} 2 as it says" in output for rank in (0, 1)), output
    eventually(lambda: cluster.lines("sinfo -h -o '%D %T'") == ["2 idle"], PINGED_S)


# Hosts that do not know the option


@contextmanager
def own_settings(cluster: Contained, stacks: Mapping[str, str]) -> Iterator[None]:
    """Give hosts their own plugstack.conf, and remove the file that identifies the cluster as one of ours."""
    etc = cluster.cli.home / "clusters/one/etc"
    try:
        for host, stack in stacks.items():
            own = cluster.cli.home / f"tmp/etc-{host}"
            shutil.copytree(etc, own)
            (own / "cluster-id").unlink()
            (own / "plugstack.conf").write_text(stack)
            cluster.on(host, "mount", "--bind", str(own), str(etc))
        yield
    finally:
        for host in stacks:
            cluster.on(host, "umount", "--lazy", str(etc))
            shutil.rmtree(cluster.cli.home / f"tmp/etc-{host}")


def batch(cluster: Contained) -> str:
    """Return the output of srun with --container-image in a batch script on train-2."""
    output = cluster.cli.home / "tmp/batch.out"
    output.unlink(missing_ok=True)
    cluster.lines(
        f"unset TMPDIR; sbatch -w train-2 -o {output} --wrap \"srun $I sh -c 'echo from \\$FROM_IMAGE' 2>&1; echo end\""
    )
    eventually(lambda: text_of(output).endswith("end\n"))
    return text_of(output)


def test_a_node_where_pyxis_is_not_registered_is_named_with_the_commands_that_fix_it(cluster: Contained):
    """Our plugin under Pyxis's file name replaces Pyxis, and a script replaces Enroot: only registering is tested."""
    home = cluster.cli.home
    line = (home / "clusters/one/etc/plugstack.conf").read_text().splitlines()[-1]
    ours = Path(line.split()[1])
    pyxis = home / "tmp/lib/spank_pyxis.so"
    shutil.copytree(ours.parent, pyxis.parent)
    (pyxis.parent / ours.name).rename(pyxis)
    registered = line.replace(str(ours), str(pyxis))
    enroot = home / "clusters/one/bin/enroot"
    enroot.write_text("#!/bin/sh\necho 3.5.0\n")
    enroot.chmod(0o755)
    try:
        with own_settings(cluster, {"head": f"{registered}\n", "train-1": f"{registered}\n", "train-2": "# none\n"}):
            assert "unrecognized option '--container-image" in batch(cluster)
            # This variable is not in the image.
            assert cluster.lines("srun -w train-2 $I sh -c 'echo from $FROM_IMAGE'") == ["from"]
            bare = cluster.sh(f"dalsegno run --framework=plain -N2 --container-image={cluster.image} true")
            assert (
                bare.code == 1
                and "train-2: the container did not start; run `dalsegno containers check` for the reason" in bare.out
            )
            answer = cluster.sh("dalsegno containers check --json")
            found = json.loads(answer.out)
            assert answer.code == 1 and [each["host"] for each in found["findings"]] == ["train-2"]
            assert "plugstack.conf names no plugin for containers" in found["findings"][0]["what"]
            assert found["findings"][0]["fix"].startswith(f"add `{registered}` to ")
            (step,) = found["commands"]
            assert step["hosts"] == ["train-2"]
            # The hosts have no systemd.
            for command in [each for each in step["commands"] if not each.startswith("systemctl ")]:
                cluster.on("train-2", "sh", "-c", command)
            assert (home / "tmp/etc-train-2/plugstack.conf").read_text().splitlines() == ["# none", "", registered]
            assert batch(cluster) == "from as it says\nend\n"
            again = cluster.sh("dalsegno containers check --json")
            assert again.code == 0 and json.loads(again.out)["commands"] == []
    finally:
        enroot.unlink()


def packed(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def processes(*words: str) -> list[int]:
    return [process.pid for process in find(lambda pid: tuple(arguments(pid)[-len(words) :]) == words)]


def containers(someone: Contained) -> int:
    """Count this cluster's processes in containers, and the squashfuse processes that have its image open."""
    home = str(someone.cli.home)

    def inside(pid: int) -> bool:
        try:
            return "upperdir=/tmp/rw/upper" in Path(f"/proc/{pid}/mounts").read_text() and any(
                home.encode() in entry for entry in environment(pid)
            )
        except OSError:
            return False

    def serves(pid: int) -> bool:
        return "squashfuse_ll" in "".join(arguments(pid)[:1]) and any(home in path for path in open_files(pid))

    return len(find(inside)) + len(find(serves))


def open_files(pid: int) -> list[str]:
    try:
        return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # the process has ended
        return []


def loops(image: Path) -> int:
    def backing(path: Path) -> str:
        try:
            return path.read_text()
        except OSError:  # released in the meantime
            return ""

    # For a file on a tmpfs in another mount namespace, the kernel shows only the path below the tmpfs.
    end = f"/{image.parent.name}/{image.name}\n"
    return sum(backing(path).endswith(end) for path in Path("/sys/block").glob("loop*/loop/backing_file"))

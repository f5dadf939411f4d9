"""Tests that problems with the machine, the home, the file or the command line give a message and no traceback."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dalsegno.system.hosts import host_process
from dalsegno.system.machine import program
from dalsegno.targets.local.folder import SOCKET_PATH_MAX, Folder
from tests.cluster.conftest import Answer, Cli, at_home, end_all, leftovers, make_home, taken_down
from tests.waiting import PATIENCE_S, eventually

SMALL = """
name: {name}
target: local
partitions:
  - {{name: train, nodes: 1, gpus: 2, cpus: 2, memory: 2G}}
slurm: {{{slurm}}}
health: {{mode: observe}}  # what is broken here stays so
"""


def small(name: str = "one", slurm: str = "accounting: false") -> str:
    return SMALL.format(name=name, slurm=slurm)


@dataclass(frozen=True)
class Bounded(Cli):
    """The `dalsegno` command, started by another command that restricts it, or with a changed environment."""

    before: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()

    def argv(self, *args: str) -> list[str]:
        return [*self.before, *super().argv(*args)]

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, **dict(self.more)}

    def refused(self, *args: str, code: int = 1, cwd: Path | None = None, timeout_s: float = 30) -> str:
        """Return the error message of a refused command."""
        answer = self.run(*args, cwd=cwd, timeout_s=timeout_s)
        assert answer.code == code, answer
        assert answer.err.startswith("error: ") and answer.out == "", answer
        return plain(answer).err


def plain(answer: Answer) -> Answer:
    assert "Traceback" not in answer.out + answer.err, answer.err
    return answer


def bounded(cli: Cli, *before: str, home: Path | None = None, **more: str) -> Bounded:
    return Bounded(home or cli.home, cli.uid, before=before, more=tuple(more.items()))


# The machine

# Hides a program in a mount namespace that ends with the command. Links are resolved, because the program may be a
# Debian alternative.
HIDE = 'mount --bind /dev/null "$1" && shift && exec "$@"'


@pytest.mark.parametrize(
    ("name", "package", "slurm"),
    [
        ("slurmctld", "slurmctld", "accounting: false"),
        ("slurmd", "slurmd", "accounting: false"),
        ("sinfo", "slurm-client", "accounting: false"),
        ("munged", "munge", "accounting: false"),
        ("mariadbd", "mariadb-server", ""),
        ("slurmdbd", "slurmdbd", ""),
        ("slurmrestd", "slurmrestd", "accounting: false, rest: true"),
        ("ip", "iproute2", "accounting: false"),
    ],
)
def test_missing_program_is_reported_with_its_package(cli: Cli, name: str, package: str, slurm: str):
    path = os.path.realpath(program(name) or "")
    without = bounded(cli, "unshare", "--mount", "sh", "-c", HIDE, "sh", path)
    said = without.refused("up", cli.file(small(slurm=slurm)))
    assert said.startswith(f"error: this machine lacks {name}")
    assert said.endswith(f"sudo apt-get install --no-install-recommends {package}\n")
    assert not (cli.home / "clusters/one").exists()


def test_unused_programs_may_be_missing(cli: Cli):
    path = os.path.realpath(program("mariadbd") or "")
    without = bounded(cli, "unshare", "--mount", "sh", "-c", HIDE, "sh", path)
    assert without.ok("plan", cli.file(small())).startswith("creates one: 1 virtual node")


def test_root_without_namespaces_gets_loopback_hosts_and_the_reason(cli: Cli):
    container = bounded(cli, "setpriv", "--bounding-set=-sys_admin")
    answer = plain(container.run("up", cli.file(small())))
    assert answer.code == 0 and answer.err.startswith("creates one: 1 loopback node"), answer
    assert container.ok("shell", "--", "srun", "sh", "-c", "echo $SLURMD_NODENAME").strip() == "train-1"
    assert container.status("one")["facts"]["hosts"] == "loopback"  # type: ignore[index]
    assert "namespaces" in answer.err
    container.ok("down", "one")


def test_virtual_hosts_without_namespaces_are_refused(cli: Cli):
    container = bounded(cli, "setpriv", "--bounding-set=-sys_admin")
    said = container.refused("up", cli.file(small() + "local: {hosts: virtual}\n"))
    assert "no virtual hosts here: this kernel or container does not permit namespaces" in said
    assert "local: {hosts: loopback}" in said and "sudo" not in said  # the user is already root
    assert not (cli.home / "clusters/one").exists()


# The home


def home_of_length(cli: Cli, socket_length: int) -> Path:
    """Return a home in which the path of munge's socket has this length."""
    rest = len(str(Folder(Path("/clusters/one")).munge_socket))
    path = cli.home / ("x" * (socket_length - rest - len(str(cli.home)) - 1))
    assert len(str(Folder(path / "clusters/one").munge_socket)) == socket_length
    return path


def test_home_too_long_for_a_socket_is_refused_early(cli: Cli):
    far = bounded(cli, home=home_of_length(cli, SOCKET_PATH_MAX + 1))
    said = far.refused("up", cli.file(small()), cwd=cli.home)
    assert "too long" in said and "hint: set DALSEGNO_HOME to a shorter folder" in said
    assert not (far.home / "clusters").exists()


def test_a_home_just_short_enough_runs_jobs(cli: Cli):
    """Sockets of job steps have longer paths than munge's socket. A cluster that starts must be able to run jobs."""
    far = bounded(cli, home=home_of_length(cli, SOCKET_PATH_MAX))
    answer = plain(far.run("up", cli.file(small()), cwd=cli.home))
    try:
        if answer.code != 0:
            assert "too long" in answer.err and "DALSEGNO_HOME" in answer.err
        else:
            assert far.ok("shell", "--", "srun", "hostname", cwd=cli.home).strip() == "train-1"
    finally:
        far.ok("down", "one", cwd=cli.home)


@pytest.mark.parametrize(
    "letter", [",", '"', "\\", *(pytest.param(each, marks=pytest.mark.long) for each in ("#", "%", ":", "=", "["))]
)
def test_home_that_slurm_files_cannot_contain_is_refused_early(cli: Cli, letter: str):
    """These ASCII characters break munge's socket, MariaDB's folder, slurmd's spool folder or gres.conf."""
    strange = bounded(cli, home=cli.home / f"a{letter}b")
    said = strange.refused("plan", cli.file(small(slurm="")), cwd=cli.home)
    assert "DALSEGNO_HOME" in said and letter in said.splitlines()[0]


def test_home_with_unusual_characters_works(cli: Cli):
    odd = bounded(cli, home=cli.home / "-my ünï; 'home' $(id)")
    odd.home.mkdir()
    (odd.home / "cache").symlink_to(cli.home / "cache")
    people = "accounts: [{name: lab}]\nusers: [{name: ada, accounts: [lab]}]\n"
    at_home = f"{odd.home}/clusters/one/home/ada"
    try:
        odd.ok("up", cli.file(small(slurm="") + people), cwd=cli.home)
        script = "hostname; echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L"
        out = odd.ok("shell", "--", "srun", "--gpus=2", "sh", "-c", script)
        assert out.splitlines()[:2] == ["train-1", "0,1"] and out.count("simulated") == 2
        assert odd.ok("shell", "-u", "ada", "--", "srun", "dalsegno", "--version").startswith("dalsegno")
        odd.ok("shell", "-u", "ada", "--", "sbatch", "-o", f"{at_home}/out", "--wrap", "cd; pwd")
        eventually(lambda: Path(at_home, "out").exists() and Path(at_home, "out").read_text().strip() == at_home)
        sourced = ["bash", "-c", 'eval "$1"; srun hostname', "bash", odd.ok("env")]
        assert subprocess.run(sourced, capture_output=True, text=True, cwd="/").stdout.strip() == "train-1"
        assert odd.run("up", cwd=cli.home).err.startswith("nothing to do")
    finally:
        odd.ok("down", "one", cwd=cli.home)
    assert leftovers(odd.home) == [] and not Folder(odd.home / "clusters/one").devices.exists()


def test_read_only_home_is_reported(cli: Cli):
    mount = 'mount -t tmpfs -o ro none "$1" && shift && exec "$@"'
    fixed = cli.home / "fixed"
    fixed.mkdir()
    read_only = bounded(cli, "unshare", "--mount", "sh", "-c", mount, "sh", str(fixed), home=fixed)
    said = read_only.refused("up", cli.file(small()), cwd=cli.home)
    assert "is on a read-only file system" in said and "set DALSEGNO_HOME to another folder" in said
    assert "no clusters yet" in plain(read_only.run("ls", cwd=cli.home)).err


def test_home_that_is_a_file_or_inaccessible_is_reported(cli: Cli):
    file = bounded(cli, home=Path(cli.file(small())))
    assert str(file.home) in file.refused("up", str(file.home), cwd=cli.home)
    closed = cli.home / "closed"
    closed.mkdir(mode=0o700)
    stranger = replace(bounded(cli, home=closed), uid=65534)
    for words in (["up", str(file.home)], ["status"], ["ls"], ["down", "one"]):
        assert "ermission" in stranger.refused(*words, cwd=Path("/")) or "may not" in stranger.refused(*words)


# The cluster file


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("nothing.yaml", "the file does not exist (nothing.yaml)"),
        (".", "this is a folder, not a file (.)"),
        ("/dev/null", "the file is empty"),
        ("/bin/true", "the file is not UTF-8 text"),
        ("/proc/self/mem", "the file cannot be read"),
        ("huge.yaml", "the file is larger than 1 MiB"),
    ],
)
def test_invalid_cluster_file_is_reported(tmp_path: Path, file: str, words: str):
    cli = Bounded(tmp_path, os.geteuid())
    (tmp_path / "huge.yaml").write_bytes(b"# \n" * 600_000)
    assert words in cli.refused("up", file)
    assert not (tmp_path / "clusters").exists()


def test_cloud_without_its_sdk_or_credentials_is_refused_with_the_fix(tmp_path: Path):
    cli = Bounded(tmp_path, os.geteuid())
    assert plain(cli.run("init", "--target", "oci")).code == 0
    assert "is valid" in cli.ok("validate")
    assert "dalsegno[oci]" in (said := cli.refused("up")) or "oci setup config" in said


# The command line


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["staus"], 2, "no command `staus`; did you mean `status`?"),
        (["xyzzy"], 2, "no command `xyzzy`"),
        (["up", "--nonsense"], 2, "No such option"),
        (["status", "extra"], 2, "unexpected extra argument"),
        (["down", "../../etc"], 2, "invalid cluster name `../../etc`"),
        (["status", "-M", "../../etc"], 1, "there is no cluster `../../etc`"),
        (["shell", "-M", "nothing", "--", "true"], 1, "there is no cluster `nothing`"),
        (["status"], 1, "there is no cluster yet"),
        (["env"], 1, "there is no cluster yet"),
    ],
)
def test_wrong_command_line_is_reported(tmp_path: Path, words: list[str], code: int, said: str):
    assert said in Bounded(tmp_path, os.geteuid()).refused(*words, code=code)


def test_no_command_at_all_shows_the_help(tmp_path: Path):
    answer = plain(Cli(tmp_path, os.geteuid()).run())
    assert answer.code == 2 and (answer.out + answer.err).startswith("Usage: dalsegno")


# Two small clusters that are only read


@pytest.fixture(scope="module")
def pair(cache: Path) -> Iterator[Bounded]:
    with taken_down(at_home(cache)) as cli:
        for name in ("one", "two"):
            cli.ok("up", cli.file(small(name), f"{name}.yaml"))
        yield Bounded(cli.home, cli.uid)


def test_cluster_option_overrides_the_variable(pair: Bounded):
    assert "there are 2 clusters: one, two" in pair.refused("status", code=2)
    named = replace(pair, more=(("DALSEGNO_CLUSTER", "two"),))
    assert "two (local) is up" in named.ok("status")
    assert "one (local) is up" in named.ok("status", "-M", "one")
    wrong = replace(pair, more=(("DALSEGNO_CLUSTER", "onne"),))
    assert "there is no cluster `onne`" in wrong.refused("status") and "did you mean `one`?" in wrong.refused("status")


def test_shell_with_cluster_environment_uses_that_cluster(pair: Bounded):
    """After `eval "$(dalsegno env)"`, no name is needed.

    Inside a host, no cluster is visible, and the command reports that.
    """
    exported = json.loads(pair.ok("env", "-M", "two", "--json"))
    assert "two (local) is up" in replace(pair, more=tuple(exported.items())).ok("status")
    inside = plain(pair.run("shell", "-M", "two", "--", *pair.argv("status")))
    assert inside.code == 2 and "this shell runs inside a host of a cluster" in inside.err


@pytest.mark.parametrize(
    "words",
    [["ls"], ["status", "-M", "one"], ["plan", "one.yaml"], ["env", "-M", "one"], ["validate", "one.yaml"]],
)
def test_json_output_is_only_json(pair: Bounded, words: list[str]):
    assert json.loads(pair.ok(words[0], "--json", *words[1:]))


def test_failure_prints_nothing_to_stdout(pair: Bounded):
    pair.refused("status", "--json", "-M", "nothing")
    pair.refused("plan", "--json", "nothing.yaml")
    assert json.loads(pair.run("validate", "--json", "nothing.yaml").out)["valid"] is False


@pytest.mark.parametrize("words", [["status", "-M", "one"], ["schema"], ["ls"], ["--help"]])
def test_closed_pipe_is_not_an_error(pair: Bounded, words: list[str]):
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            pair.argv(*words),
            env=pair.env,
            cwd=pair.home,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    finally:
        os.close(write)
    assert done.stderr == "" and done.returncode in (1, 141)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [["status", "-M", "one"], ["up", "one.yaml"], ["shell", "-M", "one", "--", "true"]])
def test_closed_streams_do_not_matter(pair: Bounded, words: list[str], closed: str):
    """Cron jobs and daemons start commands this way."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *pair.argv(*words)], env=pair.env, cwd=pair.home,
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_full_disk_on_stdout_is_reported(pair: Bounded):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            pair.argv("status", "-M", "one"),
            env={**pair.env, "PYTHONUNBUFFERED": ""},  # buffered output is written again at exit
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr


def test_a_lock_file_left_behind_does_not_matter(pair: Bounded):
    """The lock is held by a process, not by the file."""
    lock = pair.home / "locks/one.lock"
    assert lock.exists()
    lock.write_text("4242\n")
    assert pair.run("up", "one.yaml").err.strip() == "nothing to do: the cluster is as the file says"


DAMAGED = ["state.json", "cluster.json", "hosts/head/init.json", "hosts/head/services.json", "hosts/head/plan.json"]


@pytest.mark.parametrize("text", ["{", pytest.param("{}", marks=pytest.mark.long)])
@pytest.mark.parametrize("file", DAMAGED)
def test_damaged_state_file_is_reported(pair: Bounded, file: str, text: str):
    path = pair.home / "clusters/one" / file
    good = path.read_text()
    path.write_text(text)
    try:
        for words in (["status", "-M", "one"], ["plan", "one.yaml"], ["shell", "-M", "one", "--", "true"]):
            plain(pair.run(*words))
        assert "two " in plain(pair.run("ls")).out  # the other clusters are still shown
    finally:
        path.write_text(good)


@pytest.mark.parametrize("text", ["{", "{}", *(pytest.param(each, marks=pytest.mark.long) for each in ("[]", "null"))])
def test_up_with_damaged_state_does_not_recreate_the_cluster(pair: Bounded, text: str):
    """Recreating the cluster would end every job and delete the accounting database."""
    path = pair.home / "clusters/two/state.json"
    good, first = path.read_text(), host_process(pair.home / "clusters/two/hosts/head")
    path.write_text(text)
    try:
        said = pair.refused("up", "two.yaml")
        assert "state.json" in said and "dalsegno down" in said
    finally:
        path.write_text(good)
        still = host_process(pair.home / "clusters/two/hosts/head")
    assert first is not None and still == first


# Separate clusters


@pytest.mark.parametrize("text", ["{", pytest.param("null", marks=pytest.mark.long)])
def test_down_removes_a_cluster_whose_state_is_damaged(cli: Cli, text: str):
    cli.ok("up", cli.file(small()))
    for file in DAMAGED:
        (cli.home / "clusters/one" / file).write_text(text)
    plain(cli.run("down", "one"))
    assert leftovers(cli.home) == []


def test_up_ended_by_sigterm_is_finished_by_up(cli: Cli):
    cli.file(small(slurm=""))
    process = cli.start("up")
    assert process.stdout is not None
    said = next(line for line in process.stdout if "starting accounting" in line)
    process.send_signal(signal.SIGTERM)
    said += process.stdout.read()
    assert process.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM) and "Traceback" not in said
    status = cli.status("one")
    assert status["phase"] == "half-made" and "`dalsegno up` finishes it" in str(status["problems"])
    cli.ok("up")
    assert cli.ok("shell", "--", "srun", "hostname").strip() == "train-1"


def test_up_killed_just_after_the_cluster_was_registered_is_finished_by_up(cli: Cli):
    """A kill leaves the cluster registered in slurmdbd but not in our state."""
    cli.ok("up", cli.file(small(slurm="")))
    path = cli.home / "clusters/one/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "phase": "making", "registered": False}))
    (cli.home / "clusters/one/cluster.json").unlink()
    cli.ok("up")
    assert cli.status("one")["phase"] == "up"


def test_unknown_tres_limit_is_refused_and_fixed_by_up(cli: Cli):
    """Only Slurm knows which licenses exist: sacctmgr's message is shown, and the cluster can be fixed."""
    limit = "enforce: [limits], qos: [{name: low, max_tres_per_user: {license/nothing: 1}}]"
    said = plain(cli.run("up", cli.file(small(slurm=limit))))
    assert said.code == 1 and "no TRES known by type license/nothing" in said.err, said
    cli.ok("up", cli.file(small(slurm=limit.replace("license/nothing", "gres/gpu"))))
    shown = cli.ok("shell", "--", "sacctmgr", "-nP", "show", "qos", "low", "format=MaxTRESPU")
    assert shown.strip() == "gres/gpu=1"


def test_clusters_of_the_same_name_in_two_homes_do_not_conflict(cli: Cli):
    other = Cli(make_home("ds-"), cli.uid)
    (other.home / "cache").symlink_to((cli.home / "cache").resolve())
    both = (cli, other)
    try:
        started = [one.start("up", one.file(small())) for one in both]
        said = [process.communicate(timeout=60)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], said
        for one in both:
            assert [row["name"] for row in json.loads(one.ok("ls", "--json"))] == ["one"]
            one.ok("shell", "--", "sbatch", "-o", str(one.home / "out"), "--wrap", "hostname -I; sleep 300")
            eventually(lambda one=one: (one.home / "out").exists() and (one.home / "out").read_text().strip())
        assert (cli.home / "out").read_text() != (other.home / "out").read_text()
        cli.ok("down", "one")
        assert other.ok("shell", "--", "squeue", "-h", "-o", "%T").strip() == "RUNNING"
    finally:
        end_all(other)
        left = leftovers(other.home)
        shutil.rmtree(other.home, ignore_errors=True)
    assert left == []

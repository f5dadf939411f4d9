"""Tests of ./dalsegno and its set-up, without a network: copied scripts, a ready environment, folders instead of /."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.machine import DAEMONS

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

REPO = Path(__file__).parent.parent
NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="installing packages needs root")
NOT_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="packages are installed on Linux only")

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the packages of the tests. It contains no path of its own, so it can be copied."""
    venv = tmp_path_factory.mktemp("bare") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    (packages / "clone.pth").write_text("\n".join([str(REPO / "src"), *site.getsitepackages()]))
    (venv / "bin/dalsegno").write_text("from dalsegno.cli.main import main\nmain()\n")
    return venv


@pytest.fixture
def clone(bare: Path) -> Iterator[Path]:
    """A copy of the repository at a path with a space, with a ready .venv, readable for other users."""
    yield from make_clone(bare)


@pytest.fixture(scope="module")
def unchanged(bare: Path) -> Iterator[Path]:
    """A copy like `clone`, shared by all tests that do not change it."""
    yield from make_clone(bare)


def make_clone(bare: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        clone = Path(os.path.realpath(folder)) / "a clone"
        clone.mkdir()
        for name in ("dalsegno", "test", "pyproject.toml"):
            shutil.copy(REPO / name, clone)
        shutil.copytree(REPO / "scripts", clone / "scripts")
        shutil.copytree(bare, clone / ".venv", symlinks=True)
        assert bash(clone, "write_stamp core").returncode == 0
        yield clone


def bash(clone: Path, code: str, cwd: Path | None = None, **env: str) -> Done:
    """Run shell code with the functions of scripts/setup.sh."""
    return run(["bash", "-c", f'ROOT=$1; . "$ROOT/scripts/setup.sh"; {code}', "bash", str(clone)], env, cwd)


def run(argv: list[str], env: dict[str, str], cwd: Path | None = None, user: int | None = None) -> Done:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DALSEGNO_")}
    return subprocess.run(
        argv, env={**clean, **env}, cwd=cwd, user=user, group=user, extra_groups=[] if user else None,
        capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip


# The wrapper


def test_a_later_call_starts_the_command_line_at_once(unchanged: Path):
    done = run([str(unchanged / "dalsegno"), "--help"], {})
    assert done.stdout.startswith("Usage: dalsegno ")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_in_the_current_folder_is_not_imported(unchanged: Path, tmp_path: Path):
    (tmp_path / "click.py").write_text("raise SystemExit('imported from the current folder')")
    assert run([str(unchanged / "dalsegno"), "--version"], {}, cwd=tmp_path).returncode == 0


def test_a_link_to_the_wrapper_works(unchanged: Path, tmp_path: Path):
    (tmp_path / "ds").symlink_to(unchanged / "dalsegno")
    assert run([str(tmp_path / "ds"), "--version"], {}).returncode == 0


# The stamp


def test_the_environment_is_ready_when_it_has_a_stamp(unchanged: Path):
    assert bash(unchanged, "venv_ready core").returncode == 0
    assert bash(unchanged, "venv_ready dev").returncode == 1, "the dependencies of the tests have a separate stamp"


def test_a_changed_pyproject_needs_a_new_set_up(clone: Path):
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# one more line\n")
    assert bash(clone, "venv_ready core").returncode == 1


def test_a_moved_folder_needs_a_new_set_up(clone: Path):
    moved = clone.rename(clone.with_name("moved"))
    assert bash(moved, "venv_ready core").returncode == 1


def test_another_interpreter_needs_a_new_set_up(clone: Path):
    (clone / ".venv/bin/python").unlink()
    shutil.copy("/bin/sh", clone / ".venv/bin/python")
    assert bash(clone, "venv_ready core").returncode == 1


def test_a_truncated_stamp_is_ignored(clone: Path):
    stamp = clone / ".venv/dalsegno-core.stamp"
    stamp.write_text(stamp.read_text()[:-20])
    assert bash(clone, "venv_ready core").returncode == 1


# Python


def test_the_named_interpreter_is_used(unchanged: Path):
    done = bash(unchanged, 'find_python && echo "$PYTHON"', DALSEGNO_PYTHON=sys.executable)
    assert done.stdout.strip() == sys.executable


def test_an_old_python_is_refused_with_what_to_install(unchanged: Path):
    done = bash(unchanged, "find_python || no_python", DALSEGNO_PYTHON="/bin/false")
    assert done.returncode == 1
    assert "needs Python 3.10 or newer, and /bin/false is not" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


@AS_ROOT
def test_a_user_who_may_not_write_the_environment_gets_a_hint(clone: Path):
    (clone / ".venv/dalsegno-core.stamp").unlink()
    done = run([str(clone / "dalsegno"), "--version"], {}, user=NOBODY)
    assert (done.returncode, done.stdout) == (1, "")
    assert "run `./dalsegno setup` as the owner of the folder" in done.stderr


# System packages

PACKAGES = "slurmctld slurmd slurmdbd slurmrestd slurm-client munge mariadb-server iproute2 util-linux"


def without_packages(clone: Path, *args: str) -> Done:
    """Run ./dalsegno as a user without root, without sudo and without any of the programs."""
    tools = clone / "tools"
    tools.mkdir()
    (tools / "apt-get").symlink_to("/bin/false")
    env = {"PATH": str(tools), "DALSEGNO_PROBE_PATH": str(clone / "nothing"), "HOME": str(clone)}
    return run([str(clone / "dalsegno"), *args], env, cwd=clone, user=NOBODY if os.geteuid() == 0 else None)


@NOT_LINUX
@pytest.mark.parametrize("args", [["demo"], ["up"], ["up", "cluster.yaml"]])
def test_without_root_the_error_lists_the_missing_packages(clone: Path, args: list[str]):
    done = without_packages(clone, *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"  apt-get update && apt-get install -y --no-install-recommends {PACKAGES}\n" in done.stderr


@NOT_LINUX
def test_container_jobs_also_need_a_compiler_and_squashfs(clone: Path, tmp_path: Path):
    (clone / "cluster.yaml").write_text(LOCAL_FILE + "containers: {enabled: true}\n")
    more = "gcc libc6-dev libslurm-dev squashfs-tools squashfuse zstd"
    env = {"DALSEGNO_PROBE_PATH": str(tmp_path), "DALSEGNO_SYSROOT": str(tmp_path)}
    needed = {"core": f"{PACKAGES}|", "core containers": f"{PACKAGES} {more}|", "core offer": f"{PACKAGES}|{more}"}
    for words, packages in needed.items():
        result = bash(clone, f'MISSING= OFFERED=; need_local_packages {words}; echo "$MISSING|$OFFERED"', **env).stdout
        assert result == f"{packages}\n"
    for block, said in {
        "containers: {enabled: true}\n": "yes",
        "containers:\n  images: [ubuntu]\n": "yes",
        "containers: {enabled: false}\n": "no",
        "containers:\n  # none\n  enabled: false\nhealth: {}\n": "no",
        "containers:\n  folder: /x\nhealth:\n  enabled: false\n": "yes",
        "": "",
    }.items():
        (clone / "cluster.yaml").write_text(LOCAL_FILE + block)
        assert bash(clone, "containers_in_file up cluster.yaml", cwd=clone).stdout.strip() == said


@NOT_LINUX
def test_a_cluster_starts_without_container_tools_that_cannot_be_installed(clone: Path, tmp_path: Path):
    """The installation is tried once. Later calls do not try again until `setup` does."""
    (clone / "scripts/install-packages").write_text('#!/bin/bash\necho "asked: $*" >&2\nexit 1\n')
    (clone / "scripts/install-packages").chmod(0o755)
    programs, nothing = tmp_path / "bin", tmp_path / "nothing"
    for folder in (programs, nothing):
        folder.mkdir()
    for name in DAEMONS:
        (programs / name).symlink_to("/bin/true")
    (nothing / "apt-get").symlink_to("/bin/true")
    (nothing / "sudo").symlink_to("/bin/true")  # a `sudo -n` that does nothing and succeeds
    env = {"DALSEGNO_PROBE_PATH": str(programs), "DALSEGNO_SYSROOT": str(tmp_path), "PATH": f"{nothing}:/usr/bin:/bin"}
    done = bash(clone, "set_up core local offer && echo continues", **env)
    assert done.stdout == "continues\n"
    if os.geteuid() == 0:
        assert "asked: --optional gcc libc6-dev libslurm-dev" in done.stderr and "no containers" in done.stderr
        assert bash(clone, "set_up core local offer", **env).stderr == ""


@NOT_LINUX
def test_docker_is_installed_only_for_the_scene_with_docker(unchanged: Path, tmp_path: Path):
    env = {"DALSEGNO_PROBE_PATH": str(tmp_path), "DALSEGNO_SYSROOT": str(tmp_path)}
    for words in ("demo --scene docker", "demo --scene=docker"):
        assert bash(unchanged, f"asks_for_docker {words}").returncode == 0
    for words in ("demo", "demo --report docker.html", "up docker.yaml"):
        assert bash(unchanged, f"asks_for_docker {words}").returncode == 1
    assert bash(unchanged, "trains_with_torch demo --scene docker").returncode == 1
    for words, there in {"core containers docker": True, "core containers": False, "dev containers": False}.items():
        result = bash(unchanged, f'MISSING=; need_local_packages {words}; echo "$MISSING"', **env).stdout
        assert ("docker.io" in result.split()) == there


@NOT_LINUX
def test_prometheus_is_installed_only_if_requested(clone: Path, tmp_path: Path):
    for block, asked in {
        "monitoring: {prometheus: true}\n": True,
        "monitoring:\n  retention: 1d\n  prometheus: yes  # with alerts\n": True,
        "monitoring: {prometheus: false}\n": False,
        "monitoring:\n  # prometheus: true\n": False,
        "monitoring: {}\nhealth:\n  prometheus: true\n": False,
        "": False,
    }.items():
        (clone / "cluster.yaml").write_text(LOCAL_FILE + block)
        done = bash(clone, "asks_for_prometheus up cluster.yaml", cwd=clone)
        assert (done.returncode == 0) == asked, block
    assert bash(clone, "asks_for_prometheus monitor up").returncode == 0
    assert bash(clone, "asks_for_prometheus demo").returncode == 1
    env = {"DALSEGNO_PROBE_PATH": str(tmp_path), "DALSEGNO_SYSROOT": str(tmp_path)}
    for words, there in {"core monitor": True, "core containers": False, "dev": True}.items():
        result = bash(clone, f'MISSING=; need_local_packages {words}; echo "$MISSING"', **env).stdout
        assert ("prometheus-alertmanager" in result.split()) == there


def test_slapd_is_installed_only_if_requested(clone: Path, tmp_path: Path):
    asked = {
        "directory: {kind: ldap}\n": True,
        "directory:\n  base: dc=local\n  kind: 'ldap'\n": True,
        "directory: {kind: files}\n": False,
        "directory:\n  # kind: ldap\n": False,
        "": False,
    }
    for block, is_asked in asked.items():
        (clone / "cluster.yaml").write_text(LOCAL_FILE + block)
        assert (bash(clone, "asks_for_ldap up cluster.yaml", cwd=clone).returncode == 0) == is_asked, block
    env = {"DALSEGNO_PROBE_PATH": str(tmp_path), "DALSEGNO_SYSROOT": str(tmp_path)}
    for words, there in {"core directory": True, "core monitor": False, "dev": True}.items():
        result = bash(clone, f'MISSING=; need_local_packages {words}; echo "$MISSING"', **env).stdout
        assert ("slapd" in result.split()) == there


def test_optional_python_packages_are_installed_once_and_only_if_the_file_needs_them(clone: Path, tmp_path: Path):
    for args, file, needed in (
        ("up", SSH_FILE, True),
        ("plan far.yaml", LOCAL_FILE, True),
        ("up", LOCAL_FILE, False),
        ("up --help", SSH_FILE, False),
        ("validate", SSH_FILE, False),
    ):
        (tmp_path / "far.yaml").write_text(SSH_FILE)
        (tmp_path / "cluster.yaml").write_text(file)
        assert (bash(clone, f"asks_for_ssh {args}", cwd=tmp_path).returncode == 0) == needed, (args, file)
    code = 'install_extra() { echo "installs $1"; }; need_extra ssh asyncssh'
    assert bash(clone, code).stdout == "installs ssh\n"
    (packages,) = (clone / ".venv/lib").glob("python3*/site-packages")
    (packages / "asyncssh").mkdir()
    assert bash(clone, code).stdout == ""


def test_failed_install_of_an_optional_package_shows_the_error_of_pip(clone: Path):
    done = bash(clone, "need_extra ldap ldap3", PIP_TIMEOUT="never")
    assert done.returncode == 1
    assert "error: pip could not install what ldap needs\nhint: " in done.stderr


def test_the_packages_match_the_programs_of_the_local_target(unchanged: Path):
    pairs = bash(unchanged, "echo $LOCAL_PROGRAMS $MONITOR_PROGRAMS $DIRECTORY_PROGRAMS").stdout.split()
    assert dict(pair.split(":") for pair in pairs) == DAEMONS


@NOT_LINUX
def test_packages_of_an_interrupted_set_up_are_installed_again(unchanged: Path, tmp_path: Path):
    note = tmp_path / "var/lib/dalsegno-setup/packages"
    note.parent.mkdir(parents=True)
    note.write_text("munge\nslurmd\n")
    everything = tmp_path / "bin"
    everything.mkdir()
    for program in DAEMONS:
        (everything / program).symlink_to("/bin/true")
    env = {"DALSEGNO_PROBE_PATH": str(everything), "DALSEGNO_SYSROOT": str(tmp_path)}
    assert bash(unchanged, 'MISSING=; need_local_packages core; echo "$MISSING"', **env).stdout == "munge slurmd\n"


@NOT_LINUX
def test_only_the_suite_needs_an_mpi(unchanged: Path, tmp_path: Path):
    for program in DAEMONS:
        (tmp_path / program).symlink_to("/bin/true")
    env = {"DALSEGNO_PROBE_PATH": str(tmp_path), "DALSEGNO_SYSROOT": str(tmp_path)}
    images = "busybox-static docker-registry skopeo umoci buildah openssh-server sudo chromium ldap-utils"
    logins = "nslcd libnss-ldapd libpam-slurm-adopt"
    for who, packages in {"core": "", "dev": f"gcc openmpi-bin libopenmpi-dev libc6-dev {images} {logins}"}.items():
        assert bash(unchanged, f'MISSING=; need_local_packages {who}; echo "$MISSING"', **env).stdout == f"{packages}\n"


SSH_FILE = "name: far\ntarget: ssh  # my own hosts\n"
LOCAL_FILE = "name: near\ntarget: local\nssh: {}\n"


@pytest.mark.parametrize(
    ("needed", "args", "file"),
    [
        (True, "demo", ""),
        (True, "up", ""),
        (True, "up", LOCAL_FILE),
        (False, "up", SSH_FILE),
        (False, "up --help", LOCAL_FILE),
        (False, "", ""),
        (False, "--help", ""),
        (False, "validate", LOCAL_FILE),
        (False, "logs demo", ""),
        (True, "monitor up", ""),
        (False, "monitor status", ""),
        (False, "up far.yaml", "target: local\n"),
        (False, "status -c up", ""),
    ],
)
def test_only_commands_that_create_a_local_cluster_need_slurm(
    unchanged: Path, tmp_path: Path, needed: bool, args: str, file: str
):
    (tmp_path / "far.yaml").write_text(SSH_FILE)
    if file:
        (tmp_path / "cluster.yaml").write_text(file)
    assert (bash(unchanged, f"makes_local_cluster {args}", cwd=tmp_path).returncode == 0) == needed


# Services


@pytest.fixture
def sysroot(tmp_path: Path) -> Path:
    for folder in ("usr/sbin", "var/lib/dpkg", "etc/systemd/system"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    return tmp_path / "root"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


def packages_script(sysroot: Path, code: str) -> Done:
    """Run shell code with the functions of scripts/install-packages."""
    return run(["bash", "-c", f'. "{REPO}/scripts/install-packages"; {code}'], {"DALSEGNO_SYSROOT": str(sysroot)})


def policy_says(sysroot: Path, service: str) -> int:
    return run([str(sysroot / "usr/sbin/policy-rc.d"), service, "start"], {}).returncode


def test_only_held_services_are_masked_and_denied(sysroot: Path):
    assert packages_script(sysroot, "hold_services munge").returncode == 0
    for unit in ("munge.service", "slurmd.service", "mariadb.service", "mariadb.socket"):
        assert os.readlink(sysroot / "etc/systemd/system" / unit) == "/dev/null"
    for service, answer in {"munge": 101, "munge.service": 101, "mariadb.socket": 101, "cron": 104}.items():
        assert policy_says(sysroot, service) == answer


def test_releasing_services_leaves_only_the_lists(sysroot: Path):
    packages_script(sysroot, "hold_services munge; release_services")
    assert files(sysroot) == {"var/lib/dalsegno-setup/services", "var/lib/dalsegno-setup/packages"}


def test_a_unit_enabled_meanwhile_is_disabled_and_foreign_units_stay(sysroot: Path):
    wants = sysroot / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    (wants / "munge.service").symlink_to("/lib/systemd/system/munge.service")
    (wants / "cron.service").symlink_to("/lib/systemd/system/cron.service")
    packages_script(sysroot, "hold_services munge; release_services")
    assert os.listdir(wants) == ["cron.service"]


def test_a_foreign_policy_is_not_changed(sysroot: Path):
    policy = sysroot / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    packages_script(sysroot, "hold_services munge; release_services")
    assert policy.read_text() == "#!/bin/sh\nexit 101\n"


def test_a_unit_or_mask_of_the_administrator_is_not_changed(sysroot: Path):
    units = sysroot / "etc/systemd/system"
    (units / "slurmd.service").write_text("[Service]\n")
    (units / "munge.service").symlink_to("/dev/null")
    packages_script(sysroot, "hold_services munge; release_services")
    assert files(units) == {"slurmd.service", "munge.service"}


def install(sysroot: Path, apt: str) -> Done:
    """Run install-packages, with a fake apt-get that runs the code `apt` when it installs."""
    tools = sysroot.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name, code in {"apt-get": f'case " $* " in *simulate*) ;; *" install "*) {apt} ;; esac', "dpkg": ":"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (tools / name).chmod(0o755)
    env = {"DALSEGNO_SYSROOT": str(sysroot), "PATH": f"{tools}:{os.environ['PATH']}", "SYSROOT": str(sysroot)}
    env["TMPDIR"] = str(tools)  # a killed call leaves its temporary file there
    return run([str(REPO / "scripts/install-packages"), "munge"], env)


@AS_ROOT
def test_services_are_denied_only_while_apt_works(sysroot: Path):
    done = install(sysroot, '"$SYSROOT/usr/sbin/policy-rc.d" munge start; echo $? >"$SYSROOT/../said"')
    assert done.returncode == 0, done.stderr
    assert (sysroot.parent / "said").read_text() == "101\n"
    assert files(sysroot) == set()


@AS_ROOT
@pytest.mark.parametrize(
    ("apt", "code"),
    [
        ("exit 100", 1),
        pytest.param("kill -TERM $PPID", 143, marks=pytest.mark.long),
        ("kill -INT $PPID; kill -INT $$", 130),
    ],
)
def test_the_next_call_finishes_a_failed_or_interrupted_install(sysroot: Path, apt: str, code: int):
    assert install(sysroot, apt).returncode == code
    assert files(sysroot) == {"var/lib/dalsegno-setup/services", "var/lib/dalsegno-setup/packages"}
    assert install(sysroot, ":").returncode == 0
    assert files(sysroot) == set()


@AS_ROOT
def test_the_next_call_cleans_up_after_a_killed_install(sysroot: Path):
    install(sysroot, "kill -KILL $PPID")
    assert "usr/sbin/policy-rc.d" in files(sysroot)
    assert install(sysroot, ":").returncode == 0
    assert files(sysroot) == set()


# Documentation


def test_the_documented_variables_match_those_in_the_scripts():
    texts = [path.read_text() for path in (REPO / "dalsegno", REPO / "test", *(REPO / "scripts").iterdir())]
    used = {name for text in texts for name in re.findall(r"\$\{(DALSEGNO_\w+)", text)}
    documented = set(re.findall(r"^# +(DALSEGNO_\w+)", (REPO / "scripts/setup.sh").read_text(), re.MULTILINE))
    assert used == documented

"""Checks that hosts know --container-image: their answers, the findings, and the commands that fix them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.containers.plugstack import CommandStep, PluginBuild, plan_commands
from dalsegno.containers.plugstack.check import ENABLE, INSTALL, SETTINGS, judge
from dalsegno.containers.plugstack.facts import ClosedFolder, PluginFacts, PluginKind, StackLine, parse_answer
from dalsegno.containers.plugstack.hosts import ask_host, question, srun_route, ssh_route
from dalsegno.system.processes import Completed, FakeRunner
from tests.waiting import PATIENCE_S

STACK = "/etc/slurm/plugstack.conf"
PYXIS = "/usr/local/lib/slurm/spank_pyxis.so"
OURS = "/var/lib/dalsegno/containers/b1/dalsegno_container.so"
BUILD = PluginBuild("login", "/src/native", "b1")
ALL = frozenset(("squashfs", "overlay", "unsquashfs", "namespaces"))
BOTH = frozenset(("srun", "sbatch"))


def host(
    name: str, *lines: str, plugins: tuple[str, ...] = (PYXIS,), knows: bool = False, **more: object
) -> PluginFacts:
    """Return a host with Enroot and a plugstack.conf of these lines."""
    facts: dict[str, object] = {
        "login": name == "login", "slurm": "22.05.8", "conf": "/etc/slurm/slurm.conf",
        "stack": STACK, "files": (STACK,),
        "lines": tuple(StackLine(STACK, line) for line in lines), "plugins": plugins, "enroot": "3.5.0", "has": ALL,
        "knows": BOTH if knows else frozenset(), **more,
    }  # fmt: skip
    return PluginFacts(name, **facts)  # type: ignore[arg-type]


def with_pyxis(name: str, **more: object) -> PluginFacts:
    return host(name, f"required {PYXIS} sbatch_support=1", knows=True, **more)


def commands(
    *hosts: PluginFacts, own: bool = False, asleep: Sequence[str] = (), build: PluginBuild | None = BUILD
) -> list[CommandStep]:
    return plan_commands(hosts, judge(hosts, own), own, asleep, build)


def adding(line: str, *further: str) -> tuple[str, ...]:
    return (f"grep -qsxF -- '{line}' {STACK} || printf '\\n%s\\n' '{line}' >> {STACK}", *further)


def run_commands(commands: Sequence[str]) -> None:
    for command in commands:
        subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=PATIENCE_S)


# Findings and commands


def test_hosts_that_all_know_the_option_need_nothing():
    hosts = [with_pyxis("login"), with_pyxis("n1")]
    assert (judge(hosts), commands(*hosts)) == ([], [])


def test_a_node_whose_plugstack_names_no_plugin_gets_the_line_of_the_others():
    hosts = [with_pyxis("login"), with_pyxis("n1"), host("n2"), host("n3")]
    found, _ = judge(hosts)
    assert found.host == "n2"
    assert f"{STACK} names no plugin for containers" in found.what
    assert '"unrecognized option"' in found.what and "runs on the bare node" in found.what
    line = f"required {PYXIS} sbatch_support=1"
    assert found.fix == f"add `{line}` to {STACK}"
    (step,) = commands(*hosts)
    assert step.hosts == ("n2", "n3") and step.commands == adding(line, "systemctl try-restart slurmd")
    assert step.caution == ""


def test_an_installed_pyxis_is_registered_first_where_jobs_are_submitted():
    login, node = commands(host("n1"), host("login"))
    assert (login.hosts, node.hosts) == (("login",), ("n1",))
    assert node.commands == adding(f"required {PYXIS}", "systemctl try-restart slurmd")
    assert login.commands[:-1] == node.commands and "srun does not load the plugin" in login.commands[-1]


def test_without_any_plugin_ours_is_compiled_copied_and_then_registered():
    hosts = [host("login", plugins=()), host("n1", plugins=()), host("n2", plugins=())]
    assert {each.fix for each in judge(hosts)} == {INSTALL}
    compile_, copy, login, nodes = commands(*hosts)
    assert compile_.hosts == copy.hosts == login.hosts == ("login",) and nodes.hosts == ("n1", "n2")
    first, *gcc = compile_.commands
    folder = "/var/lib/dalsegno/containers"
    assert first == f"install -d -m 755 {folder}/b1 {folder}/kept {folder}/unpacked"
    for name, each in zip(("dalsegno_container.so", "dalsegno-container"), gcc, strict=True):
        assert each.startswith("(cd /src/native && gcc ") and f" -o {folder}/b1/{name} " in each
    assert copy.commands[0].startswith("for host in n1 n2; do tar ")
    assert nodes.commands == adding(f"required {OURS} data={folder}/kept cache={folder}/unpacked squashfs=user")


def test_from_outside_of_the_cluster_or_on_our_own_clusters_our_plugin_is_not_compiled():
    hosts = [host("login", plugins=()), host("n1", plugins=())]
    assert commands(*hosts, build=None) == []
    assert [each.fix for each in judge(hosts, own=True)] == [ENABLE, ENABLE]
    assert commands(*hosts, own=True) == []


def test_our_line_imports_images_only_by_a_command_that_all_hosts_have():
    has = {"plugins": (), "dalsegno": "/usr/bin/dalsegno"}
    assert (
        commands(host("login", **has), host("n1", **has))[-1]
        .commands[0]
        .endswith(f" squashfs=user import=/usr/bin/dalsegno' >> {STACK}")
    )
    compile_, *_, line = commands(host("login", **has), host("n1", plugins=(), open="/usr/local/bin"))
    assert "import=" not in line.commands[0]
    assert compile_.caution.endswith("on n1 other users can write to /usr/local/bin.")


def test_our_plugin_is_copied_from_a_host_that_uses_it():
    line = f"required {OURS} data=/d squashfs=user"
    hosts = [host("login", line, plugins=(OURS,), knows=True), host("n1", plugins=()), host("n2", line, plugins=())]
    copy, add = commands(*hosts)
    assert (
        copy.hosts == ("login",) and "for host in n1 n2; do" in copy.commands[0] and " /d && tar " in copy.commands[0]
    )
    assert (add.hosts, add.commands) == (("n1",), adding(line)), "n2 has the line already"


def test_hosts_that_may_share_the_file_and_lack_the_plugin_are_named_in_a_caution():
    hosts = [
        host("login", plugins=()), host("n1", plugins=(), slurm="23.02.1"), PluginFacts("n2", silent="ssh: refused")
    ]  # fmt: skip
    *_, line = commands(*hosts, asleep=["n3"])
    assert line.hosts == ("login",) and line.caution.startswith(f"n[1-3]: no {OURS}, or not checked. ")
    assert "(23.02.1) to the version of the others: 22.05.8" in judge(hosts)[1].fix


def test_line_that_mounts_user_images_as_root_is_replaced():
    old = f"required /old/{PluginKind.OURS.value} data=/d"
    hosts = [host(name, old, plugins=(f"/old/{PluginKind.OURS.value}",), knows=True) for name in ("login", "n1")]
    found = judge(hosts)
    assert [each.host for each in found] == ["login", "n1"] and "root's kernel mounts" in found[0].what
    *_, node = commands(*hosts)
    assert node.commands[0].startswith("sed -i ") and node.commands[1:] == adding(
        f"required {OURS} data=/d squashfs=user"
    )
    assert judge(hosts, own=True) == [] == commands(*hosts, own=True), "`up` writes the lines of our own clusters"
    safe = [host(name, f"{old} squashfs=user", plugins=(f"/old/{PluginKind.OURS.value}",), knows=True) for name in "ab"]
    assert judge(safe) == [] == commands(*safe)


def test_a_node_without_pyxis_where_others_have_it_must_install_it():
    hosts = [with_pyxis("login"), host("n1", plugins=())]
    assert [each.fix for each in judge(hosts)] == ["install Pyxis and Enroot there, as on login"]
    assert commands(*hosts) == []


def test_a_line_of_a_missing_plugin_is_commented_out():
    missing = "required /old/spank_pyxis.so"
    hosts = [with_pyxis("login"), host("n1", missing)]
    (found,) = judge(hosts)
    assert "/old/spank_pyxis.so, which does not exist, so no job starts there" in found.what
    (step,) = commands(*hosts)
    assert step.commands[0].startswith("sed -i ") and step.commands[1:] == adding(
        f"required {PYXIS} sbatch_support=1", "systemctl try-restart slurmd"
    )


def test_line_of_another_plugin_that_breaks_srun_is_removed_first():
    ours, theirs, optional = f"required {OURS} data=/d", "required /nope/x.so", "optional /nope/y.so"
    error = f"srun: error: spank: {STACK}:3: dlopen(/nope/x.so): /nope/x.so: cannot open shared object file"
    hosts = [host(name, ours, theirs, optional, plugins=(OURS,), errors=(error,)) for name in ("login", "n1")]
    found = judge(hosts, own=True)
    assert found[0].what.endswith(f"{STACK} names /nope/x.so, which does not exist, so no job can be submitted")
    assert {each.fix for each in found} == {f"remove `{theirs}` from {STACK}"}
    for own in (True, False):
        (step,) = commands(*hosts, own=own)
        assert step.hosts == ("login", "n1") and len(step.commands) == 1 and "x\\.so" in step.commands[0]
        assert "check again" in step.purpose


def test_a_plugin_of_another_slurm_must_be_rebuilt():
    error = "srun: error: plugin_load_from_file: Incompatible Slurm plugin version (23.11.4)"
    hosts = [with_pyxis("login"), host("n1", f"required {PYXIS}", errors=(error,))]
    (found,) = judge(hosts)
    assert "does not load" in found.what and "23.11.4" in found.what
    assert found.fix == f"rebuild {PYXIS} for the Slurm version installed there"
    assert commands(*hosts) == []


def test_two_plugins_on_one_host_or_on_two_become_one():
    both = host("n1", f"required {PYXIS}", f"required {OURS}", plugins=(PYXIS, OURS), knows=True)
    other = host("n2", f"required {OURS}", plugins=(PYXIS, OURS), knows=True)
    hosts = [with_pyxis("login"), both, other]
    assert ["names both" in each.what for each in judge(hosts)] == [True, False]
    assert "neither accepts the other's options" in judge(hosts)[1].what
    first, second = commands(*hosts)
    assert first.hosts == ("n1",) and len(first.commands) == 1 and "dalsegno_container" in first.commands[0]
    assert second.commands == (
        *first.commands, *adding(f"required {PYXIS} sbatch_support=1", "systemctl try-restart slurmd")
    )  # fmt: skip


def test_files_that_slurmctld_distributes_are_changed_there():
    hosts = [with_pyxis("login"), host("n1", conf="/run/slurm/conf/slurm.conf")]
    assert "scontrol reconfigure" in judge(hosts)[0].fix
    (step,) = commands(*hosts)
    assert step.hosts == ("login",) and step.commands == ("scontrol reconfigure",)


def test_missing_requirements_of_pyxis_have_commands():
    closed = ClosedFolder("RUNTIME", "/run/enroot", "/run"), ClosedFolder("TEMP", "/scratch", "/scratch")
    bare = with_pyxis("n1", has=frozenset(), closed=closed)
    hosts = [with_pyxis("login", enroot=None), bare, with_pyxis("n2", enroot=None)]
    assert [each.what.split(":")[0] for each in judge(hosts)] == [
        "users cannot create namespaces, so Enroot cannot start containers",
        "Enroot cannot unpack images",
        "users cannot write to ENROOT_RUNTIME_PATH",
        "users cannot write to ENROOT_TEMP_PATH",
        "Pyxis is registered, but Enroot, which it needs, is not installed",
    ]
    assert [(step.hosts, step.commands[0].split()[0]) for step in commands(*hosts)] == [
        (("n1",), "sysctl"), (("n1",), "if"), (("n1",), "install"),
    ], "/scratch is not Enroot's alone, and not opened"  # fmt: skip


def test_old_pyxis_without_sbatch_support_is_reported():
    old = host("login", f"required {PYXIS}", knows=True)
    (found,) = judge([replace(old, knows=frozenset({"srun"}))])
    assert "older than 0.12" in found.what


def test_the_commands_edit_a_real_file_and_can_be_run_twice(tmp_path: Path):
    file, included, link = tmp_path / "real.conf", tmp_path / "my [a].conf", tmp_path / "plugstack.conf"
    file.write_text(
        "# mine\n  required  /old/spank_pyxis.so a=*b # why\nrequired /old/spank_pyxis.so.2\noptional x11.so"
    )
    included.write_text("required /other/spank_pyxis.so\n")
    link.symlink_to(file.name)
    lines = (
        StackLine(str(link), "required  /old/spank_pyxis.so a=*b"),
        StackLine(str(included), "required /other/spank_pyxis.so"),
    )
    (step,) = commands(with_pyxis("login"), host("n1", lines=lines, stack=str(link), files=(str(link),)))
    for _ in range(2):
        run_commands([each for each in step.commands if not each.startswith("systemctl")])
    assert link.is_symlink() and file.read_text().splitlines() == [
        "# mine",
        "#   required  /old/spank_pyxis.so a=*b # why",
        "required /old/spank_pyxis.so.2",
        "optional x11.so",
        f"required {PYXIS} sbatch_support=1",
    ]
    assert included.read_text() == "# required /other/spank_pyxis.so\n"


def test_a_missing_plugstack_is_created(tmp_path: Path):
    stack = tmp_path / "own etc/plugstack.conf"
    (step,) = commands(with_pyxis("login"), host("n1", stack=str(stack), files=()))
    run_commands(step.commands[:2])
    assert stack.read_text() == f"\nrequired {PYXIS} sbatch_support=1\n"


# Questions to a host


def ask_in(tmp_path: Path, env: Mapping[str, str], *plugins: str) -> PluginFacts:
    """Run the query script with a PATH that has stand-ins for Slurm's commands."""
    done = subprocess.run(question(plugins), env=env, capture_output=True, text=True, timeout=60, check=True)
    facts = parse_answer("n1", f"welcome to n1\n{done.stdout}")
    assert facts, done
    return facts


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A host with slurm.conf, and an srun whose help text is in a file."""
    for name, body in {
        "srun": f"cat {tmp_path}/help >&2; cat {tmp_path}/help",
        "sbatch": "true",
        "scontrol": f"echo slurm-wlm 22.05.8; echo 'PluginDir               = {tmp_path}/lib'",
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    (tmp_path / "lib").mkdir()
    (tmp_path / "help").write_text("  --container-image=X\n")
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_CONF": f"{tmp_path}/slurm.conf"}


def test_included_files_are_read_and_plugins_found_by_their_bare_name(tmp_path: Path, slurm: dict[str, str]):
    (tmp_path / "plugstack.conf").write_text("# ours\n\ninclude plugstack.conf.d/*\noptional  x11.so # no\n")
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d/pyxis.conf").write_text("required spank_pyxis.so a=b\n")
    (tmp_path / "lib/spank_pyxis.so").touch()
    (tmp_path / "elsewhere.so").touch()
    facts = ask_in(tmp_path, slurm, f"{tmp_path}/elsewhere.so", "/nowhere/x.so")
    assert facts.stack == f"{tmp_path}/plugstack.conf"
    assert [line.text for line in facts.lines] == [
        "include plugstack.conf.d/*", "required spank_pyxis.so a=b", "optional  x11.so"
    ]  # fmt: skip
    assert facts.plugins[:2] == (f"{tmp_path}/lib/spank_pyxis.so", f"{tmp_path}/elsewhere.so")
    assert facts.working == facts.registered[0]
    assert facts.knows == {"srun"}


def test_slurm_conf_may_name_another_plugstack_and_errors_are_passed_on(tmp_path: Path, slurm: dict[str, str]):
    (tmp_path / "slurm.conf").write_text(f"plugstackconfig = {tmp_path}/other.conf\n")
    (tmp_path / "help").write_text("srun: error: spank: x.so: Dlopen of plugin file failed\n")
    facts = ask_in(tmp_path, slurm)
    assert (facts.stack, facts.files, facts.knows) == (f"{tmp_path}/other.conf", (), frozenset())
    assert facts.errors[0].endswith("Dlopen of plugin file failed")


def test_folders_of_enroot_that_users_cannot_write_to_are_named_and_opened(tmp_path: Path, slurm: dict[str, str]):
    """Even as root, a plain user's access is checked. The folders are outside pytest's, which users cannot enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        for folder, mode in {"": 0o755, "shut": 0o555, "open": 0o1777}.items():
            (place / folder).mkdir(exist_ok=True)
            (place / folder).chmod(mode)
        (tmp_path / "enroot.conf").write_text(
            f"# ENROOT_CACHE_PATH {place}/shut/no\nENROOT_RUNTIME_PATH {place}/shut/enroot/user-$(id -u)\n"
            f"ENROOT_DATA_PATH={place}/open/data-${{UID}}\nENROOT_TEMP_PATH ${{TMPDIR:-/tmp}}\n"
        )
        (tmp_path / "bin/enroot").write_text("#!/bin/sh\necho 3.5.0\n")
        (tmp_path / "bin/enroot").chmod(0o755)
        facts = ask_in(tmp_path, {**slurm, "ENROOT_SYSCONF_PATH": str(tmp_path)})
        assert facts.enroot == "3.5.0"
        assert facts.closed == (ClosedFolder("RUNTIME", f"{place}/shut/enroot", f"{place}/shut"),)
        finding = judge([replace(with_pyxis("n1"), closed=facts.closed)])[0]
        (place / "shut").chmod(0o755)
        run_commands(finding.commands)
        assert ask_in(tmp_path, {**slurm, "ENROOT_SYSCONF_PATH": str(tmp_path)}).closed == ()


@pytest.mark.cluster  # real processes: too slow for the unit part
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_our_command_is_reported_only_if_no_other_user_can_change_it(tmp_path: Path, slurm: dict[str, str]):
    program, link = tmp_path / "program", tmp_path / "bin/dalsegno"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    link.symlink_to(program)
    assert ask_in(tmp_path, slurm).dalsegno == str(link)
    os.chown(program, 65534, 65534)
    assert ask_in(tmp_path, slurm).dalsegno == ""
    os.chown(program, 0, 0)
    for open_, mode in (
        (program, 0o757),
        (tmp_path / "bin", 0o757),
        (tmp_path / "far", 0o777),
        (tmp_path / "far", 0o2775),
    ):
        (tmp_path / "far").mkdir(exist_ok=True)
        (tmp_path / "far/link").unlink(missing_ok=True)
        (tmp_path / "far/link").symlink_to("../program")
        link.unlink()
        link.symlink_to("../far/link")  # the folder that contains this link matters too
        before = open_.stat().st_mode & 0o7777
        os.chown(tmp_path / "far", 0, 65534)
        open_.chmod(mode)
        facts = ask_in(tmp_path, slurm)
        assert facts.dalsegno == "" and os.path.samefile(facts.open, open_), facts
        open_.chmod(before)
    (tmp_path / "far").chmod(0o1777)  # as in /tmp, files of root cannot be replaced
    assert ask_in(tmp_path, slurm).dalsegno == str(link)


def test_slurm_without_a_slurm_conf_differs_from_no_slurm(tmp_path: Path):
    """Without a slurm.conf, Slurm's commands do not even print their version."""
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("srun", "sbatch", "scontrol"):
        (path / name).write_text(
            f"#!/bin/sh\necho '{name}: fatal: Could not establish a configuration source' >&2; exit 1\n"
        )
        (path / name).chmod(0o755)
    env = {"PATH": f"{path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    bare = ask_in(tmp_path, env)
    assert (bare.commands, bare.slurm, bare.conf) == (True, "", "")
    other = host("login", plugins=(), slurm="23.11.4")
    _, found = judge([other, bare])
    assert "Slurm's commands are there, but they find no slurm.conf" in found.what
    assert found.fix == SETTINGS and [step.hosts for step in commands(other, bare)] == [("login",)] * 2
    (tmp_path / "slurm.conf").write_text("nonsense\n")
    _, found = judge([other, ask_in(tmp_path, {**env, "SLURM_CONF": f"{tmp_path}/slurm.conf"})])
    assert f"fail with {tmp_path}/slurm.conf: Could not establish a configuration source" in found.what
    assert found.fix == f"`scontrol --version` must work there first, with {tmp_path}/slurm.conf"


def test_incomplete_answer_counts_as_missing():
    assert parse_answer("n1", "ds:slurm 22.05.8\nds:knows srun\n") is None
    assert parse_answer("n1", "ds:end\nds:closed x\nds:new ?\n") == PluginFacts("n1")


def test_node_that_srun_does_not_reach_is_asked_over_ssh_or_reported():
    def answer(argv: tuple[str, ...], _: str | None) -> Completed:
        if argv[0] == "srun":  # srun exits with 0 nevertheless
            return Completed(argv, 0, "", "srun: error: task 0 launch failed: Plugin initialization failed")
        return Completed(argv, 0, "ds:end n1") if "n1" in argv else Completed(argv, 255, "", "ssh: refused")

    runner = FakeRunner(answer)
    env = {"PYXIS_CONTAINER_IMAGE": "x", "SLURM_JOB_ID": "7", "SLURM_CONF": "c"}
    routes = [srun_route(env, {"n1": "train"}, {"n3": "it is down"}), ssh_route({})]
    assert routes[0].enter("n1", [])[1] == {"SLURM_CONF": "c"}
    assert "--partition=train" in routes[0].enter("n1", [])[0]
    assert ask_host(runner, "n1", routes, ()) == PluginFacts("n1")
    silent = ask_host(runner, "n2", routes, ())
    assert silent.silent.startswith("srun: ") and silent.silent.endswith("; ssh: ssh: refused")
    assert "requires a plugin that does not load" in judge([silent])[0].fix
    assert ask_host(runner, "n3", routes, ()).silent == "it is down; ssh: ssh: refused"
    assert not any("--nodelist=n3" in argv for argv in runner.calls)

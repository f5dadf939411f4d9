"""Whether hosts know --container-image: what they answer, what is wrong, and what mends it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.containers.plugstack.asking import ask_host, question, script
from dalsegno.containers.plugstack.facts import Closed, HostFacts, Kind, StackLine, parse_answer
from dalsegno.containers.plugstack.judge import ENABLE, INSTALL, SETTINGS, judge
from dalsegno.containers.plugstack.mending import mend, steps
from dalsegno.containers.plugstack.repairs import Repair, decide_repairs, in_vain
from dalsegno.containers.plugstack.sharing import readers, shares
from dalsegno.containers.plugstack.ways import by_srun, by_ssh
from dalsegno.system.processes import Completed, FakeRunner
from tests.waiting import PATIENCE_S

STACK = "/etc/slurm/plugstack.conf"
PYXIS = "/usr/local/lib/slurm/spank_pyxis.so"
OURS = "/var/lib/dalsegno/containers/b1/dalsegno_container.so"
ALL = frozenset(("squashfs", "overlay", "unsquashfs", "namespaces"))
BOTH = frozenset(("srun", "sbatch"))


def host(name: str, *lines: str, plugins: tuple[str, ...] = (PYXIS,), knows: bool = False, **more: object) -> HostFacts:
    """One with Enroot and a plugstack.conf that has these lines."""
    facts: dict[str, object] = {
        "login": name == "login", "uid": 0, "slurm": "22.05.8", "conf": "/etc/slurm/slurm.conf",
        "stack": STACK, "files": (STACK,),
        "lines": tuple(StackLine(STACK, line) for line in lines), "plugins": plugins, "enroot": "3.5.0", "has": ALL,
        "knows": BOTH if knows else frozenset(), **more,
    }  # fmt: skip
    return HostFacts(name, **facts)  # type: ignore[arg-type]


def with_pyxis(name: str, **more: object) -> HostFacts:
    return host(name, f"required {PYXIS} sbatch_support=1", knows=True, **more)


def repairs(*hosts: HostFacts, own: bool = False) -> list[Repair]:
    return decide_repairs(hosts, own, "b1")[0]


# Judging and deciding --------------------------------------------------------------------------------------------


def test_hosts_that_all_know_the_option_are_fine_and_left_alone():
    hosts = [with_pyxis("login"), with_pyxis("n1")]
    assert (judge(hosts), repairs(*hosts)) == ([], [])


def test_a_node_whose_plugstack_names_no_plugin_gets_the_line_of_the_others():
    hosts = [with_pyxis("login"), with_pyxis("n1"), host("n2")]
    (found,) = judge(hosts)
    assert found.host == "n2"
    assert f"{STACK} names no plugin for containers" in found.what
    assert '"unrecognized option"' in found.what and "runs on the bare node" in found.what
    line = f"required {PYXIS} sbatch_support=1"
    assert found.fix == f"add `{line}` to {STACK}"
    assert repairs(*hosts) == [Repair("n2", STACK, line, restart=True)]


def test_a_pyxis_that_is_installed_and_registered_nowhere_is_registered_not_ours():
    hosts = [host("login"), host("n1")]
    assert [each.add for each in repairs(*hosts)] == [f"required {PYXIS}"] * 2
    assert [each.restart for each in repairs(*hosts)] == [True, True], "jobs may be handed in on a node"


def test_where_there_is_no_plugin_at_all_ours_is_installed_or_the_cluster_file_says_so():
    hosts = [host("login", plugins=(), dalsegno="/usr/bin/dalsegno"), host("n1", plugins=())]
    assert [each.fix for each in judge(hosts)] == [INSTALL, INSTALL]
    first, second = repairs(*hosts)
    assert first.install == second.install == "/var/lib/dalsegno/containers/b1"
    assert first.add.startswith(f"required {OURS} data=")
    assert first.add.endswith(" squashfs=user import=/usr/bin/dalsegno") and second.add.endswith(" squashfs=user")
    assert [each.fix for each in judge(hosts, own=True)] == [ENABLE, ENABLE]
    assert repairs(*hosts, own=True) == []


def test_line_by_which_root_reads_users_images_is_found_and_replaced():
    old = f"required /old/{Kind.OURS.value} data=/d"
    hosts = [host(name, old, plugins=(f"/old/{Kind.OURS.value}",), knows=True) for name in ("login", "n1")]
    found = judge(hosts)
    assert [each.host for each in found] == ["login", "n1"] and "root's kernel mounts" in found[0].what
    for repair in repairs(*hosts):
        assert repair.drop == (StackLine(STACK, old),)
        assert (repair.add, repair.install) == (f"required {OURS} data=/d squashfs=user", OURS.rpartition("/")[0])
    assert judge(hosts, own=True) == [] == repairs(*hosts, own=True), "`up` writes the lines of a cluster of ours"
    safe = [host(name, f"{old} squashfs=user", plugins=(f"/old/{Kind.OURS.value}",), knows=True) for name in "ab"]
    assert judge(safe) == [] == repairs(*safe)


def test_a_node_without_pyxis_where_others_have_it_is_told_to_install_it():
    hosts = [with_pyxis("login"), host("n1", plugins=())]
    assert [each.fix for each in judge(hosts)] == ["install Pyxis and Enroot there, as on login"]
    assert repairs(*hosts) == []


def test_a_line_that_names_a_missing_plugin_is_put_out_of_use():
    missing = "required /old/spank_pyxis.so"
    hosts = [with_pyxis("login"), host("n1", missing)]
    (found,) = judge(hosts)
    assert "/old/spank_pyxis.so, which is not there, so that no job starts there" in found.what
    (repair,) = repairs(*hosts)
    assert repair.drop == (StackLine(STACK, missing),) and repair.add.startswith(f"required {PYXIS}")


def test_somebody_elses_line_that_keeps_srun_from_starting_is_named_and_put_out_of_use_and_ours_is_not_blamed():
    ours, theirs, optional = f"required {OURS} data=/d", "required /nope/x.so", "optional /nope/y.so"
    said = f"srun: error: spank: {STACK}:3: dlopen(/nope/x.so): /nope/x.so: cannot open shared object file"
    hosts = [host(name, ours, theirs, optional, plugins=(OURS,), errors=(said,)) for name in ("login", "n1")]
    found = judge(hosts, own=True)
    assert found[0].what.endswith(f"{STACK} names /nope/x.so, which is not there, so that no job can be handed in")
    assert {each.fix for each in found} == {f"take `{theirs}` out of {STACK}"}
    for own in (True, False):
        assert repairs(*hosts, own=own) == [
            Repair(name, STACK, drop=(StackLine(STACK, theirs),)) for name in ("login", "n1")
        ]
    well = [host("login", ours, plugins=(OURS,), knows=True), hosts[1]]
    assert repairs(*well, own=True) == [Repair("n1", STACK, drop=(StackLine(STACK, theirs),))]


def test_a_plugin_of_another_slurm_is_not_mended_by_naming_it_once_more():
    said = "srun: error: plugin_load_from_file: Incompatible Slurm plugin version (23.11.4)"
    hosts = [with_pyxis("login"), host("n1", f"required {PYXIS}", errors=(said,))]
    (found,) = judge(hosts)
    assert "does not load" in found.what and "23.11.4" in found.what
    assert found.fix == f"build {PYXIS} anew, for the Slurm that is there"
    assert repairs(*hosts) == []


def test_two_plugins_on_one_host_or_on_two_are_one_too_many():
    both = host("n1", f"required {PYXIS}", f"required {OURS}", plugins=(PYXIS, OURS), knows=True)
    other = host("n2", f"required {OURS}", plugins=(PYXIS, OURS), knows=True)
    hosts = [with_pyxis("login"), both, other]
    assert ["names both" in each.what for each in judge(hosts)] == [True, False]
    assert "neither takes the other's options" in judge(hosts)[1].what
    assert [(each.host, [line.plugin for line in each.drop]) for each in repairs(*hosts)] == [
        ("n1", [OURS]),
        ("n2", [OURS]),
    ]
    assert repairs(*hosts)[1].add == f"required {PYXIS} sbatch_support=1"


def test_files_that_slurmctld_hands_out_are_mended_there():
    hosts = [with_pyxis("login"), host("n1", conf="/run/slurm/conf/slurm.conf")]
    assert "scontrol reconfigure" in judge(hosts)[0].fix
    assert decide_repairs(hosts, False, "b1") == ([], True)


def test_what_pyxis_needs_on_a_node():
    closed = Closed("RUNTIME", "/run/enroot", "/run")
    bare = with_pyxis("n1", has=frozenset(), closed=(closed,))
    hosts = [with_pyxis("login", enroot=None), bare, with_pyxis("n2", enroot=None)]
    assert [each.what.split(":")[0] for each in judge(hosts)] == [
        "users may make no namespaces, so Enroot starts nothing",
        "Enroot cannot unpack images",
        "users cannot write to ENROOT_RUNTIME_PATH",
        "Pyxis is registered, but Enroot, which it needs, is not installed",
    ]
    assert repairs(*hosts) == [Repair("n1", folders=("/run/enroot",))]


def test_an_old_pyxis_that_sbatch_does_not_know():
    old = host("login", f"required {PYXIS}", knows=True)
    (found,) = judge([HostFacts(**{**vars(old), "knows": frozenset({"srun"})})])
    assert "older than 0.12" in found.what


def test_a_line_that_was_added_and_does_not_help_is_noticed():
    given, dropped = Repair("login", STACK, f"required {OURS}"), Repair("n1", STACK, drop=(StackLine(STACK, "x"),))
    mute = HostFacts("n2", silent="ssh: refused")
    hosts = [host("login", f"required {OURS}"), host("n1"), mute]
    assert in_vain(hosts, [given, dropped, Repair("n2", STACK, "x")]) == hosts[:1]
    assert in_vain([with_pyxis("login")], [given]) == []


# Asking ----------------------------------------------------------------------------------------------------------


def ask_in(tmp_path: Path, env: Mapping[str, str], *plugins: str) -> HostFacts:
    """The question itself, in a shell, with a PATH that has stand-ins for Slurm's commands."""
    done = subprocess.run(question(plugins), env=env, capture_output=True, text=True, timeout=60, check=True)
    facts = parse_answer("n1", f"welcome to n1\n{done.stdout}")
    assert facts, done
    return facts


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A host with slurm.conf, and an srun that knows the option if a file says so."""
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


def test_folders_of_enroots_that_users_cannot_write_to_are_named(tmp_path: Path, slurm: dict[str, str]):
    """A user, whoever asks: root may write anywhere. The folders are outside of pytest's own, which are closed."""
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
        assert facts.closed == (Closed("RUNTIME", f"{place}/shut/enroot", f"{place}/shut"),)
        (open_,) = steps(Repair("n1", folders=(f"{place}/shut/enroot",)), None)
        (place / "shut").chmod(0o755)
        assert (
            subprocess.run(open_[0], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
            == "ds:done\n"
        )
        assert ask_in(tmp_path, {**slurm, "ENROOT_SYSCONF_PATH": str(tmp_path)}).closed == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_our_command_is_named_only_if_nobody_else_can_write_what_it_leads_to(tmp_path: Path, slurm: dict[str, str]):
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
        link.symlink_to("../far/link")  # whose folder counts too
        before = open_.stat().st_mode & 0o7777
        os.chown(tmp_path / "far", 0, 65534)
        open_.chmod(mode)
        facts = ask_in(tmp_path, slurm)
        assert facts.dalsegno == "" and os.path.samefile(facts.open, open_), facts
        open_.chmod(before)
    (tmp_path / "far").chmod(0o1777)  # like /tmp: what is root's stays
    assert ask_in(tmp_path, slurm).dalsegno == str(link)


def test_a_line_without_our_command_says_why(tmp_path: Path):
    (repair,) = repairs(host("login", plugins=(), open="/usr/local/bin"))
    assert "import=" not in repair.add
    assert "others can write to /usr/local/bin" in " ".join(repair.sentences())


def test_slurm_without_a_slurm_conf_is_told_from_no_slurm(tmp_path: Path):
    """As Slurm's commands are without one: they do not even say their version."""
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
    assert "Slurm's commands are there, but no slurm.conf" in found.what
    assert found.fix == SETTINGS and repairs(other, bare)[0].host == "login"
    (tmp_path / "slurm.conf").write_text("nonsense\n")
    _, found = judge([other, ask_in(tmp_path, {**env, "SLURM_CONF": f"{tmp_path}/slurm.conf"})])
    assert f"give up over {tmp_path}/slurm.conf: Could not establish a configuration source" in found.what
    assert found.fix == f"`scontrol --version` must work there first, with {tmp_path}/slurm.conf"


def test_hosts_that_have_one_plugstack_are_known_by_it(tmp_path: Path, slurm: dict[str, str]):
    (tmp_path / "etc").mkdir()
    (tmp_path / "slurm.conf").write_text(f"PlugStackConfig={tmp_path}/etc/plugstack.conf\n")
    (tmp_path / "other.conf").write_text(f"PlugStackConfig={tmp_path}/other/plugstack.conf\n")
    (tmp_path / "other").symlink_to("etc")
    other = {**slurm, "SLURM_CONF": f"{tmp_path}/other.conf"}
    for _ in range(2):  # it need not be there yet
        first, second = ask_in(tmp_path, slurm), ask_in(tmp_path, other)
        assert first.place == second.place != "" and first.file_system == second.file_system != ""
        (tmp_path / "etc/plugstack.conf").touch()
    hosts = [replace(first, host="a", file_system="xfs"), replace(second, host="b", file_system="xfs")]
    assert [shares(each, hosts) for each in hosts] == [True, True]
    apart = [hosts[0], replace(hosts[1], place="another")]
    assert [shares(each, apart) for each in apart] == [False, False]
    assert [shares(replace(each, file_system="nfs"), apart) for each in apart] == [True, True]
    assert readers(apart[0], [*apart, host("c", conf="/run/slurm/conf/slurm.conf")])[-1].host == "c"


def test_half_an_answer_is_none():
    assert parse_answer("n1", "ds:uid 0\nds:knows srun\n") is None
    assert parse_answer("n1", "ds:end\nds:closed x\nds:uid ?\n") == HostFacts("n1")


def test_a_node_that_srun_does_not_reach_is_asked_over_ssh_and_else_says_why():
    def answer(argv: tuple[str, ...], _: str | None) -> Completed:
        if argv[0] == "srun":  # it ends with 0 all the same
            return Completed(argv, 0, "", "srun: error: task 0 launch failed: Plugin initialization failed")
        return Completed(argv, 0, "ds:end n1") if "n1" in argv else Completed(argv, 255, "", "ssh: refused")

    runner = FakeRunner(answer)
    env = {"PYXIS_CONTAINER_IMAGE": "x", "SLURM_JOB_ID": "7", "SLURM_CONF": "c"}
    ways = [by_srun(env, {"n1": "train"}, {"n3": "it is down"}), by_ssh({})]
    assert ways[0].enter("n1", [])[1] == {"SLURM_CONF": "c"}
    assert "--partition=train" in ways[0].enter("n1", [])[0]
    assert ask_host(runner, "n1", ways, ()) == HostFacts("n1")
    silent = ask_host(runner, "n2", ways, ())
    assert silent.silent.startswith("srun: ") and silent.silent.endswith("; ssh: ssh: refused")
    assert "requires a plugin that does not load" in judge([silent])[0].fix
    assert ask_host(runner, "n3", ways, ()).silent == "it is down; ssh: ssh: refused"
    assert not any("--nodelist=n3" in argv for argv in runner.calls)


# Mending ---------------------------------------------------------------------------------------------------------


def write_stack(file: Path, add: str, *drop: str) -> None:
    words = ["sh", "-c", script("stack.sh"), "dalsegno", str(file), add, *drop]
    assert subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout == "ds:done\n"


def test_a_line_is_added_once_others_are_put_out_of_use_and_what_was_is_kept(tmp_path: Path):
    file = tmp_path / "plugstack.conf"
    file.write_text("# mine\n  required  /old.so # why\noptional x11.so")
    file.chmod(0o640)
    for _ in range(2):
        write_stack(file, "required /new.so", "required  /old.so")
    assert file.read_text().splitlines() == [
        "# mine",
        "# out of use, by dalsegno:   required  /old.so # why",
        "optional x11.so",
        "# by dalsegno containers check --repair",
        "required /new.so",
    ]
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == [".plugstack.conf.before-dalsegno", "plugstack.conf"]
    assert "optional x11.so" in (tmp_path / ".plugstack.conf.before-dalsegno").read_text()


def test_a_plugstack_that_is_missing_is_made_and_a_link_stays_one(tmp_path: Path):
    write_stack(tmp_path / "etc/plugstack.conf", "required /new.so")
    assert (tmp_path / "etc/plugstack.conf").read_text().endswith("\nrequired /new.so\n")
    (tmp_path / "link").symlink_to("etc/plugstack.conf")
    write_stack(tmp_path / "link", "required /other.so")
    assert (tmp_path / "link").is_symlink()
    assert "required /other.so" in (tmp_path / "etc/plugstack.conf").read_text()


def test_a_repair_that_srun_did_not_bring_there_is_brought_in_the_next_way():
    runner = FakeRunner(lambda argv, _: Completed(argv, 0, "ds:done\n" if argv[0] == "ssh" else ""))
    repair = Repair("n1", STACK, "required x.so", restart=True)
    mend(runner, [by_srun({}, {}, {}), by_ssh({})], repair, None)
    assert [argv[0] for argv in runner.calls] == ["srun", "ssh", "ssh"]


def test_lines_in_included_files_are_changed_where_they_are():
    repair = Repair(
        "n1", STACK, "required x.so", (StackLine("/d/a.conf", "required a"), StackLine(STACK, "required b"))
    )
    assert [words[4:] for words, _ in steps(repair, None)] == [
        ["/d/a.conf", "", "required a"],
        [STACK, "required x.so", "required b"],
    ]

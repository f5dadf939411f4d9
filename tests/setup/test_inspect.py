"""Tests of the inspection of hosts: recorded answers, broken answers, and the program itself on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.inspect import (
    HostFacts,
    HostUser,
    InspectedDisk,
    InspectedGpu,
    ListeningPort,
    inspect_hosts,
    parse_inspection,
    program,
)
from dalsegno.system.processes import Completed
from dalsegno.system.ssh import FakeHostRunner, HostCall, SshError, SshFault

RECORDED = Path(__file__).parents[1] / "recorded/host-inspection"
ARGV = ("python3", "-")


def answered(answer: object, **more: object) -> Completed:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return Completed(ARGV, 0, text, **more)


def parse(answer: object, at: float = 0.0) -> HostFacts:
    return parse_inspection("gpu-1", answered(answer), at)


def inspection(**values: object) -> dict[str, object]:
    return {"dalsegno": "inspection", **values}


def test_facts_of_a_debian_12_host():
    text = (RECORDED / "debian-12.json").read_text()
    facts = parse(text, at=json.loads(text)["time"] - 1.5)
    assert (facts.os_id, facts.os_version, facts.machine, facts.python) == ("debian", "12", "x86_64", (3, 11, 2))
    assert (facts.cpus, facts.sockets, facts.cores, facts.memory_mib) == (2, 1, 2, 24103)
    assert facts.is_root and not facts.systemd and facts.cgroup_version == 1 and facts.package_manager == "apt-get"
    assert facts.version_of("slurmd") == "22.05.8-4+deb12u3" and facts.version_of("nosuch") == ""
    assert ListeningPort(22, "sshd") in facts.listening and facts.daemons == ("sshd",)
    assert HostUser("slurm", 64030, 64030) in facts.users
    assert facts.munge_key and facts.slurm_conf == "" and not facts.record
    assert facts.clock_offset_s == pytest.approx(1.5)
    assert facts.gpus == () and facts.problems == ()


def test_gpus_are_read_from_nvidia_smi(tmp_path):
    recorded = "NVIDIA H200, 143771, 580.159.04"  # driver 580.159 on an H200
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{recorded}'\necho '{recorded}'\n")
    tool.chmod(0o755)
    facts = inspect_this_machine({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert facts.gpus == (InspectedGpu("NVIDIA H200", 143771),) * 2 and facts.driver == "580.159.04"


def test_free_space_is_that_of_the_deepest_mount():
    facts = HostFacts("a", disks=(InspectedDisk("/", "ext4", "", 9, 5), InspectedDisk("/var", "xfs", "", 9, 7),
                                  InspectedDisk("/home", "nfs4", "fs:/home")))  # fmt: skip
    assert [facts.free_mib(folder) for folder in ("/var/lib", "/various", "/", "/home/ann")] == [5 + 2, 5, 5, None]


def test_lines_of_a_shell_before_the_answer_are_skipped():
    noise = 'Welcome!\n{"motd": true}\n'
    assert parse(noise + json.dumps(inspection(hostname="gpu-1"))).hostname == "gpu-1"


@pytest.mark.parametrize("text", ["", "hello", "<html>", "[]", "null", "{}", '{"dalsegno": "inspec', "[" * 100_000])
def test_answer_that_is_not_ours_is_an_error_with_a_hint(text):
    with pytest.raises(TargetError, match="gpu-1: ") as raised:
        parse(text)
    assert raised.value.hint


def test_missing_python_is_named():
    with pytest.raises(TargetError) as raised:
        parse_inspection("gpu-1", Completed(ARGV, 127, "", "bash: python3: command not found\n"), 0)
    assert raised.value.what == "gpu-1: `python3` is not installed"


def test_output_of_a_failed_inspection_is_safe_to_print():
    with pytest.raises(TargetError) as raised:
        parse_inspection("gpu-1", Completed(ARGV, 1, "", "\x1b]0;owned\x07Syntax\x9bError"), 0)
    assert "\\x1b" in raised.value.what and raised.value.what.isprintable()


def test_texts_of_a_hostile_host_are_bounded_and_safe_to_print():
    facts = parse(inspection(hostname="\x1b[2J\u202e" + "x" * 10_000, gpus=[{"name": "a\nb"}], users=[{}] * 100_000))
    assert facts.hostname.isprintable() and len(facts.hostname) < 300
    assert facts.gpus == (InspectedGpu("a\\nb"),)
    assert len(facts.users) == 5000


def test_values_of_the_wrong_type_are_left_out():
    wrong = [None, True, -1, 1e400, float("nan"), "x", [], {}, [[]], [1], {"a": 1}, 10**30]
    for value in wrong:
        facts = parse(
            inspection(**dict.fromkeys((field.name for field in dataclasses.fields(HostFacts)), value), time=value)
        )
        assert facts.host == "gpu-1" and facts.memory_mib == 0 and facts.clock_offset_s in (0.0, -1.0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(HostFacts)] + ["time", "uid"]), VALUES)
)
def test_any_answer_gives_facts_of_the_declared_types(values):
    facts = parse(inspection(**values))
    kinds = typing.get_type_hints(HostFacts)
    for field in dataclasses.fields(facts):
        kind = typing.get_origin(kinds[field.name]) or kinds[field.name]
        assert isinstance(getattr(facts, field.name), kind), field.name


def inspect_this_machine(env: Mapping[str, str] = os.environ, *packages: str) -> HostFacts:
    argv = [sys.executable, "-", *(packages or ["bash"])]
    done = subprocess.run(argv, input=program(), capture_output=True, timeout=100, check=True, cwd="/", env=env)
    return parse_inspection("here", answered(done.stdout.decode()), 0)


def test_program_finds_all_facts_of_this_machine():
    facts = inspect_this_machine()
    assert facts.problems == () and facts.cpus > 0 and facts.memory_mib > 0
    assert facts.python == sys.version_info[:3]
    assert any(user.name == "root" and user.uid == 0 for user in facts.users)
    assert facts.disks


@pytest.fixture
def package() -> Iterator[Path]:
    """A package file in a folder that only root can change. /tmp is open to all users."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to own files of root")
    with tempfile.TemporaryDirectory(dir="/root") as folder:
        control = Path(folder) / "made-up/DEBIAN/control"
        control.parent.mkdir(parents=True)
        control.write_text(CONTROL)
        file = Path(folder) / "made-up.deb"
        subprocess.run(["dpkg-deb", "--build", control.parents[1], file], check=True, timeout=60)
        yield file


def test_program_reads_the_version_of_package_files(package: Path):
    other = f"{package.parent}/none.deb"
    facts = inspect_this_machine(os.environ, str(package), other, "bash=0")
    assert facts.available == ((str(package), "1:25.05.3-1"),) and facts.untrusted == ()
    assert facts.version_of("bash") and facts.problems == ()


def test_program_does_not_read_package_files_that_users_can_change(package: Path, tmp_path: Path):
    """Root would parse them with dpkg-deb."""
    link = tmp_path / "link.deb"
    link.symlink_to(package)
    theirs = package.with_name("theirs.deb")
    theirs.write_bytes(package.read_bytes())
    os.chown(theirs, 65534, 65534)
    through = package.with_name("through.deb")
    through.symlink_to(theirs)
    facts = inspect_this_machine(os.environ, str(package), str(link), str(theirs), str(through))
    assert facts.available == ((str(package), "1:25.05.3-1"),) and facts.problems == ()
    assert facts.untrusted == (str(link), str(theirs), str(through))


CONTROL = """\
Package: made-up
Version: 1:25.05.3-1
Architecture: all
Maintainer: Nobody <nobody@example.org>
Description: made up
"""


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("required /usr/lib/slurm/spank_pyxis.so runtime_path=/run/pyxis\n", "/usr/lib/slurm/spank_pyxis.so"),
        ("optional other.so\ninclude plugstack.conf.d/*\n", "spank_pyxis.so"),
        ("# required spank_pyxis.so\noptional other.so # not spank_pyxis.so\n", ""),
        ("include plugstack.conf\n", ""),
        (None, ""),
    ],
)
def test_pyxis_is_found_in_plugstack_conf_and_the_files_that_it_includes(tmp_path, conf, expected):
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d/pyxis.conf").write_text("required spank_pyxis.so\n")
    if conf is not None:
        (tmp_path / "plugstack.conf").write_text(conf)
    source = program().replace(b'"/etc/slurm/plugstack.conf"', f'"{tmp_path}/plugstack.conf"'.encode())
    enroot = tmp_path / "bin/enroot"
    enroot.parent.mkdir()
    enroot.touch(mode=0o755)
    env = {**os.environ, "PATH": f"{enroot.parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-"], input=source, capture_output=True, timeout=100, check=True, env=env)
    facts = parse_inspection("here", answered(done.stdout.decode()), 0)
    assert (facts.pyxis, facts.enroot, facts.problems) == (expected, True, ())


def test_hosts_are_inspected_as_root_and_a_failed_one_keeps_its_error():
    def answer(call: HostCall) -> Completed | DalsegnoError:
        if call.host == "gpu-2":
            return SshError("gpu-2", SshFault.REFUSED, "nothing listens", hint="start sshd")
        return answered(inspection(hostname=call.host))

    runner = FakeHostRunner(answer)
    found = inspect_hosts(runner, ["gpu-1", "gpu-2"], ["slurmd", "munge"])
    assert isinstance(found["gpu-1"], HostFacts) and found["gpu-1"].hostname == "gpu-1"
    assert isinstance(found["gpu-2"], SshError)
    assert runner.calls[0] == HostCall("gpu-1", ("python3", "-", "slurmd", "munge"), program(), root=True)

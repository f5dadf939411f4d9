"""Tests of the parsers of the Docker scene."""

from __future__ import annotations

from dalsegno.demo.docker import NodeProcess, ancestors, parse_cgroup, parse_ldd, parse_ps, parse_variable

PS = """
      1       0 root             ds:gpu-1        /usr/bin/python3 -I -S -c import sys
    120       1 root             containerd-shim /usr/bin/containerd-shim-runc-v2 -namespace moby
    140     120 root             sleep           sleep 1000
    266       1 root             slurmstepd      slurmstepd: [2.0]
    274     266 ada              sleep           /bin/sleep 1000
    280       2 root             [kthread]
"""


def test_ancestors_end_at_a_service_of_the_node():
    known = {process.pid: process for process in parse_ps(PS)}
    assert known[274] == NodeProcess(274, 266, "ada", "sleep", "/bin/sleep 1000")
    assert ancestors(known, 140) == ("init", "containerd-shim")
    assert ancestors(known, 274) == ("slurmstepd",)
    assert ancestors(known, 280) == ()  # the parent of this process is not listed


def test_the_cgroup_is_that_of_the_freezer_or_the_only_one():
    assert parse_cgroup("6:freezer:/a/job_2/step_0\n4:memory:/b\n0::/c\n") == "/a/job_2/step_0"
    assert parse_cgroup("0::/docker/4711\n") == "/docker/4711"
    assert parse_cgroup("") == ""


def test_a_variable_is_read_from_an_environment():
    assert parse_variable("A=1\0CUDA_VISIBLE_DEVICES=0,1\0", "CUDA_VISIBLE_DEVICES") == "0,1"
    assert parse_variable("", "CUDA_VISIBLE_DEVICES") == ""


def test_only_libraries_with_a_path_are_listed():
    text = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld.so.2 (0x7f)\n"
    assert parse_ldd(text) == ["/lib/libc.so.6", "/lib64/ld.so.2"]
    assert parse_ldd("\tnot a dynamic executable\n") == []

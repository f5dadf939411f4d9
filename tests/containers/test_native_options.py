"""The plugin's option parser, called directly and fuzzed under AddressSanitizer; then compiling the plugin."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dalsegno.containers.native import (
    COMPILE_S,
    FLAGS,
    HEADER,
    PARTS,
    build_native,
    header_version,
    missing_packages,
    prepare_native,
    source_folder,
)
from dalsegno.containers.native import check_compiler as check
from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Completed, FakeRunner, LocalRunner

FUZZ_S = int(os.environ.get("DALSEGNO_FUZZ_S") or (2 if os.environ.get("DALSEGNO_LONG") else 1))
WHY_LENGTH = 512
SANITIZED = ("-g", "-fno-sanitize-recover=all", "-U_FORTIFY_SOURCE")
SEEDS = (
    "/fsx:/fsx:ro+noexec,./a:/b",
    "PATH,LANG,_X1",
    "mine-2.0:no_exec",
    "net,ipc,uts",
    'cd "/w \\"" && unset OLDPWD',
    "A=b c",
    "1",
)
Check = Callable[[str, str], str]


def compiled(target: Path, *words: str) -> Path:
    subprocess.run(["gcc", *FLAGS, *words, "-o", str(target)], cwd=source_folder(), check=True)
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("native")
    library = ctypes.CDLL(str(compiled(folder / "options.so", "-fPIC", "-shared", "options.c")))
    library.parse_rc_workdir.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def refusal(library: ctypes.CDLL) -> Check:
    """Return a function that gives the error for an option's value; "" if it is valid."""
    names = re.findall(r"^ +OPTION_(\w+),", (source_folder() / "options.h").read_text(), re.MULTILINE)

    def refusal(option: str, value: str) -> str:
        why = ctypes.create_string_buffer(WHY_LENGTH)
        rc = library.check_option(names.index(option), value.encode(), why)
        return why.value.decode() if rc else ""

    return refusal


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("IMAGE", "/fsx/pytorch.sqsh"),
        ("IMAGE", "./with a blank.sqsh"),
        ("IMAGE", "me@nvcr.io#nvidia/pytorch:24.01-py3"),
        ("MOUNTS", "/fsx:/fsx"),
        ("MOUNTS", "/fsx"),
        ("MOUNTS", "./here:/there:ro,/a:/b:ro+noexec"),
        ("MOUNTS", "/a:/b:rw+rbind+x-create=dir"),
        ("MOUNTS", "/a:/b:ro+nosuid+nodev+rprivate"),
        ("MOUNTS", "/a:/b:unbindable+ro,/a:./b,/a:/b:"),
        ("MOUNTS", "tmpfs:/x,tmpfs:/y:size=1G+mode=1777+huge=within_size+noexec,umount:/root"),
        ("ENV", "PATH,LANG,_X1"),
        ("NAME", "mine"),
        ("NAME", "mine-2.0_x:no_exec"),
        ("WORKDIR", "/workspace"),
        ("WORKDIR", "../relative"),
        ("SAVE", "after.sqsh"),
        ("UNSHARE", "net"),
        ("UNSHARE", "uts,ipc,net,net"),
        ("AUTO_RESUME", "1"),
    ],
)
def test_values_that_pyxis_accepts_are_accepted(refusal: Check, option: str, value: str):
    assert refusal(option, value) == ""


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("IMAGE", "", "empty"),
        ("IMAGE", "nvcr.io#a b", "space"),
        ("MOUNTS", "", "of a mount is empty"),
        ("MOUNTS", "/a:", "of a mount is empty"),
        ("MOUNTS", "fsx:/fsx", "the source must be /PATH, ./PATH or tmpfs"),
        ("MOUNTS", "/a:b", "the target must be an absolute path"),
        ("MOUNTS", "/a:../b", "is outside the container (Invalid cross-device link)"),
        ("MOUNTS", "/a:./b/../../c", "is outside the container"),
        ("MOUNTS", "devpts:/x", "the source must be /PATH, ./PATH or tmpfs"),
        ("MOUNTS", "tmpfs:/x:uid=0", "unknown mount flag `uid=0`"),
        ("MOUNTS", "tmpfs:/x:size=1G,uid=0", "the source must be /PATH"),
        ("MOUNTS", "/a:/b:size=1G", "unknown mount flag `size=1G`"),
        ("MOUNTS", "umount:/x:ro", "unknown mount flag `ro`"),
        ("MOUNTS", "/a:/b:ro:more", "more than two colons"),
        ("MOUNTS", "/a:/b:wild", "unknown mount flag `wild`"),
        ("MOUNTS", ",".join(["/a"] * 65), "more than 64"),
        ("ENV", "A=1", "not a valid name of an environment variable"),
        ("ENV", "A,,B", "not a valid name of an environment variable"),
        ("ENV", ",".join(["A"] * 129), "more than 128"),
        ("NAME", "", "1 to 64"),
        ("NAME", "x" * 65, "1 to 64"),
        ("NAME", "../up", "letters, digits"),
        ("NAME", "mine:later", "auto, create, exec or no_exec"),
        ("WORKDIR", "", "empty"),
        ("SAVE", "", "empty"),
        ("UNSHARE", "", "argument required"),
        ("UNSHARE", "net,", "empty namespace argument"),
        ("UNSHARE", "foo", "unknown namespace 'foo': use net, ipc or uts"),
        ("UNSHARE", "net,pid", "unknown namespace 'pid'"),
        ("UNSHARE", "NET", "unknown namespace 'NET'"),
        ("AUTO_RESUME", "yes", "0 or 1"),
    ],
)
def test_invalid_values_are_refused_with_the_reason(refusal: Check, option: str, value: str, why: str):
    assert why in refusal(option, value)


def test_error_for_a_long_value_fits_its_buffer(refusal: Check):
    assert 0 < len(refusal("MOUNTS", "x" * 100_000)) < WHY_LENGTH


@pytest.mark.parametrize(
    ("rc", "folder"),
    [
        (b'mkdir -p "/w"\ncd "/w" && unset OLDPWD || exit 1\n', b"/w"),
        (b'cd "/a \\$b \\"c\\"" && x\n', b'/a $b "c"'),
        (b"cd /plain && x", b"/plain"),
        (b"cd relative", None),
        (b"exec sh", None),
    ],
)
def test_workdir_is_parsed_from_the_rc_of_an_image(library: ctypes.CDLL, rc: bytes, folder: bytes | None):
    assert library.parse_rc_workdir(ctypes.create_string_buffer(rc)) == folder


def test_option_parser_survives_random_values(tmp_path: Path):
    """Set DALSEGNO_FUZZ_S=600 for a long run."""
    program = compiled(tmp_path / "fuzz", *SANITIZED, "-O0", "-fsanitize=address,undefined", "fuzz.c", "options.c")
    seed = os.getpid() if "DALSEGNO_FUZZ_S" in os.environ else 1
    done = subprocess.run([program, str(FUZZ_S), str(seed)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert int(done.stdout) >= 1000


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed (apt: clang libclang-rt-14-dev)")
def test_option_parser_survives_libfuzzer(tmp_path: Path):
    """Set DALSEGNO_FUZZ_S=600 for a long run."""
    words = [*SANITIZED, "-O1", "-fsanitize=fuzzer,address,undefined", "-DWITHOUT_MAIN", "fuzz.c", "options.c"]
    made = subprocess.run(
        ["clang", *FLAGS, *words, "-o", tmp_path / "fuzz"],
        cwd=source_folder(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "libclang_rt.fuzzer" in made.stderr:
        pytest.skip("clang's fuzzer is not installed (apt: libclang-rt-14-dev)")
    assert made.returncode == 0, made.stderr
    (tmp_path / "corpus").mkdir()
    for number, seed in enumerate(SEEDS):
        (tmp_path / f"corpus/{number}").write_text(seed)
    limits = [f"-max_total_time={FUZZ_S}", "-max_len=6000", "-timeout=60"]
    done = subprocess.run(
        [tmp_path / "fuzz", *limits, "corpus"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list((tmp_path / "corpus").iterdir())) > len(SEEDS), (
        "no new input was found: is the fuzzer guided by coverage?"
    )


# Compiling


def test_slurm_version_is_parsed_from_its_header():
    assert header_version("#define SLURM_VERSION_NUMBER 0x160508\n") == "22.5.8"


def test_missing_headers_are_named_with_their_package(tmp_path: Path):
    with pytest.raises(DalsegnoError, match="libslurm-dev") as caught:
        check("slurm-wlm 22.05.8", tmp_path / "slurm_version.h")
    assert "./dalsegno setup" in caught.value.hint


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("start.c:85:9: error: unknown type name 'hostlist_t'; did you mean 'hostlist_t *'?", "report it"),
        ("spank.c:9:10: fatal error: slurm/spank.h: No such file or directory", "apt-get install"),
    ],
)
def test_compile_error_shows_command_and_lines_and_hints_at_packages_only_for_headers(
    tmp_path: Path, message: str, hint: str
):
    (tmp_path / "slurm_version.h").write_text("#define SLURM_VERSION_NUMBER 0x1a0505\n")
    lines = ["In file included from start.c:3:", *["note"] * 20, message, "   85 |         hostlist_t list = x;"]
    failing = FakeRunner(lambda argv, stdin: Completed(argv, 1, stderr="\n".join(lines)))
    with pytest.raises(DalsegnoError) as caught:
        build_native(failing, tmp_path / "cache", "slurm-wlm 26.05.5", tmp_path / "slurm_version.h")
    assert "does not compile with Slurm 26.05.5" in caught.value.what and "gcc -std=gnu11" in caught.value.what
    assert caught.value.what.endswith(f":\n  {message}\n{'  ' + lines[-1]}") and hint in caught.value.hint
    assert list((tmp_path / "cache/native").iterdir()) == []


def test_compile_time_limit_grows_with_the_slowness_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits: list[float | None] = []

    class Recording(LocalRunner):
        def run(self, argv: Sequence[str], *, timeout_s: float | None = None, **more: Any) -> Completed:
            limits.append(timeout_s)
            Path(argv[-1]).touch()
            return Completed(tuple(argv), 0)

    monkeypatch.setattr("dalsegno.containers.native.slowness", lambda: 4.0)
    build_native(Recording(), tmp_path / "cache", f"slurm-wlm {header_version(HEADER.read_text())}")
    assert limits == [4 * COMPILE_S] * len(PARTS)


def test_missing_packages_are_named_and_compiler_packages_only_before_the_build():
    tools = {"no-such-compiler": "gcc", "/no/such/header.h": "libslurm-dev", "sh": "dash", "/etc": "base-files"}
    assert missing_packages(tools=tools) == ["gcc", "libslurm-dev"]
    assert missing_packages(built=True, tools={**tools, "no-sqfstar": "squashfs-tools"}) == ["squashfs-tools"]


@pytest.mark.cluster  # the test compiles code, which is too slow for the unit part
def test_machine_without_a_plugin_reports_why_it_has_no_containers(tmp_path: Path):
    version = f"slurm-wlm {header_version(HEADER.read_text())}"
    failing = FakeRunner(lambda argv, stdin: Completed(argv, 1, stderr="start.c:1:1: error: no such thing"))
    assert "contains a space" in prepare_native(failing, tmp_path, version, "/a b/c")
    assert "start.c:1:1: error: no such thing" in prepare_native(failing, tmp_path, version, "/c")
    assert "headers are version" in prepare_native(failing, tmp_path, "slurm-wlm 1.02.3", "/c")
    assert prepare_native(LocalRunner(), tmp_path, version, "/c") == ""
    assert prepare_native(failing, tmp_path, version, "/c") == "", "it is compiled once per version"


def test_headers_of_another_slurm_version_are_refused(tmp_path: Path):
    (tmp_path / "slurm_version.h").write_text("#define SLURM_VERSION_NUMBER 0x180b05\n")
    with pytest.raises(DalsegnoError, match=r"headers are version 24\.11\.5, but Slurm itself is 22\.05\.8"):
        check("slurm-wlm 22.05.8", tmp_path / "slurm_version.h")

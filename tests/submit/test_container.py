"""srun options of a run in a container."""

from __future__ import annotations

import subprocess

import pytest

from dalsegno.errors import UsageError
from dalsegno.runs.submit.container import (
    check_container,
    check_mounts,
    container_options,
    launcher_inside,
    takes_containers,
    wrap_guard,
)
from dalsegno.runs.submit.request import RunRequest
from tests.waiting import PATIENCE_S

LAUNCHER = ("/usr/bin/python3.12", "-I", "/opt/lib/dalsegno/programs.py")


def request(**fields: object) -> RunRequest:
    return RunRequest(**{"script": "train.py", "chdir": "/home/ada/work", "container_image": "/fsx/a.sqsh", **fields})  # type: ignore[arg-type]


def test_run_folders_are_mounted_in_place_and_the_package_read_only():
    assert container_options(request(container_mounts=("/fsx:/data:ro",)), "/runs/train-abc", LAUNCHER) == [
        "--container-image=/fsx/a.sqsh",
        "--container-mounts=/home/ada/work:/home/ada/work,/runs/train-abc:/runs/train-abc,"
        "/opt/lib/dalsegno:/opt/lib/dalsegno:ro,/opt/lib/dalsegno:/.dalsegno/dalsegno:ro,/fsx:/data:ro",
        "--container-workdir=/home/ada/work",
    ]


def test_nested_folders_are_mounted_once():
    (_, mounts, _) = container_options(request(), "/home/ada/work/runs/train-abc", ("dalsegno",))
    assert mounts == "--container-mounts=/home/ada/work:/home/ada/work"


def test_folder_of_a_script_elsewhere_is_mounted():
    (_, mounts, _) = container_options(request(script="/shared/tools/train.py"), "/home/ada/work/runs/x", ("dalsegno",))
    assert mounts == "--container-mounts=/home/ada/work:/home/ada/work,/shared/tools:/shared/tools"


def test_relative_image_path_is_made_absolute():
    (image, *_) = container_options(request(container_image="../a.sqsh"), "/runs/x", LAUNCHER)
    assert image == "--container-image=/home/ada/a.sqsh"
    (image, *_) = container_options(request(container_image="nvcr.io#nvidia/pytorch:24.01-py3"), "/runs/x", LAUNCHER)
    assert image == "--container-image=nvcr.io#nvidia/pytorch:24.01-py3"


def test_our_programs_use_the_python_of_the_image():
    """The path exists only in the container, so a program fails if srun starts it on the bare node without an error."""
    assert launcher_inside(request(), LAUNCHER) == ("python3", "-I", "/.dalsegno/dalsegno/programs.py")
    assert launcher_inside(request(container_image=""), LAUNCHER) == LAUNCHER


def test_program_starts_in_its_container_or_not_at_all():
    words = wrap_guard(request(), LAUNCHER, ["echo", "$HOME", "a b"])
    done = subprocess.run(
        words, env={"SLURMD_NODENAME": "n1"}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "n1: the container did not start; run `dalsegno containers check` for the reason\n"
    there = [word.replace("/.dalsegno/dalsegno", "/") for word in words]
    assert subprocess.run(there, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout == "$HOME a b\n"
    assert wrap_guard(request(container_image=""), LAUNCHER, ["echo"]) == ["echo"]


def test_no_container_options_without_an_image():
    assert container_options(request(container_image=""), "/runs/x", LAUNCHER) == []


@pytest.mark.parametrize("text", ["/fsx", "/fsx:/data", "./here:/there:ro", "/a:/b,/c:/d:ro"])
def test_mounts_of_pyxis_are_accepted(text: str):
    assert check_mounts(text) == tuple(text.split(","))


@pytest.mark.parametrize("text", ["", "fsx:/data", "/a:b", "/a:/b:ro:x", "/a,,/b", "./here"])
def test_invalid_mount_is_refused(text: str):
    with pytest.raises(UsageError, match="invalid mount"):
        check_mounts(text)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"container_image": "", "container_mounts": ("/a:/a",)}, "mounts need a container"),
        ({"container_image": "a.sqsh"}, "invalid image name"),
        ({"chdir": "/home/a:b"}, "cannot be mounted"),
    ],
)
def test_impossible_container_options_are_refused(fields: dict[str, object], why: str):
    with pytest.raises(UsageError, match=why):
        check_container(request(**fields), "/runs/x")


def test_missing_container_support_names_the_fix():
    with pytest.raises(UsageError, match="has no --container-image option") as caught:
        check_container(request(), "/runs/x", takes_containers=False)
    assert "`dalsegno plan` shows what is missing" in caught.value.hint
    assert takes_containers("  --container-image=IMAGE  the image") and not takes_containers("  --container=PATH")


def test_image_excludes_venv_and_conda():
    with pytest.raises(UsageError, match="uses the image's Python"):
        request(venv="/home/ada/venv")

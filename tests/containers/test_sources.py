"""Imports from layouts and archives, compared with what umoci unpacks."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.containers import parse_name
from dalsegno.containers.import_image import Importer
from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.store import ImageStore
from dalsegno.errors import NotThere, UsageError
from tests.containers.images import CONFIG, LOWER, UPPER, Layout, member, tree, unpack

pytestmark = pytest.mark.cluster  # real programs: sqfstar, umoci, skopeo
ROOT = Path(__file__).parents[2]
TWO = [(LOWER, "gzip"), (UPPER, "zstd")]
ADDED = {"etc/rc", "etc/rc.local", "etc/environment", "etc/fstab", "work dir"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can unpack files of other owners")


def importer(folder: Path, **rest: object) -> Importer:
    return Importer(ImageStore(folder), arch=str(rest.pop("arch", "amd64")), **rest)  # type: ignore[arg-type]


def imported(name: str, folder: Path, **rest: object) -> Path:
    return importer(folder, **rest).to_store(parse_name(name)).path


@as_root
def test_image_equals_what_umoci_unpacks_except_set_id_bits_and_devices(tmp_path: Path):
    layout = Layout(tmp_path / "oci")
    layout.image("two", [(LOWER, "gzip"), (UPPER, "gzip")])
    subprocess.run(["umoci", "unpack", "--image", "oci:two", "bundle"], cwd=tmp_path, check=True, capture_output=True)
    expected = tree(tmp_path / "bundle/rootfs")
    found = tree(unpack(imported(f"oci:{tmp_path}/oci:two", tmp_path / "store"), tmp_path / "out"))
    assert expected.pop("dev/null")[0] == "crw-r--r--"
    assert expected["usr/bin/su"][0] == "-rwsr-xr-x" and found["usr/bin/su"][0] == "-rwxr-xr-x"
    assert set(found) >= ADDED
    ours = {name: each for name, each in found.items() if name not in ADDED and name != "usr/bin/su"}
    assert ours == {name: each for name, each in expected.items() if name != "usr/bin/su"}
    layout.image("zstd", TWO)  # umoci cannot read such layers
    assert tree(unpack(imported(f"oci:{tmp_path}/oci:zstd", tmp_path / "store"), tmp_path / "other")) == found


def test_image_settings_are_written_in_enroots_format(tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [([member("f")], "gzip")])
    root = unpack(imported(f"oci:{tmp_path}/oci:x", tmp_path / "store"), tmp_path / "out")
    assert (root / "etc/environment").read_text() == "".join(f"{each}\n" for each in CONFIG["Env"])
    assert stat.S_IMODE((root / "work dir").stat().st_mode) == stat.S_IMODE(root.stat().st_mode) == 0o755
    rc = (root / "etc/rc").read_text().replace("/work dir", str(root / "work dir")).replace("/etc/rc.local", "/nowhere")
    output = subprocess.run(["sh", "-c", rc, "rc"], capture_output=True, text=True, check=True).stdout
    given = subprocess.run(["sh", "-c", rc, "rc", "pwd"], capture_output=True, text=True, check=True).stdout
    assert (output, given) == ("sh\n", f"{root}/work dir\n")


def test_docker_archive_gives_the_same_image_compressed_or_not(tmp_path: Path):
    Layout(tmp_path / "oci").image("two", [(LOWER, "gzip"), (UPPER, "gzip"), ([], "gzip"), ([], "gzip")])
    archive = tmp_path / "saved.tar"
    copy = [
        "skopeo",
        "--insecure-policy",
        "copy",
        "-q",
        f"oci:{tmp_path}/oci:two",
        f"docker-archive:{archive}:me/app:1",
    ]
    subprocess.run(copy, check=True, capture_output=True)
    straight = tree(unpack(imported(f"oci:{tmp_path}/oci:two", tmp_path / "a"), tmp_path / "out-a"))
    named = imported(f"docker-archive:{archive}:me/app:1", tmp_path / "b")
    assert tree(unpack(named, tmp_path / "out-b")) == straight
    subprocess.run(["gzip", "-1", archive], check=True)
    assert tree(unpack(imported(f"docker-archive:{archive}.gz", tmp_path / "c"), tmp_path / "out-c")) == straight
    with pytest.raises(NotThere) as caught:
        imported(f"docker-archive:{archive}.gz:me/app:2", tmp_path / "c")
    assert "me/app:1" in caught.value.hint
    assert list((tmp_path / "c/blobs").iterdir()) == []


def test_docker_saves_the_image_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for `docker` writes a real archive."""
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    copy = [
        "skopeo",
        "--insecure-policy",
        "copy",
        "-q",
        f"oci:{tmp_path}/oci:x",
        f"docker-archive:{tmp_path}/d.tar:app:1",
    ]
    subprocess.run(copy, check=True, capture_output=True)
    (tmp_path / "docker").write_text(f'#!/bin/sh\n[ "$1 $2 $4" = "save --output app:1" ] && cp {tmp_path}/d.tar "$3"\n')
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "over" in tree(unpack(imported("dockerd://app:1", tmp_path / "s"), tmp_path / "out"))


@pytest.mark.parametrize("how", ["", "gzip in parts", "zstd"])
def test_layers_may_use_any_compression(tmp_path: Path, how: str):
    Layout(tmp_path / "oci").image("x", [(UPPER, how)])
    root = unpack(imported(f"oci:{tmp_path}/oci:x", tmp_path / "store"), tmp_path / "out")
    assert (root / "big").read_bytes() == dict((i.name, c) for i, c in UPPER)["big"]


def test_image_of_an_index_is_chosen_by_architecture(tmp_path: Path):
    images = {arch: [([member("arch", arch.encode())], "gzip")] for arch in ("amd64", "arm64")}
    Layout(tmp_path / "oci").index("many", images)  # type: ignore[arg-type]
    name = f"oci:{tmp_path}/oci:many"
    arm = unpack(imported(name, tmp_path / "s", arch="arm64"), tmp_path / "out")
    assert (arm / "arch").read_text() == "arm64"
    assert imported(name, tmp_path / "s") != imported(name, tmp_path / "s", arch="arm64")
    with pytest.raises(NotThere) as caught:
        imported(name, tmp_path / "s", arch="s390x")
    assert "amd64, arm64" in caught.value.hint


def test_architecture_in_an_index_overrides_the_images_own(tmp_path: Path):
    """Only the index is changed. The configuration of the image still names amd64."""
    Layout(tmp_path / "oci").image("x", [(LOWER, "gzip")])
    name, index = f"oci:{tmp_path}/oci:x", tmp_path / "oci/index.json"
    with pytest.raises(NotThere) as caught:
        imported(name, tmp_path / "s", arch="arm64")
    assert caught.value.hint == "it is for amd64; use `--arch amd64`"
    index.write_text(index.read_text().replace('"amd64"', '"arm64"'))
    assert imported(name, tmp_path / "s", arch="arm64").is_file()


def test_damaged_layer_leaves_no_files(tmp_path: Path):
    layout = Layout(tmp_path / "oci")
    layout.image("x", [(UPPER, "gzip")])
    largest = max((layout.path / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(DamagedImage):
        imported(f"oci:{layout.path}:x", tmp_path / "store")
    with pytest.raises(DamagedImage):
        importer(tmp_path / "store").to_file(parse_name(f"oci:{layout.path}:x"), tmp_path / "x.sqsh")
    assert not (tmp_path / "x.sqsh").exists()
    assert [path.name for path in (tmp_path / "store/images").iterdir()] == []


def test_existing_file_is_overwritten_only_with_force(tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [(UPPER, "gzip")])
    name, target = parse_name(f"oci:{tmp_path}/oci:x"), tmp_path / "x.sqsh"
    importer(tmp_path / "store").to_file(name, target)
    with pytest.raises(UsageError, match="already exists"):
        importer(tmp_path / "store").to_file(name, target)
    kept = importer(tmp_path / "store").to_store(name)
    importer(tmp_path / "store").to_file(name, target, force=True)
    assert target.read_bytes() == kept.path.read_bytes() and target.stat().st_ino != kept.path.stat().st_ino
    assert kept.record.workdir == "/work dir" and kept.record.size == target.stat().st_size


def test_wrong_tag_of_a_layout_gets_a_suggestion(tmp_path: Path):
    layout = Layout(tmp_path / "oci")
    layout.image("training", [([member("f")], "gzip")])
    layout.image("serving", [([member("g")], "gzip")])
    with pytest.raises(NotThere) as caught:
        imported(f"oci:{layout.path}:trainnig", tmp_path / "s")
    assert caught.value.hint == "did you mean `training`?"
    with pytest.raises(UsageError, match="2 images"):
        imported(f"oci:{layout.path}", tmp_path / "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root")
def test_full_disk_is_an_error_that_leaves_no_files(tmp_path: Path):
    Layout(tmp_path / "oci").image("x", [([member("big", os.urandom(6 << 20))], "")])
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "small", tmp_path / "small"], check=True)
    try:
        with pytest.raises(Exception, match="no space left") as caught:
            imported(f"oci:{tmp_path}/oci:x", tmp_path / "small/store")
        assert caught.value.hint  # type: ignore[attr-defined]
        assert list((tmp_path / "small/store/images").iterdir()) == []
        assert os.statvfs(tmp_path / "small").f_bavail * 4096 > 2_900_000
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)


def test_layout_with_a_malformed_index_is_damaged(tmp_path: Path):
    layout = Layout(tmp_path / "oci")
    (layout.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": "none"}))
    with pytest.raises(DamagedImage):
        imported(f"oci:{layout.path}:x", tmp_path / "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_unprivileged_user_builds_the_same_image(tmp_path: Path):
    Layout(tmp_path / "oci").image("two", TWO)
    by_root = imported(f"oci:{tmp_path}/oci:two", tmp_path / "store")
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    code = (
        f"import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.path[:0] = {sys.path!r}\n"
        "from tests.containers.test_sources import imported; from pathlib import Path\n"
        f"print(imported('oci:{tmp_path}/oci:two', Path('{tmp_path}/theirs/store')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    by_user = Path(done.stdout.strip())
    assert tree(unpack(by_user, tmp_path / "a")) == tree(unpack(by_root, tmp_path / "b"))
    assert by_user.stat().st_uid == 65534
    root = subprocess.run(["unsquashfs", "-lln", by_user], capture_output=True, text=True, check=True).stdout
    assert root.split()[:2] == ["drwxr-xr-x", "0/0"]

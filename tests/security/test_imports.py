"""Attacks on imports by root: files that another user left in the store are neither followed nor trusted."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.containers import parse_name
from dalsegno.containers.build import check_trusted, inspect_python, make_folder_layer
from dalsegno.containers.image_metadata import inspect_image
from dalsegno.containers.import_image import Importer, import_by_enroot
from dalsegno.containers.layers import ImageLimits, scan
from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.store import ImageStore, NoProgress, open_store
from dalsegno.containers.tar import FileSlice
from dalsegno.errors import DalsegnoError
from dalsegno.image_name import ImageName
from dalsegno.system.files import in_turn
from dalsegno.system.processes import Completed, FakeRunner, LocalRunner
from tests.containers.images import Layout, member, unpack
from tests.security.test_registry import Headers, server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the victim is root")
MALLORY = 12345


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder open to all users, with a folder `fsx` that everyone can write to, like /tmp, and a file of root."""
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-security-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "fsx").mkdir()
        (folder / "fsx").chmod(0o1777)
        (folder / "victim").mkdir()
        (folder / "victim/file").write_text("precious")
        yield folder
    finally:
        shutil.rmtree(folder)


def as_mallory(script: str, folder: Path) -> None:
    argv = ["sh", "-ec", script]
    subprocess.run(argv, cwd=folder, user=MALLORY, group=MALLORY, extra_groups=[], check=True)


def layout(folder: Path) -> str:
    Layout(folder / "oci").image("v1", [([member("program", b"good" * 500)], "gzip")])
    return f"oci:{folder}/oci:v1"


def importer(folder: Path) -> Importer:
    return Importer(ImageStore(folder), arch="amd64", env={"PATH": os.environ["PATH"], "HOME": "/nowhere"})


def small_image() -> tuple[bytes, bytes, bytes]:
    """Return manifest, configuration and layer of an image whose configuration has no digests."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info, content = member("program", b"good")
        archive.addfile(info, io.BytesIO(content))
    layer, config = gzip.compress(stream.getvalue()), b'{"architecture": "amd64"}'

    def about(data: bytes) -> dict[str, object]:
        return {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}

    return json.dumps({"schemaVersion": 2, "config": about(config), "layers": [about(layer)]}).encode(), config, layer


@pytest.mark.parametrize("name", ["blobs", "images", "tags", "locks", "files"])
def test_folder_that_another_user_made_is_refused(place: Path, name: str):
    image = parse_name(layout(place))
    as_mallory(f"mkdir {name}", place / "fsx")
    with pytest.raises(DalsegnoError, match=rf"{name} belongs to another user \(uid {MALLORY}\)") as caught:
        importer(place / "fsx").to_store(image)
    assert "containers.folder" in caught.value.hint
    as_mallory(f"rmdir {name}", place / "fsx")
    assert importer(place / "fsx").to_store(image).path.exists()


def test_link_in_place_of_a_download_is_not_followed(place: Path):
    """Root would truncate the link's target and write the layer there."""
    manifest, config, layer = small_image()
    parts = [f"blobs/{hashlib.sha256(data).hexdigest()}.part" for data in (config, layer)]
    links = "; ".join(f"ln -s {place}/victim/file {part}" for part in parts)
    as_mallory(f"mkdir blobs; {links}", place / "fsx")

    def answer(path: str, authorization: str) -> tuple[int, Headers, bytes]:
        blobs = {hashlib.sha256(data).hexdigest(): data for data in (config, layer)}
        return 200, {}, manifest if "/manifests/" in path else blobs[path.rpartition(":")[2]]

    with server(answer) as registry:
        name = parse_name(f"{registry.address}#app:v1")
        with pytest.raises(DalsegnoError):
            importer(place / "fsx").to_store(name)
        assert (place / "victim/file").read_text() == "precious"
        (place / "own").mkdir()  # partial downloads of root are resumed, but never through a link
        with ImageStore(place / "own").in_use():
            (place / "own" / parts[1]).symlink_to(place / "victim/file")
        assert importer(place / "own").to_store(name).path.exists()
    assert (place / "victim/file").read_text() == "precious"


def test_link_in_place_of_a_folder_does_not_make_root_remove_files(place: Path):
    as_mallory(f"ln -s {place}/victim files; ln -s {place}/victim tags", place / "fsx")
    with pytest.raises(DalsegnoError, match=r"symbolic link|belongs to another|no permission"):
        ImageStore(place / "fsx").sweep()  # with fs.protected_symlinks=1, the kernel refuses the link first
    assert (place / "victim/file").exists()


def test_link_in_place_of_a_lock_creates_no_file(place: Path):
    as_mallory(f"mkdir mine; ln -s {place}/victim/made mine/lock", place / "fsx")
    with pytest.raises(OSError, match="symbolic"), in_turn(place / "fsx/mine/lock"):
        pass
    assert not (place / "victim/made").exists()


def test_root_stores_no_images_below_a_folder_of_another_user(place: Path):
    as_mallory("mkdir mine; chmod 755 mine; mkdir mine/of-0; ln -s mine link", place / "fsx")
    for wanted in (place / "fsx/mine", place / "fsx/link/images"):
        refused = pytest.raises(DalsegnoError, match=r"other users can change|no permission")
        with refused, open_store(wanted, wanted).in_use():
            pass
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    with pytest.raises(DalsegnoError, match="other users can change"), ImageStore(place / "open/images").in_use():
        pass


def test_images_of_another_user_in_roots_store_are_ignored(place: Path):
    kept = importer(place / "fsx").to_store(parse_name(layout(place)))
    os.chown(kept.path, MALLORY, MALLORY)
    assert ImageStore(place / "fsx").get(kept.record.digest, "lz4") is None
    os.chown(kept.path, 0, 0)
    kept.path.chmod(0o666)
    assert ImageStore(place / "fsx").get(kept.record.digest, "lz4") is None
    kept.path.chmod(0o644)
    assert ImageStore(place / "mine", place / "fsx").shared
    os.chown(place / "fsx/tags", MALLORY, MALLORY)  # the owner of this folder decides which image a name refers to
    assert ImageStore(place / "mine", place / "fsx").shared is None


def test_stored_layer_is_compared_with_its_digest(place: Path):
    manifest, config, layer = small_image()
    store = ImageStore(place / "own")
    planted = gzip.compress(gzip.decompress(layer).replace(b"good", b"evil"))
    with store.in_use():
        blob = store.blob(f"sha256:{hashlib.sha256(layer).hexdigest()}")
        blob.write_bytes(planted)

    def answer(path: str, authorization: str) -> tuple[int, Headers, bytes]:
        return 200, {}, manifest if "/manifests/" in path else config

    with server(answer) as registry, pytest.raises(DamagedImage, match="does not match its digest"):
        importer(place / "own").to_store(parse_name(f"{registry.address}#app:v1"))
    assert store.all() == []


class Meanwhile(NoProgress):
    """Changes a layer between its check and its packing."""

    def __init__(self, layer: Path) -> None:
        self._layer = layer

    def stage(self, text: str, total: int = 0, here: int = 0) -> None:
        if text == "packing":
            plain = gzip.decompress(self._layer.read_bytes())
            self._layer.write_bytes(gzip.compress(plain.replace(b"good", b"evil")))


def test_layer_changed_after_its_check_makes_no_image(place: Path):
    """Otherwise the store would have the bad image under the digest of the good one."""
    name = layout(place)
    layer = max((place / "oci/blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    good = importer(place / "other").to_store(parse_name(name))
    assert (unpack(good.path, place / "out") / "program").read_bytes().startswith(b"good")
    store = ImageStore(place / "own")
    with pytest.raises(DamagedImage, match="changed while it was read"):
        Importer(store, Meanwhile(layer), arch="amd64").to_store(parse_name(name))
    assert store.all() == [] and store.get(good.record.digest, "lz4") is None


def test_link_in_place_of_enroots_folder_is_not_followed(place: Path):
    as_mallory(f"mkdir mine; ln -s {place}/victim mine/.x.sqsh.enroot", place / "fsx")
    asked: list[tuple[str, ...]] = []

    def enroot(argv: tuple[str, ...], stdin: str | None) -> Completed:
        asked.append(argv)
        return Completed(argv, 0)

    name: ImageName = parse_name("ubuntu")
    with pytest.raises(DalsegnoError):
        import_by_enroot("enroot", name, "amd64", place / "fsx/mine/x.sqsh", FakeRunner(enroot))
    assert asked == [] and (place / "victim/file").read_text() == "precious"


def test_decompression_bomb_is_refused(tmp_path: Path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number in range(2000):
            archive.addfile(member(f"file{number}")[0])
        info, content = member("zeros", bytes(8 << 20))
        archive.addfile(info, io.BytesIO(content))
    (tmp_path / "layer").write_bytes(gzip.compress(stream.getvalue()))
    blob, stop = FileSlice(tmp_path / "layer"), threading.Event()
    assert len(scan(blob, "", stop, ImageLimits()).entries) == 2001
    with pytest.raises(DamagedImage, match="more files than fit"):
        scan(blob, "", stop, ImageLimits(headers=1 << 19))
    with pytest.raises(DamagedImage, match="unpacks to more"):
        scan(blob, "", stop, ImageLimits(unpacked=4 << 20))


# Images that root builds


def test_file_that_becomes_a_link_is_not_read_by_root(place: Path):
    """The swap happens after the folder was listed: the image, which all can read, would contain a file of root."""
    as_mallory("mkdir -p tree/d; echo mine > tree/d/file; echo mine > tree/plain", place / "fsx")
    for swap in (
        f"rm -r d; ln -s {place}/victim d",
        f"rm plain; ln -s {place}/victim/file plain",
        "rm plain; mkfifo plain",
    ):
        layer = make_folder_layer(place / "fsx/tree")
        as_mallory(swap, place / "fsx/tree")
        with pytest.raises(DalsegnoError):
            list(layer.chunks())
        as_mallory("rm -rf d plain; mkdir d; echo mine > d/file; echo mine > plain", place / "fsx/tree")
    assert b"precious" not in b"".join(make_folder_layer(place / "fsx/tree").chunks())


def test_python_of_another_user_is_not_run_by_root(place: Path):
    as_mallory(
        "mkdir -p venv/bin; printf '#!/bin/sh\\ntouch ran\\n' > venv/bin/python; chmod +x venv/bin/python",
        place / "fsx",
    )
    with pytest.raises(DalsegnoError, match="root does not run programs") as caught:
        inspect_python(place / "fsx/venv", LocalRunner())
    assert "sudo -u USER" in caught.value.hint
    with pytest.raises(DalsegnoError, match="root does not run programs"):
        check_trusted(place / "fsx/venv")


def test_settings_in_an_image_have_a_size_limit(tmp_path: Path):
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/rc").write_bytes(bytes(8 << 20))
    subprocess.run(["mksquashfs", tmp_path / "root", tmp_path / "x.sqsh", "-quiet"], check=True, capture_output=True)
    with pytest.raises(DamagedImage, match="longer than 1 MiB"):
        inspect_image(tmp_path / "x.sqsh", LocalRunner())

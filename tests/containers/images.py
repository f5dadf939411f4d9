"""Real images for tests: layers compressed as tools do, in an OCI layout."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

Member = tuple[tarfile.TarInfo, bytes]
CONFIG = {"Env": ["PATH=/usr/bin:/bin", "GREETING=hi there"], "WorkingDir": "/work dir", "Cmd": ["sh", "-c", "echo $0"]}


def member(path: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", **rest: int) -> Member:
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.size = kind, link, len(content)
    info.mode = rest.get("mode", 0o755 if kind == tarfile.DIRTYPE else 0o644)
    info.uid, info.gid, info.mtime = rest.get("uid", 0), rest.get("gid", 0), rest.get("mtime", 1_600_000_000)
    if kind == tarfile.CHRTYPE:
        info.devmajor, info.devminor = 1, 3
    return info, content


def folder(path: str, mode: int = 0o755) -> Member:
    return member(path, kind=tarfile.DIRTYPE, mode=mode)


def link(path: str, to: str) -> Member:
    return member(path, kind=tarfile.LNKTYPE, link=to)


def symlink(path: str, to: str) -> Member:
    return member(path, kind=tarfile.SYMTYPE, link=to, mode=0o777)


LONG = "long/" + "/".join(["folder-with-a-long-name"] * 12) + "/file"
LOWER = [
    folder("etc"), member("etc/passwd", b"root:x:0:0\n"), folder("usr"), folder("usr/lib"), folder("usr/bin"),
    member("usr/lib/a", b"a" * 5000), link("usr/lib/b", "usr/lib/a"), link("usr/lib/c", "usr/lib/a"),
    symlink("lib", "usr/lib"), member("usr/bin/su", b"#!", mode=0o4755), folder("dev"),
    member("dev/null", kind=tarfile.CHRTYPE), folder("opaque"), member("opaque/x", b"x"), folder("opaque/y"),
    member("opaque/y/z", b"z"), folder("gone"), member("gone/x", b"x"), member("gone.txt", b"x"),
    member("over", b"old"),
    folder("to-file"), member("to-file/x", b"x"), member("to-folder", b"x"), member("owned", b"x", uid=1000, gid=1001),
    folder("long"), member(LONG, b"far down"), member("h\u00e9llo w\u00f6rld", b"\xff" * 700),
    folder("tmp", 0o1777), member("empty"), symlink("up", "../../etc"),
]  # fmt: skip
UPPER = [
    folder("etc", 0o700), member(".wh.gone"), member(".wh.gone.txt"), folder("opaque", 0o711),
    member("opaque/.wh..wh..opq"), member("opaque/new", b"new"), member("over", b"newer"), member("to-file", b"y"),
    folder("to-folder"), member("to-folder/x", b"x"), member("usr/lib/a", b"A" * 3000), member("usr/lib/.wh.c"),
    member("big", os.urandom(1 << 20) + bytes(1 << 20)),
]  # fmt: skip


def packed(members: Iterable[Member], how: str) -> tuple[bytes, bytes]:
    """Return a layer as a plain tar, and compressed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    plain = buffer.getvalue()
    if how == "zstd":
        return plain, subprocess.run(["zstd", "-qc"], input=plain, capture_output=True, check=True).stdout
    if how == "gzip in parts":
        return plain, gzip.compress(plain[: len(plain) // 2], mtime=0) + gzip.compress(
            plain[len(plain) // 2 :], mtime=0
        )
    return plain, gzip.compress(plain, mtime=0) if how == "gzip" else plain


KIND = "application/vnd.oci.image"
MEDIA = {"gzip": "+gzip", "gzip in parts": "+gzip", "zstd": "+zstd", "": ""}
Layers = list[tuple[list[Member], str]]


class Layout:
    """A folder with OCI's layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifests: list[dict[str, object]] = []
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (self.path / "blobs/sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def manifest(self, layers: Layers, arch: str = "amd64", config: Mapping[str, object] = CONFIG) -> dict[str, object]:
        parts = [(packed(members, how), how) for members, how in layers]
        kind = "application/vnd.oci.image.layer.v1.tar"
        carried = [{"mediaType": f"{kind}{MEDIA[how]}", **self.blob(data)} for (_, data), how in parts]
        diff_ids = [f"sha256:{hashlib.sha256(plain).hexdigest()}" for (plain, _), _ in parts]
        about = {
            "architecture": arch,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        value = {
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": carried,
            "config": {"mediaType": f"{KIND}.config.v1+json", **self.blob(json.dumps(about).encode())},
        }  # fmt: skip
        found = self.blob(json.dumps(value).encode())
        platform = {"architecture": arch, "os": "linux"}
        return {"mediaType": "application/vnd.oci.image.manifest.v1+json", **found, "platform": platform}

    def image(self, tag: str, layers: Layers, **rest: object) -> str:
        """Add an image and return its digest."""
        return self._name(tag, self.manifest(layers, **rest))  # type: ignore[arg-type]

    def index(self, tag: str, images: Mapping[str, Layers]) -> str:
        """Add one name for images of several architectures, and return its digest."""
        kind = "application/vnd.oci.image.index.v1+json"
        manifests = [self.manifest(layers, arch) for arch, layers in images.items()]
        value = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": manifests}).encode()
        return self._name(tag, {"mediaType": kind, **self.blob(value)})

    def _name(self, tag: str, descriptor: dict[str, object]) -> str:
        self.manifests.append({**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}})
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))
        return str(descriptor["digest"])


def unpack(sqsh: Path, target: Path) -> Path:
    subprocess.run(["unsquashfs", "-q", "-n", "-d", target, sqsh], check=True, capture_output=True)
    return target


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Return every entry below a folder: mode, owner, content or link target, and the first of its hard links."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        about, name = path.lstat(), str(path.relative_to(root))
        content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else ""
        same = first.setdefault(about.st_ino, name) if stat.S_ISREG(about.st_mode) else ""
        found[name] = (stat.filemode(about.st_mode), about.st_uid, about.st_gid, content, same)
    return found

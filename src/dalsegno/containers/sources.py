"""Sources of images: registries, OCI layouts, archives, and the daemons of Docker and Podman."""

from __future__ import annotations

import json
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from dalsegno.containers.http import downloaded, fetch
from dalsegno.containers.manifest import (
    MAX_JSON,
    Config,
    DamagedImage,
    Descriptor,
    ImageManifest,
    Index,
    check_digest,
    choose_platform,
    digest_of,
    find_tag,
    parse_config,
    parse_manifest,
)
from dalsegno.containers.registry import Registry
from dalsegno.containers.squash import Advance
from dalsegno.containers.store import ImageStore
from dalsegno.containers.tar import FileSlice, unpacked
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.hardware.catalog import did_you_mean
from dalsegno.image_name import ImageKind, ImageName
from dalsegno.system.files import explain
from dalsegno.system.processes import Runner

_MAX_DEPTH = 4  # maximum number of nested indexes


@dataclass(frozen=True)
class FoundImage:
    """One image, for one architecture."""

    digest: str
    layers: tuple[Descriptor, ...]
    config: Config
    listed: bool = False  # whether an index lists the image for the requested architecture


class ImageSource(Protocol):
    """Finds an image and provides its layers."""

    def find(self, arch: str) -> FoundImage: ...

    def here(self, layer: Descriptor) -> int:
        """Return how many bytes of the layer an earlier call has downloaded."""
        ...

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> FileSlice:
        """Return the layer's bytes, with the digest if it must still be checked."""
        ...


class FromRegistry:
    """An image in a registry; its layers are downloaded to the store."""

    def __init__(self, name: ImageName, registry: Registry, store: ImageStore) -> None:
        self._name, self._registry, self._store = name, registry, store

    def find(self, arch: str) -> FoundImage:
        data = self._registry.manifest(self._name.reference)
        if self._name.digest:
            check_digest(data, self._name.digest, "the manifest")
        digest, manifest, listed = _resolve(data, arch, str(self._name), self._manifest)
        config = self.layer(manifest.config, lambda _: None, threading.Event()).read(MAX_JSON)
        checked = check_digest(config, manifest.config.digest, "the configuration")
        return FoundImage(digest, manifest.layers, parse_config(checked), listed)

    def here(self, layer: Descriptor) -> int:
        return downloaded(self._store.blob(layer.digest))

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> FileSlice:
        path = self._store.blob(layer.digest)
        checked = fetch(self._registry, layer, path, advance, stop)
        return FileSlice(path, digest="" if checked else layer.digest, private=True)

    def _manifest(self, wanted: Descriptor) -> bytes:
        return check_digest(self._registry.manifest(wanted.digest), wanted.digest, "the manifest")


class FromLayout:
    """An image in a folder with OCI's layout."""

    def __init__(self, name: ImageName) -> None:
        self._name, self._folder = name, Path(name.path)

    def find(self, arch: str) -> FoundImage:
        index_file = self._folder / "index.json"
        if not index_file.is_file():
            raise NotThere(
                f"{self._folder} is not an OCI layout: it has no index.json", hint="write it as `oci:FOLDER:TAG`"
            )
        index = parse_manifest(FileSlice(index_file).read(MAX_JSON))
        if not isinstance(index, Index):
            raise DamagedImage(f"{index_file} is not an index")
        # An index without tag names may list one image for several architectures.
        named = any(each.ref_name for each in index.manifests)
        top = (
            find_tag(index, self._name.tag, str(self._folder))
            if named or self._name.tag
            else choose_platform(index, arch, str(self._name))
        )
        digest, manifest, listed = _resolve(self._blob(top), arch, str(self._name), self._blob)
        return FoundImage(
            digest, manifest.layers, parse_config(self._blob(manifest.config)), listed or top.arch == arch
        )

    def here(self, layer: Descriptor) -> int:
        return 0

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> FileSlice:
        advance(layer.size)
        return FileSlice(self._path(layer), digest=layer.digest)

    def _blob(self, wanted: Descriptor) -> bytes:
        return check_digest(FileSlice(self._path(wanted)).read(MAX_JSON), wanted.digest, f"a blob of {self._folder}")

    def _path(self, wanted: Descriptor) -> Path:
        path = self._folder / "blobs" / "sha256" / wanted.hex
        if not path.is_file():
            raise DamagedImage(f"{self._folder} is incomplete: {path.name} is missing", hint="copy it again")
        return path


def _resolve(data: bytes, arch: str, what: str, get: Callable[[Descriptor], bytes]) -> tuple[str, ImageManifest, bool]:
    """Return the digest and manifest of the image for this architecture, and whether an index lists it for this
    architecture."""
    listed = False
    for _ in range(_MAX_DEPTH):
        found = parse_manifest(data)
        if isinstance(found, ImageManifest):
            return digest_of(data), found, listed
        chosen = choose_platform(found, arch, what)
        data, listed = get(chosen), listed or chosen.arch == arch
    raise DamagedImage(f"{what} has more than {_MAX_DEPTH - 1} levels of indexes")


# Archives that `docker save` and `podman save` write


_MANIFEST = "manifest.json"
_PROGRAMS = {ImageKind.DOCKERD: "docker", ImageKind.PODMAN: "podman"}
_MAX_LINKS = 8


class FromArchive:
    """An image in a tar file. Its layers are read in place; their digests are checked when they are unpacked."""

    def __init__(self, name: ImageName, scratch: Path) -> None:
        """Open the archive. `scratch` is the path for an unpacked copy of a compressed archive."""
        self._name, self._path, self._scratch = name, Path(name.path), scratch
        self._layers: dict[str, FileSlice] = {}

    def find(self, arch: str) -> FoundImage:
        if not self._path.is_file():
            raise NotThere(f"no file {self._path}", hint="write it as `docker-archive:FILE`")
        self._path = _plain(self._path, self._scratch)
        try:
            with tarfile.open(self._path, "r:") as archive:
                return self._read(archive)
        except tarfile.TarError as error:
            raise DamagedImage(
                f"{self._path} is not an image archive: {error}", hint="write one with `docker save`"
            ) from error

    def _read(self, archive: tarfile.TarFile) -> FoundImage:
        image = self._choose(_json(archive))
        config_data = _member(archive, str(image.get("Config", ""))).read(MAX_JSON)
        config = parse_config(config_data)
        layers = image.get("Layers")
        if not isinstance(layers, list) or len(layers) != len(config.diff_ids):
            raise DamagedImage(f"{self._path} and its configuration name different numbers of layers")
        found = []
        for layer, diff_id in zip(layers, config.diff_ids, strict=True):
            blob = _member(archive, str(layer))
            self._layers[diff_id] = blob
            found.append(Descriptor(diff_id, blob.size))
        return FoundImage(digest_of(config_data), tuple(found), config)

    def _choose(self, images: list[dict[str, object]]) -> dict[str, object]:
        wanted = f"{self._name.repository}:{self._name.tag}" if self._name.repository else ""
        tags: dict[str, dict[str, object]] = {}
        for image in images:
            repo_tags = image.get("RepoTags")
            for tag in repo_tags if isinstance(repo_tags, list) else []:
                tags.setdefault(str(tag), image)
        for tag, image in tags.items():
            if wanted and (tag == wanted or tag.endswith(f"/{wanted}")):
                return image
        listed = f"name one of them: {', '.join(sorted(tags)[:8])}" if tags else "none of them has a name"
        if wanted:
            raise NotThere(f"{self._path} has no image {wanted}", hint=did_you_mean(wanted, tags, listed))
        if len(images) != 1:
            raise UsageError(f"{self._path} has {len(images)} images", hint=listed)
        return images[0]

    def here(self, layer: Descriptor) -> int:
        return 0

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> FileSlice:
        advance(layer.size)
        return self._layers[layer.digest]


def saved_by_daemon(name: ImageName, runner: Runner, scratch: Path) -> ImageName:
    """Have Docker or Podman save the image to a file, and return the file's image name."""
    program = _PROGRAMS[name.kind]
    # A name without digest and tag is the id of an image that was just built.
    reference = f"{name.repository}@{name.digest}" if name.digest else f"{name.repository}:{name.tag}".rstrip(":")
    argv = [program, "save", "--output", str(scratch), reference]
    if name.kind is ImageKind.PODMAN:
        argv[2:2] = ["--format", "docker-archive"]
    try:
        done = runner.run(argv)
    except DalsegnoError as error:
        raise DalsegnoError(
            f"`{program}` is not installed", hint=f"install it: `{name.kind.value}` reads images from it"
        ) from error
    daemon_down = "daemon" in done.stderr and "connect" in done.stderr
    done.checked(
        hint="start the daemon, or get access to it" if daemon_down else f"`{program} images` lists its images"
    )
    return ImageName(ImageKind.ARCHIVE, path=str(scratch))


def _plain(path: Path, scratch: Path) -> Path:
    """Return the archive, or an unpacked copy if it is compressed, because layers are read at their offsets in the
    file.
    """
    with open(path, "rb") as file:
        if file.read(2) not in (b"\x1f\x8b", b"\x28\xb5"):
            return path
    try:
        with open(scratch, "wb") as target:
            for chunk in unpacked(FileSlice(path).raw()):
                target.write(chunk)
    except OSError as error:
        raise explain(error, scratch) from error
    return scratch


def _json(archive: tarfile.TarFile) -> list[dict[str, object]]:
    blob = _member(archive, _MANIFEST)
    try:
        value = json.loads(blob.read(MAX_JSON))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise DamagedImage(f"{archive.name!s} is not an image archive: its {_MANIFEST} cannot be read")
    return value


def _member(archive: tarfile.TarFile, name: str) -> FileSlice:
    """Return the bytes of a member. A layer that an image uses twice may be a link, which is followed."""
    for _ in range(_MAX_LINKS):
        try:
            info = archive.getmember(name)
        except KeyError:
            raise DamagedImage(
                f"{archive.name!s} is not an image archive: it has no {name}", hint="write one with `docker save`"
            ) from None
        if info.isreg():
            return FileSlice(Path(str(archive.name)), info.offset_data, info.size)
        if not (info.issym() or info.islnk()):
            break
        name = _joined(name, info.linkname) if info.issym() else info.linkname
    raise DamagedImage(f"{name} in {archive.name!s} is not a file")


def _joined(name: str, link: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / link).parts:
        if part == "..":
            del parts[-1:]
        elif part != "/":
            parts.append(part)
    return "/".join(parts)

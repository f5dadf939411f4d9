"""Where images come from: each kind finds one, and has its layers at hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dalsegno.containers.damage import DamagedImage
from dalsegno.containers.decompress import Blob
from dalsegno.containers.download import brought, fetch
from dalsegno.containers.manifest import (
    MAX_JSON,
    Config,
    Descriptor,
    Index,
    Manifest,
    check_digest,
    choose,
    digest_of,
    parse_config,
    parse_manifest,
    tagged,
)
from dalsegno.containers.registry import Registry
from dalsegno.containers.squash import Advance
from dalsegno.containers.store import Store
from dalsegno.errors import NotThere
from dalsegno.image_name import ImageName

_DEEPEST = 4  # an index in an index


@dataclass(frozen=True)
class Found:
    """One image, for one architecture."""

    digest: str
    layers: tuple[Descriptor, ...]
    config: Config
    listed: bool = False  # an index has it for the architecture that was asked for


class Source(Protocol):
    """Finds an image, and brings its layers."""

    def find(self, arch: str) -> Found: ...

    def here(self, layer: Descriptor) -> int:
        """How many of its bytes an earlier call has brought."""
        ...

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> Blob:
        """Its bytes, with the digest that is still to be checked."""
        ...


class FromRegistry:
    """An image in a registry; its layers come into the store."""

    def __init__(self, name: ImageName, registry: Registry, store: Store) -> None:
        self._name, self._registry, self._store = name, registry, store

    def find(self, arch: str) -> Found:
        data = self._registry.manifest(self._name.reference)
        if self._name.digest:
            check_digest(data, self._name.digest, "the manifest")
        digest, manifest, listed = _resolve(data, arch, str(self._name), self._manifest)
        config = self.layer(manifest.config, lambda _: None, threading.Event()).read(MAX_JSON)
        checked = check_digest(config, manifest.config.digest, "the configuration")
        return Found(digest, manifest.layers, parse_config(checked), listed)

    def here(self, layer: Descriptor) -> int:
        return brought(self._store.blob(layer.digest))

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> Blob:
        path = self._store.blob(layer.digest)
        checked = fetch(self._registry, layer, path, advance, stop)
        return Blob(path, digest="" if checked else layer.digest, private=True)

    def _manifest(self, wanted: Descriptor) -> bytes:
        return check_digest(self._registry.manifest(wanted.digest), wanted.digest, "the manifest")


class FromLayout:
    """An image in a folder in OCI's layout."""

    def __init__(self, name: ImageName) -> None:
        self._name, self._folder = name, Path(name.path)

    def find(self, arch: str) -> Found:
        index_file = self._folder / "index.json"
        if not index_file.is_file():
            raise NotThere(
                f"{self._folder} is no OCI layout: it has no index.json", hint="write it as `oci:FOLDER:TAG`"
            )
        index = parse_manifest(Blob(index_file).read(MAX_JSON))
        if not isinstance(index, Index):
            raise DamagedImage(f"{index_file} is no index")
        # A layout's list without names may be one image for several machines.
        named = any(each.ref_name for each in index.manifests)
        top = (
            tagged(index, self._name.tag, str(self._folder))
            if named or self._name.tag
            else choose(index, arch, str(self._name))
        )
        digest, manifest, listed = _resolve(self._blob(top), arch, str(self._name), self._blob)
        return Found(digest, manifest.layers, parse_config(self._blob(manifest.config)), listed or top.arch == arch)

    def here(self, layer: Descriptor) -> int:
        return 0

    def layer(self, layer: Descriptor, advance: Advance, stop: threading.Event) -> Blob:
        advance(layer.size)
        return Blob(self._path(layer), digest=layer.digest)

    def _blob(self, wanted: Descriptor) -> bytes:
        return check_digest(Blob(self._path(wanted)).read(MAX_JSON), wanted.digest, f"a blob of {self._folder}")

    def _path(self, wanted: Descriptor) -> Path:
        path = self._folder / "blobs" / "sha256" / wanted.hex
        if not path.is_file():
            raise DamagedImage(f"{self._folder} has not all of the image: {path.name} is missing", hint="copy it again")
        return path


def _resolve(data: bytes, arch: str, what: str, get: Callable[[Descriptor], bytes]) -> tuple[str, Manifest, bool]:
    """From an index, through those that are in it, to the image for this architecture; and whether they say so."""
    listed = False
    for _ in range(_DEEPEST):
        found = parse_manifest(data)
        if isinstance(found, Manifest):
            return digest_of(data), found, listed
        chosen = choose(found, arch, what)
        data, listed = get(chosen), listed or chosen.arch == arch
    raise DamagedImage(f"{what} is an index in an index in an index")

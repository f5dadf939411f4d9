"""Import an image from any source as a .sqsh file, into the store or into a file of the user's choice."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.containers import image_metadata
from dalsegno.containers.credentials import CredentialFinder
from dalsegno.containers.dockerfile import DockerfileBuild
from dalsegno.containers.http import PLAIN_HINT, Http, Unreachable
from dalsegno.containers.image_metadata import ImageRecord, with_config
from dalsegno.containers.layers import fetch_layers
from dalsegno.containers.manifest import DamagedImage, architecture, check_arch
from dalsegno.containers.merge import merge
from dalsegno.containers.registry import Registry
from dalsegno.containers.sources import FoundImage, FromArchive, FromLayout, FromRegistry, ImageSource, saved_by_daemon
from dalsegno.containers.squash import check_target, layer_chunks, squash, stream_size, tar_stream
from dalsegno.containers.store import ImageStore, ImportProgress, NoProgress, Stored
from dalsegno.containers.tar import CHUNK
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.image_name import DOCKER_HUB, ImageKind, ImageName
from dalsegno.system.files import explain, nameless, remove_tree
from dalsegno.system.processes import LocalRunner, Runner

# Import by Enroot, which is preferred where it is installed because the site has configured it


_HINT = "this import used Enroot, which is installed here; `--own` imports without it"
_NO_TLS = re.compile(r"wrong version number|SSL_connect|SSL routines|[Pp]rotocol .http. (not supported|disabled)")


def enroot_uri(name: ImageName) -> str:
    """Return an image name in Enroot's form. A name without a registry refers to Docker Hub."""
    user = f"{name.user}@" if name.user else ""
    registry = "" if name.registry == DOCKER_HUB else f"{name.registry}#"
    tag = f"@{name.digest}" if name.digest else f":{name.tag}"
    return (
        f"docker://{user}{registry}{name.repository.removeprefix('library/') if not registry else name.repository}{tag}"
    )


def import_by_enroot(enroot: str, name: ImageName, arch: str, target: Path, runner: Runner, own: bool = False) -> None:
    """Run `enroot import` in a new folder beside the target, and rename the file when it is complete."""
    aside = target.with_name(f".{target.name}.enroot")
    if aside.is_symlink():
        raise DalsegnoError(
            f"{aside} is a symbolic link, which is not followed", hint="remove it, or name another file"
        )
    remove_tree(aside)  # a call that was killed may have left this folder behind
    try:
        aside.mkdir(0o700)  # fails if another user has created a link with this name since the check above
        made = aside / "image.sqsh"
        argv = [enroot, "import", "--arch", arch, "--output", str(made), enroot_uri(name)]
        done = runner.run(argv)
        done.checked(hint=PLAIN_HINT if _NO_TLS.search(done.stderr) else _HINT)
        if own:
            made.chmod(made.stat().st_mode & ~0o022 & 0o777)
        os.replace(made, target)
    except OSError as error:
        raise explain(error, target, named=not own) from error
    finally:
        remove_tree(aside)


# Import by Dal Segno


_FICLONE = 0x40049409  # linux/fs.h: both files share their blocks until one is written to


@dataclass(frozen=True)
class Importer:
    """Imports images into the store or into files."""

    store: ImageStore
    progress: ImportProgress = field(default_factory=NoProgress)
    runner: Runner = field(default_factory=LocalRunner)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    arch: str = field(default_factory=architecture)
    compression: str = "lz4"
    plain_http: bool = False
    enroot: str = ""  # path of Enroot's program; "" imports without it
    or_kept: bool = True  # whether to use the image of an earlier import if the registry does not answer
    build: DockerfileBuild | None = None  # builds the image that a path names

    def to_store(self, name: ImageName, *, force: bool = False) -> Stored:
        """Import the image into the store, unless it is stored already, and return it.

        If several processes call this at once, one looks up the tag and imports the image, and the others wait for it.
        `force` imports the image again even if it is stored.
        """
        name = name.absolute()
        asked = 0.0 if name.digest and not force else self.store.clock()
        with self.store.in_use(), self._turn(f"{name} {self.arch} {self.compression}", str(name)):
            known = self.store.lookup(str(name), self.arch, self.compression, since=asked)
            # Another call imported it meanwhile, or the name contains the digest of a stored image. Builds of the same
            # name may have different arguments.
            if known and not self.build:
                return known
            with self._source(name) as source:
                self.progress.stage(f"looking for {name}")
                try:
                    found = source.find(self.arch)
                except Unreachable as error:
                    if force:
                        raise
                    return self._stored_before(name, error)
                self._check_arch(name, found)
                stored = self._stored(name, source, found, force)
            self.store.name(str(name), self.arch, stored.record)
            return stored

    def to_file(self, name: ImageName, target: Path, *, force: bool = False) -> None:
        """Write the image to a file, which exists only when complete."""
        name, target = name.absolute(), Path(os.path.abspath(target))
        with self.store.in_use(), self._turn(str(target), str(target)):
            check_target(target, force)
            with self._source(name) as source:
                self.progress.stage(f"looking for {name}")
                found = source.find(self.arch)
                self._check_arch(name, found)
                sha256 = self._copied(found.digest, target) or self._make(name, source, found, target)
                self.store.record_file(target, str(name), sha256)

    def _copied(self, digest: str, target: Path) -> str:
        """Copy the stored image to this file and return its SHA-256; "" if no image is stored or the stored one is
        damaged."""
        known = self.store.get(digest, self.compression)
        try:
            return copy_image(known, target) if known else ""
        except DamagedImage as error:
            self.progress.warn(f"{error.what}, and is not used")
            return ""

    def _check_arch(self, name: ImageName, found: FoundImage) -> None:
        """Raise if the image is for another architecture.

        If an index lists the image for this architecture, only warn, because `--arch` could not select it otherwise.
        """
        if not found.listed:
            check_arch(found.config, self.arch, str(name))
        elif found.config.arch not in ("", self.arch):
            self.progress.warn(f"{name} was built for {found.config.arch}, not for {self.arch}")

    def _stored_before(self, name: ImageName, error: Unreachable) -> Stored:
        """Return the image that the name referred to at the last lookup, so that runs can restart while a registry is
        down.
        """
        known = self.store.lookup(str(name), self.arch, self.compression, since=0.0)
        if known is None:
            raise error
        if not self.or_kept:
            hint = f"{error.hint}; `--or-kept` uses the image imported before: {known.path}"
            raise Unreachable(error.what, hint=hint, answered=error.answered, stored=True)
        self.progress.warn(f"{error.what}; using {name} as it was imported before")
        return known

    def _turn(self, what: str, label: str) -> contextlib.AbstractContextManager[None]:
        return self.store.turn(what, lambda: self.progress.stage(f"waiting for another import of {label}"))

    def _stored(self, name: ImageName, source: ImageSource, found: FoundImage, force: bool) -> Stored:
        with self._turn(f"{found.digest} {self.compression}", found.digest[:19]):
            known = self.store.get(found.digest, self.compression)
            if known and not force:
                return known
            path = self.store.image(found.digest, self.compression)
            sha256 = self._make(name, source, found, path, own=True)
            record = ImageRecord(
                found.digest, self.compression, path.stat().st_size, sha256, self.store.clock(),
                layers=tuple(dict.fromkeys(layer.digest for layer in found.layers)),
            )  # fmt: skip
            return self.store.put(with_config(record, found.config, image_metadata.usable_workdir(found.config)))

    def _make(self, name: ImageName, source: ImageSource, found: FoundImage, target: Path, own: bool = False) -> str:
        """Write the image and return the SHA-256 of the file."""
        if self.enroot and name.kind is ImageKind.REGISTRY:
            self.progress.stage("importing with Enroot")
            import_by_enroot(self.enroot, name, self.arch, target, self.runner, own)
            return digest_of(target, self.progress)
        layers = fetch_layers(source, found, self.progress)
        about, content = image_metadata.render_layer(found.config)
        entries = [*(layer.entries for layer in layers), about]
        merged = merge(entries, folders=[image_metadata.usable_workdir(found.config)])
        if merged.devices:
            self.progress.warn(f"left out {len(merged.devices)} device nodes, {merged.devices[0]} first")
        self.progress.stage("packing", stream_size(merged))
        chunks = [*layer_chunks([layer.blob for layer in layers]), iter([content])]
        with nameless(target, own=own) as handle:
            squash(tar_stream(merged, chunks, self.progress.advance), handle, self.compression)
            return digest_of(Path(f"/proc/self/fd/{handle}"), self.progress)

    @contextlib.contextmanager
    def _source(self, name: ImageName) -> Iterator[ImageSource]:
        scratch = self.store.blob(f"scratch:{secrets.token_hex(16)}.part")
        try:
            yield self._open(name, scratch)
        finally:
            scratch.unlink(missing_ok=True)

    def _open(self, name: ImageName, scratch: Path) -> ImageSource:
        if name.kind is ImageKind.REGISTRY:
            credentials = CredentialFinder(self.env, Path(self.env.get("HOME") or os.path.expanduser("~")), self.runner)
            plain = self.plain_http or self.env.get("ENROOT_ALLOW_HTTP", "").lower() in ("y", "yes", "true", "1")
            return FromRegistry(name, Registry(name, Http(plain_http=plain), credentials, plain_http=plain), self.store)
        if name.kind is ImageKind.OCI:
            return FromLayout(name)
        if name.kind is ImageKind.ARCHIVE:
            return FromArchive(name, scratch)
        if self.build:
            self.progress.stage(f"building {self.build.file} with {os.path.basename(self.build.program)}")
            return FromArchive(self.build.save(scratch, self.runner), scratch.with_suffix(".plain"))
        if name.is_path:
            what = (
                "is already a file or a folder" if os.path.exists(name.path) else "is a path, but there is no such file"
            )
            raise UsageError(
                f"{name.path} {what}",
                hint="use a .sqsh file as it is; `dalsegno image build FOLDER` builds one from a folder",
            )
        self.progress.stage(f"saving {name.repository}:{name.tag} with {name.kind.value.partition(':')[0]}")
        return FromArchive(saved_by_daemon(name, self.runner, scratch), scratch.with_suffix(".plain"))


def copy_image(kept: Stored, target: Path) -> str:
    """Copy a stored image to a file, which exists only when complete and undamaged, and return its SHA-256.

    The copy is never a hard link, because a write to it would change the stored image.
    """
    with open(kept.path, "rb") as file, nameless(target) as handle:
        shared = _share_blocks(file.fileno(), handle)
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            if not shared:
                _write_all(handle, chunk)
        if digest.hexdigest() != kept.record.sha256:
            raise DamagedImage(
                f"the stored image {kept.path} is damaged", hint="import it again with `dalsegno image import --force`"
            )
    return digest.hexdigest()


def _share_blocks(source: int, target: int) -> bool:
    """Make the target a clone that shares the source's blocks. Return False if the file system cannot do that."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _write_all(handle: int, chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[os.write(handle, left) :]


def digest_of(made: Path, progress: ImportProgress) -> str:
    """Return the SHA-256 of an image that was just written. The file is read again, because sqfstar seeks back while it
    writes."""
    progress.stage("reading it back", made.stat().st_size)
    return sha256_of(made, progress.advance)


def sha256_of(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()

"""Images made here, of a folder or of a Python environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.containers import metadata
from dalsegno.containers.folder import Layer, layer_of, pack
from dalsegno.containers.importing import digest_of
from dalsegno.containers.manifest import Config, architecture
from dalsegno.containers.progress import Progress, Silent
from dalsegno.containers.record import Record, with_config
from dalsegno.containers.squash import check_target
from dalsegno.containers.store import Store, Stored


@dataclass(frozen=True)
class Builder:
    """How images are made here."""

    store: Store
    progress: Progress = field(default_factory=Silent)
    compression: str = "lz4"

    def of_folder(self, folder: Path, config: Config, output: Path | None, force: bool = False) -> Stored | Path:
        return self.build(layer_of(folder), config, os.path.abspath(folder), output, force)

    def build(self, layer: Layer, config: Config, name: str, output: Path | None, force: bool) -> Stored | Path:
        """Into a file, or into the store under this name."""
        if output is not None:
            check_target(output, force)
            pack(layer, config, output, self.compression, self.progress)
            self.store.wrote(Path(os.path.abspath(output)), name, digest_of(output, self.progress))
            return output
        with self.store.in_use(), self.store.turn(name, lambda: self.progress.stage(f"waiting for another {name}")):
            return self._into_store(layer, config, name)

    def _into_store(self, layer: Layer, config: Config, name: str) -> Stored:
        scratch = self.store.image(f"made:{os.getpid()}", self.compression)
        digest = pack(layer, config, scratch, self.compression, self.progress, own=True)
        sha256 = digest_of(scratch, self.progress)
        path = self.store.image(digest, self.compression)
        os.replace(scratch, path)  # what has the same digest is the same
        record = Record(digest, self.compression, path.stat().st_size, sha256, self.store.clock())
        config = Config(architecture(), config.env, config.entrypoint, config.cmd, config.workdir)
        stored = self.store.put(with_config(record, config, metadata.workdir(config)))
        self.store.name(name, architecture(), stored.record)
        return stored

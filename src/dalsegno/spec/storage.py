"""Shared storage, as written in the cluster file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dalsegno.spec.names import AbsolutePath, PlainName
from dalsegno.spec.patterns import matching
from dalsegno.spec.quantities import SizeMiB
from dalsegno.spec.section import Section

Source = Annotated[
    str,
    matching(r"[A-Za-z0-9/][A-Za-z0-9_./:@-]{0,254}", "write a folder, `server:/export`, or the file system's id"),
]
Options = Annotated[str, matching(r"[A-Za-z0-9_=,.:/-]{0,254}", "write them as for mount: `noatime,nconnect=16`")]
StorageType = Literal["folder", "nfs", "lustre", "openzfs", "efs", "ebs", "fss"]


class Storage(Section):
    """A file system that all nodes see."""

    name: PlainName = Field(description="Name of the file system.")
    mount: AbsolutePath = Field(description="Where every node finds it: /fsx.")
    type: StorageType = Field(default="folder", description="folder, nfs, lustre, openzfs, efs, ebs or fss (OCI).")
    size: SizeMiB | None = Field(default=None, description="Size of one to be made: 1200G.")
    source: Source = Field(
        default="", description="One that exists: a folder of this machine, server:/export, or fs-0123456789abcdef0."
    )
    options: Options = Field(default="", description="Mount options.")
    throughput: int | None = Field(default=None, ge=1, le=10000, description="MB/s per TiB, where the cloud sells it.")
    home: bool = Field(default=False, description="People's home folders live here.")

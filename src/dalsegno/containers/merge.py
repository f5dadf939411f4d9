"""Merge layers into one file tree, without I/O: decide which entries make up the image, and under which names.

The rules are those of the OCI image specification:

- `.wh.NAME` removes NAME from the layers below; `.wh..wh..opq` removes everything that the layers below have in its
  folder. Files in the whiteout's own layer stay, whether they come before or after it.
- A folder entry for an existing folder sets its mode and owner and keeps its contents; any other entry replaces what
  was there.
- A hard link refers to the file that its target's path names when the link is added, even if a later entry removes that
  path.
- Symbolic links among the parents of a path are followed, but never out of the root.

Device nodes, set-user-ID and set-group-ID bits of files, and extended attributes that grant rights are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.tar import TarEntry, TarType

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_AUFS = ".wh..wh."  # prefix of aufs metadata in old images
_SET_USER_ID = 0o4000
_SET_IDS = 0o6000  # removed from files, but not from folders, where the set-group-ID bit grants no rights
_MAX_PATH = 4096  # the kernel's limit for the length of a path
_MAX_LINKS = 40  # the kernel's limit for symbolic links on one path
_PLAIN_XATTR = "user."


@dataclass(frozen=True)
class ImageEntry:
    """An entry and its names in the image. All names of a file but the first are hard links."""

    entry: TarEntry
    names: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """The content of the tar stream: first all entries without content, then the files of each layer in order."""

    bare: tuple[ImageEntry, ...]
    files: tuple[tuple[ImageEntry, ...], ...]
    devices: tuple[str, ...]  # paths of device nodes, which are left out


@dataclass
class _TarFolder:
    entry: TarEntry
    names: dict[str, _TarFolder | _Leaf] = field(default_factory=dict)


@dataclass
class _Leaf:
    """A file, link or other entry that is not a folder: one inode with one or more names."""

    entry: TarEntry
    layer: int
    paths: list[str] = field(default_factory=list)


def merge(layers: Sequence[Sequence[TarEntry]], folders: Sequence[str] = ()) -> Merged:
    """Merge the layers, the lowest first. Missing `folders` are created."""
    root = _TarFolder(TarEntry("", TarType.FOLDER))
    for number, layer in enumerate(layers):
        for entry in layer:
            _hide(root, entry)
        for entry in layer:
            _put(root, entry, number)
    for path in folders:
        above, name = _split(path)
        _walk(root, [*above, name] if name else [], make=True)
    return _collect(root, len(layers))


def _hide(root: _TarFolder, entry: TarEntry) -> None:
    """Remove the files of lower layers that a whiteout hides."""
    above, name = _split(entry.path)
    if not name.startswith(_WHITEOUT):
        return
    folder = _walk(root, above, make=False)
    if folder is None:
        return
    if name == _OPAQUE:
        folder.names.clear()
    elif not name.startswith(_AUFS):
        folder.names.pop(name.removeprefix(_WHITEOUT), None)


def _put(root: _TarFolder, entry: TarEntry, layer: int) -> None:
    above, name = _split(entry.path)
    if name.startswith(_WHITEOUT) or _AUFS in entry.path:
        return
    if not name:
        return  # the entry is the root folder, which always has mode 0755 and belongs to root
    folder = _walk(root, above, make=True)
    assert folder is not None
    there = folder.names.get(name)
    if entry.type is TarType.FOLDER and isinstance(there, _TarFolder):
        there.entry = entry
    elif entry.type is TarType.FOLDER:
        folder.names[name] = _TarFolder(entry)
    elif entry.type is TarType.LINK:
        folder.names[name] = _target(root, entry)
    else:
        folder.names[name] = _Leaf(entry, layer)


def _target(root: _TarFolder, link: TarEntry) -> _Leaf:
    above, name = _split(link.link)
    folder = _walk(root, above, make=False)
    found = folder.names.get(name) if folder else None
    if not isinstance(found, _Leaf):
        raise DamagedImage(f"`{link.path}` is a hard link to `{link.link}`, which does not exist")
    return found


def _split(path: str) -> tuple[list[str], str]:
    if len(path) > _MAX_PATH:
        raise DamagedImage(f"a layer has a name of {len(path)} characters: `{path[:60]}…`")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise DamagedImage(f"a layer has the path `{path}`, which leads out of the image")
    if "\0" in path:
        raise DamagedImage("a layer has a name that contains a zero byte")
    return (parts[:-1], parts[-1]) if parts else ([], "")


def _walk(root: _TarFolder, parts: list[str], make: bool) -> _TarFolder | None:
    """Return the folder at this path, resolving symbolic links. With `make`, create missing folders; otherwise return
    None if one is missing."""
    way, todo, followed = [root], parts[::-1], 0
    while todo:
        part = todo.pop()
        there = way[-1].names.get(part)
        if part in ("", "."):
            continue
        if part == "..":  # this part comes from a symbolic link; the parent of the root is the root
            del way[max(1, len(way) - 1) :]
        elif isinstance(there, _TarFolder):
            way.append(there)
        elif there is not None and there.entry.type is TarType.SYMLINK:
            followed += 1
            if followed > _MAX_LINKS:
                raise DamagedImage(f"symbolic links in `{'/'.join(parts)}` form a loop")
            if there.entry.link.startswith("/"):
                del way[1:]
            todo.extend(there.entry.link.split("/")[::-1])
        elif make:
            made = _TarFolder(TarEntry(part, TarType.FOLDER))
            way[-1].names[part] = made
            way.append(made)
        else:
            return None
    return way[-1]


def _collect(root: _TarFolder, layers: int) -> Merged:
    folders: list[ImageEntry] = []
    leaves: dict[int, _Leaf] = {}
    for path, node in _everything(root):
        if isinstance(node, _TarFolder):
            folders.append(ImageEntry(_harmless(node.entry), (path,)))
        else:
            node.paths.append(path)
            leaves[id(node)] = node
    files: list[list[ImageEntry]] = [[] for _ in range(layers)]
    bare: list[ImageEntry] = []
    devices: list[str] = []
    for leaf in leaves.values():
        if leaf.entry.type is TarType.FILE:
            files[leaf.layer].append(ImageEntry(_harmless(leaf.entry), tuple(leaf.paths)))
        elif leaf.entry.type is TarType.DEVICE:
            devices += leaf.paths
        else:  # a symbolic link with two names becomes two links
            bare += [ImageEntry(_harmless(leaf.entry), (path,)) for path in leaf.paths]
    for each in files:
        each.sort(key=lambda placed: placed.entry.offset)
    return Merged((*folders, *bare), tuple(map(tuple, files)), tuple(devices))


def _everything(root: _TarFolder) -> Iterator[tuple[str, _TarFolder | _Leaf]]:
    """Yield every name below the root, a folder before its contents. The walk is not recursive, because paths may be
    deep."""
    todo: list[tuple[str, _TarFolder | _Leaf]] = [(name, root.names[name]) for name in sorted(root.names, reverse=True)]
    while todo:
        path, node = todo.pop()
        yield path, node
        if isinstance(node, _TarFolder):
            todo += [(f"{path}/{name}", node.names[name]) for name in sorted(node.names, reverse=True)]


def _harmless(entry: TarEntry) -> TarEntry:
    mode = entry.mode & ~(_SET_USER_ID if entry.type is TarType.FOLDER else _SET_IDS)
    if mode == entry.mode and not entry.xattrs:
        return entry
    kept = tuple((key, value) for key, value in entry.xattrs if key.startswith(_PLAIN_XATTR))
    return entry._replace(mode=mode, xattrs=kept)

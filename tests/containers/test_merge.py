"""Merging layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.merge import Merged, merge
from dalsegno.containers.tar import TarEntry, TarType
from tests.containers.layers import device, file, folder, link, symlink


def names(merged: Merged) -> list[str]:
    files = (placed for layer in merged.files for placed in layer)
    return sorted(name for placed in (*merged.bare, *files) for name in placed.names)


def where(merged: Merged) -> dict[str, tuple[int, int]]:
    """Return each file's name with the layer and the offset of its content."""
    return {
        name: (number, placed.entry.offset)
        for number, layer in enumerate(merged.files)
        for placed in layer
        for name in placed.names
    }


def test_file_of_an_upper_layer_replaces_one_below():
    assert where(merge([[file("a", offset=1)], [file("./a", offset=2)]])) == {"a": (1, 2)}


def test_whiteout_removes_only_entries_of_layers_below():
    below = [folder("d"), file("d/x"), file("dx")]
    assert names(merge([below, [file(".wh.d")]])) == ["dx"]
    assert names(merge([below, [file("d/.wh.x")]])) == ["d", "dx"]
    assert names(merge([below, [file("e/.wh.x"), file(".wh.nothing")]])) == ["d", "d/x", "dx"]


def test_whiteout_keeps_files_of_its_own_layer_in_any_order():
    below = [folder("d"), file("d/x"), file("d/y")]
    assert names(merge([below, [file("d/z"), file("d/.wh..wh..opq")]])) == ["d", "d/z"]
    assert names(merge([below, [file("d/z"), file(".wh.d")]])) == ["d", "d/z"]
    assert where(merge([[file("a", offset=1)], [file("a", offset=2), file(".wh.a")]])) == {"a": (1, 2)}


def test_folder_over_a_folder_changes_its_mode_and_keeps_its_contents():
    merged = merge([[folder("d", 0o700), file("d/x")], [folder("d", 0o755)]])
    assert merged.bare[0].entry.mode == 0o755 and names(merged) == ["d", "d/x"]


def test_file_replaces_a_folder_and_folder_replaces_a_link():
    assert names(merge([[folder("d"), file("d/x")], [file("d")]])) == ["d"]
    assert names(merge([[folder("usr"), symlink("d", "usr")], [folder("d"), file("d/x")]])) == ["d", "d/x", "usr"]


def test_a_hard_link_outlives_the_name_it_was_made_from():
    below = [file("a", offset=1), link("b", "a"), link("c", "./b")]
    assert where(merge([below])) == {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    assert where(merge([below, [file(".wh.a")]])) == {"b": (0, 1), "c": (0, 1)}
    assert where(merge([below, [file("a", offset=7)]])) == {"a": (1, 7), "b": (0, 1), "c": (0, 1)}


def test_hard_link_may_refer_to_a_layer_below():
    assert where(merge([[file("a", offset=1)], [link("b", "a"), file("a", offset=2)]])) == {"a": (1, 2), "b": (0, 1)}


def test_last_of_two_entries_with_one_name_wins():
    assert where(merge([[file("a", offset=1), file("a", offset=2)]])) == {"a": (0, 2)}


def test_parent_folders_are_resolved_through_symbolic_links():
    below = [folder("usr"), folder("usr/lib"), symlink("lib", "usr/lib"), symlink("usr/up", "../..")]
    assert names(merge([below, [file("lib/x")]])) == ["lib", "usr", "usr/lib", "usr/lib/x", "usr/up"]
    assert "etc/passwd" in names(merge([below, [file("usr/up/etc/passwd")]]))
    assert names(merge([[symlink("l", "/a/b")], [file("l/x")]])) == ["a", "a/b", "a/b/x", "l"]
    with pytest.raises(DamagedImage, match="loop"):
        merge([[symlink("a", "b"), symlink("b", "a")], [file("a/x")]])


def test_devices_set_id_bits_and_capabilities_are_left_out():
    merged = merge([[file("dev/null"), file("su", mode=0o6755)], [device("dev/null")]])
    assert merged.devices == ("dev/null",)
    assert [placed.entry.mode for placed in merged.files[0]] == [0o755]
    capable = TarEntry("ping", TarType.FILE, xattrs=(("security.capability", b"\1"), ("user.note", b"hi")))
    assert merge([[capable]]).files[0][0].entry.xattrs == (("user.note", b"hi"),)


@pytest.mark.parametrize("path", ["../etc/passwd", "a/../../b", "a\0b", "x/" * 3000])
def test_path_out_of_the_image_is_refused(path: str):
    with pytest.raises(DamagedImage):
        merge([[file(path)]])
    with pytest.raises(DamagedImage):
        merge([[file("a"), link("b", path)]])


def test_a_hard_link_to_nothing_or_to_a_folder_is_refused():
    for target in ("nothing", "d"):
        with pytest.raises(DamagedImage, match="hard link"):
            merge([[folder("d"), link("b", target)]])


# A model of the specification: the same rules on a flat dictionary of paths

PARTS = st.sampled_from("abc")
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
WORDS = st.tuples(st.sampled_from(["file", "folder", "link", "hide", "opaque"]), PATHS, PATHS)


def model(layers: list[list[TarEntry]]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for number, layer in enumerate(layers):
        for entry in layer:
            above, _, name = entry.path.rpartition("/")
            if name == ".wh..wh..opq":
                _remove_below(tree, above)
            elif name.startswith(".wh."):
                gone = f"{above}/{name[4:]}".lstrip("/")
                _remove_below(tree, gone)
                tree.pop(gone, None)
        for index, entry in enumerate(layer):
            if ".wh." in entry.path:
                continue
            for folder_ in _above(entry.path):
                if tree.get(folder_) != "folder":
                    tree[folder_] = "folder"
            if entry.type is TarType.FOLDER:
                tree[entry.path] = "folder"
            else:
                value = tree[entry.link] if entry.type is TarType.LINK else (number, index)
                _remove_below(tree, entry.path)
                tree[entry.path] = value
    return tree


def _remove_below(tree: dict[str, object], path: str) -> None:
    for each in [each for each in tree if each.startswith(f"{path}/")]:
        del tree[each]


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def to_entries(words: list[tuple[str, str, str]]) -> list[TarEntry]:
    made = []
    for index, (kind, path, other) in enumerate(words):
        above, slash, name = path.rpartition("/")
        made.append(
            {
                "file": file(path, offset=index),
                "folder": folder(path),
                "link": link(path, other),
                "hide": file(f"{above}{slash}.wh.{name}"),
                "opaque": file(f"{path}/.wh..wh..opq"),
            }[kind]
        )
    return made


def below(path: str, other: str) -> bool:
    return path.startswith(f"{other}/")


def sensible(layers: list[list[TarEntry]]) -> list[list[TarEntry]]:
    """Return the layers without hard links to missing files, which have their own test."""
    kept: list[list[TarEntry]] = []
    for layer in layers:
        kept.append([])
        hiding = [entry for entry in layer if ".wh." in entry.path]
        for entry in layer:
            here = [*kept[:-1], [*hiding, *(each for each in kept[-1] if each not in hiding)]]
            leads_somewhere = isinstance(model(here).get(entry.link), tuple) and not below(entry.path, entry.link)
            if entry.type is not TarType.LINK or leads_somewhere:
                kept[-1].append(entry)
    return kept


@given(st.lists(st.lists(WORDS, max_size=6), max_size=4))
def test_merge_matches_a_model_of_the_specification(words: list[list[tuple[str, str, str]]]):
    layers = sensible(
        [[entry._replace(offset=index) for index, entry in enumerate(to_entries(layer))] for layer in words]
    )
    layers = [[entry._replace(offset=index) for index, entry in enumerate(layer)] for layer in layers]
    merged = merge(layers)
    found = {name: "folder" for placed in merged.bare for name in placed.names} | where(merged)
    assert found == model(layers)
    assert len(names(merged)) == len(set(names(merged)))

"""Tests of where clusters are stored and how one is chosen."""

from pathlib import Path

import pytest

from dalsegno.cluster import ROOT_HOME, SlurmHere, find_place, has_virtual_nodes, home, homes, place_named, places
from dalsegno.errors import NotThere, UsageError


def make(base: Path, *names: str) -> dict[str, str]:
    for name in names:
        (base / "clusters" / name).mkdir(parents=True)
        (base / "clusters" / name / "state.json").write_text("{}")
    return {"DALSEGNO_HOME": str(base)}


def test_only_the_given_home_is_searched(tmp_path: Path):
    env = {"DALSEGNO_HOME": str(tmp_path)}
    assert home(env) == tmp_path and homes(env) == [tmp_path]


def test_root_clusters_are_searched_for_every_user():
    assert homes({"XDG_STATE_HOME": "/home/ada/.local/state"})[-1] == ROOT_HOME


def test_single_cluster_needs_no_name(tmp_path: Path):
    assert find_place(None, make(tmp_path, "one")).name == "one"


def test_several_clusters_require_a_name(tmp_path: Path):
    env = make(tmp_path, "one", "two")
    with pytest.raises(UsageError, match="there are 2 clusters: one, two"):
        find_place(None, env)
    assert find_place("two", env).name == "two"
    assert find_place(None, {**env, "DALSEGNO_CLUSTER": "one"}).name == "one"


def test_misspelt_cluster_name_gets_a_hint(tmp_path: Path):
    with pytest.raises(NotThere) as caught:
        find_place("trainn", make(tmp_path, "train"))
    assert caught.value.hint == "did you mean `train`?"


def test_error_without_clusters_says_how_to_create_one(tmp_path: Path):
    with pytest.raises(NotThere) as caught:
        find_place(None, {"DALSEGNO_HOME": str(tmp_path)})
    assert "dalsegno init" in caught.value.hint


def test_other_folders_are_not_clusters(tmp_path: Path):
    (tmp_path / "clusters" / "notes").mkdir(parents=True)
    assert places({"DALSEGNO_HOME": str(tmp_path)}) == []


@pytest.mark.parametrize(("target", "virtual"), [("local", True), ("ssh", False), ("oci", False)])
def test_only_local_clusters_have_virtual_nodes(tmp_path: Path, target: str, virtual: bool):
    folder = tmp_path / "clusters" / "one"
    (folder / "etc").mkdir(parents=True)
    (folder / "state.json").write_text(f'{{"target": "{target}"}}')
    (folder / "etc" / "cluster-id").write_text("c0ffee")
    assert has_virtual_nodes(SlurmHere({"SLURM_CONF": str(folder / "etc" / "slurm.conf")})) is virtual


@pytest.mark.parametrize("name", ["..", "../etc", "a/b", "", "-x"])
def test_path_is_not_accepted_as_cluster_name(name: str, tmp_path: Path):
    with pytest.raises(UsageError):
        place_named(name, {"DALSEGNO_HOME": str(tmp_path)})

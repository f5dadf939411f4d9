"""Images of the cluster file: where they are kept, and which errors are reported."""

from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.cluster import images_home
from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.spec.facts import Containers
from dalsegno.targets.local.desired import jobs_images
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.images import failure, import_all
from tests.local.sites import folder_of
from tests.local.test_desired import cluster


def failed(folder: Path, *images: str) -> TargetError:
    with pytest.raises(TargetError) as caught:
        import_all(folder, images, lambda _: None, "lab")
    return caught.value


def test_common_hint_is_shown_once_and_others_per_image(tmp_path: Path):
    same = failed(tmp_path / "store", f"docker-archive:{tmp_path}/a.tar", f"docker-archive:{tmp_path}/b.tar")
    assert "lab is up, but 2 images could not be imported:\n  docker-archive:" in same.what
    assert same.hint.endswith("; `dalsegno up` tries again") and same.hint.partition(";")[0] not in same.what
    other = failed(tmp_path / "store", f"docker-archive:{tmp_path}/a.tar", f"oci:{tmp_path}/none:x")
    first, second = other.what.splitlines()[1:]
    assert same.hint.partition(";")[0] in first and first.endswith(")") and second.endswith(")")
    assert other.hint == "`dalsegno up` tries again"


def test_error_without_hint_adds_no_separator():
    mute, hinted = DalsegnoError("it is gone"), DalsegnoError("no space", hint="free some")
    alone = failure("lab", [("a", mute), ("b", mute)])
    assert alone.what.endswith(":\n  a: it is gone\n  b: it is gone") and alone.hint == "`dalsegno up` tries again"
    both = failure("lab", [("a", mute), ("b", hinted)])
    assert both.what.endswith(":\n  a: it is gone\n  b: no space (free some)") and both.hint == alone.hint


def test_images_are_stored_in_the_folder_of_the_cluster(tmp_path: Path):
    home = {"DALSEGNO_HOME": str(tmp_path)}
    assert images_home(home) == tmp_path / "images", "there is no cluster"
    there = cluster(1)
    folder = folder_of(tmp_path, replace(there, containers=Containers(enabled=True, folder="/shared/images")))
    for env in (home, {**home, "DALSEGNO_CLUSTER": "demo"}):
        assert images_home(env) == Path("/shared/images")
    assert images_home({**home, "DALSEGNO_IMAGES": "/mine"}) == Path("/mine")
    on_it, elsewhere = {"SLURM_CONF": str(folder.slurm_conf)}, {**home, "SLURM_CONF": "/etc/slurm/slurm.conf"}
    assert images_home({**elsewhere}) == tmp_path / "images", "another's Slurm"
    folder.etc.mkdir()
    folder.identity.write_text("a1b2")
    assert images_home(on_it) == Path("/shared/images"), "in the cluster's own shell"
    (tmp_path / "clusters/other").mkdir()
    (tmp_path / "clusters/other/state.json").touch()
    assert images_home(home) == tmp_path / "images", "several, and none is named"


def test_without_folder_jobs_use_images_of_up_else_their_users(tmp_path: Path):
    folder = Folder(tmp_path / "clusters/demo")
    listed = replace(cluster(1), containers=Containers(enabled=True, images=("ubuntu:24.04",)))
    assert jobs_images(listed, folder) == str(tmp_path / "images")
    assert jobs_images(replace(listed, containers=Containers(enabled=True)), folder) == ""

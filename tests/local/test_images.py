"""Images of the cluster file that cannot be had."""

from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.targets.local.images import import_all


def failure(folder: Path, *images: str) -> TargetError:
    with pytest.raises(TargetError) as caught:
        import_all(folder, images, lambda _: None, "lab")
    return caught.value


def test_what_mends_all_is_told_once_and_what_mends_each_beside_it(tmp_path: Path):
    same = failure(tmp_path / "store", f"docker-archive:{tmp_path}/a.tar", f"docker-archive:{tmp_path}/b.tar")
    assert "lab is up, but 2 images could not be imported:\n  docker-archive:" in same.what
    assert same.hint.endswith("; `dalsegno up` tries again") and same.hint.partition(";")[0] not in same.what
    other = failure(tmp_path / "store", f"docker-archive:{tmp_path}/a.tar", f"oci:{tmp_path}/none:x")
    first, second = other.what.splitlines()[1:]
    assert same.hint.partition(";")[0] in first and first.endswith(")") and second.endswith(")")
    assert other.hint == "`dalsegno up` tries again"

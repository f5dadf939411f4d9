"""Tests of image names."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dalsegno.errors import UsageError
from dalsegno.image_name import DOCKER_HUB, ImageKind, ImageName, parse_name

DIGEST = "sha256:" + "0123456789abcdef" * 4


def registry(repository: str, tag: str = "latest", **rest: str) -> ImageName:
    return ImageName(ImageKind.REGISTRY, **{"registry": DOCKER_HUB, "repository": repository, "tag": tag, **rest})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/fsx/pytorch.sqsh", ImageName(ImageKind.PATH, path="/fsx/pytorch.sqsh")),
        ("./a b.sqsh", ImageName(ImageKind.PATH, path="./a b.sqsh")),
        ("../rootfs", ImageName(ImageKind.PATH, path="../rootfs")),
        ("ubuntu", registry("library/ubuntu")),
        ("ubuntu:22.04", registry("library/ubuntu", "22.04")),
        ("docker://ubuntu:22.04", registry("library/ubuntu", "22.04")),
        ("docker.io#ubuntu", registry("library/ubuntu")),
        ("docker.io/ubuntu:24.04", registry("library/ubuntu", "24.04")),
        ("docker://docker.io/library/ubuntu", registry("library/ubuntu")),
        ("index.docker.io/pytorch/pytorch:2.4", registry("pytorch/pytorch", "2.4")),
        ("nvcr.io/nvidia/pytorch:24.01", registry("nvidia/pytorch", "24.01", registry="nvcr.io")),
        ("docker://localhost:5000/app", registry("app", registry="localhost:5000")),
        ("localhost/app", registry("app", registry="localhost")),
        ("ann@ghcr.io/me/app:1", registry("me/app", "1", registry="ghcr.io", user="ann")),
        (f"ghcr.io/me/app@{DIGEST}", registry("me/app", "", registry="ghcr.io", digest=DIGEST)),
        ("pytorch/pytorch:2.4", registry("pytorch/pytorch", "2.4")),
        ("nvcr.io#nvidia/pytorch:24.01-py3", registry("nvidia/pytorch", "24.01-py3", registry="nvcr.io")),
        ("$oauthtoken@nvcr.io#nvidia/pytorch", registry("nvidia/pytorch", registry="nvcr.io", user="$oauthtoken")),
        ("ann@pytorch/pytorch:2.4", registry("pytorch/pytorch", "2.4", user="ann")),
        ("localhost:5000#a/b-c__d.e:x", registry("a/b-c__d.e", "x", registry="localhost:5000")),
        ("docker://[::1]:5000#a", registry("a", registry="[::1]:5000")),
        (f"ubuntu@{DIGEST}", registry("library/ubuntu", "", digest=DIGEST)),
        (f"ubuntu:22.04@{DIGEST}", registry("library/ubuntu", "22.04", digest=DIGEST)),
        (f"ann@nvcr.io#a@{DIGEST}", registry("a", "", registry="nvcr.io", user="ann", digest=DIGEST)),
        ("dockerd://me/app:1", ImageName(ImageKind.DOCKERD, repository="me/app", tag="1")),
        ("dockerd://host:5000/app", ImageName(ImageKind.DOCKERD, repository="host:5000/app", tag="latest")),
        ("podman://app", ImageName(ImageKind.PODMAN, repository="app", tag="latest")),
        ("oci:/tmp/layout:v1", ImageName(ImageKind.OCI, path="/tmp/layout", tag="v1")),
        ("oci:layout", ImageName(ImageKind.OCI, path="layout")),
        ("docker-archive:a.tar", ImageName(ImageKind.ARCHIVE, path="a.tar")),
        ("docker-archive:a.tar:me/app:1", ImageName(ImageKind.ARCHIVE, path="a.tar", repository="me/app", tag="1")),
    ],
)  # fmt: skip
def test_image_name_is_parsed(text: str, name: ImageName):
    assert parse_name(text) == name


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("nvcr.io/nvidia:24.01/pytorch", "write a tag after `:`"),
        ("nvcr:x/nvidia/pytorch", "write the registry, HOST or HOST:PORT, before `#`"),
        ("data.d/pytorch.sqsh", "did you mean the file `./data.d/pytorch.sqsh`?"),
        ("pytorch.sqsh", "did you mean the file `./pytorch.sqsh`?"),
        ("saved.tar", "did you mean `docker-archive:saved.tar`?"),
        ("dockerd:team/app:v1", "did you mean `dockerd://team/app:v1`?"),
        ("dokcer://ubuntu", "did you mean `docker://ubuntu`?"),
        ("https://nvcr.io/v2", "start it with `docker://`"),
        ("Ubuntu:22.04", "did you mean `ubuntu:22.04`?"),
        ("ubuntu:", "write a tag after `:`"),
        ("ubuntu@sha256:12", "64 lower-case hexadecimal digits"),
        ("#ubuntu", "write the registry, HOST or HOST:PORT, before `#`"),
        ("@ubuntu", "write the user name before `@`"),
        ("a b", "lower-case letters"),
        (" ubuntu", "without spaces"),
        ("", "write a path"),
        ("oci:", "write it as `oci:FOLDER:TAG`"),
        ("docker-archive:a.tar:", "write it as `docker-archive:FILE`"),
        ("ubuntu\n", "without spaces"),
        ("../x\0", "without spaces"),
    ],
)  # fmt: skip
def test_error_suggests_the_intended_image_name(text: str, hint: str):
    with pytest.raises(UsageError) as caught:
        parse_name(text)
    assert hint in caught.value.hint


PARTS = st.lists(
    st.sampled_from(["docker", "://", "oci", ":", "#", "@", "/", ".", "a", "-", "sha256:", "\n", "é", "x"])
)


@given(PARTS.map("".join) | st.text(max_size=30))
@example("docker-archive:a:b:c")
def test_any_text_parses_to_a_stable_name_or_an_error_with_a_hint(text: str):
    try:
        name = parse_name(text)
    except UsageError as error:
        assert error.hint
    else:
        assert parse_name(str(name)) == ImageName(**{**name.__dict__, "user": ""})

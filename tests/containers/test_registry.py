"""Imports from a real registry: downloads, interruptions and authentication."""

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.containers import parse_name
from dalsegno.containers.import_image import Importer, sha256_of
from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.store import ImageStore, NoProgress
from dalsegno.errors import DalsegnoError, NotThere
from tests.containers.images import LOWER, UPPER, Layout, member, tree, unpack
from tests.containers.registries import Meddler, Tokens, push, registry, serving
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
ARCHES = ("amd64", "arm64")


class Hub:
    """A registry with a few images, and the layout that they were built in."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address, self.layout = folder, address, Layout(folder / "oci")
        self.two = self.layout.image("two", [(LOWER, "gzip"), (UPPER, "zstd")])
        self.many = self.layout.index("many", {each: [([member("arch", each.encode())], "gzip")] for each in ARCHES})
        self.layout.image("v1", [(LOWER, "gzip"), ([member("version", b"1")], "gzip")])
        self.layout.image("v2", [(LOWER, "gzip"), ([member("version", b"2")], "gzip")])
        for tag in ("two", "many", "v1"):
            push(self.layout.path, tag, address, f"team/app:{tag}")

    def name(self, tag: str, address: str = "") -> str:
        return f"{address or self.address}#team/app:{tag}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("registry")
    with registry(folder) as address:
        yield Hub(folder, address)


@pytest.fixture
def meddler(hub: Hub) -> Iterator[tuple[Meddler, str]]:
    between = Meddler(hub.address)
    with serving(between.handler()) as address:
        yield between, address


def importer(folder: Path, home: Path | None = None, arch: str = "amd64", **rest: bool) -> Importer:
    env = {**os.environ, "HOME": str(home or folder)}
    for name in ("DOCKER_CONFIG", "XDG_CONFIG_HOME", "ENROOT_CONFIG_PATH", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        env.pop(name, None)
    return Importer(ImageStore(folder / "store"), env=env, arch=arch, **rest)


def imported(name: str, folder: Path, **rest: object) -> Path:
    return importer(folder, **rest).to_store(parse_name(name)).path  # type: ignore[arg-type]


def kept(folder: Path) -> list[str]:
    """Return the names of all files in the folder for images."""
    return sorted(path.name for path in (folder / "store/images").iterdir())


def test_imported_image_equals_the_pushed_one(hub: Hub, tmp_path: Path):
    path = imported(hub.name("two"), tmp_path)
    assert path.name == f"{hub.two.partition(':')[2]}.lz4.sqsh"
    straight = imported(f"oci:{hub.layout.path}:two", tmp_path / "other")
    assert tree(unpack(path, tmp_path / "a")) == tree(unpack(straight, tmp_path / "b"))


def test_index_selects_the_architecture_by_tag_and_by_digest(hub: Hub, tmp_path: Path):
    arm = imported(hub.name("many"), tmp_path, arch="arm64")
    assert (unpack(arm, tmp_path / "arm") / "arch").read_text() == "arm64"
    by_digest = f"{hub.address}#team/app@{hub.many}"
    assert imported(by_digest, tmp_path) == imported(hub.name("many"), tmp_path) != arm


def test_moved_tag_downloads_only_new_layers(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    push(hub.layout.path, "v1", hub.address, "team/app:moving")
    first = imported(hub.name("moving", address), tmp_path)
    between.seen.clear()
    assert imported(hub.name("moving", address), tmp_path) == first and between.blobs() == []
    push(hub.layout.path, "v2", hub.address, "team/app:moving")
    second = imported(hub.name("moving", address), tmp_path)
    assert len(between.blobs()) == 2  # a configuration and a layer; the large layer was already stored
    assert first != second and first.exists()  # a job may have it mounted
    assert (unpack(second, tmp_path / "out") / "version").read_text() == "2"
    ImageStore(tmp_path / "store").sweep()
    assert not first.exists() and second.exists()


def test_sixteen_concurrent_imports_download_once(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    with ThreadPoolExecutor(16) as pool:
        paths = set(pool.map(lambda _: imported(hub.name("two", address), tmp_path), range(16)))
    assert len(paths) == 1
    assert len(between.blobs()) == len(set(between.blobs())) == 3
    assert len([path for path, _ in between.seen if "/manifests/" in path]) == 1


def test_layers_are_downloaded_in_parallel(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    both = threading.Barrier(2, timeout=60)

    def hold_back(path: str, body: bytes) -> bytes:
        if "/blobs/" in path and not body.startswith(b"{"):  # each layer waits until the other is requested
            both.wait()
        return body

    between.meddle = hold_back
    assert imported(hub.name("two", address), tmp_path).exists()


def test_interrupted_download_is_resumed(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    between.cut = 2
    imported(hub.name("two", address), tmp_path)
    ranges = [asked for path, asked in between.seen if "/blobs/" in path and asked]
    assert len(ranges) == 2 and all(asked != "bytes=0-" for asked in ranges)


def test_partial_download_of_an_earlier_call_is_resumed(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    imported(hub.name("two"), tmp_path / "once")
    blob = max((tmp_path / "once/store/blobs").iterdir(), key=lambda path: path.stat().st_size)
    part = tmp_path / "store/blobs" / f"{blob.name}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(blob.read_bytes()[:5000])
    output = _command(tmp_path, "import", hub.name("two", address)).communicate(timeout=60)[1]
    assert "\nfetching 2 layers: 4.9 KiB of " in output and " already downloaded\n" in output
    assert "bytes=5000-" in [asked for _, asked in between.seen]
    part.with_suffix("").unlink()
    part.write_bytes(b"x" * 5000)  # this data is not from the blob
    ImageStore(tmp_path / "store").remove(ImageStore(tmp_path / "store").all()[0])
    with pytest.raises(DamagedImage, match="digest"):
        imported(hub.name("two", address), tmp_path)
    assert imported(hub.name("two", address), tmp_path).exists()  # the wrong part was removed


def test_a_blob_with_a_wrong_digest_is_refused_and_leaves_nothing(
    hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path
):
    between, address = meddler
    between.meddle = lambda path, body: body[:-1] + b"x" if "/blobs/" in path and len(body) > 100_000 else body
    with pytest.raises(DamagedImage, match="digest"):
        imported(hub.name("two", address), tmp_path)
    assert kept(tmp_path) == []
    assert not [path for path in (tmp_path / "store/blobs").iterdir() if path.stat().st_size > 100_000]
    between.meddle = lambda path, body: body.replace(b'"layers"', b'"Layers"') if "/manifests/" in path else body
    with pytest.raises(DamagedImage):
        imported(hub.name("two", address), tmp_path)


class Dying(NoProgress):
    """Kills its process at the n-th progress report."""

    def __init__(self, at: int) -> None:
        self._left = at

    def stage(self, text: str, total: int = 0, here: int = 0) -> None:
        self.advance(0)

    def advance(self, count: int) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(name: str, folder: Path, at: int) -> bool:
    """Import an image and kill the process at the step `at`. Return False if the import ended earlier."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            replace(importer(folder), progress=Dying(at)).to_store(parse_name(name))
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_import_killed_at_any_moment_leaves_no_incomplete_image(hub: Hub, tmp_path: Path):
    at = 1
    while killed(hub.name("two"), tmp_path, at):
        assert kept(tmp_path) == [] and ImageStore(tmp_path / "store").all() == []
        assert {path.suffix for path in (tmp_path / "store/blobs").iterdir()} <= {"", ".part", ".lock"}
        at += 3
    assert at > 12  # kills happened both during downloads and during packing
    (stored,) = ImageStore(tmp_path / "store").all()
    assert sha256_of(stored.path) == stored.record.sha256 and imported(hub.name("two"), tmp_path) == stored.path


def test_ctrl_c_ends_an_import_from_a_silent_registry_at_once(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    asked = threading.Event()

    def meddle(path: str, body: bytes) -> bytes | None:
        if "/blobs/" in path and len(body) > 1000:
            asked.set()
            return None
        return body

    between.meddle = meddle
    process = _command(tmp_path, "import", hub.name("two", address))
    assert asked.wait(60)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and output.endswith("error: interrupted\n")
    assert kept(tmp_path) == []


def _command(folder: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "DALSEGNO_IMAGES": str(folder / "store")}
    argv = [sys.executable, "-m", "dalsegno", "image", *words]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_missing_image_and_unreachable_registry_are_errors_with_a_hint(hub: Hub, tmp_path: Path):
    with pytest.raises(NotThere, match="has no image team/app:nothing"):
        imported(hub.name("nothing"), tmp_path)
    with pytest.raises(DalsegnoError, match=r"no answer from 127\.0\.0\.1:1") as caught:
        imported("127.0.0.1:1#team/app", tmp_path)
    assert caught.value.hint


def test_stored_image_is_used_while_its_registry_is_down(hub: Hub, meddler: tuple[Meddler, str], tmp_path: Path):
    between, address = meddler
    first = imported(hub.name("v1", address), tmp_path)
    between.behind = "127.0.0.1:1"
    assert imported(hub.name("v1", address), tmp_path) == first
    with pytest.raises(DalsegnoError, match=r"no answer|answered"):
        imported(hub.name("two", address), tmp_path)


def test_proxy_of_the_environment_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The registry stands in for a proxy. It answers proxy requests like its own requests."""
    monkeypatch.setenv("http_proxy", f"http://{hub.address}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert imported("registry.example#team/app:v1", tmp_path, plain_http=True).exists()


def test_error_for_a_registry_without_tls_names_the_variable_that_allows_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The address is not a loopback address, as for srun on a virtual node."""
    own = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    if not own:
        pytest.skip("this machine has no address but loopback")
    with serving(Meddler(hub.address).handler(), own[0]) as address:
        with pytest.raises(DalsegnoError, match="does not speak TLS") as caught:
            imported(hub.name("v1", address), tmp_path)
        assert "ENROOT_ALLOW_HTTP=yes" in caught.value.hint
        output = _command(tmp_path, "import", hub.name("v1", address)).communicate(timeout=60)[1]
        assert "ENROOT_ALLOW_HTTP=yes" in output
        monkeypatch.setenv("ENROOT_ALLOW_HTTP", "yes")
        assert imported(hub.name("v1", address), tmp_path).exists()


# Authentication


@pytest.fixture(scope="module")
def locked(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Tokens]]:
    """The same images behind a registry that requires tokens."""
    tokens = Tokens(tmp_path_factory.mktemp("tokens"), {"ann": "secret: word"})
    with serving(tokens.handler()) as address, registry(hub.folder, tokens.auth(address)) as behind:
        yield behind, tokens


def docker_login(home: Path, address: str, user: str, password: str) -> None:
    (home / ".docker").mkdir(parents=True, exist_ok=True)
    word = base64.b64encode(f"{user}:{password}".encode()).decode()
    (home / ".docker/config.json").write_text(json.dumps({"auths": {address: {"auth": word}}}))


def test_docker_password_is_exchanged_for_one_token(hub: Hub, locked: tuple[str, Tokens], tmp_path: Path):
    address, tokens = locked
    docker_login(tmp_path, address, "ann", "secret: word")
    before = tokens.given
    assert imported(hub.name("two", address), tmp_path, home=tmp_path).exists()
    assert tokens.given == before + 1  # one token is used for all layers


def test_enroot_credentials_are_used(hub: Hub, locked: tuple[str, Tokens], tmp_path: Path):
    address, tokens = locked
    tokens.passwords["bob"] = "word"
    (tmp_path / ".config/enroot").mkdir(parents=True)
    (tmp_path / ".config/enroot/.credentials").write_text(f"# mine\nmachine {address} login bob password word\n")
    assert imported(f"bob@{hub.name('v1', address)}", tmp_path, home=tmp_path).exists()


def test_wrong_or_missing_password_is_reported_without_showing_it(hub: Hub, locked: tuple[str, Tokens], tmp_path: Path):
    address, _ = locked
    for password in ("", "wrong word"):
        if password:
            docker_login(tmp_path, address, "ann", password)
        with pytest.raises(DalsegnoError, match=f"^{address} refused .* for team/app .*at its token server") as caught:
            imported(hub.name("two", address), tmp_path, home=tmp_path)
        assert "docker login" in caught.value.hint and "wrong word" not in f"{caught.value} {caught.value.hint}"
    with pytest.raises(DalsegnoError, match="no password is stored for cem"):
        imported(f"cem@{hub.name('two', address)}", tmp_path, home=tmp_path)
    (tmp_path / ".docker/config.json").write_text('{"credsStore": "nowhere"}')
    with pytest.raises(DalsegnoError) as caught:
        imported(hub.name("two", address), tmp_path, home=tmp_path)
    assert caught.value.hint.startswith(
        "docker-credential-nowhere is configured, but not installed on this machine; log in"
    )

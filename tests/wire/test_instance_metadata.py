"""The reader of EC2's metadata service, against servers on the loopback."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dalsegno.health.checks.cloud import NoticeAnswers, cloud_text, judge_notices
from dalsegno.health.telemetry import Telemetry, write_telemetry
from dalsegno.observe.http_server import MAX_PER_ADDRESS, HttpServer
from dalsegno.runs.agent.notice_watch import NoticeWatch, find_cloud_file
from dalsegno.spec.facts import CheckSetting, Health
from dalsegno.targets.local.metadata_service import InstanceMetadataService
from dalsegno.wire.cloud_notice import CHECK, CLOUD_FILE, RESERVATION_S, CloudNotice, NoticeKind, parse_cloud
from dalsegno.wire.instance_metadata import MAX_BYTES, SCHEDULED, SPOT, InstanceMetadata, NoMetadata, is_ec2

HEALTHY = Telemetry("train-1")
ANNOUNCED = replace(HEALTHY, notice_at=1795003320.0)
LOOPBACK = ("127.0.0.1", 0)


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[InstanceMetadata]:
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield InstanceMetadata(("127.0.0.1", server.server_address[1]))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def simulated(telemetry: Path | InstanceMetadataService) -> Iterator[InstanceMetadata]:
    """Run the service of virtual hosts."""
    service = InstanceMetadataService(telemetry) if isinstance(telemetry, Path) else telemetry
    listener = socket.create_server(LOOPBACK)
    server = HttpServer(listener, service.answer)
    server.start()
    try:
        yield InstanceMetadata(("127.0.0.1", listener.getsockname()[1]))
    finally:
        server.close()


def answering(status: int, body: bytes = b"token", location: str = "") -> ThreadingHTTPServer:
    """Return a server that gives tokens and answers everything else in the same way."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.answer(200, b"token")

        def do_GET(self) -> None:
            self.answer(status, body)

        def answer(self, code: int, data: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    return ThreadingHTTPServer(LOOPBACK, Handler)


@pytest.fixture
def telemetry(tmp_path: Path) -> Path:
    write_telemetry(tmp_path / "telemetry.json", HEALTHY)
    return tmp_path / "telemetry.json"


def test_missing_item_is_no_notice_and_a_later_notice_is_read(telemetry: Path):
    with simulated(telemetry) as metadata:
        assert metadata.get(SPOT) is None and metadata.get(SCHEDULED) == "[]"
        write_telemetry(telemetry, ANNOUNCED)
        assert metadata.get(SPOT) == '{"action": "terminate", "time": "2026-11-18T12:02:00Z"}'


def test_expired_token_is_renewed(telemetry: Path):
    service = InstanceMetadataService(telemetry)
    with simulated(service) as metadata:
        assert metadata.get(SCHEDULED) == "[]"
        service.token = "another"
        assert metadata.get(SCHEDULED) == "[]"


def test_processes_that_keep_connections_open_do_not_block_the_reader_of_notices(telemetry: Path):
    with simulated(telemetry) as metadata, ExitStack() as stack:
        for _ in range(MAX_PER_ADDRESS + 20):
            stack.enter_context(socket.create_connection(metadata.address))
        assert metadata.get(SCHEDULED) == "[]"


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_refusal_is_not_taken_for_an_answer(status: int):
    with served(answering(status)) as metadata, pytest.raises(NoMetadata, match=str(status)):
        metadata.get(SPOT)


def test_redirects_are_not_followed(telemetry: Path):
    with simulated(telemetry) as elsewhere:
        assert elsewhere.get(SCHEDULED) == "[]"
        target = f"http://127.0.0.1:{elsewhere.address[1]}/latest/meta-data/{SCHEDULED}"
        with served(answering(302, location=target)) as metadata, pytest.raises(NoMetadata, match="302"):
            metadata.get(SCHEDULED)


def test_answer_that_is_too_long_is_refused():
    with served(answering(200, b"x" * (MAX_BYTES + 1))) as metadata, pytest.raises(NoMetadata, match="more than"):
        metadata.get(SPOT)


def test_proxies_of_the_environment_are_not_used(telemetry: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with simulated(telemetry) as metadata:
        assert metadata.get(SCHEDULED) == "[]"


def test_service_that_does_not_listen_gives_no_answer():
    with socket.create_server(LOOPBACK) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(NoMetadata, match="does not answer"):
        InstanceMetadata(("127.0.0.1", port)).get(SPOT)


def test_only_firmware_of_ec2_makes_a_machine_an_instance(tmp_path: Path):
    vendor = tmp_path / "sys_vendor"
    assert not is_ec2(vendor)
    vendor.write_text("Amazon EC2\n")
    assert is_ec2(vendor)
    vendor.write_text("QEMU\n")
    assert not is_ec2(vendor)


# The run agent's watch


def test_run_agent_reports_a_notice_once_and_again_to_a_new_coordinator(telemetry: Path):
    with simulated(telemetry) as metadata:
        watch = NoticeWatch("n1", None, metadata)
        watch.look()
        assert watch.take() == ""
        write_telemetry(telemetry, ANNOUNCED)
        watch.look()
        assert (watch.take(), watch.take()) == ("spot:2026-11-18T12:02:00Z", "")
        watch.repeat()
        assert watch.take() == "spot:2026-11-18T12:02:00Z"


def test_run_agent_takes_a_malformed_answer_for_no_notice():
    with served(answering(200, b'{"action": ')) as metadata:
        watch = NoticeWatch("n1", None, metadata)
        watch.look()
        assert watch.take() == ""


@pytest.fixture
def nobody() -> Iterator[InstanceMetadata]:
    """Return a metadata service that does not answer."""
    with socket.create_server(LOOPBACK) as closed:
        port = closed.getsockname()[1]
    yield InstanceMetadata(("127.0.0.1", port))


@pytest.mark.parametrize("cloud", ["ec2", "hyperpod"])
@pytest.mark.parametrize(("left_s", "is_read"), [(RESERVATION_S + 60, False), (RESERVATION_S - 60, True)])
def test_run_agent_reads_the_end_of_reserved_time_when_the_health_check_does(
    tmp_path: Path, nobody: InstanceMetadata, cloud: str, left_s: float, is_read: bool
):
    file, end = tmp_path / CLOUD_FILE, CloudNotice(NoticeKind.CAPACITY_BLOCK, int(time.time() + left_s))
    file.write_text(cloud_text(Health(), {"n1": end.deadline, "n2": 1.0}, cloud))
    watch = NoticeWatch("n1", file, nobody)
    watch.look()
    assert (watch.take(), watch.take()) == (end.code if is_read else "", "")
    answers = NoticeAnswers(time.time(), parse_cloud(file.read_text(), "n1"))
    assert judge_notices(answers).code == (end.code if is_read else "")


def test_run_agent_uses_the_time_before_the_end_that_the_health_settings_name(tmp_path: Path, nobody: InstanceMetadata):
    file, end = tmp_path / CLOUD_FILE, CloudNotice(NoticeKind.CAPACITY_BLOCK, int(time.time() + 3000))
    health = Health(checks={CHECK: CheckSetting(thresholds={"reservation_s": 3600.0})})
    file.write_text(cloud_text(health, {"n1": end.deadline}))
    watch = NoticeWatch("n1", file, nobody)
    watch.look()
    assert watch.take() == end.code


def test_spot_interruption_takes_precedence_over_the_end_of_reserved_time(telemetry: Path, tmp_path: Path):
    (tmp_path / CLOUD_FILE).write_text(cloud_text(Health(), {"n1": time.time()}))
    write_telemetry(telemetry, ANNOUNCED)
    with simulated(telemetry) as metadata:
        watch = NoticeWatch("n1", tmp_path / CLOUD_FILE, metadata)
        watch.look()
        assert watch.take().startswith("spot:")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"cloud": "ec2", "ends": {"n1": "soon"}}'])
def test_run_agent_takes_a_malformed_file_about_the_cloud_for_no_notice(
    tmp_path: Path, nobody: InstanceMetadata, text: str
):
    (tmp_path / CLOUD_FILE).write_text(text)
    watch = NoticeWatch("n1", tmp_path / CLOUD_FILE, nobody)
    watch.look()
    assert watch.take() == ""


def test_file_about_the_cloud_is_beside_slurm_conf_or_where_the_platform_has_it(tmp_path: Path):
    """A slurmd without a slurm.conf of its own sets SLURM_CONF of jobs to the copy that it fetched."""
    fetched, platform = tmp_path / "conf-cache", tmp_path / "opt"
    for folder in (fetched, platform):
        folder.mkdir()
    env = {"SLURM_CONF": str(fetched / "slurm.conf")}
    assert find_cloud_file(env, platform) is None
    (platform / CLOUD_FILE).touch()
    assert find_cloud_file(env, platform) == platform / CLOUD_FILE
    (fetched / CLOUD_FILE).touch()
    assert find_cloud_file(env, platform) == fetched / CLOUD_FILE

"""Tests of the connections over SSH, against virtual hosts with a real sshd each."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import CommandTimedOut, DalsegnoError
from dalsegno.system.ssh import SshAddress, SshConnections, SshError, SshFault, client_argv
from tests.ssh.hosts import SUDO_PASSWORD, HostRack, make_key, reason_to_skip, running_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "-")]


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostRack]:
    """Eight hosts. A test that breaks one repairs it."""
    with running_hosts(8, tmp_path_factory.mktemp("ssh") / "hosts") as found:
        yield found


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the ssh folder of the user who runs the tests by an empty one, and return it."""
    (tmp_path / ".ssh").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path / ".ssh"


def connect(rack: HostRack, user: str = "root", **settings: object) -> SshConnections:
    return SshConnections(rack.addresses(user), **{"known_hosts": rack.known_hosts, **settings})


def fault_of(connections: SshConnections, host: str = "host-1", *, root: bool = False) -> SshError:
    with connections, pytest.raises(SshError) as raised:
        connections.run(host, ["true"], root=root)
    assert raised.value.host == host and raised.value.what.startswith(f"{host}: ") and raised.value.hint
    return raised.value


# Commands


def test_command_runs_with_its_arguments_unchanged_and_its_exit_code_is_kept(rack):
    words = ["a b", "'", '"', "$HOME", "\\", "line\nbreak", "*", "-n", "ü"]
    with connect(rack) as ssh:
        assert ssh.run("host-1", ["printf", "%s|", *words]).stdout == "".join(f"{word}|" for word in words)
        done = ssh.run("host-2", ["sh", "-c", "hostname; echo no >&2; exit 7"])
        assert (done.exit_code, done.stdout, done.stderr) == (7, "host-2\n", "no\n")
        assert ssh.run("host-1", ["no-such-program"]).exit_code == 127
        assert ssh.run("host-1", ["sh", "-c", "kill -9 $$"]).exit_code == 128 + 9
        assert ssh.run("host-1", ["printf", r"\377\0"]).raw == b"\xff\0"


def test_all_commands_of_a_host_share_one_connection(rack):
    show = ["sh", "-c", "echo $SSH_CONNECTION"]
    with connect(rack) as ssh:
        first = ssh.run("host-1", show).stdout
        with ThreadPoolExecutor(20) as pool:  # more than the sessions that sshd permits on a connection
            others = list(pool.map(lambda _: ssh.run("host-1", show).stdout, range(20)))
        assert {first, *others} == {first}


def test_commands_wait_for_a_session_on_a_host_that_permits_one(rack):
    rack.kill_sshd("host-8")
    rack.start_sshd("host-8", "-o", "MaxSessions=1")
    try:
        with connect(rack) as ssh, ThreadPoolExecutor(8) as pool:
            done = list(pool.map(lambda number: ssh.run("host-8", ["echo", str(number)]).stdout, range(16)))
    finally:
        rack.kill_sshd("host-8")
        rack.start_sshd("host-8")
    assert done == [f"{number}\n" for number in range(16)]


def test_64_mb_of_input_arrive_complete(rack):
    data = os.urandom(1 << 20) * 64
    with connect(rack) as ssh:
        done = ssh.run("host-1", ["sha256sum"], stdin=data, timeout_s=120)
    assert done.stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_input_that_nobody_reads_does_not_block_the_end(rack):
    with connect(rack) as ssh:
        assert ssh.run("host-1", ["true"], stdin=bytes(32 << 20), timeout_s=60).exit_code == 0


def test_lines_arrive_while_the_command_is_still_running(rack):
    host, lines = rack["host-1"], []

    def note(line: str) -> None:
        lines.append((line, threading.current_thread()))
        if line == "first":
            host.run("touch", "/tmp/seen")

    script = "echo first; until [ -e /tmp/seen ]; do sleep 0.02; done; rm /tmp/seen; printf 'second\nno newline'"
    with connect(rack) as ssh:
        done = ssh.run("host-1", ["sh", "-c", script], on_line=note, timeout_s=60)
    assert [line for line, _ in lines] == ["first", "second", "no newline"]
    assert {thread for _, thread in lines} == {threading.current_thread()}
    assert done.stdout == "first\nsecond\nno newline"


def test_command_that_never_ends_is_killed_on_the_host_after_its_time(rack):
    script = "trap '' TERM; echo $$; while :; do sleep 0.1; done"
    with connect(rack) as ssh:
        with pytest.raises(CommandTimedOut) as raised:
            ssh.run("host-1", ["sh", "-c", script], timeout_s=1)
        assert "on host-1" in raised.value.what and "1 s" in raised.value.what
        pid = raised.value.hint.rpartition(" ")[2]
        assert pid.isdigit()
        eventually(lambda: not ssh.run("host-1", ["ps", "-p", pid, "-o", "pid="]).stdout)


def test_endless_output_is_stopped(rack):
    with connect(rack) as ssh:
        with pytest.raises(SshError) as raised:
            ssh.run("host-1", ["yes", "\x1b[2J" + "x" * 100])
        assert raised.value.fault is SshFault.TOO_MUCH_OUTPUT
        assert ssh.run("host-1", ["echo", "still usable"]).stdout == "still usable\n"
        eventually(lambda: not ssh.run("host-1", ["pidof", "yes"]).stdout)


# Faults of a connection


def test_host_that_does_not_exist_is_unreachable(rack):
    address = replace(rack.addresses()[0], address=rack["host-1"].address.rpartition(".")[0] + ".250")
    error = fault_of(SshConnections([address], known_hosts=rack.known_hosts, connect_timeout_s=1))
    assert error.fault is SshFault.UNREACHABLE


def test_port_without_listener_is_refused(rack):
    address = replace(rack.addresses()[0], port=2)
    error = fault_of(SshConnections([address], known_hosts=rack.known_hosts))
    assert error.fault is SshFault.REFUSED and ":2" in error.what


def test_wrong_key_is_refused(rack, tmp_path):
    make_key(tmp_path / "other")
    address = replace(rack.addresses()[0], key=str(tmp_path / "other"))
    error = fault_of(SshConnections([address], known_hosts=rack.known_hosts))
    assert error.fault is SshFault.LOGIN_REFUSED and "`root`" in error.what and "authorized_keys" in error.hint


def test_missing_key_file_is_reported_as_a_setting(rack, tmp_path):
    address = replace(rack.addresses()[0], key=str(tmp_path / "missing"))
    error = fault_of(SshConnections([address], known_hosts=rack.known_hosts))
    assert error.fault is SshFault.SETTINGS and str(tmp_path / "missing") in error.what


def test_unknown_host_key_is_refused_and_shown(rack, tmp_path):
    empty = tmp_path / "known_hosts"
    empty.touch()
    error = fault_of(connect(rack, known_hosts=empty))
    assert error.fault is SshFault.HOST_KEY_UNKNOWN and "ssh-keyscan" in error.hint
    fingerprint = rack["host-1"].run("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    assert fingerprint in error.what
    assert empty.read_text() == ""


def test_settings_that_switch_the_check_of_host_keys_off_are_not_followed(rack, own_settings):
    (own_settings / "config").write_text("Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n")
    error = fault_of(SshConnections(rack.addresses()))
    assert error.fault is SshFault.HOST_KEY_UNKNOWN
    (own_settings / "config").write_text("Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n")
    assert fault_of(SshConnections(rack.addresses())).fault is SshFault.HOST_KEY_UNKNOWN


def test_changed_host_key_is_refused(rack, tmp_path):
    keys = dict(line.split(" ", 1) for line in rack.known_hosts.read_text().splitlines())
    swapped = tmp_path / "known_hosts"
    swapped.write_text(f"damaged line\n{rack['host-1'].address} {keys[rack['host-2'].address]}\n")
    error = fault_of(connect(rack, known_hosts=swapped))
    assert error.fault is SshFault.HOST_KEY_CHANGED and "ssh-keygen" in error.hint


def test_known_key_of_another_type_counts_as_changed(rack, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(tmp_path / "ecdsa")], check=True)
    known = tmp_path / "known_hosts"
    known.write_text(f"{rack['host-1'].address} {(tmp_path / 'ecdsa.pub').read_text()}")
    assert fault_of(connect(rack, known_hosts=known)).fault is SshFault.HOST_KEY_CHANGED


def test_user_settings_name_the_host_its_key_and_its_known_hosts(rack, own_settings):
    (own_settings / "config").write_text(
        f"Host gpu\n  HostName {rack['host-2'].address}\n  User admin\n  IdentityFile {rack.key}\n"
        f"  UserKnownHostsFile {rack.known_hosts}\n  RequestTTY force\n  RemoteCommand false\n  ForwardAgent yes\n"
    )
    with SshConnections([SshAddress("x", "gpu")]) as ssh:
        done = ssh.run("x", ["sh", "-c", "hostname; id -un; tty; echo $SSH_AUTH_SOCK"])
    assert done.stdout == "host-2\nadmin\nnot a tty\n\n"


def test_host_that_is_killed_during_a_command_is_cut_off_at_once(rack):
    with connect(rack) as ssh:
        with pytest.raises(SshError) as raised:
            ssh.run("host-8", ["sh", "-c", "echo begun; sleep 100"], on_line=lambda _: rack.kill_sshd("host-8"))
        assert raised.value.fault is SshFault.CUT and raised.value.output == "begun"
        rack.start_sshd("host-8")
        assert ssh.run("host-8", ["hostname"]).stdout == "host-8\n"


def test_host_whose_cable_is_pulled_is_cut_off_and_connected_again_later(rack):
    with connect(rack, keepalive_s=0.3) as ssh:
        before = time.monotonic()
        with pytest.raises(SshError) as raised:
            ssh.run(
                "host-7", ["sh", "-c", r"printf '\033]0;x\007begun\n'; sleep 100"], on_line=lambda _: rack.cut("host-7")
            )
        assert raised.value.fault is SshFault.CUT and time.monotonic() - before < 20
        assert "\x1b" not in raised.value.what + raised.value.output and "begun" in raised.value.output
        assert ssh.run("host-6", ["hostname"]).stdout == "host-6\n"
        rack.join("host-7")
        assert ssh.run("host-7", ["hostname"]).stdout == "host-7\n"


def test_closing_ends_commands_in_progress(rack):
    ssh = connect(rack)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ssh.run, "host-1", ["sleep", "100"], on_line=None)
        eventually(lambda: rack["host-1"].run("sh", "-c", "pidof sleep || true"))
        ssh.close()
        with pytest.raises(SshError):
            running.result(timeout=30)
    with pytest.raises(DalsegnoError):
        ssh.run("host-1", ["true"])


# Root


def test_root_needs_no_sudo_and_plain_users_get_it_with_or_without_password(rack):
    for user, password in (("root", ""), ("admin", ""), ("asks", SUDO_PASSWORD)):
        with connect(rack, user, sudo_password=password) as ssh:
            assert ssh.run("host-1", ["id", "-u"], root=True).stdout == "0\n"
            expected = "root\n" if user == "root" else f"{user}\n"
            assert ssh.run("host-1", ["id", "-un"]).stdout == expected
            # The password must not reach the command, and no line of the command's input may be lost.
            assert ssh.run("host-1", ["cat"], stdin=b"one\ntwo\n", root=True, timeout_s=30).stdout == "one\ntwo\n"


@pytest.mark.parametrize(
    ("user", "password"), [("asks", ""), ("asks", "wrong"), ("plain", ""), ("plain", SUDO_PASSWORD)]
)
def test_user_who_cannot_become_root_is_reported(rack, user, password):
    error = fault_of(connect(rack, user, sudo_password=password), root=True)
    assert error.fault is SshFault.NO_SUDO and f"`{user}`" in error.what and "sudo_password_file" in error.hint
    assert not password or password not in error.what + error.hint + repr(error)


def test_secrets_are_in_no_argument_or_environment_on_the_host(rack):
    secret = "s3cr3t-of-the-plan"
    look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"
    seen = []
    script = "cat > /dev/null; echo ready; until [ -e /tmp/looked ]; do sleep 0.02; done; rm /tmp/looked"

    def inspect(_: str) -> None:
        seen.append(rack["host-1"].run("sh", "-c", look))
        rack["host-1"].run("touch", "/tmp/looked")

    with connect(rack, "asks", sudo_password=SUDO_PASSWORD) as ssh:
        ssh.run("host-1", ["sh", "-c", script], stdin=secret.encode(), root=True, on_line=inspect, timeout_s=60)
    assert "looked" in seen[0]  # the command itself was observed
    assert secret not in seen[0] and SUDO_PASSWORD not in seen[0]


# Many hosts, jump hosts


def test_each_host_gets_its_own_result_and_not_more_than_the_limit_run_at_once(rack):
    lock, now, most = threading.Lock(), 0, 0

    def work(host: str) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            return ssh.run(host, ["sh", "-c", "sleep 0.3; hostname"]).stdout
        finally:
            with lock:
                now -= 1

    with connect(rack, limit=3) as ssh:
        found = ssh.each([*rack.names, "nowhere"], work)
    failed = found.pop("nowhere")
    assert isinstance(failed, SshError) and failed.fault is SshFault.SETTINGS
    assert found == {name: f"{name}\n" for name in rack.names} and list(found) == rack.names
    assert most == 3


def test_error_that_is_not_ours_ends_all_of_them(rack):
    with connect(rack) as ssh, pytest.raises(ZeroDivisionError):
        ssh.each(["host-1", "host-2"], lambda host: ssh.run(host, ["sleep", "100"]) if host == "host-1" else 1 // 0)


def test_jump_host_reaches_a_host_that_the_operator_cannot_reach(rack):
    rack.hide("host-5")
    hidden = rack.addresses()[4]
    direct = SshConnections([hidden], known_hosts=rack.known_hosts, connect_timeout_s=1)
    assert fault_of(direct, "host-5").fault is SshFault.UNREACHABLE
    through = replace(hidden, jump=f"admin@{rack['host-2'].address}:22")
    with SshConnections([through], known_hosts=rack.known_hosts) as ssh:
        done = ssh.run("host-5", ["sh", "-c", "hostname; echo $SSH_CONNECTION"])
    assert done.stdout.split()[:2] == ["host-5", rack["host-2"].address]


def test_faults_behind_a_jump_host_and_at_it_are_distinguished(rack, tmp_path):
    inner, outer = rack.addresses()[0], rack["host-2"].address
    known = rack.known_hosts
    error = fault_of(SshConnections([replace(inner, port=2, jump=f"root@{outer}")], known_hosts=known))
    assert error.fault is SshFault.UNREACHABLE and "jump host cannot reach" in error.what
    error = fault_of(SshConnections([replace(inner, jump=f"root@{outer}:2")], known_hosts=known))
    assert error.fault is SshFault.REFUSED and f"jump host root@{outer}:2" in error.what
    only_inner = tmp_path / "known"
    only_inner.write_text(known.read_text().splitlines()[0])
    error = fault_of(SshConnections([replace(inner, jump=f"root@{outer}")], known_hosts=only_inner))
    assert error.fault is SshFault.HOST_KEY_UNKNOWN and "jump host" in error.what


def test_name_that_leads_to_another_host_that_is_known_by_its_address_is_refused(rack, tmp_path, own_settings):
    """Otherwise, an attacker who forges DNS answers could present any other known host under the requested name."""
    other = rack["host-2"].address
    (own_settings / "config").write_text(f"Host head\n  HostName {other}\n  HostKeyAlias head\n")
    keys = dict(line.split(" ", 1) for line in rack.known_hosts.read_text().splitlines())
    known = tmp_path / "known"
    known.write_text(f"head {keys[rack['host-1'].address]}\n{other} {keys[other]}\n")
    address = SshAddress("host-1", "head", "root", key=str(rack.key))
    assert fault_of(SshConnections([address], known_hosts=known)).fault is SshFault.HOST_KEY_CHANGED


def test_ssh_client_for_people_uses_the_same_settings_and_checks(rack, tmp_path):
    def ask(address: SshAddress, known: Path) -> subprocess.CompletedProcess[str]:
        argv = client_argv(address, ["echo", "a  b", "$HOME"], known_hosts=known)
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    direct = rack.addresses("admin")[0]
    through = replace(direct, jump=f"root@{rack['host-2'].address}:22")
    empty = tmp_path / "known_hosts"
    empty.touch()
    assert [ask(each, rack.known_hosts).stdout for each in (direct, through)] == ["a  b $HOME\n"] * 2
    assert [ask(each, empty).returncode for each in (direct, through)] == [255, 255]
    assert empty.read_text() == ""

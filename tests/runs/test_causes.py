"""Classification of failures: signatures, noise of peers, kinds, and messages."""

from dataclasses import replace

import pytest

from dalsegno.runs.coordinator.generations.causes import (
    CauseKind,
    Failure,
    back_off_s,
    first_cause,
    is_bug,
    read_failure,
    signature,
    suspected_node,
)


def traceback(message: str = "ValueError: bad batch", line: int = 7, file: str = "/home/ada/train.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line {line}, in <module>\n    step(batch)\n{message}'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("KeyError: 17", "KeyError: 18"),
        ("RuntimeError: tensor at 0x7f3a10 is gone", "RuntimeError: tensor at 0x7f9bcd is gone"),
        ("ValueError: shape [2, 3]", "ValueError: shape [64, 12]"),
    ],
)
def test_signature_ignores_numbers_and_addresses(one: str, other: str):
    assert signature(traceback(one)) == signature(traceback(other)) != ""


@pytest.mark.parametrize(
    "other", [traceback(line=8), traceback("TypeError: bad batch"), traceback("ValueError: bad file"),
              traceback(file="/home/ada/other.py")]
)  # fmt: skip
def test_signature_depends_on_line_type_message_and_file(other: str):
    assert signature(traceback()) != signature(other)


def test_signature_ignores_the_rank_prefix_of_torch():
    def on(rank: int) -> str:
        return "\n".join(f"[rank{rank}]: {line}" for line in traceback().splitlines())

    two, five = read_failure(2, "n1", 1, on(2)), read_failure(5, "n2", 1, on(5))
    assert two.signature == five.signature == read_failure(0, "n", 1, traceback()).signature
    assert two.traceback == traceback(), "the prefix is removed for display"


def test_signature_uses_only_frames_of_the_user():
    def through(library_line: int) -> str:
        frame = f'  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py", line {library_line}, in forward\n'
        head, _, message = traceback().rpartition("\n")
        return f"{head}\n{frame}{message}"

    assert signature(through(10)) == signature(through(99)) and "torch" not in signature(through(10))


def test_signature_uses_library_frames_if_there_are_no_others():
    assert "module.py:3" in signature(traceback(line=3, file="/usr/lib/python3/dist-packages/module.py"))


@pytest.mark.parametrize("text", ["", "\n\n", "Killed", "ValueError: without a frame"])
def test_text_without_a_traceback_has_no_signature(text: str):
    assert signature(text) == ""


def test_exit_code_is_a_signature_but_a_signal_is_not():
    assert (read_failure(0, "n", 3).signature, read_failure(0, "n", -9).signature) == ("exit 3", "")


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1234",
        "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] . Read timeout",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms "
        "for recv operation to complete",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, "
        "unhandled system error, NCCL version 2.20.5",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
        "via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (n1, 2)",
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "RuntimeError: Socket Timeout",
        "RuntimeError: Broken pipe",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)  # fmt: skip
def test_errors_about_lost_peers_are_noise(message: str):
    assert read_failure(1, "n", 1, traceback(message)).noise


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: bad batch",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: device-side assert triggered",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",
        "KeyboardInterrupt",
    ],
)
def test_fault_of_the_rank_itself_is_not_noise(message: str):
    assert not read_failure(1, "n", 1, traceback(message)).noise


def test_only_the_last_line_decides_on_noise():
    text = traceback("ValueError: bad batch").replace("step(batch)", "init_process_group('gloo')  # NCCL")
    assert not read_failure(1, "n", 1, text).noise


def test_broken_pipe_to_a_lost_peer_is_noise():
    assert read_failure(1, "n", -13).noise and not read_failure(1, "n", -9).noise


@pytest.mark.parametrize(
    ("code", "oom", "kind"),
    [(1, False, CauseKind.SCRIPT), (75, False, CauseKind.SCRIPT), (-9, False, CauseKind.KILLED),
     (-15, False, CauseKind.KILLED), (-9, True, CauseKind.OOM), (-11, False, CauseKind.CRASHED),
     (-6, False, CauseKind.CRASHED), (-7, False, CauseKind.CRASHED)],
)  # fmt: skip
def test_failure_kind_follows_from_the_exit_code(code: int, oom: bool, kind: CauseKind):
    assert read_failure(0, "n", code, oom=oom).kind is kind


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (read_failure(3, "gpu-7", 1, traceback("KeyError: 'x'")), "rank 3 on gpu-7 failed: KeyError: 'x'"),
        (read_failure(3, "gpu-7", 1, traceback("[rank3]: KeyError: 1")), "rank 3 on gpu-7 failed: KeyError: 1"),
        (read_failure(3, "gpu-7", 5), "rank 3 on gpu-7 ended with exit code 5"),
        (read_failure(3, "gpu-7", -11), "rank 3 on gpu-7 was ended by SIGSEGV"),
        (read_failure(3, "gpu-7", -62), "rank 3 on gpu-7 was ended by signal 62"),
        (read_failure(3, "gpu-7", -9, oom=True), "rank 3 on gpu-7 was killed by the kernel: out of memory"),
        (Failure(3, "gpu-7", -9, CauseKind.KILLED, why="no step for 60 s"), "rank 3 on gpu-7 ended: no step for 60 s"),
    ],
)
def test_failure_is_described_in_one_sentence(failure: Failure, sentence: str):
    assert failure.sentence() == sentence


def test_exit_code_of_a_signal_is_as_in_a_shell():
    assert [read_failure(0, "n", code).exit_code for code in (1, 93, -9, -11)] == [1, 93, 137, 139]


def test_first_failure_that_is_not_noise_is_the_cause():
    noise, real, later = (read_failure(0, "n", -13), read_failure(1, "n", 1), read_failure(2, "n", 2))
    assert first_cause([noise, real, later]) == real
    assert first_cause([noise]) == noise
    assert first_cause([]) is None


def test_same_script_fault_twice_is_a_bug():
    fault = read_failure(0, "n", 1, traceback())
    assert is_bug(fault, read_failure(5, "m", 1, traceback()))
    assert not is_bug(fault, None) and not is_bug(fault, read_failure(0, "n", 1, traceback(line=9)))


def test_signals_and_noise_are_not_bugs():
    for code, text in ((-9, ""), (-11, traceback()), (1, traceback("RuntimeError: Socket Timeout"))):
        failure = read_failure(0, "n", code, text)
        assert not is_bug(failure, failure)


def test_node_is_suspected_after_two_crashes_in_a_row():
    crash, oom = read_failure(0, "n", -11), read_failure(0, "n", -9, oom=True)
    assert suspected_node(crash, read_failure(4, "n", -7)) == "n" == suspected_node(oom, oom)
    for before in (None, oom, read_failure(0, "m", -11), read_failure(0, "n", 1)):
        assert suspected_node(crash, before) == ""


def test_failure_on_an_unhealthy_node_is_not_a_bug_and_excludes_the_node():
    fault = read_failure(0, "n", 1, traceback())
    ill = replace(fault, healthy=False)
    assert is_bug(fault, fault) and not is_bug(ill, fault) and not is_bug(fault, ill)
    assert suspected_node(ill, None) == "n" and suspected_node(fault, ill) == ""


def test_pause_doubles_up_to_half_a_minute():
    assert [back_off_s(quick) for quick in (0, 1, 2, 3, 4, 5, 6, 7, 8, 100)] == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30]


NO_PYTHON = '  File "train.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax'


@pytest.mark.parametrize(
    ("code", "traceback", "hopeless"),
    [
        (1, NO_PYTHON, True),
        (1, NO_PYTHON.replace("SyntaxError: invalid syntax", "IndentationError: unexpected indent"), True),
        (2, "train.py: error: the following arguments are required: --lr", True),
        (2, "Error: No such option: --nope", True),
        (1, "train.py: error: the following arguments are required: --lr", False),
        (2, "Traceback (most recent call last):\nValueError: bad batch", False),
        (1, "ValueError: SyntaxError: in the data", False),
        (2, "", False),
    ],
)
def test_syntax_and_usage_errors_are_hopeless_at_once(code: int, traceback: str, hopeless: bool):
    assert read_failure(0, "n1", code, traceback).hopeless is hopeless

"""A node under load, for a short while: what it computes, remembers and sends is compared with what is known.

No library is needed. numpy makes the products faster where it is, and torch has the GPUs do them where there are some.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dalsegno.health.result import Remedy, Result, failed, passed, unknown

PRODUCT_S, MEMORY_S = 1.0, 1.5
MEMORY_SHARE, MOST_MEMORY = 0.1, 256 << 20
LOOPBACK_BYTES = 32 << 20


def judged(load: Callable[[], Result]) -> Result:
    """What a load comes to; one that could not be put on the node says nothing of it."""
    try:
        return load()
    except Exception as error:  # a library that is there and does not work
        return unknown(f"could not be tried: {type(error).__name__}: {error}"[:200])


# Products of matrices: a(i, k) = i + k, b(k, j) = k - j. Whole numbers, exact in 64 bits, and the answer has a formula.


def product_formula(i: int, j: int, n: int) -> int:
    first, second = n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6  # sums of k, and of its squares
    return i * first - i * j * n + second - j * first


def matrix_product(for_s: float = PRODUCT_S) -> Result:
    """On the CPU."""
    if importlib.util.find_spec("numpy") is None:
        return _repeat(for_s, 48, _plain_product)
    return _repeat(for_s, 384, _numpy_product)


def may_have_gpus() -> bool:
    """Real ones: their driver is there."""
    return os.path.exists("/dev/nvidiactl")


def gpu_products(for_s: float = PRODUCT_S) -> Iterator[tuple[int, Result]]:
    """On every GPU that torch can use; none where there is no driver, or no torch, which takes seconds to load."""
    if not may_have_gpus() or importlib.util.find_spec("torch") is None:
        return
    import torch

    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        yield index, judged(lambda index=index: _repeat(for_s, 2048, lambda n: _torch_product(torch, index, n)))  # type: ignore[misc]


def _repeat(for_s: float, n: int, product: Callable[[int], int]) -> Result:
    """Again and again for a while; `product` gives how many of its numbers are wrong."""
    began, times = time.monotonic(), 0
    while times == 0 or time.monotonic() - began < for_s:
        if wrong := product(n):
            return failed(f"{wrong} of {n * n} numbers of a matrix product are wrong", Remedy.REPLACE, "wrong")
        times += 1
    gflops = 2e-9 * n**3 * times / (time.monotonic() - began)
    return passed(f"{times} products of {n} x {n} matrices are right, {gflops:.3g} GFLOP/s")


def _plain_product(n: int) -> int:
    rows = [[i + k for k in range(n)] for i in range(n)]
    columns = [[k - j for k in range(n)] for j in range(n)]
    return sum(
        sum(a * b for a, b in zip(row, column, strict=True)) != product_formula(i, j, n)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    )


def _numpy_product(n: int) -> int:
    import numpy

    i = numpy.arange(n, dtype=numpy.float64)
    found = (i[:, None] + i[None, :]) @ (i[:, None] - i[None, :])
    return int((found != _formula_table(i, n)).sum())


def _torch_product(torch: Any, index: int, n: int) -> int:
    """In 64 bits against the formula, and twice as training does it: the same bits must come out."""
    i = torch.arange(n, dtype=torch.float64, device=f"cuda:{index}")
    a, b = i[:, None] + i[None, :], i[:, None] - i[None, :]
    wrong = int((a @ b != _formula_table(i, n)).sum())
    short_a, short_b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return wrong + int((short_a @ short_b != short_a @ short_b).sum())


def _formula_table(i: Any, n: int) -> Any:
    first, second = n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6
    return i[:, None] * first - i[:, None] * i[None, :] * n + second - i[None, :] * first


# Memory -------------------------------------------------------------------------------------------------------


def memory_load(available: int, for_s: float = MEMORY_S) -> Result:
    """Fill a part of what is free with patterns, and read it again."""
    size = max(min(int(available * MEMORY_SHARE), MOST_MEMORY), 1 << 20)
    began, rounds = time.monotonic(), 0
    while rounds == 0 or time.monotonic() - began < for_s:
        if at := _wrong_block(size, rounds):
            return failed(f"memory gave back other bytes than it was given, in block {at}", Remedy.REPLACE, "wrong")
        rounds += 1
    return passed(f"{rounds} times {size >> 20} MiB of memory came back as they were written")


def _wrong_block(size: int, seed: int) -> int:
    """The number of the first block, from 1, that is not as it was written; 0 if all are."""
    block = hashlib.shake_128(b"memory %d" % seed).digest(1 << 20)
    blocks = [bytearray(block) for _ in range(size >> 20)]
    return next((number for number, each in enumerate(blocks, 1) if each != block), 0)


def available_bytes(meminfo: str) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


# Sending ------------------------------------------------------------------------------------------------------


def pattern(seed: bytes) -> bytes:
    """A MiB that only those who know the seed can make."""
    return hashlib.shake_128(seed).digest(1 << 20)


def send_pattern(sock: socket.socket, seed: bytes, size: int) -> None:
    block = memoryview(pattern(seed))
    for start in range(0, size, len(block)):
        sock.sendall(block[: min(len(block), size - start)])


def receive_pattern(sock: socket.socket, seed: bytes, size: int) -> bool:
    """Whether what comes is what was sent. OSError if it does not come."""
    block, got = pattern(seed), 0
    while got < size:
        at = got % len(block)
        data = sock.recv(min(len(block) - at, size - got))
        if not data:
            raise OSError("the connection broke")
        if data != block[at : at + len(data)]:
            return False
        got += len(data)
    return True


def loopback_exchange(size: int = LOOPBACK_BYTES) -> Result:
    """Through the host's own network stack."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        began = time.monotonic()
        sender = socket.create_connection(server.getsockname(), 5.0)
        address = sender.getsockname()  # before the thread, which closes it
        threading.Thread(target=_send_loopback, args=(sender, size), daemon=True).start()
        with _accept_from(server, address) as sock:
            sock.settimeout(10.0)
            right = receive_pattern(sock, b"loopback", size)
    if not right:
        return failed("other bytes came through the loopback than were sent", Remedy.REPLACE, "wrong")
    return passed(f"{size >> 20} MiB through the loopback, {size / 1e9 / (time.monotonic() - began):.2g} GB/s")


def _accept_from(server: socket.socket, address: tuple[str, int]) -> socket.socket:
    """Any user of the node can call too, and what a stranger sends must not condemn it."""
    while True:
        sock, caller = server.accept()
        if caller == address:
            return sock
        sock.close()


def _send_loopback(sock: socket.socket, size: int) -> None:
    with contextlib.suppress(OSError), sock:
        send_pattern(sock, b"loopback", size)

"""Short load tests of a node: computation, memory and network, compared with known results.

No library is required. numpy speeds up the products if installed; torch runs them on the GPUs, if there are any.
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
MEMORY_SHARE, MAX_MEMORY = 0.1, 256 << 20
LOOPBACK_BYTES = 32 << 20


def run_load(load: Callable[[], Result]) -> Result:
    """Return the result of a load test; unknown if it could not be run."""
    try:
        return load()
    except Exception as error:  # for example, a library is installed but does not work
        return unknown(f"could not be run: {type(error).__name__}: {error}"[:200])


# Matrix products of a(i, k) = i + k and b(k, j) = k - j: integers that are exact in 64 bits, with a known result.


def product_formula(i: int, j: int, n: int) -> int:
    first, second = n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6  # the sum of k, and the sum of its squares
    return i * first - i * j * n + second - j * first


def matrix_product(for_s: float = PRODUCT_S) -> Result:
    """Multiply matrices on the CPU."""
    if importlib.util.find_spec("numpy") is None:
        return _repeat(for_s, 48, _plain_product)
    return _repeat(for_s, 384, _numpy_product)


def may_have_gpus() -> bool:
    """Return whether real GPUs may be present: their driver is loaded."""
    return os.path.exists("/dev/nvidiactl")


def gpu_products(for_s: float = PRODUCT_S) -> Iterator[tuple[int, Result]]:
    """Multiply matrices on every GPU, and yield the index and the result of each. Without a driver or torch, yield
    nothing."""
    if not may_have_gpus() or importlib.util.find_spec("torch") is None:
        return
    import torch

    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        yield index, run_load(lambda index=index: _repeat(for_s, 2048, lambda n: _torch_product(torch, index, n)))  # type: ignore[misc]


def _repeat(for_s: float, n: int, product: Callable[[int], int]) -> Result:
    """Repeat a product of `n` x `n` matrices for `for_s` seconds. `product` returns how many numbers of its result are
    wrong."""
    began, times = time.monotonic(), 0
    while times == 0 or time.monotonic() - began < for_s:
        if wrong := product(n):
            return failed(f"{wrong} of {n * n} numbers of a matrix product are wrong", Remedy.REPLACE, "wrong")
        times += 1
    gflops = 2e-9 * n**3 * times / (time.monotonic() - began)
    return passed(f"{times} products of {n} x {n} matrices are correct, {gflops:.3g} GFLOP/s")


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
    """Return how many numbers are wrong: the 64-bit product is compared with the formula, the bfloat16 product with a
    second run."""
    i = torch.arange(n, dtype=torch.float64, device=f"cuda:{index}")
    a, b = i[:, None] + i[None, :], i[:, None] - i[None, :]
    wrong = int((a @ b != _formula_table(i, n)).sum())
    short_a, short_b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return wrong + int((short_a @ short_b != short_a @ short_b).sum())


def _formula_table(i: Any, n: int) -> Any:
    first, second = n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6
    return i[:, None] * first - i[:, None] * i[None, :] * n + second - i[None, :] * first


# The load test of memory


def memory_load(available: int, for_s: float = MEMORY_S) -> Result:
    """Fill part of the free memory with patterns and read it back."""
    size = max(min(int(available * MEMORY_SHARE), MAX_MEMORY), 1 << 20)
    began, rounds = time.monotonic(), 0
    while rounds == 0 or time.monotonic() - began < for_s:
        if at := _wrong_block(size, rounds):
            return failed(f"memory returned other bytes than were written, in block {at}", Remedy.REPLACE, "wrong")
        rounds += 1
    return passed(f"{size >> 20} MiB of memory written and read back {rounds} times")


def _wrong_block(size: int, seed: int) -> int:
    """Return the number of the first wrong block, counted from 1; 0 if all blocks are right."""
    block = hashlib.shake_128(b"memory %d" % seed).digest(1 << 20)
    blocks = [bytearray(block) for _ in range(size >> 20)]
    return next((number for number, each in enumerate(blocks, 1) if each != block), 0)


def available_bytes(meminfo: str) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


# The load test of the network


def pattern(seed: bytes) -> bytes:
    """Return one MiB of data that cannot be computed without the seed."""
    return hashlib.shake_128(seed).digest(1 << 20)


def send_pattern(sock: socket.socket, seed: bytes, size: int) -> None:
    block = memoryview(pattern(seed))
    for start in range(0, size, len(block)):
        sock.sendall(block[: min(len(block), size - start)])


def receive_pattern(sock: socket.socket, seed: bytes, size: int) -> bool:
    """Return whether the expected pattern is received; raise OSError if the connection ends."""
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
    """Send data through the host's own network stack, and return whether it arrived unchanged."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        began = time.monotonic()
        sender = socket.create_connection(server.getsockname(), 5.0)
        address = sender.getsockname()  # read before the thread starts, which closes the socket
        threading.Thread(target=_send_loopback, args=(sender, size), daemon=True).start()
        with _accept_from(server, address) as sock:
            sock.settimeout(10.0)
            right = receive_pattern(sock, b"loopback", size)
    if not right:
        return failed("the loopback returned other bytes than were sent", Remedy.REPLACE, "wrong")
    return passed(f"{size >> 20} MiB through the loopback, {size / 1e9 / (time.monotonic() - began):.2g} GB/s")


def _accept_from(server: socket.socket, address: tuple[str, int]) -> socket.socket:
    """Accept only our own connection: any user of the node can connect, and their data must not make the test fail."""
    while True:
        sock, caller = server.accept()
        if caller == address:
            return sock
        sock.close()


def _send_loopback(sock: socket.socket, size: int) -> None:
    with contextlib.suppress(OSError), sock:
        send_pattern(sock, b"loopback", size)

"""Another user of the machine can neither make a training load their files nor make root remove files of others.

The attacker and the victim are two plain users, and the shared memory is real. The attacker's pickle would create a
harmless file when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.node_agent.evidence import UNUSED_S, SharedMemorySweeper
from dalsegno.node_agent.worker import CHECK_S
from dalsegno.runs.torchrun.rendezvous import Keys
from dalsegno.system.children import descendants
from dalsegno.train.agent import AgentLink
from dalsegno.train.errors import NotEnoughMemory
from dalsegno.train.keeper.holdings import holdings
from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.keeper.wire import dial
from dalsegno.train.memory.files import (
    SHM,
    SlotName,
    alive_name,
    find_folder,
    hold,
    open_own,
    own_folder,
    sweep,
    sweep_abandoned,
)
from dalsegno.train.memory.slots import Slot, Slots, write
from dalsegno.train.memory.snapshot import open_snapshot, state_of
from dalsegno.train.ranks import LocalRankStore
from dalsegno.train.resume import resume_from_memory
from dalsegno.train.state import Objects, TrainingState, take
from dalsegno.wire.frames import BadFrame, Reader, send
from tests.security.other_user import as_user
from tests.security.poison import Poison
from tests.submit.torchrun.launcher import Launcher
from tests.train.keeper.nodes import Node
from tests.train.memory.run_files import list_run_files
from tests.train.memory.states import filled

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two other users")

VICTIM, ATTACKER = 64201, 64202


@pytest.fixture
def run() -> str:
    return f"security-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def loaded() -> Iterator[Path]:
    """The file that exists once the attacker's code has run."""
    with tempfile.TemporaryDirectory(prefix="dalsegno-security-") as folder:
        os.chmod(folder, 0o777)
        yield Path(folder) / "loaded"


@pytest.fixture(autouse=True)
def shm() -> Iterator[Path]:
    """The machine's shared memory, without files of the two users."""
    _clear()
    yield SHM
    _clear()


def _clear() -> None:
    for path in SHM.glob(f"dalsegno.{VICTIM}*"):
        subprocess.run(["rm", "-rf", "--", str(path)], check=True)


def poisoned(target: Path) -> TrainingState:
    """Return a state that runs code when it is loaded."""
    state = take({"model": torch.nn.Linear(2, 2).state_dict()}, {"random": None}, step=7, rank=0, world=1)
    bad = pickle.dumps(Poison(target))
    return TrainingState(state.step, state.rank, state.world, state.pieces, bad, bad, {"x": Poison(target)})


def plant(folder: Path, run: str, target: Path) -> Path:
    """Write a complete snapshot of the attacker that everyone can read."""
    path = folder / str(SlotName(run, 0, 0))
    assert write(Slot(path), poisoned(target), generation=1)
    path.chmod(0o644)
    folder.chmod(0o755)
    return path


def test_poisoned_snapshot_runs_code_when_loaded(run: str, loaded: Path) -> None:
    """Otherwise the other tests would prove nothing."""

    def attack_oneself() -> None:
        snapshot = open_snapshot(Slots(run, 0, 1).slots[0].path)
        assert snapshot is None
        slot = Slots(run, 0, 1)
        slot.write(poisoned(loaded))
        mine = open_snapshot(slot.slots[0].path)
        assert mine is not None
        state_of(mine)

    as_user(VICTIM, attack_oneself)
    assert loaded.exists()


def test_snapshots_in_a_folder_created_by_another_user_are_ignored(run: str, loaded: Path) -> None:
    folder = SHM / f"dalsegno.{VICTIM}"

    def squat() -> str:
        folder.mkdir(mode=0o700)
        return str(plant(folder, run, loaded))

    planted = Path(as_user(ATTACKER, squat))

    def train() -> tuple[bool, int, str]:
        assert open_snapshot(planted) is None and open_own(planted) is None
        slots = Slots(run, 0, 2)
        slots.write(take({}, {}, step=1, rank=0, world=1))
        return find_folder() == folder, len(holdings(run)), str(find_folder())

    assert as_user(VICTIM, train) == (False, 1, f"{folder}.1")
    assert not loaded.exists()
    assert as_user(VICTIM, lambda: str(own_folder())) == f"{folder}.1", "and it is found again later"


@pytest.mark.parametrize("kind", ["link", "file", "accessible to others"])
def test_link_file_or_open_folder_is_not_used_for_snapshots(run: str, loaded: Path, kind: str) -> None:
    folder = SHM / f"dalsegno.{VICTIM}"

    def prepare() -> None:
        if kind == "file":
            folder.touch()
        elif kind == "link":
            folder.symlink_to(loaded.parent)
        else:
            folder.mkdir()
            folder.chmod(0o777)

    as_user(VICTIM if kind == "accessible to others" else ATTACKER, prepare)
    assert as_user(VICTIM, lambda: str(own_folder())) == f"{folder}.1"


def test_a_file_in_the_victims_own_folder_is_checked_too(run: str, loaded: Path) -> None:
    """The victim's folder may have been accessible to others for a moment."""

    def leave_open() -> None:
        own_folder().chmod(0o777)

    as_user(VICTIM, leave_open)
    folder = SHM / f"dalsegno.{VICTIM}"
    planted = as_user(ATTACKER, lambda: _planted_elsewhere(folder, run, loaded))
    as_user(VICTIM, lambda: folder.chmod(0o700))
    assert planted == 3

    def train() -> int:
        assert all(open_snapshot(folder / str(SlotName(run, 0, slot))) is None for slot in range(3))
        slots = Slots(run, 0, 2)
        slots.write(take({}, {}, step=1, rank=0, world=1))
        return len(holdings(run))

    assert as_user(VICTIM, train) == 1, "planted files are removed, and the victim's folder stays in use"
    assert not loaded.exists()


def _planted_elsewhere(folder: Path, run: str, target: Path) -> int:
    """Plant a file, a link to it, and a FIFO that would block a reader."""
    with tempfile.TemporaryDirectory(prefix=f"dalsegno.{VICTIM}-", dir=SHM) as made:
        path = plant(Path(made), run, target)
        (folder / str(SlotName(run, 0, 0))).write_bytes(path.read_bytes())
    (folder / str(SlotName(run, 0, 1))).symlink_to(folder / str(SlotName(run, 0, 0)))
    os.mkfifo(folder / str(SlotName(run, 0, 2)), 0o644)
    return 3


def test_when_every_name_is_taken_the_error_names_the_fix(run: str) -> None:
    def squat_all() -> None:
        for number in range(64):
            (SHM / f"dalsegno.{VICTIM}{f'.{number}' if number else ''}").mkdir()

    as_user(ATTACKER, squat_all)

    def train() -> str:
        with pytest.raises(NotEnoughMemory) as refused:
            Slots(run, 0, 1)
        return str(refused.value)

    assert f"ask an administrator to remove {SHM}/dalsegno.{VICTIM}*" in as_user(VICTIM, train)


def test_agent_of_another_user_is_not_asked_for_snapshots(run: str, loaded: Path) -> None:
    """Once an agent is dead, anyone can take its abstract socket name and offer their own snapshot."""
    name = f"dalsegno.{VICTIM}.{run}.1"
    folder = Path(as_user(ATTACKER, lambda: tempfile.mkdtemp(prefix=f"dalsegno.{VICTIM}-", dir=SHM)))
    planted = as_user(ATTACKER, lambda: str(plant(folder, run, loaded)))
    listener = as_listener(name, ATTACKER)
    asked: list[dict[str, Any]] = []

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            for message in Reader().feed(sock.recv(65536)):
                asked.append(message)
                send(sock, {"step": 7, "own": planted, "shared": planted})

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()

    def resume() -> bool:
        model = Objects({"model": torch.nn.Linear(2, 2)})
        return resume_from_memory(model, AgentLink(name), Path("/nonexistent"), LocalRankStore(), 0, print) is None

    assert as_user(VICTIM, resume)
    thread.join(10)
    listener.close()
    assert asked == [] and not loaded.exists()


def as_listener(name: str, uid: int) -> socket.socket:
    """Return a socket with the user's credentials: the kernel records who calls listen()."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.seteuid(uid)
    try:
        sock.bind("\0" + name)
        sock.listen(8)
    finally:
        os.seteuid(0)
    return sock


def test_snapshot_of_another_user_is_not_loaded_even_if_the_agent_names_it(run: str, loaded: Path) -> None:
    folder = Path(as_user(ATTACKER, lambda: tempfile.mkdtemp(prefix=f"dalsegno.{VICTIM}-", dir=SHM)))
    planted = Path(as_user(ATTACKER, lambda: str(plant(folder, run, loaded))))
    assert as_user(VICTIM, lambda: open_snapshot(planted) is None)
    assert not loaded.exists()


def test_root_sweep_follows_no_links_out_of_the_owners_folder(run: str, loaded: Path) -> None:
    """Neither links in the attacker's folder nor a link in place of the folder are followed."""
    outside = loaded.parent / "outside"
    outside.mkdir()
    (outside / f"{run}.safe").touch()
    os.utime(outside / f"{run}.safe", (0, 0))
    shm = loaded.parent / "shm"
    shm.mkdir()
    shm.chmod(0o1777)

    def prepare() -> None:
        (shm / f"dalsegno.{ATTACKER}").mkdir(mode=0o700)
        (shm / f"dalsegno.{ATTACKER}" / f"{run}.0.0").symlink_to(outside / f"{run}.safe")
        os.utime(shm / f"dalsegno.{ATTACKER}" / f"{run}.0.0", (0, 0), follow_symlinks=False)
        (shm / f"dalsegno.{VICTIM}").symlink_to(outside)

    as_user(ATTACKER, prepare)
    memory = SharedMemorySweeper(shm)
    assert memory.tidy(0.0) == []
    assert memory.tidy(UNUSED_S) == [(ATTACKER, run)]
    assert os.listdir(shm) == [f"dalsegno.{VICTIM}"], "the link itself and the empty folder were removed"
    assert os.listdir(outside) == [f"{run}.safe"], "its target is untouched"


def test_locks_of_other_users_do_not_affect_sweeping(run: str) -> None:
    """Only a user's own files count, so a lock of the attacker has no effect on the victim's files and vice versa."""

    def train() -> None:
        folder = own_folder()
        os.close(hold(run, 0, folder))
        assert list_run_files(run, folder) == [alive_name(run, 0)]

    as_user(VICTIM, train)
    assert as_user(ATTACKER, sweep_abandoned) == []
    assert as_user(VICTIM, sweep_abandoned) == [(run, 0)]


TRAINS = """
import os, time, torch, torch.distributed as dist
from dalsegno.train import Checkpointer
dist.init_process_group("gloo")
steps = Checkpointer("ckpt", model=torch.nn.Linear(2, 2), memory_every=1, disk_every=None)
for step in steps.steps(10**6):
    steps.done()
    time.sleep(0.05)
    if step == 20:
        print("trains", os.environ["DALSEGNO_RUN"], flush=True)
"""


@pytest.mark.cluster  # processes with torch: too slow for the unit part
def test_torchrun_without_munge_serves_no_snapshots_under_a_guessable_key(tmp_path: Path) -> None:
    """The key that its agents share is derived from the run's id and the endpoint: anyone can compute it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    launcher = Launcher(tmp_path, sys.executable, {"SLURM_CONF": "/nonexistent"})
    launcher.script(TRAINS)
    run = "none"
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", f"localhost:{port}"]
    try:
        nodes = [launcher.start(*words, "train.py") for _ in range(2)]
        for node in nodes:
            assert node.stdout is not None
            (run,) = {node.stdout.readline().split()[1]}
        guessed = Keys("j", f"localhost:{port}", None).make()
        pids = {node.pid: (node.pid, *descendants(node.pid)) for node in nodes}
        names = {pid: [f"0@{socket.gethostname()}#{each}" for each in own] for pid, own in pids.items()}
        doors = {place: names[node.pid] for node in nodes for place in listening(node.pid)}
        assert len(doors) >= 3, "the coordinator's, and each agent's"
        with ThreadPoolExecutor(len(doors)) as pool:
            accepted = pool.map(lambda door: accepts_any(*door, run, (guessed, b"")), doors.items())
            assert list(accepted) == [False] * len(doors)
    finally:
        launcher.close()
        sweep(run)  # killed agents leave their snapshots behind


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses on which a process and its descendants listen."""
    pids = [pid, *descendants(pid)]
    inodes = set()
    for each in pids:
        for fd in Path(f"/proc/{each}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    ours = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return sorted({("127.0.0.1", int(row[1].rpartition(":")[2], 16)) for row in ours})


def accepts_any(place: tuple[str, int], names: list[str], run: str, keys: Sequence[bytes]) -> bool:
    """Return whether a keeper at this address accepts us as part of its run, under any of these names and keys."""
    try:
        return any(is_accepted(KeeperAddress(*place, name), run, key) for name in names for key in keys)
    except TimeoutError:
        return False  # this address has no keeper, because it never answers


def is_accepted(address: KeeperAddress, run: str, secret: bytes) -> bool:
    try:
        dial(address, run, secret).close()
    except TimeoutError:
        raise
    except (OSError, BadFrame, ValueError):
        return False
    return True


def test_a_redirected_connection_reaches_no_other_node_of_the_run(tmp_path: Path) -> None:
    """All keepers of a run share its secret. A copy on the node that it came from would be lost with that node."""
    nodes = {}
    for name in ("one", "other", "third"):
        (tmp_path / name).mkdir(mode=0o700)
        nodes[name] = Node(tmp_path / name)
        nodes[name].start()
    one, other, third = nodes.values()
    try:
        other.keep()
        third.keep()
        third.commit(filled(5, rank=2, world=3))
        third.until(lambda: third.kept)
        redirected = KeeperAddress("127.0.0.1", third.port, "other")
        one.keep(redirected)
        one.commit(filled(5, world=3))
        answer = one.fetch(2, 5, own=[redirected], shared=[redirected])
        assert not answer["ok"] and "other" in answer["why"], "a fetch accepts only the intended node"
        assert (one.sent(), third.copies()) == ([], []), "and so does a copy"
        one.keep(other.address)
        one.until(one.sent)
        assert [copy.rank for copy in other.copies()] == [0]
    finally:
        for node in nodes.values():
            node.close()


def test_connections_before_the_first_order_do_not_exhaust_a_keeper(tmp_path: Path) -> None:
    """If each took a thread and a descriptor, the keeper would run out of descriptors and end."""
    (tmp_path / "shm").mkdir(mode=0o700)
    node = Node(tmp_path / "shm")
    node.start()
    callers: list[socket.socket] = []
    try:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (100, 100))
        callers = [node.call() for _ in range(200)]
        node.listen(1.0)  # enough time for the keeper to accept them
        held = len(os.listdir(f"/proc/{node.pid}/fd"))
        threads = len(os.listdir(f"/proc/{node.pid}/task"))
        assert held < 50 and threads < 50, (held, threads)
        node.keep()
        node.ready()
        with node.call() as late:
            assert b"nonce" in late.recv(4096)
        node.listen()  # the keeper has not ended
    finally:
        for caller in callers:
            caller.close()
        node.close()


def test_user_with_many_files_does_not_delay_sweeping_for_others(tmp_path: Path, run: str) -> None:
    """The node agent limits the time for sweeping, and then skips it for a quarter of an hour."""
    for uid, names in ((VICTIM, [f"{run}.safe"]), (ATTACKER, [f"r{number}.0.0" for number in range(5000)])):
        folder = tmp_path / f"dalsegno.{uid}"
        folder.mkdir(mode=0o700)
        for name in names:
            (folder / name).touch()
            os.utime(folder / name, (1e9, 1e9))
        os.chown(folder, uid, uid)
    memory = SharedMemorySweeper(tmp_path, uid=0)
    memory.tidy(0.0)
    began = time.process_time()
    gone = memory.tidy(UNUSED_S)
    assert time.process_time() - began < CHECK_S / 4
    assert len(gone) == 5001 and os.listdir(tmp_path) == []

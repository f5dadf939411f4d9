"""A file system in memory on /dev/fuse that delays every write and every new file. It runs until it is killed.

    slow_fs.py FOLDER WRITE_DELAY_S CREATE_DELAY_S

It implements only what `storage-probe` uses. See include/uapi/linux/fuse.h for the structures.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import time

LOOKUP, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, OPEN, READ, WRITE, STATFS = 1, 3, 4, 9, 10, 11, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS, CREATE = 18, 20, 25, 26, 27, 28, 29, 34, 35
SILENT = {2, 36, 42}  # FORGET, INTERRUPT and BATCH_FORGET have no answer


class File:
    def __init__(self, mode: int, uid: int, gid: int) -> None:
        self.mode, self.uid, self.gid = mode, uid, gid
        self.data = bytearray()
        self.names: dict[bytes, int] = {}


class SlowFs:
    def __init__(self, write_delay_s: float, create_delay_s: float) -> None:
        self.write_delay_s, self.create_delay_s = write_delay_s, create_delay_s
        self.files = {1: File(stat.S_IFDIR | 0o1777, 0, 0)}

    def attr(self, node: int) -> bytes:
        file = self.files[node]
        sizes = struct.pack("<6Q3I", node, len(file.data), 0, 0, 0, 0, 0, 0, 0)
        return sizes + struct.pack("<7I", file.mode, 1, file.uid, file.gid, 0, 4096, 0)

    def entry(self, node: int) -> bytes:
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self.attr(node)

    def new(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> int:
        if name in self.files[parent].names:
            raise OSError(errno.EEXIST, "")
        time.sleep(self.create_delay_s)
        node = max(self.files) + 1
        self.files[node] = File(mode, uid, gid)
        self.files[parent].names[name] = node
        return node

    def answer(self, code: int, node: int, uid: int, gid: int, body: bytes) -> bytes:
        name = body.split(b"\0")[0]
        opened = struct.pack("<QII", 0, 1, 0)  # flag 1 disables the cache, so that every write arrives here
        if code == INIT:
            return struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 1 << 17, 1, 0, 0, *([0] * 8))
        if code == LOOKUP:
            found = self.files[node].names.get(name)
            if found is None:
                raise OSError(errno.ENOENT, "")
            return self.entry(found)
        if code in (GETATTR, SETATTR):
            return struct.pack("<QII", 0, 0, 0) + self.attr(node)
        if code == MKDIR:
            (mode,) = struct.unpack_from("<I", body)
            return self.entry(self.new(node, body[8:].split(b"\0")[0], stat.S_IFDIR | mode, uid, gid))
        if code == CREATE:
            mode = struct.unpack_from("<II", body)[1]
            made = self.new(node, body[16:].split(b"\0")[0], stat.S_IFREG | mode, uid, gid)
            return self.entry(made) + opened
        if code in (UNLINK, RMDIR):
            self.files[node].names.pop(name)
            return b""
        if code in (OPEN, OPENDIR):
            return opened
        if code == READ:
            _, at, size = struct.unpack_from("<QQI", body)
            return bytes(self.files[node].data[at : at + size])
        if code == WRITE:
            _, at, size = struct.unpack_from("<QQI", body)
            time.sleep(self.write_delay_s)
            self.files[node].data[at : at + size] = body[40 : 40 + size]
            return struct.pack("<II", size, 0)
        if code == STATFS:
            return struct.pack("<5Q10I", 1 << 24, 1 << 24, 1 << 24, 1000, 1000, 4096, 255, 4096, 0, *([0] * 6))
        if code in (RELEASE, FSYNC, FLUSH, READDIR, RELEASEDIR, ACCESS):
            return b""
        raise OSError(errno.ENOSYS, "")


def main() -> None:
    folder, write_s, create_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=41777,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slow", folder.encode(), b"fuse", 0, options.encode()) != 0:
        sys.exit(f"mount {folder}: {os.strerror(ctypes.get_errno())}")
    served = SlowFs(write_s, create_s)
    while True:
        request = os.read(fd, 1 << 18)
        length, code, unique, node, uid, gid = struct.unpack_from("<IIQQII", request)
        if code in SILENT:
            continue
        try:
            body, failure = served.answer(code, node, uid, gid, request[40:length]), 0
        except OSError as error:
            body, failure = b"", -(error.errno or errno.EIO)
        os.write(fd, struct.pack("<IiQ", 16 + len(body), failure, unique) + body)


if __name__ == "__main__":
    main()

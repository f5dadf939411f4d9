/* Decides which files the kernel may mount: only files that root alone can have written, because the kernel's squashfs
 * code is not hardened against hostile files. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "build.h"

#ifndef FUSE_SUPER_MAGIC
#define FUSE_SUPER_MAGIC 0x65735546
#endif

/* Returns false for files on FUSE, because a user's FUSE server can report any owner. Returns false for files that any
 * group can write to, because an ACL that lets other users write appears as group permission. */
static bool is_writable_only_by_root(int fd) {
    struct stat seen;
    struct statfs system;
    if (fstat(fd, &seen) != 0 || fstatfs(fd, &system) != 0 || system.f_type == FUSE_SUPER_MAGIC || seen.st_uid != 0)
        return false;
    bool sticky = S_ISDIR(seen.st_mode) && seen.st_mode & S_ISVTX; /* like /tmp: nobody can replace files of root there */
    return sticky || !(seen.st_mode & (S_IWGRP | S_IWOTH));
}

/* Checks the open file and every folder on the path to it. The kernel reports the path, so it contains no links. */
bool only_root_can_change(int file) {
    char link[64], path[PATH_MAX];
    struct stat opened, found;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/')
        return false;
    path[length] = '\0';
    int at = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool trusted = at >= 0 && is_writable_only_by_root(at);
    for (char *rest = path + 1, *name; trusted && (name = strsep(&rest, "/"));) {
        int next = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        trusted = next >= 0 && is_writable_only_by_root(next);
        close(at);
        at = next;
    }
    trusted = trusted && fstat(at, &found) == 0 && fstat(file, &opened) == 0 && found.st_dev == opened.st_dev &&
            found.st_ino == opened.st_ino && S_ISREG(found.st_mode);
    if (at >= 0)
        close(at);
    return trusted;
}

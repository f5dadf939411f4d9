/* Which files the kernel may mount. Its squashfs code is not made for hostile files, so it gets only those that root alone
 * can have written. */
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

/* A FUSE server, which may be the user's, reports whatever owner it likes. An ACL that lets others write shows as the
 * group's right to write, so that one is refused for every group. */
static bool is_roots(int fd) {
    struct stat seen;
    struct statfs system;
    if (fstat(fd, &seen) != 0 || fstatfs(fd, &system) != 0 || system.f_type == FUSE_SUPER_MAGIC || seen.st_uid != 0)
        return false;
    bool sticky = S_ISDIR(seen.st_mode) && seen.st_mode & S_ISVTX; /* /tmp: nobody can replace what is root's there */
    return sticky || !(seen.st_mode & (S_IWGRP | S_IWOTH));
}

/* The file that is open, and every folder on the way to it, as the kernel knows the way now: no link is in it. */
bool only_root_can_change(int file) {
    char link[64], path[PATH_MAX];
    struct stat opened, found;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/')
        return false;
    path[length] = '\0';
    int at = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool roots = at >= 0 && is_roots(at);
    for (char *rest = path + 1, *name; roots && (name = strsep(&rest, "/"));) {
        int next = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
        roots = next >= 0 && is_roots(next);
        close(at);
        at = next;
    }
    roots = roots && fstat(at, &found) == 0 && fstat(file, &opened) == 0 && found.st_dev == opened.st_dev &&
            found.st_ino == opened.st_ino && S_ISREG(found.st_mode);
    if (at >= 0)
        close(at);
    return roots;
}

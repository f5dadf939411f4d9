/* System calls that not every C library wraps. */
#ifndef DALSEGNO_KERNEL_H
#define DALSEGNO_KERNEL_H

#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "options.h"

#ifndef MOUNT_ATTR_RDONLY
#define MOUNT_ATTR_RDONLY 0x01
#define MOUNT_ATTR_NOSUID 0x02
#define MOUNT_ATTR_NODEV 0x04
#define MOUNT_ATTR_NOEXEC 0x08
#endif
#ifndef MOUNT_ATTR_IDMAP
#define MOUNT_ATTR_IDMAP 0x00100000
#endif
#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif

struct kernel_attributes {
    uint64_t set, clear, propagation, userns;
};

struct kernel_how {
    uint64_t flags, mode, resolve;
};

enum { RESOLVE_BELOW_ROOT = 0x10 /* RESOLVE_IN_ROOT */, RESOLVE_WITHOUT_MAGIC = 0x02 };

/* Clones the folder or file of a descriptor, with all mounts below it, as a tree that is not attached yet. */
static inline int clone_tree(int fd) {
    return (int)syscall(SYS_open_tree, fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | AT_RECURSIVE | O_CLOEXEC);
}

static inline int attach_tree(int tree, int mount_point) {
    return (int)syscall(SYS_move_mount, tree, "", mount_point, "", 0x04 | 0x40); /* both sides are descriptors */
}

static inline int change_tree(int tree, uint64_t set, int userns, int recursive) {
    struct kernel_attributes attributes = {.set = set, .userns = userns >= 0 ? (uint64_t)userns : 0};
    int flags = AT_EMPTY_PATH | (recursive ? AT_RECURSIVE : 0);
    return (int)syscall(SYS_mount_setattr, tree, "", flags, &attributes, sizeof attributes);
}

/* Sets the propagation of a mount: MS_PRIVATE, MS_SLAVE and so on. The kernel refuses mounts of other namespaces. */
static inline int change_propagation(int fd, uint64_t propagation, bool recursive) {
    struct kernel_attributes attributes = {.propagation = propagation};
    int flags = AT_EMPTY_PATH | (recursive ? AT_RECURSIVE : 0);
    return (int)syscall(SYS_mount_setattr, fd, "", flags, &attributes, sizeof attributes);
}

/* Opens a path as if root were /: links in it, even absolute ones, and `..` never lead out. */
static inline int open_in_root(int root, const char *path, int flags, int mode) {
    struct kernel_how how = {.flags = (uint64_t)(flags | O_CLOEXEC),
                             .mode = flags & O_CREAT ? (uint64_t)mode : 0,
                             .resolve = RESOLVE_BELOW_ROOT | RESOLVE_WITHOUT_MAGIC};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* Opens a path that the user gave. A link such as /proc/self/fd/5 is refused: it would refer to a descriptor of the
 * helper. */
static inline int open_no_magiclinks(const char *path, int flags) {
    struct kernel_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .resolve = RESOLVE_WITHOUT_MAGIC};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

/* Returns the id of the mount that a descriptor is on; 0 if the kernel does not report it. */
static inline uint64_t mount_of(int fd) {
    struct statx seen;
    bool reported = statx(fd, "", AT_EMPTY_PATH, STATX_MNT_ID, &seen) == 0 && seen.stx_mask & STATX_MNT_ID;
    return reported ? seen.stx_mnt_id : 0;
}

static inline bool on_one_mount(int first, int second) {
    uint64_t mount = mount_of(first);
    return mount != 0 && mount == mount_of(second);
}

/* Makes exactly the capabilities in the mask effective; the permitted ones do not change. */
static inline int set_effective(uint32_t mask) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{0}};
    if (syscall(SYS_capget, &header, data) != 0)
        return -1;
    data[0].effective = mask, data[1].effective = 0;
    return (int)syscall(SYS_capset, &header, data);
}

/* Returns the flag for setns and unshare. */
static inline int namespace_flag(enum namespace_kind kind) {
    return (const int[]){[NAMESPACE_NET] = CLONE_NEWNET, [NAMESPACE_IPC] = CLONE_NEWIPC, [NAMESPACE_UTS] = CLONE_NEWUTS}[kind];
}

static inline int change_root_here(void) { return (int)syscall(SYS_pivot_root, ".", "."); }

#endif

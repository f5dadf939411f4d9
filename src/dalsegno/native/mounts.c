/* Mounts inside a container: /proc, /sys, /dev, a few files of /etc, and the folders that the user requested. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"

enum { TABLE_MAX = 1 << 20, ENTRIES_MAX = MOUNTS_MAX + SITE_MAX + 16 };

struct mount_entry {
    const char *from, *to;
    int tree;
    bool folder, wanted; /* wanted: the user requested it, so a failure to mount it is an error */
    const struct mount *mount; /* the entry in --container-mounts */
    uint64_t attached;         /* the id of the mount, once attached */
};

static struct mount_entry entries[ENTRIES_MAX];
static size_t entry_count;
static struct mounts mounts;
static char passwd_line[512], group_line[256], home[PATH_MAX];

/* Sources of mounts, opened before another mount hides them */

enum path_kind { NODE_PATH, USER_PATH, OPTIONAL_USER_PATH };

static struct mount_entry *add_entry(struct mount_entry entry) {
    if (entry_count == ENTRIES_MAX)
        fail("too many mounts");
    entries[entry_count] = entry;
    return &entries[entry_count++];
}

static struct mount_entry *add_bind(const char *from, const char *to, enum path_kind path_kind, uint64_t attributes) {
    struct stat seen;
    if (path_kind != NODE_PATH)
        as_user(); /* so that only paths that the user can reach are mounted */
    int fd = open_no_magiclinks(from, O_PATH), error = errno;
    as_root();
    if (fd < 0 && path_kind != USER_PATH)
        return NULL;
    if (fd < 0)
        fail("cannot mount %s: %s", from, error == ENOENT ? "the source path does not exist" : strerror(error));
    int tree = clone_tree(fd);
    if (tree < 0 || fstat(fd, &seen) != 0 || (attributes && change_tree(tree, attributes, -1, 1) != 0))
        fail("cannot mount %s: %s", from, strerror(errno));
    close(fd);
    return add_entry((struct mount_entry){from, to, tree, S_ISDIR(seen.st_mode), path_kind == USER_PATH, NULL, 0});
}

static uint64_t attributes_of(const struct mount *mount) {
    return MOUNT_ATTR_NOSUID | (mount->read_only ? MOUNT_ATTR_RDONLY : 0) | (mount->no_exec ? MOUNT_ATTR_NOEXEC : 0) |
           (mount->no_devices ? MOUNT_ATTR_NODEV : 0);
}

/* Sets the requested propagation of mounts. Must run inside the namespace that the tasks enter, because a copy of a
 * namespace does not inherit the propagation. By then, a path may contain a link that the user put into a mounted
 * folder. It must not lead to a descriptor of the helper, such as its working folder, which is on a mount of the
 * node. */
bool set_propagation(void) {
    static const unsigned long flags[] = {[PROPAGATION_PRIVATE] = MS_PRIVATE,
                                          [PROPAGATION_SLAVE] = MS_SLAVE,
                                          [PROPAGATION_SHARED] = MS_SHARED,
                                          [PROPAGATION_UNBINDABLE] = MS_UNBINDABLE};
    for (size_t i = 0; i < mounts.count; i++) {
        const struct mount *each = &mounts.list[i];
        if (each->propagation == PROPAGATION_DEFAULT)
            continue;
        int fd = open_no_magiclinks(each->to, O_PATH);
        bool set = fd >= 0 && change_propagation(fd, flags[each->propagation], each->recursive) == 0;
        int error = errno;
        if (fd >= 0)
            close(fd);
        errno = error;
        if (!set)
            return false;
    }
    return true;
}

static void open_mount(const struct mount *mount) {
    if (mount->kind != MOUNT_BIND) { /* mounted or unmounted later, in the order of the entries */
        add_entry((struct mount_entry){mount->from, mount->to, -1, true, true, mount, 0});
        return;
    }
    struct mount_entry *entry = add_bind(mount->from, mount->to, USER_PATH, attributes_of(mount));
    entry->mount = mount;
}

void open_mount_sources(void) {
    char why[WHY_LENGTH];
    add_bind("/proc", "/proc", NODE_PATH, 0);
    add_bind("/sys", "/sys", NODE_PATH, 0);
    if (request.unshare[NAMESPACE_IPC])
        add_entry((struct mount_entry){"/dev", "/dev", -1, true, false, NULL, 0}); /* made by make_devices() */
    else
        add_bind("/dev", "/dev", NODE_PATH, MOUNT_ATTR_NOSUID); /* with the node's /dev/shm and /dev/pts */
    add_bind("/etc/resolv.conf", "/etc/resolv.conf", NODE_PATH, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID);
    add_bind("/etc/hosts", "/etc/hosts", NODE_PATH, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID);
    for (size_t i = 0; i < request.site_count; i++)
        add_bind(request.site[i], request.site[i], NODE_PATH, MOUNT_ATTR_NOSUID);
    if (request.pmix)
        add_bind(request.pmix, request.pmix, OPTIONAL_USER_PATH, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    if (request.home)
        add_bind(request.home, request.home_at ? request.home_at : request.home, USER_PATH, MOUNT_ATTR_NOSUID);
    if (request.mounts && parse_mounts(request.mounts, &mounts, why) != 0)
        fail("--container-mounts: %s", why);
    for (size_t i = 0; i < mounts.count; i++)
        open_mount(&mounts.list[i]);
    if (request.script)
        add_bind(request.script, request.script, USER_PATH, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID);
}

/* Mount points. The image is not trusted, so no path may lead out of its root. */

static bool create_one(int folder, const char *name, mode_t mode, bool is_folder) {
    if (is_folder)
        return mkdirat(folder, name, mode) == 0;
    int file = openat(folder, name, O_CREAT | O_WRONLY | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    return file >= 0 && close(file) == 0;
}

/* Creates a mount point. If the user may not write to the folder, because a folder image belongs to another user, the
 * mount point is created with CAP_DAC_OVERRIDE, but only on the mount of the container's root, which is the container's
 * own layer. Any other mount is a real folder of the node, where the user gets no additional rights. */
static bool create_in_root(int root, int folder, const char *name, mode_t mode, bool is_folder) {
    if (create_one(folder, name, mode, is_folder))
        return true;
    if (errno != EACCES || !privileged || request.uid == 0)
        return false;
    bool made = on_one_mount(root, folder) && set_effective(1u << CAP_DAC_OVERRIDE) == 0 &&
                create_one(folder, name, mode, is_folder);
    int error = errno;
    if (set_effective(0) != 0)
        fail("cannot drop root's rights: %s", strerror(errno));
    errno = error;
    return made;
}

static int make_folder(int root, const char *path, mode_t mode) {
    char part[PATH_MAX] = "";
    if (strlen(path) >= sizeof part)
        return errno = ENAMETOOLONG, -1;
    int here = open_in_root(root, "/", O_PATH | O_DIRECTORY, 0);
    for (const char *end = path; here >= 0 && *end;) {
        end += strspn(end, "/");
        const char *name = end;
        end += strcspn(end, "/");
        memcpy(part, path, (size_t)(end - path));
        part[end - path] = '\0';
        if (end == name)
            break;
        int next = open_in_root(root, part, O_PATH | O_DIRECTORY, 0);
        if (next < 0 && errno == ENOENT) {
            char last[NAME_MAX + 1];
            snprintf(last, sizeof last, "%.*s", (int)(end - name), name);
            if (create_in_root(root, here, last, mode, true))
                next = open_in_root(root, part, O_PATH | O_DIRECTORY, 0);
        }
        int error = errno;
        close(here);
        errno = error;
        here = next;
    }
    return here;
}

static int make_file(int root, const char *path) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    *(slash ? slash : parent) = '\0';
    int folder = make_folder(root, parent, 0755);
    bool made = folder >= 0 && create_in_root(root, folder, slash ? slash + 1 : path, 0644, false);
    int error = errno;
    if (folder >= 0)
        close(folder);
    errno = error;
    return made ? open_in_root(root, path, O_PATH, 0) : -1;
}

static int open_mount_point(int root, const struct mount_entry *entry) {
    struct stat found, top;
    int fd = open_in_root(root, entry->to, O_PATH, 0);
    if (fd < 0 && errno == ENOENT)
        fd = entry->folder ? make_folder(root, entry->to, 0755) : make_file(root, entry->to);
    if (fd < 0)
        return -1;
    if (fstat(fd, &found) != 0 || fstat(root, &top) != 0)
        return -1;
    if (S_ISDIR(found.st_mode) != entry->folder)
        return errno = entry->folder ? ENOTDIR : EISDIR, -1;
    if (found.st_dev == top.st_dev && found.st_ino == top.st_ino)
        return errno = EBUSY, -1;
    return fd;
}

/* Detaches the mount at a path below the scratch folder, and returns it as a tree to attach. */
static int detach_tree(const char *at) {
    int folder = open(at, O_PATH | O_DIRECTORY | O_CLOEXEC), tree = folder < 0 ? -1 : clone_tree(folder);
    if (folder >= 0)
        close(folder);
    return tree >= 0 && umount2(at, MNT_DETACH) == 0 && rmdir(at) == 0 ? tree : -1;
}

/* Returns whether a device may be in the container: it reveals nothing about other jobs, or cgroups control its use. */
static bool is_allowed_device(const char *name) {
    static const char *const names[] = {"zero", "null",       "full",   "random", "urandom", "tty",      "log",
                                        "fuse", "infiniband", "gdrdrv", "dri",    "kfd",     "hugepages"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return strncmp(name, "nvidia", 6) == 0;
}

static bool show_device(int from, const char *name, int to) {
    struct stat seen;
    int fd = openat(from, name, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return true; /* a dangling link such as /dev/log */
    int tree = fstat(fd, &seen) == 0 ? clone_tree(fd) : -1;
    int target = tree >= 0 && create_one(to, name, 0755, S_ISDIR(seen.st_mode)) ? openat(to, name, O_PATH | O_CLOEXEC) : -1;
    bool shown = target >= 0 && change_tree(tree, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, -1, 1) == 0 &&
                 attach_tree(tree, target) == 0;
    for (int i = 0; i < 3; i++)
        if ((const int[]){fd, tree, target}[i] >= 0)
            close((const int[]){fd, tree, target}[i]);
    return shown;
}

static bool fill_devices(int to) {
    static const char *const links[][2] = {{"fd", "/proc/self/fd"},
                                           {"stdin", "/proc/self/fd/0"},
                                           {"stdout", "/proc/self/fd/1"},
                                           {"stderr", "/proc/self/fd/2"},
                                           {"ptmx", "pts/ptmx"}};
    DIR *list = opendir("/dev");
    bool filled = list != NULL;
    for (struct dirent *entry; filled && (entry = readdir(list));)
        filled = !is_allowed_device(entry->d_name) || show_device(dirfd(list), entry->d_name, to);
    if (list)
        closedir(list);
    for (size_t i = 0; filled && i < sizeof links / sizeof *links; i++)
        filled = symlinkat(links[i][1], to, links[i][0]) == 0;
    return filled && mkdirat(to, "shm", 0755) == 0 && mkdirat(to, "pts", 0755) == 0 && mkdirat(to, "mqueue", 0755) == 0;
}

/* Creates /dev for a container with its own IPC namespace, much like Enroot: it has separate shared memory, message
 * queues (see unshare_namespaces) and terminals. */
static int make_devices(const char *scratch) {
    char at[PATH_MAX], shm[PATH_MAX + 8], pts[PATH_MAX + 8];
    const unsigned long flags = MS_NOSUID | MS_NOEXEC;
    snprintf(at, sizeof at, "%s/dev", scratch);
    snprintf(shm, sizeof shm, "%s/shm", at);
    snprintf(pts, sizeof pts, "%s/pts", at);
    int folder = mkdir(at, 0755) == 0 && mount("tmpfs", at, "tmpfs", flags | MS_NODEV, "mode=0755") == 0
                     ? open(at, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
                     : -1;
    bool made = folder >= 0 && fill_devices(folder) &&
                mount("tmpfs", shm, "tmpfs", flags | MS_NODEV, "mode=1777") == 0 &&
                mount("devpts", pts, "devpts", flags, "newinstance,ptmxmode=0666,mode=0620") == 0;
    if (folder >= 0)
        close(folder);
    int tree = made ? detach_tree(at) : -1;
    if (tree < 0)
        fail("--container-unshare=ipc: cannot create a new /dev: %s", strerror(errno));
    return tree;
}

/* Creates an empty tmpfs that belongs to the user. */
static int make_tmpfs(const struct mount *wanted, const char *scratch) {
    char at[PATH_MAX], options[sizeof wanted->options + 64];
    bool mapped = privileged; /* otherwise uid 0 in the helper's user namespace is the user */
    snprintf(at, sizeof at, "%s/tmpfs", scratch);
    snprintf(options, sizeof options, "mode=0755,uid=%u,gid=%u%s", mapped ? request.uid : 0, mapped ? request.gid : 0,
             wanted->options);
    if (mkdir(at, 0700) != 0 || mount("tmpfs", at, "tmpfs", MS_NOSUID | MS_NODEV, options) != 0)
        fail("cannot mount a tmpfs at %s: %s", wanted->to, strerror(errno));
    int tree = detach_tree(at);
    if (tree < 0 || change_tree(tree, attributes_of(wanted) | MOUNT_ATTR_NODEV, -1, 0) != 0)
        fail("cannot mount a tmpfs at %s: %s", wanted->to, strerror(errno));
    return tree;
}

static bool is_attached(uint64_t mount) {
    for (size_t i = 0; i < entry_count; i++)
        if (mount != 0 && entries[i].attached == mount)
            return true;
    return false;
}

/* Carries out `umount:/PATH`: removes a mount that the helper attached, for example a mount that the cluster adds to
 * every container. Refuses mounts of the node inside such a mount, because the node may hide files with them. */
static void detach_entry(int root, const struct mount_entry *entry) {
    char path[64];
    as_user();
    int fd = open_in_root(root, entry->to, O_PATH, 0), error = errno;
    as_root();
    if (fd < 0)
        fail("cannot unmount %s in the container: %s", entry->to, strerror(error));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    uint64_t mount = mount_of(fd);
    if (!is_attached(mount) || umount2(path, MNT_DETACH) != 0)
        fail("cannot unmount %s in the container: nothing is mounted there", entry->to);
    close(fd);
    for (size_t i = 0; i < entry_count; i++) /* the kernel may reuse the id */
        if (entries[i].attached == mount)
            entries[i].attached = 0;
}

static void attach_entry(int root, struct mount_entry *entry) {
    as_user();
    int fd = open_mount_point(root, entry), error = errno;
    as_root();
    if (fd >= 0 && attach_tree(entry->tree, fd) != 0)
        error = errno, close(fd), fd = -1;
    if (fd < 0 && entry->wanted)
        fail("cannot mount %s at %s in the container: %s", entry->from, entry->to, strerror(error));
    if (fd < 0 && strncmp(entry->to, "/etc/", 5) != 0)
        fail("cannot create the mount point %s in the image: %s", entry->to, strerror(error));
    if (fd >= 0)
        close(fd), entry->attached = mount_of(entry->tree);
    close(entry->tree);
}

/* Mounts a file with this text over a file of the image. */
static void mount_text(int root, const char *scratch, const char *to, const char *const pieces[]) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s%s", scratch, strrchr(to, '/'));
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    for (; *pieces; pieces++)
        if (file < 0 || dprintf(file, "%s", *pieces) < 0)
            fail("cannot write %s: %s", to, strerror(errno));
    struct mount_entry entry = {path, to, clone_tree(file), false, false, NULL, 0};
    close(file);
    if (entry.tree >= 0)
        attach_entry(root, &entry);
}

/* The user's name: the image's passwd and group with an additional line */

void look_up_user_name(void) {
    const struct passwd *user = getpwuid(request.uid);
    const struct group *group = getgrgid(request.gid);
    if (user)
        snprintf(home, sizeof home, "%s", user->pw_dir);
    if (user)
        snprintf(passwd_line, sizeof passwd_line, "%s:x:%u:%u::%s:/bin/sh\n", user->pw_name, request.uid, request.gid,
                 user->pw_dir);
    if (group)
        snprintf(group_line, sizeof group_line, "%s:x:%u:\n", group->gr_name, request.gid);
}

static bool has_id(const char *table, unsigned id) {
    char field[32];
    snprintf(field, sizeof field, ":%u:", id);
    for (const char *line = table; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        const char *second = strchr(line, ':');
        const char *third = second ? strchr(second + 1, ':') : NULL;
        if (third && strncmp(third, field, strlen(field)) == 0)
            return true;
    }
    return false;
}

static void add_line(int root, const char *scratch, const char *to, const char *line, unsigned id) {
    static char table[TABLE_MAX];
    struct stat seen = {0};
    as_user();
    int fd = open_in_root(root, to, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    ssize_t got = fd >= 0 && fstat(fd, &seen) == 0 && S_ISREG(seen.st_mode) ? read(fd, table, sizeof table - 1) : 0;
    if (fd >= 0)
        close(fd);
    as_root();
    table[got > 0 ? got : 0] = '\0';
    if (!*line || has_id(table, id) || got == (ssize_t)sizeof table - 1)
        return;
    mount_text(root, scratch, to, (const char *[]){table, got > 0 && table[got - 1] != '\n' ? "\n" : "", line, NULL});
}

/* Keeps apt from switching to its own user, which fails where root is the only user. */
static void configure_apt(int root, const char *scratch) {
    as_user();
    int folder = open_in_root(root, "/etc/apt/apt.conf.d", O_PATH | O_DIRECTORY, 0);
    as_root();
    if (folder < 0)
        return;
    close(folder);
    mount_text(root, scratch, "/etc/apt/apt.conf.d/90dalsegno", (const char *[]){"APT::Sandbox::User \"root\";\n", NULL});
}

void mount_in_root(const char *path, const char *scratch) {
    int root = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    as_user();
    mode_t mask = umask(0);
    int folder = make_folder(root, "/tmp", 01777);
    if (folder >= 0)
        close(folder);
    umask(mask);
    folder = *home && !request.home ? make_folder(root, home, 0755) : -1;
    if (folder >= 0)
        close(folder);
    as_root();
    if (!request.remap_root && request.uid != 0) {
        add_line(root, scratch, "/etc/passwd", passwd_line, request.uid);
        add_line(root, scratch, "/etc/group", group_line, request.gid);
    }
    if (request.remap_root && request.uid != 0)
        configure_apt(root, scratch);
    struct mount_entry gpu = {"NVIDIA's driver", GPU_FOLDER, gpu_tree(scratch), true, true, NULL, 0};
    if (gpu.tree >= 0)
        attach_entry(root, &gpu);
    for (size_t i = 0; i < entry_count; i++) {
        const struct mount *mount = entries[i].mount;
        if (mount && mount->kind == MOUNT_UMOUNT) {
            detach_entry(root, &entries[i]);
            continue;
        }
        if (mount && mount->kind == MOUNT_TMPFS)
            entries[i].tree = make_tmpfs(mount, scratch);
        else if (entries[i].tree < 0)
            entries[i].tree = make_devices(scratch);
        attach_entry(root, &entries[i]);
    }
    close(root);
}

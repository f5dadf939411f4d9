/* Named containers. Their files are stored for later steps and jobs of the same user on this node, and concurrent steps
 * share one container. A step holds a shared lock on the container that it uses. A step that gets the lock exclusively
 * builds the container again from the stored files. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/nsfs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"

static int open_lock(const struct named_container *container, const char *name) {
    return openat(container->folder, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
}

static void make_subfolder(const struct named_container *container, const char *name, mode_t mode) {
    if (mkdirat(container->folder, name, mode) != 0 && errno != EEXIST)
        fail("cannot store the container: %s/%s: %s", container->path, name, strerror(errno));
}

/* Opens a namespace that a process holds. The process may belong to the user, who could replace the descriptor in the
 * meantime. Therefore the type is checked before the file is opened: opening a device can have side effects. */
static int open_namespace(int folder, const char *name, const char *wanted) {
    char link[64], target[64] = "";
    int path = openat(folder, name, O_PATH | O_CLOEXEC);
    snprintf(link, sizeof link, "self/fd/%d", path);
    bool same = path >= 0 && readlinkat(proc_fd, link, target, sizeof target - 1) > 0 && strcmp(target, wanted) == 0;
    int found = same ? openat(proc_fd, link, O_RDONLY | O_CLOEXEC) : -1;
    if (path >= 0)
        close(path);
    return found;
}

/* Opens the namespace of this kind and number among the descriptors of a process; returns -1 if there is none. */
static int find_namespace(const char *pid, const char *kind, unsigned long long number) {
    char folder[NAME_MAX + 16], wanted[64];
    struct stat seen;
    snprintf(folder, sizeof folder, "/proc/%s/fd", pid);
    snprintf(wanted, sizeof wanted, "%s:[%llu]", kind, number);
    DIR *list = opendir(folder);
    int found = -1;
    for (struct dirent *entry; list && found < 0 && (entry = readdir(list));)
        if (fstatat(dirfd(list), entry->d_name, &seen, 0) == 0 && seen.st_ino == number)
            found = open_namespace(dirfd(list), entry->d_name, wanted);
    if (list)
        closedir(list);
    return found;
}

/* Returns whether a namespace is owned by the user namespace `user` (-1: the helper's), and `user` by the job's user.
 * If not, the holder has ended, and another process has its PID and a namespace with the same number. */
static bool belongs_to_user(int namespace, int user) {
    struct stat owning, named;
    uid_t owner;
    int userns = ioctl(namespace, NS_GET_USERNS);
    bool same = userns >= 0 && fstat(userns, &owning) == 0 &&
                (user >= 0 ? fstat(user, &named) : fstatat(proc_fd, "self/ns/user", &named, 0)) == 0 &&
                owning.st_ino == named.st_ino;
    if (userns >= 0)
        close(userns);
    return same && (user < 0 || (ioctl(user, NS_GET_OWNER_UID, &owner) == 0 && owner == request.uid));
}

/* A holder file contains this many inode numbers of namespaces. 0 stands for a missing namespace. */
enum { NAMESPACE_NUMBERS = 4 + NAMESPACE_KINDS };

static void close_namespaces(struct named_container *container) {
    int *const fds[] = {&container->namespaces.mounts, &container->namespaces.user,   &container->rootfs,
                        &container->owner,             &container->namespaces.own[0], &container->namespaces.own[1],
                        &container->namespaces.own[2]};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

static bool join_holder(struct named_container *container, int folder, const char *pid) {
    static const char *const kinds[] = {"mnt", "user", "mnt", "user"};
    char text[256] = "";
    unsigned long long numbers[NAMESPACE_NUMBERS] = {0};
    struct namespaces *namespaces = &container->namespaces;
    int *const fds[] = {&namespaces->mounts, &namespaces->user, &container->rootfs, &container->owner};
    /* O_NONBLOCK: if the user owns the folder, the file may be a pipe. */
    int file = openat(folder, pid, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    ssize_t got = file < 0 ? -1 : read(file, text, sizeof text - 1);
    bool all = true;
    if (file >= 0)
        close(file);
    if (got <= 0 || sscanf(text, "%llu %llu %llu %llu %llu %llu %llu", &numbers[0], &numbers[1], &numbers[2], &numbers[3],
                           &numbers[4], &numbers[5], &numbers[6]) < 4) /* earlier versions wrote four numbers */
        return false;
    regain_root(); /* if slurmd runs as root, only root sees the descriptors of slurmstepd */
    for (int i = 0; i < 4; i++) {
        *fds[i] = numbers[i] ? find_namespace(pid, kinds[i], numbers[i]) : -1;
        all &= *fds[i] >= 0 || !numbers[i];
    }
    for (int i = 0; i < NAMESPACE_KINDS; i++) {
        namespaces->own[i] = numbers[4 + i] ? find_namespace(pid, namespace_words[i], numbers[4 + i]) : -1;
        all &= !numbers[4 + i] || (namespaces->own[i] >= 0 && belongs_to_user(namespaces->own[i], namespaces->user));
    }
    bool apart = (numbers[1] || (privileged && request.uid == 0)) && (numbers[3] || privileged);
    bool joined = all && apart && belongs_to_user(namespaces->mounts, namespaces->user) &&
                  belongs_to_user(container->rootfs, container->owner);
    release_root();
    if (!joined)
        close_namespaces(container);
    return joined;
}

/* Joins the container of the first holder that still has it, and returns whether there is one. With `remove_only`, only
 * removes the holders' files. */
static bool join_or_remove_holders(struct named_container *container, bool remove_only) {
    DIR *list = fdopendir(openat(container->folder, "holders", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    bool joined = false;
    for (struct dirent *entry; list && !joined && (entry = readdir(list));) {
        if (entry->d_name[0] == '.')
            continue;
        if (remove_only)
            unlinkat(dirfd(list), entry->d_name, 0);
        else
            joined = join_holder(container, dirfd(list), entry->d_name);
    }
    if (list)
        closedir(list);
    return joined;
}

/* Returns whether the named container exists in data/UID or, with the ending ".own", in data/UID.own, where the user
 * can create any file. */
bool named_container_exists(const char *ending) {
    struct container_name name;
    struct stat seen;
    char why[WHY_LENGTH], path[PATH_MAX];
    if (!request.data || parse_container_name(request.name, &name, why) != 0)
        return false;
    snprintf(path, sizeof path, "%s/%u%s/%s/image", request.data, request.uid, ending, name.name);
    if (*ending)
        as_user();
    bool exists = lstat(path, &seen) == 0 && S_ISREG(seen.st_mode);
    as_root();
    return exists;
}

/* Reads the path of the container's image, and the image as the user named it. */
void read_recorded_image(struct named_container *container) {
    int file = openat(container->folder, "image", O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    ssize_t got = file < 0 ? 0 : read(file, container->image, sizeof container->image - 1);
    container->image[got > 0 ? got : 0] = '\0';
    size_t first = strlen(container->image) + 1;
    container->requested_image = got > (ssize_t)first ? container->image + first : container->image;
    if (file >= 0)
        close(file);
}

static void add_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void add_note(const char *format, ...) {
    char text[WHY_LENGTH], *both = NULL;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (asprintf(&both, "%s%s%s", request.note ? request.note : "", request.note ? "; " : "", text) > 0)
        request.note = both;
}

/* Uses the image of an existing container, as Pyxis does, even if the step names another; a note then reports it. */
static void use_recorded_image(const struct named_container *container, const char *name) {
    if (request.image && strcmp(request.image, container->image) != 0)
        add_note("container %s exists and is reused; it was created from %s, and --container-image=%s is ignored", name,
                 container->requested_image, request.requested_image);
    request.image = container->image;
}

/* Fails, as Pyxis does, if the step asks for a namespace that the running container does not have. */
static void check_namespaces(const struct namespaces *running) {
    static const char *const names[] = {[NAMESPACE_NET] = "network", [NAMESPACE_IPC] = "IPC", [NAMESPACE_UTS] = "UTS"};
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        if (request.unshare[i] && running->own[i] < 0)
            fail("--container-unshare=%s requested but the container is not in a separate %s namespace", namespace_words[i],
                 names[i]);
}

static void check_use(const struct container_name *name, bool known, bool busy) {
    if (name->use == NAME_CREATE && known)
        fail("container %s already exists on this node", name->name);
    if (name->use == NAME_EXEC && !busy)
        fail("container %s is not running on this node", name->name);
    if (!known && !request.image)
        fail("container %s does not exist on this node; create it with --container-image", name->name);
}

static time_t seconds_since_boot(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

enum { JOIN_S = 2, JOIN_PAUSE_NS = 20000000 };

/* Joins the running container and returns true, or takes the container's lock and returns false. Retries, because a
 * step that is ending may hold the lock for a moment after it has closed its namespaces. */
static bool join_or_lock(struct named_container *container, const char *name) {
    time_t until = seconds_since_boot() + JOIN_S;
    while (flock(container->lock, LOCK_EX | LOCK_NB) != 0) {
        if (join_or_remove_holders(container, false))
            return true;
        if (seconds_since_boot() > until) /* no limit on tries, because the user's files decide how long one takes */
            fail("container %s is in use on this node and cannot be joined", name);
        nanosleep(&(struct timespec){.tv_nsec = JOIN_PAUSE_NS}, NULL);
    }
    return false;
}

/* Opens or creates the container's folder. If root builds the container, only root can access the stored files. A user
 * who could change an overlay's folders could redirect its writes. */
void open_named_container(struct named_container *container) {
    struct container_name name;
    char why[WHY_LENGTH];
    *container = (struct named_container){.folder = -1, .entry_lock = -1, .lock = -1, .tree = -1, .rootfs = -1, .owner = -1,
                           .namespaces = no_namespaces};
    if (!request.name)
        return;
    if (parse_container_name(request.name, &name, why) != 0)
        fail("--container-name: %s", why);
    if (!request.data)
        fail("named containers are disabled: plugstack.conf has no data=");
    if ((size_t)snprintf(container->path, sizeof container->path, "%s/%s", request.data, name.name) >= sizeof container->path)
        fail("cannot store the container: %s: %s", request.data, strerror(ENAMETOOLONG));
    container->folder = open_own_folder(request.data_folder, name.name, geteuid(), container->path);
    make_subfolder(container, "holders", 0700);
    container->entry_lock = open_lock(container, "door");
    container->lock = open_lock(container, "lock");
    if (container->entry_lock < 0 || container->lock < 0 || flock(container->entry_lock, LOCK_EX) != 0)
        fail("cannot store the container: %s", strerror(errno));
    read_recorded_image(container);
    bool busy = join_or_lock(container, name.name);
    check_use(&name, container->image[0], busy);
    if (!busy)
        join_or_remove_holders(container, true);
    if (container->image[0])
        use_recorded_image(container, name.name);
    container->running = busy && name.use == NAME_NO_EXEC;
    if (container->running) /* use the same file system, with separate mounts and namespaces */
        container->namespaces = no_namespaces;
    else if (busy)
        check_namespaces(&container->namespaces);
    if (busy && !container->running && request.mounts)
        add_note("container %s is already running: --container-mounts is ignored", name.name);
    make_subfolder(container, "upper", 0755);
    make_subfolder(container, "work", 0700);
    if (privileged && fchownat(container->folder, "upper", request.uid, request.gid, AT_SYMLINK_NOFOLLOW) != 0)
        fail("cannot store the container: %s", strerror(errno));
}

void clone_named_container(struct named_container *container) {
    if (!container->path[0])
        return;
    int folder = privileged ? container->folder : open_again(container->folder, container->path);
    container->tree = folder < 0 ? -1 : clone_tree(folder);
    if (container->tree < 0)
        fail("cannot store the container: %s: %s", container->path, strerror(errno));
    if (!privileged)
        close(folder);
}

/* Returns the PID of slurmstepd, which created the socket for the answer. It is not the helper's parent. */
static pid_t find_step(void) {
    struct ucred creator = {.pid = 0};
    socklen_t length = sizeof creator;
    if (getsockopt(ANSWER_FD, SOL_SOCKET, SO_PEERCRED, &creator, &length) != 0 || creator.pid <= 0)
        fail("cannot store the container: the step's process was not found");
    return creator.pid;
}

/* Records the step as a holder. */
void record_holder(struct named_container *container, const struct namespaces *namespaces) {
    int fds[NAMESPACE_NUMBERS] = {namespaces->mounts, namespaces->user, container->rootfs, container->owner};
    struct stat seen;
    char name[64];
    if (container->entry_lock < 0)
        return;
    memcpy(fds + 4, namespaces->own, sizeof namespaces->own);
    snprintf(name, sizeof name, "holders/%d", (int)find_step());
    int file = openat(container->folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    for (int i = 0; i < NAMESPACE_NUMBERS; i++) {
        seen.st_ino = 0;
        if (file < 0 || (fds[i] >= 0 && fstat(fds[i], &seen) != 0) ||
            dprintf(file, "%llu%c", (unsigned long long)seen.st_ino, i + 1 < NAMESPACE_NUMBERS ? ' ' : '\n') < 0)
            fail("cannot store the container: %s", strerror(errno));
    }
    close(file);
    file = openat(container->folder, "image", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0) {
        size_t first = strlen(request.image) + 1;
        if (write(file, request.image, first) < 0 || write(file, request.requested_image, strlen(request.requested_image)) < 0)
            fail("cannot store the container: %s", strerror(errno));
        close(file);
    }
    flock(container->lock, LOCK_SH);
    close(container->entry_lock);
}

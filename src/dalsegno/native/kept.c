/* Named containers: what was written to them is kept for later steps and jobs of the same user on this node, and
 * concurrent steps share one. A step that uses one holds a shared lock. A step that gets the lock exclusively builds the
 * container again on the files that were kept. */
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
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"

static int open_lock(const struct kept *kept, const char *name) {
    return openat(kept->folder, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
}

static void make_subfolder(const struct kept *kept, const char *name, mode_t mode) {
    if (mkdirat(kept->folder, name, mode) != 0 && errno != EEXIST)
        fail("cannot store the container: %s/%s: %s", kept->path, name, strerror(errno));
}

/* The process may belong to the user, who could exchange the descriptor in the meantime: only a namespace is opened for
 * reading, because opening a device can have effects. */
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

/* Finds a namespace of one kind that a process holds open, by its number. */
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

/* Whether a namespace belongs to this user namespace, or to ours (-1), and that one to the user. The process may have
 * ended, and another one may have its PID and a namespace with the same number. */
static bool belongs_to_user(int space, int user) {
    struct stat owning, named;
    uid_t owner;
    int userns = ioctl(space, NS_GET_USERNS);
    bool same = userns >= 0 && fstat(userns, &owning) == 0 &&
                (user >= 0 ? fstat(user, &named) : fstatat(proc_fd, "self/ns/user", &named, 0)) == 0 &&
                owning.st_ino == named.st_ino;
    if (userns >= 0)
        close(userns);
    return same && (user < 0 || (ioctl(user, NS_GET_OWNER_UID, &owner) == 0 && owner == request.uid));
}

enum { NOTED = 4 + NAMESPACE_KINDS }; /* numbers of namespaces in a holder file: 0 for one that the container does not have */

static void close_spaces(struct kept *kept) {
    int *const fds[] = {&kept->spaces.mounts, &kept->spaces.user,   &kept->bare,          &kept->owner,
                        &kept->spaces.own[0], &kept->spaces.own[1], &kept->spaces.own[2]};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

static bool join_holder(struct kept *kept, int folder, const char *pid) {
    static const char *const kinds[] = {"mnt", "user", "mnt", "user"};
    char text[256] = "";
    unsigned long long numbers[NOTED] = {0};
    struct spaces *spaces = &kept->spaces;
    int *const fds[] = {&spaces->mounts, &spaces->user, &kept->bare, &kept->owner};
    int file = openat(folder, pid, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW); /* a file of the user may be a pipe */
    ssize_t got = file < 0 ? -1 : read(file, text, sizeof text - 1);
    bool all = true;
    if (file >= 0)
        close(file);
    if (got <= 0 || sscanf(text, "%llu %llu %llu %llu %llu %llu %llu", &numbers[0], &numbers[1], &numbers[2], &numbers[3],
                           &numbers[4], &numbers[5], &numbers[6]) < 4) /* earlier versions wrote four */
        return false;
    borrow_root(); /* if slurmd runs as root, only root sees the descriptors of slurmstepd */
    for (int i = 0; i < 4; i++) {
        *fds[i] = numbers[i] ? find_namespace(pid, kinds[i], numbers[i]) : -1;
        all &= *fds[i] >= 0 || !numbers[i];
    }
    for (int i = 0; i < NAMESPACE_KINDS; i++) {
        spaces->own[i] = numbers[4 + i] ? find_namespace(pid, namespace_words[i], numbers[4 + i]) : -1;
        all &= !numbers[4 + i] || (spaces->own[i] >= 0 && belongs_to_user(spaces->own[i], spaces->user));
    }
    bool apart = (numbers[1] || (privileged && request.uid == 0)) && (numbers[3] || privileged);
    bool joined = all && apart && belongs_to_user(spaces->mounts, spaces->user) && belongs_to_user(kept->bare, kept->owner);
    give_root_back();
    if (!joined)
        close_spaces(kept);
    return joined;
}

/* Tries to join each holder of the container; with `forget`, only removes their files. */
static bool join_any(struct kept *kept, bool forget) {
    DIR *list = fdopendir(openat(kept->folder, "holders", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    bool joined = false;
    for (struct dirent *entry; list && !joined && (entry = readdir(list));) {
        if (entry->d_name[0] == '.')
            continue;
        if (forget)
            unlinkat(dirfd(list), entry->d_name, 0);
        else
            joined = join_holder(kept, dirfd(list), entry->d_name);
    }
    if (list)
        closedir(list);
    return joined;
}

/* Whether the named container exists below data/UID, or below data/UID.own, where the user may have put anything. */
bool is_kept(const char *ending) {
    struct container_name name;
    struct stat seen;
    char why[WHY_LENGTH], path[PATH_MAX];
    if (!request.data || parse_container_name(request.name, &name, why) != 0)
        return false;
    snprintf(path, sizeof path, "%s/%u%s/%s/image", request.data, request.uid, ending, name.name);
    if (*ending)
        as_user();
    bool kept = lstat(path, &seen) == 0 && S_ISREG(seen.st_mode);
    as_root();
    return kept;
}

/* Reads the path of the container's image, and the image as the user named it. */
void read_image(struct kept *kept) {
    int file = openat(kept->folder, "image", O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    ssize_t got = file < 0 ? 0 : read(file, kept->image, sizeof kept->image - 1);
    kept->image[got > 0 ? got : 0] = '\0';
    size_t first = strlen(kept->image) + 1;
    kept->asked = got > (ssize_t)first ? kept->image + first : kept->image;
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

/* As in Pyxis, an existing container takes precedence over the image named; a note reports a different image. */
static void take_image(const struct kept *kept, const char *name) {
    if (request.image && strcmp(request.image, kept->image) != 0)
        add_note("container %s exists and is reused; it was created from %s, and --container-image=%s is ignored", name,
                 kept->asked, request.asked);
    request.image = kept->image;
}

/* As in Pyxis, a running container has the namespaces that it was started with. */
static void check_namespaces(const struct spaces *running) {
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

/* Takes the container's lock, or joins its holders; returns whether it is held. A step that is ending may hold the lock
 * for a moment after it has closed its namespaces. */
static bool join_or_lock(struct kept *kept, const char *name) {
    time_t until = seconds_since_boot() + JOIN_S;
    while (flock(kept->lock, LOCK_EX | LOCK_NB) != 0) {
        if (join_any(kept, false))
            return true;
        if (seconds_since_boot() > until) /* not by the number of tries: the user decides how many holders there are */
            fail("container %s is in use on this node and cannot be joined", name);
        nanosleep(&(struct timespec){.tv_nsec = JOIN_PAUSE_NS}, NULL);
    }
    return false;
}

/* If root builds the root, only root can access the kept files: an overlay's folders decide where writes go. */
void open_kept(struct kept *kept) {
    struct container_name name;
    char why[WHY_LENGTH];
    *kept = (struct kept){.folder = -1, .door = -1, .lock = -1, .tree = -1, .bare = -1, .owner = -1,
                           .spaces = no_spaces};
    if (!request.name)
        return;
    if (parse_container_name(request.name, &name, why) != 0)
        fail("--container-name: %s", why);
    if (!request.data)
        fail("named containers are disabled: plugstack.conf has no data=");
    if ((size_t)snprintf(kept->path, sizeof kept->path, "%s/%s", request.data, name.name) >= sizeof kept->path)
        fail("cannot store the container: %s: %s", request.data, strerror(ENAMETOOLONG));
    kept->folder = open_own_folder(request.data_folder, name.name, geteuid(), kept->path);
    make_subfolder(kept, "holders", 0700);
    kept->door = open_lock(kept, "door");
    kept->lock = open_lock(kept, "lock");
    if (kept->door < 0 || kept->lock < 0 || flock(kept->door, LOCK_EX) != 0)
        fail("cannot store the container: %s", strerror(errno));
    read_image(kept);
    bool busy = join_or_lock(kept, name.name);
    check_use(&name, kept->image[0], busy);
    if (!busy)
        join_any(kept, true);
    if (kept->image[0])
        take_image(kept, name.name);
    kept->running = busy && name.use == NAME_NO_EXEC;
    if (kept->running) /* beside it: the same file system, with separate mounts and namespaces */
        kept->spaces = no_spaces;
    else if (busy)
        check_namespaces(&kept->spaces);
    if (busy && !kept->running && request.mounts)
        add_note("container %s is already running: --container-mounts is ignored", name.name);
    make_subfolder(kept, "upper", 0755);
    make_subfolder(kept, "work", 0700);
    if (privileged && fchownat(kept->folder, "upper", request.uid, request.gid, AT_SYMLINK_NOFOLLOW) != 0)
        fail("cannot store the container: %s", strerror(errno));
}

void hold_kept(struct kept *kept) {
    if (!kept->path[0])
        return;
    int folder = privileged ? kept->folder : open_again(kept->folder, kept->path);
    kept->tree = folder < 0 ? -1 : clone_tree(folder);
    if (kept->tree < 0)
        fail("cannot store the container: %s: %s", kept->path, strerror(errno));
    if (!privileged)
        close(folder);
}

/* Records the step, which is our parent, as a holder. */
void note_kept(struct kept *kept, const struct spaces *spaces) {
    int fds[NOTED] = {spaces->mounts, spaces->user, kept->bare, kept->owner};
    struct stat seen;
    char name[64];
    if (kept->door < 0)
        return;
    memcpy(fds + 4, spaces->own, sizeof spaces->own);
    snprintf(name, sizeof name, "holders/%d", (int)getppid());
    int file = openat(kept->folder, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    for (int i = 0; i < NOTED; i++) {
        seen.st_ino = 0;
        if (file < 0 || (fds[i] >= 0 && fstat(fds[i], &seen) != 0) ||
            dprintf(file, "%llu%c", (unsigned long long)seen.st_ino, i + 1 < NOTED ? ' ' : '\n') < 0)
            fail("cannot store the container: %s", strerror(errno));
    }
    close(file);
    file = openat(kept->folder, "image", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0) {
        size_t first = strlen(request.image) + 1;
        if (write(file, request.image, first) < 0 || write(file, request.asked, strlen(request.asked)) < 0)
            fail("cannot store the container: %s", strerror(errno));
        close(file);
    }
    flock(kept->lock, LOCK_SH);
    close(kept->door);
}

/* An image that can be mounted neither by the kernel nor by FUSE is unpacked once, for all steps of its user:
 *
 *   CACHE/KEY         what is in it; the key is the file's own identity, so that another image at its path has another
 *   CACHE/KEY.image   the path it was found at. Who uses the folder has this file locked, together with others
 *   CACHE/lock        held by whoever unpacks or removes
 *
 * `dalsegno image gc` removes folders that nobody uses and to whose key no file at their path leads any more. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "build.h"

static void name_folder(struct image *image) {
    struct stat seen;
    if (fstat(image->fd, &seen) != 0 || !request.cache)
        fail("image %s: cannot unpack it: plugstack.conf has no cache=", request.image);
    int used = snprintf(image->extracted, sizeof image->extracted, "%s/%llx-%llx-%llx-%llx", request.cache,
                        (unsigned long long)seen.st_dev, (unsigned long long)seen.st_ino,
                        (unsigned long long)seen.st_size,
                        (unsigned long long)seen.st_mtim.tv_sec * 1000000000ull + (unsigned long long)seen.st_mtim.tv_nsec);
    if ((size_t)used >= sizeof image->extracted - 8)
        fail("image %s: the path of %s is too long", request.image, request.cache);
}

/* access() would ask with root's rights where we can be root again, and a link of the user's could lead it anywhere. */
static bool is_there(const char *path) { return faccessat(AT_FDCWD, path, F_OK, AT_EACCESS | AT_SYMLINK_NOFOLLOW) == 0; }

static int take_turn(void) {
    char path[PATH_MAX];
    mkdir(request.cache, 0700);
    snprintf(path, sizeof path, "%s/lock", request.cache);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock < 0 || flock(lock, LOCK_EX) != 0)
        fail("image %s: cannot unpack it into %s: %s", request.image, request.cache, strerror(errno));
    return lock;
}

static void remove_folder(const char *path) {
    run_program((const char *const[]){"chmod", "-R", "u+rwX", path, NULL}, -1, -1); /* as the image had it */
    run_program((const char *const[]){"rm", "-rf", path, NULL}, -1, -1);
}

static void fill_folder(const struct image *image) {
    char partial[PATH_MAX + 16], file[64], why[WHY_LENGTH], queue[32] = "256"; /* MiB, as unsquashfs has it */
    int told = memfd_create("errors", MFD_CLOEXEC);
    snprintf(partial, sizeof partial, "%s.part", image->extracted);
    snprintf(file, sizeof file, "/proc/self/fd/%d", image->fd);
    remove_folder(partial);
    fcntl(image->fd, F_SETFD, 0); /* unsquashfs reads what we opened, whatever is at that path by now */
    if (request.memory_mib > 0 && request.memory_mib / 8 < 256)
        snprintf(queue, sizeof queue, "%llu", request.memory_mib / 8 < 16 ? 16 : request.memory_mib / 8);
    int rc = run_program((const char *const[]){"unsquashfs", "-no-progress", "-no-xattrs", "-da", queue, "-fr", queue, "-d",
                                               partial, file, NULL},
                         -1, told);
    fcntl(image->fd, F_SETFD, FD_CLOEXEC);
    if (rc == 127)
        fail("image %s: this node has neither squashfuse with a usable /dev/fuse nor unsquashfs", request.image);
    if (rc != 0 && rc != 2) { /* 2: devices and owners, which we do not want */
        remove_folder(partial);
        fail("image %s: unsquashfs into %s failed (%d): %s", request.image, request.cache, rc, why_failed(rc, told, why));
    }
    if (rename(partial, image->extracted) != 0)
        fail("image %s: %s", request.image, strerror(errno));
    close(told);
}

/* From now on it is used, for as long as somebody has this descriptor: the step that we hand it to. */
static void note_use(const struct image *image) {
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s.image", image->extracted);
    request.in_use = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (request.in_use < 0 || flock(request.in_use, LOCK_SH) != 0 || ftruncate(request.in_use, 0) != 0 ||
        write(request.in_use, request.image, strlen(request.image)) < 0)
        fail("image %s: %s: %s", request.image, path, strerror(errno));
}

void unpack(struct image *image) {
    name_folder(image);
    int turn = take_turn();
    if (!is_there(image->extracted)) /* once per node, whoever comes first */
        fill_folder(image);
    note_use(image);
    close(turn);
}

/* A container that runs already: it may outlive the step that had its image unpacked. */
void join_unpacked(void) {
    struct image image = {0};
    if (privileged || !request.cache || access(request.image, R_OK) != 0)
        return;
    open_image(&image);
    if (image.folder)
        return;
    name_folder(&image);
    int turn = take_turn();
    if (is_there(image.extracted))
        note_use(&image);
    close(turn);
}

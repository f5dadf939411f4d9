/* An image that neither the kernel nor FUSE can mount is unpacked once, for all steps of its user:
 *
 *   CACHE/KEY         the content; the key identifies the file, so another image at the same path has another key
 *   CACHE/KEY.image   the path of the image. Steps that use the folder hold a shared lock on this file
 *   CACHE/lock        held while an image is unpacked or removed
 *
 * `dalsegno image gc` removes unused folders whose image file no longer exists or has changed. */
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

/* Returns whether a path exists. access() uses the real user id, which may still be root's, and would follow links of
 * the user. */
static bool is_there(const char *path) { return faccessat(AT_FDCWD, path, F_OK, AT_EACCESS | AT_SYMLINK_NOFOLLOW) == 0; }

static int lock_cache(void) {
    char path[PATH_MAX];
    mkdir(request.cache, 0700);
    snprintf(path, sizeof path, "%s/lock", request.cache);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock < 0 || flock(lock, LOCK_EX) != 0)
        fail("image %s: cannot unpack it into %s: %s", request.image, request.cache, strerror(errno));
    return lock;
}

static void remove_folder(const char *path) {
    run_program((const char *const[]){"chmod", "-R", "u+rwX", path, NULL}, -1, -1); /* the image may contain folders without permissions */
    run_program((const char *const[]){"rm", "-rf", path, NULL}, -1, -1);
}

static void fill_folder(const struct image *image) {
    char partial[PATH_MAX + 16], file[64], why[WHY_LENGTH], queue[32] = "256"; /* MiB, the default of unsquashfs */
    int errors_fd = memfd_create("errors", MFD_CLOEXEC);
    snprintf(partial, sizeof partial, "%s.part", image->extracted);
    snprintf(file, sizeof file, "/proc/self/fd/%d", image->fd);
    remove_folder(partial);
    fcntl(image->fd, F_SETFD, 0); /* unsquashfs reads the opened file, whatever is at the path now */
    if (request.memory_mib > 0 && request.memory_mib / 8 < 256)
        snprintf(queue, sizeof queue, "%llu", request.memory_mib / 8 < 16 ? 16 : request.memory_mib / 8);
    int rc = run_program((const char *const[]){"unsquashfs", "-no-progress", "-no-xattrs", "-da", queue, "-fr", queue, "-d",
                                               partial, file, NULL},
                         -1, errors_fd);
    fcntl(image->fd, F_SETFD, FD_CLOEXEC);
    if (rc == 127)
        fail("image %s: this node has neither squashfuse with a usable /dev/fuse nor unsquashfs", request.image);
    if (rc != 0 && rc != 2) { /* 2 means that devices or owners could not be set, which does not matter */
        remove_folder(partial);
        fail("image %s: unsquashfs into %s failed (%d): %s", request.image, request.cache, rc, why_failed(rc, errors_fd, why));
    }
    if (rename(partial, image->extracted) != 0)
        fail("image %s: %s", request.image, strerror(errno));
    close(errors_fd);
}

/* Marks the folder as in use with a lock. The step gets the lock's descriptor, and the lock lasts until the step closes
 * it. */
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
    int lock_fd = lock_cache();
    if (!is_there(image->extracted)) /* the first step on the node unpacks it */
        fill_folder(image);
    note_use(image);
    close(lock_fd);
}

/* Marks the unpacked image of a running container as used: the container may outlive the step that unpacked the image. */
void join_unpacked(void) {
    struct image image = {0};
    if (privileged || !request.cache || access(request.image, R_OK) != 0)
        return;
    open_image(&image);
    if (image.folder)
        return;
    name_folder(&image);
    int lock_fd = lock_cache();
    if (is_there(image.extracted))
        note_use(&image);
    close(lock_fd);
}

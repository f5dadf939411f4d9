/* Mounts an image with the kernel's squashfs or FUSE, or unpacks it once. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"
#include "message.h"

static const char *const squashfuse[] = {"/usr/bin/squashfuse_ll", "/usr/local/bin/squashfuse_ll"};

/* Opens the image with the user's rights, so that users read only files that they may read. */
void open_image(struct image *image) {
    struct stat seen;
    char magic[4] = "";
    as_user();
    image->fd = open_no_magiclinks(request.image, O_RDONLY | O_NONBLOCK); /* a pipe must not block the helper */
    image->folder = image->fd >= 0 && fstat(image->fd, &seen) == 0 && S_ISDIR(seen.st_mode);
    /* In the container, the root folder belongs to the user, whatever its mode is. So check here that the user may
     * search it. */
    int searched = image->folder ? openat(image->fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC) : image->fd, error = errno;
    as_root();
    if (searched < 0)
        fail("image %s: %s", request.image, strerror(error));
    if (image->folder)
        close(searched);
    image->fuse_server = image->tree = -1;
    if (image->folder)
        return;
    if (fstat(image->fd, &seen) != 0 || !S_ISREG(seen.st_mode) || pread(image->fd, magic, 4, 0) != 4 || memcmp(magic, "hsqs", 4) != 0)
        fail("image %s is not a squashfs file (.sqsh)", request.image);
    image->trusted = request.uid == 0 || only_root_can_change(image->fd);
}

/* The kernel's squashfs, as root */

static int attach_loop(int file) {
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0)
        fail("/dev/loop-control: %s (modprobe loop)", strerror(errno));
    for (int attempt = 0; attempt < 256; attempt++) { /* another step may take the free device first */
        char path[32];
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(path, sizeof path, "/dev/loop%d", number);
        int device = number < 0 ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        if (device < 0)
            fail("no free loop device: %s", strerror(errno));
        struct loop_config config = {.fd = (unsigned)file,
                                     .info = {.lo_flags = LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR}};
        if (ioctl(device, LOOP_CONFIGURE, &config) == 0) {
            close(control);
            return device;
        }
        close(device);
        if (errno != EBUSY)
            fail("loop device %s: %s", path, strerror(errno));
    }
    fail("no free loop device: other processes took 256 in a row");
}

/* Mounts the image with the kernel's squashfs. Returns false if the kernel must not mount this file, or cannot map the
 * owners of its files. */
static bool mount_squashfs(struct image *image, const char *at) {
    char device[64];
    if (!image->trusted)
        return false;
    int loop = attach_loop(image->fd);
    snprintf(device, sizeof device, "/proc/self/fd/%d", loop);
    if (mount(device, at, "squashfs", MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) != 0)
        fail("image %s: the kernel cannot mount it: %s", request.image,
             errno == EINVAL ? "it is damaged, or this kernel does not support its compression" : strerror(errno));
    close(loop);
    if (request.uid == 0)
        return true;
    int folder = open(at, O_PATH | O_DIRECTORY | O_CLOEXEC), tree = clone_tree(folder);
    int owner = create_mapped_user_namespace(0, request.uid, request.gid);
    bool mapped = tree >= 0 && change_tree(tree, MOUNT_ATTR_IDMAP, owner, 0) == 0;
    umount2(at, MNT_DETACH);
    close(folder);
    close(owner);
    folder = open(at, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (mapped && attach_tree(tree, folder) != 0)
        fail("image %s: cannot mount it: %s", request.image, strerror(errno));
    close(tree);
    close(folder);
    return mapped;
}

/* Without root: FUSE, or an unpacked image */

/* Starts the server before the helper enters new namespaces: a server inside them would keep its own mount alive. */
static bool start_fuse_server(struct image *image) {
    const char *program = NULL;
    for (size_t i = 0; i < sizeof squashfuse / sizeof *squashfuse; i++)
        if (access(squashfuse[i], X_OK) == 0)
            program = squashfuse[i];
    int pair[2], fuse_works = program ? open("/dev/fuse", O_RDWR | O_CLOEXEC) : -1; /* fails if the kernel module is missing */
    if (fuse_works < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return false;
    close(fuse_works);
    int ended[2] = {-1, -1}; /* a pipe whose reader notices when the server ends */
    pid_t child = pipe2(ended, O_CLOEXEC) == 0 ? fork() : -1;
    if (child < 0)
        return false;
    if (child > 0) {
        waitpid(child, NULL, 0);
        close(pair[1]);
        close(ended[1]);
        request.in_use = ended[0];
        image->fuse_server = pair[0];
        return true;
    }
    if (fork() != 0)
        _exit(0); /* the server must not be a child of the step, because it must outlive the step's tasks */
    drop_root(false);
    setsid();
    char text[8], file[64], device[64];
    int fuse;
    close(pair[0]);
    if (receive_message(pair[1], text, sizeof text, &fuse, 1) != 1)
        _exit(1);
    int null = open("/dev/null", O_RDWR);
    for (int stream = 0; stream < 3; stream++)
        dup2(null, stream);
    close(ANSWER_FD);
    fcntl(fuse, F_SETFD, 0);
    fcntl(ended[1], F_SETFD, 0);
    fcntl(image->fd, F_SETFD, 0);
    snprintf(file, sizeof file, "/proc/self/fd/%d", image->fd);
    snprintf(device, sizeof device, "/dev/fd/%d", fuse);
    execl(program, program, "-f", file, device, (char *)NULL);
    _exit(127);
}

static bool mount_fuse(struct image *image, const char *at) {
    char options[128];
    int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fuse);
    if (fuse < 0 || mount("squashfuse", at, "fuse.squashfuse", MS_RDONLY | MS_NOSUID | MS_NODEV, options) != 0)
        fail("image %s: cannot mount it with FUSE: %s", request.image, strerror(errno));
    send_answer(image->fuse_server, "fuse", &fuse, 1);
    close(fuse);
    close(image->fuse_server);
    return true;
}

/* Replaces the escapes of mountinfo, such as \040 for a space. */
static void unescape(char *text) {
    char *to = text;
    for (; *text; text++) {
        if (text[0] == '\\' && text[1] && text[2] && text[3])
            *to++ = (char)((text[1] - '0') * 64 + (text[2] - '0') * 8 + (text[3] - '0')), text += 3;
        else
            *to++ = *text;
    }
    *to = '\0';
}

/* Refuses a folder with mounts: the node may hide files below a mount, and an overlay would show them to the user. */
static void refuse_mounts_within(const char *folder, size_t length) {
    char *line = NULL, *point = NULL;
    size_t size = 0;
    FILE *list = fopen("/proc/self/mountinfo", "re");
    if (!list)
        fail("image %s: cannot read the list of mounts: %s", request.image, strerror(errno));
    for (; getline(&line, &size, list) > 0; free(point), point = NULL) {
        if (sscanf(line, "%*s %*s %*s %*s %ms", &point) != 1)
            continue;
        unescape(point);
        if (strncmp(point, folder, length) == 0 && point[length] == '/' && point[length + 1])
            fail("image %s: %s%s is a mount point; use a folder without mounts inside", request.image, request.image,
                 point + length);
    }
    free(line);
    fclose(list);
}

/* Refuses a folder with mounts of the node inside. Reads them from mountinfo, because a clone of the tree leaves out
 * unbindable mounts. */
static void refuse_mounts_of_nodes(const struct image *image) {
    char link[64], folder[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", image->fd);
    ssize_t length = readlink(link, folder, sizeof folder - 1);
    if (length <= 0)
        fail("image %s: cannot read the list of mounts: %s", request.image, strerror(errno));
    folder[length] = '\0';
    refuse_mounts_within(folder, (size_t)length - (folder[length - 1] == '/')); /* only / ends with a slash */
}

/* Clones the folder of an image as a tree, inside the new namespaces and before other mounts hide the folder. */
void hold_image(struct image *image) {
    if (!image->folder && !image->extracted[0])
        return;
    int folder = image->fd;
    if (image->extracted[0])
        folder = open(image->extracted, O_PATH | O_DIRECTORY | O_CLOEXEC);
    else if (privileged && request.uid != 0)
        refuse_mounts_of_nodes(image);
    else if (!privileged) /* image->fd belongs to the old mount namespace */
        folder = open_again(image->fd, request.image);
    image->tree = folder < 0 ? -1 : clone_tree(folder);
    if (image->tree < 0 || change_tree(image->tree, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, -1, 1) != 0)
        fail("image %s: %s", request.image, strerror(errno));
    close(folder);
}

/* Starts a FUSE server for the image, or unpacks the image. Called without root, before new namespaces are entered. */
void prepare_image(struct image *image) {
    if (image->folder)
        return;
    /* If slurmd runs as root, the server is in the step's cgroup and ends with the step. Another step that joins the
     * named container may run longer. */
    bool outlived = request.name && slurmd_is_root;
    if (outlived || !start_fuse_server(image))
        unpack(image);
}

bool mount_image(struct image *image, const char *at) {
    if (image->fuse_server >= 0)
        return mount_fuse(image, at);
    if (image->tree < 0)
        return mount_squashfs(image, at);
    int mount_point = open(at, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (attach_tree(image->tree, mount_point) != 0)
        fail("image %s: %s", request.image, strerror(errno));
    /* Check again: the first check went by path, and the owner may have renamed the folder before it was cloned. */
    if (privileged && request.uid != 0)
        refuse_mounts_within(at, strlen(at));
    close(image->tree);
    close(mount_point);
    return true;
}

/* Saves the container as a .sqsh file when its step ends, with the user's rights. The file exists only when complete. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "build.h"
#include "message.h"

enum { WORDS_MAX = 512 };

/* Enters the container, copies /proc/self/mountinfo to `list`, and answers with the root folder. */
static _Noreturn void send_root_and_mounts(int user, int mounts, int list, int answer) {
    char space[4096];
    if ((user >= 0 && setns(user, CLONE_NEWUSER) != 0) || setns(mounts, CLONE_NEWNS) != 0)
        _exit(1);
    int info = openat(proc_fd, "self/mountinfo", O_RDONLY | O_CLOEXEC);
    for (ssize_t got; (got = read(info, space, sizeof space)) > 0;)
        if (write(list, space, (size_t)got) != got)
            _exit(1);
    int folder = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    send_answer(answer, "root", &folder, 1);
    _exit(0);
}

/* Returns the container's root folder, opened inside the container. The node's own mksquashfs then reads it outside the
 * container. */
static int root_of(int user, int mounts, int list) {
    int pair[2], root = -1;
    char text[8];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        fail("cannot create a socket: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0)
        send_root_and_mounts(user, mounts, list, pair[1]);
    close(pair[1]);
    if (receive_message(pair[0], text, sizeof text, &root, 1) != 1)
        fail("--container-save: cannot enter the container");
    waitpid(child, NULL, 0);
    return root;
}

/* Excludes everything that is mounted in the container. (The option -one-file-system of mksquashfs would also exclude
 * every unmodified file, because an overlay reports another file system for it.) */
static void exclude_mounts(int list, const char *words[], int count) {
    char *line = NULL, *point = NULL;
    size_t size = 0;
    FILE *file = fdopen(list, "r");
    rewind(file);
    words[count++] = "-e";
    while (count < WORDS_MAX - 1 && getline(&line, &size, file) > 0) /* the helper mounts no path that contains a space */
        if (sscanf(line, "%*s %*s %*s %*s %ms", &point) == 1 && strcmp(point, "/") != 0)
            words[count++] = point + 1;
    words[count] = NULL;
}

void save_root(int user, int mounts) {
    char partial[PATH_MAX], why[WHY_LENGTH], memory[32];
    struct timespec now;
    enter_cgroups();
    if (geteuid() == 0 && request.uid != 0)
        become_user();
    clock_gettime(CLOCK_REALTIME, &now); /* for a unique name: several nodes may save to one folder */
    int used = snprintf(partial, sizeof partial, "%s.%d.%ld.part", request.save, (int)getpid(), now.tv_nsec);
    if (used < 0 || (size_t)used >= sizeof partial)
        fail("--container-save: the path is too long");
    int errors_fd = memfd_create("errors", MFD_CLOEXEC);
    int list = memfd_create("mounts", MFD_CLOEXEC), root = root_of(user, mounts, list);
    const char *words[WORDS_MAX] = {"mksquashfs", ".",    partial,   "-noappend",     "-no-progress", "-no-xattrs",
                                    "-comp",      "zstd", "-Xcompression-level", "3", "-all-root"};
    int count = request.uid == 0 ? 10 : 11;
    if (request.memory_mib > 0) { /* the default is a quarter of the machine's memory */
        snprintf(memory, sizeof memory, "%lluM", request.memory_mib / 4 < 64 ? 64 : request.memory_mib / 4);
        words[count++] = "-mem", words[count++] = memory;
    }
    exclude_mounts(list, words, count);
    int rc = run_program(words, root, errors_fd);
    if (rc == 0 && rename(partial, request.save) == 0) {
        send_answer(ANSWER_FD, "saved", NULL, 0);
        exit(0);
    }
    int error = errno;
    unlink(partial);
    if (rc == 127)
        fail("--container-save=%s: this node has no mksquashfs (squashfs-tools)", request.save);
    if (rc != 0)
        fail("--container-save=%s: mksquashfs failed (%d): %s", request.save, rc, why_failed(rc, errors_fd, why));
    fail("--container-save=%s: %s", request.save, strerror(error));
}

/* Programs that the helper runs with the user's rights (an import, squashfuse, unsquashfs, mksquashfs) belong to the
 * job: they count against its memory and CPUs, and end with the step. Slurm puts only tasks into the step's cgroups.
 * Therefore a task sends us its /proc/self/cgroup, and we enter the same cgroups while we are still root. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "build.h"
#include "message.h"

/* Waits for a task's message. Exits if no task is left, because then nothing needs the container. */
void await_cgroups(void) {
    static char reported[CGROUPS_LENGTH];
    if (geteuid() != 0 || request.cgroups)
        return;
    if (receive_message(ANSWER_FD, reported, sizeof reported, NULL, 0) < 0)
        exit(1);
    request.cgroups = reported;
}

static bool is_among(const char *words, const char *word, size_t length) {
    for (; *words; words += strcspn(words, ","), words += *words == ',')
        if (strcspn(words, ",\n") == length && strncmp(words, word, length) == 0)
            return true;
    return false;
}

/* Opens a cgroup's folder below the mount point of its hierarchy. */
static int open_cgroup(const char *controllers, const char *path) {
    char *line = NULL, *root = NULL, *point = NULL, *type = NULL, *options = NULL;
    size_t size = 0, first = strcspn(controllers, ",");
    int found = -1;
    int info = openat(proc_fd, "self/mountinfo", O_RDONLY | O_CLOEXEC);
    FILE *list = info < 0 ? NULL : fdopen(info, "r");
    while (list && found < 0 && getline(&line, &size, list) > 0) {
        const char *rest = strstr(line, " - ");
        if (sscanf(line, "%*s %*s %*s %ms %ms", &root, &point) == 2 && rest &&
            sscanf(rest, " - %ms %*s %ms", &type, &options) == 2 &&
            (*controllers ? strcmp(type, "cgroup") == 0 && is_among(options, controllers, first)
                          : strcmp(type, "cgroup2") == 0)) {
            size_t above = strcmp(root, "/") == 0 ? 0 : strlen(root);
            int mounted = strncmp(path, root, above) == 0 ? open(point, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
            const char *below = path + above + strspn(path + above, "/");
            if (mounted >= 0) {
                found = *below ? openat(mounted, below, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : dup(mounted);
                close(mounted);
            }
        }
        free(root), free(point), free(type), free(options);
        root = point = type = options = NULL;
    }
    free(line);
    if (list)
        fclose(list);
    return found;
}

static void enter_cgroup(const char *controllers, const char *path) {
    int folder = open_cgroup(controllers, path);
    int members = folder < 0 ? -1 : openat(folder, "cgroup.procs", O_WRONLY | O_CLOEXEC);
    if (members < 0 || write(members, "0", 1) != 1) /* "0" means this process */
        fail("cannot enter the step's cgroup %s: %s", path, strerror(errno));
    close(members);
    close(folder);
}

/* Moves this process and its future children into the cgroups of the step's tasks. Each reported line is
 * NUMBER:CONTROLLERS:PATH; CONTROLLERS is empty for cgroup v2. */
void enter_cgroups(void) {
    char own[CGROUPS_LENGTH] = "\n", reported[CGROUPS_LENGTH], wanted[CGROUPS_LENGTH + 2];
    if (geteuid() != 0)
        return;
    await_cgroups();
    int file = openat(proc_fd, "self/cgroup", O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, own + 1, sizeof own - 2) <= 0)
        fail("cannot read /proc/self/cgroup: %s", strerror(errno));
    close(file);
    snprintf(reported, sizeof reported, "%s", request.cgroups);
    for (char *rest = reported, *line; (line = strsep(&rest, "\n"));) {
        snprintf(wanted, sizeof wanted, "\n%s\n", line);
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path || strstr(own, wanted)) /* this process is in the task's cgroup already */
            continue;
        *path++ = '\0';
        enter_cgroup(controllers + 1, path);
    }
}

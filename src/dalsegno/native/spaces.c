/* User and mount namespaces: making them, mapping one user into them, and holding them by descriptor. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/securebits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"

enum { CHILD_MS = 30000 };

int proc_fd = -1;

int namespace_fd(pid_t pid, const char *kind) {
    char path[64];
    if (pid == 0)
        snprintf(path, sizeof path, "self/ns/%s", kind);
    else
        snprintf(path, sizeof path, "%d/ns/%s", (int)pid, kind);
    int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        fail("the container's namespaces cannot be opened: %s", strerror(errno));
    return fd;
}

static void write_maps(pid_t pid, unsigned inside_uid, unsigned inside_gid, unsigned outside_uid,
                       unsigned outside_gid) {
    char who[32] = "self", path[64], text[64];
    if (pid != 0)
        snprintf(who, sizeof who, "%d", (int)pid);
    /* Without this a member of a group that is denied something could leave the group in here. */
    snprintf(path, sizeof path, "%s/setgroups", who);
    write_text(proc_fd, path, "deny");
    snprintf(path, sizeof path, "%s/uid_map", who);
    snprintf(text, sizeof text, "%u %u 1\n", inside_uid, outside_uid);
    write_text(proc_fd, path, text);
    snprintf(path, sizeof path, "%s/gid_map", who);
    snprintf(text, sizeof text, "%u %u 1\n", inside_gid, outside_gid);
    write_text(proc_fd, path, text);
}

/* As a user without rights: root of a namespace in which nobody else exists. */
void enter_own_user_namespace(void) {
    prctl(PR_SET_DUMPABLE, 1); /* after a change of user our files in /proc would be root's */
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        fail("this machine permits users no namespaces (%s): see kernel.unprivileged_userns_clone, "
             "kernel.apparmor_restrict_unprivileged_userns",
             strerror(errno));
    write_maps(0, 0, 0, request.uid, request.gid);
}

/* The child has the user's id: they may stop it, and must not stop us. */
static char hear(int from) {
    char said = '\0';
    struct pollfd end = {.fd = from, .events = POLLIN};
    return poll(&end, 1, CHILD_MS) > 0 && read(from, &said, 1) == 1 ? said : '\0';
}

/* A child that waits in a new user namespace until it is mapped; with `mounts`, it then leaves our mounts too. */
static pid_t start_child(bool mounts, int *talk) {
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) != 0)
        fail("no pipe: %s", strerror(errno));
    int back[2];
    if (pipe2(back, O_CLOEXEC) != 0)
        fail("no pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0)
        fail("no process: %s", strerror(errno));
    if (child > 0) {
        close(pair[0]);
        close(back[1]);
        if (!hear(back[0]))
            fail("a user namespace was refused: see user.max_user_namespaces");
        talk[0] = back[0], talk[1] = pair[1];
        return child;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char go;
    if (mounts && privileged) {
        /* The namespace is the user's, so that the user's tasks may enter it. Root's rights stay until then: machines
           that refuse namespaces to users (Ubuntu 24.04) make this one. */
        prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
        become_user();
    }
    if (unshare(CLONE_NEWUSER) != 0 || write(back[1], "r", 1) != 1 || read(pair[0], &go, 1) != 1)
        _exit(1);
    if (mounts && (unshare(CLONE_NEWNS) != 0 || write(back[1], set_propagation() ? "m" : "p", 1) != 1 ||
                   read(pair[0], &go, 1) < 0))
        _exit(1);
    _exit(0);
}

static void end_child(pid_t child, int talk[2]) {
    close(talk[0]);
    close(talk[1]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* For an idmapped mount: whoever is `inside` on disk is the user outside. */
int user_namespace_of(unsigned inside, unsigned outside_uid, unsigned outside_gid) {
    int talk[2];
    pid_t child = start_child(false, talk);
    write_maps(child, inside, inside, outside_uid, outside_gid);
    int fd = namespace_fd(child, "user");
    end_child(child, talk);
    return fd;
}

/* The mounts as they are now, in a namespace that belongs to the user: nothing in it can be taken apart. */
void wrap(unsigned inside_uid, unsigned inside_gid, unsigned outside_uid, unsigned outside_gid, int fds[2]) {
    int talk[2];
    pid_t child = start_child(true, talk);
    write_maps(child, inside_uid, inside_gid, outside_uid, outside_gid);
    char said = write(talk[1], "g", 1) == 1 ? hear(talk[0]) : '\0';
    if (said == 'p')
        fail("the propagation of mounts cannot be set");
    if (said != 'm')
        fail("a mount namespace was refused: see user.max_mnt_namespaces");
    fds[0] = namespace_fd(child, "mnt");
    fds[1] = namespace_fd(child, "user");
    end_child(child, talk);
}

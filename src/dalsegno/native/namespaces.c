/* Creates user and mount namespaces, maps one user into them, and holds them by descriptor. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"
#include "message.h"

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
        fail("cannot open the container's namespaces: %s", strerror(errno));
    return fd;
}

static void write_maps(pid_t pid, unsigned inside_uid, unsigned inside_gid, unsigned outside_uid,
                       unsigned outside_gid) {
    char process[32] = "self", path[64], text[64];
    if (pid != 0)
        snprintf(process, sizeof process, "%d", (int)pid);
    /* Deny setgroups: otherwise a user could leave a group in the namespace, and open files that deny access to it. */
    snprintf(path, sizeof path, "%s/setgroups", process);
    write_text(proc_fd, path, "deny");
    snprintf(path, sizeof path, "%s/uid_map", process);
    snprintf(text, sizeof text, "%u %u 1\n", inside_uid, outside_uid);
    write_text(proc_fd, path, text);
    snprintf(path, sizeof path, "%s/gid_map", process);
    snprintf(text, sizeof text, "%u %u 1\n", inside_gid, outside_gid);
    write_text(proc_fd, path, text);
}

/* Enters a new user namespace, in which the user is root and no other user exists, and a new mount namespace. */
void enter_own_user_namespace(void) {
    drop_root(true);
    prctl(PR_SET_DUMPABLE, 1); /* otherwise, after a change of user, this process's files in /proc belong to root */
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        fail("this machine does not let users create namespaces (%s); check kernel.unprivileged_userns_clone and "
             "kernel.apparmor_restrict_unprivileged_userns",
             strerror(errno));
    write_maps(0, 0, 0, request.uid, request.gid);
}

/* Waits for a reply from the child, with a timeout: the child has the user's id, so the user can stop it. */
static char read_reply(int from) {
    char reply = '\0';
    struct pollfd end = {.fd = from, .events = POLLIN};
    return poll(&end, 1, CHILD_MS) > 0 && read(from, &reply, 1) == 1 ? reply : '\0';
}

static bool start_loopback(void) {
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool started = fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &loopback) == 0;
    if (fd >= 0)
        close(fd);
    return started;
}

/* Creates the namespaces for --container-unshare and mounts the file systems that show them. Runs inside the
 * container's root and user namespace, which then owns them. If the kernel refuses a new /sys, because the node hides
 * parts of its /sys, the node's /sys stays. */
bool unshare_namespaces(void) {
    const unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;
    struct statfs seen;
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        if (request.unshare[i] && unshare(namespace_flag((enum namespace_kind)i)) != 0)
            return false;
    if (request.unshare[NAMESPACE_NET]) {
        if (!start_loopback())
            return false;
        if (statfs("/sys", &seen) == 0 && seen.f_type == SYSFS_MAGIC)
            mount("sysfs", "/sys", "sysfs", flags | MS_RDONLY, NULL);
    }
    if (request.unshare[NAMESPACE_IPC]) /* may fail: not every kernel has mqueue */
        mount("mqueue", "/dev/mqueue", "mqueue", flags, NULL);
    return true;
}

void open_namespaces(pid_t pid, struct namespaces *namespaces) {
    namespaces->mounts = namespace_fd(pid, "mnt");
    namespaces->user = namespace_fd(pid, "user");
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        namespaces->own[i] = request.unshare[i] ? namespace_fd(pid, namespace_words[i]) : -1;
}

/* Starts a child that enters a new user namespace and waits until its ids are mapped. With `mounts`, the child then
 * creates a mount namespace and the namespaces for --container-unshare. */
static pid_t start_child(bool mounts, int *pipes) {
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) != 0)
        fail("cannot create a pipe: %s", strerror(errno));
    int back[2];
    if (pipe2(back, O_CLOEXEC) != 0)
        fail("cannot create a pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0)
        fail("cannot create a process: %s", strerror(errno));
    if (child > 0) {
        close(pair[0]);
        close(back[1]);
        if (!read_reply(back[0]))
            fail("the kernel refused a user namespace; check user.max_user_namespaces");
        pipes[0] = back[0], pipes[1] = pair[1];
        return child;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* become_user() clears this; from then on, the child ends when the pipe closes */
    close(pair[1]);
    close(back[0]);
    char go;
    if (mounts && privileged) {
        /* The namespace must belong to the user, so that the user's tasks may enter it. Root's capabilities remain
           until it is created, because some systems (Ubuntu 24.04) refuse user namespaces to processes without them. */
        prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
        become_user();
    }
    if (unshare(CLONE_NEWUSER) != 0 || write(back[1], "r", 1) != 1 || read(pair[0], &go, 1) != 1)
        _exit(1);
    if (mounts && (unshare(CLONE_NEWNS) != 0 ||
                   write(back[1], !set_propagation() ? "p" : unshare_namespaces() ? "m" : "n", 1) != 1 ||
                   read(pair[0], &go, 1) < 0))
        _exit(1);
    _exit(0);
}

static void end_child(pid_t child, int pipes[2]) {
    close(pipes[0]);
    close(pipes[1]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* Creates a mount namespace whose only mount is the one at `root`. */
int create_rootfs_namespace(const char *root) {
    int pair[2];
    if (pipe2(pair, O_CLOEXEC) != 0)
        fail("cannot create a pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0)
        fail("cannot create a process: %s", strerror(errno));
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (unshare(CLONE_NEWNS) != 0 || chdir(root) != 0 || change_root_here() != 0 || umount2(".", MNT_DETACH) != 0 ||
            write(pair[1], "m", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(pair[1]);
    if (!read_reply(pair[0]))
        fail("cannot create a mount namespace for the container's file system");
    close(pair[0]);
    int fd = namespace_fd(child, "mnt");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return fd;
}

/* Returns the only mount of a namespace that create_rootfs_namespace() made, as a tree to attach; -1 on failure. */
int clone_root_of(int mounts) {
    int pair[2], tree = -1;
    char text[8];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        fail("cannot create a socket: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0)
        fail("cannot create a process: %s", strerror(errno));
    if (child == 0) {
        if (setns(mounts, CLONE_NEWNS) != 0)
            _exit(1);
        int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), clone = root < 0 ? -1 : clone_tree(root);
        _exit(clone >= 0 && send_message(pair[1], "tree", &clone, 1) ? 0 : 1);
    }
    close(pair[1]);
    bool came = receive_message(pair[0], text, sizeof text, &tree, 1) == 1;
    close(pair[0]);
    waitpid(child, NULL, 0);
    return came ? tree : -1;
}

/* Joins the user namespace of a running container: its file system can be mounted only there. */
void join_user_namespace(int user) {
    if (setns(user, CLONE_NEWUSER) != 0 || unshare(CLONE_NEWNS) != 0)
        fail("cannot enter the container's user namespace: %s", strerror(errno));
    prctl(PR_SET_DUMPABLE, 1);
}

/* Creates a user namespace for an ID-mapped mount: the owner `inside` on disk appears as the user outside. */
int create_mapped_user_namespace(unsigned inside, unsigned outside_uid, unsigned outside_gid) {
    int pipes[2];
    pid_t child = start_child(false, pipes);
    write_maps(child, inside, inside, outside_uid, outside_gid);
    int fd = namespace_fd(child, "user");
    end_child(child, pipes);
    return fd;
}

/* Copies the current mounts into a namespace of the user, where the kernel locks them. */
void wrap_in_user_namespace(unsigned inside_uid, unsigned inside_gid, unsigned outside_uid, unsigned outside_gid,
                            struct namespaces *namespaces) {
    int pipes[2];
    pid_t child = start_child(true, pipes);
    write_maps(child, inside_uid, inside_gid, outside_uid, outside_gid);
    char reply = write(pipes[1], "g", 1) == 1 ? read_reply(pipes[0]) : '\0';
    if (reply == 'p')
        fail("cannot set the propagation of mounts");
    if (reply == 'n')
        fail(UNSHARE_REFUSED, "a limit is reached, or users may not create them");
    if (reply != 'm')
        fail("the kernel refused a mount namespace; check user.max_mnt_namespaces");
    open_namespaces(child, namespaces);
    end_child(child, pipes);
}

/* A step must fail if its container could not be saved. But when slurmstepd tells a plugin that a task has ended, the
 * task's exit code is final. So with --container-save, each task consists of two processes: the program and its parent.
 * The parent waits for the program, reports its end to slurmstepd and exits with the same code. The last parent on a
 * node also waits until a thread of slurmstepd has saved the container. If the program succeeded but the save failed,
 * this parent exits with an error. (The task does not save the container itself: packing takes memory that the job may
 * not have.) */
#define _GNU_SOURCE
#include "wait_save.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "enter.h"
#include "message.h"

enum { SUFFIX_MAX = 64 }; /* room for the suffix of the partial file */

static struct {
    bool wanted, started, done;
    pthread_t thread;
    int socket[2]; /* tasks use the first */
    uint32_t task_count;
    const struct site *site;
    const struct container *container;
    char cgroups[CGROUPS_LENGTH]; /* the step's cgroups, as reported by a task */
} pending = {.socket = {-1, -1}};

static bool refuse(char why[WHY_LENGTH], const char *path, const char *what) {
    snprintf(why, WHY_LENGTH, "--container-save: %.*s: %s", WHY_LENGTH / 2, path, what);
    return false;
}

/* Returns whether another user owns a file in a sticky folder like /tmp, in which only the owner can replace it. */
static bool belongs_to_another(const char *folder, const struct stat *file) {
    struct stat seen;
    return geteuid() != 0 && stat(folder, &seen) == 0 && seen.st_mode & S_ISVTX && seen.st_uid != geteuid() &&
           file->st_uid != geteuid();
}

/* Checks the path before the step starts, not after hours of work. This runs with the user's rights. */
bool check_save_path(const char *path, char why[WHY_LENGTH]) {
    char folder[PATH_MAX];
    struct stat seen;
    const char *name = path + strlen(path);
    while (name > path && name[-1] != '/')
        name--;
    if (strlen(path) >= sizeof folder - SUFFIX_MAX || strlen(name) > NAME_MAX - SUFFIX_MAX)
        return refuse(why, path, strerror(ENAMETOOLONG));
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path) - (name - path > 1), path);
    bool there = stat(path, &seen) == 0;
    if (there && S_ISDIR(seen.st_mode))
        return refuse(why, path, "is a folder; name a file in it");
    if (there && !S_ISREG(seen.st_mode))
        return refuse(why, path, "is not a regular file");
    if (faccessat(AT_FDCWD, folder, W_OK | X_OK, AT_EACCESS) != 0)
        return refuse(why, folder, strerror(errno));
    return !there || !belongs_to_another(folder, &seen) || refuse(why, path, "belongs to another user and cannot be replaced");
}

/* In slurmstepd */

static bool save(void) {
    pending.done = true;
    return pending.container->mounts < 0 || save_container(pending.site, pending.container, pending.cgroups);
}

/* Answers each task that ends, and saves the container before the last answer. Any task may receive any answer. */
static void *answer_tasks(void *nothing) {
    char text[CGROUPS_LENGTH];
    for (uint32_t ended = 0; receive_message(pending.socket[1], text, sizeof text, NULL, 0) >= 0;) {
        if (text[0]) /* a task that starts sends its cgroups; a task that has ended sends an empty string */
            snprintf(pending.cgroups, sizeof pending.cgroups, "%s", text);
        else
            send_message(pending.socket[1], ++ended == pending.task_count && !save() ? "!" : "", NULL, 0);
    }
    return nothing;
}

void start_save_thread(spank_t spank, const struct site *site, const char *path, const struct container *container) {
    sigset_t all, before;
    pending.wanted = true, pending.site = site, pending.container = container;
    prepare_save(spank, path);
    if (spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &pending.task_count) != ESPANK_SUCCESS ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pending.socket) != 0)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for slurmstepd's own threads */
    pending.started = pthread_create(&pending.thread, NULL, answer_tasks, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Finishes the save once no task is left. A task that was killed has not reported its end. In that case the thread has
 * not saved the container, so it is saved now; the step has failed anyway. */
void finish_save(void) {
    if (pending.started) {
        shutdown(pending.socket[1], SHUT_RD);
        pthread_join(pending.thread, NULL);
        close(pending.socket[0]);
        close(pending.socket[1]);
    }
    if (pending.wanted && !pending.done)
        save();
    pending.started = pending.wanted = false;
}

/* In a task */

/* Ends this process as the program ended, but without a core dump. If only the save failed, exits with NO_CONTAINER. */
static _Noreturn void exit_like(int status, bool saved) {
    if (WIFSIGNALED(status)) {
        sigset_t same;
        sigemptyset(&same);
        sigaddset(&same, WTERMSIG(status));
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        signal(WTERMSIG(status), SIG_DFL);
        sigprocmask(SIG_UNBLOCK, &same, NULL);
        raise(WTERMSIG(status));
    }
    _exit(WEXITSTATUS(status) != 0 || saved ? WEXITSTATUS(status) : NO_CONTAINER);
}

/* Each signal must reach the program exactly once. Slurm signals a task in one of three ways:
 * - the children of slurmstepd (proctrack/cgroup): we are such a child, and forward the signal.
 * - the task's process group: the program has its own group, so we forward the signal too.
 * - all descendants of slurmstepd that are not named slurmstepd (proctrack/linuxproc): the program receives the signal
 *   directly, and we do not receive it. */
static int forward_signals(pid_t program, const sigset_t *all) {
    int status = 0, signal_number;
    while (waitpid(program, &status, WNOHANG) == 0) {
        signal_number = sigwaitinfo(all, NULL);
        if (signal_number > 0 && signal_number != SIGCHLD)
            kill(program, signal_number);
    }
    return status;
}

static _Noreturn void wait_for_program(pid_t program, const sigset_t *all) {
    char text[8] = "";
    prctl(PR_SET_DUMPABLE, 0);        /* this process never calls exec, so it still has slurmstepd's memory */
    prctl(PR_SET_NAME, "slurmstepd"); /* undoes "awaits-an-image", because linuxproc would signal us too */
    dup2(pending.socket[0], 0);
    /* Otherwise readers of the program's output would not see its end, and we would not see the end of slurmstepd. */
    syscall(SYS_close_range, 1, ~0u, 0);
    int status = forward_signals(program, all);
    if (send_message(0, "", NULL, 0))
        receive_message(0, text, sizeof text, NULL, 0);
    exit_like(status, text[0] != '!');
}

/* Splits the task into the program and its parent; returns only in the program's process. */
void wait_for_save(spank_t spank) {
    sigset_t all, before;
    char number[16], cgroups[CGROUPS_LENGTH];
    if (!pending.started)
        return;
    if (read_cgroups(cgroups))
        send_message(pending.socket[0], cgroups, NULL, 0);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    signal(SIGCHLD, SIG_DFL);
    pid_t program = fork();
    if (program > 0)
        wait_for_program(program, &all);
    if (program == 0) {
        setpgid(0, 0);
        if (isatty(STDIN_FILENO))
            tcsetpgrp(STDIN_FILENO, getpid());
        snprintf(number, sizeof number, "%d", (int)getpid());
        spank_setenv(spank, "SLURM_TASK_PID", number, 1);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
}

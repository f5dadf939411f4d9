/* An import may take minutes, and a file system may hang. Slurm delivers no signal to a step before its user_init
 * returns, so waiting for the helper there would make the step impossible to cancel. Instead the step starts, a thread
 * of slurmstepd waits for the helper, and the tasks wait in task_init until the thread passes the answer on. A signal
 * ends the waiting tasks like any others. When the last task has ended, the helper sees its socket closed and ends the
 * import. */
#define _GNU_SOURCE
#include "wait_helper.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "message.h"

enum { SLOW_MS = 2000, KILLED_MS = 1000 };

static struct {
    bool started;
    pthread_t thread;
    struct helper helper;
    int tasks[2]; /* tasks read from the first */
    uint32_t task_count;
    struct container *container;
} pending = {.tasks = {-1, -1}};

/* Receives the helper's answer and sends it once for each task. */
static void *forward_answer(void *nothing) {
    char text[ANSWER_LENGTH], copy[ANSWER_LENGTH];
    int fds[ANSWER_FDS_MAX];
    int count = receive_answer(pending.helper.socket, text, sizeof text, fds, ANSWER_FDS_MAX);
    snprintf(copy, sizeof copy, "%s", text);
    parse_answer(copy, fds, count, pending.container);
    become_subreaper();
    if (count < 0) /* the signal that killed the helper will kill the tasks, which must not exit with an error first */
        poll(&(struct pollfd){.fd = pending.tasks[1]}, 1, KILLED_MS);
    for (uint32_t i = 0; i < pending.task_count && send_message(pending.tasks[1], text, fds, count); i++)
        ;
    shutdown(pending.tasks[1], SHUT_WR); /* a task without a message stops waiting */
    return nothing;
}

/* Starts the thread that waits for the helper. Returns false if that fails; then the caller waits for the helper
 * itself. */
bool start_wait_thread(spank_t spank, struct helper helper, struct container *container) {
    sigset_t all, before;
    if (spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &pending.task_count) != ESPANK_SUCCESS || helper.socket < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pending.tasks) != 0)
        return false;
    pending.helper = helper, pending.container = container;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for slurmstepd's own threads */
    pending.started = pthread_create(&pending.thread, NULL, forward_answer, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pending.started;
}

/* Waits for the container, in a task. Overwrites what the thread may have written to `container` before the fork. */
void wait_for_container(spank_t spank, const char *image, struct container *container) {
    char text[ANSWER_LENGTH];
    int fds[ANSWER_FDS_MAX];
    uint32_t task = 1;
    struct pollfd answer = {.fd = pending.tasks[0], .events = POLLIN};
    if (!pending.started)
        return;
    close(pending.tasks[1]);               /* so that the socket closes with slurmstepd */
    prctl(PR_SET_DUMPABLE, 0);             /* other processes of the user must not read slurmstepd's memory */
    prctl(PR_SET_NAME, "awaits-an-image"); /* proctrack/linuxproc does not signal processes named slurmstepd */
    send_cgroups(pending.helper.socket);
    if (image && !image_is_path(image) && spank_get_item(spank, S_TASK_GLOBAL_ID, &task) == ESPANK_SUCCESS &&
        task == 0 && poll(&answer, 1, SLOW_MS) == 0)
        dprintf(STDERR_FILENO, "dalsegno: importing %s; this may take a while\n", image);
    int count = receive_answer(pending.tasks[0], text, sizeof text, fds, ANSWER_FDS_MAX);
    container->mounts = container->user = container->lock = container->output = -1;
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        container->own[i] = -1;
    container->folder = false;
    container->error[0] = container->note[0] = '\0';
    parse_answer(text, fds, count, container);
}

/* Ends the thread and the helper by closing their sockets. Called in slurmstepd when no task is left. */
void stop_waiting(void) {
    if (!pending.started)
        return;
    shutdown(pending.helper.socket, SHUT_RDWR);
    shutdown(pending.tasks[0], SHUT_RDWR);
    pthread_join(pending.thread, NULL);
    end_helper(&pending.helper);
    close(pending.tasks[0]);
    close(pending.tasks[1]);
    pending.started = false;
}

/* The name of an image becomes the path of a file: a program of the cluster's is asked, as the user. It answers with the
 * path; it is the one that knows registries, and that sees to it that many who ask at once fetch once. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"

enum { SAID_MAX = 8192 };

static _Noreturn void become_program(int out, int err, pid_t parent) {
    char *words[] = {(char *)request.import, "image", "import", "--quiet", "--or-kept", "--", (char *)request.image,
                     NULL};
    setpgid(0, 0);
    enter_cgroups();
    if (geteuid() == 0 && request.uid != 0)
        become_user();
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* last: a change of user forgets it */
    if (getppid() != parent)
        _exit(127); /* it went before we could be told */
    int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out, 1);
    dup2(err, 2);
    request.variables[request.variable_count] = NULL;
    execve(request.import, words, (char *const *)request.variables);
    dprintf(2, "error: %s: %s\n", request.import, strerror(errno));
    _exit(127);
}

/* Without root Slurm's signals go to all that descends from slurmstepd. They are meant for the tasks: those end of them,
 * and we when they have. */
static void leave_signals_to_tasks(bool leave) {
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        signal(signals[i], leave ? SIG_IGN : SIG_DFL);
}

/* Until it has ended, or nobody is left who wants the image; what has come of it by then is gone on with next time. */
static int wait_for(pid_t child) {
    int status = 0;
    struct pollfd ends[] = {{.fd = (int)syscall(SYS_pidfd_open, child, 0), .events = POLLIN}, {.fd = ANSWER_FD}};
    while (ends[0].fd >= 0 && poll(ends, 2, -1) < 0 && errno == EINTR)
        ;
    if (ends[1].revents)
        kill(-child, SIGKILL);
    return waitpid(child, &status, 0) == child ? status : -1;
}

/* What was written into a file that has no name. */
static char *said(int file) {
    char *text = calloc(SAID_MAX + 1, 1);
    if (!text || pread(file, text, SAID_MAX, 0) < 0)
        fail("cannot read the output of the import");
    return text;
}

/* The line that says what is wrong, with what to do about it; a program's own words are in lines below it. */
static _Noreturn void tell(char *text) {
    const char *error = "the import failed without an error message", *words = "", *hint = "";
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        if (strncmp(line, "error: ", 7) == 0)
            error = line + 7;
        else if (strncmp(line, "  ", 2) == 0)
            words = line + 1;
        else if (strncmp(line, "hint: ", 6) == 0)
            hint = line + 6;
    }
    fail("image %s: %s%s%s%s", request.image, error, words, *hint ? "; " : "", hint);
}

/* A registry that does not answer, say: the image is taken as it was when it was last asked for. */
static const char *warning_in(char *text) {
    char *found = strncmp(text, "warning: ", 9) == 0 ? text : strstr(text, "\nwarning: ");
    if (!found)
        return NULL;
    found += *found == '\n' ? 10 : 9;
    found[strcspn(found, "\n")] = '\0';
    return found;
}

void import_image(void) {
    int out = memfd_create("path", MFD_CLOEXEC), err = memfd_create("errors", MFD_CLOEXEC);
    if (!request.import)
        fail("image %s is not a path, and this cluster does not import images; create a .sqsh file with "
             "`dalsegno image import`",
             request.image);
    if (out < 0 || err < 0)
        fail("cannot store the output of the import: %s", strerror(errno));
    await_cgroups();
    leave_signals_to_tasks(true);
    pid_t parent = getpid(), child = fork();
    if (child == 0)
        become_program(out, err, parent);
    if (child < 0)
        fail("cannot start the import: %s", strerror(errno));
    setpgid(child, child); /* here too: whoever is first, its group is there when we kill it */
    int status = wait_for(child);
    leave_signals_to_tasks(false);
    char *path = said(out);
    path[strcspn(path, "\n")] = '\0';
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || path[0] != '/')
        tell(said(err));
    request.note = warning_in(said(err));
    request.image = path;
}

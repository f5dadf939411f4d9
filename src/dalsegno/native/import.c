/* Imports an image by its name: runs the cluster's import program as the user. That program prints the path of the
 * file, handles registries, and makes concurrent imports share one download. */
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

enum { OUTPUT_MAX = 8192 };

static _Noreturn void become_program(int out, int err, pid_t parent) {
    char *words[] = {(char *)request.import, "image", "import", "--quiet", "--or-kept", "--", (char *)request.image,
                     NULL};
    setpgid(0, 0);
    enter_cgroups();
    if (geteuid() == 0 && request.uid != 0)
        become_user();
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* set after the change of user, which clears it */
    if (getppid() != parent)
        _exit(127); /* the parent ended before the signal was set */
    int null = open("/dev/null", O_RDONLY);
    dup2(null, 0);
    dup2(out, 1);
    dup2(err, 2);
    request.variables[request.variable_count] = NULL;
    execve(request.import, words, (char *const *)request.variables);
    dprintf(2, "error: %s: %s\n", request.import, strerror(errno));
    _exit(127);
}

/* Ignores signals, or restores their default actions. If slurmd does not run as root, Slurm's signals go to all
 * descendants of slurmstepd. They are meant for the tasks; the helper ends when the tasks have ended. */
static void ignore_signals(bool ignore) {
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        signal(signals[i], ignore ? SIG_IGN : SIG_DFL);
}

/* Waits for the import and returns its status. Kills it when no task is left; the next import resumes the download. */
static int wait_for_import(pid_t child) {
    int status = 0;
    struct pollfd ends[] = {{.fd = (int)syscall(SYS_pidfd_open, child, 0), .events = POLLIN}, {.fd = ANSWER_FD}};
    while (ends[0].fd >= 0 && poll(ends, 2, -1) < 0 && errno == EINTR)
        ;
    if (ends[1].revents)
        kill(-child, SIGKILL);
    return waitpid(child, &status, 0) == child ? status : -1;
}

/* Returns the content of an output file. */
static char *read_output(int file) {
    char *text = calloc(OUTPUT_MAX + 1, 1);
    if (!text || pread(file, text, OUTPUT_MAX, 0) < 0)
        fail("cannot read the output of the import");
    return text;
}

/* Fails with the error that the import printed, the indented line below it (from another program) and the hint. The
 * text is only handed on to the user: whether the import failed is known from its exit code and its output. */
static _Noreturn void fail_import(char *text) {
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

/* Returns the first warning in the output, or NULL. For example: the registry is down, and a stored image is used. */
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
    ignore_signals(true);
    pid_t parent = getpid(), child = fork();
    if (child == 0)
        become_program(out, err, parent);
    if (child < 0)
        fail("cannot start the import: %s", strerror(errno));
    setpgid(child, child); /* the child calls this too, so that the group exists before it may be killed */
    int status = wait_for_import(child);
    ignore_signals(false);
    char *path = read_output(out);
    path[strcspn(path, "\n")] = '\0';
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || path[0] != '/')
        fail_import(read_output(err));
    request.note = warning_in(read_output(err));
    request.image = path;
}

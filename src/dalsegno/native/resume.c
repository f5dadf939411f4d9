#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "resume.h"

#define NOTES "DALSEGNO_RESUME_NOTES" /* the variable with the descriptor for reports about the step */

static int notes = -1;
static bool resumed;

/* Returns whether the resume program started this srun. Must be called early, so that no task inherits the variable. */
bool is_resumed(void) {
    const char *number = getenv(NOTES);
    if (!number)
        return resumed;
    notes = atoi(number);
    unsetenv(NOTES);
    if (notes <= STDERR_FILENO || fcntl(notes, F_SETFD, FD_CLOEXEC) != 0)
        notes = -1;
    return resumed = true;
}

void report_step(spank_t spank) {
    slurm_step_id_t id = {.step_het_comp = NO_VAL};
    if (notes < 0 || spank_get_item(spank, S_JOB_ID, &id.job_id) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &id.step_id) != ESPANK_SUCCESS)
        return;
    /* Ask Slurm for the step's nodes, because no environment variable has them yet. */
    slurm_step_layout_t *layout = slurm_job_step_layout_get(&id);
    if (layout && layout->node_list)
        dprintf(notes, "%u %u %s\n", id.job_id, id.step_id, layout->node_list);
    slurm_job_step_layout_free(layout);
}

/* Reads the NUL-terminated strings of a file in /proc into a list that begins with `free_places` empty entries. The
 * list is never freed. */
static char **read_words(const char *path, size_t free_places) {
    size_t room = 1 << 16, length = 0, count = free_places;
    char *text = malloc(room);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t got = 1; text && file >= 0 && got != 0;) {
        if (room - length < 2 && !(text = realloc(text, room *= 2)))
            break;
        if ((got = read(file, text + length, room - length - 1)) < 0)
            break;
        length += (size_t)got;
    }
    if (file >= 0)
        close(file);
    if (!text || length == 0)
        return NULL;
    text[length] = '\0';
    for (size_t i = 0; i < length; i++)
        count += text[i] == '\0';
    char **words = calloc(count + 2, sizeof *words);
    for (size_t i = free_places, at = 0; words && at < length; at += strlen(text + at) + 1)
        words[i++] = text + at;
    return words;
}

/* Uses srun's original arguments and environment from /proc, because srun may have changed its own copies since. */
void exec_resume_program(const char *program) {
    char srun[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", srun, sizeof srun - 1);
    char **arguments = read_words("/proc/self/cmdline", 2), **environment = read_words("/proc/self/environ", 0);
    sigset_t none, before;
    if (length > 0 && arguments && environment) {
        srun[length] = '\0';
        arguments[0] = (char *)program;
        arguments[1] = srun;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, &before);
        execve(program, arguments, environment);
        sigprocmask(SIG_SETMASK, &before, NULL);
    }
    slurm_error("--auto-resume: %s: %s; the step will not be restarted", program, strerror(errno));
}

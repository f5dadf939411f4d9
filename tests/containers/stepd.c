/* A stand-in for slurmstepd, so that the whole plugin can run under AddressSanitizer without Slurm:
 * `stepd UID TASKS [--OPTION[=VALUE]]... -- COMMAND...`. Its environment is the job's. In it, PLUGSTACK is an argument
 * of the plugin's line in plugstack.conf, and STEP_CGROUPS lists the cgroup folders for tasks, separated by colons. */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <pthread.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static struct spank_option known[64];
static int known_count, command_count, task;
static uid_t user;
static uint32_t tasks;
static char **command;

/* Slurm's interface for plugins */

spank_context_t spank_context(void) { return S_CTX_REMOTE; }

spank_err_t spank_option_register(spank_t spank, struct spank_option *option) {
    (void)spank;
    known[known_count++] = *option;
    return ESPANK_SUCCESS;
}

spank_err_t spank_getenv(spank_t spank, const char *name, char *space, int size) {
    const char *value = getenv(name);
    (void)spank;
    if (!value)
        return ESPANK_ENV_NOEXIST;
    snprintf(space, (size_t)size, "%s", value);
    return strlen(value) < (size_t)size ? ESPANK_SUCCESS : ESPANK_NOSPACE;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int over) {
    (void)spank;
    return setenv(name, value, over) == 0 ? ESPANK_SUCCESS : ESPANK_ERROR;
}

spank_err_t spank_unsetenv(spank_t spank, const char *name) {
    (void)spank;
    return unsetenv(name) == 0 ? ESPANK_SUCCESS : ESPANK_ERROR;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...) {
    va_list to;
    (void)spank;
    va_start(to, item);
    switch (item) {
    case S_JOB_UID:
    case S_JOB_GID:
        *va_arg(to, uid_t *) = user;
        break;
    case S_JOB_SUPPLEMENTARY_GIDS:
        *va_arg(to, gid_t **) = &user;
        *va_arg(to, int *) = 1;
        break;
    case S_JOB_ARGV:
        *va_arg(to, int *) = command_count;
        *va_arg(to, char ***) = command;
        break;
    case S_JOB_ENV:
        *va_arg(to, char ***) = environ;
        break;
    case S_TASK_ID:
        *va_arg(to, int *) = task;
        break;
    case S_TASK_GLOBAL_ID:
        *va_arg(to, uint32_t *) = (uint32_t)task;
        break;
    case S_JOB_LOCAL_TASK_COUNT:
        *va_arg(to, uint32_t *) = tasks;
        break;
    default: /* step 0 on node 0 */
        *va_arg(to, uint32_t *) = 0;
    }
    va_end(to);
    return ESPANK_SUCCESS;
}

/* The life of a step */

static void give_option(const char *word) {
    size_t length = strcspn(word, "=");
    for (int i = 0; i < known_count; i++)
        if (strlen(known[i].name) == length && strncmp(known[i].name, word, length) == 0)
            known[i].cb(known[i].val, word[length] ? word + length + 1 : NULL, 1);
}

/* The plugin's threads start once all tasks are forked. AddressSanitizer's malloc stays locked forever in a child that
 * was forked while a thread allocated (seen with GCC 14). slurmstepd uses glibc's, which is unlocked in a child. */
static struct {
    pthread_t *thread;
    void *(*begin)(void *);
    void *with;
} threads[4];
static int thread_count;

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*begin)(void *), void *with) {
    (void)attr; /* the plugin passes none */
    if (thread_count == sizeof threads / sizeof threads[0])
        abort();
    threads[thread_count].thread = thread, threads[thread_count].begin = begin;
    threads[thread_count++].with = with;
    return 0;
}

static void begin_threads(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* as the plugin does for its threads */
    for (int i = 0; i < thread_count; i++)
        if (__real_pthread_create(threads[i].thread, NULL, threads[i].begin, threads[i].with) != 0)
            abort();
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void enter_cgroups(void) {
    char *folders = getenv("STEP_CGROUPS") ? strdup(getenv("STEP_CGROUPS")) : NULL, path[4096];
    for (char *rest = folders, *folder; rest && (folder = strsep(&rest, ":"));) {
        snprintf(path, sizeof path, "%s/cgroup.procs", folder);
        FILE *members = fopen(path, "w");
        if (!members || fputs("0", members) < 0 || fclose(members) != 0)
            _exit(125);
    }
    free(folders);
}

/* Each task stops before the plugin is called until its turn, so that tasks and their output come one by one. */
static pid_t fork_task(pid_t stepd) {
    int status;
    pid_t child = fork();
    if (child > 0)
        waitpid(child, &status, WUNTRACED);
    if (child != 0)
        return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != stepd)
        _exit(125);
    raise(SIGSTOP);
    prctl(PR_SET_PDEATHSIG, 0);
    enter_cgroups();
    if (setgroups(0, NULL) != 0 || setresgid(user, user, user) != 0 || setresuid(user, user, user) != 0)
        _exit(125);
    slurm_spank_task_init(NULL, 0, NULL);
    execvp(command[0], command);
    _exit(127);
}

int main(int argc, char *argv[]) {
    int status = 0, worst = 0, next = 3;
    user = (uid_t)atoi(argv[1]), tasks = (uint32_t)atoi(argv[2]);
    char *word = getenv("PLUGSTACK");
    slurm_spank_init(NULL, word != NULL, &word);
    for (; next < argc && strcmp(argv[next], "--") != 0; next++)
        give_option(argv[next] + 2); /* a refused option is logged by slurmd, and the step continues */
    command = argv + next + 1, command_count = argc - next - 1;
    if (setegid(user) != 0 || seteuid(user) != 0) /* as slurmstepd does */
        return 2;
    slurm_spank_user_init(NULL, 0, NULL);
    if (seteuid(0) != 0 || setegid(0) != 0)
        return 2;
    /* slurmstepd sleeps 0.1 s whenever it reaps a child that is not a task. */
    if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD) {
        fprintf(stderr, "the plugin has left a child process to slurmstepd\n");
        return 3;
    }
    pid_t children[tasks], self = getpid();
    for (task = 0; task < (int)tasks; task++)
        children[task] = fork_task(self);
    begin_threads();
    for (task = 0; task < (int)tasks; task++) {
        kill(children[task], SIGCONT);
        waitpid(children[task], &status, 0);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        worst = code > worst ? code : worst;
        slurm_spank_task_exit(NULL, 0, NULL);
    }
    return worst;
}

#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernel.h"
#include "remap_root.h"

enum { TEXT_MAX = 1 << 18 };

/* Prints the error once per node, with the exit code by which programs recognize it, and exits. If the plugin returned
 * an error, slurmstepd would add useless lines. */
static _Noreturn void exit_with_error(spank_t spank, const char *format, ...) {
    int task = 0;
    char node[256] = "this node", line[WHY_LENGTH * 3];
    va_list arguments;
    spank_get_item(spank, S_TASK_ID, &task);
    spank_getenv(spank, "SLURMD_NODENAME", node, sizeof node);
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    make_printable(line);
    make_printable(node);
    if (task == 0)
        dprintf(STDERR_FILENO, "dalsegno: %s: container[%d]: %s\n", node, NO_CONTAINER, line);
    _exit(NO_CONTAINER);
}

/* Reads a small file of the image, as the user and inside the container. Returns NULL if there is none, or if it is a
 * pipe, a device or a link to a descriptor of slurmstepd. */
static char *read_file(const char *path) {
    struct stat seen;
    int fd = open_no_magiclinks(path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return NULL;
    char *text = fstat(fd, &seen) == 0 && S_ISREG(seen.st_mode) ? malloc(TEXT_MAX + 1) : NULL;
    ssize_t got = text ? read(fd, text, TEXT_MAX) : -1;
    close(fd);
    if (got < 0)
        return free(text), NULL;
    text[got] = '\0';
    return text;
}

static bool belongs_to_slurm(const char *name) {
    return strncmp(name, "SLURM", 5) == 0 || strncmp(name, "PMI", 3) == 0 || strncmp(name, "CUDA_VISIBLE_", 13) == 0 ||
           strncmp(name, "GPU_DEVICE_ORDINAL", 18) == 0;
}

static bool has(spank_t spank, const char *name) {
    char value[2];
    return spank_getenv(spank, name, value, sizeof value) != ESPANK_ENV_NOEXIST;
}

/* Removes the job's locale settings: images rarely have the node's locales, and programs warn about missing ones. */
static void unset_locale(spank_t spank, const struct names *kept) {
    static const char *const names[] = {"LANG", "LANGUAGE", "LC_ALL"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!names_hold(kept, names[i], strlen(names[i])))
            spank_unsetenv(spank, names[i]);
}

/* Copies Slurm's PMIx settings to the names that Open MPI reads. */
static void name_pmix_modules(spank_t spank) {
    static const char *const names[][2] = {{"PMIX_SECURITY_MODE", "PMIX_MCA_psec"},
                                           {"PMIX_GDS_MODULE", "PMIX_MCA_gds"},
                                           {"PMIX_PTL_MODULE", "PMIX_MCA_ptl"}};
    char value[256];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (spank_getenv(spank, names[i][0], value, sizeof value) == ESPANK_SUCCESS)
            spank_setenv(spank, names[i][1], value, 0);
}

/* Sets the image's variables. They override the job's, unless --container-env names them. */
static void set_environment(spank_t spank, const char *kept, bool is_root) {
    char why[WHY_LENGTH], *text = read_file("/etc/environment"), *value;
    struct names names = {0};
    bool home = !is_root;
    if (kept && parse_names(kept, &names, why) != 0)
        exit_with_error(spank, "--container-env: %s", why);
    unset_locale(spank, &names);
    for (char *rest = text, *line; rest && (line = strsep(&rest, "\n"));) {
        size_t length = parse_environment(line, &value);
        if (length == 0)
            continue;
        line[length] = '\0';
        if (belongs_to_slurm(line) || (names_hold(&names, line, length) && has(spank, line)))
            continue;
        home |= strcmp(line, "HOME") == 0;
        spank_setenv(spank, line, value, 1);
    }
    if (!home && !names_hold(&names, "HOME", 4) && access("/root", R_OK | W_OK | X_OK) == 0)
        spank_setenv(spank, "HOME", "/root", 1);
    name_pmix_modules(spank);
    names_free(&names);
    free(text);
}

/* Appends the driver's folder to LD_LIBRARY_PATH and PATH, so that the image's forward-compatibility libraries take
 * precedence. */
static void add_gpu_libraries(spank_t spank) {
    char there[8192] = "", path[8192 + sizeof GPU_FOLDER];
    if (access(GPU_FOLDER, X_OK) != 0)
        return;
    spank_getenv(spank, "LD_LIBRARY_PATH", there, sizeof there);
    snprintf(path, sizeof path, "%s%s%s", there, *there ? ":" : "", GPU_FOLDER);
    spank_setenv(spank, "LD_LIBRARY_PATH", path, 1);
    spank_getenv(spank, "PATH", there, sizeof there);
    snprintf(path, sizeof path, "%s%s%s", there, *there ? ":" : "", GPU_FOLDER);
    spank_setenv(spank, "PATH", path, 1);
}

/* Changes to a folder. Refuses a link such as /proc/self/fd/5, which could lead out of the container to a folder that
 * slurmstepd has open. */
static bool enter_folder(const char *path) {
    int folder = open_no_magiclinks(path, O_PATH | O_DIRECTORY);
    bool gone = folder >= 0 && fchdir(folder) == 0;
    int error = errno;
    if (folder >= 0)
        close(folder);
    errno = error;
    return gone;
}

static void change_folder(spank_t spank, const char *wanted) {
    if (wanted) {
        if (chdir("/") != 0 || !enter_folder(wanted)) /* relative paths are below the container's root */
            exit_with_error(spank, "--container-workdir=%s: %s", wanted, strerror(errno));
        return;
    }
    char *text = read_file("/etc/rc"), *folder = text ? parse_rc_workdir(text) : NULL;
    bool there = folder && (enter_folder(folder) || (errno == ENOENT && mkdir(folder, 0755) == 0 && enter_folder(folder)));
    if (!there && chdir("/") != 0)
        exit_with_error(spank, "/: %s", strerror(errno));
    free(text);
}

/* Runs the image's entry point, with the command as its arguments. */
static _Noreturn void run_entrypoint(spank_t spank) {
    char **argv = NULL, **environment = NULL;
    int argc = 0;
    if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_ENV, &environment) != ESPANK_SUCCESS)
        exit_with_error(spank, "--container-entrypoint: Slurm does not report the command");
    char **words = calloc((size_t)argc + 3, sizeof *words);
    if (!words)
        exit_with_error(spank, "out of memory");
    words[0] = "/bin/sh", words[1] = "/etc/rc";
    memcpy(words + 2, argv, (size_t)argc * sizeof *words);
    execve(words[0], words, environment);
    exit_with_error(spank, "--container-entrypoint: /bin/sh: %s", strerror(errno));
}

/* Prints the note, in the first task of the step only. */
static void print_note(spank_t spank, const char *note) {
    uint32_t task = 1;
    if (spank_get_item(spank, S_TASK_GLOBAL_ID, &task) == ESPANK_SUCCESS && task == 0)
        dprintf(STDERR_FILENO, "dalsegno: note: %s\n", note);
}

/* Prints the helper's answer instead of running the command. */
static _Noreturn void print_answer(spank_t spank, int answer) {
    int task = 0;
    char space[4096];
    ssize_t got = 0;
    spank_get_item(spank, S_TASK_ID, &task);
    for (off_t at = 0; task == 0 && (got = pread(answer, space, sizeof space, at)) > 0; at += got)
        if (write(STDOUT_FILENO, space, (size_t)got) != got)
            _exit(1);
    _exit(got < 0);
}

void enter_container(spank_t spank, char *const given[], const struct container *container) {
    if (container->error[0])
        exit_with_error(spank, "%s", container->error);
    if (container->output >= 0)
        print_answer(spank, container->output);
    prctl(PR_SET_DUMPABLE, 0); /* until execve, processes in the container must not reach slurmstepd's descriptors */
    if (container->user >= 0 && setns(container->user, CLONE_NEWUSER) != 0)
        exit_with_error(spank, "cannot enter its user namespace: %s", strerror(errno));
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        if (container->own[i] >= 0 && setns(container->own[i], namespace_flag((enum namespace_kind)i)) != 0)
            exit_with_error(spank, "cannot enter its %s namespace: %s", namespace_words[i], strerror(errno));
    if (setns(container->mounts, CLONE_NEWNS) != 0)
        exit_with_error(spank, "cannot enter its mount namespace: %s", strerror(errno));
    set_environment(spank, given[OPTION_ENV], container->user >= 0 && given[OPTION_REMAP_ROOT]);
    add_gpu_libraries(spank);
    change_folder(spank, given[OPTION_WORKDIR]);
    if (container->note[0])
        print_note(spank, container->note);
    if (container->folder)
        print_note(spank, "Pyxis does not accept a folder as image; on clusters with Pyxis, use a .sqsh file");
    if (container->user >= 0 && given[OPTION_REMAP_ROOT])
        ignore_owner_changes();
    if (given[OPTION_ENTRYPOINT] && access("/etc/rc", R_OK) == 0)
        run_entrypoint(spank);
}

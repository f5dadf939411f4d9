/* The SPANK plugin: srun, sbatch and salloc get Pyxis's options, and each task of a step enters its container.
 *
 * user_init (in slurmstepd, once per step and node) starts the helper, which builds the root, and stores the namespaces
 * or the error. It never fails, because Slurm would then drain the node. task_init (in each task, as the user) enters
 * the container, or prints the error and exits.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "enter.h"
#include "wait_helper.h"
#include "options.h"
#include "resume.h"
#include "wait_save.h"
#include "start.h"

SPANK_PLUGIN(dalsegno_container, 1)

enum { VALUE_MAX = 1 << 16, SERVER_MS = 500 };

static char *given[OPTION_COUNT]; /* the value, "" for a switch, NULL if not given */
static struct site site;
static bool without_resume; /* a plugin of the platform has the option --auto-resume */
static struct container container = {.mounts = -1, .user = -1, .own = {-1, -1, -1}, .lock = -1, .unpacked = -1, .rootfs = -1,
                                     .owner = -1, .output = -1};

/* Options */

static int take_option(int which, const char *value, int remote) {
    char why[WHY_LENGTH];
    if (which < 0 || which >= OPTION_COUNT)
        return -1;
    if (!value || !option_words[which].argument)
        value = "";
    if (check_option((enum option)which, value, why) != 0) {
        if (!remote)
            slurm_error("--%s: %s", option_words[which].name, why);
        else /* srun accepted the value, and slurmstepd continues without the option, so the tasks report the error */
            snprintf(container.error, sizeof container.error, "--%s: %s", option_words[which].name, why);
        container.wanted |= remote && (which == OPTION_IMAGE || which == OPTION_NAME);
        return -1;
    }
    enum option other = opposite((enum option)which);
    if (other != OPTION_COUNT && given[other]) {
        snprintf(why, sizeof why, "both --%s and --%s were given", option_words[which].name, option_words[other].name);
        if (!remote)
            slurm_error("%s", why);
        else
            snprintf(container.error, sizeof container.error, "%s", why);
        return -1;
    }
    bool list = which == OPTION_MOUNTS || which == OPTION_UNSHARE;
    if (list && !remote && given[which] && strcmp(given[which], value) != 0)
        slurm_info("--%s was given twice: only %s is used; separate several %s with commas", option_words[which].name, value,
                   which == OPTION_MOUNTS ? "mounts" : "namespaces");
    free(given[which]);
    return (given[which] = strdup(value)) ? 0 : -1;
}

static void read_site(int count, char *words[]) {
    for (int i = 0; i < count; i++) {
        if (strncmp(words[i], "data=", 5) == 0)
            site.data = words[i] + 5;
        else if (strncmp(words[i], "cache=", 6) == 0)
            site.cache = words[i] + 6;
        else if (strncmp(words[i], "import=", 7) == 0)
            site.import = words[i] + 7;
        else if (strncmp(words[i], "images=", 7) == 0)
            site.images = words[i] + 7;
        else if (strcmp(words[i], "resume=none") == 0)
            without_resume = true;
        else if (strncmp(words[i], "resume=", 7) == 0)
            site.resume = words[i] + 7;
        else if (strncmp(words[i], "show=", 5) == 0 && site.shown_count < SHOWN_MAX)
            site.shown[site.shown_count++] = words[i] + 5;
        else if (strcmp(words[i], "squashfs=user") == 0)
            site.as_user = true;
        else
            slurm_error("plugstack.conf: dalsegno_container does not know `%s`", words[i]);
    }
}

int slurm_spank_init(spank_t spank, int count, char *words[]) {
    spank_context_t context = spank_context();
    Dl_info self;
    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return ESPANK_SUCCESS;
    read_site(count, words);
    is_resumed();
    if (dladdr((void *)slurm_spank_init, &self) && self.dli_fname) /* the helper is in the plugin's folder */
        snprintf(site.helper, sizeof site.helper, "%.*sdalsegno-container",
                 (int)(strrchr(self.dli_fname, '/') - self.dli_fname + 1), self.dli_fname);
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option_word *word = &option_words[i];
        struct spank_option option = {(char *)word->name, (char *)word->argument, (char *)word->usage,
                                      word->argument != NULL, i, take_option};
        if (i == OPTION_AUTO_RESUME && without_resume)
            continue;
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
            slurm_error("cannot register --%s", word->name);
    }
    return ESPANK_SUCCESS;
}

/* Reads the variable for an option, for example PYXIS_CONTAINER_READONLY. Returns false if the job does not set it. */
static bool read_variable(spank_t spank, int option, char name[SPANK_OPTION_MAXLEN + 8], char value[VALUE_MAX]) {
    snprintf(name, SPANK_OPTION_MAXLEN + 8, "PYXIS_%s", option_words[option].name);
    for (char *letter = name; *letter; letter++)
        *letter = *letter == '-' ? '_' : (char)(*letter >= 'a' && *letter <= 'z' ? *letter - 32 : *letter);
    spank_err_t rc = spank_getenv(spank, name, value, VALUE_MAX);
    if (rc == ESPANK_NOSPACE)
        snprintf(container.error, sizeof container.error, "%s is too long", name);
    return rc == ESPANK_SUCCESS && *value;
}

/* As in Pyxis, PYXIS_CONTAINER_IMAGE sets --container-image, and so on; for a switch the value is 1 or 0. The command
 * line takes precedence. The variables do not apply to batch scripts. */
static void read_environment(spank_t spank) {
    char name[SPANK_OPTION_MAXLEN + 8], value[VALUE_MAX], why[WHY_LENGTH];
    bool on, before[OPTION_COUNT + 1] = {false};
    for (int i = 0; i < OPTION_COUNT; i++)
        before[i] = given[i];
    for (int i = 0; i < OPTION_LIST; i++) { /* the options from OPTION_LIST on have no variables */
        enum option other = opposite((enum option)i);
        if (before[i] || before[other] || strncmp(option_words[i].name, "no-", 3) == 0 ||
            !read_variable(spank, i, name, value))
            continue;
        if (option_words[i].argument)
            take_option(i, value, 1);
        else if (parse_switch(value, &on, why) != 0)
            snprintf(container.error, sizeof container.error, "%s: %s", name, why);
        else if (on || other != OPTION_COUNT)
            take_option(on ? i : (int)other, "", 1);
    }
}

/* Returns whether auto-resume is on: set for this srun, or for its batch script unless this srun runs in a task. */
static bool is_resume_requested(void) {
    const char *noted = getenv("SLURM_STEP_ID") ? NULL : getenv("DALSEGNO_AUTO_RESUME");
    const char *value = given[OPTION_AUTO_RESUME] ? given[OPTION_AUTO_RESUME] : noted;
    return value && strcmp(value, "1") == 0;
}

/* Warns if the image name seems to be cut off: `#` starts a comment even in an #SBATCH line, which turns REGISTRY#IMAGE
 * into REGISTRY. */
static void warn_of_comment(const char *image) {
    const char *port = strrchr(image, ':');
    bool is_port = port && port[1] && strspn(port + 1, "0123456789") == strlen(port + 1);
    bool is_host = port ? is_port && (strchr(image, '.') < port || strncmp(image, "localhost:", 10) == 0)
                        : strchr(image, '.') != NULL;
    if (!image_is_path(image) && !strpbrk(image, "/#@") && is_host)
        slurm_info("--container-image=%s names a registry but no image; in an #SBATCH line, write \\# for #: "
                   "%s\\#IMAGE",
                   image, image);
}

int slurm_spank_init_post_opt(spank_t spank, int count, char *words[]) {
    (void)spank, (void)count, (void)words;
    if (spank_context() == S_CTX_ALLOCATOR && given[OPTION_IMAGE])
        warn_of_comment(given[OPTION_IMAGE]);
    if (spank_context() == S_CTX_LOCAL && is_resume_requested() && !is_resumed()) {
        if (site.resume)
            exec_resume_program(site.resume);
        else
            slurm_info("--auto-resume is ignored: this cluster does not restart steps");
    }
    if (spank_context() == S_CTX_REMOTE || given[OPTION_IMAGE] || given[OPTION_NAME])
        return ESPANK_SUCCESS;
    for (int i = 0; i < OPTION_LIST; i++)
        if (given[i] && !getenv("PYXIS_CONTAINER_IMAGE") && !getenv("PYXIS_CONTAINER_NAME"))
            slurm_error("--%s is ignored without --container-image or --container-name", option_words[i].name);
    return ESPANK_SUCCESS;
}

int slurm_spank_local_user_init(spank_t spank, int count, char *words[]) {
    (void)count, (void)words;
    report_step(spank);
    return ESPANK_SUCCESS;
}

/* In slurmstepd */

static void export_auto_resume(spank_t spank) {
    if (given[OPTION_AUTO_RESUME])
        spank_setenv(spank, "DALSEGNO_AUTO_RESUME", given[OPTION_AUTO_RESUME], 1);
}

/* Makes the path absolute. It is relative to the job's folder, which slurmstepd will have left when the step ends. */
static void make_save_path_absolute(void) {
    char folder[PATH_MAX], *path = NULL, *old = given[OPTION_SAVE];
    if (!old || old[0] == '/' || !getcwd(folder, sizeof folder) || asprintf(&path, "%s/%s", folder, old) < 0)
        return;
    given[OPTION_SAVE] = path;
    free(old);
}

int slurm_spank_user_init(spank_t spank, int count, char *words[]) {
    uint32_t step = 0;
    char **argv = NULL;
    int argc = 0;
    (void)count, (void)words;
    if (spank_context() != S_CTX_REMOTE)
        return ESPANK_SUCCESS;
    export_auto_resume(spank);
    spank_get_item(spank, S_JOB_STEPID, &step);
    if (step != SLURM_BATCH_SCRIPT)
        read_environment(spank);
    container.wanted |= given[OPTION_IMAGE] || given[OPTION_NAME] || given[OPTION_LIST] || given[OPTION_REMOVE];
    if (!container.wanted) {
        become_subreaper();
        return ESPANK_SUCCESS;
    }
    make_save_path_absolute();
    if (given[OPTION_SAVE] && check_save_path(given[OPTION_SAVE], container.error))
        start_save_thread(spank, &site, given[OPTION_SAVE], &container);
    if (step == SLURM_BATCH_SCRIPT && spank_get_item(spank, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS && argc > 0)
        container.script = strdup(argv[0]); /* must be mounted: slurmd's spool folder is not in the image */
    if (!container.error[0])
        start_container(spank, &site, given, &container);
    return ESPANK_SUCCESS; /* never an error: see the top of this file */
}

int slurm_spank_task_init(spank_t spank, int count, char *words[]) {
    (void)count, (void)words;
    if (!container.wanted)
        return ESPANK_SUCCESS;
    wait_for_container(spank, given[OPTION_IMAGE], &container);
    if (!container.error[0])
        wait_for_save(spank);
    enter_container(spank, given, &container); /* does not return if it fails */
    return ESPANK_SUCCESS;
}

/* Closes the container's namespaces, except those of a named container, which other steps may join. This removes a FUSE
 * mount, and its server ends. Waits for that, because Slurm takes a second longer to end a step that has processes. */
static void close_namespaces(void) {
    int *const fds[] = {&container.mounts, &container.user, &container.own[0], &container.own[1], &container.own[2]};
    for (size_t i = 0; container.lock < 0 && i < sizeof fds / sizeof *fds; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
    if (container.lock < 0 && container.unpacked >= 0) /* the timeout is for a server that the user has stopped */
        poll(&(struct pollfd){.fd = container.unpacked, .events = POLLIN}, 1, SERVER_MS);
}

/* Saves and closes the container when the node's last task has ended. srun is notified later, so the saved file exists
 * when srun ends. */
int slurm_spank_task_exit(spank_t spank, int count, char *words[]) {
    static uint32_t ended;
    uint32_t tasks = 0;
    (void)count, (void)words;
    if (!container.wanted || spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS || ++ended != tasks)
        return ESPANK_SUCCESS;
    stop_waiting();
    finish_save();
    close_namespaces();
    return ESPANK_SUCCESS;
}

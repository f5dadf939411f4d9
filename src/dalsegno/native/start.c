#define _GNU_SOURCE
#include "start.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "descriptors.h"
#include "wait_helper.h"
#include "message.h"

#ifndef P_PIDFD /* glibc before 2.36 */
#define P_PIDFD 3
#endif

enum { WORDS_MAX = 64, LINGER_MS = 5000 };

struct words {
    char *list[WORDS_MAX + 1];
    int count;
};

static struct words save_words;

static void add(struct words *words, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct words *words, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (words->count < WORDS_MAX && vasprintf(&words->list[words->count], format, arguments) >= 0)
        words->count++;
    va_end(arguments);
    words->list[words->count] = NULL;
}

static void free_words(struct words *words) {
    for (int i = 0; i < words->count; i++)
        free(words->list[i]);
    words->count = 0;
}

/* Adds the job's user and groups. Returns false if Slurm does not report them. */
static bool add_user(spank_t spank, struct words *words) {
    uid_t uid;
    gid_t gid, *groups = NULL;
    int count = 0;
    if (spank_get_item(spank, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_GID, &gid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_SUPPLEMENTARY_GIDS, &groups, &count) != ESPANK_SUCCESS)
        return false;
    add(words, "uid=%u", uid);
    add(words, "gid=%u", gid);
    char *list = NULL;
    size_t size = 0;
    FILE *text = open_memstream(&list, &size);
    for (int i = 0; text && i < count; i++)
        fprintf(text, "%s%u", i ? "," : "", groups[i]);
    if (!text || fclose(text) != 0)
        return false;
    if (*list)
        add(words, "groups=%s", list);
    free(list);
    return true;
}

/* Passes on the step's memory limit, so that programs that pack and unpack images stay within it. */
static void add_memory(spank_t spank, struct words *words, const char *name) {
    uint64_t memory_mib = 0;
    if (spank_get_item(spank, S_STEP_ALLOC_MEM, &memory_mib) == ESPANK_SUCCESS && memory_mib > 0 &&
        memory_mib < UINT32_MAX)
        add(words, "%s=%llu", name, (unsigned long long)memory_mib);
}

/* Passes on $HOME, as in Enroot, or else the account's home folder. The helper opens it with the user's rights. */
static void add_home(spank_t spank, struct words *words, bool remap_root) {
    char text[PATH_MAX] = "", space[4096];
    uid_t uid = 0;
    struct passwd entry, *found = NULL;
    spank_get_item(spank, S_JOB_UID, &uid);
    if (spank_getenv(spank, "HOME", text, sizeof text) != ESPANK_SUCCESS || text[0] != '/')
        snprintf(text, sizeof text, "%s",
                 getpwuid_r(uid, &entry, space, sizeof space, &found) == 0 && found ? found->pw_dir : "");
    if (*text) {
        add(words, "home=%s", text);
        add(words, "home_at=%s", remap_root && uid != 0 ? "/root" : text);
    }
}

/* Passes on the folder in which slurmstepd and the PMIx library in a task exchange files. slurmstepd's environment
 * names it. */
static void add_pmix(struct words *words) {
    const char *folder = getenv("PMIX_SERVER_TMPDIR");
    if (folder && folder[0] == '/')
        add(words, "pmix=%s", folder);
}

/* Reads slurmd's name for the node from slurmstepd's own environment. (The user controls the job's environment, which
 * spank_getenv reads.) Before Slurm 22.05 the variable is missing, and the host name is used. */
static bool read_node_name(char *name, size_t size) {
    const char *own = getenv("SLURMD_NODENAME");
    if (own)
        snprintf(name, size, "%s", own);
    else if (gethostname(name, size) == 0)
        name[size - 1] = '\0', name[strcspn(name, ".")] = '\0';
    for (const char *letter = name; *letter; letter++) /* the name becomes part of a path */
        if (!isalnum((unsigned char)*letter) && (letter == name || !strchr("._-", *letter)))
            return false;
    return *name;
}

#define PATH_WORD "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

/* Passes on variables of the job that an import may need for credentials and proxies. They are in the helper's
 * environment, with a prefix so that other programs ignore them. As arguments, they would show a proxy's password to
 * all users. */
static void add_import(spank_t spank, const struct site *site, struct words *variables) {
    static const char *const names[] = {"HOME",       "XDG_CONFIG_HOME",   "XDG_RUNTIME_DIR", "DOCKER_CONFIG",
                                        "http_proxy", "https_proxy",       "no_proxy",        "HTTP_PROXY",
                                        "HTTPS_PROXY", "NO_PROXY",         "SSL_CERT_FILE",   "DALSEGNO_HOME",
                                        "DALSEGNO_IMAGES", "ENROOT_CONFIG_PATH", "ENROOT_ALLOW_HTTP"};
    char value[4096];
    add(variables, FOR_IMPORT PATH_WORD);
    add_memory(spank, variables, FOR_IMPORT "DALSEGNO_MEMORY_MIB");
    if (site->images && spank_getenv(spank, "DALSEGNO_IMAGES", value, sizeof value) != ESPANK_SUCCESS)
        add(variables, FOR_IMPORT "DALSEGNO_IMAGES=%s", site->images);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (spank_getenv(spank, names[i], value, sizeof value) == ESPANK_SUCCESS)
            add(variables, FOR_IMPORT "%s=%s", names[i], value);
}

static void add_site(const struct site *site, struct words *words) {
    char node[256] = "";
    const char *mark = site->data ? strstr(site->data, "%n") : NULL;
    if (site->data && !mark)
        add(words, "data=%s", site->data);
    else if (mark && read_node_name(node, sizeof node))
        add(words, "data=%.*s%s%s", (int)(mark - site->data), site->data, node, mark + 2);
    if (site->cache)
        add(words, "cache=%s", site->cache);
    for (int i = 0; i < site->shown_count; i++)
        add(words, "site=%s", site->shown[i]);
    if (site->as_user)
        add(words, "as_user=1");
}

/* Executes the helper. Only system calls are allowed between fork and exec: locks that other threads of slurmstepd hold
 * are never released in the child. */
static void exec_helper(const char *path, char *const words[], char *const variables[], int answer, int user,
                       int mounts) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (getuid() == 0 && (syscall(SYS_setresuid, 0, 0, 0) != 0 || syscall(SYS_setresgid, 0, 0, 0) != 0))
        _exit(126);
    int high[3] = {fcntl(answer, F_DUPFD, 64), user < 0 ? -1 : fcntl(user, F_DUPFD, 64),
                   mounts < 0 ? -1 : fcntl(mounts, F_DUPFD, 64)};
    /* If a copy failed, the helper would use a wrong descriptor. */
    if (high[0] < 0 || (user >= 0 && high[1] < 0) || (mounts >= 0 && high[2] < 0))
        _exit(126);
    dup2(high[0], ANSWER_FD);
    syscall(SYS_close_range, USER_FD, 63, 0);
    if (high[1] >= 0)
        dup2(high[1], USER_FD);
    if (high[2] >= 0)
        dup2(high[2], MOUNTS_FD);
    syscall(SYS_close_range, 64, ~0u, 0);
    execve(path, words, variables);
    _exit(127);
}

/* Makes processes that detach from a task children of slurmstepd, so that they end with the step: without cgroups,
 * Slurm finds a step's processes only by their parents (proctrack/linuxproc). Must be called after the helper has
 * answered, because the server of a FUSE mount must outlive the tasks. */
void become_subreaper(void) { prctl(PR_SET_CHILD_SUBREAPER, 1); }

/* Starts the helper from a process that ends at once, and sends a pidfd of the helper to `report`. Only system calls are
 * allowed here, as in exec_helper(). */
static _Noreturn void fork_helper(const char *path, char *const words[], char *const variables[], int answer, int user,
                                  int mounts, int report) {
    pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); /* fork() takes locks of the C library */
    if (pid == 0)
        exec_helper(path, words, variables, answer, user, mounts);
    int process = pid < 0 ? -1 : (int)syscall(SYS_pidfd_open, pid, 0);
    _exit(process >= 0 && send_message(report, "", &process, 1) ? 0 : 1);
}

/* Starts the helper as a grandchild of slurmstepd. If slurmstepd's wait for its tasks returned a child that is not a
 * task, slurmstepd would sleep 0.1 s before it looked for ended tasks again. */
struct helper start_helper(const char *path, char *const words[], char *const variables[], int user, int mounts) {
    static char *const none[] = {PATH_WORD, NULL};
    struct helper helper = {.socket = -1, .process = -1};
    int pair[2], report[2];
    char text[8];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return helper;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, report) != 0) {
        close(pair[0]), close(pair[1]);
        return helper;
    }
    pid_t between = fork();
    if (between == 0)
        fork_helper(path, words, variables ? variables : none, pair[1], user, mounts, report[1]);
    close(pair[1]);
    close(report[1]);
    if (receive_message(report[0], text, sizeof text, &helper.process, 1) != 1)
        helper.process = -1;
    close(report[0]);
    while (between > 0 && waitpid(between, NULL, 0) < 0 && errno == EINTR)
        ;
    helper.socket = pair[0];
    return helper;
}

/* Sends the cgroups of this process, in which the helper then runs programs with the user's rights. */
void send_cgroups(int helper) {
    char text[CGROUPS_LENGTH] = "";
    if (read_cgroups(text))
        send_now(helper, text);
}

bool read_cgroups(char text[CGROUPS_LENGTH]) {
    int file = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? -1 : read(file, text, CGROUPS_LENGTH - 1);
    if (file >= 0)
        close(file);
    text[got > 0 ? got : 0] = '\0';
    return got > 0;
}

int receive_answer(int from, char *text, size_t size, int *fds, int count) {
    int came = receive_message(from, text, size, fds, count);
    if (came < 0)
        snprintf(text, size, "!the container helper ended without an answer");
    return came;
}

/* Ends the helper without blocking slurmstepd. The helper ends by itself when its socket is closed. It is killed if
 * that takes too long: a user may stop a helper with the user's rights, or a file system may hang. */
void end_helper(struct helper *helper) {
    close(helper->socket);
    if (helper->process >= 0) {
        if (poll(&(struct pollfd){.fd = helper->process, .events = POLLIN}, 1, LINGER_MS) == 0)
            syscall(SYS_pidfd_send_signal, helper->process, SIGKILL, NULL, 0);
        /* After become_subreaper(), the helper is a child of slurmstepd. Otherwise there is nothing to wait for. */
        while (waitid((idtype_t)P_PIDFD, (id_t)helper->process, NULL, WEXITED) < 0 && errno == EINTR)
            ;
        close(helper->process);
    }
    *helper = (struct helper){.socket = -1, .process = -1};
}

/* Reads the helper's answer. An answer that begins with `!` is an error. */
void parse_answer(char *text, const int *fds, int count, struct container *container) {
    int next = 0;
    if (text[0] == '!' || count < 1) {
        snprintf(container->error, sizeof container->error, "%s", text[0] == '!' ? text + 1 : text);
        make_printable(container->error);
        return;
    }
    char *note = strchr(text, '\n');
    if (note) {
        *note = '\0';
        snprintf(container->note, sizeof container->note, "%s", note + 1);
        make_printable(container->note);
    }
    if (strcmp(text, "said") == 0) {
        container->output = fds[next];
        return;
    }
    container->mounts = fds[next++];
    if (strstr(text, " user") && next < count)
        container->user = fds[next++];
    if (strstr(text, " lock") && next < count)
        container->lock = fds[next++];
    if (strstr(text, " unpacked") && next < count)
        container->unpacked = fds[next++];
    if (strstr(text, " bare") && next < count)
        container->rootfs = fds[next++];
    if (strstr(text, " owner") && next < count)
        container->owner = fds[next++];
    for (int i = 0; i < NAMESPACE_KINDS; i++) {
        char word[16];
        snprintf(word, sizeof word, " %s", namespace_words[i]);
        if (strstr(text, word) && next < count)
            container->own[i] = fds[next++];
    }
    container->folder = strstr(text, " folder") != NULL;
}

void start_container(spank_t spank, const struct site *site, char *const given[], struct container *container) {
    struct words words = {.count = 0}, variables = {.count = 0};
    char text[ANSWER_LENGTH];
    int fds[ANSWER_FDS_MAX];
    const char *image = given[OPTION_IMAGE];
    bool import = image && !image_is_path(image);
    add(&words, "dalsegno-container");
    if (!add_user(spank, &words)) {
        snprintf(container->error, sizeof container->error, "Slurm does not report the job's user");
        free_words(&words);
        return;
    }
    add_site(site, &words);
    if (image)
        add(&words, "image=%s", image);
    if (import && site->import)
        add(&words, "import=%s", site->import);
    add(&variables, PATH_WORD);
    if (import)
        add_import(spank, site, &variables);
    if (given[OPTION_LIST])
        add(&words, "list=1");
    if (given[OPTION_REMOVE])
        add(&words, "remove=%s", given[OPTION_REMOVE]);
    if (given[OPTION_MOUNTS])
        add(&words, "mounts=%s", given[OPTION_MOUNTS]);
    if (given[OPTION_NAME])
        add(&words, "name=%s", given[OPTION_NAME]);
    if (given[OPTION_UNSHARE])
        add(&words, "unshare=%s", given[OPTION_UNSHARE]);
    if (container->script)
        add(&words, "script=%s", container->script);
    if (given[OPTION_MOUNT_HOME])
        add_home(spank, &words, given[OPTION_REMAP_ROOT]);
    add_pmix(&words);
    add_memory(spank, &words, "memory_mib");
    add(&words, "readonly=%d", given[OPTION_READONLY] != NULL);
    add(&words, "remap_root=%d", given[OPTION_REMAP_ROOT] != NULL);
    struct helper helper = start_helper(site->helper, words.list, variables.list, -1, -1);
    free_words(&words);
    free_words(&variables);
    if (start_wait_thread(spank, helper, container))
        return;
    send_cgroups(helper.socket); /* no task exists yet that could send its cgroups */
    int count = receive_answer(helper.socket, text, sizeof text, fds, ANSWER_FDS_MAX);
    end_helper(&helper);
    parse_answer(text, fds, count, container);
    become_subreaper();
}

/* Prepares the helper's arguments for the save. Called early, because a SPANK handle is valid only in its own hook. */
void prepare_save(spank_t spank, const char *path) {
    add(&save_words, "dalsegno-container");
    add_user(spank, &save_words);
    add_memory(spank, &save_words, "memory_mib");
    add(&save_words, "save=%s", path);
}

bool save_container(const struct site *site, const struct container *container, const char *cgroups) {
    char text[ANSWER_LENGTH];
    struct helper helper = start_helper(site->helper, save_words.list, NULL, container->user, container->mounts);
    if (*cgroups)
        send_message(helper.socket, cgroups, NULL, 0);
    else
        send_cgroups(helper.socket);
    receive_answer(helper.socket, text, sizeof text, NULL, 0);
    end_helper(&helper);
    free_words(&save_words);
    make_printable(text);
    if (text[0] == '!')
        slurm_spank_log("dalsegno: %s", text + 1);
    return text[0] != '!';
}

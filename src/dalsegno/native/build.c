/* dalsegno-container NAME=VALUE...: builds the root of a container and answers on descriptor 3 with its namespaces, or
 * with an error line for the user. It leaves no process and no mount that is visible outside: everything is released
 * when the last task has ended and slurmstepd has closed the namespaces.
 *
 *   slurmd   job's user   how the root is built
 *   root     root         by root, in a mount namespace
 *   root     another      by root (from a folder, or from a squashfs file of root with its files mapped to the user),
 *                         then wrapped in a user namespace of the user
 *   a user   the same     in a user namespace. A slurmd that runs as root does the same with as_user=1, for a squashfs
 *                         file that users other than root can change, and if the kernel cannot map owners
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"
#include "message.h"

#define SCRATCH "/tmp" /* in the new mount namespace, a tmpfs covers it until the old root is unmounted */

struct request request = {.in_use = -1, .data_folder = -1};
bool privileged, slurmd_is_root;
static bool can_regain_root; /* the effective user ID is the user's, but the saved one is still root's */
static char **initial_environment; /* the environment at the start of the program */

/* Answers */

void send_answer(int to, const char *text, const int *fds, int count) {
    if (!send_message(to, text, fds, count))
        _exit(1);
}

_Noreturn void fail(const char *format, ...) {
    char line[WHY_LENGTH * 2] = "!";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + 1, sizeof line - 1, format, arguments);
    va_end(arguments);
    send_answer(ANSWER_FD, line, NULL, 0);
    exit(1);
}

/* User and root rights */

void as_user(void) {
    if (!privileged || request.uid == 0)
        return;
    if (setgroups(request.group_count, request.groups) != 0 || setegid(request.gid) != 0 || seteuid(request.uid) != 0)
        fail("cannot take the user's rights: %s", strerror(errno));
}

void as_root(void) {
    if (!privileged || request.uid == 0)
        return;
    int error = errno;
    if (seteuid(0) != 0 || setegid(0) != 0)
        fail("cannot take root's rights back: %s", strerror(errno));
    errno = error;
}

/* Gives a helper that runs as root the user's effective ids. The user can still neither trace nor stop the helper. */
static void use_user_rights(void) {
    can_regain_root = slurmd_is_root && request.uid != 0;
    if (can_regain_root && (setgroups(request.group_count, request.groups) != 0 || setegid(request.gid) != 0 ||
                            seteuid(request.uid) != 0))
        fail("cannot take the user's rights: %s", strerror(errno));
}

void regain_root(void) {
    if (can_regain_root && (seteuid(0) != 0 || setegid(0) != 0))
        fail("cannot take root's rights back: %s", strerror(errno));
}

void release_root(void) {
    if (can_regain_root && (setegid(request.gid) != 0 || seteuid(request.uid) != 0))
        fail("cannot take the user's rights: %s", strerror(errno));
}

/* Drops root's rights permanently. With `caps`, root's capabilities remain until a user namespace is created, because
 * some systems (Ubuntu 24.04) refuse user namespaces to processes without them. */
void drop_root(bool caps) {
    regain_root();
    if (can_regain_root && caps && prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) != 0)
        fail("cannot keep root's capabilities: %s", strerror(errno));
    if (can_regain_root)
        become_user();
    can_regain_root = false;
}

void become_user(void) {
    if (setgroups(request.group_count, request.groups) != 0 ||
        setresgid(request.gid, request.gid, request.gid) != 0 || setresuid(request.uid, request.uid, request.uid) != 0)
        fail("cannot become the user: %s", strerror(errno));
}

void write_text(int folder, const char *path, const char *text) {
    int fd = openat(folder, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        fail("cannot write /proc/%s: %s", path, strerror(errno));
    close(fd);
}

/* Runs a program and returns its exit code. Its stderr goes to the file `errors_fd`, or nowhere if that is -1. */
int run_program(const char *const argv[], int folder, int errors_fd) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        drop_root(false);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* set after the change of user, which clears it */
        int null = open("/dev/null", O_RDWR);
        for (int stream = 0; stream < 3; stream++)
            dup2(stream == 2 && errors_fd >= 0 ? errors_fd : null, stream);
        if (folder >= 0 && fchdir(folder) != 0)
            _exit(126);
        execvp(argv[0], (char *const *)argv);
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return 255;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Returns why a program of squashfs-tools failed: the text after the first "because" in its messages, otherwise its
 * last message. */
const char *why_failed(int rc, int errors_fd, char why[WHY_LENGTH]) {
    if (rc == 128 + SIGKILL)
        return snprintf(why, WHY_LENGTH, "it was killed; does the step have enough memory?"), why;
    static char text[8192];
    ssize_t got = errors_fd < 0 ? -1 : pread(errors_fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = '\0';
    snprintf(why, WHY_LENGTH, "no error message");
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        const char *reason = strstr(line, "because ");
        if (reason)
            return snprintf(why, WHY_LENGTH, "%s", reason + 8), why;
        if (*line)
            snprintf(why, WHY_LENGTH, "%.*s", WHY_LENGTH / 2, line);
    }
    return why;
}

/* The request */

static void read_groups(const char *text) {
    for (char *end; *text; text = *end ? end + 1 : end) {
        if (request.group_count == GROUPS_MAX) /* files may deny access to a group, so no group may be left out */
            fail("the user is in more than %d groups", GROUPS_MAX);
        request.groups[request.group_count++] = (gid_t)strtoul(text, &end, 10);
        if (end == text)
            fail("invalid list of groups");
    }
}

static bool is_named(const char *word, const char *name, const char **value) {
    size_t length = strlen(name);
    if (strncmp(word, name, length) != 0 || word[length] != '=')
        return false;
    *value = word + length + 1;
    return true;
}

static void read_word(const char *word) {
    const char *value;
    const struct {
        const char *name, **to;
    } texts[] = {{"image", &request.image}, {"mounts", &request.mounts}, {"name", &request.name},
                 {"home", &request.home},   {"script", &request.script}, {"data", &request.data},
                 {"cache", &request.cache}, {"save", &request.save},     {"import", &request.import},
                 {"pmix", &request.pmix},   {"home_at", &request.home_at}, {"remove", &request.remove},
                 {"asked", &request.requested_image}, {"cgroups", &request.cgroups}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (is_named(word, texts[i].name, &value)) {
            *texts[i].to = value;
            return;
        }
    if (is_named(word, "uid", &value))
        request.uid = (uid_t)strtoul(value, NULL, 10), request.uid_given = *value;
    else if (is_named(word, "gid", &value))
        request.gid = (gid_t)strtoul(value, NULL, 10), request.gid_given = *value;
    else if (is_named(word, "groups", &value))
        read_groups(value);
    else if (is_named(word, "memory_mib", &value))
        request.memory_mib = strtoull(value, NULL, 10);
    else if (is_named(word, "site", &value) && request.site_count < SITE_MAX)
        request.site[request.site_count++] = value;
    else if (is_named(word, "unshare", &value)) {
        char why[WHY_LENGTH];
        if (parse_unshare(value, request.unshare, why) != 0)
            fail("--container-unshare: %s", why);
    } else if (is_named(word, "readonly", &value))
        request.readonly = *value == '1';
    else if (is_named(word, "remap_root", &value))
        request.remap_root = *value == '1';
    else if (is_named(word, "list", &value))
        request.list = *value == '1';
    else if (is_named(word, "as_user", &value))
        request.as_user = *value == '1';
    else
        fail("the helper does not know `%.100s`: plugin and helper have different versions", word);
}

/* Reads the variables for an import and clears the environment, so that no other program gets them. */
static void read_variables(void) {
    static char path[PATH_MAX] = "/usr/sbin:/usr/bin:/sbin:/bin";
    const char *own = getenv("PATH");
    if (own)
        snprintf(path, sizeof path, "%s", own);
    initial_environment = environ;
    for (char **each = environ; each && *each && request.variable_count < VARIABLES_MAX; each++)
        if (strncmp(*each, FOR_IMPORT, strlen(FOR_IMPORT)) == 0)
            request.variables[request.variable_count++] = *each + strlen(FOR_IMPORT);
    if (request.variable_count == 0)
        return;
    clearenv();
    setenv("PATH", path, 1);
}

/* Folders of the cluster */

/* Fails unless only this owner may write to the folder: the helper opens files in it by name. */
void check_owner(int folder, uid_t owner, const char *path) {
    struct stat seen;
    if (fstat(folder, &seen) != 0)
        fail("%s: %s", path, strerror(errno));
    bool groups = seen.st_mode & S_IWGRP && owner == 0 && seen.st_gid != 0;
    if (seen.st_uid != owner || groups || seen.st_mode & S_IWOTH)
        fail("%s can be changed by users other than %s", path, owner == 0 ? "root" : "its owner");
}

static bool is_empty(int folder) {
    DIR *list = fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    struct dirent *entry = NULL;
    while (list && (entry = readdir(list)) && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0))
        ;
    if (list)
        closedir(list);
    return list && !entry;
}

/* Returns whether another step has just created the folder and not yet changed its owner. Only the
 * helper's user can create entries in the parent, and only new folders of that user are empty. */
static bool is_new(int parent, int folder, uid_t owner) {
    struct stat above, seen;
    return owner != geteuid() && fstat(parent, &above) == 0 && above.st_uid == geteuid() &&
           !(above.st_mode & (S_IWGRP | S_IWOTH)) && fstat(folder, &seen) == 0 && seen.st_uid == geteuid() &&
           is_empty(folder);
}

/* Opens a folder within another, and creates it if it is missing. A link is not followed. */
int open_own_folder(int parent, const char *name, uid_t owner, const char *path) {
    bool made = mkdirat(parent, name, 0700) == 0;
    int folder = made || errno == EEXIST ? openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
    bool give = folder >= 0 && ((made && owner != geteuid()) || is_new(parent, folder, owner));
    if (folder < 0 || (give && fchown(folder, request.uid, request.gid) != 0))
        fail("cannot store the container: %s: %s", path, strerror(errno));
    check_owner(folder, owner, path);
    return folder;
}

/* Opens the user's folder below a folder of the cluster, and sets `path` to it. */
static int open_users_folder(const char **path, const char *ending) {
    char *name = NULL, *whole = NULL;
    if (!*path)
        return -1;
    if (asprintf(&name, "%u%s", request.uid, ending) < 0 || asprintf(&whole, "%s/%s", *path, name) < 0)
        fail("out of memory");
    int parent = open(*path, O_PATH | O_DIRECTORY | O_CLOEXEC); /* the cluster's path may contain links */
    if (parent < 0)
        fail("%s: %s", *path, strerror(errno));
    check_owner(parent, geteuid(), *path);
    int folder = open_own_folder(parent, name, privileged ? 0 : request.uid, whole);
    close(parent);
    free(name);
    *path = whole;
    return folder;
}

/* Opens a file again in the current mount namespace, by its path, which must still refer to the same file. */
int open_again(int first, const char *path) {
    struct stat before, now;
    int again = open(path, O_PATH | O_CLOEXEC);
    if (again >= 0 && (fstat(first, &before) != 0 || fstat(again, &now) != 0 || before.st_dev != now.st_dev ||
                       before.st_ino != now.st_ino))
        fail("%s was replaced while it was opened", path);
    return again;
}

/* Removes the protection from the OOM killer that slurmstepd may have: the user's processes must not inherit it. */
static void drop_oom_protection(void) {
    int file = openat(proc_fd, "self/oom_score_adj", O_RDWR | O_CLOEXEC);
    char now[16] = "";
    if (file >= 0 && read(file, now, sizeof now - 1) > 0 && now[0] == '-' && pwrite(file, "0", 1, 0) != 1)
        fail("/proc/self/oom_score_adj: %s", strerror(errno));
    if (file >= 0)
        close(file);
}

static const char *absolute(const char *path) {
    char here[PATH_MAX], *whole = NULL;
    if (!path || path[0] == '/')
        return path;
    if (!getcwd(here, sizeof here) || asprintf(&whole, "%s/%s", here, path) < 0)
        fail("the working folder does not exist any more");
    return whole;
}

/* The root */

static void make_scratch(void) {
    if (mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755") != 0)
        fail("cannot mount a tmpfs: %s", strerror(errno));
    mkdir(SCRATCH "/lower", 0755);
    mkdir(SCRATCH "/root", 0755);
    mkdir(SCRATCH "/rw", 0755);
}

static void attach_at(int tree, const char *path) {
    int mount_point = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (mount_point < 0 || tree < 0 || attach_tree(tree, mount_point) != 0)
        fail("cannot store the container: %s", strerror(errno));
    close(mount_point);
    close(tree);
}

static void make_layer(const struct named_container *container) {
    if (container->tree >= 0) {
        attach_at(container->tree, SCRATCH "/rw");
        return;
    }
    mkdir(SCRATCH "/rw/upper", 0755);
    mkdir(SCRATCH "/rw/work", 0755);
    if (privileged && chown(SCRATCH "/rw/upper", request.uid, request.gid) != 0)
        fail("cannot create the writable layer: %s", strerror(errno));
}

static void mount_overlay(void) {
    char options[256];
    /* redirect_dir=nofollow: an image may contain extended attributes that redirect folders of an overlay elsewhere. */
    snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/rw/upper,workdir=%s/rw/work,%s", SCRATCH, SCRATCH,
             SCRATCH, privileged ? "redirect_dir=nofollow,metacopy=off" : "userxattr");
    if (mount("overlay", SCRATCH "/root", "overlay", MS_NOSUID | MS_NODEV, options) != 0)
        fail("the kernel refused the overlay mount: %s", strerror(errno));
}

static void change_root(void) {
    unsigned long flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | MS_RDONLY;
    if (request.readonly && mount(NULL, SCRATCH "/root", NULL, flags, NULL) != 0)
        fail("cannot make the container read-only: %s", strerror(errno));
    if (chdir(SCRATCH "/root") != 0 || change_root_here() != 0 || umount2(".", MNT_DETACH) != 0 || chdir("/") != 0)
        fail("cannot enter the container's root: %s", strerror(errno));
}

static _Noreturn void restart_as_user(char *argv[], int mounts, int folder) {
    size_t count = 0;
    while (argv[count])
        count++;
    char **words = calloc(count + 5, sizeof *words);
    if (!words || setns(mounts, CLONE_NEWNS) != 0 || fchdir(folder) != 0)
        fail("cannot restart the helper: %s", strerror(errno));
    memcpy(words, argv, count * sizeof *words);
    words[count] = "as_user=1";
    /* The last argument with a name counts, so these override those in argv. They hold what this helper has found out:
     * the new one neither imports the image again nor waits for a task again. */
    if (asprintf(&words[count + 1], "image=%s", request.image) < 0 ||
        asprintf(&words[count + 2], "asked=%s", request.requested_image) < 0 ||
        (request.cgroups && asprintf(&words[count + 3], "cgroups=%s", request.cgroups) < 0))
        fail("out of memory");
    fcntl(ANSWER_FD, F_SETFD, 0);
    execve("/proc/self/exe", words, initial_environment);
    fail("cannot restart the helper: %s", strerror(errno));
}

/* Enters a new mount namespace as root, before any source of a mount is opened: the kernel clones trees only from the
 * caller's namespace. */
static void unshare_mounts(void) {
    if (unshare(CLONE_NEWNS) != 0)
        fail("cannot create a mount namespace: %s", strerror(errno));
    if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) != 0)
        fail("cannot separate the mounts from the node's: %s", strerror(errno));
}

/* Mounts the container's root. Returns false if the image must be mounted with the user's rights instead. */
static bool mount_root(struct named_container *container, struct image *image) {
    open_image(image);
    if (!privileged) {
        prepare_image(image);
        enter_own_user_namespace();
    }
    hold_image(image);
    clone_named_container(container);
    open_mount_sources();
    make_scratch();
    make_layer(container);
    if (!mount_image(image, SCRATCH "/lower"))
        return false;
    mount_overlay();
    if (container->folder >= 0) {
        container->rootfs = create_rootfs_namespace(SCRATCH "/root");
        container->owner = privileged ? -1 : namespace_fd(0, "user");
    }
    return true;
}

/* Mounts the root from the running container, because an overlay's upper folder can be mounted only once. */
static void mount_root_of_running(struct named_container *container) {
    drop_root(false);
    join_unpacked();
    if (!privileged)
        join_user_namespace(container->owner);
    open_mount_sources();
    make_scratch();
    attach_at(clone_root_of(container->rootfs), SCRATCH "/root");
}

static void build(char *argv[], int old_mounts, int old_folder, struct named_container *container,
                  struct namespaces *namespaces, bool *folder) {
    struct image image = {0};
    if (container->running)
        mount_root_of_running(container);
    else if (!mount_root(container, &image)) {
        if (container->image[0]) /* root stored its files; a container that the user builds could not use them */
            fail("image %s: users other than root can change it now, and the container was created when they could not; "
                 "remove the container, or restore the image's owner",
                 request.image);
        restart_as_user(argv, old_mounts, old_folder);
    }
    mount_in_root(SCRATCH "/root", SCRATCH);
    change_root();
    *folder = image.folder;
    bool wrapped = privileged ? request.uid != 0 : !request.remap_root;
    if (!wrapped && !set_propagation())
        fail("cannot set the propagation of mounts: %s", strerror(errno));
    if (wrapped && privileged)
        wrap_in_user_namespace(request.remap_root ? 0 : request.uid, request.remap_root ? 0 : request.gid, request.uid,
                               request.gid, namespaces);
    else if (wrapped)
        wrap_in_user_namespace(request.uid, request.gid, 0, 0, namespaces);
    else if (!unshare_namespaces())
        fail(UNSHARE_REFUSED, strerror(errno));
    else
        open_namespaces(0, namespaces);
    if (privileged && request.uid == 0)
        close(namespaces->user), namespaces->user = -1;
}

static void answer(const struct named_container *container, const struct namespaces *namespaces, bool folder) {
    char text[WHY_LENGTH] = "mnt";
    int all[DESCRIPTORS_MAX], count = 0;
    all[count++] = namespaces->mounts;
    if (namespaces->user >= 0)
        all[count++] = namespaces->user, strcat(text, " user");
    if (container->lock >= 0)
        all[count++] = container->lock, strcat(text, " lock");
    if (request.in_use >= 0)
        all[count++] = request.in_use, strcat(text, " unpacked");
    if (container->rootfs >= 0)
        all[count++] = container->rootfs, strcat(text, " bare");
    if (container->owner >= 0)
        all[count++] = container->owner, strcat(text, " owner");
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        if (namespaces->own[i] >= 0)
            all[count++] = namespaces->own[i], strcat(strcat(text, " "), namespace_words[i]);
    if (folder)
        strcat(text, " folder");
    if (request.note) /* the note comes last, on a separate line */
        snprintf(text + strlen(text), sizeof text - strlen(text), "\n%s", request.note);
    send_answer(ANSWER_FD, text, all, count);
}

/* Lists or removes named containers, both those built with root's rights and those built with the user's. */
static _Noreturn void manage(void) {
    const char *below = request.data;
    char name[32];
    if (!request.data)
        fail("named containers are disabled: plugstack.conf has no data=");
    request.data_folder = open_users_folder(&request.data, privileged ? "" : ".own");
    int parent = open(below, O_PATH | O_DIRECTORY | O_CLOEXEC), own = -1;
    snprintf(name, sizeof name, "%u.own", request.uid);
    if (privileged && parent >= 0)
        own = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (own >= 0)
        check_owner(own, request.uid, name);
    if (!privileged && geteuid() == 0)
        become_user();
    manage_containers(own);
}

/* Returns whether the container must be built with the user's rights: because it exists and was built with them, or
 * because the kernel must not mount the image. */
static bool needs_user_rights(void) {
    struct image image;
    if (request.name && (named_container_exists("") || named_container_exists(".own")))
        return !named_container_exists("");
    if (!request.image)
        return false;
    open_image(&image);
    bool users = !image.folder && !image.trusted;
    close(image.fd);
    return users;
}

int main(int argc, char *argv[]) {
    struct named_container container;
    struct namespaces namespaces = no_namespaces;
    bool folder = false;
    /* Must come first: if root owns the container, USER_FD is closed, and the next file opened could get its number. */
    int user = fcntl(USER_FD, F_GETFD) < 0 ? -1 : USER_FD;
    fcntl(ANSWER_FD, F_SETFD, FD_CLOEXEC);
    umask(022);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}); /* a core dump could land in a folder of the user */
    for (int i = 1; i < argc; i++)
        read_word(argv[i]);
    if (!request.uid_given || !request.gid_given)
        fail("uid= and gid= are missing");
    read_variables();
    proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    drop_oom_protection();
    if (request.save)
        save_root(user, MOUNTS_FD);
    look_up_user_name();
    slurmd_is_root = geteuid() == 0;
    privileged = slurmd_is_root && !(request.as_user && request.uid != 0);
    if (!request.requested_image)
        request.requested_image = request.image;
    if (request.image && !image_is_path(request.image))
        import_image();
    request.image = absolute(request.image);
    bool managing = request.list || request.remove;
    if (privileged && request.uid != 0 && !managing && needs_user_rights())
        privileged = false;
    int mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC), here = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (privileged)
        unshare_mounts();
    if (managing)
        manage();
    if (request.name)
        request.data_folder = open_users_folder(&request.data, privileged ? "" : ".own");
    if (!privileged) {
        close(open_users_folder(&request.cache, ""));
        enter_cgroups();
        use_user_rights();
    }
    open_named_container(&container);
    if (container.namespaces.mounts >= 0) {
        drop_root(false);
        namespaces = container.namespaces;
        join_unpacked();
    } else {
        if (!request.image)
            fail("no image: --container-image is missing");
        build(argv, mounts, here, &container, &namespaces, &folder);
    }
    record_holder(&container, &namespaces);
    answer(&container, &namespaces, folder);
    return 0;
}

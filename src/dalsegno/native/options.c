#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const struct option_word option_words[OPTION_COUNT] = {
    [OPTION_IMAGE] = {"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH",
                      "the image to run the tasks in: a path to a .sqsh, or a name in a registry"},
    [OPTION_MOUNTS] = {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]",
                       "mounts inside the container: a path on the node, `tmpfs`, or `umount` to remove one; flags are "
                       "joined by '+', for example ro"},
    [OPTION_WORKDIR] = {"container-workdir", "PATH", "the working folder inside the container"},
    [OPTION_NAME] = {"container-name", "NAME[:auto|create|exec|no_exec]",
                     "keep the container under this name, or use the one that exists"},
    [OPTION_SAVE] = {"container-save", "PATH", "save the container as a .sqsh when the step ends"},
    [OPTION_ENV] = {"container-env", "NAME[,NAME...]",
                    "environment variables that keep the job's value instead of the image's"},
    [OPTION_MOUNT_HOME] = {"container-mount-home", NULL, "mount the user's home folder"},
    [OPTION_NO_MOUNT_HOME] = {"no-container-mount-home", NULL, "do not mount the user's home folder (default)"},
    [OPTION_REMAP_ROOT] = {"container-remap-root", NULL, "run as root inside the container, without root's rights outside"},
    [OPTION_NO_REMAP_ROOT] = {"no-container-remap-root", NULL, "run as yourself inside the container (default)"},
    [OPTION_ENTRYPOINT] = {"container-entrypoint", NULL, "run the image's entry point before the command"},
    [OPTION_NO_ENTRYPOINT] = {"no-container-entrypoint", NULL, "do not run the image's entry point (default)"},
    [OPTION_ENTRYPOINT_LOG] = {"container-entrypoint-log", NULL,
                               "print the output of the entry point (always on here)"},
    [OPTION_WRITABLE] = {"container-writable", NULL, "make the container writable (default)"},
    [OPTION_READONLY] = {"container-readonly", NULL, "make the container read-only"},
    [OPTION_UNSHARE] = {"container-unshare", "NS[,NS...]",
                        "create new namespaces for the container: net, ipc, uts; its tasks on a node share them"},
    [OPTION_LIST] = {"container-list", NULL, "list your named containers on the node; runs no command"},
    [OPTION_REMOVE] = {"container-remove", "NAME[,NAME...]",
                       "remove named containers from the node; runs no command"},
    [OPTION_AUTO_RESUME] = {"auto-resume", "0|1", "restart the step on healthy nodes after a node has failed"},
};

static int refuse(char why[WHY_LENGTH], const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, WHY_LENGTH, format, arguments);
    va_end(arguments);
    make_printable(why);
    return -1;
}

void make_printable(char *text) {
    for (unsigned char *at = (unsigned char *)text; *at; at++) {
        if (iscntrl(*at))
            *at = '?';
        else if (at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0) /* U+0080 to U+009F: U+009B acts like ESC [ */
            at[0] = at[1] = '?';
    }
}

/* Mounts */

static bool set_propagation(const char *flag, struct mount *mount) {
    static const char *const words[] = {[PROPAGATION_PRIVATE] = "private",
                                        [PROPAGATION_SLAVE] = "slave",
                                        [PROPAGATION_SHARED] = "shared",
                                        [PROPAGATION_UNBINDABLE] = "unbindable"};
    bool recursive = flag[0] == 'r';
    for (int i = PROPAGATION_PRIVATE; i <= PROPAGATION_UNBINDABLE; i++)
        if (strcmp(flag + recursive, words[i]) == 0) {
            mount->propagation = (enum mount_propagation)i, mount->recursive = recursive;
            return true;
        }
    return false;
}

/* Adds an option of a tmpfs. The user may not set the owner or any option that is not in this list. */
static bool add_tmpfs_option(const char *flag, struct mount *mount) {
    static const char *const names[] = {"size=", "mode=", "huge=", "nr_inodes="};
    size_t used = strlen(mount->options);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = flag + strlen(names[i]);
        if (strncmp(flag, names[i], strlen(names[i])) == 0 && *value &&
            strspn(value, "abcdefghijklmnopqrstuvwxyzGKMT0123456789_%") == strlen(value))
            return (size_t)snprintf(mount->options + used, sizeof mount->options - used, ",%s", flag) <
                   sizeof mount->options - used;
    }
    return false;
}

static int set_flag(const char *flag, struct mount *mount) {
    static const char *const without_effect[] = {"rw",   "bind",         "rbind",         "nosuid",   "dev",
                                           "exec", "x-create=dir", "x-create=auto", "defaults", "x-create=file"};
    if (mount->kind == MOUNT_UMOUNT)
        return strcmp(flag, "x-detach") == 0 ? 0 : -1;
    if (strcmp(flag, "ro") == 0)
        mount->read_only = true;
    else if (strcmp(flag, "noexec") == 0)
        mount->no_exec = true;
    else if (strcmp(flag, "nodev") == 0)
        mount->no_devices = true;
    else if (!set_propagation(flag, mount) && !(mount->kind == MOUNT_TMPFS && add_tmpfs_option(flag, mount))) {
        for (size_t i = 0; i < sizeof without_effect / sizeof *without_effect; i++)
            if (strcmp(flag, without_effect[i]) == 0)
                return 0;
        return -1;
    }
    return 0;
}

/* Returns whether a path leaves its root: it has more `..` than folders before them. */
static bool escapes(const char *path) {
    int depth = 0;
    while (*path && depth >= 0) {
        path += strspn(path, "/");
        size_t length = strcspn(path, "/");
        if (length == 2 && strncmp(path, "..", 2) == 0)
            depth--;
        else if (length > 1 || (length == 1 && *path != '.'))
            depth++;
        path += length;
    }
    return depth < 0;
}

static int parse_mount(char *entry, struct mount *mount, char why[WHY_LENGTH]) {
    char *rest = entry;
    memset(mount, 0, sizeof *mount);
    mount->from = strsep(&rest, ":");
    char *to = strsep(&rest, ":"), *flags = rest;
    mount->to = to ? to : mount->from;
    if (!*mount->from || !*mount->to)
        return refuse(why, "SRC or DST of a mount is empty");
    if (strcmp(mount->from, "tmpfs") == 0)
        mount->kind = MOUNT_TMPFS;
    else if (strcmp(mount->from, "umount") == 0)
        mount->kind = MOUNT_UMOUNT;
    else if (mount->from[0] != '/' && mount->from[0] != '.')
        return refuse(why, "cannot mount `%.200s`: the source must be /PATH, ./PATH or tmpfs", mount->from);
    if (mount->to[0] != '/' && mount->to[0] != '.')
        return refuse(why, "cannot mount at `%.200s`: the target must be an absolute path", mount->to);
    if (mount->to[0] == '.' && escapes(mount->to))
        return refuse(why, "`%.200s` is outside the container (%s)", mount->to, strerror(EXDEV));
    if (flags && strchr(flags, ':'))
        return refuse(why, "a mount has more than two colons; the form is SRC:DST:FLAGS");
    for (char *flag; flags && *flags && (flag = strsep(&flags, "+"));)
        if (set_flag(flag, mount) != 0)
            return refuse(why, "unknown mount flag `%.100s`; use ro, rw, noexec, nodev, rprivate%s", flag,
                          mount->kind == MOUNT_TMPFS ? ", size=1G, mode=1777" : "");
    return 0;
}

int parse_mounts(const char *text, struct mounts *mounts, char why[WHY_LENGTH]) {
    memset(mounts, 0, sizeof *mounts);
    if (!(mounts->text = strdup(text)))
        return refuse(why, "out of memory");
    for (char *rest = mounts->text, *entry; (entry = strsep(&rest, ","));) {
        if (mounts->count == MOUNTS_MAX)
            return refuse(why, "more than %d mounts", MOUNTS_MAX);
        if (parse_mount(entry, &mounts->list[mounts->count], why) != 0)
            return -1;
        mounts->count++;
    }
    return 0;
}

void mounts_free(struct mounts *mounts) {
    free(mounts->text);
    memset(mounts, 0, sizeof *mounts);
}

/* Names of variables */

static bool is_variable(const char *name) {
    if (!isalpha((unsigned char)*name) && *name != '_')
        return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && *name != '_')
            return false;
    return true;
}

int parse_names(const char *text, struct names *names, char why[WHY_LENGTH]) {
    memset(names, 0, sizeof *names);
    if (!(names->text = strdup(text)))
        return refuse(why, "out of memory");
    for (char *rest = names->text, *name; (name = strsep(&rest, ","));) {
        if (names->count == NAMES_MAX)
            return refuse(why, "more than %d names", NAMES_MAX);
        if (!is_variable(name))
            return refuse(why, "`%.200s` is not a valid name of an environment variable", name);
        names->list[names->count++] = name;
    }
    return 0;
}

void names_free(struct names *names) {
    free(names->text);
    memset(names, 0, sizeof *names);
}

bool names_hold(const struct names *names, const char *name, size_t length) {
    for (size_t i = 0; i < names->count; i++)
        if (strlen(names->list[i]) == length && memcmp(names->list[i], name, length) == 0)
            return true;
    return false;
}

/* Container names, paths, images */

static int parse_use(const char *word, enum name_use *use) {
    static const char *const words[] = {"auto", "create", "exec", "no_exec"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(word, words[i]) == 0) {
            *use = (enum name_use)i;
            return 0;
        }
    return -1;
}

int parse_container_name(const char *text, struct container_name *name, char why[WHY_LENGTH]) {
    size_t length = strcspn(text, ":");
    memset(name, 0, sizeof *name);
    if (text[length] && parse_use(text + length + 1, &name->use) != 0)
        return refuse(why, "unknown mode `%.100s` after the container's name; use auto, create, exec or no_exec",
                      text + length + 1);
    if (length == 0 || length > NAME_LENGTH_MAX)
        return refuse(why, "a container name has 1 to %d characters", NAME_LENGTH_MAX);
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)text[i]) && (i == 0 || !strchr("._-", text[i])))
            return refuse(why, "a container name consists of letters, digits, '.', '_' and '-'");
    memcpy(name->name, text, length);
    return 0;
}

int parse_container_names(const char *text, struct names *names, char why[WHY_LENGTH]) {
    struct container_name name;
    memset(names, 0, sizeof *names);
    if (strchr(text, ':'))
        return refuse(why, "a container name consists of letters, digits, '.', '_' and '-'");
    if (!(names->text = strdup(text)))
        return refuse(why, "out of memory");
    for (char *rest = names->text, *each; (each = strsep(&rest, ","));) {
        if (names->count == NAMES_MAX)
            return refuse(why, "more than %d names", NAMES_MAX);
        if (parse_container_name(each, &name, why) != 0)
            return -1;
        names->list[names->count++] = each;
    }
    return 0;
}

const char *const namespace_words[NAMESPACE_KINDS] = {"net", "ipc", "uts"};

static int find_namespace(const char *word) {
    for (int i = 0; i < NAMESPACE_KINDS; i++)
        if (strcmp(word, namespace_words[i]) == 0)
            return i;
    return -1;
}

int parse_unshare(const char *text, bool wanted[NAMESPACE_KINDS], char why[WHY_LENGTH]) {
    memset(wanted, 0, sizeof *wanted * NAMESPACE_KINDS);
    if (!*text)
        return refuse(why, "argument required: net, ipc or uts, joined by commas");
    char *copy = strdup(text), *rest = copy, *word;
    if (!copy)
        return refuse(why, "out of memory");
    int rc = 0;
    while (rc == 0 && (word = strsep(&rest, ","))) {
        int kind = find_namespace(word);
        if (kind >= 0)
            wanted[kind] = true;
        else if (!*word)
            rc = refuse(why, "empty namespace argument");
        else
            rc = refuse(why, "unknown namespace '%.100s': use net, ipc or uts", word);
    }
    free(copy);
    return rc;
}

int parse_switch(const char *text, bool *on, char why[WHY_LENGTH]) {
    static const char *const words[] = {"0", "no", "n", "false", "f", "1", "yes", "y", "true", "t"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcasecmp(text, words[i]) == 0) {
            *on = i >= 5;
            return 0;
        }
    return refuse(why, "`%.100s` is not 1 or 0", text);
}

enum option opposite(enum option option) {
    static const enum option pairs[][2] = {{OPTION_MOUNT_HOME, OPTION_NO_MOUNT_HOME},
                                           {OPTION_REMAP_ROOT, OPTION_NO_REMAP_ROOT},
                                           {OPTION_ENTRYPOINT, OPTION_NO_ENTRYPOINT},
                                           {OPTION_WRITABLE, OPTION_READONLY}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int side = 0; side < 2; side++)
            if (pairs[i][side] == option)
                return pairs[i][!side];
    return OPTION_COUNT;
}

bool image_is_path(const char *image) { return image[0] == '/' || image[0] == '.'; }

static int check_image(const char *image, char why[WHY_LENGTH]) {
    if (!*image)
        return refuse(why, "the image name is empty");
    for (const char *letter = image; *letter; letter++)
        if (iscntrl((unsigned char)*letter) || (!image_is_path(image) && isspace((unsigned char)*letter)))
            return refuse(why, "the image name contains a space or a control character");
    return 0;
}

int check_option(enum option option, const char *value, char why[WHY_LENGTH]) {
    struct mounts mounts = {0};
    struct names names = {0};
    struct container_name name;
    bool wanted[NAMESPACE_KINDS];
    int rc = 0;
    switch (option) {
    case OPTION_IMAGE:
        return check_image(value, why);
    case OPTION_MOUNTS:
        rc = parse_mounts(value, &mounts, why);
        mounts_free(&mounts);
        return rc;
    case OPTION_ENV:
        rc = parse_names(value, &names, why);
        names_free(&names);
        return rc;
    case OPTION_NAME:
        return parse_container_name(value, &name, why);
    case OPTION_WORKDIR:
        return *value ? 0 : refuse(why, "the path is empty");
    case OPTION_REMOVE:
        rc = parse_container_names(value, &names, why);
        names_free(&names);
        return rc;
    case OPTION_UNSHARE:
        return parse_unshare(value, wanted, why);
    case OPTION_SAVE:
        return *value ? 0 : refuse(why, "the path to save to is empty");
    case OPTION_AUTO_RESUME:
        return strcmp(value, "0") == 0 || strcmp(value, "1") == 0 ? 0 : refuse(why, "the value must be 0 or 1");
    default:
        return 0;
    }
}

/* Settings of an image */

size_t parse_environment(char *line, char **value) {
    line[strcspn(line, "\n")] = '\0';
    size_t length = strcspn(line, "=");
    if (!line[length])
        return 0;
    line[length] = '\0';
    bool good = is_variable(line);
    line[length] = '=';
    if (!good)
        return 0;
    *value = line + length + 1;
    return length;
}

/* Removes the backslashes before characters that are special to a shell between double quotes. */
static void unquote(char *text) {
    char *to = text;
    for (; *text && *text != '"'; text++) {
        if (*text == '\\' && text[1])
            text++;
        *to++ = *text;
    }
    *to = '\0';
}

char *parse_rc_workdir(char *text) {
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        if (strncmp(line, "cd ", 3) != 0)
            continue;
        char *path = line + 3;
        if (*path == '"')
            unquote(++path);
        else
            path[strcspn(path, " ;&")] = '\0';
        return *path == '/' ? path : NULL;
    }
    return NULL;
}

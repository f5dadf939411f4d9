/* Parses and checks the container options, which are compatible with Pyxis. No Slurm, no system calls. */
#ifndef DALSEGNO_OPTIONS_H
#define DALSEGNO_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#define GPU_FOLDER "/.dalsegno-gpu" /* for NVIDIA's driver; in /, because the user can write to / in any container */

enum { MOUNTS_MAX = 64, NAMES_MAX = 128, NAME_LENGTH_MAX = 64, WHY_LENGTH = 512 };

enum option {
    OPTION_IMAGE,
    OPTION_MOUNTS,
    OPTION_WORKDIR,
    OPTION_NAME,
    OPTION_SAVE,
    OPTION_ENV,
    OPTION_MOUNT_HOME,
    OPTION_NO_MOUNT_HOME,
    OPTION_REMAP_ROOT,
    OPTION_NO_REMAP_ROOT,
    OPTION_ENTRYPOINT,
    OPTION_NO_ENTRYPOINT,
    OPTION_ENTRYPOINT_LOG,
    OPTION_WRITABLE,
    OPTION_READONLY,
    OPTION_UNSHARE,
    OPTION_LIST,
    OPTION_REMOVE,
    OPTION_AUTO_RESUME,
    OPTION_COUNT
};

struct option_word {
    const char *name, *argument, *usage; /* argument is NULL for an option without a value */
};

extern const struct option_word option_words[OPTION_COUNT];

enum mount_kind { MOUNT_BIND, MOUNT_TMPFS, MOUNT_UMOUNT };
enum mount_propagation { PROPAGATION_DEFAULT, PROPAGATION_PRIVATE, PROPAGATION_SLAVE, PROPAGATION_SHARED, PROPAGATION_UNBINDABLE };

struct mount {
    enum mount_kind kind;
    char *from, *to; /* a relative target is below the container's root */
    bool read_only, no_exec, no_devices, recursive;
    enum mount_propagation propagation;
    char options[128]; /* options of a tmpfs, in the form that mount(8) accepts */
};

struct mounts {
    struct mount list[MOUNTS_MAX];
    size_t count;
    char *text; /* from and to point into it */
};

struct names {
    const char *list[NAMES_MAX];
    size_t count;
    char *text;
};

/* Namespaces that --container-unshare creates for a container; the others are the node's. */
enum namespace_kind { NAMESPACE_NET, NAMESPACE_IPC, NAMESPACE_UTS, NAMESPACE_KINDS };

extern const char *const namespace_words[NAMESPACE_KINDS];

enum name_use { NAME_AUTO, NAME_CREATE, NAME_EXEC, NAME_NO_EXEC };

struct container_name {
    char name[NAME_LENGTH_MAX + 1];
    enum name_use use;
};

/* Parsers return 0, or -1 with a message in `why`. Free the result with the matching *_free, even after an error. */
int parse_mounts(const char *text, struct mounts *mounts, char why[WHY_LENGTH]);
void mounts_free(struct mounts *mounts);
int parse_names(const char *text, struct names *names, char why[WHY_LENGTH]);
void names_free(struct names *names);
bool names_hold(const struct names *names, const char *name, size_t length);
int parse_container_names(const char *text, struct names *names, char why[WHY_LENGTH]); /* names separated by commas, without modes */
int parse_container_name(const char *text, struct container_name *name, char why[WHY_LENGTH]);
int parse_unshare(const char *text, bool wanted[NAMESPACE_KINDS], char why[WHY_LENGTH]);
int parse_switch(const char *text, bool *on, char why[WHY_LENGTH]); /* reads a variable such as PYXIS_CONTAINER_READONLY */
enum option opposite(enum option option); /* the option that reverses this one, or OPTION_COUNT */
bool image_is_path(const char *image);
void make_printable(char *text); /* for a log or a terminal: control characters become '?' */

/* Checks the value of an option from the command line. */
int check_option(enum option option, const char *value, char why[WHY_LENGTH]);

/* Parses a line of the image's /etc/environment. Returns the length of the name and sets `value`; returns 0 for a line
 * to skip. */
size_t parse_environment(char *line, char **value);

/* Returns the folder that the image's /etc/rc (in Enroot's format) changes to, or NULL. The result points into `text`,
 * which is changed. */
char *parse_rc_workdir(char *text);

#endif

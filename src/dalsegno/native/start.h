/* Starts the helper from slurmstepd, and reads its answer. */
#ifndef DALSEGNO_START_H
#define DALSEGNO_START_H

#include <limits.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <sys/types.h>

#include "descriptors.h"
#include "options.h"

enum { SHOWN_MAX = 16, ANSWER_FDS_MAX = 6 + NAMESPACE_KINDS, ANSWER_LENGTH = WHY_LENGTH * 2 };

/* The arguments in plugstack.conf. %n in data stands for the node's name. */
struct site {
    char helper[PATH_MAX];
    const char *data, *cache, *import, *images, *resume, *shown[SHOWN_MAX];
    int shown_count;
    bool as_user;
};

struct container {
    bool wanted, folder;
    int output; /* a file that a task prints instead of running its command, or -1 */
    int mounts, user, lock, unpacked, rootfs, owner; /* kept open as long as the step runs */
    int own[NAMESPACE_KINDS]; /* namespaces of --container-unshare; -1 means the node's */
    char *script;
    char error[WHY_LENGTH * 2]; /* printed by the tasks */
    char note[WHY_LENGTH];      /* printed by the first task */
};

/* A running helper, and the socket for its answer. */
struct helper {
    int socket;
    int process; /* a pidfd: slurmstepd is not the helper's parent, so the helper's PID may be reused at any time */
};

struct helper start_helper(const char *path, char *const words[], char *const variables[], int user, int mounts);
int receive_answer(int from, char *text, size_t size, int *fds, int count); /* returns the number of fds; -1 if closed */
void end_helper(struct helper *helper);
void send_cgroups(int helper);
bool read_cgroups(char text[CGROUPS_LENGTH]);
void parse_answer(char *text, const int *fds, int count, struct container *container);

void become_subreaper(void);
void start_container(spank_t spank, const struct site *site, char *const given[], struct container *container);
void prepare_save(spank_t spank, const char *path);
bool save_container(const struct site *site, const struct container *container, const char *cgroups);

#endif

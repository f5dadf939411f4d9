/* Starting the helper from slurmstepd, and what it hands back. */
#ifndef DALSEGNO_START_H
#define DALSEGNO_START_H

#include <limits.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <sys/types.h>

#include "descriptors.h"
#include "options.h"

enum { SHOWN_MAX = 16, HANDED_MAX = 6 + NAMESPACE_KINDS, ANSWER_LENGTH = WHY_LENGTH * 2 };

/* What the cluster's plugstack.conf says. %n in data stands for the node's name. */
struct site {
    char helper[PATH_MAX];
    const char *data, *cache, *import, *images, *resume, *shown[SHOWN_MAX];
    int shown_count;
    bool as_user;
};

struct container {
    bool wanted, folder;
    int said; /* a file with what a task prints instead of its command's output, or -1 */
    int mounts, user, lock, unpacked, bare, owner; /* kept open for as long as the step lives */
    int own[NAMESPACE_KINDS]; /* those of --container-unshare; -1: the node's */
    char *script;
    char error[WHY_LENGTH * 2]; /* for the tasks to tell */
    char note[WHY_LENGTH];      /* for the first of them to tell */
};

/* The helper at work, and where it answers. */
struct helper {
    pid_t pid;
    int talk;
    int process; /* a pidfd: slurmstepd itself may wait for it first, and its number be another's by then */
};

struct helper begin_helper(const char *path, char *const words[], char *const variables[], int user, int mounts);
int take_message(int from, char *text, size_t size, int *fds, int count); /* how many descriptors came with it; -1: none will */
void end_helper(struct helper *helper);
void tell_cgroups(int helper);
bool read_cgroups(char text[CGROUPS_LENGTH]);
void take_answer(char *text, const int *fds, int count, struct container *container);

void keep_detached(void);
void start_container(spank_t spank, const struct site *site, char *const given[], struct container *container);
void prepare_save(spank_t spank, const char *path);
bool save_container(const struct site *site, const struct container *container, const char *cgroups);

#endif

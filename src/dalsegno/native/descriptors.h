/* What the helper finds when the plugin starts it: open descriptors, and variables that are meant for an import. */
#ifndef DALSEGNO_DESCRIPTORS_H
#define DALSEGNO_DESCRIPTORS_H

enum {
    ANSWER_FD = 3, /* where it says what came of it */
    USER_FD = 4,   /* a container's namespaces, to save it; root's has no user namespace */
    MOUNTS_FD = 5,
};

enum { CGROUPS_LENGTH = 8192 }; /* what a task tells of its cgroups: /proc/self/cgroup */

#define FOR_IMPORT "DALSEGNO_IMPORT_" /* before the names of those */

#endif

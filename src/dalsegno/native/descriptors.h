/* Open descriptors that the plugin passes to the helper, and variables for an import. */
#ifndef DALSEGNO_DESCRIPTORS_H
#define DALSEGNO_DESCRIPTORS_H

enum {
    ANSWER_FD = 3, /* for the helper's answer */
    USER_FD = 4,   /* namespaces of the container to save; one of root has no user namespace */
    MOUNTS_FD = 5,
};

enum { CGROUPS_LENGTH = 8192 }; /* of /proc/self/cgroup, which a task sends */

#define FOR_IMPORT "DALSEGNO_IMPORT_" /* prefix of these variables */

#endif

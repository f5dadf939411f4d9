/* Open descriptors that the plugin passes to the helper, and variables for an import. */
#ifndef DALSEGNO_DESCRIPTORS_H
#define DALSEGNO_DESCRIPTORS_H

enum {
    ANSWER_FD = 3, /* the socket for the helper's answer */
    USER_FD = 4,   /* user namespace of the container to save; closed if root owns the container */
    MOUNTS_FD = 5, /* mount namespace of the container to save */
};

enum { CGROUPS_LENGTH = 8192 }; /* buffer size for /proc/self/cgroup, which a task sends */

#define FOR_IMPORT "DALSEGNO_IMPORT_" /* prefix of the variables for an import */

#endif

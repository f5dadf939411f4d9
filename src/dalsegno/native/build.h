/* The helper, which builds a container's root in new namespaces and sends their descriptors to the plugin. */
#ifndef DALSEGNO_BUILD_H
#define DALSEGNO_BUILD_H

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

#include "descriptors.h"
#include "options.h"

enum { GROUPS_MAX = 4096, SITE_MAX = 16, VARIABLES_MAX = 32 };

/* The plugin's request: the NAME=VALUE arguments of the command line. */
struct request {
    bool unshare[NAMESPACE_KINDS]; /* namespaces to create */
    const char *image, *mounts, *name, *home, *home_at, *pmix, *script, *user, *data, *cache, *save;
    const char *remove;                   /* named containers to remove, instead of building one */
    bool list;                            /* list the named containers, instead of building one */
    const char *requested_image;          /* the image as the user named it */
    const char *cgroups;                  /* the step's cgroups; NULL until a task has reported them */
    const char *import;                   /* the program that imports an image by its name */
    const char *note;                     /* a warning from that program, for the user */
    const char *variables[VARIABLES_MAX]; /* the environment of that program: NAME=VALUE */
    size_t variable_count;
    const char *site[SITE_MAX]; /* paths that the cluster mounts in every container */
    size_t site_count;
    int data_folder; /* the folder of the user's named containers, or -1 */
    uid_t uid;
    gid_t gid;
    bool uid_given, gid_given;
    gid_t groups[GROUPS_MAX];
    size_t group_count;
    int in_use; /* a lock on the unpacked image, or a pipe that is closed when the FUSE server ends, or -1 */
    bool readonly, remap_root, as_user; /* as_user: the image is never accessed with root's rights */
    unsigned long long memory_mib;      /* memory of the step; 0 if unknown */
};

extern struct request request;
extern bool privileged;    /* the container's root is built with root's rights */
extern bool slurmd_is_root;

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void check_owner(int folder, uid_t owner, const char *path);
int open_own_folder(int parent, const char *name, uid_t owner, const char *path);
int open_again(int first, const char *path);
void as_user(void);
void as_root(void);
void become_user(void);
void regain_root(void);
void release_root(void);
void drop_root(bool caps);
void write_text(int folder, const char *path, const char *text);
int run_program(const char *const argv[], int folder, int errors_fd);
const char *why_failed(int rc, int errors_fd, char why[WHY_LENGTH]);
void send_answer(int to, const char *text, const int *fds, int count);

/* cgroup.c: processes with the user's rights enter the job's cgroups */
void await_cgroups(void);
void enter_cgroups(void);

/* trust.c: files that the kernel may mount */
bool only_root_can_change(int file);

/* import.c: import of an image by its name */
void import_image(void);

/* image.c: the image below the container's root */
struct image {
    int fd;
    bool folder;
    bool trusted;    /* the kernel may mount it; always true in jobs of root */
    int tree;        /* a folder or unpacked image as a mount tree to attach, or -1 */
    int fuse_server; /* the socket on which the FUSE server waits for its descriptor, or -1 */
    char extracted[PATH_MAX];
};
void open_image(struct image *image);
void prepare_image(struct image *image);
void hold_image(struct image *image);
bool mount_image(struct image *image, const char *at);

/* unpack.c: images that cannot be mounted */
void unpack(struct image *image);
void join_unpacked(void);

/* mounts.c: mounts inside the container */
void look_up_user_name(void);
void open_mount_sources(void);
void mount_in_root(const char *root, const char *scratch);
bool set_propagation(void);

/* gpu.c: the driver's libraries and programs */
int gpu_tree(const char *scratch);

/* A container's namespaces. A descriptor of -1 means that the container uses the node's namespace. */
struct namespaces {
    int mounts, user, own[NAMESPACE_KINDS]; /* own: created by --container-unshare */
};

static const struct namespaces no_namespaces = {-1, -1, {-1, -1, -1}};

/* named_containers.c: named containers */
struct named_container {
    char path[PATH_MAX], image[2 * PATH_MAX];
    const char *requested_image; /* the image as the user named it */
    int folder, entry_lock, lock, tree;
    struct namespaces namespaces; /* namespaces of the running container to join */
    int rootfs;   /* a mount namespace whose only mount is the container's file system, or -1 */
    int owner;    /* the user namespace that owns `rootfs`, or -1 for the helper's */
    bool running; /* the container runs: share its file system, but create separate mounts and namespaces */
};
void open_named_container(struct named_container *container);
void clone_named_container(struct named_container *container);
void record_holder(struct named_container *container, const struct namespaces *namespaces);
void read_recorded_image(struct named_container *container);
bool named_container_exists(const char *ending);

/* manage_named.c: listing and removing named containers */
_Noreturn void manage_containers(int own);

/* namespaces.c: namespaces */
int namespace_fd(pid_t pid, const char *kind);
void enter_own_user_namespace(void);
int create_mapped_user_namespace(unsigned inside, unsigned outside_uid, unsigned outside_gid);
int create_rootfs_namespace(const char *root);
int clone_root_of(int mounts);
void join_user_namespace(int user);
#define UNSHARE_REFUSED                                                                                                 \
    "--container-unshare: the kernel refused: %s; check user.max_net_namespaces, user.max_ipc_namespaces and "          \
    "user.max_uts_namespaces"
void wrap_in_user_namespace(unsigned inside_uid, unsigned inside_gid, unsigned outside_uid, unsigned outside_gid,
                            struct namespaces *namespaces);
bool unshare_namespaces(void);
void open_namespaces(pid_t pid, struct namespaces *namespaces);
extern int proc_fd;

void save_root(int user, int mounts);

#endif

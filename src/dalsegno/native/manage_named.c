/* Lists and removes a user's named containers on this node.
 *
 * This runs as root in folders of root, but the user controls the content of the upper folders: names, links and depth.
 * Therefore no link is followed, all files are accessed by descriptor, and there is no recursion: the content of a
 * folder is moved up, then removed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "build.h"

#define REMOVED ".removed." /* prefix of a container that is being removed; no container has such a name */

static int open_folder(int parent, const char *name) {
    return openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static bool is_entry(const struct dirent *entry) {
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

/* Lists a folder through a new descriptor, because closedir() would close the caller's. */
static DIR *entries_of(int folder) {
    int again = open_folder(folder, ".");
    DIR *list = again < 0 ? NULL : fdopendir(again);
    if (!list && again >= 0)
        close(again);
    return list;
}

/* Removal */

/* Gives the user all permissions on a folder, because a folder without them cannot even be moved. Root does not need
 * this, and must not do it: chmod would follow a link that appeared in the meantime. */
static bool make_open(int parent, const char *name) {
    return errno == EACCES && geteuid() != 0 && fchmodat(parent, name, 0700, 0) == 0;
}

/* Removes the files in a folder, and moves the folders in it to the top. */
static void move_up(int top, int parent, const char *name) {
    static unsigned count;
    char fresh[32];
    int folder = open_folder(parent, name);
    if (folder < 0 && make_open(parent, name))
        folder = open_folder(parent, name);
    DIR *list = folder < 0 ? NULL : entries_of(folder);
    for (struct dirent *entry; list && (entry = readdir(list));) {
        if (!is_entry(entry) || unlinkat(folder, entry->d_name, 0) == 0)
            continue;
        snprintf(fresh, sizeof fresh, "%u", count++);
        if (renameat(folder, entry->d_name, top, fresh) != 0 && make_open(folder, entry->d_name))
            renameat(folder, entry->d_name, top, fresh);
    }
    if (list)
        closedir(list);
    if (folder >= 0)
        close(folder);
}

/* Removes the content of a folder; returns false if something could not be removed. */
static bool empty_folder(int top) {
    for (bool progress = true; progress;) {
        DIR *list = entries_of(top);
        bool any = false;
        progress = false;
        for (struct dirent *entry; list && (entry = readdir(list));) {
            if (!is_entry(entry))
                continue;
            any = true;
            if (unlinkat(top, entry->d_name, 0) != 0) {
                move_up(top, top, entry->d_name);
                if (unlinkat(top, entry->d_name, AT_REMOVEDIR) != 0)
                    continue;
            }
            progress = true;
        }
        if (!list)
            return false;
        closedir(list);
        if (!any)
            return true;
    }
    return false;
}

static void remove_renamed(int parent, const char *name) {
    int folder = open_folder(parent, name);
    if (folder < 0)
        return;
    if (!empty_folder(folder) || unlinkat(parent, name, AT_REMOVEDIR) != 0)
        fail("cannot remove %s/%s", request.data, name);
    close(folder);
}

static int lock_of(int folder, const char *name, int how) {
    int lock = openat(folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (lock >= 0 && flock(lock, how | LOCK_NB) != 0) {
        close(lock);
        return -1;
    }
    return lock;
}

/* Locks the container and returns whether it was unused. New steps wait until the locks are closed. */
static bool is_free(int folder, int locks[2]) {
    locks[0] = lock_of(folder, "door", LOCK_EX);
    locks[1] = locks[0] < 0 ? -1 : lock_of(folder, "lock", LOCK_EX);
    return locks[1] >= 0;
}

static void close_locks(const int locks[2]) {
    for (int i = 0; i < 2; i++)
        if (locks[i] >= 0)
            close(locks[i]);
}

static bool remove_one(int parent, const char *name) {
    char renamed[NAME_MAX + 1];
    int locks[2], folder = open_folder(parent, name);
    if (folder < 0)
        return false;
    if (!is_free(folder, locks))
        fail("container %s is in use on this node", name);
    snprintf(renamed, sizeof renamed, REMOVED "%s.%d", name, (int)getpid());
    if (renameat(parent, name, parent, renamed) != 0)
        fail("%s/%s: %s", request.data, name, strerror(errno));
    remove_renamed(parent, renamed);
    close_locks(locks);
    close(folder);
    return true;
}

/* Listing */

static void list_one(FILE *to, int parent, const char *name) {
    struct named_container container = {.folder = open_folder(parent, name)};
    struct stat used = {0};
    int locks[2];
    if (container.folder < 0)
        return;
    read_recorded_image(&container);
    bool busy = !is_free(container.folder, locks);
    close_locks(locks);
    bool built = container.image[0] && fstatat(container.folder, "holders", &used, AT_SYMLINK_NOFOLLOW) == 0;
    char *requested_image = built ? strdup(container.requested_image) : NULL;
    if (requested_image) {
        make_printable(requested_image);
        fprintf(to, "%s\t%d\t%lld\t%s\n", name, busy, (long long)used.st_mtime, requested_image);
    }
    free(requested_image);
    close(container.folder);
}

static void list_all(FILE *to, int folder) {
    struct container_name name;
    char why[WHY_LENGTH];
    DIR *list = entries_of(folder);
    for (struct dirent *entry; list && (entry = readdir(list));)
        if (parse_container_name(entry->d_name, &name, why) == 0 && !strchr(entry->d_name, ':'))
            list_one(to, folder, entry->d_name);
    if (list)
        closedir(list);
}

/* Finishes removals that were interrupted. */
static void finish_removing(int folder) {
    DIR *list = entries_of(folder);
    for (struct dirent *entry; list && (entry = readdir(list));)
        if (strncmp(entry->d_name, REMOVED, strlen(REMOVED)) == 0)
            remove_renamed(folder, entry->d_name);
    if (list)
        closedir(list);
}

static void remove_named(FILE *to, int folder, struct names *wanted) {
    for (size_t i = 0; i < wanted->count; i++)
        if (wanted->list[i] && remove_one(folder, wanted->list[i])) {
            fprintf(to, "%s\n", wanted->list[i]);
            wanted->list[i] = NULL;
        }
    finish_removing(folder);
}

/* Lists or removes containers, and answers with a file that contains the output for the user. */
_Noreturn void manage_containers(int own) {
    struct names wanted = {0};
    char why[WHY_LENGTH];
    int file = memfd_create("answer", MFD_CLOEXEC);
    FILE *to = file < 0 ? NULL : fdopen(dup(file), "w");
    if (!to)
        fail("cannot store the answer: %s", strerror(errno));
    if (request.remove && parse_container_names(request.remove, &wanted, why) != 0)
        fail("--container-remove: %s", why);
    const int folders[] = {request.data_folder, own};
    for (int i = 0; i < 2 && folders[i] >= 0; i++) {
        if (i == 1)
            become_user(); /* containers built with the user's rights belong to the user */
        if (request.remove)
            remove_named(to, folders[i], &wanted);
        else
            list_all(to, folders[i]);
    }
    if (fclose(to) != 0)
        fail("cannot write the answer: %s", strerror(errno));
    send_answer(ANSWER_FD, "said", &file, 1);
    exit(0);
}

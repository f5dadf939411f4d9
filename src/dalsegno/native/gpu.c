/* Mounts the libraries and programs of the node's NVIDIA driver. They must match the version of the kernel module, so
 * images do not contain them. All are mounted in one folder, which follows the image's own folders in LD_LIBRARY_PATH
 * and PATH. The device files are already in /dev. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "build.h"
#include "kernel.h"

static const char *const folders[] = {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
                                      "/usr/local/nvidia/lib64"};
static const char *const libraries[] = {"libcuda.so", "libcudadebugger.so", "libnvidia-", "libnvcuvid.so"};
static const char *const bins[] = {"/usr/local/nvidia/bin", "/usr/bin"};
static const char *const programs[] = {"nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"};

static bool is_library(const char *name) {
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++)
        if (strncmp(name, libraries[i], strlen(libraries[i])) == 0 && strstr(name, ".so"))
            return true;
    return false;
}

/* Mounts a file of the node on a new empty file in `folder`. Returns false if it is missing or the name is taken. */
static bool show(int from, const char *name, int folder) {
    int file = openat(from, name, O_PATH | O_CLOEXEC), tree = file < 0 ? -1 : clone_tree(file);
    int mount_point = tree < 0 ? -1 : openat(folder, name, O_CREAT | O_EXCL | O_RDONLY | O_CLOEXEC, 0644);
    bool shown = mount_point >= 0 && change_tree(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, -1, 0) == 0 &&
                 attach_tree(tree, mount_point) == 0;
    for (int fd = 0; fd < 3; fd++)
        if ((const int[]){file, tree, mount_point}[fd] >= 0)
            close((const int[]){file, tree, mount_point}[fd]);
    return shown;
}

static int show_libraries(int folder) {
    int count = 0;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        DIR *list = opendir(folders[i]);
        for (struct dirent *entry; list && (entry = readdir(list));)
            count += is_library(entry->d_name) && show(dirfd(list), entry->d_name, folder);
        if (list)
            closedir(list);
    }
    return count;
}

static void show_programs(int folder) {
    for (size_t i = 0; i < sizeof bins / sizeof *bins; i++) {
        int bin = open(bins[i], O_PATH | O_DIRECTORY | O_CLOEXEC);
        for (size_t j = 0; bin >= 0 && j < sizeof programs / sizeof *programs; j++)
            show(bin, programs[j], folder); /* the first program with a name wins */
        if (bin >= 0)
            close(bin);
    }
}

/* Returns the folder with the driver's files as a mount tree to attach; -1 if there is no driver. */
int gpu_tree(const char *scratch) {
    char path[PATH_MAX];
    if (access("/dev/nvidiactl", F_OK) != 0)
        return -1;
    snprintf(path, sizeof path, "%s/gpu", scratch);
    mkdir(path, 0755);
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), count = show_libraries(folder);
    show_programs(folder);
    int tree = count > 0 ? clone_tree(folder) : -1;
    close(folder);
    return tree;
}

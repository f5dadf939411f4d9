/* Fuzzes the option parser with random words: `fuzz SECONDS SEED`, with gcc's sanitizers. With clang, -fsanitize=fuzzer
 * -DWITHOUT_MAIN uses the same entry point, guided by coverage. The test suite runs both. */
#define _GNU_SOURCE
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "options.h"

static void try_mounts(const char *text) {
    struct mounts mounts;
    char why[WHY_LENGTH] = "";
    int rc = parse_mounts(text, &mounts, why);
    assert(mounts.count <= MOUNTS_MAX && (rc == 0 || *why));
    for (size_t i = 0; i < mounts.count; i++)
        assert(strchr("/.", mounts.list[i].to[0]) && !strchr(mounts.list[i].to, ':') &&
               (mounts.list[i].kind != MOUNT_BIND || strchr("/.", mounts.list[i].from[0])) &&
               memchr(mounts.list[i].options, 0, sizeof mounts.list[i].options) && !strchr(mounts.list[i].options, '/'));
    mounts_free(&mounts);
}

static void try_names(const char *text) {
    struct names names;
    struct container_name name;
    char why[WHY_LENGTH] = "";
    int rc = parse_names(text, &names, why);
    assert(names.count <= NAMES_MAX && (rc == 0 || *why));
    for (size_t i = 0; i < names.count; i++)
        assert(names_hold(&names, names.list[i], strlen(names.list[i])) && !strpbrk(names.list[i], "=, /"));
    assert(!names_hold(&names, "=", 1));
    names_free(&names);
    if (parse_container_name(text, &name, why) == 0)
        assert(*name.name && strlen(name.name) <= NAME_LENGTH_MAX && !strchr(name.name, '/') && name.name[0] != '.');
}

static void try_unshare(const char *text) {
    bool wanted[NAMESPACE_KINDS];
    char why[WHY_LENGTH] = "";
    bool some = parse_unshare(text, wanted, why) == 0;
    assert(some ? wanted[NAMESPACE_NET] || wanted[NAMESPACE_IPC] || wanted[NAMESPACE_UTS] : *why);
}

static void try_image_files(const char *text) {
    char *copy = strdup(text), *value = NULL;
    size_t length = parse_environment(copy, &value);
    assert(length == 0 || (length < strlen(text) && value > copy && text[length] == '='));
    free(copy);
    copy = strdup(text);
    value = parse_rc_workdir(copy);
    assert(!value || *value == '/');
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = calloc(size + 1, 1), why[WHY_LENGTH] = "";
    if (size)
        memcpy(text, data, size);
    for (int option = 0; option < OPTION_COUNT; option++)
        assert(check_option((enum option)option, text, why) == 0 || memchr(why, 0, sizeof why));
    try_mounts(text);
    try_names(text);
    try_unshare(text);
    try_image_files(text);
    free(text);
    return 0;
}

#ifndef WITHOUT_MAIN
static size_t make_words(char *text, size_t size) {
    static const char *const pieces[] = {"/",   ":",  ",",  "+",    "ro",   "/a",     "../", "NAME", "=", "tmpfs:", "umount:", "size=", "rslave", "net", "ipc,", "uts",    "\"", "'",
                                         "cd ", "\n", "&&", "auto", "exec", "create", "./x", "_",    "\xff", " ",  "#"};
    size_t used = 0, count = (size_t)rand() % (rand() % 50 ? 24 : 400);
    for (size_t i = 0; i < count && used + 8 < size; i++) {
        if (rand() % 4 == 0)
            text[used++] = (char)(rand() % 256);
        else
            used += (size_t)snprintf(text + used, 8, "%s", pieces[(size_t)rand() % (sizeof pieces / sizeof *pieces)]);
    }
    return used;
}

int main(int argc, char *argv[]) {
    char text[4096];
    long runs = 0;
    time_t until = time(NULL) + (argc > 1 ? atoi(argv[1]) : 2);
    srand(argc > 2 ? (unsigned)atoi(argv[2]) : 1);
    do {
        for (int i = 0; i < 1000; i++, runs++)
            LLVMFuzzerTestOneInput((const uint8_t *)text, make_words(text, sizeof text));
    } while (time(NULL) < until);
    printf("%ld\n", runs);
    return 0;
}
#endif

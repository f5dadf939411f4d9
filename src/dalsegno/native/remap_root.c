/* --container-remap-root: the user is root in a user namespace that has no other user. Package managers and tar change
 * the owners of files and switch to other users. The kernel refuses these calls, because the namespace does not have
 * those users. So, as in Enroot, a seccomp filter makes the calls do nothing and succeed. The filter is written by hand
 * to avoid a dependency on libseccomp. */
#define _GNU_SOURCE
#include "remap_root.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define OUR_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define OUR_ARCH AUDIT_ARCH_AARCH64
#endif

#ifdef OUR_ARCH

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(what) BPF_STMT(BPF_RET | BPF_K, what)
#define SUCCEED(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), RETURN(SECCOMP_RET_ERRNO | 0)

void ignore_owner_changes(void) {
    static struct sock_filter filter[] = {
        LOAD(arch), /* call numbers differ for other architectures, such as 32-bit programs */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OUR_ARCH, 1, 0),
        RETURN(SECCOMP_RET_ALLOW),
        LOAD(nr),
#ifdef SYS_chown
        SUCCEED(chown),
        SUCCEED(lchown),
#endif
        SUCCEED(fchown),
        SUCCEED(fchownat),
        SUCCEED(setuid),
        SUCCEED(setgid),
        SUCCEED(setreuid),
        SUCCEED(setregid),
        SUCCEED(setresuid),
        SUCCEED(setresgid),
        SUCCEED(setfsuid),
        SUCCEED(setfsgid),
        SUCCEED(setgroups),
        RETURN(SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    /* A set-user-ID program must not mistake an ignored change of user for a real one. */
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program); /* without seccomp, the kernel refuses the calls */
}

#else

void ignore_owner_changes(void) {}

#endif

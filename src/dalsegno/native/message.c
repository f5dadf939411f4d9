#define _GNU_SOURCE
#include "message.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

bool send_message(int to, const char *text, const int *fds, int count) {
    _Alignas(struct cmsghdr) char space[CMSG_SPACE(sizeof(int) * DESCRIPTORS_MAX)] = {0};
    struct iovec part = {.iov_base = (void *)text, .iov_len = strlen(text) + 1}; /* an empty string is one zero byte */
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > DESCRIPTORS_MAX)
        return false;
    if (count > 0) {
        message.msg_control = space;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(rights), fds, sizeof(int) * (size_t)count);
    }
    return sendmsg(to, &message, MSG_NOSIGNAL) >= 0;
}

bool send_now(int to, const char *text) { return send(to, text, strlen(text) + 1, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0; }

/* Copies the received descriptors to `fds`, closes any beyond `count`, and returns the number copied. */
static int take_descriptors(struct msghdr *message, int *fds, int count) {
    struct cmsghdr *rights = CMSG_FIRSTHDR(message);
    if (!rights || rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS)
        return 0;
    int received[CMSG_SPACE(sizeof(int) * DESCRIPTORS_MAX) / sizeof(int)]; /* the space is rounded up, so one more may arrive */
    int sent = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(received, CMSG_DATA(rights), sizeof(int) * (size_t)sent);
    for (int i = 0; i < sent; i++) {
        if (i < count)
            fds[i] = received[i];
        else
            close(received[i]);
    }
    return sent < count ? sent : count;
}

int receive_message(int from, char *text, size_t size, int *fds, int count) {
    _Alignas(struct cmsghdr) char space[CMSG_SPACE(sizeof(int) * DESCRIPTORS_MAX)];
    struct iovec part = {.iov_base = text, .iov_len = size - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t got;
    /* ECONNRESET: the peer ended without reading all messages. The messages that it sent come next. */
    while ((got = recvmsg(from, &message, MSG_CMSG_CLOEXEC)) < 0 && (errno == EINTR || errno == ECONNRESET))
        ;
    if (got <= 0)
        return -1;
    text[got] = '\0';
    return take_descriptors(&message, fds, count);
}

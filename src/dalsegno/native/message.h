/* Messages of text and descriptors, on a SOCK_SEQPACKET socket. */
#ifndef DALSEGNO_MESSAGE_H
#define DALSEGNO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>

enum { DESCRIPTORS_MAX = 9 };

bool send_message(int to, const char *text, const int *fds, int count);
bool send_now(int to, const char *text); /* fails if the peer reads too slowly */
int receive_message(int from, char *text, size_t size, int *fds, int count); /* returns the number of fds; -1 if closed */

#endif

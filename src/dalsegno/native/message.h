/* A line of text with descriptors beside it, on a socket that keeps messages apart (SOCK_SEQPACKET). */
#ifndef DALSEGNO_MESSAGE_H
#define DALSEGNO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>

enum { DESCRIPTORS_MAX = 9 };

bool send_message(int to, const char *text, const int *fds, int count);
bool send_now(int to, const char *text); /* or not at all, if the other side reads too slowly */
int receive_message(int from, char *text, size_t size, int *fds, int count); /* how many descriptors; -1: nobody is there */

#endif

/* A task enters its container. */
#ifndef DALSEGNO_ENTER_H
#define DALSEGNO_ENTER_H

#include "start.h"

/* What a task that cannot enter ends with, as docker and podman do: Dal Segno's controller blames no node for it. */
enum { NO_CONTAINER = 125 };

void enter_container(spank_t spank, char *const given[], const struct container *container);

#endif

/* How a task enters its container. */
#ifndef DALSEGNO_ENTER_H
#define DALSEGNO_ENTER_H

#include "start.h"

/* The exit code of a task that cannot enter its container, as in docker and podman. The controller does not blame the
 * node for it. */
enum { NO_CONTAINER = 125 };

void enter_container(spank_t spank, char *const given[], const struct container *container);

#endif

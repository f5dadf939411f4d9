/* A task enters its container. */
#ifndef DALSEGNO_ENTER_H
#define DALSEGNO_ENTER_H

#include "start.h"

void enter_container(spank_t spank, char *const given[], const struct container *container);

#endif

/* Lets tasks wait for a container that is not ready yet. */
#ifndef DALSEGNO_WAIT_HELPER_H
#define DALSEGNO_WAIT_HELPER_H

#include "start.h"

bool start_wait_thread(spank_t spank, struct helper helper, struct container *container);
void wait_for_container(spank_t spank, const char *image, struct container *container);
void stop_waiting(void);

#endif

/* --container-save, in slurmstepd and its tasks. */
#ifndef DALSEGNO_WAIT_SAVE_H
#define DALSEGNO_WAIT_SAVE_H

#include "start.h"

bool check_save_path(const char *path, char why[WHY_LENGTH]);
void start_save_thread(spank_t spank, const struct site *site, const char *path, const struct container *container);
void wait_for_save(spank_t spank);
void finish_save(void);

#endif

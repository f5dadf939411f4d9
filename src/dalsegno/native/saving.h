/* --container-save, in slurmstepd and its tasks. */
#ifndef DALSEGNO_SAVING_H
#define DALSEGNO_SAVING_H

#include "start.h"

bool may_be_saved(const char *path, char why[WHY_LENGTH]);
void expect_save(spank_t spank, const struct site *site, const char *path, const struct container *container);
void wait_for_save(spank_t spank);
void end_saving(void);

#endif

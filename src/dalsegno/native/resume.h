/* --auto-resume=1, in srun: a program that runs srun, and runs it again after a node failure, takes srun's place. */
#ifndef DALSEGNO_RESUME_H
#define DALSEGNO_RESUME_H

#include <slurm/spank.h>
#include <stdbool.h>

/* Whether this srun was started by that program: then it is told of the step, and takes nobody's place again. */
bool is_resumed(void);

/* Comes back only where it cannot be done; srun then goes on as without the option. */
void hand_over(const char *program);

/* Job, step and nodes, in a line for that program. */
void tell_step(spank_t spank);

#endif

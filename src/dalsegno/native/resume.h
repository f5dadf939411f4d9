/* --auto-resume=1, in srun: srun is replaced by a program that runs srun, and runs it again after a node failure. */
#ifndef DALSEGNO_RESUME_H
#define DALSEGNO_RESUME_H

#include <slurm/spank.h>
#include <stdbool.h>

/* Whether this srun was started by that program. Then it reports its step, and is not replaced again. */
bool is_resumed(void);

/* Returns only on failure; srun then continues without the option. */
void exec_resume_program(const char *program);

/* Reports job, step and nodes to that program, in one line. */
void report_step(spank_t spank);

#endif

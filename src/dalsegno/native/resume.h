/* --auto-resume=1, in srun: srun is replaced by a program that runs srun, and runs it again after a node failure. */
#ifndef DALSEGNO_RESUME_H
#define DALSEGNO_RESUME_H

#include <slurm/spank.h>
#include <stdbool.h>

/* Returns whether the resume program started this srun. Then srun reports its step, and is not replaced again. */
bool is_resumed(void);

/* Replaces srun with the resume program. Returns only on failure; srun then continues without the option. */
void exec_resume_program(const char *program);

/* Reports job, step and nodes to the resume program, in one line. */
void report_step(spank_t spank);

#endif

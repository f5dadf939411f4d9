/* Makes changes of owners and users succeed without effect, in a user namespace with one user. */
#ifndef DALSEGNO_REMAP_ROOT_H
#define DALSEGNO_REMAP_ROOT_H

void ignore_owner_changes(void);

#endif

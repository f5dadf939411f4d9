/* Pretended changes of owners and users in a user namespace with one user. */
#ifndef DALSEGNO_OWNERS_H
#define DALSEGNO_OWNERS_H

void accept_all_owners(void);

#endif

/* Attention over groups: to be written. */
#include "layer.h"
void KVC_NAME(attend_groups, KVC_LEVEL)(const Call *c, const Part *p, Unit u, const Queries q, int64_t a, int64_t b, State *s) { (void)c, (void)p, (void)u, (void)q, (void)a, (void)b, (void)s; }

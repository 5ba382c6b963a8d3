/* Attention over rows: to be written. */
#include "layer.h"
void KVC_NAME(attend_rows, KVC_LEVEL)(const Call *c, const Part *p, Unit u, const Queries q, int64_t a, int64_t b, State *s) { (void)c, (void)p, (void)u, (void)q, (void)a, (void)b, (void)s; }
void KVC_NAME(attend_basis_rows, KVC_LEVEL)(const Call *c, const Part *p, Unit u, const Queries q, int64_t a, int64_t b, State *s) { (void)c, (void)p, (void)u, (void)q, (void)a, (void)b, (void)s; }

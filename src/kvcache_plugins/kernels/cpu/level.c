/* The highest level of instructions that both the processor and the library have, and the checksum
   of the sources: see `build.py`. */
#include "simd.h"

#if defined(KVC_IS_PLAIN) || defined(KVC_IS_NEON)
KVC_VISIBLE const char *kvc_level(void);
KVC_VISIBLE uint32_t kvc_sources(void);

KVC_VISIBLE uint32_t kvc_sources(void) { return KVC_SOURCES; }

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>

static int has_all(unsigned word, unsigned bits) { return (word & bits) == bits; }

/* Asks the processor itself: `__builtin_cpu_supports` denies everything in programs of zig 0.17. */
static const char *x86_level(void) {
    unsigned a, b, c, d, state, high;
    const unsigned saves = 1u << 27, avx = 1u << 28, f16c = 1u << 29, fma = 1u << 12;
    const unsigned avx2 = 1u << 5, f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    const unsigned vbmi = 1u << 1, vnni = 1u << 11;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_all(c, saves | avx | f16c | fma)) return "plain";
    /* Ask which parts of wide registers the system saves when it switches threads. */
    __asm__ volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    if (!has_all(state, 0x06) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return "plain";
    if (!has_all(b, avx2)) return "plain";
    if (!has_all(state, 0xe6) || !has_all(b, f | dq | bw | vl)) return "avx2";
    return has_all(c, vbmi | vnni) ? "avx512" : "avx2";
}
#endif

KVC_VISIBLE const char *kvc_level(void) {
#if defined(KVC_IS_NEON)
    return "neon";
#elif defined(__x86_64__) || defined(_M_X64)
    return x86_level();
#else
    return "plain";
#endif
}
#endif

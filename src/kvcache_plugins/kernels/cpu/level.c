/* The highest level of instructions that the processor has and the library was compiled for, and the checksum of the
   sources (see `build.py`). */
#include "simd.h"

#if defined(KVC_IS_PLAIN) || defined(KVC_IS_NEON)
KVC_VISIBLE const char *kvc_level(void);
KVC_VISIBLE uint32_t kvc_sources(void);
KVC_VISIBLE uint32_t kvc_sources(void) { return KVC_SOURCES; }
KVC_VISIBLE const char *kvc_level(void) {
#if defined(KVC_IS_NEON)
    return "neon";
#elif defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni"))
        return "avx512";
    return has_avx2 ? "avx2" : "plain";
#else
    return "plain";
#endif
}
#endif

/* Vectors of L numbers in the compiler's own types (GCC, Clang): what differs between machines is the look-up of a
   number in registers, conversions of halves, and little else. A level without intrinsics is the reference of all. */
#pragma once
#include <math.h>
#include <string.h>
#include "calls.h"
#if defined(KVC_IS_AVX512)
#include <immintrin.h>
#define L 16
#elif defined(KVC_IS_AVX2)
#include <immintrin.h>
#define L 8
#elif defined(KVC_IS_NEON)
#include <arm_neon.h>
#define L 4
#else
#define L 4
#endif
#define KVC_JOIN(name, level) kvc_##name##_##level
#define KVC_NAME(name, level) KVC_JOIN(name, level)
#ifdef _WIN32
#define KVC_VISIBLE __declspec(dllexport)
#else
#define KVC_VISIBLE __attribute__((visibility("default")))
#endif
/* `EXPORT(attend)(...)` defines what `library.function("attend")` finds */
#define EXPORT(name) KVC_VISIBLE void KVC_NAME(name, KVC_LEVEL)
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))

typedef float vf __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vu load_u(const uint32_t *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void store_u(uint32_t *p, vu v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }
INLINE vf choose(vi where, vf yes, vf no) { return (vf)(((vi)yes & where) | ((vi)no & ~where)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

/* Entries of a table of 16 numbers (64-byte aligned) by the lowest 4 bits of each lane */
INLINE vf look_up16(const float *table, vu at) {
#if defined(KVC_IS_AVX512)
    return (vf)_mm512_permutexvar_ps((__m512i)at, _mm512_load_ps(table));
#elif defined(KVC_IS_AVX2)
    __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)at);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), (__m256i)at);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(at << 28));
#elif defined(KVC_IS_NEON)
    uint8x16x4_t t = vld1q_u8_x4((const uint8_t *)table);
    return (vf)vqtbl4q_u8(t, (uint8x16_t)((at & 15) * 0x04040404u + 0x03020100u));
#else
    vf v;
    for (int i = 0; i < L; i++) v[i] = table[at[i] & 15];
    return v;
#endif
}

INLINE float sum_of(vf v) {
#if defined(KVC_IS_AVX512)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(KVC_IS_AVX2)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float s = 0;
    for (int i = 0; i < L; i++) s += v[i];
    return s;
#endif
}
INLINE float largest_of(vf v) {
#if defined(KVC_IS_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(KVC_IS_AVX2)
    __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float s = v[0];
    for (int i = 1; i < L; i++) s = s > v[i] ? s : v[i];
    return s;
#endif
}
/* exp(x) of x <= 0, relative error about 1e-7; 0 below -87 and for -inf */
INLINE vf exp_of(vf x) {
    const vf magic = splat(12582912.0f);
    vi seen = x > splat(-87.0f);
    vf n = x * splat(1.44269504f) + magic;
    vi e = (vi)n << 23;
    n -= magic;
    vf f = x - n * splat(0.693359375f);
    f = f + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691e-4f);
    p = p * f + splat(1.3981999e-3f);
    p = p * f + splat(8.3334519e-3f);
    p = p * f + splat(4.1665795e-2f);
    p = p * f + splat(1.6666665e-1f);
    p = p * f + splat(5.0000001e-1f);
    p = p * f * f + f + splat(1.0f);
    return (vf)(((vi)p + e) & seen);
}

INLINE float float_of_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t bits_of_float(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float float_of_bfloat(uint16_t h) { return float_of_bits((uint32_t)h << 16); }
/* To the nearest, ties to even; NaN stays NaN */
INLINE uint16_t bfloat_of(float f) {
    uint32_t u = bits_of_float(f);
    if (f != f) return 0x7fc0;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* All halves, subnormal, infinite and NaN ones too */
INLINE float float_of_half(uint16_t h) {
#if defined(KVC_IS_AVX512) || defined(KVC_IS_AVX2)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float f = float_of_bits(rest) * 5.192296858534828e33f; /* 2^112 */
    if (f >= 65536.0f) return float_of_bits(sign | 0x7f800000 | (rest & 0x7fffff));
    return float_of_bits(sign | bits_of_float(f));
#endif
}
/* To the nearest, ties to even, subnormal ones too; what is too large is infinite, NaN stays NaN */
INLINE uint16_t half_of(float f) {
#if defined(KVC_IS_AVX512) || defined(KVC_IS_AVX2)
    return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t u = bits_of_float(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    /* Below 2^-14 the addition rounds: 0.5 is where a float's last bit is worth a half's */
    if (rest < 0x38800000) return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
#endif
}
/* L numbers stored as `kind`, as float32 */
INLINE size_t size_of_kind(int kind) { return kind == FLOATS ? 4 : 2; }
INLINE vf load_numbers(const void *base, int kind, int64_t at) {
    if (kind == FLOATS) return load((const float *)base + at);
    const uint16_t *p = (const uint16_t *)base + at;
#if defined(KVC_IS_AVX2)
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    if (kind == HALVES) return (vf)_mm256_cvtph_ps(h);
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#elif defined(KVC_IS_AVX512)
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    if (kind == HALVES) return (vf)_mm512_cvtph_ps(h);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    vf v;
    for (int i = 0; i < L; i++) v[i] = kind == HALVES ? float_of_half(p[i]) : float_of_bfloat(p[i]);
    return v;
#endif
}
INLINE float number_at(const void *base, int kind, int64_t at) {
    if (kind == FLOATS) return ((const float *)base)[at];
    uint16_t h = ((const uint16_t *)base)[at];
    return kind == HALVES ? float_of_half(h) : float_of_bfloat(h);
}
INLINE void store_number(void *base, int kind, int64_t at, float x) {
    if (kind == FLOATS) ((float *)base)[at] = x;
    else ((uint16_t *)base)[at] = kind == HALVES ? half_of(x) : bfloat_of(x);
}
/* `dim` numbers from `at` on, as float32, and zeros up to `padded` */
INLINE void read_numbers(const void *base, int kind, int64_t at, int dim, int padded, float *to) {
    int d = 0;
    for (; d + L <= dim; d += L) store(to + d, load_numbers(base, kind, at + d));
    for (; d < dim; d++) to[d] = number_at(base, kind, at + d);
    for (; d < padded; d++) to[d] = 0;
}
/* Whoever takes a task sees what had been written before those before it were taken */
INLINE int64_t take_task(Tasks *tasks) { return __atomic_fetch_add(&tasks->next, 1, __ATOMIC_ACQ_REL); }
INLINE int ends_last(Tasks *tasks) { return __atomic_add_fetch(&tasks->ended, 1, __ATOMIC_ACQ_REL) == tasks->count; }
#define FOR_TASKS(call, task) \
    for (int64_t task = take_task(&(call)->tasks); task < (call)->tasks.count; task = take_task(&(call)->tasks))

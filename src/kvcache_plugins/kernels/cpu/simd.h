/* Vectors of L numbers in the compiler's own types (GCC, Clang), and tasks that threads share.

   Levels of instructions differ in the look-up of a number in registers, in conversions of halves,
   and in little else. The level without intrinsics is the reference of all. A source that defines
   KVC_MAX_256_BITS first has vectors of at most 256 bits. L of 16 means that there are AVX-512
   instructions, L of 8 that there are those of AVX2. */
#pragma once
#include <math.h>
#include <string.h>
#include "abi.h"

#if defined(KVC_IS_AVX512) && !defined(KVC_MAX_256_BITS)
#include <immintrin.h>
#define L 16
#elif defined(KVC_IS_AVX512) || defined(KVC_IS_AVX2)
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
/* `EXPORT(attend)(...)` defines the kernel that `library.function("attend")` finds. */
#define EXPORT(name) KVC_VISIBLE void KVC_NAME(name, KVC_LEVEL)
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))

typedef float vf __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vu load_u(const uint32_t *p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE void store_u(uint32_t *p, vu v) { memcpy(p, &v, sizeof v); }

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }

INLINE vf blend(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

INLINE vf larger(vf a, vf b) { return blend(a > b, a, b); }

/* Entries of a table of 16 numbers (64-byte aligned), by the lowest 4 bits of each lane. */
INLINE vf look_up16(const float *table, vu index) {
#if L == 16
    return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(table));
#elif L == 8
    __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), (__m256i)index);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), (__m256i)index);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#elif defined(KVC_IS_NEON)
    uint8x16x4_t bytes = vld1q_u8_x4((const uint8_t *)table);
    return (vf)vqtbl4q_u8(bytes, (uint8x16_t)((index & 15) * 0x04040404u + 0x03020100u));
#else
    vf v;
    for (int i = 0; i < L; i++) v[i] = table[index[i] & 15];
    return v;
#endif
}

INLINE float sum_of(vf v) {
#if L == 16
    return _mm512_reduce_add_ps((__m512)v);
#elif L == 8
    __m128 low = _mm256_castps256_ps128((__m256)v);
    __m128 four = _mm_add_ps(low, _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float sum = 0;
    for (int i = 0; i < L; i++) sum += v[i];
    return sum;
#endif
}

INLINE float largest_of(vf v) {
#if L == 16
    return _mm512_reduce_max_ps((__m512)v);
#elif L == 8
    __m128 low = _mm256_castps256_ps128((__m256)v);
    __m128 four = _mm_max_ps(low, _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float largest = v[0];
    for (int i = 1; i < L; i++) largest = largest > v[i] ? largest : v[i];
    return largest;
#endif
}

/* 1.5 * 2^23: added to a float of at most 2^22, it leaves the nearest integer in the lowest bits,
   and subtracted again as the float. */
#define ROUNDING 12582912.0f

/* exp(x) of x <= 0, relative error about 1e-7; 0 below -87 and for -inf. */
INLINE vf exp_of(vf x) {
    const vf rounding = splat(ROUNDING);
    vi is_in_range = x > splat(-87.0f);
    vf n = x * splat(1.44269504f) + rounding;
    vi exponent = (vi)n << 23;
    n -= rounding;
    vf f = x - n * splat(0.693359375f);
    f = f + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691e-4f);
    p = p * f + splat(1.3981999e-3f);
    p = p * f + splat(8.3334519e-3f);
    p = p * f + splat(4.1665795e-2f);
    p = p * f + splat(1.6666665e-1f);
    p = p * f + splat(5.0000001e-1f);
    p = p * f * f + f + splat(1.0f);
    return (vf)(((vi)p + exponent) & is_in_range);
}

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float float_of_bfloat(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

/* The nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t bfloat_of_float(float x) {
    uint32_t bits = bits_of_float(x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The value of any half: subnormal, infinite and NaN, too. */
INLINE float float_of_half(uint16_t h) {
#if L == 16 || L == 8
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t rest = (uint32_t)(h & 0x7fff) << 13;
    float x = float_of_bits(rest) * 5.192296858534828e33f; /* 2^112 */
    if (x >= 65536.0f) return float_of_bits(sign | 0x7f800000 | (rest & 0x7fffff));
    return float_of_bits(sign | bits_of_float(x));
#endif
}

/* The nearest half, ties to even, subnormal ones too; infinite beyond 65504, NaN stays NaN. */
INLINE uint16_t half_of_float(float x) {
#if L == 16 || L == 8
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits = bits_of_float(x);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    /* Below 2^-14 the addition rounds: the last bit of a float near 0.5 is worth a half's. */
    if (rest < 0x38800000)
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
#endif
}

INLINE size_t size_of_dtype(int dtype) { return dtype == F32 ? 4 : 2; }

/* L numbers of a stored dtype from `index` on, as float32. */
INLINE vf load_floats(const void *base, int dtype, int64_t index) {
    if (dtype == F32) return load((const float *)base + index);
    const uint16_t *p = (const uint16_t *)base + index;
#if L == 8
    __m128i h = _mm_loadu_si128((const __m128i *)p);
    if (dtype == F16) return (vf)_mm256_cvtph_ps(h);
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
#elif L == 16
    __m256i h = _mm256_loadu_si256((const __m256i *)p);
    if (dtype == F16) return (vf)_mm512_cvtph_ps(h);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    vf v;
    for (int i = 0; i < L; i++) v[i] = dtype == F16 ? float_of_half(p[i]) : float_of_bfloat(p[i]);
    return v;
#endif
}

INLINE float float_at(const void *base, int dtype, int64_t index) {
    if (dtype == F32) return ((const float *)base)[index];
    uint16_t h = ((const uint16_t *)base)[index];
    return dtype == F16 ? float_of_half(h) : float_of_bfloat(h);
}

INLINE void store_float(void *base, int dtype, int64_t index, float x) {
    if (dtype == F32)
        ((float *)base)[index] = x;
    else
        ((uint16_t *)base)[index] = dtype == F16 ? half_of_float(x) : bfloat_of_float(x);
}

/* Copies `count` numbers from `index` on as float32, with zeros behind them up to `size`. */
INLINE void read_floats(
    const void *base, int dtype, int64_t index, int count, int size, float *result) {
    int i = 0;
    for (; i + L <= count; i += L) store(result + i, load_floats(base, dtype, index + i));
    for (; i < count; i++) result[i] = float_at(base, dtype, index + i);
    for (; i < size; i++) result[i] = 0;
}

/* Takes a task. The thread that takes it sees everything written before earlier ones were taken. */
INLINE int64_t take_task(Tasks *tasks) {
    return __atomic_fetch_add(&tasks->next, 1, __ATOMIC_ACQ_REL);
}

/* Counts a task as done; returns true to the thread that does the last one. */
INLINE int ends_last(Tasks *tasks) {
    return __atomic_add_fetch(&tasks->ended, 1, __ATOMIC_ACQ_REL) == tasks->count;
}

#define FOR_TASKS(args, task) \
    for (int64_t task = take_task(&(args)->tasks); task < (args)->tasks.count; \
         task = take_task(&(args)->tasks))

/* Products of codes in integers, with queries, for scores of tokens.

   Codes are small integers, and so queries are made integers for them, of 16 bits: machines multiply such numbers and
   add neighbours in one instruction, which takes half the time that floats take. Rounding a query changes its scores by
   some 1e-5 of their size, codes of 8 bits by 100 times that.

   D channels, P bytes of a token, F fields of a byte: channel f P + j is in field f, lowest first, of byte j. WORDS bytes
   are unpacked at once; the last of a token's may not reach beyond it and so repeat some, for which queries are 0. */
#pragma once
/* With AVX-512, too, vectors of 256 bits: the codes of a head are often 8 or 16 bytes */
#if defined(KVC_IS_AVX512)
#undef KVC_IS_AVX512
#define KVC_IS_AVX2 1
#define KVC_HAS_VNNI 1
#endif
#include "scattered.h"

enum { WORDS = 2 * L, MOST_WORDS = MOST_CHANNELS + 8 + 5 * WORDS };
typedef int16_t vw __attribute__((vector_size(4 * L)));
typedef int16_t vh __attribute__((vector_size(2 * L)));
typedef int32_t i4 __attribute__((vector_size(16)));

typedef struct {
    int dim, width, fields, row;    /* D, P, F, and bytes from token to token */
    ALIGNED int16_t words[ROWS][MOST_WORDS]; /* WORDS for every field of every WORDS bytes */
    float factor[ROWS];             /* by that a product has to be multiplied */
    float base[ROWS];               /* and that be added, for codes to count from half of the largest on */
} Integers;

/* Adds the products of words to sums, two neighbours each */
INLINE vi add_products_of_words(vi sums, vw a, vw b) {
#if defined(KVC_HAS_VNNI)
    return (vi)_mm256_dpwssd_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif defined(KVC_IS_AVX2)
    return sums + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(KVC_IS_NEON)
    return sums + (vi)vpaddq_s32(vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b)), vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
    for (int i = 0; i < L; i++) sums[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
}
INLINE vw bytes_as_words(const uint8_t *p) {
#if defined(KVC_IS_AVX2)
    return (vw)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
#elif defined(KVC_IS_NEON)
    return (vw)vmovl_u8(vld1_u8(p));
#else
    vw v;
    for (int i = 0; i < WORDS; i++) v[i] = p[i];
    return v;
#endif
}
INLINE i4 int_sums_of_four(vi a, vi b, vi c, vi d) {
#if defined(KVC_IS_AVX2)
    __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32((__m256i)a, (__m256i)b), _mm256_hadd_epi32((__m256i)c, (__m256i)d));
    return (i4)_mm256_castsi256_si128(s) + (i4)_mm256_extracti128_si256(s, 1);
#elif defined(KVC_IS_NEON)
    return (i4)vpaddq_s32(vpaddq_s32((int32x4_t)a, (int32x4_t)b), vpaddq_s32((int32x4_t)c, (int32x4_t)d));
#else
    i4 v = {0};
    for (int i = 0; i < L; i++) v += (i4){a[i], b[i], c[i], d[i]};
    return v;
#endif
}

/* Rounds queries [ROWS][D], zeros behind D up to a whole vector */
static void round_queries(Integers *to, int rows, const float (*query)[MOST_CHANNELS]) {
    int top = (1 << 8 / to->fields) - 1, size = padded(to->dim);
    /* Of codes in 8 bits some 256 are as many as 32 bits hold the sum of */
    int most = (int)(2147483647LL / ((int64_t)top * to->dim));
    float largest = (float)(most < 32767 ? most : 32767);
    for (int r = 0; r < rows; r++) {
        ALIGNED int16_t in_order[MOST_WORDS];
        vf high = {0}, nothing = {0}, magic = splat(12582912.0f);
        for (int d = 0; d < size; d += L) {
            vf q = load(query[r] + d);
            high = larger(larger(q, -q), high), nothing += q * 0;
        }
        /* Of NaN and of what is infinite every product is NaN */
        float most_of = largest_of(high) + sum_of(nothing);
        /* What is below that counts as nothing: one could not divide by it */
        float step = most_of > 1e-30f ? largest / most_of : 0;
        vi total = {0};
        for (int d = 0; d < size; d += L) {
            /* The nearest integer is in the lowest bits of the sum; NaN may be any of 16 bits */
            vi rounded = (vi)(load(query[r] + d) * step + magic) - (vi)magic;
            total += rounded;
            vh words = __builtin_convertvector(rounded, vh);
            memcpy(in_order + d, &words, sizeof words);
        }
        memset(in_order + size, 0, 2 * (size_t)(MOST_WORDS - size < WORDS + 8 ? MOST_WORDS - size : WORDS + 8));
        int64_t sum = 0;
        for (int i = 0; i < L; i++) sum += total[i];
        to->factor[r] = most_of / largest;
        to->base[r] = -to->factor[r] * (float)sum * (float)top / 2;
        int16_t *words = to->words[r];
        for (int offset = 0; offset < to->width; offset += WORDS) {
            int last = to->width - WORDS < 0 ? 0 : to->width - WORDS, first = offset < last ? offset : last;
            for (int field = 0; field < to->fields; field++, words += WORDS) {
                memcpy(words, in_order + field * to->width + first, 2 * WORDS);
                memset(words, 0, 2 * (size_t)(offset - first));
            }
        }
    }
}
/* Products of `rows` integer queries with the codes of up to TILE tokens that follow each other, [ROWS][TILE] */
INLINE void multiply_codes(
    const Integers *by, int fields, int rows, const uint8_t *codes, int tokens, float (*products)[TILE]) {
    int width = by->width, bits = 8 / fields, count = rows < 4 ? 4 : 2;
    vw mask = (vw){0} + (int16_t)((1 << bits) - 1);
    for (int t = 0; t < tokens; t += count) {
        const uint8_t *own[4];
        vi sums[4][ROWS] = {{{0}}};
        ALIGNED uint8_t few[4][WORDS] = {{0}};
        for (int i = 0; i < count; i++) {
            own[i] = codes + (int64_t)(t + i < tokens ? t + i : tokens - 1) * by->row;
            if (width < WORDS) own[i] = memcpy(few[i], own[i], (size_t)width);
        }
        for (int offset = 0, place = 0; offset < width; offset += WORDS) {
            int last = width - WORDS < 0 ? 0 : width - WORDS, first = offset < last ? offset : last;
            vw packed[4];
            for (int i = 0; i < count; i++) packed[i] = bytes_as_words(own[i] + first);
            for (int field = 0; field < fields; field++, place += WORDS)
                for (int i = 0; i < count; i++) {
                    vw code = packed[i] >> (int16_t)(bits * field);
                    if (field < fields - 1) code &= mask;
                    for (int r = 0; r < rows; r++) {
                        vw query;
                        memcpy(&query, by->words[r] + place, sizeof query);
                        sums[i][r] = add_products_of_words(sums[i][r], code, query);
                    }
                }
        }
        for (int r = 0; r < rows && count == 4; r++) {
            v4 s = __builtin_convertvector(int_sums_of_four(sums[0][r], sums[1][r], sums[2][r], sums[3][r]), v4);
            memcpy(products[r] + t, &s, sizeof s);
        }
        for (int i = 0; i < count && count < 4; i++) {
            i4 s = int_sums_of_four(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
            for (int r = 0; r < rows; r++) products[r][t + i] = (float)s[r];
        }
    }
}
static void dot_codes(const Integers *by, int rows, const uint8_t *codes, int tokens, float (*products)[TILE]) {
#define DOT(fields, rows) multiply_codes(by, fields, rows, codes, tokens, products)
    switch (by->fields * 8 + rows) { FOR_ROWS(DOT, 1) FOR_ROWS(DOT, 2) FOR_ROWS(DOT, 4) FOR_ROWS(DOT, 8) }
#undef DOT
}

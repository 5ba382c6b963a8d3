/* Products of queries with codes, in integers.

   Codes are small integers, so queries are rounded to integers of 16 bits: one instruction
   multiplies such numbers and adds neighbours, in half the time that floats take. Rounding a query
   changes its scores by some 1e-5 of their size; codes of 8 bits change them by 100 times that.

   D channels, P bytes of a token, F fields of a byte: channel f P + j is in field f, lowest first,
   of byte j. WORDS bytes are unpacked at once. The last ones of a token end with it and so repeat
   some before, for which the query is 0. */
#pragma once
/* With AVX-512, too: the codes of a head are often 8 or 16 bytes. */
#define KVC_MAX_256_BITS
#include "gathered_attention.h"

enum { WORDS = 2 * L, MAX_WORDS = MAX_CHANNELS + 8 + 5 * WORDS };
typedef int16_t vw __attribute__((vector_size(4 * L)));
typedef int16_t vh __attribute__((vector_size(2 * L)));
typedef int32_t i4 __attribute__((vector_size(16)));

/* Queries as integers. A product times `factor`, plus `base`, is that of codes less half of the
   largest code. */
typedef struct {
    int dim, width, fields;         /* D, P, F */
    int stride;                     /* bytes from token to token */
    /* WORDS for every field of every WORDS bytes */
    ALIGNED int16_t words[BLOCK_QUERIES][MAX_WORDS];
    float factor[BLOCK_QUERIES];
    float base[BLOCK_QUERIES];
} IntegerQueries;

/* Adds to each lane of `sums` the products of two neighbouring words. */
INLINE vi add_products_of_words(vi sums, vw a, vw b) {
#if defined(KVC_IS_AVX512)
    return (vi)_mm256_dpwssd_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#elif L == 8
    return sums + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(KVC_IS_NEON)
    int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return sums + (vi)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
    for (int i = 0; i < L; i++) sums[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
}

INLINE vw bytes_as_words(const uint8_t *p) {
#if L == 8
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
#if L == 8
    __m256i first = _mm256_hadd_epi32((__m256i)a, (__m256i)b);
    __m256i sums = _mm256_hadd_epi32(first, _mm256_hadd_epi32((__m256i)c, (__m256i)d));
    return (i4)_mm256_castsi256_si128(sums) + (i4)_mm256_extracti128_si256(sums, 1);
#elif defined(KVC_IS_NEON)
    int32x4_t first = vpaddq_s32((int32x4_t)a, (int32x4_t)b);
    return (i4)vpaddq_s32(first, vpaddq_s32((int32x4_t)c, (int32x4_t)d));
#else
    i4 v = {0};
    for (int i = 0; i < L; i++) v += (i4){a[i], b[i], c[i], d[i]};
    return v;
#endif
}

/* The first of WORDS bytes that are unpacked together for bytes from `offset` on. */
INLINE int first_of_bytes(int offset, int width) {
    int last = width - WORDS < 0 ? 0 : width - WORDS;
    return offset < last ? offset : last;
}

/* Rounds a query [D] with zeros behind it up to a whole vector. */
static void round_query(IntegerQueries *integers, int index, const float *query) {
    int top = (1 << 8 / integers->fields) - 1;
    int size = padded(integers->dim);
    /* The sum of products has to fit into 32 bits, which matters for codes of 8 bits. */
    int fitting = (int)(2147483647LL / ((int64_t)top * integers->dim));
    float largest = (float)(fitting < 32767 ? fitting : 32767);
    ALIGNED int16_t in_order[MAX_WORDS];
    vf high = {0};
    vf nothing = {0};
    vf rounding = splat(ROUNDING);
    for (int d = 0; d < size; d += L) {
        vf q = load(query + d);
        high = larger(larger(q, -q), high);
        nothing += q * 0;
    }
    /* If a channel is NaN or infinite, every product is NaN. */
    float magnitude = largest_of(high) + sum_of(nothing);
    /* Smaller queries count as 0: they cannot be divided by. */
    float step = magnitude > 1e-30f ? largest / magnitude : 0;
    vi total = {0};
    for (int d = 0; d < size; d += L) {
        /* NaN may be any word. */
        vi rounded = (vi)(load(query + d) * step + rounding) - (vi)rounding;
        total += rounded;
        vh words = __builtin_convertvector(rounded, vh);
        memcpy(in_order + d, &words, sizeof words);
    }
    int behind = MAX_WORDS - size < WORDS + 8 ? MAX_WORDS - size : WORDS + 8;
    memset(in_order + size, 0, 2 * (size_t)behind);
    int64_t sum = 0;
    for (int i = 0; i < L; i++) sum += total[i];
    integers->factor[index] = magnitude / largest;
    integers->base[index] = -integers->factor[index] * (float)sum * (float)top / 2;
    int16_t *words = integers->words[index];
    for (int offset = 0; offset < integers->width; offset += WORDS) {
        int first = first_of_bytes(offset, integers->width);
        for (int field = 0; field < integers->fields; field++) {
            memcpy(words, in_order + field * integers->width + first, 2 * WORDS);
            memset(words, 0, 2 * (size_t)(offset - first));
            words += WORDS;
        }
    }
}

static void round_queries(
    IntegerQueries *integers, int count, const float (*query)[MAX_CHANNELS]) {
    for (int r = 0; r < count; r++) round_query(integers, r, query[r]);
}

/* Products of `count` queries with the codes of up to TILE tokens, [BLOCK_QUERIES][TILE]. */
INLINE void multiply_codes(
    const IntegerQueries *integers, int fields, int count, const uint8_t *codes, int tokens,
    float (*products)[TILE]) {
    int width = integers->width;
    int bits = 8 / fields;
    int together = count < 4 ? 4 : 2;
    vw mask = (vw){0} + (int16_t)((1 << bits) - 1);
    for (int t = 0; t < tokens; t += together) {
        const uint8_t *rows[4];
        vi sums[4][BLOCK_QUERIES] = {{{0}}};
        ALIGNED uint8_t short_rows[4][WORDS] = {{0}};
        for (int i = 0; i < together; i++) {
            int token = t + i < tokens ? t + i : tokens - 1;
            rows[i] = codes + (int64_t)token * integers->stride;
            if (width < WORDS) rows[i] = memcpy(short_rows[i], rows[i], (size_t)width);
        }
        for (int offset = 0, word = 0; offset < width; offset += WORDS) {
            int first = first_of_bytes(offset, width);
            vw packed[4];
            for (int i = 0; i < together; i++) packed[i] = bytes_as_words(rows[i] + first);
            for (int field = 0; field < fields; field++, word += WORDS)
                for (int i = 0; i < together; i++) {
                    vw code = packed[i] >> (int16_t)(bits * field);
                    if (field < fields - 1) code &= mask;
                    for (int r = 0; r < count; r++) {
                        vw query;
                        memcpy(&query, integers->words[r] + word, sizeof query);
                        sums[i][r] = add_products_of_words(sums[i][r], code, query);
                    }
                }
        }
        for (int r = 0; r < count && together == 4; r++) {
            i4 four = int_sums_of_four(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
            v4 floats = __builtin_convertvector(four, v4);
            memcpy(products[r] + t, &floats, sizeof floats);
        }
        for (int i = 0; i < together && together < 4; i++) {
            i4 four = int_sums_of_four(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
            for (int r = 0; r < count; r++) products[r][t + i] = (float)four[r];
        }
    }
}

static void dot_codes(
    const IntegerQueries *integers, int count, const uint8_t *codes, int tokens,
    float (*products)[TILE]) {
#define DOT(fields, count) multiply_codes(integers, fields, count, codes, tokens, products)
    switch (integers->fields * 8 + count) {
    FOR_QUERIES(DOT, 1)
    FOR_QUERIES(DOT, 2)
    FOR_QUERIES(DOT, 4)
    FOR_QUERIES(DOT, 8)
    }
#undef DOT
}

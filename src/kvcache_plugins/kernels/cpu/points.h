/* Points of packed codes, a strip of STRIP tokens at a time: lanes are tokens.

   A strip's rows are turned into planes, the byte at one place of every row; a channel's codes are then a shift away, or
   two. With AVX-512 the bytes of four tokens, L apart, are a lane of 32 bits, and points are looked up as floats by its
   lowest bits: nothing is masked, as tables repeat themselves. Elsewhere they are looked up as bytes: four look-ups of
   16 entries, in runs of 16 lanes, give the four bytes of a float32, and interleaving them gives four vectors of floats,
   for a third of a look-up of floats; token v L + 4 h + k is then byte 16 h + 4 v + k of a plane.

   There codes of five bits use that points are odd: a look-up of magnitudes, and a sign. Wider ones are put into the
   polynomial that the tables are made of. */
#pragma once
#include "coding.h"

enum { STRIP = 4 * L, MOST_ROW = MOST_CHANNELS + 1 };

typedef uint8_t vb __attribute__((vector_size(STRIP)));
typedef int8_t vsb __attribute__((vector_size(STRIP)));
typedef uint16_t vh __attribute__((vector_size(STRIP)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

INLINE vb load_bytes(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }
INLINE vb all_bytes(uint8_t x) { return x - (vb){0}; }

#if defined(KVC_IS_AVX512)
#define IN_RUNS(name) _mm512_##name
typedef __m512i bytes_of_machine;
#elif defined(KVC_IS_AVX2)
#define IN_RUNS(name) _mm256_##name
typedef __m256i bytes_of_machine;
#endif
/* Bytes, or pairs of them, of the lower or upper half of every run of 16, interleaved */
#if defined(IN_RUNS)
#define INTERLEAVE(name, instruction, ...) \
    INLINE vb name(vb a, vb b) { return (vb)IN_RUNS(instruction)((bytes_of_machine)a, (bytes_of_machine)b); }
#else
#define INTERLEAVE(name, instruction, ...) \
    INLINE vb name(vb a, vb b) { return __builtin_shufflevector(a, b, __VA_ARGS__); }
#endif
INTERLEAVE(low_bytes, unpacklo_epi8, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
INTERLEAVE(high_bytes, unpackhi_epi8, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
INTERLEAVE(low_pairs, unpacklo_epi16, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23)
INTERLEAVE(high_pairs, unpackhi_epi16, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31)

/* Entries of a table of 16 bytes by numbers below 16 */
#if defined(KVC_IS_PLAIN)
APART
#else
INLINE
#endif
vb look_up_bytes(const uint8_t *table, vb at) {
#if defined(KVC_IS_AVX512)
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)table)), (__m512i)at);
#elif defined(KVC_IS_AVX2)
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table)), (__m256i)at);
#elif defined(KVC_IS_NEON)
    return (vb)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)at);
#else
    vb v;
    for (int i = 0; i < STRIP; i++) v[i] = table[at[i] & 15];
    return v;
#endif
}
/* 16 bytes of each of the rows that byte `i` of every run of a plane is of */
INLINE vb load_run(const uint8_t *const *rows, int i, int64_t column) {
#if defined(KVC_IS_AVX512)
    int token = i % 4 * L + i / 4;
#else
    int token = i / 4 * L + i % 4;
#endif
#if defined(KVC_IS_AVX512)
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[token] + column)));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(rows[token + 4] + column)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(rows[token + 8] + column)), 2);
    return (vb)_mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(rows[token + 12] + column)), 3);
#elif defined(KVC_IS_AVX2)
    __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(rows[token] + column)));
    return (vb)_mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i *)(rows[token + 4] + column)), 1);
#else
    return load_bytes(rows[token] + column);
#endif
}
typedef uint8_t Planes[MOST_ROW + 1][STRIP];

/* The planes of `tokens` rows of `size` bytes behind their scales, the last one again in place of those that a strip
   lacks, and one of zeros, which the states of a row's last channel reach into. No byte beside the rows is read. */
APART void make_planes(const uint8_t *from, int64_t size, int tokens, Planes planes) {
    const uint8_t *rows[STRIP];
    uint8_t copies[STRIP][16];
    for (int t = 0; t < STRIP; t++) {
        rows[t] = from + (t < tokens ? t : tokens - 1) * size;
        if (size < 16) memcpy(copies[t], rows[t], (size_t)size), rows[t] = copies[t];
    }
    for (int64_t column = 1; column < size; column += 16) {
        int64_t first = column + 16 <= size ? column : size < 16 ? 0 : size - 16;
        vb x[16], y[16];
        for (int i = 0; i < 16; i++) x[i] = load_run(rows, i, first);
        /* Four times the first half of vectors between the second: then rows are columns */
        for (int round = 0; round < 2; round++) {
            for (int i = 0; i < 8; i++) y[2 * i] = low_bytes(x[i], x[i + 8]), y[2 * i + 1] = high_bytes(x[i], x[i + 8]);
            for (int i = 0; i < 8; i++) x[2 * i] = low_bytes(y[i], y[i + 8]), x[2 * i + 1] = high_bytes(y[i], y[i + 8]);
        }
        for (int i = 0; i < 16 && first + i < size; i++) memcpy(planes[first + i], &x[i], STRIP);
    }
    memset(planes[size], 0, STRIP);
}

/* What a channel's codes stand for: points, or `u -> x (c[2] + x^2 (c[3] + x^2 c[4]))` of `x = u c[0] + c[1]` */
#if defined(KVC_IS_AVX512)
enum { ENTRIES = 32 };
typedef union { ALIGNED float table[32]; float c[5]; } Points;
#else
enum { ENTRIES = 16 };
typedef union { ALIGNED uint8_t bytes[4][16]; float c[5]; } Points;
#endif

/* Bits of a code in a block of eight channels, 0 for nothing, and its first byte */
typedef struct { int width, offset; } Block;
/* Bits of a channel's code, and its first bit of its first byte */
typedef struct { int width, byte, shift; } Lane;

INLINE Lane lane_of(Block block, int lane) {
    int bit = block.width * lane;
    return (Lane){block.width, block.offset + bit / 8, bit % 8};
}
/* Blocks of a row; widths that no row has, or that reach beyond the row, are taken for 0 */
APART void make_blocks(const uint8_t *widths, int count, int64_t size, Block *blocks) {
    int64_t offset = 1;
    for (int v = 0; v < count; v++) {
        int width = widths[v];
        if (width > MOST_WIDTH || offset + width > size) width = 0;
        blocks[v] = (Block){width, (int)offset};
        offset += width;
    }
}
INLINE float polynomial(const float *c, float code) {
    float x = code * c[0] + c[1], square = x * x;
    return x * (c[2] + square * (c[3] + square * c[4]));
}
/* The points of a width as numbers that are looked up, the larger half of them where there is room for no more, or five
   coefficients */
APART void base_points(int width, const Codebook *book, float *base) {
    float codes = (float)(1 << width);
    const float *own = book->coefficients[width];
    float c[5] = {2 / codes, 1 / codes - 1, own[0] * own[3], own[1] * own[3], own[2] * own[3]};
    if (width > 5) memcpy(base, c, sizeof c);
    else for (int i = 0; i < ENTRIES; i++) base[i] = polynomial(c, (float)(width == 5 ? 32 - ENTRIES + i : i % (1 << width)));
}
/* The same times a factor */
APART Points points_of(int width, const float *base, float factor) {
    Points points;
    if (width > 5) {
        for (int i = 0; i < 5; i++) points.c[i] = i < 2 ? base[i] : base[i] * factor;
        return points;
    }
#if defined(KVC_IS_AVX512)
    for (int i = 0; i < 32; i++) points.table[i] = base[i] * factor;
#else
    ALIGNED float scaled[16];
    u8x16 x[4], y[4];
    for (int i = 0; i < 16; i++) scaled[i] = base[i] * factor;
    memcpy(x, scaled, sizeof x);
    for (int i = 0; i < 4; i++) x[i] = __builtin_shufflevector(x[i], x[i], 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int i = 0; i < 4; i += 2) {
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        x[2 * i] = __builtin_shufflevector(y[i], y[i + 2], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[2 * i + 1] = __builtin_shufflevector(y[i], y[i + 2], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    memcpy(points.bytes, x, sizeof x);
#endif
    return points;
}

/* A channel's codes at the lowest bits of every byte, with anything above them */
INLINE vb codes_of(const Lane *lane, const uint8_t (*planes)[STRIP]) {
    int own = 8 - lane->shift;
    vb at = (vb)((vh)load_bytes(planes[lane->byte]) >> (uint16_t)lane->shift);
    if (lane->width <= own) return at;
    vb low = all_bytes((uint8_t)((1 << own) - 1)), next = (vb)((vh)load_bytes(planes[lane->byte + 1]) << (uint16_t)own);
    return (at & low) | (next & ~low);
}
/* Bytes of a strip's tokens as L numbers four times */
INLINE void spread_bytes(vb x, vu *to) {
#if defined(KVC_IS_AVX512)
    for (uint32_t u = 0; u < 4; u++) to[u] = ((vu)x >> (8 * u)) & 255;
#else
    vb zero = {0}, low = low_bytes(x, zero), high = high_bytes(x, zero);
    to[0] = (vu)low_pairs(low, zero), to[1] = (vu)high_pairs(low, zero);
    to[2] = (vu)low_pairs(high, zero), to[3] = (vu)high_pairs(high, zero);
#endif
}
INLINE void look_up_points(int width, const Points *points, vb at, vf *to) {
#if defined(KVC_IS_AVX512)
    __m512 low = _mm512_load_ps(points->table), high = _mm512_load_ps(points->table + 16);
    for (uint32_t u = 0; u < 4; u++) {
        __m512i own = (__m512i)((vu)at >> (8 * u));
        to[u] = width == 5 ? (vf)_mm512_permutex2var_ps(low, own, high) : (vf)_mm512_permutexvar_ps(own, low);
    }
#else
    vb sign = {0};
    if (width == 5) sign = (vb)((vsb)(at & all_bytes(31)) < 16), at ^= sign;
    at &= all_bytes(15);
    vb a = look_up_bytes(points->bytes[0], at), b = look_up_bytes(points->bytes[1], at);
    vb c = look_up_bytes(points->bytes[2], at), d = look_up_bytes(points->bytes[3], at) ^ (sign & all_bytes(0x80));
    vb low[2] = {low_bytes(a, b), low_bytes(c, d)}, high[2] = {high_bytes(a, b), high_bytes(c, d)};
    to[0] = (vf)low_pairs(low[0], low[1]), to[1] = (vf)high_pairs(low[0], low[1]);
    to[2] = (vf)low_pairs(high[0], high[1]), to[3] = (vf)high_pairs(high[0], high[1]);
#endif
}
/* The points of a channel's codes, L tokens four times */
INLINE void read_points(const Lane *lane, const uint8_t (*planes)[STRIP], const Points *points, vf *to) {
    vb at = codes_of(lane, planes);
    if (lane->width <= 5) {
        if (lane->width == 5) look_up_points(5, points, at, to);
        else look_up_points(4, points, at, to);
        return;
    }
    at &= all_bytes((uint8_t)((1 << lane->width) - 1));
    vu codes[4];
    const float *c = points->c;
    spread_bytes(at, codes);
    for (int u = 0; u < 4; u++) {
        vf x = to_float(codes[u]) * c[0] + c[1], square = x * x;
        to[u] = x * (c[2] + square * (c[3] + square * c[4]));
    }
}
#if defined(KVC_IS_AVX512)
/* Points times a factor as words, in the upper half of a lane if `is_upper`; wide ones are rounded when they are read */
INLINE Points words_of(int width, const float *base, float factor, int is_upper) {
    Points points = points_of(width, base, factor);
    for (int i = 0; i < 32 && width <= 5; i += 16) {
        __m512i word = _mm512_cvtps_epi32(_mm512_load_ps(points.table + i));
        word = is_upper ? _mm512_slli_epi32(word, 16) : _mm512_and_si512(word, _mm512_set1_epi32(0xffff));
        _mm512_store_si512(points.table + i, word);
    }
    return points;
}
INLINE void read_words(
    const Lane *lane, const uint8_t (*planes)[STRIP], const Points *points, int is_upper, vu *to) {
    vf x[4];
    read_points(lane, planes, points, x);
    for (int u = 0; u < 4; u++) {
        if (lane->width <= 5) to[u] = (vu)x[u];
        else to[u] = (vu)_mm512_cvtps_epi32((__m512)x[u]), to[u] = is_upper ? to[u] << 16 : to[u] & 0xffff;
    }
}
#else
/* The points of a block's eight channels, which all have the same */
APART void widen(Block block, const Planes planes, const Points *points, float (*to)[STRIP]) {
    for (int i = 0; i < 8; i++) {
        Lane lane = lane_of(block, i);
        vf x[4];
        read_points(&lane, planes, points, x);
        for (int u = 0; u < 4; u++) store(to[i] + u * L, x[u]);
    }
}
#endif

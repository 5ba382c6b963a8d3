/* Levels of packed codes, a strip of STRIP tokens at a time: lanes are tokens.

   The rows of a strip are transposed into planes, each the same byte of every row; a channel's
   codes are then one shift away, or two. With AVX-512 the bytes of four tokens, L apart, are a lane
   of 32 bits, and levels are looked up as floats by its lowest bits: nothing is masked, as tables
   repeat themselves. At other levels of instructions they are looked up as bytes: four look-ups of
   16 entries, in runs of 16 lanes, give the four bytes of a float32, and interleaving them gives
   four vectors of floats, for a third of the cost of a look-up of floats. There token v L + 4 h + k
   is byte 16 h + 4 v + k of a plane.

   Codes of five bits use that levels are odd: a look-up of magnitudes, and a sign. Codes of more
   bits are put into the polynomial that the tables are made of. */
#pragma once
#include "coding.h"

enum { STRIP = 4 * L, MAX_ROW = MAX_CHANNELS + 1 };

typedef uint8_t vb __attribute__((vector_size(STRIP)));
typedef int8_t vsb __attribute__((vector_size(STRIP)));
typedef uint16_t vh __attribute__((vector_size(STRIP)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

INLINE vb load_bytes(const uint8_t *p) {
    vb v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vb all_bytes(uint8_t x) { return x - (vb){0}; }

#if L == 16
#define IN_RUNS(name) _mm512_##name
typedef __m512i machine_bytes;
#elif L == 8
#define IN_RUNS(name) _mm256_##name
typedef __m256i machine_bytes;
#endif
/* Interleaves bytes, or pairs of them, of the lower or upper half of every run of 16. */
#if defined(IN_RUNS)
#define INTERLEAVE(name, instruction, ...) \
    INLINE vb name(vb a, vb b) { \
        return (vb)IN_RUNS(instruction)((machine_bytes)a, (machine_bytes)b); \
    }
#else
#define INTERLEAVE(name, instruction, ...) \
    INLINE vb name(vb a, vb b) { return __builtin_shufflevector(a, b, __VA_ARGS__); }
#endif
INTERLEAVE(low_bytes, unpacklo_epi8, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
INTERLEAVE(high_bytes, unpackhi_epi8, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
INTERLEAVE(low_pairs, unpacklo_epi16, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23)
INTERLEAVE(high_pairs, unpackhi_epi16, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31)

/* Entries of a table of 16 bytes, by numbers below 16. */
#if defined(KVC_IS_PLAIN)
APART
#else
INLINE
#endif
vb look_up_bytes(const uint8_t *table, vb index) {
#if L == 16
    __m128i entries = _mm_load_si128((const __m128i *)table);
    return (vb)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)index);
#elif L == 8
    __m128i entries = _mm_load_si128((const __m128i *)table);
    return (vb)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)index);
#elif defined(KVC_IS_NEON)
    return (vb)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index);
#else
    vb v;
    for (int i = 0; i < STRIP; i++) v[i] = table[index[i] & 15];
    return v;
#endif
}

/* 16 bytes from `column` on of each row that byte `i` of the runs of a plane belongs to. */
INLINE vb load_run(const uint8_t *const *rows, int i, int64_t column) {
#if L == 16
    int token = i % 4 * L + i / 4;
    __m128i first = _mm_loadu_si128((const __m128i *)(rows[token] + column));
    __m128i second = _mm_loadu_si128((const __m128i *)(rows[token + 4] + column));
    __m128i third = _mm_loadu_si128((const __m128i *)(rows[token + 8] + column));
    __m128i fourth = _mm_loadu_si128((const __m128i *)(rows[token + 12] + column));
    __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(first), second, 1);
    return (vb)_mm512_inserti32x4(_mm512_inserti32x4(v, third, 2), fourth, 3);
#elif L == 8
    int token = i / 4 * L + i % 4;
    __m128i first = _mm_loadu_si128((const __m128i *)(rows[token] + column));
    __m128i second = _mm_loadu_si128((const __m128i *)(rows[token + 4] + column));
    return (vb)_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
#else
    int token = i / 4 * L + i % 4;
    return load_bytes(rows[token] + column);
#endif
}

typedef uint8_t Planes[MAX_ROW + 1][STRIP];

/* Makes the planes of `tokens` rows of `size` bytes, behind their scales, and one of zeros, which
   the last code of a row may be read across. The last row is repeated for tokens that the strip
   lacks. No byte beside the rows is read. */
APART void make_planes(const uint8_t *source, int64_t size, int tokens, Planes planes) {
    const uint8_t *rows[STRIP];
    uint8_t copies[STRIP][16];
    for (int t = 0; t < STRIP; t++) {
        rows[t] = source + (t < tokens ? t : tokens - 1) * size;
        if (size < 16) {
            memcpy(copies[t], rows[t], (size_t)size);
            rows[t] = copies[t];
        }
    }
    for (int64_t column = 1; column < size; column += 16) {
        int64_t first = column + 16 <= size ? column : size < 16 ? 0 : size - 16;
        vb x[16], y[16];
        for (int i = 0; i < 16; i++) x[i] = load_run(rows, i, first);
        /* Interleaving the halves of all vectors four times turns rows into columns. */
        for (int round = 0; round < 2; round++) {
            for (int i = 0; i < 8; i++) {
                y[2 * i] = low_bytes(x[i], x[i + 8]);
                y[2 * i + 1] = high_bytes(x[i], x[i + 8]);
            }
            for (int i = 0; i < 8; i++) {
                x[2 * i] = low_bytes(y[i], y[i + 8]);
                x[2 * i + 1] = high_bytes(y[i], y[i + 8]);
            }
        }
        for (int i = 0; i < 16 && first + i < size; i++) memcpy(planes[first + i], &x[i], STRIP);
    }
    memset(planes[size], 0, STRIP);
}

/* Levels that the codes of a channel stand for: a table, or for more than five bits the polynomial
   `code -> x (c[2] + x^2 (c[3] + x^2 c[4]))` of `x = code c[0] + c[1]`. */
#if L == 16
enum { ENTRIES = 32 };
typedef union {
    ALIGNED float table[32];
    float c[5];
} LevelTable;
#else
enum { ENTRIES = 16 };
typedef union {
    ALIGNED uint8_t bytes[4][16];
    float c[5];
} LevelTable;
#endif

/* A band of eight channels in a row: bits of a code, 0 if it has none, and the first byte. */
typedef struct {
    int width, offset;
} Band;

/* A channel's code in a row: its bits, and its first bit in its first byte. */
typedef struct {
    int width, byte, shift;
} CodeField;

INLINE CodeField code_field(Band band, int channel) {
    int bit = band.width * channel;
    return (CodeField){band.width, band.offset + bit / 8, bit % 8};
}

/* Places the bands of a row. Widths are not trusted: those that no code has, or that reach beyond
   the row, count as 0. */
APART void place_bands(const uint8_t *widths, int count, int64_t size, Band *bands) {
    int64_t offset = 1;
    for (int v = 0; v < count; v++) {
        int width = widths[v];
        if (width > MAX_WIDTH || offset + width > size) width = 0;
        bands[v] = (Band){width, (int)offset};
        offset += width;
    }
}

INLINE float polynomial(const float *c, float code) {
    float x = code * c[0] + c[1];
    float square = x * x;
    return x * (c[2] + square * (c[3] + square * c[4]));
}

/* Computes the levels of codes of a width: numbers to be looked up (the larger half of them if the
   table has no room for all), or five coefficients. */
APART void make_levels(int width, const Codebook *book, float *levels) {
    float count = (float)(1 << width);
    const float *own = book->coefficients[width];
    float c[5] = {2 / count, 1 / count - 1, own[0] * own[3], own[1] * own[3], own[2] * own[3]};
    if (width > 5) {
        memcpy(levels, c, sizeof c);
        return;
    }
    for (int i = 0; i < ENTRIES; i++) {
        int code = width == 5 ? 32 - ENTRIES + i : i % (1 << width);
        levels[i] = polynomial(c, (float)code);
    }
}

/* The table of levels times a factor. */
APART LevelTable scaled_levels(int width, const float *levels, float factor) {
    LevelTable scaled;
    if (width > 5) {
        for (int i = 0; i < 5; i++) scaled.c[i] = i < 2 ? levels[i] : levels[i] * factor;
        return scaled;
    }
#if L == 16
    for (int i = 0; i < 32; i++) scaled.table[i] = levels[i] * factor;
#else
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
    ALIGNED float floats[16];
    u8x16 x[4], y[4];
    for (int i = 0; i < 16; i++) floats[i] = levels[i] * factor;
    memcpy(x, floats, sizeof x);
    for (int i = 0; i < 4; i++)
        x[i] = SHUFFLE(x[i], x[i], 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int i = 0; i < 4; i += 2) {
        u8x16 a = x[i];
        u8x16 b = x[i + 1];
        y[i] = SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        y[i + 1] = SHUFFLE(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        u8x16 a = y[i];
        u8x16 b = y[i + 2];
        x[2 * i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[2 * i + 1] = SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    memcpy(scaled.bytes, x, sizeof x);
#undef SHUFFLE
#endif
    return scaled;
}

/* The codes of a channel in the lowest bits of every byte, with anything above them. */
INLINE vb codes_of(const CodeField *field, const uint8_t (*planes)[STRIP]) {
    int available = 8 - field->shift;
    vb codes = (vb)((vh)load_bytes(planes[field->byte]) >> (uint16_t)field->shift);
    if (field->width <= available) return codes;
    vb low = all_bytes((uint8_t)((1 << available) - 1));
    vb next = (vb)((vh)load_bytes(planes[field->byte + 1]) << (uint16_t)available);
    return (codes & low) | (next & ~low);
}

/* Widens the bytes of a strip's tokens to four vectors of L numbers. */
INLINE void widen_bytes(vb bytes, vu *numbers) {
#if L == 16
    for (uint32_t u = 0; u < 4; u++) numbers[u] = ((vu)bytes >> (8 * u)) & 255;
#else
    vb zero = {0};
    vb low = low_bytes(bytes, zero);
    vb high = high_bytes(bytes, zero);
    numbers[0] = (vu)low_pairs(low, zero);
    numbers[1] = (vu)high_pairs(low, zero);
    numbers[2] = (vu)low_pairs(high, zero);
    numbers[3] = (vu)high_pairs(high, zero);
#endif
}

INLINE void look_up_levels(int width, const LevelTable *levels, vb codes, vf *result) {
#if L == 16
    __m512 low = _mm512_load_ps(levels->table);
    __m512 high = _mm512_load_ps(levels->table + 16);
    for (uint32_t u = 0; u < 4; u++) {
        __m512i index = (__m512i)((vu)codes >> (8 * u));
        if (width == 5)
            result[u] = (vf)_mm512_permutex2var_ps(low, index, high);
        else
            result[u] = (vf)_mm512_permutexvar_ps(index, low);
    }
#else
    vb sign = {0};
    if (width == 5) {
        sign = (vb)((vsb)(codes & all_bytes(31)) < 16);
        codes ^= sign;
    }
    codes &= all_bytes(15);
    vb a = look_up_bytes(levels->bytes[0], codes);
    vb b = look_up_bytes(levels->bytes[1], codes);
    vb c = look_up_bytes(levels->bytes[2], codes);
    vb d = look_up_bytes(levels->bytes[3], codes) ^ (sign & all_bytes(0x80));
    vb low[2] = {low_bytes(a, b), low_bytes(c, d)};
    vb high[2] = {high_bytes(a, b), high_bytes(c, d)};
    result[0] = (vf)low_pairs(low[0], low[1]);
    result[1] = (vf)high_pairs(low[0], low[1]);
    result[2] = (vf)low_pairs(high[0], high[1]);
    result[3] = (vf)high_pairs(high[0], high[1]);
#endif
}

/* Reads the levels of a channel's codes: four vectors of L tokens. */
INLINE void read_levels(
    const CodeField *field, const uint8_t (*planes)[STRIP], const LevelTable *levels, vf *result) {
    vb codes = codes_of(field, planes);
    if (field->width <= 5) {
        if (field->width == 5)
            look_up_levels(5, levels, codes, result);
        else
            look_up_levels(4, levels, codes, result);
        return;
    }
    codes &= all_bytes((uint8_t)((1 << field->width) - 1));
    vu numbers[4];
    const float *c = levels->c;
    widen_bytes(codes, numbers);
    for (int u = 0; u < 4; u++) {
        vf x = to_float(numbers[u]) * c[0] + c[1];
        vf square = x * x;
        result[u] = x * (c[2] + square * (c[3] + square * c[4]));
    }
}

#if L == 16
/* The table of levels times a factor as words, in the upper half of a lane if `is_upper`. Levels
   that are not looked up are rounded when they are read. */
INLINE LevelTable levels_as_words(int width, const float *levels, float factor, int is_upper) {
    LevelTable words = scaled_levels(width, levels, factor);
    for (int i = 0; i < 32 && width <= 5; i += 16) {
        __m512i word = _mm512_cvtps_epi32(_mm512_load_ps(words.table + i));
        if (is_upper)
            word = _mm512_slli_epi32(word, 16);
        else
            word = _mm512_and_si512(word, _mm512_set1_epi32(0xffff));
        _mm512_store_si512(words.table + i, word);
    }
    return words;
}

INLINE void read_words(
    const CodeField *field, const uint8_t (*planes)[STRIP], const LevelTable *words, int is_upper,
    vu *result) {
    vf x[4];
    read_levels(field, planes, words, x);
    for (int u = 0; u < 4; u++) {
        if (field->width <= 5) {
            result[u] = (vu)x[u];
            continue;
        }
        vu word = (vu)_mm512_cvtps_epi32((__m512)x[u]);
        result[u] = is_upper ? word << 16 : word & 0xffff;
    }
}
#else
/* Reads the levels of a band's eight channels, which have one table. */
APART void read_band(
    Band band, const Planes planes, const LevelTable *levels, float (*result)[STRIP]) {
    for (int i = 0; i < 8; i++) {
        CodeField field = code_field(band, i);
        vf x[4];
        read_levels(&field, planes, levels, x);
        for (int u = 0; u < 4; u++) store(result[i] + u * L, x[u]);
    }
}
#endif

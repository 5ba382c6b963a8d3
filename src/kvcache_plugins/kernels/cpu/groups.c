/* Attention over groups: codes of 1 to 8 bits that share a scale and a zero, low-rank factors, outliers. See `groups.py`.

   A tile's codes become bytes in the order of the channels, once for all queries of a unit; scales are part of the
   queries (keys by channel) or of the weights (values), so that the inner loops only convert, multiply and add. Zeros,
   low rank and outliers are what they add to a score or to a channel: four numbers side by side, one a query.

   Believed of memory is what `groups.py` checks: addresses and sizes. Offsets and indices of outliers are not: see
   `Outliers`. D, E channels of keys and values, T tokens of a tile, r query, d channel, t token within the tile. */
#include "layer.h"

typedef float f4 __attribute__((vector_size(16)));
enum { FACTORS = 1024, ALL_CHANNELS = 1024 /* that an index of an outlier can name */ };

INLINE f4 splat4(float x) { return x - (f4){0}; }
/* A code as it stands between unpacking and the inner loops: the byte itself, or, where the machine makes floats of
   bytes by shuffles, of up to 7 bits, the second byte of 1 + code / 2^bits, which scales and zeros then make up for. */
#if defined(KVC_IS_AVX2)
INLINE int is_biased(const GroupSide *side) { return side->nbits < 8; }
#else
INLINE int is_biased(const GroupSide *side) { return (void)side, 0; }
#endif
INLINE float code_at(const uint8_t *p, const int biased) { return biased ? *p / 128.0f : *p; }
INLINE vf codes_at(const uint8_t *p, const int biased) {
#if defined(KVC_IS_AVX512)
    return (void)biased, (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(KVC_IS_AVX2)
    vu x = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return biased ? (vf)(x << 16 | 0x3f000000u) : to_float(x);
#else
    uint8_t b __attribute__((vector_size(L)));
    memcpy(&b, p, sizeof b);
    return (void)biased, __builtin_convertvector(b, vf);
#endif
}
/* Of a block of four vectors of codes the ones numbered `half` and `half + 2`, in the order of `swap` */
enum { BLOCK = 4 * L };
INLINE void pair_at(const uint8_t *p, const int half, const int biased, vf *x) {
#if defined(KVC_IS_AVX2)
    if (biased) {
        __m256i y = _mm256_loadu_si256((const __m256i *)p), high = _mm256_set1_epi8(0x3f), zero = _mm256_setzero_si256();
        y = half ? _mm256_unpackhi_epi8(y, high) : _mm256_unpacklo_epi8(y, high);
        x[0] = (vf)_mm256_unpacklo_epi16(zero, y), x[1] = (vf)_mm256_unpackhi_epi16(zero, y);
        return;
    }
#endif
    x[0] = codes_at(p + half * L, biased), x[1] = codes_at(p + (half + 2) * L, biased);
}
/* Brings a pair into the order of the channels, or out of it */
INLINE void swap(const int biased, vf *x) {
#if defined(KVC_IS_AVX2)
    __m256 a = (__m256)x[0], b = (__m256)x[1];
    if (biased) x[0] = (vf)_mm256_permute2f128_ps(a, b, 0x20), x[1] = (vf)_mm256_permute2f128_ps(a, b, 0x31);
#else
    (void)biased, (void)x;
#endif
}
INLINE void load_pair(const float *p, const int half, vf *x) { x[0] = load(p + half * L), x[1] = load(p + (half + 2) * L); }
INLINE void store_pair(float *p, const int half, const vf *x) { store(p + half * L, x[0]), store(p + (half + 2) * L, x[1]); }
/* Numbers of `dim` channels in the order of their codes */
static void order(float *numbers, int dim) {
    for (int d = 0; d + BLOCK <= dim; d += BLOCK)
        for (int half = 0; half < 2; half++) {
            vf x[2];
            load_pair(numbers + d, half, x), swap(1, x), store_pair(numbers + d, half, x);
        }
}
/* The sum of each of four vectors */
INLINE f4 sums_of_four(const vf *v) {
#if defined(KVC_IS_AVX512) || defined(KVC_IS_AVX2)
    __m128 s[4];
    for (int r = 0; r < 4; r++) {
#if defined(KVC_IS_AVX512)
        __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[r]), _mm512_extractf32x8_ps((__m512)v[r], 1));
#else
        __m256 h = (__m256)v[r];
#endif
        s[r] = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    }
    __m128 a = _mm_add_ps(_mm_unpacklo_ps(s[0], s[1]), _mm_unpackhi_ps(s[0], s[1]));
    __m128 b = _mm_add_ps(_mm_unpacklo_ps(s[2], s[3]), _mm_unpackhi_ps(s[2], s[3]));
    return (f4)_mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
#else
    return (f4){sum_of(v[0]), sum_of(v[1]), sum_of(v[2]), sum_of(v[3])};
#endif
}
/* Halves, `step` apart, as floats, and zeros up to `size` */
INLINE void halves_of(const uint16_t *from, int64_t step, int count, int size, float *to) {
    if (step == 1) read_numbers(from, HALVES, 0, count, size, to);
    else for (int i = 0; i < size; i++) to[i] = i < count ? float_of_half(from[i * step]) : 0;
}

/* One slab of one plane of all tokens, so many bytes at once, with the bits `set`, or those of the planes before if that
   is negative: see `codecs.quantization` for the packing */
#define UNPACK(name, Word, ones) \
    static void name(const uint8_t *from, int64_t row, int size, int down, int mask, int set, int tokens, uint8_t *to, int stride) { \
        for (int j = 0; j + (int)sizeof(Word) <= size; j += (int)sizeof(Word)) \
            for (int t = 0; t < tokens; t++) { \
                Word x, before; \
                memcpy(&x, from + t * row + j, sizeof x); \
                x = (down >= 0 ? x >> down : x << -down) & (__typeof__(ones))(ones * (unsigned)mask); \
                if (set < 0) memcpy(&before, to + t * stride + j, sizeof x), x |= before; \
                else x |= (__typeof__(ones))(ones * (unsigned)set); \
                memcpy(to + t * stride + j, &x, sizeof x); \
            } \
    }
typedef uint16_t Words32 __attribute__((vector_size(32)));
typedef uint16_t Words16 __attribute__((vector_size(16)));
UNPACK(unpack32, Words32, (uint16_t)0x0101)
UNPACK(unpack16, Words16, (uint16_t)0x0101)
UNPACK(unpack8, uint64_t, 0x0101010101010101u)
UNPACK(unpack4, uint32_t, 0x01010101u)
UNPACK(unpack1, uint8_t, 1u)
/* Four slabs of eight bytes, which lie one behind the other */
static void unpack_four(
    const uint8_t *from, int64_t row, int width, int down, int mask, int up, int set, int tokens, uint8_t *to, int stride) {
    typedef uint64_t Words __attribute__((vector_size(32)));
    Words downs = {(uint64_t)down, (uint64_t)(down + width), (uint64_t)(down + 2 * width), (uint64_t)(down + 3 * width)};
    for (int t = 0; t < tokens; t++) {
        uint64_t word;
        Words x, before;
        memcpy(&word, from + t * row, sizeof word);
        x = (Words){word, word, word, word} >> downs << up & 0x0101010101010101u * (unsigned)mask;
        if (set < 0) memcpy(&before, to + t * stride, sizeof x), x |= before;
        else x |= 0x0101010101010101u * (unsigned)set;
        memcpy(to + t * stride, &x, sizeof x);
    }
}

static void unpack(const GroupSide *side, const uint8_t *rows, int tokens, uint8_t *codes, int stride) {
    for (int shift = 0, width; shift < side->nbits; shift += width) {
        int rest = (int)side->nbits - shift;
        width = rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        int up = shift + (is_biased(side) ? 7 - (int)side->nbits : 0), set = shift ? -1 : is_biased(side) ? 0x80 : 0;
        int slabs = 8 / width, size = ((int)side->dim + slabs - 1) / slabs;
        for (int s = 0, step; s < slabs; s += step) {
            int down = s * width - up, mask = ((1 << width) - 1) << up;
            uint8_t *to = codes + s * size;
            step = size == 8 && slabs >= 4 ? 4 : 1;
            if (step == 4) unpack_four(rows, side->row_size, width, s * width, mask, up, set, tokens, to, stride);
            else if (size % 32 == 0) unpack32(rows, side->row_size, size, down, mask, set, tokens, to, stride);
            else if (size % 16 == 0) unpack16(rows, side->row_size, size, down, mask, set, tokens, to, stride);
            else if (size % 8 == 0) unpack8(rows, side->row_size, size, down, mask, set, tokens, to, stride);
            else if (size % 4 == 0) unpack4(rows, side->row_size, size, down, mask, set, tokens, to, stride);
            else unpack1(rows, side->row_size, size, down, mask, set, tokens, to, stride);
        }
        rows += size;
    }
}

/* Products of queries, in the order of the codes, with `dim` channels of tokens; `wide` tokens at once, all sums in
   registers */
INLINE void dot_rows(
    const int rows, const int wide, const int biased, const float (*query)[MOST_CHANNELS], const uint8_t *codes, int stride,
    int dim, int tokens, f4 *scores) {
    for (int t = 0; t < tokens; t += wide) {
        const uint8_t *at[8];
        vf sums[8][ROWS];
        int d = 0;
        for (int i = 0; i < wide; i++) {
            /* Tokens behind the last one are the last one again */
            at[i] = codes + (t + i < tokens ? t + i : tokens - 1) * stride;
            for (int r = 0; r < ROWS; r++) sums[i][r] = (vf){0};
        }
        for (; d + BLOCK <= dim; d += BLOCK)
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < wide; i++) {
                    vf x[2];
                    pair_at(at[i] + d, half, biased, x);
                    for (int r = 0; r < rows; r++)
                        sums[i][r] += x[0] * load(query[r] + d + half * L), sums[i][r] += x[1] * load(query[r] + d + (half + 2) * L);
                }
        for (; d + L <= dim; d += L)
            for (int i = 0; i < wide; i++) {
                vf x = codes_at(at[i] + d, biased);
                for (int r = 0; r < rows; r++) sums[i][r] += x * load(query[r] + d);
            }
#pragma GCC unroll 8
        for (int i = 0; i < wide; i++) if (t + i < tokens) scores[t + i] = sums_of_four(sums[i]);
        for (int i = 0; i < wide && t + i < tokens; i++)
            for (int e = d; e < dim; e++)
                for (int r = 0; r < rows; r++) scores[t + i][r] += code_at(at[i] + e, biased) * query[r][e];
    }
}
/* Adds weighted codes to `sums`; `halves` of a block at once, all sums in registers */
INLINE void accumulate_halves(
    const int rows, const int halves, const int biased, const float (*weights)[TILE], const uint8_t *codes, const int first,
    int stride, int tokens, float *sums) {
    vf own[ROWS][4][2], x[2];
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < halves; h++) own[r][h][0] = own[r][h][1] = (vf){0};
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < halves; h++) {
            pair_at(codes + t * stride + (first + h) / 2 * BLOCK, (first + h) % 2, biased, x);
            for (int r = 0; r < rows; r++) own[r][h][0] += x[0] * weights[r][t], own[r][h][1] += x[1] * weights[r][t];
        }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < halves; h++) {
            float *to = sums + r * MOST_CHANNELS + (first + h) / 2 * BLOCK;
            load_pair(to, (first + h) % 2, x), swap(biased, own[r][h]);
            x[0] += own[r][h][0], x[1] += own[r][h][1], store_pair(to, (first + h) % 2, x);
        }
}
INLINE void accumulate_rows(
    const int rows, const int halves, const int biased, const float (*w)[TILE], const uint8_t *codes, int stride, int dim,
    int tokens, float *sums) {
    int d = 0;
    for (; halves == 4 && d + 2 * BLOCK <= dim; d += 2 * BLOCK)
        accumulate_halves(rows, 4, biased, w, codes + d, 0, stride, tokens, sums + d);
    for (; halves > 1 && d + BLOCK <= dim; d += BLOCK) accumulate_halves(rows, 2, biased, w, codes + d, 0, stride, tokens, sums + d);
    for (; d + BLOCK <= dim; d += BLOCK) {
        accumulate_halves(rows, 1, biased, w, codes + d, 0, stride, tokens, sums + d);
        accumulate_halves(rows, 1, biased, w, codes + d, 1, stride, tokens, sums + d);
    }
    for (; d + L <= dim; d += L) {
        vf own[ROWS] = {{0}};
        for (int t = 0; t < tokens; t++) {
            vf x = codes_at(codes + t * stride + d, biased);
            for (int r = 0; r < rows; r++) own[r] += x * w[r][t];
        }
        for (int r = 0; r < rows; r++) store(sums + r * MOST_CHANNELS + d, load(sums + r * MOST_CHANNELS + d) + own[r]);
    }
    for (; d < dim; d++)
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < rows; r++) sums[r * MOST_CHANNELS + d] += code_at(codes + t * stride + d, biased) * w[r][t];
}
/* As wide as the registers allow */
INLINE void dot_by_rows(
    const int rows, int biased, const float (*q)[MOST_CHANNELS], const uint8_t *codes, int stride, int dim, int tokens, f4 *scores) {
    if (biased) dot_rows(rows, rows == 1 ? 8 : 6 - rows, 1, q, codes, stride, dim, tokens, scores);
    else dot_rows(rows, rows == 1 ? 8 : 6 - rows, 0, q, codes, stride, dim, tokens, scores);
}
INLINE void accumulate_by_rows(
    const int rows, int biased, const float (*w)[TILE], const uint8_t *codes, int stride, int dim, int tokens, float *sums) {
    if (biased) accumulate_rows(rows, rows == 1 ? 4 : rows < 4 ? 2 : 1, 1, w, codes, stride, dim, tokens, sums);
    else accumulate_rows(rows, rows == 1 ? 4 : rows < 4 ? 2 : 1, 0, w, codes, stride, dim, tokens, sums);
}
static void dot(
    int rows, int biased, const float (*q)[MOST_CHANNELS], const uint8_t *codes, int stride, int dim, int tokens, f4 *scores) {
    BY_ROWS(rows, dot_by_rows, biased, q, codes, stride, dim, tokens, scores)
}
static void accumulate(
    int rows, int biased, const float (*w)[TILE], const uint8_t *codes, int stride, int dim, int tokens, float *sums) {
    BY_ROWS(rows, accumulate_by_rows, biased, w, codes, stride, dim, tokens, sums)
}

/* Scales and zeros of `count` numbers as floats, for codes as they are unpacked; 0 up to `size` */
static void read_scales(const GroupSide *side, int64_t at, int64_t step, int count, int size, float *scale, float *zero) {
    float factor = is_biased(side) ? (float)(1 << side->nbits) : 1, bias = is_biased(side) ? 1 : 0;
    halves_of(side->scale + at, step, count, size, scale);
    halves_of(side->zero + at, step, count, size, zero);
    for (int i = 0; i < size; i += L) {
        vf own = load(scale + i) * factor;
        store(scale + i, own), store(zero + i, load(zero + i) - own * bias);
    }
}

/* out[i] += factors[i] columns, with factors [count, rank] */
static void add_products(const uint16_t *factors, int rank, int count, const f4 *columns, f4 *out) {
    ALIGNED float own[FACTORS];
    for (int i = 0, step = FACTORS / rank; i < count; i += step) {
        int most = count - i < step ? count - i : step;
        halves_of(factors + i * rank, 1, most * rank, most * rank, own);
        for (int j = 0; j < most; j++)
            for (int k = 0; k < rank; k++) out[i + j] += splat4(own[j * rank + k]) * columns[k];
    }
}
/* columns[k] += sum of factors[i][k] in[i] */
static void sum_products(const uint16_t *factors, int rank, int count, const f4 *in, f4 *columns) {
    ALIGNED float own[FACTORS];
    for (int i = 0, step = FACTORS / rank; i < count; i += step) {
        int most = count - i < step ? count - i : step;
        halves_of(factors + i * rank, 1, most * rank, most * rank, own);
        for (int k = 0; k < rank; k++) {
            f4 even = {0}, odd = {0};
            int j = 0;
            for (; j + 2 <= most; j += 2)
                even += splat4(own[j * rank + k]) * in[i + j], odd += splat4(own[(j + 1) * rank + k]) * in[i + j + 1];
            if (j < most) even += splat4(own[j * rank + k]) * in[i + j];
            columns[k] += even + odd;
        }
    }
}

/* What a tile and head has of a chunk's outliers. Offsets are cut to the list; a token that is not of the tile is
   skipped, and what an index can name of channels there is room for. */
typedef struct { const void *indices; const uint16_t *values; int first, last, is_wide, bits; } Outliers;
INLINE Outliers outliers_of(const GroupSide *side, int64_t chunk, int64_t slot) {
    if (!side->num_outliers) return (Outliers){0};
    const int32_t *at = side->outlier_offsets + chunk * side->num_offsets + slot;
    int most = (int)side->num_outliers, first = at[0] < 0 ? 0 : at[0], last = at[1] > most ? most : at[1];
    const char *indices = (const char *)side->outlier_indices + chunk * side->num_outliers * (side->is_wide ? 4 : 2);
    return (Outliers){indices, side->outlier_values + chunk * side->num_outliers, first, last, (int)side->is_wide, (int)side->channel_bits};
}
INLINE uint32_t index_of(const Outliers *o, int i) {
    return o->is_wide ? ((const uint32_t *)o->indices)[i] : ((const uint16_t *)o->indices)[i];
}
/* scores[token] += value query[channel], or sums[channel] += value weights[token] */
INLINE void add_outliers(Outliers o, uint32_t skipped, uint32_t tokens, f4 *by_token, f4 *by_channel, const int of_keys) {
    uint32_t ones = (1u << o.bits) - 1;
    for (int i = o.first; i < o.last; i++) {
        uint32_t index = index_of(&o, i), t = (index >> o.bits) - skipped, d = index & ones;
        f4 x = splat4(float_of_half(o.values[i]));
        if (t >= tokens) continue;
        if (of_keys) by_token[t] += x * by_channel[d];
        else by_channel[d] += x * by_token[t];
    }
}

/* Some tokens of a tile: `start` within the chunk, and how many of the tile's are skipped and used */
typedef struct { int64_t chunk, start, skipped; int tokens; } Piece;
typedef struct {
    const Groups *groups;
    Unit unit;
    int64_t heads, group;
    const float (*query)[MOST_CHANNELS];
    ALIGNED float folded[ROWS][MOST_CHANNELS]; /* queries in the order of the codes, times the scales of `group` if any */
    ALIGNED uint8_t codes[TILE * MOST_CHANNELS];
    f4 base;                        /* what the zeros of that group add to a score */
    f4 by_channel[ALL_CHANNELS];    /* queries */
    f4 totals[MOST_CHANNELS];       /* sums of the queries of every group of channels */
    f4 projected[MOST_CHANNELS];    /* queries times B of the chunk */
    f4 sums[ALL_CHANNELS];          /* of outliers and low rank, by channel */
    f4 zeros[MOST_CHANNELS], weighted_a[MOST_CHANNELS];
} Work;
INLINE int stride_of(const GroupSide *side) { return (int)(side->dim + 15) & ~15; }
INLINE int64_t chunk_of(const Work *work, int64_t chunk) { return work->unit.matrix * work->groups->chunks + chunk; }
INLINE int64_t scales_of(const Work *work, const GroupSide *side, int64_t chunk) {
    int64_t head = side->scale_heads > 1 ? work->unit.head : 0;
    int64_t size = side->by_channel ? side->groups * side->dim : work->groups->chunk_length * side->groups;
    return ((work->unit.batch * side->scale_heads + head) * work->groups->chunks + chunk) * size;
}
INLINE Outliers outliers_here(const Work *work, const GroupSide *side, const Piece *p) {
    return outliers_of(side, work->unit.batch * work->groups->chunks + p->chunk, p->start / TILE * work->heads + work->unit.head);
}
static void unpack_piece(Work *work, const GroupSide *side, const Piece *p) {
    int64_t row = chunk_of(work, p->chunk) * work->groups->chunk_length + p->start + p->skipped;
    unpack(side, side->codes + row * side->row_size, p->tokens, work->codes, stride_of(side));
}
/* Rows of A, which begins at some token of the chunk: the first of the piece's that it has, and where that is */
INLINE const uint16_t *rows_of_a(const Work *work, const GroupSide *side, const Piece *p, int *first) {
    int64_t at = p->start + p->skipped - (work->groups->chunk_length - side->a_tokens);
    *first = at >= 0 ? 0 : -at < p->tokens ? (int)-at : p->tokens;
    return side->low_rank_a + (chunk_of(work, p->chunk) * side->a_tokens + (at > 0 ? at : 0)) * side->rank;
}

static void fold_scales(Work *work, const GroupSide *keys, int64_t at) {
    ALIGNED float scale[MOST_CHANNELS], zero[MOST_CHANNELS];
    int dim = (int)keys->dim, size = padded(dim);
    vf base[ROWS] = {{0}};
    read_scales(keys, at, 1, dim, size, scale, zero);
    for (int r = 0; r < work->unit.rows; r++) {
        for (int d = 0; d < size; d += L) {
            vf q = load(work->query[r] + d);
            store(work->folded[r] + d, q * load(scale + d));
            base[r] += q * load(zero + d);
        }
        if (is_biased(keys)) order(work->folded[r], size);
    }
    work->base = sums_of_four(base);
}
static void score_codes(Work *work, const GroupSide *keys, const Piece *p, f4 *scores) {
    int stride = stride_of(keys), dim = (int)keys->dim, rows = work->unit.rows, groups = (int)keys->groups;
    int64_t scales = scales_of(work, keys, p->chunk), first = p->start + p->skipped;
    if (keys->by_channel) {
        int64_t size = work->groups->chunk_length / groups;
        for (int t = 0, last; t < p->tokens; t = last) {
            int64_t group = (first + t) / size, end = (group + 1) * size - first;
            last = end < p->tokens ? (int)end : p->tokens;
            if (work->group != group) fold_scales(work, keys, scales + group * dim), work->group = group;
            dot(rows, is_biased(keys), work->folded, work->codes + t * stride, stride, padded(dim), last - t, scores + t);
            for (int i = t; i < last; i++) scores[i] += work->base;
        }
        return;
    }
    f4 products[TILE];
    ALIGNED float scale[TILE], zero[TILE];
    for (int g = 0, size = dim / groups; g < groups; g++) {
        const float (*query)[MOST_CHANNELS] = (const float (*)[MOST_CHANNELS])(work->folded[0] + g * size);
        dot(rows, is_biased(keys), query, work->codes + g * size, stride, groups == 1 ? padded(dim) : size, p->tokens, products);
        read_scales(keys, scales + first * groups + g, groups, p->tokens, TILE, scale, zero);
        for (int t = 0; t < p->tokens; t++) {
            f4 own = products[t] * scale[t] + work->totals[g] * zero[t];
            scores[t] = g ? scores[t] + own : own;
        }
    }
}
static void score(Work *work, const Piece *p, f4 *scores) {
    const GroupSide *keys = work->groups->keys;
    int first;
    unpack_piece(work, keys, p);
    score_codes(work, keys, p, scores);
    add_outliers(outliers_here(work, keys, p), (uint32_t)p->skipped, (uint32_t)p->tokens, scores, work->by_channel, 1);
    if (!keys->rank) return;
    const uint16_t *a = rows_of_a(work, keys, p, &first);
    add_products(a, (int)keys->rank, p->tokens - first, work->projected, scores + first);
}
static void add_values(Work *work, const Piece *p, const float (*weights)[TILE], float (*sums)[MOST_CHANNELS]) {
    const GroupSide *values = work->groups->values;
    int stride = stride_of(values), dim = (int)values->dim, groups = (int)values->groups, rows = work->unit.rows, first;
    int64_t at = scales_of(work, values, p->chunk) + (p->start + p->skipped) * groups;
    ALIGNED float scale[TILE], zero[TILE], scaled[ROWS][TILE];
    f4 by_token[TILE];
    unpack_piece(work, values, p);
    for (int g = 0, size = dim / groups; g < groups; g++) {
        vf lows[ROWS] = {{0}};
        read_scales(values, at + g, groups, p->tokens, TILE, scale, zero);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < TILE; t += L) {
                store(scaled[r] + t, load(weights[r] + t) * load(scale + t));
                lows[r] += load(weights[r] + t) * load(zero + t);
            }
        work->zeros[g] += sums_of_four(lows);
        accumulate(
            rows, is_biased(values), scaled, work->codes + g * size, stride, groups == 1 ? padded(dim) : size, p->tokens,
            sums[0] + g * size);
    }
    if (!values->rank && !values->num_outliers) return;
    for (int t = 0; t < p->tokens; t++)
        by_token[t] = (f4){weights[0][t], rows > 1 ? weights[1][t] : 0, rows > 2 ? weights[2][t] : 0, rows > 3 ? weights[3][t] : 0};
    add_outliers(outliers_here(work, values, p), (uint32_t)p->skipped, (uint32_t)p->tokens, by_token, work->sums, 0);
    if (!values->rank) return;
    const uint16_t *a = rows_of_a(work, values, p, &first);
    sum_products(a, (int)values->rank, p->tokens - first, by_token + first, work->weighted_a);
}
/* What a chunk's tokens share: queries times B before they are scored, and sums of weighted rows of A times B behind */
static void begin_chunk(Work *work, int64_t chunk) {
    const GroupSide *keys = work->groups->keys;
    work->group = -1;
    if (!keys->rank) return;
    memset(work->projected, 0, sizeof(f4) * (size_t)keys->rank);
    const uint16_t *b = keys->low_rank_b + chunk_of(work, chunk) * keys->dim * keys->rank;
    sum_products(b, (int)keys->rank, (int)keys->dim, work->by_channel, work->projected);
}
static void end_chunk(Work *work, int64_t chunk) {
    const GroupSide *values = work->groups->values;
    if (!values->rank) return;
    const uint16_t *b = values->low_rank_b + chunk_of(work, chunk) * values->dim * values->rank;
    add_products(b, (int)values->rank, (int)values->dim, work->weighted_a, work->sums);
    memset(work->weighted_a, 0, sizeof(f4) * (size_t)values->rank);
}
static void begin(Work *work) {
    const GroupSide *keys = work->groups->keys, *values = work->groups->values;
    int dim = (int)keys->dim, size = dim / (int)keys->groups;
    memset(work->by_channel, 0, sizeof(f4) << keys->channel_bits);
    memset(work->sums, 0, sizeof(f4) << values->channel_bits);
    memset(work->zeros, 0, sizeof(f4) * (size_t)values->groups);
    memset(work->weighted_a, 0, sizeof(f4) * (size_t)values->rank);
    for (int d = 0; d < dim; d++)
        for (int r = 0; r < work->unit.rows; r++) work->by_channel[d][r] = work->query[r][d];
    if (keys->by_channel) return;
    memset(work->totals, 0, sizeof(f4) * (size_t)keys->groups);
    for (int d = 0; d < dim; d++) work->totals[d / size] += work->by_channel[d];
    for (int r = 0; r < work->unit.rows; r++) {
        memcpy(work->folded[r], work->query[r], sizeof(float) * (size_t)padded(dim));
        for (int g = 0; g < keys->groups && is_biased(keys); g++)
            order(work->folded[r] + g * size, keys->groups == 1 ? padded(dim) : size);
    }
}
static void scale_sums(Work *work, const float *factors) {
    const GroupSide *values = work->groups->values;
    f4 factor;
    memcpy(&factor, factors, sizeof factor);
    for (int g = 0; g < values->groups; g++) work->zeros[g] *= factor;
    for (int k = 0; k < values->rank; k++) work->weighted_a[k] *= factor;
    if (values->rank || values->num_outliers)
        for (int d = 0; d < values->dim; d++) work->sums[d] *= factor;
}
static void end(const Work *work, State *state) {
    const GroupSide *values = work->groups->values;
    int dim = (int)values->dim, size = dim / (int)values->groups, turned = (int)values->rotation_size;
    for (int r = 0; r < work->unit.rows; r++) {
        float *sums = turned > 1 ? state->coded[r] : state->sums[r];
        for (int d = 0; d < dim; d++) sums[d] += work->sums[d][r] + work->zeros[d / size][r];
        if (turned == 1) continue;
        hadamard(sums, dim, turned);
        for (int d = 0; d < dim; d++) state->sums[r][d] += sums[d] / sqrtf((float)turned);
    }
    state->coded_size = 0;
}
void KVC_NAME(attend_groups, KVC_LEVEL)(
    const Call *call, const Part *part, Unit unit, const Queries query, int64_t first, int64_t last, State *state) {
    Work work;
    const Groups *groups = part->stored;
    int64_t at = first * TILE, end_at = last * TILE < length_of(part, unit) ? last * TILE : length_of(part, unit), chunk = -1;
    ALIGNED float scores[ROWS][TILE], decay[ROWS] = {1, 1, 1, 1};
    f4 by_token[TILE];
    int is_turned = groups->values->rotation_size > 1;
    work.groups = groups, work.unit = unit, work.heads = call->heads, work.query = query;
    begin(&work);
    if (is_turned) {
        state->coded_size = padded(groups->values->dim);
        for (int r = 0; r < unit.rows; r++) memset(state->coded[r], 0, sizeof(float) * (size_t)state->coded_size);
    }
    /* Tiles of a run go through the part's tokens, those of outliers through a chunk's: a piece is of one of both */
    for (int64_t count; at < end_at; at += count) {
        int64_t within = at % groups->chunk_length, skipped = within % TILE;
        count = TILE - skipped;
        if (count > groups->chunk_length - within) count = groups->chunk_length - within;
        if (count > end_at - at) count = end_at - at;
        Piece piece = {at / groups->chunk_length, within - skipped, skipped, (int)count};
        if (piece.chunk != chunk) {
            if (chunk >= 0) end_chunk(&work, chunk);
            begin_chunk(&work, chunk = piece.chunk);
        }
        score(&work, &piece, by_token);
        for (int r = 0; r < unit.rows; r++)
            for (int t = 0; t < count; t++) scores[r][t] = by_token[t][r];
        add_mask(call, part, unit, at, piece.tokens, scores);
        if (softmax_tile(state, unit.rows, piece.tokens, scores, state->total, decay)) scale_sums(&work, decay);
        add_values(&work, &piece, scores, is_turned ? state->coded : state->sums);
    }
    if (chunk >= 0) end_chunk(&work, chunk);
    end(&work, state);
}

/* Attention over quantized groups: codes of 1 to 8 bits that share a scale and a zero, low-rank
   factors, and outliers. See `formats/groups.py`.

   Codes are multiplied as integers, as they are packed: their scales are part of the queries (keys
   by channel) or of the weights (values). Rounding queries or weights changes their sum, which is
   corrected as if all codes were half of the largest. If a token's keys have several groups, or
   groups of values are not of whole vectors, the codes of a tile are unpacked to bytes in the order
   of channels and then multiplied as floats. Zeros, low rank and outliers are terms added to scores
   or to channels: four numbers side by side, one a query.

   Addresses and sizes are trusted, as Python checks them. Offsets and indices of outliers are not:
   see `Outliers`. D, E channels of keys and values, T tokens of a tile, r query of the block, d
   channel, t token within the tile. */
#include "integer_products.h"

typedef v4 f4;
/* ALL_CHANNELS: channels that an index of an outlier can name. */
enum { PLANES = 3, FACTORS = 1024, ALL_CHANNELS = 1024 };

INLINE f4 splat4(float x) { return x - (f4){0}; }

INLINE vf codes_as_floats(const uint8_t *p) {
#if L == 8
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
    uint8_t bytes __attribute__((vector_size(L)));
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vf);
#endif
}

/* Reads `count` halves, `step` apart, as floats, with zeros behind them up to `size`. */
INLINE void read_halves(const half *source, int64_t step, int count, int size, float *result) {
    if (step == 1) {
        read_floats(source, F16, 0, count, size, result);
        return;
    }
    for (int i = 0; i < size; i++) result[i] = i < count ? float_of_half(source[i * step]) : 0;
}

/* One bit plane of a side's codes: where it is in a row, its bytes a token, the bits of a field,
   and their shift in a code. See `formats/bits.py` for the packing. */
typedef struct {
    int offset, size, bits, shift;
} BitPlane;

/* Lists the bit planes of codes. Returns how many they are. */
static int list_planes(const QuantizedChunks *side, BitPlane *planes) {
    int count = 0;
    int offset = 0;
    int shift = 0;
    while (shift < side->nbits) {
        int rest = (int)side->nbits - shift;
        int bits = rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
        int size = ((int)side->dim * bits + 7) / 8;
        planes[count++] = (BitPlane){offset, size, bits, shift};
        offset += size;
        shift += bits;
    }
    return count;
}

INLINE float largest_code(const QuantizedChunks *side) { return (float)((1 << side->nbits) - 1); }

/* Unpacks a bit plane of the codes of tokens into bytes, `stride` apart. */
static void unpack_plane(
    BitPlane plane, const uint8_t *rows, int64_t row_size, int tokens, uint8_t *codes, int stride) {
    int mask = (1 << plane.bits) - 1;
    for (int t = 0; t < tokens; t++)
        for (int field = 0; field < 8 / plane.bits; field++) {
            const uint8_t *packed = rows + t * row_size + plane.offset;
            uint8_t *code = codes + t * stride + field * plane.size;
            for (int j = 0; j < plane.size; j++) {
                int part = (packed[j] >> field * plane.bits & mask) << plane.shift;
                code[j] = (uint8_t)((plane.shift ? code[j] : 0) | part);
            }
        }
}

/* Products of queries with `dim` channels of tokens, as floats. */
INLINE void dot_rows(
    const int count, const float (*query)[MAX_CHANNELS], const uint8_t *codes, int stride, int dim,
    int tokens, float (*products)[TILE]) {
    for (int t = 0; t < tokens; t++) {
        const uint8_t *row = codes + t * stride;
        vf sums[BLOCK_QUERIES] = {{0}};
        int d = 0;
        for (; d + L <= dim; d += L)
            for (int r = 0; r < count; r++)
                sums[r] += codes_as_floats(row + d) * load(query[r] + d);
        for (int r = 0; r < count; r++) {
            products[r][t] = sum_of(sums[r]);
            for (int e = d; e < dim; e++) products[r][t] += (float)row[e] * query[r][e];
        }
    }
}

/* Adds weighted codes, as floats. */
INLINE void accumulate_rows(
    const int count, const float (*weights)[TILE], const uint8_t *codes, int stride, int dim,
    int tokens, float *sums) {
    int d = 0;
    for (; d + L <= dim; d += L) {
        vf totals[BLOCK_QUERIES] = {{0}};
        for (int t = 0; t < tokens; t++) {
            vf x = codes_as_floats(codes + t * stride + d);
            for (int r = 0; r < count; r++) totals[r] += x * weights[r][t];
        }
        for (int r = 0; r < count; r++) {
            float *sum = sums + r * MAX_CHANNELS + d;
            store(sum, load(sum) + totals[r]);
        }
    }
    for (; d < dim; d++)
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < count; r++)
                sums[r * MAX_CHANNELS + d] += (float)codes[t * stride + d] * weights[r][t];
}

static void dot(
    int count, const float (*query)[MAX_CHANNELS], const uint8_t *codes, int stride, int dim,
    int tokens, float (*products)[TILE]) {
    UNROLL_QUERIES(count, dot_rows, query, codes, stride, dim, tokens, products)
}

static void accumulate(
    int count, const float (*weights)[TILE], const uint8_t *codes, int stride, int dim, int tokens,
    float *sums) {
    UNROLL_QUERIES(count, accumulate_rows, weights, codes, stride, dim, tokens, sums)
}

/* Weights of a tile's tokens as integers; the factor that sums have to be multiplied by, and what
   rounding took from the sum of all. */
typedef struct {
    ALIGNED int16_t words[TILE];
    float factor, lost;
} IntegerWeights;

static void round_weights(const float *weights, IntegerWeights *rounded) {
    vf high = {0};
    vf nothing = {0};
    vf lost = {0};
    vf rounding = splat(ROUNDING);
    for (int t = 0; t < TILE; t += L) {
        vf w = load(weights + t);
        high = larger(larger(w, -w), high);
        nothing += w * 0;
    }
    float magnitude = largest_of(high) + sum_of(nothing);
    float step = magnitude > 1e-30f ? 32767 / magnitude : 0;
    rounded->factor = magnitude / 32767;
    for (int t = 0; t < TILE; t += L) {
        vf w = load(weights + t);
        vf nearest = w * step + rounding;
        vh words = __builtin_convertvector((vi)nearest - (vi)rounding, vh);
        memcpy(rounded->words + t, &words, sizeof words);
        lost += w - (nearest - rounding) * rounded->factor;
    }
    rounded->lost = sum_of(lost);
}

/* L bytes of one token beside those of another, as words. */
INLINE vw bytes_side_by_side(const uint8_t *p, const uint8_t *q) {
#if L == 8
    __m128i a = _mm_loadl_epi64((const __m128i *)p);
    __m128i b = _mm_loadl_epi64((const __m128i *)q);
    return (vw)_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
#elif defined(KVC_IS_NEON)
    uint32_t a, b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, q, sizeof b);
    return (vw)vmovl_u8(vzip1_u8(vcreate_u8(a), vcreate_u8(b)));
#else
    vw v;
    for (int i = 0; i < L; i++) {
        v[2 * i] = p[i];
        v[2 * i + 1] = q[i];
    }
    return v;
#endif
}

/* One bit plane of the codes of a tile: `width` bytes a token, `stride` apart, with fields of
   `bits`, which count `unit` each; and the channels of all groups and of one. */
typedef struct {
    const uint8_t *codes;
    int width, bits, stride, tokens, dim, group_size;
    float unit;
} Plane;

/* Adds to `sums` the weighted codes of `fields` fields, from `field` on, of L bytes from `byte` on.
   `weights` are those of every group of channels: of one group, or of groups of whole vectors. */
INLINE void add_fields(
    const int count, const int fields, const int is_one, const Plane *p,
    const IntegerWeights (*weights)[BLOCK_QUERIES], int byte, int field,
    float (*sums)[MAX_CHANNELS]) {
    vw mask = (vw){0} + (int16_t)((1 << p->bits) - 1);
    const IntegerWeights *weights_of[4];
    vi totals[4][BLOCK_QUERIES];
    for (int f = 0; f < fields; f++) {
        int group = is_one ? 0 : ((field + f) * p->width + byte) / p->group_size;
        weights_of[f] = weights[group];
        for (int r = 0; r < count; r++) totals[f][r] = (vi){0};
    }
    for (int t = 0; t < p->tokens; t += 2) {
        const uint8_t *first = p->codes + t * p->stride + byte;
        /* The weight of a token behind the last is 0. */
        const uint8_t *second = t + 1 < p->tokens ? first + p->stride : first;
        vw packed = bytes_side_by_side(first, second) >> (int16_t)(p->bits * field);
        vi pair[BLOCK_QUERIES];
        for (int f = 0; f < fields; f++)
            for (int r = 0; r < count; r++) {
                if (!f || !is_one) {
                    int32_t both;
                    memcpy(&both, weights_of[f][r].words + t, sizeof both);
                    pair[r] = (vi){0} + both;
                }
                vw codes = packed >> (int16_t)(p->bits * f) & mask;
                totals[f][r] = add_products_of_words(totals[f][r], codes, (vw)pair[r]);
            }
    }
    for (int f = 0; f < fields; f++)
        for (int r = 0; r < count; r++) {
            /* The last bytes of a row are read with some that were added before. */
            int d = (field + f) * p->width + byte;
            int added = byte % L ? L - p->width % L : 0;
            float *sum = sums[r] + d;
            ALIGNED float x[L];
            float factor = weights_of[f][r].factor * p->unit;
            store(x, __builtin_convertvector(totals[f][r], vf) * factor);
            if (!added && d + L <= p->dim) {
                store(sum, load(sum) + load(x));
                continue;
            }
            for (int i = added; i < L && d + i < p->dim; i++) sum[i] += x[i];
        }
}

INLINE void add_plane(
    const int count, const int fields, const int is_one, const Plane *p,
    const IntegerWeights (*weights)[BLOCK_QUERIES], float (*sums)[MAX_CHANNELS]) {
    for (int byte = 0; byte < p->width; byte += L) {
        int first = byte + L <= p->width ? byte : p->width - L;
        for (int field = 0; field < 8 / p->bits; field += fields)
            add_fields(count, fields, is_one, p, weights, first, field, sums);
    }
}

/* Adds weighted codes, as many fields at once as there are registers for. */
static void add_codes(
    int count, int is_one, const Plane *p, const IntegerWeights (*weights)[BLOCK_QUERIES],
    float (*sums)[MAX_CHANNELS]) {
    int all = 8 / p->bits;
    int fields = all <= 2 ? all : count == 4 && L == 8 ? 2 : 4;
#define ADD(fields, count) \
    is_one ? add_plane(count, fields, 1, p, weights, sums) \
           : add_plane(count, fields, 0, p, weights, sums)
    switch (fields * 8 + count) {
    FOR_QUERIES(ADD, 1)
    FOR_QUERIES(ADD, 2)
    FOR_QUERIES(ADD, 4)
    }
#undef ADD
}

/* Reads scales and zeros of `count` numbers as floats, with 0 behind them up to `size`. */
static void read_scales(
    const QuantizedChunks *side, int64_t first, int64_t step, int count, int size, float *scale,
    float *zero) {
    read_halves(side->scale + first, step, count, size, scale);
    read_halves(side->zero + first, step, count, size, zero);
}

/* out[i] += factors[i] columns, with factors [count, rank]. */
static void add_products(const half *factors, int rank, int count, const f4 *columns, f4 *out) {
    ALIGNED float floats[FACTORS];
    int step = FACTORS / rank;
    for (int first = 0; first < count; first += step) {
        int rows = count - first < step ? count - first : step;
        read_halves(factors + first * rank, 1, rows * rank, rows * rank, floats);
        for (int i = 0; i < rows; i++)
            for (int k = 0; k < rank; k++)
                out[first + i] += splat4(floats[i * rank + k]) * columns[k];
    }
}

/* columns[k] += sum of factors[i][k] in[i], with factors [count, rank]. */
static void sum_products(const half *factors, int rank, int count, const f4 *in, f4 *columns) {
    ALIGNED float floats[FACTORS];
    int step = FACTORS / rank;
    for (int first = 0; first < count; first += step) {
        int rows = count - first < step ? count - first : step;
        read_halves(factors + first * rank, 1, rows * rank, rows * rank, floats);
        for (int k = 0; k < rank; k++) {
            f4 even = {0};
            f4 odd = {0};
            int i = 0;
            for (; i + 2 <= rows; i += 2) {
                even += splat4(floats[i * rank + k]) * in[first + i];
                odd += splat4(floats[(i + 1) * rank + k]) * in[first + i + 1];
            }
            if (i < rows) even += splat4(floats[i * rank + k]) * in[first + i];
            columns[k] += even + odd;
        }
    }
}

/* The outliers of a chunk that a tile and head has. Offsets are clamped to the list; a token that
   is not of the tile is skipped, and arrays have room for every channel that an index can name. */
typedef struct {
    const void *indices;
    const half *values;
    int first, last, is_wide, channel_bits;
} Outliers;

INLINE Outliers outliers_of(const QuantizedChunks *side, int64_t chunk, int64_t slot) {
    if (!side->num_outliers) return (Outliers){0};
    const int32_t *offsets = side->outlier_offsets + chunk * side->num_offsets + slot;
    int count = (int)side->num_outliers;
    int64_t index_size = side->is_wide ? 4 : 2;
    return (Outliers){
        .indices = (const char *)side->outlier_indices + chunk * count * index_size,
        .values = side->outlier_values + chunk * count,
        .first = offsets[0] < 0 ? 0 : offsets[0],
        .last = offsets[1] > count ? count : offsets[1],
        .is_wide = (int)side->is_wide,
        .channel_bits = (int)side->channel_bits};
}

INLINE uint32_t index_of(const Outliers *outliers, int i) {
    if (outliers->is_wide) return ((const uint32_t *)outliers->indices)[i];
    return ((const uint16_t *)outliers->indices)[i];
}

/* by_token[token] += value by_channel[channel] for keys, and the other way round for values. */
INLINE void add_outliers(
    Outliers outliers, uint32_t skipped, uint32_t tokens, f4 *by_token, f4 *by_channel,
    const int is_keys) {
    uint32_t mask = (1u << outliers.channel_bits) - 1;
    for (int i = outliers.first; i < outliers.last; i++) {
        uint32_t index = index_of(&outliers, i);
        uint32_t t = (index >> outliers.channel_bits) - skipped;
        uint32_t d = index & mask;
        f4 x = splat4(float_of_half(outliers.values[i]));
        if (t >= tokens) continue;
        if (is_keys)
            by_token[t] += x * by_channel[d];
        else
            by_channel[d] += x * by_token[t];
    }
}

/* Tokens of a chunk that are in one tile of it, which starts at token `start` of the chunk: behind
   the first `skipped` ones of the tile, `tokens` of them. */
typedef struct {
    int64_t chunk, start, skipped;
    int tokens;
} Piece;

typedef struct {
    const GroupPart *groups;
    QueryBlock block;
    int64_t heads, group;
    const float (*query)[MAX_CHANNELS];
    int key_planes, value_planes;
    BitPlane keys[PLANES], values[PLANES];
    IntegerQueries integers[PLANES]; /* queries, times the scales of `group` if by channel */
    ALIGNED uint8_t codes[TILE * MAX_CHANNELS];
    f4 lost;                        /* by rounding, if all codes were half of the largest */
    f4 base;                        /* added to a score: `lost` and the zeros of the group */
    f4 by_channel[ALL_CHANNELS];    /* queries */
    f4 totals[MAX_CHANNELS];        /* sums of the queries of every group of channels */
    f4 projected[MAX_CHANNELS];     /* queries times B of the chunk */
    f4 sums[ALL_CHANNELS];          /* of outliers and low rank, by channel */
    f4 zeros[MAX_CHANNELS], weighted_a[MAX_CHANNELS];
} GroupScratch;

INLINE int stride_of(const QuantizedChunks *side) { return (int)(side->dim + 15) & ~15; }

INLINE int64_t chunk_index(const GroupScratch *scratch, int64_t chunk) {
    return scratch->block.bh * scratch->groups->chunks + chunk;
}

/* Index of the first scale of a chunk. */
INLINE int64_t first_scale(
    const GroupScratch *scratch, const QuantizedChunks *side, int64_t chunk) {
    int64_t head = side->scale_heads > 1 ? scratch->block.head : 0;
    int64_t size = side->groups * (side->by_channel ? side->dim : scratch->groups->chunk_length);
    int64_t bh = scratch->block.batch * side->scale_heads + head;
    return (bh * scratch->groups->chunks + chunk) * size;
}

INLINE Outliers outliers_here(
    const GroupScratch *scratch, const QuantizedChunks *side, const Piece *p) {
    int64_t chunk = scratch->block.batch * scratch->groups->chunks + p->chunk;
    return outliers_of(side, chunk, p->start / TILE * scratch->heads + scratch->block.head);
}

/* Index of the first token of a piece among those of all chunks. */
INLINE int64_t first_token(const GroupScratch *scratch, const Piece *p) {
    int64_t chunk = chunk_index(scratch, p->chunk);
    return chunk * scratch->groups->chunk_length + p->start + p->skipped;
}

INLINE const uint8_t *codes_of(
    const GroupScratch *scratch, const QuantizedChunks *side, const Piece *p) {
    return side->codes + first_token(scratch, p) * side->row_size;
}

INLINE const half *rows_of_a(
    const GroupScratch *scratch, const QuantizedChunks *side, const Piece *p) {
    return side->low_rank_a + first_token(scratch, p) * side->rank;
}

/* Rounds queries to integers for every bit plane of keys. */
static void round_for_planes(
    GroupScratch *scratch, const QuantizedChunks *keys, const float (*query)[MAX_CHANNELS]) {
    int count = scratch->block.count;
    for (int r = 0; r < count; r++) {
        vf sum = {0};
        for (int d = 0; d < padded(keys->dim); d += L) sum += load(query[r] + d);
        scratch->lost[r] = sum_of(sum) * largest_code(keys) / 2;
    }
    for (int p = 0; p < scratch->key_planes; p++) {
        BitPlane plane = scratch->keys[p];
        IntegerQueries *integers = &scratch->integers[p];
        float unit = (float)(1 << plane.shift);
        integers->dim = (int)keys->dim;
        integers->width = plane.size;
        integers->fields = 8 / plane.bits;
        integers->stride = (int)keys->row_size;
        round_queries(integers, count, query);
        for (int r = 0; r < count; r++) {
            integers->factor[r] *= unit;
            scratch->lost[r] += integers->base[r] * unit;
        }
    }
}

/* Products of all channels with the codes of tokens. */
static void multiply_planes(
    GroupScratch *scratch, const uint8_t *codes, int tokens, float (*products)[TILE]) {
    ALIGNED float of_plane[BLOCK_QUERIES][TILE];
    int count = scratch->block.count;
    for (int p = 0; p < scratch->key_planes; p++) {
        const IntegerQueries *integers = &scratch->integers[p];
        dot_codes(integers, count, codes + scratch->keys[p].offset, tokens, of_plane);
        for (int r = 0; r < count; r++)
            for (int t = 0; t < TILE; t += L) {
                vf x = load(of_plane[r] + t) * integers->factor[r];
                store(products[r] + t, p ? load(products[r] + t) + x : x);
            }
    }
}

/* Multiplies queries with the scales of a group of tokens, from scale `first` on. */
static void fold_scales(GroupScratch *scratch, const QuantizedChunks *keys, int64_t first) {
    ALIGNED float scale[MAX_CHANNELS], zero[MAX_CHANNELS], folded[BLOCK_QUERIES][MAX_CHANNELS];
    int dim = (int)keys->dim;
    int size = padded(dim);
    vf base[BLOCK_QUERIES] = {{0}};
    read_scales(keys, first, 1, dim, size, scale, zero);
    for (int r = 0; r < scratch->block.count; r++)
        for (int d = 0; d < size; d += L) {
            vf q = load(scratch->query[r] + d);
            store(folded[r] + d, q * load(scale + d));
            base[r] += q * load(zero + d);
        }
    round_for_planes(scratch, keys, (const float (*)[MAX_CHANNELS])folded);
    scratch->base = sums_of_four(base[0], base[1], base[2], base[3]) + scratch->lost;
}

static void score_by_channel(
    GroupScratch *scratch, const QuantizedChunks *keys, const Piece *p, float (*scores)[TILE]) {
    int64_t size = scratch->groups->chunk_length / keys->groups;
    int64_t scales = first_scale(scratch, keys, p->chunk);
    int64_t first = p->start + p->skipped;
    const uint8_t *codes = codes_of(scratch, keys, p);
    ALIGNED float products[BLOCK_QUERIES][TILE];
    int t = 0;
    while (t < p->tokens) {
        int64_t group = (first + t) / size;
        int64_t end = (group + 1) * size - first;
        int last = end < p->tokens ? (int)end : p->tokens;
        if (scratch->group != group) {
            fold_scales(scratch, keys, scales + group * keys->dim);
            scratch->group = group;
        }
        multiply_planes(scratch, codes + t * keys->row_size, last - t, products);
        for (int r = 0; r < scratch->block.count; r++)
            for (int i = t; i < last; i++) scores[r][i] = products[r][i - t] + scratch->base[r];
        t = last;
    }
}

static void score_by_token(
    GroupScratch *scratch, const QuantizedChunks *keys, const Piece *p, float (*scores)[TILE]) {
    int stride = stride_of(keys);
    int count = scratch->block.count;
    int groups = (int)keys->groups;
    int size = (int)keys->dim / groups;
    int64_t scales = first_scale(scratch, keys, p->chunk) + (p->start + p->skipped) * groups;
    const uint8_t *codes = codes_of(scratch, keys, p);
    ALIGNED float products[BLOCK_QUERIES][TILE], scale[TILE], zero[TILE];
    for (int i = 0; i < scratch->key_planes && groups > 1; i++)
        unpack_plane(scratch->keys[i], codes, keys->row_size, p->tokens, scratch->codes, stride);
    for (int g = 0; g < groups; g++) {
        if (groups == 1) {
            multiply_planes(scratch, codes, p->tokens, products);
        } else {
            const float (*query)[MAX_CHANNELS] =
                (const float (*)[MAX_CHANNELS])(scratch->query[0] + g * size);
            dot(count, query, scratch->codes + g * size, stride, size, p->tokens, products);
        }
        read_scales(keys, scales + g, groups, p->tokens, TILE, scale, zero);
        for (int r = 0; r < count; r++)
            for (int t = 0; t < TILE; t += L) {
                vf product = load(products[r] + t) + scratch->lost[r];
                vf x = product * load(scale + t) + load(zero + t) * scratch->totals[g][r];
                store(scores[r] + t, g ? load(scores[r] + t) + x : x);
            }
    }
}

static void score_piece(GroupScratch *scratch, const Piece *p, float (*scores)[TILE]) {
    const QuantizedChunks *keys = scratch->groups->keys;
    uint32_t skipped = (uint32_t)p->skipped;
    f4 terms[TILE] = {{0}};
    if (keys->by_channel)
        score_by_channel(scratch, keys, p, scores);
    else
        score_by_token(scratch, keys, p, scores);
    if (!keys->rank && !keys->num_outliers) return;
    Outliers outliers = outliers_here(scratch, keys, p);
    add_outliers(outliers, skipped, (uint32_t)p->tokens, terms, scratch->by_channel, 1);
    if (keys->rank) {
        const half *a = rows_of_a(scratch, keys, p);
        add_products(a, (int)keys->rank, p->tokens, scratch->projected, terms);
    }
    for (int r = 0; r < scratch->block.count; r++)
        for (int t = 0; t < p->tokens; t++) scores[r][t] += terms[t][r];
}

/* Returns true if groups of channels are of whole vectors as they are packed. */
static int is_packed_by_vectors(const GroupScratch *scratch, const QuantizedChunks *values) {
    for (int i = 0; i < scratch->value_planes; i++) {
        int size = scratch->values[i].size;
        if (size < L) return 0;
        if (values->groups > 1 && (size % L || values->dim / values->groups % L)) return 0;
    }
    return 1;
}

/* Adds the values of a piece, times their weights, of one group of channels after the other. */
static void add_values(
    GroupScratch *scratch, const Piece *p, const float (*weights)[TILE],
    float (*sums)[MAX_CHANNELS]) {
    const QuantizedChunks *values = scratch->groups->values;
    int stride = stride_of(values);
    int dim = (int)values->dim;
    int groups = (int)values->groups;
    int size = dim / groups;
    int count = scratch->block.count;
    int64_t scales = first_scale(scratch, values, p->chunk) + (p->start + p->skipped) * groups;
    const uint8_t *codes = codes_of(scratch, values, p);
    int is_packed = is_packed_by_vectors(scratch, values);
    ALIGNED float scale[TILE], zero[TILE], scaled[BLOCK_QUERIES][TILE];
    IntegerWeights rounded[MAX_CHANNELS / L][BLOCK_QUERIES];
    for (int i = 0; i < scratch->value_planes && !is_packed; i++)
        unpack_plane(
            scratch->values[i], codes, values->row_size, p->tokens, scratch->codes, stride);
    for (int g = 0; g < groups; g++) {
        vf zeros[BLOCK_QUERIES] = {{0}};
        read_scales(values, scales + g, groups, p->tokens, TILE, scale, zero);
        for (int r = 0; r < count; r++) {
            for (int t = 0; t < TILE; t += L) {
                store(scaled[r] + t, load(weights[r] + t) * load(scale + t));
                zeros[r] += load(weights[r] + t) * load(zero + t);
            }
            if (!is_packed) continue;
            round_weights(scaled[r], &rounded[g][r]);
            scratch->zeros[g][r] += rounded[g][r].lost * largest_code(values) / 2;
        }
        scratch->zeros[g] += sums_of_four(zeros[0], zeros[1], zeros[2], zeros[3]);
        if (is_packed) continue;
        accumulate(
            count, (const float (*)[TILE])scaled, scratch->codes + g * size, stride, size,
            p->tokens, sums[0] + g * size);
    }
    for (int i = 0; i < scratch->value_planes && is_packed; i++) {
        BitPlane bits = scratch->values[i];
        Plane plane = {
            .codes = codes + bits.offset,
            .width = bits.size,
            .bits = bits.bits,
            .stride = (int)values->row_size,
            .tokens = p->tokens,
            .dim = dim,
            .group_size = size,
            .unit = (float)(1 << bits.shift)};
        const IntegerWeights (*by_group)[BLOCK_QUERIES] = rounded;
        add_codes(count, groups == 1, &plane, by_group, sums);
    }
}

/* Adds the weighted low rank and outliers of values. */
static void add_value_terms(
    GroupScratch *scratch, const Piece *p, const float (*weights)[TILE]) {
    const QuantizedChunks *values = scratch->groups->values;
    int count = scratch->block.count;
    f4 by_token[TILE];
    if (!values->rank && !values->num_outliers) return;
    for (int t = 0; t < p->tokens; t++)
        by_token[t] = (f4){
            weights[0][t], count > 1 ? weights[1][t] : 0, count > 2 ? weights[2][t] : 0,
            count > 3 ? weights[3][t] : 0};
    Outliers outliers = outliers_here(scratch, values, p);
    add_outliers(
        outliers, (uint32_t)p->skipped, (uint32_t)p->tokens, by_token, scratch->sums, 0);
    if (values->rank) {
        const half *a = rows_of_a(scratch, values, p);
        sum_products(a, (int)values->rank, p->tokens, by_token, scratch->weighted_a);
    }
}

/* Multiplies queries with B, which the tokens of a chunk share. */
static void begin_chunk(GroupScratch *scratch, int64_t chunk) {
    const QuantizedChunks *keys = scratch->groups->keys;
    int rank = (int)keys->rank;
    scratch->group = -1;
    if (!rank) return;
    memset(scratch->projected, 0, sizeof(f4) * (size_t)rank);
    const half *b = keys->low_rank_b + chunk_index(scratch, chunk) * keys->dim * rank;
    sum_products(b, rank, (int)keys->dim, scratch->by_channel, scratch->projected);
}

/* Multiplies the weighted rows of A with B. */
static void end_chunk(GroupScratch *scratch, int64_t chunk) {
    const QuantizedChunks *values = scratch->groups->values;
    int rank = (int)values->rank;
    if (!rank) return;
    const half *b = values->low_rank_b + chunk_index(scratch, chunk) * values->dim * rank;
    add_products(b, rank, (int)values->dim, scratch->weighted_a, scratch->sums);
    memset(scratch->weighted_a, 0, sizeof(f4) * (size_t)rank);
}

static void begin_part(GroupScratch *scratch) {
    const QuantizedChunks *keys = scratch->groups->keys;
    const QuantizedChunks *values = scratch->groups->values;
    int dim = (int)keys->dim;
    int size = dim / (int)keys->groups;
    scratch->key_planes = list_planes(keys, scratch->keys);
    scratch->value_planes = list_planes(values, scratch->values);
    memset(scratch->by_channel, 0, sizeof(f4) << keys->channel_bits);
    memset(scratch->sums, 0, sizeof(f4) << values->channel_bits);
    memset(scratch->zeros, 0, sizeof(f4) * (size_t)values->groups);
    memset(scratch->weighted_a, 0, sizeof(f4) * (size_t)values->rank);
    for (int d = 0; d < dim; d++)
        for (int r = 0; r < scratch->block.count; r++)
            scratch->by_channel[d][r] = scratch->query[r][d];
    if (keys->by_channel) return;
    memset(scratch->totals, 0, sizeof(f4) * (size_t)keys->groups);
    for (int d = 0; d < dim; d++) scratch->totals[d / size] += scratch->by_channel[d];
    scratch->lost = (f4){0};
    if (keys->groups == 1) round_for_planes(scratch, keys, scratch->query);
}

static void scale_sums(GroupScratch *scratch, const float *decay) {
    const QuantizedChunks *values = scratch->groups->values;
    f4 factor;
    memcpy(&factor, decay, sizeof factor);
    for (int g = 0; g < values->groups; g++) scratch->zeros[g] *= factor;
    for (int k = 0; k < values->rank; k++) scratch->weighted_a[k] *= factor;
    if (!values->rank && !values->num_outliers) return;
    for (int d = 0; d < values->dim; d++) scratch->sums[d] *= factor;
}

/* Adds what the part summed up by channel to the state, rotated back if values are rotated. */
static void end_part(const GroupScratch *scratch, SoftmaxState *state) {
    const QuantizedChunks *values = scratch->groups->values;
    int dim = (int)values->dim;
    int size = dim / (int)values->groups;
    int rotation = (int)values->rotation_size;
    for (int r = 0; r < scratch->block.count; r++) {
        float *sums = rotation > 1 ? state->rotated[r] : state->sums[r];
        for (int d = 0; d < dim; d++)
            sums[d] += scratch->sums[d][r] + scratch->zeros[d / size][r];
        if (rotation == 1) continue;
        hadamard(sums, dim, rotation);
        for (int d = 0; d < dim; d++) state->sums[r][d] += sums[d] / sqrtf((float)rotation);
    }
    state->rotated_size = 0;
}

/* The tokens from `token` on that are in one chunk and in one tile of it: tiles of a split divide
   the tokens of the part, those of outliers the tokens of a chunk. */
INLINE Piece piece_at(const GroupPart *groups, int64_t token, int64_t end) {
    int64_t within = token % groups->chunk_length;
    int64_t skipped = within % TILE;
    int64_t tokens = min_of(TILE - skipped, groups->chunk_length - within);
    tokens = min_of(tokens, end - token);
    return (Piece){token / groups->chunk_length, within - skipped, skipped, (int)tokens};
}

void KVC_NAME(attend_groups, KVC_LEVEL)(
    const AttentionArgs *args, const Part *part, QueryBlock block, const Queries query,
    int64_t first, int64_t last, SoftmaxState *state) {
    GroupScratch scratch;
    const GroupPart *groups = part->stored;
    int64_t token = first * TILE;
    int64_t end = min_of(last * TILE, length_of(part, block));
    int64_t chunk = -1;
    int is_rotated = groups->values->rotation_size > 1;
    ALIGNED float scores[BLOCK_QUERIES][TILE], decay[BLOCK_QUERIES] = {1, 1, 1, 1};
    scratch.groups = groups;
    scratch.block = block;
    scratch.heads = args->heads;
    scratch.query = query;
    begin_part(&scratch);
    if (is_rotated) {
        state->rotated_size = padded(groups->values->dim);
        size_t size = sizeof(float) * (size_t)state->rotated_size;
        for (int r = 0; r < block.count; r++) memset(state->rotated[r], 0, size);
    }
    while (token < end) {
        Piece piece = piece_at(groups, token, end);
        if (piece.chunk != chunk) {
            if (chunk >= 0) end_chunk(&scratch, chunk);
            chunk = piece.chunk;
            begin_chunk(&scratch, chunk);
        }
        score_piece(&scratch, &piece, scores);
        add_mask(args, part, block, token, piece.tokens, scores);
        if (softmax_tile(state, block.count, piece.tokens, scores, state->total, decay))
            scale_sums(&scratch, decay);
        add_values(&scratch, &piece, scores, is_rotated ? state->rotated : state->sums);
        add_value_terms(&scratch, &piece, scores);
        token += piece.tokens;
    }
    if (chunk >= 0) end_chunk(&scratch, chunk);
    end_part(&scratch, state);
}

/* Attention over groups: codes of 1 to 8 bits that share a scale and a zero, low-rank factors, outliers. See `groups.py`.

   Codes are multiplied as integers, as they are packed: scales are part of the queries (keys by channel) or of the
   weights (values). What rounding these takes from a sum is given back for codes that are half of the largest. Where a
   token's keys have several groups, or groups of values are not of whole vectors, a tile's codes become bytes in the order
   of the channels and then floats. Zeros, low rank and outliers are what they add to a score or to a channel: four numbers
   side by side, one a query.

   Believed of memory is what `groups.py` checks: addresses and sizes. Offsets and indices of outliers are not: see
   `Outliers`. D, E channels of keys and values, T tokens of a tile, r query, d channel, t token within the tile. */
#include "integer_products.h"

typedef v4 f4;
enum { PLANES = 3, FACTORS = 1024, ALL_CHANNELS = 1024 /* that an index of an outlier can name */ };

INLINE f4 splat4(float x) { return x - (f4){0}; }
INLINE vf codes_at(const uint8_t *p) {
#if defined(KVC_IS_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    uint8_t b __attribute__((vector_size(L)));
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vf);
#endif
}
/* Halves, `step` apart, as floats, and zeros up to `size` */
INLINE void halves_of(const uint16_t *from, int64_t step, int count, int size, float *to) {
    if (step == 1) read_numbers(from, HALVES, 0, count, size, to);
    else for (int i = 0; i < size; i++) to[i] = i < count ? float_of_half(from[i * step]) : 0;
}

/* Goes through the planes of a side's codes: where one is in a row, its bytes a token, the bits of a field, and how far up in
   a code they stand; see `codecs.quantization` for the packing */
#define FOR_PLANES(side, offset, size, bits, shift) \
    for (int shift = 0, offset = 0, bits, size; \
         shift < (side)->nbits && (bits = plane_bits((int)(side)->nbits - shift), size = ((int)(side)->dim * bits + 7) / 8, 1); \
         shift += bits, offset += size)
INLINE float largest_code(const GroupSide *side) { return (float)((1 << side->nbits) - 1); }
INLINE int plane_bits(int rest) { return rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1; }
static void unpack(const GroupSide *side, const uint8_t *rows, int tokens, uint8_t *codes, int stride) {
    FOR_PLANES(side, offset, size, bits, shift)
        for (int t = 0; t < tokens; t++)
            for (int slab = 0; slab < 8 / bits; slab++) {
                const uint8_t *from = rows + t * side->row_size + offset;
                uint8_t *to = codes + t * stride + slab * size;
                for (int j = 0; j < size; j++)
                    to[j] = (uint8_t)((shift ? to[j] : 0) | (from[j] >> slab * bits & ((1 << bits) - 1)) << shift);
            }
}

/* Products of queries with `dim` channels of tokens, as floats */
INLINE void dot_rows(
    const int rows, const float (*query)[MOST_CHANNELS], const uint8_t *codes, int stride, int dim, int tokens,
    float (*products)[TILE]) {
    for (int t = 0; t < tokens; t++) {
        const uint8_t *at = codes + t * stride;
        vf sums[ROWS] = {{0}};
        int d = 0;
        for (; d + L <= dim; d += L)
            for (int r = 0; r < rows; r++) sums[r] += codes_at(at + d) * load(query[r] + d);
        for (int r = 0; r < rows; r++) {
            products[r][t] = sum_of(sums[r]);
            for (int e = d; e < dim; e++) products[r][t] += (float)at[e] * query[r][e];
        }
    }
}
/* Adds weighted codes, as floats */
INLINE void accumulate_rows(
    const int rows, const float (*w)[TILE], const uint8_t *codes, int stride, int dim, int tokens, float *sums) {
    int d = 0;
    for (; d + L <= dim; d += L) {
        vf own[ROWS] = {{0}};
        for (int t = 0; t < tokens; t++) {
            vf x = codes_at(codes + t * stride + d);
            for (int r = 0; r < rows; r++) own[r] += x * w[r][t];
        }
        for (int r = 0; r < rows; r++) store(sums + r * MOST_CHANNELS + d, load(sums + r * MOST_CHANNELS + d) + own[r]);
    }
    for (; d < dim; d++)
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < rows; r++) sums[r * MOST_CHANNELS + d] += (float)codes[t * stride + d] * w[r][t];
}
static void dot(
    int rows, const float (*q)[MOST_CHANNELS], const uint8_t *codes, int stride, int dim, int tokens, float (*products)[TILE]) {
    BY_ROWS(rows, dot_rows, q, codes, stride, dim, tokens, products)
}
static void accumulate(
    int rows, const float (*w)[TILE], const uint8_t *codes, int stride, int dim, int tokens, float *sums) {
    BY_ROWS(rows, accumulate_rows, w, codes, stride, dim, tokens, sums)
}

/* Weights of a tile's tokens as integers, a pair of tokens side by side; by what sums have to be multiplied, and what
   rounding took from the sum of all */
typedef struct { ALIGNED int16_t words[TILE]; float factor, lost; } Weights;
static void round_weights(const float *weights, Weights *to) {
    vf high = {0}, nothing = {0}, lost = {0}, magic = splat(12582912.0f);
    for (int t = 0; t < TILE; t += L) {
        vf w = load(weights + t);
        high = larger(larger(w, -w), high), nothing += w * 0;
    }
    float most = largest_of(high) + sum_of(nothing), step = most > 1e-30f ? 32767 / most : 0;
    to->factor = most / 32767;
    for (int t = 0; t < TILE; t += L) {
        vf w = load(weights + t), rounded = w * step + magic;
        vh words = __builtin_convertvector((vi)rounded - (vi)magic, vh);
        memcpy(to->words + t, &words, sizeof words);
        lost += w - (rounded - magic) * to->factor;
    }
    to->lost = sum_of(lost);
}
/* L bytes of one token beside those of another, as words */
INLINE vw bytes_side_by_side(const uint8_t *p, const uint8_t *q) {
#if defined(KVC_IS_AVX2)
    __m128i a = _mm_loadl_epi64((const __m128i *)p), b = _mm_loadl_epi64((const __m128i *)q);
    return (vw)_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
#elif defined(KVC_IS_NEON)
    uint32_t a, b;
    memcpy(&a, p, sizeof a), memcpy(&b, q, sizeof b);
    return (vw)vmovl_u8(vzip1_u8(vcreate_u8(a), vcreate_u8(b)));
#else
    vw v;
    for (int i = 0; i < L; i++) v[2 * i] = p[i], v[2 * i + 1] = q[i];
    return v;
#endif
}
/* One bit-plane of a tile's codes: of P bytes a token and fields of `bits`, which count `unit` each */
typedef struct { const uint8_t *codes; int width, bits, row, tokens, dim, group; float unit; } Plane;
/* Adds the weighted codes of L bytes from `byte` on, of `fields` fields from `field` on, to `sums`. `weights` are those of
   every group of channels: one for all, or each of whole vectors. */
INLINE void add_fields(
    const int rows, const int fields, const int is_one, const Plane *p, const Weights (*weights)[ROWS], int byte, int field,
    float (*sums)[MOST_CHANNELS]) {
    vw mask = (vw){0} + (int16_t)((1 << p->bits) - 1);
    const Weights *by[4];
    vi own[4][ROWS];
    for (int f = 0; f < fields; f++) {
        by[f] = is_one ? weights[0] : weights[((field + f) * p->width + byte) / p->group];
        for (int r = 0; r < rows; r++) own[f][r] = (vi){0};
    }
    for (int t = 0; t < p->tokens; t += 2) {
        const uint8_t *first = p->codes + t * p->row + byte;
        /* The weight of a token behind the last is 0 */
        vw packed = bytes_side_by_side(first, t + 1 < p->tokens ? first + p->row : first) >> (int16_t)(p->bits * field);
        vi pair[ROWS];
        for (int f = 0; f < fields; f++)
            for (int r = 0; r < rows; r++) {
                int32_t both;
                if (!f || !is_one) memcpy(&both, by[f][r].words + t, sizeof both), pair[r] = (vi){0} + both;
                own[f][r] = add_products_of_words(own[f][r], packed >> (int16_t)(p->bits * f) & mask, (vw)pair[r]);
            }
    }
    for (int f = 0; f < fields; f++)
        for (int r = 0; r < rows; r++) {
            /* The last bytes of a row are read with some that were before them */
            int at = (field + f) * p->width + byte, seen = byte % L ? L - p->width % L : 0;
            ALIGNED float x[L];
            store(x, __builtin_convertvector(own[f][r], vf) * (by[f][r].factor * p->unit));
            if (!seen && at + L <= p->dim) store(sums[r] + at, load(sums[r] + at) + load(x));
            else for (int i = seen; i < L && at + i < p->dim; i++) sums[r][at + i] += x[i];
        }
}
INLINE void add_plane(
    const int rows, const int fields, const int is_one, const Plane *p, const Weights (*weights)[ROWS], float (*sums)[MOST_CHANNELS]) {
    for (int byte = 0; byte < p->width; byte += L)
        for (int field = 0; field < 8 / p->bits; field += fields)
            add_fields(rows, fields, is_one, p, weights, byte + L <= p->width ? byte : p->width - L, field, sums);
}
/* As many fields at once as there are registers for */
static void add_codes(int rows, int is_one, const Plane *p, const Weights (*weights)[ROWS], float (*sums)[MOST_CHANNELS]) {
    int all = 8 / p->bits, fields = all <= 2 ? all : rows == 4 && L == 8 ? 2 : 4;
#define ADD(fields, rows) is_one ? add_plane(rows, fields, 1, p, weights, sums) : add_plane(rows, fields, 0, p, weights, sums)
    switch (fields * 8 + rows) { FOR_ROWS(ADD, 1) FOR_ROWS(ADD, 2) FOR_ROWS(ADD, 4) }
#undef ADD
}

/* Scales and zeros of `count` numbers as floats; 0 up to `size` */
static void read_scales(const GroupSide *side, int64_t at, int64_t step, int count, int size, float *scale, float *zero) {
    halves_of(side->scale + at, step, count, size, scale);
    halves_of(side->zero + at, step, count, size, zero);
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
    Integers integers[PLANES];      /* queries, times the scales of `group` if any, for every plane of keys */
    ALIGNED uint8_t codes[TILE * MOST_CHANNELS];
    f4 lost;                        /* by rounding, if all codes were half of the largest */
    f4 base;                        /* what that and the zeros of the group add to a score */
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
INLINE const uint8_t *codes_of(const Work *work, const GroupSide *side, const Piece *p) {
    return side->codes + (chunk_of(work, p->chunk) * work->groups->chunk_length + p->start + p->skipped) * side->row_size;
}
INLINE const uint16_t *rows_of_a(const Work *work, const GroupSide *side, const Piece *p) {
    return side->low_rank_a + (chunk_of(work, p->chunk) * work->groups->chunk_length + p->start + p->skipped) * side->rank;
}

static void round_for_planes(Work *work, const GroupSide *keys, const float (*query)[MOST_CHANNELS]) {
    Integers *to = work->integers;
    for (int r = 0; r < work->unit.rows; r++) {
        vf sum = {0};
        for (int d = 0; d < padded(keys->dim); d += L) sum += load(query[r] + d);
        work->lost[r] = sum_of(sum) * largest_code(keys) / 2;
    }
    FOR_PLANES(keys, offset, size, bits, shift) {
        to->dim = (int)keys->dim, to->width = size, to->fields = 8 / bits, to->row = (int)keys->row_size;
        round_queries(to, work->unit.rows, query);
        for (int r = 0; r < work->unit.rows; r++)
            to->factor[r] *= (float)(1 << shift), work->lost[r] += to->base[r] * (float)(1 << shift);
        to++;
    }
}
/* Products of all channels with the tokens of a piece from `start` on */
static void multiply_planes(Work *work, const GroupSide *keys, const uint8_t *codes, int tokens, float (*products)[TILE]) {
    ALIGNED float own[ROWS][TILE];
    const Integers *by = work->integers;
    FOR_PLANES(keys, offset, size, bits, shift) {
        dot_codes(by, work->unit.rows, codes + offset, tokens, own);
        for (int r = 0; r < work->unit.rows; r++)
            for (int t = 0; t < TILE; t += L) {
                vf x = load(own[r] + t) * by->factor[r];
                store(products[r] + t, shift ? load(products[r] + t) + x : x);
            }
        by++;
    }
}
static void fold_scales(Work *work, const GroupSide *keys, int64_t at) {
    ALIGNED float scale[MOST_CHANNELS], zero[MOST_CHANNELS], folded[ROWS][MOST_CHANNELS];
    int dim = (int)keys->dim, size = padded(dim);
    vf base[ROWS] = {{0}};
    read_scales(keys, at, 1, dim, size, scale, zero);
    for (int r = 0; r < work->unit.rows; r++)
        for (int d = 0; d < size; d += L) {
            vf q = load(work->query[r] + d);
            store(folded[r] + d, q * load(scale + d));
            base[r] += q * load(zero + d);
        }
    round_for_planes(work, keys, (const float (*)[MOST_CHANNELS])folded);
    work->base = sums_of_four(base[0], base[1], base[2], base[3]) + work->lost;
}
static void score_codes(Work *work, const GroupSide *keys, const Piece *p, float (*scores)[TILE]) {
    int stride = stride_of(keys), dim = (int)keys->dim, rows = work->unit.rows, groups = (int)keys->groups;
    int64_t scales = scales_of(work, keys, p->chunk), first = p->start + p->skipped;
    const uint8_t *codes = codes_of(work, keys, p);
    ALIGNED float products[ROWS][TILE], scale[TILE], zero[TILE];
    if (keys->by_channel) {
        int64_t size = work->groups->chunk_length / groups;
        for (int t = 0, last; t < p->tokens; t = last) {
            int64_t group = (first + t) / size, end = (group + 1) * size - first;
            last = end < p->tokens ? (int)end : p->tokens;
            if (work->group != group) fold_scales(work, keys, scales + group * dim), work->group = group;
            multiply_planes(work, keys, codes + t * keys->row_size, last - t, products);
            for (int r = 0; r < rows; r++)
                for (int i = t; i < last; i++) scores[r][i] = products[r][i - t] + work->base[r];
        }
        return;
    }
    if (groups > 1) unpack(keys, codes, p->tokens, work->codes, stride);
    for (int g = 0, size = dim / groups; g < groups; g++) {
        if (groups == 1) multiply_planes(work, keys, codes, p->tokens, products);
        else dot(rows, (const float (*)[MOST_CHANNELS])(work->query[0] + g * size), work->codes + g * size, stride, size, p->tokens, products);
        read_scales(keys, scales + first * groups + g, groups, p->tokens, TILE, scale, zero);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < TILE; t += L) {
                vf own = (load(products[r] + t) + work->lost[r]) * load(scale + t) + load(zero + t) * work->totals[g][r];
                store(scores[r] + t, g ? load(scores[r] + t) + own : own);
            }
    }
}
static void score(Work *work, const Piece *p, float (*scores)[TILE]) {
    const GroupSide *keys = work->groups->keys;
    f4 more[TILE] = {{0}};
    score_codes(work, keys, p, scores);
    if (!keys->rank && !keys->num_outliers) return;
    add_outliers(outliers_here(work, keys, p), (uint32_t)p->skipped, (uint32_t)p->tokens, more, work->by_channel, 1);
    if (keys->rank) add_products(rows_of_a(work, keys, p), (int)keys->rank, p->tokens, work->projected, more);
    for (int r = 0; r < work->unit.rows; r++)
        for (int t = 0; t < p->tokens; t++) scores[r][t] += more[t][r];
}
/* Whether groups of channels are of whole vectors as they are packed */
INLINE int is_packed_by_vectors(const GroupSide *side) {
    int is_whole = 1;
    FOR_PLANES(side, offset, size, bits, shift)
        is_whole &= size >= L && (side->groups == 1 || (size % L == 0 && side->dim / side->groups % L == 0));
    return is_whole;
}
static void add_values(Work *work, const Piece *p, const float (*weights)[TILE], float (*sums)[MOST_CHANNELS]) {
    const GroupSide *values = work->groups->values;
    int stride = stride_of(values), dim = (int)values->dim, groups = (int)values->groups, rows = work->unit.rows;
    int64_t at = scales_of(work, values, p->chunk) + (p->start + p->skipped) * groups;
    const uint8_t *codes = codes_of(work, values, p);
    int is_packed = is_packed_by_vectors(values);
    ALIGNED float scale[TILE], zero[TILE], scaled[ROWS][TILE];
    Weights rounded[MOST_CHANNELS / L][ROWS];
    f4 by_token[TILE];
    if (!is_packed) unpack(values, codes, p->tokens, work->codes, stride);
    for (int g = 0, size = dim / groups; g < groups; g++) {
        vf lows[ROWS] = {{0}};
        read_scales(values, at + g, groups, p->tokens, TILE, scale, zero);
        for (int r = 0; r < rows; r++) {
            for (int t = 0; t < TILE; t += L) {
                store(scaled[r] + t, load(weights[r] + t) * load(scale + t));
                lows[r] += load(weights[r] + t) * load(zero + t);
            }
            if (!is_packed) continue;
            round_weights(scaled[r], &rounded[g][r]);
            work->zeros[g][r] += rounded[g][r].lost * largest_code(values) / 2;
        }
        work->zeros[g] += sums_of_four(lows[0], lows[1], lows[2], lows[3]);
        if (is_packed) continue;
        accumulate(rows, (const float (*)[TILE])scaled, work->codes + g * size, stride, size, p->tokens, sums[0] + g * size);
    }
    if (is_packed)
        FOR_PLANES(values, offset, size, bits, shift) {
            Plane plane = {codes + offset, size, bits, (int)values->row_size, p->tokens, dim, dim / groups, (float)(1 << shift)};
            add_codes(rows, groups == 1, &plane, (const Weights (*)[ROWS])rounded, sums);
        }
    if (!values->rank && !values->num_outliers) return;
    for (int t = 0; t < p->tokens; t++)
        by_token[t] = (f4){weights[0][t], rows > 1 ? weights[1][t] : 0, rows > 2 ? weights[2][t] : 0, rows > 3 ? weights[3][t] : 0};
    add_outliers(outliers_here(work, values, p), (uint32_t)p->skipped, (uint32_t)p->tokens, by_token, work->sums, 0);
    if (values->rank) sum_products(rows_of_a(work, values, p), (int)values->rank, p->tokens, by_token, work->weighted_a);
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
    work->lost = (f4){0};
    if (keys->groups == 1) round_for_planes(work, keys, work->query);
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
        score(&work, &piece, scores);
        add_mask(call, part, unit, at, piece.tokens, scores);
        if (softmax_tile(state, unit.rows, piece.tokens, scores, state->total, decay)) scale_sums(&work, decay);
        add_values(&work, &piece, scores, is_turned ? state->coded : state->sums);
    }
    if (chunk >= 0) end_chunk(&work, chunk);
    end(&work, state);
}

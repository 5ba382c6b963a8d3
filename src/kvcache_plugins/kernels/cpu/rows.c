/* Attention over rows of bytes, see `levels.h`: nothing dense is in memory but the levels of a
   strip.

   Keys: the two channels of a rotary pair are two vectors, so a key is rotated once for all
   queries, by cosines and sines of offsets in a strip that all heads and layers share, and every
   query costs two multiply-adds a pair; nothing is summed across lanes. Queries are rotated back by
   the position of the strip's start, step by step from an anchor. Values: sums over a tile stay
   vectors of tokens, which are added up at the end of the part. In calibrated bases keys are
   products of levels and a basis, some channels at a time, which meet the queries without being
   written; values stay components until the end. With AVX-512 levels are rounded to words of 16
   bits for that: one instruction multiplies and adds two of them, and sums them up exactly.

   Everything that follows from a format is computed in every call: loading it from memory would
   take longer. Formats are not trusted, see `place_bands` and `load_channels`; Python checks the
   sizes of rows. */
#include "gathered_attention.h"
#include "levels.h"

enum { MAX_PAIRS = MAX_CHANNELS / 2 + 16, ANCHOR_TILES = 32 };

/* A rotary pair: indices of its channels' levels, and its channels' means. */
typedef struct {
    int a, b;
    float mean_a, mean_b;
} ChannelPair;

typedef float PairedQueries[2][BLOCK_QUERIES][MAX_PAIRS]; /* first and second channels of pairs */

/* Queries as they are, and rotated back by the position at which strip `strips - 1` starts. */
typedef struct {
    PairedQueries original, rotated;
    int64_t strips;
} RopeCursor;

/* All that a query block works with: where codes are in rows, levels of a strip, and sums of values
   over its tokens. */
typedef struct {
    const RowPart *part;
    QueryBlock block;
    int is_basis, dim, key_bands, value_bands;
    int64_t used;                   /* components that have bits */
    float step;                     /* that a word stands for */
    Band keys[MAX_CHANNELS / 8], values[MAX_CHANNELS / 8];
    LevelTable key_levels[MAX_CHANNELS], value_levels[NUM_WIDTHS];
    CodeField fields[MAX_CHANNELS + 8];
    ChannelPair pairs[MAX_PAIRS];
    ALIGNED RopeCursor cursor;
    ALIGNED float levels[MAX_CHANNELS + 8][STRIP];
    ALIGNED float sums[MAX_CHANNELS][BLOCK_QUERIES][L];
    ALIGNED float scales[STRIP];
    ALIGNED Planes planes;
} RowScratch;

/* ---- queries ---- */

static void rotate(
    int count, int pairs, const float *cosines, const float *sines, const PairedQueries queries,
    PairedQueries rotated) {
    for (int p = 0; p < pairs; p += L) {
        vf c = load(cosines + p);
        vf s = load(sines + p);
        for (int r = 0; r < count; r++) {
            vf a = load(queries[0][r] + p);
            vf b = load(queries[1][r] + p);
            store(rotated[0][r] + p, a * c - b * s);
            store(rotated[1][r] + p, b * c + a * s);
        }
    }
}

/* Computes cosines and sines of a position from those of its tile and of its offset in the tile. */
static void angles_at(const Rotary *rotary, int64_t position, float (*angles)[MAX_PAIRS]) {
    int64_t offset = position & (TILE - 1);
    int64_t size = rotary->padded_pairs;
    float sign;
    const float *coarse = coarse_angles(rotary, (position - offset) / TILE, &sign);
    const float *fine = rotary->fine + offset * 2 * size;
    for (int64_t p = 0; p < size; p += L) {
        vf c = load(coarse + p);
        vf s = load(coarse + size + p) * sign;
        vf x = load(fine + p);
        vf y = load(fine + size + p);
        store(angles[0] + p, c * x - s * y);
        store(angles[1] + p, s * x + c * y);
    }
}

INLINE int64_t first_position(const RowPart *part, QueryBlock block) {
    return part->first_position - (part->padding ? part->padding[block.batch] : 0);
}

static void start_cursor(
    int count, const RowPart *part, const Queries query, int dim, RopeCursor *cursor) {
    const int32_t *pairs = part->rotary->pairs;
    for (int r = 0; r < count; r++)
        for (int p = 0; p < part->rotary->padded_pairs; p++) {
            int a = pairs[2 * p];
            int b = pairs[2 * p + 1];
            cursor->original[0][r][p] = a >= 0 && a < dim ? query[r][a] : 0;
            cursor->original[1][r][p] = b >= 0 && b < dim ? query[r][b] : 0;
        }
}

static void go_to_next_strip(int count, const RowPart *part, QueryBlock block, RopeCursor *cursor) {
    const Rotary *rotary = part->rotary;
    int64_t size = rotary->padded_pairs;
    int64_t token = cursor->strips++ * STRIP;
    if (token % (ANCHOR_TILES * TILE)) {
        /* Angles of STRIP positions: those of a whole tile are the coarse ones of tile 1. */
        const float *step =
            (int)STRIP < (int)TILE ? rotary->fine + STRIP * 2 * size : rotary->coarse + 2 * size;
        rotate(count, (int)size, step, step + size, cursor->rotated, cursor->rotated);
        return;
    }
    ALIGNED float angles[2][MAX_PAIRS];
    angles_at(rotary, first_position(part, block) + token, angles);
    rotate(count, (int)size, angles[0], angles[1], cursor->original, cursor->rotated);
}

/* Moves to where the next strip is the first of a tile. */
static void go_to_tile(
    int count, const RowPart *part, QueryBlock block, int64_t tile, RopeCursor *cursor) {
    cursor->strips = tile / ANCHOR_TILES * ANCHOR_TILES * TILE / STRIP;
    while (cursor->strips < tile * TILE / STRIP) go_to_next_strip(count, part, block, cursor);
}

/* ---- keys ---- */

/* Rotates the vectors of a pair's channels and adds their products with the queries. */
INLINE void dot_pair(
    const int count, vf a, vf b, const float *angles, const PairedQueries query, int p, vf *sums) {
    vf c = load(angles);
    vf s = load(angles + ANGLES);
    vf x = a * c + b * s;
    vf y = b * c - a * s;
    for (int r = 0; r < count; r++) {
        sums[r] += x * query[0][r][p];
        sums[r] += y * query[1][r][p];
    }
}

/* Scores of a strip, which the levels of a pair's channels reach in registers. */
INLINE void dot_strip(
    const int count, const RowScratch *scratch, const float *angles, const PairedQueries query,
    float (*scores)[TILE]) {
    const ChannelPair *pairs = scratch->pairs;
    const CodeField *fields = scratch->fields;
    const LevelTable *levels = scratch->key_levels;
    const float *scales = scratch->scales;
    vf sums[BLOCK_QUERIES][4] = {{{0}}};
    int num_pairs = (int)scratch->part->rotary->num_pairs;
    for (int p = 0; p < num_pairs; p++) {
        vf a[4] = {{0}};
        vf b[4] = {{0}};
        int i = pairs[p].a;
        int j = pairs[p].b;
        if (fields[i].width) read_levels(&fields[i], scratch->planes, &levels[i], a);
        if (fields[j].width) read_levels(&fields[j], scratch->planes, &levels[j], b);
        for (int u = 0; u < 4; u++) {
            const float *angle = angles + 2 * ANGLES * p + u * L;
            vf scale = load(scales + u * L);
            vf c = load(angle);
            vf s = load(angle + ANGLES);
            vf x = a[u] * scale + pairs[p].mean_a;
            vf y = b[u] * scale + pairs[p].mean_b;
            a[u] = x * c + y * s;
            b[u] = y * c - x * s;
        }
        for (int r = 0; r < count; r++)
            for (int u = 0; u < 4; u++) {
                sums[r][u] += a[u] * query[0][r][p];
                sums[r][u] += b[u] * query[1][r][p];
            }
    }
    for (int r = 0; r < count; r++)
        for (int u = 0; u < 4; u++) store(scores[r] + u * L, sums[r][u]);
}

/* Components of a strip times a basis, BASIS_CHANNELS channels at a time. With AVX-512 a lane has
   the words of two components, and one of them stands for `step`. */
#if L == 16
enum { BASIS_CHANNELS = 8, COMPONENTS_IN_LANE = 2 };
#define BASIS key_words
typedef __m512i Products;

INLINE Products add_products(Products sum, vf components, int32_t basis) {
    return _mm512_dpwssd_epi32(sum, (__m512i)components, _mm512_set1_epi32(basis));
}

INLINE vf channel_of(const RowPart *part, int64_t channel, Products sum, float step) {
    return to_float((vu)sum) * (part->key_factors[channel] * step);
}
#else
enum { BASIS_CHANNELS = 4, COMPONENTS_IN_LANE = 1 };
#define BASIS key_basis
typedef vf Products;

INLINE Products add_products(Products sum, vf components, float basis) {
    return sum + components * basis;
}

INLINE vf channel_of(const RowPart *part, int64_t channel, Products sum, float step) {
    (void)part;
    (void)channel;
    (void)step;
    return sum;
}
#endif

INLINE void dot_components(
    const int count, const RowScratch *scratch, const float *angles, const PairedQueries query,
    float (*scores)[TILE]) {
    const RowPart *part = scratch->part;
    const float *scales = scratch->scales;
    float step = scratch->step;
    int64_t pairs = BASIS_CHANNELS / 2;
    int64_t runs = (part->rotary->num_pairs + pairs - 1) / pairs;
    int64_t size = part->rotary->padded_pairs;
    int64_t num_coefficients = part->keys.format->num_coefficients;
    int64_t stored = (num_coefficients + COMPONENTS_IN_LANE - 1) / COMPONENTS_IN_LANE;
    int64_t lanes = (scratch->used + COMPONENTS_IN_LANE - 1) / COMPONENTS_IN_LANE;
    for (int t = 0; t < STRIP; t += 2 * L) {
        vf sums[2][BLOCK_QUERIES] = {{{0}}};
        vf scale[2] = {load(scales + t), load(scales + t + L)};
        for (int64_t n = 0; n < runs; n++) {
            int64_t first = 2 * (scratch->block.head * size + pairs * n);
            const __typeof__(*part->BASIS) *basis = part->BASIS + first * stored;
            Products x[BASIS_CHANNELS][2] = {{{0}}};
            for (int64_t i = 0; i < lanes; i++) {
                const float *level = scratch->levels[i] + t;
                vf z[2] = {load(level), load(level + L)};
                for (int g = 0; g < BASIS_CHANNELS; g++) {
                    x[g][0] = add_products(x[g][0], z[0], basis[g]);
                    x[g][1] = add_products(x[g][1], z[1], basis[g]);
                }
                basis += BASIS_CHANNELS;
            }
            for (int g = 0; g < BASIS_CHANNELS; g += 2)
                for (int u = 0; u < 2; u++) {
                    const float *mean = part->key_mean + first + g;
                    int p = (int)(pairs * n + g / 2);
                    const float *angle = angles + 2 * ANGLES * p + t + u * L;
                    vf a = channel_of(part, first + g, x[g][u], step) * scale[u] + mean[0];
                    vf b = channel_of(part, first + g + 1, x[g + 1][u], step) * scale[u] + mean[1];
                    dot_pair(count, a, b, angle, query, p, sums[u]);
                }
        }
        for (int r = 0; r < count; r++) {
            store(scores[r] + t, sums[0][r]);
            store(scores[r] + t + L, sums[1][r]);
        }
    }
}

/* Finds the code of each channel, in the order of rows, and its levels times its deviation; and the
   indices of the channels of pairs. Channels without codes have the plane of zeros, at `none`. */
static void load_channels(RowScratch *scratch, float (*base)[ENTRIES], int none) {
    const RowPart *part = scratch->part;
    const RowFormat *format = part->keys.format;
    int64_t bh = scratch->block.bh;
    int dim = scratch->dim;
    int index_of[MAX_CHANNELS];
    const half *mean = format->mean + bh * dim;
    const half *deviation = format->deviation + bh * format->num_deviations;
    memset(scratch->fields, 0, sizeof *scratch->fields * (size_t)(none + 1));
    for (int d = 0; d < dim; d++) index_of[d] = none;
    for (int i = 0; i < dim; i++) {
        Band band = scratch->keys[i / 8];
        int64_t entry = bh * dim + i;
        int d;
        if (format->order_size > 1)
            d = ((const uint16_t *)format->order)[entry];
        else
            d = ((const uint8_t *)format->order)[entry];
        if (d >= dim) continue;
        index_of[d] = i;
        scratch->fields[i] = code_field(band, i % 8);
        if (!band.width) continue;
        float factor = float_of_half(deviation[format->num_deviations > 1 ? d : 0]);
        scratch->key_levels[i] = scaled_levels(band.width, base[band.width], factor);
    }
    for (int p = 0; p < part->rotary->num_pairs; p++) {
        int a = part->rotary->pairs[2 * p];
        int b = part->rotary->pairs[2 * p + 1];
        int has_a = a >= 0 && a < dim;
        int has_b = b >= 0 && b < dim;
        ChannelPair *pair = &scratch->pairs[p];
        pair->a = has_a ? index_of[a] : none;
        pair->b = has_b ? index_of[b] : none;
        pair->mean_a = has_a ? float_of_half(mean[a]) : 0;
        pair->mean_b = has_b ? float_of_half(mean[b]) : 0;
    }
}

/* Computes the levels of all widths that bands have. */
static void load_levels(
    const Band *bands, int count, const Codebook *book, float (*levels)[ENTRIES]) {
    int known = 0;
    for (int v = 0; v < count; v++) {
        int width = bands[v].width;
        if (!width || known >> width & 1) continue;
        make_levels(width, book, levels[width]);
        known |= 1 << width;
    }
}

/* Reads the scales of a strip's tokens, well before they are used: a load would wait for narrower
   stores right before it. */
INLINE void load_scales(
    const RowPart *part, const uint8_t *rows, int64_t size, int tokens, float *scales) {
    const float *scale_of_byte = book_of(part->keys.format)->scales;
    for (int t = 0; t < STRIP; t++) scales[t] = t < tokens ? scale_of_byte[rows[t * size]] : 0;
}

/* ---- values ---- */

INLINE void add_band(
    const int count, Band band, const uint8_t (*planes)[STRIP], const LevelTable *levels,
    const float (*restrict weights)[TILE], float (*restrict sums)[BLOCK_QUERIES][L]) {
    vf weight[BLOCK_QUERIES][4];
    for (int r = 0; r < count; r++)
        for (int u = 0; u < 4; u++) weight[r][u] = load(weights[r] + u * L);
    for (int d = 0; d < 8; d++) {
        CodeField field = code_field(band, d);
        vf x[4];
        read_levels(&field, planes, levels, x);
        for (int r = 0; r < count; r++) {
            vf sum = load(sums[d][r]);
            for (int u = 0; u < 4; u++) sum += x[u] * weight[r][u];
            store(sums[d][r], sum);
        }
    }
}

/* Adds the means of values, scaled by the sum of the weights. Weights are summed in the same order
   with and without means, so that a sequence's result does not depend on its batch. */
static void add_means(int dim, const RowFormat *format, QueryBlock block, SoftmaxState *state) {
    const half *mean = format->mean ? format->mean + block.bh * dim : 0;
    for (int r = 0; r < block.count; r++) {
        for (int d = 0; mean && d < dim; d++)
            state->sums[r][d] += state->part_total[r] * float_of_half(mean[d]);
        state->total[r] += state->part_total[r];
        state->part_total[r] = 0;
    }
}

static void end_values(const RowScratch *scratch, int dim, SoftmaxState *state) {
    ALIGNED float x[MAX_CHANNELS];
    const RowFormat *format = scratch->part->values.format;
    int64_t first = scratch->block.bh * format->num_deviations;
    float factor = float_of_half(format->deviation[first]) / sqrtf((float)format->rotation_size);
    for (int r = 0; r < scratch->block.count; r++) {
        for (int d = 0; d < dim; d++) x[d] = sum_of(load(scratch->sums[d][r])) * factor;
        hadamard(x, dim, format->rotation_size);
        for (int d = 0; d < dim; d++) state->sums[r][d] += x[d];
    }
}

static void end_basis_values(const RowScratch *scratch, int dim, SoftmaxState *state) {
    const RowFormat *format = scratch->part->values.format;
    int64_t head = scratch->block.head;
    int count = (int)min_of(8 * format->bands, dim);
    const float *factors = format->factors + head * dim;
    const float *steps = format->steps + head * dim;
    for (int r = 0; r < scratch->block.count; r++) {
        float channels[MAX_CHANNELS] = {0};
        for (int i = 0; i < count; i++) {
            const int8_t *basis = format->basis + (head * dim + i) * dim;
            float component = sum_of(load(scratch->sums[i][r])) * steps[i];
            for (int d = 0; d < dim; d++) channels[d] += component * (float)basis[d];
        }
        for (int d = 0; d < dim; d++) state->sums[r][d] += channels[d] / factors[d];
    }
}

/* ---- parts ---- */

#if L == 16
static float largest_level(int width, const float *levels) {
    float c[5];
    float largest = 0;
    memcpy(c, levels, sizeof c);
    if (width > 5) return fabsf(polynomial(c, 0));
    for (int i = 0; i < ENTRIES; i++)
        largest = fabsf(levels[i]) > largest ? fabsf(levels[i]) : largest;
    return largest;
}

/* Rounds the levels of components to words, the largest of which has all bits. */
static void load_words(RowScratch *scratch, float (*levels)[ENTRIES]) {
    const RowPart *part = scratch->part;
    int64_t num_coefficients = part->keys.format->num_coefficients;
    const float *steps = part->key_steps + scratch->block.head * num_coefficients;
    float largest = 1e-30f;
    for (int i = 0; i < scratch->used; i++) {
        int width = scratch->keys[i / 8].width;
        if (!width) continue;
        float end = largest_level(width, levels[width]) * steps[i];
        largest = end > largest ? end : largest;
    }
    for (int i = 0; i < scratch->used; i++) {
        Band band = scratch->keys[i / 8];
        int width = band.width;
        scratch->fields[i] = code_field(band, i % 8);
        if (!width) continue;
        float factor = steps[i] / largest * 32766;
        scratch->key_levels[i] = levels_as_words(width, levels[width], factor, i % 2);
    }
    scratch->step = largest / 32766;
}
#endif

static void start_keys(
    RowScratch *scratch, const RowPart *part, QueryBlock block, const Queries query, int dim) {
    const RowFormat *format = part->keys.format;
    const uint8_t *widths = format->widths + block.bh * format->bands;
    int bands = (int)format->bands;
    ALIGNED float levels[NUM_WIDTHS][ENTRIES];
    scratch->part = part;
    scratch->block = block;
    scratch->is_basis = format->basis != 0;
    scratch->dim = dim;
    scratch->key_bands = bands;
    scratch->used = 0;
    scratch->step = 0;
    place_bands(widths, bands, part->keys.row_size, scratch->keys);
    load_levels(scratch->keys, bands, book_of(format), levels);
    if (!scratch->is_basis) load_channels(scratch, levels, 8 * bands);
    for (int v = 0; v < bands && scratch->is_basis; v++) {
        int width = scratch->keys[v].width;
        if (!width) continue;
        scratch->used = min_of(8 * (v + 1), format->num_coefficients);
#if L != 16
        scratch->key_levels[v] = scaled_levels(width, levels[width], 1);
#endif
    }
#if L == 16
    if (scratch->is_basis) load_words(scratch, levels);
#else
    memset(scratch->levels, 0, sizeof scratch->levels[0] * (size_t)(8 * bands + 1));
#endif
    start_cursor(block.count, part, query, dim, &scratch->cursor);
}

static void start_values(RowScratch *scratch) {
    const RowSide *side = &scratch->part->values;
    const RowFormat *format = side->format;
    const uint8_t *widths = format->widths + scratch->block.bh * format->bands;
    int bands = (int)format->bands;
    ALIGNED float levels[NUM_WIDTHS][ENTRIES];
    scratch->value_bands = bands;
    place_bands(widths, bands, side->row_size, scratch->values);
    load_levels(scratch->values, bands, book_of(format), levels);
    for (int v = 0; v < bands; v++) {
        int width = scratch->values[v].width;
        if (width) scratch->value_levels[width] = scaled_levels(width, levels[width], 1);
    }
    memset(scratch->sums, 0, sizeof scratch->sums[0] * 8 * (size_t)bands);
}

/* Reads the levels of all components of a strip. */
static void read_components(RowScratch *scratch) {
#if L == 16
    uint32_t(*words)[STRIP] = (uint32_t(*)[STRIP])scratch->levels;
    for (int i = 0; i < scratch->used; i += 2) {
        vu x[2][4] = {{{0}}};
        for (int k = 0; k < 2 && i + k < scratch->used; k++) {
            const CodeField *field = &scratch->fields[i + k];
            if (field->width)
                read_words(field, scratch->planes, &scratch->key_levels[i + k], k, x[k]);
        }
        for (int u = 0; u < 4; u++) store_u(words[i / 2] + u * L, x[0][u] | x[1][u]);
    }
#else
    for (int v = 0; v < scratch->key_bands; v++) {
        const LevelTable *levels = &scratch->key_levels[v];
        if (scratch->keys[v].width)
            read_band(scratch->keys[v], scratch->planes, levels, scratch->levels + 8 * v);
    }
#endif
}

/* Scores the tokens of a strip, whose rows follow each other: products of keys that are rotated by
   `angles` with queries that are rotated back by the rest. */
static void score_strip(
    RowScratch *scratch, const uint8_t *rows, int tokens, const float *angles,
    const PairedQueries query, float (*scores)[TILE]) {
    const RowPart *part = scratch->part;
    load_scales(part, rows, part->keys.row_size, tokens, scratch->scales);
    make_planes(rows, part->keys.row_size, tokens, scratch->planes);
    if (scratch->is_basis) {
        read_components(scratch);
        UNROLL_QUERIES(scratch->block.count, dot_components, scratch, angles, query, scores)
    } else {
        UNROLL_QUERIES(scratch->block.count, dot_strip, scratch, angles, query, scores)
    }
}

/* The rows of the tile from `start` on, which are on one page. */
INLINE const uint8_t *rows_at(const RowSide *side, QueryBlock block, int64_t start) {
    if (side->rows) return side->rows + (block.bh * side->capacity + start) * side->row_size;
    int64_t entry = block.batch * side->max_pages + start / side->page_tokens;
    int64_t page = clamped(side->pages[entry], side->num_pages);
    int64_t token = block.head * side->page_tokens + start % side->page_tokens;
    return side->memory + side->page_start + page * side->page_stride + token * side->row_size;
}

/* Scores the tile from `start` on. */
static void score_tile(
    RowScratch *scratch, int64_t start, int tokens, float (*scores)[TILE]) {
    const RowPart *part = scratch->part;
    RopeCursor *cursor = &scratch->cursor;
    const uint8_t *rows = rows_at(&part->keys, scratch->block, start);
    for (int t = 0; t < TILE; t += STRIP) {
        /* Scores behind the last token are not read. */
        if (t >= tokens) {
            cursor->strips++;
            continue;
        }
        go_to_next_strip(scratch->block.count, part, scratch->block, cursor);
        const uint8_t *strip = rows + t * part->keys.row_size;
        score_strip(
            scratch, strip, tokens - t, part->rotary->fine_by_pair, cursor->rotated,
            (float (*)[TILE])(scores[0] + t));
    }
}

static void scale_sums(RowScratch *scratch, const float *decay) {
    for (int d = 0; d < 8 * scratch->value_bands; d++)
        for (int r = 0; r < scratch->block.count; r++)
            store(scratch->sums[d][r], load(scratch->sums[d][r]) * decay[r]);
}

/* Adds the values of a strip's tokens, times their weights, which are overwritten. */
static void add_values(
    RowScratch *scratch, const uint8_t *rows, int tokens, float (*weights)[TILE]) {
    const RowPart *part = scratch->part;
    load_scales(part, rows, part->values.row_size, tokens, scratch->scales);
    make_planes(rows, part->values.row_size, tokens, scratch->planes);
    for (int r = 0; r < scratch->block.count; r++)
        for (int i = 0; i < STRIP; i += L)
            store(weights[r] + i, load(weights[r] + i) * load(scratch->scales + i));
    for (int v = 0; v < scratch->value_bands; v++) {
        Band band = scratch->values[v];
        const LevelTable *levels = &scratch->value_levels[band.width];
        if (band.width)
            UNROLL_QUERIES(
                scratch->block.count, add_band, band, scratch->planes, levels,
                (const float(*)[TILE])weights, scratch->sums + 8 * v)
    }
}

/* Adds the sums of values to the state. */
static void end_part(const RowScratch *scratch, int dim, SoftmaxState *state) {
    if (scratch->is_basis)
        end_basis_values(scratch, dim, state);
    else
        end_values(scratch, dim, state);
    add_means(dim, scratch->part->values.format, scratch->block, state);
}

void KVC_NAME(attend_rows, KVC_LEVEL)(
    const AttentionArgs *args, const Part *part, QueryBlock block, const Queries query,
    int64_t first, int64_t last, SoftmaxState *state) {
    const RowPart *stored = part->stored;
    const RowSide *values = &stored->values;
    int64_t length = length_of(part, block);
    int64_t end = min_of(last * TILE, length);
    ALIGNED float scores[BLOCK_QUERIES][TILE], decay[BLOCK_QUERIES];
    RowScratch scratch;
    start_keys(&scratch, stored, block, query, (int)args->key_dim);
    start_values(&scratch);
    go_to_tile(block.count, stored, block, first, &scratch.cursor);
    for (int64_t start = first * TILE; start < end; start += TILE) {
        int tokens = (int)min_of(length - start, TILE);
        const uint8_t *rows = rows_at(values, block, start);
        score_tile(&scratch, start, tokens, scores);
        add_mask(args, part, block, start, tokens, scores);
        if (softmax_tile(state, block.count, tokens, scores, state->part_total, decay))
            scale_sums(&scratch, decay);
        for (int t = 0; t < tokens; t += STRIP) {
            const uint8_t *strip = rows + t * values->row_size;
            add_values(&scratch, strip, tokens - t, (float (*)[TILE])(scores[0] + t));
        }
    }
    end_part(&scratch, (int)args->value_dim, state);
}

/* Scores the tokens of a split with the queries of a block. */
static void score_split(const RowScoreArgs *args, QueryBlock block, int64_t split) {
    int64_t length = args->length;
    int64_t tiles = (length + TILE - 1) / TILE;
    int64_t first = tiles * split / args->splits;
    int64_t last = tiles * (split + 1) / args->splits;
    int64_t end = min_of(last * TILE, length);
    ALIGNED float scores[BLOCK_QUERIES][TILE];
    ALIGNED Queries query;
    RowScratch scratch;
    load_token_queries(args->queries, block, query);
    start_keys(&scratch, args->rows, block, query, (int)args->queries->key_dim);
    go_to_tile(block.count, args->rows, block, first, &scratch.cursor);
    for (int64_t start = first * TILE; start < end; start += TILE) {
        int tokens = (int)min_of(length - start, TILE);
        score_tile(&scratch, start, tokens, scores);
        for (int r = 0; r < block.count; r++) {
            float *line = args->scores + (first_query(args->queries, block) + r) * length + start;
            memcpy(line, scores[r], sizeof(float) * (size_t)tokens);
        }
    }
}

EXPORT(score_rows)(RowScoreArgs *args) {
    const TokenQueries *queries = args->queries;
    FOR_TASKS(args, task) {
        int64_t index = task / args->splits;
        QueryBlock block = query_block(queries->heads, queries->query_groups, index);
        score_split(args, block, task % args->splits);
    }
}

/* Computes the angles of the tokens of a strip in any slots, in the order of `fine_by_pair`. */
static void angles_of_slots(
    const RowPart *part, QueryBlock block, const int64_t *slots, int count, float *angles) {
    ALIGNED float of_token[2][MAX_PAIRS];
    for (int t = 0; t < count; t++) {
        angles_at(part->rotary, first_position(part, block) + slots[t], of_token);
        for (int p = 0; p < part->rotary->num_pairs; p++) {
            angles[2 * ANGLES * p + t] = of_token[0][p];
            angles[2 * ANGLES * p + ANGLES + t] = of_token[1][p];
        }
    }
}

void KVC_NAME(attend_selected_rows, KVC_LEVEL)(
    const SelectedAttentionArgs *args, QueryBlock block, const Queries query, const int64_t *slots,
    int64_t count, SoftmaxState *state) {
    const SelectableTokens *stored = args->tokens;
    const RowSide *keys = &stored->rows->keys;
    const RowPart *part = stored->rows;
    int64_t value_size = stored->row_dim;
    const uint8_t *key_rows = keys->rows + block.bh * keys->capacity * keys->row_size;
    ALIGNED float scores[BLOCK_QUERIES][TILE], decay[BLOCK_QUERIES];
    ALIGNED float angles[MAX_PAIRS * 2 * ANGLES];
    uint8_t gathered[STRIP * MAX_ROW];
    RowScratch scratch;
    start_keys(&scratch, part, block, query, (int)args->queries->key_dim);
    start_values(&scratch);
    memset(angles, 0, sizeof(float) * 2 * ANGLES * (size_t)part->rotary->num_pairs);
    for (int64_t start = 0; start < count; start += TILE, slots += TILE) {
        int tokens = (int)min_of(count - start, TILE);
        for (int t = 0; t < tokens; t += STRIP) {
            int n = (int)min_of(tokens - t, STRIP);
            for (int i = 0; i < n; i++) {
                const uint8_t *row = key_rows + slots[t + i] * keys->row_size;
                memcpy(gathered + i * keys->row_size, row, (size_t)keys->row_size);
            }
            angles_of_slots(part, block, slots + t, n, angles);
            score_strip(
                &scratch, gathered, n, angles, scratch.cursor.original,
                (float (*)[TILE])(scores[0] + t));
        }
        add_mask_columns(args->mask, block, slots, tokens, scores);
        if (softmax_tile(state, block.count, tokens, scores, state->part_total, decay))
            scale_sums(&scratch, decay);
        for (int t = 0; t < tokens; t += STRIP) {
            int n = (int)min_of(tokens - t, STRIP);
            for (int i = 0; i < n; i++) {
                const char *row = row_in_pages(stored, block.bh, slots[t + i], value_size);
                memcpy(gathered + i * value_size, row, (size_t)value_size);
            }
            add_values(&scratch, gathered, n, (float (*)[TILE])(scores[0] + t));
        }
    }
    end_part(&scratch, (int)args->value_dim, state);
}

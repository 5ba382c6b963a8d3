/* Attention over all parts of a layer: what every kind of part has in common.

   A query block is a batch-head (a key/value head of a sequence, `bh`) and up to BLOCK_QUERIES of
   its queries. Its tiles are divided into splits, each a task: one split attends to its share of
   the tiles of all parts, one part after the other, with one softmax. A single split writes the
   result; otherwise the last task that ends merges the partial results of all splits.

   B batch, H key/value heads, G query heads a key/value head, Q new tokens, D and E channels of
   keys and of values, T tokens. */
#pragma once
#include "simd.h"

typedef struct {
    int64_t bh, batch, head;        /* bh = batch * heads + head */
    int first, count;               /* queries of the G Q ones of the batch-head */
} QueryBlock;

/* The softmax of a query block. A part adds its weighted values to `sums`, or to `rotated` if they
   are to be rotated back at its end, and its weights to `total`, or to `part_total`. Whenever
   `maximum` rises, all of them are scaled. */
typedef struct {
    float maximum[BLOCK_QUERIES];
    float total[BLOCK_QUERIES];
    ALIGNED float sums[BLOCK_QUERIES][MAX_CHANNELS];
    ALIGNED float rotated[BLOCK_QUERIES][MAX_CHANNELS];
    float part_total[BLOCK_QUERIES]; /* of a part of rows, added to `total` at its end */
    int sums_size, rotated_size;    /* channels in use, in whole vectors */
} SoftmaxState;

INLINE int padded(int64_t size) { return (int)((size + L - 1) / L * L); }

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* The query block of an index, where a batch-head has `queries` queries. Its blocks follow each
   other. */
INLINE QueryBlock query_block(int64_t heads, int64_t queries, int64_t index) {
    int64_t blocks = (queries + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
    int64_t size = (queries + blocks - 1) / blocks;
    blocks = (queries + size - 1) / size;
    int64_t bh = index / blocks;
    int64_t first = index % blocks * size;
    return (QueryBlock){
        bh, bh / heads, bh % heads, (int)first, (int)min_of(queries - first, size)};
}

/* Clamps an untrusted index to [0, size). */
INLINE int64_t clamped(int64_t index, int64_t size) {
    return index < 0 ? 0 : index >= size ? size - 1 : index;
}

/* Cosines of the first position of a tile, and behind them sines that have to be multiplied by
   `sign`, which is negative for tiles before position 0. */
INLINE const float *coarse_angles(const Rotary *rotary, int64_t tile, float *sign) {
    *sign = tile < 0 ? -1 : 1;
    int64_t index = clamped(tile < 0 ? -tile : tile, rotary->tiles);
    return rotary->coarse + index * 2 * rotary->padded_pairs;
}

INLINE int64_t length_of(const Part *part, QueryBlock block) {
    if (!part->lengths) return part->length;
    return clamped(part->lengths[block.batch], part->length + 1);
}

INLINE int64_t tiles_of(const Part *part, QueryBlock block) {
    return (length_of(part, block) + TILE - 1) / TILE;
}

/* Calls an INLINE function with the number of queries as a constant, so that its loops unroll. */
#define UNROLL_QUERIES(count, function, ...) \
    switch (count) { \
    case 1: \
        function(1, __VA_ARGS__); \
        break; \
    case 2: \
        function(2, __VA_ARGS__); \
        break; \
    case 3: \
        function(3, __VA_ARGS__); \
        break; \
    default: \
        function(BLOCK_QUERIES, __VA_ARGS__); \
    }

/* Adds the mask of a tile's tokens to its scores. Columns that the mask lacks add nothing. */
INLINE void add_mask(
    const AttentionArgs *args, const Part *part, QueryBlock block, int64_t start, int tokens,
    float (*scores)[TILE]) {
    const int64_t *shape = part->mask_shape;
    if (!part->mask) return;
    for (int r = 0; r < block.count; r++) {
        int64_t index = block.first + r;
        int64_t head = block.head * args->query_groups + index / args->queries;
        int64_t query = index % args->queries;
        int64_t b = shape[0] > 1 ? block.batch : 0;
        int64_t h = shape[1] > 1 ? head : 0;
        int64_t q = shape[2] > 1 ? query : 0;
        const float *line = part->mask + ((b * shape[1] + h) * shape[2] + q) * shape[3] + start;
        for (int t = 0; t < tokens && start + t < shape[3]; t++) scores[r][t] += line[t];
    }
}

/* Turns the scores of a tile into weights, and adds their sums to `total`. Weights behind the last
   token are 0. Returns true if a higher maximum scaled the state: by the factors in `decay`. */
INLINE int softmax_tile(
    SoftmaxState *state, int count, int tokens, float (*scores)[TILE], float *total, float *decay) {
    int is_scaled = 0;
    for (int r = 0; r < count; r++) {
        for (int t = tokens; t < TILE; t++) scores[r][t] = -INFINITY;
        vf high = load(scores[r]);
        for (int t = L; t < TILE; t += L) high = larger(load(scores[r] + t), high);
        float highest = largest_of(high);
        decay[r] = 1;
        if (highest > state->maximum[r]) {
            float factor = state->maximum[r] == -INFINITY ? 0 : expf(state->maximum[r] - highest);
            float *sums = state->sums[r];
            float *rotated = state->rotated[r];
            decay[r] = factor;
            state->maximum[r] = highest;
            is_scaled = 1;
            state->total[r] *= factor;
            state->part_total[r] *= factor;
            for (int d = 0; d < state->sums_size; d += L) store(sums + d, load(sums + d) * factor);
            for (int d = 0; d < state->rotated_size; d += L)
                store(rotated + d, load(rotated + d) * factor);
        }
        /* In a tile that is masked throughout, every exponential has to be 0. */
        vf reference = splat(state->maximum[r] == -INFINITY ? 0 : state->maximum[r]);
        vf sum = {0};
        for (int t = 0; t < TILE; t += L) {
            vf weight = exp_of(load(scores[r] + t) - reference);
            sum += weight;
            store(scores[r] + t, weight);
        }
        total[r] += sum_of(sum);
    }
    return is_scaled;
}

/* Applies Hadamard's transform, without its factor, to runs of `size` (a power of two) of `count`
   numbers. */
INLINE void hadamard(float *x, int64_t count, int64_t size) {
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t start = 0; start + 2 * half <= count; start += 2 * half)
            for (int64_t i = start; i < start + half; i++) {
                float a = x[i];
                float b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}

typedef float Queries[BLOCK_QUERIES][MAX_CHANNELS];

/* Reads `count` queries [D] from query `first` on, times `scale`, with zeros behind them up to a
   whole vector. */
static inline void load_queries(
    const void *source, int dtype, int64_t first, int count, double scale, int dim, Queries query) {
    for (int r = 0; r < count; r++) {
        read_floats(source, dtype, (first + r) * dim, dim, padded(dim), query[r]);
        for (int d = 0; d < dim; d++) query[r][d] *= (float)scale;
    }
}

static inline void start_softmax(int count, int64_t value_dim, SoftmaxState *state) {
    for (int r = 0; r < count; r++) {
        state->maximum[r] = -INFINITY;
        state->total[r] = 0;
        state->part_total[r] = 0;
        memset(state->sums[r], 0, sizeof(float) * (size_t)padded(value_dim));
    }
    state->sums_size = padded(value_dim);
    state->rotated_size = 0;
}

/* Writes the result [E] of one query: zeros if it is masked everywhere. */
static inline void write_result(
    void *result, int dtype, int64_t query, int64_t value_dim, const float *sums, float total) {
    float factor = total > 0 ? 1 / total : 0;
    for (int64_t d = 0; d < value_dim; d++)
        store_float(result, dtype, query * value_dim + d, sums[d] * factor);
}

/* Attend to tiles `first` to `last`, exclusive, of a part, with queries that are scaled already. */
void KVC_NAME(attend_rows, KVC_LEVEL)(
    const AttentionArgs *, const Part *, QueryBlock, const Queries, int64_t first, int64_t last,
    SoftmaxState *);
void KVC_NAME(attend_groups, KVC_LEVEL)(
    const AttentionArgs *, const Part *, QueryBlock, const Queries, int64_t first, int64_t last,
    SoftmaxState *);

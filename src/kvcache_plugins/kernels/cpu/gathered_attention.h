/* Attention of up to BLOCK_QUERIES queries to tokens whose keys and values are anywhere in memory:
   products of queries with rows at addresses, and weighted sums of rows. Scores are
   [BLOCK_QUERIES][TILE]. */
#pragma once
#include "layer.h"

/* Prefetch distance in rows; cache line in bytes. */
enum { PREFETCH_ROWS = 8, CACHE_LINE = 64 };

INLINE const char *window_key(const Window *w, QueryBlock block, int64_t size, int64_t token) {
    int64_t offset = block.batch * w->key_strides[0] + block.head * w->key_strides[1];
    return w->keys + offset + token * size;
}

INLINE const char *window_value(const Window *w, QueryBlock block, int64_t size, int64_t token) {
    int64_t offset = block.batch * w->value_strides[0] + block.head * w->value_strides[1];
    return w->values + offset + token * size;
}

/* The row of `size` bytes in a slot that is in range. */
INLINE const char *row_in_pages(
    const SelectableTokens *tokens, int64_t bh, int64_t slot, int64_t size) {
    int64_t page = slot / tokens->page_tokens;
    int64_t token = slot - page * tokens->page_tokens;
    return tokens->pages[page] + (bh * tokens->page_tokens + token) * size;
}

/* The number of a query block's first query among those of all batch-heads. */
INLINE int64_t first_query(const TokenQueries *queries, QueryBlock block) {
    return block.bh * queries->query_groups + block.first;
}

static inline void load_token_queries(
    const TokenQueries *queries, QueryBlock block, Queries query) {
    load_queries(
        queries->data, F32, first_query(queries, block), block.count, queries->scale,
        (int)queries->key_dim, query);
}

/* Addresses of keys and values: those of the `tokens` tokens of a tile, and behind them those of
   the next tile, as far as they are `known`. */
typedef struct {
    const char *keys[2 * TILE];
    const char *values[2 * TILE];
    int64_t columns[2 * TILE];      /* of the mask, if there is one */
    int tokens, known;
    int key_dim, value_dim;
} TokenRefs;

/* Adds the mask at the columns of tokens to their scores. Columns are not trusted. */
static inline void add_mask_columns(
    const Mask *mask, QueryBlock block, const int64_t *columns, int tokens,
    float (*scores)[TILE]) {
    for (int t = 0; t < tokens && mask; t++) {
        int64_t index = block.batch * mask->columns + clamped(columns[t], mask->columns);
        float bias;
        if (mask->is_boolean)
            bias = ((const uint8_t *)mask->data)[index] ? 0 : -INFINITY;
        else
            bias = ((const float *)mask->data)[index];
        for (int r = 0; r < block.count; r++) scores[r][t] += bias;
    }
}

INLINE void prefetch_row(const char *row, int64_t size) {
    for (int64_t i = 0; i < size; i += CACHE_LINE) __builtin_prefetch(row + i);
}

typedef float v4 __attribute__((vector_size(16)));

/* The sums of four vectors, side by side. */
INLINE v4 sums_of_four(vf a, vf b, vf c, vf d) {
#if L == 16
    typedef float v8 __attribute__((vector_size(32)));
    v8 halves[4];
    vf all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        __m256 low = _mm512_castps512_ps256((__m512)all[i]);
        halves[i] = (v8)low + (v8)_mm512_extractf32x8_ps((__m512)all[i], 1);
    }
    __m256 first = _mm256_hadd_ps((__m256)halves[0], (__m256)halves[1]);
    __m256 sums = _mm256_hadd_ps(first, _mm256_hadd_ps((__m256)halves[2], (__m256)halves[3]));
    return (v4)_mm256_castps256_ps128(sums) + (v4)_mm256_extractf128_ps(sums, 1);
#elif L == 8
    __m256 first = _mm256_hadd_ps((__m256)a, (__m256)b);
    __m256 sums = _mm256_hadd_ps(first, _mm256_hadd_ps((__m256)c, (__m256)d));
    return (v4)_mm256_castps256_ps128(sums) + (v4)_mm256_extractf128_ps(sums, 1);
#elif defined(KVC_IS_NEON)
    float32x4_t first = vpaddq_f32((float32x4_t)a, (float32x4_t)b);
    return (v4)vpaddq_f32(first, vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
    return (v4){sum_of(a), sum_of(b), sum_of(c), sum_of(d)};
#endif
}

/* The numbers of a row from `d` on, fewer than L, with zeros behind them. */
INLINE vf load_last(const char *row, int dtype, int d, int dim) {
    ALIGNED char last[4 * L] = {0};
    size_t size = size_of_dtype(dtype);
    memcpy(last, row + size * (size_t)d, size * (size_t)(dim - d));
    return load_floats(last, dtype, 0);
}

/* Scores `width` tokens at `keys`: as many sums at once as there are registers for. */
INLINE void score_some(
    const char *const *keys, int dtype, int dim, int width, int count, const Queries query,
    float (*scores)[TILE], int first) {
    vf sums[4][BLOCK_QUERIES] = {{{0}}};
    int d = 0;
    for (; d + L <= dim; d += L)
        for (int i = 0; i < width; i++) {
            vf key = load_floats(keys[i], dtype, d);
            for (int r = 0; r < count; r++) sums[i][r] += key * load(query[r] + d);
        }
    if (d < dim)
        for (int i = 0; i < width; i++) {
            vf key = load_last(keys[i], dtype, d, dim);
            for (int r = 0; r < count; r++) sums[i][r] += key * load(query[r] + d);
        }
    for (int r = 0; r < count && width == 4; r++) {
        v4 four = sums_of_four(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
        memcpy(scores[r] + first, &four, sizeof four);
    }
    for (int i = 0; i < width && width < 4; i++) {
        v4 four = sums_of_four(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        for (int r = 0; r < count; r++) scores[r][first + i] = four[r];
    }
}

/* Scores the tokens of a tile, the last of which is repeated in place of tokens that a step
   lacks. */
INLINE void score_tokens(
    const TokenRefs *refs, int dtype, int count, const Queries query, float (*scores)[TILE]) {
    int dim = refs->key_dim;
    int tokens = refs->tokens;
    int key_size = (int)size_of_dtype(dtype) * dim;
    int value_size = (int)size_of_dtype(dtype) * refs->value_dim;
    int width = count < 4 ? 4 : 2;
    for (int first = 0; first < tokens; first += width) {
        const char *keys[4];
        for (int i = 0; i < width; i++) {
            int t = first + i;
            if (t + PREFETCH_ROWS < refs->known)
                prefetch_row(refs->keys[t + PREFETCH_ROWS], key_size);
            /* Values are read when all scores of the tile are there. */
            if (t < tokens) prefetch_row(refs->values[t], value_size);
            keys[i] = refs->keys[t < tokens ? t : tokens - 1];
        }
        score_some(keys, dtype, dim, width, count, query, scores, first);
    }
}

/* Adds `vectors` vectors from channel `d` on of all values, times weights, to the sums. */
INLINE void add_channels(
    const TokenRefs *refs, int dtype, int d, int vectors, int count, const float (*weights)[TILE],
    float (*sums)[MAX_CHANNELS]) {
    vf totals[BLOCK_QUERIES][4];
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vectors; v++) totals[r][v] = load(sums[r] + d + v * L);
    for (int t = 0; t < refs->tokens; t++) {
        const char *value = refs->values[t];
        vf x[4];
        for (int v = 0; v < vectors; v++) x[v] = load_floats(value, dtype, d + v * L);
        for (int r = 0; r < count; r++)
            for (int v = 0; v < vectors; v++) totals[r][v] += x[v] * weights[r][t];
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < vectors; v++) store(sums[r] + d + v * L, totals[r][v]);
}

INLINE void add_tokens(
    const TokenRefs *refs, int dtype, int count, const float (*weights)[TILE],
    float (*sums)[MAX_CHANNELS]) {
    int d = 0;
    int dim = refs->value_dim;
    int vectors = count < 3 ? 4 : 2;
    for (; d + vectors * L <= dim; d += vectors * L)
        add_channels(refs, dtype, d, vectors, count, weights, sums);
    for (; d + L <= dim; d += L) add_channels(refs, dtype, d, 1, count, weights, sums);
    for (int t = 0; t < refs->tokens && d < dim; t++) {
        vf x = load_last(refs->values[t], dtype, d, dim);
        for (int r = 0; r < count; r++)
            store(sums[r] + d, load(sums[r] + d) + x * weights[r][t]);
    }
}

/* Cases of a switch over `key * 8 + count`, which call with both as constants. */
#define CASE_OF_QUERIES(CALL, key, count) \
    case key * 8 + count: \
        CALL(key, count); \
        break;
#define FOR_QUERIES(CALL, key) \
    CASE_OF_QUERIES(CALL, key, 1) \
    CASE_OF_QUERIES(CALL, key, 2) \
    CASE_OF_QUERIES(CALL, key, 3) \
    CASE_OF_QUERIES(CALL, key, 4)
#define BY_DTYPE_AND_QUERIES(CALL) \
    switch (dtype * 8 + count) { \
    FOR_QUERIES(CALL, F32) \
    FOR_QUERIES(CALL, BF16) \
    FOR_QUERIES(CALL, F16) \
    }

static inline void score_refs(
    const TokenRefs *refs, int dtype, int count, const Queries query, float (*scores)[TILE]) {
#define SCORE(dtype, count) score_tokens(refs, dtype, count, query, scores)
    BY_DTYPE_AND_QUERIES(SCORE)
#undef SCORE
}

static inline void add_refs(
    const TokenRefs *refs, int dtype, int count, const float (*weights)[TILE],
    float (*sums)[MAX_CHANNELS]) {
#define ADD(dtype, count) add_tokens(refs, dtype, count, weights, sums)
    BY_DTYPE_AND_QUERIES(ADD)
#undef ADD
}

/* Attends to the tokens of a tile. */
static inline void attend_refs(
    const TokenRefs *refs, int dtype, QueryBlock block, const Mask *mask, const Queries query,
    SoftmaxState *state) {
    ALIGNED float scores[BLOCK_QUERIES][TILE], decay[BLOCK_QUERIES];
    score_refs(refs, dtype, block.count, query, scores);
    add_mask_columns(mask, block, refs->columns, refs->tokens, scores);
    softmax_tile(state, block.count, refs->tokens, scores, state->total, decay);
    add_refs(refs, dtype, block.count, scores, state->sums);
}

/* Attends to rows of selected tokens, in slots that are in range: see `rows.c`. */
void KVC_NAME(attend_selected_rows, KVC_LEVEL)(
    const SelectedAttentionArgs *, QueryBlock, const Queries, const int64_t *slots, int64_t count,
    SoftmaxState *);

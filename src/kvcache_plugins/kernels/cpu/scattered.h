/* Attention of up to ROWS queries over tokens whose keys and values stand anywhere in memory: products with rows at
   addresses, and sums of them. A score is that of a query and a token, [ROWS][TILE].

   D channels of a row, R queries. */
#pragma once
#include "layer.h"

/* Rows that are called for before they are needed, and bytes that come at once */
enum { AHEAD = 8, LINE = 64 };

INLINE const char *window_key(const Window *w, Unit unit, int64_t size, int64_t t) {
    return w->keys + unit.batch * w->key_strides[0] + unit.head * w->key_strides[1] + t * size;
}
INLINE const char *window_value(const Window *w, Unit unit, int64_t size, int64_t t) {
    return w->values + unit.batch * w->value_strides[0] + unit.head * w->value_strides[1] + t * size;
}
/* The row of `size` bytes in a slot that is in range */
INLINE const char *row_in_pages(const Choice *call, int64_t matrix, int64_t slot, int64_t size) {
    int64_t page = slot / call->page_tokens;
    return call->pages[page] + (matrix * call->page_tokens + slot - page * call->page_tokens) * size;
}
/* Where the tokens of a tile are, and those of the next, as far as they are known */
typedef struct {
    const char *keys[2 * TILE], *values[2 * TILE];
    int64_t columns[2 * TILE];      /* of a mask, where there is one */
    int tokens, known, key_dim, value_dim;
} Places;

/* Adds a mask at the tokens' columns to their scores. A column from memory may be any: there is at least one. */
static inline void add_columns_of(const Mask *mask, Unit unit, const int64_t *columns, int tokens, float (*scores)[TILE]) {
    for (int t = 0; t < tokens && mask->numbers; t++) {
        int64_t at = unit.batch * mask->columns + clamped(columns[t], mask->columns);
        float bias = mask->is_boolean ? ((const uint8_t *)mask->numbers)[at] ? 0 : -INFINITY : ((const float *)mask->numbers)[at];
        for (int r = 0; r < unit.rows; r++) scores[r][t] += bias;
    }
}
INLINE void call_for(const char *row, int64_t size) {
    for (int64_t i = 0; i < size; i += LINE) __builtin_prefetch(row + i);
}

/* The sums of four vectors side by side */
typedef float v4 __attribute__((vector_size(16)));
INLINE v4 sums_of_four(vf a, vf b, vf c, vf d) {
#if defined(KVC_IS_AVX512)
    typedef float v8 __attribute__((vector_size(32)));
    v8 halves[4];
    vf all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        halves[i] = (v8)_mm512_castps512_ps256((__m512)all[i]) + (v8)_mm512_extractf32x8_ps((__m512)all[i], 1);
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)halves[0], (__m256)halves[1]),
                              _mm256_hadd_ps((__m256)halves[2], (__m256)halves[3]));
    return (v4)_mm256_castps256_ps128(s) + (v4)_mm256_extractf128_ps(s, 1);
#elif defined(KVC_IS_AVX2)
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    return (v4)_mm256_castps256_ps128(s) + (v4)_mm256_extractf128_ps(s, 1);
#elif defined(KVC_IS_NEON)
    return (v4)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
    return (v4){sum_of(a), sum_of(b), sum_of(c), sum_of(d)};
#endif
}
/* L numbers of a row from `d` on, zeros behind its end */
INLINE vf load_last(const char *row, int kind, int d, int dim) {
    ALIGNED char last[4 * L] = {0};
    size_t size = size_of_kind(kind);
    memcpy(last, row + size * (size_t)d, size * (size_t)(dim - d));
    return load_numbers(last, kind, 0);
}

/* Products of `rows` queries with `count` rows: as many sums as there are registers for. Fewer tokens are the last again. */
INLINE void score_some(
    const char *const *at, int kind, int dim, int count, int rows, const Queries query, int tokens, float (*scores)[TILE], int t) {
    const char *own[4];
    vf sums[4][ROWS] = {{{0}}};
    int d = 0;
    for (int i = 0; i < count; i++) own[i] = at[t + i < tokens ? t + i : tokens - 1];
    for (; d + L <= dim; d += L)
        for (int i = 0; i < count; i++) {
            vf x = load_numbers(own[i], kind, d);
            for (int r = 0; r < rows; r++) sums[i][r] += x * load(query[r] + d);
        }
    if (d < dim)
        for (int i = 0; i < count; i++) {
            vf x = load_last(own[i], kind, d, dim);
            for (int r = 0; r < rows; r++) sums[i][r] += x * load(query[r] + d);
        }
    for (int r = 0; r < rows && count == 4; r++) {
        v4 s = sums_of_four(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
        memcpy(scores[r] + t, &s, sizeof s);
    }
    for (int i = 0; i < count && count < 4; i++) {
        v4 s = sums_of_four(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        for (int r = 0; r < rows; r++) scores[r][t + i] = s[r];
    }
}
INLINE void score_tokens(const Places *at, int kind, int rows, const Queries query, float (*scores)[TILE]) {
    int key_size = (int)size_of_kind(kind) * at->key_dim, value_size = (int)size_of_kind(kind) * at->value_dim;
    int count = rows < 4 ? 4 : 2;
    for (int t = 0; t < at->tokens; t += count) {
        for (int i = t; i < t + count; i++) {
            if (i + AHEAD < at->known) call_for(at->keys[i + AHEAD], key_size);
            /* Values are needed when all scores of the tile are there */
            if (i < at->tokens) call_for(at->values[i], value_size);
        }
        score_some(at->keys, kind, at->key_dim, count, rows, query, at->tokens, scores, t);
    }
}
/* Adds `vectors` vectors from channel `d` on of all rows, times weights, to the sums of `rows` queries */
INLINE void add_columns(
    const Places *at, int kind, int d, int vectors, int rows, const float (*weights)[TILE], float (*sums)[MOST_CHANNELS]) {
    vf own[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) own[r][v] = load(sums[r] + d + v * L);
    for (int t = 0; t < at->tokens; t++) {
        const char *value = at->values[t];
        vf x[4];
        for (int v = 0; v < vectors; v++) x[v] = load_numbers(value, kind, d + v * L);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) own[r][v] += x[v] * weights[r][t];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(sums[r] + d + v * L, own[r][v]);
}
INLINE void add_tokens(
    const Places *at, int kind, int rows, const float (*weights)[TILE], float (*sums)[MOST_CHANNELS]) {
    int d = 0, dim = at->value_dim, most = rows < 3 ? 4 : 2;
    for (; d + most * L <= dim; d += most * L) add_columns(at, kind, d, most, rows, weights, sums);
    for (; d + L <= dim; d += L) add_columns(at, kind, d, 1, rows, weights, sums);
    for (int t = 0; t < at->tokens && d < dim; t++) {
        vf x = load_last(at->values[t], kind, d, dim);
        for (int r = 0; r < rows; r++) store(sums[r] + d, load(sums[r] + d) + x * weights[r][t]);
    }
}
/* Calls for what is stored and for the queries in use, both of which are known when it is compiled */
#define FOR_ROWS(CALL, kind) \
    case kind * 8 + 1: CALL(kind, 1); break; \
    case kind * 8 + 2: CALL(kind, 2); break; \
    case kind * 8 + 3: CALL(kind, 3); break; \
    case kind * 8 + 4: CALL(kind, 4); break;
#define BY_KIND_AND_ROWS(CALL) \
    switch (kind * 8 + rows) { FOR_ROWS(CALL, FLOATS) FOR_ROWS(CALL, BFLOATS) FOR_ROWS(CALL, HALVES) }

static inline void score_places(const Places *at, int kind, int rows, const Queries query, float (*scores)[TILE]) {
#define SCORE(kind, rows) score_tokens(at, kind, rows, query, scores)
    BY_KIND_AND_ROWS(SCORE)
#undef SCORE
}
static inline void add_places(const Places *at, int kind, int rows, const float (*weights)[TILE], float (*sums)[MOST_CHANNELS]) {
#define ADD(kind, rows) add_tokens(at, kind, rows, weights, sums)
    BY_KIND_AND_ROWS(ADD)
#undef ADD
}

/* Attends to the tokens of a tile */
static inline void attend_places(const Places *at, int kind, Unit unit, const Mask *mask, const Queries query, State *state) {
    ALIGNED float scores[ROWS][TILE], decay[ROWS];
    score_places(at, kind, unit.rows, query, scores);
    add_columns_of(mask, unit, at->columns, at->tokens, scores);
    softmax_tile(state, unit.rows, at->tokens, scores, state->total, decay);
    add_places(at, kind, unit.rows, scores, state->sums);
}

/* Rows of chosen tokens, in slots that are in range: see `rows.c` */
void KVC_NAME(attend_chosen_rows, KVC_LEVEL)(
    const Choice *, Unit, const Queries, const int64_t *slots, int64_t count, State *);

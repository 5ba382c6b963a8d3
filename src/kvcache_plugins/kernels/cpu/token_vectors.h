/* Vectors of tokens: lanes are tokens of a head, so that no sum over channels goes across lanes. */
#pragma once
#include "layer.h"

enum { TASK_TOKENS = 128 };

/* Up to L consecutive tokens of one batch-head, within a tile: the first one's index, and the tile
   and the offset of its position. */
typedef struct {
    int64_t bh, first, tile, offset;
    int count;
} TokenVector;

/* Transposes squares of four by four numbers, which follow each other in vectors. */
INLINE void transpose4(vf *r) {
#if L == 16
    __m512 a = _mm512_unpacklo_ps((__m512)r[0], (__m512)r[1]);
    __m512 b = _mm512_unpackhi_ps((__m512)r[0], (__m512)r[1]);
    __m512 c = _mm512_unpacklo_ps((__m512)r[2], (__m512)r[3]);
    __m512 d = _mm512_unpackhi_ps((__m512)r[2], (__m512)r[3]);
    r[0] = (vf)_mm512_shuffle_ps(a, c, 0x44);
    r[1] = (vf)_mm512_shuffle_ps(a, c, 0xee);
    r[2] = (vf)_mm512_shuffle_ps(b, d, 0x44);
    r[3] = (vf)_mm512_shuffle_ps(b, d, 0xee);
#elif L == 8
    __m256 a = _mm256_unpacklo_ps((__m256)r[0], (__m256)r[1]);
    __m256 b = _mm256_unpackhi_ps((__m256)r[0], (__m256)r[1]);
    __m256 c = _mm256_unpacklo_ps((__m256)r[2], (__m256)r[3]);
    __m256 d = _mm256_unpackhi_ps((__m256)r[2], (__m256)r[3]);
    r[0] = (vf)_mm256_shuffle_ps(a, c, 0x44);
    r[1] = (vf)_mm256_shuffle_ps(a, c, 0xee);
    r[2] = (vf)_mm256_shuffle_ps(b, d, 0x44);
    r[3] = (vf)_mm256_shuffle_ps(b, d, 0xee);
#else
    for (int i = 1; i < 4; i++)
        for (int j = 0; j < i; j++) {
            float x = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = x;
        }
#endif
}

/* Loads four numbers of each token: those of token 4 i + j are run i of vector j. */
INLINE void load4(const float *const *tokens, int d, vf *r) {
    for (int j = 0; j < 4; j++) {
#if L == 16
        __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(tokens[j] + d));
        v = _mm512_insertf32x4(v, _mm_loadu_ps(tokens[j + 4] + d), 1);
        v = _mm512_insertf32x4(v, _mm_loadu_ps(tokens[j + 8] + d), 2);
        r[j] = (vf)_mm512_insertf32x4(v, _mm_loadu_ps(tokens[j + 12] + d), 3);
#elif L == 8
        __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(tokens[j] + d));
        r[j] = (vf)_mm256_insertf128_ps(v, _mm_loadu_ps(tokens[j + 4] + d), 1);
#else
        r[j] = load(tokens[j] + d);
#endif
    }
}

INLINE void store4(float *const *tokens, int d, const vf *r) {
    for (int j = 0; j < 4; j++) {
#if L == 16
        __m512 v = (__m512)r[j];
        _mm_storeu_ps(tokens[j] + d, _mm512_castps512_ps128(v));
        _mm_storeu_ps(tokens[j + 4] + d, _mm512_extractf32x4_ps(v, 1));
        _mm_storeu_ps(tokens[j + 8] + d, _mm512_extractf32x4_ps(v, 2));
        _mm_storeu_ps(tokens[j + 12] + d, _mm512_extractf32x4_ps(v, 3));
#elif L == 8
        __m256 v = (__m256)r[j];
        _mm_storeu_ps(tokens[j] + d, _mm256_castps256_ps128(v));
        _mm_storeu_ps(tokens[j + 4] + d, _mm256_extractf128_ps(v, 1));
#else
        store(tokens[j] + d, r[j]);
#endif
    }
}

/* Loads the channels of a vector of tokens. Lanes behind the last token repeat it. */
INLINE void load_tokens(const TokenSizes *sizes, const States *states, TokenVector vector, vf *x) {
    ALIGNED float lines[L][MAX_CHANNELS];
    const float *tokens[L];
    int dtype = (int)states->dtype;
    int dim = (int)sizes->channels;
    int64_t item = vector.bh / sizes->heads;
    int64_t head = vector.bh % sizes->heads;
    int64_t origin = item * states->strides[0] + head * states->strides[1];
    int d = 0;
    for (int t = 0; t < L; t++) {
        int64_t token = vector.first + (t < vector.count ? t : vector.count - 1);
        int64_t index = origin + token * states->strides[2];
        tokens[t] = dtype == F32 ? (const float *)states->data + index : lines[t];
        if (dtype != F32) read_floats(states->data, dtype, index, dim, dim, lines[t]);
    }
    for (; d + 4 <= dim; d += 4) {
        load4(tokens, d, x + d);
        transpose4(x + d);
    }
    for (; d < dim; d++)
        for (int t = 0; t < L; t++) x[d][t] = tokens[t][d];
}

INLINE void store_tokens(const TokenSizes *sizes, float *result, TokenVector vector, const vf *x) {
    ALIGNED float unused[MAX_CHANNELS];
    int dim = (int)sizes->channels;
    int d = 0;
    float *first = result + (vector.bh * sizes->tokens + vector.first) * dim;
    float *tokens[L];
    for (int t = 0; t < L; t++) tokens[t] = t < vector.count ? first + t * dim : unused;
    for (; d + 4 <= dim; d += 4) {
        vf r[4] = {x[d], x[d + 1], x[d + 2], x[d + 3]};
        transpose4(r);
        store4(tokens, d, r);
    }
    for (; d < dim; d++)
        for (int t = 0; t < L; t++) tokens[t][d] = x[d][t];
}

/* Applies or undoes a rotary embedding. Angles are sums of those of the tile and of the offset in
   it: they depend on the position alone, to the last bit, wherever a run of tokens begins. */
INLINE void rotate_tokens(
    const Rotary *rotary, int channels, int inverse, TokenVector vector, vf *x) {
    float direction = inverse ? -1 : 1;
    float sign;
    const float *coarse = coarse_angles(rotary, vector.tile, &sign);
    for (int64_t n = 0; n < rotary->num_rotated; n++) {
        int64_t d = rotary->pairs[2 * n];
        int64_t p = rotary->pairs[2 * n + 1];
        if (d < 0 || p < 0 || d >= channels || p >= channels) continue;
        const float *fine = rotary->fine_by_pair + n * 2 * ANGLES + vector.offset;
        float coarse_cosine = coarse[n];
        float coarse_sine = coarse[rotary->padded_pairs + n] * sign;
        vf cosine = load(fine);
        vf sine = load(fine + ANGLES);
        vf low = x[d];
        vf high = x[p];
        vf both_cosine = cosine * coarse_cosine - sine * coarse_sine;
        vf both_sine = (sine * coarse_cosine + cosine * coarse_sine) * direction;
        x[d] = low * both_cosine + high * both_sine;
        x[p] = high * both_cosine - low * both_sine;
    }
}

/* Tokens of a task, as offsets from the start of the tile that the position of their sequence's
   first token is in: that tile's index, and the offset of that token. */
typedef struct {
    int64_t bh, shift, tile, from, to;
} TokenRange;

INLINE TokenRange whole_range(
    const TokenSizes *sizes, const TokenPositions *positions, int64_t bh) {
    TokenRange range = {.bh = bh};
    if (positions && positions->rotary) {
        const int64_t *padding = positions->padding;
        int64_t first = positions->first - (padding ? padding[bh / sizes->heads] : 0);
        range.shift = (first % TILE + TILE) % TILE;
        range.tile = (first - range.shift) / TILE;
    }
    range.from = range.shift;
    range.to = range.shift + sizes->tokens;
    return range;
}

INLINE TokenRange range_of_task(
    const TokenSizes *sizes, const TokenPositions *positions, int64_t task) {
    int64_t heads = sizes->batch * sizes->heads;
    TokenRange range = whole_range(sizes, positions, task % heads);
    int64_t from = task / heads * TASK_TOKENS;
    range.to = min_of(range.to, from + TASK_TOKENS);
    if (from > range.from) range.from = from;
    return range;
}

/* Takes the next vector of tokens of a range. Returns false if there is none. */
INLINE int take_vector(TokenRange *range, TokenVector *vector) {
    int64_t offset = range->from;
    if (offset >= range->to) return 0;
    range->from = min_of(offset - offset % L + L, range->to);
    vector->bh = range->bh;
    vector->first = offset - range->shift;
    vector->tile = range->tile + offset / TILE;
    vector->offset = offset % TILE;
    vector->count = (int)(range->from - offset);
    return 1;
}

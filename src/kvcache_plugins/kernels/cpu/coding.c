/* Rows of tokens coded and decoded, keys turned, and channels measured: see `coding.h`. Lanes are tokens of a head. A channel has one width
   in all of them, so a code is found by halving bounds in registers, and no sum goes across lanes. Rotary embedding,
   Hadamard's rotation and the change of basis are done, or undone, in the same pass.

   Nothing in memory is believed where it says a place: see `load_head`; lengths and sizes are checked by `coding.py`. */
#include "coding.h"

enum { TASK_TOKENS = 128, SUM_TOKENS = 1024, SOME = 8 };

/* A head's table, channels in the order of rows */
typedef struct {
    int dim, channels, blocks, coded; /* `coded`: numbers that have bits */
    int own[MOST_CHANNELS];
    uint8_t widths[MOST_BLOCKS];
    float means[MOST_CHANNELS], deviations[MOST_CHANNELS], inverses[MOST_CHANNELS];
    /* Of channels that are rotated or change their basis: taken off before; and what products with the inverse are over */
    float centres[MOST_CHANNELS], units[MOST_CHANNELS];
    const int8_t *basis, *inverse;
    const float *steps, *factors;
} Head;
/* Up to L tokens of a matrix, at consecutive places of one tile */
typedef struct { int64_t matrix, first, tile, place; int count; } Group;
typedef uint32_t Bits[MOST_BLOCKS][2][L];

INLINE vf larger_of(vf a, float b) { return larger(a, splat(b)); }
INLINE vf size_of(vf x) { return (vf)((vi)x & 0x7fffffff); }
INLINE vf gather(const float *table, vu at) {
    vf v;
    for (int i = 0; i < L; i++) v[i] = table[at[i]];
    return v;
}
/* Of a level of bounds, which has 2^level */
INLINE vf bound_at(const float *bounds, vu at, int level) {
    if (level == 0) return splat(bounds[0]);
#if defined(KVC_IS_AVX2)
    if (level < 4) return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(bounds + 16 * level), (__m256i)at);
#endif
    if (level <= 4) return look_up16(bounds + 16 * level, at);
    return gather(bounds + (level == 5 ? LEVEL5 : LEVEL6), at);
}
/* How many of the bounds of some levels lie below positive numbers, which compare like their bits */
INLINE vu search(vi x, const float *bounds, int levels) {
    vi found = {0};
    for (int level = 0; level < levels; level++)
        found = found + found - (x > (vi)bound_at(bounds, (vu)found, level));
    return (vu)found;
}
/* The points of numbers in order among 2^width, by (2 number + 1) / 2^width - 1 */
INLINE vf point_at(vf centred, const float *p) {
    vf square = centred * centred;
    return centred * (p[0] + square * (p[1] + square * p[2]));
}

/* The bytes that scales are stored as: log2 in steps of 1/16 */
static vu stored_scales(const Codebook *book, vf scale) {
    vi bits = (vi)larger_of(scale, 1e-6f);
    vf mantissa = (vf)((bits & 0x7fffff) | 0x3f800000);
    vi step = (vi)search((vi)mantissa, book->scale_bounds, 4) - (mantissa > splat(book->scale_bounds[15]));
    vi stored = ((bits >> 23) - 127) * SCALE_STEPS + step + SCALE_OFFSET;
    stored = (stored | (stored > LAST_SCALE)) & LAST_SCALE & (stored > 0);
    return (vu)(stored & (scale == scale));
}
/* The scale that suits points found with `scale`, of sums of squared numbers, of numbers times points, of squared points */
INLINE vf fitting_scale(const Coding *c, vf energy, vf over, vf under, vf scale) {
    if (c->table->is_weighted) return over / larger_of(under, 1e-9f);
    return choose(over > energy / scale * LEAST_GAIN, energy / over, scale);
}
INLINE float weight_of(const Coding *c, int width) {
    return c->table->is_weighted || c->table->by_energy ? (float)(1 << 2 * width) : 1;
}

static void load_head(const Coding *c, int64_t matrix, Head *head) {
    int64_t item = matrix % c->heads, size = item * c->channels;
    int is_turned = c->table->rotation > 1 || c->table->basis;
    head->dim = (int)c->table->dim, head->channels = (int)c->channels;
    head->blocks = (int)((c->table->dim + BLOCK - 1) / BLOCK), head->coded = 0, head->basis = 0;
    for (int i = 0; i < head->dim; i++) {
        int64_t at = matrix * c->table->dim + i, own = i;
        if (c->table->order) own = c->table->order_size == 1 ? ((const uint8_t *)c->table->order)[at] : ((const int16_t *)c->table->order)[at];
        /* An order that is none reads and writes channels that there are */
        own = own < 0 || own >= c->table->dim ? 0 : own;
        float deviation = float_of_half(c->table->deviation[matrix * c->table->deviations + (c->table->deviations > 1 ? own : 0)]);
        head->own[i] = (int)own;
        head->means[i] = c->table->mean && !is_turned ? float_of_half(c->table->mean[matrix * c->table->dim + own]) : 0;
        head->deviations[i] = deviation, head->inverses[i] = deviation > 0 ? 1 / deviation : 0;
    }
    for (int d = 0; d < head->channels; d++)
        head->centres[d] = c->table->mean && is_turned ? float_of_half(c->table->mean[matrix * c->channels + d]) : 0;
    if (c->table->basis) {
        head->basis = c->table->basis + size * c->channels, head->inverse = c->table->inverse + item * c->table->dim * c->channels;
        head->steps = c->table->steps + size, head->factors = c->table->factors + size;
        for (int i = 0; i < head->dim; i++) {
            int32_t own = 0;
            for (int d = 0; d < head->channels; d++) own += head->basis[i * head->channels + d] * head->inverse[i * head->channels + d];
            head->units[i] = (float)own * head->steps[i];
        }
    }
    int64_t left = c->table->row_size - 1;
    for (int v = 0; v < head->blocks; v++) {
        int width = c->table->widths[matrix * head->blocks + v];
        /* Wider than there are codes, or beyond the row: of no bits */
        head->widths[v] = (uint8_t)(width > MOST_WIDTH || width > left ? 0 : width);
        left -= head->widths[v];
        head->coded += head->widths[v] ? BLOCK : 0;
    }
}
/* Squares of four by four numbers, one behind the other in vectors, with rows for columns */
INLINE void transpose4(vf *r) {
#if defined(KVC_IS_AVX512)
    __m512 a = _mm512_unpacklo_ps((__m512)r[0], (__m512)r[1]), b = _mm512_unpackhi_ps((__m512)r[0], (__m512)r[1]);
    __m512 c = _mm512_unpacklo_ps((__m512)r[2], (__m512)r[3]), d = _mm512_unpackhi_ps((__m512)r[2], (__m512)r[3]);
    r[0] = (vf)_mm512_shuffle_ps(a, c, 0x44), r[1] = (vf)_mm512_shuffle_ps(a, c, 0xee);
    r[2] = (vf)_mm512_shuffle_ps(b, d, 0x44), r[3] = (vf)_mm512_shuffle_ps(b, d, 0xee);
#elif defined(KVC_IS_AVX2)
    __m256 a = _mm256_unpacklo_ps((__m256)r[0], (__m256)r[1]), b = _mm256_unpackhi_ps((__m256)r[0], (__m256)r[1]);
    __m256 c = _mm256_unpacklo_ps((__m256)r[2], (__m256)r[3]), d = _mm256_unpackhi_ps((__m256)r[2], (__m256)r[3]);
    r[0] = (vf)_mm256_shuffle_ps(a, c, 0x44), r[1] = (vf)_mm256_shuffle_ps(a, c, 0xee);
    r[2] = (vf)_mm256_shuffle_ps(b, d, 0x44), r[3] = (vf)_mm256_shuffle_ps(b, d, 0xee);
#else
    for (int i = 1; i < 4; i++)
        for (int j = 0; j < i; j++) {
            float x = r[i][j];
            r[i][j] = r[j][i], r[j][i] = x;
        }
#endif
}
/* Four numbers of each token, token 4 i + j at i of vector j */
INLINE void load4(const float *const *from, int d, vf *r) {
    for (int j = 0; j < 4; j++) {
#if defined(KVC_IS_AVX512)
        __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(from[j] + d));
        v = _mm512_insertf32x4(v, _mm_loadu_ps(from[j + 4] + d), 1), v = _mm512_insertf32x4(v, _mm_loadu_ps(from[j + 8] + d), 2);
        r[j] = (vf)_mm512_insertf32x4(v, _mm_loadu_ps(from[j + 12] + d), 3);
#elif defined(KVC_IS_AVX2)
        __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(from[j] + d));
        r[j] = (vf)_mm256_insertf128_ps(v, _mm_loadu_ps(from[j + 4] + d), 1);
#else
        r[j] = load(from[j] + d);
#endif
    }
}
INLINE void store4(float *const *to, int d, const vf *r) {
    for (int j = 0; j < 4; j++) {
#if defined(KVC_IS_AVX512)
        __m512 v = (__m512)r[j];
        _mm_storeu_ps(to[j] + d, _mm512_castps512_ps128(v)), _mm_storeu_ps(to[j + 4] + d, _mm512_extractf32x4_ps(v, 1));
        _mm_storeu_ps(to[j + 8] + d, _mm512_extractf32x4_ps(v, 2)), _mm_storeu_ps(to[j + 12] + d, _mm512_extractf32x4_ps(v, 3));
#elif defined(KVC_IS_AVX2)
        _mm_storeu_ps(to[j] + d, _mm256_castps256_ps128((__m256)r[j]));
        _mm_storeu_ps(to[j + 4] + d, _mm256_extractf128_ps((__m256)r[j], 1));
#else
        store(to[j] + d, r[j]);
#endif
    }
}
static void load_tokens(const Coding *c, Group g, vf *x) {
    ALIGNED float lines[L][MOST_CHANNELS];
    const float *from[L];
    int dim = (int)c->channels, d = 0;
    for (int t = 0; t < L; t++) {
        /* Lanes behind the last token repeat it */
        int64_t item = g.matrix / c->heads, head = g.matrix % c->heads, token = g.first + (t < g.count ? t : g.count - 1);
        int64_t at = item * c->strides[0] + head * c->strides[1] + token * c->strides[2];
        from[t] = c->kind == FLOATS ? (const float *)c->states + at : lines[t];
        if (c->kind != FLOATS) read_numbers(c->states, (int)c->kind, at, dim, dim, lines[t]);
    }
    for (; d + 4 <= dim; d += 4) {
        load4(from, d, x + d);
        transpose4(x + d);
    }
    for (; d < dim; d++)
        for (int t = 0; t < L; t++) x[d][t] = from[t][d];
}
static void store_tokens(const Coding *c, Group g, const vf *x) {
    ALIGNED float rest[MOST_CHANNELS];
    int dim = (int)c->channels, d = 0;
    float *to[L];
    for (int t = 0; t < L; t++) to[t] = t < g.count ? c->result + (g.matrix * c->tokens + g.first + t) * dim : rest;
    for (; d + 4 <= dim; d += 4) {
        vf r[4] = {x[d], x[d + 1], x[d + 2], x[d + 3]};
        transpose4(r);
        store4(to, d, r);
    }
    for (; d < dim; d++)
        for (int t = 0; t < L; t++) to[t][d] = x[d][t];
}
/* Rotary embedding done or undone. Angles are sums of those of the tile and of the place in it: told by the position
   alone, to the last bit, wherever a run of tokens begins. */
static void turn_tokens(const Coding *c, Group g, vf *x) {
    const Rotary *rotary = c->rotary;
    float back = c->is_back ? -1 : 1, sign;
    const float *far = far_angles(rotary, g.tile, &sign);
    for (int64_t n = 0; n < rotary->num_turned; n++) {
        int64_t d = rotary->pairs[2 * n], p = rotary->pairs[2 * n + 1];
        if (d < 0 || p < 0 || d >= c->channels || p >= c->channels) continue;
        const float *near = rotary->places + n * 2 * ANGLES + g.place;
        float far_cosine = far[n], far_sine = far[rotary->all_pairs + n] * sign;
        vf cosine = load(near), sine = load(near + ANGLES), low = x[d], high = x[p];
        vf both_cosine = cosine * far_cosine - sine * far_sine;
        vf both_sine = (sine * far_cosine + cosine * far_sine) * back;
        x[d] = low * both_cosine + high * both_sine, x[p] = high * both_cosine - low * both_sine;
    }
}
/* Hadamard's transform of every `rotation` channels: two steps at a time, as they wait for memory */
static void rotate_tokens(const Coding *c, vf *x) {
    int dim = (int)c->channels, size = (int)c->table->rotation, half = 1;
    float factor = 1 / sqrtf((float)size);
    for (; half * 2 < size; half *= 4)
        for (int start = 0; start < dim; start += 4 * half)
            for (int d = start; d < start + half; d++) {
                vf *y = x + d, a = y[0] + y[half], b = y[0] - y[half];
                vf e = y[2 * half] + y[3 * half], f = y[2 * half] - y[3 * half];
                y[0] = a + e, y[half] = b + f, y[2 * half] = a - e, y[3 * half] = b - f;
            }
    for (int d = 0; d < dim; d += 2 * half)
        for (int i = d; half < size && i < d + half; i++) {
            vf a = x[i], b = x[i + half];
            x[i] = a + b, x[i + half] = a - b;
        }
    for (int d = 0; d < dim; d++) x[d] *= factor;
}

/* Up to SOME rows of a matrix of bytes as floats, zeros behind them */
INLINE void spread_rows(const int8_t *from, int count, int size, float (*rows)[MOST_CHANNELS]) {
    for (int r = 0; r < SOME; r++)
        for (int d = 0; d < size; d++) rows[r][d] = r < count ? (float)from[r * size + d] : 0;
}
/* Components added to channels times their factors, or taken off */
static void add_components(const Head *head, const vf *components, float sign, vf *x) {
    float rows[SOME][MOST_CHANNELS];
    for (int i = 0; i < head->dim; i += SOME) {
        int count = head->dim - i < SOME ? head->dim - i : SOME;
        vf y[SOME] = {{0}};
        spread_rows(head->basis + i * head->channels, count, head->channels, rows);
        for (int r = 0; r < count; r++) y[r] = components[i + r] * (head->steps[i + r] * sign);
        for (int d = 0; d < head->channels; d++) {
            vf sum = x[d];
            for (int r = 0; r < SOME; r++) sum += y[r] * rows[r][d];
            x[d] = sum;
        }
    }
}
/* Components of channels, of which little is left: the inverse is rounded, so what the first ones leave is looked at again */
static void find_components(const Head *head, vf *x, vf *components) {
    float rows[SOME][MOST_CHANNELS];
    for (int d = 0; d < head->channels; d++) x[d] *= head->factors[d];
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < head->dim; i += SOME) {
            int count = head->dim - i < SOME ? head->dim - i : SOME;
            vf sums[SOME] = {{0}};
            spread_rows(head->inverse + i * head->channels, count, head->channels, rows);
            for (int d = 0; d < head->channels; d++)
                for (int r = 0; r < SOME; r++) sums[r] += x[d] * rows[r][d];
            for (int r = 0; r < count; r++) components[i + r] = (pass ? components[i + r] : (vf){0}) + sums[r] / head->units[i + r];
        }
        if (!pass) add_components(head, components, -1, x);
    }
}

/* Numbers of variance 1 in the order of rows, `energy` for the fit of the scale, and a first scale */
static vf normalize(const Coding *c, const Head *head, const vf *x, vf *normal, vf *energy) {
    vf all = {0}, coded = {0}, weighted = {0}, root;
    for (int v = 0; v < head->blocks; v++) {
        vf block = {0};
        for (int i = v * BLOCK; i < (v + 1) * BLOCK; i++) {
            normal[i] = i < head->dim ? (x[head->own[i]] - head->means[i]) * head->inverses[i] : (vf){0};
            block += normal[i] * normal[i];
        }
        all += block;
        if (head->widths[v]) coded += block, weighted += block * weight_of(c, head->widths[v]);
    }
    *energy = c->table->by_energy ? weighted : all;
    coded /= (float)(head->coded ? head->coded : 1);
    for (int i = 0; i < L; i++) root[i] = sqrtf(coded[i]);
    return gather(book_of(c->table)->scales, stored_scales(book_of(c->table), root));
}
/* Codes of a block, each number going to its nearest point; adds to the sums that scales are fitted by */
INLINE void code_block(const vf *normal, vf inverse, const Codebook *book, int width, vf *over, vf *under, uint32_t (*bits)[L]) {
    const float *p = book->coefficients[width], step = 2.0f / (float)(1 << width);
    uint32_t half = 1u << (width - 1);
    for (int part = 0; part < 2; part++) {
        vu all = {0};
        for (int i = BLOCK / 2; i-- > 0;) {
            vf number = normal[part * BLOCK / 2 + i], size = size_of(number);
            vi is_low = ~(number > 0);
            /* Raised by one bit if negative: codes are those of searching upwards, where a bound is not below itself */
            vu code = search((vi)(size * inverse) - is_low, book->bounds[width], width - 1);
            vf point = point_at(to_float(code) * step + splat(step / 2), p);
            *over += size * point, *under += point * point;
            all = all << (uint32_t)width | (((code + half) ^ (vu)is_low) & (2 * half - 1));
        }
        memcpy(bits[part], &all, sizeof all);
    }
}
static vf code_numbers(const Coding *c, const Head *head, const vf *normal, vf energy, vf scale, Bits bits) {
    vf inverse = 1 / scale, all_over = {0}, all_under = {0};
    for (int v = 0; v < head->blocks; v++) {
        int width = head->widths[v];
        vf over = {0}, under = {0};
#define CASE(w) case w: code_block(normal + v * BLOCK, inverse, book_of(c->table), w, &over, &under, bits[v]); break;
        switch (width) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        default: continue;
        }
#undef CASE
        float factor = book_of(c->table)->coefficients[width][3], weight = weight_of(c, width) * factor;
        all_over += over * weight, all_under += under * (weight * factor);
    }
    return fitting_scale(c, energy, all_over, all_under, scale);
}
static void write_rows(const Coding *c, const Head *head, Group g, vu stored, Bits bits) {
    for (int t = 0; t < g.count; t++) {
        uint8_t *row = c->rows + (g.matrix * c->capacity + c->used + g.first + t) * c->table->row_size, *end = row + c->table->row_size;
        *row++ = (uint8_t)stored[t];
        for (int v = 0; v < head->blocks; v++) {
            int width = head->widths[v];
            if (!width) continue;
            uint64_t block = bits[v][0][t] | (uint64_t)bits[v][1][t] << 4 * width;
            /* Another thread may own the row behind this one */
            if (end - row >= 8) memcpy(row, &block, 8);
            else for (int i = 0; i < width; i++) row[i] = (uint8_t)(block >> 8 * i);
            row += width;
        }
        memset(row, 0, (size_t)(end - row));
    }
}

/* Eight bytes of a row from a place on, zeros behind its end */
INLINE uint64_t word_at(const uint8_t *row, int64_t place, int64_t size) {
    uint64_t word = 0;
    if (size - place >= 8) memcpy(&word, row + place, 8);
    else if (size >= 8) memcpy(&word, row + size - 8, 8), word >>= 8 * (8 + place - size);
    else memcpy(&word, row + place, (size_t)(size - place));
    return word;
}
static void decode_group(const Coding *c, const Head *head, Group g, vf *x) {
    const uint8_t *rows = c->rows + (g.matrix * c->capacity + g.first) * c->table->row_size;
    ALIGNED Bits bits;
    vu stored;
    for (int t = 0; t < L; t++) {
        const uint8_t *row = rows + (t < g.count ? t : g.count - 1) * c->table->row_size;
        int64_t place = 1;
        stored[t] = row[0];
        for (int v = 0; v < head->blocks; place += head->widths[v++]) {
            uint64_t word = head->widths[v] ? word_at(row, place, c->table->row_size) : 0;
            bits[v][0][t] = (uint32_t)word, bits[v][1][t] = (uint32_t)(word >> 4 * head->widths[v]);
        }
    }
    vf scale = gather(book_of(c->table)->scales, stored);
    for (int v = 0; v < head->blocks; v++) {
        int width = head->widths[v];
        const float *own = book_of(c->table)->coefficients[width], step = 2.0f / (float)(1 << width);
        const float p[3] = {own[0] * own[3], own[1] * own[3], own[2] * own[3]};
        uint32_t mask = (1u << width) - 1;
        for (int i = v * BLOCK; i < (v + 1) * BLOCK && i < head->dim; i++) {
            vu code = load_u(bits[v][i % BLOCK / 4]) >> (uint32_t)(i % 4 * width) & mask;
            vf point = point_at(to_float(code) * step + splat(step / 2 - 1), p) * scale;
            x[head->own[i]] = width ? point * head->deviations[i] + head->means[i] : splat(head->means[i]);
        }
    }
}

static void encode_group(Coding *c, const Head *head, const Head *finer, Group g) {
    ALIGNED vf x[MOST_CHANNELS], components[MOST_CHANNELS], normal[MOST_CHANNELS];
    Bits bits;
    vf energy;
    vu stored = {0};
    vi fits = ~(vi){0};
    if (finer) decode_group(c->source, finer, g, x);
    else {
        load_tokens(c, g, x);
        /* NaN is not below anything */
        for (int d = 0; c->limit > 0 && d < c->channels; d++) fits &= (x[d] < (float)c->limit) & (x[d] > -(float)c->limit);
        if (c->rotary) turn_tokens(c, g, x);
        for (int d = 0; c->table->mean && d < c->channels; d++) x[d] -= head->centres[d];
        if (c->table->rotation > 1) rotate_tokens(c, x);
        if (c->table->basis) find_components(head, x, components);
    }
    vf found = normalize(c, head, c->table->basis && !finer ? components : x, normal, &energy);
    for (int64_t pass = 0; pass <= c->table->refits; pass++) {
        vf scale = found;
        vf fitting = code_numbers(c, head, normal, energy, scale, bits);
        int is_settled = 1;
        stored = stored_scales(book_of(c->table), fitting);
        found = gather(book_of(c->table)->scales, stored);
        /* Coded again with the same scale a token gets the same codes */
        for (int t = 0; t < L; t++) is_settled &= found[t] == scale[t];
        if (is_settled) break;
    }
    for (int t = 0; c->limit > 0 && t < g.count; t++)
        if (!fits[t] || stored[t] == LAST_SCALE) __atomic_store_n(&c->is_unfit, 1, __ATOMIC_RELAXED);
    write_rows(c, head, g, stored, bits);
}
/* Tokens of a task, as places from the start of the first tile of their item, whose number is `tile` */
typedef struct { int64_t matrix, shift, tile, from, to; } Span;
INLINE Span span_of(const Coding *c, int64_t task) {
    int64_t matrices = c->batch * c->heads;
    Span s = {.matrix = task % matrices};
    if (c->rotary) {
        int64_t first = c->start - (c->padding ? c->padding[s.matrix / c->heads] : 0);
        s.shift = (first % TILE + TILE) % TILE, s.tile = (first - s.shift) / TILE;
    }
    s.from = task / matrices * TASK_TOKENS, s.to = s.from + TASK_TOKENS;
    s.from = s.from > s.shift ? s.from : s.shift;
    s.to = s.to < s.shift + c->tokens ? s.to : s.shift + c->tokens;
    return s;
}
/* The tokens of a span one vector after the other; whether there are any left */
INLINE int take_group(Span *s, Group *g) {
    int64_t place = s->from, end = place - place % L + L;
    if (place >= s->to) return 0;
    s->from = end < s->to ? end : s->to;
    *g = (Group){s->matrix, place - s->shift, s->tile + place / TILE, place % TILE, (int)(s->from - place)};
    return 1;
}
/* Rows in front of new ones, where storage is another; what is behind them is zero */
static void move_rows(const Coding *c, int64_t matrix) {
    int64_t size = c->table->row_size, end = c->used + c->tokens;
    uint8_t *to = c->rows + matrix * c->capacity * size;
    memcpy(to, c->moved + (matrix * c->moved_capacity + c->moved_first) * size, (size_t)(c->used * size));
    memset(to + end * size, 0, (size_t)((c->capacity - end) * size));
}
static void encode_task(Coding *c, int64_t task) {
    Span s = span_of(c, task);
    Head head, finer;
    load_head(c, s.matrix, &head);
    if (c->source) load_head(c->source, s.matrix, &finer);
    if (c->moved && task < c->batch * c->heads) move_rows(c, s.matrix);
    for (Group g; take_group(&s, &g);) encode_group(c, &head, c->source ? &finer : 0, g);
}
EXPORT(encode_rows)(Coding *c) {
    FOR_TASKS(c, task) encode_task(c, task);
}
/* Tokens behind those that have been coded move to the front */
static void move_states(const Coding *c, int64_t left) {
    int64_t size = c->strides[2] * (int64_t)size_of_kind((int)c->kind);
    for (int64_t matrix = 0; matrix < c->batch * c->heads; matrix++) {
        int64_t at = matrix / c->heads * c->strides[0] + matrix % c->heads * c->strides[1];
        char *to = (char *)(uintptr_t)c->states + at * (int64_t)size_of_kind((int)c->kind);
        memmove(to, to + c->tokens * size, (size_t)(left * size));
    }
}
EXPORT(append_rows)(Appended *a) {
    Coding *all = a->codings;
    int64_t matrices = all->batch * all->heads;
    FOR_TASKS(a, task) {
        encode_task(all + task / matrices, task % matrices);
        if (!ends_last(&a->tasks)) continue;
        a->is_unfit = all[0].is_unfit | all[1].is_unfit;
        for (int side = 0; side < 2 && a->left && !a->is_unfit; side++) move_states(all + side, a->left);
    }
}
EXPORT(decode_rows)(Coding *c) {
    FOR_TASKS(c, task) {
        Span s = span_of(c, task);
        Head head;
        /* An order that is none leaves channels out */
        ALIGNED vf x[MOST_CHANNELS] = {{0}}, channels[MOST_CHANNELS];
        load_head(c, s.matrix, &head);
        for (Group g; take_group(&s, &g);) {
            vf *own = c->table->basis ? channels : x;
            decode_group(c, &head, g, x);
            if (c->table->rotation > 1) rotate_tokens(c, x);
            if (c->table->basis) {
                memset(channels, 0, sizeof(vf) * (size_t)c->channels);
                add_components(&head, x, 1, channels);
            }
            for (int d = 0; c->table->basis && d < c->channels; d++) own[d] /= head.factors[d];
            for (int d = 0; c->table->mean && d < c->channels; d++) own[d] += head.centres[d];
            if (c->rotary) turn_tokens(c, g, own);
            store_tokens(c, g, own);
        }
    }
}
EXPORT(turn_states)(Coding *c) {
    ALIGNED vf x[MOST_CHANNELS];
    FOR_TASKS(c, task) {
        Span s = span_of(c, task);
        for (Group g; take_group(&s, &g);) {
            load_tokens(c, g, x);
            turn_tokens(c, g, x);
            store_tokens(c, g, x);
        }
    }
}
/* Means and variances of the channels of a head's tokens that count. They are counted from one of these, as a channel may
   vary little about a large mean; sums of some tokens in floats, all of them in doubles. */
EXPORT(measure_channels)(Coding *c) {
    ALIGNED vf x[MOST_CHANNELS], sums[MOST_CHANNELS], squares[MOST_CHANNELS];
    double sum[MOST_CHANNELS], square[MOST_CHANNELS];
    float one[MOST_CHANNELS];
    FOR_TASKS(c, task) {
        Span s = span_of(c, task);
        const uint8_t *valid = c->valid ? c->valid + s.matrix / c->heads * c->tokens : 0;
        int64_t count = 0, end = s.shift + c->tokens;
        for (int64_t d = 0; d < c->channels; d++) sum[d] = square[d] = one[d] = 0;
        for (s.from = s.shift; s.from < end;) {
            s.to = s.from + SUM_TOKENS < end ? s.from + SUM_TOKENS : end;
            for (int64_t d = 0; d < c->channels; d++) sums[d] = squares[d] = (vf){0};
            for (Group g; take_group(&s, &g);) {
                vi counts = {0};
                int newest = -1, is_first = !count;
                for (int t = 0; t < g.count; t++)
                    if (!valid || valid[g.first + t]) counts[t] = -1, newest = t, count++;
                if (newest < 0) continue;
                load_tokens(c, g, x);
                if (c->rotary) turn_tokens(c, g, x);
                for (int64_t d = 0; d < c->channels; d++) {
                    if (is_first) one[d] = x[d][newest];
                    vf rest = choose(counts, x[d] - one[d], (vf){0});
                    sums[d] += rest, squares[d] += rest * rest;
                }
            }
            for (int64_t d = 0; d < c->channels; d++)
                for (int t = 0; t < L; t++) sum[d] += sums[d][t], square[d] += squares[d][t];
        }
        for (int64_t d = 0; d < c->channels; d++) {
            int64_t at = s.matrix * c->channels + d;
            double mean = count ? sum[d] / (double)count : 0, all = one[d] + mean, rest;
            c->means[at] = (float)all, rest = c->means[at] - all;
            c->variances[at] = count ? (float)(square[d] / (double)count - mean * mean + rest * rest) : 0;
            if (c->variances[at] < 0) c->variances[at] = 0;
        }
    }
}

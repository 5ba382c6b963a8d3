/* Attention over rows of bytes, see `points.h`: nothing dense is ever in memory but a strip's points.

   Keys: a channel and its partner of the rotary embedding are two vectors, so a key is turned once for all queries, by
   cosines and sines of offsets in a strip that all heads and layers share, and every query costs two multiply-adds a
   pair; nothing is summed over lanes. The queries are turned back to the strip's start, anew from every anchor.
   Values: sums of a tile stay as vectors of tokens, which are added up at the end of the part.
   In calibrated bases keys are products of points and a basis, four channels at a time, which meet the queries without
   being written; values stay components until the end.

   What tables say is worked out in every call: out of memory, made once, it would take longer to come. No table is
   believed: see `make_blocks` and `load_places`; row sizes are checked in `rows.py`. */
#include "points.h"

enum { MOST_PAIRS = MOST_CHANNELS / 2 + 16, GROUP = 4, ANCHOR_TILES = 32 };

typedef struct { int a, b; float mean_a, mean_b; } Pair; /* where its points are in a strip's, and means */
typedef float Turned[2][ROWS][MOST_PAIRS];
typedef float Strips[][STRIP];
typedef float Sums[][ROWS][L];

/* ---- queries ---- */
static void turn_by(int rows, int pairs, const float *cosines, const float *sines, const Turned from, Turned to) {
    for (int p = 0; p < pairs; p += L) {
        vf c = load(cosines + p), s = load(sines + p);
        for (int r = 0; r < rows; r++) {
            vf a = load(from[0][r] + p), b = load(from[1][r] + p);
            store(to[0][r] + p, a * c - b * s), store(to[1][r] + p, b * c + a * s);
        }
    }
}
/* Queries as they are turned back to the start of the strip that is next, from tile `first` on */
typedef struct { Turned still, turned; int64_t strips; } Turning;

static void turn_to_next(int rows, const Rows *part, Unit unit, Turning *turning) {
    int size = (int)(part->num_pairs + 15) / 16 * 16, period = ANCHOR_TILES * TILE / STRIP;
    int64_t anchor = turning->strips / period;
    if (turning->strips % period == 0 && anchor < part->num_anchors) {
        const float *angles = part->anchors + (unit.batch * part->num_anchors + anchor) * 2 * size;
        turn_by(rows, size, angles, angles + size, turning->still, turning->turned);
    } else turn_by(rows, size, part->turn, part->turn + size, turning->turned, turning->turned);
    turning->strips++;
}
static void start_turning(
    int rows, const Rows *part, Unit unit, const Queries query, int dim, int64_t first, Turning *turning) {
    int size = (int)(part->num_pairs + 15) / 16 * 16;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < size; p++) {
            int a = part->pairs[2 * p], b = part->pairs[2 * p + 1];
            turning->still[0][r][p] = a >= 0 && a < dim ? query[r][a] : 0;
            turning->still[1][r][p] = b >= 0 && b < dim ? query[r][b] : 0;
        }
    turning->strips = first / ANCHOR_TILES * ANCHOR_TILES * TILE / STRIP;
    while (turning->strips < first * TILE / STRIP) turn_to_next(rows, part, unit, turning);
}

/* ---- keys ---- */
/* Turns two vectors of channels and adds their products with the queries */
INLINE void dot_pair(const int rows, vf a, vf b, const float *angles, const Turned q, int p, vf *sums) {
    vf c = load(angles), s = load(angles + STRIP), x = a * c + b * s, y = b * c - a * s;
    for (int r = 0; r < rows; r++) sums[r] += x * q[0][r][p], sums[r] += y * q[1][r][p];
}
INLINE void dot_strip(
    const int rows, const Rows *part, const Pair *pairs, const Strips points, const float *scales, const Turned q,
    float (*scores)[TILE]) {
    for (int t = 0; t < STRIP; t += 2 * L) {
        vf sums[2][ROWS] = {{{0}}}, scale[2] = {load(scales + t), load(scales + t + L)};
        for (int p = 0; p < part->num_pairs; p++) {
            const float *a = points[pairs[p].a] + t, *b = points[pairs[p].b] + t;
            for (int u = 0; u < 2; u++) {
                vf x = load(a + u * L) * scale[u] + pairs[p].mean_a, y = load(b + u * L) * scale[u] + pairs[p].mean_b;
                dot_pair(rows, x, y, part->offsets + 2 * STRIP * p + t + u * L, q, p, sums[u]);
            }
        }
        for (int r = 0; r < rows; r++) store(scores[r] + t, sums[0][r]), store(scores[r] + t + L, sums[1][r]);
    }
}
INLINE void dot_basis_strip(
    const int rows, const Rows *part, int64_t head, int64_t used, const Strips points, const float *scales,
    const Turned q, float (*scores)[TILE]) {
    int64_t groups = (part->num_pairs + 1) / 2, size = (part->num_pairs + 15) / 16 * 16, count = part->num_components;
    for (int t = 0; t < STRIP; t += 2 * L) {
        vf sums[2][ROWS] = {{{0}}}, scale[2] = {load(scales + t), load(scales + t + L)};
        for (int64_t n = 0; n < groups; n++) {
            const float *basis = part->key_basis + (head * size / 2 + n) * count * GROUP;
            const float *mean = part->key_mean + (head * size + 2 * n) * 2;
            vf x[GROUP][2] = {{{0}}};
            for (int64_t i = 0; i < used; i++, basis += GROUP) {
                vf z[2] = {load(points[i] + t), load(points[i] + t + L)};
                for (int g = 0; g < GROUP; g++) x[g][0] += z[0] * basis[g], x[g][1] += z[1] * basis[g];
            }
            for (int g = 0; g < GROUP; g += 2)
                for (int u = 0; u < 2; u++) {
                    int p = (int)(2 * n + g / 2);
                    dot_pair(
                        rows, x[g][u] * scale[u] + mean[g], x[g + 1][u] * scale[u] + mean[g + 1],
                        part->offsets + 2 * STRIP * p + t + u * L, q, p, sums[u]);
                }
        }
        for (int r = 0; r < rows; r++) store(scores[r] + t, sums[0][r]), store(scores[r] + t + L, sums[1][r]);
    }
}
/* A channel's place in a row, and its points times its deviation; without one, the row of zeros at `none` */
static void load_places(
    const Rows *part, Unit unit, int dim, const Block *blocks, float (*base)[16], int none, Points *points, Pair *pairs) {
    int place[MOST_CHANNELS];
    const uint16_t *mean = part->mean + unit.matrix * dim, *deviation = part->deviation + unit.matrix * dim;
    for (int d = 0; d < dim; d++) place[d] = none;
    for (int i = 0; i < dim; i++) {
        int64_t at = unit.matrix * dim + i;
        int d = part->is_wide ? ((const uint16_t *)part->order)[at] : ((const uint8_t *)part->order)[at];
        if (d >= dim) continue;
        place[d] = i;
        if (blocks[i / 8].kind) points[i] = points_of(blocks[i / 8].kind, base[blocks[i / 8].kind], float_of_half(deviation[d]));
    }
    for (int p = 0; p < part->num_pairs; p++) {
        int a = part->pairs[2 * p], b = part->pairs[2 * p + 1];
        int has_a = a >= 0 && a < dim, has_b = b >= 0 && b < dim;
        pairs[p] = (Pair){has_a ? place[a] : none, has_b ? place[b] : none,
                          has_a ? float_of_half(mean[a]) : 0, has_b ? float_of_half(mean[b]) : 0};
    }
}
static void load_base(const Block *blocks, int count, const float *coefficients, float (*base)[16]) {
    int known = 0;
    for (int v = 0; v < count; v++)
        if (blocks[v].kind && !(known >> blocks[v].kind & 1))
            base_points(blocks[v].kind, coefficients, base[blocks[v].kind]), known |= 1 << blocks[v].kind;
}

/* Of a strip's tokens; well before they are read, as stores narrower than the load that follows hold it up */
INLINE void load_scales(const Rows *part, const uint8_t *rows, int64_t size, int tokens, float *scales) {
    for (int t = 0; t < STRIP; t++) scales[t] = t < tokens ? part->scales[rows[t * size]] : 0;
}

/* ---- values ---- */
INLINE void add_strip(const int rows, const Strips points, const float (*weights)[TILE], Sums sums) {
    for (int d = 0; d < 8; d++)
        for (int r = 0; r < rows; r++) {
            vf sum = load(sums[d][r]);
            for (int t = 0; t < STRIP; t += L) sum += load(points[d] + t) * load(weights[r] + t);
            store(sums[d][r], sum);
        }
}
/* Adds the means `[E]` that were taken off values, if any, as often as their tokens weigh. Weights are summed up in the
   same order without means: whether a head has one may depend on others of the batch, and its result may not. */
static void add_means(const Call *call, const uint16_t *mean, Unit unit, State *state) {
    for (int r = 0; r < unit.rows; r++) {
        for (int64_t d = 0; mean && d < call->value_dim; d++)
            state->sums[r][d] += state->coded_total[r] * float_of_half(mean[d]);
        state->total[r] += state->coded_total[r], state->coded_total[r] = 0;
    }
}
static void end_values(const Call *call, const Rows *part, Unit unit, const Sums sums, State *state) {
    int dim = (int)call->value_dim;
    ALIGNED float own[MOST_CHANNELS];
    float factor = float_of_half(part->value_deviation[unit.matrix]) / sqrtf((float)part->rotation);
    for (int r = 0; r < unit.rows; r++) {
        for (int d = 0; d < dim; d++) own[d] = sum_of(load(sums[d][r])) * factor;
        hadamard(own, dim, part->rotation);
        for (int d = 0; d < dim; d++) state->sums[r][d] += own[d];
    }
    add_means(call, part->value_mean ? part->value_mean + unit.matrix * dim : 0, unit, state);
}
static void end_basis_values(const Call *call, const Rows *part, Unit unit, const Sums sums, State *state) {
    int dim = (int)call->value_dim, count = 8 * (int)part->values.blocks < dim ? 8 * (int)part->values.blocks : dim;
    const float *factors = part->value_factors + unit.head * dim, *steps = part->value_steps + unit.head * dim;
    for (int r = 0; r < unit.rows; r++) {
        float own[MOST_CHANNELS] = {0};
        for (int i = 0; i < count; i++) {
            const int8_t *codes = part->value_basis + (unit.head * dim + i) * dim;
            float x = sum_of(load(sums[i][r])) * steps[i];
            for (int d = 0; d < dim; d++) own[d] += x * (float)codes[d];
        }
        for (int d = 0; d < dim; d++) state->sums[r][d] += own[d] / factors[d];
    }
    add_means(call, part->value_mean + unit.head * dim, unit, state);
}

/* ---- parts ---- */
static void attend(
    int is_basis, const Call *call, const Part *own, Unit unit, const Queries query, int64_t first,
    int64_t last, State *state) {
    const Rows *part = own->stored;
    int rows = unit.rows, dim = (int)call->key_dim, key_blocks = (int)part->keys.blocks, value_blocks = (int)part->values.blocks;
    int64_t used = 0, tables = is_basis ? unit.head : unit.matrix;
    const int64_t *multipliers = part->multipliers;
    const uint8_t *keys = part->keys.rows + unit.matrix * part->keys.capacity * part->keys.size;
    const uint8_t *values = part->values.rows + unit.matrix * part->values.capacity * part->values.size;
    Block key_block[MOST_CHANNELS / 8] = {{0}}, value_block[MOST_CHANNELS / 8] = {{0}};
    ALIGNED float base[2 * STATES][16], points[MOST_CHANNELS + 8][STRIP], sums[MOST_CHANNELS][ROWS][L];
    ALIGNED float scores[ROWS][TILE], scales[TILE], decay[ROWS];
    ALIGNED Planes planes;
    Points key_points[MOST_CHANNELS], value_points[2 * STATES];
    Pair pairs[MOST_PAIRS];
    ALIGNED Turning turning;

    make_blocks(part->values.widths + tables * value_blocks, value_blocks, part->values.size, multipliers, value_block);
    load_base(value_block, value_blocks, part->values.coefficients, base);
    for (int v = 0; v < value_blocks; v++)
        if (value_block[v].kind) value_points[value_block[v].kind] = points_of(value_block[v].kind, base[value_block[v].kind], 1);
    make_blocks(part->keys.widths + tables * key_blocks, key_blocks, part->keys.size, multipliers, key_block);
    load_base(key_block, key_blocks, part->keys.coefficients, base);
    if (!is_basis) load_places(part, unit, dim, key_block, base, 8 * key_blocks, key_points, pairs);
    else for (int v = 0; v < key_blocks; v++) {
        if (!key_block[v].kind) continue;
        key_points[v] = points_of(key_block[v].kind, base[key_block[v].kind], 1);
        used = 8 * (v + 1) < part->num_components ? 8 * (v + 1) : part->num_components;
    }
    memset(points, 0, sizeof points[0] * (size_t)(8 * key_blocks + 1));
    memset(sums, 0, sizeof sums[0] * 8 * (size_t)value_blocks);
    start_turning(rows, part, unit, query, dim, first, &turning);

    for (int64_t start = first * TILE; start < last * TILE && start < own->length; start += TILE) {
        int tokens = (int)(own->length - start < TILE ? own->length - start : TILE);
        for (int t = 0; t < TILE; t += STRIP) {
            /* Later scores are those of no tokens */
            if (t >= tokens) { turning.strips++; continue; }
            const uint8_t *at = keys + (start + t) * part->keys.size;
            load_scales(part, at, part->keys.size, tokens - t, scales);
            make_planes(at, part->keys.size, tokens - t, planes);
            for (int v = 0; v < key_blocks; v++)
                if (key_block[v].kind)
                    widen(key_block[v], multipliers, planes, key_points + (is_basis ? v : 8 * v), !is_basis, points + 8 * v);
            turn_to_next(rows, part, unit, &turning);
            float(*to)[TILE] = (float(*)[TILE])(scores[0] + t);
            if (is_basis) BY_ROWS(rows, dot_basis_strip, part, unit.head, used, points, scales, turning.turned, to)
            else BY_ROWS(rows, dot_strip, part, pairs, points, scales, turning.turned, to)
        }
        add_mask(call, own, unit, start, tokens, scores);
        if (softmax_tile(state, rows, tokens, scores, state->coded_total, decay))
            for (int d = 0; d < 8 * value_blocks; d++)
                for (int r = 0; r < rows; r++) store(sums[d][r], load(sums[d][r]) * decay[r]);
        for (int t = 0; t < tokens; t += STRIP) {
            const uint8_t *at = values + (start + t) * part->values.size;
            load_scales(part, at, part->values.size, tokens - t, scales);
            make_planes(at, part->values.size, tokens - t, planes);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < STRIP; i += L)
                    store(scores[r] + t + i, load(scores[r] + t + i) * load(scales + i));
            for (int v = 0; v < value_blocks; v++) {
                if (!value_block[v].kind) continue;
                float(*block)[STRIP] = points + 8 * key_blocks + 1;
                widen(value_block[v], multipliers, planes, &value_points[value_block[v].kind], 0, block);
                BY_ROWS(rows, add_strip, block, (const float(*)[TILE])(scores[0] + t), sums + 8 * v)
            }
        }
    }
    if (is_basis) end_basis_values(call, part, unit, sums, state);
    else end_values(call, part, unit, sums, state);
}
void KVC_NAME(attend_rows, KVC_LEVEL)(
    const Call *call, const Part *part, Unit unit, const Queries query, int64_t first, int64_t last, State *state) {
    attend(0, call, part, unit, query, first, last, state);
}
void KVC_NAME(attend_basis_rows, KVC_LEVEL)(
    const Call *call, const Part *part, Unit unit, const Queries query, int64_t first, int64_t last, State *state) {
    attend(1, call, part, unit, query, first, last, state);
}

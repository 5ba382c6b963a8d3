/* Attention over rows of bytes, see `points.h`: nothing dense is ever in memory but a strip's points.

   Keys: a channel and its partner of the rotary embedding are two vectors, so a key is turned once for all queries, by
   cosines and sines of offsets in a strip that all heads and layers share, and every query costs two multiply-adds a
   pair; nothing is summed over lanes. The queries are turned back to the strip's start, anew from every anchor.
   Values: sums of a tile stay as vectors of tokens, which are added up at the end of the part.
   In calibrated bases keys are products of points and a basis, some channels at a time, which meet the queries without
   being written; values stay components until the end. With AVX-512 points are rounded to words of 16 bits for that, two
   of which an instruction multiplies and adds; what it sums up is exact.

   What tables say is worked out in every call: out of memory, made once, it would take longer to come. No table is
   believed: see `make_blocks` and `load_places`; row sizes are checked in `rows.py`. */
#include "points.h"
#include "scattered.h"

enum { MOST_PAIRS = MOST_CHANNELS / 2 + 16, ANCHOR_TILES = 32 };

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
/* Angles of a position, from those of its tile and of its place in it */
static void angles_at(const Rotary *rotary, int64_t position, float (*to)[MOST_PAIRS]) {
    int64_t place = position & (TILE - 1), size = rotary->all_pairs;
    float sign;
    const float *far = far_angles(rotary, (position - place) / TILE, &sign), *near = rotary->near + place * 2 * size;
    for (int64_t p = 0; p < size; p += L) {
        vf c = load(far + p), s = load(far + size + p) * sign, x = load(near + p), y = load(near + size + p);
        store(to[0] + p, c * x - s * y), store(to[1] + p, s * x + c * y);
    }
}
INLINE int64_t first_position(const Rows *part, Unit unit) {
    return part->first_position - (part->padding ? part->padding[unit.batch] : 0);
}
/* Queries as they are turned back to the start of the strip that is next, from tile `first` on */
typedef struct { Turned still, turned; int64_t strips; } Turning;

static void turn_to_next(int rows, const Rows *part, Unit unit, Turning *turning) {
    const Rotary *rotary = part->rotary;
    int64_t size = rotary->all_pairs, token = turning->strips++ * STRIP;
    const float *strip = (int)STRIP < (int)TILE ? rotary->near + STRIP * 2 * size : rotary->far + 2 * size;
    ALIGNED float angles[2][MOST_PAIRS];
    if (token % (ANCHOR_TILES * TILE)) turn_by(rows, (int)size, strip, strip + size, turning->turned, turning->turned);
    else {
        angles_at(rotary, first_position(part, unit) + token, angles);
        turn_by(rows, (int)size, angles[0], angles[1], turning->still, turning->turned);
    }
}
static void start_turning(int rows, const Rows *part, const Queries query, int dim, Turning *turning) {
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < part->rotary->all_pairs; p++) {
            int a = part->rotary->pairs[2 * p], b = part->rotary->pairs[2 * p + 1];
            turning->still[0][r][p] = a >= 0 && a < dim ? query[r][a] : 0;
            turning->still[1][r][p] = b >= 0 && b < dim ? query[r][b] : 0;
        }
}
static void turn_to_tile(int rows, const Rows *part, Unit unit, int64_t first, Turning *turning) {
    turning->strips = first / ANCHOR_TILES * ANCHOR_TILES * TILE / STRIP;
    while (turning->strips < first * TILE / STRIP) turn_to_next(rows, part, unit, turning);
}

/* ---- keys ---- */
/* Turns two vectors of channels and adds their products with the queries */
INLINE void dot_pair(const int rows, vf a, vf b, const float *angles, const Turned q, int p, vf *sums) {
    vf c = load(angles), s = load(angles + ANGLES), x = a * c + b * s, y = b * c - a * s;
    for (int r = 0; r < rows; r++) sums[r] += x * q[0][r][p], sums[r] += y * q[1][r][p];
}
/* Points of a pair's channels meet the queries in registers */
INLINE void dot_strip(
    const int rows, const Rows *part, const Pair *pairs, const Lane *lanes, const Points *points,
    const uint8_t (*planes)[STRIP], const float *scales, const float *angles, const Turned q, float (*scores)[TILE]) {
    vf sums[ROWS][4] = {{{0}}};
    for (int p = 0, end = (int)part->rotary->num_pairs; p < end; p++) {
        vf a[4] = {{0}}, b[4] = {{0}};
        int i = pairs[p].a, j = pairs[p].b;
        if (lanes[i].width) read_points(&lanes[i], planes, &points[i], a);
        if (lanes[j].width) read_points(&lanes[j], planes, &points[j], b);
        for (int u = 0; u < 4; u++) {
            const float *angle = angles + 2 * ANGLES * p + u * L;
            vf scale = load(scales + u * L), c = load(angle), s = load(angle + ANGLES);
            vf x = a[u] * scale + pairs[p].mean_a, y = b[u] * scale + pairs[p].mean_b;
            a[u] = x * c + y * s, b[u] = y * c - x * s;
        }
        for (int r = 0; r < rows; r++)
            for (int u = 0; u < 4; u++) sums[r][u] += a[u] * q[0][r][p], sums[r][u] += b[u] * q[1][r][p];
    }
    for (int r = 0; r < rows; r++)
        for (int u = 0; u < 4; u++) store(scores[r] + u * L, sums[r][u]);
}
/* Components of a strip times a basis, GROUP channels at a time, which meet the queries without being written. With AVX-512
   two components are a lane, as words, and `step` is what one of them stands for. */
#if defined(KVC_IS_AVX512)
enum { GROUP = 8, IN_LANE = 2 };
#define BASIS key_words
typedef __m512i Products;
INLINE Products add_products(Products sum, vf z, int32_t basis) { return _mm512_dpwssd_epi32(sum, (__m512i)z, _mm512_set1_epi32(basis)); }
INLINE vf channel_of(const Rows *part, int64_t at, Products sum, float step) { return to_float((vu)sum) * (part->key_factors[at] * step); }
#else
enum { GROUP = 4, IN_LANE = 1 };
#define BASIS key_basis
typedef vf Products;
INLINE Products add_products(Products sum, vf z, float basis) { return sum + z * basis; }
INLINE vf channel_of(const Rows *part, int64_t at, Products sum, float step) { (void)part, (void)at, (void)step; return sum; }
#endif
INLINE void dot_components(
    const int rows, const Rows *part, int64_t head, int64_t used, const Strips points, float step, const float *scales,
    const float *angles, const Turned q, float (*scores)[TILE]) {
    int64_t pairs = GROUP / 2, groups = (part->rotary->num_pairs + pairs - 1) / pairs, size = part->rotary->all_pairs;
    int64_t count = (part->keys.table->dim + IN_LANE - 1) / IN_LANE;
    for (int t = 0; t < STRIP; t += 2 * L) {
        vf sums[2][ROWS] = {{{0}}}, scale[2] = {load(scales + t), load(scales + t + L)};
        for (int64_t n = 0; n < groups; n++) {
            int64_t at = 2 * (head * size + pairs * n);
            const __typeof__(*part->BASIS) *basis = part->BASIS + at * count;
            Products x[GROUP][2] = {{{0}}};
            for (int64_t i = 0; i < (used + IN_LANE - 1) / IN_LANE; i++, basis += GROUP) {
                vf z[2] = {load(points[i] + t), load(points[i] + t + L)};
                for (int g = 0; g < GROUP; g++) x[g][0] = add_products(x[g][0], z[0], basis[g]), x[g][1] = add_products(x[g][1], z[1], basis[g]);
            }
            for (int g = 0; g < GROUP; g += 2)
                for (int u = 0; u < 2; u++) {
                    vf a = channel_of(part, at + g, x[g][u], step), b = channel_of(part, at + g + 1, x[g + 1][u], step);
                    const float *mean = part->key_mean + at + g;
                    int p = (int)(pairs * n + g / 2);
                    dot_pair(rows, a * scale[u] + mean[0], b * scale[u] + mean[1], angles + 2 * ANGLES * p + t + u * L, q, p, sums[u]);
                }
        }
        for (int r = 0; r < rows; r++) store(scores[r] + t, sums[0][r]), store(scores[r] + t + L, sums[1][r]);
    }
}
/* A channel's place in a row, and its points times its deviation; without one, the row of zeros at `none` */
static void load_places(
    const Rows *part, Unit unit, int dim, const Block *blocks, float (*base)[ENTRIES], int none, Points *points,
    Lane *lanes, Pair *pairs) {
    int place[MOST_CHANNELS];
    const Table *table = part->keys.table;
    const uint16_t *mean = table->mean + unit.matrix * dim, *deviation = table->deviation + unit.matrix * table->deviations;
    memset(lanes, 0, sizeof *lanes * (size_t)(none + 1));
    for (int d = 0; d < dim; d++) place[d] = none;
    for (int i = 0; i < dim; i++) {
        int64_t at = unit.matrix * dim + i;
        int d = table->order_size > 1 ? ((const uint16_t *)table->order)[at] : ((const uint8_t *)table->order)[at];
        if (d >= dim) continue;
        place[d] = i;
        lanes[i] = lane_of(blocks[i / 8], i % 8);
        if (blocks[i / 8].width) points[i] = points_of(blocks[i / 8].width, base[blocks[i / 8].width], float_of_half(deviation[table->deviations > 1 ? d : 0]));
    }
    for (int p = 0; p < part->rotary->num_pairs; p++) {
        int a = part->rotary->pairs[2 * p], b = part->rotary->pairs[2 * p + 1];
        int has_a = a >= 0 && a < dim, has_b = b >= 0 && b < dim;
        pairs[p] = (Pair){has_a ? place[a] : none, has_b ? place[b] : none,
                          has_a ? float_of_half(mean[a]) : 0, has_b ? float_of_half(mean[b]) : 0};
    }
}
static void load_base(const Block *blocks, int count, const Codebook *book, float (*base)[ENTRIES]) {
    int known = 0;
    for (int v = 0; v < count; v++)
        if (blocks[v].width && !(known >> blocks[v].width & 1))
            base_points(blocks[v].width, book, base[blocks[v].width]), known |= 1 << blocks[v].width;
}

/* Of a strip's tokens; well before they are read, as stores narrower than the load that follows hold it up */
INLINE void load_scales(const Rows *part, const uint8_t *rows, int64_t size, int tokens, float *scales) {
    const float *all = book_of(part->keys.table)->scales;
    for (int t = 0; t < STRIP; t++) scales[t] = t < tokens ? all[rows[t * size]] : 0;
}

/* ---- values ---- */
INLINE void add_block(
    const int rows, Block block, const uint8_t (*planes)[STRIP], const Points *points,
    const float (*restrict weights)[TILE], float (*restrict sums)[ROWS][L]) {
    vf own[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int u = 0; u < 4; u++) own[r][u] = load(weights[r] + u * L);
    for (int d = 0; d < 8; d++) {
        Lane lane = lane_of(block, d);
        vf x[4];
        read_points(&lane, planes, points, x);
        for (int r = 0; r < rows; r++) {
            vf sum = load(sums[d][r]);
            for (int u = 0; u < 4; u++) sum += x[u] * own[r][u];
            store(sums[d][r], sum);
        }
    }
}
/* Adds the means `[E]` that were taken off values, if any, as often as their tokens weigh. Weights are summed up in the
   same order without means: whether a head has one may depend on others of the batch, and its result may not. */
static void add_means(int dim, const Table *table, Unit unit, State *state) {
    const uint16_t *mean = table->mean ? table->mean + unit.matrix * dim : 0;
    for (int r = 0; r < unit.rows; r++) {
        for (int d = 0; mean && d < dim; d++)
            state->sums[r][d] += state->coded_total[r] * float_of_half(mean[d]);
        state->total[r] += state->coded_total[r], state->coded_total[r] = 0;
    }
}
static void end_values(int dim, const Rows *part, Unit unit, const Sums sums, State *state) {
    ALIGNED float own[MOST_CHANNELS];
    const Table *table = part->values.table;
    float factor = float_of_half(table->deviation[unit.matrix * table->deviations]) / sqrtf((float)table->rotation);
    for (int r = 0; r < unit.rows; r++) {
        for (int d = 0; d < dim; d++) own[d] = sum_of(load(sums[d][r])) * factor;
        hadamard(own, dim, table->rotation);
        for (int d = 0; d < dim; d++) state->sums[r][d] += own[d];
    }
    add_means(dim, table, unit, state);
}
static void end_basis_values(int dim, const Rows *part, Unit unit, const Sums sums, State *state) {
    const Table *table = part->values.table;
    int count = 8 * (int)table->blocks < dim ? 8 * (int)table->blocks : dim;
    const float *factors = table->factors + unit.head * dim, *steps = table->steps + unit.head * dim;
    for (int r = 0; r < unit.rows; r++) {
        float own[MOST_CHANNELS] = {0};
        for (int i = 0; i < count; i++) {
            const int8_t *codes = table->basis + (unit.head * dim + i) * dim;
            float x = sum_of(load(sums[i][r])) * steps[i];
            for (int d = 0; d < dim; d++) own[d] += x * (float)codes[d];
        }
        for (int d = 0; d < dim; d++) state->sums[r][d] += own[d] / factors[d];
    }
    add_means(dim, table, unit, state);
}

/* ---- parts ---- */
/* What a unit works with: how blocks of rows are coded, points of a strip, and sums of values over its tokens */
typedef struct {
    const Rows *part;
    Unit unit;
    int is_basis, dim, key_blocks, value_blocks;
    int64_t used;                   /* components that have bits */
    float step;                     /* of words */
    Block keys[MOST_CHANNELS / 8], values[MOST_CHANNELS / 8];
    Points key_points[MOST_CHANNELS], value_points[NUM_WIDTHS];
    Lane lanes[MOST_CHANNELS + 8];
    Pair pairs[MOST_PAIRS];
    ALIGNED Turning turning;
    ALIGNED float points[MOST_CHANNELS + 8][STRIP], sums[MOST_CHANNELS][ROWS][L], scales[STRIP];
    ALIGNED Planes planes;
} Work;

#if defined(KVC_IS_AVX512)
static float largest_point(int width, const float *base) {
    float c[5], most = 0;
    memcpy(c, base, sizeof c);
    if (width > 5) return fabsf(polynomial(c, 0));
    for (int i = 0; i < ENTRIES; i++) most = fabsf(base[i]) > most ? fabsf(base[i]) : most;
    return most;
}
/* Components' points as words, of which the largest has all bits */
static void load_words(Work *work, float (*base)[ENTRIES]) {
    const float *steps = work->part->key_steps + work->unit.head * work->part->keys.table->dim;
    float most = 1e-30f;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < work->used; i++) {
            Block block = work->keys[i / 8];
            work->lanes[i] = lane_of(block, i % 8);
            if (!block.width) continue;
            float end = largest_point(block.width, base[block.width]) * steps[i];
            if (pass) work->key_points[i] = words_of(block.width, base[block.width], steps[i] / most * 32766, i % 2);
            else most = end > most ? end : most;
        }
    work->step = most / 32766;
}
#endif
static void start_keys(Work *work, const Rows *part, Unit unit, const Queries query, int dim) {
    const Table *table = part->keys.table;
    int blocks = (int)table->blocks, is_basis = table->basis != 0;
    ALIGNED float base[NUM_WIDTHS][ENTRIES];
    work->part = part, work->unit = unit, work->is_basis = is_basis, work->dim = dim, work->key_blocks = blocks, work->used = 0, work->step = 0;
    make_blocks(table->widths + unit.matrix * blocks, blocks, part->keys.size, work->keys);
    load_base(work->keys, blocks, book_of(table), base);
    if (!is_basis) load_places(part, unit, dim, work->keys, base, 8 * blocks, work->key_points, work->lanes, work->pairs);
    else for (int v = 0; v < blocks; v++) {
        if (!work->keys[v].width) continue;
        work->used = 8 * (v + 1) < table->dim ? 8 * (v + 1) : table->dim;
#if !defined(KVC_IS_AVX512)
        work->key_points[v] = points_of(work->keys[v].width, base[work->keys[v].width], 1);
#endif
    }
#if defined(KVC_IS_AVX512)
    if (is_basis) load_words(work, base);
#else
    memset(work->points, 0, sizeof work->points[0] * (size_t)(8 * blocks + 1));
#endif
    start_turning(unit.rows, part, query, dim, &work->turning);
}
static void start_values(Work *work) {
    const Table *table = work->part->values.table;
    int blocks = work->value_blocks = (int)table->blocks;
    ALIGNED float base[NUM_WIDTHS][ENTRIES];
    make_blocks(table->widths + work->unit.matrix * blocks, blocks, work->part->values.size, work->values);
    load_base(work->values, blocks, book_of(table), base);
    for (int v = 0; v < blocks; v++)
        if (work->values[v].width) work->value_points[work->values[v].width] = points_of(work->values[v].width, base[work->values[v].width], 1);
    memset(work->sums, 0, sizeof work->sums[0] * 8 * (size_t)blocks);
}
/* Scores of a strip's tokens, whose rows follow each other: products with queries that were turned back by as much as
   angles leave out */
static void score_strip(Work *work, const uint8_t *at, int tokens, const float *angles, const Turned turned, float (*to)[TILE]) {
    const Rows *part = work->part;
    load_scales(part, at, part->keys.size, tokens, work->scales);
    make_planes(at, part->keys.size, tokens, work->planes);
#if defined(KVC_IS_AVX512)
    uint32_t(*words)[STRIP] = (uint32_t(*)[STRIP])work->points;
    for (int i = 0; i < work->used && work->is_basis; i += 2) {
        vu x[2][4] = {{{0}}};
        for (int k = 0; k < 2 && i + k < work->used; k++)
            if (work->lanes[i + k].width) read_words(&work->lanes[i + k], work->planes, &work->key_points[i + k], k, x[k]);
        for (int u = 0; u < 4; u++) store_u(words[i / 2] + u * L, x[0][u] | x[1][u]);
    }
#else
    for (int v = 0; v < work->key_blocks && work->is_basis; v++)
        if (work->keys[v].width) widen(work->keys[v], work->planes, &work->key_points[v], work->points + 8 * v);
#endif
    if (work->is_basis) BY_ROWS(work->unit.rows, dot_components, part, work->unit.head, work->used, work->points, work->step, work->scales, angles, turned, to)
    else BY_ROWS(work->unit.rows, dot_strip, part, work->pairs, work->lanes, work->key_points, work->planes, work->scales, angles, turned, to)
}
/* Rows of the tile from `start` on, of which no page has a part */
INLINE const uint8_t *rows_at(const RowSide *side, Unit unit, int64_t start) {
    if (side->rows) return side->rows + (unit.matrix * side->capacity + start) * side->size;
    int64_t page = clamped(side->pages[unit.batch * side->most_pages + start / side->page_tokens], side->num_pages);
    const uint8_t *own = side->memory + side->page_start + page * side->page_stride;
    return own + (unit.head * side->page_tokens + start % side->page_tokens) * side->size;
}
/* Scores of the tile from `start` on */
static void score_tile(Work *work, int64_t start, int tokens, float (*scores)[TILE]) {
    const RowSide *side = &work->part->keys;
    const uint8_t *at = rows_at(side, work->unit, start);
    for (int t = 0; t < TILE; t += STRIP) {
        /* Later scores are those of no tokens */
        if (t >= tokens) { work->turning.strips++; continue; }
        turn_to_next(work->unit.rows, work->part, work->unit, &work->turning);
        score_strip(work, at + t * side->size, tokens - t, work->part->rotary->places, work->turning.turned, (float (*)[TILE])(scores[0] + t));
    }
}
static void scale_sums(Work *work, const float *decay) {
    for (int d = 0; d < 8 * work->value_blocks; d++)
        for (int r = 0; r < work->unit.rows; r++) store(work->sums[d][r], load(work->sums[d][r]) * decay[r]);
}
/* Adds the values of a strip's tokens, times their weights, which get lost */
static void add_values(Work *work, const uint8_t *at, int tokens, float (*weights)[TILE]) {
    const Rows *part = work->part;
    load_scales(part, at, part->values.size, tokens, work->scales);
    make_planes(at, part->values.size, tokens, work->planes);
    for (int r = 0; r < work->unit.rows; r++)
        for (int i = 0; i < STRIP; i += L) store(weights[r] + i, load(weights[r] + i) * load(work->scales + i));
    for (int v = 0; v < work->value_blocks; v++) {
        const Points *points = &work->value_points[work->values[v].width];
        if (work->values[v].width)
            BY_ROWS(work->unit.rows, add_block, work->values[v], work->planes, points, (const float(*)[TILE])weights, work->sums + 8 * v)
    }
}
static void end_unit_values(Work *work, int dim, State *state) {
    if (work->is_basis) end_basis_values(dim, work->part, work->unit, work->sums, state);
    else end_values(dim, work->part, work->unit, work->sums, state);
}
void KVC_NAME(attend_rows, KVC_LEVEL)(
    const Call *call, const Part *own, Unit unit, const Queries query, int64_t first, int64_t last, State *state) {
    const RowSide *values = &((const Rows *)own->stored)->values;
    ALIGNED float scores[ROWS][TILE], decay[ROWS];
    Work work;
    start_keys(&work, own->stored, unit, query, (int)call->key_dim);
    start_values(&work);
    turn_to_tile(unit.rows, work.part, unit, first, &work.turning);
    int64_t length = length_of(own, unit);
    for (int64_t start = first * TILE; start < last * TILE && start < length; start += TILE) {
        int tokens = (int)(length - start < TILE ? length - start : TILE);
        const uint8_t *at = rows_at(values, unit, start);
        score_tile(&work, start, tokens, scores);
        add_mask(call, own, unit, start, tokens, scores);
        if (softmax_tile(state, unit.rows, tokens, scores, state->coded_total, decay)) scale_sums(&work, decay);
        for (int t = 0; t < tokens; t += STRIP)
            add_values(&work, at + t * values->size, tokens - t, (float (*)[TILE])(scores[0] + t));
    }
    end_unit_values(&work, (int)call->value_dim, state);
}
EXPORT(score_rows)(Choice *call) {
    Call shape = {.heads = call->heads, .groups = call->groups, .queries = 1};
    int dim = (int)call->key_dim;
    int64_t tiles = (call->length + TILE - 1) / TILE;
    FOR_TASKS(call, task) {
        Unit unit = unit_at(&shape, task / call->runs);
        int64_t run = task % call->runs, first = tiles * run / call->runs, last = tiles * (run + 1) / call->runs;
        ALIGNED float scores[ROWS][TILE];
        ALIGNED Queries query;
        Work work;
        load_queries(call->query, FLOATS, unit.matrix * call->groups + unit.row, unit.rows, call->scale, dim, query);
        start_keys(&work, call->rows, unit, query, dim);
        turn_to_tile(unit.rows, work.part, unit, first, &work.turning);
        for (int64_t start = first * TILE; start < last * TILE && start < call->length; start += TILE) {
            int tokens = (int)(call->length - start < TILE ? call->length - start : TILE);
            score_tile(&work, start, tokens, scores);
            for (int r = 0; r < unit.rows; r++)
                memcpy(call->scores + (unit.matrix * call->groups + unit.row + r) * call->length + start, scores[r], sizeof(float) * (size_t)tokens);
        }
    }
}

/* Angles of the pairs of a strip's tokens, as `places` has them */
static void chosen_angles(const Rows *part, Unit unit, const int64_t *slots, int count, float *to) {
    ALIGNED float own[2][MOST_PAIRS];
    for (int t = 0; t < count; t++) {
        angles_at(part->rotary, first_position(part, unit) + slots[t], own);
        for (int p = 0; p < part->rotary->num_pairs; p++) to[2 * ANGLES * p + t] = own[0][p], to[2 * ANGLES * p + ANGLES + t] = own[1][p];
    }
}
void KVC_NAME(attend_chosen_rows, KVC_LEVEL)(
    const Choice *call, Unit unit, const Queries query, const int64_t *slots, int64_t count, State *state) {
    const RowSide *keys = &call->rows->keys;
    int64_t value_size = call->row_dim, rows = unit.matrix * keys->capacity;
    ALIGNED float scores[ROWS][TILE], decay[ROWS], angles[MOST_PAIRS * 2 * ANGLES];
    uint8_t gathered[STRIP * MOST_ROW];
    Work work;
    start_keys(&work, call->rows, unit, query, (int)call->key_dim);
    start_values(&work);
    memset(angles, 0, sizeof(float) * 2 * ANGLES * (size_t)call->rows->rotary->num_pairs);
    for (int64_t start = 0; start < count; start += TILE, slots += TILE) {
        int some = (int)(count - start < TILE ? count - start : TILE);
        for (int t = 0; t < some; t += STRIP) {
            int n = some - t < STRIP ? some - t : STRIP;
            for (int i = 0; i < n; i++) memcpy(gathered + i * keys->size, keys->rows + (rows + slots[t + i]) * keys->size, (size_t)keys->size);
            chosen_angles(call->rows, unit, slots + t, n, angles);
            score_strip(&work, gathered, n, angles, work.turning.still, (float (*)[TILE])(scores[0] + t));
        }
        add_columns_of(&call->mask, unit, slots, some, scores);
        if (softmax_tile(state, unit.rows, some, scores, state->coded_total, decay)) scale_sums(&work, decay);
        for (int t = 0; t < some; t += STRIP) {
            int n = some - t < STRIP ? some - t : STRIP;
            for (int i = 0; i < n; i++) memcpy(gathered + i * value_size, row_in_pages(call, unit.matrix, slots[t + i], value_size), (size_t)value_size);
            add_values(&work, gathered, n, (float (*)[TILE])(scores[0] + t));
        }
    }
    end_unit_values(&work, (int)call->value_dim, state);
}

/* Tokens in codes of which some are chosen: scores of all keys, whose steps and minima are those of a channel in a group
   of tokens, and attention over those that were chosen and over exact ones. `chosen.py` checks runs and sizes; slots
   come from memory and are brought into the range of what there is.

   B items, H key/value heads, G queries a head, D and E channels of keys and values, T tokens of a group, N and K slots
   of all and of those chosen, S sink tokens. */
#include "integer_products.h"
#include "scattered.h"



/* A group's steps go into the queries, which then are rounded for it, and its minima into what all scores begin at */
static void score_group(const GroupedScores *call, int64_t head, int first_row, int rows, const float (*query)[MOST_CHANNELS], Integers *by, int64_t group, int64_t begin, int64_t end, int64_t shift) {
    const KeyGroups *keys = &call->keys;
    int dim = (int)keys->dim, size = padded(dim);
    int64_t origin = head * keys->num_groups + group;
    ALIGNED float folded[ROWS][MOST_CHANNELS], steps[MOST_CHANNELS], minima[MOST_CHANNELS], products[ROWS][TILE];
    float base[ROWS], half = (float)((1 << keys->nbits) - 1) / 2;
    read_numbers(keys->scale, HALVES, origin * dim, dim, size, steps);
    read_numbers(keys->zero, HALVES, origin * dim, dim, size, minima);
    for (int r = 0; r < rows; r++) {
        vf sum = {0};
        for (int d = 0; d < size; d += L) {
            vf q = load(query[r] + d), own = q * load(steps + d);
            store(folded[r] + d, own);
            sum += own * half + q * load(minima + d);
        }
        base[r] = sum_of(sum);
    }
    round_queries(by, rows, folded);
    for (int64_t place = begin; place < end; place += TILE) {
        int tokens = (int)(end - place < TILE ? end - place : TILE);
        dot_codes(by, rows, keys->codes + (head * keys->num_groups * keys->group_size + place) * keys->width, tokens, products);
        for (int r = 0; r < rows; r++) {
            float *to = call->scores + (head * call->groups + first_row + r) * keys->num_slots + place - shift;
            float factor = by->factor[r], all = by->base[r] + base[r];
            int t = 0;
            for (; t + L <= tokens; t += L) store(to + t, load(products[r] + t) * factor + all);
            for (; t < tokens; t++) to[t] = products[r][t] * factor + all;
        }
    }
}
static void score_part(const GroupedScores *call, int64_t head, int64_t first_group) {
    const KeyGroups *keys = &call->keys;
    int dim = (int)keys->dim, groups = (int)call->groups, blocks = (groups + ROWS - 1) / ROWS;
    ALIGNED float query[ROWS][MOST_CHANNELS];
    Integers by = {.dim = dim, .width = (int)keys->width, .fields = (int)(8 / keys->nbits)};
    for (int block = 0; block < blocks; block++) {
        int row = groups * block / blocks, rows = groups * (block + 1) / blocks - row;
        for (int r = 0; r < rows; r++)
            read_numbers(call->query, FLOATS, (head * groups + row + r) * dim, dim, padded(dim), query[r]);
        for (int64_t n = 0; n < keys->num_runs; n++) {
            int64_t shift = keys->runs[n][2], first = keys->runs[n][0] + shift, stop = keys->runs[n][1] + shift;
            int64_t from = first / keys->group_size, until = (stop + keys->group_size - 1) / keys->group_size;
            if (from < first_group) from = first_group;
            if (until > first_group + call->at_once) until = first_group + call->at_once;
            for (int64_t group = from; group < until; group++) {
                int64_t begin = group * keys->group_size, end = begin + keys->group_size;
                if (begin < first) begin = first;
                if (end > stop) end = stop;
                score_group(call, head, row, rows, query, &by, group, begin, end, shift);
            }
        }
    }
}
EXPORT(grouped_scores)(GroupedScores *call) {
    FOR_TASKS(call, task)
        score_part(call, task / call->parts, task % call->parts * call->at_once);
}

enum { AT_ONCE = 16 };

/* A token in codes: its slot, its place among the keys, and that one's group */
typedef struct { int64_t slot, place, group; } Coded;


/* Eight codes of a plane from eight bytes */
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
INLINE f8 eight_codes(const uint8_t *p, int32_t mask) {
#if defined(KVC_IS_AVX512) || defined(KVC_IS_AVX2)
    i8 v = (i8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    i8 v;
    for (int i = 0; i < 8; i++) v[i] = p[i];
#endif
    return __builtin_convertvector(v & mask, f8);
}
/* Numbers of a token, [dim]: the codes of a plane, times the steps of the channels, and what they begin at. Steps of all
   channels are `one_step` where there is no array of them. */
INLINE void decode_plane(
    const uint8_t *codes, Plane plane, int dim, int adds, const float *steps, const float *minima, float step, float low, float *to) {
    int size = (int)plane.size;
    for (int field = 0; field < 8 / (int)plane.bits; field++) {
        int32_t shift = field * (int)plane.bits, mask = ((1 << plane.bits) - 1) << shift, d = field * size, j = 0;
        /* The bits stay where they are in their byte */
        float weight = (float)(1 << plane.shift) / (float)(1 << shift);
        for (; j + 8 <= size && d + j + 8 <= dim; j += 8) {
            f8 x = eight_codes(codes + j, mask) * weight, s = (f8){0} + step, before = (f8){0} + low;
            if (steps) memcpy(&s, steps + d + j, sizeof s), memcpy(&before, minima + d + j, sizeof before);
            if (adds) memcpy(&before, to + d + j, sizeof before);
            before += x * s;
            memcpy(to + d + j, &before, sizeof before);
        }
        for (; j < size && d + j < dim; j++) {
            float x = (float)(codes[j] & mask) * weight * (steps ? steps[d + j] : step);
            to[d + j] = (adds ? to[d + j] : steps ? minima[d + j] : low) + x;
        }
    }
}
/* Steps and minima of the key's group, as of the token before it if that is of the same */
typedef struct {
    int64_t group;
    ALIGNED float steps[MOST_CHANNELS], minima[MOST_CHANNELS];
} Known;

INLINE int64_t place_of(const KeyGroups *keys, int64_t slot) {
    int64_t number = keys->num_runs - 1;
    while (number > 0 && slot < keys->runs[number][0]) number--;
    return slot + keys->runs[number][2];
}
INLINE const uint8_t *key_codes(const KeyGroups *keys, int64_t matrix, int64_t place) {
    return keys->codes + (matrix * keys->num_groups * keys->group_size + place) * keys->width;
}
static void call_for_key(const KeyGroups *keys, int64_t matrix, int64_t place, int64_t group) {
    const uint8_t *codes = key_codes(keys, matrix, place);
    int64_t at = (matrix * keys->num_groups + group) * keys->dim;
    __builtin_prefetch(codes);
    __builtin_prefetch(codes + keys->width - 1);
    if (group < 0) return;
    call_for((const char *)(keys->scale + at), 2 * keys->dim);
    call_for((const char *)(keys->zero + at), 2 * keys->dim);
}
static void decode_key(const KeyGroups *keys, int64_t matrix, int64_t place, int64_t group, Known *known, float *to) {
    int dim = (int)keys->dim;
    if (group != known->group) {
        int64_t at = (matrix * keys->num_groups + group) * dim;
        read_numbers(keys->scale, HALVES, at, dim, dim, known->steps);
        read_numbers(keys->zero, HALVES, at, dim, dim, known->minima);
        known->group = group;
    }
    Plane plane = {keys->nbits, 0, keys->width};
    decode_plane(key_codes(keys, matrix, place), plane, dim, 0, known->steps, known->minima, 0, 0, to);
}
INLINE const uint8_t *value_row(const Chosen *call, int64_t matrix, int64_t slot) {
    int64_t page = slot / call->page_tokens;
    return (const uint8_t *)call->pages[page] + (matrix * call->page_tokens + slot - page * call->page_tokens) * call->row_bytes;
}
static void decode_value(const Chosen *call, const uint8_t *row, float *to) {
    int dim = (int)call->value_dim, groups = (int)call->num_value_groups, size = dim / groups;
    const uint8_t *behind = row + call->code_bytes;
    ALIGNED float steps[MOST_CHANNELS], minima[MOST_CHANNELS];
    uint16_t half;
    memcpy(&half, behind, 2);
    float step = float_of_half(half);
    memcpy(&half, behind + 2 * groups, 2);
    float low = float_of_half(half);
    for (int g = 0; g < groups && groups > 1; g++) {
        uint16_t halves[2];
        memcpy(halves, behind + 2 * g, 2), memcpy(halves + 1, behind + 2 * (groups + g), 2);
        float own_step = float_of_half(halves[0]), own_low = float_of_half(halves[1]);
        for (int d = g * size; d < (g + 1) * size; d++) steps[d] = own_step, minima[d] = own_low;
    }
    for (int p = 0; p < (int)call->num_planes; row += call->planes[p++].size)
        decode_plane(row, call->planes[p], dim, p > 0, groups > 1 ? steps : 0, minima, step, low, to);
}

/* A tile of tokens, their columns of the mask, and what it leaves in the sums */
typedef struct {
    Places at;
    int64_t columns[TILE];
    ALIGNED float scores[ROWS][TILE], decay[ROWS];
} Tile;

static void weigh(const Chosen *call, Unit unit, Tile *tile, State *state) {
    for (int t = 0; t < tile->at.tokens && call->mask.numbers; t++) {
        float bias = bias_at(&call->mask, unit.batch, tile->columns[t]);
        for (int r = 0; r < unit.rows; r++) tile->scores[r][t] += bias;
    }
    softmax_tile(state, unit.rows, tile->at.tokens, tile->scores, state->total, tile->decay);
}
static void attend_exact(const Chosen *call, Unit unit, const Queries query, Tile *tile, State *state) {
    int kind = (int)call->window.kind;
    score_places(&tile->at, kind, unit.rows, query, tile->scores);
    weigh(call, unit, tile, state);
    add_places(&tile->at, kind, unit.rows, tile->scores, state->sums);
    tile->at.tokens = tile->at.known = 0;
}
static void add_exact(const Chosen *call, Unit unit, const Queries query, Tile *tile, State *state, const char *key, const char *value, int64_t column) {
    int t = tile->at.tokens++;
    tile->at.keys[t] = key, tile->at.values[t] = value, tile->columns[t] = column, tile->at.known = t + 1;
    if (t + 1 == TILE) attend_exact(call, unit, query, tile, state);
}
/* Tokens in codes become floats a few at a time, which stay in the fastest memory */
static void attend_codes(const Chosen *call, Unit unit, const Queries query, const Coded *coded, int tokens, Known *known, Tile *tile, State *state) {
    int dim = (int)call->keys.dim, value_dim = (int)call->value_dim;
    ALIGNED float numbers[AT_ONCE][MOST_CHANNELS];
    const uint8_t *rows[TILE];
    for (int t = 0; t < tokens; t++) {
        rows[t] = value_row(call, unit.matrix, coded[t].slot), tile->columns[t] = coded[t].slot;
        call_for_key(&call->keys, unit.matrix, coded[t].place, t && coded[t].group == coded[t - 1].group ? -1 : coded[t].group);
        __builtin_prefetch(rows[t]);
        __builtin_prefetch(rows[t] + call->row_bytes - 1);
    }
    Places some = {.key_dim = dim, .value_dim = value_dim};
    for (int i = 0; i < AT_ONCE; i++) some.keys[i] = some.values[i] = (const char *)numbers[i];
    for (int first = 0; first < tokens; first += AT_ONCE) {
        ALIGNED float scores[ROWS][TILE];
        some.tokens = tokens - first < AT_ONCE ? tokens - first : AT_ONCE;
        for (int i = 0; i < some.tokens; i++) {
            int t = first + i;
            decode_key(&call->keys, unit.matrix, coded[t].place, coded[t].group, known, numbers[i]);
        }
        score_places(&some, FLOATS, unit.rows, query, scores);
        for (int r = 0; r < unit.rows; r++) memcpy(tile->scores[r] + first, scores[r], sizeof(float) * AT_ONCE);
    }
    tile->at.tokens = tokens;
    weigh(call, unit, tile, state);
    for (int first = 0; first < tokens; first += AT_ONCE) {
        some.tokens = tokens - first < AT_ONCE ? tokens - first : AT_ONCE;
        for (int i = 0; i < some.tokens; i++) decode_value(call, rows[first + i], numbers[i]);
        ALIGNED float weights[ROWS][TILE];
        for (int r = 0; r < unit.rows; r++) memcpy(weights[r], tile->scores[r] + first, sizeof(float) * AT_ONCE);
        add_places(&some, FLOATS, unit.rows, weights, state->coded);
    }
}
/* Puts tokens [count] in the order of their groups, of which `ends` [groups] are counted: steps are read once a group */
static void sort_by_group(const Coded *from, int64_t count, int64_t num_groups, int64_t *ends, Coded *to) {
    int64_t total = 0;
    memset(ends, 0, sizeof(int64_t) * (size_t)num_groups);
    for (int64_t k = 0; k < count; k++) ends[from[k].group]++;
    for (int64_t g = 0; g < num_groups; g++) {
        int64_t size = ends[g];
        ends[g] = total, total += size;
    }
    for (int64_t k = 0; k < count; k++) to[ends[from[k].group]++] = from[k];
}
static void attend_unit(const Chosen *call, Unit unit, Coded *coded, int64_t *ends) {
    int dim = (int)call->keys.dim, value_dim = (int)call->value_dim;
    int64_t size = (int64_t)size_of_kind((int)call->window.kind), key_size = size * dim, value_size = size * value_dim;
    int64_t count = call->counts[unit.matrix], room = call->num_pages * call->page_tokens, some = 0;
    int64_t first_sink = call->first_sinks[unit.batch], origin = unit.matrix * call->num_sinks;
    const int64_t *slots = call->slots + unit.matrix * call->num_chosen;
    ALIGNED Queries query;
    State state;
    Tile tile = {.at = {.key_dim = dim, .value_dim = value_dim}};
    Known known = {.group = -1};
    if (room > call->keys.num_slots) room = call->keys.num_slots;
    if (count > call->num_chosen) count = call->num_chosen;
    if (room <= 0) count = 0;
    start_unit(call->query + unit.matrix * call->groups * dim, call->scale, dim, value_dim, unit, query, &state);
    for (int r = 0; r < unit.rows; r++) memset(state.coded[r], 0, sizeof(float) * (size_t)padded(value_dim));
    state.coded_size = padded(value_dim);
    for (int64_t t = 0; t < call->window.length; t++)
        add_exact(call, unit, query, &tile, &state, window_key(&call->window, unit, key_size, t),
                  window_value(&call->window, unit, value_size, t), call->window.start + t);
    for (int64_t k = 0; k < count; k++) {
        int64_t slot = clamped(slots[k], room), number = slot - first_sink;
        if (number >= 0 && number < call->num_sinks)
            add_exact(call, unit, query, &tile, &state, call->sink_keys + (origin + number) * key_size,
                      call->sink_values + (origin + number) * value_size, slot);
        else {
            int64_t place = place_of(&call->keys, slot);
            coded[some++] = (Coded){slot, place, place / call->keys.group_size};
        }
    }
    if (tile.at.tokens) attend_exact(call, unit, query, &tile, &state);
    Coded *sorted = coded + call->num_chosen;
    sort_by_group(coded, some, call->keys.num_groups, ends, sorted);
    for (int64_t k = 0; k < some; k += TILE)
        attend_codes(call, unit, query, sorted + k, (int)(some - k < TILE ? some - k : TILE), &known, &tile, &state);
    float factor = 1 / sqrtf((float)call->rotation);
    for (int r = 0; r < unit.rows; r++) {
        hadamard(state.coded[r], value_dim, call->rotation);
        for (int d = 0; d < value_dim; d++) state.sums[r][d] += state.coded[r][d] * factor;
    }
    end_unit(&state, value_dim, unit, call->result + unit.matrix * call->groups * value_dim);
}
EXPORT(attend_chosen)(Chosen *call) {
    Call shape = {.heads = call->heads, .groups = call->groups, .queries = 1};
    int64_t thread = __atomic_fetch_add(&call->threads, 1, __ATOMIC_RELAXED);
    Coded *coded = (Coded *)call->coded + 2 * thread * call->num_chosen;
    int64_t *ends = call->ends + thread * call->keys.num_groups;
    FOR_TASKS(call, task)
        attend_unit(call, unit_at(&shape, task), coded, ends);
}

/* Which tokens a step attends to: scores of all from codes, the largest numbers of rows in order, and the tokens that
   weigh most.

   B items, H key/value heads, G queries a head, D channels, N tokens, R tokens that are attended to anyway. */
#include "integer_products.h"

static void score_run(const Choice *call, Unit unit, int64_t run) {
    int dim = (int)call->key_dim;
    int64_t tiles = (call->length + TILE - 1) / TILE, start = tiles * run / call->runs * TILE, stop = tiles * (run + 1) / call->runs * TILE;
    int64_t row = unit.matrix * call->groups + unit.row;
    const uint8_t *codes = call->codes + unit.matrix * call->capacity * call->width;
    const uint16_t *scale = call->code_scales + unit.matrix * call->capacity;
    ALIGNED float query[ROWS][MOST_CHANNELS], products[ROWS][TILE];
    Integers by = {.dim = dim, .width = (int)call->width, .row = (int)call->width, .fields = (int)call->fields};
    if (stop > call->length) stop = call->length;
    load_queries(call->query, FLOATS, row, unit.rows, call->scale, dim, query);
    for (int r = 0; r < unit.rows && call->spread; r++)
        for (int d = 0; d < dim; d++) query[r][d] *= call->spread[unit.matrix * dim + d];
    round_queries(&by, unit.rows, query);
    for (int64_t t = start; t < stop; t += TILE) {
        int tokens = (int)(stop - t < TILE ? stop - t : TILE);
        dot_codes(&by, unit.rows, codes + t * call->width, tokens, products);
        for (int r = 0; r < unit.rows; r++) {
            float *to = call->scores + (row + r) * call->length + t;
            int i = 0;
            for (; i + L <= tokens; i += L)
                store(to + i, (load(products[r] + i) * by.factor[r] + by.base[r]) * load_numbers(scale, HALVES, t + i));
            for (; i < tokens; i++) to[i] = (products[r][i] * by.factor[r] + by.base[r]) * float_of_half(scale[t + i]);
        }
    }
}
/* Units of a head read the same codes, one behind the other */
EXPORT(code_scores)(Choice *call) {
    Call shape = {.heads = call->heads, .groups = call->groups, .queries = 1};
    int64_t units = call->tasks.count / call->runs;
    FOR_TASKS(call, task)
        score_run(call, unit_at(&shape, task % units), task / units);
}

/* A number and where it stands, to be sorted: of a row only those that may count, by their bits, eleven at a time from
   the lowest on. It takes time in proportion to how many there are, and equal numbers keep their order. */
typedef struct { uint32_t key, place; } Pair;
enum { DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS, DIGITS = 3 };

/* Bit `i` of lane `i`, whose bits are all the same */
INLINE unsigned bits_of_lanes(vi where) {
#if defined(KVC_IS_AVX2)
    return (unsigned)_mm256_movemask_ps((__m256)where);
#else
    unsigned bits = 0;
    for (int i = 0; i < L; i++) bits |= (unsigned)(where[i] & 1) << i;
    return bits;
#endif
}
/* Notes the numbers that are not below `least`, which leaves out NaN, and how many keys have each digit in `ends`;
   returns how many numbers they are */
static int64_t find_numbers(const float *numbers, int64_t count, float least, Pair *pairs, uint32_t (*ends)[BINS]) {
    int64_t found = 0;
    memset(ends, 0, sizeof(uint32_t) * DIGITS * BINS);
    for (int64_t first = 0; first < count; first += L) {
        vf own = splat(NAN);
        if (first + L <= count) own = load(numbers + first);
        else memcpy(&own, numbers + first, sizeof(float) * (size_t)(count - first));
        for (unsigned rest = bits_of_lanes(own >= splat(least)); rest; rest &= rest - 1) {
            int64_t i = first + __builtin_ctz(rest);
            uint32_t bits = bits_of_float(numbers[i]);
            /* The opposite order of floats, once the bits of negative ones are turned over */
            uint32_t key = bits >> 31 ? bits : 0x7fffffff - bits;
            pairs[found++] = (Pair){key, (uint32_t)i};
            for (int d = 0; d < DIGITS; d++) ends[d][key >> d * DIGIT_BITS & (BINS - 1)]++;
        }
    }
    return found;
}
/* Sorts pairs; returns where they are then, there or in `spare` */
static const Pair *sort_pairs(Pair *pairs, Pair *spare, int64_t count, uint32_t (*ends)[BINS]) {
    for (int d = 0; d < DIGITS && count > 0; d++) {
        /* All in one bin are in order */
        if (ends[d][pairs[0].key >> d * DIGIT_BITS & (BINS - 1)] == count) continue;
        uint32_t total = 0;
        for (int b = 0; b < BINS; b++) {
            uint32_t size = ends[d][b];
            ends[d][b] = total, total += size;
        }
        for (int64_t i = 0; i < count; i++) spare[ends[d][pairs[i].key >> d * DIGIT_BITS & (BINS - 1)]++] = pairs[i];
        Pair *sorted = spare;
        spare = pairs, pairs = sorted;
    }
    return pairs;
}

EXPORT(largest)(Largest *call) {
    int64_t length = call->length, limit = call->limit, room = length + 1;
    uint32_t ends[DIGITS][BINS];
    Pair *pairs = (Pair *)call->pairs + 2 * room * __atomic_fetch_add(&call->threads, 1, __ATOMIC_RELAXED);
    FOR_TASKS(call, row) {
        const float *numbers = call->numbers + row * length;
        int64_t count = find_numbers(numbers, length, call->least[row], pairs, ends);
        const Pair *sorted = sort_pairs(pairs, pairs + room, count, ends);
        for (int64_t i = 0; i < limit; i++) {
            call->places[row * limit + i] = i < count ? sorted[i].place : 0;
            call->values[row * limit + i] = i < count ? numbers[sorted[i].place] : -INFINITY;
        }
    }
}

/* `count` scores, and -inf behind the last up to a whole vector */
INLINE vf scores_at(const float *scores, int64_t n, int64_t count) {
    if (n + L <= count) return load(scores + n);
    vf v = splat(-INFINITY);
    memcpy(&v, scores + n, sizeof(float) * (size_t)(count - n));
    return v;
}
/* Exponentials of scores, of those of N tokens into `weights` [whole vectors]; returns 1 / the sum of all */
static float exponentials(const Choice *call, const float *scores, const float *resident, float *weights) {
    vf high = splat(-3e38f), sum = {0};
    for (int64_t n = 0; n < call->length; n += L) high = larger(scores_at(scores, n, call->length), high);
    for (int64_t n = 0; n < call->num_resident; n += L) high = larger(scores_at(resident, n, call->num_resident), high);
    high = splat(largest_of(high));
    for (int64_t n = 0; n < call->length; n += L) {
        vf w = exp_of(scores_at(scores, n, call->length) - high);
        sum += w, store(weights + n, w);
    }
    for (int64_t n = 0; n < call->num_resident; n += L) sum += exp_of(scores_at(resident, n, call->num_resident) - high);
    float total = sum_of(sum);
    return total > 0 ? 1 / total : 0;
}
/* Writes the newest token of a head into the window, and scores of its tokens into `resident` [groups, num_resident] */
static void score_window(const Choice *call, int64_t head, float *resident) {
    const Window *window = &call->window;
    Unit unit = {.matrix = head, .batch = head / call->heads, .head = head % call->heads};
    int dim = (int)call->key_dim, kind = (int)window->kind;
    size_t key = size_of_kind(kind) * (size_t)dim, value = size_of_kind(kind) * (size_t)call->value_dim;
    if (call->newest_key) {
        int64_t last = window->length - 1;
        memcpy((char *)window_key(window, unit, (int64_t)key, last), call->newest_key + (size_t)head * key, key);
        memcpy((char *)window_value(window, unit, (int64_t)value, last), call->newest_value + (size_t)head * value, value);
    }
    ALIGNED float scores[ROWS][TILE];
    ALIGNED Queries query;
    Places places = {.key_dim = dim};
    for (; unit.row < call->groups; unit.row += ROWS) {
        unit.rows = call->groups - unit.row < ROWS ? (int)(call->groups - unit.row) : ROWS;
        load_queries(call->query, FLOATS, head * call->groups + unit.row, unit.rows, call->scale, dim, query);
        for (int64_t start = 0; start < window->length; start += TILE) {
            places.tokens = places.known = (int)(window->length - start < TILE ? window->length - start : TILE);
            for (int t = 0; t < places.tokens; t++) places.keys[t] = window_key(window, unit, (int64_t)key, start + t);
            score_places(&places, kind, unit.rows, query, scores);
            for (int r = 0; r < unit.rows; r++)
                memcpy(resident + (unit.row + r) * window->length + start, scores[r], sizeof(float) * (size_t)places.tokens);
        }
    }
}
static void choose_for_head(Choice *call, int64_t head, float *mean, float *weights, Pair *pairs, Pair *spare) {
    int64_t length = call->length, forced = 0;
    uint32_t ends[DIGITS][BINS];
    const float *resident = call->query ? (float *)(spare + length + 1) : call->resident + head * call->groups * call->num_resident;
    if (call->query) score_window(call, head, (float *)(spare + length + 1));
    memset(mean, 0, sizeof(float) * (size_t)length);
    for (int64_t g = 0; g < call->groups; g++) {
        const float *scores = call->scores + (head * call->groups + g) * length;
        float factor = exponentials(call, scores, resident + g * call->num_resident, weights);
        factor /= (float)call->groups;
        for (int64_t n = 0; n < length; n += L) store(mean + n, load(mean + n) + load(weights + n) * factor);
    }
    /* Above all probabilities */
    for (int64_t n = 0; n < call->first && n < length; n++) mean[n] += 2, forced++;
    for (int64_t n = call->newest > forced ? call->newest : forced; n < length; n++) mean[n] += 2, forced++;
    int64_t found = find_numbers(mean, length, (float)call->least, pairs, ends), most = call->cap > forced ? call->cap : forced;
    const Pair *sorted = sort_pairs(pairs, spare, found, ends);
    if (most > call->limit) most = call->limit;
    if (found > most) found = most;
    for (int64_t i = 0; i < call->limit; i++) call->slots[head * call->limit + i] = i < found ? sorted[i].place : 0;
    call->counts[head] = found;
    __atomic_fetch_add(&call->chosen, found, __ATOMIC_RELAXED);
}
EXPORT(choose_heaviest)(Choice *call) {
    int64_t room = (call->length + L) / L * L;
    float *mean = (float *)(call->scratch + call->scratch_size * __atomic_fetch_add(&call->threads, 1, __ATOMIC_RELAXED));
    Pair *pairs = (Pair *)(mean + 2 * room);
    FOR_TASKS(call, task)
        choose_for_head(call, task, mean, mean + room, pairs, pairs + call->length + 1);
}

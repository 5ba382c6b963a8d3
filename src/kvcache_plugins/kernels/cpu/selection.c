/* Selection of the tokens that a step attends to: scores of all tokens from their codes, the
   largest numbers of rows in order, and the tokens of the largest weights.

   B sequences, H key/value heads, G queries a head, D channels, N tokens, R resident tokens, which
   are attended to in any case. */
#include "integer_products.h"

/* Scores the tokens of a split with the queries of a block. */
static void score_split(const CodeScoreArgs *args, QueryBlock block, int64_t split) {
    int dim = (int)args->queries->key_dim;
    int64_t tiles = (args->length + TILE - 1) / TILE;
    int64_t start = tiles * split / args->splits * TILE;
    int64_t stop = min_of(tiles * (split + 1) / args->splits * TILE, args->length);
    int64_t first = first_query(args->queries, block);
    const uint8_t *codes = args->codes + block.bh * args->capacity * args->width;
    const half *scale = args->code_scales + block.bh * args->capacity;
    ALIGNED float products[BLOCK_QUERIES][TILE];
    ALIGNED Queries query;
    IntegerQueries integers = {
        .dim = dim,
        .width = (int)args->width,
        .stride = (int)args->width,
        .fields = (int)args->fields};
    load_token_queries(args->queries, block, query);
    for (int r = 0; r < block.count && args->spread; r++)
        for (int d = 0; d < dim; d++) query[r][d] *= args->spread[block.bh * dim + d];
    round_queries(&integers, block.count, query);
    for (int64_t t = start; t < stop; t += TILE) {
        int tokens = (int)min_of(stop - t, TILE);
        dot_codes(&integers, block.count, codes + t * args->width, tokens, products);
        for (int r = 0; r < block.count; r++) {
            float *scores = args->scores + (first + r) * args->length + t;
            float factor = integers.factor[r];
            float base = integers.base[r];
            int i = 0;
            for (; i + L <= tokens; i += L) {
                vf product = load(products[r] + i) * factor + base;
                store(scores + i, product * load_floats(scale, F16, t + i));
            }
            for (; i < tokens; i++)
                scores[i] = (products[r][i] * factor + base) * float_of_half(scale[t + i]);
        }
    }
}

/* Blocks of a head, which read the same codes, follow each other. */
EXPORT(score_codes)(CodeScoreArgs *args) {
    const TokenQueries *queries = args->queries;
    int64_t blocks = args->tasks.count / args->splits;
    FOR_TASKS(args, task) {
        QueryBlock block = query_block(queries->heads, queries->query_groups, task % blocks);
        score_split(args, block, task / blocks);
    }
}

/* A number to be sorted and its index. Numbers that may count are sorted by their bits, eleven at a
   time from the lowest on: in time proportional to their count, and equal ones keep their order. */
typedef struct {
    uint32_t key, index;
} SortEntry;

enum { DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS, DIGITS = 3 };

INLINE uint32_t digit_of(uint32_t key, int digit) {
    return key >> digit * DIGIT_BITS & (BINS - 1);
}

/* Bit `i` is set if the bits of lane `i` are. */
INLINE unsigned lane_mask(vi lanes) {
#if L == 8
    return (unsigned)_mm256_movemask_ps((__m256)lanes);
#else
    unsigned mask = 0;
    for (int i = 0; i < L; i++) mask |= (unsigned)(lanes[i] & 1) << i;
    return mask;
#endif
}

/* Lists the numbers that are not below `least` (NaN is), and counts the keys of each digit in
   `ends`. Returns the length of the list. */
static int64_t find_numbers(
    const float *numbers, int64_t count, float least, SortEntry *entries,
    uint32_t (*ends)[BINS]) {
    int64_t found = 0;
    memset(ends, 0, sizeof(uint32_t) * DIGITS * BINS);
    for (int64_t first = 0; first < count; first += L) {
        vf x = splat(NAN);
        if (first + L <= count)
            x = load(numbers + first);
        else
            memcpy(&x, numbers + first, sizeof(float) * (size_t)(count - first));
        for (unsigned rest = lane_mask(x >= splat(least)); rest; rest &= rest - 1) {
            int64_t i = first + __builtin_ctz(rest);
            uint32_t bits = bits_of_float(numbers[i]);
            /* Keys ascend as floats descend: bits of negative floats do, the others are
               inverted. */
            uint32_t key = bits >> 31 ? bits : 0x7fffffff - bits;
            entries[found++] = (SortEntry){key, (uint32_t)i};
            for (int d = 0; d < DIGITS; d++) ends[d][digit_of(key, d)]++;
        }
    }
    return found;
}

/* Sorts entries. Returns where they are then: there, or in `spare`. */
static const SortEntry *sort_entries(
    SortEntry *entries, SortEntry *spare, int64_t count, uint32_t (*ends)[BINS]) {
    for (int d = 0; d < DIGITS && count > 0; d++) {
        /* Entries that are all in one bin are in order. */
        if (ends[d][digit_of(entries[0].key, d)] == count) continue;
        uint32_t total = 0;
        for (int b = 0; b < BINS; b++) {
            uint32_t size = ends[d][b];
            ends[d][b] = total;
            total += size;
        }
        for (int64_t i = 0; i < count; i++)
            spare[ends[d][digit_of(entries[i].key, d)]++] = entries[i];
        SortEntry *sorted = spare;
        spare = entries;
        entries = sorted;
    }
    return entries;
}

EXPORT(topk)(TopKArgs *args) {
    int64_t length = args->length;
    int64_t limit = args->limit;
    int64_t capacity = length + 1;
    int64_t thread = __atomic_fetch_add(&args->threads_entered, 1, __ATOMIC_RELAXED);
    uint32_t ends[DIGITS][BINS];
    SortEntry *entries = (SortEntry *)args->scratch + 2 * capacity * thread;
    FOR_TASKS(args, row) {
        const float *numbers = args->numbers + row * length;
        int64_t count = find_numbers(numbers, length, args->least[row], entries, ends);
        const SortEntry *sorted = sort_entries(entries, entries + capacity, count, ends);
        for (int64_t i = 0; i < limit; i++) {
            args->indices[row * limit + i] = i < count ? sorted[i].index : 0;
            args->values[row * limit + i] = i < count ? numbers[sorted[i].index] : -INFINITY;
        }
    }
}

/* Scores from `n` on, and -inf behind the last of `count` up to a whole vector. */
INLINE vf scores_at(const float *scores, int64_t n, int64_t count) {
    if (n + L <= count) return load(scores + n);
    vf v = splat(-INFINITY);
    memcpy(&v, scores + n, sizeof(float) * (size_t)(count - n));
    return v;
}

/* Writes exponentials of the scores of N tokens into `weights` [whole vectors]. Returns one over
   their sum with those of resident tokens. */
static float exponentials(
    const float *scores, int64_t length, const float *resident, int64_t num_resident,
    float *weights) {
    vf high = splat(-3e38f);
    vf sum = {0};
    for (int64_t n = 0; n < length; n += L) high = larger(scores_at(scores, n, length), high);
    for (int64_t n = 0; n < num_resident; n += L)
        high = larger(scores_at(resident, n, num_resident), high);
    high = splat(largest_of(high));
    for (int64_t n = 0; n < length; n += L) {
        vf weight = exp_of(scores_at(scores, n, length) - high);
        sum += weight;
        store(weights + n, weight);
    }
    for (int64_t n = 0; n < num_resident; n += L)
        sum += exp_of(scores_at(resident, n, num_resident) - high);
    float total = sum_of(sum);
    return total > 0 ? 1 / total : 0;
}

/* Writes the newest key and value of a batch-head into the window. */
static void write_newest(const SelectionArgs *args, QueryBlock block) {
    const Window *window = args->window;
    size_t size = size_of_dtype((int)window->dtype);
    size_t key_size = size * (size_t)args->queries->key_dim;
    size_t value_size = size * (size_t)args->value_dim;
    int64_t last = window->length - 1;
    const char *key = args->newest_key + (size_t)block.bh * key_size;
    const char *value = args->newest_value + (size_t)block.bh * value_size;
    memcpy((char *)window_key(window, block, (int64_t)key_size, last), key, key_size);
    memcpy((char *)window_value(window, block, (int64_t)value_size, last), value, value_size);
}

/* Writes scores of the window's tokens into `resident` [query_groups, window->length], once the
   newest token of the batch-head is written into the window. */
static void score_window(const SelectionArgs *args, int64_t bh, float *resident) {
    const Window *window = args->window;
    const TokenQueries *queries = args->queries;
    QueryBlock block = {.bh = bh, .batch = bh / args->heads, .head = bh % args->heads};
    int dtype = (int)window->dtype;
    int64_t key_size = (int64_t)size_of_dtype(dtype) * queries->key_dim;
    ALIGNED float scores[BLOCK_QUERIES][TILE];
    ALIGNED Queries query;
    TokenRefs refs = {.key_dim = (int)queries->key_dim};
    if (args->newest_key) write_newest(args, block);
    for (; block.first < args->query_groups; block.first += BLOCK_QUERIES) {
        block.count = (int)min_of(args->query_groups - block.first, BLOCK_QUERIES);
        load_token_queries(queries, block, query);
        for (int64_t start = 0; start < window->length; start += TILE) {
            refs.tokens = (int)min_of(window->length - start, TILE);
            refs.known = refs.tokens;
            for (int t = 0; t < refs.tokens; t++)
                refs.keys[t] = window_key(window, block, key_size, start + t);
            score_refs(&refs, dtype, block.count, query, scores);
            for (int r = 0; r < block.count; r++) {
                float *line = resident + (block.first + r) * window->length + start;
                memcpy(line, scores[r], sizeof(float) * (size_t)refs.tokens);
            }
        }
    }
}

/* Scratch of a thread: two rows of floats in whole vectors, two lists of N + 1 entries, and scores
   of the window. */
typedef struct {
    float *mean, *weights;
    SortEntry *entries, *spare;
    float *window_scores;
} SelectionScratch;

/* Writes the mean weight of each token over the queries of a batch-head. */
static void find_mean_weights(
    const SelectionArgs *args, int64_t bh, const SelectionScratch *scratch) {
    int64_t length = args->length;
    int64_t num_resident = args->num_resident;
    float *mean = scratch->mean;
    const float *resident = args->resident + bh * args->query_groups * num_resident;
    if (args->queries) {
        score_window(args, bh, scratch->window_scores);
        resident = scratch->window_scores;
    }
    memset(mean, 0, sizeof(float) * (size_t)length);
    for (int64_t g = 0; g < args->query_groups; g++) {
        const float *scores = args->scores + (bh * args->query_groups + g) * length;
        const float *others = resident + g * num_resident;
        float factor = exponentials(scores, length, others, num_resident, scratch->weights);
        factor /= (float)args->query_groups;
        for (int64_t n = 0; n < length; n += L)
            store(mean + n, load(mean + n) + load(scratch->weights + n) * factor);
    }
}

static void select_for_head(SelectionArgs *args, int64_t bh, const SelectionScratch *scratch) {
    int64_t length = args->length;
    int64_t limit = args->selected->limit;
    int64_t forced = 0;
    uint32_t ends[DIGITS][BINS];
    float *mean = scratch->mean;
    find_mean_weights(args, bh, scratch);
    /* Forced tokens get a weight above all probabilities. */
    for (int64_t n = 0; n < args->first && n < length; n++) {
        mean[n] += 2;
        forced++;
    }
    for (int64_t n = args->newest > forced ? args->newest : forced; n < length; n++) {
        mean[n] += 2;
        forced++;
    }
    int64_t found = find_numbers(mean, length, (float)args->least, scratch->entries, ends);
    const SortEntry *sorted = sort_entries(scratch->entries, scratch->spare, found, ends);
    int64_t wanted = min_of(args->cap > forced ? args->cap : forced, limit);
    found = min_of(found, wanted);
    int64_t *slots = args->selected->slots + bh * limit;
    for (int64_t i = 0; i < limit; i++) slots[i] = i < found ? sorted[i].index : 0;
    args->selected->counts[bh] = found;
    __atomic_fetch_add(&args->num_selected, found, __ATOMIC_RELAXED);
}

EXPORT(select_by_weight)(SelectionArgs *args) {
    int64_t size = (args->length + L) / L * L;
    int64_t thread = __atomic_fetch_add(&args->threads_entered, 1, __ATOMIC_RELAXED);
    SelectionScratch scratch;
    scratch.mean = (float *)(args->scratch + args->scratch_size * thread);
    scratch.weights = scratch.mean + size;
    scratch.entries = (SortEntry *)(scratch.weights + size);
    scratch.spare = scratch.entries + args->length + 1;
    scratch.window_scores = (float *)(scratch.spare + args->length + 1);
    FOR_TASKS(args, task) select_for_head(args, task, &scratch);
}

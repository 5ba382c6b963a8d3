/* Attention of a few queries over all parts of a layer: tasks, exact tokens, and the merging of
   splits. See `layer.h`. */
#include "gathered_attention.h"

static void write_newest(
    const AttentionArgs *args, const Part *part, const ExactPart *exact, QueryBlock block) {
    size_t size = size_of_dtype((int)exact->dtype);
    size_t key_size = size * (size_t)args->key_dim;
    size_t value_size = size * (size_t)args->value_dim;
    int64_t token = block.bh * exact->capacity + length_of(part, block) - 1;
    const char *key = (const char *)exact->newest_key + block.bh * key_size;
    const char *value = (const char *)exact->newest_value + block.bh * value_size;
    memcpy((char *)exact->keys + token * key_size, key, key_size);
    memcpy((char *)exact->values + token * value_size, value, value_size);
}

static void attend_exact(
    const AttentionArgs *args, const Part *part, QueryBlock block, const Queries query,
    int64_t first, int64_t last, SoftmaxState *state) {
    const ExactPart *exact = part->stored;
    int dtype = (int)exact->dtype;
    int64_t size = (int64_t)size_of_dtype(dtype);
    int64_t key_size = size * args->key_dim;
    int64_t value_size = size * args->value_dim;
    int64_t origin = block.bh * exact->capacity;
    int64_t length = length_of(part, block);
    int64_t end = min_of(last * TILE, length);
    ALIGNED float scores[BLOCK_QUERIES][TILE], decay[BLOCK_QUERIES];
    TokenRefs refs = {.key_dim = (int)args->key_dim, .value_dim = (int)args->value_dim};
    /* Every task with the last tile of a batch-head writes the same; no other task reads it. */
    if (exact->newest_key && last == tiles_of(part, block))
        write_newest(args, part, exact, block);
    for (int64_t start = first * TILE; start < end; start += TILE) {
        refs.tokens = (int)min_of(length - start, TILE);
        refs.known = refs.tokens;
        for (int t = 0; t < refs.tokens; t++) {
            int64_t token = origin + start + t;
            refs.keys[t] = (const char *)exact->keys + token * key_size;
            refs.values[t] = (const char *)exact->values + token * value_size;
        }
        score_refs(&refs, dtype, block.count, query, scores);
        add_mask(args, part, block, start, refs.tokens, scores);
        softmax_tile(state, block.count, refs.tokens, scores, state->total, decay);
        add_refs(&refs, dtype, block.count, scores, state->sums);
    }
}

INLINE QueryBlock block_at(const AttentionArgs *args, int64_t index) {
    return query_block(args->heads, args->query_groups * args->queries, index);
}

INLINE int64_t first_result(const AttentionArgs *args, QueryBlock block) {
    return block.bh * args->query_groups * args->queries + block.first;
}

/* Attends to tiles `begin` to `end`, exclusive, of all parts, counted one part behind the other. */
static void attend_parts(
    const AttentionArgs *args, QueryBlock block, const Queries query, int64_t begin, int64_t end,
    SoftmaxState *state) {
    int64_t before = 0;
    for (int64_t p = 0; p < args->num_parts; p++) {
        const Part *part = &args->parts[p];
        int64_t tiles = tiles_of(part, block);
        int64_t first = begin > before ? begin - before : 0;
        int64_t last = min_of(end - before, tiles);
        before += tiles;
        if (first >= last) continue;
        switch (part->kind) {
        case PART_ROWS:
            KVC_NAME(attend_rows, KVC_LEVEL)(args, part, block, query, first, last, state);
            break;
        case PART_GROUPS:
            KVC_NAME(attend_groups, KVC_LEVEL)(args, part, block, query, first, last, state);
            break;
        default:
            attend_exact(args, part, block, query, first, last, state);
        }
    }
}

static void run_task(const AttentionArgs *args, int64_t task) {
    int64_t split = task % args->splits;
    QueryBlock block = block_at(args, task / args->splits);
    ALIGNED Queries query;
    SoftmaxState state;
    int dtype = (int)args->dtype;
    int64_t first = first_result(args, block);
    int64_t tiles = 0;
    load_queries(args->query, dtype, first, block.count, args->scale, (int)args->key_dim, query);
    start_softmax(block.count, args->value_dim, &state);
    for (int64_t p = 0; p < args->num_parts; p++) tiles += tiles_of(&args->parts[p], block);
    int64_t begin = tiles * split / args->splits;
    int64_t end = tiles * (split + 1) / args->splits;
    attend_parts(args, block, query, begin, end, &state);
    for (int r = 0; r < block.count; r++) {
        const float *sums = state.sums[r];
        if (args->splits == 1) {
            write_result(args->result, dtype, first + r, args->value_dim, sums, state.total[r]);
            continue;
        }
        float *partial = args->partials + (task * BLOCK_QUERIES + r) * (args->value_dim + 2);
        partial[0] = state.maximum[r];
        partial[1] = state.total[r];
        memcpy(partial + 2, sums, sizeof(float) * (size_t)args->value_dim);
    }
}

/* Merges the partial results of a query, `stride` apart: each its maximum, total and sums. */
static void merge_query(
    const AttentionArgs *args, const float *partials, int64_t stride, int64_t query) {
    float maximum = -INFINITY;
    float total = 0;
    float sums[MAX_CHANNELS] = {0};
    for (int64_t i = 0; i < args->splits; i++)
        maximum = partials[i * stride] > maximum ? partials[i * stride] : maximum;
    for (int64_t i = 0; i < args->splits && maximum > -INFINITY; i++) {
        const float *partial = partials + i * stride;
        float decay = expf(partial[0] - maximum);
        total += decay * partial[1];
        for (int64_t d = 0; d < args->value_dim; d++) sums[d] += decay * partial[2 + d];
    }
    write_result(args->result, (int)args->dtype, query, args->value_dim, sums, total);
}

static void merge(const AttentionArgs *args) {
    int64_t size = args->value_dim + 2;
    int64_t blocks = args->tasks.count / args->splits;
    for (int64_t b = 0; b < blocks; b++) {
        QueryBlock block = block_at(args, b);
        const float *partials = args->partials + b * args->splits * BLOCK_QUERIES * size;
        int64_t first = first_result(args, block);
        for (int r = 0; r < block.count; r++)
            merge_query(args, partials + r * size, BLOCK_QUERIES * size, first + r);
    }
}

EXPORT(attend)(AttentionArgs *args) {
    FOR_TASKS(args, task) {
        run_task(args, task);
        if (ends_last(&args->tasks) && args->splits > 1) merge(args);
    }
}

/* Attention of a few queries over all parts of a layer: tasks, exact tokens, and the merging of runs. See `layer.h`. */
#include "layer.h"

static void write_newest(const Call *call, const Part *part, const Exact *exact, Unit unit) {
    size_t size = size_of_kind((int)exact->kind);
    size_t key = size * (size_t)call->key_dim, value = size * (size_t)call->value_dim;
    int64_t at = unit.matrix * exact->capacity + length_of(part, unit) - 1;
    memcpy((char *)exact->keys + at * key, (const char *)exact->newest_key + unit.matrix * key, key);
    memcpy((char *)exact->values + at * value, (const char *)exact->newest_value + unit.matrix * value, value);
}
INLINE void attend_exact(
    const int rows, const Call *call, const Part *part, Unit unit, const Queries query, int64_t first, int64_t last,
    State *state) {
    const Exact *exact = part->stored;
    int dim = (int)call->key_dim, value_dim = (int)call->value_dim, kind = (int)exact->kind;
    int key_size = padded(dim), value_size = padded(value_dim);
    int64_t origin = unit.matrix * exact->capacity, length = length_of(part, unit);
    ALIGNED float scores[ROWS][TILE], numbers[MOST_CHANNELS], decay[ROWS];
    /* By every task of the head, which all write the same; only the one with the last tile reads it */
    if (exact->newest_key && last == tiles_of(part, unit)) write_newest(call, part, exact, unit);
    for (int64_t start = first * TILE; start < last * TILE && start < length; start += TILE) {
        int tokens = (int)(length - start < TILE ? length - start : TILE);
        for (int t = 0; t < tokens; t++) {
            vf sums[ROWS] = {{0}};
            read_numbers(exact->keys, kind, (origin + start + t) * dim, dim, key_size, numbers);
            for (int d = 0; d < key_size; d += L)
                for (int r = 0; r < rows; r++) sums[r] += load(numbers + d) * load(query[r] + d);
            for (int r = 0; r < rows; r++) scores[r][t] = sum_of(sums[r]);
        }
        add_mask(call, part, unit, start, tokens, scores);
        softmax_tile(state, rows, tokens, scores, state->total, decay);
        for (int t = 0; t < tokens; t++) {
            read_numbers(exact->values, kind, (origin + start + t) * value_dim, value_dim, value_size, numbers);
            for (int d = 0; d < value_size; d += L)
                for (int r = 0; r < rows; r++)
                    store(state->sums[r] + d, load(state->sums[r] + d) + load(numbers + d) * scores[r][t]);
        }
    }
}
static void write_result(const Call *call, Unit unit, int r, const float *sums, float total) {
    int64_t at = (unit.matrix * call->groups * call->queries + unit.row + r) * call->value_dim;
    /* A query that may attend to nothing has the sum of nothing */
    float factor = total > 0 ? 1 / total : 0;
    for (int64_t d = 0; d < call->value_dim; d++)
        store_number(call->result, (int)call->states_kind, at + d, sums[d] * factor);
}
static void run_task(const Call *call, int64_t number) {
    int64_t unit_number = number / call->runs, run = number % call->runs, all = 0, seen = 0;
    Unit unit = unit_at(call, unit_number);
    ALIGNED Queries query;
    State state;
    int dim = (int)call->key_dim, size = padded(dim);
    for (int r = 0; r < unit.rows; r++) {
        int64_t row = unit.matrix * call->groups * call->queries + unit.row + r;
        read_numbers(call->query, (int)call->states_kind, row * dim, dim, size, query[r]);
        for (int d = 0; d < size; d++) query[r][d] *= (float)call->scale;
        state.maximum[r] = -INFINITY, state.total[r] = 0, state.coded_total[r] = 0;
        memset(state.sums[r], 0, sizeof(float) * (size_t)padded(call->value_dim));
    }
    state.sums_size = padded(call->value_dim), state.coded_size = 0;
    for (int64_t p = 0; p < call->num_parts; p++) all += tiles_of(&call->parts[p], unit);
    int64_t begin = all * run / call->runs, end = all * (run + 1) / call->runs;
    for (int64_t p = 0; p < call->num_parts; p++) {
        const Part *part = &call->parts[p];
        int64_t tiles = tiles_of(part, unit), first = begin > seen ? begin - seen : 0, last = end - seen < tiles ? end - seen : tiles;
        seen += tiles;
        if (first >= last) continue;
        switch (part->kind) {
        case PART_ROWS: KVC_NAME(attend_rows, KVC_LEVEL)(call, part, unit, query, first, last, &state); break;
        case PART_BASIS_ROWS: KVC_NAME(attend_basis_rows, KVC_LEVEL)(call, part, unit, query, first, last, &state); break;
        case PART_GROUPS: KVC_NAME(attend_groups, KVC_LEVEL)(call, part, unit, query, first, last, &state); break;
        default: BY_ROWS(unit.rows, attend_exact, call, part, unit, query, first, last, &state);
        }
    }
    for (int r = 0; r < unit.rows; r++) {
        if (call->runs == 1) {
            write_result(call, unit, r, state.sums[r], state.total[r]);
            continue;
        }
        float *to = call->partial + (number * ROWS + r) * (call->value_dim + 2);
        to[0] = state.maximum[r], to[1] = state.total[r];
        memcpy(to + 2, state.sums[r], sizeof(float) * (size_t)call->value_dim);
    }
}
static void merge(const Call *call) {
    int64_t size = call->value_dim + 2, units = call->tasks.count / call->runs;
    for (int64_t u = 0; u < units; u++) {
        Unit unit = unit_at(call, u);
        for (int r = 0; r < unit.rows; r++) {
            const float *own = call->partial + (u * call->runs * ROWS + r) * size;
            float most = -INFINITY, total = 0, sums[MOST_CHANNELS] = {0};
            for (int64_t i = 0; i < call->runs; i++) most = own[i * ROWS * size] > most ? own[i * ROWS * size] : most;
            for (int64_t i = 0; i < call->runs && most > -INFINITY; i++) {
                const float *from = own + i * ROWS * size;
                float decay = expf(from[0] - most);
                total += decay * from[1];
                for (int64_t d = 0; d < call->value_dim; d++) sums[d] += decay * from[2 + d];
            }
            write_result(call, unit, r, sums, total);
        }
    }
}
EXPORT(attend)(Call *call) {
    FOR_TASKS(call, task) {
        run_task(call, task);
        if (ends_last(&call->tasks) && call->runs > 1) merge(call);
    }
}

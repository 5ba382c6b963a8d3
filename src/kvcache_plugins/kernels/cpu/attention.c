/* Attention of a few queries over all parts of a layer: tasks, exact tokens, and the merging of runs. See `layer.h`. */
#include "scattered.h"

static void write_newest(const Call *call, const Part *part, const Exact *exact, Unit unit) {
    size_t size = size_of_kind((int)exact->kind);
    size_t key = size * (size_t)call->key_dim, value = size * (size_t)call->value_dim;
    int64_t at = unit.matrix * exact->capacity + length_of(part, unit) - 1;
    memcpy((char *)exact->keys + at * key, (const char *)exact->newest_key + unit.matrix * key, key);
    memcpy((char *)exact->values + at * value, (const char *)exact->newest_value + unit.matrix * value, value);
}
static void attend_exact(
    const Call *call, const Part *part, Unit unit, const Queries query, int64_t first, int64_t last, State *state) {
    const Exact *exact = part->stored;
    int kind = (int)exact->kind;
    int64_t size = (int64_t)size_of_kind(kind), key_size = size * call->key_dim, value_size = size * call->value_dim;
    int64_t origin = unit.matrix * exact->capacity, length = length_of(part, unit);
    ALIGNED float scores[ROWS][TILE], decay[ROWS];
    Places places = {.key_dim = (int)call->key_dim, .value_dim = (int)call->value_dim};
    /* By every task of the head, which all write the same; only the one with the last tile reads it */
    if (exact->newest_key && last == tiles_of(part, unit)) write_newest(call, part, exact, unit);
    for (int64_t start = first * TILE; start < last * TILE && start < length; start += TILE) {
        places.tokens = places.known = (int)(length - start < TILE ? length - start : TILE);
        for (int t = 0; t < places.tokens; t++) {
            places.keys[t] = (const char *)exact->keys + (origin + start + t) * key_size;
            places.values[t] = (const char *)exact->values + (origin + start + t) * value_size;
        }
        score_places(&places, kind, unit.rows, query, scores);
        add_mask(call, part, unit, start, places.tokens, scores);
        softmax_tile(state, unit.rows, places.tokens, scores, state->total, decay);
        add_places(&places, kind, unit.rows, scores, state->sums);
    }
}
INLINE int64_t result_row(const Call *call, Unit unit) { return unit.matrix * call->groups * call->queries + unit.row; }
static void run_task(const Call *call, int64_t number) {
    int64_t unit_number = number / call->runs, run = number % call->runs, all = 0, seen = 0;
    Unit unit = unit_at(call, unit_number);
    ALIGNED Queries query;
    State state;
    int64_t row = result_row(call, unit);
    load_queries(call->query, (int)call->states_kind, row, unit.rows, call->scale, (int)call->key_dim, query);
    start_state(unit.rows, call->value_dim, &state);
    for (int64_t p = 0; p < call->num_parts; p++) all += tiles_of(&call->parts[p], unit);
    int64_t begin = all * run / call->runs, end = all * (run + 1) / call->runs;
    for (int64_t p = 0; p < call->num_parts; p++) {
        const Part *part = &call->parts[p];
        int64_t tiles = tiles_of(part, unit), first = begin > seen ? begin - seen : 0, last = end - seen < tiles ? end - seen : tiles;
        seen += tiles;
        if (first >= last) continue;
        switch (part->kind) {
        case PART_ROWS: KVC_NAME(attend_rows, KVC_LEVEL)(call, part, unit, query, first, last, &state); break;
        case PART_GROUPS: KVC_NAME(attend_groups, KVC_LEVEL)(call, part, unit, query, first, last, &state); break;
        default: attend_exact(call, part, unit, query, first, last, &state);
        }
    }
    for (int r = 0; r < unit.rows; r++) {
        if (call->runs == 1) {
            write_result(call->result, (int)call->states_kind, row + r, call->value_dim, state.sums[r], state.total[r]);
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
            write_result(call->result, (int)call->states_kind, result_row(call, unit) + r, call->value_dim, sums, total);
        }
    }
}
EXPORT(attend)(Call *call) {
    FOR_TASKS(call, task) {
        run_task(call, task);
        if (ends_last(&call->tasks) && call->runs > 1) merge(call);
    }
}

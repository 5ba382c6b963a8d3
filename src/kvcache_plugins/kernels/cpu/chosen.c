/* Attention over chosen tokens that are rows, over exact ones among them, and over the newest. Slots and counts come from
   memory and are brought into the range of what there is.

   B items, H key/value heads, G queries a head, D and E channels of keys and values, K slots, S exact first tokens. */
#include "scattered.h"

/* Adds an exact token to a tile, which is attended to when it is full */
static void add_exact(const Chosen *call, Unit unit, const Queries query, Places *tile, State *state, const char *key, const char *value, int64_t column) {
    int t = tile->tokens++;
    tile->keys[t] = key, tile->values[t] = value, tile->columns[t] = column, tile->known = t + 1;
    if (t + 1 < TILE) return;
    attend_places(tile, (int)call->window.kind, unit, &call->mask, query, state);
    tile->tokens = 0;
}
/* Puts slots [count] in the order of their tiles, of which `ends` [tiles] are counted: rows are read one behind the other */
static void sort_by_tile(const int64_t *from, int64_t count, int64_t num_tiles, int64_t *ends, int64_t *to) {
    int64_t total = 0;
    memset(ends, 0, sizeof(int64_t) * (size_t)num_tiles);
    for (int64_t k = 0; k < count; k++) ends[from[k] / TILE]++;
    for (int64_t g = 0; g < num_tiles; g++) {
        int64_t size = ends[g];
        ends[g] = total, total += size;
    }
    for (int64_t k = 0; k < count; k++) to[ends[from[k] / TILE]++] = from[k];
}
static void attend_unit(const Chosen *call, Unit unit, int64_t *coded, int64_t *ends) {
    int dim = (int)call->key_dim, value_dim = (int)call->value_dim;
    int64_t size = (int64_t)size_of_kind((int)call->window.kind), key_size = size * dim, value_size = size * value_dim;
    int64_t count = call->counts[unit.matrix], room = call->num_pages * call->page_tokens, some = 0;
    int64_t first_sink = call->first_sinks[unit.batch], origin = unit.matrix * call->num_sinks, row = unit.matrix * call->groups + unit.row;
    const int64_t *slots = call->slots + unit.matrix * call->num_chosen;
    ALIGNED Queries query;
    State state;
    Places tile = {.key_dim = dim, .value_dim = value_dim};
    if (room > call->num_slots) room = call->num_slots;
    if (count > call->num_chosen) count = call->num_chosen;
    if (room <= 0) count = 0;
    load_queries(call->query, FLOATS, row, unit.rows, call->scale, dim, query);
    start_state(unit.rows, value_dim, &state);
    for (int64_t t = 0; t < call->window.length; t++)
        add_exact(call, unit, query, &tile, &state, window_key(&call->window, unit, key_size, t),
                  window_value(&call->window, unit, value_size, t), call->window.start + t);
    for (int64_t k = 0; k < count; k++) {
        int64_t slot = clamped(slots[k], room), number = slot - first_sink;
        if (number >= 0 && number < call->num_sinks)
            add_exact(call, unit, query, &tile, &state, call->sink_keys + (origin + number) * key_size,
                      call->sink_values + (origin + number) * value_size, slot);
        else coded[some++] = slot;
    }
    if (tile.tokens) attend_places(&tile, (int)call->window.kind, unit, &call->mask, query, &state);
    int64_t *sorted = coded + call->num_chosen;
    sort_by_tile(coded, some, call->num_tiles, ends, sorted);
    KVC_NAME(attend_chosen_rows, KVC_LEVEL)(call, unit, query, sorted, some, &state);
    for (int r = 0; r < unit.rows; r++) write_result(call->result, FLOATS, row + r, value_dim, state.sums[r], state.total[r]);
}
EXPORT(attend_chosen)(Chosen *call) {
    Call shape = {.heads = call->heads, .groups = call->groups, .queries = 1};
    int64_t thread = __atomic_fetch_add(&call->threads, 1, __ATOMIC_RELAXED);
    int64_t *coded = call->coded + 2 * thread * call->num_chosen, *ends = call->ends + thread * call->num_tiles;
    FOR_TASKS(call, task)
        attend_unit(call, unit_at(&shape, task), coded, ends);
}

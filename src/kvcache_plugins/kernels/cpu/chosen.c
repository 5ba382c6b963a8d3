/* Attention over chosen tokens, exact ones and such as are rows of tables, and over the newest; and copies of rows.

   Rows lie scattered, and no machine foresees them: where those of the next tile are is known while a tile is computed, and
   they are called into the machine's caches. Tasks share nothing, so a result depends on its own tokens only. Slots and
   counts come from memory and are brought into the range of what there is.

   B items, H key/value heads, G queries a head, D and E channels of keys and values, K slots, S exact first tokens. */
#include "scattered.h"

/* Attends to the first tile of the tokens that are known */
static void attend_tile(const Choice *call, Unit unit, const Queries query, Places *places, State *state) {
    places->tokens = places->known < TILE ? places->known : TILE;
    attend_places(places, (int)call->window.kind, unit, &call->mask, query, state);
    memcpy(places->keys, places->keys + TILE, sizeof places->keys / 2);
    memcpy(places->values, places->values + TILE, sizeof places->values / 2);
    memcpy(places->columns, places->columns + TILE, sizeof places->columns / 2);
    places->known -= places->tokens;
}
static void add_exact(const Choice *call, Unit unit, const Queries query, Places *places, State *state, const char *key, const char *value, int64_t column) {
    int t = places->known++;
    places->keys[t] = key, places->values[t] = value, places->columns[t] = column;
    if (t + 1 == 2 * TILE) attend_tile(call, unit, query, places, state);
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
static void attend_unit(const Choice *call, Unit unit, int64_t *coded, int64_t *ends) {
    const Window *window = &call->window;
    int64_t size = (int64_t)size_of_kind((int)window->kind), key_size = size * call->key_dim, value_size = size * call->value_dim;
    int64_t room = call->num_pages * call->page_tokens, count = clamped(call->counts[unit.matrix], call->limit + 1), some = 0;
    int64_t origin = unit.matrix * call->limit, row = unit.matrix * call->groups + unit.row;
    ALIGNED Queries query;
    State state;
    Places places = {.key_dim = (int)call->key_dim, .value_dim = (int)call->value_dim};
    load_queries(call->query, FLOATS, row, unit.rows, call->scale, places.key_dim, query);
    start_state(unit.rows, call->value_dim, &state);
    if (room > call->length) room = call->length;
    for (int64_t k = 0; k < count && room > 0; k++) {
        int64_t slot = clamped(call->slots[origin + k], room), column = call->columns ? call->columns[origin + k] : slot;
        if (!call->rows) {
            const char *key = row_in_pages(call, unit.matrix, slot, key_size + value_size);
            add_exact(call, unit, query, &places, &state, key, key + key_size, column);
            continue;
        }
        int64_t number = slot - call->first_sinks[unit.batch], at = unit.matrix * call->num_sinks + number;
        if (number < 0 || number >= call->num_sinks) coded[some++] = slot;
        else add_exact(call, unit, query, &places, &state, call->sink_keys + at * key_size, call->sink_values + at * value_size, column);
    }
    for (int64_t t = 0; t < window->length; t++)
        add_exact(call, unit, query, &places, &state, window_key(window, unit, key_size, t), window_value(window, unit, value_size, t), window->start + t);
    while (places.known) attend_tile(call, unit, query, &places, &state);
    if (call->rows) {
        sort_by_tile(coded, some, (call->length + TILE - 1) / TILE, ends, coded + call->limit);
        KVC_NAME(attend_chosen_rows, KVC_LEVEL)(call, unit, query, coded + call->limit, some, &state);
    }
    for (int r = 0; r < unit.rows; r++) write_result(call->result, FLOATS, row + r, call->value_dim, state.sums[r], state.total[r]);
}
EXPORT(attend_chosen)(Choice *call) {
    Call shape = {.heads = call->heads, .groups = call->groups, .queries = 1};
    int64_t thread = __atomic_fetch_add(&call->threads, 1, __ATOMIC_RELAXED), tiles = (call->length + TILE - 1) / TILE;
    int64_t *coded = call->rows ? call->coded + 2 * thread * call->limit : 0, *ends = call->rows ? call->ends + thread * tiles : 0;
    FOR_TASKS(call, task)
        attend_unit(call, unit_at(&shape, task), coded, ends);
}

static void copy_head(const Copies *call, int64_t matrix) {
    int64_t size = call->row_size, head = call->page_tokens * size, all = call->num_pages * call->page_tokens;
    const int64_t *slots = call->slots + matrix * call->num_slots;
    char *result = call->result + matrix * call->num_slots * size;
    for (int64_t k = 0; k < call->num_slots; k++) {
        int64_t slot = clamped(slots[k], all), page = slot / call->page_tokens;
        memcpy(result + k * size, call->pages[page] + matrix * head + (slot - page * call->page_tokens) * size, (size_t)size);
    }
}
EXPORT(copy_rows)(Copies *call) {
    FOR_TASKS(call, task)
        copy_head(call, task);
}

/* Chosen rows of an offloaded cache: attention over them where they stand, and copies of them.

   Rows lie scattered, and no machine foresees them: where a tile's are is told while those of the tile before are
   computed, and they are called into the machine's caches. Tasks share nothing, so a result depends on its own tokens
   only. What memory says of slots and counts is brought into the range of what there is.

   B items, H key/value heads, G queries a head, D and E channels of keys and values, K slots, W tokens of the window. */
#include "scattered.h"

static void place_tile(const Gathered *call, Unit unit, int64_t count, int64_t start, int tokens, int at, Places *places) {
    int64_t size = (int64_t)size_of_kind((int)call->kind), key_size = size * call->key_dim;
    int64_t value_size = size * call->value_dim, page_size = call->page_tokens * (key_size + value_size);
    const int64_t *slots = call->slots + unit.matrix * call->num_slots, *columns = call->columns + unit.matrix * call->num_slots;
    for (int i = 0; i < tokens; i++) {
        int64_t t = start + i;
        places->columns[at + i] = t < count ? columns[t] : call->window.start + t - count;
        if (t < count) {
            int64_t slot = clamped(slots[t], call->num_pages * call->page_tokens), page = slot / call->page_tokens;
            const char *row = call->pages[page] + unit.matrix * page_size + (slot - page * call->page_tokens) * (key_size + value_size);
            places->keys[at + i] = row, places->values[at + i] = row + key_size;
        } else {
            places->keys[at + i] = window_key(&call->window, unit, key_size, t - count);
            places->values[at + i] = window_value(&call->window, unit, value_size, t - count);
        }
    }
    places->known = at + tokens;
}
static void attend_unit(const Gathered *call, Unit unit) {
    int64_t count = call->counts[unit.matrix], most = call->num_pages * call->page_tokens > 0 ? call->num_slots : 0;
    count = count < 0 ? 0 : count < most ? count : most;
    int64_t length = count + call->window.length, row = unit.matrix * call->groups + unit.row;
    ALIGNED Queries query;
    State state;
    Places places = {.key_dim = (int)call->key_dim, .value_dim = (int)call->value_dim};
    load_queries(call->query, FLOATS, row, unit.rows, call->scale, places.key_dim, query);
    start_state(unit.rows, call->value_dim, &state);
    place_tile(call, unit, count, 0, (int)(length < TILE ? length : TILE), 0, &places);
    for (int64_t start = 0; start < length; start += TILE) {
        int64_t rest = length - start - TILE;
        places.tokens = (int)(rest < 0 ? length - start : TILE);
        if (rest > 0) place_tile(call, unit, count, start + TILE, (int)(rest < TILE ? rest : TILE), TILE, &places);
        attend_places(&places, (int)call->kind, unit, &call->mask, query, &state);
        memcpy(places.keys, places.keys + TILE, sizeof places.keys / 2);
        memcpy(places.values, places.values + TILE, sizeof places.values / 2);
        memcpy(places.columns, places.columns + TILE, sizeof places.columns / 2);
        places.known -= TILE;
    }
    for (int r = 0; r < unit.rows; r++) write_result(call->result, FLOATS, row + r, call->value_dim, state.sums[r], state.total[r]);
}
EXPORT(attend_gathered)(Gathered *call) {
    Call shape = {.heads = call->heads, .groups = call->groups, .queries = 1};
    FOR_TASKS(call, task)
        attend_unit(call, unit_at(&shape, task));
}

/* Pages that are mapped files are read a share of them at a time, and let go of: a step's rows lie in nearly all */
enum { SHARES = 12 };

static void copy_head(const Copies *call, int64_t matrix) {
    int64_t size = call->row_size, head = call->page_tokens * size, all = call->num_pages * call->page_tokens;
    int64_t at_once = call->advise ? (call->num_pages + SHARES - 1) / SHARES : call->num_pages;
    const int64_t *slots = call->slots + matrix * call->num_slots;
    char *result = call->result + matrix * call->num_slots * size;
    for (int64_t first = 0; first < call->num_pages; first += at_once) {
        int64_t stop = first + at_once < call->num_pages ? first + at_once : call->num_pages;
        for (int64_t k = 0; k < call->num_slots; k++) {
            int64_t slot = clamped(slots[k], all), page = slot / call->page_tokens;
            if (page < first || page >= stop) continue;
            const char *row = call->pages[page] + matrix * head + (slot - page * call->page_tokens) * size;
            memcpy(result + k * size, row, (size_t)size);
        }
        for (int64_t page = first; page < stop && call->advise; page++) {
            uintptr_t begin = (uintptr_t)(call->pages[page] + matrix * head), beyond = begin % (uintptr_t)call->block;
            call->advise((void *)(begin - beyond), (size_t)head + beyond, (int)call->let_go);
        }
    }
}
EXPORT(copy_rows)(Copies *call) {
    FOR_TASKS(call, task)
        copy_head(call, task);
}

/* Attention to selected tokens, exact ones and rows of formats, and to the newest; copies of rows.

   Selected rows are scattered, and no processor foresees them. So addresses of the next tile are
   known while a tile is computed, and its rows are prefetched. Tasks share nothing: a result
   depends on its own tokens only. Slots and counts are not trusted, and clamped.

   B sequences, H key/value heads, G queries a head, D and E channels of keys and values, K slots, S
   exact first tokens. */
#include "gathered_attention.h"

/* All that attention of a query block works with. */
typedef struct {
    const SelectedAttentionArgs *args;
    QueryBlock block;
    ALIGNED Queries query;
    TokenRefs refs;
    SoftmaxState state;
} SelectedScratch;

/* Attends to the first tile of the tokens that are known. */
static void attend_tile(SelectedScratch *scratch) {
    const SelectedAttentionArgs *args = scratch->args;
    TokenRefs *refs = &scratch->refs;
    int dtype = (int)args->window->dtype;
    refs->tokens = (int)min_of(refs->known, TILE);
    attend_refs(refs, dtype, scratch->block, args->mask, scratch->query, &scratch->state);
    memcpy(refs->keys, refs->keys + TILE, sizeof refs->keys / 2);
    memcpy(refs->values, refs->values + TILE, sizeof refs->values / 2);
    memcpy(refs->columns, refs->columns + TILE, sizeof refs->columns / 2);
    refs->known -= refs->tokens;
}

static void add_exact(
    SelectedScratch *scratch, const char *key, const char *value, int64_t column) {
    TokenRefs *refs = &scratch->refs;
    int t = refs->known++;
    refs->keys[t] = key;
    refs->values[t] = value;
    refs->columns[t] = column;
    if (t + 1 == 2 * TILE) attend_tile(scratch);
}

/* Sorts slots [count] by tile, so that rows are read in the order of memory. `ends` [tiles] is for
   counts. */
static void sort_by_tile(
    const int64_t *slots, int64_t count, int64_t num_tiles, int64_t *ends, int64_t *sorted) {
    int64_t total = 0;
    memset(ends, 0, sizeof(int64_t) * (size_t)num_tiles);
    for (int64_t k = 0; k < count; k++) ends[slots[k] / TILE]++;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t size = ends[tile];
        ends[tile] = total;
        total += size;
    }
    for (int64_t k = 0; k < count; k++) sorted[ends[slots[k] / TILE]++] = slots[k];
}

/* Attends to selected tokens that are exact. Writes the slots of the others to `coded`. Returns the
   number of these. */
static int64_t attend_exact_slots(SelectedScratch *scratch, int64_t *coded) {
    const SelectedAttentionArgs *args = scratch->args;
    const SelectableTokens *tokens = args->tokens;
    const SelectedSlots *selected = args->selected;
    QueryBlock block = scratch->block;
    int64_t size = (int64_t)size_of_dtype((int)args->window->dtype);
    int64_t key_size = size * args->queries->key_dim;
    int64_t value_size = size * args->value_dim;
    int64_t stored = min_of(tokens->num_pages * tokens->page_tokens, tokens->length);
    int64_t count = clamped(selected->counts[block.bh], selected->limit + 1);
    int64_t num_coded = 0;
    const int64_t *slots = selected->slots + block.bh * selected->limit;
    const int64_t *columns = args->columns ? args->columns + block.bh * selected->limit : 0;
    for (int64_t k = 0; k < count && stored > 0; k++) {
        int64_t slot = clamped(slots[k], stored);
        int64_t column = columns ? columns[k] : slot;
        if (!tokens->rows) {
            const char *key = row_in_pages(tokens, block.bh, slot, key_size + value_size);
            add_exact(scratch, key, key + key_size, column);
            continue;
        }
        int64_t sink = slot - tokens->first_sinks[block.batch];
        if (sink < 0 || sink >= tokens->num_sinks) {
            coded[num_coded++] = slot;
            continue;
        }
        int64_t index = block.bh * tokens->num_sinks + sink;
        const char *value = tokens->sink_values + index * value_size;
        add_exact(scratch, tokens->sink_keys + index * key_size, value, column);
    }
    return num_coded;
}

static void attend_window(SelectedScratch *scratch) {
    const SelectedAttentionArgs *args = scratch->args;
    const Window *window = args->window;
    QueryBlock block = scratch->block;
    int64_t size = (int64_t)size_of_dtype((int)window->dtype);
    for (int64_t t = 0; t < window->length; t++) {
        const char *key = window_key(window, block, size * args->queries->key_dim, t);
        const char *value = window_value(window, block, size * args->value_dim, t);
        add_exact(scratch, key, value, window->start + t);
    }
}

static void attend_block(
    const SelectedAttentionArgs *args, QueryBlock block, int64_t *coded, int64_t *tile_ends) {
    const SelectableTokens *tokens = args->tokens;
    int value_dim = (int)args->value_dim;
    int64_t limit = args->selected->limit;
    SelectedScratch scratch;
    SoftmaxState *state = &scratch.state;
    scratch.args = args;
    scratch.block = block;
    scratch.refs = (TokenRefs){.key_dim = (int)args->queries->key_dim, .value_dim = value_dim};
    load_token_queries(args->queries, block, scratch.query);
    start_softmax(block.count, value_dim, state);
    int64_t num_coded = attend_exact_slots(&scratch, coded);
    attend_window(&scratch);
    while (scratch.refs.known) attend_tile(&scratch);
    if (tokens->rows) {
        int64_t num_tiles = (tokens->length + TILE - 1) / TILE;
        int64_t *sorted = coded + limit;
        sort_by_tile(coded, num_coded, num_tiles, tile_ends, sorted);
        KVC_NAME(attend_selected_rows, KVC_LEVEL)(
            args, block, scratch.query, sorted, num_coded, state);
    }
    int64_t first = first_query(args->queries, block);
    for (int r = 0; r < block.count; r++)
        write_result(args->result, F32, first + r, value_dim, state->sums[r], state->total[r]);
}

EXPORT(attend_selected)(SelectedAttentionArgs *args) {
    const TokenQueries *queries = args->queries;
    int64_t thread = __atomic_fetch_add(&args->threads_entered, 1, __ATOMIC_RELAXED);
    int64_t num_tiles = (args->tokens->length + TILE - 1) / TILE;
    int64_t *coded = 0;
    int64_t *tile_ends = 0;
    if (args->tokens->rows) {
        coded = args->coded + 2 * thread * args->selected->limit;
        tile_ends = args->tile_ends + thread * num_tiles;
    }
    FOR_TASKS(args, task) {
        QueryBlock block = query_block(queries->heads, queries->query_groups, task);
        attend_block(args, block, coded, tile_ends);
    }
}

static void gather_head(const GatherArgs *args, int64_t bh) {
    int64_t size = args->row_size;
    int64_t head_size = args->page_tokens * size;
    int64_t stored = args->num_pages * args->page_tokens;
    const int64_t *slots = args->slots + bh * args->num_slots;
    char *result = args->result + bh * args->num_slots * size;
    for (int64_t k = 0; k < args->num_slots; k++) {
        int64_t slot = clamped(slots[k], stored);
        int64_t page = slot / args->page_tokens;
        int64_t token = slot - page * args->page_tokens;
        const char *row = args->pages[page] + bh * head_size + token * size;
        memcpy(result + k * size, row, (size_t)size);
    }
}

EXPORT(gather_rows)(GatherArgs *args) {
    FOR_TASKS(args, task) gather_head(args, task);
}

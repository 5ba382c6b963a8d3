/* Attention over all parts of a layer, a `Call`: what every kind of part has in common.

   A unit is a key/value head of an item and up to ROWS of its queries. Its parts are cut into runs, each a task: one run
   goes through its share of the tiles of all parts, one behind the other, with one softmax. Where there is one run, it
   writes the result; otherwise the last task that ends merges what the runs of all units have left.

   B batch, H key/value heads, G queries a head, Q new tokens, D and E channels of keys and of values, T tokens. */
#pragma once
#include "simd.h"

typedef struct {
    int64_t matrix, batch, head;    /* matrix = batch * heads + head */
    int row, rows;                  /* first of the G Q queries, and how many */
} Unit;

/* The softmax of a unit. A part adds to `sums` as it reads (or to `coded`, if its kind ends with a transform), and to
   `total` its weights; whoever raises `maximum` scales all of them. */
typedef struct {
    float maximum[ROWS], total[ROWS];
    ALIGNED float sums[ROWS][MOST_CHANNELS], coded[ROWS][MOST_CHANNELS];
    float coded_total[ROWS];        /* of the weights of the part whose values are in `coded` */
    int sums_size, coded_size;      /* channels in use, in whole vectors */
} State;

INLINE int padded(int64_t size) { return (int)((size + L - 1) / L * L); }

INLINE int64_t rows_of_unit(const Call *call) {
    int64_t all = call->groups * call->queries, blocks = (all + ROWS - 1) / ROWS;
    return (all + blocks - 1) / blocks;
}
INLINE Unit unit_at(const Call *call, int64_t number) {
    int64_t all = call->groups * call->queries, most = rows_of_unit(call), blocks = (all + most - 1) / most;
    int64_t matrix = number / blocks, row = number % blocks * most;
    return (Unit){matrix, matrix / call->heads, matrix % call->heads, (int)row, (int)(all - row < most ? all - row : most)};
}
/* A number of `size`, whatever memory says */
INLINE int64_t clamped(int64_t x, int64_t size) { return x < 0 ? 0 : x >= size ? size - 1 : x; }
/* Cosines of the first position of a tile, which may be below 0, with sines behind them that are to be multiplied by `sign` */
INLINE const float *far_angles(const Rotary *rotary, int64_t tile, float *sign) {
    *sign = tile < 0 ? -1 : 1;
    return rotary->far + clamped(tile < 0 ? -tile : tile, rotary->tiles) * 2 * rotary->all_pairs;
}
INLINE int64_t length_of(const Part *part, Unit unit) {
    return part->lengths ? clamped(part->lengths[unit.batch], part->length + 1) : part->length;
}
INLINE int64_t tiles_of(const Part *part, Unit unit) { return (length_of(part, unit) + TILE - 1) / TILE; }

/* Calls an INLINE function whose first argument is how many rows there are, so that loops over them are unrolled */
#define BY_ROWS(rows, function, ...) \
    switch (rows) { \
    case 1: function(1, __VA_ARGS__); break; \
    case 2: function(2, __VA_ARGS__); break; \
    case 3: function(3, __VA_ARGS__); break; \
    default: function(ROWS, __VA_ARGS__); \
    }

/* Adds the mask of a tile's tokens to its scores; columns that a mask lacks add nothing */
INLINE void add_mask(const Call *call, const Part *part, Unit unit, int64_t start, int tokens, float (*scores)[TILE]) {
    const int64_t *n = part->mask_shape;
    if (!part->mask) return;
    for (int r = 0; r < unit.rows; r++) {
        int64_t row = unit.row + r, head = unit.head * call->groups + row / call->queries, query = row % call->queries;
        int64_t b = n[0] > 1 ? unit.batch : 0, h = n[1] > 1 ? head : 0, q = n[2] > 1 ? query : 0;
        const float *line = part->mask + ((b * n[1] + h) * n[2] + q) * n[3] + start;
        for (int t = 0; t < tokens && start + t < n[3]; t++) scores[r][t] += line[t];
    }
}
/* Turns scores into weights, scaling what there is where a tile has a higher maximum. Weights behind the last token
   are 0. `total` gets their sum. Returns whether anything was scaled; factors are in `decay`. */
INLINE int softmax_tile(State *state, int rows, int tokens, float (*scores)[TILE], float *total, float *decay) {
    int is_scaled = 0;
    for (int r = 0; r < rows; r++) {
        for (int t = tokens; t < TILE; t++) scores[r][t] = -INFINITY;
        vf high = load(scores[r]);
        for (int t = L; t < TILE; t += L) high = larger(load(scores[r] + t), high);
        float most = largest_of(high);
        decay[r] = 1;
        if (most > state->maximum[r]) {
            decay[r] = state->maximum[r] == -INFINITY ? 0 : expf(state->maximum[r] - most);
            state->maximum[r] = most, is_scaled = 1;
            state->total[r] *= decay[r], state->coded_total[r] *= decay[r];
            for (int d = 0; d < state->sums_size; d += L) store(state->sums[r] + d, load(state->sums[r] + d) * decay[r]);
            for (int d = 0; d < state->coded_size; d += L)
                store(state->coded[r] + d, load(state->coded[r] + d) * decay[r]);
        }
        /* All of it hidden: every exponential has to be 0 */
        vf reference = splat(state->maximum[r] == -INFINITY ? 0 : state->maximum[r]), sum = {0};
        for (int t = 0; t < TILE; t += L) {
            vf w = exp_of(load(scores[r] + t) - reference);
            sum += w, store(scores[r] + t, w);
        }
        total[r] += sum_of(sum);
    }
    return is_scaled;
}
/* Hadamard's transform of runs of `size` (a power of two) of `dim` numbers, without its factor */
INLINE void hadamard(float *x, int64_t dim, int64_t size) {
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t start = 0; start + 2 * half <= dim; start += 2 * half)
            for (int64_t d = start; d < start + half; d++) {
                float a = x[d], b = x[d + half];
                x[d] = a + b, x[d + half] = a - b;
            }
}

typedef float Queries[ROWS][MOST_CHANNELS];
/* Queries [rows][D] from a row on, scaled, and zeros behind D up to a whole vector */
static inline void load_queries(const void *from, int kind, int64_t row, int rows, double scale, int dim, Queries query) {
    for (int r = 0; r < rows; r++) {
        read_numbers(from, kind, (row + r) * dim, dim, padded(dim), query[r]);
        for (int d = 0; d < dim; d++) query[r][d] *= (float)scale;
    }
}
/* A softmax of nothing yet */
static inline void start_state(int rows, int64_t value_dim, State *state) {
    for (int r = 0; r < rows; r++) {
        state->maximum[r] = -INFINITY, state->total[r] = 0, state->coded_total[r] = 0;
        memset(state->sums[r], 0, sizeof(float) * (size_t)padded(value_dim));
    }
    state->sums_size = padded(value_dim), state->coded_size = 0;
}
/* Row `row` of a result [rows][E]; zero where there was nothing to attend to */
static inline void write_result(void *result, int kind, int64_t row, int64_t value_dim, const float *sums, float total) {
    float factor = total > 0 ? 1 / total : 0;
    for (int64_t d = 0; d < value_dim; d++) store_number(result, kind, row * value_dim + d, sums[d] * factor);
}

/* Each kind's tokens from tile `first` up to tile `last` of a part, the queries being scaled */
void KVC_NAME(attend_rows, KVC_LEVEL)(const Call *, const Part *, Unit, const Queries, int64_t first, int64_t last, State *);
void KVC_NAME(attend_groups, KVC_LEVEL)(const Call *, const Part *, Unit, const Queries, int64_t, int64_t, State *);

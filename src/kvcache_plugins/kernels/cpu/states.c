/* Applies rotary embeddings to states, and computes moments of their channels. */
#include "token_vectors.h"

enum { SUM_TOKENS = 1024 };

EXPORT(apply_rope)(RopeArgs *args) {
    int channels = (int)args->sizes.channels;
    int inverse = args->inverse != 0;
    ALIGNED vf x[MAX_CHANNELS];
    FOR_TASKS(args, task) {
        TokenRange range = range_of_task(&args->sizes, &args->positions, task);
        TokenVector vector;
        while (take_vector(&range, &vector)) {
            load_tokens(&args->sizes, &args->states, vector, x);
            rotate_tokens(args->positions.rotary, channels, inverse, vector, x);
            store_tokens(&args->sizes, args->result, vector, x);
        }
    }
}

/* Sums of the valid tokens of a head, less one of them (a channel may vary little about a large
   mean): of some tokens in floats, of all in doubles. */
typedef struct {
    ALIGNED vf some[MAX_CHANNELS], some_squares[MAX_CHANNELS];
    double sums[MAX_CHANNELS], squares[MAX_CHANNELS];
    float one[MAX_CHANNELS];
    int64_t count;
} Moments;

/* Adds the valid tokens of a range, up to SUM_TOKENS. */
static void add_moments(
    const MomentsArgs *args, const uint8_t *valid, TokenRange *range, Moments *moments) {
    int channels = (int)args->sizes.channels;
    TokenVector vector;
    ALIGNED vf x[MAX_CHANNELS];
    for (int d = 0; d < channels; d++) {
        moments->some[d] = (vf){0};
        moments->some_squares[d] = (vf){0};
    }
    while (take_vector(range, &vector)) {
        vi counts = {0};
        int newest = -1;
        int is_first = !moments->count;
        for (int t = 0; t < vector.count; t++) {
            if (valid && !valid[vector.first + t]) continue;
            counts[t] = -1;
            newest = t;
            moments->count++;
        }
        if (newest < 0) continue;
        load_tokens(&args->sizes, &args->states, vector, x);
        if (args->positions.rotary)
            rotate_tokens(args->positions.rotary, channels, 1, vector, x);
        for (int d = 0; d < channels; d++) {
            if (is_first) moments->one[d] = x[d][newest];
            vf rest = blend(counts, x[d] - moments->one[d], (vf){0});
            moments->some[d] += rest;
            moments->some_squares[d] += rest * rest;
        }
    }
    for (int d = 0; d < channels; d++)
        for (int t = 0; t < L; t++) {
            moments->sums[d] += moments->some[d][t];
            moments->squares[d] += moments->some_squares[d][t];
        }
}

static void write_moments(const MomentsArgs *args, int64_t bh, const Moments *moments) {
    int64_t channels = args->sizes.channels;
    double count = (double)moments->count;
    for (int64_t d = 0; d < channels; d++) {
        float *result = args->means + bh * channels + d;
        float *variance = args->variances + bh * channels + d;
        double mean = moments->count ? moments->sums[d] / count : 0;
        double exact = moments->one[d] + mean;
        *result = (float)exact;
        double error = *result - exact;
        *variance = 0;
        if (moments->count)
            *variance = (float)(moments->squares[d] / count - mean * mean + error * error);
        if (*variance < 0) *variance = 0;
    }
}

EXPORT(channel_moments)(MomentsArgs *args) {
    Moments moments;
    FOR_TASKS(args, task) {
        TokenRange range = whole_range(&args->sizes, &args->positions, task);
        const uint8_t *valid = args->valid;
        int64_t end = range.to;
        if (valid) valid += task / args->sizes.heads * args->sizes.tokens;
        memset(moments.sums, 0, sizeof moments.sums);
        memset(moments.squares, 0, sizeof moments.squares);
        memset(moments.one, 0, sizeof moments.one);
        moments.count = 0;
        while (range.from < end) {
            range.to = min_of(range.from + SUM_TOKENS, end);
            add_moments(args, valid, &range, &moments);
        }
        write_moments(args, task, &moments);
    }
}

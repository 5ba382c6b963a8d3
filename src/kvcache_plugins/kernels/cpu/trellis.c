/* Viterbi's search of a trellis of 256 states, a stream in each lane: all of a head have the same widths at the same
   places, so no step branches.

   What a path into a state has cost depends on the number there and on the least cost of the paths that can go there,
   which is one number for all states with the same old bits: these minima are kept of every step, and nothing else. On
   the way back choices are found again, along the path alone. All numbers are integers below 2^24, so sums and squares
   are exact, and of equal paths the one of lower states is taken, as in PyTorch. */
#include "coding.h"

static const float no_path = 1e30f;

INLINE vf smaller(vf a, vf b) {
#if defined(KVC_IS_AVX512)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(KVC_IS_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}
/* The minima behind a step: over the states of which all but the oldest bits, those that leave, are a group's. Some
   groups at a time, as each waits for itself; they may share what came `before` them. */
INLINE void go_on(vf number, const float *grid, int width, int groups, int together, int shares, const float *before, float *after) {
    for (int group = 0; group < groups; group += together) {
        vf least[4] = {splat(no_path), splat(no_path), splat(no_path), splat(no_path)};
        for (int first = group; first < NUM_STATES; first += groups) {
            vf cost = load(before + (first >> width) * L);
            for (int i = 0; i < together; i++) {
                vf error = splat(grid[first + i]) - number;
                if (!shares) cost = load(before + ((first + i) >> width) * L);
                least[i] = smaller(error * error + cost, least[i]);
            }
        }
        for (int i = 0; i < together; i++) store(after + (group + i) * L, least[i]);
    }
}
/* The states along the best paths, from the last number to the first */
static void go_back(
    int steps, const vf *numbers, const uint8_t *widths, const Grids grids, const float *minima, uint8_t (*states)[L]) {
    int group[L] = {0}, groups = 1;
    for (int step = steps - 1; step >= 0; step--) {
        int width = widths[step];
        const float *grid = grids[width], *after = minima;
        minima -= (NUM_STATES >> width) * L;
        for (int lane = 0; lane < L; lane++) {
            float number = ((const float *)(numbers + step))[lane], least = no_path, target = after[group[lane] * L + lane];
            int best = group[lane];
            for (int state = best; state < NUM_STATES && least > target; state += groups) {
                float error = grid[state] - number, cost = error * error + minima[(state >> width) * L + lane];
                if (cost < least) least = cost, best = state;
            }
            states[step][lane] = (uint8_t)best, group[lane] = best >> width;
        }
        groups = NUM_STATES >> width;
    }
}
void KVC_NAME(search_trellis, KVC_LEVEL)(
    int steps, const vf *numbers, const uint8_t *widths, const Grids grids, float *minima, uint8_t (*states)[L]) {
    if (!steps) return;
    for (int group = 0; group < NUM_STATES >> widths[0]; group++) store(minima + group * L, splat(group ? no_path : 0));
    for (int step = 0; step < steps; step++) {
        /* Behind the last number all paths go on as one */
        int width = widths[step], groups = step + 1 < steps ? NUM_STATES >> widths[step + 1] : 1;
        float *after = minima + (NUM_STATES >> width) * L;
        if (groups == 1) go_on(numbers[step], grids[width], width, 1, 1, 1, minima, after);
        else if (width == 1) go_on(numbers[step], grids[width], width, groups, 4, 0, minima, after);
        else go_on(numbers[step], grids[width], width, groups, 4, 1, minima, after);
        minima = after;
    }
    go_back(steps, numbers, widths, grids, minima, states);
}

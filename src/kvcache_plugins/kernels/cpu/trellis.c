/* Viterbi's search of a trellis of 256 states, a stream in each lane: all of a head have the same widths at the same
   places, so no step branches.

   What a path into a state has cost depends on the number there and on the least cost of the paths that can go there,
   which is one number for all states with the same old bits: these minima are kept of every step, and nothing else. On
   the way back choices are found again, along the path alone. All numbers are integers below 2^24, so sums and squares
   are exact, and of equal paths the one of lower states is taken, as in PyTorch. */
#include "coding.h"

static const float no_path = 1e30f;

/* The minima behind a step: over the 2^leaving states of which all but the oldest bits are a group's */
INLINE void go_on(vf number, const float *grid, int width, int leaving, const float *before, float *after) {
    int groups = NUM_STATES >> leaving;
    for (int group = 0; group < groups; group++) {
        vf least = splat(no_path);
        for (int state = group; state < NUM_STATES; state += groups) {
            vf error = splat(grid[state]) - number, cost = error * error + load(before + (state >> width) * L);
            least = choose(cost < least, cost, least);
        }
        store(after + group * L, least);
    }
}
static void go_back(
    int lane, int steps, const vf *numbers, const uint8_t *widths, const Grids grids, const float *minima, uint8_t (*states)[L]) {
    int group = 0, leaving = 8;
    for (int step = steps - 1; step >= 0; step--) {
        int width = widths[step], groups = NUM_STATES >> leaving, best = group;
        float number = numbers[step][lane], least = no_path, target = minima[group * L + lane];
        minima -= (NUM_STATES >> width) * L;
        for (int state = group; state < NUM_STATES && least > target; state += groups) {
            float error = grids[width][state] - number, cost = error * error + minima[(state >> width) * L + lane];
            if (cost < least) least = cost, best = state;
        }
        states[step][lane] = (uint8_t)best;
        group = best >> width, leaving = width;
    }
}
void KVC_NAME(search_trellis, KVC_LEVEL)(
    int steps, const vf *numbers, const uint8_t *widths, const Grids grids, float *minima, uint8_t (*states)[L]) {
    if (!steps) return;
    for (int group = 0; group < NUM_STATES >> widths[0]; group++) store(minima + group * L, splat(group ? no_path : 0));
    for (int step = 0; step < steps; step++) {
        /* Behind the last number all paths go on as one */
        int width = widths[step], leaving = step + 1 < steps ? widths[step + 1] : 8;
        float *after = minima + (NUM_STATES >> width) * L;
        go_on(numbers[step], grids[width], width, leaving, minima, after);
        minima = after;
    }
    for (int lane = 0; lane < L; lane++) go_back(lane, steps, numbers, widths, grids, minima, states);
}

/* Rows of tokens, as `coding.py` lays them out, and their search for a trellis. See `codecs/rows.py`, whose constants of the format these are: a test compares them.

   B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row. A matrix is a head of an item. */
#pragma once
#include "layer.h"

enum { BLOCK = 8, MOST_BLOCKS = MOST_CHANNELS / BLOCK, MOST_WIDTH = 8, NUM_WIDTHS, MOST_TRELLIS_WIDTH = 6, NUM_STATES = 256 };
/* Bytes that are scales: log2 in steps; and below which share of what it would be without error `z.q` says nothing */
enum { SCALE_STEPS = 16, SCALE_OFFSET = 128, LAST_SCALE = 255 };
#define LEAST_GAIN 0.3f
/* Of the search for a trellis: steps in what is 2^-width, and where numbers end for it */
enum { SEARCH_STEPS = 8 };
#define SEARCH_END 6.0f
/* Bounds stand as a search by halves meets them: of every level by the bits that are known, in vectors of their own */
enum { LEVEL4 = 64, LEVEL5 = 80, LEVEL6 = 112, ALL_LEVELS = 192 };

typedef struct {
    float bounds[NUM_WIDTHS][ALL_LEVELS];  /* between sizes of numbers whose codes follow each other, signs aside */
    float scale_bounds[ALL_LEVELS];        /* between 16 steps of scales from 1 on; [15] the one before 2 */
    float scales[256];                     /* of all bytes */
    float coefficients[NUM_WIDTHS][4];     /* of points, and a factor of sums over them */
    float search_points[MOST_TRELLIS_WIDTH + 1][NUM_STATES];
    int32_t multipliers[NUM_WIDTHS];       /* of states, 0 for codes */
} Codebook;
INLINE const Codebook *book_of(const Table *table) { return table->codebook; }

/* The paths of L streams through a trellis; `numbers` [steps] and `grids` are integers below 2^24, `states` [steps][L] */
typedef float Grids[MOST_TRELLIS_WIDTH + 1][NUM_STATES];
void KVC_NAME(search_trellis, KVC_LEVEL)(
    int steps, const vf *numbers, const uint8_t *widths, const Grids grids, float *scratch, uint8_t (*states)[L]);

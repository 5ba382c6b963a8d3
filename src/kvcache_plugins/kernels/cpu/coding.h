/* Rows of tokens, as `compiled.py` lays them out. See `codecs/rows.py`: a test compares its constants with these.

   B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row. A matrix is a head of an item. */
#pragma once
#include "layer.h"

enum { BLOCK = 8, MOST_BLOCKS = MOST_CHANNELS / BLOCK, MOST_WIDTH = 8, NUM_WIDTHS };
/* Bytes that are scales: log2 in steps; and below which share of what it would be without error `z.q` says nothing */
enum { SCALE_STEPS = 16, SCALE_OFFSET = 128, LAST_SCALE = 255 };
#define LEAST_GAIN 0.3f
/* Bounds stand as a search by halves meets them: of every level by the bits that are known, in vectors of their own */
enum { LEVEL4 = 64, LEVEL5 = 80, LEVEL6 = 112, ALL_LEVELS = 192 };

typedef struct {
    float bounds[NUM_WIDTHS][ALL_LEVELS];  /* between sizes of numbers whose codes follow each other, signs aside */
    float scale_bounds[ALL_LEVELS];        /* between 16 steps of scales from 1 on; [15] the one before 2 */
    float scales[256];                     /* of all bytes */
    float coefficients[NUM_WIDTHS][4];     /* of points, and a factor of sums over them */
} Codebook;
INLINE const Codebook *book_of(const Table *table) { return table->codebook; }

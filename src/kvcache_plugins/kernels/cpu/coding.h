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
    int32_t multipliers[NUM_WIDTHS];       /* of states */
} Codebook;

/* A rotary embedding: partners [D]; cosine and signed sine of places in a tile, [D, 2, TILE + 16], and of the first
   positions of tiles from -tiles on, [2 tiles, D, 2] */
typedef struct {
    const int64_t *partners;
    const float *offsets, *origins;
    int64_t tiles;
} Rotary;

typedef struct {
    Tasks tasks;
    int64_t batch, heads, tokens, dim, row_size;
    int64_t kind;                          /* of states that are read; FLOATS are written */
    const void *states;                    /* [B, H, T, D], read */
    float *result;                         /* [B, H, T, D], written */
    uint8_t *rows;                         /* [B, H, T, R] */
    const void *order;                     /* [B, H, D], uint8 or int16 by its size, or 0 */
    int64_t order_size;
    const uint16_t *mean, *deviation;      /* halves: [B, H, D] or 0, [B, H, deviations] */
    int64_t deviations;
    const uint8_t *widths;                 /* [B, H, N] */
    int64_t is_trellis, is_weighted, by_energy, refits;
    const Codebook *codebook;
    int64_t rotation;                      /* channels that are rotated together, or 1 */
    const Rotary *rotary;                  /* or 0 */
    int64_t start;                         /* index of the first token */
    const int64_t *padding;                /* [B] or 0 */
    int64_t is_back;
    float *scratch;                        /* [threads, scratch_size], of trellises */
    int64_t scratch_size, entered;
} Coding;

/* The paths of L streams through a trellis; `numbers` [steps] and `grids` are integers below 2^24, `states` [steps][L] */
typedef float Grids[MOST_TRELLIS_WIDTH + 1][NUM_STATES];
void KVC_NAME(search_trellis, KVC_LEVEL)(
    int steps, const vf *numbers, const uint8_t *widths, const Grids grids, float *scratch, uint8_t (*states)[L]);

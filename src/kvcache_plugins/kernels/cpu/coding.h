/* Constants of stored rows, which are those of `formats/rows.py` (a test compares them), and the
   code book of a format.

   B sequences, H heads, T tokens, D channels, N bands of eight numbers, R bytes of a row. */
#pragma once
#include "layer.h"

enum { BAND = 8, MAX_BANDS = MAX_CHANNELS / BAND, MAX_WIDTH = 8, NUM_WIDTHS };
/* Bytes that stand for scales: log2 in steps. */
enum { SCALE_STEPS = 16, SCALE_OFFSET = 128, LAST_SCALE = 255 };
/* Below that share of its value without error, `z.q` says nothing about a scale. */
#define LEAST_GAIN 0.3f
/* Bounds are in the order of a binary search: those of a depth, by the bits that are known, in
   whole vectors. Depths before the fourth are 16 numbers apart. */
enum { DEPTH5 = 80, DEPTH6 = 112, ALL_DEPTHS = 192 };

typedef struct {
    float bounds[NUM_WIDTHS][ALL_DEPTHS]; /* between magnitudes of successive codes */
    float scale_bounds[ALL_DEPTHS];       /* between 16 steps of scales from 1 on; [15]: before 2 */
    float scales[256];                    /* of all bytes */
    float coefficients[NUM_WIDTHS][4];    /* of levels, and a factor of sums over them */
} Codebook;

INLINE const Codebook *book_of(const RowFormat *format) {
    return (const Codebook *)format->codebook;
}

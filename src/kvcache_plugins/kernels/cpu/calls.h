/* Everything that Python hands to a kernel. `structs.py` reads these declarations, makes ctypes structures of them, and
   checks every tensor before its address goes into one: its dtype is the C type (of halves uint16_t) or what stands in
   front of the shape, and its shape is what stands in brackets, of fields of the structure or sizes of the call; `any`
   is any size. Where no shape stands the address is none of a tensor. Fields are numbers of 8 bytes and addresses. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* ANGLES: of places in a tile, and of some behind it that whole vectors are read with */
enum { ROWS = 4, TILE = 64, ANGLES = 80, MOST_CHANNELS = 640 };
/* Kinds of numbers, and of parts of a layer */
enum { NO_KIND, FLOATS, BFLOATS, HALVES };
enum { PART_EXACT, PART_ROWS, PART_GROUPS };

/* Tasks that threads share: the next one, how many there are, and how many have ended */
typedef struct { int64_t next, count, ended; } Tasks;

/* ---- attention over the parts of a layer ---- */
typedef struct {
    int64_t kind;
    int64_t length;                 /* tokens in use, or the most of any sequence */
    const int64_t *lengths;         /* [batch]; tokens in use of each, or 0 */
    const float *mask;              /* [any, any, any, any]; added to the scores; sizes are 1 or those of batch, query heads, queries; fewer columns than tokens hide nothing of the others */
    int64_t mask_shape[4];
    const void *stored;             /* of its kind */
} Part;

typedef struct {
    Tasks tasks;
    int64_t batch, heads, groups, queries, key_dim, value_dim;
    int64_t runs;                   /* of a unit */
    int64_t states_kind;            /* of queries and result */
    double scale;
    const void *query;              /* [batch, heads * groups, queries, key_dim] */
    void *result;                   /* [batch, heads * groups, queries, value_dim] */
    float *partial;                 /* [units, runs, ROWS, value_dim + 2] */
    int64_t num_parts;
    const Part *parts;
} Call;

typedef struct {
    int64_t kind, capacity;
    const void *keys;               /* float32 or bfloat16 or float16 [batch, heads, capacity, key_dim] */
    const void *values;             /* float32 or bfloat16 or float16 [batch, heads, capacity, value_dim] */
    const void *newest_key, *newest_value; /* to be written as the last token in use, or 0 */
} Exact;

/* A rotary embedding: pairs of channels that are turned together, some of them -1, for no channel, and at the end such as
   are not turned; cosines and signed sines of the first of a pair at places in a tile and at the first positions of tiles */
typedef struct {
    int64_t num_turned, num_pairs, all_pairs, tiles;
    const int32_t *pairs;           /* [all_pairs, 2] */
    const float *near;              /* [TILE, 2, all_pairs] */
    const float *far;               /* [tiles, 2, all_pairs] */
    const float *places;            /* [all_pairs, 2, ANGLES]; as `near` */
} Rotary;

/* How tokens are coded as rows: described once, while a table lives */
typedef struct {
    int64_t batch, heads, channels;
    int64_t dim;                    /* numbers of a token that are coded: channels, or components in a basis */
    int64_t row_size, blocks, is_weighted, by_energy, refits;
    const void *codebook;           /* float32 [any]; see `Codebook` */
    const uint8_t *widths;          /* [batch, heads, blocks] */
    const void *order;              /* uint8 or int16 [batch, heads, dim]; or 0 */
    int64_t order_size;
    const uint16_t *mean;           /* [batch, heads, channels]; or 0 */
    const uint16_t *deviation;      /* [batch, heads, deviations] */
    int64_t deviations, rotation;   /* one of a head, or of every number; channels that are rotated together, or 1 */
    const int8_t *basis;            /* [heads, channels, channels]; or 0; see `codecs/basis.py` */
    const int8_t *inverse;          /* [heads, dim, channels] */
    const float *steps, *factors;   /* [heads, channels] */
} Table;

typedef struct {
    const Table *table;
    const uint8_t *rows;            /* [batch, heads, capacity, size] */
    int64_t capacity, size;
    /* Without `rows`: every sequence's rows stand in pages of one memory, `[heads, page_tokens, size]` at `page_start` and
       a number of strides of `page_stride` bytes */
    const uint8_t *memory;          /* [memory_size] */
    const int64_t *pages;           /* [batch, most_pages]; numbers of pages */
    int64_t memory_size, num_pages, most_pages, page_tokens, page_start, page_stride;
} RowSide;

typedef struct {
    RowSide keys, values;
    const Rotary *rotary;
    int64_t first_position;
    const int64_t *padding;         /* [batch]; or 0 */
    /* Bases of keys by four channels of pairs, times steps of components over factors of channels, or 0; and means */
    const float *key_basis;         /* [heads, all_pairs // 2, num_components, 4] */
    const float *key_mean;          /* [heads, all_pairs, 2] */
    /* The same bases in words, two components a lane, without these */
    const int32_t *key_words;       /* [heads, all_pairs // 4, (num_components + 1) // 2, 8] */
    const float *key_steps;         /* [heads, num_components] */
    const float *key_factors;       /* [heads, all_pairs, 2]; one over them */
} Rows;

typedef struct {
    const uint8_t *codes;           /* [batch, heads, chunks, chunk_length, row_size] */
    const uint16_t *scale, *zero;   /* [batch, scale_heads, chunks, scale_rows, scale_columns] */
    const uint16_t *low_rank_a;     /* [batch, heads, chunks, chunk_length, rank] */
    const uint16_t *low_rank_b;     /* [batch, heads, chunks, dim, rank] */
    const void *outlier_indices;    /* int16 or int32 [batch, 1, chunks, num_outliers] */
    const uint16_t *outlier_values; /* [batch, 1, chunks, num_outliers] */
    const int32_t *outlier_offsets; /* [batch, 1, chunks, num_offsets] */
    int64_t dim, nbits, row_size, by_channel, groups, scale_heads, rotation_size, rank;
    int64_t num_outliers, num_offsets, is_wide, channel_bits;
    int64_t batch, heads, chunks, chunk_length, scale_rows, scale_columns;
} GroupSide;
typedef struct {
    int64_t chunks, chunk_length;
    const GroupSide *keys, *values;
} Groups;

/* ---- rows coded and decoded ---- */
typedef struct {
    Tasks tasks;
    int64_t batch, heads, tokens, channels;
    int64_t kind;                   /* of states that are read; FLOATS are written */
    const void *states;             /* [batch, heads, tokens, channels], read; numbers of a token follow each other */
    int64_t strides[3];             /* of its batch, heads and tokens, in numbers */
    float *result;                  /* [batch, heads, tokens, channels]; written */
    const void *source;             /* instead of states, a `Coding` of the same numbers in finer rows; or 0 */
    uint8_t *rows;                  /* [batch, heads, capacity, row_size] */
    int64_t capacity, used;         /* and how many are in front of those that are written */
    const uint8_t *moved;           /* [batch, heads, moved_capacity, row_size]; storage that they come from, or 0 */
    int64_t moved_capacity, moved_first;
    const Table *table;             /* or 0, where nothing is coded */
    const Rotary *rotary;           /* or 0 */
    int64_t start;                  /* index of the first token */
    const int64_t *padding;         /* [batch]; or 0 */
    int64_t is_back;
    const uint8_t *valid;           /* bool [batch, tokens]; tokens that count, or 0 */
    float *means, *variances;       /* each [batch, heads, channels]; written */
    double limit;                   /* where numbers are too large to be coded, if that is to be told */
    int64_t is_unfit;               /* told: whether a token has NaN, such a number, or the last scale */
} Coding;
typedef struct {
    Tasks tasks;                    /* heads of all items, of one coding after the other */
    Coding *codings;                /* of keys and of values, and perhaps of such as become older, up to TILE tokens each */
    int64_t left;                   /* tokens behind those of the first two, which move to the front where all fit */
    int64_t is_unfit;
} Appended;

/* ---- tokens of which some are chosen ---- */
/* The newest tokens, which follow each other in every head */
typedef struct {
    int64_t length, kind, start;    /* and the column of the mask of the first */
    int64_t key_strides[2], value_strides[2]; /* over items and heads, in bytes */
    const char *keys, *values;
} Window;

/* A row of a mask for every item; `numbers` may be 0 */
typedef struct {
    int64_t columns, is_boolean;
    const void *numbers;            /* bool or float32 [batch, columns]; floats are added */
} Mask;

typedef struct {
    Tasks tasks;                    /* heads of all items */
    int64_t batch, heads, num_slots, num_pages, page_tokens, row_dim, row_size; /* numbers and bytes of a row */
    const char *const *pages;       /* each [batch, heads, page_tokens, row_dim] */
    const int64_t *slots;           /* [batch, heads, num_slots] */
    char *result;                   /* [batch, heads, num_slots, row_dim] */
} Copies;

/* A step of a new token that attends to some: scores of all tokens, the choice, attention to what was chosen and to a
   window. Each of these kernels reads what it needs. */
typedef struct {
    Tasks tasks;                    /* runs of units; heads; units */
    int64_t threads;                /* that have come */
    int64_t batch, heads, groups, key_dim, value_dim, most_threads;
    int64_t length, runs;           /* tokens to choose from, and tasks that score those of a unit */
    double scale;
    const float *query;             /* [batch, heads, groups, key_dim] */
    float *scores;                  /* [batch, heads, groups, length] */
    int64_t limit;                  /* tokens that there is room for in a choice */
    int64_t *slots;                 /* [batch, heads, limit] */
    int64_t *counts;                /* [batch, heads] */
    float *result;                  /* [batch, heads, groups, value_dim] */
    Window window;
    Mask mask;
    const int64_t *columns;         /* [batch, heads, limit]; of the mask, or 0 if slots are these */
    /* Stored tokens: keys and values side by side, or values alone of tokens whose keys are rows of tables */
    int64_t num_pages, page_tokens, row_dim;
    const char *const *pages;       /* each [batch, heads, page_tokens, row_dim] */
    /* Scores by codes: fields of a byte, bytes of a token; queries are multiplied with the spread, if any */
    int64_t fields, width, capacity;
    const uint8_t *codes;           /* [batch, heads, capacity, width] */
    const uint16_t *code_scales;    /* [batch, heads, capacity] */
    const float *spread;            /* [batch, heads, key_dim] */
    /* The choice. Tokens before `first` and from `newest` on are forced; `cap` is the most unless more are, and `least` the
       weight of others. Beside them are scores of tokens that are attended to anyway: without those, and with queries, the
       window is scored, whose last token is written into it if it is given here. What is chosen is counted. */
    int64_t first, newest, cap, chosen;
    double least;
    int64_t num_resident;
    const float *resident;          /* [batch, heads, groups, num_resident] */
    const char *newest_key, *newest_value;
    int64_t scratch_size;
    uint8_t *scratch;               /* [most_threads, scratch_size]; two rows of floats in whole vectors, two of pairs, scores of the window */
    /* Rows of tables, or 0 */
    const Rows *rows;               /* with the rows of keys */
    int64_t num_sinks;
    const int64_t *first_sinks;     /* [batch]; slot of every item's first */
    const char *sink_keys;          /* [batch, heads, num_sinks, key_dim]; as the window's */
    const char *sink_values;        /* [batch, heads, num_sinks, value_dim] */
    int64_t *coded;                 /* [most_threads, 2, limit]; slots of tokens that are not exact */
    int64_t *ends;                  /* [most_threads, (length + TILE - 1) // TILE] */
} Choice;

typedef struct {
    Tasks tasks;                    /* rows */
    int64_t threads;                /* that have come */
    int64_t rows, length, limit, most_threads; /* numbers of a row, and how many are asked for */
    const float *numbers;           /* [rows, length] */
    const float *least;             /* [rows] */
    float *values;                  /* [rows, limit] */
    int64_t *places;                /* [rows, limit] */
    int64_t *pairs;                 /* [most_threads, 2, length + 1]; see `Pair` */
} Largest;

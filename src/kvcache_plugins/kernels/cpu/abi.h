/* Structures that Python passes to kernels, and what it checks before it does.

   `c_structs.py` reads these declarations, one field a line. SHAPE makes a pointer the address of a
   tensor: contiguous, on the CPU, of that shape, and of the dtype that its C type names, or of one
   of DTYPES. SHAPES is the same for the addresses of several tensors. Sizes are constants, fields
   of the structure, or sizes that the caller names; `any` is any size or dtype. A pointer without a
   shape is 0, or an address that Python answers for. Each field has 8 bytes. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define SHAPE(...)
#define SHAPES(...)
#define DTYPES(...)

/* A float16 as it is stored. */
typedef uint16_t half;

enum {
    BLOCK_QUERIES = 4,              /* the most queries of a query block */
    TILE = 64,                      /* tokens */
    ANGLES = 80,                    /* offsets in a tile, and some more for whole vectors */
    MAX_CHANNELS = 640
};

/* Dtypes of states. */
enum {
    F32 = 1,
    BF16 = 2,
    F16 = 3
};

enum {
    PART_EXACT = 0,
    PART_ROWS = 1,
    PART_GROUPS = 2
};

/* Tasks that threads share: the next one, how many there are, and how many have ended. */
typedef struct {
    int64_t next;
    int64_t count;
    int64_t ended;
} Tasks;

/* ---- formats of stored tokens ---- */

/* A rotary embedding: pairs of channels that are rotated, then channels that are not, two a pair;
   -1 stands for no channel. Cosines and sines, with the sign of the pair's first channel, are those
   of offsets in a tile (fine) and of the first positions of tiles (coarse). */
typedef struct {
    int64_t num_rotated;            /* pairs */
    int64_t num_pairs;
    int64_t padded_pairs;           /* in whole vectors */
    int64_t tiles;
    const int32_t *pairs SHAPE(padded_pairs, 2);
    const float *fine SHAPE(TILE, 2, padded_pairs);
    const float *coarse SHAPE(tiles, 2, padded_pairs);
    const float *fine_by_pair SHAPE(padded_pairs, 2, ANGLES);
} Rotary;

/* The format of one side's rows, see `formats/rows.py`. */
typedef struct {
    int64_t batch;
    int64_t heads;
    int64_t channels;
    int64_t num_coefficients;       /* channels, or components in a basis */
    int64_t row_size;
    int64_t bands;
    int64_t is_weighted;
    int64_t by_energy;
    int64_t num_refits;
    const float *codebook SHAPE(any); /* a `Codebook` */
    const uint8_t *widths SHAPE(batch, heads, bands);
    int64_t order_size;             /* bytes of an entry */
    const void *order SHAPE(batch, heads, num_coefficients) DTYPES(uint8, int16); /* or 0 */
    const half *mean SHAPE(batch, heads, channels); /* or 0 */
    int64_t num_deviations;         /* of a head: 1, or one a channel */
    const half *deviation SHAPE(batch, heads, num_deviations);
    int64_t rotation_size;          /* channels of a Hadamard matrix, 1 without */
    const int8_t *basis SHAPE(heads, channels, channels); /* or 0 */
    const int8_t *inverse SHAPE(heads, num_coefficients, channels);
    const float *steps SHAPE(heads, channels);
    const float *factors SHAPE(heads, channels);
} RowFormat;

/* One side of quantized chunks, see `formats/groups.py`. */
typedef struct {
    int64_t batch;
    int64_t heads;
    int64_t chunks;
    int64_t chunk_length;
    int64_t dim;
    int64_t nbits;
    int64_t row_size;
    int64_t by_channel;             /* groups are of a channel, else of a token */
    int64_t groups;                 /* of a channel's chunk, or of a token */
    int64_t scale_heads;
    int64_t scale_rows;
    int64_t scale_columns;
    int64_t rotation_size;
    int64_t rank;
    int64_t num_outliers;
    int64_t num_offsets;
    int64_t is_wide;                /* indices of outliers have 32 bits, else 16 */
    int64_t channel_bits;           /* of an index of an outlier */
    const uint8_t *codes SHAPE(batch, heads, chunks, chunk_length, row_size);
    const half *scale SHAPE(batch, scale_heads, chunks, scale_rows, scale_columns);
    const half *zero SHAPE(batch, scale_heads, chunks, scale_rows, scale_columns);
    const half *low_rank_a SHAPE(batch, heads, chunks, chunk_length, rank);
    const half *low_rank_b SHAPE(batch, heads, chunks, dim, rank);
    const void *outlier_indices SHAPE(batch, 1, chunks, num_outliers) DTYPES(int16, int32);
    const half *outlier_values SHAPE(batch, 1, chunks, num_outliers);
    const int32_t *outlier_offsets SHAPE(batch, 1, chunks, num_offsets);
} QuantizedChunks;

/* ---- attention over the parts of a layer ---- */

/* Tokens of a layer that are stored in one form. */
typedef struct {
    int64_t kind;                   /* PART_EXACT, PART_ROWS or PART_GROUPS */
    int64_t length;                 /* tokens in use, or the most of any sequence */
    const int64_t *lengths SHAPE(batch); /* tokens in use of each sequence, or 0 */
    int64_t mask_shape[4];          /* 1 or batch, query heads, queries; columns */
    const float *mask SHAPE(any, any, any, any); /* added to scores; missing columns add nothing */
    const void *stored;             /* an ExactPart, a RowPart or a GroupPart */
} Part;

/* Arguments of `attend`. */
typedef struct {
    Tasks tasks;                    /* splits of query blocks */
    int64_t batch;
    int64_t heads;
    int64_t query_groups;           /* query heads a key/value head */
    int64_t queries;
    int64_t key_dim;
    int64_t value_dim;
    int64_t splits;                 /* of a query block */
    int64_t dtype;                  /* of queries and result */
    double scale;
    const void *query;              /* [batch, query heads, queries, key_dim] */
    void *result;                   /* [batch, query heads, queries, value_dim] */
    float *partials SHAPE(blocks, splits, BLOCK_QUERIES, partial_size);
    int64_t num_parts;
    const Part *parts;
} AttentionArgs;

/* Exact tokens. */
typedef struct {
    int64_t dtype;
    int64_t capacity;
    const void *keys SHAPE(batch, heads, capacity, key_dim) DTYPES(float32, bfloat16, float16);
    const void *values SHAPE(batch, heads, capacity, value_dim) DTYPES(float32, bfloat16, float16);
    const void *newest_key;         /* to be written as the last token in use, or 0 */
    const void *newest_value;
} ExactPart;

/* Rows of keys or of values: one run of rows a batch-head, or, if `rows` is 0, pages of one memory.
   The rows of page i, [heads, page_tokens, row_size], start at byte page_start + i page_stride. */
typedef struct {
    const RowFormat *format;
    int64_t row_size;
    int64_t capacity;
    const uint8_t *rows SHAPE(batch, heads, capacity, row_size);
    int64_t memory_size;
    const uint8_t *memory SHAPE(memory_size);
    int64_t num_pages;
    int64_t max_pages;              /* of a sequence */
    const int64_t *pages SHAPE(batch, max_pages); /* indices of pages */
    int64_t page_tokens;
    int64_t page_start;
    int64_t page_stride;
} RowSide;

/* Tokens as rows of formats. */
typedef struct {
    RowSide keys;
    RowSide values;
    const Rotary *rotary;
    int64_t first_position;
    const int64_t *padding SHAPE(batch); /* or 0 */
    /* In a basis: its vectors times steps over factors, by four channels of pairs. */
    const float *key_basis SHAPE(heads, basis_runs, num_coefficients, 4);
    const float *key_mean SHAPE(heads, padded_pairs, 2);
    /* With AVX-512 in its place: vectors as words, two components a lane; steps; 1 / factors. */
    const int32_t *key_words SHAPE(heads, word_runs, word_lanes, 8);
    const float *key_steps SHAPE(heads, num_coefficients);
    const float *key_factors SHAPE(heads, padded_pairs, 2);
} RowPart;

/* Tokens as quantized chunks. */
typedef struct {
    int64_t chunks;
    int64_t chunk_length;
    const QuantizedChunks *keys;
    const QuantizedChunks *values;
} GroupPart;

/* ---- rows encoded and decoded, rotary embeddings, moments ---- */

/* Sizes of the tokens of a call. */
typedef struct {
    int64_t batch;
    int64_t heads;
    int64_t tokens;
    int64_t channels;
} TokenSizes;

/* States that are read, with strides over sequences, heads and tokens in numbers. The numbers of a
   token are contiguous. Python answers for the address. */
typedef struct {
    int64_t dtype;
    int64_t strides[3];
    const void *data;
} States;

/* Positions of tokens: the first one's is `first`, less the padding of its sequence. They are not
   read without a rotary embedding. */
typedef struct {
    const Rotary *rotary;           /* or 0 */
    int64_t first;
    const int64_t *padding SHAPE(batch); /* or 0 */
} TokenPositions;

/* Rows that are written, behind the first `used` ones. If `moved` is another storage, these are
   copied from it first, from its row `moved_first` on. */
typedef struct {
    const RowFormat *format;
    int64_t capacity;
    uint8_t *rows SHAPE(batch, heads, capacity, row_size);
    int64_t used;
    int64_t moved_capacity;
    int64_t moved_first;
    const uint8_t *moved SHAPE(batch, heads, moved_capacity, row_size); /* or 0 */
} RowTarget;

/* Arguments of `encode_rows`. */
typedef struct {
    Tasks tasks;                    /* ranges of tokens of batch-heads */
    TokenSizes sizes;
    States states;
    TokenPositions positions;
    RowTarget target;
    double limit;                   /* of magnitudes, or 0 */
    int64_t overflow;               /* written: NaN, beyond `limit`, or the largest scale */
} EncodeArgs;

/* Arguments of `requantize_rows`, which encodes rows of a format with more bits anew. */
typedef struct {
    Tasks tasks;
    TokenSizes sizes;
    const RowFormat *source_format;
    int64_t source_capacity;
    const uint8_t *source SHAPE(batch, heads, source_capacity, source_row_size);
    RowTarget target;
} RequantizeArgs;

/* Arguments of `decode_rows`. */
typedef struct {
    Tasks tasks;
    TokenSizes sizes;
    const RowFormat *format;
    int64_t capacity;
    const uint8_t *rows SHAPE(batch, heads, capacity, row_size);
    TokenPositions positions;
    float *result SHAPE(batch, heads, tokens, channels);
} DecodeArgs;

/* Arguments of `apply_rope`. */
typedef struct {
    Tasks tasks;
    TokenSizes sizes;
    States states;
    TokenPositions positions;
    int64_t inverse;
    float *result SHAPE(batch, heads, tokens, channels);
} RopeArgs;

/* Arguments of `channel_moments`: means and variances over valid tokens. */
typedef struct {
    Tasks tasks;                    /* batch-heads */
    TokenSizes sizes;
    States states;
    TokenPositions positions;       /* of a rotary embedding that is undone first */
    const uint8_t *valid SHAPE(batch, tokens) DTYPES(bool); /* or 0 */
    float *means SHAPE(batch, heads, channels);
    float *variances SHAPE(batch, heads, channels);
} MomentsArgs;

/* Arguments of `append_rows`, which encodes up to TILE keys and values and then moves the tokens
   behind them to the front of their states. Tasks may go on to requantize the oldest rows. If a
   token overflows, no state moves, and the caller drops the new rows. */
typedef struct {
    Tasks tasks;                    /* batch-heads of one encoding after the other */
    EncodeArgs encode[2];           /* keys, values */
    RequantizeArgs requantize[2];
    int64_t remaining;              /* tokens behind those that are encoded */
    int64_t overflow;               /* written */
} AppendArgs;

/* ---- attention to selected tokens ---- */

/* The queries of one new token. */
typedef struct {
    int64_t batch;
    int64_t heads;
    int64_t query_groups;
    int64_t key_dim;
    double scale;
    const float *data SHAPE(batch, heads, query_groups, key_dim);
} TokenQueries;

/* The newest tokens, which are contiguous in every head. */
typedef struct {
    int64_t length;
    int64_t dtype;
    int64_t start;                  /* column of the mask of the first */
    int64_t key_strides[2];         /* over sequences and heads, in bytes */
    int64_t value_strides[2];
    const char *keys;
    const char *values;
} Window;

/* A row of a mask for every sequence, or none. */
typedef struct {
    int64_t columns;
    int64_t is_boolean;
    const void *data SHAPE(batch, columns) DTYPES(bool, float32); /* added if floats */
} Mask;

/* Slots of the tokens that each batch-head attends to. */
typedef struct {
    int64_t limit;
    int64_t *slots SHAPE(batch, heads, limit);
    int64_t *counts SHAPE(batch, heads);
} SelectedSlots;

/* Stored tokens to select from: keys and values side by side in pages, or, with `rows`, keys as
   rows of formats and values as rows in pages. Then the first tokens of a sequence, from its first
   slot on, are exact. Python answers for the dtype of exact ones, which is the window's. */
typedef struct {
    int64_t length;
    int64_t num_pages;
    int64_t page_tokens;
    int64_t row_dim;                /* numbers, or bytes of a row of values */
    const char *const *pages SHAPES(batch, heads, page_tokens, row_dim) DTYPES(any);
    const RowPart *rows;            /* or 0 */
    int64_t num_sinks;
    const int64_t *first_sinks SHAPE(batch);
    const char *sink_keys SHAPE(batch, heads, num_sinks, key_dim) DTYPES(any);
    const char *sink_values SHAPE(batch, heads, num_sinks, value_dim) DTYPES(any);
} SelectableTokens;

/* Arguments of `score_codes`: codes of `width` bytes a token, a byte of which has `fields`
   codes. */
typedef struct {
    Tasks tasks;                    /* splits of query blocks */
    const TokenQueries *queries;
    int64_t length;
    int64_t splits;                 /* of a query block */
    int64_t fields;
    int64_t width;
    int64_t capacity;
    const uint8_t *codes SHAPE(batch, heads, capacity, width);
    const half *code_scales SHAPE(batch, heads, capacity);
    const float *spread SHAPE(batch, heads, key_dim); /* factors of queries, or 0 */
    float *scores SHAPE(batch, heads, query_groups, length);
} CodeScoreArgs;

/* Arguments of `score_rows`. */
typedef struct {
    Tasks tasks;                    /* splits of query blocks */
    const TokenQueries *queries;
    int64_t length;
    int64_t splits;                 /* of a query block */
    const RowPart *rows;
    float *scores SHAPE(batch, heads, query_groups, length);
} RowScoreArgs;

/* Arguments of `select_by_weight`, which selects the tokens of the largest weights. Beside them are
   resident tokens, which are attended to in any case. Either their scores are given, or they are
   the window: then the newest token is written into it, and the queries score it. */
typedef struct {
    Tasks tasks;                    /* batch-heads */
    int64_t threads_entered;
    int64_t max_threads;
    int64_t batch;
    int64_t heads;
    int64_t query_groups;
    int64_t length;
    int64_t first;                  /* tokens before it are forced */
    int64_t newest;                 /* tokens from it on are forced */
    int64_t cap;                    /* tokens at most, unless more are forced */
    double least;                   /* weight of a token that is not forced */
    const float *scores SHAPE(batch, heads, query_groups, length);
    int64_t num_resident;
    const float *resident SHAPE(batch, heads, query_groups, num_resident);
    const TokenQueries *queries;    /* or 0 */
    int64_t value_dim;
    const Window *window;
    const char *newest_key;         /* to be written as the window's last token, or 0 */
    const char *newest_value;
    const SelectedSlots *selected;  /* written, forced tokens first, then by falling weight */
    int64_t num_selected;           /* written: of all batch-heads */
    int64_t scratch_size;
    uint8_t *scratch SHAPE(max_threads, scratch_size); /* see `SelectionScratch` */
} SelectionArgs;

/* Arguments of `attend_selected`, which attends to selected tokens and to the window. */
typedef struct {
    Tasks tasks;                    /* query blocks */
    int64_t threads_entered;
    int64_t max_threads;
    const TokenQueries *queries;
    int64_t value_dim;
    const SelectableTokens *tokens;
    const SelectedSlots *selected;
    const int64_t *columns SHAPE(batch, heads, limit); /* of the mask, or 0 if they are the slots */
    const Window *window;
    const Mask *mask;               /* or 0 */
    int64_t *coded SHAPE(max_threads, 2, limit); /* slots of tokens that are rows, or 0 */
    int64_t *tile_ends SHAPE(max_threads, tiles); /* or 0 */
    float *result SHAPE(batch, heads, query_groups, value_dim);
} SelectedAttentionArgs;

/* Arguments of `gather_rows`, which copies the rows in slots. */
typedef struct {
    Tasks tasks;                    /* batch-heads */
    int64_t batch;
    int64_t heads;
    int64_t num_slots;
    int64_t num_pages;
    int64_t page_tokens;
    int64_t row_dim;
    int64_t row_size;               /* bytes */
    const char *const *pages SHAPES(batch, heads, page_tokens, row_dim) DTYPES(any);
    const int64_t *slots SHAPE(batch, heads, num_slots);
    char *result SHAPE(batch, heads, num_slots, row_dim) DTYPES(any);
} GatherArgs;

/* Arguments of `topk`: the largest numbers of every row and their indices, in order. */
typedef struct {
    Tasks tasks;                    /* rows */
    int64_t threads_entered;
    int64_t max_threads;
    int64_t rows;
    int64_t length;
    int64_t limit;
    const float *numbers SHAPE(rows, length);
    const float *least SHAPE(rows); /* smaller numbers may be left out */
    float *values SHAPE(rows, limit);
    int64_t *indices SHAPE(rows, limit);
    int64_t *scratch SHAPE(max_threads, 2, entries); /* two lists of `SortEntry` */
} TopKArgs;

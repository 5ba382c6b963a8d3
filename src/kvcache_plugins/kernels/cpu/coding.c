/* Encodes and decodes rows of tokens.

   Lanes are tokens of a head. A channel has one width in all of them, so a code is found by a
   binary search of bounds in registers. Rotary embedding, Hadamard's rotation and the change of
   basis are done, or undone, in the same pass.

   No index in memory is trusted: see `load_head`. Python checks lengths and sizes. */
#include "coding.h"
#include "token_vectors.h"

enum { BASIS_ROWS = 8 };

/* The format of a head's rows, with numbers in the order of rows. */
typedef struct {
    int num_coefficients, channels, bands;
    int num_with_bits;              /* numbers of bands that have bits */
    int channel_of[MAX_CHANNELS];
    uint8_t widths[MAX_BANDS];
    float means[MAX_CHANNELS];
    float deviations[MAX_CHANNELS];
    float inverses[MAX_CHANNELS];   /* 1 / deviations */
    float centres[MAX_CHANNELS];    /* means to subtract before a rotation or a change of basis */
    float units[MAX_CHANNELS];      /* of products with the inverse */
    const int8_t *basis, *inverse;
    const float *steps, *factors;
} HeadFormat;

typedef uint32_t Bits[MAX_BANDS][2][L];

INLINE vf larger_of(vf a, float b) { return larger(a, splat(b)); }

INLINE vf magnitude_of(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf gather(const float *table, vu index) {
    vf v;
    for (int i = 0; i < L; i++) v[i] = table[index[i]];
    return v;
}

/* Bounds of a depth, which has 2^depth of them. */
INLINE vf bound_at(const float *bounds, vu index, int depth) {
    if (depth == 0) return splat(bounds[0]);
#if L == 8
    if (depth < 4) {
        __m256 table = _mm256_loadu_ps(bounds + 16 * depth);
        return (vf)_mm256_permutevar8x32_ps(table, (__m256i)index);
    }
#endif
    if (depth <= 4) return look_up16(bounds + 16 * depth, index);
    return gather(bounds + (depth == 5 ? DEPTH5 : DEPTH6), index);
}

/* Counts the bounds below positive numbers, which compare like their bits. */
INLINE vu count_below(vi x, const float *bounds, int depths) {
    vi found = {0};
    for (int depth = 0; depth < depths; depth++)
        found = found + found - (x > (vi)bound_at(bounds, (vu)found, depth));
    return (vu)found;
}

/* Levels of codes of 2^width, by (2 code + 1) / 2^width - 1. */
INLINE vf level_at(vf centred, const float *p) {
    vf square = centred * centred;
    return centred * (p[0] + square * (p[1] + square * p[2]));
}

/* The bytes that scales are stored as: log2 in steps of 1/16. */
static vu stored_scales(const Codebook *book, vf scale) {
    vi bits = (vi)larger_of(scale, 1e-6f);
    vf mantissa = (vf)((bits & 0x7fffff) | 0x3f800000);
    vi step = (vi)count_below((vi)mantissa, book->scale_bounds, 4);
    step -= mantissa > splat(book->scale_bounds[15]);
    vi stored = ((bits >> 23) - 127) * SCALE_STEPS + step + SCALE_OFFSET;
    stored = (stored | (stored > LAST_SCALE)) & LAST_SCALE & (stored > 0);
    return (vu)(stored & (scale == scale));
}

/* The scale that fits levels found with `scale`: from sums of squared numbers, of numbers times
   levels, and of squared levels. */
INLINE vf fitting_scale(const RowFormat *format, vf energy, vf over, vf under, vf scale) {
    if (format->is_weighted) return over / larger_of(under, 1e-9f);
    return blend(over > energy / scale * LEAST_GAIN, energy / over, scale);
}

INLINE float weight_of(const RowFormat *format, int width) {
    return format->is_weighted || format->by_energy ? (float)(1 << 2 * width) : 1;
}

INLINE int64_t channel_at(const RowFormat *format, int64_t entry) {
    if (format->order_size == 1) return ((const uint8_t *)format->order)[entry];
    return ((const int16_t *)format->order)[entry];
}

static void load_basis(const RowFormat *format, int64_t item, HeadFormat *head) {
    int64_t first = item * format->channels;
    head->basis = format->basis + first * format->channels;
    head->inverse = format->inverse + item * format->num_coefficients * format->channels;
    head->steps = format->steps + first;
    head->factors = format->factors + first;
    for (int i = 0; i < head->num_coefficients; i++) {
        const int8_t *vector = head->basis + i * head->channels;
        const int8_t *inverse = head->inverse + i * head->channels;
        int32_t product = 0;
        for (int d = 0; d < head->channels; d++) product += vector[d] * inverse[d];
        head->units[i] = (float)product * head->steps[i];
    }
}

static void load_head(const RowFormat *format, int64_t bh, HeadFormat *head) {
    int is_rotated = format->rotation_size > 1 || format->basis;
    const half *mean = format->mean ? format->mean + bh * format->channels : 0;
    const half *deviation = format->deviation + bh * format->num_deviations;
    head->num_coefficients = (int)format->num_coefficients;
    head->channels = (int)format->channels;
    head->bands = (int)((format->num_coefficients + BAND - 1) / BAND);
    head->num_with_bits = 0;
    head->basis = 0;
    for (int i = 0; i < head->num_coefficients; i++) {
        int64_t entry = bh * format->num_coefficients + i;
        int64_t channel = format->order ? channel_at(format, entry) : i;
        /* A corrupt channel order stays in bounds. */
        if (channel < 0 || channel >= format->num_coefficients) channel = 0;
        float divisor = float_of_half(deviation[format->num_deviations > 1 ? channel : 0]);
        head->channel_of[i] = (int)channel;
        head->means[i] = mean && !is_rotated ? float_of_half(mean[channel]) : 0;
        head->deviations[i] = divisor;
        head->inverses[i] = divisor > 0 ? 1 / divisor : 0;
    }
    for (int d = 0; d < head->channels; d++)
        head->centres[d] = mean && is_rotated ? float_of_half(mean[d]) : 0;
    if (format->basis) load_basis(format, bh % format->heads, head);
    int64_t rest = format->row_size - 1;
    for (int v = 0; v < head->bands; v++) {
        int width = format->widths[bh * head->bands + v];
        /* Widths that no code has, or that reach beyond the row, count as 0. */
        if (width > MAX_WIDTH || width > rest) width = 0;
        head->widths[v] = (uint8_t)width;
        rest -= width;
        head->num_with_bits += width ? BAND : 0;
    }
}

/* Applies Hadamard's transform to every `size` channels: two steps at a time, as they wait for
   memory. */
static void transform_tokens(int dim, int size, vf *x) {
    int half_size = 1;
    float factor = 1 / sqrtf((float)size);
    for (; half_size * 2 < size; half_size *= 4)
        for (int start = 0; start < dim; start += 4 * half_size)
            for (int d = start; d < start + half_size; d++) {
                vf *y = x + d;
                vf a = y[0] + y[half_size];
                vf b = y[0] - y[half_size];
                vf e = y[2 * half_size] + y[3 * half_size];
                vf f = y[2 * half_size] - y[3 * half_size];
                y[0] = a + e;
                y[half_size] = b + f;
                y[2 * half_size] = a - e;
                y[3 * half_size] = b - f;
            }
    for (int d = 0; d < dim; d += 2 * half_size)
        for (int i = d; half_size < size && i < d + half_size; i++) {
            vf a = x[i];
            vf b = x[i + half_size];
            x[i] = a + b;
            x[i + half_size] = a - b;
        }
    for (int d = 0; d < dim; d++) x[d] *= factor;
}

/* Converts up to BASIS_ROWS rows of a matrix of bytes to floats, with zeros behind them. */
INLINE void convert_rows(const int8_t *matrix, int count, int size, float (*rows)[MAX_CHANNELS]) {
    for (int r = 0; r < BASIS_ROWS; r++)
        for (int d = 0; d < size; d++) rows[r][d] = r < count ? (float)matrix[r * size + d] : 0;
}

/* Adds components, times `sign`, to channels times their factors. */
static void add_components(const HeadFormat *head, const vf *components, float sign, vf *x) {
    float rows[BASIS_ROWS][MAX_CHANNELS];
    for (int i = 0; i < head->num_coefficients; i += BASIS_ROWS) {
        int count = (int)min_of(head->num_coefficients - i, BASIS_ROWS);
        vf y[BASIS_ROWS] = {{0}};
        convert_rows(head->basis + i * head->channels, count, head->channels, rows);
        for (int r = 0; r < count; r++) y[r] = components[i + r] * (head->steps[i + r] * sign);
        for (int d = 0; d < head->channels; d++) {
            vf sum = x[d];
            for (int r = 0; r < BASIS_ROWS; r++) sum += y[r] * rows[r][d];
            x[d] = sum;
        }
    }
}

/* Computes the components of channels, which are overwritten. The rest that the first components
   leave of the channels is projected once more, as the inverse is rounded. */
static void find_components(const HeadFormat *head, vf *x, vf *components) {
    float rows[BASIS_ROWS][MAX_CHANNELS];
    for (int d = 0; d < head->channels; d++) x[d] *= head->factors[d];
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < head->num_coefficients; i += BASIS_ROWS) {
            int count = (int)min_of(head->num_coefficients - i, BASIS_ROWS);
            vf sums[BASIS_ROWS] = {{0}};
            convert_rows(head->inverse + i * head->channels, count, head->channels, rows);
            for (int d = 0; d < head->channels; d++)
                for (int r = 0; r < BASIS_ROWS; r++) sums[r] += x[d] * rows[r][d];
            for (int r = 0; r < count; r++) {
                vf before = pass ? components[i + r] : (vf){0};
                components[i + r] = before + sums[r] / head->units[i + r];
            }
        }
        if (!pass) add_components(head, components, -1, x);
    }
}

/* ---- encoding ---- */

/* Makes numbers of variance 1 in the order of rows, and their `energy`, which scales are fitted by.
   Returns a first scale. */
static vf normalize(
    const RowFormat *format, const HeadFormat *head, const vf *x, vf *normal, vf *energy) {
    const Codebook *book = book_of(format);
    vf all = {0};
    vf coded = {0};
    vf weighted = {0};
    vf root;
    for (int v = 0; v < head->bands; v++) {
        vf band = {0};
        for (int i = v * BAND; i < (v + 1) * BAND; i++) {
            vf number = {0};
            if (i < head->num_coefficients)
                number = (x[head->channel_of[i]] - head->means[i]) * head->inverses[i];
            normal[i] = number;
            band += number * number;
        }
        all += band;
        if (!head->widths[v]) continue;
        coded += band;
        weighted += band * weight_of(format, head->widths[v]);
    }
    *energy = format->by_energy ? weighted : all;
    coded /= (float)(head->num_with_bits ? head->num_with_bits : 1);
    for (int i = 0; i < L; i++) root[i] = sqrtf(coded[i]);
    return gather(book->scales, stored_scales(book, root));
}

/* Encodes a band, each number by its nearest level. Adds to the sums that scales are fitted by. */
INLINE void encode_band(
    const vf *normal, vf inverse, const Codebook *book, int width, vf *over, vf *under,
    uint32_t (*bits)[L]) {
    const float *p = book->coefficients[width];
    float step = 2.0f / (float)(1 << width);
    uint32_t half_codes = 1u << (width - 1);
    for (int part = 0; part < 2; part++) {
        vu all = {0};
        for (int i = BAND / 2; i-- > 0;) {
            vf number = normal[part * BAND / 2 + i];
            vf magnitude = magnitude_of(number);
            vi is_low = ~(number > 0);
            /* One bit more for negative numbers gives the codes of a search upwards, where a bound
               is not below itself. */
            vi key = (vi)(magnitude * inverse) - is_low;
            vu code = count_below(key, book->bounds[width], width - 1);
            vf level = level_at(to_float(code) * step + splat(step / 2), p);
            *over += magnitude * level;
            *under += level * level;
            vu stored = ((code + half_codes) ^ (vu)is_low) & (2 * half_codes - 1);
            all = all << (uint32_t)width | stored;
        }
        memcpy(bits[part], &all, sizeof all);
    }
}

/* Encodes numbers with a scale. Returns the scale that fits their codes. */
static vf encode_numbers(
    const RowFormat *format, const HeadFormat *head, const vf *normal, vf energy, vf scale,
    Bits bits) {
    const Codebook *book = book_of(format);
    vf inverse = 1 / scale;
    vf all_over = {0};
    vf all_under = {0};
    for (int v = 0; v < head->bands; v++) {
        int width = head->widths[v];
        const vf *numbers = normal + v * BAND;
        vf over = {0};
        vf under = {0};
#define CASE(w) \
    case w: \
        encode_band(numbers, inverse, book, w, &over, &under, bits[v]); \
        break;
        switch (width) {
            CASE(1)
            CASE(2)
            CASE(3)
            CASE(4)
            CASE(5)
            CASE(6)
            CASE(7)
            CASE(8)
        default:
            continue;
        }
#undef CASE
        float factor = book->coefficients[width][3];
        float weight = weight_of(format, width) * factor;
        all_over += over * weight;
        all_under += under * (weight * factor);
    }
    return fitting_scale(format, energy, all_over, all_under, scale);
}

static void write_rows(
    const RowTarget *target, const HeadFormat *head, TokenVector vector, vu stored,
    const Bits bits) {
    int64_t size = target->format->row_size;
    int64_t first = vector.bh * target->capacity + target->used + vector.first;
    for (int t = 0; t < vector.count; t++) {
        uint8_t *row = target->rows + (first + t) * size;
        uint8_t *end = row + size;
        *row++ = (uint8_t)stored[t];
        for (int v = 0; v < head->bands; v++) {
            int width = head->widths[v];
            if (!width) continue;
            uint64_t band = bits[v][0][t] | (uint64_t)bits[v][1][t] << 4 * width;
            /* Another thread may write the row behind this one. */
            if (end - row >= 8)
                memcpy(row, &band, 8);
            else
                for (int i = 0; i < width; i++) row[i] = (uint8_t)(band >> 8 * i);
            row += width;
        }
        memset(row, 0, (size_t)(end - row));
    }
}

/* Encodes tokens, whose numbers are those of channels or components, into rows. Returns the bytes
   of their scales. */
static vu encode_vector(
    const RowTarget *target, const HeadFormat *head, TokenVector vector, const vf *x) {
    const RowFormat *format = target->format;
    const Codebook *book = book_of(format);
    ALIGNED vf normal[MAX_CHANNELS];
    Bits bits;
    vf energy;
    vu stored = {0};
    vf found = normalize(format, head, x, normal, &energy);
    for (int64_t pass = 0; pass <= format->num_refits; pass++) {
        vf scale = found;
        vf fitting = encode_numbers(format, head, normal, energy, scale, bits);
        int is_fixed = 1;
        stored = stored_scales(book, fitting);
        found = gather(book->scales, stored);
        /* Another pass with the same scale would find the same codes. */
        for (int t = 0; t < L; t++) is_fixed &= found[t] == scale[t];
        if (is_fixed) break;
    }
    write_rows(target, head, vector, stored, bits);
    return stored;
}

/* ---- decoding ---- */

/* Reads eight bytes of a row from an offset on, with zeros behind its end. */
INLINE uint64_t word_at(const uint8_t *row, int64_t offset, int64_t size) {
    uint64_t word = 0;
    if (size - offset >= 8) {
        memcpy(&word, row + offset, 8);
    } else if (size >= 8) {
        memcpy(&word, row + size - 8, 8);
        word >>= 8 * (8 + offset - size);
    } else {
        memcpy(&word, row + offset, (size_t)(size - offset));
    }
    return word;
}

/* Decodes the rows of a vector of tokens, [batch, heads, capacity, R], into channels or
   components. */
static void decode_vector(
    const RowFormat *format, const HeadFormat *head, const uint8_t *rows, int64_t capacity,
    TokenVector vector, vf *x) {
    const Codebook *book = book_of(format);
    int64_t size = format->row_size;
    const uint8_t *first = rows + (vector.bh * capacity + vector.first) * size;
    ALIGNED Bits bits;
    vu stored;
    for (int t = 0; t < L; t++) {
        const uint8_t *row = first + (t < vector.count ? t : vector.count - 1) * size;
        int64_t offset = 1;
        stored[t] = row[0];
        for (int v = 0; v < head->bands; v++) {
            int width = head->widths[v];
            uint64_t word = width ? word_at(row, offset, size) : 0;
            bits[v][0][t] = (uint32_t)word;
            bits[v][1][t] = (uint32_t)(word >> 4 * width);
            offset += width;
        }
    }
    vf scale = gather(book->scales, stored);
    for (int v = 0; v < head->bands; v++) {
        int width = head->widths[v];
        const float *c = book->coefficients[width];
        const float p[3] = {c[0] * c[3], c[1] * c[3], c[2] * c[3]};
        float step = 2.0f / (float)(1 << width);
        uint32_t mask = (1u << width) - 1;
        for (int i = v * BAND; i < (v + 1) * BAND && i < head->num_coefficients; i++) {
            vu code = load_u(bits[v][i % BAND / 4]) >> (uint32_t)(i % 4 * width) & mask;
            vf level = level_at(to_float(code) * step + splat(step / 2 - 1), p) * scale;
            vf number = splat(head->means[i]);
            if (width) number = level * head->deviations[i] + head->means[i];
            x[head->channel_of[i]] = number;
        }
    }
}

/* ---- tasks ---- */

/* Copies the rows in front of new ones from another storage, and clears those behind them. */
static void move_rows(const RowTarget *target, const TokenSizes *sizes, int64_t bh) {
    int64_t size = target->format->row_size;
    int64_t end = target->used + sizes->tokens;
    int64_t first = bh * target->moved_capacity + target->moved_first;
    uint8_t *rows = target->rows + bh * target->capacity * size;
    memcpy(rows, target->moved + first * size, (size_t)(target->used * size));
    memset(rows + end * size, 0, (size_t)((target->capacity - end) * size));
}

INLINE void move_rows_once(const RowTarget *target, const TokenSizes *sizes, int64_t task) {
    if (target->moved && task < sizes->batch * sizes->heads) move_rows(target, sizes, task);
}

static void encode_task(EncodeArgs *args, int64_t task) {
    const RowFormat *format = args->target.format;
    const Rotary *rotary = args->positions.rotary;
    int channels = (int)args->sizes.channels;
    float limit = (float)args->limit;
    TokenRange range = range_of_task(&args->sizes, &args->positions, task);
    TokenVector vector;
    HeadFormat head;
    ALIGNED vf x[MAX_CHANNELS], components[MAX_CHANNELS];
    load_head(format, range.bh, &head);
    move_rows_once(&args->target, &args->sizes, task);
    while (take_vector(&range, &vector)) {
        vi fits = ~(vi){0};
        load_tokens(&args->sizes, &args->states, vector, x);
        /* NaN is not below anything. */
        for (int d = 0; limit > 0 && d < channels; d++) fits &= (x[d] < limit) & (x[d] > -limit);
        if (rotary) rotate_tokens(rotary, channels, 1, vector, x);
        for (int d = 0; format->mean && d < channels; d++) x[d] -= head.centres[d];
        if (format->rotation_size > 1) transform_tokens(channels, (int)format->rotation_size, x);
        if (format->basis) find_components(&head, x, components);
        vu stored = encode_vector(&args->target, &head, vector, format->basis ? components : x);
        for (int t = 0; limit > 0 && t < vector.count; t++)
            if (!fits[t] || stored[t] == LAST_SCALE)
                __atomic_store_n(&args->overflow, 1, __ATOMIC_RELAXED);
    }
}

EXPORT(encode_rows)(EncodeArgs *args) {
    FOR_TASKS(args, task) encode_task(args, task);
}

static void requantize_task(const RequantizeArgs *args, int64_t task) {
    TokenRange range = range_of_task(&args->sizes, 0, task);
    TokenVector vector;
    HeadFormat source, head;
    ALIGNED vf x[MAX_CHANNELS];
    load_head(args->source_format, range.bh, &source);
    load_head(args->target.format, range.bh, &head);
    move_rows_once(&args->target, &args->sizes, task);
    while (take_vector(&range, &vector)) {
        decode_vector(
            args->source_format, &source, args->source, args->source_capacity, vector, x);
        encode_vector(&args->target, &head, vector, x);
    }
}

EXPORT(requantize_rows)(RequantizeArgs *args) {
    FOR_TASKS(args, task) requantize_task(args, task);
}

/* Moves the tokens behind those that were encoded to the front of their states. */
static void move_states(const EncodeArgs *args, int64_t remaining) {
    const States *states = &args->states;
    const TokenSizes *sizes = &args->sizes;
    int64_t number_size = (int64_t)size_of_dtype((int)states->dtype);
    int64_t size = states->strides[2] * number_size;
    for (int64_t bh = 0; bh < sizes->batch * sizes->heads; bh++) {
        int64_t item = bh / sizes->heads;
        int64_t head = bh % sizes->heads;
        int64_t index = item * states->strides[0] + head * states->strides[1];
        char *front = (char *)(uintptr_t)states->data + index * number_size;
        memmove(front, front + sizes->tokens * size, (size_t)(remaining * size));
    }
}

EXPORT(append_rows)(AppendArgs *args) {
    EncodeArgs *encode = args->encode;
    int64_t heads = encode->sizes.batch * encode->sizes.heads;
    FOR_TASKS(args, task) {
        int64_t index = task / heads;
        if (index < 2)
            encode_task(encode + index, task % heads);
        else
            requantize_task(args->requantize + index - 2, task % heads);
        if (!ends_last(&args->tasks)) continue;
        args->overflow = encode[0].overflow | encode[1].overflow;
        if (!args->remaining || args->overflow) continue;
        move_states(&encode[0], args->remaining);
        move_states(&encode[1], args->remaining);
    }
}

static void decode_task(const DecodeArgs *args, int64_t task) {
    const RowFormat *format = args->format;
    const Rotary *rotary = args->positions.rotary;
    int channels = (int)args->sizes.channels;
    TokenRange range = range_of_task(&args->sizes, &args->positions, task);
    TokenVector vector;
    HeadFormat head;
    /* A corrupt channel order leaves channels out. */
    ALIGNED vf x[MAX_CHANNELS] = {{0}}, of_components[MAX_CHANNELS];
    vf *states = format->basis ? of_components : x;
    load_head(format, range.bh, &head);
    while (take_vector(&range, &vector)) {
        decode_vector(format, &head, args->rows, args->capacity, vector, x);
        if (format->rotation_size > 1) transform_tokens(channels, (int)format->rotation_size, x);
        if (format->basis) {
            memset(of_components, 0, sizeof(vf) * (size_t)channels);
            add_components(&head, x, 1, of_components);
            for (int d = 0; d < channels; d++) of_components[d] /= head.factors[d];
        }
        for (int d = 0; format->mean && d < channels; d++) states[d] += head.centres[d];
        if (rotary) rotate_tokens(rotary, channels, 0, vector, states);
        store_tokens(&args->sizes, args->result, vector, states);
    }
}

EXPORT(decode_rows)(DecodeArgs *args) {
    FOR_TASKS(args, task) decode_task(args, task);
}

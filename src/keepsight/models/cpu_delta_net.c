/* A gated delta net between its matrix products. Queries, keys and values of all heads pass a short convolution over tokens;
 * then each head updates a state, a matrix [keys, values], by every token, and reads it:
 *
 *     state = decay * state
 *     state = state + key x strength * (value - key state)
 *     out = norm(query state) * silu(gate)
 *
 * All is computed token by token, so no bit of it depends on how a prompt is cut or on other sequences.
 */

#include <math.h>
#include "cpu_activations.h"

#define MOST_COLUMNS 8
/* Vectors that are computed together: those of a convolution's channels, and of a state's values, which are independent of each
 * other; so many columns of a state stay in the first cache. */
#define CHANNELS_AT_ONCE 16
#define VALUES_AT_ONCE 4

/* Channels and values must be multiples of this. */
const long keepsight_lanes = LANES;

typedef struct {
    float *out;                /* [rows, heads, values]; rows: the tokens of one sequence after another */
    float *columns;            /* [slots, channels, size]: the last inputs of the convolution; overwritten */
    float *state;              /* [slots, heads, keys, values]; overwritten */
    float *mixed;              /* [rows, channels]: queries and keys of key_heads, values of heads; overwritten */
    float *decay, *strength;   /* [rows, heads]: what they are computed from; overwritten */
    const float *gate;         /* [rows, heads, values] */
    const float *filter;       /* [size, channels]: of the convolution */
    const float *rate, *shift; /* [heads]: of decay */
    const float *scale;        /* [values]: of the norm */
    const int64_t *first_rows; /* [sequences + 1]: of each sequence, and behind the last */
    const int64_t *slots;      /* [sequences] */
    const int64_t *kept_slots; /* [rows]: where columns and state after the row are written as well; negative: nowhere */
    long sequences, heads, key_heads, keys, values, size;
    float eps;
} delta_net_work;

static long channels_of(const delta_net_work *w)
{
    return 2 * w->key_heads * w->keys + w->heads * w->values;
}

static long rows_of(const delta_net_work *w)
{
    return w->first_rows[w->sequences];
}

/* Convolution ----------------------------------------------------------------------------------------------------- */

INLINE void write_columns(const delta_net_work *w, lanes past[][CHANNELS_AT_ONCE], long slot, long first, long count)
{
    float *columns = w->columns + (slot * channels_of(w) + first) * w->size;
    for (long c = 0; c < count * LANES; c++)
        for (long s = 0; s < w->size; s++)
            columns[c * w->size + s] = past[s][c / LANES][c % LANES];
}

INLINE void convolve(const delta_net_work *w, long sequence, long first, long count)
{
    const long channels = channels_of(w), size = w->size;
    const float *columns = w->columns + (w->slots[sequence] * channels + first) * size;
    lanes past[MOST_COLUMNS][CHANNELS_AT_ONCE];
    for (long c = 0; c < count * LANES; c++)
        for (long s = 0; s < size; s++)
            past[s][c / LANES][c % LANES] = columns[c * size + s];
    for (long token = w->first_rows[sequence]; token < w->first_rows[sequence + 1]; token++) {
        float *row = w->mixed + token * channels + first;
        for (long v = 0; v < count; v++) {
            for (long s = 1; s < size; s++)
                past[s - 1][v] = past[s][v];
            past[size - 1][v] = vector_at(row + v * LANES);
            lanes sum = {0};
            for (long s = 0; s < size; s++)
                sum += past[s][v] * vector_at(w->filter + s * channels + first + v * LANES);
            sum = silu(sum);
            memcpy(row + v * LANES, &sum, sizeof sum);
        }
        if (w->kept_slots[token] >= 0)
            write_columns(w, past, w->kept_slots[token], first, count);
    }
    write_columns(w, past, w->slots[sequence], first, count);
}

/* Here and below the sequences of a piece follow each other, so that threads share a long one. */
static void convolution_part(const void *shared, long part, long parts)
{
    const delta_net_work *w = shared;
    const long vectors = channels_of(w) / LANES, pieces = parts_of(vectors, CHANNELS_AT_ONCE);
    const long count = w->sequences * pieces;
    for (long i = count * part / parts; i < count * (part + 1) / parts; i++) {
        const long first = i / w->sequences * CHANNELS_AT_ONCE;
        convolve(w, i % w->sequences, first * LANES, lesser(CHANNELS_AT_ONCE, vectors - first));
    }
}

/* Delta rule ------------------------------------------------------------------------------------------------------ */

static void factors_part(const void *shared, long part, long parts)
{
    const delta_net_work *w = shared;
    const long count = rows_of(w) * w->heads;
    for (long i = count * part / parts; i < count * (part + 1) / parts; i++) {
        const float x = w->decay[i] + w->shift[i % w->heads];
        const float softplus = x > 20.0f ? x : log1pf(expf(x));
        w->decay[i] = expf(-w->rate[i % w->heads] * softplus);
        w->strength[i] = 1.0f / (1.0f + expf(-w->strength[i]));
    }
}

INLINE float inverse_length(const float *x, long size)
{
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < size; i++)
        squares += x[i] * x[i];
    return 1.0f / sqrtf(squares + 1e-6f);
}

INLINE void update_and_read(const delta_net_work *w, long sequence, long head, long column, const int vectors)
{
    const long keys = w->keys, values = w->values, channels = channels_of(w);
    const long key_head = head / (w->heads / w->key_heads);
    float *state = w->state + (w->slots[sequence] * w->heads + head) * keys * values + column;
    for (long token = w->first_rows[sequence]; token < w->first_rows[sequence + 1]; token++) {
        const float *query = w->mixed + token * channels + key_head * keys, *key = query + w->key_heads * keys;
        const float *value = w->mixed + token * channels + 2 * w->key_heads * keys + head * values + column;
        const float of_key = inverse_length(key, keys), of_query = inverse_length(query, keys) / sqrtf(keys);
        const float decay = w->decay[token * w->heads + head], strength = w->strength[token * w->heads + head];
        lanes added[VALUES_AT_ONCE] = {0}, out[VALUES_AT_ONCE] = {0};
        for (long k = 0; k < keys; k++)
            for (int v = 0; v < vectors; v++) {
                const lanes kept = vector_at(state + k * values + v * LANES) * decay;
                memcpy(state + k * values + v * LANES, &kept, sizeof kept);
                added[v] += kept * (key[k] * of_key);
            }
        for (int v = 0; v < vectors; v++)
            added[v] = (vector_at(value + v * LANES) - added[v]) * strength;
        for (long k = 0; k < keys; k++)
            for (int v = 0; v < vectors; v++) {
                const lanes changed = vector_at(state + k * values + v * LANES) + added[v] * (key[k] * of_key);
                memcpy(state + k * values + v * LANES, &changed, sizeof changed);
                out[v] += changed * (query[k] * of_query);
            }
        memcpy(w->out + (token * w->heads + head) * values + column, out, vectors * sizeof *out);
        if (w->kept_slots[token] >= 0) {
            float *kept = w->state + (w->kept_slots[token] * w->heads + head) * keys * values + column;
            for (long k = 0; k < keys; k++)
                memcpy(kept + k * values, state + k * values, vectors * sizeof *out);
        }
    }
}

static void rule_part(const void *shared, long part, long parts)
{
    const delta_net_work *w = shared;
    const long at_once = VALUES_AT_ONCE * LANES, pieces = parts_of(w->values, at_once);
    const long count = w->sequences * w->heads * pieces;
    for (long i = count * part / parts; i < count * (part + 1) / parts; i++) {
        const long sequence = i % w->sequences, piece = i / w->sequences;
        const long head = piece / pieces, first = piece % pieces * at_once;
        if (first + at_once <= w->values)
            update_and_read(w, sequence, head, first, VALUES_AT_ONCE);
        else
            for (long column = first; column < w->values; column += LANES)
                update_and_read(w, sequence, head, column, 1);
    }
}

/* Norm and gate --------------------------------------------------------------------------------------------------- */

static void output_part(const void *shared, long part, long parts)
{
    const delta_net_work *w = shared;
    const long rows = rows_of(w) * w->heads;
    for (long row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
        float *out = w->out + row * w->values, squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < w->values; i++)
            squares += out[i] * out[i];
        const float inverse = 1.0f / sqrtf(squares / w->values + w->eps);
        for (long i = 0; i < w->values; i += LANES) {
            const lanes normed = vector_at(out + i) * inverse * vector_at(w->scale + i);
            const lanes gated = normed * silu(vector_at(w->gate + row * w->values + i));
            memcpy(out + i, &gated, sizeof gated);
        }
    }
}

void keepsight_compute_delta_net(const delta_net_work *w)
{
    const long rows = rows_of(w);
    share(convolution_part, w, parts_for(rows * channels_of(w) * w->size));
    share(factors_part, w, parts_for(rows * w->heads * 64)); /* each costs as much as 64 numbers elsewhere */
    share(rule_part, w, parts_for(rows * w->heads * w->keys * w->values));
    share(output_part, w, parts_for(rows * w->heads * w->values));
}

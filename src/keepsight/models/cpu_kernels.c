/* What a step does between its matrix products, in float32 on a CPU: norms, heads, attention.  Each is one pass over what
 * it reads, where torch has a call and a copy for each sign of the formula.
 *
 * C with the vectors that gcc and clang have; compiled for several kinds of processors, of which the caller chooses.
 */

#include <math.h>
#include <string.h>

#include "cpu_vectors.h"

/* Norms --------------------------------------------------------------------------------------------------------- */

INLINE float inverse_rms(const float *x, long size, float eps)
{
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < size; i++)
        squares += x[i] * x[i];
    return 1.0f / sqrtf(squares / size + eps);
}

typedef struct {
    float *out;            /* [rows, size] */
    const float *hidden;   /* likewise */
    const float *scale;    /* [size] */
    const float *residual; /* [rows, size], or null */
    long rows, size;
    float eps;
} norm_work;

static void norm_part(const void *shared, long part, long parts)
{
    const norm_work *w = shared;
    for (long row = w->rows * part / parts; row < w->rows * (part + 1) / parts; row++) {
        const float *x = w->hidden + row * w->size;
        const float inverse = inverse_rms(x, w->size, w->eps);
        float *out = w->out + row * w->size;
        if (w->residual)
            for (long i = 0; i < w->size; i++)
                out[i] = w->residual[row * w->size + i] + x[i] * inverse * w->scale[i];
        else
            for (long i = 0; i < w->size; i++)
                out[i] = x[i] * inverse * w->scale[i];
    }
}

/* hidden / rms(hidden) * scale, and the residual on top. */
void keepsight_norm(const norm_work *w)
{
    share(norm_part, w, parts_for(w->rows * w->size));
}

/* Rotation ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *cos, *sin;          /* [bases, tokens, 2 * half]: each twice in a row, sines negative at first */
    const int64_t *positions;  /* [tokens] */
    const float *frequencies;  /* [bases, half] */
    long bases, tokens, half;
} angles_work;

static void angles_part(const void *shared, long part, long parts)
{
    const angles_work *w = shared;
    const long rows = w->bases * w->tokens;
    for (long row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
        const float *frequencies = w->frequencies + row / w->tokens * w->half;
        const float position = w->positions[row % w->tokens];
        float *cos = w->cos + row * 2 * w->half, *sin = w->sin + row * 2 * w->half;
        for (long i = 0; i < w->half; i++) {
            const float angle = position * frequencies[i];
            cos[i] = cos[w->half + i] = cosf(angle);
            sin[w->half + i] = sinf(angle);
            sin[i] = -sin[w->half + i];
        }
    }
}

/* Of every base and position. */
void keepsight_angles(const angles_work *w)
{
    share(angles_part, w, parts_for(16 * w->bases * w->tokens * w->half)); /* each takes as long as so many of others */
}

/* Queries, keys and values ---------------------------------------------------------------------------------------- */

typedef struct {
    float *query;           /* [tokens, heads, dim] */
    float *keys, *values;   /* [slots, kv_heads, dim] */
    const float *projected; /* [tokens, heads + 2 * kv_heads, dim] */
    const float *scale;     /* [heads + kv_heads, dim] */
    const float *cos, *sin; /* [tokens, dim], sines negative in their first half */
    const int64_t *slots;   /* [tokens] */
    long tokens, heads, kv_heads, dim;
    float eps;
} heads_work;

INLINE void norm_and_rotate(
    float *out, const float *x, const float *scale, const float *cos, const float *sin, long dim, float eps)
{
    const float inverse = inverse_rms(x, dim, eps);
    const long half = dim / 2;
#pragma omp simd
    for (long i = 0; i < half; i++) {
        const float a = x[i] * inverse * scale[i], b = x[half + i] * inverse * scale[half + i];
        out[i] = a * cos[i] + b * sin[i];
        out[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

static void heads_part(const void *shared, long part, long parts)
{
    const heads_work *w = shared;
    const long dim = w->dim, num_normed = w->heads + w->kv_heads;
    for (long token = w->tokens * part / parts; token < w->tokens * (part + 1) / parts; token++) {
        const float *projected = w->projected + token * (num_normed + w->kv_heads) * dim;
        float *query = w->query + token * w->heads * dim;
        float *key = w->keys + w->slots[token] * w->kv_heads * dim;
        const float *cos = w->cos + token * dim, *sin = w->sin + token * dim;
        for (long head = 0; head < num_normed; head++) {
            float *out = head < w->heads ? query + head * dim : key + (head - w->heads) * dim;
            norm_and_rotate(out, projected + head * dim, w->scale + head * dim, cos, sin, dim, w->eps);
        }
        float *value = w->values + w->slots[token] * w->kv_heads * dim;
        memcpy(value, projected + num_normed * dim, w->kv_heads * dim * sizeof(float));
    }
}

/* Norm and rotation of queries and keys; keys and values go to their slots. */
void keepsight_place_heads(const heads_work *w)
{
    share(heads_part, w, parts_for(w->tokens * w->heads * w->dim));
}

/* Attention --------------------------------------------------------------------------------------------------------
 *
 * A lane of a vector is a query: a row and one of the heads that share a key head.  So scores, their maximum and their
 * sum need nothing from a neighbour, and every number of keys and values is read once for all lanes of a tile.  Keys
 * come in chunks, and what was summed before is scaled down when a chunk has a higher score.  Chunks begin where a multiple
 * of their size does, whoever else is in the tile, so that a row's numbers are the same to the last bit with whatever it is
 * computed.
 */

/* Of a tile: so many vectors of queries and, at once, numbers of keys or values keep all registers busy. */
#if LANES == 16
#define AT_ONCE 8
#else
#define AT_ONCE 4
#endif
#define CHUNK 128

/* For the caller, who must not have more heads share a key head, nor heads of other than multiples of so many numbers. */
const long keepsight_queries_per_tile = MOST_VECTORS * LANES, keepsight_numbers_at_once = AT_ONCE;

typedef struct {
    float *out;                   /* [rows, heads, dim] */
    const float *query;           /* [rows, heads, dim] */
    const float *keys, *values;   /* [slots, kv_heads, dim] */
    const int64_t *first_rows;    /* [sequences + 1]: of each sequence and, last, the number of rows */
    const int64_t *const *slots;  /* of each sequence, of each of its positions */
    const int64_t *begins, *ends; /* [rows]: which positions of its sequence a row sees */
    long sequences, heads, kv_heads, dim;
    long out_stride, query_stride, key_stride; /* from one row, or slot, to the next */
    float scale;
} attention_work;

/* Keys, or values, of some positions of a sequence: where in memory those are. */
typedef struct {
    const float *numbers;
    const int64_t *slots;
    long stride;
} places;

INLINE const float *place(places all, long position)
{
    return all.numbers + all.slots[position] * all.stride;
}

/* [AT_ONCE, vectors]: of as many keys from `first` on with all queries of a tile; beyond the `last` it is that one's. */
INLINE void score(lanes *scores, places keys, long first, long last, const lanes *query, long dim, const int vectors)
{
    lanes sums[AT_ONCE][MOST_VECTORS] = {};
    const float *numbers[AT_ONCE];
    for (int key = 0; key < AT_ONCE; key++)
        numbers[key] = place(keys, first + key < last ? first + key : last);
    for (long d = 0; d < dim; d++)
#pragma GCC unroll 8
        for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[key][v] += numbers[key][d] * query[d * vectors + v];
    for (int key = 0; key < AT_ONCE; key++)
        for (int v = 0; v < vectors; v++)
            scores[key * vectors + v] = sums[key][v];
}

/* To [AT_ONCE, vectors] of the outputs: as many numbers of `count` values from `first` on, weighted. */
INLINE void add_values(lanes *out, places values, long first, long count, const lanes *weights, const int vectors)
{
    lanes sums[AT_ONCE][MOST_VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = out[i * vectors + v];
    for (long key = 0; key < count; key++) {
        const float *value = place(values, first + key);
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[i][v] += value[i] * weights[key * vectors + v];
    }
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            out[i * vectors + v] = sums[i][v];
}

/* Rows of one sequence, with the heads that share a key head: a lane for each of both. */
typedef struct {
    long first_row, count, first_head, group;
} tile;

/* Which positions the lanes of a tile see; none before `begin` or from `end` on, each all from `last_begin` to
 * `first_end`. */
typedef struct {
    whole_lanes begins[MOST_VECTORS], ends[MOST_VECTORS];
    long begin, last_begin, first_end, end;
} view;

INLINE view view_of(const attention_work *w, tile t)
{
    view seen = {.begin = INT64_MAX, .first_end = INT64_MAX};
    for (long lane = 0; lane < t.count * t.group; lane++) {
        const long row = t.first_row + lane / t.group, begin = w->begins[row], end = w->ends[row];
        seen.begins[lane / LANES][lane % LANES] = begin;
        seen.ends[lane / LANES][lane % LANES] = end;
        seen.begin = begin < seen.begin ? begin : seen.begin;
        seen.last_begin = begin > seen.last_begin ? begin : seen.last_begin;
        seen.first_end = end < seen.first_end ? end : seen.first_end;
        seen.end = end > seen.end ? end : seen.end;
    }
    return seen;
}

/* To [dim, vectors]. */
INLINE void take_queries(lanes *query, const attention_work *w, tile t, const int vectors)
{
    memset(query, 0, w->dim * vectors * sizeof *query);
    for (long lane = 0; lane < t.count * t.group; lane++) {
        const long row = t.first_row + lane / t.group, head = t.first_head + lane % t.group;
        const float *numbers = w->query + row * w->query_stride + head * w->dim;
        for (long d = 0; d < w->dim; d++)
            ((float *)query)[d * vectors * LANES + lane] = numbers[d] * w->scale;
    }
}

/* From [dim, vectors]. */
INLINE void give_outputs(const attention_work *w, tile t, const lanes *out, const lanes *total, const int vectors)
{
    for (long lane = 0; lane < t.count * t.group; lane++) {
        const long row = t.first_row + lane / t.group, head = t.first_head + lane % t.group;
        float *numbers = w->out + row * w->out_stride + head * w->dim;
        const float inverse = 1.0f / total[lane / LANES][lane % LANES];
        for (long d = 0; d < w->dim; d++)
            numbers[d] = ((const float *)out)[d * vectors * LANES + lane] * inverse;
    }
}

/* Scores of `count` keys from position `at` on that a lane does not see. */
INLINE void hide(lanes *scores, const view *seen, long at, long count, const int vectors)
{
    for (long key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++) {
            const int32_t position = at + key;
            const whole_lanes is_seen = (seen->begins[v] <= position) & (seen->ends[v] > position);
            scores[key * vectors + v] = choose(is_seen, scores[key * vectors + v], (lanes){} - INFINITY);
        }
}

/* Scores become weights relative to the highest so far, and so does what was summed before. */
INLINE void weigh(lanes *scores, long count, lanes *highest, lanes *total, lanes *out, long dim, const int vectors)
{
    raise_highest(highest, scores, count, total, out, dim, vectors);
    for (long key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++)
            total[v] += scores[key * vectors + v] = power_of_2(scores[key * vectors + v] - highest[v]);
}

INLINE void attend_tile(const attention_work *w, const int64_t *slots, tile t, const int vectors)
{
    const long dim = w->dim, from = t.first_head / t.group * dim;
    const view seen = view_of(w, t);
    lanes query[dim * vectors], out[dim * vectors], scores[CHUNK * vectors];
    lanes highest[MOST_VECTORS], total[MOST_VECTORS] = {};
    for (int v = 0; v < vectors; v++)
        highest[v] = (lanes){} + LOWEST_SCORE;
    memset(out, 0, sizeof out);
    take_queries(query, w, t, vectors);
    for (long at = seen.begin, count; at < seen.end; at += count) {
        const long next = (at / CHUNK + 1) * CHUNK;
        count = (seen.end < next ? seen.end : next) - at;
        for (long key = 0; key < count; key += AT_ONCE)
            score(
                scores + key * vectors, (places){w->keys + from, slots, w->key_stride}, at + key, seen.end - 1, query, dim,
                vectors);
        if (at < seen.last_begin || at + count > seen.first_end)
            hide(scores, &seen, at, count, vectors);
        weigh(scores, count, highest, total, out, dim, vectors);
        for (long d = 0; d < dim; d += AT_ONCE)
            add_values(out + d * vectors, (places){w->values + from + d, slots, w->key_stride}, at, count, scores, vectors);
    }
    give_outputs(w, t, out, total, vectors);
}

static long rows_per_tile(const attention_work *w)
{
    return MOST_VECTORS * LANES / (w->heads / w->kv_heads);
}

/* One tile of as many as there are parts, all over the batch: later ones see more keys. */
static void attention_part(const void *shared, long part, long parts)
{
    const attention_work *w = shared;
    const long group = w->heads / w->kv_heads, most_rows = rows_per_tile(w);
    long index = 0;
    for (long sequence = 0; sequence < w->sequences; sequence++) {
        const long end = w->first_rows[sequence + 1];
        for (long row = w->first_rows[sequence]; row < end; row += most_rows)
            for (long kv_head = 0; kv_head < w->kv_heads; kv_head++) {
                if (index++ % parts != part)
                    continue;
                const tile t = {row, end - row < most_rows ? end - row : most_rows, kv_head * group, group};
                if (t.count * group <= LANES)
                    attend_tile(w, w->slots[sequence], t, 1);
                else
                    attend_tile(w, w->slots[sequence], t, 2);
            }
    }
}

/* Rows and keys of each sequence for themselves. */
void keepsight_attend(const attention_work *w)
{
    const long rows = w->first_rows[w->sequences];
    share(attention_part, w, w->kv_heads * (w->sequences + rows / rows_per_tile(w)));
}

/* Attention of rows that all see all keys, as a picture's patches do. With pairs of bfloat16 it takes half the time of
 * float32 in cpu_attention.c, whose algorithm it follows; requires `keepsight_multiplies_bfloat16`. With AMX tiles it
 * computes both dtypes. Here values are paired, or split, once for all tiles.
 */

#include <math.h>

#include "cpu_bfloat16.h"

typedef struct {
    float *out;                   /* [rows, dim] */
    const float *query;           /* [rows, dim] */
    const float *keys, *values;   /* [count, dim] */
    long rows, count, dim;        /* dim: a multiple of AT_ONCE */
    long out_stride, query_stride, key_stride;
    long is_rounded; /* whether everything is rounded to bfloat16 */
    float scale;
} sight_work;

/* Whether unrounded float32 is supported, too. */
#if defined(__AMX_BF16__)
const long keepsight_attends_unrounded = 1;

#include "cpu_whole_sight_tiles.h"

#else
const long keepsight_attends_unrounded = 0;

/* Vectors of queries, and keys or numbers of values processed at once: together they use all registers. */
#define VECTORS MOST_VECTORS
#define AT_ONCE 8
#define QUERIES (VECTORS * LANES)
/* Pairs of keys per chunk. */
#define CHUNK 64

/* The arguments, and keys and values in the layout that tiles read. */
typedef struct {
    sight_work told;
    int32_t *keys;   /* [count, pairs of dim] */
    int32_t *values; /* [pairs of count, dim]; if count is odd the last pair's second number is 0 */
} rounded_work;

static void round_part(const void *shared, long part, long parts)
{
    const rounded_work *w = shared;
    const long count = w->told.count, dim = w->told.dim, stride = w->told.key_stride, pairs = parts_of(count, 2);
    for (long pair = pairs * part / parts; pair < pairs * (part + 1) / parts; pair++) {
        for (long key = 2 * pair; key < lesser(2 * pair + 2, count); key++)
            for (long i = 0; i < dim / 2; i++)
                w->keys[key * dim / 2 + i] =
                    pair_of(w->told.keys[key * stride + 2 * i], w->told.keys[key * stride + 2 * i + 1]);
        const float *value = w->told.values + 2 * pair * stride;
        for (long i = 0; i < dim; i++)
            w->values[pair * dim + i] = pair_of(value[i], 2 * pair + 1 < count ? value[stride + i] : 0.0f);
    }
}

/* Compute scores [AT_ONCE, VECTORS] of keys from `first` on; past the end the last key is repeated. */
INLINE void score(lanes *scores, const rounded_work *w, long first, const whole_lanes *query)
{
    const long pairs = w->told.dim / 2;
    lanes sums[AT_ONCE][VECTORS] = {};
    const int32_t *keys[AT_ONCE];
    for (int key = 0; key < AT_ONCE; key++)
        keys[key] = w->keys + lesser(first + key, w->told.count - 1) * pairs;
    for (long i = 0; i < pairs; i++)
#pragma GCC unroll 8
        for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[key][v] = add_pairs(sums[key][v], (whole_lanes){} + keys[key][i], query[i * VECTORS + v]);
    memcpy(scores, sums, sizeof sums);
}

/* Turn scores of pairs of keys into weights relative to the highest score so far; rescale earlier sums to match. */
INLINE void weigh(whole_lanes *weights, const lanes *scores, long pairs, lanes *highest, lanes *total, lanes *out, long dim)
{
    raise_highest(highest, scores, 2 * pairs, total, out, dim, VECTORS);
    for (long pair = 0; pair < pairs; pair++)
        for (int v = 0; v < VECTORS; v++) {
            const lanes first = power_of_2(scores[2 * pair * VECTORS + v] - highest[v]);
            const lanes second = power_of_2(scores[(2 * pair + 1) * VECTORS + v] - highest[v]);
            total[v] += first;
            total[v] += second;
            weights[pair * VECTORS + v] = pairs_of(first, second);
        }
}

/* Add AT_ONCE numbers of each pair of values, weighted, to [AT_ONCE, VECTORS] of the outputs. */
INLINE void add_values(lanes *out, const int32_t *values, long dim, long pairs, const whole_lanes *weights)
{
    lanes sums[AT_ONCE][VECTORS];
    memcpy(sums, out, sizeof sums);
    for (long pair = 0; pair < pairs; pair++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                sums[i][v] = add_pairs(sums[i][v], (whole_lanes){} + values[pair * dim + i], weights[pair * VECTORS + v]);
    memcpy(out, sums, sizeof sums);
}

static void attend_tile(const rounded_work *w, long first_row, long rows)
{
    const sight_work *told = &w->told;
    const long dim = told->dim;
    whole_lanes query[dim / 2 * VECTORS], weights[CHUNK * VECTORS];
    lanes out[dim * VECTORS], scores[2 * CHUNK * VECTORS], highest[VECTORS], total[VECTORS] = {};
    memset(out, 0, sizeof out);
    memset(query, 0, sizeof query);
    for (int v = 0; v < VECTORS; v++)
        highest[v] = (lanes){} + LOWEST_SCORE;
    for (long row = 0; row < rows; row++) {
        const float *numbers = told->query + (first_row + row) * told->query_stride;
        for (long i = 0; i < dim / 2; i++)
            ((int32_t *)query)[i * QUERIES + row] = pair_of(numbers[2 * i] * told->scale, numbers[2 * i + 1] * told->scale);
    }
    for (long at = 0; at < told->count; at += 2 * CHUNK) {
        const long count = lesser(told->count - at, 2 * CHUNK), pairs = parts_of(count, 2);
        for (long key = 0; key < count; key += AT_ONCE)
            score(scores + key * VECTORS, w, at + key, query);
        if (count % 2)
            for (int v = 0; v < VECTORS; v++)
                scores[count * VECTORS + v] = (lanes){} - INFINITY;
        weigh(weights, scores, pairs, highest, total, out, dim);
        for (long i = 0; i < dim; i += AT_ONCE)
            add_values(out + i * VECTORS, w->values + at / 2 * dim + i, dim, pairs, weights);
    }
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < dim; i++)
            told->out[(first_row + row) * told->out_stride + i] = ((float *)out)[i * QUERIES + row] / ((float *)total)[row];
}

static void tiles_part(const void *shared, long part, long parts)
{
    const rounded_work *w = shared;
    for (long row = part * QUERIES; row < w->told.rows; row += parts * QUERIES)
        attend_tile(w, row, lesser(w->told.rows - row, QUERIES));
}

void keepsight_attend_to_all(const sight_work *told)
{
    rounded_work work = {
        .told = *told,
        .keys = room_for(told->count * told->dim / 2 * sizeof *work.keys),
        .values = room_for(parts_of(told->count, 2) * told->dim * sizeof *work.values),
    };
    share(round_part, &work, parts_for(told->count * told->dim));
    share(tiles_part, &work, parts_for(told->rows * told->count));
    free(work.keys);
    free(work.values);
}

#endif

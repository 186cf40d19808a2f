/* Attention of one row. A tile would leave most lanes empty, and reads too few consecutive bytes of a value for data that
 * comes from memory. Here lanes are first keys, then numbers of values; every number is summed in the same order as in a tile.
 */

#include "cpu_attention.h"

/* The most heads, and vectors of values, that are processed at once. */
#define MOST_HEADS 4
#define VALUES_AT_ONCE 4

/* Compute scores of LANES keys from `first` on, into rows [heads, CHUNK]; past the end `last` is repeated. */
INLINE void score_keys(
    float *scores, places keys, long first, long last, const float *query, long words, const int heads, const int is_paired)
{
    lanes sums[MOST_HEADS] = {};
    const float *numbers[LANES];
    for (int key = 0; key < LANES; key++)
        numbers[key] = place(keys, lesser(first + key, last), is_paired);
    for (long i = 0; i < words; i += LANES) {
        lanes block[LANES];
#pragma GCC unroll 16
        for (int key = 0; key < LANES; key++) {
            block[key] = vector_at(numbers[key] + i);
            /* Usually this lane's next key. */
            __builtin_prefetch(numbers[key] + i + LANES * keys.stride / (is_paired ? 2 : 1));
        }
        transpose(block);
#pragma GCC unroll 16
        for (int word = 0; word < LANES; word++)
#pragma GCC unroll 4
            for (int head = 0; head < heads; head++)
                sums[head] = multiply_add(sums[head], query + head * words + i + word, block[word], is_paired);
    }
    for (int head = 0; head < heads; head++)
        memcpy(scores + head * CHUNK, &sums[head], sizeof sums[head]);
}

/* Add some numbers of `count` values, weighted, to the outputs [heads, dim]. */
INLINE void add_some_values(
    float *out, places values, long first, long count, const float *weights, long dim, const int heads, const int vectors,
    const int is_paired)
{
    lanes sums[MOST_HEADS][VALUES_AT_ONCE];
#pragma GCC unroll 4
    for (int head = 0; head < heads; head++)
        memcpy(sums[head], out + head * dim, vectors * sizeof sums[head][0]);
    for (long key = 0; key < count; key += is_paired ? 2 : 1) {
        const void *value = place(values, first + key, is_paired);
        const void *next = place(values, first + lesser(key + 1, count - 1), is_paired);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
            for (int head = 0; head < heads; head++)
                if (is_paired) {
                    const uint16_t *one = (const uint16_t *)value + v * LANES, *other = (const uint16_t *)next + v * LANES;
                    const whole_lanes weight = (whole_lanes){} + pair_at(weights + head * CHUNK + key / 2);
                    sums[head][v] = add_pairs(sums[head][v], pairs_from(one, other), weight);
                } else
                    sums[head][v] += vector_at((const float *)value + v * LANES) * weights[head * CHUNK + key];
    }
#pragma GCC unroll 4
    for (int head = 0; head < heads; head++)
        memcpy(out + head * dim, sums[head], vectors * sizeof sums[head][0]);
}

/* Add all numbers of `count` values. */
INLINE void add_values(
    float *out, places values, long first, long count, const float *weights, long dim, const int heads, const int is_paired)
{
    long d = 0;
    for (; d + VALUES_AT_ONCE * LANES <= dim; d += VALUES_AT_ONCE * LANES) {
        const places from_d = from_number(values, d, is_paired);
        add_some_values(out + d, from_d, first, count, weights, dim, heads, VALUES_AT_ONCE, is_paired);
    }
    for (; d < dim; d += LANES)
        add_some_values(out + d, from_number(values, d, is_paired), first, count, weights, dim, heads, 1, is_paired);
}

/* Turn one head's scores into weights (or pairs) relative to the highest score so far; rescale earlier sums to match. */
INLINE void weigh_head(
    float *scores, long count, float *highest, float *total, float *out, long dim, const int is_paired)
{
    float top = *highest;
    for (long key = 0; key < count; key++)
        top = scores[key] > top ? scores[key] : top;
    const lanes kept = power_of_2((lanes){} + (*highest - top));
    *highest = top;
    *total *= kept[0];
    for (long d = 0; d < dim; d += LANES) {
        const lanes scaled = vector_at(out + d) * kept;
        memcpy(out + d, &scaled, sizeof scaled);
    }
    for (long key = 0; key < count; key += LANES) {
        const lanes weights = power_of_2(vector_at(scores + key) - top);
        memcpy(scores + key, &weights, sizeof weights);
    }
    for (long key = 0; key < count; key++)
        *total += scores[key];
    if (is_paired && count % 2)
        scores[count] = 0.0f;
    for (long key = 0; is_paired && key < count; key += LANES) {
        const halves weights = halves_of(vector_at(scores + key));
        memcpy((uint16_t *)scores + key, &weights, sizeof weights);
    }
}

INLINE void attend_some(
    const attention_work *w, const int64_t *slots, long row, long first_head, const int heads, const int is_paired)
{
    const long dim = w->dim, words = is_paired ? dim / 2 : dim, from = first_head / (w->heads / w->kv_heads) * dim;
    const long begin = w->begins[row], end = w->ends[row];
    const places keys = from_number((places){w->keys, slots, w->key_stride}, from, is_paired);
    const places values = from_number((places){w->values, slots, w->key_stride}, from, is_paired);
    const float *numbers = w->query + row * w->query_stride + first_head * dim;
    float query[MOST_HEADS * dim], out[MOST_HEADS * dim], scores[MOST_HEADS * CHUNK];
    float highest[MOST_HEADS], total[MOST_HEADS] = {};
    memset(out, 0, sizeof out);
    for (int head = 0; head < heads; head++)
        highest[head] = LOWEST_SCORE;
    for (long i = 0; i < heads * words; i++)
        if (is_paired)
            set_pair(query + i, pair_of(numbers[2 * i] * w->scale, numbers[2 * i + 1] * w->scale));
        else
            query[i] = numbers[i] * w->scale;
    for (long at = first_position(begin, is_paired), count; at < end; at += count) {
        count = end_of_chunk(at, end) - at;
        for (long key = 0; key < count; key += LANES)
            score_keys(scores + key, keys, at + key, end - 1, query, words, heads, is_paired);
        for (int head = 0; head < heads; head++) {
            if (at < begin)
                scores[head * CHUNK] = -INFINITY;
            weigh_head(scores + head * CHUNK, count, highest + head, total + head, out + head * dim, dim, is_paired);
        }
        for (long key = 0; key < count; key += LANES) {
            const float *weights = scores + (is_paired ? key / 2 : key);
            add_values(out, values, at + key, lesser(count - key, LANES), weights, dim, heads, is_paired);
        }
    }
    float *given = w->out + row * w->out_stride + first_head * dim;
    for (int head = 0; head < heads; head++) {
        const float inverse = 1.0f / total[head];
        for (long d = 0; d < dim; d++)
            given[head * dim + d] = out[head * dim + d] * inverse;
    }
}

INLINE void attend_heads(const attention_work *w, const int64_t *slots, long row, long first_head, const int is_paired)
{
    const long end = first_head + w->heads / w->kv_heads;
    for (long head = first_head; head < end; head += MOST_HEADS)
        switch (lesser(end - head, MOST_HEADS)) {
        case 1:
            attend_some(w, slots, row, head, 1, is_paired);
            break;
        case 2:
            attend_some(w, slots, row, head, 2, is_paired);
            break;
        case 3:
            attend_some(w, slots, row, head, 3, is_paired);
            break;
        default:
            attend_some(w, slots, row, head, MOST_HEADS, is_paired);
        }
}

void keepsight_attend_row(const attention_work *w, const int64_t *slots, long row, long first_head)
{
    if (w->is_paired)
        attend_heads(w, slots, row, first_head, 1);
    else
        attend_heads(w, slots, row, first_head, 0);
}

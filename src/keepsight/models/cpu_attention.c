/* Decoder attention on a CPU: rows of several sequences, each over one interval of its sequence's keys and values, which are
 * read in place. Those are float32, or bfloat16, which is multiplied in pairs: a word of 4 bytes is a number or a pair.
 *
 * Keys are processed in chunks, and earlier sums are scaled down when a chunk has a higher score. Chunks begin at multiples
 * of their size, and every number is summed in a fixed order: a row's results are the same to the last bit whatever else is
 * in the batch.
 */

#include "cpu_attention.h"

/* Keys, or numbers of values, that are processed at once: with MOST_VECTORS vectors of queries they use all registers. */
#if LANES == 16
#define AT_ONCE 8
#else
#define AT_ONCE 4
#endif

/* Limits that the caller must check: the most query heads that share a key head, and a divisor of the head dimension. */
const long keepsight_queries_per_tile = MOST_VECTORS * LANES, keepsight_numbers_at_once = AT_ONCE;

/* Tiles ------------------------------------------------------------------------------------------------------------
 *
 * A lane of a vector is a query: a row and one of the heads that share a key head. So scores, their maximum and their
 * sum need nothing from other lanes, and every number of keys and values is read once for all lanes of a tile.
 */

/* Compute scores [AT_ONCE, vectors] of keys from `first` on with all queries of a tile; past the end `last` is repeated. */
INLINE void score(
    lanes *scores, places keys, long first, long last, const lanes *query, long words, const int vectors,
    const int is_paired)
{
    lanes sums[AT_ONCE][MOST_VECTORS] = {};
    const float *numbers[AT_ONCE];
    for (int key = 0; key < AT_ONCE; key++)
        numbers[key] = place(keys, lesser(first + key, last), is_paired);
    for (long i = 0; i < words; i++)
#pragma GCC unroll 8
        for (int key = 0; key < AT_ONCE; key++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                if (is_paired) {
                    const whole_lanes pair = (whole_lanes){} + pair_at(numbers[key] + i);
                    sums[key][v] = add_pairs(sums[key][v], pair, (whole_lanes)query[i * vectors + v]);
                } else
                    sums[key][v] += numbers[key][i] * query[i * vectors + v];
    for (int key = 0; key < AT_ONCE; key++)
        for (int v = 0; v < vectors; v++)
            scores[key * vectors + v] = sums[key][v];
}

/* Add AT_ONCE numbers of each of `count` values from `first` on, weighted, to [AT_ONCE, vectors] of the outputs. */
INLINE void add_values(lanes *out, places values, long first, long count, const lanes *weights, const int vectors)
{
    lanes sums[AT_ONCE][MOST_VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = out[i * vectors + v];
    for (long key = 0; key < count; key++) {
        const float *value = place(values, first + key, 0);
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

/* The same for pairs of values [pairs, dim]. */
INLINE void add_pairs_of_values(
    lanes *out, const int32_t *values, long dim, long pairs, const lanes *weights, const int vectors)
{
    lanes sums[AT_ONCE][MOST_VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = out[i * vectors + v];
    for (long pair = 0; pair < pairs; pair++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                const whole_lanes value = (whole_lanes){} + values[pair * dim + i];
                sums[i][v] = add_pairs(sums[i][v], value, (whole_lanes)weights[pair * vectors + v]);
            }
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            out[i * vectors + v] = sums[i][v];
}

/* Interleave values in pairs; a last single value is paired with itself, and its second weight is 0. */
INLINE void pair_values(int32_t *pairs, places values, long first, long count, long dim)
{
    for (long key = 0; key < count; key += 2, pairs += dim) {
        const uint16_t *one = place(values, first + key, 1);
        const uint16_t *other = place(values, first + lesser(key + 1, count - 1), 1);
        for (long i = 0; i < dim; i++)
            pairs[i] = (int32_t)(one[i] | (uint32_t)other[i] << 16);
    }
}

/* Rows of one sequence, with the heads that share a key head: a lane for each combination. */
typedef struct {
    long first_row, count, first_head, group;
} tile;

/* The positions that the lanes of a tile see: none before `begin` or from `end` on; all lanes see all from `last_begin` to
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

/* Load the scaled queries into [words, vectors]. */
INLINE void take_queries(lanes *query, const attention_work *w, tile t, const int vectors, const int is_paired)
{
    memset(query, 0, (is_paired ? w->dim / 2 : w->dim) * vectors * sizeof *query);
    for (long lane = 0; lane < t.count * t.group; lane++) {
        const long row = t.first_row + lane / t.group, head = t.first_head + lane % t.group;
        const float *numbers = w->query + row * w->query_stride + head * w->dim;
        float *words = (float *)query + lane;
        if (is_paired)
            for (long i = 0; i < w->dim / 2; i++)
                set_pair(words + i * vectors * LANES, pair_of(numbers[2 * i] * w->scale, numbers[2 * i + 1] * w->scale));
        else
            for (long i = 0; i < w->dim; i++)
                words[i * vectors * LANES] = numbers[i] * w->scale;
    }
}

/* Store the normalized outputs, from [dim, vectors]. */
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

/* Mask scores of `count` keys from position `at` on that a lane does not see. */
INLINE void hide(lanes *scores, const view *seen, long at, long count, const int vectors)
{
    for (long key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++) {
            const int32_t position = at + key;
            const whole_lanes is_seen = (seen->begins[v] <= position) & (seen->ends[v] > position);
            scores[key * vectors + v] = choose(is_seen, scores[key * vectors + v], (lanes){} - INFINITY);
        }
}

/* Turn scores into weights (or pairs of weights) relative to the highest score so far; rescale earlier sums to match. */
INLINE void weigh(
    lanes *scores, long count, lanes *highest, lanes *total, lanes *out, long dim, const int vectors, const int is_paired)
{
    raise_highest(highest, scores, count, total, out, dim, vectors);
    for (long key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++)
            total[v] += scores[key * vectors + v] = power_of_2(scores[key * vectors + v] - highest[v]);
    if (is_paired)
        for (long pair = 0; pair < parts_of(count, 2); pair++)
            for (int v = 0; v < vectors; v++) {
                const lanes second = 2 * pair + 1 < count ? scores[(2 * pair + 1) * vectors + v] : (lanes){};
                scores[pair * vectors + v] = (lanes)pairs_of(scores[2 * pair * vectors + v], second);
            }
}

INLINE void attend_tile(const attention_work *w, const int64_t *slots, tile t, const int vectors, const int is_paired)
{
    const long dim = w->dim, from = t.first_head / t.group * dim, words = is_paired ? dim / 2 : dim;
    const places keys = from_number((places){w->keys, slots, w->key_stride}, from, is_paired);
    const places values = from_number((places){w->values, slots, w->key_stride}, from, is_paired);
    const view seen = view_of(w, t);
    lanes query[words * vectors], out[dim * vectors], scores[CHUNK * vectors];
    lanes highest[MOST_VECTORS], total[MOST_VECTORS] = {};
    int32_t pairs[is_paired ? CHUNK / 2 * dim : 1];
    for (int v = 0; v < vectors; v++)
        highest[v] = (lanes){} + LOWEST_SCORE;
    memset(out, 0, sizeof out);
    take_queries(query, w, t, vectors, is_paired);
    for (long at = first_position(seen.begin, is_paired), count; at < seen.end; at += count) {
        count = end_of_chunk(at, seen.end) - at;
        for (long key = 0; key < count; key += AT_ONCE)
            score(scores + key * vectors, keys, at + key, seen.end - 1, query, words, vectors, is_paired);
        if (at < seen.last_begin || at + count > seen.first_end)
            hide(scores, &seen, at, count, vectors);
        weigh(scores, count, highest, total, out, dim, vectors, is_paired);
        if (is_paired)
            pair_values(pairs, values, at, count, dim);
        for (long d = 0; d < dim; d += AT_ONCE)
            if (is_paired)
                add_pairs_of_values(out + d * vectors, pairs + d, dim, parts_of(count, 2), scores, vectors);
            else
                add_values(out + d * vectors, from_number(values, d, 0), at, count, scores, vectors);
    }
    give_outputs(w, t, out, total, vectors);
}

/* All rows --------------------------------------------------------------------------------------------------------- */

INLINE void attend_some(const attention_work *w, const int64_t *slots, tile t, const int is_paired)
{
    if (t.count == 1 && takes_row(w))
        keepsight_attend_row(w, slots, t.first_row, t.first_head);
    else if (t.count * t.group <= LANES)
        attend_tile(w, slots, t, 1, is_paired);
    else
        attend_tile(w, slots, t, MOST_VECTORS, is_paired);
}

static long rows_per_tile(const attention_work *w)
{
    return MOST_VECTORS * LANES / (w->heads / w->kv_heads);
}

/* Compute every `parts`-th tile: spread over the batch, as later tiles see more keys. */
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
                const tile t = {row, lesser(end - row, most_rows), kv_head * group, group};
                if (w->is_paired)
                    attend_some(w, w->slots[sequence], t, 1);
                else
                    attend_some(w, w->slots[sequence], t, 0);
            }
    }
}

/* Compute attention of each sequence's rows over its own keys. */
void keepsight_attend(const attention_work *w)
{
    const long rows = w->first_rows[w->sequences];
    share(attention_part, w, w->kv_heads * (w->sequences + rows / rows_per_tile(w)));
}

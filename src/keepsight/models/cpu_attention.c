/* Attention on a CPU: rows of several sequences, each over one interval of its sequence's keys and values. Those are float32,
 * or bfloat16, which is multiplied in pairs: a word of 4 bytes is a number or a pair.
 *
 * Keys are processed in chunks, and earlier sums are scaled down when a chunk has a higher score. Chunks begin at multiples
 * of their size, and every number is summed in a fixed order: a row's results are the same to the last bit whatever else is
 * in the batch.
 */

#include <stdatomic.h>

#include "cpu_attention.h"

/* Keys, or numbers of values, that are processed at once: with MOST_VECTORS vectors of queries they use all registers. */
#if LANES == 16
#define AT_ONCE 8
#else
#define AT_ONCE 4
#endif

/* The most tiles of a group (see below), and numbers of one query of each: with a chunk they fit the cache next to the innermost,
 * and the stack. */
#define MOST_TILES 8
#define MOST_NUMBERS 1024

/* Limits that the caller must check: the most query heads that share a key head, and a divisor and the most of the head
 * dimension. */
const long keepsight_queries_per_tile = MOST_VECTORS * LANES, keepsight_numbers_at_once = AT_ONCE;
const long keepsight_most_numbers = MOST_NUMBERS;

/* Tiles ------------------------------------------------------------------------------------------------------------
 *
 * A lane of a vector is a query: a row and one of the heads that share a key head. So scores, their maximum and their
 * sum need nothing from other lanes, and every number of keys and values is read once for all lanes of a tile.
 */

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

/* A tile's state after the keys so far. */
typedef struct {
    tile its;
    view seen;
    lanes *query; /* [words of dim, vectors] */
    lanes *out;   /* [dim, vectors] */
    lanes highest[MOST_VECTORS], total[MOST_VECTORS];
} progress;

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

INLINE int vectors_of(tile t)
{
    return t.count * t.group <= LANES ? 1 : MOST_VECTORS;
}

INLINE void begin_tile(progress *made, const attention_work *w, const int is_paired)
{
    const int vectors = vectors_of(made->its);
    made->seen = view_of(w, made->its);
    for (int v = 0; v < vectors; v++) {
        made->highest[v] = (lanes){} + LOWEST_SCORE;
        made->total[v] = (lanes){};
    }
    memset(made->out, 0, w->dim * vectors * sizeof *made->out);
    take_queries(made->query, w, made->its, vectors, is_paired);
}

/* Store the normalized outputs. */
INLINE void end_tile(const progress *made, const attention_work *w)
{
    const tile t = made->its;
    const int vectors = vectors_of(t);
    for (long lane = 0; lane < t.count * t.group; lane++) {
        const long row = t.first_row + lane / t.group, head = t.first_head + lane % t.group;
        float *numbers = w->out + row * w->out_stride + head * w->dim;
        const float inverse = 1.0f / made->total[lane / LANES][lane % LANES];
        for (long d = 0; d < w->dim; d++)
            numbers[d] = ((const float *)made->out)[d * vectors * LANES + lane] * inverse;
    }
}

/* Chunks -----------------------------------------------------------------------------------------------------------
 *
 * Tiles of the same sequence and key head form a group: a chunk of keys and values, which come from outer caches or memory
 * and may lie apart by a power of 2, for which caches have few places, is laid out once for all of them.
 */

/* With fewer groups, some parts would finish long before others. */
#define GROUPS_OF_PART 4

/* Keys and values from position `first` on, of one head. */
typedef struct {
    float *keys;   /* [CHUNK, words of dim] */
    float *values; /* [words of CHUNK, dim] */
    long first;
} chunk;

/* Interleave values in pairs; a last single value is paired with itself. */
INLINE void pair_values(int32_t *pairs, places values, long first, long count, long dim)
{
    for (long key = 0; key < count; key += 2, pairs += dim) {
        const uint16_t *one = place(values, first + key, 1);
        const uint16_t *other = place(values, first + lesser(key + 1, count - 1), 1);
        for (long i = 0; i < dim; i++)
            pairs[i] = (int32_t)(one[i] | (uint32_t)other[i] << 16);
    }
}

/* Lay out `count` keys and values from position `first` on. */
INLINE void lay_out(chunk *laid, places keys, places values, long first, long count, long dim, const int is_paired)
{
    const long words = is_paired ? dim / 2 : dim;
    laid->first = first;
    for (long key = 0; key < count; key++)
        memcpy(laid->keys + key * words, place(keys, first + key, is_paired), words * sizeof *laid->keys);
    if (is_paired)
        pair_values((int32_t *)laid->values, values, first, count, dim);
    else
        for (long key = 0; key < count; key++)
            memcpy(laid->values + key * dim, place(values, first + key, 0), dim * sizeof *laid->values);
}

/* Compute scores [AT_ONCE, vectors] of keys from `key` on with all queries of a tile; past the end `last` is repeated. */
INLINE void score(
    lanes *scores, const chunk *laid, long key, long last, const lanes *query, long words, const int vectors,
    const int is_paired)
{
    lanes sums[AT_ONCE][MOST_VECTORS] = {};
    const float *keys[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++)
        keys[i] = laid->keys + lesser(key + i, last) * words;
    for (long word = 0; word < words; word++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[i][v] = multiply_add(sums[i][v], keys[i] + word, query[word * vectors + v], is_paired);
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            scores[i * vectors + v] = sums[i][v];
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

/* Add AT_ONCE numbers of each of `count` values, or pairs, weighted, to [AT_ONCE, vectors] of the outputs. */
INLINE void add_values(
    lanes *out, const float *values, long dim, long count, const lanes *weights, const int vectors, const int is_paired)
{
    lanes sums[AT_ONCE][MOST_VECTORS];
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            sums[i][v] = out[i * vectors + v];
    for (long word = 0; word < count; word++)
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sums[i][v] = multiply_add(sums[i][v], values + word * dim + i, weights[word * vectors + v], is_paired);
    for (int i = 0; i < AT_ONCE; i++)
        for (int v = 0; v < vectors; v++)
            out[i * vectors + v] = sums[i][v];
}

/* Add the first values of some pairs. A tile may not see the second ones: those that are not finite must not reach it, though
 * their weights are 0. */
INLINE void add_half_a_pair(lanes *out, const float *pairs, long dim, const lanes *weights, const int vectors)
{
    float halves[dim];
    for (long d = 0; d < dim; d++)
        set_pair(halves + d, pair_at(pairs + d) & 0xffff);
    for (long d = 0; d < dim; d += AT_ONCE)
        add_values(out + d * vectors, halves + d, dim, 1, weights, vectors, 1);
}

/* Process the keys of a chunk that a tile sees: positions [at, end). */
INLINE void see_chunk(
    progress *made, const chunk *laid, long at, long end, long dim, const int vectors, const int is_paired)
{
    const long count = end - at, skipped = at - laid->first, words = is_paired ? dim / 2 : dim;
    lanes scores[CHUNK * vectors];
    for (long key = 0; key < count; key += AT_ONCE)
        score(scores + key * vectors, laid, skipped + key, skipped + count - 1, made->query, words, vectors, is_paired);
    if (at < made->seen.last_begin || end > made->seen.first_end)
        hide(scores, &made->seen, at, count, vectors);
    weigh(scores, count, made->highest, made->total, made->out, dim, vectors, is_paired);
    const float *values = laid->values + (is_paired ? skipped / 2 : skipped) * dim;
    const long whole = is_paired ? count / 2 : count;
    for (long d = 0; d < dim; d += AT_ONCE)
        add_values(made->out + d * vectors, values + d, dim, whole, scores, vectors, is_paired);
    if (is_paired && count % 2)
        add_half_a_pair(made->out, values + whole * dim, dim, scores + whole * vectors, vectors);
}

/* Process those of the positions [at, end) of a chunk that a tile sees. */
INLINE void see_some(progress *made, const chunk *laid, long at, long end, long dim, const int is_paired)
{
    const long begin = first_position(made->seen.begin, is_paired), from = begin > at ? begin : at;
    const long to = lesser(end, made->seen.end);
    if (from >= to)
        return;
    if (vectors_of(made->its) == 1)
        see_chunk(made, laid, from, to, dim, 1, is_paired);
    else
        see_chunk(made, laid, from, to, dim, MOST_VECTORS, is_paired);
}

/* Rows of one sequence that are computed together, with the heads that share a key head. */
typedef struct {
    tile rows;
    long of_tile; /* rows of a tile */
    const int64_t *slots;
} group;

INLINE void attend_group(const attention_work *w, group g, const int is_paired)
{
    const long dim = w->dim, words = is_paired ? dim / 2 : dim, from = g.rows.first_head / g.rows.group * dim;
    const places keys = from_number((places){w->keys, g.slots, w->key_stride}, from, is_paired);
    const places values = from_number((places){w->values, g.slots, w->key_stride}, from, is_paired);
    const long tiles = parts_of(g.rows.count, g.of_tile);
    lanes queries[tiles][words * MOST_VECTORS], outs[tiles][dim * MOST_VECTORS];
    float laid_keys[CHUNK * words], laid_values[CHUNK * words];
    chunk laid = {.keys = laid_keys, .values = laid_values};
    progress made[tiles];
    long begin = INT64_MAX, end = 0;
    for (long i = 0; i < tiles; i++) {
        made[i].its = g.rows;
        made[i].its.first_row += i * g.of_tile;
        made[i].its.count = lesser(g.rows.count - i * g.of_tile, g.of_tile);
        made[i].query = queries[i];
        made[i].out = outs[i];
        begin_tile(made + i, w, is_paired);
        begin = lesser(begin, made[i].seen.begin);
        end = made[i].seen.end > end ? made[i].seen.end : end;
    }
    for (long at = first_position(begin, is_paired), to; at < end; at = to) {
        to = end_of_chunk(at, end);
        lay_out(&laid, keys, values, at, to - at, dim, is_paired);
        for (long i = 0; i < tiles; i++)
            see_some(made + i, &laid, at, to, dim, is_paired);
    }
    for (long i = 0; i < tiles; i++)
        end_tile(made + i, w);
}

/* All rows --------------------------------------------------------------------------------------------------------- */

INLINE void attend_some(const attention_work *w, group g, const int is_paired)
{
    if (g.rows.count == 1 && takes_row(w))
        keepsight_attend_row(w, g.slots, g.rows.first_row, g.rows.first_head);
    else
        attend_group(w, g, is_paired);
}

static long rows_per_tile(const attention_work *w)
{
    return MOST_VECTORS * LANES / (w->heads / w->kv_heads);
}

static long tiles_of(const attention_work *w)
{
    return w->kv_heads * (w->sequences + w->first_rows[w->sequences] / rows_per_tile(w));
}

typedef struct {
    const attention_work *w;
    atomic_long *taken; /* groups so far, the last ones first */
} shared_attention;

/* Take one group after the other, the last first, as these see most keys: so all parts finish at about the same time. */
static void attention_part(const void *shared, long part, long parts)
{
    const shared_attention *all = shared;
    const attention_work *w = all->w;
    const long heads = w->heads / w->kv_heads, of_tile = rows_per_tile(w);
    const long most_tiles = lesser(MOST_TILES, MOST_NUMBERS / w->dim);
    const long of_group = of_tile * lesser(parts_of(tiles_of(w), GROUPS_OF_PART * parts), most_tiles);
    long next = atomic_fetch_add(all->taken, 1), index = 0;
    (void)part;
    for (long sequence = w->sequences - 1; sequence >= 0; sequence--) {
        const long begin = w->first_rows[sequence], end = w->first_rows[sequence + 1];
        for (long row = begin + (parts_of(end - begin, of_group) - 1) * of_group; row >= begin; row -= of_group)
            for (long kv_head = 0; kv_head < w->kv_heads; kv_head++) {
                if (index++ != next)
                    continue;
                next = atomic_fetch_add(all->taken, 1);
                const tile rows = {row, lesser(end - row, of_group), kv_head * heads, heads};
                const group g = {rows, of_tile, w->slots[sequence]};
                if (w->is_paired)
                    attend_some(w, g, 1);
                else
                    attend_some(w, g, 0);
            }
    }
}

/* Compute attention of each sequence's rows over its own keys. */
void keepsight_attend(const attention_work *w)
{
    atomic_long taken = 0;
    const shared_attention all = {w, &taken};
    share(attention_part, &all, tiles_of(w));
}

/* Attention of rows that all see all keys, as a picture's patches do, with AMX tiles (cpu_tiles.h); float32, or rounded to
 * bfloat16. Scores are [keys, queries] and outputs [numbers, queries], so that a lane of a vector is a query, as in
 * cpu_attention.c: keys and the numbers of values are the rows of products, queries and weights the others. Keys and values are
 * split, or rounded, once for all tiles.
 */

/* Whether this build has it; others use cpu_attention.c. */
#if !defined(__AMX_BF16__)
const long keepsight_attends_to_all = 0;
#else
const long keepsight_attends_to_all = 1;

#include <math.h>

#include "cpu_tiles.h"

typedef struct {
    float *out;                   /* [rows, dim] */
    const float *query;           /* [rows, dim] */
    const float *keys, *values;   /* [count, dim] */
    long rows, count, dim;
    long out_stride, query_stride, key_stride;
    long is_rounded; /* whether everything is rounded to bfloat16 */
    float scale;
} sight_work;

/* Keys that are rows, or a step, together; and the number of such groups that are weighed at once. */
#define GROUP TILE_INPUTS
#define GROUPS_AT_ONCE 8
/* Tiles of queries that use the same keys before the next keys, which come from outer caches or memory. */
#define MOST_SIGHTS 16
/* Numbers of values that are rows together. */
#define MOST_ROWS (2 * TILE_ROWS)

typedef struct {
    sight_work told;
    char *keys;   /* per group: its keys as rows */
    char *values; /* per group: numbers of values as rows, whose inputs are its keys */
} tiled_work;

/* The state of a tile of queries after the keys so far. */
typedef struct {
    lanes *out; /* [places of numbers, VECTORS] */
    char *query;
    lanes highest[VECTORS], total[VECTORS];
    long first_row, rows;
} sight;

INLINE long bytes_of_others(arithmetic kind)
{
    return kind == FLOAT32 ? PARTS * VECTORS * TILE_BYTES : VECTORS * TILE_BYTES;
}

/* Numbers of values are laid out in whole tiles. */
INLINE long places_of_numbers(long dim)
{
    return parts_of(dim, TILE_ROWS) * TILE_ROWS;
}

/* Lay out the keys and values of a group. Values of missing keys are 0; their scores are not used. */
INLINE void take_group(const tiled_work *w, long group, const arithmetic kind)
{
    const sight_work *told = &w->told;
    const long dim = told->dim, places = places_of_numbers(dim), stride = told->key_stride;
    const long first = group * GROUP, count = lesser(told->count - first, GROUP);
    take_inputs(w->keys + group * bytes_of_rows(GROUP, dim, kind), GROUP, told->keys + first * stride, stride, count, dim, kind);
    const float *from = told->values + first * stride;
    char *place = w->values + group * bytes_of_rows(places, GROUP, kind);
    for (long row = 0; row < places; row += MOST_ROWS) {
        const long its = lesser(places - row, MOST_ROWS), numbers = lesser(dim - row, its);
        float values[MOST_ROWS * GROUP] = {};
        for (long key = 0; key < count; key++)
            for (long i = 0; i < numbers; i++)
                values[i * GROUP + key] = from[key * stride + row + i];
        take_inputs(place + bytes_of_rows(row, GROUP, kind), its, values, GROUP, its, GROUP, kind);
    }
}

/* Lay out scaled queries, all their numbers in steps. */
INLINE void take_queries(char *others, const sight_work *told, long first_row, long rows, const arithmetic kind)
{
    const long steps = parts_of(told->dim, TILE_INPUTS);
    float query[steps * TILE_INPUTS * PANEL];
    memset(query, 0, sizeof query);
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < told->dim; i++)
            query[i * PANEL + row] = told->query[(first_row + row) * told->query_stride + i] * told->scale;
    if (kind == FLOAT32)
        for (long step = 0; step < steps; step++)
            split_pairs(others + step * bytes_of_others(kind), query + step * TILE_INPUTS * PANEL, TILE_INPUTS, 0, TILE_ROWS);
    else
        for (long pair = 0; pair < steps * TILE_ROWS; pair++)
            for (long i = 0; i < PANEL; i++)
                ((int32_t *)others)[pair * PANEL + i] = pair_of(query[2 * pair * PANEL + i], query[(2 * pair + 1) * PANEL + i]);
}

INLINE void add_step(
    const char *rows, long num_rows, const char *others, const int tiles, meanwhile *also, void *job,
    const arithmetic kind)
{
    if (kind == FLOAT32)
        add_split(rows, num_rows, TILE_ROWS, others, tiles, also, job);
    else {
        add_whole(rows, num_rows, TILE_ROWS, others, tiles, kind);
        also(job, 0);
    }
}

/* Compute the scores of a group, [GROUP, VECTORS]. */
INLINE void score_group(
    lanes *scores, const tiled_work *w, long group, const char *query, meanwhile *also, void *job, const arithmetic kind)
{
    const long dim = w->told.dim, bytes = bytes_of_rows(GROUP, TILE_INPUTS, kind);
    const char *keys = w->keys + group * bytes_of_rows(GROUP, dim, kind);
    begin_sums((float *)scores, TILE_ROWS, 1, 2);
    for (long step = 0; step < parts_of(dim, TILE_INPUTS); step++)
        add_step(keys + step * bytes, GROUP, query + step * bytes_of_others(kind), 2, also, job, kind);
    end_sums((places_of_sums){(float *)scores, PANEL}, TILE_ROWS, 2);
}

/* The conversion of scores to weights relative to the highest so far: places of [pairs of keys, VECTORS], some at once, up
 * to `end`. */
typedef struct {
    char *weights;
    const lanes *scores;
    lanes highest[VECTORS], total[VECTORS];
    long place, at_once, end;
} weighing;

INLINE void weigh_some(weighing *job, long end, const arithmetic kind)
{
    for (; job->place < lesser(end, job->end); job->place++) {
        const long pair = job->place / VECTORS, v = job->place % VECTORS;
        const lanes one = job->scores[2 * pair * VECTORS + v] - job->highest[v];
        const lanes other = job->scores[(2 * pair + 1) * VECTORS + v] - job->highest[v];
        const lanes first = kind == FLOAT32 ? power_of_2(one) : rough_power_of_2(one);
        const lanes second = kind == FLOAT32 ? power_of_2(other) : rough_power_of_2(other);
        job->total[v] += first + second;
        if (kind == FLOAT32) {
            char *tiles = job->weights + pair / TILE_ROWS * bytes_of_others(kind);
            split_pair(tiles + v * TILE_BYTES + pair % TILE_ROWS * 64, first, second);
        } else {
            const whole_lanes both = pairs_of(first, second);
            memcpy(job->weights + job->place * 64, &both, sizeof both);
        }
    }
}

INLINE void weigh_meanwhile(void *job, int product)
{
    (void)product;
    weighing *j = job;
    weigh_some(j, j->place + j->at_once, FLOAT32);
}

INLINE void weigh_roughly_meanwhile(void *job, int product)
{
    (void)product;
    weighing *j = job;
    weigh_some(j, j->place + j->at_once, BFLOAT16_BY_SAME);
}

INLINE meanwhile *weighs(const arithmetic kind)
{
    return kind == FLOAT32 ? weigh_meanwhile : weigh_roughly_meanwhile;
}

/* Add weighted values to some numbers of the outputs, of one or two tiles; `values`: those of the first group. */
INLINE void add_strip(
    float *sums, const char *values, long bytes_of_group, const char *weights, long groups, weighing *others, const int tiles,
    const arithmetic kind)
{
    begin_sums(sums, TILE_ROWS, 0, tiles);
    for (long group = 0; group < groups; group++, values += bytes_of_group, weights += bytes_of_others(kind))
        add_step(values, tiles * TILE_ROWS, weights, tiles, weighs(kind), others, kind);
    end_sums((places_of_sums){sums, PANEL}, TILE_ROWS, tiles);
}

/* Add weighted values of some groups to the outputs [places of numbers, VECTORS]. */
INLINE void add_values(
    lanes *out, const tiled_work *w, long first_group, long groups, const char *weights, weighing *others,
    const arithmetic kind)
{
    const long places = places_of_numbers(w->told.dim), bytes = bytes_of_rows(places, GROUP, kind);
    for (long row = 0; row < places; row += MOST_ROWS) {
        const char *values = w->values + first_group * bytes + bytes_of_rows(row, GROUP, kind);
        float *sums = (float *)(out + row * VECTORS);
        if (places - row <= TILE_ROWS)
            add_strip(sums, values, bytes, weights, groups, others, 1, kind);
        else
            add_strip(sums, values, bytes, weights, groups, others, 2, kind);
    }
}

INLINE void begin_sight(sight *seen, const tiled_work *w, const arithmetic kind)
{
    memset(seen->out, 0, places_of_numbers(w->told.dim) * VECTORS * sizeof *seen->out);
    for (int v = 0; v < VECTORS; v++) {
        seen->highest[v] = (lanes){} + LOWEST_SCORE;
        seen->total[v] = (lanes){};
    }
    take_queries(seen->query, &w->told, seen->first_row, seen->rows, kind);
}

#define PLACES (GROUPS_AT_ONCE * GROUP * VECTORS)

/* Compute the scores of a tile of queries with some groups of keys, while another tile's are weighed. */
INLINE void score(
    lanes *scores, const sight *seen, const tiled_work *w, long first, long groups, weighing *others, const arithmetic kind)
{
    for (long group = 0; group < groups; group++)
        score_group(scores + group * GROUP * VECTORS, w, first + group, seen->query, weighs(kind), others, kind);
    for (long key = w->told.count - first * GROUP; key < groups * GROUP; key++)
        for (int v = 0; v < VECTORS; v++)
            scores[key * VECTORS + v] = (lanes){} - INFINITY;
}

/* The number of products, per group and tile of queries, during which another tile is weighed. Rounded weights are computed
 * only while scores are. */
INLINE long products_of_group(long dim, arithmetic kind)
{
    const long of_scores = parts_of(dim, TILE_INPUTS), of_values = parts_of(places_of_numbers(dim), MOST_ROWS);
    return kind == FLOAT32 ? (of_scores + of_values) * NUM_PRODUCTS : of_scores;
}

/* Process some groups of keys: each tile of queries is weighed while the next one is scored and the values of the one before
 * are added. */
INLINE void see_groups(sight *seen, long sights, const tiled_work *w, long first, long groups, const arithmetic kind)
{
    char weights[2][GROUPS_AT_ONCE * bytes_of_others(kind)] __attribute__((aligned(64)));
    lanes scores[2][PLACES];
    weighing job = {};
    score(scores[0], seen, w, first, groups, &job, kind);
    for (long i = 0; i < sights; i++) {
        sight *s = seen + i;
        raise_highest(s->highest, scores[i % 2], groups * GROUP, s->total, s->out, w->told.dim, VECTORS);
        job = (weighing){.weights = weights[i % 2], .scores = scores[i % 2], .end = groups * GROUP / 2 * VECTORS};
        job.at_once = parts_of(job.end, groups * products_of_group(w->told.dim, kind));
        memcpy(job.highest, s->highest, sizeof job.highest);
        memcpy(job.total, s->total, sizeof job.total);
        if (i + 1 < sights)
            score(scores[(i + 1) % 2], s + 1, w, first, groups, &job, kind);
        if (i)
            add_values(s[-1].out, w, first, groups, weights[(i - 1) % 2], &job, kind);
        weigh_some(&job, job.end, kind);
        memcpy(s->total, job.total, sizeof job.total);
    }
    add_values(seen[sights - 1].out, w, first, groups, weights[(sights - 1) % 2], &job, kind);
}

INLINE void end_sight(const sight *seen, const sight_work *told)
{
    const float *out = (const float *)seen->out, *total = (const float *)seen->total;
    for (long row = 0; row < seen->rows; row++)
        for (long i = 0; i < told->dim; i++)
            told->out[(seen->first_row + row) * told->out_stride + i] = out[i * PANEL + row] / total[row];
}

/* Compute rows [first_row, end), at most MOST_SIGHTS tiles of queries. */
INLINE void attend_sights(const tiled_work *w, sight *seen, long first_row, long end, const arithmetic kind)
{
    const long groups = parts_of(w->told.count, GROUP), sights = parts_of(end - first_row, PANEL);
    for (long i = 0; i < sights; i++) {
        seen[i].first_row = first_row + i * PANEL;
        seen[i].rows = lesser(end - seen[i].first_row, PANEL);
        begin_sight(seen + i, w, kind);
    }
    for (long first = 0; first < groups; first += GROUPS_AT_ONCE)
        see_groups(seen, sights, w, first, lesser(groups - first, GROUPS_AT_ONCE), kind);
    for (long i = 0; i < sights; i++)
        end_sight(seen + i, &w->told);
}

INLINE void attend_rows(const tiled_work *w, long first_row, long end, const arithmetic kind)
{
    const long bytes_of_query = parts_of(w->told.dim, TILE_INPUTS) * bytes_of_others(kind);
    const long bytes_of_out = places_of_numbers(w->told.dim) * VECTORS * sizeof(lanes);
    char *room = room_for(MOST_SIGHTS * (bytes_of_query + bytes_of_out));
    if (!room)
        return;
    sight seen[MOST_SIGHTS];
    for (long i = 0; i < MOST_SIGHTS; i++) {
        seen[i].query = room + i * (bytes_of_query + bytes_of_out);
        seen[i].out = (lanes *)(seen[i].query + bytes_of_query);
    }
    shape_tiles(TILE_ROWS);
    for (; first_row < end; first_row += MOST_SIGHTS * PANEL)
        attend_sights(w, seen, first_row, lesser(end, first_row + MOST_SIGHTS * PANEL), kind);
    leave_tiles();
    free(room);
}

static void groups_part(const void *shared, long part, long parts)
{
    const tiled_work *w = shared;
    const long groups = parts_of(w->told.count, GROUP);
    for (long group = groups * part / parts; group < groups * (part + 1) / parts; group++)
        if (w->told.is_rounded)
            take_group(w, group, BFLOAT16_BY_SAME);
        else
            take_group(w, group, FLOAT32);
}

static void tiles_part(const void *shared, long part, long parts)
{
    const tiled_work *w = shared;
    const long sights = parts_of(w->told.rows, PANEL);
    const long first = sights * part / parts * PANEL, end = lesser(sights * (part + 1) / parts * PANEL, w->told.rows);
    if (w->told.is_rounded)
        attend_rows(w, first, end, BFLOAT16_BY_SAME);
    else
        attend_rows(w, first, end, FLOAT32);
}

void keepsight_attend_to_all(const sight_work *told)
{
    const arithmetic kind = told->is_rounded ? BFLOAT16_BY_SAME : FLOAT32;
    const long groups = parts_of(told->count, GROUP);
    tiled_work work = {
        .told = *told,
        .keys = room_for(groups * bytes_of_rows(GROUP, told->dim, kind)),
        .values = room_for(groups * bytes_of_rows(places_of_numbers(told->dim), GROUP, kind)),
    };
    if (work.keys && work.values) {
        share(groups_part, &work, parts_for(told->count * told->dim));
        share(tiles_part, &work, parts_for(told->rows * told->count));
    }
    free(work.keys);
    free(work.values);
}

#endif

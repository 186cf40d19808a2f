/* Some rows by a panel of a weight with tiles (cpu_tiles.h): one or two tiles of rows by the panel's two.
 *
 * Rows are laid out as their tiles are read: [steps of TILE_INPUTS inputs, parts, rows, TILE_INPUTS].  A weight of
 * bfloat16 is read where it lies; one of float32 is split while the first rows are multiplied by it.
 */

#ifndef KEEPSIGHT_CPU_PRODUCT_TILES_H
#define KEEPSIGHT_CPU_PRODUCT_TILES_H

#include "cpu_tiles.h"

#define MOST_ROWS (2 * TILE_ROWS)
/* Rows whose inputs share a core's own cache; they are laid out anew for each block of those, so that all panels pass first. */
#define ROWS_AT_ONCE (10 * MOST_ROWS)
#define PANELS_AT_ONCE INT64_MAX
#define STEPS_KEPT 4

INLINE long most_inputs_of_block(arithmetic kind)
{
    return kind == BFLOAT16_BY_SAME ? 2048 : 768;
}

/* So many inputs' weights stay in the innermost cache until all rows are multiplied by them. */
INLINE long inputs_per_strip(arithmetic kind)
{
    return TILE_INPUTS * (kind == FLOAT32 ? STEPS_KEPT : 16);
}

/* What a part takes, in what one row takes to be prepared: a panel of float32, split, is as much as six. */
INLINE long cost_of_part(long rows, long panels, arithmetic kind)
{
    return 10 * parts_of(rows, MOST_ROWS) * panels + rows + (kind == FLOAT32 ? 6 * panels : 0);
}

typedef struct {
    float sums[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    /* Of a weight of float32 [STEPS_KEPT, PARTS, VECTORS] tiles, else the last step if it is not whole. */
    char weight[STEPS_KEPT * PARTS * VECTORS * TILE_BYTES] __attribute__((aligned(64)));
    long rows_of_tile;
} product_room;

INLINE void enter(product_room *room)
{
    room->rows_of_tile = 0;
}

INLINE void leave(product_room *room)
{
    (void)room;
    leave_tiles();
}

INLINE long inputs_at_once(arithmetic kind)
{
    (void)kind;
    return TILE_INPUTS;
}

/* The next step's weight, and to which tiles. */
typedef struct {
    char *tiles;
    const float *weight;
} split_job;

INLINE void split_meanwhile(void *job, int product)
{
    const split_job *j = job;
    const long first = TILE_ROWS * product / NUM_PRODUCTS, end = TILE_ROWS * (product + 1) / NUM_PRODUCTS;
    split_pairs(j->tiles, j->weight, TILE_INPUTS, first, end);
}

INLINE void multiply_strip(
    float *out, const char *rows, long num_rows, const char *weight, long inputs, int is_first, int is_new,
    product_room *room, const int tiles, const arithmetic kind)
{
    const long steps = parts_of(inputs, TILE_INPUTS), bytes_of_rows_of_step = bytes_of_rows(num_rows, TILE_INPUTS, kind);
    const long bytes_of_weight = TILE_INPUTS / inputs_of_step(kind) * bytes_of_step(kind);
    /* The second tile may have some of the first one's: twice the same numbers. */
    const long second = num_rows - room->rows_of_tile;
    begin_sums(out, second, is_first, tiles);
    const long bytes_of_tiles = PARTS * VECTORS * TILE_BYTES;
    if (kind == FLOAT32 && is_new)
        split_pairs(room->weight, (const float *)weight, inputs, 0, TILE_ROWS);
    for (long step = 0; step < steps; step++, weight += bytes_of_weight, rows += bytes_of_rows_of_step) {
        const long left = inputs - step * TILE_INPUTS;
        if (kind == FLOAT32) {
            const char *its = room->weight + step % STEPS_KEPT * bytes_of_tiles;
            char *next = room->weight + (step + 1) % STEPS_KEPT * bytes_of_tiles;
            const float *next_weight = (const float *)(weight + bytes_of_weight);
            if (is_new && left >= 2 * TILE_INPUTS)
                add_split(rows, num_rows, second, its, tiles, split_meanwhile, &(split_job){next, next_weight});
            else
                add_split(rows, num_rows, second, its, tiles, nothing_meanwhile, 0);
            if (is_new && left > TILE_INPUTS && left < 2 * TILE_INPUTS)
                split_pairs(next, next_weight, left - TILE_INPUTS, 0, TILE_ROWS);
            continue;
        }
        if (is_new)
            for (long byte = 0; byte < bytes_of_weight; byte += 64)
                __builtin_prefetch(weight + BYTES_AHEAD + byte);
        if (left < TILE_INPUTS) {
            memset(room->weight, 0, bytes_of_weight);
            memcpy(room->weight, weight, parts_of(left, 2) * bytes_of_step(kind));
        }
        add_whole(rows, num_rows, second, left < TILE_INPUTS ? room->weight : weight, tiles, kind);
    }
    end_sums(out, second, tiles);
}

INLINE void multiply_rows(
    float *out, const void *prepared, long rows, const void *weight, long inputs, int is_first, int is_new,
    product_room *room, const arithmetic kind)
{
    const long rows_of_tile = rows <= TILE_ROWS ? rows : parts_of(rows, 2);
    /* Shaping takes as long as some products. */
    if (room->rows_of_tile < rows_of_tile || room->rows_of_tile > rows)
        shape_tiles(room->rows_of_tile = rows_of_tile);
    if (rows <= TILE_ROWS)
        multiply_strip(out, prepared, rows, weight, inputs, is_first, is_new, room, 1, kind);
    else
        multiply_strip(out, prepared, rows, weight, inputs, is_first, is_new, room, 2, kind);
}

#endif

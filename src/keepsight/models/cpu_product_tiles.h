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
/* Steps of a weight of float32 that rows are multiplied by before the next, and those that are split ahead. */
#define STEPS_KEPT 2
#define STEPS_AHEAD 2
#define SLOTS (STEPS_KEPT + STEPS_AHEAD)

INLINE long most_inputs_of_block(arithmetic kind)
{
    return kind == BFLOAT16_BY_SAME ? 2048 : 768;
}

/* So many inputs' weights stay in the innermost cache until all rows are multiplied by them. */
INLINE long inputs_per_strip(arithmetic kind)
{
    return TILE_INPUTS * (kind == FLOAT32 ? STEPS_KEPT : 16);
}

/* What a part takes, nearly: by so much more than a product of tiles does a row that is laid out, and a panel that is read. */
INLINE long cost_of_part(long rows, long panels, arithmetic kind)
{
    const long of_row = kind == BFLOAT16_BY_SAME ? 3 : 1;
    return 5 * parts_of(rows, TILE_ROWS) * panels + of_row * rows + 6 * panels;
}

typedef struct {
    float sums[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    /* Of a weight of float32 [SLOTS, PARTS, VECTORS] tiles, else the last step if it is not whole. */
    char weight[SLOTS * PARTS * VECTORS * TILE_BYTES] __attribute__((aligned(64)));
    long slot, used;  /* of the first step at hand; and how many were at hand */
    const char *next; /* the step behind those: before `end` it lies split, and so do others ahead */
    const char *end;  /* of steps that may be split for the next panel: of a weight whose steps are all whole */
    long rows_of_tile;
} product_room;

/* As few tiles as can be, all of one shape, as shaping takes as long as some products. */
INLINE long rows_of_tile(long rows)
{
    return parts_of(rows, parts_of(rows, TILE_ROWS));
}

INLINE strip strip_of(long rows, long index)
{
    const long of_tile = rows_of_tile(rows), first = index * 2 * of_tile, its = lesser(rows - first, 2 * of_tile);
    return (strip){first, its, parts_of(its, of_tile) * of_tile};
}

INLINE void enter(product_room *room, const product_work *w, long rows)
{
    const char *weight = w->weight;
    const long bytes = parts_of(w->outputs, PANEL) * w->inputs * bytes_of_step(w->kind);
    shape_tiles(room->rows_of_tile = rows_of_tile(rows));
    room->slot = room->used = 0;
    room->next = 0;
    room->end = w->kind == FLOAT32 && w->inputs % TILE_INPUTS == 0 ? weight + bytes : weight;
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

INLINE char *slot_of(product_room *room, long step)
{
    return room->weight + (room->slot + step) % SLOTS * (PARTS * VECTORS * TILE_BYTES);
}

/* How many inputs the step at `weight` has: of those at hand, of which so many are `left` from it on, or of the next ones. */
INLINE long inputs_to_split(const product_room *room, const char *weight, long left)
{
    return weight < room->end ? TILE_INPUTS : lesser(left, TILE_INPUTS);
}

/* Of a weight of float32, which is split while the first rows are multiplied by it, some steps before its use: what is written
 * can be read once the products before it are done. */
INLINE void add_steps_of_split(
    const char *rows, long num_rows, long second, const char *weight, long inputs, int is_new, product_room *room,
    const int tiles)
{
    const long bytes_of_weight = TILE_INPUTS * bytes_of_step(FLOAT32), steps = parts_of(inputs, TILE_INPUTS);
    if (is_new) {
        room->slot = (room->slot + room->used) % SLOTS;
        const int is_split = room->next == weight && weight < room->end;
        for (long step = 0; step < STEPS_AHEAD && !is_split; step++) {
            const char *its = weight + step * bytes_of_weight;
            split_pairs(
                slot_of(room, step), (const float *)its, inputs_to_split(room, its, inputs - step * TILE_INPUTS), 0, TILE_ROWS);
        }
    }
    for (long step = 0; step < steps; step++, rows += bytes_of_rows(num_rows, TILE_INPUTS, FLOAT32)) {
        const char *its = slot_of(room, step), *next = weight + (step + STEPS_AHEAD) * bytes_of_weight;
        const long some = inputs_to_split(room, next, inputs - (step + STEPS_AHEAD) * TILE_INPUTS);
        split_job job = {slot_of(room, step + STEPS_AHEAD), (const float *)next};
        if (is_new && some == TILE_INPUTS)
            add_split(rows, num_rows, second, its, tiles, split_meanwhile, &job);
        else
            add_split(rows, num_rows, second, its, tiles, nothing_meanwhile, 0);
        if (is_new && some > 0 && some < TILE_INPUTS)
            split_pairs(job.tiles, job.weight, some, 0, TILE_ROWS);
    }
    if (is_new) {
        room->next = weight + steps * bytes_of_weight;
        room->used = steps;
    }
}

INLINE void add_steps_of_whole(
    const char *rows, long num_rows, long second, const char *weight, long inputs, int is_new, product_room *room,
    const int tiles, const arithmetic kind)
{
    const long bytes_of_weight = TILE_ROWS * bytes_of_step(kind);
    for (long input = 0; input < inputs; input += TILE_INPUTS, weight += bytes_of_weight) {
        if (is_new)
            for (long byte = 0; byte < bytes_of_weight; byte += 64)
                __builtin_prefetch(weight + BYTES_AHEAD + byte, 0, 2);
        const char *others = weight;
        if (inputs - input < TILE_INPUTS) {
            memset(room->weight, 0, bytes_of_weight);
            others = memcpy(room->weight, weight, parts_of(inputs - input, 2) * bytes_of_step(kind));
        }
        add_whole(rows, num_rows, second, others, tiles, kind);
        rows += bytes_of_rows(num_rows, TILE_INPUTS, kind);
    }
}

INLINE void multiply_strip(
    places_of_sums to, const float *sums, const char *rows, long num_rows, const char *weight, long inputs, int is_first,
    int is_new, product_room *room, const int tiles, const arithmetic kind)
{
    const long second = room->rows_of_tile;
    begin_sums(sums, second, is_first, tiles);
    if (kind == FLOAT32)
        add_steps_of_split(rows, num_rows, second, weight, inputs, is_new, room, tiles);
    else
        add_steps_of_whole(rows, num_rows, second, weight, inputs, is_new, room, tiles, kind);
    end_sums(to, second, tiles);
}

INLINE void multiply_rows(
    places_of_sums to, const float *sums, const void *prepared, long rows, const void *weight, long inputs, int is_first,
    int is_new, product_room *room, const arithmetic kind)
{
    if (rows == room->rows_of_tile)
        multiply_strip(to, sums, prepared, rows, weight, inputs, is_first, is_new, room, 1, kind);
    else
        multiply_strip(to, sums, prepared, rows, weight, inputs, is_first, is_new, room, 2, kind);
}

#endif

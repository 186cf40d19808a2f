/* Multiplies some rows by a panel of a weight with tiles (cpu_tiles.h): one or two tiles of rows by the panel's two.
 *
 * Rows are laid out in the order in which tiles read them: [steps of TILE_INPUTS inputs, parts, rows, TILE_INPUTS]. A
 * bfloat16 weight is read in place; a float32 weight is split while rows are multiplied by the stretch before; an int8
 * weight is widened to bfloat16, some inputs at a time.
 */

#ifndef KEEPSIGHT_CPU_PRODUCT_TILES_H
#define KEEPSIGHT_CPU_PRODUCT_TILES_H

#include "cpu_tiles.h"

#define MOST_ROWS (2 * TILE_ROWS)
/* Rows whose inputs fit a core's own cache. They are laid out again for each block of inputs, so all panels use one block
 * before the next. */
#define ROWS_AT_ONCE (10 * MOST_ROWS)
#define PANELS_AT_ONCE INT64_MAX
/* The most inputs of a float32 block, whose weights for a panel are split and kept until all rows are multiplied by them. With
 * few rows a stretch has fewer inputs, so that the split weights stay in the innermost cache. */
#define MOST_INPUTS_SPLIT 640
#define FEW_STRIPS 2
#define FEW_INPUTS_SPLIT (2 * TILE_INPUTS)

INLINE long most_inputs_of_block(arithmetic kind)
{
    return rounds_rows(kind) ? 2048 : MOST_INPUTS_SPLIT;
}

/* The number of inputs whose weights stay in the caches until all rows are multiplied by them. */
INLINE long inputs_at_hand(long strips, arithmetic kind)
{
    if (kind != FLOAT32)
        return strips > 1 || is_of_int8(kind) ? 16 * TILE_INPUTS : INT64_MAX;
    return strips > FEW_STRIPS ? MOST_INPUTS_SPLIT : FEW_INPUTS_SPLIT;
}

#define BYTES_OF_SPLIT (PARTS * VECTORS * TILE_BYTES)

/* The splitting of a weight's stretch, pair by pair: the same number of pairs with each product that is computed meanwhile. */
typedef struct {
    char *tiles;
    stretch weight;
    uint64_t pairs_of_product, due; /* fixed point, in units of 1 / ONE_PAIR */
    long pair;
} splitting;

#define ONE_PAIR ((uint64_t)1 << 32)

typedef struct {
    float sums[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    /* float32: two split stretches, the current one and the next. Otherwise the first holds the last step if it is
     * incomplete, and the second, for int8, the widened stretch. */
    char weight[2][MOST_INPUTS_SPLIT / TILE_INPUTS * BYTES_OF_SPLIT] __attribute__((aligned(64)));
    int at_hand;
    splitting next;
    long strips, rows_of_tile;
} product_room;

/* Uses as few tiles as possible, all of one shape, as configuring shapes takes as long as some products. */
INLINE long rows_of_tile(long rows)
{
    return parts_of(rows, parts_of(rows, TILE_ROWS));
}

INLINE strip strip_of(long rows, long index)
{
    const long of_tile = rows_of_tile(rows), first = index * 2 * of_tile, its = lesser(rows - first, 2 * of_tile);
    return (strip){first, its, parts_of(its, of_tile) * of_tile};
}

INLINE void enter(product_room *room, long rows)
{
    room->strips = parts_of(rows, MOST_ROWS);
    shape_tiles(room->rows_of_tile = rows_of_tile(rows));
    room->at_hand = 0;
    room->next = (splitting){};
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

/* Split pairs [first, end) of the current step. */
INLINE void split_some(const splitting *s, long first, long end)
{
    char *tiles = s->tiles + s->pair / TILE_ROWS * BYTES_OF_SPLIT + s->pair % TILE_ROWS * 64;
    split_pairs(tiles, (const float *)s->weight.first + s->pair * 2 * PANEL, s->weight.inputs - 2 * s->pair, first, end);
}

INLINE void split_up_to(splitting *s, long end)
{
    for (; s->pair < end; s->pair++)
        split_some(s, 0, 1);
}

INLINE void split_meanwhile(void *job, int product)
{
    (void)product;
    splitting *s = job;
    s->due += s->pairs_of_product;
    split_up_to(s, s->due / ONE_PAIR);
}

/* For a single strip: one step is split while one is multiplied, so the number of pairs per product is a constant. */
INLINE void split_step_meanwhile(void *job, int product)
{
    splitting *s = job;
    if (2 * s->pair < s->weight.inputs)
        split_some(s, product * TILE_ROWS / NUM_PRODUCTS, (product + 1) * TILE_ROWS / NUM_PRODUCTS);
    if (product == NUM_PRODUCTS - 1)
        s->pair += TILE_ROWS;
}

/* Round up to whole steps. */
INLINE long places_of_inputs(long inputs)
{
    return parts_of(inputs, TILE_INPUTS) * TILE_INPUTS;
}

INLINE long places_of_pairs(stretch weight)
{
    return places_of_inputs(weight.inputs) / 2;
}

/* Widen a stretch of int8 to pairs of bfloat16, in whole steps of tiles. */
INLINE void widen_stretch(char *pairs, stretch weight)
{
    const long fours = parts_of(weight.inputs, 4), whole = places_of_inputs(weight.inputs) / 4;
    const char *words = weight.first;
    for (long four = 0; four < fours; four++, words += BYTES_OF_STEP, pairs += 2 * BYTES_OF_STEP) {
        __builtin_prefetch(words + BYTES_AHEAD, 0, 2);
        __builtin_prefetch(words + BYTES_AHEAD + 64, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < 2 * VECTORS; i++) {
            const whole_lanes its = (whole_lanes)vector_at((const float *)words + i % VECTORS * LANES);
            const whole_lanes pair = two_of_four(its, i / VECTORS * 2);
            memcpy(pairs + i * sizeof pair, &pair, sizeof pair);
        }
    }
    memset(pairs, 0, (whole - fours) * 2 * BYTES_OF_STEP);
}

/* Make `its` the current stretch, which was split meanwhile if it was the next one; `next` will be split while all strips are
 * multiplied. */
INLINE void take_stretch(product_room *room, stretch its, stretch next, arithmetic kind)
{
    if (is_of_int8(kind))
        widen_stretch(room->weight[1], its);
    if (kind != FLOAT32)
        return;
    splitting *s = &room->next;
    if (s->weight.first != its.first)
        *s = (splitting){.tiles = room->weight[room->at_hand], .weight = its};
    split_up_to(s, places_of_pairs(its));
    const uint64_t products = room->strips * parts_of(its.inputs, TILE_INPUTS) * NUM_PRODUCTS;
    room->at_hand = s->tiles == room->weight[1];
    *s = (splitting){room->weight[!room->at_hand], next, (places_of_pairs(next) * ONE_PAIR + products - 1) / products, 0, 0};
}

/* Multiply by a split float32 stretch, while the next one is split. */
INLINE void add_steps_of_split(
    const char *rows, long num_rows, long second, long inputs, product_room *room, const int tiles, meanwhile *also)
{
    const char *others = room->weight[room->at_hand];
    for (long input = 0; input < inputs; input += TILE_INPUTS, others += BYTES_OF_SPLIT) {
        add_split(rows, num_rows, second, others, tiles, also, &room->next);
        rows += bytes_of_rows(num_rows, TILE_INPUTS, FLOAT32);
    }
}

INLINE void add_steps_of_whole(
    const char *rows, long num_rows, long second, const char *weight, long inputs, int is_new, product_room *room,
    const int tiles, const arithmetic kind)
{
    const long bytes_of_weight = TILE_ROWS * BYTES_OF_STEP;
    for (long input = 0; input < inputs; input += TILE_INPUTS, weight += bytes_of_weight) {
        if (is_new)
            for (long byte = 0; byte < bytes_of_weight; byte += 64)
                __builtin_prefetch(weight + BYTES_AHEAD + byte, 0, 2);
        const char *others = weight;
        if (inputs - input < TILE_INPUTS) {
            memset(room->weight[0], 0, bytes_of_weight);
            others = memcpy(room->weight[0], weight, parts_of(inputs - input, 2) * BYTES_OF_STEP);
        }
        add_whole(rows, num_rows, second, others, tiles, kind);
        rows += bytes_of_rows(num_rows, TILE_INPUTS, kind);
    }
}

INLINE void multiply_strip(
    places_of_sums to, const float *sums, const char *rows, long num_rows, stretch weight, int is_first, int is_new,
    product_room *room, const int tiles, const arithmetic kind)
{
    const long second = room->rows_of_tile;
    if (is_first || sums)
        begin_sums(sums, second, is_first, tiles);
    if (kind == FLOAT32 && room->strips == 1)
        add_steps_of_split(rows, num_rows, second, weight.inputs, room, tiles, split_step_meanwhile);
    else if (kind == FLOAT32)
        add_steps_of_split(rows, num_rows, second, weight.inputs, room, tiles, split_meanwhile);
    else if (is_of_int8(kind))
        add_steps_of_whole(
            rows, num_rows, second, room->weight[1], places_of_inputs(weight.inputs), 0, room, tiles, kind);
    else
        add_steps_of_whole(rows, num_rows, second, weight.first, weight.inputs, is_new, room, tiles, kind);
    if (to.first)
        end_sums(to, second, tiles);
}

INLINE void multiply_rows(
    places_of_sums to, const float *sums, const void *prepared, long rows, stretch weight, int is_first, int is_new,
    product_room *room, const arithmetic kind)
{
    if (rows == room->rows_of_tile)
        multiply_strip(to, sums, prepared, rows, weight, is_first, is_new, room, 1, kind);
    else
        multiply_strip(to, sums, prepared, rows, weight, is_first, is_new, room, 2, kind);
}

#endif

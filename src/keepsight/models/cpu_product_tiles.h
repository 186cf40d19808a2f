/* Some rows by a panel of a weight with tiles (cpu_tiles.h): one or two tiles of rows by the panel's two.
 *
 * Rows are laid out as their tiles are read: [steps of TILE_INPUTS inputs, parts, rows, TILE_INPUTS].  A weight of
 * bfloat16 is read where it lies; one of float32 is split while the first rows are multiplied by it.
 */

#ifndef KEEPSIGHT_CPU_PRODUCT_TILES_H
#define KEEPSIGHT_CPU_PRODUCT_TILES_H

#include "cpu_products.h"
#include "cpu_tiles.h"

#define MOST_ROWS (2 * TILE_ROWS)
/* Rows whose inputs share a core's own cache; they are laid out anew for each block of those, so that all panels pass first. */
#define ROWS_AT_ONCE (10 * MOST_ROWS)
#define PANELS_AT_ONCE INT64_MAX
/* So far ahead of its use a weight is asked of memory. */
#define BYTES_AHEAD 2048

INLINE long parts_of_rows_of(arithmetic kind)
{
    return kind == BFLOAT16_BY_SAME ? 1 : PARTS;
}

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

INLINE long bytes_of_rows(long rows, long inputs, arithmetic kind)
{
    return rows * parts_of(inputs, TILE_INPUTS) * parts_of_rows_of(kind) * 64;
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

typedef uint16_t row_of_tile __attribute__((vector_size(64)));

/* The upper halves of two vectors' numbers. */
INLINE row_of_tile upper_halves(unsigned_lanes first, unsigned_lanes second)
{
#define UPPER 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define UPPER_OF_SECOND 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63
#if defined(__clang__)
    return __builtin_shufflevector((row_of_tile)first, (row_of_tile)second, UPPER, UPPER_OF_SECOND);
#else
    return __builtin_shuffle((row_of_tile)first, (row_of_tile)second, (row_of_tile){UPPER, UPPER_OF_SECOND});
#endif
}

/* `count` inputs of some rows; missing ones are 0. */
INLINE void take_inputs(void *prepared, const float *hidden, long stride, long rows, long count, const arithmetic kind)
{
    const long bytes_of_part = rows * 64, bytes_of_step = parts_of_rows_of(kind) * bytes_of_part;
    for (long row = 0; row < rows; row++, hidden += stride)
        for (long first = 0; first < count; first += TILE_INPUTS) {
            char *place = (char *)prepared + first / TILE_INPUTS * bytes_of_step + row * 64;
            float edge[TILE_INPUTS] = {};
            const float *numbers = hidden + first;
            if (count - first < TILE_INPUTS)
                numbers = memcpy(edge, numbers, (count - first) * sizeof *edge);
            unsigned_lanes one[PARTS], other[PARTS];
            if (kind == BFLOAT16_BY_SAME) {
                one[0] = nearest(vector_at(numbers)), other[0] = nearest(vector_at(numbers + LANES));
            } else {
                split(one, vector_at(numbers), 1);
                split(other, vector_at(numbers + LANES), 1);
            }
#pragma GCC unroll 3
            for (int part = 0; part < parts_of_rows_of(kind); part++) {
                const row_of_tile upper = upper_halves(one[part], other[part]);
                memcpy(place + part * bytes_of_part, &upper, sizeof upper);
            }
        }
}

/* Pairs [first, end) of one step's of a weight of float32, of which `inputs` are there, to [PARTS, VECTORS] tiles. */
INLINE void split_pairs(char *tiles, const float *weight, long inputs, long first, long end)
{
    for (long pair = first; pair < end; pair++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const float *one = weight + 2 * pair * PANEL + v * LANES, *other = one + PANEL;
            unsigned_lanes first_parts[PARTS], second_parts[PARTS];
            __builtin_prefetch((const char *)one + BYTES_AHEAD);
            __builtin_prefetch((const char *)other + BYTES_AHEAD);
            split(first_parts, 2 * pair < inputs ? vector_at(one) : (lanes){}, 0);
            split(second_parts, 2 * pair + 1 < inputs ? vector_at(other) : (lanes){}, 0);
#pragma GCC unroll 3
            for (int part = 0; part < PARTS; part++) {
                const unsigned_lanes pairs = first_parts[part] >> 16 | (second_parts[part] & 0xffff0000u);
                memcpy(tiles + (part * VECTORS + v) * TILE_BYTES + pair * 64, &pairs, sizeof pairs);
            }
        }
}

/* Which parts of rows and weight are multiplied; from one to the next only one of both is another. */
static const struct {
    int of_rows, of_weight;
} PRODUCTS[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}};

INLINE void load_rows(const char *rows, long second, const int tiles)
{
    LOAD_TILE(4, rows, 64);
    if (tiles == 2)
        LOAD_TILE(5, rows + second * 64, 64);
}

INLINE void load_weight(const char *weight, long bytes_between, long stride)
{
    LOAD_TILE(6, weight, stride);
    LOAD_TILE(7, weight + bytes_between, stride);
}

#define NUM_PRODUCTS 6

/* Of split rows by a split weight; meanwhile, if there is one, the `next` step's weight is split, little by little, as the
 * processor looks only so far ahead for what else it could do. */
INLINE void add_split(
    const char *rows, long second, long bytes_of_part, const char *weight, const int tiles, char *next_tiles, const float *next)
{
#pragma GCC unroll 6
    for (int i = 0; i < NUM_PRODUCTS; i++) {
        if (!i || PRODUCTS[i].of_rows != PRODUCTS[i - 1].of_rows)
            load_rows(rows + PRODUCTS[i].of_rows * bytes_of_part, second, tiles);
        if (!i || PRODUCTS[i].of_weight != PRODUCTS[i - 1].of_weight)
            load_weight(weight + PRODUCTS[i].of_weight * VECTORS * TILE_BYTES, TILE_BYTES, 64);
        add_products(tiles);
        if (next)
            split_pairs(next_tiles, next, TILE_INPUTS, TILE_ROWS * i / NUM_PRODUCTS, TILE_ROWS * (i + 1) / NUM_PRODUCTS);
    }
}

INLINE void multiply_strip(
    float *out, const char *rows, long num_rows, const char *weight, long inputs, int is_first, int is_new,
    product_room *room, const int tiles, const arithmetic kind)
{
    const long steps = parts_of(inputs, TILE_INPUTS), bytes_of_part = num_rows * 64;
    const long bytes_of_weight = TILE_INPUTS / inputs_of_step(kind) * bytes_of_step(kind);
    const int parts = kind == BFLOAT16_BY_SAME ? 1 : PARTS;
    /* The second tile may have some of the first one's: twice the same numbers. */
    const long second = num_rows - room->rows_of_tile, bytes = PANEL * sizeof *out;
    if (is_first) {
        CLEAR_TILE(0);
        CLEAR_TILE(1);
        CLEAR_TILE(2);
        CLEAR_TILE(3);
    } else {
        LOAD_TILE(0, out, bytes);
        LOAD_TILE(1, out + LANES, bytes);
        if (tiles == 2) {
            LOAD_TILE(2, out + second * PANEL, bytes);
            LOAD_TILE(3, out + second * PANEL + LANES, bytes);
        }
    }
    const long bytes_of_tiles = PARTS * VECTORS * TILE_BYTES;
    if (kind == FLOAT32 && is_new)
        split_pairs(room->weight, (const float *)weight, inputs, 0, TILE_ROWS);
    for (long step = 0; step < steps; step++, weight += bytes_of_weight, rows += parts * bytes_of_part) {
        const long left = inputs - step * TILE_INPUTS;
        if (kind == FLOAT32) {
            const char *its = room->weight + step % STEPS_KEPT * bytes_of_tiles;
            char *next = room->weight + (step + 1) % STEPS_KEPT * bytes_of_tiles;
            const float *next_weight = (const float *)(weight + bytes_of_weight);
            if (is_new && left >= 2 * TILE_INPUTS)
                add_split(rows, second, bytes_of_part, its, tiles, next, next_weight);
            else
                add_split(rows, second, bytes_of_part, its, tiles, 0, 0);
            if (is_new && left > TILE_INPUTS && left < 2 * TILE_INPUTS)
                split_pairs(next, next_weight, left - TILE_INPUTS, 0, TILE_ROWS);
            continue;
        }
        if (is_new)
            for (long byte = 0; byte < bytes_of_weight; byte += 64)
                __builtin_prefetch(weight + BYTES_AHEAD + byte);
        if (left >= TILE_INPUTS)
            load_weight(weight, 64, VECTORS * 64);
        else {
            memset(room->weight, 0, bytes_of_weight);
            memcpy(room->weight, weight, parts_of(left, 2) * bytes_of_step(kind));
            load_weight(room->weight, 64, VECTORS * 64);
        }
#pragma GCC unroll 3
        for (int part = 0; part < parts; part++) {
            load_rows(rows + part * bytes_of_part, second, tiles);
            add_products(tiles);
        }
    }
    STORE_TILE(0, out, bytes);
    STORE_TILE(1, out + LANES, bytes);
    if (tiles == 2) {
        STORE_TILE(2, out + second * PANEL, bytes);
        STORE_TILE(3, out + second * PANEL + LANES, bytes);
    }
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

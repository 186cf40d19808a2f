/* Tiles of an Intel processor (AMX): registers of up to 16 rows of 64 bytes. An instruction multiplies two of them, as
 * pairs of bfloat16, and adds the sums to a third, 16 times as fast as vectors multiply float32.
 *
 * So products of float32 are computed from those: a number is the sum of three bfloat16 parts, and of the nine products of
 * such parts the three smallest are left out, which together are about as large as float32's rounding of a product.
 */

#ifndef KEEPSIGHT_CPU_TILES_H
#define KEEPSIGHT_CPU_TILES_H

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu_products.h"

/* On Linux a process must request the memory in which tiles are saved at context switches. */
#define ASK_FOR_STATE 0x1023
#define STATE_OF_TILES 18

/* Return whether tiles can be used; if so, enables them for all threads of this process. */
INLINE int may_use_tiles(void)
{
    unsigned a, b, c, d;
    const int has_them = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && d >> 22 & 1;
    return has_them && !syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES);
}

#define TILE_ROWS 16
#define TILE_BYTES 1024
/* Numbers of bfloat16 in a row of a tile; in the tile by which it is multiplied, they are rows of pairs. */
#define TILE_INPUTS 32

/* Tiles 0 to 3 are sums [tiles of rows, tiles of others]; 4 and 5 are rows, 6 and 7 the others, by which rows are multiplied.
 * Inline assembly, as the compilers' intrinsics do not declare that memory is read. */
#define LOAD_TILE(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((long)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define CLEAR_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define ADD_PRODUCTS(sums, rows, others) __asm__ volatile("tdpbf16ps %%tmm" #others ", %%tmm" #rows ", %%tmm" #sums ::)

/* Add products to all sums, for one or two tiles of rows. */
INLINE void add_products(const int tiles)
{
    ADD_PRODUCTS(0, 4, 6);
    ADD_PRODUCTS(1, 4, 7);
    if (tiles == 2) {
        ADD_PRODUCTS(2, 5, 6);
        ADD_PRODUCTS(3, 5, 7);
    }
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} tile_shapes;

/* Configure tiles of sums and rows with this number of rows; clears all tiles. */
INLINE void shape_tiles(long rows)
{
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes_of_row[tile] = 64;
        shapes.rows[tile] = tile < 6 ? rows : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

/* Otherwise the operating system would save and restore them for each thread. */
INLINE void leave_tiles(void)
{
    __asm__ volatile("tilerelease" ::);
}

#define PARTS 3

/* Split numbers into parts whose upper halves are bfloat16. The parts sum to the number, unless one is too small for that.
 * Weights, which are many, are truncated; rows are rounded to nearest, so that the products left out have either sign. */
INLINE void split(unsigned_lanes *parts, lanes number, const int to_nearest)
{
    for (int part = 0; part < PARTS - 1; part++) {
        parts[part] = ((unsigned_lanes)number + (to_nearest ? 0x8000u : 0)) & 0xffff0000u;
        number -= (lanes)parts[part];
    }
    parts[PARTS - 1] = (unsigned_lanes)number;
}

/* How far ahead of its use a weight is prefetched, into a core's L2 cache: L1 holds rows and split weights. */
#define BYTES_AHEAD 2048

/* Rows ------------------------------------------------------------------------------------------------------------
 *
 * They are laid out in the order in which tiles read them: [steps of TILE_INPUTS inputs, parts, rows, TILE_INPUTS].
 */

INLINE long parts_of_rows_of(arithmetic kind)
{
    return rounds_rows(kind) ? 1 : PARTS;
}

INLINE long bytes_of_rows(long rows, long inputs, arithmetic kind)
{
    return rows * parts_of(inputs, TILE_INPUTS) * parts_of_rows_of(kind) * 64;
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

/* Lay out `count` inputs of some rows; missing inputs are 0. Places of missing rows only affect sums that are not used. */
INLINE void take_inputs(
    void *prepared, long places, const float *hidden, long stride, long rows, long count, const arithmetic kind)
{
    const long bytes_of_part = places * 64, bytes_of_step = parts_of_rows_of(kind) * bytes_of_part;
    for (long first = 0; first < count; first += TILE_INPUTS)
        for (long row = 0; row < rows; row++) {
            char *place = (char *)prepared + first / TILE_INPUTS * bytes_of_step + row * 64;
            float edge[TILE_INPUTS] = {};
            const float *numbers = hidden + row * stride + first;
            if (count - first < TILE_INPUTS)
                numbers = memcpy(edge, numbers, (count - first) * sizeof *edge);
            unsigned_lanes one[PARTS], other[PARTS];
            if (rounds_rows(kind)) {
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

/* Split two vectors as pairs, to the same place of PARTS tiles, which lie VECTORS tiles apart. */
INLINE void split_pair(char *place, lanes first, lanes second)
{
    unsigned_lanes of_first[PARTS], of_second[PARTS];
    split(of_first, first, 0);
    split(of_second, second, 0);
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) {
        const unsigned_lanes pairs = of_first[part] >> 16 | (of_second[part] & 0xffff0000u);
        memcpy(place + part * VECTORS * TILE_BYTES, &pairs, sizeof pairs);
    }
}

/* Split pairs [first, end) of one step of a float32 weight, which has `inputs` inputs left, to [PARTS, VECTORS] tiles. */
INLINE void split_pairs(char *tiles, const float *weight, long inputs, long first, long end)
{
    for (long pair = first; pair < end; pair++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const float *one = weight + 2 * pair * PANEL + v * LANES, *other = one + PANEL;
            __builtin_prefetch((const char *)one + BYTES_AHEAD, 0, 2);
            __builtin_prefetch((const char *)other + BYTES_AHEAD, 0, 2);
            const lanes nothing = {};
            split_pair(
                tiles + v * TILE_BYTES + pair * 64, 2 * pair < inputs ? vector_at(one) : nothing,
                2 * pair + 1 < inputs ? vector_at(other) : nothing);
        }
}

/* Products --------------------------------------------------------------------------------------------------------
 *
 * One or two tiles of rows are multiplied by a panel: two tiles of others. Sums are [rows, PANEL].
 */

INLINE void begin_sums(const float *sums, long second, int is_first, const int tiles)
{
    const long bytes = PANEL * sizeof *sums;
    if (is_first) {
        CLEAR_TILE(0);
        CLEAR_TILE(1);
        CLEAR_TILE(2);
        CLEAR_TILE(3);
        return;
    }
    LOAD_TILE(0, sums, bytes);
    LOAD_TILE(1, sums + LANES, bytes);
    if (tiles == 2) {
        LOAD_TILE(2, sums + second * PANEL, bytes);
        LOAD_TILE(3, sums + second * PANEL + LANES, bytes);
    }
}

INLINE void end_sums(places_of_sums to, long second, const int tiles)
{
    const long bytes = to.stride * sizeof *to.first;
    STORE_TILE(0, to.first, bytes);
    STORE_TILE(1, to.first + LANES, bytes);
    if (tiles == 2) {
        STORE_TILE(2, to.first + second * to.stride, bytes);
        STORE_TILE(3, to.first + second * to.stride + LANES, bytes);
    }
}

#define NUM_PRODUCTS 6

/* The parts of rows and others that are multiplied; ordered so that only one of both changes from one to the next. */
static const struct {
    int of_rows, of_others;
} PRODUCTS[NUM_PRODUCTS] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}};

INLINE void load_rows(const char *rows, long second, const int tiles)
{
    LOAD_TILE(4, rows, 64);
    if (tiles == 2)
        LOAD_TILE(5, rows + second * 64, 64);
}

INLINE void load_others(const char *others, long bytes_between, long stride)
{
    LOAD_TILE(6, others, stride);
    LOAD_TILE(7, others + bytes_between, stride);
}

/* Vector work that is interleaved with tile products in small portions, as out-of-order execution looks only so far ahead.
 * `product`: which of a step's NUM_PRODUCTS was just issued. */
typedef void meanwhile(void *job, int product);

/* Add the products of one step's split rows by split others. */
INLINE void add_split(
    const char *rows, long num_rows, long second, const char *others, const int tiles, meanwhile *also, void *job)
{
#pragma GCC unroll 6
    for (int i = 0; i < NUM_PRODUCTS; i++) {
        if (!i || PRODUCTS[i].of_rows != PRODUCTS[i - 1].of_rows)
            load_rows(rows + PRODUCTS[i].of_rows * num_rows * 64, second, tiles);
        if (!i || PRODUCTS[i].of_others != PRODUCTS[i - 1].of_others)
            load_others(others + PRODUCTS[i].of_others * VECTORS * TILE_BYTES, TILE_BYTES, 64);
        add_products(tiles);
        also(job, i);
    }
}

/* Add the products of one step's rows, split or rounded, by bfloat16 others [pairs, PANEL]. */
INLINE void add_whole(const char *rows, long num_rows, long second, const char *others, const int tiles, const arithmetic kind)
{
    load_others(others, 64, VECTORS * 64);
#pragma GCC unroll 3
    for (int part = 0; part < parts_of_rows_of(kind); part++) {
        load_rows(rows + part * num_rows * 64, second, tiles);
        add_products(tiles);
    }
}

#endif

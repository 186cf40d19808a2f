/* Tiles of an Intel processor (AMX): registers of up to 16 rows of 64 bytes, and sums of products of pairs of bfloat16 of
 * two of them added to a third, 16 times as fast as vectors multiply float32.
 *
 * So products of float32 are made of those: a number is the sum of three of bfloat16, and of nine products of such parts
 * the three least are left out, which together are smaller than what float32 rounds a product by.
 */

#ifndef KEEPSIGHT_CPU_TILES_H
#define KEEPSIGHT_CPU_TILES_H

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu_bfloat16.h"

/* Linux has a process ask for the memory in which it keeps them while others run. */
#define ASK_FOR_STATE 0x1023
#define STATE_OF_TILES 18

/* From now on, in all threads of this process. */
INLINE int may_use_tiles(void)
{
    unsigned a, b, c, d;
    const int has_them = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && d >> 22 & 1;
    return has_them && !syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES);
}

#define TILE_ROWS 16
#define TILE_BYTES 1024
/* A row of a tile, as numbers of bfloat16; of the tile that it is multiplied by they are rows of pairs. */
#define TILE_INPUTS 32

/* Tiles 0 to 3 are sums [tiles of rows, tiles of what they are multiplied by]; 4 and 5 are the former, 6 and 7 the latter.
 * Written by hand, as compilers' own ways do not tell that memory is read. */
#define LOAD_TILE(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((long)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define CLEAR_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define ADD_PRODUCTS(sums, rows, others) __asm__ volatile("tdpbf16ps %%tmm" #others ", %%tmm" #rows ", %%tmm" #sums ::)

/* To all sums, of one or two tiles of rows. */
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

/* Of sums and rows so many from now on; all tiles are empty then. */
INLINE void shape_tiles(long rows)
{
    tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes_of_row[tile] = 64;
        shapes.rows[tile] = tile < 6 ? rows : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

/* Else the operating system would keep them for each thread. */
INLINE void leave_tiles(void)
{
    __asm__ volatile("tilerelease" ::);
}

#define PARTS 3

/* Whose upper halves are bfloat16; their sum is the number, unless one is too small for that.  Of weights, which are many, they
 * are what is left of it, of rows the nearest: then what is left out has either sign. */
INLINE void split(unsigned_lanes *parts, lanes number, const int to_nearest)
{
    for (int part = 0; part < PARTS - 1; part++) {
        parts[part] = ((unsigned_lanes)number + (to_nearest ? 0x8000u : 0)) & 0xffff0000u;
        number -= (lanes)parts[part];
    }
    parts[PARTS - 1] = (unsigned_lanes)number;
}

#endif

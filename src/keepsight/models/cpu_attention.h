/* Shared by both attention kernels: arguments, addressing of keys and values, and chunks. */

#ifndef KEEPSIGHT_CPU_ATTENTION_H
#define KEEPSIGHT_CPU_ATTENTION_H

#include <math.h>

#include "cpu_bfloat16.h"

typedef struct {
    float *out;                   /* [rows, heads, dim] */
    const float *query;           /* [rows, heads, dim] */
    const void *keys, *values;    /* [slots, kv_heads, dim] */
    const int64_t *first_rows;    /* [sequences + 1]: first row of each sequence and, last, the number of rows */
    const int64_t *const *slots;  /* [sequences]: slots of the positions of each sequence */
    const int64_t *begins, *ends; /* [rows]: the interval of positions of its sequence that a row sees */
    long sequences, heads, kv_heads, dim;
    long out_stride, query_stride, key_stride; /* from one row, or slot, to the next */
    long is_paired;                            /* keys and values are bfloat16, and what they multiply is rounded to it */
    float scale;
} attention_work;

void keepsight_attend(const attention_work *w);

/* The memory locations of the keys, or values, of a sequence's positions. */
typedef struct {
    const void *numbers;
    const int64_t *slots;
    long stride;
} places;

INLINE const void *place(places all, long position, const int is_paired)
{
    return (const char *)all.numbers + all.slots[position] * all.stride * (is_paired ? 2 : 4);
}

INLINE places from_number(places all, long first, const int is_paired)
{
    all.numbers = (const char *)all.numbers + first * (is_paired ? 2 : 4);
    return all;
}

/* Return where the first chunk begins: pairs begin at even positions. */
INLINE long first_position(long begin, const int is_paired)
{
    return is_paired ? begin / 2 * 2 : begin;
}

#define CHUNK 128

/* Return the end of the chunk that holds position `at`. */
INLINE long end_of_chunk(long at, long end)
{
    return lesser(end, (at / CHUNK + 1) * CHUNK);
}

/* Compute attention of one row, for all heads from `first_head` on that share its key head (cpu_attention_of_row.c). */
void keepsight_attend_row(const attention_work *w, const int64_t *slots, long row, long first_head);

/* Return whether the head dimension fits `keepsight_attend_row`. */
INLINE int takes_row(const attention_work *w)
{
    return w->dim % (w->is_paired ? 2 * LANES : LANES) == 0;
}

#endif

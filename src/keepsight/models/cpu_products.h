/* What a matrix product is told. */

#ifndef KEEPSIGHT_CPU_PRODUCTS_H
#define KEEPSIGHT_CPU_PRODUCTS_H

#include "cpu_bfloat16.h"

/* A weight is laid out in panels of as many outputs as two vectors have lanes. */
#define VECTORS MOST_VECTORS
#define PANEL (VECTORS * LANES)

typedef enum {
    FLOAT32,          /* a step is one input */
    BFLOAT16,         /* two, of a weight that is widened: numbers of float32 by numbers of bfloat16 */
    BFLOAT16_BY_SAME, /* two, and the rows are rounded, too */
    INT8,             /* four, of a weight that is widened and then scaled: numbers of float32 by whole ones */
    INT8_BY_BFLOAT16, /* four, and the rows are rounded to bfloat16, which holds any number of int8 */
} arithmetic;

typedef struct {
    float *out;          /* [rows, outputs] */
    const float *hidden; /* [rows, inputs] */
    const void *weight;  /* [panels, steps, PANEL, inputs of a step] */
    const float *scales; /* [panels * PANEL], of int8: what an output's weights are multiplied by */
    const float *bias;   /* [panels * PANEL], or null */
    const float *times;  /* [rows, outputs], what each number is multiplied by in the end; or null */
    long rows, inputs, outputs;
    long kind;       /* an `arithmetic` */
    long activation; /* an `activation`, before it is multiplied */
    long is_onto;    /* whether it is added to what `out` holds */
} product_work;

void keepsight_multiply(const product_work *w);

/* Some of many rows, which are multiplied at once; they are laid out in as many rows' places or more. */
typedef struct {
    long first, rows, places;
} strip;

/* Some inputs' weights of a panel, by which all rows are multiplied before the next: those that lie there, if any. */
typedef struct {
    const void *first;
    long inputs;
} stretch;

/* Where sums of some rows by a panel are written: each row's so far from the one before. */
typedef struct {
    float *first;
    long stride;
} places_of_sums;

INLINE int is_of_int8(arithmetic kind)
{
    return kind == INT8 || kind == INT8_BY_BFLOAT16;
}

INLINE int rounds_rows(arithmetic kind)
{
    return kind == BFLOAT16_BY_SAME || kind == INT8_BY_BFLOAT16;
}

/* As many as a word of 4 bytes holds. */
INLINE long inputs_of_step(arithmetic kind)
{
    return kind == FLOAT32 ? 1 : is_of_int8(kind) ? 4 : 2;
}

/* Of a panel. */
#define BYTES_OF_STEP (4 * PANEL)

#endif

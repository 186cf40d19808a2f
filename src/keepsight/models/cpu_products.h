/* Arguments and types of matrix products. */

#ifndef KEEPSIGHT_CPU_PRODUCTS_H
#define KEEPSIGHT_CPU_PRODUCTS_H

#include "cpu_bfloat16.h"

/* A weight is laid out in panels of VECTORS * LANES outputs. */
#define VECTORS MOST_VECTORS
#define PANEL (VECTORS * LANES)

typedef enum {
    FLOAT32,          /* one input per step */
    BFLOAT16,         /* two inputs per step; the weight is widened: float32 by bfloat16 */
    BFLOAT16_BY_SAME, /* two inputs per step; rows are rounded to bfloat16, too */
    INT8,             /* four inputs per step; the weight is widened, the sums are scaled: float32 by integers */
    INT8_BY_BFLOAT16, /* four inputs per step; rows are rounded to bfloat16, which can represent any int8 */
} arithmetic;

typedef struct {
    float *out;          /* [rows, outputs] */
    const float *hidden; /* [rows, inputs] */
    const void *weight;  /* [panels, steps, PANEL, inputs of a step] */
    const float *scales; /* [panels * PANEL], for int8: factor of each output's weights */
    const float *bias;   /* [panels * PANEL], or null */
    const float *times;  /* [rows, outputs], factors applied last; or null */
    long rows, inputs, outputs;
    long kind;       /* an `arithmetic` */
    long activation; /* an `activation`, applied before `times` */
    long is_onto;    /* whether the product is added to `out` */
} product_work;

void keepsight_multiply(const product_work *w);

/* Rows that are multiplied at once, laid out in places for at least as many rows. */
typedef struct {
    long first, rows, places;
} strip;

/* The weights of some consecutive inputs of a panel, by which all rows are multiplied before the next; may be empty. */
typedef struct {
    const void *first;
    long inputs;
} stretch;

/* The destination of sums of some rows by a panel; `stride`: from one row to the next. */
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

/* The number of inputs that a word of 4 bytes holds. */
INLINE long inputs_of_step(arithmetic kind)
{
    return kind == FLOAT32 ? 1 : is_of_int8(kind) ? 4 : 2;
}

/* Size of one step of a panel. */
#define BYTES_OF_STEP (4 * PANEL)

#endif

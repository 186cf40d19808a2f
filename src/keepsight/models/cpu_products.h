/* What a matrix product is told. */

#ifndef KEEPSIGHT_CPU_PRODUCTS_H
#define KEEPSIGHT_CPU_PRODUCTS_H

typedef struct {
    float *out;          /* [rows, outputs] */
    const float *hidden; /* [rows, inputs] */
    const void *weight;  /* [panels, inputs, PANEL], of bfloat16 [panels, pairs of inputs, PANEL, 2] */
    const float *bias;   /* [panels * PANEL], or null */
    const float *times;  /* [rows, outputs], what each number is multiplied by in the end; or null */
    long rows, inputs, outputs;
    long kind;      /* an `arithmetic` */
    long then_gelu; /* tanh's approximation */
    long is_onto;   /* whether it is added to what `out` holds */
} product_work;

void keepsight_multiply(const product_work *w);

#endif
